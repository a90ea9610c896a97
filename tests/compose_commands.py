"""The documented commands of docker compose, and what each of them asks of docker-compose.yaml."""

import argparse
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from tests.docs_commands import PAGES, ROOT, commands

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())[
    "services"
]
_HEADER = re.findall(
    r"^# (docker compose .*)$", (ROOT / "docker-compose.yaml").read_text(), re.MULTILINE
)
# The commands of each page, and of the comment at the beginning of the compose file.
LINES = {
    "docker-compose.yaml": _HEADER,
    **{
        str(page.relative_to(ROOT)): lines
        for page in PAGES
        if (lines := [line for line in commands(page) if line.startswith("docker compose ")])
    },
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command: the profiles that it names, what it does, and the services that it names."""

    profiles: set[str]
    action: str
    services: list[str]
    source: str | None = None  # of `cp`: a folder in the container


def parse(line: str) -> Line:
    """Take a command apart. Raises SystemExit if an option is not one of those in use."""
    parser = argparse.ArgumentParser(prog="docker compose", exit_on_error=False)
    parser.add_argument("--profile", action="append", default=[])
    actions = parser.add_subparsers(dest="action", required=True)
    for action, option in {"up": "-d", "logs": "-f", "stop": None, "down": None}.items():
        one = actions.add_parser(action)
        if option:
            one.add_argument(option, action="store_true")
        if action != "down":
            one.add_argument("services", nargs="*")
    copy = actions.add_parser("cp")
    copy.add_argument("source")
    copy.add_argument("target")
    words = parser.parse_args(shlex.split(line)[2:])
    service, _, source = getattr(words, "source", "").partition(":")
    return Line(
        profiles=set(words.profile),
        action=words.action,
        services=[service] if service else getattr(words, "services", []),
        source=source or None,
    )


def problems(line: Line, services: dict[str, dict[str, Any]] = SERVICES) -> list[str]:
    """List what a command needs and the compose file lacks: profiles, services, a volume."""
    known = {profile for service in services.values() for profile in service.get("profiles", ())}
    found = [f"no service has the profile {name}" for name in sorted(line.profiles - known)]
    enabled = {
        name
        for name, service in services.items()
        if not service.get("profiles") or set(service["profiles"]) & line.profiles
    }
    needed = list(line.services)
    for name in needed:  # grows by what each of them depends on
        needed += [more for more in services.get(name, {}).get("depends_on", ())]
    found += [f"{name} is not a service of the profiles" for name in needed if name not in enabled]
    if line.source:
        volumes = services.get(line.services[0], {}).get("volumes", ())
        targets = [volume.split(":")[1] for volume in volumes]
        if not any(f"{line.source}/".startswith(f"{target}/") for target in targets):
            found.append(f"{line.services[0]} has no volume at {line.source}")
    return found
