"""Which steps end with a push, and which pushes are evaluated."""

from hypothesis import given
from hypothesis import strategies as st

from areal_lite.config import TrainConfig


def config(every: int, eval_every: int, steps: int) -> TrainConfig:
    made = TrainConfig(model="m")
    made.sync.every, made.eval.every, made.trainer.steps = every, eval_every, steps
    return made


def pushed(run: TrainConfig) -> list[int]:
    return [done for done in range(1, run.trainer.steps + 1) if run.is_pushed(done)]


def evaluated(run: TrainConfig) -> list[int]:
    return [done for done in range(1, run.trainer.steps + 1) if run.is_evaluated(done)]


def test_every_fourth_step_and_the_last_one() -> None:
    run = config(every=4, eval_every=5, steps=18)
    assert pushed(run) == [4, 8, 12, 16, 18]
    # Due at 5, 10 and 15. The end of training has an evaluation of its own.
    assert evaluated(run) == [8, 12, 16]


def test_a_push_after_each_step_is_evaluated_when_it_is_due() -> None:
    run = config(every=1, eval_every=3, steps=9)
    assert pushed(run) == list(range(1, 10))
    assert evaluated(run) == [3, 6]
    assert [run.last_evaluated(done) for done in range(10)] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 6]
    assert evaluated(config(every=2, eval_every=0, steps=9)) == []


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 40))
def test_each_due_evaluation_is_made_once_at_the_next_push(
    every: int, eval_every: int, steps: int
) -> None:
    run = config(every, eval_every, steps)
    due = range(eval_every, steps, eval_every)
    expected = {next(push for push in pushed(run) if push >= step) for step in due} - {steps}
    assert set(evaluated(run)) == expected
