"""Whatever a model writes costs a verifier bounded time and memory, and scores a number."""

import asyncio
import resource
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.rewards import math as math_verifier
from areal_lite.rewards.exact import exact_reward
from areal_lite.rewards.gsm8k import gsm8k_reward
from areal_lite.rewards.math import is_oversized, math_reward
from areal_lite.rewards.pool import RewardPool
from benchmarks.verifiers import PATTERNS, VERIFIERS, measure, text_of

# Refused before they are parsed.
OVERSIZED = {
    "tower": r"\boxed{9^{9^9}}",
    "tower in Python": "9**9**9",
    "tower below": r"\boxed{10^{-10^{10}}}",
    "power": "9^99999999",
    "power of a sum": r"\boxed{(1/3)^{99999999}}",
    "factorial": r"\boxed{99999999!}",
    "nested": r"\boxed{" + "(" * 120 + "1" + ")" * 120 + "}",
    "roots": r"\boxed{" + r"\sqrt{1+" * 40 + "2" + "}" * 41,
    "elements": r"\boxed{\{" + ",".join(map(str, range(300))) + r"\}}",
}
# Parsed, in a process with limits.
HEAVY = {
    "factorials": r"\boxed{99!!!}",
    "powers": r"\boxed{((9^{999})^{999})^{999}}",
    "polynomial": r"\boxed{(a+b+c+d+e+f)^{50}}",
    "product": r"\boxed{\prod_{i=1}^{1000000} i}",
    "binomial": r"\boxed{\binom{10000000}{5000000}}",
    "sum": r"\boxed{\sum_{i=1}^{1000000} \sin(i)}",
    "integral": r"\boxed{\int_0^1 \frac{\sin(x^5)}{e^{x}+\ln(x+1)} dx}",
    "float": "1e999999",
    "long number": r"\boxed{" + "9" * 990 + "}",
    "terms": r"\boxed{" + "+".join(f"x^{{{i}}}" for i in range(100)) + "}",
}
PIECES = st.sampled_from(
    [first for first, _ in PATTERNS.values()] + [repeated for _, repeated in PATTERNS.values()]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=30).map("".join)


@pytest.mark.parametrize("verifier", sorted(VERIFIERS.keys() - {"math"}))
def test_degenerate_texts_cost_no_more_than_their_length(verifier: str) -> None:
    """Ten times the length takes a quadratic verifier a hundred times as long."""
    verify = VERIFIERS[verifier]
    for pattern in PATTERNS:
        short, long = (measure(verify, text_of(pattern, n), repeats=1) for n in (20_000, 200_000))
        assert long < 30 * short + 0.05, pattern


def test_degenerate_texts_cost_math_no_more_when_longer() -> None:
    verify = VERIFIERS["math"]
    verify("4")  # its imports take most of a second
    for pattern in PATTERNS:
        short, long = (measure(verify, text_of(pattern, n), repeats=1) for n in (10_000, 200_000))
        assert long < 3 * short + 0.2, pattern


@pytest.mark.parametrize("pattern", PATTERNS)
def test_degenerate_texts_score_zero(pattern: str) -> None:
    text = text_of(pattern, 20_000)
    assert gsm8k_reward(text, "4") == exact_reward(text, "4") == 0.0


@pytest.mark.parametrize("name", OVERSIZED)
def test_oversized_mathematics_scores_zero_unparsed(name: str, monkeypatch) -> None:
    monkeypatch.setattr(math_verifier, "_compare_in_child", None)
    assert math_reward(OVERSIZED[name], "4") == 0.0


@pytest.mark.parametrize(
    "result",
    [r"7^{12345}", r"2^{2^{3}}", r"(1+2^{10})^{10}", "100!", r"x^{2024}", "9" * 500, "((((1))))"],
)
def test_mathematics_of_competitions_is_not_oversized(result: str) -> None:
    assert not is_oversized(result)


@pytest.mark.parametrize("name", ["binomial", pytest.param("powers", marks=pytest.mark.slow)])
def test_heavy_mathematics_scores_zero_within_its_limits(name: str, monkeypatch) -> None:
    monkeypatch.setattr(math_verifier, "_PROCESSOR_S", 1)
    _within_limits(HEAVY[name], "4", processor_s=2.5)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["4", "x^2+2x+1", r"\{1,2\}", "x<4"])
def test_all_heavy_mathematics_scores_zero_within_its_limits(answer: str) -> None:
    for text in HEAVY.values():
        _within_limits(text, answer, processor_s=4.5)


def _within_limits(text: str, answer: str, processor_s: float) -> None:
    assert math_reward("no mathematics here", answer) == 0.0  # imports
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert math_reward(text, answer) == 0.0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < processor_s
    # KiB of the largest child so far: that of another test may have been larger.
    assert after.ru_maxrss < max(2 << 20, before.ru_maxrss + 1)


def test_memory_beyond_the_limit_scores_zero(monkeypatch) -> None:
    def allocate(text: str) -> list:
        return [bytearray(1 << 28)]

    monkeypatch.setattr(math_verifier, "_MEMORY_BYTES", 1 << 27)
    gold = math_verifier._parse_answer("4")
    monkeypatch.setattr(math_verifier, "_parse", allocate)
    assert math_verifier._compare_in_child(gold, "4", [False, False]) == 0.0


def test_a_sleeping_comparison_scores_zero(monkeypatch) -> None:
    gold = math_verifier._parse_answer("4")
    monkeypatch.setattr(math_verifier, "_parse", lambda text: threading.Event().wait())
    monkeypatch.setattr(math_verifier, "_WALL_CLOCK_S", 0.2)
    assert math_verifier._compare_in_child(gold, "4", [False, False]) == 0.0


def test_math_works_outside_the_main_thread() -> None:
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_reward(r"\boxed{4}", "4")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_workers_score_heavy_and_degenerate_texts() -> None:
    """They are not dropped: the pool raises no RewardError."""

    async def scores(function: str, texts: list[str]) -> list[float]:
        async with RewardPool(function) as pool:
            return [await pool.score(text, "4") for text in texts]

    texts = [HEAVY["binomial"], OVERSIZED["tower"], r"\boxed{4}"]
    assert asyncio.run(scores("areal_lite.rewards.math:math_reward", texts)) == [0.0, 0.0, 1.0]
    texts = [text_of("marks", 1_000_000), "\ud800 #### 4".encode(errors="replace").decode()]
    assert asyncio.run(scores("areal_lite.rewards.gsm8k:gsm8k_reward", texts)) == [0.0, 1.0]


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.integers(1, 300))
def test_gsm8k_scores_any_text(text: str, times: int) -> None:
    """Texts of up to 30 pieces, repeated: nothing raises, and no repetition is slow."""
    assert measure(lambda t: gsm8k_reward(t, "72"), text * times, repeats=1) < 0.5
    assert gsm8k_reward(text * times, "72") in (0.0, 1.0)


@settings(deadline=None, max_examples=25)
@given(TEXTS)
def test_math_scores_any_text(text: str) -> None:
    assert math_reward(text, "72") in (0.0, 1.0)


@pytest.mark.slow
@settings(deadline=None, max_examples=3000)
@given(TEXTS)
def test_math_scores_many_texts(text: str) -> None:
    assert math_reward(text, "72") in (0.0, 1.0)


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.integers(1, 300))
def test_results_of_any_text_are_found_in_bounded_time(text: str, times: int) -> None:
    def check(text: str) -> None:
        result = math_verifier.stated_result(text)
        assert is_oversized(result) or len(result) <= 1000

    assert measure(check, text * times, repeats=1) < 0.5
