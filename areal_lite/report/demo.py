"""The runs that are part of the package: demo, asynchronous, and demo-sync, synchronous.

Both are real runs of the quickstart, small ones: 24 steps of 8 groups of 4 trajectories on two
servers. `python -m areal_lite.report.demo RUN NAME` packs a run directory as the demo NAME.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from pathlib import Path

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
from areal_lite.system.files import publish_folder, scratch_folder, write_json

_FOLDER = Path(__file__).with_name("demo_runs")
_FILES = (METRICS_FILE, EVALS_FILE, PROXIMAL_FILE, SUMMARY_FILE, TOTALS_FILE)


def unpack(name: str = "demo", parent: Path = Path("runs")) -> Path:
    """Unpack the run `name` to `<parent>/<name>`, if it is not there, and return that folder."""
    folder = parent / name
    if not (folder / STORE_FILE).exists():
        scratch = scratch_folder(folder)
        with tarfile.open(_FOLDER / f"{name}.tar.xz") as archive:
            archive.extractall(scratch, filter="data")
        config = OmegaConf.load(scratch / CONFIG_FILE)
        config.model, config.run_dir = str(folder / "model"), str(folder)
        OmegaConf.save(config, scratch / CONFIG_FILE)
        publish_folder(scratch, folder)
    return folder


def pack(run_dir: Path, name: str) -> Path:
    """Pack a run and the tokenizer of its model, and return the archive."""
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
        source = sqlite3.connect(f"file:{run_dir / STORE_FILE}?mode=ro", uri=True)
        source.execute("VACUUM INTO ?", (str(folder / STORE_FILE),))
        source.close()
        with lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for file in sorted(folder.iterdir()):
                    tar.add(file, file.name, filter=_without_owner)
    return archive


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    made = pack(Path(sys.argv[1]), sys.argv[2])
    print(made, made.stat().st_size, "bytes")
