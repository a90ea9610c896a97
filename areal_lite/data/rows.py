"""Readers of data files: each yields rows with an id that says where the row is from.

A row's id is `<file name>:<line>` or `<split>:<number>`, counted from 1.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from areal_lite.config import DataConfig

Split = Literal["train", "eval"]
Row = tuple[str, dict[str, Any]]  # (row id, the row itself)


def jsonl_rows(config: DataConfig, split: Split) -> Iterator[Row]:
    """Read a JSONL file. Raises ValueError without a file, or if a line is not an object."""
    key, path = (
        ("data.path", config.path) if split == "train" else ("data.eval_path", config.eval_path)
    )
    if path is None:
        raise ValueError(f"data.source=jsonl needs {key}, a file with one JSON object per line")
    if not Path(path).is_file():
        raise ValueError(f"{key}={path} is not a file")
    return _jsonl_file(Path(path))


def hf_rows(config: DataConfig, split: Split, name: str, part: str) -> Iterator[Row]:
    """Read a Hugging Face data set of any kind that prompts.py lists.

    `name` is its configuration, or empty; `part` is what it calls the split.
    """
    path = (config.eval_path if split == "eval" else None) or config.path
    if path is None:
        raise ValueError("data.source=hf needs data.path, the name or the folder of a data set")
    folder = Path(path, name)
    if folder.is_file():
        return _parquet_file(folder) if folder.suffix == ".parquet" else _jsonl_file(folder)
    if not folder.is_dir():
        datasets = _library("datasets")
        return _numbered(part, datasets.load_dataset(path, name or None, split=part))
    if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        return _numbered(part, _saved_data_set(folder, part))
    return _folder(folder, part)


def _library(name: str) -> Any:
    """Import a module of the extra `hf`. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(f"{name} is not installed: pip install datasets") from None


def _jsonl_file(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                # Some editors begin a file with a byte-order mark.
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8: {error}; convert the file") from None
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            except RecursionError:
                raise ValueError(f"{path}:{number}: not JSON: nested too deep") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}:{number}: a {type(row).__name__}, not an object of keys and values"
                )
            yield f"{path.name}:{number}", row


def _parquet_file(path: Path) -> Iterator[Row]:
    parquet = _library("pyarrow.parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        yield from _numbered(path.name, (row for batch in batches for row in batch.to_pylist()))
    except (_library("pyarrow").ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file that can be read: {error}") from None


def _folder(folder: Path, split: str) -> Iterator[Row]:
    files = sorted([*folder.glob(f"{split}*.jsonl"), *folder.glob(f"{split}*.parquet")])
    if not files:
        raise ValueError(
            f"{folder} has no {split}*.jsonl and no {split}*.parquet:"
            " set data.path, data.args.name and the split's name"
        )
    for file in files:
        yield from _jsonl_file(file) if file.suffix == ".jsonl" else _parquet_file(file)


def _saved_data_set(folder: Path, split: str) -> Any:
    datasets = _library("datasets")
    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(
            f"{folder} has no split {split!r}, only {sorted(loaded)}:"
            " set data.args.train_split and data.args.eval_split"
        )
    return loaded[split]


def _numbered(name: str, rows: Any) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield f"{name}:{number}", row
