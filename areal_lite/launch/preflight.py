"""Rules of the configuration that need more than one field, or the world outside: checked before anything starts.

Each broken rule is a ValueError of one line that names the key, its value and what to do.
"""

from __future__ import annotations

import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_lite.config import (
    DataConfig,
    EvalCommandConfig,
    GenerateConfig,
    QuickstartConfig,
    RewardConfig,
    ServerConfig,
    SftConfig,
    SlurmConfig,
    TrainConfig,
)
from areal_lite.config.rules import check_trainer
from areal_lite.controller.filters import load_filters
from areal_lite.controller.stored_run import bound_of
from areal_lite.launch.placement import place
from areal_lite.launch.slurm import layout
from areal_lite.rewards.function import load_reward_function
from areal_lite.rollout.runner import load_workflow
from areal_lite.system.gpus import resolve_device, visible_gpus
from areal_lite.system.network import LOOPBACK, NODE, listen_address

_CHOICES = {
    "resume": ("never", "auto"),
    "data.source": ("addition", "jsonl", "hf"),
    "reward.on_failure": ("drop", "zero"),
    "server.device": ("auto", "cpu", "cuda"),
    "server.dtype": ("auto", "float32", "bfloat16", "float16"),
    "rollout.interrupt": ("in_place", "retract", "abort", "none"),
    "buffer.overdue": ("mask", "drop"),
    "buffer.replay.by": ("reward", "uniform"),
    "algo.prox": ("recompute", "reuse", "loglinear"),
    "algo.loss": ("ppo", "gspo", "cispo", "reinforce", "tb"),
    "algo.reduction": ("token", "sequence", "constant"),
    "algo.correction.mode": ("cap", "mask", "off"),
    "algo.correction.level": ("token", "geometric", "product"),
    "algo.advantage.estimator": ("grpo", "rloo", "reinforce_pp", "gae"),
    "algo.advantage.mean": ("group", "batch"),
    "algo.advantage.std": ("group", "batch", "off"),
    "algo.kl.estimator": ("k1", "k2", "k3"),
    "algo.kl.into": ("loss", "reward"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.dtype": ("auto", "float32", "bfloat16"),
    "trainer.recompute": ("none", "selective", "full"),
    "trainer.lr_schedule": ("constant", "linear", "cosine", "wsd"),
    "sync.transport": ("distributed", "disk"),
    "logger.wandb": ("off", "offline", "online"),
    "cluster.container": ("none", "pyxis", "apptainer"),
}
_POSITIVE = (
    "server.count server.tensor_parallel server.health_interval_s server.health_timeout_s server.start_timeout_s rollout.group_size rollout.max_new_tokens rollout.max_concurrent reward.workers reward.timeout_s "
    "trainer.steps trainer.batch_groups trainer.minibatches trainer.tokens_per_microbatch trainer.tensor_parallel trainer.data_parallel "
    "trainer.pipeline_parallel trainer.virtual_pipeline trainer.context_parallel trainer.expert_parallel "
    "buffer.replay.temperature trainer.lr trainer.max_skipped_steps data.max_digits sync.bucket_mb sync.timeout_s algo.critic.lr cluster.nodes cluster.chain"
).split()


def check_config(config: Any) -> None:
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
        check_trainer(config.sft.trainer)
        _sft(config.sft)
    elif hasattr(config, "model"):
        _model_folder(config.model)
    if isinstance(config, (TrainConfig, EvalCommandConfig, GenerateConfig)):
        _servers(config.server)
        if config.rollout.temperature <= 0:
            raise ValueError(
                f"rollout.temperature={config.rollout.temperature}: must be more than 0 (evaluation adds a greedy completion)"
            )
    if isinstance(config, (TrainConfig, EvalCommandConfig)):
        _reward(config.reward)
        load_workflow(config.rollout)
    if hasattr(config, "data"):
        _data(config.data)
    if isinstance(config, (TrainConfig, SftConfig)):
        check_trainer(config.trainer)
    if isinstance(config, SftConfig):
        _sft(config)
    if isinstance(config, TrainConfig):
        _train(config)
    if isinstance(config, SlurmConfig):
        _cluster(config)


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def _model_folder(model: str, key: str = "model") -> None:
    for file in ("config.json", "tokenizer.json"):
        if not (Path(model) / file).is_file():
            raise ValueError(
                f"{key}={model}: no {file} there; give a Hugging Face checkpoint folder (`areal-lite make-model` writes a small one)"
            )


def _servers(server: ServerConfig) -> None:
    if server.host not in LOOPBACK and not server.api_key:
        raise ValueError(
            f"server.host={server.host} is reachable from outside: set server.api_key, or use 127.0.0.1"
        )
    if server.port:
        for port in range(server.port, server.port + server.count):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((listen_address(server.host), port))
                except OSError as error:
                    raise ValueError(
                        f"server.port={server.port}: port {port} cannot be used ({error.strerror}); 0 picks free ones"
                    ) from None


def _reward(reward: RewardConfig) -> None:
    load_reward_function(reward.function)


def _data(data: DataConfig) -> None:
    if data.source != "addition" and not data.path:
        raise ValueError(f"data.path is not set: data.source={data.source} needs one")
    if data.source == "jsonl" and not Path(data.path).exists():
        raise ValueError(f"data.path={data.path}: no such file")


def _sft(config: SftConfig) -> None:
    if config.data.source != "addition":
        raise ValueError(
            f"data.source={config.data.source}: `sft` generates demonstrations of the addition task only"
        )
    if not 0 <= config.forget_carry <= 1:
        raise ValueError(f"forget_carry={config.forget_carry}: a probability between 0 and 1")
    if config.batch_size % config.trainer.data_parallel:
        raise ValueError(
            f"batch_size={config.batch_size} is not a multiple of trainer.data_parallel={config.trainer.data_parallel}"
        )


def _algo(config: TrainConfig) -> None:
    """What one objective needs of another setting."""
    algo, correction = config.algo, config.algo.correction
    if algo.prox == "reuse" and config.trainer.minibatches > 1:
        raise ValueError(
            f"algo.prox=reuse is exact with one minibatch only, trainer.minibatches={config.trainer.minibatches}: use recompute"
        )
    early = {
        "algo.kl.into=reward": algo.kl.coef and algo.kl.into == "reward",
        "algo.loss=tb": algo.loss == "tb",
    }
    for key in [key for key, asked in early.items() if asked and algo.prox != "recompute"]:
        raise ValueError(
            f"algo.prox={algo.prox}: {key} needs the log-probs before the update, use recompute"
        )
    if algo.reference is None and (algo.kl.coef or algo.loss == "tb"):
        asked = "algo.loss=tb" if algo.loss == "tb" else f"algo.kl.coef={algo.kl.coef}"
        raise ValueError(
            f"{asked} needs a reference policy: set algo.reference to a checkpoint folder (algo.reference='${{model}}': the start)"
        )
    if algo.reference not in (
        None,
        config.model,
    ):  # the model itself has been checked, or is yet to be made
        _model_folder(algo.reference, "algo.reference")
    if algo.loss == "tb":
        for key in ("tb_beta", "tb_beta_end", "tb_beta_steps"):
            if (value := getattr(algo, key)) is not None and value <= 0:
                raise ValueError(f"algo.{key}={value}: must be more than 0")
        if algo.kl.coef or algo.entropy_coef or algo.advantage.estimator == "gae":
            raise ValueError(
                "algo.loss=tb has its own KL (algo.tb_beta) and no advantages: set algo.kl.coef=0, algo.entropy_coef=0 and another estimator than gae"
            )
    if not correction.cap >= 1 or not 0 <= (correction.low or 0.0) <= 1:
        raise ValueError(
            f"algo.correction.cap={correction.cap}, low={correction.low}: need low <= 1 <= cap, as the weight of a token that is on policy is 1"
        )
    if correction.veto is not None and not (
        len(correction.veto) == 2 and 0 <= correction.veto[0] < 1 < correction.veto[1]
    ):
        raise ValueError(
            f"algo.correction.veto={list(correction.veto)}: give [low, high] with low < 1 < high, or null"
        )
    if algo.dual_clip is not None and algo.dual_clip <= 1:
        raise ValueError(f"algo.dual_clip={algo.dual_clip}: must be more than 1, or null")
    if algo.eps_low < 0 or algo.eps_high < 0:
        raise ValueError(
            f"algo.eps_low={algo.eps_low}, algo.eps_high={algo.eps_high}: must not be negative"
        )
    if not 0 <= algo.shaping.overlong_margin <= config.rollout.max_new_tokens:
        raise ValueError(
            f"algo.shaping.overlong_margin={algo.shaping.overlong_margin}: choose 0 to rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    if config.rollout.group_size == 1 and (
        algo.loss == "tb"
        or (algo.advantage.estimator in ("grpo", "rloo") and algo.advantage.mean == "group")
    ):
        raise ValueError(
            "rollout.group_size=1: a group of one has nothing to be compared with; use 2 or more, or algo.advantage.estimator=reinforce_pp or gae"
        )


def _train(config: TrainConfig) -> None:
    if config.buffer.max_staleness < 0:
        raise ValueError(
            f"buffer.max_staleness={config.buffer.max_staleness}: 0 is synchronous, 1 or more asynchronous"
        )
    if config.rollout.group_size > config.rollout.max_concurrent:
        raise ValueError(
            f"rollout.max_concurrent={config.rollout.max_concurrent} is less than one group (rollout.group_size={config.rollout.group_size})"
        )
    _algo(config)
    if config.eval.problems < 0 or config.eval.samples < 0:
        raise ValueError("eval.problems and eval.samples must not be negative")
    if (
        config.eval.problems
        and config.data.source == "jsonl"
        and not (config.data.eval_path and Path(config.data.eval_path).exists())
    ):
        raise ValueError(
            f"data.eval_path={config.data.eval_path}: no such file; give held-out problems, or set eval.problems=0"
        )
    if config.server.host != NODE:  # else other machines' GPUs count, not this one's
        gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
        place(gpus, config.trainer, config.server, config.sync.transport)
    _selection(config)
    _replay(config)
    _debug(config)
    _eval_sets(config)
    if any(
        (Path(config.run_dir) / file).exists()
        for file in ("config.yaml", "metrics.jsonl", "trajectories.sqlite", "checkpoints")
    ):
        _resume(config)


def _resume(config: TrainConfig) -> None:
    """`run_dir` holds a run: may it go on as it is configured now?"""
    if config.resume == "never":
        raise ValueError(
            f"run_dir={config.run_dir} holds a run already: choose another folder, remove it, or go on with it by resume=auto"
        )
    if config.debug != "off":
        raise ValueError(f"debug={config.debug} goes on with nothing: choose another run_dir")
    if isinstance(config, QuickstartConfig):
        raise ValueError(
            "resume=auto: quickstart begins anew; go on with its run by `areal-lite train` and its settings"
        )
    path = Path(config.run_dir) / "config.yaml"
    if not path.is_file():
        raise ValueError(
            f"run_dir={config.run_dir}: there is no config.yaml to go on by, choose another folder"
        )
    began = OmegaConf.load(path)
    same = [
        "model",
        *(
            f"data.{field.name}"
            for field in fields(DataConfig)
            if not field.name.startswith("eval_")
        ),
    ]
    for key in same:
        if (was := OmegaConf.select(began, key)) != _get(config, key):
            raise ValueError(
                f"{key}={_get(config, key)}: the run in run_dir={config.run_dir} began with {was} and can only go on with that"
            )
    if bool(was := OmegaConf.select(began, "buffer.replay.capacity")) != bool(
        config.buffer.replay.capacity
    ):
        raise ValueError(
            f"buffer.replay.capacity={config.buffer.replay.capacity}: the run began with {was}, and 0 and others cannot be exchanged"
        )


def _cluster(config: SlurmConfig) -> None:
    cluster = config.cluster
    if cluster.container != "none" and not cluster.image:
        raise ValueError(f"cluster.container={cluster.container}: set cluster.image")
    if config.debug != "off":
        raise ValueError(f"debug={config.debug} is for one machine: use areal-lite train")
    if cluster.stop_before_s < 0:
        raise ValueError(f"cluster.stop_before_s={cluster.stop_before_s}: seconds, or 0 for never")
    if config.server.host in LOOPBACK and cluster.nodes > 1:
        raise ValueError(
            f"server.host={config.server.host}: other nodes cannot reach that, use node"
        )
    if (
        config.sync.disk_path
        and config.sync.transport == "disk"
        and cluster.nodes > 1
        and config.sync.disk_path.startswith("/dev/shm")
    ):
        raise ValueError(
            f"sync.disk_path={config.sync.disk_path} is of one node only: use a folder that all nodes see"
        )
    layout(config)


def _selection(config: TrainConfig) -> None:
    """Which groups are trained on, and which prompts are asked."""
    rollout = config.rollout
    load_filters(rollout.filters, rollout.active_sampling)
    if rollout.active_sampling and rollout.group_size == 1:
        raise ValueError(
            "rollout.active_sampling=true would filter every group of rollout.group_size=1: one reward has no variance"
        )
    if rollout.retire_above is not None and not 0 <= rollout.retire_above < 1:
        raise ValueError(
            f"rollout.retire_above={rollout.retire_above}: a share of trajectories, 0 or more and less than 1, or null"
        )
    if rollout.retire_above is not None and config.data.source == "addition":
        raise ValueError(
            "rollout.retire_above needs a data set whose prompts come again: data.source=addition makes new ones for ever"
        )


def _eval_sets(config: TrainConfig) -> None:
    for path in config.eval.sets:
        if path.endswith(".jsonl") and not Path(path).is_file():
            raise ValueError(f"eval.sets: {path}: no such file")
    if len({Path(path).stem for path in config.eval.sets}) < len(config.eval.sets):
        raise ValueError(
            f"eval.sets={config.eval.sets}: two have the same name, by which their results are told apart"
        )
    if config.eval.sets and not config.eval.problems:
        raise ValueError("eval.sets are not evaluated with eval.problems=0: set how many of each")


def _debug(config: TrainConfig) -> None:
    if config.debug not in ("off", "rollout_only", "train_only"):
        raise ValueError(f"debug={config.debug}: choose one of off, rollout_only, train_only")
    if (config.debug == "train_only") != (config.debug_run is not None):
        raise ValueError(
            f"debug={config.debug}, debug_run={config.debug_run}: train_only needs a stored run, and nothing else takes one"
        )
    if config.debug == "train_only":
        bound_of(Path(config.debug_run))
        if config.eval.problems or config.buffer.replay.capacity:
            raise ValueError(
                "debug=train_only has no servers: set eval.problems=0 and buffer.replay.capacity=0"
            )
    if config.debug == "rollout_only" and config.buffer.replay.capacity:
        raise ValueError(
            "debug=rollout_only stores a number of groups, and buffer.replay.capacity generates without end: set it to 0"
        )


def _replay(config: TrainConfig) -> None:
    replay = config.buffer.replay
    if replay.capacity and config.algo.loss != "tb":
        raise ValueError(
            f"buffer.replay.capacity={replay.capacity} trains on tokens of any age, which algo.loss={config.algo.loss} cannot: set algo.loss=tb"
        )
    if replay.capacity and replay.capacity < config.rollout.group_size:
        raise ValueError(
            f"buffer.replay.capacity={replay.capacity} holds less than a group (rollout.group_size={config.rollout.group_size})"
        )
    if replay.capacity and config.rollout.group_size == 1:
        raise ValueError(
            "buffer.replay balances the trajectories of a prompt against each other: rollout.group_size must be 2 or more"
        )
    if replay.capacity and replay.max_prompts < config.trainer.batch_groups:
        batch = config.trainer.batch_groups
        raise ValueError(
            f"buffer.replay.max_prompts={replay.max_prompts} is less than a batch (trainer.batch_groups={batch})"
        )
    if not 0 <= replay.recency_probability <= 1:
        raise ValueError(
            f"buffer.replay.recency_probability={replay.recency_probability}: a probability between 0 and 1"
        )
    for key, asked in {
        "buffer.fixed_lag": config.buffer.fixed_lag,
        "rollout.retire_above": config.rollout.retire_above is not None,
    }.items():
        if replay.capacity and asked:
            raise ValueError(
                f"{key} does not go with buffer.replay.capacity={replay.capacity}, for which generation never stops"
            )
