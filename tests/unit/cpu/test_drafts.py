"""Drafts from earlier answers, and when a drafted token is worth its time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.cpu.drafts import LONGEST, History, Pace, PromptHistory, StoredAnswers
from areal_lite.run_dir.store import Store
from areal_lite.trajectory import FinishReason, Group, Trajectory

TOKENS = st.lists(st.integers(0, 5), max_size=40)


def told(history: PromptHistory, tokens: list[int]) -> PromptHistory:
    for at in range(1, len(tokens)):
        history.note(tokens[max(at - LONGEST, 0) : at], tokens[at])
    return history


def drafted(history: PromptHistory, before: list[int], most: int) -> list[int]:
    return [row.token for row in history.draft(before, most, frozenset())]


def test_nothing_is_drafted_after_the_end() -> None:
    history = told(History().of("prompt"), [7, 8, 2, 9, 10])
    draft = history.draft([7, 8], 4, {2})
    assert [row.token for row in draft] == [2]


def test_an_answer_that_was_given_is_drafted() -> None:
    answer = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    history = told(History().of("prompt"), answer)
    assert drafted(history, answer[:3], 4) == answer[3:7]
    assert drafted(history, answer[:9], 4) == answer[9:]
    assert drafted(history, [1, 2, 3], 4) == []


def test_the_longest_context_decides() -> None:
    history = History().of("prompt")
    for _ in range(5):
        told(history, [1, 2, 3, 4, 20])
    told(history, [9, 9, 3, 4, 30])
    assert drafted(history, [9, 9, 3, 4], 1) == [30]
    assert drafted(history, [5, 5, 3, 4], 1) == [20]


def test_the_history_of_a_prompt_goes_before_that_of_all() -> None:
    histories = History()
    told(histories.of("one"), [1, 2, 3, 5])
    for _ in range(9):
        told(histories.of("other"), [1, 2, 4, 6])
    assert drafted(histories.of("one"), [1, 2], 2) == [3, 5]
    assert drafted(histories.of("new"), [1, 2], 2) == [4, 6]


def test_a_prompt_is_quoted() -> None:
    history = History().of("prompt")
    history.begin([1, 2, 3, 4, 5, 6])
    assert drafted(history, [9, 3, 4], 3) == [5, 6]
    told(told(history, [3, 4, 8]), [3, 4, 8])
    history.begin([1, 2, 3, 4, 5, 6])
    assert drafted(history, [9, 3, 4], 1) == [8], "a prompt is noted once"


def test_a_policy_that_changes_is_followed() -> None:
    history = History().of("prompt")
    for answer in [[1, 2, 3]] * 100 + [[1, 2, 4]] * 40:
        told(history, answer)
    assert drafted(history, [1, 2], 1) == [4]


@given(TOKENS, TOKENS, st.integers(0, 8))
def test_drafts_are_what_followed(first: list[int], second: list[int], most: int) -> None:
    """Each token of a draft followed the two tokens before it in some answer."""
    history = told(told(History().of("prompt"), first), second)
    pairs = {(*a[i - 2 : i], a[i]) for a in (first, second) for i in range(2, len(a))}
    short = {(a[0], a[1]) for a in (first, second) if len(a) > 1}
    before = (first + second)[:LONGEST]
    draft = drafted(history, before, most)
    assert len(draft) <= most
    whole = before + draft
    for at in range(len(before), len(whole)):
        assert (*whole[max(at - 2, 0) : at], whole[at]) in pairs | short


@pytest.mark.parametrize("right", [0.6, 0.9])
def test_the_chance_of_a_draft_is_how_often_such_drafts_were_right(right: float) -> None:
    """With guesses that are right in `right` of the cases."""
    source, histories = random.Random(0), History()
    for prompt in range(400):
        answer = [100 + i for i in range(30)]
        again = [
            token if source.random() < right else 500 + source.randrange(99) for token in answer
        ]
        told(told(histories.of(prompt), answer), again)
    fresh = told(histories.of("fresh"), list(range(100, 130)))
    draft = fresh.draft(list(range(100, 110)), 5, frozenset())
    for length, row in enumerate(draft, 1):
        assert 0.7 * right**length < row.chance < min(1.4 * right**length, 1.0)


def test_memory_is_bounded_and_the_last_used_stay() -> None:
    histories = History(most=1000)
    for number in range(100):
        told(histories.of(number), [number * 1000 + i for i in range(20)])
        told(histories.of(0), [number * 1000 + i for i in range(2)])
        histories.trim()
    kept = [n for n in range(100) if len(histories.of(n)) > 0]
    assert sum(len(histories.of(n)) for n in kept) <= 1000
    assert 0 in kept and 99 in kept and 1 not in kept


def test_what_forgotten_prompts_note_takes_no_place_of_others() -> None:
    histories = History(most=1000)
    running = [histories.of(number) for number in range(20)]
    for step in range(50):
        for number, history in enumerate(running):
            told(history, [step * 1000 + number * 20 + i for i in range(10)])
        histories.trim()
    told(histories.of("one"), list(range(20)))
    told(histories.of("two"), list(range(20)))
    histories.trim()
    assert len(histories.of("one")) > 0 and len(histories.of("two")) > 0


def step_seconds(rows: np.ndarray) -> np.ndarray:
    """Return what a step takes on a processor that computes 16 rows at a time."""
    return np.maximum(50.0, 3.5 * 16 * np.ceil(rows / 16))


@pytest.mark.parametrize("requests", [1, 8, 24])
def test_drafts_give_the_most_tokens_a_second(requests: int) -> None:
    """Steps that take much longer for another reason, one in ten, do not matter."""
    pace, noise = Pace(), np.random.default_rng(requests)
    for rows in noise.integers(1, 200, 2000).tolist():
        late = 9 if noise.random() < 0.1 else 1
        pace.note(rows, float(step_seconds(np.array(rows))) * noise.uniform(0.98, 1.02) * late)
    chances = noise.uniform(0.3, 1.0, 7 * requests)
    floor = pace.floor(requests, chances.tolist())

    def speed(least: float) -> float:
        drafted = chances[chances >= least]
        return (requests + drafted.sum()) / step_seconds(np.array(requests + len(drafted)))

    assert speed(floor) > 0.97 * max(speed(least) for least in [*chances, np.inf])


def test_drafts_that_promise_little_are_not_computed() -> None:
    pace = Pace()
    for rows in range(1, 100):
        pace.note(rows, 10.0 + rows)
    assert pace.floor(20, [1.0]) == np.inf  # 21 tokens in 31 ms, 20 in 30
    assert pace.floor(20, [1.0] * 20) == 1.0
    assert pace.floor(20, [0.3] * 140) == np.inf
    assert pace.floor(20, []) == np.inf


def test_before_any_step_few_requests_may_speculate() -> None:
    assert Pace().floor(1, [0.5, 0.2]) == 0.2 and Pace().floor(256, [0.9] * 7) == np.inf


def test_rows_that_were_not_seen_are_tried() -> None:
    pace = Pace()
    for _ in range(20):
        pace.note(8, 60.0)
    assert pace.floor(8, [0.9] * 20) == 0.9
    for _ in range(20):
        pace.note(28, 600.0)
    assert pace.floor(8, [0.9] * 20) == np.inf


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 100)), max_size=30),
    st.lists(st.floats(0, 1), max_size=50),
)
def test_seconds_of_steps_grow_with_their_rows(
    steps: list[tuple[int, float]], chances: list[float]
) -> None:
    pace = Pace()
    for rows, seconds in steps:
        pace.note(rows, seconds)
    seconds = pace.seconds(np.arange(1, 400))
    assert (seconds > 0).all() and (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
    for requests in (1, 30, 300):
        assert pace.floor(requests, chances) in [*chances, np.inf]


def write(store: Store, group_id: int, server: str, answers: list[list[int]]) -> None:
    """Write a group whose prompt is [3, 4, 5], and whose answers end with two more tokens."""
    trajectories = []
    for number, answer in enumerate(answers):
        tokens = np.array([3, 4, 5, *answer, 1, 2], np.int32)
        sampled = np.arange(len(tokens)) >= 3
        sampled[-2:] = False
        trajectories.append(
            Trajectory(
                group_id=group_id,
                sample_index=number,
                prompt_id="p",
                tokens=tokens,
                loss_mask=sampled,
                behavior_logprobs=np.where(sampled, -1, 0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                kv_version=0,
                reward=1.0,
                finish_reason=FinishReason.STOP,
                started_at=1.0,
                finished_at=2.0,
                server=server,
                requests=1,
            )
        )
    group = Group(group_id=group_id, prompt_id="p", size=len(answers), trajectories=trajectories)
    store.admit(group_id, "p", 0, 1, len(answers), 1.0)
    store.finish(group, [(None, None)] * len(answers), None, 2.0)


def test_a_server_learns_the_newest_answers_that_it_has_not_given(tmp_path) -> None:
    path = tmp_path / "t.sqlite"
    stored = StoredAnswers(path, "mine", vocabulary=100)
    late = StoredAnswers(path, "mine", vocabulary=100)
    assert stored.new(1000) == [], "there is no store yet"
    store = Store(path)
    write(store, 0, "mine", [[6, 7]])
    write(store, 1, "other", [[8, 9], [10], [11, 100]])
    places = {n: [*range(3, 3 + n)] for n in (1, 2)}
    mine, first, second = (
        ([3, 4, 5, *answer, 1, 2], places[len(answer)]) for answer in ([6, 7], [8, 9], [10])
    )
    assert stored.new(1000) == [first, second], "token 100 is none of the model's"
    assert late.new(1000) == [mine, first, second], "its process before has given this answer"
    assert stored.new(1000) == late.new(1000) == []
    write(store, 2, "mine", [[6, 7]])
    write(store, 3, "other", [[8, 9], [10], [8, 9]])
    assert stored.new(3) == [second, first], "the newest, oldest first"
    assert stored.new(3) == []
    store.close()
    path.write_bytes(b"damaged")
    assert stored.new(3) == []


def test_learned_answers_are_drafted_like_own_ones() -> None:
    answer = [3, 4, 5, 6, 7, 8, 1, 2, 9, 10]
    learned, own = History(), History()
    learned.learn(answer, [3, 4, 5, 8, 9])
    prompt = hash((3, 4, 5))
    own.of(prompt).begin(answer[:3])
    for at in (3, 4, 5, 8, 9):
        own.of(prompt).note(answer[max(at - LONGEST, 0) : at], answer[at])
    for start in range(2, len(answer)):
        known, before = learned.of(prompt), answer[:start]
        assert drafted(known, before, 7) == drafted(own.of(prompt), before, 7)
    assert drafted(learned.of(prompt), [3, 4, 5], 7) == [6, 7, 8], "tools are not drafted"
