"""Which checkpoints exist, which are removed, and what readers may rely on."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from areal_lite.megatron.checkpoint import AsyncRequest, _host_copy
from areal_lite.run_dir.resume import checkpoint_steps, latest_checkpoint
from areal_lite.system.files import publish_folder, reading, remove_unread, scratch_folder
from areal_lite.train_batch import TrainBatch, load_batch, save_batch


def checkpoint(folder: Path) -> Path:
    scratch = scratch_folder(folder)
    (scratch / "weights").write_text(folder.name)
    (scratch / "manifest.json").write_text("{}")
    publish_folder(scratch, folder)
    return folder


def test_only_complete_checkpoints_count(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        checkpoint(tmp_path / f"step-{step}")
    scratch_folder(tmp_path / "step-200")
    (tmp_path / "step-300").mkdir()
    (tmp_path / "hf").mkdir()
    assert checkpoint_steps(tmp_path) == [9, 10, 100]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoint(tmp_path / "step-1")
    scratch = scratch_folder(tmp_path / "step-1")
    (scratch / "manifest.json").write_text("new")
    publish_folder(scratch, tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert [path.name for path in (tmp_path / "step-1").iterdir()] == ["manifest.json"]


def test_a_copy_of_the_model_is_written():
    layer, master, momentum = torch.nn.Linear(3, 2), torch.ones(2), torch.ones(2)
    other = torch.zeros(2)  # copied by Megatron already
    request = AsyncRequest(
        None,
        (),
        [],
        preload_fn=lambda: [
            (
                "file",
                "key",
                (
                    [],
                    [
                        ("weight", layer.weight.detach()),
                        ("master", master),
                        ("momentum", momentum),
                        ("other", other),
                    ],
                ),
            )
        ],
    )
    state = {master: {"momentum_buffer": momentum}}
    one = SimpleNamespace(get_parameters=lambda: [master], optimizer=SimpleNamespace(state=state))
    optimizer = SimpleNamespace(chained_optimizers=[one])
    [(_, _, (_, [(_, weight), (_, masters), (_, momenta), (_, same)]))] = _host_copy(
        request, {"policy": SimpleNamespace(model=layer, optimizer=optimizer, average=None)}
    )
    before = weight.clone()
    layer.weight.data.zero_()
    master.zero_()
    momentum.zero_()
    assert torch.equal(weight, before) and before.any()
    assert masters.tolist() == momenta.tolist() == [1.0, 1.0]
    assert same is other


def _read(marker: Path, inside, leave) -> None:
    with reading(marker):
        inside.set()
        leave.wait()


def test_a_checkpoint_that_another_process_reads_is_not_removed(tmp_path):
    marker = checkpoint(tmp_path / "step-1") / "manifest.json"
    context = multiprocessing.get_context("fork")
    inside, leave = context.Event(), context.Event()
    reader = context.Process(target=_read, args=(marker, inside, leave))
    reader.start()
    try:
        assert inside.wait(30)
        assert not remove_unread(marker)
        assert marker.is_file()
        leave.set()
        reader.join(30)
        assert remove_unread(marker)
        assert list(tmp_path.iterdir()) == []
    finally:
        reader.kill()
        reader.join()


def test_two_may_read_at_once(tmp_path):
    marker = checkpoint(tmp_path / "step-1") / "manifest.json"
    with reading(marker):
        with reading(marker):
            pass
        assert not remove_unread(marker)


def test_a_saved_batch_comes_back(tmp_path):
    lengths = np.array([3, 2])
    batch = TrainBatch(
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 1, 1, 0, 1], bool),
        behavior_logprobs=np.array([0, -1, np.nan, 0, -np.inf], np.float32),
        versions=np.array([-1, 3, 4, -1, 4], np.int32),
        rewards=np.array([1.0, np.nan], np.float32),
        group_ids=np.array([7, 7], np.int64),
        sample_indices=np.array([0, 1], np.int32),
        trace_indices=np.zeros(2, np.int32),
        truncated=np.array([True, False]),
        kv_versions=np.array([3, 4], np.int32),
        source_keys=np.array([8, 9], np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )
    path = tmp_path / "bad_batches" / "step-3-rank-0.msgpack"
    save_batch(batch, path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    again = load_batch(path)
    for name in TrainBatch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
