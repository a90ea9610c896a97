"""`areal-lite train --dry-run`: show what a run would do and need.

It checks everything that a run checks before its first step: the configuration, the prompts, the
model's architecture and layout, and the GPUs of this machine. Nothing is started, written or
downloaded.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from areal_lite.config import (
    LoraConfig,
    TrainConfig,
    TrainerConfig,
    longest_sequence,
    naming,
    reference_folders,
    source_configs,
)
from areal_lite.config.data import shares
from areal_lite.config.help import show
from areal_lite.config.rules import CLIPPED_LOSSES
from areal_lite.data.model_folder import check_numbers, check_weights, expert_layout
from areal_lite.data.prompts import PromptSet, Split, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.launch.roles import Placement, place_run
from areal_lite.megatron.architectures import check_supported
from areal_lite.megatron.parallel import select_device, select_dtype
from areal_lite.system.gpus import gpu_memory, resolve_device
from areal_lite.tools import memory
from areal_lite.tools.evaluate import reading
from areal_lite.tools.formatting import byte_size, counted, excerpt
from areal_lite.tools.report.summary import age_label
from areal_lite.weights.push import BUCKET_BYTES, choose_transport

# A token with its log-prob and text in the store, measured (benchmarks/results/store.json).
_STORED_BYTES = 6
_ITEMSIZE = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_SHOWN = 200  # characters of an answer
_MEASURED = 64  # prompts whose mean length is shown
_IDLE_CLIP = (
    "algo.eps_low and algo.eps_high never act: trainer.minibatches=1 makes one update a batch, in "
    "which the ratio to the proximal policy is 1. For a clip that acts, set trainer.minibatches=2 "
    "and algo.prox=recompute"
)
_PARALLEL = ("tensor", "pipeline", "context", "data", "expert")


def run(config: TrainConfig) -> int:
    """Print the plan and return the exit status. Raises ValueError where a run would."""
    trainer, folder = config.trainer, Path(config.model)
    placement = place_run(config)
    hf = read_config(config.model)
    check_supported(hf, trainer)
    if any(folder.glob("*.safetensors")):  # a plan needs no weights
        check_weights(folder)
        check_numbers(folder)
    device = select_device(trainer)
    dtype = select_dtype(trainer, device)
    name = str(dtype).removeprefix("torch.")
    default = 2 if resolve_device(config.server.device) == "cuda" else 4
    serving = _ITEMSIZE.get(config.server.args.get("dtype", ""), default)
    server_title = f"memory of each GPU or process of a server ({serving} bytes a number)"
    trainer_title, on_gpu = f"memory of a trainer rank ({name})", device.type == "cuda"
    sections = {
        f"model {config.model}": model_lines(hf, trainer.lora),
        "what is trained": objective_lines(config),
        "prompts": prompt_lines(config),
        "processes": process_lines(config, placement),
        "a training step, at most": batch_lines(config),
        trainer_title: trainer_lines(config, hf, dtype, gpu=on_gpu),
        server_title: server_lines(config, hf, serving),
        "a push of the weights": push_lines(config, hf, dtype.itemsize),
    }
    if config.server.takes_turns:
        sections["servers and trainer in turn on a GPU"] = turn_lines(config, hf, placement)
    elif trainer.gpu_memory_fraction and config.server.mem_fraction:
        sections["server and trainer on one GPU"] = shared_lines(config, hf, placement)
    texts = ["\n  ".join([title, *lines]) for title, lines in sections.items()]
    show("\n\n".join(texts), 4, sys.stdout)
    return 0


def read_config(model: str) -> PretrainedConfig:
    """Read config.json. Raises ValueError if transformers refuses it, by any of its errors."""
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())
        file = Path(model) / "config.json"
        raise ValueError(f"{file}: transformers refuses it: {reason}") from error


def model_lines(hf: PretrainedConfig, lora: LoraConfig) -> list[str]:
    """Describe the model, and its adapters if there are any."""
    parameters = memory.num_parameters(hf)
    lines = [f"{hf.model_type}, {hf.num_hidden_layers} layers, {parameters:,} parameters"]
    if lora.rank:
        trained = memory.adapter_parameters(hf, TrainerConfig(lora=lora))
        lines.append(
            f"adapters of rank {lora.rank} on {', '.join(lora.targets)}: only their {trained:,} "
            "parameters are trained"
        )
    return lines


def objective_lines(config: TrainConfig) -> list[str]:
    """Name the objective, the reward and the workflow."""
    algo = config.algo
    decoupled = ", decoupled" if algo.decoupled and algo.loss != "tb" else ""
    advantages = "" if algo.loss == "tb" else f", advantages {algo.advantage.estimator}"
    lines = [f"objective: {algo.loss}{decoupled}{advantages}, tokens: {age_label(config.buffer)}"]
    if config.buffer.window is not None:
        passing = f"at most {counted(config.buffer.window, 'group')} may pass one that still runs"
        lines.append(f"{passing}: no token is overdue")
    for name, own in source_configs(config).items():
        of = f" of {name}" if name else ""
        lines += [f"reward{of}: {own.reward.function}", f"workflow{of}: {own.rollout.workflow}"]
    recomputed = algo.decoupled and algo.prox != "loglinear"
    is_idle = algo.loss in CLIPPED_LOSSES and recomputed and config.trainer.minibatches == 1
    return lines + ([_IDLE_CLIP] if is_idle else [])


def prompt_lines(config: TrainConfig) -> list[str]:
    """Describe each data source. Raises ValueError as a run would.

    A data set on the hub is not downloaded, so nothing of it is checked.
    """
    if config.debug_mode == "train_only":  # its batches are stored
        return [f"stored in {config.debug.partition(':')[2]}"]
    configs = source_configs(config)
    lines = []
    for name, share in shares(configs).items():
        if name:
            lines.append(f"{name}: {100 * share:.4g} % of the draws")
        with naming(name):
            lines += _source_lines(configs[name])
    return lines


def _source_lines(config: TrainConfig) -> list[str]:
    """Count the prompts of a source, and show the first one and its answer."""
    data = config.data
    splits: list[tuple[str, Split, str | None]] = [("training", "train", data.path)]
    if config.eval.problems:
        splits.append(("held-out", "eval", data.eval_path or data.path))
    lines, shown = [], None
    for name, split, path in splits:
        where = ", ".join(part for part in (data.source, path) if part)
        if data.source == "hf" and not (path and Path(path, data.args.get("name", "")).is_dir()):
            lines.append(f"{name}: {where}, not looked at: it is on the hub")
            continue
        prompts = load_prompts(data, config.model, split, config.reward.function)
        number = prompts.num_prompts
        if number is None:  # they are made, of no file
            lines.append(f"{name}: {data.source}, without end")
        else:
            long = f", {prompts.num_too_long:,} are too long" if prompts.num_too_long else ""
            lines.append(f"{name}: {where}, {counted(number, 'prompt')}{long}")
        shown = prompts if shown is None else shown
    if shown is None:
        return lines
    first, tokenizer = shown[0], Tokenizer(config.model, data.chat_template_kwargs)
    lines += reading(tokenizer, first.text, raw=not first.messages)
    lines.append(f"its answer: {excerpt(first.answer, _SHOWN)}")
    if config.trainer.share_prefixes and config.rollout.group_size > 1:
        lines.append(_saving_line(config, shown))
    return lines


def _saving_line(config: TrainConfig, prompts: PromptSet) -> str:
    """Say what the trainer saves because it computes the prompt of a group once."""
    number = min(prompts.num_prompts or _MEASURED, _MEASURED)
    prompt = sum(len(prompts[i].tokens) for i in range(number)) / number
    size, answer = config.rollout.group_size, config.rollout.max_new_tokens
    share = (size - 1) * prompt / (size * (prompt + answer))
    return (
        f"{prompt:.0f} tokens, the mean of {counted(number, 'prompt')}: computed once a group, "
        f"they save the trainer {100 * share:.0f} % of its tokens, more if answers are shorter"
    )


def process_lines(config: TrainConfig, placement: Placement) -> list[str]:
    """List the processes and their GPUs."""
    trainer = config.trainer
    sizes = ", ".join(f"{name} {getattr(trainer, f'{name}_parallel')}" for name in _PARALLEL)
    size = config.server.tensor_parallel
    # Sources with the same reward share its processes.
    rewards = [source.reward for source in source_configs(config).values()]
    workers = sum(r.workers for i, r in enumerate(rewards) if r not in rewards[:i])
    servers = enumerate(placement.servers)
    return [
        *(f"server-{i}: {_gpus(gpus)}, tensor parallel {size}" for i, gpus in servers),
        f"controller: no GPU, {counted(workers, 'reward worker')}, "
        f"up to {config.rollout.max_concurrent} trajectories in flight",
        f"trainer: {counted(trainer.world_size, 'rank')} ({sizes}), {_gpus(placement.trainer)}",
    ]


def _gpus(gpus: list[str]) -> str:
    return f"GPU {', '.join(gpus)}" if gpus else "no GPU"


def batch_lines(config: TrainConfig) -> list[str]:
    """Show the arithmetic of a step. Lengths are limits: most trajectories are shorter."""
    trainer, size, longest = config.trainer, config.rollout.group_size, longest_sequence(config)
    groups, replicas = trainer.batch_groups, trainer.data_parallel
    sequences = groups * size
    share = sequences // (replicas * trainer.minibatches)
    microbatches = -(-share // max(trainer.tokens_per_microbatch // longest, 1))
    layout = expert_layout(Path(config.model)) if config.algo.routing_replay else None
    stored = _STORED_BYTES + (layout.choices if layout else 0)
    bound = "it grows without limit (store.max_gib=null)"
    if config.store.max_gib is not None:
        bound = f"beyond {config.store.max_gib:g} GiB the oldest tokens go (store.max_gib)"
    return [
        f"{counted(groups, 'group')} x {size} = {sequences} sequences of {longest:,} tokens "
        f"= {sequences * longest:,} tokens",
        f"{sequences // replicas} sequences for each of {counted(replicas, 'data-parallel rank')}",
        f"{counted(trainer.minibatches, 'update')}, each of {share} sequences a rank in "
        f"{counted(microbatches, 'microbatch', 'es')} of {trainer.tokens_per_microbatch:,} tokens",
        f"{counted(trainer.steps, 'step')}: "
        f"{counted(trainer.steps * trainer.minibatches, 'update')}, "
        f"{trainer.steps * sequences:,} sequences",
        f"{byte_size(stored * sequences * longest)} of the store: {bound}",
    ]


def trainer_lines(
    config: TrainConfig, hf: PretrainedConfig, dtype: torch.dtype, *, gpu: bool = False
) -> list[str]:
    """Show the memory of the ranks that need most."""
    trainer = config.trainer
    itemsize, stages = dtype.itemsize, range(trainer.pipeline_parallel)
    ranks = [memory.rank_memory(hf, trainer, itemsize, stage, gpu=gpu) for stage in stages]
    worst = max(ranks, key=lambda rank: rank.total)
    critic = worst.states if config.algo.advantage.estimator == "gae" else 0
    estimate = (
        f"estimated, trainer.recompute={trainer.recompute}, "
        f"{trainer.tokens_per_microbatch:,} tokens a microbatch"
    )
    lines = [_line(k, size, estimate * (k == "activations")) for k, size in vars(worst).items()]
    if critic:
        lines.append(_line("critic", critic, "weights, gradients and moments of its own"))
    for folder in sorted(set(filter(None, reference_folders(config).values()))):
        if not config.is_base(folder):
            own = folder == config.model
            other = hf if own else AutoConfig.from_pretrained(folder, local_files_only=True)
            size = memory.reference_bytes(other, trainer, itemsize)
            note = f"{folder}, on a GPU only during its forward pass, without activations"
            lines.append(_line("reference", size, note))
    stage = f" of pipeline stage {ranks.index(worst)}" if len(ranks) > 1 else ""
    lines.append(_line("in all", worst.total + critic, f"on each rank{stage}"))
    copies = memory.SAVING_BYTES * worst.gradients // 4 * (2 if critic else 1)
    lines.append(_line("saving", copies, "estimated, host memory while a checkpoint is copied"))
    if trainer.offload:
        moved = worst.gradients + worst.moments
        lines.append(_line("offloaded", moved, "between steps, from a GPU"))
    return lines


def server_lines(config: TrainConfig, hf: PretrainedConfig, itemsize: int) -> list[str]:
    """Show the memory of one tensor-parallel rank of a server; `itemsize` in bytes."""
    ranks = config.server.tensor_parallel
    per_token = memory.kv_bytes_per_token(hf, itemsize, ranks)
    running = -(-config.rollout.max_concurrent // config.server.count)
    tokens = running * longest_sequence(config)
    note = f"for {running} trajectories at full length ({tokens:,} tokens)"
    return [
        _line("weights", memory.num_parameters(hf) * itemsize // ranks),
        _line("KV cache", per_token, "a token"),
        _line("", per_token * tokens, f"{note}; with less memory fewer run at once"),
    ]


def push_lines(config: TrainConfig, hf: PretrainedConfig, itemsize: int) -> list[str]:
    """Show the size of a push; `itemsize`: bytes of one of the trainer's weights."""
    transport = choose_transport(config)
    chosen = "" if transport == config.sync.transport else f", which is {transport} here"
    size = byte_size(memory.pushed_parameters(hf, config.trainer) * itemsize)
    what = f"{size} in buckets of about {byte_size(BUCKET_BYTES)}"
    if transport == "adapters":
        adapters = memory.pushed_adapter_parameters(hf, config.trainer.lora) * itemsize
        what = f"{byte_size(adapters)} of adapters, in place of {size} of weights"
    kept = {"memory": "which the servers share", "delta": "for a copy of what the servers have"}
    return [
        f"{what}, to each server (sync.transport={config.sync.transport}{chosen})",
        cadence_line(config),
        *([f"{size} of the trainer's memory, {kept[transport]}"] if transport in kept else []),
    ]


def cadence_line(config: TrainConfig) -> str:
    """Say when weights are pushed, and whether generation waits for it."""
    every = config.sync.every
    pushes = f"after every {counted(every, 'step')}" if every > 1 else "after every step"
    if config.buffer.replay.capacity:
        return f"{pushes}; generation never waits"
    if spare := config.max_lead + 1 - every:
        return f"{pushes}; generation runs up to {counted(spare, 'step')} ahead of it"
    return f"{pushes}; generation waits for it, as buffer.max_staleness admits nothing more"


def shared_lines(config: TrainConfig, hf: PretrainedConfig, placement: Placement) -> list[str]:
    """Show whether server and trainer fit into this machine's GPU, or into GPUs of usual sizes."""
    memories = [gpu_memory(gpu) for gpu in placement.trainer[:1] if placement.shared]
    sizes = [found.total for found in memories if found] or memory.SIZES
    return [_shared_line(memory.share_gpu(config, hf, size)) for size in sizes]


def turn_lines(config: TrainConfig, hf: PretrainedConfig, placement: Placement) -> list[str]:
    """Show whether each side fits in its turn, what a turn moves, and when not to take turns."""
    moments = memory.rank_memory(hf, config.trainer, 2, 0, gpu=True).moments
    return [
        *shared_lines(config, hf, placement),
        f"{byte_size(2 * moments)} a rank to and from host memory in each step, while nothing else "
        "works. GPUs of their own are faster where the model fits: docs/simulate.md says how to "
        "compare",
    ]


def _shared_line(gpu: memory.SharedGpu) -> str:
    missing = " and ".join(gpu.missing)
    return (
        f"{byte_size(gpu.size):>10}: "
        f"trainer {byte_size(gpu.trainer)} of {byte_size(gpu.trainer_share)}, "
        f"KV cache {byte_size(gpu.kv_cache)} ({gpu.kv_tokens:,} tokens), "
        f"rest {byte_size(gpu.rest)} of {byte_size(gpu.rest_share)}: "
        + (f"no room for {missing}" if missing else "fits")
    )


def _line(name: str, count: float, note: str = "") -> str:
    """Align a name and a number of bytes; put the note behind them."""
    return f"{name:<12}{byte_size(count):>12}" + (f"   {note}" if note else "")
