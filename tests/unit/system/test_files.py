"""Files that appear complete or not at all."""

import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from areal_lite.system.files import append_log, to_plain, write_atomically, write_json


def test_the_content_is_replaced_and_nothing_else_remains(tmp_path):
    path = tmp_path / "new" / "file"
    write_atomically(path, "first, longer")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second" and os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_leaves_the_old_content(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_only_the_owner_reads_a_private_file(tmp_path):
    path = tmp_path / "key"
    write_atomically(path, "hush", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_atomically(path, "hush again", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_json_has_plain_types_only(tmp_path):
    value = {1: np.float32(0.5), "a": np.array([1, 2]), "b": (math.nan, math.inf), "c": Path("x")}
    plain = {"1": 0.5, "a": [1, 2], "b": [None, None], "c": "x"}
    assert to_plain(value) == plain
    write_json(tmp_path / "file.json", value)
    assert json.loads((tmp_path / "file.json").read_text()) == plain


def test_a_log_on_a_full_disk_loses_its_line_and_nothing_else(tmp_path):
    append_log(tmp_path / "log", "one")
    append_log(tmp_path / "log", "two")
    assert [line[20:] for line in (tmp_path / "log").read_text().splitlines()] == ["one", "two"]
    append_log(Path("/dev/full"), "three")
