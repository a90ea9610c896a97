"""A run that goes on is left alone, and a folder that cannot be used is one line."""

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lite import cli
from areal_lite.launch import prepare
from areal_lite.run_dir.resume import lock_controller, lock_run_dir, remove_files
from areal_lite.system.files import write_atomically
from areal_lite_quickstart import make_model
from areal_lite_quickstart.command import MakeModelConfig

STARTS = ("train", "prepare", "slurm", "eval", "sft", "quickstart")


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / file).write_text("{}")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def real_model(tmp_path_factory) -> Path:
    """A model for commands that look at it before they write."""
    out = tmp_path_factory.mktemp("real") / "model"
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    assert make_model.run(MakeModelConfig(out=str(out), mlp_size=16, **small)) == 0
    return out


def arguments(command: str, model: Path, run_dir: Path | str) -> list[str]:
    own = {
        "generate": [f"model={model}", "data.source=addition"],
        "sft": [f"model={model}", f"out={model}-sft"],
        "quickstart": [f"make_model.out={model}-new", f"sft.out={model}-sft"],
    }
    task = [] if command in ("sft", "quickstart", "generate") else ["+task=addition"]
    words = ["train", "--prepare"] if command == "prepare" else [command]
    return [*words, *task, f"run_dir={run_dir}", *own.get(command, [f"model={model}"])]


def run(command: str, *arguments: str) -> int:
    return cli.run_command(command, list(arguments))


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those of the locks, which are empty."""
    files = (path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def one_line(capsys) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def living(model, tmp_path, capsys) -> Path:
    """The run directory of a training run, with what a living one has."""
    run_dir = tmp_path / "run"
    assert run(*arguments("prepare", model, run_dir)) == 0
    (run_dir / "servers").mkdir()
    for name in ("controller.json", "servers/server-0.json", "summary.json", "stop"):
        (run_dir / name).write_text(f'"{name}"')
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    capsys.readouterr()
    return run_dir


@pytest.mark.parametrize("lock", [lock_run_dir, lock_controller])
@pytest.mark.parametrize("command", ["train", "prepare", "slurm"])
def test_a_living_run_is_not_touched(command, lock, living, model, capsys):
    before = content(living)
    overrides = ["resume=auto", "trainer.lr=0.5"]
    if command == "train":
        overrides += ["server.host=127.0.0.1"]
    with lock(living):
        assert run(*arguments(command, model, living), *overrides) == 1
        assert "a run is going on there" in one_line(capsys)
        with pytest.raises(ValueError, match="a run is going on there"):
            prepare.begin(living)
    assert content(living) == before


def test_the_roles_of_a_living_run_are_noticed_in_another_process(living, model, capsys):
    code = (
        "import sys, time; from pathlib import Path; "
        "from areal_lite.run_dir.resume import lock_controller; "
        "lock = lock_controller(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    role = subprocess.Popen([sys.executable, "-c", code, living], stdout=subprocess.PIPE)
    try:
        assert role.stdout is not None and role.stdout.readline() == b"held\n"
        before = content(living)
        assert run(*arguments("prepare", model, living), "resume=auto") == 0
        assert "is left alone" in capsys.readouterr().out
        other = ["resume=auto", "trainer.lr=0.5", "server.count=3"]
        assert run(*arguments("prepare", model, living), *other) == 1
        assert "other settings of server.count, trainer.lr: end it first" in one_line(capsys)
        assert content(living) == before
    finally:
        role.kill()
        role.communicate()
    assert prepare.begin(living) == 0  # a dead process holds no lock


@pytest.mark.parametrize("command", ["eval", "sft", "quickstart"])
def test_the_folder_of_a_training_run_is_for_training_runs(command, living, model, capsys):
    before = content(living)
    assert run(*arguments(command, model, living)) == 2
    assert str(living) in one_line(capsys)
    assert content(living) == before


@pytest.mark.parametrize("command", ["eval", "sft"])
def test_two_commands_do_not_share_a_folder(command, model, tmp_path, capsys):
    run_dir = tmp_path / "other"
    with lock_run_dir(run_dir):
        assert run(*arguments(command, model, run_dir)) == 1
    assert "a run is going on there" in one_line(capsys)
    assert content(run_dir) == {}


def test_training_does_not_continue_an_evaluation(real_model, tmp_path, capsys):
    run_dir = tmp_path / "eval"
    wrong = ["server.start_timeout_s=0.05"]
    assert run(*arguments("eval", real_model, run_dir), *wrong) == 1
    capsys.readouterr()
    before = content(run_dir)
    assert run(*arguments("train", real_model, run_dir), "resume=auto") == 2
    assert str(run_dir) in one_line(capsys)
    assert content(run_dir) == before


@pytest.mark.parametrize(
    ("command", "place"),
    [(command, "file") for command in STARTS]
    + [("train", place) for place in ("file/below", "/proc/nope", "x" * 300, "d/" * 2500)],
)
def test_a_folder_that_cannot_be_used_is_one_line(command, place, model, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    run_dir = tmp_path / place
    before = content(tmp_path)
    assert run(*arguments(command, model, run_dir)) in (1, 2)
    assert f"run_dir={run_dir}"[:500] in one_line(capsys)
    assert content(tmp_path) == before


@pytest.mark.parametrize("command", ["train", "prepare", "eval", "sft"])
def test_a_full_disk_is_one_line_with_the_file(command, real_model, tmp_path, capsys):
    """A limit on the size of files stands for it: every write fails."""
    run_dir = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        status = run(*arguments(command, real_model, run_dir))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"areal-lite: {run_dir}/config.yaml: File too large"
    assert content(run_dir) == {}


def test_links_that_somebody_planted_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("safe")
    for name in ("lock", "controller.lock"):
        run_dir = tmp_path / f"run-{name}"
        run_dir.mkdir()
        (run_dir / name).symlink_to(victim)
        with pytest.raises((ValueError, OSError)), lock_run_dir(run_dir):
            pass
    (tmp_path / "config.yaml").symlink_to(victim)
    write_atomically(tmp_path / "config.yaml", "new")
    assert victim.read_text() == "safe" and not (tmp_path / "config.yaml").is_symlink()


def test_a_private_file_never_was_readable_and_leaves_nothing(tmp_path, monkeypatch):
    seen = []

    def crash(descriptor: int) -> None:
        seen.append(os.fstat(descriptor).st_mode)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="No space left on device: '.*/key'"):
        write_atomically(tmp_path / "key", "hush", private=True)
    assert [stat.S_IMODE(mode) for mode in seen] == [0o600] and os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_at_the_next_start(tmp_path):
    (tmp_path / "servers").mkdir()
    for name in (".config.yaml.0123.tmp", "servers/.server-0.json.0123.tmp"):
        (tmp_path / name).write_text('{"half":')
    remove_files(tmp_path)
    assert content(tmp_path) == {}
