"""Define `areal-lite train` and `areal-lite servers`, and find the other commands.

The others are entry points of the group `areal_lite.commands`, each a `Command`.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING

from areal_lite import extensions
from areal_lite.config.algo import AlgoConfig
from areal_lite.config.data import DataConfig, EvalConfig, RewardConfig
from areal_lite.config.fields import MAX_SEED, setting
from areal_lite.config.sections import (
    BufferConfig,
    LoggerConfig,
    RestartConfig,
    RolloutConfig,
    ServerConfig,
    StoreConfig,
    SyncConfig,
    TrainerConfig,
)

MODEL_HELP = "Folder of a Hugging Face checkpoint."
RUN_DIR_HELP = "Run directory, to which the command writes everything."
SEED_HELP = "Seed of all randomness that has no seed of its own."


@dataclass(frozen=True, kw_only=True)
class Mode:
    """An option of a command, which calls another function with the same settings."""

    entry: str = ""  # as in `Command`; empty: the entry point of `extensions.MODES` with its name
    does: str  # its help
    settings: tuple[str, ...] = ()  # overrides in front of the user's


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `areal-lite`. A function is named as `module:function`, and imported late."""

    schema: type  # the dataclass of its settings; the first line of its docstring is the help
    entry: str  # runs it, called as f(config) -> exit status
    check: str = ""  # called as f(config) beforehand; ValueError for what cannot work here
    adapt: str = ""  # called as f(overrides) -> overrides in front of the user's
    words: tuple[str, str] | None = None  # the setting of words without `=`, and its help
    modes: dict[str, Mode] = field(default_factory=dict)  # options by their flags

    def written(self, name: str) -> str:
        """Write the start of its command line. A stage of a command is a module."""
        module = self.entry.partition(":")[0]
        return f"areal-lite {name}" if name in command_names() else f"python -m {module}"


@dataclass
class TrainConfig:
    """Reinforcement learning: servers, controller and trainer on one machine."""

    model: str = setting(MISSING, MODEL_HELP)
    run_dir: str = setting("runs/${now:%Y%m%d-%H%M%S}", RUN_DIR_HELP)
    seed: int = setting(1, SEED_HELP, within=(0, MAX_SEED))
    resume: str = setting(
        "never",
        "auto: continue the run in run_dir, if there is one, from its newest checkpoint.",
        choices=("never", "auto"),
    )
    debug: str = setting(
        "off", "train_only:RUN_DIR: train without servers, on the batches of a stored run."
    )
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def debug_mode(self) -> str:
        """Return the mode in `debug`, without what follows its colon."""
        return self.debug.partition(":")[0]

    @property
    def max_lead(self) -> int:
        """Return the steps from the version at which a group may start to the step of its turn.

        The window takes its part of the staleness bound (controller/buffer.py).
        """
        passing = self.buffer.window or 0
        return self.buffer.max_staleness - -(-passing // self.trainer.batch_groups)

    def is_base(self, reference: str) -> bool:
        """Return whether a reference policy is the trained model without its adapters."""
        return self.trainer.lora.rank > 0 and reference == self.model

    def is_pushed(self, done: int) -> bool:
        """Return whether the weights after `done` steps are pushed."""
        return done % self.sync.every == 0 or done == self.trainer.steps

    def is_evaluated(self, done: int) -> bool:
        """Return whether the push after `done` steps is evaluated while training continues."""
        every = self.eval.every
        if not every or not self.is_pushed(done) or done == self.trainer.steps:
            return False
        return done // every > (done - self.sync.every) // every

    def last_evaluated(self, done: int) -> int:
        """Return the newest version up to `done` that a run evaluates; 0 is the first."""
        return next((step for step in range(done, 0, -1) if self.is_evaluated(step)), 0)


CORE = {
    "train": Command(
        schema=TrainConfig,
        entry="areal_lite.launch.local:run",
        check="areal_lite.launch.preflight:check_run",
        modes={
            "--dry-run": Mode(does="checks everything, shows the plan, starts nothing"),
            "--prepare": Mode(
                entry="areal_lite.launch.prepare:run",
                does="writes the run directory; you start the processes",
                # Random keys, made for the run, protect the servers and the controller.
                settings=("server.host=node", "server.api_key='${token:}'"),
            ),
        },
    ),
}

LOCAL: dict[str, Command] = {}
"""Commands that a program defines for itself, to run them by `cli.run_command`."""


def command_names() -> list[str]:
    """List the commands of the core and of the installed extensions."""
    return [*CORE, *extensions.names(extensions.COMMANDS)]


def find_command(name: str) -> Command:
    """Return a command, or a stage of one, by its name. Raises ValueError if there is none."""
    if found := CORE.get(name) or LOCAL.get(name):
        return found
    load = extensions.load
    if found := load(extensions.COMMANDS, name) or load(extensions.STAGES, name):
        return found
    raise ValueError(f"unknown command {name!r}; choose one of {', '.join(command_names())}")
