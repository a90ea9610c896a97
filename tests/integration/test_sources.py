"""Several data sources in the real controller process, which is killed and goes on."""

import json
from pathlib import Path

from areal_lite.data.sampler import interleave
from tests.integration.controller_run import GROUPS, MEMBERS, Run, assert_store_matches, push

FILES, STEPS = 3, 5


def settings(folder: Path) -> dict[str, object]:
    """Two of three draws are additions. The rows of a file end with half a reward."""
    rows = [{"question": f"{i} + 1 =", "answer": "2"} for i in range(FILES)]
    path = folder / "own.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "reward__function": "tests.integration.toy_reward:always",
        "data__chat": False,
        "data__sources": {
            "made": {"weight": 2},
            "files": {
                "source": "jsonl",
                "path": str(path),
                "eval_path": str(path),
                "reward": {"function": "tests.integration.toy_reward:share_of_letters"},
                "workflow": "areal_lite.workflows.multi_turn:MultiTurn",
                "workflow_args": {"feedback": "tests.integration.toy_reward:half"},
            },
        },
    }


def kill_controller(r: Run) -> None:
    r.processes["controller"].kill()
    r.processes["controller"].wait()
    (r.path / "controller.json").unlink()


def test_a_mixture_keeps_its_weights_rewards_and_workflows(run, tmp_path) -> None:
    r = run(max_staleness=2, trainer__steps=STEPS, **settings(tmp_path))
    r.start_server()
    client = r.start_controller()
    scores = client.evaluate(0)
    assert [scores["sets"][name]["problems"] for name in ("made", "files")] == [5, FILES]
    assert (scores["name"], scores["problems"]) == ("all", 5 + FILES)
    assert scores["sets"]["made"]["greedy"] == 1.0 and scores["sets"]["files"]["greedy"] == 0.5
    assert scores["greedy"] == (5 + FILES / 2) / (5 + FILES)
    client.batch(0, 0, 1)
    kill_controller(r)
    client, used = r.start_controller(), {}
    for step in range(STEPS):
        # A controller that starts again trusts a server after a push only.
        batch, info = client.batch(step, 0, 1, lambda: push(client, 0, "in_place"))
        used[step] = sorted(set(batch.group_ids.tolist()))
        assert info.get("reward_mean/made", 1.0) == 1.0
        assert info.get("reward_mean/files", 0.5) == 0.5
        counts = [info.get(f"trajectories/{name}", 0) for name in ("made", "files")]
        assert sum(counts) == GROUPS * MEMBERS
        push(client, step + 1, "in_place")
    assert info["epochs/files"] > 1 and "epochs/made" not in info
    totals = client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()
    assert_store_matches(r, totals, used)  # the audit draws every prompt again
    store = r.store()
    groups = list(store.groups())
    store.close()
    turns = interleave([2, 1]).tolist()
    for group in groups:
        name = ("made", "files")[group["prompt_index"] % 2]
        assert group["prompt_id"].startswith(f"{name}/")
    drawn = {group["drawn"]: group["prompt_index"] % 2 for group in reversed(groups)}
    assert sorted(drawn) == list(range(1, len(drawn) + 1)), "every draw has a group"
    assert [drawn[n] for n in sorted(drawn)] == [turns[(n - 1) % 3] for n in sorted(drawn)]
