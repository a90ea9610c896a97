"""Stock SGLang without a GPU: torch and numba do the work of its CUDA kernels.

SGLang itself is not edited: it has extension points for hardware that it does not know. Its own
platform for a CPU needs a build of its kernel package that no package index carries. Workers start
by fork: spawn protects a CUDA context, and would only import everything three times. With a GPU
nothing of this is active: `activate` returns None.
"""

from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any

_DENSE_MODELS = ("llama.LlamaModel", "qwen2.Qwen2Model", "qwen3.Qwen3Model")
_MEMORY = "utils.torch_memory_saver_adapter.TorchMemorySaverAdapter"
_MOE = "qwen3_moe.Qwen3MoeModel"
_UPDATES = [f"update_weights_from_{source}" for source in ("disk", "distributed", "ipc", "tensor")]


def activate() -> str | None:
    """Return the platform class for SGLang to load, None where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from areal_lite.cpu.sglang import families
    from areal_lite.cpu.sglang.invariant import multinomial_with_seed
    from areal_lite.sglang_plugins import push

    after, around, replace = HookType.AFTER, HookType.AROUND, HookType.REPLACE
    logits = "layers.logits_processor.LogitsProcessor"
    runner = "model_executor.model_runner.ModelRunner"
    updater = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for target, hook, kind in (
        ("entrypoints.engine._set_envs_and_config", _fork_workers, after),
        ("managers.scheduler.Scheduler._should_defer_prefill", _defer_while_decoding, around),
        ("managers.scheduler.Scheduler.get_num_allocatable_reqs", _admit_few, around),
        *((f"models.{model}.forward", _late("decoder:forward"), around) for model in _DENSE_MODELS),
        *((f"models.{model}.__init__", _set_windows, after) for model in (*_DENSE_MODELS, _MOE)),
        *((target, hook, around) for target, hook in families.hooks()),
        (f"{logits}._compute_lm_head", _late("decoder:lm_head"), around),
        *((f"{updater}.{update}", _late("decoder:forget_packed"), around) for update in _UPDATES),
        ("layers.sampler.sampling_from_probs_torch", _late("operators:draw"), around),
        (f"{_MEMORY}.create", _late("parking:adapter"), replace),
        (f"{runner}.init_memory_saver_adapter", _late("parking:know_runner"), replace),
        (f"{runner}.maybe_enable_batch_invariant_mode", _make_invariant, replace),
        ("layers.sampler.multinomial_with_seed", multinomial_with_seed, replace),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, kind)
    # `--enable-deterministic-inference` is allowed, too.
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    push.empty_bucket = BucketMemory()
    push.wait_for_streams = lambda scheduler: None  # what was launched has ended
    return "areal_lite.cpu.sglang.platform.CpuPlatform"


class BucketMemory:
    """The memory of the last bucket of a push, whose weights the model has by now.

    The system would give new memory page by page, during the pause.
    """

    def __init__(self) -> None:
        self._kept: Any = None

    def __call__(self, size: int, *, dtype: Any, device: str) -> Any:
        """Return memory for `size` numbers."""
        import torch

        if self._kept is None or len(self._kept) < size:
            self._kept = None  # before there are two
            self._kept = torch.empty(size, dtype=dtype, device=device)
        return self._kept[:size]


def _late(name: str) -> Callable[..., Any]:
    """Return a hook that runs `module:function` of this package.

    The module is imported at the first call: SGLang knows its platform by then.
    """

    def hook(*args: Any, **named: Any) -> Any:
        return resolve_name(f"{__name__}.{name}")(*args, **named)

    return hook


def _set_windows(_: None, self: Any, *__: Any, **___: Any) -> None:
    """Give attention the windows of its layers, which these models of SGLang leave out."""
    from areal_lite.data.model_folder import has_window

    for layer, windowed in zip(self.layers, has_window(self.config), strict=True):
        if windowed:  # SGLang does not count the token itself
            layer.self_attn.attn.sliding_window_size = self.config.sliding_window - 1


def _make_invariant(self: Any) -> None:
    from sglang.srt.runtime_context import get_exec

    from areal_lite.cpu.sglang.invariant import install_products

    if get_exec().deterministic.enable_deterministic_inference:
        install_products(self.dtype)


def _defer_while_decoding(original: Callable[..., bool], self: Any, *running: Any) -> bool:
    """Return whether new requests wait for decode steps (`--prefill-decode-interval`).

    SGLang counts the steps also while nothing decodes. A scheduler that sleeps while it is idle
    would then take a second for each.
    """
    return not self.running_batch.is_empty() and original(self, *running)


def _admit_few(
    original: Callable[..., int], self: Any, running_bs: int, *args: Any, **named: Any
) -> int:
    """Return how many requests may join `running_bs` others. SGLang's setting has precedence.

    A product of enough rows takes time for each row. More requests at once then give hardly more
    tokens a second, and all of them end late: an older group waits for younger ones.
    """
    from sglang.srt.runtime_context import get_schedule

    most = original(self, running_bs, *args, **named)
    if get_schedule().max_running_requests is not None:
        return most
    return min(most, enough_requests(_num_weights(self.tp_worker.model_runner.model)) - running_bs)


@cache
def _num_weights(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def enough_requests(weights: int) -> int:
    """Return how many requests at once keep a core at work with a model of so many weights.

    A step spends the time of 20 rows on reading the weights, and of 10⁹ multiplications on all that
    it does once. With several times as much, rows take most of it.
    """
    return max(64, 2**33 // weights)


def _fork_workers(_: None, server_args: Any) -> None:
    import multiprocessing

    # Fork is safe here: this process has a single thread until its workers run.
    multiprocessing.set_start_method("fork", force=True)
