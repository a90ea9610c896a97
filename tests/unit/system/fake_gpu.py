"""Stand-ins for nvidia-smi and nvcc, on a machine without a GPU."""

import os
from pathlib import Path

import pytest

_NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *MIG*) echo "No devices were found"; exit 6 ;;
  *driver_version*) echo "{driver}" ;;
  *memory*) echo "{total}, $(cat "{folder}/free")" ;;
esac
"""


def fake_gpu(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    driver: str = "580.82.07",
    total: int = 81920,
    free: int = 81000,
) -> None:
    """Put a nvidia-smi that sees one GPU on the PATH, and a CUDA toolkit into CUDA_HOME.

    Args:
        folder: where to put them. Its file `free` says how much memory is free.
        monkeypatch: sets the environment.
        driver: version of the driver.
        total: memory of the GPU, in MiB.
        free: free memory of the GPU, in MiB.
    """
    texts = {
        "bin/nvidia-smi": _NVIDIA_SMI.format(driver=driver, total=total, folder=folder),
        "cuda/bin/nvcc": "#!/bin/sh\n",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "free").write_text(str(free))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
