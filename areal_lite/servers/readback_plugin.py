"""An SGLang plugin that lets every architecture answer `/get_weights_by_name`.

Pushes are verified with it. Names are those of the server's own parameters. SGLang loads the
plugin through its entry-point group; it does nothing unless the server's environment contains
AREAL_LITE_READBACK=1.
"""

import os

ENV_READBACK = "AREAL_LITE_READBACK"
_METHOD = (
    "sglang.srt.model_executor.model_runner_components.weight_exporter"
    ".WeightExporter.get_weights_by_name"
)


def install() -> None:
    """Replace SGLang's method. Entry point of the group `sglang.srt.plugins`."""
    if os.environ.get(ENV_READBACK) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_METHOD, _read_parameter, HookType.REPLACE)


def _read_parameter(self, name: str, truncate_size: int = 100) -> list | None:
    """Return the first rows of a parameter as nested lists of floats; None if it is unknown."""
    parameter = dict(self.get_model().named_parameters()).get(name)
    return None if parameter is None else parameter[:truncate_size].float().cpu().tolist()
