"""Every parallel layout against transformers and torch.optim.AdamW.

Compared are log-probs, loss curves, gradient norms, weights and values.
"""

import math
from pathlib import Path

import pytest
import torch
import transformers

from areal_lite.config import TrainerConfig
from areal_lite.system.network import free_port
from areal_lite.tools.convert import convert
from tests.ranks.engine_worker import SETTINGS, random_batch
from tests.ranks.layout_worker import CRITIC, CRITIC_UPDATES, RESUMED_UPDATES, UPDATES
from tests.ranks.processes import run_ranks
from tests.ranks.test_engine import (
    largest_difference,
    make_model,
    reference,
    reference_model,
    weights_of,
)

WORKER = Path(__file__).with_name("layout_worker.py")
# name -> (model, layout)
TWO = {
    "sequence": (
        "qwen3_tied",
        dict(tensor_parallel=2, recompute="selective"),
    ),
    "interleaved": ("qwen3_tied", dict(pipeline_parallel=2, virtual_pipeline=2)),
    "context": ("qwen3_tied", dict(context_parallel=2)),
    "experts": ("moe_untied", dict(data_parallel=2, expert_parallel=2)),
    "whole_experts": ("moe_untied", dict(tensor_parallel=2)),
}
MORE_OF_TWO = {
    "pipeline": ("qwen2_untied", dict(pipeline_parallel=2, recompute="full")),
    "tied_pipeline": ("qwen3_tied", dict(pipeline_parallel=2)),
}
FOUR = {
    "tensor_pipeline": ("qwen3_tied", dict(tensor_parallel=2, pipeline_parallel=2)),
    "tensor_interleaved": (
        "qwen2_untied",
        dict(tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
    ),
    "tensor_context": (
        "qwen3_tied",
        dict(tensor_parallel=2, context_parallel=2),
    ),
    "context_pipeline": (
        "qwen3_tied",
        dict(context_parallel=2, pipeline_parallel=2, virtual_pipeline=2, recompute="full"),
    ),
    "context4": ("qwen3_tied", dict(context_parallel=4)),
    "data_pipeline": ("qwen3_tied", dict(data_parallel=2, pipeline_parallel=2)),
    "whole_experts_pipeline": ("moe_untied", dict(data_parallel=2, pipeline_parallel=2)),
    "tensor_experts": (
        "moe_untied",
        dict(tensor_parallel=2, data_parallel=2, expert_parallel=2),
    ),
    "experts_pipeline": (
        "moe_untied",
        dict(data_parallel=2, expert_parallel=2, pipeline_parallel=2),
    ),
}
CRITICS = (
    "sequence",
    "pipeline",
    "interleaved",
    "context",
    "experts",
    "tensor_interleaved",
    "context_pipeline",
    "tensor_experts",
)
# layout -> the earlier layout whose checkpoint it loads, with the same model.
RESUMES = {
    "interleaved": "sequence",
    "whole_experts": "experts",
    "tensor_context": "tensor_pipeline",
    "tensor_experts": "whole_experts_pipeline",
    "experts_pipeline": "tensor_experts",
}


GROUPS = {"two": TWO, "more_of_two": MORE_OF_TWO, "four": FOUR}
CASES = TWO | MORE_OF_TWO | FOUR


def group_of(name: str) -> str:
    """Return the group of layouts that run together with `name`, in a folder of this name."""
    return next(group for group, layouts in GROUPS.items() if name in layouts)


def runs(names=CASES):
    """Parametrize a test by layout. Some of two processes and all of four are slow."""
    slow = (pytest.mark.slow, pytest.mark.timeout(1800))
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in TWO else slow) for name in names]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for name in ("qwen3_tied", "qwen2_untied", "moe_untied"):
        make_model(name, folder / name, layers=4)
    return folder


def run(folder: Path, group: str) -> dict[str, list[dict]]:
    layouts, out = GROUPS[group], folder / group
    world = TrainerConfig(**next(iter(layouts.values()))[1]).world_size
    cases = []
    for name, (model, layout) in layouts.items():
        resume = RESUMES.get(name)
        checkpoint = str(out / resume / "checkpoint") if resume else None
        cases.append(
            {
                "name": name,
                "model": str(folder / model),
                "layout": layout,
                "port": free_port(),
                "critic": name in CRITICS,
                "resume": checkpoint,
            }
        )
    run_ranks(
        WORKER, {"cases": cases, "out": str(out)}, out, world, timeout_s=280 if world == 2 else 1700
    )
    return torch.load(out / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def two(folder):
    return run(folder, "two")


@pytest.fixture(scope="module")
def more_of_two(folder):
    return run(folder, "more_of_two")


@pytest.fixture(scope="module")
def four(folder):
    return run(folder, "four")


@pytest.fixture
def results(request):
    """results(name): what each rank of a layout computed.

    All layouts of a group run in the same processes, when a test asks for the first.
    """

    return lambda name: request.getfixturevalue(group_of(name))[name]


@pytest.fixture(scope="module")
def expected(folder):
    """expected(model): the same by transformers and AdamW, on whole batches."""
    cache = {}

    def of(model: str) -> dict:
        if model not in cache:
            cache[model] = reference_policy(folder, model) | reference_critic(folder, model)
        return cache[model]

    return of


def optimizer_of(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == big] for big in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": SETTINGS["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=lr, betas=(0.9, SETTINGS["adam_beta2"]), eps=SETTINGS["adam_eps"]
    )


def train(
    model: torch.nn.Module,
    updates: range,
    loss_of,
    settings: dict,
    optimizer=None,
    total: int = UPDATES + RESUMED_UPDATES,
) -> list[dict[str, float]]:
    optimizer = optimizer or optimizer_of(model, settings["lr"])
    warmup, least = settings["lr_warmup_steps"], settings["min_lr"]
    history = []
    for step in updates:
        batch = random_batch(12, 98, seed=step)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"])
        update = step + 1
        share = 0.5 * (1 + math.cos(math.pi * (update - warmup) / (total - warmup)))
        lr = (
            settings["lr"] * update / warmup
            if update <= warmup
            else least + (settings["lr"] - least) * share
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr, "skipped": 0.0})
    return history


def policy_loss(model: torch.nn.Module, batch) -> torch.Tensor:
    logprobs, entropy = reference(model, batch)
    weights = torch.from_numpy(batch.rewards[batch.sequence_ids])
    sums = torch.zeros(batch.num_sequences).index_add(
        0, torch.from_numpy(batch.sequence_ids), logprobs
    )
    return (0.001 * sums.square().sum() - (weights * logprobs).sum() - 0.1 * entropy.sum()) / len(
        batch.tokens
    )


def reference_policy(folder: Path, name: str) -> dict:
    model, batch = reference_model(folder, name), random_batch(16, 98, seed=100)
    with torch.no_grad():
        before, _ = reference(model, batch)
    optimizer = optimizer_of(model, SETTINGS["lr"])
    history = train(model, range(UPDATES), policy_loss, SETTINGS, optimizer)
    with torch.no_grad():
        after, _ = reference(model, batch)
    model.save_pretrained(folder / f"trained_{name}")
    further = train(
        model, range(UPDATES, UPDATES + RESUMED_UPDATES), policy_loss, SETTINGS, optimizer
    )
    return {"logprobs": before, "history": history, "after": after, "further": further}


class ReferenceCritic(torch.nn.Module):
    def __init__(self, path: Path):
        super().__init__()
        self.backbone = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, batch) -> torch.Tensor:
        values = []
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
            tokens = torch.from_numpy(batch.tokens[start:end].astype("int64"))
            after = self.head(self.backbone(tokens[None]).last_hidden_state[0])[:, 0]
            values.append(after.roll(1))  # a first token has the value after the last one
        return torch.cat(values)


def reference_critic(folder: Path, name: str) -> dict:
    critic = ReferenceCritic(folder / name)

    def loss(model, batch):
        targets = torch.from_numpy(batch.rewards[batch.sequence_ids])
        return (model(batch) - targets).square().sum() / len(batch.tokens)

    history = train(critic, range(CRITIC_UPDATES), loss, SETTINGS | CRITIC)
    with torch.no_grad():
        return {"critic_history": history, "values": critic(random_batch(16, 98, seed=100))}


def model_of(name: str) -> str:
    return CASES[name][0]


def assert_curves_agree(got: list[dict], want: list[dict]) -> None:
    for a, b in zip(got, want, strict=True):
        for key, value in b.items():
            assert a[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


@runs()
def test_logprobs_match_transformers(results, expected, name):
    want = expected(model_of(name))["logprobs"]
    for rank in results(name):
        assert (rank["logprobs"] - want).abs().max() <= 5e-6
        assert (rank["reference"] - want).abs().max() <= 5e-6  # training has not moved it


@runs()
def test_training_matches_adamw(results, expected, folder, name):
    ranks, want = results(name), expected(model_of(name))
    assert_curves_agree(ranks[0]["history"], want["history"])
    # Clipping is tested too.
    assert any(h["grad_norm"] > SETTINGS["clip_grad"] for h in want["history"])
    for step, metrics in enumerate(ranks[0]["history"]):
        batch = random_batch(12, 98, seed=step)
        assert (metrics["tokens"], metrics["length_max"]) == (
            len(batch.tokens),
            batch.lengths.max(),
        )
    assert (ranks[0]["after"] - want["after"]).abs().max() <= 2e-5
    exported = weights_of(folder / group_of(name) / name / "export")
    assert largest_difference(exported, weights_of(folder / f"trained_{model_of(name)}")) <= 1e-5


@runs()
def test_every_rank_has_the_same_results(results, name):
    first, *others = results(name)
    for rank in others:
        assert rank["history"] == first["history"]
        for key in ("logprobs", "after"):
            assert torch.equal(rank[key], first[key])


@runs(CRITICS)
def test_critic_matches_a_value_model_of_transformers(results, expected, name):
    want = expected(model_of(name))
    for rank in results(name):
        assert not rank["values_before"].any()
        assert_curves_agree(rank["critic_history"], want["critic_history"])
        assert (rank["values"] - want["values"]).abs().max() <= 1e-4
        assert torch.equal(rank["loaded"], rank["values"]) and rank["extra"] == {"of": "values"}


@runs(RESUMES)
def test_a_checkpoint_of_another_layout_is_loaded(results, expected, name):
    """It restores weights, moments and the position in the schedule."""
    want = expected(model_of(name))
    for rank in results(name):
        assert (rank["resumed"] - want["after"]).abs().max() <= 2e-5
        assert_curves_agree(rank["resumed_history"], want["further"])


@runs()
def test_its_checkpoint_converts_to_what_the_ranks_export(results, folder, tmp_path, name):
    ranks = results(name)
    source, case = folder / model_of(name), folder / group_of(name) / name
    convert(case / "checkpoint", source, tmp_path / "out", "auto")
    converted, exported = weights_of(tmp_path / "out"), weights_of(case / "export")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[tensor], exported[tensor]) for tensor in exported)
    with torch.no_grad():
        got, _ = reference(reference_model(tmp_path, "out"), random_batch(16, 98, seed=100))
    assert (got - ranks[0]["after"]).abs().max() <= 5e-6
