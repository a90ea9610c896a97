"""One training step on a real policy: invariance to packing, minibatches and prox."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from areal_lite.algo.objective import PolicyObjective
from areal_lite.algo.trajectory_balance import BalanceObjective
from areal_lite.config import AlgoConfig, RolloutConfig, TrainConfig, TrainerConfig
from areal_lite.config.algo import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    KLConfig,
    ShapingConfig,
)
from areal_lite.config.command_line import compose_config
from areal_lite.megatron.flops import Operations
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch, source_key
from areal_lite.trainer.objective import build_objective
from areal_lite.trainer.step import Models, build_models, policy_step
from areal_lite.trajectory import Trajectory
from areal_lite_quickstart.command import MakeModelConfig
from areal_lite_quickstart.make_model import run as make_model


@pytest.fixture(scope="module", autouse=True)
def process_groups():
    """End the process groups that the first policy makes, for the tests of other modules."""
    yield
    shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("step") / "model"
    make_model(MakeModelConfig(out=str(out), hidden_size=32, num_layers=2, head_dim=8, mlp_size=64))
    return out


def batch(seed: int = 0, groups: int = 4, size: int = 3) -> TrainBatch:
    """Make ragged sequences of versions 1..3, with log-probs near those of a random model.

    Most sequences of a group begin with the same prompt, and some answers with the same tokens.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    for group in range(groups):
        beginning = rng.integers(2, 98, rng.integers(1, 12))
        for sample_index in range(size):
            prompt, length = rng.integers(1, 6), rng.integers(1, 20)
            tokens = rng.integers(2, 98, prompt + length)
            if sample_index != 1:
                tokens[: len(beginning)] = beginning[: len(tokens)]
            sampled = np.repeat([False, True], [prompt, length])
            trajectories.append(
                Trajectory(
                    group_id=group,
                    prompt_id=str(group),
                    sample_index=sample_index,
                    tokens=tokens.astype(np.int32),
                    loss_mask=sampled,
                    behavior_logprobs=np.where(
                        sampled, -4.5 + rng.normal(0, 0.2, prompt + length), 0
                    ).astype(np.float32),
                    versions=np.where(
                        sampled, np.sort(rng.integers(1, 4, prompt + length)), -1
                    ).astype(np.int32),
                    finish_reason="stop",
                    reward=float(rng.integers(0, 2)),
                ).check()
            )
    return TrainBatch.from_trajectories(trajectories)


def step(model: Path, data: TrainBatch, algo: AlgoConfig = AlgoConfig(), **trainer):  # noqa: B008
    settings = TrainerConfig(steps=10, lr=1e-3, adam_eps=1e-5, **trainer)
    config = TrainConfig(
        model=str(model), algo=algo, trainer=settings, rollout=RolloutConfig(temperature=0.9)
    )
    engine = Policy(settings, model, 1)
    plain = make_microbatches(data, settings.tokens_per_microbatch, share=False)
    before = engine.logprobs(plain, 0.9) * torch.from_numpy(data.sampled)
    result = policy_step(Models(engine), build_objective(config), data, config, 3)
    weights = {
        name: tensor.clone() for bucket in engine.weights.buckets(2**30) for name, tensor in bucket
    }
    return result, weights, before.cpu()


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], atol: float) -> None:
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=atol)


def test_prox_is_the_policy_before_the_step(model):
    result, _, before = step(model, batch())
    torch.testing.assert_close(result.prox, before, rtol=0, atol=1e-6)
    assert result.metrics["ratio"] == pytest.approx(1.0, abs=1e-5), (
        "in the first minibatch theta is still the proximal policy"
    )
    assert result.metrics["clip_fraction"] == 0


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_step_does_not_depend_on_packing(model, num_minibatches):
    whole, split = (
        step(model, batch(), minibatches=num_minibatches, tokens_per_microbatch=budget)
        for budget in (8192, 25)
    )
    assert_same(whole[1], split[1], 2e-6)
    for name, value in whole[0].metrics.items():
        assert split[0].metrics[name] == pytest.approx(value, abs=2e-5), name


def test_threads_change_no_weight(tmp_path):
    """Bit for bit: a step may have more or fewer cores than the one before."""
    out = tmp_path / "model"
    make_model(MakeModelConfig(out=str(out), hidden_size=64, num_layers=2, head_dim=16))
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            runs.append(step(out, batch(groups=64), minibatches=2))
        finally:
            torch.set_num_threads(1)
    (one, weights, _), (two, others, _) = runs
    assert torch.equal(one.prox, two.prox)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_metrics_against_the_definition(model):
    data = batch()
    result, _, before = step(model, data)
    d = (before.double().numpy() - data.behavior_logprobs)[data.loss_mask]
    assert result.metrics["behave_kl"] == pytest.approx(np.mean(np.exp(d) - d - 1), rel=1e-4)
    assert result.metrics["ess"] == pytest.approx(
        np.exp(d).sum() ** 2 / np.square(np.exp(d)).sum() / len(d), rel=1e-4
    )


def test_staleness_and_mismatch_are_measured_apart(model):
    data = batch()
    result, _, before = step(model, data)
    squares = np.square(before.double().numpy() - data.behavior_logprobs)
    mismatch = squares[data.loss_mask & (data.versions == 3)].mean()
    older = squares[data.loss_mask & (data.versions < 3)].mean()
    assert result.metrics["mismatch_square"] == pytest.approx(mismatch, rel=1e-4)
    assert result.metrics["stale_square"] == pytest.approx(max(older - mismatch, 0), abs=1e-5)
    fresh, _, _ = step(model, replace(data, versions=np.where(data.loss_mask, 3, -1)))
    assert "stale_square" not in fresh.metrics
    stale, _, _ = step(model, replace(data, versions=np.where(data.loss_mask, 2, -1)))
    assert "mismatch_square" not in stale.metrics


def test_interpolated_log_probs_measure_no_mismatch(model):
    result, _, _ = step(model, batch(), AlgoConfig(prox="loglinear"))
    assert not {"mismatch_square", "stale_square"} & result.metrics.keys()


def test_fresh_data_are_on_policy_without_the_mismatch(model):
    data = replace(batch(), versions=np.where(batch().loss_mask, 3, -1))
    plain, weights, _ = step(model, data, AlgoConfig(correction=CorrectionConfig("off")))
    apart, same, _ = step(model, data, AlgoConfig(loss="examples.recipes.mismatch:loss"))
    assert plain.metrics["mismatch_square"] > 0.01
    assert apart.metrics["mismatch_square"] == pytest.approx(
        plain.metrics["mismatch_square"], rel=1e-5
    )
    assert_same(weights, same, 1e-6)


def test_the_learning_rate_follows_the_effective_sample_size(model):
    data = batch()
    algo = AlgoConfig(loss="examples.recipes.vcpo:loss", reduction="sequence")
    own = build_objective(TrainConfig(model="", algo=algo)).policy_loss
    constant = replace(own, prepare=lambda *args: {**own.prepare(*args), "lr_factor": 1.0})
    result, scaled, before = step(model, data, algo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.recipes.vcpo.loss", constant)
        _, plain, _ = step(model, data, algo)
    _, untouched, _ = step(model, replace(data, loss_mask=np.zeros_like(data.loss_mask)))
    d = np.where(data.loss_mask, before.double().numpy() - data.behavior_logprobs, 0)
    weights = np.exp(np.bincount(data.sequence_ids, d))
    factor = np.sqrt(weights.sum() ** 2 / np.square(weights).sum() / len(weights))
    assert 0.1 < factor < 0.99
    assert result.metrics["lr"] == pytest.approx(1e-3 * factor, rel=1e-4)
    # Adam's move is proportional to the learning rate.
    for name, start in untouched.items():
        torch.testing.assert_close(
            scaled[name] - start, factor * (plain[name] - start), rtol=0, atol=1e-6
        )


def test_a_batch_without_advantages_changes_nothing(model):
    data = replace(batch(), rewards=np.ones(12, np.float32))
    _, weights, _ = step(model, data)
    _, untouched, _ = step(model, replace(data, loss_mask=np.zeros_like(data.loss_mask)))
    assert_same(weights, untouched, 0)


LONG = AlgoConfig(
    loss="gspo",
    eps_low=0.3,
    eps_high=0.3,
    reduction="sequence",
    correction=CorrectionConfig(level="geometric"),
)
OBJECTIVES = {
    "gspo": LONG,
    "cispo": AlgoConfig(loss="cispo", eps_low=1.0, eps_high=2.0),
    "reinforce": AlgoConfig(
        loss="reinforce", reduction="constant", advantage=AdvantageConfig("rloo")
    ),
    "own": AlgoConfig(loss="examples.recipes.stale:loss"),
    "own, of whole groups": AlgoConfig(loss="examples.recipes.gepo:loss", reduction="sequence"),
    "kl and entropy": AlgoConfig(kl=KLConfig(0.1, "k2", "loss"), entropy_coef=0.01),
    "kl in reward": AlgoConfig(
        kl=KLConfig(0.1, "k1", "reward"), advantage=AdvantageConfig("reinforce_pp")
    ),
    "critic": AlgoConfig(
        advantage=AdvantageConfig("gae", lam=0.95, whiten=True), critic=CriticConfig(lr=1e-2)
    ),
    "tb": AlgoConfig(loss="tb", kl=KLConfig(0.5)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_and_does_not_depend_on_packing(model, name):
    algo = replace(OBJECTIVES[name], reference=str(model))
    whole, split = (
        steps(model, batch(), algo, minibatches=2, tokens_per_microbatch=budget)
        for budget in (8192, 25)
    )
    untouched = steps(
        model,
        replace(
            batch(),
            loss_mask=np.zeros(len(batch().tokens), bool),
            versions=np.full(len(batch().tokens), -1, np.int32),
        ),
    )
    assert any(not torch.equal(whole[1][n], untouched[1][n]) for n in whole[1]), (
        "nothing was learned"
    )
    assert_same(whole[1], split[1], 2e-5)
    for metrics, others in zip(whole[0], split[0]):
        assert np.isfinite(np.concatenate([np.atleast_1d(x) for x in metrics.values()])).all()
        for key, value in metrics.items():
            assert value == pytest.approx(others[key], rel=1e-3, abs=1e-4), key


@pytest.mark.parametrize(
    "name, uniform",
    [*[(name, [0, 1]) for name in OBJECTIVES], ("ppo", [1, 3]), ("ppo", [0, 1, 2, 3])],
)
def test_running_only_what_has_a_gradient_changes_nothing(model, name, uniform, monkeypatch):
    """Groups of equal rewards: all of the first of two updates, scattered ones, and all."""
    data = batch()
    data.rewards[np.isin(data.group_ids, uniform)] = 1.0
    algo = replace(OBJECTIVES.get(name, AlgoConfig()), reference=str(model))
    run = partial(steps, model, data, algo, minibatches=2)
    (metrics, weights), tokens = run(), _tokens_run(monkeypatch, "update", run)
    for objective in (PolicyObjective, BalanceObjective):
        monkeypatch.setattr(objective, "trains_on", lambda _, flat: torch.ones_like(flat.truncated))
    (expected_metrics, expected), all_tokens = run(), _tokens_run(monkeypatch, "update", run)
    assert_same(weights, expected, 2e-6)
    # In the second update of a step the policy has moved, but not for the metrics of the others.
    moved = {"entropy", "ratio", "ratio_max", "ratio_chi2", "reference_kl", "behavior_weight"}
    moved |= {"computed_share"}
    for row, expected_row in zip(metrics, expected_metrics):
        for key in expected_row.keys() - moved:
            assert row[key] == pytest.approx(expected_row[key], rel=1e-4, abs=1e-5), key
        assert row["entropy"] == pytest.approx(expected_row["entropy"], rel=1e-3)
    assert all_tokens == 2 * len(data.tokens), "each of two steps runs the model on every token"
    if name in {"ppo", "gspo", "cispo", "reinforce", "own"}:
        assert tokens < 0.7 * all_tokens
    elif name != "kl in reward":
        assert tokens == all_tokens


@pytest.mark.parametrize("uniform", [[], [0, 1], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_first_update_fills_in_what_a_pass_over_all_would(
    model, minibatches, uniform, monkeypatch
):
    data = batch()
    data.rewards[np.isin(data.group_ids, uniform)] = 1.0
    part, weights, before = step(model, data, minibatches=minibatches)
    run = partial(step, model, data, minibatches=minibatches)
    tokens = _tokens_run(monkeypatch, "logprobs_and_entropies", run)
    monkeypatch.setattr(AlgoConfig, "prox_pass", "all")
    whole, expected, _ = step(model, data, minibatches=minibatches)
    torch.testing.assert_close(part.prox, before, rtol=0, atol=1e-6)
    assert_same(weights, expected, 2e-6)
    assert part.metrics.keys() == whole.metrics.keys()
    for key, value in whole.metrics.items():
        assert part.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    first = data.minibatches(minibatches)[0]
    mixed = [len(set(data.rewards[data.group_ids == data.group_ids[s]])) > 1 for s in first]
    runs = first[mixed] if any(mixed) else first[:1]
    assert tokens == len(data.tokens) - data.lengths[runs].sum()


def _tokens_run(monkeypatch, method: str, run) -> int:
    """Count the tokens that a method of the policy runs the model on."""
    counts, original = [], getattr(Policy, method)

    def counting(policy, microbatches, *args):
        counts.extend(len(microbatch.tokens) for microbatch in microbatches)
        return original(policy, microbatches, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Policy, method, counting)
        run()
    return sum(counts)


def steps(model: Path, data: TrainBatch, algo: AlgoConfig = AlgoConfig(), **trainer):  # noqa: B008
    """Metrics of two steps, and the weights after them."""
    config = TrainConfig(
        model=str(model),
        algo=algo,
        trainer=TrainerConfig(steps=10, lr=1e-3, adam_eps=1e-5, **trainer),
    )
    objective = build_objective(config)
    models = build_models(config, objective)
    metrics = [policy_step(models, objective, data, config, version).metrics for version in (3, 4)]
    return metrics, {
        name: tensor.clone()
        for bucket in models.policy.weights.buckets(2**30)
        for name, tensor in bucket
    }


def test_both_passes_of_a_step_replay_the_routes_of_its_batch(tmp_path):
    out = tmp_path / "moe"
    sizes = dict(hidden_size=32, num_layers=2, head_dim=8, mlp_size=64, num_experts=8)
    make_model(
        MakeModelConfig(out=str(out), architecture="qwen3_moe", tie_embeddings=False, **sizes)
    )
    data, rng = batch(), np.random.default_rng(1)
    routes = rng.random((len(data.tokens), 2, 8)).argsort(-1)[..., :2]
    data = replace(data, routes=np.sort(routes).astype(np.uint8))
    config = TrainConfig(
        model=str(out),
        algo=AlgoConfig(routing_replay=True, reference=str(out), kl=KLConfig(coef=0.1)),
        trainer=TrainerConfig(steps=10, lr=1e-3, tokens_per_microbatch=50),
    )
    objective = build_objective(config)
    models = build_models(config, objective)
    policy = models.policy
    sampled = torch.from_numpy(data.sampled)
    replayed = policy.logprobs(policy.microbatches(data)) * sampled
    own = policy.logprobs(policy.microbatches(replace(data, routes=None))) * sampled
    assert (own - replayed).abs().max() > 1e-3
    result = policy_step(models, objective, data, config, 3)
    torch.testing.assert_close(result.prox, replayed.cpu(), rtol=0, atol=1e-6)
    assert result.metrics["ratio_chi2"] < 1e-10, "the update computes what the first pass did"
    assert 0.5 < result.metrics["routes_changed"] < 1
    assert result.metrics["reference_kl"] > 1e-8, "equal weights, but experts of its own"
    plain = Policy(config.trainer, out, config.seed)
    ignored = plain.logprobs(plain.microbatches(data)) * sampled
    assert torch.equal(ignored, own), "without it they are ignored"


def test_no_bias_and_no_norm_is_decayed(tmp_path):
    """Decay no bias of gpt-oss, whose experts keep their biases in one matrix."""
    out = tmp_path / "gpt_oss"
    sizes = dict(hidden_size=32, num_layers=1, head_dim=8, mlp_size=64, num_experts=4)
    make_model(MakeModelConfig(out=str(out), architecture="gpt_oss", tie_embeddings=False, **sizes))
    tensors = load_file(out / "model.safetensors")
    vectors = {name for name in tensors if name.endswith(("bias", "norm.weight", "sinks"))}
    save_file(
        {name: torch.ones_like(x) if name in vectors else x for name, x in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    policy, data = Policy(TrainerConfig(lr=0.1, weight_decay=0.5), out, 1), batch()

    def no_loss(logprobs, *_):
        return 0.0 * logprobs.sum(), {}

    policy.update(policy.microbatches(data, data.sampled), no_loss)
    for bucket in policy.weights.buckets(2**30):
        for name, tensor in bucket:
            expected = torch.ones_like(tensor) if name in vectors else 0.95 * tensors[name]
            torch.testing.assert_close(tensor, expected)


def every_token_after(prompts: np.ndarray, vocabulary: int) -> TrainBatch:
    """Make a group of each prompt, int [n, l]: each token of the vocabulary as a completion."""
    length = prompts.shape[1] + 1
    sampled = np.arange(length) == length - 1
    return TrainBatch.from_trajectories(
        [
            Trajectory(
                group_id=group,
                prompt_id=str(group),
                sample_index=token,
                tokens=np.array([*prompt, token], np.int32),
                loss_mask=sampled,
                behavior_logprobs=np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
                versions=np.where(sampled, 3, -1).astype(np.int32),
                finish_reason="stop",
                reward=1.0,
            ).check()
            for group, prompt in enumerate(prompts)
            for token in range(vocabulary)
        ]
    )


@pytest.mark.parametrize("budget", [8192, 200])
def test_distillation_follows_the_reverse_kl_to_a_larger_teacher(model, tmp_path, budget):
    """All tokens as if sampled uniformly: with their weights the step is the exact gradient."""
    teacher = tmp_path / "teacher"
    make_model(
        MakeModelConfig(
            out=str(teacher), seed=7, hidden_size=48, num_layers=3, head_dim=8, mlp_size=96
        )
    )
    overrides = [f"model={model}", "algo=distill", f"algo.reference={teacher}"]
    overrides += ["algo.correction.cap=1e6", "trainer.steps=30", "trainer.lr=1e-2"]
    overrides += [f"trainer.tokens_per_microbatch={budget}", "trainer.adam_eps=1e-5"]
    config = OmegaConf.to_object(compose_config("train", overrides))
    student, scorer = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in (model, teacher)
    )
    prompts = np.random.default_rng(0).integers(2, 98, (3, 5))
    data = every_token_after(prompts, student.config.vocab_size)
    own, other = (
        one(torch.from_numpy(prompts)).logits[:, -1].log_softmax(-1) for one in (student, scorer)
    )
    expected = (own.exp() * (own - other.detach())).sum(-1).mean()
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
    objective = build_objective(config)
    models = build_models(config, objective)

    def divergence() -> float:
        at = models.policy.microbatches(data)
        logprobs = models.policy.logprobs(at, 1.0)[data.loss_mask].double()
        scores = models.reference.logprobs(data)[data.loss_mask].double()
        return float((logprobs.exp() * (logprobs - scores)).sum()) / len(prompts)

    before = divergence()
    assert before == pytest.approx(expected.item(), rel=1e-4)
    metrics = [policy_step(models, objective, data, config, 3).metrics for _ in range(30)]
    assert metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert divergence() < 0.1 * before


def test_each_source_learns_from_a_teacher_of_its_own(model, tmp_path):
    teachers = {"a": tmp_path / "small", "b": tmp_path / "large"}
    for seed, (folder, layers) in enumerate(zip(teachers.values(), (1, 3))):
        sizes = {"hidden_size": 48, "num_layers": layers, "head_dim": 8, "mlp_size": 96}
        make_model(MakeModelConfig(out=str(folder), seed=seed, **sizes))
    sources = {name: {"reference": str(folder)} for name, folder in teachers.items()}
    config = OmegaConf.to_object(compose_config("train", [f"model={model}", "algo=distill"]))
    config.data.sources = sources
    data, drawn = batch(), "abba" * 3
    data = replace(data, source_keys=np.array([source_key(f"{name}/1") for name in drawn]))
    result = build_models(config, build_objective(config)).reference.logprobs(data, 0.7)
    scorers = {
        name: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for name, folder in teachers.items()
    }
    for i, name in enumerate(drawn):
        own = slice(data.cu_seqlens[i], data.cu_seqlens[i + 1])
        tokens = torch.from_numpy(data.tokens[own]).long()
        with torch.no_grad():
            logprobs = (scorers[name](tokens[None]).logits[0] / 0.7).log_softmax(-1)
        expected = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0].float()
        expected *= torch.from_numpy(data.sampled[own][1:])
        torch.testing.assert_close(result[own][1:], expected, atol=2e-5, rtol=1e-5)


def test_a_critic_learns_the_reward(model):
    """All rewards alike: the value of every state is that reward."""
    algo = AlgoConfig(advantage=AdvantageConfig("gae"), critic=CriticConfig(lr=1e-2))
    config = TrainConfig(model=str(model), algo=algo, trainer=TrainerConfig(steps=40, lr=1e-9))
    data = replace(batch(), rewards=np.full(12, 0.75, np.float32))
    objective = build_objective(config)
    models = build_models(config, objective)
    errors = [
        policy_step(models, objective, data, config, 3).metrics["value_error"] for _ in range(40)
    ]
    assert errors[0] == pytest.approx(0.75**2, rel=1e-4), "a new critic says 0"
    assert errors[-1] < 0.01


def test_tokens_that_are_left_out_are_counted_with_the_reason(model):
    data = batch()
    data.loss_mask[np.flatnonzero(data.versions == 1)[:2]] = (
        False  # overdue at version 6 with a bound of 4
    )
    lost = np.flatnonzero(data.versions == 3)[:3]
    data.loss_mask[lost] = False  # as where a log-prob was not finite
    data.truncated[0] = True
    algo = AlgoConfig(shaping=ShapingConfig(mask_truncated=True))
    config = TrainConfig(model=str(model), algo=algo, trainer=TrainerConfig(steps=10))
    objective = build_objective(config)
    models = build_models(config, objective)
    metrics = policy_step(models, objective, data, config, 6).metrics
    of_first = data.sequence_ids == 0
    sampled = data.versions >= 0
    assert metrics["masked_truncated"] == (sampled & of_first).sum()
    assert metrics["masked_overdue"] == ((data.versions == 1) & ~data.loss_mask & ~of_first).sum()
    assert metrics["masked_nonfinite"] == ((data.versions == 3) & ~data.loss_mask & ~of_first).sum()
    assert (
        sum(metrics["tokens_by_staleness"])
        == metrics["trained_tokens"]
        == (data.loss_mask & ~of_first).sum()
    )


@pytest.mark.parametrize("prox, passes", [("recompute", 1), ("loglinear", 0)])
def test_a_step_counts_the_operations_of_its_passes(model, prox: str, passes: int) -> None:
    """A step of two updates; a proximal pass before it runs the second one's tokens again."""
    data = batch()
    data.rewards = (np.arange(data.num_sequences) % 2).astype(np.float32)  # all have a gradient
    algo = AlgoConfig(prox=prox)
    result, _, _ = step(model, data, algo, minibatches=2)
    engine = Policy(TrainerConfig(), model, 1)
    counter = Operations(engine.hf_config, model, has_head=True, frozen=False)
    halves = [data.select(sequences) for sequences in data.minibatches(2)]
    first, second = ([*engine.microbatches(half, half.sampled)] for half in halves)
    expected = sum(counter.count(half, backward=True) for half in (first, second))
    expected += passes * counter.count(second, backward=False)
    assert result.operations == expected
