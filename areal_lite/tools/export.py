"""Run `areal-lite export`: turn a run's checkpoint into a Hugging Face folder.

It starts no server and uses no GPU, so it can run beside the run that wrote the checkpoint.
"""

import sys
import warnings
from pathlib import Path

from areal_lite.config import stored_settings, value_of
from areal_lite.data.model_folder import check_model_folder
from areal_lite.run_dir.paths import CHECKPOINT_MARKER, CHECKPOINTS_DIR, EXPORTS_DIR, HF_DIR
from areal_lite.run_dir.resume import checkpoint_steps, damage, newest_whole_step
from areal_lite.system.processes import environment
from areal_lite.tools.commands import ExportConfig, existing_run


def run(config: ExportConfig) -> int:
    """Write the folder and print its path. Returns the exit status.

    Raises ValueError for a run without such a checkpoint, and for a folder that is not empty.
    """
    run_dir = existing_run(config.run_dir)
    step = config.step or newest_step(run_dir)
    out = Path(config.out) if config.out else export_folder(run_dir, step, config.adapter)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"out={out} is not an empty folder: remove it or choose another one")
    print(export_step(run_dir, step, out, config.model, config.dtype, config.adapter))
    return 0


def export_folder(run_dir: Path, step: int, adapter: bool = False) -> Path:
    """Return the folder of the run's exported checkpoint of `step`, or of its adapters."""
    return run_dir / EXPORTS_DIR / f"step-{step}{'-adapter' * adapter}"


def model_of_run(run_dir: Path) -> Path:
    """Return a Hugging Face folder with the weights of the run's newest checkpoint.

    Raises ValueError as `export_step` does.
    """
    existing_run(run_dir)
    return model_of_step(run_dir, newest_step(run_dir))


def model_of_step(run_dir: Path, step: int) -> Path:
    """Return a Hugging Face folder with the weights of `step`, exported unless it exists."""
    final = run_dir / CHECKPOINTS_DIR / HF_DIR
    # A run exports its final weights before it publishes the checkpoint of its last step.
    if final.is_dir() and value_of(stored_settings(run_dir), "trainer.steps") == step:
        return final
    folder = export_folder(run_dir, step)
    if not folder.is_dir():
        return export_step(run_dir, step, folder)
    written = run_dir / CHECKPOINTS_DIR / f"step-{step}" / CHECKPOINT_MARKER
    if folder.lstat().st_mtime < written.stat().st_mtime:
        raise ValueError(f"{folder} is older than the checkpoint of step {step}: remove it")
    return folder


def newest_step(run_dir: Path) -> int:
    """Return the step of the run's newest checkpoint that is whole. Raises ValueError without one.

    It warns of damaged ones that are newer, and leaves them as they are.
    """
    step, reasons = newest_whole_step(run_dir)
    for path, reason in reasons.items():
        print(f"{path} is damaged: {reason}", file=sys.stderr)
    if not step:
        raise ValueError(
            f"run_dir={run_dir} has no checkpoint yet: a run writes one every trainer.save_every "
            "steps, and at its end"
        )
    return step


def export_step(
    run_dir: Path,
    step: int,
    out: Path,
    model: str | None = None,
    dtype: str = "auto",
    adapter: bool = False,
) -> Path:
    """Write the checkpoint of `step` to `out`, a new or empty folder, and return `out`.

    `model` is the one that the run started from; None: where the run's settings say. A dtype `auto`
    is the checkpoint's. `adapter` writes the adapters alone, in PEFT's format. Raises ValueError
    when the checkpoint is missing or damaged, or when the model is not there.
    """
    checkpoint = run_dir / CHECKPOINTS_DIR / f"step-{step}"
    steps = checkpoint_steps(checkpoint.parent)
    if step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"step={step}: no such checkpoint in {checkpoint.parent}; it has {found}")
    if reason := damage(checkpoint):
        raise ValueError(f"{checkpoint} is damaged: {reason}; choose another step")
    source = Path(model or stored_settings(run_dir)["model"])
    if not source.is_dir():
        raise ValueError(
            f"the run started from the model {source}, which is not there: give the folder to "
            f"which it was moved (areal-lite export {run_dir} model=…)"
        )
    check_model_folder(source)
    # Megatron-core would use a GPU that it sees, and a run may need all of its memory.
    with environment("CUDA_VISIBLE_DEVICES", ""), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and Megatron-core warn of what their own code uses
        from areal_lite.tools.convert import convert  # torch is slow to import

        written = convert(checkpoint, source, out, dtype, adapter)
    print(f"step {step} of {run_dir}, {str(written).removeprefix('torch.')}", file=sys.stderr)
    return out
