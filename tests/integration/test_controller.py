"""The real controller process against fake servers, driven by a scripted trainer."""

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from areal_lite.config import ReplayConfig
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase, read_status
from areal_lite.servers.blocking import post
from areal_lite.servers.registry import UNPUSHED, ServerInfo, announced_servers
from tests.integration.controller_run import (
    GROUPS,
    MEMBERS,
    assert_exact,
    assert_store_matches,
    end_step,
    push,
)


@pytest.mark.parametrize(
    "mode, every, window", [("in_place", 1, None), ("retract", 2, None), ("abort", 1, 0)]
)
def test_batches_for_two_ranks_through_pushes(
    run, mode: str, every: int, window: int | None
) -> None:
    # One batch in flight: whatever the cadence, a push finds requests that run.
    r = run(
        interrupt=mode,
        max_staleness=2,
        rollout__max_concurrent=GROUPS * MEMBERS,
        buffer__window=window,
    )
    r.start_server("s0"), r.start_server("s1")
    client, other = r.start_controller(), r.client()
    used: dict[int, list[int]] = {}
    interrupted = 0.0
    for step in range(6):
        batch, info = client.batch(step, 0, 2)
        second, same = other.batch(step, 1, 2)
        assert info == same
        again, _ = client.batch(step, 0, 2)
        assert [bytes(f) for f in again.to_frames()] == [bytes(f) for f in batch.to_frames()]
        for shard in (batch, second):
            assert_exact(shard)
            assert (
                len(set(shard.group_ids)) == GROUPS // 2
                and shard.num_sequences == GROUPS // 2 * MEMBERS
            )
            sampled = shard.loss_mask
            assert (step - shard.versions[sampled] <= 2).all() and (
                shard.versions[sampled] <= step
            ).all()
        used[step] = sorted({*batch.group_ids.tolist(), *second.group_ids.tolist()})
        assert len(used[step]) == GROUPS
        if window is not None:
            assert info["masked_tokens"] == 0 and info["passed_groups"] <= window
        if window == 0:
            assert used[step] == list(range(step * GROUPS, (step + 1) * GROUPS))
        assert info["trajectories"] == GROUPS * MEMBERS and (
            info["masked_tokens"] or info["staleness_max"] <= 2
        )
        interrupted += info["interrupted_share"]
        assert end_step(client, step + 1, every, mode) == 0
    with pytest.raises(RuntimeError, match="6 steps are complete"):
        client.batch(5, 0, 2)
    totals = client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()
    assert interrupted > 0, "no push came in the middle of a trajectory: the test tests nothing"
    assert totals["aborts"] > 0 if mode == "abort" else totals["aborts"] == 0
    assert_store_matches(r, totals, used)
    everything = [group for groups in used.values() for group in groups]
    assert len(everything) == len(set(everything)) and totals["groups"]["used"] == 6 * GROUPS
    assert not (r.path / "controller.json").exists()


def test_a_rank_may_ask_for_the_next_batch_before_the_push_is_over(run) -> None:
    r = run()
    r.start_server()
    client, early = r.start_controller(), r.client()
    client.batch(0, 0, 2), early.batch(0, 1, 2)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(early.batch(1, 1, 2)[1]["staleness_max"]))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    push(client, 1, "in_place")
    thread.join(10)
    assert got and got[0] <= 1
    with pytest.raises(RuntimeError, match="assigned to 2 ranks"):
        client.batch(1, 0, 1)


def test_mode_none_drains_and_never_mixes_versions(run) -> None:
    r = run(interrupt="none", max_staleness=4, rollout__max_concurrent=2 * MEMBERS)
    r.start_server(delay=0.005)
    client = r.start_controller()
    drained = 0
    for step in range(4):
        batch, info = client.batch(step, 0, 1)
        assert_exact(batch)
        assert info["interrupted_share"] == 0 and info["segments_mean"] == 1
        drained += client.begin_push(step + 1).drained
        with urllib.request.urlopen(announced_servers(r.path)[0].url + "/model_info") as answer:
            assert json.load(answer)["running"] == 0
        assert (
            r.store().counts()["in_flight"] > 0 or step > 0
        )  # a request that was not sent yet is held back, not waited for
        drained += push(
            client, step + 1, None
        ).drained  # an update without a pause would wait for running requests: there are none
    totals = client.finish()
    assert totals["drained"] == drained > 0 and totals["aborts"] == 0
    assert r.processes["controller"].wait(10) == 0, r.log()


@pytest.mark.parametrize("every", [1, 3])
def test_synchronous_starts_only_what_the_steps_to_the_next_push_need(run, every: int) -> None:
    r = run(interrupt="none", max_staleness=every - 1, sync__every=every)
    r.start_server()
    client = r.start_controller()
    for step in range(2 * every):
        batch, info = client.batch(step, 0, 1)
        assert set(step - batch.versions[batch.loss_mask]) == {step % every}
        assert len(set(batch.group_ids)) == GROUPS
        if step % every == every - 1:
            assert set(batch.group_ids) <= set(range((step + 1) * GROUPS))
            time.sleep(0.1)
            assert sum(r.store().counts().values()) == (step + 1) * GROUPS
        assert end_step(client, step + 1, every, None) == 0
        assert r.store().counts()["used"] == (step + 1) * GROUPS
    client.finish()


@pytest.mark.parametrize("every", [1, 3])
def test_in_order_and_uninterrupted_every_token_is_exactly_that_old(run, every: int) -> None:
    """With a push every third step the lag rises from 0 to 2, again and again."""
    lag, steps = 2, 5
    r = run(
        max_staleness=lag,
        buffer__window=0,
        interrupt="none",
        trainer__steps=steps,
        sync__every=every,
    )
    r.start_server()
    client = r.start_controller()
    for step in range(steps):  # to the last step: nothing more may start then
        batch, _ = client.batch(step, 0, 1)
        expected = min(step, lag) if every == 1 else step % every
        assert set(step - batch.versions[batch.loss_mask]) == {expected}
        assert sorted(set(batch.group_ids)) == list(range(step * GROUPS, (step + 1) * GROUPS))
        end_step(client, step + 1, every, None)
    assert client.finish()["groups"]["used"] == steps * GROUPS


def test_a_server_dies_and_nothing_is_lost(run) -> None:
    r = run(max_staleness=2)
    r.start_server("s0", delay=0.01), r.start_server("s1", delay=0.01)
    while len(announced_servers(r.path)) < 2:
        time.sleep(0.02)
    client = r.start_controller()
    used = {0: sorted(set(client.batch(0, 0, 1)[0].group_ids.tolist()))}
    push(client, 1, "in_place")
    time.sleep(0.1)
    r.processes["s0"].kill()
    r.wait_for("left out until it is announced again")  # or the scripted push below would ask it
    for step in (1, 2):
        batch, _ = client.batch(step, 0, 1)
        assert_exact(batch)
        used[step] = sorted(set(batch.group_ids.tolist()))
        assert [s.name for s in push(client, step + 1, "in_place").servers] == ["s1"]
    # A server that comes back with old weights takes requests only after the push.
    r.start_server("s0", delay=0.001)
    r.wait_for("it waits for the next push")
    batch, info = client.batch(3, 0, 1)
    used[3] = sorted(set(batch.group_ids.tolist()))
    assert batch.versions[batch.loss_mask].min() >= 1
    assert len(push(client, 4, "in_place").servers) == 2
    totals = client.finish()
    assert totals["retries"] > 0
    assert_store_matches(r, totals, used)


def test_a_server_that_returns_between_two_pushes_brings_a_push_to_all(run) -> None:
    """No server may hold weights that are newer than those of the others."""
    r = run(max_staleness=1, sync__every=2)
    r.start_server("s0")
    client, pushed = r.start_controller(), []
    for step in range(4):
        client.batch(step, 0, 1)
        end_step(client, step + 1, 2, "in_place")
    client.batch(4, 0, 1), client.step_done(5)
    client.batch(5, 0, 1), client.step_done(6)  # a trainer would push here
    r.start_server("s1")
    batch, info = client.batch(
        6, 0, 1, lambda: pushed.extend(s.name for s in push(client, 6, "in_place").servers)
    )
    assert sorted(pushed) == ["s0", "s1"]
    assert set(batch.versions[batch.loss_mask]) == {6} and info["staleness_max"] == 0
    with pytest.raises(RuntimeError, match="step 5 is reported, but 6 steps are complete already"):
        client.step_done(5)


def test_without_a_server_everything_waits_for_one(run) -> None:
    r = run()
    r.start_server(delay=1.0)
    client = r.start_controller()
    r.wait_for("joined at version 0")
    r.processes["s0"].kill()
    r.wait_for("left out until it is announced again")
    r.start_server("s1")
    assert_exact(client.batch(0, 0, 1)[0])


def test_a_server_that_failed_the_push_is_left_out(run) -> None:
    r = run()
    r.start_server("s0"), r.start_server("s1")
    while len(announced_servers(r.path)) < 2:
        time.sleep(0.02)
    client = r.start_controller()
    client.batch(0, 0, 1)
    (good,) = [s for s in client.begin_push(1).servers if s.name == "s0"]
    post(good, "/update_weights_from_disk", {"model_path": "m", "weight_version": "1"}, 10)
    client.pushed(1, failed=["s1"])
    client.batch(1, 0, 1)
    assert [s.name for s in client.begin_push(2).servers] == ["s0"]
    client.pushed(2)


def test_evaluation_during_training(run) -> None:
    r = run()
    r.start_server()
    client = r.start_controller()
    result = client.evaluate(0)
    assert (result["problems"], result["samples"], result["versions"], result["failures"]) == (
        5,
        1,
        [0],
        0,
    )
    assert 0 <= result["greedy"] <= 1 and 0 <= result["sampled"] <= 1
    client.batch(0, 0, 1)
    assert sum(r.store().counts().values()) == 2 * GROUPS  # evaluation makes no rollout group
    client.finish()


def test_several_eval_sets_and_pass_at_k(run, tmp_path) -> None:
    sets = {}
    for name, rows in {"easy": 2, "hard": 9}.items():
        sets[name] = str(tmp_path / f"{name}.jsonl")
        Path(sets[name]).write_text(
            "".join(
                json.dumps({"question": f"{i} + 1 =", "answer": "2"}) + "\n" for i in range(rows)
            )
        )
    r = run(
        reward__function="tests.integration.toy_reward:coin",
        eval__sets=list(sets.values()),
        eval__samples=4,
        data__chat=False,
    )
    r.start_server()
    result = r.start_controller().evaluate(0)
    assert result["problems"] == 5 and list(result["sets"]) == ["easy", "hard"]
    assert [result["sets"][name]["problems"] for name in sets] == [
        2,
        5,
    ]  # eval.problems of each, as far as there are
    for facts in (result, *result["sets"].values()):
        k = facts["pass_at_k"]
        assert (
            list(k) == ["1", "2", "4"]
            and k["1"] == pytest.approx(facts["sampled"])
            and k["1"] <= k["2"] <= k["4"]
        )
        assert facts["versions"] == [0] and facts["failures"] == 0


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(run) -> None:
    r = run(reward__function="operator:truediv")
    r.start_server()
    client = r.start_controller()
    with pytest.raises(RuntimeError, match="lost all their rollouts.*TypeError"):
        client.batch(0, 0, 1)
    assert r.processes["controller"].wait(10) == 1
    assert "lost all their rollouts" in r.log().splitlines()[-1]


def test_active_sampling_replaces_groups_without_variance(run) -> None:
    r = run(
        reward__function="tests.integration.toy_reward:coin",
        rollout__filters=["zero_variance"],
        trainer__steps=4,
    )
    r.start_server()
    client = r.start_controller()
    used: dict[int, list[int]] = {}
    for step in range(4):
        batch, info = client.batch(step, 0, 1)
        used[step] = sorted(set(batch.group_ids.tolist()))
        assert len(used[step]) == GROUPS and info["uniform_groups_share"] == 0
        assert (step - batch.versions[batch.loss_mask] <= 1).all()
        assert info["filtered_groups"] == info["filtered_zero_variance"]
        push(client, step + 1, "in_place")
    totals = client.finish()
    assert_store_matches(r, totals, used)
    assert totals["groups"]["filtered"] == totals["filtered"]["zero_variance"] > 0
    store = r.store()
    for group in store.groups():
        rewards = {t["reward"] for t in store.trajectories() if t["group_id"] == group["group_id"]}
        assert (group["state"] == "filtered") == (len(rewards) == 1)
        assert group["reason"] == ("zero_variance" if len(rewards) == 1 else None)


def test_a_run_in_which_every_group_is_filtered_ends_with_the_counts(run) -> None:
    r = run(
        reward__function="tests.integration.toy_reward:always", rollout__filters=["zero_variance"]
    )
    r.start_server(delay=0)
    client = r.start_controller()
    with pytest.raises(
        RuntimeError, match="no batch can be made: 501 groups in a row.*501 zero_variance"
    ):
        client.batch(0, 0, 1)
    assert r.processes["controller"].wait(10) == 1


def test_prompts_that_are_always_solved_are_retired_until_none_is_left(run, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"{i} + 1 =", "answer": ""}) + "\n" for i in range(6))
    )
    settings = {
        "data__source": "jsonl",
        "data__path": str(data),
        "data__chat": False,
        "eval__problems": 0,
    }
    r = run(
        reward__function="tests.integration.toy_reward:always",
        rollout__retire_above=0.9,
        **settings,
    )
    r.start_server()
    r.start_controller()
    client = r.client(timeout_s=3)
    with contextlib.suppress(
        RuntimeError, TimeoutError
    ):  # the latter when it was over before we asked
        for step in range(100):
            client.batch(step, 0, 1)
            push(client, step + 1, "in_place")
    assert r.processes["controller"].wait(10) == 1
    assert (
        "no prompt is left at step" in (end := r.log().splitlines()[-1])
        and "all 6 are retired" in end
    )
    groups = list(r.store().groups())
    assert all(t["state"] in ("used", "finished") for t in groups)
    assert sum(t["state"] == "finished" for t in groups) < GROUPS, "what could be used was not"
    assert min(sum(t["prompt_index"] == i for t in groups) for i in range(6)) >= 2


def test_replay_never_waits_and_uses_each_group_up_once(run) -> None:
    replay = ReplayConfig(capacity=8, recency_probability=0.3)
    r = run(
        reward__function="tests.integration.toy_reward:coin",
        buffer__replay=replay,
        max_staleness=0,
        trainer__steps=5,
    )
    r.start("s0", "tests/fake_sglang.py", str(r.path), "s0", "--delay", "0.001", "--vary")
    client = r.start_controller()
    for step in range(5):
        batch, info = client.batch(step, 0, 1)
        assert (
            len(set(batch.group_ids)) == GROUPS
            and info["masked_tokens"] == 0
            and info["replay_prompts"] >= GROUPS
        )
        time.sleep(0.2)
        push(client, step + 1, "in_place")
    totals = client.finish()
    assert info["staleness_max"] > 0, "nothing old was drawn: the test tests nothing"
    groups = list(r.store().groups())
    assert totals["trajectories_lost"] == 0 and len(groups) > 10 * GROUPS, "generation waited"
    steps = [t["step"] for t in groups if t["state"] == "used"]
    assert set(steps) == set(range(5)) and len(steps) <= 5 * GROUPS


def test_servers_get_no_request_before_their_first_push(run) -> None:
    r, pushes = run(), []
    r.start_server("s0", version=UNPUSHED)
    client = r.start_controller()
    batch, _ = client.batch(0, 0, 1, lambda: pushes.append(push(client, 0, "in_place")))
    assert len(pushes) == 1 and set(batch.versions[batch.loss_mask]) == {0}
    assert_exact(batch)


def test_a_server_with_a_version_that_is_no_number_is_left_out(run) -> None:
    r = run()
    r.start_server("s0", version="default"), r.start_server("s1")
    while len(announced_servers(r.path)) < 2:
        time.sleep(0.02)
    client = r.start_controller()
    assert_exact(client.batch(0, 0, 1)[0])
    assert "start the server with --weight-version 0" in r.log()
    assert (
        "weight version 'default'"
        in json.loads((r.path / "servers" / "s0.unhealthy").read_text())["reason"]
    )


def test_sigterm_ends_it_and_leaves_the_store_whole(run) -> None:
    r = run()
    r.start_server()
    client = r.start_controller()
    client.batch(0, 0, 1)
    r.processes["controller"].send_signal(signal.SIGTERM)
    # A supervisor must not take it for the end of the run.
    assert r.processes["controller"].wait(10) == -signal.SIGTERM, r.log()
    assert not (r.path / "trajectories.sqlite-wal").exists()  # closed in good order


def test_it_does_not_outlive_its_parent(run) -> None:
    r = run()
    code = """
import os, subprocess, sys, time
from areal_lite.system.processes import dying_with_me
subprocess.Popen([sys.executable, *sys.argv[1:]], env=os.environ | dying_with_me())
time.sleep(60)
"""
    parent = r.start("parent", "-c", code, "-m", "areal_lite.controller.service", str(r.path))
    pid = r.client()._address.pid
    parent.kill()
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline and _state(pid) != "Z":
            os.kill(pid, 0)
            time.sleep(0.05)
    assert time.monotonic() < deadline


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_server_info_crosses_the_wire_whole(run) -> None:
    r = run()
    r.start_server()
    client = r.start_controller()
    client.batch(0, 0, 1)
    assert client.begin_push(1).servers == announced_servers(r.path)
    assert isinstance(announced_servers(r.path)[0], ServerInfo)


def test_the_status_follows_trainer_and_servers(run) -> None:
    r = run(max_staleness=0)

    def wait_for(condition) -> ControllerStatus:
        deadline = time.monotonic() + 20
        while (status := read_status(r.path)) is None or not condition(status):
            assert time.monotonic() < deadline, status
            time.sleep(0.1)
        return status

    client = r.start_controller()
    status = wait_for(lambda status: True)
    assert (status.trainer, status.servers_announced) == (TrainerPhase.LOADING, 0)
    pull = threading.Thread(target=client.batch, args=(0, 0, 1))
    pull.start()
    status = wait_for(lambda status: status.trainer == TrainerPhase.WAITING)
    assert (status.batch_step, status.missing_groups) == (0, GROUPS)
    r.start_server()
    pull.join(20)
    status = wait_for(lambda status: status.trainer == TrainerPhase.TRAINING)
    assert (status.servers_ready, status.running_groups, status.capacity) == (1, 0, 0)
    client.begin_push(1)
    wait_for(lambda status: status.trainer == TrainerPhase.PUSHING)
    client.pushed(1, [])
    assert wait_for(lambda status: status.version == 1).in_flight >= 0
    client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()
    assert read_status(r.path) is None
