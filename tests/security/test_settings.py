"""Random settings: each is a valid run, or is refused by one line that names a key.

The settings are composed once for each command. A case then changes some keys, and goes through the
same conversion and checks as on the command line. Fewer cases go through the whole command line,
because a composition takes long.
"""

import math
import pickle
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite import cli
from areal_lite.config import TrainConfig, command_names, find_command, save_config
from areal_lite.config.command_line import compose_config, explain, one_line
from areal_lite.config.fields import keys_of, sections, settings_of
from areal_lite.launch.preflight import check_config

COMMANDS = [*command_names(), "make-model", "sft"]
NUMBERS = (-1, 0, -0.0, 1, 2, 0.5, -5, 2**31, 10**9, 10**20, 1e308, -1e308, 1e-320)
NUMBERS += (math.nan, math.inf, -math.inf)
TEXTS = ("", "abc", "☃", "\0", "a\nb", "\ud800", "a" * 5000, "b/" * 3000, "../../x", "/etc/passwd")
TEXTS += ("/dev/full", "os:system", ":", ".a:b", "a..b:c", "this:nothing", "é" * 300, "x" * 10**6)
OTHERS = (None, True, [], [1, 2], ["/dev/full"], ["\0"], [math.nan, 2.0], [0.5, math.inf], {"a": 1})
VALUES = NUMBERS + TEXTS + OTHERS
# As they are written on a command line.
WRITTEN = ("-1", "0", "-0.0", "1e308", "nan", "inf", "-inf", "9" * 20, "1e-320", "null", "true", "")
WRITTEN += ("''", "'☃'", "abc", "[1,2]", "{a: 1}", "{a: {b: [1}", "0.5", "1000000000", "/dev/full")
WRITTEN += ("'a b'", "[]", "[" * 60, "${seed}", "${nothing}", "${oc.env:NOTHING}", "a,b", "=", "@")
WRITTEN += (
    "\udcff",
    "x" * 5000,
    "range(1,1e9)",
    "$(id)",
    "'\\",
    "a:b:c",
    "!!python/name:os.system",
)


@pytest.fixture(scope="module")
def where(tmp_path_factory) -> dict[str, list[str]]:
    """The overrides that each command needs."""
    folder = tmp_path_factory.mktemp("settings")
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    both = [f"model={folder}", f"run_dir={folder}/run"]
    needed = (
        dict.fromkeys(COMMANDS, both)
        | dict.fromkeys([name for name in COMMANDS if find_command(name).words], both[1:])
        | {"report": [], "doctor": []}
    )
    needed |= {name: ["+task=addition", *both] for name in ("train", "slurm", "eval")}
    needed |= {"make-model": [f"out={folder}/out"], "quickstart": both[1:]}
    needed |= {"generate": ["data.source=addition", *both], "serve": both[:1]}
    save_config(TrainConfig(model=str(folder)), folder / "going-on")
    needed |= {"servers": [f"run_dir={folder}/going-on"]}
    return needed | {"sft": [*both, f"out={folder}/out"]}


def cases(command: str, count: int, values: tuple) -> Iterator[dict[str, Any]]:
    """Every key once with each kind of value, then random mixtures of up to three keys."""
    settings = [
        f"{prefix}{name}"
        for prefix, section in sections(find_command(command).schema)
        for name in settings_of(section)
    ]
    generator = random.Random(command)
    for _ in range(count):
        keys = generator.sample(settings, min(generator.choice((1, 1, 2, 3)), len(settings)))
        yield {key: generator.choice(values) for key in keys}


def refusal(command: str, composed: bytes, changes: dict[str, Any]) -> str:
    """Return why the changed settings are refused; "" for valid ones, which are looked at."""
    config = pickle.loads(composed)
    try:
        for key, value in changes.items():
            OmegaConf.update(config, key, value)
        final = OmegaConf.to_object(config)
        check_config(find_command(command), final)
    except (HydraException, OmegaConfBaseException) as error:
        return explain(error, command)
    except ValueError as error:
        return str(error)
    assert_plausible(asdict(final))
    return ""


def assert_plausible(value: Any) -> None:
    """No accepted number is absurd, whatever the bounds of the fields say."""
    if isinstance(value, dict):
        # `args` and `options` are handed to SGLang and Slurm as they are.
        value = [item for key, item in value.items() if key not in ("args", "options")]
    if isinstance(value, list):
        for item in value:
            assert_plausible(item)
    if isinstance(value, (int, float)):
        assert math.isfinite(value) and abs(value) <= 2**31


def assert_one_line(message: str, command: str, changes: object) -> None:
    """It names a key of the command, and a terminal can show it."""
    line = one_line(message)
    parts = {
        part
        for key in keys_of(find_command(command).schema)
        for part in (key, key.rpartition(".")[2])
    }
    assert any(part in line for part in parts), (line, changes)
    assert len(line) < 2010 and "Traceback" not in line, (line, changes)


def attack(command: str, where: dict[str, list[str]], count: int) -> None:
    composed = pickle.dumps(compose_config(command, where[command]))
    assert not refusal(command, composed, {})
    parser = OverridesParser.create()
    for number, changes in enumerate(cases(command, count, VALUES)):
        started = time.process_time()
        if number % 3 == 0:  # as the command line reads them
            chosen = random.Random(number)
            written = [f"{key}={chosen.choice(WRITTEN)}" for key in changes]
            try:
                read = parser.parse_overrides(written)
                changes = {one.key_or_group: one.value() for one in read}
            except HydraException as error:
                assert_one_line(explain(error, command), command, written)
                continue
        if line := refusal(command, composed, changes):
            assert_one_line(line, command, changes)
        assert time.process_time() - started < 5, changes


def run_attacks(where: dict[str, list[str]], count: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = {"train": 1.0, "slurm": 0.5, "quickstart": 0.3}
    for command in COMMANDS:
        attack(command, where, int(count * weights.get(command, 0.2)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # KiB


def test_random_settings_are_valid_or_refused_in_one_line(where):
    run_attacks(where, 250)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_random_settings(where):
    run_attacks(where, 20_000)


def run_command_line(where, capsys, monkeypatch, count: int) -> None:
    monkeypatch.setattr(
        cli, "_run", lambda command, flags, configs: 0
    )  # a valid run is not started
    for command in COMMANDS:
        # The stderr of a test refuses what is not Unicode, and a real one escapes it.
        for changes in cases(command, count, [value for value in WRITTEN if value.isprintable()]):
            overrides = [f"{key}={value}" for key, value in changes.items()]
            status = cli.run_command(command, [*where[command], *overrides])
            lines = capsys.readouterr().err.splitlines()
            mistakes = [line for line in lines if not line.startswith("caution: ")]
            assert (status, len(mistakes)) in ((0, 0), (2, 1)), (status, lines[:3], overrides)


def test_random_command_lines(where, capsys, monkeypatch):
    run_command_line(where, capsys, monkeypatch, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_random_command_lines(where, capsys, monkeypatch):
    run_command_line(where, capsys, monkeypatch, 100)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.count=1000000000", "server.count=1000000000: must be at least 1 and at most 1024"),
        ("model=" + "a" * 5000, "no config.json there"),
        ("algo.reference=" + "a" * 5000, "no config.json there"),
        ("run_dir=", "run_dir is empty"),
        ("run_dir=''", "run_dir is empty"),
        ("reward.function=.a:b", "cannot import .a"),
        ("rollout.temperature=nan", "rollout.temperature=nan: must be at least 0 and"),
        ("algo.correction.low=inf", "algo.correction.low=inf: must be"),
        (
            "data.path=a\nb data.source=jsonl",
            r"""cannot read data.path=a b: type $'data.path="a\nb"'""",
        ),
        ("trainer.lr=" + "[" * 500, "cannot read trainer.lr=[["),
    ],
)
def test_what_was_a_traceback_or_was_accepted(where, capsys, override, message):
    assert cli.main(["train", *where["train"], *override.split(" ")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"", b"- 1", b"model: 5", b"\xff\xfe", b"!!python/name:os.system", b"{" * 1000],
)
def test_a_run_whose_settings_cannot_be_read_is_not_continued(where, tmp_path, capsys, content):
    (tmp_path / "config.yaml").write_bytes(content)
    overrides = [*where["train"], f"run_dir={tmp_path}", "resume=auto"]
    assert cli.main(["train", *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and str(tmp_path) in lines[0]
    assert (tmp_path / "config.yaml").read_bytes() == content
    assert [path.name for path in Path(tmp_path).iterdir()] == ["config.yaml"]
