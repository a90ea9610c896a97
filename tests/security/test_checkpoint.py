"""Damaged checkpoints are set aside, and none of them can run code."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import time
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from areal_lite.config import TrainConfig, save_config
from areal_lite.launch import prepare
from areal_lite.megatron.checkpoint import only_data
from areal_lite.run_dir.metrics import read_events
from areal_lite.run_dir.resume import (
    checkpoint_steps,
    damage,
    set_aside_damaged,
    start_version,
    write_manifest,
)
from tests.security.mutation import mutated


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def checkpoint(folder: Path, value: object = "plain") -> Path:
    """A distributed checkpoint as torch writes it: a tensor and an object, and the manifest."""
    state = {"weight": torch.arange(1000.0), "object": value}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder)))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    write_manifest(folder, {})
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("good") / "step-1")


FILES = (".metadata", "__0_0.distcp", "metadata.json", "manifest.json")


def copied(good: Path, run_dir: Path, *steps: int) -> list[Path]:
    folders = [run_dir / "checkpoints" / f"step-{step}" for step in steps]
    for folder in folders:
        shutil.copytree(good, folder)
    return folders


def change(path: Path, how: str) -> None:
    content = path.read_bytes()
    generator = random.Random(how)
    flipped = bytearray(content)
    flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    changed = {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "longer": content + b"\0",
        "garbage": generator.randbytes(len(content)),
        "flipped": bytes(flipped),
    }
    path.write_bytes(changed[how])


def test_a_whole_checkpoint_has_every_file_in_its_manifest(good):
    assert damage(good) == ""
    listed = json.loads((good / "manifest.json").read_text())
    assert sorted([*listed, "manifest.json"]) == sorted(os.listdir(good)) == sorted(FILES)


@pytest.mark.parametrize("how", ["empty", "truncated", "longer", "garbage", "flipped", "missing"])
@pytest.mark.parametrize("name", FILES[:3])
def test_every_damage_of_a_file_is_found(good, tmp_path, name, how):
    (folder,) = copied(good, tmp_path, 1)
    (folder / name).unlink() if how == "missing" else change(folder / name, how)
    assert damage(folder).startswith(f"{name} ")


def test_every_flipped_bit_of_a_tensor_is_found(good, tmp_path):
    (folder,) = copied(good, tmp_path, 1)
    path = folder / "__0_0.distcp"
    content, generator = path.read_bytes(), random.Random(1)
    for _ in range(300):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        assert damage(folder) == "__0_0.distcp has a wrong checksum"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"5", b"\xff", b'{"a": 1}', b'{"a": [1, 2]}', b"[" * 10**5]
)
def test_a_damaged_manifest_is_damage(good, tmp_path, content):
    (folder,) = copied(good, tmp_path, 1)
    (folder / "manifest.json").write_bytes(content)
    assert len(damage(folder).splitlines()) == 1 and damage(folder) != ""


@pytest.mark.parametrize("name", ["\0", "/dev/zero", "../1/__0_0.distcp", "..", "", "a/"])
def test_a_manifest_lists_files_of_its_folder_only(good, tmp_path, name):
    """A device would be read without end, and no file has a name with a null byte."""
    (folder,) = copied(good, tmp_path, 1)
    (folder / "manifest.json").write_text(json.dumps({name: [0, 0]}))
    assert len(damage(folder).splitlines()) == 1


def test_the_newest_whole_checkpoint_is_continued(good, tmp_path, capsys):
    """Metrics are cut at its step, so that store, metrics and weights agree."""
    copied(good, tmp_path, 2, 4, 6)
    change(tmp_path / "checkpoints/step-6/__0_0.distcp", "flipped")
    change(tmp_path / "checkpoints/step-4/metadata.json", "empty")
    save_config(TrainConfig(model="m", run_dir=str(tmp_path)), tmp_path)
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert prepare.begin(tmp_path) == 0
    assert start_version(tmp_path) == 2
    assert [one["step"] for one in read_events(tmp_path, "metrics")] == [1, 2]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-2", "step-4.damaged", "step-6.damaged"]
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2
    assert "step-6 is damaged: __0_0.distcp has a wrong checksum; it is now" in warned[0]
    assert "step-4 is damaged: metadata.json has 0 bytes, not 33" in warned[1]
    assert prepare.begin(tmp_path) == 0 and capsys.readouterr().err == ""


def test_damage_of_an_older_checkpoint_does_not_matter_now(good, tmp_path):
    copied(good, tmp_path, 2, 4)
    change(tmp_path / "checkpoints/step-2/.metadata", "garbage")
    set_aside_damaged(tmp_path)
    assert checkpoint_steps(tmp_path / "checkpoints") == [2, 4]


def test_without_a_whole_checkpoint_nothing_starts_from_the_beginning(good, tmp_path):
    copied(good, tmp_path, 2, 4)
    for step in (2, 4):
        change(tmp_path / f"checkpoints/step-{step}/__0_0.distcp", "truncated")
    for _ in range(2):  # the refusal leaves everything where it was
        with pytest.raises(ValueError, match="no checkpoint that is whole .*step-4: .*step-2: "):
            set_aside_damaged(tmp_path)
    assert checkpoint_steps(tmp_path / "checkpoints") == [2, 4]
    set_aside_damaged(tmp_path / "a new run")


def load(folder: Path) -> dict:
    state = {"weight": torch.zeros(1000), "object": None}
    with only_data(folder):
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    return state


def test_a_checkpoint_of_torch_is_data(good):
    state = load(good)
    assert torch.equal(state["weight"], torch.arange(1000.0)) and state["object"] == "plain"


def test_the_metadata_of_python_3_11_2_is_data(tmp_path, monkeypatch):
    """It pickles the member of an enumeration as a call of getattr."""
    monkeypatch.setattr(
        Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    folder = checkpoint(tmp_path / "step-1")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert torch.equal(load(folder)["weight"], torch.arange(1000.0))


@pytest.mark.parametrize("owner", [_MEM_FORMAT_ENCODING, torch.Size, {}])
def test_the_metadata_reads_no_other_attribute(good, tmp_path, owner):
    (folder,) = copied(good, tmp_path, 1)
    for name in ("__class__", "mro", "clear", ["name"]):
        (folder / ".metadata").write_bytes(pickle.dumps(Call(getattr, owner, name)))
        with pytest.raises(ValueError, match="metadata is damaged or forged"):
            load(folder)


def test_code_in_the_metadata_does_not_run(good, tmp_path):
    (folder,) = copied(good, tmp_path, 1)
    witness = tmp_path / "ran"
    for forged in (
        Call(Path.touch, witness),
        {"a": [Call(Path.touch, witness)]},
        os.system,
        torch.load,
        eval,
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(forged))
        with pytest.raises(ValueError, match="metadata is damaged or forged: it names "):
            load(folder)
    assert not witness.exists()
    (folder / ".metadata").write_bytes(pickle.dumps(Call(Path.touch, witness)))
    with contextlib.suppress(AttributeError):
        dcp.FileSystemReader(folder).read_metadata()
    assert witness.exists()  # torch itself has no such wall


def test_code_in_an_object_does_not_run(tmp_path):
    witness = tmp_path / "ran"
    folder = checkpoint(tmp_path / "step-1", Call(Path.touch, witness))
    assert damage(folder) == ""
    with pytest.raises(ValueError, match="cannot be loaded.*Weights only load failed") as refused:
        load(folder)
    assert len(str(refused.value).splitlines()) == 1
    assert not witness.exists()


def test_the_wall_is_gone_after_the_block(good):
    with only_data(good):
        pass
    file = io.BytesIO()
    torch.save(Path("x"), file)
    file.seek(0)
    assert torch.load(file, weights_only=False) == Path("x")


@pytest.mark.parametrize("how", ["empty", "truncated", "garbage"])
def test_damaged_metadata_is_one_line(good, tmp_path, how):
    (folder,) = copied(good, tmp_path, 1)
    change(folder / ".metadata", how)
    with pytest.raises(ValueError, match="metadata is damaged or forged") as refused:
        load(folder)
    assert len(str(refused.value).splitlines()) == 1


WORDS = [b"\x80\x04", b"cos\nsystem\n", b"ctorch\nload\n", b"R", b"b", b"u", b"\x85", b".", b"N"]
WORDS += [b"8\xff\xff\xff\x7f", b"cpathlib\nPath\n", b"I999999999\n", b"\x8a\xff", b"(", b"t"]


def read_mutated_metadata(good, tmp_path, seed: int, count: int) -> None:
    (folder,) = copied(good, tmp_path, 1)
    rng, honest = random.Random(seed), (good / ".metadata").read_bytes()
    for _ in range(count):
        (folder / ".metadata").write_bytes(mutated(rng, honest, WORDS))
        started = time.process_time()
        try:
            with only_data(folder):
                dcp.FileSystemReader(folder).read_metadata()
        except ValueError as error:
            assert "metadata is damaged or forged" in str(error)
            assert len(str(error).splitlines()) == 1
        assert time.process_time() - started < 1


def test_mutated_metadata(good, tmp_path) -> None:
    """Reading any bytes ends soon, runs nothing and says what is wrong."""
    read_mutated_metadata(good, tmp_path, 1, 2000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_mutated_metadata(good, tmp_path) -> None:
    read_mutated_metadata(good, tmp_path, 2, 200_000)
