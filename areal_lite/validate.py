"""Rules of the configuration that need more than one field, or the world outside: checked before anything starts.

Each broken rule is a ValueError of one line that names the key, its value and what to do.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from areal_lite.config import (
    DataConfig,
    EvalCommandConfig,
    GenerateConfig,
    QuickstartConfig,
    RewardConfig,
    ServerConfig,
    SftConfig,
    TrainConfig,
    TrainerConfig,
)
from areal_lite.launch.placement import place, visible_gpus
from areal_lite.rewards.pool import load_function
from areal_lite.rollout.server import LOOPBACK, resolve_device

_CHOICES = {
    "data.source": ("addition", "jsonl", "hf"),
    "reward.on_failure": ("drop", "zero"),
    "server.device": ("auto", "cpu", "cuda"),
    "server.dtype": ("auto", "float32", "bfloat16", "float16"),
    "rollout.interrupt": ("in_place", "retract", "abort", "none"),
    "buffer.overdue": ("mask", "drop"),
    "algo.prox": ("recompute", "reuse", "loglinear"),
    "algo.behavior_weight": ("cap", "mask", "off"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.dtype": ("auto", "float32", "bfloat16"),
    "trainer.lr_schedule": ("constant", "linear", "cosine"),
    "sync.transport": ("distributed", "disk"),
    "logger.wandb": ("off", "offline", "online"),
}
_POSITIVE = (
    "server.count server.tensor_parallel rollout.group_size rollout.max_new_tokens rollout.max_concurrent reward.workers reward.timeout_s "
    "trainer.steps trainer.batch_groups trainer.minibatches trainer.tokens_per_microbatch trainer.tensor_parallel trainer.data_parallel "
    "trainer.lr data.max_digits sync.bucket_mb sync.timeout_s algo.behavior_cap"
).split()


def validate(config: Any) -> None:
    """Check one command's configuration. Raises ValueError."""
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        if value is not None and value not in choices:
            raise ValueError(f"{key}={value}: choose one of {', '.join(choices)}")
    for key in _POSITIVE:
        value = _get(config, key)
        if value is not None and value <= 0:
            raise ValueError(f"{key}={value}: must be more than 0")
    if isinstance(config, QuickstartConfig):
        _trainer(config.sft.trainer)
        _sft(config.sft)
    elif hasattr(config, "model"):
        _model_folder(config.model)
    if isinstance(config, (TrainConfig, EvalCommandConfig, GenerateConfig)):
        _servers(config.server)
        if config.rollout.temperature <= 0:
            raise ValueError(f"rollout.temperature={config.rollout.temperature}: must be more than 0 (evaluation adds a greedy completion)")
    if isinstance(config, (TrainConfig, EvalCommandConfig)):
        _reward(config.reward)
    if hasattr(config, "data"):
        _data(config.data)
    if isinstance(config, (TrainConfig, SftConfig)):
        _trainer(config.trainer)
    if isinstance(config, SftConfig):
        _sft(config)
    if isinstance(config, TrainConfig):
        _train(config)


def _get(config: Any, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section, None), name, None)


def _model_folder(model: str) -> None:
    for file in ("config.json", "tokenizer.json"):
        if not (Path(model) / file).is_file():
            raise ValueError(f"model={model}: no {file} there; give a Hugging Face checkpoint folder (`areal-lite make-model` writes a small one)")


def _servers(server: ServerConfig) -> None:
    if server.host not in LOOPBACK and not server.api_key:
        raise ValueError(f"server.host={server.host} is reachable from outside: set server.api_key, or use 127.0.0.1")
    if server.port:
        for port in range(server.port, server.port + server.count):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((server.host, port))
                except OSError as error:
                    raise ValueError(f"server.port={server.port}: port {port} cannot be used ({error.strerror}); 0 picks free ones") from None


def _reward(reward: RewardConfig) -> None:
    load_function(reward.function)


def _data(data: DataConfig) -> None:
    if data.source != "addition" and not data.path:
        raise ValueError(f"data.path is not set: data.source={data.source} needs one")
    if data.source == "jsonl" and not Path(data.path).exists():
        raise ValueError(f"data.path={data.path}: no such file")


def _trainer(trainer: TrainerConfig) -> None:
    if not 0 <= trainer.lr_warmup_steps <= trainer.steps:
        raise ValueError(f"trainer.lr_warmup_steps={trainer.lr_warmup_steps}: must be between 0 and trainer.steps={trainer.steps}")
    if trainer.batch_groups % (trainer.data_parallel * trainer.minibatches):
        raise ValueError(
            f"trainer.batch_groups={trainer.batch_groups} cannot be dealt equally to trainer.data_parallel={trainer.data_parallel} ranks"
            f" x trainer.minibatches={trainer.minibatches}: make it a multiple of {trainer.data_parallel * trainer.minibatches}"
        )


def _sft(config: SftConfig) -> None:
    if config.data.source != "addition":
        raise ValueError(f"data.source={config.data.source}: `sft` generates demonstrations of the addition task only")
    if not 0 <= config.forget_carry <= 1:
        raise ValueError(f"forget_carry={config.forget_carry}: a probability between 0 and 1")
    if config.batch_size % config.trainer.data_parallel:
        raise ValueError(f"batch_size={config.batch_size} is not a multiple of trainer.data_parallel={config.trainer.data_parallel}")


def _train(config: TrainConfig) -> None:
    if config.buffer.max_staleness < 0:
        raise ValueError(f"buffer.max_staleness={config.buffer.max_staleness}: 0 is synchronous, 1 or more asynchronous")
    if config.algo.prox == "reuse" and config.trainer.minibatches > 1:
        raise ValueError(f"algo.prox=reuse is exact with one minibatch only, trainer.minibatches={config.trainer.minibatches}: use recompute")
    if config.rollout.group_size > config.rollout.max_concurrent:
        raise ValueError(f"rollout.max_concurrent={config.rollout.max_concurrent} is less than one group (rollout.group_size={config.rollout.group_size})")
    if not config.algo.behavior_cap > 1:
        raise ValueError(f"algo.behavior_cap={config.algo.behavior_cap}: must be more than 1, the weight of a token that is on policy")
    if config.algo.dual_clip is not None and config.algo.dual_clip <= 1:
        raise ValueError(f"algo.dual_clip={config.algo.dual_clip}: must be more than 1, or null")
    if config.eval.problems < 0 or config.eval.samples < 0:
        raise ValueError("eval.problems and eval.samples must not be negative")
    if config.eval.problems and config.data.source == "jsonl" and not (config.data.eval_path and Path(config.data.eval_path).exists()):
        raise ValueError(f"data.eval_path={config.data.eval_path}: no such file; give held-out problems, or set eval.problems=0")
    gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
    place(gpus, config.trainer, config.server, config.sync.transport)
    run_dir = Path(config.run_dir)
    if any((run_dir / file).exists() for file in ("config.yaml", "metrics.jsonl", "trajectories.sqlite")):
        raise ValueError(f"run_dir={config.run_dir} holds a run already: choose another folder or remove it")
