"""The real settings of a trainer rank and a server: NCCL's settings, time-outs and groups."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch import server_pool as process
from areal_lite.launch.server_pool import ServerProcess

ROOT = Path(__file__).parents[2]

# A rank without a GPU takes the branches of a rank with one: the device is a stand-in, and gloo is
# the backend.
RANK = """
import ctypes, json, os, sys
import torch
import torch.distributed as dist
from unittest import mock
from areal_lite.config import TrainerConfig
from areal_lite.megatron import parallel
from megatron.core import parallel_state

seen = {}

def init(backend, timeout):
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        value = getenv(name.encode())
        seen[name] = value and value.decode()
    seen["backend"] = backend
    real("gloo", timeout)

real = parallel._init_process_group
with (
    mock.patch.object(parallel, "_init_process_group", init),
    mock.patch.object(parallel, "select_device", lambda config: torch.device(sys.argv[1])),
    mock.patch.object(torch.cuda, "set_device"),
    mock.patch.object(parallel, "model_parallel_cuda_manual_seed"),
):
    parallel.init_distributed(TrainerConfig(), seed=1)

group = parallel_state.get_data_parallel_group()
seen["bound"] = dist.distributed_c10d._get_default_group().bound_device_id is not None
seen["timeouts"] = [
    g._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    for g in (dist.distributed_c10d._get_default_group(), group)
]
seen["gloo groups"] = sum("GLOO" in g.group_desc for g in dist.distributed_c10d._world.pg_map)
print(json.dumps(seen))
"""

SERVER = """
import json, os
names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")
print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
"""


def rank(device: str, **environment: str) -> dict:
    command = [sys.executable, "-c", RANK, device]
    result = subprocess.run(
        command, cwd=ROOT, env=clean() | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def server(folder: Path, device: str) -> dict:
    """Return what the process of a server has in its environment."""
    (folder / "config.json").write_text("{}")
    config = ServerConfig(device=device)
    started = ServerProcess(
        config, str(folder), name="s", port=1, seed=1, log_path=folder / "server.log"
    )
    started.argv = [sys.executable, "-c", SERVER]
    started.start()
    started._process.wait(20)
    return json.loads(started.log_path.read_text().splitlines()[-1])


def clean() -> dict[str, str]:
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in names}


@pytest.mark.parametrize("users", [{}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}])
def test_trainer_and_servers_agree_on_nccls_memory(tmp_path, monkeypatch, users) -> None:
    """SGLang sets 0 where nothing is set, and NCCL's default is 1: handles of two kinds."""
    for name in os.environ.keys() - clean().keys():
        monkeypatch.delenv(name)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "check_cuda", lambda: None)
    trainer, server_has = rank("cuda:0", **users), server(tmp_path, "cuda")
    expected = users or {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert expected.items() <= trainer.items() and expected.items() <= server_has.items()
    assert trainer["backend"] == "nccl" and not trainer["bound"]
    leaked = {"TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"}
    assert {server_has[name] for name in leaked} == {None}, "these are the trainer's only"


def test_every_group_waits_for_the_longest_evaluation() -> None:
    seen, day_s = rank("cpu"), 24 * 3600
    assert seen["timeouts"] == [day_s, day_s] and seen["gloo groups"] == 0
    assert seen["NCCL_CUMEM_ENABLE"] is None, "without a GPU nothing changes"
