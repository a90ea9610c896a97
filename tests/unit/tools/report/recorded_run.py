"""Two recorded runs for tests of the tools: "async" and "sync".

Both are real runs of the quickstart, small ones: 24 steps of 8 groups of 4 trajectories on two
servers. `python -m tests.unit.tools.report.recorded_run RUN NAME` packs a run directory as one.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from omegaconf import OmegaConf

from areal_lite.config import load_config
from areal_lite.run_dir.paths import (
    CONFIG_FILE,
    EVALS_FILE,
    METRICS_FILE,
    PROXIMAL_FILE,
    STORE_FILE,
    SUMMARY_FILE,
    TOTALS_FILE,
)
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_format import ADMISSION
from areal_lite.system.files import publish_folder, scratch_folder, write_json
from areal_lite.trajectory import Group, Trajectory

_FOLDER = Path(__file__).with_name("recorded_runs")
# Python 3.11.2 has no filters yet.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
_GROUPS_FILE = "groups.msgpack"
_FILES = (METRICS_FILE, EVALS_FILE, PROXIMAL_FILE, SUMMARY_FILE, TOTALS_FILE)


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


def unpack(name: str, parent: Path) -> Path:
    """Unpack the run `name` to `<parent>/<name>`, if it is not there, and return that folder."""
    folder = parent / name
    if not (folder / STORE_FILE).exists():
        scratch = scratch_folder(folder)
        with tarfile.open(_FOLDER / f"{name}.tar.xz") as archive:
            archive.extractall(scratch, **_FILTER)
        # Settings that are newer than the archive have their defaults.
        config = load_config(scratch)
        config.model, config.run_dir = str(folder / "model"), str(folder)
        OmegaConf.save(OmegaConf.structured(config), scratch / CONFIG_FILE)
        _write_store(scratch / STORE_FILE, (scratch / _GROUPS_FILE).read_bytes())
        (scratch / _GROUPS_FILE).unlink()
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


def pack(run_dir: Path, name: str) -> Path:
    """Pack a run whose groups were all used, and its tokenizer, and return the archive.

    The groups are packed without SQLite: an archive outlives changes of the store's tables.
    """
    archive = _FOLDER / f"{name}.tar.xz"
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file in _FILES:
            shutil.copy(run_dir / file, folder)
        summary = json.loads((folder / SUMMARY_FILE).read_text())
        write_json(folder / SUMMARY_FILE, {**summary, "run_dir": name, "report": None})
        config = OmegaConf.load(run_dir / CONFIG_FILE)
        (folder / "model").mkdir()
        shutil.copy(Path(config.model) / "tokenizer.json", folder / "model")
        config.model = config.run_dir = "?"
        OmegaConf.save(config, folder / CONFIG_FILE)
        (folder / _GROUPS_FILE).write_bytes(
            msgspec.msgpack.encode(_read_groups(run_dir / STORE_FILE))
        )
        with lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for file in sorted(folder.iterdir()):
                    tar.add(file, file.name, filter=_without_owner)
    return archive


def _read_groups(path: Path) -> list[PackedGroup]:
    store = RunReader(path)
    members: dict[int, list[PackedTrajectory]] = {}
    for row in store.trajectories(state="used"):
        arrays = {key: row[key].tobytes() for key in ("tokens", "logprobs", "versions")}
        values = {key: row[key] for key in PackedTrajectory.__struct_fields__} | arrays
        members.setdefault(row["group_id"], []).append(PackedTrajectory(**values))
    groups = [
        PackedGroup(
            admission=tuple(row[key] for key in ADMISSION),
            finished_at=row["finished_at"],
            step=row["step"],
            trajectories=members[row["group_id"]],
        )
        for row in store.groups()
    ]
    store.close()
    return groups


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    made = pack(Path(sys.argv[1]), sys.argv[2])
    print(made, made.stat().st_size, "bytes")
