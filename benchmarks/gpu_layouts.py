"""The parts of gpu.py that compare parallel layouts of the trainer with one rank alone.

Every rank is a process of its own: `gpu_layouts.py JOB`, with torchrun's environment. All layouts
of the same number of ranks run in the same processes, one after another. Without GPUs they connect
by gloo.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_parts import CUDA, Result, random_batch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_lite.config import TrainerConfig
from areal_lite.megatron.checkpoint import PendingCheckpoint, load_checkpoint
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.system.network import free_port
from areal_lite.system.processes import die_with_parent, dying_with_me

SERVER_ARGS: dict[str, str | bool] = {}  # no server is started here
UPDATES = 4
VOCAB = 1024
SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=VOCAB,
    max_position_embeddings=1024,
    eos_token_id=None,
    bos_token_id=None,
    initializer_range=0.05,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=128
)
# name -> (model, layout)
ALONE = {"alone": ("dense", {}), "alone, experts": ("experts", {})}
TWO: dict[str, tuple[str, dict]] = {
    "tensor": ("dense", dict(tensor_parallel=2)),
    "pipeline": ("dense", dict(pipeline_parallel=2)),
    "interleaved": ("dense", dict(pipeline_parallel=2, virtual_pipeline=2)),
    "context": ("dense", dict(context_parallel=2)),
    "data": ("dense", dict(data_parallel=2)),
    "experts": ("experts", dict(data_parallel=2, expert_parallel=2)),
}
FOUR: dict[str, tuple[str, dict]] = {
    "tensor x pipeline": ("dense", dict(tensor_parallel=2, pipeline_parallel=2)),
    "tensor x context": (
        "dense",
        dict(tensor_parallel=2, context_parallel=2),
    ),
    "context x pipeline": ("dense", dict(context_parallel=2, pipeline_parallel=2)),
    "data x pipeline": ("dense", dict(data_parallel=2, pipeline_parallel=2)),
    "tensor x experts": (
        "experts",
        dict(tensor_parallel=2, data_parallel=2, expert_parallel=2),
    ),
}
# Largest difference of a log-prob in nats, before and after the updates, and of a loss. The order
# of sums differs. In bfloat16 each rounds to 8 bits.
LIMITS = {"float32": (1e-3, 1e-4), "bfloat16": (0.25, 0.02)}


def layouts(tiny: bool) -> Result:
    """Compare the layouts of two ranks with one rank."""
    return _compare_with_one_rank(TWO, 2)


def layouts4(tiny: bool) -> Result:
    """Compare the layouts of four ranks with one rank."""
    return _compare_with_one_rank(FOUR, 4)


def _compare_with_one_rank(cases: dict[str, tuple[str, dict]], world: int) -> Result:
    folder = Path(tempfile.mkdtemp())
    _save_models(folder)
    numbers, checks = {}, {}
    for dtype in LIMITS if CUDA else ("float32",):
        alone = _run(ALONE, folder, dtype, 1)
        together = _run(cases, folder, dtype, world)
        for name, (model, _) in cases.items():
            want = alone["alone" if model == "dense" else "alone, experts"]
            got = together[name]
            logprobs = max(float((got[key] - want[key]).abs().max()) for key in ("before", "after"))
            losses = max(abs(a - b) for a, b in zip(got["losses"], want["losses"], strict=True))
            numbers[f"{name}, {dtype}"] = (
                f"log-probs differ by {logprobs:.1e} nats, losses by {losses:.1e}, "
                f"{got['seconds']:.1f} s"
            )
            most_logprobs, most_losses = LIMITS[dtype]
            checks[f"{name} computes what one rank does, {dtype}"] = (
                logprobs < most_logprobs and losses < most_losses
            )
            checks[f"{name} learns, {dtype}"] = got["losses"][-1] < got["losses"][0]
            checks[f"{name} loads what it saved, {dtype}"] = torch.equal(
                got["loaded"], got["after"]
            )
    return numbers, checks


def _save_models(folder: Path) -> None:
    torch.manual_seed(0)
    dense = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SHAPE))
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(tie_word_embeddings=False, **SHAPE, **EXPERTS))
    for name, model in (("dense", dense), ("experts", experts)):
        model.float().save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")


def _run(cases: dict[str, tuple[str, dict]], folder: Path, dtype: str, world: int) -> dict:
    """Run the cases on `world` ranks and return what rank 0 found, by case."""
    job = folder / f"{dtype}-{world}.json"
    out = job.with_suffix(".pt")
    models = {name: [str(folder / model), layout] for name, (model, layout) in cases.items()}
    job.write_text(json.dumps({"cases": models, "dtype": dtype, "out": str(out)}))
    environment = os.environ | dying_with_me()
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"WORLD_SIZE": str(world), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    # A default group that has ended leaves its port in use for a while.
    environment["PORTS"] = " ".join(str(free_port()) for _ in cases)
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen([sys.executable, __file__, str(job)], env=environment | own))
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):  # the others would wait for it
            break
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
        rank.wait()
    assert not any(rank.returncode for rank in ranks), [rank.returncode for rank in ranks]
    return torch.load(out)


def _case(config: TrainerConfig, model: str, checkpoint: Path) -> dict[str, Any]:
    """Compute log-probs, train, compute them again, and once more from a checkpoint.

    All layouts see the same sequences.
    """
    start = time.perf_counter()
    policy = Policy(config, Path(model), 1)
    lengths = np.random.default_rng(1).integers(8, 120, 16)
    batch = random_batch(lengths, VOCAB)
    whole = make_microbatches(batch, 256)
    rank, size = policy.dp_group.rank(), policy.dp_group.size()
    share = batch.select(range(rank, batch.num_sequences, size))
    microbatches, count = make_microbatches(share, 256), float(batch.loss_mask.sum())
    mask = torch.from_numpy(share.loss_mask).to(policy.device)

    def loss(logprobs, entropy, microbatch):
        return -(logprobs * mask[microbatch.token_index]).sum() / count, {}

    before = policy.logprobs(whole).float().cpu()
    losses = [policy.update(microbatches, loss)["loss"] for _ in range(UPDATES)]
    after = policy.logprobs(whole).float().cpu()
    PendingCheckpoint(Path(checkpoint), {"policy": policy}, {}).publish()
    again = Policy(config, Path(model), 1)
    load_checkpoint(Path(checkpoint), {"policy": again})
    return {
        "before": before,
        "losses": losses,
        "after": after,
        "loaded": again.logprobs(whole).float().cpu(),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Run the cases of a job as one of its ranks."""
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for port, (name, (model, layout)) in zip(
        os.environ["PORTS"].split(), job["cases"].items(), strict=True
    ):
        os.environ["MASTER_PORT"] = port
        config = TrainerConfig(lr=1e-4, dtype=job["dtype"], steps=UPDATES, **layout)
        init_distributed(config, seed=1)
        found[name] = _case(config, model, Path(job["out"] + f"-{name.replace(' ', '')}"))
        if dist.get_rank() == 0:
            print(f"{name}: {found[name]['losses']}", flush=True)
            torch.save(found, job["out"])
        shutdown()


if __name__ == "__main__":
    main()
