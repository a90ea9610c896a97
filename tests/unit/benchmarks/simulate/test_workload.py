"""Lengths of completions, and speeds from data sheets."""

import json

import numpy as np
import pytest

from areal_lite.cli import checked_config
from benchmarks.simulate.workload import (
    SHAPES,
    LogNormalLengths,
    RecordedLengths,
    read_shape,
    server_speed,
    trainer_speed,
)


def draw(lengths: LogNormalLengths, groups: int = 4000) -> np.ndarray:
    return np.array([lengths.group(1, prompt, 8) for prompt in range(groups)])


@pytest.mark.parametrize("spread, longest", [(0.3, 4000), (0.9, 4000), (1.5, 2000), (0.9, 100_000)])
def test_the_mean_is_that_of_the_cut_lengths(spread: float, longest: int) -> None:
    drawn = draw(LogNormalLengths(mean=1000, spread=spread, longest=longest))
    assert drawn.mean() == pytest.approx(1000, rel=0.04)
    assert drawn.min() >= 1 and drawn.max() <= longest


def test_without_a_spread_all_are_alike() -> None:
    assert set(draw(LogNormalLengths(mean=70, spread=0, longest=100), 5).ravel()) == {70}


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_answers_to_a_prompt_are_as_similar_as_they_should_be(shared: float) -> None:
    logs = np.log(draw(LogNormalLengths(mean=1000, spread=0.5, longest=10**6, shared=shared)))
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between / logs.var() == pytest.approx(shared, abs=0.04)


def test_a_prompt_gets_the_same_lengths_again() -> None:
    lengths = LogNormalLengths(mean=50, spread=1, longest=500)
    assert lengths.group(1, 7, 4).tolist() == lengths.group(1, 7, 4).tolist()
    assert lengths.group(1, 7, 4).tolist() != lengths.group(2, 7, 4).tolist()


def test_recorded_groups_are_drawn_whole() -> None:
    lengths = RecordedLengths([[1, 2], [30, 40], [5]])
    drawn = {tuple(sorted(lengths.group(1, prompt, 2))) for prompt in range(60)}
    assert drawn == {(1, 2), (30, 40), (5, 5)}


def test_a_mean_above_the_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length_mean=600 must be below .*max_new_tokens=512"):
        LogNormalLengths(mean=600, spread=1, longest=512)


QWEN_7B = dict(
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)


def test_a_config_file_gives_the_shape_of_the_table(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    shape, known = read_shape(str(tmp_path)), SHAPES["qwen2.5-7b"]
    assert shape.parameters == pytest.approx(known.parameters, rel=0.01)
    assert (shape.layers, shape.hidden, shape.kv_bytes) == (28, 3584, known.kv_bytes)


def test_a_mixture_of_experts_reads_what_a_token_uses(tmp_path) -> None:
    experts = dict(
        model_type="qwen3_moe", num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768
    )
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | experts))
    shape = read_shape(str(tmp_path))
    assert shape.parameters - shape.active == 28 * 56 * 3 * 3584 * 768


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="config.json: transformers refuses it"):
        read_shape(str(tmp_path))


def test_a_step_reads_the_weights_and_the_cache() -> None:
    config = checked_config("simulate", ["simulate.bandwidth_share=1", "simulate.host_ms=0"])
    speed = server_speed(config)
    assert speed.step_s == pytest.approx(2 * 7.62e9 / 3.35e12)
    assert speed.per_context_s == pytest.approx(2 * 2 * 28 * 512 / 3.35e12)
    two = server_speed(
        checked_config(
            "simulate",
            ["simulate.bandwidth_share=1", "simulate.host_ms=0", "server.tensor_parallel=2"],
        )
    )
    assert two.step_s == pytest.approx(speed.step_s / 2) and two.kv_tokens > 2 * speed.kv_tokens


def test_weights_that_do_not_fit_are_refused() -> None:
    config = checked_config("simulate", ["simulate.shape=qwen2.5-32b", "simulate.gpu=a100"])
    assert server_speed(config).kv_tokens > 0
    config.server.args["mem_fraction_static"] = 0.5
    with pytest.raises(ValueError, match="66 GB of weights do not fit 1 x a100"):
        server_speed(config)


def test_no_limit_of_the_cache_is_its_memory() -> None:
    config = checked_config("simulate", ["server.args.max_total_tokens=null"])
    assert server_speed(config) == server_speed(checked_config("simulate", []))
    config.server.args["max_total_tokens"] = 9000
    assert server_speed(config).kv_tokens == 9000


def test_recomputing_costs_a_forward_pass_each() -> None:
    settings = ["trainer.minibatches=1", "simulate.step_fixed_s=0"]
    plain = trainer_speed(checked_config("simulate", settings))
    full = trainer_speed(checked_config("simulate", [*settings, "trainer.recompute=full"]))
    assert plain.per_token_s == pytest.approx(6 * 7.62e9 / (0.4 * 989e12))
    assert full.per_token_s == pytest.approx(plain.per_token_s * 8 / 6)


@pytest.mark.parametrize(
    "overrides, passes",
    [
        (["trainer.minibatches=1"], 0),
        (["trainer.minibatches=4"], 3 / 4),
        (["trainer.minibatches=4", "algo.kl={coef: 0.1, into: reward}", "algo.reference=m"], 1),
        (["trainer.minibatches=4", "algo.prox=loglinear"], 0),
    ],
)
def test_the_proximal_policy_costs_a_pass_over_later_minibatches(overrides, passes) -> None:
    speed = trainer_speed(checked_config("simulate", ["simulate.step_fixed_s=0", *overrides]))
    assert speed.per_token_s == pytest.approx((6 + 2 * passes) * 7.62e9 / (0.4 * 989e12))
