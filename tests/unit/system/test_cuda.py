"""Driver, toolkit and memory of GPUs, as stand-ins for nvidia-smi and nvcc tell them."""

import pytest

from areal_lite.system.gpus import GpuMemory, check_cuda, cuda_home, gpu_memory
from tests.unit.system.fake_gpu import fake_gpu


def test_a_machine_with_driver_and_toolkit_passes(tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch)
    check_cuda()


def test_an_old_driver_is_refused(tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch, driver="570.86.15")
    with pytest.raises(ValueError, match=r"driver 570\.86\.15: .* needs driver 580") as error:
        check_cuda()
    assert "\n" not in str(error.value)


def test_a_machine_without_a_toolkit_is_refused(tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch)
    (tmp_path / "cuda" / "bin" / "nvcc").unlink()
    with pytest.raises(ValueError, match="no CUDA compiler at .*/cuda/bin/nvcc: .*CUDA_HOME"):
        check_cuda()


def test_the_toolkit_is_found_where_sglang_finds_it(tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch)
    assert cuda_home() == tmp_path / "cuda"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    assert cuda_home() == tmp_path / "cuda"
    monkeypatch.setenv("CUDA_PATH", "/elsewhere")
    assert str(cuda_home()) == "/elsewhere"
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(cuda_home()) == "/usr/local/cuda"


def test_memory_of_a_gpu(tmp_path, monkeypatch):
    fake_gpu(tmp_path, monkeypatch, total=81920, free=40000)
    assert gpu_memory("0") == GpuMemory(81920 * 2**20, 40000 * 2**20)
    assert gpu_memory("MIG-1") is None  # nvidia-smi does not know slices of a GPU
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpu_memory("0") is None
