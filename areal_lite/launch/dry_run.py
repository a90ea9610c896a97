"""`areal-lite train --dry-run`: what the run would do and need, without starting or writing anything.

Whatever a run checks before its first step is checked: the configuration, the model's architecture, its layout and the GPUs there are.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from transformers import AutoConfig, PretrainedConfig

from areal_lite.config import TrainConfig
from areal_lite.launch import memory
from areal_lite.launch.placement import Placement, place
from areal_lite.megatron.model import check_layout
from areal_lite.megatron.parallel import select_device, select_dtype
from areal_lite.system.gpus import resolve_device, visible_gpus

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def run(config: TrainConfig) -> int:
    """Print the plan. Raises ValueError where a run would."""
    trainer, on_gpu = config.trainer, resolve_device(config.server.device) == "cuda"
    placement = place(
        visible_gpus() if on_gpu else [], trainer, config.server, config.sync.transport
    )
    hf = AutoConfig.from_pretrained(config.model, local_files_only=True)
    check_layout(hf, trainer)
    dtype = select_dtype(trainer, select_device(trainer))
    serving = (
        _ITEMSIZE[config.server.dtype] if config.server.dtype != "auto" else (2 if on_gpu else 4)
    )
    sections = {
        f"model {config.model}": model_lines(hf),
        "processes": process_lines(config, placement),
        "a training step, at most": batch_lines(config),
        f"memory of a trainer rank ({str(dtype).removeprefix('torch.')})": trainer_lines(
            config, hf, dtype
        ),
        f"memory of each GPU or process of a server ({serving} bytes a number)": server_lines(
            config, hf, serving
        ),
        "a push of the weights": push_lines(config, hf, dtype.itemsize),
    }
    print(
        "\n\n".join(
            "\n".join([title, *(f"  {line}" for line in lines)])
            for title, lines in sections.items()
        )
    )
    return 0


def model_lines(hf: PretrainedConfig) -> list[str]:
    return [
        f"{hf.model_type}, {hf.num_hidden_layers} layers, {memory.num_parameters(hf):,} parameters"
    ]


def process_lines(config: TrainConfig, placement: Placement) -> list[str]:
    trainer = config.trainer
    layout = ("tensor", "pipeline", "context", "data", "expert")
    ranks = ", ".join(f"{name} {getattr(trainer, f'{name}_parallel')}" for name in layout)
    return [
        *(
            f"server-{i}: {_gpus(gpus)}, tensor parallel {config.server.tensor_parallel}"
            for i, gpus in enumerate(placement.servers)
        ),
        f"controller: no GPU, {config.reward.workers} reward workers, up to {config.rollout.max_concurrent} trajectories in flight",
        f"trainer: {trainer.world_size} ranks ({ranks}), {_gpus(placement.trainer)}",
    ]


def _gpus(gpus: list[str]) -> str:
    return f"GPU {', '.join(gpus)}" if gpus else "no GPU"


def batch_lines(config: TrainConfig) -> list[str]:
    """The arithmetic of a step. Lengths are limits: most trajectories are shorter."""
    trainer = config.trainer
    sequences = trainer.batch_groups * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    replicas = trainer.data_parallel
    share = sequences // (replicas * trainer.minibatches)
    microbatches = -(-share // max(trainer.tokens_per_microbatch // longest, 1))
    return [
        f"{trainer.batch_groups} groups x {config.rollout.group_size} = {sequences} sequences of {longest:,} tokens = {sequences * longest:,} tokens",
        f"{sequences // replicas} sequences for each of {replicas} data-parallel ranks",
        f"{trainer.minibatches} minibatches (updates) of {share} sequences a rank, in {microbatches} microbatches of {trainer.tokens_per_microbatch:,} tokens",
        f"{trainer.steps} steps: {trainer.steps * trainer.minibatches:,} updates, {trainer.steps * sequences:,} sequences",
    ]


def trainer_lines(config: TrainConfig, hf: PretrainedConfig, dtype: torch.dtype) -> list[str]:
    """Of the ranks that need most; what needs memory beside the policy, too."""
    trainer = config.trainer
    stages = [
        memory.rank_memory(hf, trainer, dtype.itemsize, stage)
        for stage in range(trainer.pipeline_parallel)
    ]
    worst = max(stages, key=lambda stage: stage.total)
    where = f" of pipeline stage {stages.index(worst)}" if len(stages) > 1 else ""
    lines = [f"{field.name:<12}{_size(getattr(worst, field.name)):>12}" for field in fields(worst)]
    lines[4] += (
        f"   estimated, trainer.recompute={trainer.recompute}, {trainer.tokens_per_microbatch:,} tokens a microbatch"
    )
    states = worst.weights + worst.gradients + worst.masters + worst.moments
    critic = states if config.algo.advantage.estimator == "gae" else 0
    if critic:
        lines.append(
            f"{'critic':<12}{_size(critic):>12}   weights, gradients and moments of its own"
        )
    if config.algo.reference:
        lines.append(
            f"{'reference':<12}{_size(worst.weights):>12}   on a GPU only while it is asked, and then without activations"
        )
    lines.append(f"{'in all':<12}{_size(worst.total + critic):>12}   on each rank{where}")
    if trainer.offload:
        lines.append(
            f"{'offloaded':<12}{_size(worst.gradients + worst.moments):>12}   between steps, from a GPU"
        )
    return lines


def server_lines(config: TrainConfig, hf: PretrainedConfig, itemsize: int) -> list[str]:
    ranks = config.server.tensor_parallel
    each = memory.kv_bytes_per_token(hf, itemsize, ranks)
    running = -(-config.rollout.max_concurrent // config.server.count)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return [
        f"{'weights':<12}{_size(memory.num_parameters(hf) * itemsize // ranks):>12}",
        f"{'KV cache':<12}{_size(each):>12}   a token",
        f"{'':<12}{_size(each * running * longest):>12}   for {running} trajectories at full length ({running * longest:,} tokens); fewer run when there is less",
    ]


def push_lines(config: TrainConfig, hf: PretrainedConfig, itemsize: int) -> list[str]:
    buckets = memory.push_buckets(hf, config.trainer, itemsize, config.sync.bucket_mb * 2**20)
    return [
        f"{_size(sum(buckets))} in {len(buckets)} buckets, the largest {_size(max(buckets))}, to each server (sync.transport={config.sync.transport})"
    ]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
