"""An SGLang plugin for checking pushes: `/get_weights_by_name` for every architecture, by the name of the server's own parameter.

Registered under SGLang's plugin entry point; does nothing unless the server's environment has AREAL_LITE_READBACK=1.
"""

from __future__ import annotations

import os

ENV_READBACK = "AREAL_LITE_READBACK"


def install() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if os.environ.get(ENV_READBACK) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner_components.weight_exporter.WeightExporter.get_weights_by_name"
    HookRegistry.register(target, _read_parameter, HookType.REPLACE)


def _read_parameter(self, name: str, truncate_size: int = 100):
    """The first `truncate_size` rows of a parameter as (nested) lists of float; None for an unknown name."""
    parameter = dict(self.get_model().named_parameters()).get(name)
    return None if parameter is None else parameter[:truncate_size].float().cpu().tolist()
