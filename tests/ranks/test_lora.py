"""Adapters in parallel layouts, against those of PEFT beside the layers of transformers.

The reference (adapted_transformers.py) runs one sequence at a time and is trained by torch.optim.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.system.network import free_port
from areal_lite.tools.convert import convert
from areal_lite.tools.memory import adapter_parameters, pushed_adapter_parameters
from tests.ranks.adapted_transformers import BACKBONE, adapt, adapted_run
from tests.ranks.engine_worker import SETTINGS, random_batch
from tests.ranks.layout_worker import CRITIC, CRITIC_UPDATES, RESUMED_UPDATES
from tests.ranks.lora_worker import UPDATES
from tests.ranks.processes import run_ranks
from tests.ranks.test_engine import (
    largest_difference,
    make_model,
    reference,
    reference_model,
    weights_of,
)
from tests.ranks.test_engine_layouts import (
    ReferenceCritic,
    assert_curves_agree,
    train,
)

WORKER = Path(__file__).with_name("lora_worker.py")
ALL = {"rank": 4, "alpha": 8.0}
ATTENTION = {"rank": 3, "alpha": 60.0, "targets": ["qkv", "proj"]}
MLP = {"rank": 4, "alpha": 32.0, "targets": ["fc2", "fc1"]}
# name -> (model, adapters, layout)
ONE = {
    "single": ("qwen3_tied", ALL, {}),
    "recomputed": ("qwen2_untied", MLP, dict(recompute="full")),
}
TWO = {
    "sequence": (
        "qwen3_tied",
        ALL,
        dict(tensor_parallel=2, recompute="selective"),
    ),
    "experts": ("moe_untied", ATTENTION, dict(data_parallel=2, expert_parallel=2)),
}
MORE_OF_TWO = {
    "tensor": ("qwen3_tied", ALL, dict(tensor_parallel=2)),
    "pipeline": ("qwen2_untied", MLP, dict(pipeline_parallel=2, recompute="full")),
    "context": ("qwen3_tied", ALL, dict(context_parallel=2)),
    "tied_pipeline": ("qwen3_tied", ALL, dict(pipeline_parallel=2, virtual_pipeline=2)),
    "data": ("qwen3_tied", ALL, dict(data_parallel=2)),
}
FOUR = {
    "tensor_interleaved": (
        "qwen2_untied",
        MLP,
        dict(tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
    ),
    "tensor_context": (
        "qwen3_tied",
        ALL,
        dict(tensor_parallel=2, context_parallel=2),
    ),
    "data_tensor": ("qwen3_tied", ALL, dict(data_parallel=2, tensor_parallel=2)),
}
GROUPS = {"one": ONE, "two": TWO, "more_of_two": MORE_OF_TWO, "four": FOUR}
CASES = ONE | TWO | MORE_OF_TWO | FOUR
SLOW = MORE_OF_TWO | FOUR
CRITICS = ("single", "sequence", "pipeline")
# layout -> an earlier one whose checkpoint it loads; others load their own.
RESUMES = {
    "context": "tensor",
    "tied_pipeline": "context",
    "data": "tied_pipeline",
    "data_tensor": "tensor_context",
}


def cases(names=CASES):
    """Parametrize a test by layout; some of two processes and all of four are slow."""
    slow = (pytest.mark.slow, pytest.mark.timeout(1800))
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=slow if name in SLOW else ()) for name in names]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name in ("qwen3_tied", "qwen2_untied", "moe_untied"):
        make_model(name, folder / name, layers=4)
    return folder


def group_of(name: str) -> str:
    """Return the group of layouts that run together with `name`, in a folder of this name."""
    return next(group for group, layouts in GROUPS.items() if name in layouts)


def run(folder: Path, group: str) -> dict[str, list[dict]]:
    layouts = GROUPS[group]
    world = TrainerConfig(**next(iter(layouts.values()))[2]).world_size
    out = folder / group
    jobs = [
        {
            "name": name,
            "model": str(folder / model),
            "lora": lora,
            "layout": layout,
            "port": free_port(),
            "critic": name in CRITICS,
            "resume": str(out / RESUMES.get(name, name) / "checkpoint"),
        }
        for name, (model, lora, layout) in layouts.items()
    ]
    job = {"cases": jobs, "out": str(out)}
    run_ranks(WORKER, job, out, world, timeout_s=280 if world < 4 else 1700)
    return torch.load(out / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def one(folder):
    return run(folder, "one")


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
    """results(name): what each rank of a layout computed."""

    def of(name: str) -> list[dict]:
        return request.getfixturevalue(group_of(name))[name]

    return of


@pytest.fixture
def written(folder, tmp_path, results):
    """written(name, checkpoint): a folder with the adapters of a checkpoint, in PEFT's format."""

    def of(name: str, checkpoint: str) -> Path:
        results(name)  # runs the group
        out, source = tmp_path / f"{name}-{checkpoint}", folder / CASES[name][0]
        if not out.exists():
            convert(folder / group_of(name) / name / checkpoint, source, out, "auto", adapter=True)
        return out

    return of


@pytest.fixture
def exported(written):
    """exported(name, checkpoint): the adapters in a checkpoint, by name."""
    return lambda *of: load_file(written(*of) / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained_by_peft(folder):
    """trained_by_peft(name, initial): the same with PEFT, from the adapters in `initial`."""
    cache: dict = {}

    def of(name: str, initial: Path) -> dict:
        model, lora, _ = CASES[name]
        key = model, json.dumps(lora)
        if key not in cache:
            cache[key] = adapted_run(folder, model, initial)
        return cache[key]

    return of


@pytest.fixture
def expected(trained_by_peft, written):
    """expected(name): what PEFT computes from the same first adapters."""
    return lambda name: trained_by_peft(name, written(name, "initial"))


@cases()
def test_adapters_start_as_in_peft(results, exported, folder, name):
    """A is uniform in ±1 / sqrt(in) and B is zero, the same in every layout."""
    model, lora, _ = CASES[name]
    initial = exported(name, "initial")
    assert len(initial) == 2 * 4 * projections(lora)
    for key, tensor in initial.items():
        if "lora_B" in key:
            assert not tensor.any()
            continue
        bound = tensor.shape[1] ** -0.5
        assert tensor.shape[0] == lora["rank"]
        assert 0.9 * bound < tensor.abs().max() <= bound
        assert tensor.std() == pytest.approx(bound / math.sqrt(3), rel=0.2)
    matrices = {tensor.numpy().tobytes() for key, tensor in initial.items() if "lora_A" in key}
    assert len(matrices) == 4 * len(LoraConfig(**lora).targets)
    if name == "sequence":
        other = exported("single", "initial")
        assert all(torch.equal(initial[key], other[key]) for key in other)


def projections(lora: dict) -> int:
    return sum({"qkv": 3, "proj": 1, "fc1": 2, "fc2": 1}[t] for t in LoraConfig(**lora).targets)


@cases()
def test_a_push_of_adapters_alone_has_all_of_them(results, exported, folder, name):
    """Rank 0 has A and B of each weight, in one bucket. Other ranks only give their parts."""
    first, *others = results(name)
    assert not any(rank["pushed"] for rank in others)
    pushed = {
        f"base_model.model.{key}": x for bucket in first["pushed"] for key, x in bucket.items()
    }
    want = exported(name, "checkpoint")
    assert pushed.keys() == want.keys()
    assert all(torch.equal(pushed[key], want[key]) for key in want)
    model, lora, _ = CASES[name]
    planned = pushed_adapter_parameters(
        AutoConfig.from_pretrained(folder / model), LoraConfig(**lora)
    )
    assert sum(tensor.numel() for tensor in pushed.values()) == planned
    assert len(first["pushed"]) > 4
    for bucket in first["pushed"]:
        stems = [[key for key in bucket if factor in key] for factor in ("lora_A", "lora_B")]
        assert [key.replace("lora_A", "lora_B") for key in stems[0]] == stems[1]


@cases()
def test_logprobs_match_peft(results, expected, name):
    want = expected(name)
    for rank in results(name):
        assert (rank["before"] - want["before"]).abs().max() <= 5e-6
        assert (rank["after"] - want["after"]).abs().max() <= 2e-5
        assert (rank["after"] - rank["before"]).abs().max() > 0.05  # it has learned something
        assert torch.equal(rank["without"], rank["before"])


@cases()
def test_training_matches_peft(results, expected, exported, name):
    want = expected(name)
    assert_curves_agree(results(name)[0]["history"], want["history"])
    assert any(h["grad_norm"] > SETTINGS["clip_grad"] for h in want["history"])
    assert largest_difference(exported(name, "checkpoint"), want["adapters"]) <= 2e-5


@cases()
def test_gradients_match_peft(results, expected, exported, name):
    """Gradient descent moves A and B by their gradients, which Adam would rescale."""
    initial, got = exported(name, "initial"), exported(name, "descended")
    want = expected(name)["descended"]
    for factor in ("lora_A", "lora_B"):
        keys = [key for key in want if factor in key]
        moved = max((want[key] - initial[key]).abs().max() for key in keys)
        apart = max((got[key] - want[key]).abs().max() for key in keys)
        assert moved > 1e-4 and apart <= 1e-3 * moved


@cases()
def test_only_adapters_are_trained(results, folder, name):
    model, lora, layout = CASES[name]
    hf = AutoConfig.from_pretrained(folder / model)
    planned = adapter_parameters(hf, TrainerConfig(**layout, lora=LoraConfig(**lora)))
    for rank in results(name):
        assert rank["base_is_same"] and not rank["base_has_gradients"]
        assert rank["adapters"] == rank["gradients"] == planned


@cases()
def test_the_merged_model_computes_the_same(results, folder, tmp_path, name):
    """The merged weights are those that the ranks push and export, also from their checkpoint."""
    ranks = results(name)
    case = folder / group_of(name) / name
    convert(case / "checkpoint", folder / CASES[name][0], tmp_path / "out", "auto")
    by_ranks, converted = weights_of(case / "export"), weights_of(tmp_path / "out")
    assert largest_difference(by_ranks, converted) <= 1e-7
    with torch.no_grad():
        got, _ = reference(reference_model(case, "export"), random_batch(16, 98, seed=100))
    assert (got - ranks[0]["after"]).abs().max() <= 5e-6


@cases()
def test_the_share_of_adapters_is_that_of_the_change(results, folder, name):
    ranks, before = results(name), weights_of(folder / CASES[name][0])
    after = weights_of(folder / group_of(name) / name / "export")
    adapted = [key for key in before if not torch.equal(before[key], after[key])]
    change, size = (
        math.sqrt(sum(tensors[key].double().square().sum() for key in adapted))
        for tensors in ({key: after[key] - before[key] for key in adapted}, before)
    )
    assert change > 0.01 * size
    for rank in ranks:
        assert rank["share"] == pytest.approx(change / size, rel=1e-4)


@cases()
def test_a_resumed_run_continues(results, expected, name):
    """It is bitwise the same in the same layout, and equal up to rounding in another one."""
    for rank in results(name):
        if name in RESUMES:
            want = expected(name)
            assert (rank["resumed"] - want["after"]).abs().max() <= 2e-5
            assert_curves_agree(rank["resumed_further"], want["further"])
        else:
            assert torch.equal(rank["resumed"], rank["after"])
            assert rank["resumed_further"] == rank["further"]


@cases()
def test_other_adapters_than_those_of_the_checkpoint_are_refused(results, name):
    for rank in results(name):
        assert "written with trainer.lora={" in rank["refused"]
        assert "cannot be continued with {" in rank["refused"]


@cases()
def test_a_checkpoint_holds_no_base(results, folder, name):
    from tests.ranks.test_checkpoint import contents

    results(name)  # runs the group
    case = folder / group_of(name) / name
    held = contents(case / "checkpoint")
    assert held and all(".adapter." in key for key in held if "optimizer" not in key)


@cases(CRITICS)
def test_critic_with_adapters_matches_a_value_model(results, written, folder, name):
    """A critic trains its adapters and its value layer."""
    critic = ReferenceCritic(folder / CASES[name][0])
    adapt(critic.backbone, written(name, "initial"), BACKBONE)

    def loss(model, batch):
        targets = torch.from_numpy(batch.rewards[batch.sequence_ids])
        return (model(batch) - targets).square().sum() / len(batch.tokens)

    history = train(
        critic, range(CRITIC_UPDATES), loss, SETTINGS | CRITIC, total=UPDATES + RESUMED_UPDATES
    )
    with torch.no_grad():
        values = critic(random_batch(16, 98, seed=100))
    for rank in results(name):
        assert_curves_agree(rank["critic_history"], history)
        assert (rank["values"] - values).abs().max() <= 1e-4
        assert torch.equal(rank["loaded"], rank["values"])
