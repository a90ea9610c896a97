"""Muon on the real engine: against updates from singular values in float64, and resumed.

The reference never iterates with matrices: it applies the polynomial to singular values.
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from areal_lite.megatron.optimizer import orthogonal
from tests.ranks.checkpoint_worker import SETTINGS
from tests.ranks.engine_worker import random_batch
from tests.ranks.test_checkpoint import LAYOUTS, contents, folder, tell  # noqa: F401
from tests.ranks.test_sgd import assert_resumed_bitwise, assert_updates, reference_loss

MUON = {"optimizer": "muon", "lr": 2e-3, "min_lr": 1e-4, "weight_decay": 0.1}
BETAS = (0.9, 0.95)
UPDATES = 3
RUNS = ("single", "dp2", "tp2", pytest.param("pp2", marks=pytest.mark.slow))


def spectral(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the five Newton-Schulz polynomials to the singular values of a matrix."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm().clamp_min(1e-7)  # the Frobenius norm of the matrix
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ values.diag() @ v


def scaled(matrix: torch.Tensor) -> torch.Tensor:
    """Return the update of a matrix at a learning rate of 1."""
    return 0.2 * max(matrix.shape) ** 0.5 * spectral(matrix)


def is_orthogonalized(name: str, weight: torch.Tensor) -> bool:
    return name.startswith("model.layers.") and weight.ndim == 2


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 7), (7, 1)])
def test_orthogonal_applies_the_polynomials_to_singular_values(shape) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = orthogonal(matrix, torch.float64)
    torch.testing.assert_close(exact, spectral(matrix), rtol=0, atol=1e-12)
    assert ((torch.linalg.svdvals(exact) - 1).abs() < 0.35).all()
    rounded = orthogonal(matrix.float(), torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() <= 0.03 * exact.norm()
    assert not orthogonal(torch.zeros(shape), torch.float32).any()


def with_muon(stories: dict[str, dict], **settings: object) -> dict[str, dict]:
    return {name: {**story, "settings": MUON | settings} for name, story in stories.items()}


@pytest.fixture(scope="module", params=RUNS)
def run(folder: Path, request: pytest.FixtureRequest) -> dict:  # noqa: F811
    """Train and export on one layout; also train on, again from a checkpoint, and on one rank."""
    name, place = request.param, str(folder / f"muon-{request.param}")
    stories = {
        "updates": {"tell": "exported", "args": {"folder": f"{place}-hf"}},
        "first": {"tell": "uninterrupted", "args": {"folder": place}},
        "again": {"tell": "resumed", "args": {"folder": place, "into": f"{place}-again"}},
    }
    told = tell(folder, f"muon-{name}", LAYOUTS[name], with_muon(stories))
    one = {"one": {"tell": "resumed", "args": {"folder": place, "into": f"{place}-one"}}}
    told |= tell(folder, f"muon-{name}-one", {}, with_muon(one))
    return told | {"weights": load_file(Path(f"{place}-hf") / "model.safetensors"), "place": place}


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:  # noqa: F811
    """Update a float64 model of transformers: what each update reports, and the weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    named = dict(model.named_parameters())
    momenta = {n: torch.zeros_like(p) for n, p in named.items() if is_orthogonalized(n, p)}
    others = [p for n, p in named.items() if n not in momenta]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": MUON["weight_decay"]},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=SETTINGS["adam_eps"],
    )
    history = []
    for step in range(UPDATES):
        batch = random_batch(12, 98, seed=step)
        loss = reference_loss(model, batch)
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip_grad"])
        lr = MUON["lr"] * (step + 1) / SETTINGS["lr_warmup_steps"]
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        with torch.no_grad():
            for name, momentum in momenta.items():
                gradient = named[name].grad
                momentum.mul_(0.95).add_(0.05 * gradient)
                named[name].mul_(1 - lr * MUON["weight_decay"])
                named[name].sub_(lr * scaled(0.95 * momentum + 0.05 * gradient))
        history.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    return history, model.state_dict()


def test_updates_are_those_of_the_reference(run: dict, expected: tuple) -> None:
    assert_updates(run, expected)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run: dict) -> None:
    first = assert_resumed_bitwise(run)
    kinds = {name.partition(".optimizer.state.")[2].partition(".")[0] for name in first}
    assert kinds == {"", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def test_a_checkpoint_of_any_layout_continues_on_one_process(run: dict) -> None:
    for got, want in zip(run["one"]["second"], run["first"]["second"], strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_bfloat16_resumes_bitwise_and_state_is_made_saved_and_moved(folder: Path) -> None:  # noqa: F811
    place = str(folder / "muon-bf16")
    stories = {
        "first": {"tell": "uninterrupted", "args": {"folder": place}},
        "again": {"tell": "resumed", "args": {"folder": place, "into": f"{place}-again"}},
        "early": {"tell": "before_any_update", "args": {"folder": f"{place}-early"}},
        "shrunk": {"tell": "offloaded"},
    }
    told = tell(folder, "muon-bf16", LAYOUTS["dp2"], with_muon(stories, dtype="bfloat16"))
    assert told["again"]["second"] == told["first"]["second"]
    assert told["early"]["again"] == told["early"]["first"] == told["early"]["plain"]
    assert told["shrunk"]["got"] == told["shrunk"]["expected"]
    state = contents(Path(place) / "step-6")
    masters = [value for name, value in state.items() if ".optimizer.state.fp32_param." in name]
    assert masters and any(not torch.equal(value, value.bfloat16().float()) for value in masters)
    again = contents(Path(f"{place}-again") / "step-6")
    assert all(torch.equal(state[name], again[name]) for name in state)
