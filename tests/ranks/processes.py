"""Start ranks of a trainer, forked from one process that has imported what all of them need.

The imports of a rank (torch, transformers, Megatron-core) take longer than most of its tests.
"""

import gc
import json
import multiprocessing
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.multiprocessing

from areal_lite.system.network import free_port

processes = multiprocessing.get_context("forkserver")
# There is one fork server, so this is also what the other tests fork from.
processes.set_forkserver_preload(
    ["areal_lite.trainer.loop", "tests.gloo_server", "tests.push_server"]
)


def run_ranks(
    worker: Path, job: dict, folder: Path, world: int, *, status: int = 0, timeout_s: float = 280
) -> None:
    """Run `worker` on `world` ranks with torchrun's environment, wait, and leave none behind.

    A worker is a script whose argument is job.json. `folder`, which must not exist, gets job.json
    and the output of each rank. The assertion that every rank ends with `status` shows the output
    of one that does not.
    """
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = []
    try:
        for rank in range(world):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = processes.Process(target=_rank, args=(worker, folder, rank, own))
            process.start()
            ranks.append(process)
        _wait(ranks, folder, status, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def call_on_ranks(function: Callable, args: tuple, world: int) -> None:
    """Call `function(rank, *args)` in a process per rank. Raises what one of them raised."""
    torch.multiprocessing.start_processes(function, args, world, start_method="forkserver")


def _rank(worker: Path, folder: Path, rank: int, environment: dict[str, str]) -> None:
    with open(folder / f"{rank}.log", "w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    gc.freeze()  # Megatron collects garbage at each checkpoint: not what the imports made
    warnings.simplefilter("ignore")
    sys.argv = [str(worker), str(folder / "job.json")]
    runpy.run_path(str(worker), run_name="__main__")


def _wait(ranks: list[BaseProcess], folder: Path, status: int, deadline: float) -> None:
    """Wait until every rank has ended with `status`, or one has not."""
    while True:
        codes = [process.exitcode for process in ranks]
        for rank, code in enumerate(codes):
            assert code in (None, status), (
                f"rank {rank} of {len(ranks)} ended with {code}, not {status}:\n"
                f"{(folder / f'{rank}.log').read_text()[-4000:]}"
            )
        if None not in codes:
            return
        assert time.monotonic() < deadline, f"the ranks did not end in time: see {folder}"
        time.sleep(0.05)
