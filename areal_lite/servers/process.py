"""Stock SGLang servers: the command that starts one, the process, and the small file by which others find it.

Contract: a server is `python -m areal_lite.servers.serve` with SGLang's own flags, in a process group of its own, logging to a file. It
serves token ids only (no tokenizer in it), starts at weight version 0, and is ready when /health answers 200. Nothing of it outlives
`ServerProcess.stop` or the process that started it. What can be seen to be wrong beforehand is a ValueError before anything starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from areal_lite.config import ServerConfig
from areal_lite.servers.cpu import PLATFORM
from areal_lite.servers.registry import ServerInfo
from areal_lite.servers.serve import ENV_API_KEY
from areal_lite.system.gpus import resolve_device
from areal_lite.system.network import require_free_port
from areal_lite.system.processes import dying_with_me, tail

CPU_KV_SLOTS = 65536  # SGLang would take 2 GB for the cache of a tiny model


def server_command(
    config: ServerConfig, model: str, port: int, seed: int
) -> tuple[list[str], dict[str, str]]:
    """The command line of a server and the environment it needs beside the current one. `config.args` win over our flags."""
    device = resolve_device(config.device)
    flags: dict[str, Any] = {
        "model_path": model,
        "host": config.host,
        "port": port,
        "random_seed": seed,
        "tensor_parallel_size": config.tensor_parallel,
        "dtype": config.dtype
        if config.dtype != "auto"
        else {"cuda": "bfloat16", "cpu": "float32"}[device],
        "mem_fraction_static": config.mem_fraction,
        "max_total_tokens": config.max_total_tokens,
        "max_running_requests": config.max_running_requests,
        "context_length": config.context_length,
        "weight_version": "0",
        "skip_tokenizer_init": True,
        "log_level_http": "warning",
    }
    # A probe of /health that generates a token would find a server dead whose generation is only paused for a push.
    environment = dying_with_me() | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    if config.api_key:
        environment[ENV_API_KEY] = config.api_key
    if device == "cpu":
        flags |= _cpu_flags(config)
        environment |= _cpu_environment(config)
    argv = [
        sys.executable,
        "-m",
        "areal_lite.servers.serve",
        *_arguments(flags | dict(config.args)),
    ]
    return argv, environment


def _cpu_flags(config: ServerConfig) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",  # ours answers to this name there: sglang_cpu/platform.py
        "sampling_backend": "pytorch",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "max_total_tokens": config.max_total_tokens or CPU_KV_SLOTS,
        "sleep_on_idle": True,  # an idle scheduler would spin on one core
        # Overlapped, a push in_place finds a sampled token whose result is not processed yet and tags it with the new version.
        # There is nothing to overlap without a GPU.
        "disable_overlap_schedule": True,
    }


def _cpu_environment(config: ServerConfig) -> dict[str, str]:
    threads = str(config.threads)
    return {
        "SGLANG_PLATFORM": PLATFORM,
        "CUDA_VISIBLE_DEVICES": "",  # device: cpu was asked for, whatever the machine has
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",  # with more threads than free cores, waiting ones would otherwise spin the working ones off theirs
        "THP_MEM_ALLOC_ENABLE": "1",  # torch on huge pages: attention reads the KV cache all over, one slot at a time
    }


def _arguments(flags: dict[str, Any]) -> list[str]:
    """{max_total_tokens: 8, sleep_on_idle: True, api_key: None} -> --max-total-tokens 8 --sleep-on-idle"""
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if isinstance(value, (list, tuple)):
            argv += [str(item) for item in value]
        elif value is not True:
            argv.append(str(value))
    return argv


class ServerProcess:
    """One server: `start`, `await wait_ready()`, `stop`. `environment` is added to the one that the server needs (a GPU to use, say)."""

    def __init__(
        self,
        config: ServerConfig,
        model: str,
        *,
        name: str,
        port: int,
        seed: int,
        log_path: Path,
        environment: dict[str, str] | None = None,
    ):
        self.config, self.model, self.name, self.port = config, model, name, port
        self.log_path = Path(log_path)
        self.argv, needed = server_command(config, model, port, seed)
        self.environment = needed | (environment or {})
        self.url = (
            f"http://{socket.gethostname() if config.host == '0.0.0.0' else config.host}:{port}"
        )
        self._process: subprocess.Popen | None = None

    @property
    def info(self) -> ServerInfo:
        assert self._process is not None, "not started"
        return ServerInfo(
            name=self.name,
            url=self.url,
            api_key=self.config.api_key,
            tensor_parallel=self.config.tensor_parallel,
            pid=self._process.pid,
        )

    def start(self) -> None:
        """Raises ValueError, with nothing started, if the model folder is not one or the port is taken."""
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model {self.model!r} is not a Hugging Face checkpoint folder: it has no config.json"
            )
        # A port that we picked was free a moment ago. To try it again could fail: another thread that is starting a process keeps sockets of
        # ours open there until that has become another program.
        if self.config.port:
            require_free_port(self.config.host, self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None, "not started"
        return self._process.poll()

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return when the server answers. TimeoutError after `timeout` seconds (default: config.start_timeout_s);
        RuntimeError with the end of its log at once if it exits."""
        timeout = self.config.start_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + timeout
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        async with aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(5)
        ) as session:
            while (answer := await _health(session, self.url)) != "200":
                if (code := self.exit_code()) is not None:
                    raise RuntimeError(
                        f"server {self.name} exited with code {code} before it was ready; {self._log_tail()}"
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"server {self.name}: no 200 from {self.url}/health in {timeout:g} s ({answer}); {self._log_tail()}"
                    )
                await asyncio.sleep(0.1)

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and every process of its group. Does nothing if it was not started.

        SIGINT first, to the leader alone, which closes its workers in half a second when it is idle; at SIGTERM SGLang would take five
        seconds or more to drain, and what is in flight is of no use to anyone who stops a server. Then SIGKILL to the group.
        """
        if self._process is None:
            return
        group = self._process.pid
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def _log_tail(self) -> str:
        return f"the end of {self.log_path}:\n{tail(self.log_path)}"


async def _health(session: aiohttp.ClientSession, url: str) -> str:
    """The status of /health, or why there is none."""
    try:
        async with session.get(f"{url}/health") as response:
            return str(response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
