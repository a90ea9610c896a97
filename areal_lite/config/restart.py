"""Settings of restarts: how often controller and trainer start again during a run."""

from dataclasses import dataclass

from areal_lite.config.fields import WEEK_S, setting


@dataclass
class RestartConfig:
    """Restarts of controller and trainer during `areal-lite train`, after a failure or a hang."""

    max: int = setting(
        3,
        "Restarts within restart.window_s. After these the run ends, and resume=auto continues "
        "it. 0: the first failure ends the run.",
        minimum=0,
        maximum=1_000_000,
    )
    window_s: float = setting(
        3600.0,
        "Failures older than this many seconds do not count.",
        minimum=1,
        maximum=WEEK_S,
    )
    hang_timeout_s: float = setting(
        1800.0,
        "A process without a heartbeat for this many seconds hangs, and is replaced. It must be "
        "longer than sync.timeout_s, a microbatch, loading the model and writing a checkpoint. A "
        "process that was stopped by a signal (SIGSTOP) is replaced after a sixtieth of it.",
        minimum=1,
        maximum=WEEK_S,
    )
