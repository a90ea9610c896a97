"""Stock SGLang on a machine with no GPU: what its CUDA kernels do there, done by torch and numba.

Nothing of SGLang is edited. It offers doors for hardware that it does not know, and these go through them:

* `platform.py`: an out-of-tree platform (entry-point group `sglang.srt.platforms`, chosen by `SGLANG_PLATFORM=areal_lite_cpu`).
  SGLang's own CPU platform needs a build of its kernel package that no package index carries; an out-of-tree one takes the
  pure-torch form of every operator. The same door carries a hook that starts SGLang's workers by fork: with no CUDA context to
  protect, the spawn that SGLang asks for would only import everything three times over.
* `attention.py`: an attention backend in SGLang's registry. SGLang's torch backend loops over the sequences in Python, for each
  layer and token; ours attends for all of them in one kernel that reads the paged cache where it lies.
* `torchvision.py`: a stand-in for a package that SGLang imports and that a text model never uses.

With a GPU nothing of this is active: `activate` returns None, and `areal_lite.servers.process` passes no flag that refers to it.
"""

from __future__ import annotations

PLATFORM = "areal_lite_cpu"


def activate() -> str | None:
    """The platform class for SGLang to load, or None where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork_workers, HookType.AFTER
    )
    return "areal_lite.servers.cpu.platform.CpuPlatform"


def _fork_workers(*_: object) -> None:
    """After SGLang chose spawn. Safe because this process has a single thread until its workers run."""
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
