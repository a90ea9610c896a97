"""The command of the acceptance on GPUs, on a machine that may have none."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    """The command as a module. No part of it runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    monkeypatch.setattr(gpu, "run_part", lambda *_, **__: pytest.fail("a part runs"))
    return gpu


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *args]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_without_a_gpu_it_shows_every_part_and_that_there_is_no_number(dry, gpu, tmp_path) -> None:
    done = run(*dry, "--name", "nowhere", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    assert [line.split()[1] for line in lines] == list(gpu.PARTS)
    assert "No number exists yet" in done.stdout.splitlines()[-1]
    assert ("no GPU is visible" in done.stdout) == (not dry)
    assert not list(tmp_path.iterdir())


def test_every_part_is_a_function_of_its_module_which_takes_server_args(gpu) -> None:
    assert [part.gpus for part in gpu.PARTS.values()] == sorted(p.gpus for p in gpu.PARTS.values())
    assert {part.gpus for part in gpu.PARTS.values()} == {1, 2, 3, 4}
    for name, part in gpu.PARTS.items():
        module = ast.parse((BENCHMARKS / f"{part.module}.py").read_text())
        functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        settings = [node.target.id for node in module.body if isinstance(node, ast.AnnAssign)]
        assert name in functions and "SERVER_ARGS" in settings, name


def test_results_are_a_table_and_a_failed_check_is_the_exit_status(gpu, tmp_path, monkeypatch):
    results = {
        "head": {"seconds": 3.0, "numbers": {"a": 1}, "checks": {"exact": True}},
        "order": {"seconds": 4.0, "numbers": {}, "checks": {"the same cache": False}},
    }
    lines = gpu.table(results).splitlines()
    assert "ok    head        3 s" in [line.rstrip() for line in lines]
    assert f"{'':<18}a: 1" in lines
    assert any(line.startswith("FAIL  order") and "the same cache" in line for line in lines)
    arguments = ["gpu.py", "--dry-run", "--name", "x", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    (tmp_path / "gpu-x.json").write_text(json.dumps(results))
    assert gpu.main() == 1
    del results["order"]
    (tmp_path / "gpu-x.json").write_text(json.dumps(results))
    assert gpu.main() == 0


@pytest.fixture
def machine(gpu, tmp_path, monkeypatch):
    """machine(gpus, *arguments) -> the parts that ran. `taken` has the seconds of a part."""
    clock = [0.0]
    taken: dict[str, float] = {}

    def command(gpus: int, *arguments: str) -> list[str]:
        ran = []

        def run_part(name, log, *, tiny, server_args, limit_s):
            ran.append(name)
            seconds = taken.get(name, 1.0)
            clock[0] += min(seconds, limit_s)
            late = seconds > limit_s
            status = "more than its time" if late else 0
            return {"status": status, "numbers": {}, "checks": {"x": not late}, "seconds": seconds}

        monkeypatch.setattr(gpu, "run_part", run_part)
        monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(gpu, "visible_gpus", lambda: [str(i) for i in range(gpus)])
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--folder", str(tmp_path), *arguments])
        gpu.main()
        return ran

    command.taken = taken
    return command


def test_a_part_runs_where_there_are_enough_gpus(gpu, machine, capsys) -> None:
    ran = machine(2)
    assert ran == [name for name, part in gpu.PARTS.items() if part.gpus <= 2]
    assert "layouts4 needs 4 GPUs, 2 are visible: left out" in capsys.readouterr().out
    assert machine(4) == ["servers", "layouts4"]  # the others have their results
    assert machine(4) == []
    assert machine(4, "head") == ["head"]


def test_tiny_models_run_on_a_cpu_what_it_can(gpu, machine) -> None:
    assert machine(0, "--tiny") == [name for name, part in gpu.PARTS.items() if part.on_cpu]
    assert machine(0, "machine") == []


def test_a_part_that_the_others_left_no_time_for_runs_in_the_next_call(machine) -> None:
    machine.taken.update(head=500.0, engine=400.0)
    call = ("--minutes", "9", "head", "engine", "agree")
    assert machine(1, *call) == ["head", "engine"]
    left = [name for name in machine(1, "--minutes", "9") if name in ("head", "engine", "agree")]
    assert left == ["engine", "agree"]


def test_a_part_that_is_too_slow_by_itself_has_a_result(machine, tmp_path) -> None:
    machine.taken.update(head=10000.0)
    assert machine(1, "--minutes", "2", "head") == ["head"]
    assert json.loads((tmp_path / "gpu-this-machine.json").read_text())["head"]["status"] != 0


def fake_part(gpu: ModuleType, monkeypatch, path: Path, text: str) -> None:
    """Let every part be this program."""
    path.write_text(f"import os, pathlib, subprocess, sys, time\n{text}")
    monkeypatch.setattr(gpu, "__file__", str(path))


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    text = "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"
    fake_part(gpu, monkeypatch, tmp_path / "slow.py", text)
    result = gpu.run_part("head", tmp_path / "log", tiny=False, server_args=[], limit_s=2)
    assert result["status"] == "more than 2 s" and result["seconds"] < 20
    (pid,) = [int(line) for line in (tmp_path / "log").read_text().splitlines() if line.isdigit()]
    for _ in range(50):
        if not runs(pid):
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failing_part_leaves_its_output_and_the_logs_of_its_servers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    text = (
        "pathlib.Path(os.environ['TMPDIR'], 'server.log').write_text('out of memory')\n"
        "print('about to fail', sys.argv[1:])\n"
        "sys.exit(1)\n"
    )
    fake_part(gpu, monkeypatch, tmp_path / "broken.py", text)
    log = tmp_path / "gpu.log"
    result = gpu.run_part("head", log, tiny=True, server_args=["a=b"])
    assert result["checks"] == {"it ends well": False} and result["status"] == 1
    text = log.read_text()
    assert "about to fail" in text and "'--tiny', '--server-args', 'a=b'" in text
    assert "--- server.log\nout of memory" in text


def test_options_of_servers_are_texts_or_switches(gpu) -> None:
    assert gpu.server_arg("attention_backend=triton") == ("attention_backend", "triton")
    assert gpu.server_arg("grammar_backend=a=b") == ("grammar_backend", "a=b")
    assert [gpu.server_arg(f"x={v}")[1] for v in ("true", "False", "1")] == [True, False, "1"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["hed"], "no part hed: choose from machine"),
        (["--server-args", "sampling_backend"], "write sampling_backend=…"),
    ],
)
def test_a_mistake_is_one_line(arguments, message) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr
