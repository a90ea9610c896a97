"""The audit accepts every history of the real parts, and sees each kind of damage."""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.cli import main
from areal_lite.config import ReplayConfig
from areal_lite.run_dir.store_format import ADMISSION, checksum
from areal_lite.tools.audit.audit import audit, audit_text
from tests.unit.tools.audit.history import EVENTS, History, lived

SOURCES = {"a": {"weight": 3}, "b": {}, "c": {}}
REPLAY = {"buffer__replay": ReplayConfig(capacity=6, recency_probability=0.3)}


def off(run_dir: Path, tokens: bool = False) -> dict[str, list[str]]:
    """Return what is wrong, by check."""
    return {check.name: check.wrong for check in audit(run_dir, tokens) if check.wrong}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_prompts": None},
        {"buffer__max_staleness": 1},
        {"sync__every": 3},
        REPLAY,
        {"rollout__rest_unsolved": 3, "rollout__retire_above": 0.9},
        {"data__sources": SOURCES, "num_prompts": {"a": 3, "b": 5, "c": None}},
    ],
    ids=["mask", "no end", "fresh", "sync.every", "replay", "curriculum", "sources"],
)
@settings(max_examples=12, deadline=None)
@given(
    events=st.lists(st.tuples(st.sampled_from([*EVENTS, "trim"]), st.integers(0, 9)), max_size=80),
    how=st.sampled_from(["live", "killed", "resumed"]),
)
def test_any_history_is_accepted(tmp_path_factory, config, events, how) -> None:
    run = History(tmp_path_factory.mktemp("run"), **config)
    for event, number in events:
        getattr(run, event)(number)
    assert off(run.run_dir, tokens=True) == {}, "while it goes on"
    if how == "resumed":
        run.kill()
    run.close()
    assert off(run.run_dir, tokens=True) == {}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("good") / "run"
    lived(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def good_replay(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("good") / "run"
    lived(run_dir, **REPLAY)
    return run_dir


def test_a_long_history_has_every_kind_of_group(good) -> None:
    assert off(good, tokens=True) == {}
    looked_at = {check.name: check.looked_at for check in audit(good)}
    assert not any(f": {state}" in looked_at["groups"] for state in ("0 used", "0 in flight"))
    assert ", 0 filtered" not in looked_at["groups"] and ", 0 dropped" not in looked_at["groups"]
    assert " 0 older ones" not in looked_at["staleness"]


def sql(*statements: str) -> Callable[[Path], None]:
    """Return a damage by SQL. The checksums of admissions are made right again."""

    def damage(run_dir: Path) -> None:
        with sqlite3.connect(run_dir / "trajectories.sqlite") as db:
            changed = sum(db.execute(statement).rowcount for statement in statements)
            assert changed > 0, "nothing was damaged"
            for row in db.execute(f"SELECT {', '.join(ADMISSION)} FROM groups").fetchall():
                right = (checksum(row), row[0])
                db.execute("UPDATE groups SET checksum = ? WHERE group_id = ?", right)
        db.close()

    return damage


def rows(name: str, change: Callable[[list[dict]], object]) -> Callable[[Path], None]:
    """Return a damage of a file of JSON lines. `change` works on the list of its rows."""

    def damage(run_dir: Path) -> None:
        path = run_dir / name
        content = [json.loads(line) for line in path.read_text().splitlines()]
        change(content)
        path.write_text("".join(json.dumps(row) + "\n" for row in content))

    return damage


def value(name: str, key: str, new: object) -> Callable[[Path], None]:
    """Return a damage of one value of a JSON file."""

    def damage(run_dir: Path) -> None:
        content = json.loads((run_dir / name).read_text())
        assert content[key] != new
        (run_dir / name).write_text(json.dumps(content | {key: new}))

    return damage


def checkpoint(file: str, content: bytes | None) -> Callable[[Path], None]:
    """Return a damage of a file of the newest checkpoint."""

    def damage(run_dir: Path) -> None:
        newest = max(run_dir.glob("checkpoints/step-*"), key=lambda p: int(p.name[5:]))
        (newest / file).unlink()
        if content is not None:
            (newest / file).write_bytes(content)

    return damage


def later_checkpoint(run_dir: Path) -> None:
    newest = max(run_dir.glob("checkpoints/step-*"), key=lambda p: int(p.name[5:]))
    shutil.copytree(newest, run_dir / "checkpoints" / "step-900")


def removed(group_id: str) -> Callable[[Path], None]:
    """Return the damage that a group has lost its tokens, as if nothing needed them."""
    return sql(
        f"DELETE FROM sequences WHERE group_id = {group_id}",
        f"UPDATE groups SET kept_bytes = 0 WHERE group_id = {group_id}",
    )


USED = "(SELECT group_id FROM groups WHERE state = 'used' AND step = 4 LIMIT 1)"
OTHER = "(SELECT group_id FROM groups WHERE state = 'used' AND step = 5 LIMIT 1)"
FILTERED = "(SELECT min(group_id) FROM groups WHERE state = 'filtered')"
DROPPED = "(SELECT min(group_id) FROM groups WHERE state = 'dropped')"
FLYING = "(SELECT max(group_id) FROM groups WHERE state = 'in_flight')"
NEWEST = "(SELECT max(group_id) FROM groups WHERE state = 'used')"
WAITING = "(SELECT max(group_id) FROM groups WHERE state = 'finished')"
OF_USED = f"group_id = {USED} AND sample_index = 0"
DAMAGES = {
    "row gone": ("groups", sql(f"DELETE FROM groups WHERE group_id = {USED}")),
    "trajectory gone": ("groups", sql(f"DELETE FROM trajectories WHERE {OF_USED}")),
    "trajectory of nothing": (
        "versions",
        sql(f"UPDATE trajectories SET group_id = 9000 WHERE {OF_USED}"),
    ),
    "trace gone": (
        "groups",
        sql(f"UPDATE trajectories SET trace_index = trace_index + 1 WHERE {OF_USED}"),
    ),
    "traces as episodes": (
        "groups",
        sql(
            "UPDATE trajectories SET sample_index = 10 * sample_index + trace_index,"
            " trace_index = 0 WHERE group_id = (SELECT group_id FROM trajectories"
            " GROUP BY group_id HAVING count(*) > 3 LIMIT 1)"
        ),
    ),
    "no step": ("groups", sql(f"UPDATE groups SET step = NULL WHERE group_id = {USED}")),
    "a step too many": ("groups", sql(f"UPDATE groups SET step = 1 WHERE group_id = {FILTERED}")),
    "no reason": ("groups", sql(f"UPDATE groups SET reason = NULL WHERE group_id = {DROPPED}")),
    "no end": ("groups", sql(f"UPDATE groups SET finished_at = NULL WHERE group_id = {USED}")),
    "ended in flight": (
        "groups",
        sql(f"UPDATE groups SET finished_at = 1 WHERE group_id = {FLYING}"),
    ),
    "empty": ("groups", sql(f"UPDATE groups SET num_trajectories = 0 WHERE group_id = {USED}")),
    "too many": ("groups", sql(f"UPDATE groups SET num_trajectories = 7 WHERE group_id = {USED}")),
    "another prompt": (
        "prompts",
        sql(f"UPDATE groups SET prompt_index = (prompt_index + 1) % 5 WHERE group_id = {OTHER}"),
    ),
    "fewer draws": ("prompts", sql(f"UPDATE groups SET drawn = 1 WHERE group_id = {USED}")),
    "skipped": ("prompts", sql(f"UPDATE groups SET drawn = drawn + 1 WHERE group_id >= {USED}")),
    "handed out twice": (
        "prompts",
        sql(f"UPDATE groups SET state = 'filtered' WHERE group_id = {DROPPED}"),
    ),
    "forgotten": (
        "prompts",
        sql(f"UPDATE groups SET state = 'dropped' WHERE group_id = {FILTERED}"),
    ),
    "another size": ("prompts", sql("UPDATE totals SET value = 6 WHERE name = 'prompts'")),
    "backwards": (
        "versions",
        sql(
            "UPDATE trajectories SET num_segments = 2, "
            "segments = json_array(json_array(max_version, 2, 3), json_array(-1, 3, 4)) "
            f"WHERE {OF_USED}"
        ),
    ),
    "overlap": (
        "versions",
        sql(
            "UPDATE trajectories SET num_segments = 2, segments = json_array("
            "json_array(min_version, 2, 4), json_array(max_version, 3, 4)), n_tokens = 4 "
            f"WHERE {OF_USED}"
        ),
    ),
    "column": ("versions", sql(f"UPDATE trajectories SET min_version = 0 WHERE {OF_USED}")),
    "tokens gone": ("groups", sql(f"DELETE FROM sequences WHERE {OF_USED}")),
    "tokens of nothing": (
        "groups",
        sql(f"UPDATE sequences SET group_id = 9000 WHERE {OF_USED}"),
    ),
    "tokens not counted": (
        "groups",
        sql(f"UPDATE groups SET kept_bytes = 0 WHERE group_id = {USED}"),
    ),
    "no size": ("groups", sql(f"UPDATE groups SET kept_bytes = NULL WHERE group_id = {USED}")),
    "needed tokens removed": ("groups", removed(NEWEST)),
    "waiting tokens removed": ("groups", removed(WAITING)),
    "no reward": ("versions", sql(f"UPDATE trajectories SET reward = NULL WHERE {OF_USED}")),
    "used twice": (
        "copies",
        sql(
            "UPDATE trajectories SET (started_at, finished_at, n_tokens, segments) = (SELECT "
            f"started_at, finished_at, n_tokens, segments FROM trajectories WHERE {OF_USED}) "
            f"WHERE group_id = {OTHER} AND sample_index = 0"
        ),
    ),
    "another step": ("batches", sql(f"UPDATE groups SET step = 5 WHERE group_id = {USED}")),
    "a step without groups": ("batches", sql("UPDATE groups SET step = step + 1 WHERE step > 3")),
    "a step that is lost": (
        "batches",
        sql("UPDATE groups SET state = 'finished', step = NULL WHERE step > 5"),
    ),
    "a checkpoint ahead": ("batches", later_checkpoint),
    "rows cut off": ("batches", rows("metrics.jsonl", lambda r: r.__delitem__(slice(5, None)))),
    "newer than the step": (
        "staleness",
        sql(
            "UPDATE trajectories SET min_version = 5, max_version = 5, num_segments = 1, "
            f"segments = json_array(json_array(5, 2, n_tokens)) WHERE {OF_USED}"
        ),
    ),
    "row twice": ("metrics", rows("metrics.jsonl", lambda r: r.insert(3, r[3]))),
    "row gone ": ("metrics", rows("metrics.jsonl", lambda r: r.pop(3))),
    "out of order": ("metrics", rows("metrics.jsonl", lambda r: r.insert(2, r.pop(3)))),
    "version back": ("metrics", rows("metrics.jsonl", lambda r: r[4].update(version=2))),
    **{
        f"another {key}": ("metrics", rows("metrics.jsonl", lambda r, key=key: _add(r[4], key)))
        for key in (
            *("tokens", "trajectories", "reward_mean", "masked_tokens"),
            *("staleness_mean", "staleness_max", "trained_tokens"),
        )
    },
    "another reward": (
        "metrics",
        sql(f"UPDATE trajectories SET reward = reward + 0.1 WHERE {OF_USED}"),
    ),
    "trained on another": (
        "trained",
        rows("proximal.jsonl", lambda r: _last(r, 4).update(group_id=_last(r, 5)["group_id"])),
    ),
    "evaluated twice": ("evaluations", rows("evals.jsonl", lambda r: r.append(r[-1]))),
    "evaluated by old weights": (
        "evaluations",
        rows("evals.jsonl", lambda r: r[0].update(versions=[0])),
    ),
    "flipped bytes": ("checkpoints", checkpoint("weights", bytes(1024))),
    "file gone": ("checkpoints", checkpoint("weights", None)),
    "another count": ("counts", value("controller_totals.json", "failed_rollouts", 0)),
    "another state": (
        "counts",
        sql("UPDATE groups SET reason = 'empty: why' WHERE reason IS 'why'"),
    ),
}


def _add(row: dict, key: str) -> None:
    row[key] += 1


def _last(content: list[dict], step: int) -> dict:
    return [row for row in content if row["step"] == step][-1]


@pytest.mark.parametrize("name", DAMAGES)
def test_each_check_sees_its_violation(good, tmp_path, name: str) -> None:
    expected, damage = DAMAGES[name]
    shutil.copytree(good, tmp_path / "run")
    damage(tmp_path / "run")
    assert expected in off(tmp_path / "run")


def test_a_changed_token_is_seen_on_request(good, tmp_path) -> None:
    shutil.copytree(good, tmp_path / "run")
    sql(f"UPDATE sequences SET logprobs = zeroblob(9) WHERE {OF_USED}")(tmp_path / "run")
    assert off(tmp_path / "run") == {}
    assert list(off(tmp_path / "run", tokens=True)) == ["tokens"]


@pytest.mark.parametrize("config", [{}, REPLAY], ids=["queue", "replay"])
def test_a_store_without_old_tokens_proves_the_same(tmp_path, config) -> None:
    run = lived(tmp_path / "run", **config)
    run.kill()
    whole = {check.name: check.looked_at for check in audit(run.run_dir)}
    before = {row["group_id"]: row["kept_bytes"] for row in run.store.groups()}
    run.trim()
    after = {row["group_id"]: row["kept_bytes"] for row in run.store.groups()}
    gone = sum(bool(before[i]) and after[i] == 0 for i in before)
    assert gone > 20
    run.end()
    assert off(run.run_dir, tokens=True) == {}
    found = {check.name: check.looked_at for check in audit(run.run_dir, tokens=True)}
    assert f"; tokens not kept (store.max_gib): {gone} groups" in found["groups"]
    assert "; tokens not kept (store.max_gib): " in found["tokens"]
    for name in ("prompts", "versions", "copies", "batches", "staleness", "metrics"):
        assert found[name] == whole[name]


def test_a_changed_admission_is_seen_by_its_checksum(good, tmp_path) -> None:
    shutil.copytree(good, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "trajectories.sqlite") as db:
        db.execute(f"UPDATE groups SET prompt_id = 'other' WHERE group_id = {USED}")
    db.close()
    assert list(off(tmp_path / "run")) == ["groups"]


def test_a_run_that_masks_nothing_has_no_overdue_tokens(good, tmp_path) -> None:
    shutil.copytree(good, tmp_path / "run")
    for path in (tmp_path / "run").glob("config*.yaml"):
        path.write_text(path.read_text().replace("window: null", "window: 0"))
    assert list(off(tmp_path / "run")) == ["staleness"]


REPLAY_DAMAGES = {
    "no draw": sql("DELETE FROM draws WHERE step = 3"),
    "trajectory gone": sql("UPDATE draws SET sample_index = 8 WHERE step = 3 AND position = 0"),
    "drawn twice": sql(
        "UPDATE draws SET (group_id, sample_index) = (SELECT group_id, sample_index FROM draws d "
        "WHERE d.step = 3 AND d.draw = 0 AND d.position = 0) WHERE step = 3 AND draw = 0"
    ),
    "two prompts": sql(
        "UPDATE draws SET (group_id, sample_index) = (SELECT group_id, sample_index FROM draws d "
        "WHERE d.step = 3 AND d.draw = 1 AND d.position = 0) "
        "WHERE step = 3 AND draw = 0 AND position = 0"
    ),
    "another first step": sql(
        "UPDATE groups SET step = step + 1 WHERE group_id = "
        "(SELECT group_id FROM draws WHERE step = 0 LIMIT 1)"
    ),
}


@pytest.mark.parametrize("name", REPLAY_DAMAGES)
def test_the_draws_of_a_replay_buffer_are_checked(good_replay, tmp_path, name: str) -> None:
    assert off(good_replay, tokens=True) == {}
    shutil.copytree(good_replay, tmp_path / "run")
    REPLAY_DAMAGES[name](tmp_path / "run")
    assert "batches" in off(tmp_path / "run")


def test_the_command_prints_a_line_for_each_check(good, tmp_path, capsys) -> None:
    assert main(["diagnose", "--audit", str(good)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{good}: all 11 checks ok" and all(s.startswith("ok ") for s in shown[2:])
    shutil.copytree(good, tmp_path / "run")
    DAMAGES["another step"][1](tmp_path / "run")
    assert main(["diagnose", "--audit", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().out
    assert "3 checks off" in shown and "off  batches " in shown
    assert "steps with another number of groups: 5 (1), 6 (3)" in shown


def test_many_ids_are_counted(good, tmp_path) -> None:
    shutil.copytree(good, tmp_path / "run")
    sql("DELETE FROM trajectories")(tmp_path / "run")
    text = audit_text(good, audit(tmp_path / "run"))
    assert re.search(r"groups that lack trajectories: (\d+, ){9}\d+ and \d+ more\n", text)
    assert re.search(r"step 1: trajectories is \d+, the store gives 0", text)


def test_a_run_without_a_store(tmp_path, good, capsys) -> None:
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "run" / "trajectories.sqlite").unlink()
    assert [check.name for check in audit(tmp_path / "run")] == [
        "metrics",
        "evaluations",
        "checkpoints",
    ]
    (tmp_path / "run" / "trajectories.sqlite").write_bytes(b"no store")
    assert main(["diagnose", "--audit", str(tmp_path / "run")]) == 1
    assert "restore the file from a copy" in capsys.readouterr().err
