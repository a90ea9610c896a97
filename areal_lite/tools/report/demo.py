"""The runs that are part of the package: demo, asynchronous, and demo-sync, synchronous.

Both are real runs of the quickstart, small ones: 24 steps of 8 groups of 4 trajectories on two
servers. `python -m tests.unit.tools.report.pack_demo RUN NAME` packs a run directory as a demo.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import msgspec
import numpy as np
from omegaconf import OmegaConf

from areal_lite.config import load_config
from areal_lite.run_dir.paths import (
    CONFIG_FILE,
    STORE_FILE,
)
from areal_lite.run_dir.store import Store
from areal_lite.system.files import publish_folder, scratch_folder
from areal_lite.trajectory import Group, Trajectory

FOLDER = Path(__file__).with_name("demo_runs")
GROUPS_FILE = "groups.msgpack"


class PackedTrajectory(msgspec.Struct, array_like=True):
    """A packed trajectory; its fields are columns of the store."""

    reward: float | None
    finish_reason: str
    started_at: float
    finished_at: float
    server: str
    tokens: bytes
    logprobs: bytes
    versions: bytes
    prompt: str | None
    completion: str | None


class PackedGroup(msgspec.Struct, array_like=True):
    """A packed group; `admission` has the columns of that name."""

    admission: tuple[int, str, int, int, int, float]
    finished_at: float
    step: int
    trajectories: list[PackedTrajectory]


def unpack(name: str = "demo", parent: Path = Path("runs")) -> Path:
    """Unpack the run `name` to `<parent>/<name>`, if it is not there, and return that folder."""
    folder = parent / name
    if not (folder / STORE_FILE).exists():
        scratch = scratch_folder(folder)
        with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
            archive.extractall(scratch, filter="data")
        # Settings that are newer than the archive have their defaults.
        config = load_config(scratch)
        config.model, config.run_dir = str(folder / "model"), str(folder)
        OmegaConf.save(OmegaConf.structured(config), scratch / CONFIG_FILE)
        _write_store(scratch / STORE_FILE, (scratch / GROUPS_FILE).read_bytes())
        (scratch / GROUPS_FILE).unlink()
        publish_folder(scratch, folder)
    return folder


def _write_store(path: Path, packed: bytes) -> None:
    """Write the packed groups, all of them used, to a new store."""
    store = Store(path)
    store.begin()
    for group in msgspec.msgpack.decode(packed, type=list[PackedGroup]):
        store.admit(*group.admission)
        trajectories = [
            Trajectory(
                group_id=group.admission[0],
                prompt_id=group.admission[1],
                sample_index=number,
                tokens=np.frombuffer(one.tokens, np.int32),
                loss_mask=np.frombuffer(one.versions, np.int32) >= 0,
                behavior_logprobs=np.frombuffer(one.logprobs, np.float32),
                versions=np.frombuffer(one.versions, np.int32),
                finish_reason=one.finish_reason,
                reward=one.reward,
                started_at=one.started_at,
                finished_at=one.finished_at,
                server=one.server,
            )
            for number, one in enumerate(group.trajectories)
        ]
        group_id, prompt_id, prompt_index, _, size, _ = group.admission
        whole = Group(
            group_id=group_id,
            prompt_id=prompt_id,
            size=size,
            trajectories=trajectories,
            prompt_index=prompt_index,
        )
        texts = [(one.prompt, one.completion) for one in group.trajectories]
        store.finish(whole, texts, None, group.finished_at)
        store.use([group_id], group.step)
    store.commit()
    store.close()
