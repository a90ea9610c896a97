"""Settings of the SGLang servers, of the pushes of weights to them, and of restarts."""

from dataclasses import dataclass
from typing import Any

from areal_lite.config.fields import MAX_COUNT, WEEK_S, setting


@dataclass
class ServerConfig:
    """The SGLang servers."""

    count: int = setting(1, "Number of servers.", minimum=1, maximum=1024)
    device: str = setting(
        "auto",
        "Where to compute. auto is cuda if the machine has a GPU, else cpu.",
        choices=("auto", "cpu", "cuda"),
    )
    tensor_parallel: int = setting(1, "GPUs of each server.", minimum=1, maximum=1024)
    host: str = setting(
        "127.0.0.1",
        "Address to listen on. `node` is this machine's own address, which the controller then "
        "uses too: for runs on several machines.",
    )
    port: int = setting(
        0, "Port of the first server. 0 picks free ports.", minimum=0, maximum=65535
    )
    api_key: str | None = setting(None, "Required unless server.host is a loopback address.")
    deterministic: bool = setting(
        False,
        "Give a request the same tokens whatever else the server runs, and on every server: "
        "seeded sampling and batch-invariant arithmetic. With schedule=sync a run can then be "
        "repeated and resumed bit for bit.",
    )
    start_timeout_s: float = setting(
        600.0,
        "Longest time that a server may take to start, in seconds.",
        minimum=0.001,
        maximum=WEEK_S,
    )
    args: dict[str, Any] = setting(
        {},
        "Options of SGLang: {chunked_prefill_size: 2048} is --chunked-prefill-size 2048. dtype is "
        "bfloat16 on a GPU and float32 without one; max_running_requests, on a GPU, a server's "
        "share of rollout.max_concurrent and a quarter more.",
    )

    @property
    def mem_fraction(self) -> float | None:
        """Return the share of a GPU's memory for weights and KV cache; None: SGLang decides."""
        return self.args.get("mem_fraction_static")

    @property
    def max_running_requests(self) -> int | None:
        """Return the requests that a server runs at a time; None: not set."""
        return self.args.get("max_running_requests")


@dataclass
class SyncConfig:
    """The pushes of new weights to the servers."""

    every: int = setting(
        1,
        "Training steps from push to push, N. Needs buffer.max_staleness of at least N - 1.",
        minimum=1,
        maximum=MAX_COUNT,
    )
    transport: str = setting(
        "auto",
        "distributed: an NCCL or Gloo broadcast. adapters: a broadcast of the adapters of "
        "trainer.lora alone, which each server adds to the weights of its checkpoint; it reads "
        "them within the pause. memory: memory that the trainer shares with servers, or a copy of "
        "it on their machine; without GPUs. disk: files in a folder. auto: memory without GPUs, "
        "else distributed.",
        choices=("auto", "distributed", "adapters", "memory", "disk"),
    )
    disk_path: str | None = setting(
        None,
        "disk: a folder that the servers see too. null: RUN_DIR/weights.",
    )
    verify: bool = setting(
        False, "Read some weights back from the servers after each push and compare them."
    )
    timeout_s: float = setting(
        120.0,
        "Longest time for an answer of a server or the controller, in seconds. A server that "
        "is silent for half of it outside a push has failed. One without a GPU may compute for "
        "many seconds before it answers.",
        minimum=0.001,
        maximum=WEEK_S,
    )

    @property
    def health_timeout_s(self) -> float:
        """Return the seconds of silence after which a server has failed."""
        return self.timeout_s / 2

    @property
    def health_interval_s(self) -> float:
        """Return the seconds between two health checks of a server."""
        return self.timeout_s / 12


@dataclass
class RestartConfig:
    """Restarts of servers, controller and trainer during a run, after a failure or a hang."""

    max: int = setting(
        5,
        "Restarts within an hour. After these the run continues without the server, or ends, and "
        "resume=auto continues it. 0: nothing is started again.",
        minimum=0,
        maximum=1_000_000,
    )
    hang_timeout_s: float = setting(
        1800.0,
        "A process without a heartbeat for this many seconds hangs, and is replaced. It must be "
        "longer than sync.timeout_s, a microbatch, loading the model and writing a checkpoint. A "
        "process that was stopped by a signal (SIGSTOP) is replaced after a sixtieth of it.",
        minimum=1,
        maximum=WEEK_S,
    )
