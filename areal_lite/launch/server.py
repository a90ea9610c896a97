"""The processes of stock SGLang servers.

* A server is `python -m areal_lite.launch.serve` with SGLang's own flags, in a process group of
  its own. It logs to a file.
* It serves token ids only and has no tokenizer. It starts at weight version 0.
* Nothing of it outlives `ServerProcess.stop`, or the process that started it.
* An error that can be seen beforehand is a ValueError before anything starts.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from areal_lite.config import ServerConfig
from areal_lite.extensions import cpu_device
from areal_lite.launch.serve import ENV_API_KEY, ENV_DEVICE
from areal_lite.servers.client import ServerError, SGLangClient
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.gpus import check_cuda, nccl_environment, resolve_device
from areal_lite.system.network import require_free_port
from areal_lite.system.processes import dying_with_me, tail

_HEALTH_TIMEOUT_S = 5.0
_SGLANG_ENVIRONMENT = {
    # With this on, /health generates a token: a server that a push has paused would look dead.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # With these on, a server whose scheduler or detokenizer has died would stop answering, and end
    # 65 seconds later: it waits for dumps.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    # The client closes idle connections. A server that stalls for longer than its own limit (5 s)
    # would close one on which a request waits: uvloop looks at timers before sockets.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
}
_MOST_GRAPHS = 512  # each captured request takes some MiB of a GPU


def server_command(
    config: ServerConfig, model: str, port: int, seed: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a server, and the environment that it needs besides the current.

    `config.args` take precedence.
    """
    device = resolve_device(config.device)
    flags: dict[str, Any] = {
        "model_path": model,
        "host": config.host,
        "port": port,
        "random_seed": seed,
        "tensor_parallel_size": config.tensor_parallel,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "weight_version": "0",
        "skip_tokenizer_init": True,
        "log_level_http": "warning",
        "enable_deterministic_inference": config.deterministic,
        # A request makes many Python objects, and the garbage collector runs after every 700 of
        # them by default. That takes a tenth of the speed at 384 requests without a GPU.
        "gc_threshold": (100_000, 20, 50),
        # The samples of a group arrive together. In order of arrival, SGLang would compute their
        # prompt once for each: this policy computes it once, and then the others.
        "schedule_policy": "lpm",
    }
    environment = dying_with_me() | _SGLANG_ENVIRONMENT
    if config.api_key:
        environment[ENV_API_KEY] = config.api_key
    if device == "cpu":
        flags |= cpu_device().server_flags()
        environment |= cpu_device().server_environment() | {ENV_DEVICE: device}
    else:
        flags |= _gpu_flags(config)
        environment |= nccl_environment()
    arguments = _arguments(flags | dict(config.args))
    return [sys.executable, "-m", "areal_lite.launch.serve", *arguments], environment


def _gpu_flags(config: ServerConfig) -> dict[str, Any]:
    if not config.max_running_requests:
        return {}
    # SGLang would capture CUDA graphs of at most 256 requests (512 with tensor parallelism of 4 or
    # more). It decodes larger batches without, which takes several times as long.
    return {"cuda_graph_max_bs_decode": min(config.max_running_requests, _MOST_GRAPHS)}


def _arguments(flags: dict[str, Any]) -> list[str]:
    """Return flags as arguments: {tp_size: 8, sleep_on_idle: True} -> --tp-size 8 --sleep-on-idle.

    Flags that are None or False are left out.
    """
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


@dataclass(eq=False, repr=False)
class ServerProcess:
    """One server: `start`, `await wait_ready()`, `stop`.

    Args:
        model: the folder of its checkpoint.
        name: its name in the registry.
        seed: the seed of its sampling.
        environment: added to the environment that the server needs, for example a GPU to use.
    """

    config: ServerConfig
    model: str
    _: KW_ONLY
    name: str
    port: int
    seed: int
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.argv, needed = server_command(self.config, self.model, self.port, self.seed)
        self.environment = needed | self.environment
        host = self.config.host
        self.url = f"http://{socket.gethostname() if host == '0.0.0.0' else host}:{self.port}"
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
        """Start the process.

        Raises ValueError, with nothing started, if `model` is no checkpoint folder, the configured
        port is taken, or a GPU is wanted that SGLang could not use.
        """
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model {self.model!r} is not a Hugging Face checkpoint folder:"
                " it has no config.json"
            )
        if resolve_device(self.config.device) == "cuda":
            check_cuda()
        # A port that was picked automatically was free a moment ago. Binding it again could fail:
        # a thread that starts another process at this moment still shares its sockets with it.
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
        """Return None while the process runs."""
        assert self._process is not None, "not started"
        return self._process.poll()

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return when GET /health answers 200.

        Raises TimeoutError after `timeout` seconds (default: `server.start_timeout_s`). Raises
        RuntimeError with the end of its log as soon as the process exits.
        """
        timeout = self.config.start_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + timeout
        async with SGLangClient(_HEALTH_TIMEOUT_S) as client:
            while True:
                try:
                    return await client.check_reachable(self.info)
                except ServerError as error:
                    reason = error
                if (code := self.exit_code()) is not None:
                    raise RuntimeError(
                        f"server {self.name} exited with code {code} before it was ready;"
                        f" {self._log_tail()}"
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"server {self.name}: {self.url}/health did not answer 200 in {timeout:g} s"
                        f" ({reason}); {self._log_tail()}"
                    )
                await asyncio.sleep(0.1)

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and every process of its group. It does nothing before `start`.

        On SIGINT to the leader alone, an idle leader closes its workers in half a second. On
        SIGTERM SGLang would take five seconds or more to finish requests that no longer matter.
        After `grace_s` seconds SIGKILL goes to the group.
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
