"""The parts of gpu.py that need no server: machine, attention, output layer, engine.

Each part returns its numbers and its checks, both by name. `tiny` models also run without a GPU.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_lite.config import TrainConfig, TrainerConfig
from areal_lite.megatron.attention import causal_varlen
from areal_lite.megatron.checkpoint import PendingCheckpoint, load_checkpoint
from areal_lite.megatron.logprobs import lm_logprobs
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.system.gpus import check_cuda, gpu_memory, visible_gpus
from areal_lite.tools.memory import num_parameters, trainer_bytes
from areal_lite.train_batch import TrainBatch

SERVER_ARGS: dict[str, str | bool] = {}  # no server is started here
NEEDED = (
    *("areal_lite.megatron.policy", "areal_lite.launch.local", "areal_lite.controller.service"),
    *("areal_lite.trainer.loop", "sgl_kernel", "sglang", "matplotlib", "psutil"),
    *("math_verify", "pytest", "hypothesis"),
)
OPTIONAL = ("flash_attn", "flashinfer", "transformer_engine", "apex", "deep_ep", "xdist")
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
Result = tuple[dict[str, Any], dict[str, bool]]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
GIB = 2**30
TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
)
SMALL: dict[str, Any] = dict(  # Qwen3-0.6B
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


def now() -> float:
    """Return seconds, after everything on the GPU is done."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the mean time of a call; the first two calls warm up."""
    for _ in range(2):
        function()
    start = now()
    for _ in range(repeats):
        function()
    return (now() - start) / repeats


def peak() -> int:
    """Return the most bytes that torch has held on the GPU."""
    return torch.cuda.max_memory_reserved() if CUDA else 0


def save_model(folder: Path, tiny: bool, tie: bool = True) -> Path:
    """Write a random model in bfloat16 and return its folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        tie_word_embeddings=tie,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.04,
        eos_token_id=None,
        bos_token_id=None,
        **(TINY if tiny else SMALL),
    )
    with DEVICE:
        model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def random_batch(lengths: np.ndarray, vocab: int) -> TrainBatch:
    total, count = int(lengths.sum()), len(lengths)
    mask = np.ones(total, bool)
    mask[np.cumsum(lengths) - lengths] = False
    return TrainBatch(
        tokens=np.random.default_rng(0).integers(0, vocab, total).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        rewards=np.zeros(count, np.float32),
        group_ids=np.arange(count),
        sample_indices=np.arange(count, dtype=np.int32),
        trace_indices=np.zeros(count, np.int32),
        truncated=np.zeros(count, bool),
        kv_versions=np.zeros(count, np.int32),
        source_keys=np.zeros(count, np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


def machine(tiny: bool) -> Result:
    """Find the driver, the compiler, and the packages and plugins that a run needs."""
    start = time.perf_counter()
    problem = ""
    try:
        check_cuda()
    except ValueError as error:
        problem = str(error)
    missing = _not_importable(NEEDED)
    plugins = entry_points(group="sglang.srt.plugins").names
    gpus = visible_gpus()
    numbers = {
        "GPUs": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "memory": gpu_memory(gpus[0]) if gpus else None,
        "python, torch, CUDA, NCCL": [
            platform.python_version(),
            torch.__version__,
            torch.version.cuda,
            torch.cuda.nccl.version() if CUDA else None,
        ],
        "driver and compiler": problem or "found",
        "cannot be imported": missing,
        # Megatron-core and SGLang take other paths where these are there.
        "also there": [name for name in OPTIONAL if find_spec(name)],
        "seconds": round(time.perf_counter() - start, 1),
    }
    seen = torch.cuda.device_count() == len(gpus) > 0
    return numbers, {
        "driver and compiler": not problem,
        "packages load": not missing,
        "SGLang finds the plugins": "areal_lite" in plugins,
        "torch sees the visible GPUs": seen,
    }


def _not_importable(names: tuple[str, ...]) -> list[str]:
    """Return those of the modules that cannot be imported, in this order, with the reason."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException as error:\n"
        "        print('MISSING', name, repr(error)[:200], flush=True)\n"
        "print('MISSING done')\n"
    )
    command = [sys.executable, "-c", script, *names]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    found = [line[8:] for line in done.stdout.splitlines() if line.startswith("MISSING ")]
    return found[:-1] if found[-1:] == ["done"] else [*found, f"status {done.returncode}"]


def tests(tiny: bool) -> Result:
    """Run the tests of GPU code on the GPU, and the unit tests beside it, where it is hidden."""
    numbers, checks = {}, {}
    rooms = ["megatron"] if tiny else ["megatron", "algo", "trainer", "weights", "servers"]
    suites = {
        "on the GPU": (["tests/unit/megatron/test_context_parallel.py", "-k", "flash"], {}),
        "beside it": ([f"tests/unit/{room}" for room in rooms], {"CUDA_VISIBLE_DEVICES": ""}),
    }
    for name, (selected, environment) in suites.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected]
        if find_spec("xdist"):
            command += ["-n", str(min(len(os.sched_getaffinity(0)), 16))]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            env=os.environ | environment | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        print(done.stdout[-20000:])
        numbers[name] = done.stdout.strip().rpartition("\n")[2].strip("= ")
        checks[f"tests {name} pass"] = done.returncode == 0
    return numbers, checks


def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Attend over packed sequences: query [t, heads, dim], key and value [t, groups, dim]."""
    return causal_varlen(query, key, value, bounds, bounds, longest, longest)


@torch.enable_grad()
def worst_error(attend: Attend, device: torch.device, heads: int, groups: int, dim: int) -> float:
    """Return the largest relative error of the output and of the three gradients."""
    lengths = (1, 7, 130, 300)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), n, dim, generator=generator).bfloat16().to(device)
        for n in (heads, groups, groups, heads)
    ]
    inputs, grad = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    exact_inputs = [x.detach().float().requires_grad_() for x in inputs]
    bounds = torch.tensor((0, *lengths), device=device).cumsum(0).int()
    out = attend(inputs[0], inputs[1], inputs[2], bounds, max(lengths))
    exact = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in sequence), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for sequence in zip(*(x.split(lengths) for x in exact_inputs), strict=True)
        ]
    )
    got = (out, *torch.autograd.grad(out, inputs, grad))
    want = (exact, *torch.autograd.grad(exact, exact_inputs, grad.float()))
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(got, want, strict=True)]
    return torch.stack(errors).max().item()


def attention(tiny: bool) -> Result:
    """Compare varlen attention with plain attention in float32, and measure its speed."""
    numbers, checks = {}, {}
    if not CUDA:
        return numbers, checks
    for heads, groups, dim in ((12, 2, 128), (16, 8, 128), (32, 4, 64)):
        error = worst_error(attend, DEVICE, heads, groups, dim)
        numbers[f"error {heads}/{groups} heads of {dim}"] = round(error, 4)
        checks[f"right with {heads}/{groups} heads of {dim}"] = error < 0.02
    lengths, heads, groups, dim = [8192] * 2, 28, 4, 128
    query, key, value = (
        torch.randn(sum(lengths), n, dim, device=DEVICE).bfloat16().requires_grad_()
        for n in (heads, groups, groups)
    )
    bounds = torch.tensor((0, *lengths), device=DEVICE).cumsum(0).int()
    operations = sum(2 * n * n * heads * dim for n in lengths)

    def step() -> None:
        attend(query, key, value, bounds, max(lengths)).sum().backward()

    numbers["FlashAttention 2 TFLOP/s"] = round(3.5 * operations / seconds(step) / 1e12)
    return numbers, checks


def head(tiny: bool) -> Result:
    """Measure the output layer of a 7B model, with bfloat16 and with float32 logits."""
    tokens, width, vocab = (300, 64, 1000) if tiny else (8192, 3584, 152064)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(vocab, width, device=DEVICE) * 2 / width**0.5
    weight = weight.bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    few = min(tokens, 512)
    logits = hidden[:few].detach().float() @ weight.detach().float().t()
    exact = F.log_softmax(logits, -1).gather(1, targets[:few, None])[:, 0]
    del logits
    numbers, errors, times = {}, {}, {}
    for name, fp32 in (("bfloat16", False), ("float32", True)):
        error = lm_logprobs(hidden[:few], weight, targets[:few], fp32=fp32)[0].detach() - exact
        errors[name] = error.abs().mean().item()

        def step(fp32: bool = fp32) -> None:
            hidden.grad = weight.grad = None
            lm_logprobs(hidden, weight, targets, fp32=fp32)[0].sum().backward()

        times[name] = seconds(step, 3)
        numbers[f"{name} logits"] = f"error {errors[name]:.6f} nats, {1e3 * times[name]:.1f} ms"
    operations = 6 * tokens * width * vocab
    numbers["float32 TFLOP/s"] = round(operations / times["float32"] / 1e12)
    checks = {"float32 logits are exact": errors["float32"] < 1e-4}
    if CUDA:
        checks["float32 logits cost at most a fifth more"] = (
            times["float32"] < 1.2 * times["bfloat16"]
        )
    return numbers, checks


def engine(tiny: bool) -> Result:
    """Train a 0.6B model for six steps, move it off the GPU and back, save it and load it."""
    folder = Path(tempfile.mkdtemp())
    model = save_model(folder / "model", tiny)
    policy, batch, update = _training(model, tiny)
    microbatches = policy.microbatches(batch)
    numbers, checks = _compare(policy, model, batch, microbatches)
    losses = [update() for _ in range(3)]
    start = now()
    losses += [update() for _ in range(3)]
    step_s = (now() - start) / 3
    total, hf = len(batch.tokens), policy.hf_config
    flops = 6 * num_parameters(hf) * total / step_s
    numbers |= {
        "losses": [round(value, 4) for value in losses],
        "tokens a second": round(total / step_s),
        "TFLOP/s of matrices": round(flops / 1e12),
    }
    checks["losses fall"] = bool(np.isfinite(losses).all()) and losses[-1] < losses[0]
    plan = TrainConfig(model=str(model), trainer=policy.config)
    plan.rollout.max_new_tokens = 100 if tiny else 2048
    planned = trainer_bytes(plan, hf)
    if CUDA and not tiny:
        # With more memory, logits are kept that a plan leaves out. With less, this would raise.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(planned / torch.cuda.mem_get_info()[1])
        update()
        checks["an update needs what is planned, or at most a fifth less"] = peak() > 0.8 * planned
        torch.cuda.set_per_process_memory_fraction(1.0)
    numbers["peak and plan, GiB"] = [round(peak() / GIB, 2), round(planned / GIB, 2)]
    for name in ("offload", "onload"):
        start = now()
        getattr(policy, name)()
        numbers[f"{name}_s"] = round(now() - start, 3)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if CUDA else 0
    start = now()
    PendingCheckpoint(folder / "step-6", {"policy": policy}, {"step": 6}).publish()
    numbers["save_s"] = round(now() - start, 2)
    more = torch.cuda.max_memory_allocated() - held if CUDA else 0
    numbers["GiB more while saving"] = round(more / GIB, 2)
    checks["saving takes no memory of the GPU"] = more < GIB / 4
    before = update()
    load_checkpoint(folder / "step-6", {"policy": policy})
    checks["a loaded checkpoint goes on as before"] = abs(update() - before) < 1e-3
    start = now()
    size = sum(x.nbytes for bucket in policy.weights.buckets(512 * 2**20) for _, x in bucket)
    numbers["gather a push"] = f"{size / GIB:.2f} GiB in {1e3 * (now() - start):.0f} ms"
    shutdown()
    return numbers, checks


def _training(model: Path, tiny: bool) -> tuple[Policy, TrainBatch, Callable[[], float]]:
    """Load a policy; return it, a batch, and a function that makes an update with the batch."""
    settings = TrainerConfig(
        lr=1e-4, tokens_per_microbatch=200 if tiny else 8192, dtype="bfloat16", fp32_head=True
    )
    policy = Policy(settings, model, 1)
    longest = 100 if tiny else 2048
    lengths = np.random.default_rng(0).integers(longest // 8, longest, 8 if tiny else 32)
    batch = random_batch(lengths, policy.hf_config.vocab_size)
    count, mask = float(batch.loss_mask.sum()), torch.from_numpy(batch.loss_mask).to(DEVICE)

    def loss(logprobs, entropy, microbatch):
        own = mask[microbatch.token_index]
        return -(logprobs * own).sum() / count, {"entropy": entropy.detach().sum()}

    microbatches = policy.microbatches(batch)
    return policy, batch, lambda: policy.update(microbatches, loss)["loss"]


def fused(tiny: bool) -> Result:
    """Make the same updates with operators fused and one after the other, in turn."""
    policy, batch, update = _training(save_model(Path(tempfile.mkdtemp()), tiny), tiny)
    operators = sys.modules["areal_lite.megatron.kernels"]  # the package's `kernels` is an object
    compiled, total = operators._compiled, len(batch.tokens)
    times: dict[str, list[float]] = {"fused": [], "one after the other": []}
    numbers: dict[str, Any] = {"tokens of an update": total}
    for _ in range(2):
        for name, seen in times.items():
            operators._compiled = compiled if name == "fused" else lambda function: function
            seen.append(seconds(update, 3))
    for name, seen in times.items():
        operators._compiled = compiled if name == "fused" else lambda function: function
        with torch.profiler.profile() as profile:
            update()
            now()
        kernels = [
            x for x in profile.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA
        ]
        busy_us = sum(event.self_device_time_total for event in kernels)
        numbers[f"{name}: seconds, GPU busy"] = [round(min(seen), 3), round(busy_us / 1e6, 3)]
    operators._compiled = compiled
    shutdown()
    return numbers, {}


def _compare(policy: Policy, model: Path, batch: TrainBatch, microbatches: list) -> Result:
    """Compare log-probs with those of transformers in float32, relative to its bfloat16 error."""
    ours = policy.logprobs(microbatches)
    bounds = batch.cu_seqlens[:3]
    sequences = [batch.tokens[a:b] for a, b in pairwise(bounds)]
    exact = torch.cat(reference_logprobs(model, torch.float32, sequences))
    rounded = torch.cat(reference_logprobs(model, torch.bfloat16, sequences))
    error = (ours[: bounds[2]] - exact).abs().mean().item()
    usual = (rounded - exact).abs().mean().item()
    numbers = {"log-prob error, ours and transformers', nats": [round(error, 5), round(usual, 5)]}
    return numbers, {"log-probs are those of transformers": error < 1.5 * usual + 1e-3}


@torch.no_grad()
def reference_logprobs(
    model: Path, dtype: torch.dtype, sequences: Sequence[Sequence[int] | np.ndarray]
) -> list[Tensor]:
    """Compute the log-prob of each token with transformers: [t] a sequence, 0 for its first."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    network.to(DEVICE).eval()
    results = []
    for tokens in sequences:
        ids = torch.tensor(np.asarray(tokens, np.int64), device=DEVICE)
        logits = network(ids[None]).logits[0, :-1].float()
        values = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        results.append(F.pad(values, (1, 0)))
    return results
