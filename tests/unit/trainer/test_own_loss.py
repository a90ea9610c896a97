"""`algo.loss=module:name`: a loss of one's own, and the recipes, against loops over tokens."""

import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from areal_lite.algo.objective import FlatBatch
from areal_lite.config import AlgoConfig, RolloutConfig, TrainConfig
from areal_lite.config.algo import AdvantageConfig, CorrectionConfig, KLConfig
from areal_lite.config.command_line import compose_config
from areal_lite.config.rules import check_rules
from areal_lite.trainer.objective import build_objective
from tests.unit.trainer import my_losses
from tests.unit.trainer.test_objective import clip, loss_in_parts, make_batch, summed, tensors_of

RECIPES = sorted((Path(__file__).resolve().parents[3] / "examples" / "recipes").glob("*.py"))
MINE = "tests.unit.trainer.my_losses:"


def run_of(loss: str, **algo) -> TrainConfig:
    """Return the settings of a run whose advantages are rewards less the mean of their group."""
    settings = {"advantage": AdvantageConfig(std="off")} | algo
    return TrainConfig(
        model="", algo=AlgoConfig(loss=loss, **settings), rollout=RolloutConfig(max_new_tokens=11)
    )


def places(t: FlatBatch) -> dict[int, list[int]]:
    """Return the unmasked tokens of each sequence that has any."""
    found: dict[int, list[int]] = {}
    for i, s in enumerate(t.sequence_ids.tolist()):
        if t.mask[i]:
            found.setdefault(s, []).append(i)
    return found


def reduced(t: FlatBatch, losses: dict[int, float], reduction: str, longest: int = 11) -> float:
    """Add up the losses of tokens as `algo.reduction` does, in one minibatch."""
    own = places(t)
    episodes: dict[int, int] = {}
    for s, tokens in own.items():
        episode = int(t.episode_ids[s])
        episodes[episode] = episodes.get(episode, 0) + len(tokens)
    total = 0.0
    for s, tokens in own.items():
        share = {
            "token": 1 / sum(map(len, own.values())),
            "sequence": 1 / episodes[int(t.episode_ids[s])] / len(episodes),
            "constant": 1 / longest / len(episodes),
        }[reduction]
        total += share * sum(losses.get(i, 0.0) for i in tokens)
    return total


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_a_function_returns_losses_and_the_settings_do_the_rest(reduction, coef):
    kl, none = KLConfig(coef, "k2", "loss"), CorrectionConfig("off")
    config = run_of(f"{MINE}plain", reduction=reduction, kl=kl, eps_low=0.3, correction=none)
    batch = make_batch(3)
    t, logprobs, entropy = tensors_of(batch, config, 1)
    got, metrics = loss_in_parts(t, batch, logprobs, entropy, config, budget=9)
    logprobs, losses = logprobs.detach(), {}
    for i, m in enumerate(t.mask.tolist()):
        if m:
            ratio = math.exp(float(logprobs[i] - t.prox[i]))
            divergence = float(logprobs[i] - t.reference[i]) ** 2 / 2
            losses[i] = -float(t.advantages[i]) * ratio * 1.3 + coef * divergence
    assert float(got.detach()) == pytest.approx(reduced(t, losses, reduction), rel=1e-5)
    assert metrics["trained_tokens"] == len(losses) and metrics["rejected"] == 0
    assert metrics["ratio"] == pytest.approx(
        sum(math.exp(float(logprobs[i] - t.prox[i])) for i in losses), rel=1e-5
    )


def test_a_loss_that_is_not_of_tokens_is_refused():
    config = run_of(f"{MINE}mean")
    batch = make_batch(3)
    t, logprobs, entropy = tensors_of(batch, config, 1)
    with pytest.raises(ValueError, match=r"my_losses:mean: return a loss of each token, not \[\]"):
        loss_in_parts(t, batch, logprobs, entropy, config, budget=9)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("budget", [1, 9, 1000])
def test_totals_are_prepared_once_for_each_update(num, budget):
    config = run_of(f"{MINE}totals")
    batch = make_batch(4)
    t, logprobs, entropy = tensors_of(batch, config, 2)
    my_losses.prepared.clear()
    got, metrics = loss_in_parts(t, batch, logprobs, entropy, config, budget, num)
    got.backward()
    updates = [batch.token_indices(indices) for indices in batch.minibatches(num)]
    assert my_losses.prepared == [len(index) for index in updates]
    gradient, logprobs = logprobs.grad, logprobs.detach()
    expected, difference, rejected = 0.0, 0.0, 0
    for index in updates:
        used = [i for i in index.tolist() if t.mask[i]]
        for i in used:
            d = float(logprobs[i] - t.behavior[i])
            difference += d
            if float(logprobs[i]) >= float(t.prox[i]):
                rejected += 1
                continue
            own = 0.5 * float(t.rewards[t.sequence_ids[i]])
            expected += (math.sqrt(len(used)) + own) * d / len(used)
    assert float(got.detach()) == pytest.approx(expected, rel=1e-5)
    assert metrics["difference"] == pytest.approx(difference, rel=1e-5)
    assert metrics["rejected"] == rejected
    assert torch.isfinite(gradient).all(), "a masked NaN does not reach the gradient"
    assert not gradient[~t.mask].any()


def test_preparation_sets_the_learning_rate_and_needs_the_log_probs():
    objective = build_objective(run_of(f"{MINE}totals"))
    batch = make_batch(5)
    t, logprobs, _ = tensors_of(batch, run_of(f"{MINE}totals"), 1)
    objective.set_targets(t, summed)
    minibatch = objective.minibatch(t, torch.arange(len(t.mask)), logprobs.detach, summed)
    assert minibatch.lr_factor == 0.25 and "lr_factor" not in minibatch.prepared
    assert objective.prox_pass == "all"
    assert build_objective(run_of(f"{MINE}plain")).prox_pass == "rest"
    with pytest.raises(ValueError, match="prox=loglinear: algo.loss=.*totals needs the log-probs"):
        build_objective(run_of(f"{MINE}totals", prox="loglinear"))
    build_objective(run_of(f"{MINE}plain", prox="loglinear"))


def test_the_model_runs_on_every_sequence_unless_the_loss_says_otherwise():
    batch = make_batch(6)
    batch.rewards[:] = 1.0
    for loss, runs in (("plain", True), ("totals", True), ("skipping", False)):
        config = run_of(f"{MINE}{loss}")
        t, _, _ = tensors_of(batch, config, 1)
        objective = build_objective(config)
        objective.set_targets(t, summed)
        assert objective.trains_on(t).tolist() == [runs] * batch.num_sequences


@pytest.mark.parametrize(
    "loss, message",
    [
        ("no.such:loss", "algo.loss=no.such:loss: cannot import no.such"),
        (f"{MINE}missing", "has no callable 'missing'"),
    ],
)
def test_a_loss_that_is_not_there_is_named(loss, message):
    with pytest.raises(ValueError, match=message):
        build_objective(run_of(loss))


def recipe_config(path: Path) -> TrainConfig:
    """Return the settings of the command in a recipe's docstring."""
    text = path.read_text().split('"""')[1].replace("\\\n", " ")
    (command,) = re.findall(r"^ +areal-lite train (.*)$", text, re.MULTILINE)
    words = [word.replace("…", "m") for word in shlex.split(command)]
    return OmegaConf.to_object(compose_config("train", words))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_names_its_source_and_a_command_that_works(path):
    text = path.read_text().split('"""')[1]
    assert re.search(r"arXiv \d{4}\.\d{5}|ringtech\.notion\.site", text)
    assert re.search(r"Sources?: |^Ours\.", text, re.MULTILINE)
    config = recipe_config(path)
    assert config.algo.loss == f"examples.recipes.{path.stem}:loss"
    check_rules(config)
    build_objective(config)


class Plain:
    """Numbers of a batch for the loops below: lists of tokens, and settings."""

    def __init__(self, t: FlatBatch, logprobs: torch.Tensor, algo: AlgoConfig):
        self.t, self.algo = t, algo
        self.lp, self.prox, self.behave = (
            x.detach().tolist() for x in (logprobs, t.prox, t.behavior)
        )
        self.adv = t.advantages.tolist()
        self.own = places(t)
        self.used = [i for tokens in self.own.values() for i in tokens]
        self.d = {i: self.prox[i] - self.behave[i] for i in self.used}

    def ppo(self, i: int, ratio: float) -> float:
        a, low, high = self.adv[i], 1 - self.algo.eps_low, 1 + self.algo.eps_high
        return max(-a * ratio, -a * clip(ratio, low, high))

    def groups(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for s in self.own:
            found.setdefault(int(self.t.group_ids[s]), []).append(s)
        return found

    def second_moment(self) -> set[int]:
        """Return the tokens that M2PO leaves in."""
        moving = [i for i in self.used if self.adv[i] * self.d[i] > 0]
        left = sorted(moving, key=lambda i: self.d[i] ** 2)
        while left and sum(self.d[i] ** 2 for i in left) >= 0.04 * len(left):
            left.pop()
        return set(self.used) - set(moving) | set(left)

    def baselines(self, norm) -> dict[int, float]:
        """Return the baseline of least variance of each sequence; norm: of a sequence."""
        found = {}
        for members in self.groups().values():
            total = sum(norm(s) for s in members)
            rewards = sum(norm(s) * self.adv[self.own[s][0]] for s in members)
            found |= dict.fromkeys(members, rewards / total)
        return found


def m2po(x: Plain) -> dict[int, float]:
    return {i: -x.adv[i] * math.exp(x.lp[i] - x.behave[i]) for i in x.second_moment()}


def stale(x: Plain) -> dict[int, float]:
    return {
        i: min(math.exp(x.d[i]), 5.0) * x.ppo(i, math.exp(x.lp[i] - x.prox[i]))
        for i in x.second_moment()
    }


def kpop(x: Plain) -> dict[int, float]:
    losses = {}
    for i in x.used:
        p, q = math.exp(x.prox[i]), math.exp(x.behave[i])
        sides = [
            a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))
        ]
        if max(sides) <= 0.1:
            losses[i] = math.exp(x.d[i]) * x.ppo(i, math.exp(x.lp[i] - x.prox[i]))
    return losses


def dppo(x: Plain) -> dict[int, float]:
    losses = {}
    for i in x.used:
        moved = math.exp(x.prox[i]) - math.exp(x.behave[i])
        if abs(moved) > 0.2 and x.adv[i] * moved > 0:
            continue
        log_ratio = x.lp[i] - x.behave[i]
        losses[i] = -x.adv[i] * math.exp(log_ratio) + 0.001 * log_ratio**2
    return losses


def gepo(x: Plain) -> dict[int, float]:
    def mean(values: list[float], s: int) -> float:
        return math.exp(sum(values[i] for i in x.own[s]) / len(x.own[s]))

    losses = {}
    for members in x.groups().values():
        q = [mean(x.behave, s) for s in members]
        expected = sum(one * one for one in q) / sum(q)
        for s in members:
            for i in x.own[s]:
                d = x.lp[i] - x.behave[i]
                k3 = math.exp(-d) - 1 + d
                losses[i] = x.ppo(i, mean(x.lp, s) / expected) + 0.005 * k3
    return losses


def opo(x: Plain) -> dict[int, float]:
    def norm(s: int) -> float:
        return sum(min(math.exp(x.d[i]), 5.0) ** 2 for i in x.own[s])

    baseline = x.baselines(norm)
    return {
        i: -min(math.exp(x.lp[i] - x.behave[i]), 5.0) * (x.adv[i] - baseline[s]) * x.lp[i]
        for s, tokens in x.own.items()
        for i in tokens
    }


def vcpo(x: Plain) -> dict[int, float]:
    def weight(values: list[float], s: int) -> float:
        return min(math.exp(sum(values[i] - x.behave[i] for i in x.own[s])), 8.0)

    def norm(s: int) -> float:
        episodes = [one for one in x.own if x.t.episode_ids[one] == x.t.episode_ids[s]]
        written = sum(len(x.own[one]) for one in episodes)
        return len(x.own[s]) * weight(x.prox, s) ** 2 / written**2

    baseline = x.baselines(norm)
    return {
        i: -weight(x.lp, s) * (x.adv[i] - baseline[s]) * x.lp[i]
        for s, tokens in x.own.items()
        for i in tokens
    }


def mismatch(x: Plain) -> dict[int, float]:
    """Scale d by 1 - E[d^2 of fresh tokens] / E[d^2 of tokens as old], not at all if none is."""
    ages = {i: int(x.t.version - x.t.versions[i]) for i in x.used}
    squares: dict[int, list[float]] = {}
    for i in x.used:
        squares.setdefault(ages[i], []).append(x.d[i] ** 2)
    moments = {age: sum(own) / len(own) for age, own in squares.items()}
    losses = {}
    for i in x.used:
        share = max(0.0, 1 - moments[0] / moments[ages[i]]) if 0 in moments else 1.0
        weight = min(math.exp(share * x.d[i]), 5.0)
        losses[i] = weight * x.ppo(i, math.exp(x.lp[i] - x.prox[i]))
    return losses


LOOPS = {one.__name__: one for one in (m2po, stale, kpop, dppo, gepo, opo, vcpo, mismatch)}


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES} == set(LOOPS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([1, 9, 1000]))
def test_every_recipe_against_loops(path, seed, budget):
    config = recipe_config(path)
    batch = make_batch(seed)
    t, logprobs, entropy = tensors_of(batch, config, seed)
    # Log-probs of a policy are not positive.
    t.prox, t.behavior = (-x.abs().clamp(min=0.01) for x in (t.prox, t.behavior))
    got, _ = loss_in_parts(t, batch, logprobs, entropy, config, budget)
    losses = LOOPS[path.stem](Plain(t, logprobs, config.algo))
    expected = reduced(t, losses, config.algo.reduction, config.rollout.max_new_tokens)
    assert float(got.detach()) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_vcpo_takes_the_learning_rate_of_its_effective_sample_size():
    path = next(path for path in RECIPES if path.stem == "vcpo")
    config, batch = recipe_config(path), make_batch(7)
    t, logprobs, _ = tensors_of(batch, config, 3)
    objective = build_objective(config)
    objective.set_targets(t, summed)
    minibatch = objective.minibatch(t, torch.arange(len(t.mask)), logprobs.detach, summed)
    x = Plain(t, logprobs, config.algo)
    weights = [math.exp(sum(x.d[i] for i in tokens)) for tokens in x.own.values()]
    size = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert 0.1 < size < 0.99
    assert minibatch.lr_factor == pytest.approx(size**0.5, rel=1e-6)
