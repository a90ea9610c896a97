"""Learning-rate schedules against closed forms, and the end of a run whose updates are skipped."""

import math

import pytest
import torch
from transformers import PretrainedConfig

from areal_lite.config import TrainerConfig
from areal_lite.megatron import optimizer
from areal_lite.megatron.optimizer import build_optimizer, build_scheduler

LR, LEAST, WARMUP, UPDATES, DECAY = 3e-3, 1e-4, 5, 40, 8


def scheduler(schedule: str):
    settings = dict(steps=20, minibatches=2, lr=LR, min_lr=LEAST, lr_warmup_steps=WARMUP)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    return build_scheduler(TrainerConfig(lr_schedule=schedule, **settings), optimizer)


def rates(schedule, updates: int) -> list[float]:
    """Return the learning rates of the next updates."""
    found = []
    for _ in range(updates):
        schedule.step(1)
        found.append(schedule.optimizer.param_groups[0]["lr"])
    return found


def closed_form(schedule: str, k: int) -> float:
    if k <= WARMUP:
        return LR * k / WARMUP
    if schedule == "constant":
        return LR
    if schedule == "wsd":
        return LEAST + (LR - LEAST) * min(1.0, (UPDATES - k) / DECAY)
    gone = (k - WARMUP) / (UPDATES - WARMUP)
    return LEAST + (LR - LEAST) * (
        1 - gone if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * gone))
    )


@pytest.mark.parametrize("schedule", ("constant", "linear", "cosine", "wsd"))
def test_every_update_has_the_rate_of_the_closed_form(schedule):
    expected = [closed_form(schedule, k) for k in range(1, UPDATES + 1)]
    assert rates(scheduler(schedule), UPDATES) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ("constant", "linear", "cosine", "wsd"))
@pytest.mark.parametrize("before", (2, 17))
def test_a_resumed_schedule_goes_on_where_it_was(schedule, before):
    first, second = scheduler(schedule), scheduler(schedule)
    rates(first, before)
    second.num_steps = 0
    second.load_state_dict(first.state_dict())
    assert rates(second, UPDATES - before) == rates(scheduler(schedule), UPDATES)[before:]


def test_one_kernel_updates_everything_as_adamw_does(monkeypatch):
    """Loshchilov & Hutter, 2019, arXiv:1711.05101, algorithm 2, in float64."""
    config = TrainerConfig(lr=LR, adam_eps=1e-6, weight_decay=0.1)
    beta1, beta2 = 0.9, config.adam_beta2
    parameter = torch.randn(300, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain = torch.optim.AdamW(
        [parameter], lr=LR, betas=(beta1, beta2), eps=config.adam_eps, weight_decay=0.1
    )
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_, **__: plain)
    adamw = build_optimizer(config, PretrainedConfig(), torch.float32, [])
    assert all(group["fused"] for group in adamw.param_groups)
    theta, m, v = parameter.detach().double(), 0.0, 0.0
    for t in range(1, 6):
        grad = torch.randn(300, generator=torch.Generator().manual_seed(t))
        parameter.grad = grad.clone()
        adamw.step()
        grad = grad.double()
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        unbiased = m / (1 - beta1**t), v / (1 - beta2**t)
        theta -= LR * (unbiased[0] / (unbiased[1].sqrt() + config.adam_eps) + 0.1 * theta)
        assert torch.allclose(parameter.double(), theta, rtol=0, atol=2e-6)
