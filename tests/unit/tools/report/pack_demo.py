"""Pack a run as a demo of the package: `python -m tests.unit.tools.report.pack_demo RUN NAME`."""

import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec
from omegaconf import OmegaConf

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
from areal_lite.run_dir.store_format import ADMISSION
from areal_lite.system.files import write_json
from areal_lite.tools.report import demo
from areal_lite.tools.report.demo import PackedGroup, PackedTrajectory

_FILES = (METRICS_FILE, EVALS_FILE, PROXIMAL_FILE, SUMMARY_FILE, TOTALS_FILE)


def pack(run_dir: Path, name: str) -> Path:
    """Pack a run whose groups were all used, and its tokenizer, and return the archive.

    The groups are packed without SQLite: an archive outlives changes of the store's tables.
    """
    archive = demo.FOLDER / f"{name}.tar.xz"
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
        (folder / demo.GROUPS_FILE).write_bytes(
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
