"""The commands beside the core, each with its settings. Importing this loads none of the tools."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from areal_lite.config import DataConfig, RewardConfig, RolloutConfig, ServerConfig
from areal_lite.config.commands import MODEL_HELP, RUN_DIR_HELP, SEED_HELP, Command, Mode
from areal_lite.config.data import SAMPLING_HELP
from areal_lite.config.fields import MAX_COUNT, MAX_SEED, setting
from areal_lite.config.sections import Sampling
from areal_lite.run_dir.paths import CONFIG_FILE, METRICS_FILE, STORE_FILE

_RUN = "Run directory of a run that has ended or is still running."


@dataclass
class EvalCommandConfig:
    """Greedy accuracy and unbiased pass@k of a checkpoint."""

    model: str = setting(MISSING, MODEL_HELP)
    run_dir: str = setting("runs/eval-${now:%Y%m%d-%H%M%S}", RUN_DIR_HELP)
    seed: int = setting(1, SEED_HELP, within=(0, MAX_SEED))
    problems: int = setting(200, "Held-out problems.", within=(1, 1_000_000))
    samples: int = setting(
        4,
        "Sampled answers to each, besides a greedy one. None at temperature 0.",
        within=(0, 10_000),
    )
    sampling: dict[str, Any] = setting({}, SAMPLING_HELP)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class ChatConfig(Sampling):
    """A conversation in the terminal, with a model or with a run's newest checkpoint."""

    model: str | None = setting(None, MODEL_HELP)
    run_dir: str | None = setting(
        None, "Run directory: talk to its newest checkpoint, which is exported first if it must be."
    )
    prompts: list[str] = setting(
        [], "Answer each of these prompts by itself, and exit. []: the lines of standard input."
    )
    seed: int = setting(1, SEED_HELP, within=(0, MAX_SEED))
    raw: bool = setting(False, "Apply no chat template: each line is a prompt of its own.")
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class ServeConfig:
    """A checkpoint behind an OpenAI endpoint."""

    model: str = setting(
        MISSING,
        "Folder of a Hugging Face checkpoint. Or a run directory: its newest checkpoint, which is "
        "exported first if it must be.",
    )
    follow: bool = setting(
        False, "Load each newer checkpoint of the run when it appears. A run may have none yet."
    )
    port: int = setting(30000, "Port of the endpoint.", within=(1, 65535))
    seed: int = setting(1, SEED_HELP, within=(0, MAX_SEED))
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class ServersConfig:
    """The servers of a run that is going on: list them, add some, or drain one."""

    run_dir: str = setting(MISSING, "Run directory of a run that is going on.")
    add: int = setting(0, "Start this many more servers, on the visible GPUs.", within=(0, 1024))
    drain: str | None = setting(
        None, "Name of a server that takes no new requests, and ends after those it has."
    )


@dataclass
class ExportConfig:
    """A run's checkpoint as a Hugging Face folder, written without servers and without a GPU."""

    run_dir: str = setting(MISSING, _RUN)
    step: int | None = setting(None, "Checkpoint step. null: the newest.", within=(1, MAX_COUNT))
    out: str | None = setting(
        None, "New or empty folder. null: exports/step-N[-adapter] in the run directory."
    )
    dtype: str = setting(
        "auto",
        "Type of the weights. auto: as in the checkpoint.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    adapter: bool = setting(
        False, "Write the adapters of trainer.lora alone, in PEFT's format. false: the whole model."
    )
    model: str | None = setting(None, "Model that the run started from. null: as its settings say.")


@dataclass
class ReportConfig:
    """One page about a run, or about several, to open in a browser."""

    runs: list[str] = setting(
        [], "Run directories. Several are shown side by side: runs=[runs/a,runs/b]."
    )
    out: str | None = setting(None, "File of a comparison. null: compare.html.")
    port: int = setting(0, "--follow: port of the page. 0: any free one.", within=(0, 65535))
    group: int | None = setting(None, "--inspect: group, from 0.", within=(0, MAX_COUNT))
    step: int | None = setting(None, "--inspect: step that used it, from 1.", within=(1, MAX_COUNT))
    version: int | None = setting(
        None, "--inspect: weight version of at least one token.", within=(0, MAX_COUNT)
    )
    reward_min: float | None = setting(None, "--inspect: lowest reward.", within=(-1e6, 1e6))
    reward_max: float | None = setting(None, "--inspect: highest reward.", within=(-1e6, 1e6))
    limit: int = setting(3, "--inspect: number of trajectories to print.", within=(1, MAX_COUNT))


@dataclass
class DiagnoseConfig:
    """Find problems of a run: alarms, hints, and the settings to change."""

    run_dir: str = setting(MISSING, _RUN)
    tokens: bool = setting(
        False, "--audit: also read every token of the store: checksums, log-probs and versions."
    )


@dataclass
class DoctorConfig:
    """Checks of this machine: can runs work here?"""

    folder: str = setting("runs", "Folder of the run directories.")
    quick: bool = setting(
        False, "Leave out the last check, which trains a small model for about a minute."
    )


_ONE_RUN = ("run_dir", "RUN")

EVAL = Command(
    schema=EvalCommandConfig,
    entry="areal_lite.tools.evaluate:run",
    check="areal_lite.tools.evaluate:check",
)
CHAT = Command(
    schema=ChatConfig,
    entry="areal_lite.tools.chat:run",
    check="areal_lite.tools.chat:check",
    words=("model", "MODEL or RUN"),
)
SERVE = Command(
    schema=ServeConfig,
    entry="areal_lite.tools.serve:run",
    check="areal_lite.tools.serve:check",
    words=("model", "MODEL or RUN"),
)
SERVERS = Command(
    schema=ServersConfig,
    entry="areal_lite.tools.servers:run",
    check="areal_lite.tools.servers:check",
    words=_ONE_RUN,
)
EXPORT = Command(schema=ExportConfig, entry="areal_lite.tools.export:run", words=_ONE_RUN)
_REPORT = "areal_lite.tools.report.command"
REPORT = Command(
    schema=ReportConfig,
    entry=f"{_REPORT}:report",
    words=("runs", "RUN …"),
    modes={
        "--follow": Mode(entry=f"{_REPORT}:follow", does="serves the page during the run"),
        "--inspect": Mode(entry=f"{_REPORT}:inspect", does="prints trajectories in the terminal"),
    },
)
DIAGNOSE = Command(
    schema=DiagnoseConfig,
    entry="areal_lite.tools.diagnose.diagnosis:run",
    words=_ONE_RUN,
    modes={
        "--audit": Mode(
            entry="areal_lite.tools.audit.audit:run",
            does="proves that nothing was lost and nothing was used twice",
        )
    },
)
DOCTOR = Command(schema=DoctorConfig, entry="areal_lite.tools.doctor:run")


def existing_run(folder: str | Path) -> Path:
    """Return the directory of a run. Raises ValueError when `folder` is not."""
    run_dir = Path(folder)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: there is no such folder")
    if not any((run_dir / file).exists() for file in (CONFIG_FILE, METRICS_FILE, STORE_FILE)):
        raise ValueError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    return run_dir


@contextmanager
def no_traceback() -> Iterator[None]:
    """Say in one line that a folder has no records of a run. Raises ValueError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise ValueError(
            f"the records are damaged, or no run wrote them ({type(error).__name__}: {error}, at "
            f"{place}): restore them from a copy"
        ) from error
