"""The addition task, its verifier and the character tokenizer."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3Config

from areal_lite_quickstart.addition import (
    FIRST,
    MAX_DIGITS,
    SECOND,
    SUM,
    Problem,
    addition_reward,
    answer,
    demonstration,
    make_problem,
    prompt,
    split_of,
)
from areal_lite_quickstart.make_model import CHARACTERS, build_char_tokenizer

splits = st.sampled_from(["train", "test"])
indices = st.integers(0, 10**9)
max_digits = st.integers(1, MAX_DIGITS)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return make_problem(
        draw(splits), draw(indices), seed=draw(st.integers(0, 99)), max_digits=draw(max_digits)
    )


@pytest.fixture(scope="module")
def tokenizer():
    return build_char_tokenizer()


def test_format_is_the_documented_one() -> None:
    problem = Problem(47, 85, 2)
    assert prompt(problem) == "b4a7+B8A5=?"
    assert answer(problem) == "x1y3z2"
    assert demonstration(problem, random.Random(0)) == "a7+A5+0=1z2\nb4+B8+1=1y3\n#x1y3z2"
    assert (
        demonstration(problem, random.Random(0), forget_carry=1.0)
        == "a7+A5+0=1z2\nb4+B8+0=1y2\n#y2z2"
    )


@given(problems())
def test_perfect_teacher_is_always_right(problem: Problem) -> None:
    text = demonstration(problem, random.Random(0))
    assert addition_reward(text, answer(problem)) == 1.0
    assert len(text) in (14 * problem.digits + 1, 14 * problem.digits + 3)
    assert int("".join(c for c in answer(problem) if c.isdigit())) == problem.a + problem.b


@given(splits, indices, max_digits)
def test_problem_is_reproducible_and_in_its_split(split: str, index: int, digits: int) -> None:
    problem = make_problem(split, index, max_digits=digits)
    assert problem == make_problem(split, index, max_digits=digits)
    assert split_of(problem.a, problem.b) == split_of(problem.b, problem.a) == split
    assert 1 <= problem.digits <= digits
    assert len(str(problem.a)) == len(str(problem.b)) == problem.digits


def test_splits_are_disjoint_and_both_hold_every_digit_count() -> None:
    seen = {
        split: {make_problem(split, i, seed=s, max_digits=4) for i in range(2000) for s in (0, 1)}
        for split in ("train", "test")
    }
    pairs = {split: {frozenset((p.a, p.b)) for p in seen[split]} for split in seen}
    assert not pairs["train"] & pairs["test"]
    for split in seen:
        assert {p.digits for p in seen[split]} == {1, 2, 3, 4}


def test_problem_is_the_same_in_another_process() -> None:
    code = (
        "from areal_lite_quickstart.addition import *;"
        "print([make_problem('test', i, seed=3) for i in range(20)])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str([make_problem("test", i, seed=3) for i in range(20)])


def test_seed_changes_the_problems() -> None:
    draw = [[make_problem("train", i, seed=seed) for i in range(50)] for seed in (0, 1)]
    assert draw[0] != draw[1]


def test_weights_rule_the_digit_counts() -> None:
    only_three = [
        make_problem("train", i, max_digits=5, weights=[0, 0, 1, 0, 0]).digits for i in range(50)
    ]
    assert set(only_three) == {3}
    default = [make_problem("train", i, max_digits=8).digits for i in range(4000)]
    counts = [default.count(d) for d in range(1, 9)]
    assert (
        counts == sorted(counts, reverse=True) and counts[-1] > 50
    )  # short is frequent, and there is a tail


@given(problems(), st.integers(0, 1000), st.floats(0, 1))
def test_errors_are_carried_on_consistently(problem: Problem, seed: int, forget: float) -> None:
    text = demonstration(problem, random.Random(seed), forget_carry=forget)
    *lines, stated = text.split("\n")
    assert len(lines) == problem.digits
    sums, carries = [], []
    for place, line in enumerate(lines):
        left, total = line[1:].split("=")
        x, y, carry = (int(term[-1]) for term in left.split("+"))
        assert (
            line[0] == FIRST[place]
            and line[3] == SECOND[place]
            and len(line) == 11
            and total[1] == SUM[place]
        )
        assert (x, y) == tuple(number // 10**place % 10 for number in (problem.a, problem.b))
        assert carry == 0 or (carry == 1 and sums[-1] >= 10)
        sums.append(int(total[0] + total[2]))
        carries.append(carry)
        assert sums[-1] == x + y + carry
    units = [f"{SUM[i]}{s % 10}" for i, s in enumerate(sums)]
    last = f"{SUM[len(sums)]}1" if sums[-1] >= 10 else None
    without, with_last = (
        "#" + "".join(reversed(units)),
        "#" + "".join(reversed([*units, last or ""])),
    )
    assert stated in (without, with_last)


@pytest.mark.parametrize("forget", [0.0, 0.45, 1.0])
def test_forgetting_carries_is_wrong_at_the_expected_rate(forget: float) -> None:
    """An answer is right if and only if no carry was forgotten: slips never cancel out."""
    rng, right, expected, n = random.Random(0), 0.0, 0.0, 3000
    for i in range(n):
        problem = make_problem("train", i, max_digits=6)
        carries = sum(
            problem.a % 10**d + problem.b % 10**d >= 10**d for d in range(1, problem.digits + 1)
        )
        right += addition_reward(demonstration(problem, rng, forget_carry=forget), answer(problem))
        expected += (1 - forget) ** carries
    assert right / n == pytest.approx(expected / n, abs=0.03)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(split="dev", index=0),
        dict(split="train", index=-1),
        dict(split="train", index=0, max_digits=0),
        dict(split="train", index=0, max_digits=MAX_DIGITS + 1),
        dict(split="train", index=0, max_digits=2, weights=[1.0]),
        dict(split="train", index=0, max_digits=2, weights=[1.0, -1.0]),
        dict(split="train", index=0, max_digits=2, weights=[0.0, 0.0]),
        dict(split="train", index=0, max_digits=2, weights=[1.0, float("inf")]),
    ],
)
def test_bad_arguments_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError):
        make_problem(**arguments)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("a1+2+0=03\n#a3", 1.0),
        ("#a3", 1.0),
        ("# a3\n", 1.0),
        ("#a4#a3", 1.0),
        ("#a3#a4", 0.0),
        ("#a3 ", 1.0),
        ("#a3a", 0.0),
        ("#b0a3", 0.0),
        ("#", 0.0),
        ("a3", 0.0),
        ("", 0.0),
    ],
)
def test_reward(completion: str, reward: float) -> None:
    assert addition_reward(completion, "a3") == reward


@given(st.text(), st.text(min_size=1))
def test_reward_never_raises(completion: str, right: str) -> None:
    assert addition_reward(completion, right) in (0.0, 1.0)


@given(text=st.text(alphabet=CHARACTERS).filter(lambda t: "<pad>" not in t and "<eos>" not in t))
@settings(deadline=None)
def test_tokenizer_round_trip(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == ids  # nothing is added at either end


def test_tokenizer_specials(tokenizer) -> None:
    assert len(tokenizer) == 98
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([1, *tokenizer.encode("a1"), 1, 0], skip_special_tokens=True) == "a1"
    assert tokenizer.encode("é") == tokenizer.encode("?")


def test_tokenizer_chat_template(tokenizer) -> None:
    question = prompt(Problem(47, 85, 2))
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == tokenizer.encode(question)
    chat.append({"role": "assistant", "content": "#a1\n"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == question + "#a1\n<eos>"


@pytest.mark.parametrize("with_model_config", [False, True])
def test_tokenizer_survives_save_and_load(tokenizer, tmp_path, with_model_config: bool) -> None:
    """Also next to a model's config, from which AutoTokenizer may infer another class."""
    tokenizer.save_pretrained(tmp_path)
    if with_model_config:
        Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "a7+5+0=12\n#b1a2 , don't  do n't .\n\n"
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token, loaded.eos_token) == ("<pad>", "<eos>")
    assert loaded.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_digits": value} for value in ("8", 2.5, None, True, 13)),
        *({"weights": value} for value in (3, "abcdefgh", [1, "x"] * 4, [1.0] * 7)),
        {"weights": [float("nan")] * 8},
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type_are_refused_in_words(wrong):
    """They come from `data.args`, where a user may write anything."""
    with pytest.raises(ValueError, match="must be"):
        make_problem("train", 0, **wrong)
