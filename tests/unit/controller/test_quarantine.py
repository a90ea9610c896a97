"""Which prompts are not asked again, and for how long."""

from pathlib import Path

from areal_lite.controller.sources import Quarantine
from areal_lite.rollout.episode import Rollout

FINE, RAISED = Rollout(), Rollout(failure="it raised")
HUNG = Rollout(failure="it hung at my.py:3", is_hazard=True)


def test_two_hazards_hold_a_prompt_in_this_run_and_in_a_resumed_one(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    assert not quarantine.record("a", [FINE, HUNG], 4)
    assert not quarantine.record("b", [FINE, FINE], 5)
    assert quarantine.record("a", [HUNG, FINE], 4)
    assert not quarantine.record("a", [HUNG], 4), "it is held already"
    again = Quarantine(tmp_path)
    assert again.indices == {4} and again.held["a"]["failure"] == HUNG.failure


def test_three_lost_groups_in_a_row_hold_a_prompt_until_the_next_start(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    for group in ([RAISED], [RAISED], [FINE, RAISED], [RAISED], [RAISED]):
        assert not quarantine.record("a", group, 1)
    assert quarantine.record("a", [RAISED], 1) and quarantine.indices == {1}
    again = Quarantine(tmp_path)
    assert again.held == {}
    again.record("b", [HUNG, HUNG], 2)
    assert Quarantine(tmp_path).indices == {2}
    assert '"a"' in (tmp_path / "quarantine.json").read_text(), "audit needs its line"


def test_prompts_that_are_fine_take_no_memory() -> None:
    quarantine = Quarantine()
    for number in range(1000):
        quarantine.record(f"p{number}", [FINE])
    assert not quarantine._hazards and not quarantine._lost
