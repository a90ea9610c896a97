"""Rules over several settings that need nothing but the settings.

A broken rule is a ValueError of one line that names the keys, their values and the remedy. A
`Finding` is about settings that are allowed but may not do what they are for: every command shows
its cautions, and the dry run also the lines of the plan. The rules over the objective are in
algo_rules.py. launch/preflight.py checks what rules cannot: the machine, files, and imported
functions.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areal_lite.config.algo import AlgoConfig
from areal_lite.config.algo_rules import check_algo
from areal_lite.config.commands import SlurmConfig, TrainConfig
from areal_lite.config.data import DataConfig, Sampled, naming, source_configs
from areal_lite.config.fields import keys_of
from areal_lite.config.rollout import MAX_PROMPTS, WHOLE_VOCABULARY
from areal_lite.config.servers import ServerConfig
from areal_lite.config.trainer import LoraConfig, TrainerConfig
from areal_lite.system.network import LOOPBACK


def check_rules(config: Any) -> None:
    """Check every rule that any command's configuration is subject to. Raises ValueError."""
    check_folders(config)
    if hasattr(config, "server"):
        check_server(config.server)
    if isinstance(config, TrainConfig):
        check_sources(config)
        check_training(config)
    if isinstance(config, SlurmConfig):
        check_cluster(config)


def check_folders(config: Any) -> None:
    """Check that no folder is empty text, which would mean the working directory."""
    for key in keys_of(type(config)):
        if key.rpartition(".")[2] in ("model", "out", "run_dir") and attrgetter(key)(config) == "":
            raise ValueError(f"{key} is empty: give a folder")


def check_sources(config: Sampled) -> None:
    """Check the data of each source."""
    for name, own in source_configs(config).items():
        with naming(name):
            check_data(own.data)


def check_data(data: DataConfig) -> None:
    if data.source in ("jsonl", "hf") and not data.path:
        raise ValueError(f"data.path is not set: data.source={data.source} needs it")


def check_server(server: ServerConfig) -> None:
    if server.host not in LOOPBACK and not server.api_key:
        raise ValueError(
            f"server.host={server.host} is reachable from outside: "
            "set server.api_key, or use 127.0.0.1"
        )
    share, running = server.mem_fraction, server.max_running_requests
    if share is not None and not (isinstance(share, float | int) and 0 < share <= 1):
        raise ValueError(
            f"server.args.mem_fraction_static={share}: must be more than 0 and at most 1"
        )
    if running is not None and not (isinstance(running, int) and running >= 1):
        raise ValueError(f"server.args.max_running_requests={running}: must be an integer from 1")


def check_training(config: TrainConfig) -> None:
    rollout = config.rollout
    if rollout.group_size > rollout.max_concurrent:
        raise ValueError(
            f"rollout.max_concurrent={rollout.max_concurrent} is less than one group "
            f"(rollout.group_size={rollout.group_size})"
        )
    check_trainer(config.trainer)
    check_algo(config)
    check_sampling(config)
    check_buffer(config)
    check_evaluation(config)
    check_push(config)


def check_trainer(trainer: TrainerConfig, key: str = "trainer") -> None:
    """Check the layout, the schedule and the batch of the trainer at `key`."""
    _parallel(trainer, key)
    _schedule(trainer, key)
    check_targets(trainer.lora, key=f"{key}.lora")
    shards = trainer.data_parallel * trainer.minibatches
    if trainer.batch_groups % shards:
        raise ValueError(
            f"{key}.batch_groups={trainer.batch_groups} cannot be dealt equally to "
            f"{key}.data_parallel={trainer.data_parallel} ranks x "
            f"{key}.minibatches={trainer.minibatches}: make it a multiple of {shards}"
        )


def _parallel(trainer: TrainerConfig, key: str) -> None:
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


def _schedule(trainer: TrainerConfig, key: str) -> None:
    updates = trainer.steps * trainer.minibatches
    if trainer.lr_warmup_steps > updates:
        raise ValueError(
            f"{key}.lr_warmup_steps={trainer.lr_warmup_steps}: must be at most the {updates} "
            f"updates of the run ({key}.steps x {key}.minibatches)"
        )
    if trainer.min_lr > trainer.lr:
        raise ValueError(f"{key}.min_lr={trainer.min_lr}: must be at most {key}.lr={trainer.lr}")


def check_sampling(config: TrainConfig) -> None:
    rollout = config.rollout
    if "zero_variance" in rollout.filters and rollout.group_size == 1:
        raise ValueError(
            "rollout.filters=[zero_variance] would filter every group of rollout.group_size=1: "
            "one reward has no variance"
        )


def check_evaluation(config: TrainConfig) -> None:
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


# SGLang ends a server whose scheduler makes no step for this many seconds, even a paused one.
_SERVER_WATCHDOG_S = 300.0


def check_push(config: TrainConfig) -> None:
    """Check that the servers can take the weights that the trainer pushes."""
    server, sync = config.server, config.sync
    quantization = server.args.get("quantization")
    if quantization is not None:
        raise ValueError(
            f"server.args.quantization={quantization}: a push writes unquantized weights and no "
            "scales, so remove it"
        )
    preferred = server.args.get("preferred_sampling_params")
    if preferred is not None:
        raise ValueError(
            f"server.args.preferred_sampling_params={preferred}: {WHOLE_VOCABULARY}, so remove it"
        )
    check_devices(config.trainer.device, server.device, sync.transport)
    if sync.transport == "memory" and server.tensor_parallel > 1:
        raise ValueError(
            f"server.tensor_parallel={server.tensor_parallel}: sync.transport=memory is for "
            "servers of one process; use sync.transport=distributed"
        )
    if sync.transport == "adapters":
        check_adapters(config)
    if server.args.get("enable_symm_mem"):
        raise ValueError(
            "server.args.enable_symm_mem=true changes NCCL's memory in the servers only, and the "
            "trainer could not connect to them: remove it"
        )
    watchdog_s = server.args.get("watchdog_timeout", _SERVER_WATCHDOG_S)
    if sync.timeout_s >= watchdog_s:
        raise ValueError(
            f"sync.timeout_s={sync.timeout_s:g} must be less than the {watchdog_s:g} s after which "
            "SGLang ends a paused server: lower it, or raise server.args.watchdog_timeout"
        )


def check_adapters(config: TrainConfig) -> None:
    """Check the settings of a run that pushes adapters alone."""
    if not config.trainer.lora.rank:
        raise ValueError(
            "sync.transport=adapters needs adapters: set trainer.lora.rank, or use distributed"
        )
    if config.sync.verify:
        raise ValueError(
            "sync.verify=true with sync.transport=adapters: it compares whole weights bit by bit, "
            "and servers that add adapters by themselves may round otherwise: leave one out"
        )


def check_devices(trainer: str, server: str, transport: str) -> None:
    """Check that weights get from the trainer's device to the servers'. `auto` may be either."""
    if transport in ("auto", "distributed", "adapters") and {trainer, server} == {"cpu", "cuda"}:
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


def check_cluster(config: SlurmConfig) -> None:
    cluster, sync = config.cluster, config.sync
    if cluster.container != "none" and not cluster.image:
        raise ValueError(f"cluster.container={cluster.container}: set cluster.image")
    if config.debug != "off":
        raise ValueError(f"debug={config.debug} is for one machine: use `areal-lite train`")
    if cluster.nodes == 1:
        return
    if config.server.host in LOOPBACK:
        raise ValueError(
            f"server.host={config.server.host}: other nodes cannot reach that, use node"
        )
    if sync.transport == "disk" and (sync.disk_path or "").startswith("/dev/shm"):
        raise ValueError(
            f"sync.disk_path={sync.disk_path} is on one node only: use a folder that all nodes see"
        )


def check_buffer(config: TrainConfig) -> None:
    """Check that batches can be made within the staleness bound, or drawn for replay."""
    if config.buffer.window is not None:
        _window(config)
    if config.buffer.replay.capacity:
        _replay(config)
    else:
        _staleness(config)


def _staleness(config: TrainConfig) -> None:
    """Check that the steps between two pushes may use what the weights of the first sampled."""
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


def _window(config: TrainConfig) -> None:
    """Check that batches are taken in the order in which a window limits them."""
    window = f"buffer.window={config.buffer.window}"
    if config.buffer.replay.capacity:
        raise ValueError(f"{window} is for batches in order, and replay draws them: unset one")


def _replay(config: TrainConfig) -> None:
    replay, group_size = config.buffer.replay, config.rollout.group_size
    capacity = f"buffer.replay.capacity={replay.capacity}"
    if config.algo.loss != "tb":
        raise ValueError(
            f"{capacity} trains on tokens of any age, which algo.loss={config.algo.loss} cannot: "
            "set algo.loss=tb"
        )
    if replay.capacity < group_size:
        raise ValueError(f"{capacity} holds less than a group (rollout.group_size={group_size})")
    if group_size == 1:
        raise ValueError(
            f"{capacity} balances the trajectories of a prompt against each other: "
            "rollout.group_size must be 2 or more"
        )
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


CLIPPED_LOSSES = ("ppo", "gspo", "cispo")
_SMALLER_LR_FROM = 32
"""Lag, in training steps, from which the learning rate of fresh data was too large."""


class Tolerance(NamedTuple):
    """The staleness, in training steps, up to which an objective is known to learn; the source."""

    steps: int
    objective: str
    shown: str


class Finding(NamedTuple):
    """A caution about a run, or a line of its plan, printed before it starts."""

    level: Literal["caution", "plan"]
    text: str


def findings(config: TrainConfig) -> list[Finding]:
    """Return what a run with these settings should know beforehand."""
    found = [_idle_clip(config), _too_stale(config), _fresh_learning_rate(config)]
    return [finding for finding in found if finding]


def clip_is_idle(config: TrainConfig) -> bool:
    """Return whether the ratio that the loss clips is always 1."""
    algo = config.algo
    return (
        algo.loss in CLIPPED_LOSSES
        and algo.decoupled
        and algo.prox != "loglinear"
        and config.trainer.minibatches == 1
    )


def tolerated_staleness(algo: AlgoConfig) -> Tolerance | None:
    """Return the staleness that an objective tolerates.

    None for Trajectory Balance, which tolerates any, and for a loss of your own.
    """
    if algo.loss == "tb" or ":" in algo.loss:
        return None
    if algo.loss in CLIPPED_LOSSES and not algo.decoupled:
        return Tolerance(
            2, "a clip around the behavior policy", "arXiv 2505.24298: AIME24 42.0 -> 23.3 at 4"
        )
    if algo.correction.mode == "off":
        return Tolerance(1, "a weight of 1", "nothing accounts for the policy that sampled")
    return Tolerance(
        8, "a bounded weight", "arXiv 2505.24298: AIME24 42.0 -> 41.0 at 8, 38.7 at 16"
    )


def _idle_clip(config: TrainConfig) -> Finding | None:
    if not clip_is_idle(config):
        return None
    return Finding(
        "plan",
        "algo.eps_low and algo.eps_high never act: trainer.minibatches=1 makes one update a batch, "
        "in which the ratio to the proximal policy is 1. For a clip that acts, set "
        "trainer.minibatches=2 and algo.prox=recompute",
    )


def _too_stale(config: TrainConfig) -> Finding | None:
    tolerance, allowed = tolerated_staleness(config.algo), config.buffer.max_staleness
    if tolerance is None or allowed <= tolerance.steps:
        return None
    return Finding(
        "caution",
        f"buffer.max_staleness={allowed} is more than the {tolerance.steps} that "
        f"{tolerance.objective} is known to tolerate ({tolerance.shown}): lower it, or use "
        "algo.loss=examples.recipes.stale:loss",
    )


def _fresh_learning_rate(config: TrainConfig) -> Finding | None:
    algo, allowed = config.algo, config.buffer.max_staleness
    if allowed < _SMALLER_LR_FROM or algo.loss not in CLIPPED_LOSSES:
        return None
    return Finding(
        "caution",
        f"trainer.lr={config.trainer.lr:g} is too large at buffer.max_staleness={allowed} if it is "
        "the learning rate of fresh data. 0.6 of it was right at a lag of 32, and a third at 64 "
        "(benchmarks/results/staleness/README.md)",
    )
