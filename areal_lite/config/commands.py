"""The settings of each command of `areal-lite`, and their registration with Hydra.

conf/<command>.yaml extends the schema `<command>_schema` that is registered here.
"""

import secrets
from dataclasses import dataclass, field
from functools import cache

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from areal_lite.config.algo import AlgoConfig
from areal_lite.config.cluster import ClusterConfig
from areal_lite.config.data import DataConfig, EvalConfig, RewardConfig
from areal_lite.config.fields import MAX_COUNT, MAX_SEED, MAX_TOKENS, setting
from areal_lite.config.report import VIEWS
from areal_lite.config.restart import RestartConfig
from areal_lite.config.rollout import BufferConfig, RolloutConfig
from areal_lite.config.servers import ServerConfig, SyncConfig
from areal_lite.config.simulate import SimulationConfig
from areal_lite.config.store import StoreConfig
from areal_lite.config.trainer import LoggerConfig, TrainerConfig

_MODEL = "Folder of a Hugging Face checkpoint."
_RUN_DIR = "Run directory, to which the command writes everything."
_SEED = "Seed of everything that is random and has no seed of its own."


@dataclass
class TrainConfig:
    """Reinforcement learning: servers, controller and trainer on one machine."""

    model: str = setting(MISSING, _MODEL)
    run_dir: str = setting("runs/${now:%Y%m%d-%H%M%S}", _RUN_DIR)
    seed: int = setting(1, _SEED, minimum=0, maximum=MAX_SEED)
    resume: str = setting(
        "never",
        "auto: continue the run in run_dir, if there is one, from its newest checkpoint.",
        choices=("never", "auto"),
    )
    debug: str = setting(
        "off",
        "Half of a run. rollout_only: generate and store groups, train nothing. train_only: train "
        "on the batches of the stored run debug_run.",
        choices=("off", "rollout_only", "train_only"),
    )
    debug_run: str | None = setting(None, "train_only: run directory of the stored run.")
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
    def max_lead(self) -> int:
        """Return the steps from the version at which a group may start to the step of its turn.

        The window takes its part of the staleness bound (controller/queue.py).
        """
        passing = self.buffer.window or 0
        return self.buffer.max_staleness - -(-passing // self.trainer.batch_groups)

    def is_base(self, reference: str) -> bool:
        """Return whether a reference policy is the trained model without its adapters."""
        return self.trainer.lora.rank > 0 and reference == self.model


@dataclass
class SlurmConfig(TrainConfig):
    """A training run on a Slurm cluster: all settings of `train`, and those of the job."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class SimulateConfig(TrainConfig):
    """A training run in virtual time: all settings of `train`, and those of the modelled parts."""

    model: str | None = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "Folder with the model's config.json. null: simulate.shape."
    )
    simulate: SimulationConfig = field(default_factory=SimulationConfig)


@dataclass
class MakeModelConfig:
    """A small, randomly initialized checkpoint with a character tokenizer."""

    out: str = setting(MISSING, "Folder to write the checkpoint to.")
    architecture: str = setting(
        "qwen3", "Model type.", choices=("qwen3", "qwen2", "llama", "mistral", "qwen3_moe")
    )
    hidden_size: int = setting(128, "Size of a hidden state.", minimum=1, maximum=65_536)
    num_layers: int = setting(4, "Layers.", minimum=1, maximum=1024)
    num_heads: int = setting(4, "Attention heads.", minimum=1, maximum=1024)
    num_kv_heads: int = setting(2, "Heads of keys and values.", minimum=1, maximum=1024)
    head_dim: int = setting(32, "Size of a head.", minimum=2, maximum=1024)
    mlp_size: int = setting(
        384, "Hidden size of an MLP, or of each expert.", minimum=1, maximum=262_144
    )
    num_experts: int = setting(8, "qwen3_moe: experts of a layer.", minimum=1, maximum=1024)
    experts_per_token: int = setting(
        2, "qwen3_moe: experts that each token uses.", minimum=1, maximum=1024
    )
    tie_embeddings: bool = setting(True, "Share input and output embeddings.")
    max_position: int = setting(2048, "Longest sequence, in tokens.", minimum=1, maximum=MAX_TOKENS)
    rope_theta: float = setting(
        10000.0, "Base of the rotary position embedding.", minimum=1, maximum=1e9
    )
    init_std: float = setting(
        0.09, "Standard deviation of the initial weights.", above=0, maximum=10
    )
    seed: int = setting(1, "Seed of the initial weights.", minimum=0, maximum=MAX_SEED)


@dataclass
class SftConfig:
    """Supervised warm-up on demonstrations that an imperfect teacher generates."""

    model: str = setting(MISSING, _MODEL)
    out: str = setting(MISSING, "Folder to write the trained checkpoint to.")
    run_dir: str = setting("runs/sft-${now:%Y%m%d-%H%M%S}", _RUN_DIR)
    seed: int = setting(1, _SEED, minimum=0, maximum=MAX_SEED)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch_size: int = setting(64, "Demonstrations of a step.", minimum=1, maximum=1_000_000)
    forget_carry: float = setting(
        0.45, "Probability that the teacher forgets a carry.", minimum=0, maximum=1
    )


@dataclass
class QuickstartConfig(TrainConfig):
    """`make-model`, `sft` and `train` in a row; conf/quickstart.yaml connects them."""

    make_model: MakeModelConfig = field(default_factory=MakeModelConfig)
    sft: SftConfig = field(default_factory=SftConfig)


@dataclass
class EvalCommandConfig:
    """Greedy accuracy and unbiased pass@k of a checkpoint."""

    model: str = setting(MISSING, _MODEL)
    run_dir: str = setting("runs/eval-${now:%Y%m%d-%H%M%S}", _RUN_DIR)
    seed: int = setting(1, _SEED, minimum=0, maximum=MAX_SEED)
    problems: int = setting(200, "Held-out problems.", minimum=1, maximum=1_000_000)
    samples: int = setting(
        4, "Sampled completions of each problem, besides a greedy one.", minimum=0, maximum=10_000
    )
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class GenerateConfig:
    """Completions of a few prompts."""

    model: str = setting(MISSING, _MODEL)
    run_dir: str = setting("runs/generate-${now:%Y%m%d-%H%M%S}", _RUN_DIR)
    seed: int = setting(1, _SEED, minimum=0, maximum=MAX_SEED)
    prompts: list[str] = setting([], "Prompts to complete. []: a few held-out problems.")
    samples: int = setting(1, "Completions of each prompt.", minimum=1, maximum=10_000)
    data: DataConfig = field(default_factory=DataConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class ChatConfig:
    """A conversation in the terminal, with a model or with a run's newest checkpoint."""

    model: str | None = setting(None, _MODEL)
    run_dir: str | None = setting(
        None,
        "Run directory: talk to its newest checkpoint, which is exported first if it must be.",
    )
    seed: int = setting(1, _SEED, minimum=0, maximum=MAX_SEED)
    temperature: float = setting(1.0, "Sampling temperature. 0: greedy.", minimum=0, maximum=100)
    max_new_tokens: int = setting(1024, "Longest answer, in tokens.", minimum=1, maximum=MAX_TOKENS)
    raw: bool = setting(
        False, "Use no chat template: each line is a prompt as it is, without the lines before."
    )
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class ExportConfig:
    """A run's checkpoint as a Hugging Face folder, written without servers and without a GPU."""

    run_dir: str = setting(MISSING, "Run directory of a run that has ended or is still running.")
    step: int | None = setting(
        None,
        "Step of the checkpoint. null: the newest one that is whole.",
        minimum=1,
        maximum=MAX_COUNT,
    )
    out: str | None = setting(
        None,
        "Folder to write, new or empty. null: exports/step-N in the run directory, for adapters "
        "exports/step-N-adapter.",
    )
    dtype: str = setting(
        "auto",
        "Type of the weights. auto: that of the checkpoint.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    adapter: bool = setting(
        False,
        "Write the adapters of trainer.lora alone, in PEFT's format. false: the whole model, with "
        "the adapters added to its weights.",
    )
    model: str | None = setting(
        None, "Model from which the run started. null: where the settings of the run say."
    )


@dataclass
class DoctorConfig:
    """Checks of this machine: can runs work here?"""

    folder: str = setting("runs", "Folder of the run directories.")
    quick: bool = setting(
        False, "Leave out the last check, which trains a small model for about a minute."
    )


COMMANDS: dict[str, type] = {
    "train": TrainConfig,
    "slurm": SlurmConfig,
    "prepare": TrainConfig,
    "simulate": SimulateConfig,
    "quickstart": QuickstartConfig,
    "make-model": MakeModelConfig,
    "sft": SftConfig,
    "eval": EvalCommandConfig,
    "generate": GenerateConfig,
    "chat": ChatConfig,
    "export": ExportConfig,
    **VIEWS,
    "doctor": DoctorConfig,
}


@cache
def register(command: str) -> DictConfig:
    """Register the schema of `command` with Hydra, once per process, and return it.

    Hydra copies every registered schema at each composition, so only what is used is registered.
    The resolver `${token:}` makes a random key.
    """
    OmegaConf.register_new_resolver(
        "token", lambda: secrets.token_hex(16), use_cache=True, replace=True
    )
    schema = OmegaConf.structured(COMMANDS[command])
    ConfigStore.instance().store(name=f"{command}_schema", node=schema)
    return schema
