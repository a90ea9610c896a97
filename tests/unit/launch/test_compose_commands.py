"""What the documented commands of docker compose name is in docker-compose.yaml. No engine needed.

tests/integration/test_compose.py gives them to the real program, and runs them on a real engine.
"""

from argparse import ArgumentError

import pytest

from tests.compose_commands import LINES, SERVICES, parse, problems


@pytest.mark.parametrize("line", sorted({line for lines in LINES.values() for line in lines}))
def test_what_a_command_names_exists(line: str) -> None:
    assert problems(parse(line)) == []


def test_commands_of_a_page_and_of_the_compose_file_are_found() -> None:
    assert set(LINES) >= {"docker-compose.yaml", "docs/running.md"}
    assert "docker compose up" in LINES["docker-compose.yaml"]
    shown = {
        service for lines in LINES.values() for line in lines for service in parse(line).services
    }
    assert {"quickstart", "trainer", "grafana"} <= shown <= set(SERVICES)


def test_run_directories_are_copied_before_their_containers_are_removed() -> None:
    lines = [parse(line) for line in LINES["docs/running.md"]]
    ends = [number for number, line in enumerate(lines) if line.action == "down"]
    copies = [number for number, line in enumerate(lines) if line.action == "cp"]
    assert copies and ends and max(copies) < min(ends)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--profile gpus up -d trainer", "no service has the profile gpus"),
        ("up trainer", "trainer is not a service of the profiles"),
        ("--profile gpu up train", "train is not a service of the profiles"),
        ("cp quickstart:/out .", "quickstart has no volume at /out"),
        ("cp quickstart:/runs2 .", "quickstart has no volume at /runs2"),
    ],
)
def test_a_mistake_is_found(line: str, problem: str) -> None:
    assert problem in problems(parse(f"docker compose {line}"))


def test_a_dependency_outside_the_profile_is_found() -> None:
    moved = SERVICES | {"exporter": SERVICES["exporter"] | {"profiles": ["other"]}}
    line = parse("docker compose --profile monitor up -d grafana")
    assert problems(line, moved) == ["exporter is not a service of the profiles"]


@pytest.mark.parametrize("line", ["docker compose run trainer", "docker compose up --detached"])
def test_an_unknown_word_is_refused(line: str) -> None:
    with pytest.raises((SystemExit, ArgumentError)):
        parse(line)
