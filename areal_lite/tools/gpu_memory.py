"""The memory plan of a GPU that a server and a trainer rank share.

The trainer rank may use `trainer.gpu_memory_fraction` of the GPU, and the weights and the KV cache
of the server `server.mem_fraction`. The rest is for what neither setting covers: the CUDA contexts
of both processes, the server's CUDA graphs, and what it computes with.
"""

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from areal_lite.config import TrainConfig, source_configs
from areal_lite.system.cuda import CUDA_CONTEXT
from areal_lite.tools import memory

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
    weights = memory.num_parameters(hf) * _SERVING_ITEMSIZE
    kv_cache = max(int(server_part * size) - weights, 0)
    tokens = kv_cache // memory.kv_bytes_per_token(hf, _SERVING_ITEMSIZE, 1)
    if config.server.max_total_tokens:
        tokens = min(tokens, config.server.max_total_tokens)
    return SharedGpu(
        size=size,
        trainer=trainer_bytes(config, hf),
        trainer_share=int(trainer_part * size),
        kv_cache=kv_cache,
        kv_tokens=tokens,
        longest=longest_sequence(config),
        rest=2 * CUDA_CONTEXT + _server_working(config, hf),
        rest_share=int((1 - server_part - trainer_part) * size),
    )


def trainer_bytes(config: TrainConfig, hf: PretrainedConfig) -> int:
    """Estimate what torch's allocator holds for a trainer rank in bfloat16 at its peak.

    Backward works on the gradients of a layer's activations next to the kept ones.
    """
    longest = longest_sequence(config)
    # A sequence longer than a microbatch is one of its own.
    tokens = max(config.trainer.tokens_per_microbatch, longest)
    trainer = replace(config.trainer, tokens_per_microbatch=tokens)
    rank = memory.rank_memory(hf, trainer, 2, 0, gpu=True)
    critic = rank.states if config.algo.advantage.estimator == "gae" else 0
    working = int(tokens * memory.layer_activations(hf, trainer, 2, gpu=True))
    # The head is done when the layers begin.
    peak = rank.total - rank.head + max(rank.head, working) + critic
    return int(peak * (1 + _ROUNDING)) + _LIBRARIES


def longest_sequence(config: TrainConfig) -> int:
    """Count the tokens of the longest sequence that a run can have."""
    sources = source_configs(config).values()
    longest_prompt = max(source.data.max_prompt_tokens for source in sources)
    return longest_prompt + config.rollout.max_new_tokens


def _server_working(config: TrainConfig, hf: PretrainedConfig) -> int:
    """Estimate what a server needs besides weights and KV cache."""
    graphs = (config.server.max_running_requests or 256) * _GRAPH_BYTES
    per_token = 4 * hf.hidden_size + 3 * hf.intermediate_size
    prefill = _PREFILL_TOKENS * per_token * _SERVING_ITEMSIZE
    logprobs = 2 * 4 * _LOGPROB_ROWS * hf.vocab_size
    return graphs + max(prefill, logprobs)
