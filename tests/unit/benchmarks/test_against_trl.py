"""The pure parts of the comparison with TRL: tasks, rates, seconds to a reward, the page."""

import json
from pathlib import Path

import pytest

from areal_lite.extensions import load_object
from areal_lite_quickstart.addition import addition_reward
from benchmarks.against_trl import page
from benchmarks.against_trl.tasks import CHAT, LONG_TAIL, SHORT, Task, write_prompts

BATCH = SHORT.common["groups"] * SHORT.common["group_size"]


def _record(seconds: list[float], rewards: list[float]) -> dict:
    made = {"task": "short", "accuracy": 0.9, "commit": "abc1234"}
    return made | {"seconds": seconds, "rewards": rewards}


@pytest.mark.parametrize("task", [SHORT, LONG_TAIL], ids=lambda task: task.name)
def test_prompts_to_train_on_are_not_held_out(task: Task, tmp_path: Path) -> None:
    train, test = write_prompts(task, tmp_path, 1)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (train, test)]
    questions = [{row["question"] for row in part} for part in rows]
    assert not questions[0] & questions[1]
    assert all(addition_reward("#" + row["answer"], row["answer"]) == 1 for row in rows[0][:50])
    longest = max(len(row["question"]) for row in rows[0])
    assert longest == len("a1A1+=?") + 4 * (task.max_digits - 1)


def test_a_chat_model_is_paid_for_the_last_number(tmp_path: Path) -> None:
    train, test = write_prompts(CHAT, tmp_path, 1)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (train, test)]
    questions = [{row["question"] for row in part} for part in rows]
    assert not questions[0] & questions[1] and len(questions[1]) == 128
    score = load_object("reward", CHAT.reward)
    assert [score(text, "12") for text in ("5 + 7 = 12.", "12 or 13")] == [1.0, 0.0]


def test_a_rate_leaves_out_the_first_steps() -> None:
    assert page.rate(_record([100.0, 110.0, 112.0, 114.0], [])) == BATCH / 2


def test_seconds_are_those_of_the_step_whose_last_rewards_reach_the_threshold() -> None:
    record = _record([1.0, 2.0, 3.0, 4.0, 5.0], [0.5, 0.9, 0.9, 0.9, 1.0])
    assert page.seconds_to(record, 0.9) == 4.0
    assert page.seconds_to(record, 0.95) is None


def test_the_table_has_both_sides_and_their_ratios(tmp_path: Path) -> None:
    own = _record([1.0, 2.0, 3.0, 4.0], [0.95] * 4)
    other = _record([4.0, 8.0, 12.0, 16.0], [0.95] * 4)
    keys = {"task": "short", "seed": 1}
    tried = {"micro_batch": 32, "continuous_batching": True, "threads": 2, "trajectories_s": 9.0}
    found = {
        "tried": {"short": [tried]},
        "rates": {"short": {"trl": [{"lr": 0.0006, "seconds": {"0.9": 36.0, "0.95": None}}]}},
        "versions": {"trl": "1.16.0"},
        "runs": [{**keys, "side": "areal_lite", **own}, {**keys, "side": "trl", **other}],
    }
    text = page.table(found)
    assert (
        f"| short | 1 | abc1234 | {BATCH}, {BATCH // 4} | 4.0 | 3, 12 | 4.0 | 3, 12 | 4.0 | 4, 16 |"
        in text
    )
    assert "| short | 32 | yes | 2 | 9.0 |" in text
    assert "| short | TRL GRPOTrainer | 0.0006 | 36, never |" in text
    page.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
