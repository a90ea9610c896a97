"""The folder of a run that somebody else made costs one line: no hang, no crash, no traceback."""

import json
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_lite.cli import main
from areal_lite.config import stored_settings
from areal_lite.run_dir.metrics import forget_after
from areal_lite.servers.registry import ServerInfo, announce_server
from areal_lite.tools.report.exporter import RunCollector
from tests.security.mutation import mutated
from tests.unit.tools.report.synthetic_run import hand_made

FILES = ("config.yaml", "metrics.jsonl", "evals.jsonl", "proximal.jsonl", "summary.json")
ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9)
)


class TooLong(BaseException):
    """Something blocks. It is no Exception: what is tested must not turn it into a line."""


@contextmanager
def seconds(most: int) -> Iterator[None]:
    """Raise TooLong in what blocks for longer, such as the opening of a pipe."""

    def late(*_: object) -> None:
        raise TooLong(f"it takes more than {most} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(most)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    hand_made(tmp_path / "run")
    return tmp_path / "run"


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 1 << 40)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def appended(name: str, **values: object) -> Callable[[Path], object]:
    def append(path: Path) -> None:
        newest = json.loads(path.read_text().splitlines()[-1])
        with open(path, "a") as file:
            file.write(json.dumps(newest | values) + "\n")

    return append


BAD = {
    "config.yaml is a pipe": ("config.yaml", pipe),
    "config.yaml is huge": ("config.yaml", huge),
    "aliases": ("config.yaml", text(ALIASES)),
    "merges": ("config.yaml", text(MERGES)),
    "deep": ("config.yaml", text("a: " + "[" * 200_000 + "]" * 200_000)),
    "a huge number": ("config.yaml", text("a: " + "9" * 10_000)),
    "metrics.jsonl is a pipe": ("metrics.jsonl", pipe),
    "metrics.jsonl is deep": ("metrics.jsonl", text("[" * 100_000 + "\n")),
    "metrics.jsonl is a list": ("metrics.jsonl", text("[]\n")),
    "a step is a text": ("metrics.jsonl", appended("metrics.jsonl", step="x")),
    "evals.jsonl is a pipe": ("evals.jsonl", pipe),
    "a version is missing": ("evals.jsonl", text('{"greedy": 0.5}\n')),
}
BAD_FOR_REPORTS = {
    "a reward is a text": ("metrics.jsonl", appended("metrics.jsonl", reward_mean="x")),
    "an accuracy is an object": ("evals.jsonl", appended("evals.jsonl", greedy={"a": 1})),
    "the store is a pipe": ("trajectories.sqlite", pipe),
}


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with seconds(20):
        assert main([*words]) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("areal-lite: "), lines
    return lines[0]


@pytest.mark.parametrize("bad", [*BAD, *BAD_FOR_REPORTS])
def test_a_report(bad: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, change = (BAD | BAD_FOR_REPORTS)[bad]
    change(run_dir / name)
    complaint(capsys, "report", str(run_dir))


@pytest.mark.parametrize("bad", BAD)
def test_a_resume(bad: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, change = BAD[bad]
    change(run_dir / name)
    with seconds(20), pytest.raises((ValueError, OSError)) as refused:
        forget_after(run_dir, 0)
        stored_settings(run_dir)
    assert name in str(refused.value) and "\n" not in str(refused.value)


def test_an_endless_view_in_the_store(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(run_dir / "trajectories.sqlite") as db:
        db.execute("ALTER TABLE groups RENAME TO g")
        db.execute(
            "CREATE VIEW groups AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) "
            "SELECT g.* FROM g, c"
        )
    db.close()
    for words in ([], ["--inspect"]):
        assert "trajectories.sqlite" in complaint(capsys, "report", str(run_dir), *words)


def gauges(*run_dirs: Path) -> dict[tuple[str, str], float]:
    with seconds(20):
        families = list(RunCollector(run_dirs, lambda: 0.0).collect())
    return {(s.name, s.labels["run"]): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("bad", BAD)
def test_the_exporter_counts_it_and_shows_the_other_runs(bad: str, run_dir: Path) -> None:
    shutil.copytree(run_dir, other := run_dir.with_name("other"))
    name, change = BAD[bad]
    change(run_dir / name)
    found = gauges(run_dir, other)
    assert found["areal_lite_step", str(other)] == 1.0
    assert found["areal_lite_run_malformed", str(other)] == 0.0
    assert found["areal_lite_run_malformed", str(run_dir)] == 1.0


def test_the_exporter_reads_no_pipe_and_no_endless_line(run_dir: Path) -> None:
    server = ServerInfo(name="s", url="http://h:1", api_key=None, tensor_parallel=1, pid=1)
    announce_server(run_dir, server)
    pipe(run_dir / "servers" / "t.json")
    huge(run_dir / "metrics.jsonl")
    found = gauges(run_dir)
    assert found["areal_lite_run_servers", str(run_dir)] == 1.0
    assert found["areal_lite_run_malformed", str(run_dir)] == 2.0


@pytest.mark.parametrize("steps", ["${oc.decode:${oc.env:NUMBER}}", "'7'", "[7]", "1.5"])
def test_the_exporter_publishes_no_environment(
    steps: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBER", "123456")
    (run_dir / "config.yaml").write_text(f"trainer:\n  steps: {steps}\n")
    found = gauges(run_dir)
    assert 123456.0 not in found.values()
    assert ("areal_lite_run_steps_planned", str(run_dir)) not in found
    assert found["areal_lite_run_malformed", str(run_dir)] == 1.0


def fuzz(run_dir: Path, cases: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    words = [b"null", b"[", b"{", b'"x"', b"\n", b": ", b"&a", b"*a", b"!!x ", b"${a}", b"9" * 99]
    names = [name for name in FILES if (run_dir / name).exists()]
    for _ in range(cases):
        name = rng.choice(names)
        whole = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(mutated(rng, whole, words))
        with seconds(30):
            status = main(["report", str(run_dir), "--inspect", "limit=1"])
            twice = [str(run_dir), str(run_dir), f"out={run_dir}/both.html"]
            status = status or main(["report", *twice])
        assert status in (0, 1, 2)
        assert status == 0 or len(capsys.readouterr().err.splitlines()) == 1
        (run_dir / name).write_bytes(whole)


def test_mutated_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(run_dir, 30, 1, capsys)


@pytest.mark.slow
def test_many_mutated_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(run_dir, 200, 2, capsys)
