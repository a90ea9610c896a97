"""Rules over several settings that need nothing but the settings.

A broken rule is a ValueError of one line that names the keys, their values and the remedy.
`cautions` are about settings that are allowed but may not do what they are for.
launch/preflight.py checks what rules cannot: the machine, files, and imported functions.
"""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from areal_lite.config.commands import TrainConfig
from areal_lite.config.data import reference_folders, sampling_of_evaluation, source_configs
from areal_lite.config.fields import keys_of
from areal_lite.config.sections import (
    MAX_PROMPTS,
    WHOLE_VOCABULARY,
    LoraConfig,
    ServerConfig,
    TrainerConfig,
)
from areal_lite.system.network import LOOPBACK, NODE

# SGLang ends a server whose scheduler makes no step for this many seconds, even a paused one.
_SERVER_WATCHDOG_S = 300.0
_COUNT = (lambda value: type(value) is int and value >= 1), "an integer from 1"
# Options of SGLang that are computed with: whether a value, which is not null, is right.
_SERVER_ARGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mem_fraction_static": (
        lambda value: type(value) in (int, float) and 0 < value <= 1,
        "more than 0 and at most 1",
    ),
    "max_running_requests": _COUNT,
    "max_total_tokens": _COUNT,
    "watchdog_timeout": (
        lambda value: type(value) in (int, float) and value > 0,
        "a number of seconds above 0",
    ),
    "speculative_algorithm": (lambda value: isinstance(value, str), "a name"),
}
CLIPPED_LOSSES = ("ppo", "gspo", "cispo")
_MAX_STOP_CHARACTERS = 1000
_LEAST_TEMPERATURE = 0.001  # the trainer divides by it
_SMALLER_LR_FROM = 32  # lag, in steps, from which the learning rate of fresh data was too large


def check_rules(config: Any) -> None:
    """Check every rule that any command's configuration is subject to. Raises ValueError."""
    for key in keys_of(type(config)):
        # An empty folder would be the working directory.
        if key.rpartition(".")[2] in ("model", "out", "run_dir") and attrgetter(key)(config) == "":
            raise ValueError(f"{key} is empty: give a folder")
    if hasattr(config, "server"):
        _check_server(config.server)
    if hasattr(config, "rollout"):
        check_stop("rollout.stop", config.rollout.stop)
        check_stop("sampling.stop of evaluation", sampling_of_evaluation(config).stop)
    if isinstance(config, TrainConfig):
        source_configs(config)  # checks their settings
        check_trainer(config.trainer)
        _check_objective(config)
        _check_divergence(config)
        _check_groups(config)
        check_buffer(config)
        _check_evaluation(config)
        check_push(config)


def _check_server(server: ServerConfig) -> None:
    if server.host not in LOOPBACK and not server.api_key:
        raise ValueError(
            f"server.host={server.host} is reachable from outside: put a key into an environment "
            "variable NAME and set server.api_key='${oc.env:NAME}', or use 127.0.0.1"
        )
    for key, (is_right, wanted) in _SERVER_ARGS.items():
        if (value := server.args.get(key)) is not None and not is_right(value):
            raise ValueError(f"server.args.{key}={value}: must be {wanted}")


def check_stop(key: str, stop: list[Any]) -> None:
    for item in stop:
        is_id = type(item) is int and 0 <= item < 2**31
        if not is_id and not (isinstance(item, str) and 0 < len(item) <= _MAX_STOP_CHARACTERS):
            raise ValueError(
                f"{key}: {item!r:.100} is neither a text of 1 to {_MAX_STOP_CHARACTERS} characters "
                "nor a token id"
            )


def check_trainer(trainer: TrainerConfig, key: str = "trainer") -> None:
    """Check the layout, the schedule and the batch of the trainer at `key`."""
    if trainer.virtual_pipeline > 1 and trainer.pipeline_parallel == 1:
        raise ValueError(
            f"{key}.virtual_pipeline={trainer.virtual_pipeline} interleaves pipeline stages: "
            f"set {key}.pipeline_parallel to 2 or more"
        )
    ranks = trainer.tensor_parallel * trainer.context_parallel * trainer.data_parallel
    if ranks % trainer.expert_parallel:
        raise ValueError(
            f"{key}.expert_parallel={trainer.expert_parallel} does not divide "
            f"{key}.tensor_parallel={trainer.tensor_parallel} x "
            f"context_parallel={trainer.context_parallel} x "
            f"data_parallel={trainer.data_parallel}, the ranks that share the experts"
        )
    updates = trainer.steps * trainer.minibatches
    if trainer.lr_warmup_steps > updates:
        raise ValueError(
            f"{key}.lr_warmup_steps={trainer.lr_warmup_steps}: must be at most the {updates} "
            f"updates of the run ({key}.steps x {key}.minibatches)"
        )
    if trainer.min_lr > trainer.lr:
        raise ValueError(f"{key}.min_lr={trainer.min_lr}: must be at most {key}.lr={trainer.lr}")
    check_targets(trainer.lora, key=f"{key}.lora")
    if trainer.lora.rank and trainer.optimizer == "muon":
        raise ValueError(f"{key}.optimizer=muon takes no adapters: set {key}.lora.rank=0, or adam")
    shards = trainer.data_parallel * trainer.minibatches
    if trainer.batch_groups % shards:
        raise ValueError(
            f"{key}.batch_groups={trainer.batch_groups} cannot be dealt equally to "
            f"{key}.data_parallel={trainer.data_parallel} ranks x "
            f"{key}.minibatches={trainer.minibatches}: make it a multiple of {shards}"
        )


def check_targets(lora: LoraConfig, has_experts: bool = False, key: str = "trainer.lora") -> None:
    """Check the layers that get adapters, in a model with or without experts."""
    if not lora.rank:
        return
    if not lora.targets or len(set(lora.targets)) < len(lora.targets):
        raise ValueError(f"{key}.targets={lora.targets}: name one or more layers, each once")
    if has_experts and {"fc1", "fc2"} & set(lora.targets):
        raise ValueError(
            f"{key}.targets={lora.targets}: experts take no adapters, so set "
            f"{key}.targets=[qkv,proj] for a mixture of experts"
        )


def _check_objective(config: TrainConfig) -> None:
    algo, trainer = config.algo, config.trainer
    no_target = not algo.kl.coef or algo.entropy_coef or algo.advantage.estimator == "gae"
    if algo.loss == "tb" and no_target:
        raise ValueError(
            "algo.loss=tb has a KL term in its target, and no advantages: set algo.kl.coef above "
            "0, algo.entropy_coef=0 and an estimator other than gae"
        )
    if algo.advantage.credit == "turns" and (
        algo.loss == "tb" or algo.advantage.estimator == "off"
    ):
        raise ValueError(
            "algo.advantage.credit=turns divides rewards among turns, and neither algo.loss=tb nor "
            "algo.advantage.estimator=off has advantages: use credit=outcome"
        )
    margin, limit = algo.shaping.overlong_margin, config.rollout.max_new_tokens
    if margin > limit:
        raise ValueError(
            f"algo.shaping.overlong_margin={margin}: choose 0 to rollout.max_new_tokens={limit}"
        )
    if not algo.routing_replay:
        return
    if trainer.recompute == "full" and trainer.pipeline_parallel > 1:
        raise ValueError(
            f"trainer.recompute=full with trainer.pipeline_parallel={trainer.pipeline_parallel}: "
            "layers are computed again after the routes of later microbatches were set, so with "
            "algo.routing_replay=true use recompute=selective or one stage"
        )
    if config.server.args.get("enable_return_routed_experts", True) is not True:
        raise ValueError(
            "server.args.enable_return_routed_experts=false: algo.routing_replay=true needs the "
            "routes of the servers, so remove it"
        )


def _check_divergence(config: TrainConfig) -> None:
    algo, kl = config.algo, config.algo.kl
    if kl.coef and None in reference_folders(config).values():
        where = " or data.sources.NAME.reference" if config.data.sources else ""
        raise ValueError(
            f"algo.kl.coef={kl.coef} needs a reference policy: set algo.reference{where} to a "
            "checkpoint folder (algo.reference='${model}' is the initial policy)"
        )
    if kl.coef and kl.into == "advantage" and kl.estimator != "k1":
        raise ValueError(
            f"algo.kl.estimator={kl.estimator}: algo.kl.into=advantage follows the gradient "
            "of the KL divergence with k1 only, set algo.kl.estimator=k1"
        )
    if kl.coef and kl.into == "loss" and kl.estimator == "k1" and algo.loss != "tb":
        raise ValueError(
            "algo.kl.estimator=k1: in the loss its gradient is 0 on average, so nothing holds the "
            "policy near the reference: set k2 or k3, or algo.kl.into=reward"
        )
    before_loss = kl.coef and kl.into != "loss"
    if algo.prox == "loglinear" and (before_loss or algo.loss == "tb"):
        cause = f"algo.kl.into={kl.into}" if before_loss else "algo.loss=tb"
        raise ValueError(
            f"algo.prox=loglinear: {cause} needs the log-probs before the update, use recompute"
        )
    teaches = ":" in algo.loss or (kl.coef and kl.into != "reward")
    if algo.advantage.estimator == "off" and not teaches:
        raise ValueError(
            "algo.advantage.estimator=off leaves nothing to learn from: set algo.kl.coef, and "
            "algo.kl.into=advantage or loss"
        )


def _check_groups(config: TrainConfig) -> None:
    """Check that a group fits, and that its members can differ and be compared."""
    rollout, advantage = config.rollout, config.algo.advantage
    if rollout.temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"rollout.temperature={rollout.temperature:g}: training needs answers that differ, so "
            f"at least {_LEAST_TEMPERATURE}; for greedy evaluation, eval.sampling.temperature=0"
        )
    if rollout.group_size > rollout.max_concurrent:
        raise ValueError(
            f"rollout.max_concurrent={rollout.max_concurrent} is less than one group "
            f"(rollout.group_size={rollout.group_size})"
        )
    kind = advantage.estimator, advantage.mean
    if (*kind, advantage.std) == ("grpo", "batch", "group"):
        raise ValueError(
            "algo.advantage.mean=batch with std=group divides by 0 in a group of equal rewards: "
            "set algo.advantage.std=batch, or off"
        )
    compares = advantage.estimator == "rloo" or kind == ("grpo", "group")
    if rollout.group_size == 1 and (config.algo.loss == "tb" or compares):
        raise ValueError(
            "rollout.group_size=1: a group of one has nothing to be compared with; use 2 or more, "
            "or algo.advantage.estimator=reinforce_pp or gae"
        )
    if "zero_variance" in rollout.filters and advantage.estimator == "off":
        raise ValueError(
            "rollout.filters=[zero_variance] leaves out groups of equal rewards, which "
            "algo.advantage.estimator=off learns from, too: leave it out"
        )
    if "zero_variance" in rollout.filters and rollout.group_size == 1:
        raise ValueError(
            "rollout.filters=[zero_variance] would filter every group of rollout.group_size=1: "
            "one reward has no variance"
        )


def check_buffer(config: TrainConfig) -> None:
    """Check that batches can be made within the staleness bound, or drawn for replay."""
    if config.buffer.replay.capacity:
        return _check_replay(config)
    every, bound = config.sync.every, config.buffer.max_staleness
    needed = min(every, config.trainer.steps) - 1
    if bound < needed:
        raise ValueError(
            f"sync.every={every} trains {needed + 1} steps on what one version of the weights "
            f"sampled, and buffer.max_staleness={bound} forbids tokens that are {needed} steps "
            f"old: set it to {needed} or more, or sync.every=1"
        )
    if config.max_lead < needed:
        window, batch = config.buffer.window, config.trainer.batch_groups
        least = bound - config.max_lead + needed
        raise ValueError(
            f"buffer.window={window} can make a group {bound - config.max_lead} steps older "
            f"(trainer.batch_groups={batch}), more than buffer.max_staleness={bound} allows with "
            f"sync.every={every}: set buffer.max_staleness to {least} or more, or lower the window"
        )


def _check_replay(config: TrainConfig) -> None:
    replay, group_size = config.buffer.replay, config.rollout.group_size
    capacity = f"buffer.replay.capacity={replay.capacity}"
    if config.buffer.window is not None:
        raise ValueError(
            f"buffer.window={config.buffer.window} is for batches in order, and replay draws them: "
            "unset one"
        )
    if config.algo.loss != "tb":
        raise ValueError(
            f"{capacity} trains on tokens of any age, which algo.loss={config.algo.loss} cannot: "
            "set algo.loss=tb"
        )
    if replay.capacity < group_size:
        raise ValueError(f"{capacity} holds less than a group (rollout.group_size={group_size})")
    if config.trainer.batch_groups > MAX_PROMPTS:
        raise ValueError(
            f"trainer.batch_groups={config.trainer.batch_groups} is more than the {MAX_PROMPTS} "
            "prompts that a replay buffer keeps"
        )
    if config.rollout.retire_above is not None:
        raise ValueError(
            f"rollout.retire_above does not go with {capacity}, for which generation never stops: "
            "unset one"
        )


def _check_evaluation(config: TrainConfig) -> None:
    sets = config.eval.sets
    if len({Path(path).stem for path in sets}) < len(sets):
        raise ValueError(
            f"eval.sets={sets}: two have the same name, by which their results are told apart"
        )
    if sets and not config.eval.problems:
        raise ValueError(
            f"eval.sets={sets} are not evaluated with eval.problems=0: set how many of each"
        )
    if sets and config.data.sources:
        raise ValueError(
            f"eval.sets={sets} are for a single source: set data.sources.NAME.eval_path instead"
        )


def check_push(config: TrainConfig) -> None:
    """Check that the servers can take the weights that the trainer pushes."""
    args, sync = config.server.args, config.sync
    refused = {
        "quantization": "a push writes unquantized weights and no scales",
        "preferred_sampling_params": WHOLE_VOCABULARY,
        "enable_symm_mem": "it changes NCCL's memory in the servers only, and the trainer could "
        "not connect to them",
    }
    for key, reason in refused.items():
        if args.get(key) not in (None, False):
            raise ValueError(f"server.args.{key}={args[key]}: {reason}, so remove it")
    check_devices(config.trainer.device, config.server.device, sync.transport)
    if sync.transport == "memory" and config.server.tensor_parallel > 1:
        raise ValueError(
            f"server.tensor_parallel={config.server.tensor_parallel}: sync.transport=memory is for "
            "servers of one process; use sync.transport=distributed"
        )
    if sync.transport == "adapters" and not config.trainer.lora.rank:
        raise ValueError(
            "sync.transport=adapters needs adapters: set trainer.lora.rank, or use distributed"
        )
    if sync.transport == "adapters" and sync.verify:
        raise ValueError(
            "sync.verify=true with sync.transport=adapters: it compares whole weights bit by bit, "
            "and servers that add adapters by themselves may round otherwise: leave one out"
        )
    _check_turns(config)
    watchdog_s = args.get("watchdog_timeout") or _SERVER_WATCHDOG_S
    if sync.timeout_s >= watchdog_s:
        raise ValueError(
            f"sync.timeout_s={sync.timeout_s:g} must be less than the {watchdog_s:g} s after which "
            "SGLang ends a paused server: lower it, or raise server.args.watchdog_timeout"
        )


def _check_turns(config: TrainConfig) -> None:
    """Check that servers can leave their GPUs to the trainer in its steps."""
    if not config.server.takes_turns:
        return
    for key, value, wanted, reason in (
        ("rollout.interrupt", config.rollout.interrupt, "retract", "the KV cache is given back"),
        ("sync.every", config.sync.every, 1, "servers wake with the weights of a push"),
        ("sync.transport", config.sync.transport, "disk", "NCCL refuses two ranks on one GPU"),
        ("trainer.offload", config.trainer.offload, True, "the trainer leaves the GPUs, too"),
    ):
        if value != wanted:
            raise ValueError(
                f"server.args.enable_memory_saver=true lets servers and trainer use GPUs in turn, "
                f"and {reason}: set {key}={str(wanted).lower()}, not {str(value).lower()}, or see "
                "+experiment=in_turn"
            )
    if config.server.host == NODE:
        raise ValueError(
            "server.args.enable_memory_saver=true is for one machine, and server.host=node for "
            "several: remove one of them"
        )


def check_devices(trainer: str, server: str, transport: str) -> None:
    """Check that weights get from the trainer's device to the servers'. `auto` may be either."""
    broadcasts = transport in ("auto", "distributed", "adapters", "delta")
    if broadcasts and {trainer, server} == {"cpu", "cuda"}:
        raise ValueError(
            f"sync.transport={transport} cannot connect trainer.device={trainer} to "
            f"server.device={server} (auto is cuda on a machine with a GPU): use "
            "sync.transport=disk, or the same device for both"
        )
    if transport == "memory" and server == "cuda":
        raise ValueError(
            "sync.transport=memory is for servers without GPUs, and server.device is cuda (auto is "
            "cuda on a machine with a GPU): use sync.transport=distributed"
        )


def cautions(config: TrainConfig) -> list[str]:
    """Return what a run with these settings should know beforehand."""
    found = []
    algo, allowed = config.algo, config.buffer.max_staleness
    shown = "arXiv 2505.24298: AIME24 42.0 -> 41.0 at 8, 38.7 at 16"
    most, objective = 8, "a bounded weight"
    if algo.loss in CLIPPED_LOSSES and not algo.decoupled:
        shown = "arXiv 2505.24298: AIME24 42.0 -> 23.3 at 4"
        most, objective = 2, "a clip around the behavior policy"
    elif algo.correction.mode == "off":
        shown = "nothing accounts for the policy that sampled"
        most, objective = 1, "a weight of 1"
    # Trajectory Balance tolerates any staleness. What a loss of your own tolerates is not known.
    if allowed > most and algo.loss != "tb" and ":" not in algo.loss:
        found.append(
            f"buffer.max_staleness={allowed} is more than the {most} that {objective} is known to "
            f"tolerate ({shown}): lower it, or use algo.loss=examples.recipes.stale:loss"
        )
    if allowed >= _SMALLER_LR_FROM and algo.loss in CLIPPED_LOSSES:
        found.append(
            f"trainer.lr={config.trainer.lr:g} is too large at buffer.max_staleness={allowed} if "
            "it is the learning rate of fresh data. 0.6 of it was right at a lag of 32, and a "
            "third at 64 (benchmarks/results/staleness/README.md)"
        )
    return found
