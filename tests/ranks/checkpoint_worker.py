"""One rank of the checkpoint tests: `checkpoint_worker.py JOB`, with torchrun's environment.

JOB is a JSON file (see test_checkpoint.py): stories, each told with a fresh engine. Rank 0 writes
what they return to the file `results` of the job.
"""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_lite.config import TrainerConfig
from areal_lite.megatron import checkpoint
from areal_lite.megatron.checkpoint import Checkpoints, filesystem_async, load_checkpoint
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Critic, Policy
from areal_lite.run_dir.resume import latest_checkpoint
from areal_lite.train_batch import TrainBatch
from tests.ranks.engine_worker import load, random_batch

# The large epsilon keeps Adam from blowing up rounding errors of gradients that are almost zero.
SETTINGS = dict(
    steps=8,
    lr=1e-3,
    lr_schedule="cosine",
    lr_warmup_steps=4,
    min_lr=1e-4,
    weight_decay=0.1,
    clip_grad=0.5,
    adam_eps=1e-5,
)


Writer = filesystem_async.FileSystemWriterAsync


class Story:
    """Training, saving and loading on this rank. Every method is a story."""

    def __init__(self, layout: dict, model: str, seed: int = 1, **overrides):
        self.settings = SETTINGS | layout | overrides
        self.engine = Policy(TrainerConfig(**self.settings), model, seed)

    def train(self, steps: range, poison: bool = False) -> list[dict[str, float]]:
        """Update once per step. `poison`: the loss of the last data-parallel rank is NaN."""
        return [self._update(step, poison) for step in steps]

    def _update(self, step: int, poison: bool) -> dict[str, float]:
        """Update on the batch of `step`, distributed to the data-parallel ranks in turns."""
        whole = random_batch(12, 98, seed=step)
        rank, size = self.engine.dp_group.rank(), self.engine.dp_group.size()
        batch = whole.select(range(rank, whole.num_sequences, size))
        weights = torch.from_numpy(batch.rewards[batch.sequence_ids])
        microbatches = make_microbatches(batch, 128)

        def loss(logprobs, entropy, microbatch):
            share = -(
                (weights[microbatch.token_index] * logprobs).sum() + 0.1 * entropy.sum()
            ) / len(whole.tokens)
            return share * (float("nan") if poison and rank == size - 1 else 1.0), {}

        return self.engine.update(microbatches, loss)

    def checkpoints(self, folder: str, **settings) -> Checkpoints:
        return Checkpoints(Path(folder), {"policy": self.engine}, **settings)

    def uninterrupted(self, folder: str) -> dict:
        """Update three times, save, update three more while the save is held, save again."""
        checkpoints = self.checkpoints(folder)
        disk = hold_the_disk()
        first = self.train(range(3))
        checkpoints.save(3, {"step": 3, "note": "three updates"})
        second = self.train(range(3, 6))
        checkpoints.poll()
        unpublished = latest_checkpoint(Path(folder)) is None
        dist.barrier()
        disk.set()
        checkpoints.save(6, {"step": 6})
        while checkpoints.pending:
            checkpoints.poll()
        return {"first": first, "second": second, "unpublished": unpublished}

    def resumed(self, folder: str, into: str) -> dict:
        extra = load(self.engine, Path(folder) / "step-3")
        second = self.train(range(3, 6))
        again = self.checkpoints(into)
        again.save(6, {"step": 6})
        again.wait()
        return {"extra": extra, "second": second}

    def exported(self, folder: str) -> list:
        """Update three times and write the weights in Hugging Face format."""
        history = self.train(range(3))
        self.engine.export_hf(folder)
        return history

    def refused(self, folder: str) -> str:
        """Load a checkpoint that another optimizer wrote; return the error."""
        try:
            load(self.engine, Path(folder) / "step-3")
        except ValueError as error:
            return str(error)

    def with_critic(self, folder: str) -> dict:
        """Save policy and critic together, train further, and load them."""
        critic = Critic(self.engine.config, self.engine.source, seed=1)

        def train_critic(steps: range) -> list[dict[str, float]]:
            batches = [random_batch(12, 98, seed=step) for step in steps]
            return [
                critic.update(
                    make_microbatches(b, 128), lambda values, _: ((values - 1).square().mean(), {})
                )
                for b in batches
            ]

        self.train(range(2))
        train_critic(range(1))
        both = Checkpoints(Path(folder), {"policy": self.engine, "critic": critic})
        both.save(2, {})
        both.wait()
        expected = [self.train(range(2, 4)), train_critic(range(2, 4))]
        load_checkpoint(latest_checkpoint(Path(folder)), both.parts)
        got = [self.train(range(2, 4)), train_critic(range(2, 4))]
        alone = self.checkpoints(folder + "-alone")
        alone.save(1, {})
        alone.wait()
        return {"expected": expected, "got": got}

    def needs_critic(self, folder: str) -> str:
        try:
            parts = {"policy": self.engine, "critic": self.engine}
            load_checkpoint(latest_checkpoint(Path(folder)), parts)
        except ValueError as error:
            return str(error)

    def before_any_update(self, folder: str) -> dict:
        """Save before the optimizer has moments, and load it. Then keep the newest."""
        plain = Story(self.settings, str(self.engine.source)).train(range(2))
        checkpoints = self.checkpoints(folder, keep=2)
        # Moments that nobody sets would be what this memory held.
        sizes = {p.numel() for p in self.engine.model.parameters()}
        freed = [torch.full((size,), 1e9) for size in sizes for _ in range(20)]
        del freed
        checkpoints.save(0, {})
        first = self.train(range(2))
        checkpoints.wait()
        load(self.engine, Path(folder) / "step-0")
        again = self.train(range(2))
        for step in (5, 10, 15, 20, 25):
            checkpoints.save(step, {})
        checkpoints.wait()
        return {
            "plain": plain,
            "first": first,
            "again": again,
            "left": sorted(path.name for path in Path(folder).iterdir()),
        }

    def other_rate(self, folder: str) -> list:
        """Continue with other settings than the checkpoint's."""
        load(self.engine, Path(folder) / "step-3")
        return self.train(range(3, 6))

    def offloaded(self) -> dict:
        plain = Story(self.settings, str(self.engine.source))
        expected = plain.train(range(3))
        got = []
        sizes = set()
        for step in range(3):
            got += self.train(range(step, step + 1))
            self.engine.offload()
            sizes.add(self.engine.ddps[0].buffers[0].grad_data.untyped_storage().size())
            self.engine.onload()
        return {"expected": expected, "got": got, "offloaded_bytes": sorted(sizes)}

    def poisoned(self) -> dict:
        first = self.train(range(1))
        before = {name: p.detach().clone() for name, p in self.engine.model.named_parameters()}
        bad = self.train(range(1, 2), poison=True)
        same = all(torch.equal(before[name], p) for name, p in self.engine.model.named_parameters())
        return {"first": first, "bad": bad, "same": same, "next": self.train(range(2, 3))}

    def measured(self) -> dict:
        return measured(self.engine)

    def unwritable(self, folder: str) -> str:
        """Save when the last rank cannot write its part; return the error."""
        checkpoints = self.checkpoints(folder)
        checkpoints.save(1, {})
        checkpoints.wait()
        if dist.get_rank() == dist.get_world_size() - 1:
            break_the_disk()
        checkpoints.save(2, {})
        try:
            checkpoints.wait()
        except RuntimeError as error:
            return str(error)

    def apart(self, folder: str) -> dict:
        """Save and resume where each rank sees a folder of its own. Rank 1 gets its copy late."""
        own = Path(folder) / f"machine-{dist.get_rank()}"
        leftover = own / ".step-1.partial" / "__1_0.distcp"
        leftover.parent.mkdir(parents=True)
        leftover.write_text("of a killed save")
        checkpoints = self.checkpoints(str(own))
        checkpoint._CHUNK = 10_000  # several of them make a file
        self.train(range(3))
        checkpoints.save(3, {"step": 3})
        checkpoints.wait()
        dist.barrier()
        left = sorted(path.name for path in Path(folder).glob("*/*"))
        expected = self.train(range(3, 6))

        def copy() -> None:
            shutil.copytree(Path(folder) / "machine-0" / "step-3", scratch := own / "copy")
            scratch.rename(own / "step-3")

        if dist.get_rank() == 1:
            threading.Timer(0.5, copy).start()
        step = checkpoints.resume()
        return {"left": left, "step": step, "expected": expected, "got": self.train(range(3, 6))}

    def seen_late(self, folder: str) -> None:
        """Save into one folder, where rank 0 does not see yet what rank 1 has written."""
        exists = Path.exists
        Path.exists = lambda path: not path.name.startswith("__1_") and exists(path)
        try:
            checkpoints = self.checkpoints(folder)
            checkpoints.save(1, {"step": 1})
            checkpoints.wait()
        finally:
            Path.exists = exists

    def killed(self, folder: str) -> None:
        """Die while the second checkpoint is being written."""
        checkpoints = self.checkpoints(folder)
        checkpoints.save(3, {})
        checkpoints.wait()
        hold_the_disk()
        checkpoints.save(6, {})
        os.kill(os.getpid(), signal.SIGKILL)


def measured(engine: Policy) -> dict:
    """Count parameters, the bytes that autograd keeps, and the bytes of push buckets."""
    sizes = [p.numel() for p in engine.model.parameters()]
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    tokens = 512
    batch = one_sequence(tokens)
    kept: dict[int, torch.Tensor] = {}
    after_forward = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            # Kept alive, so that no two have the same address.
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def loss(logprobs, entropy, microbatch):
        after_forward.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
        return logprobs.sum() / tokens, {}

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.update(make_microbatches(batch, tokens), loss)
    buckets = [sum(t.nbytes for _, t in bucket) for bucket in engine.weights.buckets(60_000)]
    return {
        "parameters": sum(sizes),
        "kept": after_forward[0],
        "tokens": tokens,
        "buckets": buckets,
    }


def one_sequence(length: int) -> TrainBatch:
    """Make a batch of a single sequence, so that attention pads nothing."""
    return TrainBatch(
        tokens=(np.arange(length) % 90).astype(np.int32),
        loss_mask=np.ones(length, bool),
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        rewards=np.ones(1, np.float32),
        group_ids=np.zeros(1, np.int64),
        sample_indices=np.arange(1, dtype=np.int32),
        trace_indices=np.zeros(1, np.int32),
        truncated=np.zeros(1, bool),
        kv_versions=np.zeros(1, np.int32),
        source_keys=np.zeros(1, np.int64),
        cu_seqlens=np.array([0, length], np.int64),
    )


def hold_the_disk() -> threading.Event:
    """Hold all writes until the returned event is set."""
    write, released = Writer.write_preloaded_data, threading.Event()

    def held(*args, **kwargs):
        released.wait()
        return write(*args, **kwargs)

    Writer.write_preloaded_data = staticmethod(held)
    return released


def break_the_disk() -> None:
    write = Writer.write_preloaded_data

    def broken(transforms, index, bucket, *args, **kwargs):
        return write(transforms, index, ("/proc/no/such/file", *bucket[1:]), *args, **kwargs)

    Writer.write_preloaded_data = staticmethod(broken)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for name, story in job["stories"].items():
        teller = Story(job["layout"], job["model"], **story.get("settings", {}))
        results[name] = getattr(teller, story["tell"])(**story.get("args", {}))
    if dist.get_rank() == 0:
        Path(job["results"]).write_text(json.dumps(results))
    shutdown()


if __name__ == "__main__":
    main()
