"""Losses, gradients and masks equal those of AReaL's own functions, for every correction of both.

`areal_outputs.json` has random packed batches, and what AReaL's functions return for them. It names
the functions and their commit. All behavior log-probs are finite: a token without one leaves the
loss here, and has weight 1 there.
"""

import json
from pathlib import Path

import pytest
import torch

from areal_lite.algo.correction import Correction, loglinear_prox
from areal_lite.algo.losses import LossInputs, gspo_loss, ppo_loss
from examples.recipes.m2po import batch_limit

BATCHES = json.loads(Path(__file__).with_name("areal_outputs.json").read_text())["batches"]
CLIP = {"eps_low": 0.2, "eps_high": 0.28}
CAP = Correction("cap", 1.3)
SEQUENCES = {
    "mask sequences below 1.1": Correction("mask", 1.1, low=0.0, level="geometric"),
    "cap sequences 1.1": Correction("cap", 1.1, level="geometric"),
}
PPO = {
    "mask below 1.5": {"correction": Correction("mask", 1.5, low=0.0)},
    "mask 0.7 to 1.5": {"correction": Correction("mask", 1.5, low=0.7)},
    "mask sequences 0.8 to 1.2": {
        "correction": Correction("mask", 1.2, low=0.8, level="geometric")
    },
    "cap 1.3": {"correction": CAP},
    "cap 1.3, dual clip": {"correction": CAP, "dual_clip": 1.5},
    "no correction, dual clip": {"correction": Correction("off"), "dual_clip": 3.0},
    "around the behavior policy": {"correction": Correction("off"), "decoupled": False},
    **{name: {"correction": correction} for name, correction in SEQUENCES.items()},
}
GSPO = {
    "gspo": Correction("off"),
    "gspo, cap 1.3": CAP,
    **{f"gspo, {name}": correction for name, correction in SEQUENCES.items()},
}


def inputs(batch: dict) -> LossInputs:
    return LossInputs(
        torch.tensor(batch["logprobs"], dtype=torch.float64).requires_grad_(),
        *(torch.tensor(batch[k], dtype=torch.float64) for k in ("prox", "behavior", "advantages")),
        torch.tensor(batch["mask"], dtype=torch.bool),
        sequence_ids=torch.tensor(batch["sequence_ids"]),
    )


def assert_equal(loss: torch.Tensor, x: LossInputs, expected: dict) -> None:
    # AReaL computes the weights in float32.
    assert loss.item() == pytest.approx(expected["loss"], rel=2e-5, abs=2e-6)
    (gradient,) = torch.autograd.grad(loss, x.logprobs)
    wanted = torch.tensor(expected["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", PPO)
@pytest.mark.parametrize("batch", BATCHES)
def test_corrections_of_ppo(batch, name):
    x = inputs(batch)
    output = ppo_loss(x, denominator=float(x.mask.sum()), **CLIP, **PPO[name])
    assert_equal(output.loss, x, batch["cases"][name])


# Where single tokens are rejected, AReaL's GSPO averages the ratio over the others alone.
@pytest.mark.parametrize("name", GSPO)
@pytest.mark.parametrize("batch", BATCHES)
def test_corrections_of_gspo(batch, name):
    x = inputs(batch)
    output = gspo_loss(x, denominator=float(x.mask.sum()), correction=GSPO[name], **CLIP)
    assert_equal(output.loss, x, batch["cases"][name])


@pytest.mark.parametrize("bound", ["0.04", "0.2", "1.0"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_mask_of_the_second_moment(batch, bound):
    x = inputs(batch)
    squares = (x.prox - x.behavior) ** 2
    kept = x.mask & (squares.float() <= batch_limit(squares[x.mask], bound=float(bound)))
    assert kept.int().tolist() == batch["second moment"][bound]


@pytest.mark.parametrize("batch", BATCHES)
def test_interpolated_proximal_log_probs(batch):
    x, versions = inputs(batch), torch.tensor(batch["versions"])
    got = loglinear_prox(x.behavior, x.logprobs.detach(), versions, version=5)
    wanted = torch.tensor(batch["loglinear"], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
