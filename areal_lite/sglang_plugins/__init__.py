"""Plugins of SGLang, which loads them in every process of a server (entry point `areal_lite`).

They are hooks around SGLang's own functions: push.py for weights, sampling.py for tokens.
weight_group.py is the process group of a push; the trainer uses it, too.
"""

ENV_READBACK = "AREAL_LITE_READBACK"
"""With the value 1, servers answer `/get_weights_by_name` for every architecture."""
installed = False
"""Whether SGLang has found the plugins in this process."""


def install() -> None:
    """Register the hooks. Entry point of the group `sglang.srt.plugins`."""
    global installed
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # They import torch, which a process that only starts servers does without.
    from areal_lite.sglang_plugins import push, sampling

    installed = True
    for target, hook in {**push.hooks(), **sampling.hooks()}.items():
        HookRegistry.register(target, hook, HookType.AROUND)
