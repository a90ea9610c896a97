"""`areal-lite quickstart`: the command, and the settings of its stages."""

import os
from dataclasses import dataclass, field

from omegaconf import MISSING

from areal_lite.config import TrainConfig, TrainerConfig
from areal_lite.config.commands import MODEL_HELP, RUN_DIR_HELP, SEED_HELP, Command
from areal_lite.config.fields import MAX_SEED, MAX_TOKENS, setting

EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "glm4_moe", "gpt_oss", "deepseek_v3")
"""Architectures that are mixtures of experts."""


@dataclass
class MakeModelConfig:
    """A small, randomly initialized checkpoint with a character tokenizer."""

    out: str = setting(MISSING, "Folder to write the checkpoint to.")
    architecture: str = setting(
        "qwen3",
        "Model type.",
        choices=(
            *("qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "smollm3", "phi3", "olmo3"),
            *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "gemma3_text"),
            *("gpt_oss", "deepseek_v3"),
        ),
    )
    hidden_size: int = setting(128, "Size of a hidden state.", within=(1, 65_536))
    num_layers: int = setting(4, "Layers.", within=(1, 1024))
    num_heads: int = setting(4, "Attention heads.", within=(1, 1024))
    num_kv_heads: int = setting(2, "Heads of keys and values.", within=(1, 1024))
    head_dim: int = setting(32, "Size of a head.", within=(2, 1024))
    mlp_size: int = setting(384, "Hidden size of an MLP or expert.", within=(1, 262_144))
    num_experts: int = setting(8, "Mixtures: experts of a layer.", within=(1, 1024))
    experts_per_token: int = setting(2, "Mixtures: experts of each token.", within=(1, 1024))
    tie_embeddings: bool = setting(True, "Share input and output embeddings.")
    max_position: int = setting(2048, "Longest sequence, in tokens.", within=(1, MAX_TOKENS))
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", within=(1, 1e9))
    init_std: float = setting(0.09, "Standard deviation of initial weights.", within=(1e-6, 10))
    seed: int = setting(1, "Seed of the initial weights.", within=(0, MAX_SEED))


@dataclass
class SftConfig:
    """Supervised warm-up on demonstrations that an imperfect teacher generates."""

    model: str = setting(MISSING, MODEL_HELP)
    out: str = setting(MISSING, "Folder to write the trained checkpoint to.")
    run_dir: str = setting("runs/sft-${now:%Y%m%d-%H%M%S}", RUN_DIR_HELP)
    seed: int = setting(1, SEED_HELP, within=(0, MAX_SEED))
    max_digits: int = setting(8, "Digits of the longest operand.", within=(1, 12))
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch_size: int = setting(64, "Demonstrations of a step.", within=(1, 1_000_000))
    forget_carry: float = setting(0.45, "Probability of a forgotten carry.", within=(0, 1))


@dataclass
class QuickstartConfig(TrainConfig):
    """Make a model, warm it up and train it; conf/quickstart.yaml connects the stages."""

    make_model: MakeModelConfig = field(default_factory=MakeModelConfig)
    sft: SftConfig = field(default_factory=SftConfig)


QUICKSTART = Command(
    schema=QuickstartConfig,
    entry="areal_lite_quickstart.quickstart:run",
    check="areal_lite_quickstart.command:check_quickstart",
    adapt="areal_lite_quickstart.command:overrides_for_gpus",
)
MAKE_MODEL = Command(
    schema=MakeModelConfig,
    entry="areal_lite_quickstart.make_model:run",
)
SFT = Command(
    schema=SftConfig,
    entry="areal_lite_quickstart.sft:run",
    check="areal_lite_quickstart.command:check_sft",
)


def check_quickstart(config: QuickstartConfig) -> None:
    """Check the stages, before there is a model. Raises ValueError."""
    from areal_lite.launch.preflight import already_there, check_run

    _check_warm_up(config.sft, "sft.")
    dense = config.make_model.architecture not in EXPERTS
    check_run(config, dense=dense)
    if config.resume == "never" and os.path.exists(config.make_model.out):
        raise ValueError(already_there(config))


def check_sft(config: SftConfig) -> None:
    """Check the warm-up. Raises ValueError."""
    from areal_lite.launch.preflight import check_layout, check_model, check_run_dir_of

    _check_warm_up(config, "")
    check_model("model", config.model)
    check_layout(config.trainer, config.model)
    check_run_dir_of(config)


def _check_warm_up(config: SftConfig, prefix: str) -> None:
    """Check the settings of the warm-up, whose keys begin with `prefix`. Raises ValueError."""
    from areal_lite.config.rules import check_trainer
    from areal_lite.launch.roles import check_trainer_device
    from areal_lite.system.gpus import resolve_device, visible_gpus

    check_trainer(config.trainer, f"{prefix}trainer")
    if config.batch_size % config.trainer.data_parallel:
        raise ValueError(
            f"{prefix}batch_size={config.batch_size} is not a multiple of "
            f"{prefix}trainer.data_parallel={config.trainer.data_parallel}"
        )
    check_trainer_device(config.trainer, f"{prefix}trainer")
    ranks, gpus = config.trainer.world_size, visible_gpus()
    if resolve_device(config.trainer.device) == "cuda" and ranks > len(gpus):
        raise ValueError(
            f"{prefix}trainer has {ranks} ranks, and {len(gpus)} GPUs are visible: "
            f"set {prefix}trainer.data_parallel={len(gpus)}"
        )


def overrides_for_gpus(overrides: list[str]) -> list[str]:
    """Return the settings that the quickstart adds to `overrides` on a machine with GPUs.

    SGLang's kernels for GPUs need heads of 64 or more. One GPU is shared, and one process warms up.
    """
    from areal_lite.system import gpus

    if gpus.resolve_device("auto") != "cuda":
        return []
    chosen = any(item.lstrip("+").startswith("experiment=") for item in overrides)
    shared = ["+experiment=one_gpu"] if len(gpus.visible_gpus()) == 1 and not chosen else []
    return [*shared, "make_model.head_dim=64", "sft.trainer.data_parallel=1"]
