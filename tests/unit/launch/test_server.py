"""The command of a server, its process and its announcement, without a model or SGLang."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess, server_command
from areal_lite.servers.registry import (
    ServerInfo,
    announce_server,
    announced_servers,
    mark_unhealthy,
    unhealthy_reason,
    withdraw_server,
)
from areal_lite.sglang_plugins import ENV_API_KEY
from areal_lite.system.gpus import resolve_device
from areal_lite.system.network import free_port


def flags(argv: list[str]) -> dict[str, str | bool]:
    """--a 1 --b -> {a: "1", b: True}"""
    words = argv[argv.index("areal_lite.launch.serve") + 1 :]
    out: dict[str, str | bool] = {}
    for word, following in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            out[word[2:]] = True if following.startswith("--") else following
    return out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_whose_scheduler_or_detokenizer_died_does_not_wait_for_dumps(device):
    """SGLang's own defaults would keep it 65 seconds, without an answer to anyone."""
    _, environment = server_command(ServerConfig(device=device), "model", 1234, 7)
    dumps = ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH")
    assert [environment[name] for name in dumps] == ["false", "false"]


def test_the_cpu_command(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    argv, environment = server_command(ServerConfig(device="cpu"), "model", 1234, 7)
    got = flags(argv)
    assert argv[:3] == [sys.executable, "-m", "areal_lite.launch.serve"]
    expected = {
        "model-path": "model",
        "port": "1234",
        "random-seed": "7",
        "device": "cpu",
        "dtype": "float32",
        "weight-version": "0",
    }
    assert expected.items() <= got.items()
    assert (
        got["max-total-tokens"] == "65536"
        and got["skip-tokenizer-init"] is True
        and "api-key" not in got
    )
    assert (
        environment["OMP_NUM_THREADS"] == "3" and environment["SGLANG_PLATFORM"] == "areal_lite_cpu"
    )


def test_a_gpu_gets_stock_sglang():
    argv, environment = server_command(
        ServerConfig(device="cuda", args={"mem_fraction_static": 0.4}, tensor_parallel=2),
        "model",
        1234,
        7,
    )
    got = flags(argv)
    assert (
        got["dtype"] == "bfloat16"
        and got["mem-fraction-static"] == "0.4"
        and got["tensor-parallel-size"] == "2"
    )
    assert not {"device", "attention-backend", "sampling-backend", "max-total-tokens"} & got.keys()
    assert not {"SGLANG_PLATFORM", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} & environment.keys()


@pytest.mark.parametrize("running, graphs", [(None, None), (320, "320"), (2000, "512")])
def test_cuda_graphs_cover_all_requests_that_run(running, graphs):
    def command(device: str, **args) -> dict[str, str | bool]:
        config = ServerConfig(device=device, args={"max_running_requests": running, **args})
        return flags(server_command(config, "model", 1, 1)[0])

    assert command("cuda").get("cuda-graph-max-bs-decode") == graphs
    assert "cuda-graph-max-bs-decode" not in command("cpu")
    own = command("cuda", cuda_graph_max_bs_decode=7)
    assert own["cuda-graph-max-bs-decode"] == "7"


def test_args_of_the_user_win():
    args = {
        "chunked_prefill_size": 2048,
        "sleep_on_idle": False,
        "max_total_tokens": 99,
        "lora_paths": ["a", "b"],
    }
    argv, _ = server_command(ServerConfig(device="cpu", args=args), "model", 1, 1)
    got = flags(argv)
    assert (
        got["chunked-prefill-size"] == "2048"
        and got["max-total-tokens"] == "99"
        and "sleep-on-idle" not in got
    )
    assert argv[argv.index("--lora-paths") + 1 :][:2] == ["a", "b"]


def test_mappings_are_json_as_sglang_reads_them():
    overrides = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "tie": True, "no": None}
    args = {"json_model_override_args": overrides, "lora_paths": [{"lora_name": "a"}]}
    argv, _ = server_command(ServerConfig(device="cpu", args=args), "m", 1, 1)
    assert json.loads(argv[argv.index("--json-model-override-args") + 1]) == overrides
    assert json.loads(argv[argv.index("--lora-paths") + 1]) == {"lora_name": "a"}


def test_a_key_is_on_no_command_line():
    argv, environment = server_command(ServerConfig(device="cpu", api_key="hush"), "model", 1, 1)
    assert "hush" not in " ".join(argv) and environment[ENV_API_KEY] == "hush"
    assert ENV_API_KEY not in server_command(ServerConfig(device="cpu"), "model", 1, 1)[1]


def test_no_device_is_seen_when_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cuda") == "cuda"


def test_the_module_needs_no_torch():
    code = (
        "import sys, areal_lite.launch.server_pool\n"
        "sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_announcements(tmp_path):
    first = ServerInfo(name="s0", url="http://127.0.0.1:1", api_key=None, tensor_parallel=1, pid=10)
    second = ServerInfo(
        name="s1", url="http://127.0.0.1:2", api_key="key", tensor_parallel=2, pid=11
    )
    assert announced_servers(tmp_path) == []
    announce_server(tmp_path, second)
    announce_server(tmp_path, first)
    path = tmp_path / "servers" / "s0.json"
    assert announced_servers(tmp_path) == [first, second]
    assert path.stat().st_mode & 0o077 == 0, "an announcement may hold a key"
    assert [p.name for p in (tmp_path / "servers").iterdir() if p.suffix != ".json"] == []
    again = ServerInfo(name="s0", url=first.url, api_key=None, tensor_parallel=1, pid=12)
    announce_server(tmp_path, again)
    withdraw_server(tmp_path, "s1")
    withdraw_server(tmp_path, "s1")
    assert announced_servers(tmp_path) == [again]


def test_unhealthy_servers(tmp_path):
    server = ServerInfo(
        name="s0", url="http://127.0.0.1:1", api_key=None, tensor_parallel=1, pid=10
    )
    announce_server(tmp_path, server)
    assert unhealthy_reason(tmp_path, server) is None
    mark_unhealthy(tmp_path, server, "hangs")
    assert unhealthy_reason(tmp_path, server) == "hangs" and announced_servers(tmp_path) == [server]
    assert unhealthy_reason(tmp_path, replace(server, pid=11)) is None, (
        "it is about an earlier process"
    )
    withdraw_server(tmp_path, "s0")
    assert unhealthy_reason(tmp_path, server) is None and not list((tmp_path / "servers").iterdir())


def process(tmp_path, model: str, port: int, argv: list[str] | None = None) -> ServerProcess:
    server = ServerProcess(
        ServerConfig(device="cpu"),
        model,
        name="s0",
        port=port,
        seed=1,
        log_path=tmp_path / "logs" / "s0.log",
    )
    server.argv = argv or server.argv
    return server


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_an_exit_is_reported_at_once_with_the_log(tmp_path, model):
    server = process(
        tmp_path,
        model,
        free_port(),
        [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"],
    )
    server.start()
    with pytest.raises(RuntimeError, match="s0 exited with code 3(.|\n)*no such flag"):
        asyncio.run(server.wait_ready())
    server.stop()


def test_a_timeout_says_what_was_waited_for(tmp_path, model):
    server = process(
        tmp_path, model, free_port(), [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    server.config.start_timeout_s = 0.1
    server.start()
    try:
        with pytest.raises(TimeoutError, match="/health did not answer 200 in 0.1 s"):
            asyncio.run(server.wait_ready())
    finally:
        server.stop(grace_s=1.0)
    assert server.exit_code() is not None


def test_stop_ends_the_whole_group(tmp_path, model):
    # Parent and child both ignore SIGINT, as a server does that waits for its requests.
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "print(child, flush=True) if child else None\n"
        "time.sleep(60)"
    )
    server = process(tmp_path, model, free_port(), [sys.executable, "-c", code])
    server.start()
    deadline = time.monotonic() + 20
    while not (text := server.log_path.read_text()).endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.01)
    server.stop(grace_s=0.1)
    assert not running(int(text)) and server.exit_code() == -9


def running(pid: int) -> bool:
    """Return whether `pid` runs. A killed process may remain as a zombie."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.01)
    return os.path.exists(f"/proc/{pid}")
