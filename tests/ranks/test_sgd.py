"""SGD on the real engine: against torch.optim.SGD in float64, on one and two ranks, resumed."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.ranks.checkpoint_worker import SETTINGS
from tests.ranks.engine_worker import random_batch
from tests.ranks.test_checkpoint import LAYOUTS, contents, folder, tell  # noqa: F401

SGD = {"optimizer": "sgd", "lr": 0.5, "min_lr": 0.1, "weight_decay": 0.01}
UPDATES = 3
RUNS = (
    "single",
    "dp2",
    pytest.param("tp2", marks=pytest.mark.slow),
    pytest.param("pp2", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=RUNS)
def run(folder: Path, request: pytest.FixtureRequest) -> dict:  # noqa: F811
    """Train and export on one layout; also train on, and again from a checkpoint."""
    name, place = request.param, str(folder / f"sgd-{request.param}")
    stories = {
        "updates": {"tell": "exported", "args": {"folder": f"{place}-hf"}},
        "first": {"tell": "uninterrupted", "args": {"folder": place}},
        "again": {"tell": "resumed", "args": {"folder": place, "into": f"{place}-again"}},
    }
    told = tell(folder, f"sgd-{name}", LAYOUTS[name], with_sgd(stories))
    return told | {"weights": load_file(Path(f"{place}-hf") / "model.safetensors"), "place": place}


def with_sgd(stories: dict[str, dict], **settings: object) -> dict[str, dict]:
    return {name: {**story, "settings": SGD | settings} for name, story in stories.items()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:  # noqa: F811
    """Update a float64 model of transformers: what each update reports, and the weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False)
    )
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": SGD["weight_decay"]}, {"params": vectors}], lr=0.0
    )
    history = []
    for step in range(UPDATES):
        batch = random_batch(12, 98, seed=step)
        loss = reference_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip_grad"])
        lr = SGD["lr"] * (step + 1) / SETTINGS["lr_warmup_steps"]
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    return history, model.state_dict()


def reference_loss(model: torch.nn.Module, batch) -> torch.Tensor:
    """Compute the loss of checkpoint_worker.Story, one sequence at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:])):
        tokens = torch.from_numpy(batch.tokens[start:end].astype("int64"))
        logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        chosen = logp.gather(-1, tokens[1:, None])
        total = total - float(batch.rewards[i]) * chosen.sum() + 0.1 * (logp.exp() * logp).sum()
    return total / len(batch.tokens)


def assert_updates(run: dict, expected: tuple) -> None:
    """Check what a run's updates report, and its weights, against a reference in float64."""
    history, weights = expected
    assert any(update["grad_norm"] > SETTINGS["clip_grad"] for update in history)
    for got, want in zip(run["updates"], history, strict=True):
        assert got["skipped"] == 0.0
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=2e-5, abs=2e-6), key
    for name, weight in run["weights"].items():
        torch.testing.assert_close(weight.double(), weights[name], rtol=0, atol=2e-6, msg=name)


def assert_resumed_bitwise(run: dict) -> dict[str, torch.Tensor]:
    """Check that a resumed run ends as one without a break, and return its last checkpoint."""
    assert run["again"]["second"] == run["first"]["second"]
    first, again = (contents(Path(run["place"] + kind) / "step-6") for kind in ("", "-again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    return first


def test_updates_are_those_of_torch(run: dict, expected: tuple) -> None:
    assert_updates(run, expected)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run: dict) -> None:
    first = assert_resumed_bitwise(run)
    assert not any("exp_avg" in name for name in first)


def test_bfloat16_resumes_with_its_float32_masters(folder: Path) -> None:  # noqa: F811
    place = str(folder / "sgd-bf16")
    stories = {
        "first": {"tell": "uninterrupted", "args": {"folder": place}},
        "again": {"tell": "resumed", "args": {"folder": place, "into": f"{place}-again"}},
        "shrunk": {"tell": "offloaded"},
    }
    told = tell(folder, "sgd-bf16", LAYOUTS["dp2"], with_sgd(stories, dtype="bfloat16"))
    assert told["again"]["second"] == told["first"]["second"]
    state = contents(Path(place) / "step-6")
    masters = [value for name, value in state.items() if ".optimizer.state.fp32_param." in name]
    assert masters and all(value.dtype == torch.float32 for value in masters)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters)
    again = contents(Path(f"{place}-again") / "step-6")
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_a_checkpoint_of_adam_is_refused(folder: Path) -> None:  # noqa: F811
    place = str(folder / "adam")
    stories = {"first": {"tell": "uninterrupted", "args": {"folder": place}}}
    stories |= with_sgd({"refused": {"tell": "refused", "args": {"folder": place}}})
    told = tell(folder, "adam", {}, stories)
    assert "written with trainer.optimizer=adam and cannot be continued with sgd" in told["refused"]
