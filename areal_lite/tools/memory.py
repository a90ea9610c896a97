"""Estimate a run's memory: exact parameter counts, approximate activations, push sizes.

Parameter counts follow `megatron.architectures` and the shapes of tensors (data/model_folder.py).
States follow the layout of the ranks. With N parameters on a rank, b bytes each, and the
distributed optimizer (ZeRO stage 1, arXiv:1910.02054) over d data- and context-parallel ranks, a
rank needs, in bytes:

    weights b N · gradients 4 N · Adam moments 8 N / d
    float32 masters 4 N / d (none for b = 4, where the weights are their own masters)

Muon has 4 bytes of momentum for an element of a matrix in a layer and Adam's moments for all else.
SGD has no moments. Their masters and moments are not divided by d. With adapters (trainer.lora)
only they have gradients, moments and masters.

Activations are estimates of the tensors that autograd keeps (in the manner of Korthikanti et al.,
2022, arXiv:2205.05198). Not counted: what an operation needs while it runs, fragmentation, and the
libraries' own memory, and what windows and sinks take in bfloat16 without a GPU.

`share_gpu` adds these for a GPU that a server and a trainer rank share. The trainer rank may use
`trainer.gpu_memory_fraction` of it, and the server's weights and KV cache
`server.args.mem_fraction_static`. The rest is for what neither setting covers: the CUDA contexts of
both processes, the server's CUDA graphs, and what it computes with. Where they use it in turn, the
trainer's share is all but that rest, which in the servers' turn has the trainer's weights, too.

Symbols: hf is a Hugging Face configuration, itemsize the bytes of a parameter (2 or 4), stage a
pipeline stage.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from areal_lite.config import LoraConfig, TrainConfig, TrainerConfig, longest_sequence
from areal_lite.cpu import KEPT_LOGITS
from areal_lite.data.model_folder import expected_shape, has_delta_net, num_experts
from areal_lite.megatron.architectures import (
    ARCHITECTURES,
    LATENT_ATTENTION,
    NORMS_AROUND,
    WIDE_QK_NORM,
    check_supported,
    described,
    layer_mapping,
    layout,
)
from areal_lite.megatron.logprobs import CHUNK
from areal_lite.megatron.parameters import Stacked, head_dim, padded_vocab
from areal_lite.system.gpus import CUDA_CONTEXT

# Host memory that a rank takes for each of its parameters while it saves a checkpoint: float32
# weights and moments as shards, gathered, and as copies to write. Measured on a CPU, at the peak.
SAVING_BYTES = 36
GIB = 2**30
SIZES = (24 * GIB, 80 * GIB, 140 * GIB)

# torch's allocator rounds tensors up and cannot use every gap.
_ROUNDING = 0.06
# cuBLAS and NCCL, inside and outside of torch's allocator.
_LIBRARIES = 256 * 2**20
# Estimates of SGLang 0.5.21: a captured request, and its defaults for the tokens that one pass
# reads and for the prompt tokens whose log-probs it computes at a time.
_GRAPH_BYTES = 4 * 2**20
_PREFILL_TOKENS = 8192
_LOGPROB_ROWS = 2048
_SERVING_ITEMSIZE = 2
_EXPERT_FC1 = "mlp.experts.local_experts.{expert}.linear_fc1.weight"
# What the names of parameters in a layer that are no matrices end with.
_VECTORS = ("norm.weight", "_bda.weight", "bias", "sinks", "correction", "a_log", "conv")
# trainer.lora.targets -> the matrix that gets an adapter, whichever of them a layer has.
_ADAPTED = {
    "qkv": ("self_attention.linear_qkv.weight", "self_attention.in_proj.weight"),
    "proj": ("self_attention.linear_proj.weight", "self_attention.out_proj.weight"),
    "fc1": ("mlp.linear_fc1.weight",),
    "fc2": ("mlp.linear_fc2.weight",),
}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank.

    `activations` belong to the microbatches in flight. `head` is the logits of a chunk of tokens,
    and the logits kept for backward, which a GPU keeps only where memory is left.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0
    activations: int = 0
    head: int = 0

    @property
    def states(self) -> int:
        """Return the bytes of what an update changes."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def parameter_sizes(hf: PretrainedConfig, rows: int | None = None) -> Iterator[tuple[str, int]]:
    """Yield (Megatron's name, elements) of all parameters of the model, in the order of a push.

    `rows` of embedding and output layer may be more than the tokens; None: as many.
    """
    rows = rows or hf.vocab_size
    yield "decoder.final_layernorm.weight", hf.hidden_size
    yield "embedding.word_embeddings.weight", rows * hf.hidden_size
    if not hf.tie_word_embeddings:
        yield "output_layer.weight", rows * hf.hidden_size
    sizes, experts = _layer_sizes(hf), num_experts(vars(hf))
    for layer in range(hf.num_hidden_layers):
        for name in sorted(layer_mapping(hf, layer)):
            for expert in range(experts if "{expert}" in name else 1):
                yield f"decoder.layers.{layer}.{name.format(expert=expert)}", sizes[name]


def _layer_sizes(hf: PretrainedConfig) -> dict[str, int]:
    """Count the elements of every parameter that a layer can have, for one of its experts."""
    config, sizes = described(hf), {}
    for name, parameter in ARCHITECTURES[hf.model_type].layer.items():
        shapes = [expected_shape(f"model.layers.0.{tensor}", config) for tensor in parameter.names]
        experts = num_experts(config) if isinstance(parameter, Stacked) else 1
        sizes[name] = sum(math.prod(shape) for shape in shapes if shape) // experts
    return sizes | (_delta_net_sizes(hf) if any(has_delta_net(hf)) else {})


def _delta_net_sizes(hf: PretrainedConfig) -> dict[str, int]:
    heads, keys = hf.linear_num_value_heads, hf.linear_num_key_heads * hf.linear_key_head_dim
    values = heads * hf.linear_value_head_dim
    return {
        "self_attention.in_proj.weight": 2 * (keys + values + heads) * hf.hidden_size,
        "self_attention.heads.conv": (2 * keys + values) * hf.linear_conv_kernel_dim,
        "self_attention.heads.a_log": heads,
        "self_attention.heads.dt_bias": heads,
        "self_attention.norm.weight": hf.linear_value_head_dim,
        "self_attention.out_proj.weight": values * hf.hidden_size,
    }


def num_parameters(hf: PretrainedConfig) -> int:
    """Count the parameters of the whole model, tied embeddings once."""
    return sum(size for _, size in parameter_sizes(hf))


def rank_parameters(
    hf: PretrainedConfig,
    trainer: TrainerConfig,
    stage: int,
    counts: Callable[[str], bool] = lambda name: True,
) -> tuple[int, int]:
    """Count the parameters of each rank of a stage: (outside experts, of experts).

    `counts` tells by its name whether a parameter counts.
    """
    stages, tensor = trainer.pipeline_parallel, trainer.tensor_parallel
    dense = experts = 0
    for name, size in parameter_sizes(hf, padded_vocab(hf, tensor)):
        if not counts(name):
            continue
        if name.startswith("decoder.layers."):
            on_stage = _stage_of(hf, trainer, int(name.split(".")[2])) == stage
        elif name.startswith("embedding."):
            # A tied embedding is also the output layer: the last stage has a copy.
            on_stage = stage == 0 or (hf.tie_word_embeddings and stage == stages - 1)
        else:
            on_stage = stage == stages - 1
        if on_stage and ".local_experts." in name:
            whole = layout(name, hf).replicated and trainer.expert_parallel == 1
            experts += size * tensor if whole else size
        elif on_stage:
            dense += size if layout(name, hf).replicated else size // tensor
    return dense, experts // _expert_parts(trainer)


def is_layer_matrix(name: str) -> bool:
    """Return whether Muon updates the parameter."""
    return name.startswith("decoder.layers.") and not name.endswith(_VECTORS)


def _expert_parts(trainer: TrainerConfig) -> int:
    """Return over how many ranks the experts of a layer are spread, whole or each of them split."""
    return trainer.expert_parallel if trainer.expert_parallel > 1 else trainer.tensor_parallel


def _stage_of(hf: PretrainedConfig, trainer: TrainerConfig, layer: int) -> int:
    stages = trainer.pipeline_parallel
    return layer // (hf.num_hidden_layers // (stages * trainer.virtual_pipeline)) % stages


def _adapted(hf: PretrainedConfig, lora: LoraConfig, layer: int) -> list[str]:
    names = layer_mapping(hf, layer)
    return [name for target in lora.targets for name in _ADAPTED[target] if name in names]


def adapter_parameters(hf: PretrainedConfig, trainer: TrainerConfig, stage: int = 0) -> int:
    """Count the parameters of all adapters on each rank of a stage.

    One side of every adapted matrix is a hidden state. Ranks split the other one.
    """
    sizes, hidden, rank = _layer_sizes(hf), hf.hidden_size, trainer.lora.rank
    layers = (i for i in range(hf.num_hidden_layers) if _stage_of(hf, trainer, i) == stage)
    others = [sizes[name] // hidden for i in layers for name in _adapted(hf, trainer.lora, i)]
    return sum(rank * (hidden + other // trainer.tensor_parallel) for other in others)


def pushed_adapter_parameters(hf: PretrainedConfig, lora: LoraConfig) -> int:
    """Count the numbers in a push of adapters alone: fused projections have copies of one A."""
    layers = range(hf.num_hidden_layers)
    fused = (layer_mapping(hf, i)[name].names for i in layers for name in _adapted(hf, lora, i))
    copies = sum(len(names) - 1 for names in fused)
    return adapter_parameters(hf, TrainerConfig(lora=lora)) + copies * lora.rank * hf.hidden_size


def rank_memory(
    hf: PretrainedConfig, trainer: TrainerConfig, itemsize: int, stage: int, *, gpu: bool = False
) -> RankMemory:
    """Estimate the memory of each rank of a stage, with full microbatches, on a GPU or without."""
    held = sum(rank_parameters(hf, trainer, stage))
    dense, experts = rank_parameters(hf, trainer, stage, lambda name: layout(name, hf).trained)
    replicas = trainer.data_parallel * trainer.context_parallel
    if trainer.lora.rank:
        trained = adapter_parameters(hf, trainer, stage)
        held, sharded = held + trained, trained // replicas
    else:
        trained = dense + experts
        same_experts = trainer.tensor_parallel * replicas // _expert_parts(trainer)
        sharded = dense // replicas + experts // same_experts
    moments = {"adam": 8 * sharded, "sgd": 0}.get(trainer.optimizer)
    if moments is None:
        moments = 8 * trained - 4 * sum(rank_parameters(hf, trainer, stage, is_layer_matrix))
    tokens = trainer.tokens_per_microbatch // trainer.context_parallel
    width = padded_vocab(hf, trainer.tensor_parallel) // trainer.tensor_parallel
    # Backward needs logits, their log-probs and their gradient.
    logits = 3 * min(tokens, CHUNK) * width + (0 if gpu else min(tokens * width, KEPT_LOGITS))
    return RankMemory(
        weights=itemsize * held,
        gradients=4 * trained,
        masters=0 if itemsize == 4 else 4 * (sharded if trainer.optimizer == "adam" else trained),
        moments=moments,
        activations=int(tokens * activation_bytes_per_token(hf, trainer, itemsize, stage, gpu=gpu)),
        head=4 * logits if stage == trainer.pipeline_parallel - 1 else 0,
    )


def reference_bytes(hf: PretrainedConfig, trainer: TrainerConfig, itemsize: int) -> int:
    """Return the bytes of a reference policy's weights on the rank that has most.

    Raises ValueError if the model cannot have the trainer's layout.
    """
    whole = replace(trainer, lora=LoraConfig())
    check_supported(hf, whole)
    stages = range(trainer.pipeline_parallel)
    return max(rank_memory(hf, whole, itemsize, stage).weights for stage in stages)


def activation_bytes_per_token(
    hf: PretrainedConfig, trainer: TrainerConfig, itemsize: int, stage: int, *, gpu: bool = False
) -> float:
    """Estimate the bytes kept for one token of each microbatch in flight, at the stage's peak.

    1F1B keeps as many microbatches in flight as there are stages from this one on. Recomputing
    `full` keeps each layer's input and one whole layer at a time. `selective` saves only what the
    attention kernel keeps, which is little.
    """
    tensor, stages = trainer.tensor_parallel, trainer.pipeline_parallel
    layers = hf.num_hidden_layers / stages
    per_layer = layer_activations(hf, trainer, itemsize, gpu=gpu)
    in_flight = stages - stage
    if trainer.virtual_pipeline > 1:
        in_flight += (stages - 1) / trainer.virtual_pipeline
    if trainer.recompute == "full":
        return in_flight * layers * hf.hidden_size * itemsize / tensor + per_layer
    return in_flight * layers * per_layer


def layer_activations(
    hf: PretrainedConfig, trainer: TrainerConfig, b: int, *, gpu: bool = False
) -> float:
    """Estimate the bytes that a layer keeps for one token, on average; b: of an activation."""
    tensor = trainer.tensor_parallel
    layers = [layer_mapping(hf, layer) for layer in range(hf.num_hidden_layers)]
    hidden, queries = hf.hidden_size, hf.num_attention_heads * head_dim(hf)
    # A norm keeps its input. Without a GPU and without the kernel (areal_lite/cpu/kernels), it
    # keeps its input and the normalized input, both in float32.
    norm = b if gpu or b == 4 else 8
    norms = 2 * (norm + b) * hidden  # and outputs
    family = ARCHITECTURES[hf.model_type]
    if family.has(NORMS_AROUND):
        norms += 2 * norm * hidden
    has_head_norms = any("self_attention.q_layernorm.weight" in names for names in layers)
    attention = _attention_activations(hf, b, norm if has_head_norms else 0, gpu)
    if family.has(LATENT_ATTENTION):
        attention = _latent_activations(hf, b, norm)
    if any(nets := has_delta_net(hf)):
        attention += (2 * b + 4) * queries  # gates, before and after, and what they let through
        sizes = _delta_net_sizes(hf)
        rows = sum(sizes[f"self_attention.{name}.weight"] for name in ("in_proj", "out_proj"))
        share = sum(nets) / len(nets)  # a delta net keeps what its projections return and get
        attention = share * b * rows / hidden + (1 - share) * attention
    # Both projections and the product.
    dense = getattr(hf, "intermediate_size", 0)
    mlp = b * 3 * dense / tensor
    if sparse := sum("mlp.router.weight" in names for names in layers):
        # For each expert of a token: a copy of the token, both projections, their product, and
        # four numbers of its place and weight. Tensor-parallel ranks share tokens or experts.
        expert = getattr(hf, "moe_intermediate_size", 0)
        width, place = 3 * (expert or dense), 28
        if any("mlp.router.bias" in names for names in layers):  # and which expert's biases
            place += 3 * b * num_experts(vars(hf)) // trainer.expert_parallel
        whole = tensor if trainer.expert_parallel == 1 else 1
        row = b * (width + hidden * whole) + place * whole
        mixture = hf.num_experts_per_tok * row / tensor
        if b != 4 and any("mlp.router.correction" in names for names in layers):
            mixture += 4 * hidden / tensor  # sigmoids are of numbers in float32
        gated = getattr(hf, "shared_expert_intermediate_size", 0)
        shared = gated or expert * getattr(hf, "n_shared_experts", 0)
        mixture += b * (5 * shared / tensor + bool(gated) * hidden)
        mlp += sparse / hf.num_hidden_layers * (mixture - mlp)
    return (norms + attention) / tensor + mlp


def _attention_activations(hf: PretrainedConfig, b: int, norm: int, gpu: bool) -> int:
    """Estimate the bytes that attention over heads keeps for a token; norm: 0 without such norms.

    These are rotated query and key, the value, and the output. The value is a part of one tensor
    with query and key, which it keeps. The kernel of float32 without a GPU copies it.
    """
    dim, copied = head_dim(hf), b == 4 and not gpu
    heads = (hf.num_attention_heads + hf.num_key_value_heads) * dim
    kept = 2 * b * heads + 4 * hf.num_attention_heads
    if norm or not copied:
        kept += b * heads
    if not (copied and ARCHITECTURES[hf.model_type].has(WIDE_QK_NORM)):
        kept += norm * heads
    if b != 4 and not gpu:  # torch's kernel has another order of heads: the output is copied
        kept += b * hf.num_attention_heads * dim
    return kept


def _latent_activations(hf: PretrainedConfig, b: int, norm: int) -> int:
    """Estimate the bytes that multi-latent attention keeps for a token; norm: of what is normed."""
    heads, width = hf.num_attention_heads, hf.qk_head_dim
    # Queries, keys, padded values, the output with and without its padding, and short vectors.
    kept = b * (4 * heads * width + heads * hf.v_head_dim) + 4 * heads
    return kept + (norm + b) * ((hf.q_lora_rank or 0) + hf.kv_lora_rank)


def kv_bytes_per_token(hf: PretrainedConfig, itemsize: int, tensor_parallel: int) -> int:
    """Count the bytes of KV cache for one token on each GPU of a server.

    Heads are copied where there are fewer of them than GPUs.
    """
    if ARCHITECTURES[hf.model_type].has(LATENT_ATTENTION):  # every GPU has the whole short vector
        return hf.num_hidden_layers * (hf.kv_lora_rank + hf.qk_rope_head_dim) * itemsize
    heads = max(hf.num_key_value_heads // tensor_parallel, 1)
    return 2 * has_delta_net(hf).count(False) * heads * head_dim(hf) * itemsize


def pushed_parameters(hf: PretrainedConfig, trainer: TrainerConfig) -> int:
    """Count the numbers in a push of all weights."""
    sizes = parameter_sizes(hf, padded_vocab(hf, trainer.tensor_parallel))
    return sum(size for name, size in sizes if layout(name, hf).trained)


@dataclass(frozen=True, kw_only=True)
class SharedGpu:
    """The bytes that a GPU of `size` bytes offers to each part of a run, and what each part needs.

    kv_tokens: tokens in the server's KV cache. longest: tokens of the longest sequence.
    """

    size: int
    trainer: int
    trainer_share: int
    kv_cache: int
    kv_tokens: int
    longest: int
    rest: int
    rest_share: int

    @property
    def missing(self) -> list[str]:
        """Return the names of the parts that do not fit."""
        parts = {
            "the trainer": self.trainer > self.trainer_share,
            "one sequence in the KV cache": self.longest > self.kv_tokens,
            "the rest": self.rest > self.rest_share,
        }
        return [name for name, fails in parts.items() if fails]


def share_gpu(config: TrainConfig, hf: PretrainedConfig, size: int) -> SharedGpu:
    """Divide a GPU of `size` bytes between the server and the trainer of a run."""
    server_part = config.server.mem_fraction or 0.0
    trainer_part = config.trainer.gpu_memory_fraction or 0.0
    ranks = config.server.tensor_parallel
    weights = num_parameters(hf) * _SERVING_ITEMSIZE // ranks
    kv_cache = max(int(server_part * size) - weights, 0)
    tokens = kv_cache // kv_bytes_per_token(hf, _SERVING_ITEMSIZE, ranks)
    tokens = min(tokens, config.server.args.get("max_total_tokens") or tokens)
    rest, trainer_share = 2 * CUDA_CONTEXT + _server_working(config, hf), int(trainer_part * size)
    if config.server.takes_turns:
        trainer_share = size - rest
        rest, trainer_part = rest + _kept_in_turn(config, hf), 0.0
    return SharedGpu(
        size=size,
        trainer=trainer_bytes(config, hf),
        trainer_share=trainer_share,
        kv_cache=kv_cache,
        kv_tokens=tokens,
        longest=longest_sequence(config),
        rest=rest,
        rest_share=int((1 - server_part - trainer_part) * size),
    )


def _kept_in_turn(config: TrainConfig, hf: PretrainedConfig) -> int:
    """Estimate what a trainer rank has on a GPU while servers use it in their turn."""
    rank = rank_memory(hf, config.trainer, 2, 0, gpu=True)
    models = 2 if config.algo.advantage.estimator == "gae" else 1
    return int(models * (rank.weights + rank.masters) * (1 + _ROUNDING)) + _LIBRARIES


def trainer_bytes(config: TrainConfig, hf: PretrainedConfig) -> int:
    """Estimate what torch's allocator holds for a trainer rank in bfloat16 at its peak.

    Backward works on the gradients of a layer's activations next to the kept ones, and on the
    gradient of one product of all its experts.
    """
    # A sequence longer than a microbatch is one of its own.
    tokens = max(config.trainer.tokens_per_microbatch, longest_sequence(config))
    trainer = replace(config.trainer, tokens_per_microbatch=tokens)
    rank = rank_memory(hf, trainer, 2, 0, gpu=True)
    critic = rank.states if config.algo.advantage.estimator == "gae" else 0
    working = int(tokens * layer_activations(hf, trainer, 2, gpu=True))
    working += 2 * num_experts(vars(hf)) * _layer_sizes(hf).get(_EXPERT_FC1, 0)
    # The head is done when the layers begin.
    peak = rank.total - rank.head + max(rank.head, working) + critic
    return int(peak * (1 + _ROUNDING)) + _LIBRARIES


def _server_working(config: TrainConfig, hf: PretrainedConfig) -> int:
    """Estimate what a server needs besides weights and KV cache."""
    graphs = (config.server.max_running_requests or 256) * _GRAPH_BYTES
    per_token = 4 * hf.hidden_size + 3 * getattr(hf, "intermediate_size", 0)
    prefill = _PREFILL_TOKENS * per_token * _SERVING_ITEMSIZE
    logprobs = 2 * 4 * _LOGPROB_ROWS * hf.vocab_size
    return graphs + max(prefill, logprobs)
