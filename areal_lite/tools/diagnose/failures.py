"""Findings about failures and hangs, and about samples of a group that are the same."""

import numpy as np

from areal_lite.run_dir.controller_status import TrainerPhase, read_status
from areal_lite.run_dir.paths import CONTROLLER_STATUS_FILE, QUARANTINE_FILE
from areal_lite.system.files import read_json
from areal_lite.tools.diagnose.history import History, Sign, alarm, finding, hint, limit


@finding(
    "The run makes no progress",
    flag="no step for {stall_s:g} s and {stall_factor:g} usual steps, while the run is active",
    cause="a role hangs, and the others wait for it",
    change="read the log that is named; `reward.timeout_s` and `sync.timeout_s` bound how long a "
    "hang lasts",
)
def stalled(run: History) -> Sign | None:
    if not run.running or run.complete:
        return None
    usual = float(np.median(run.values("time_s")[1:])) if len(run.metrics) > 1 else 0.0
    patience = max(limit("stall_s"), limit("stall_factor") * usual)
    last = run.metrics[-1]["logged_at"] if run.metrics else 0.0
    if last < run.started_at:  # servers start, and an evaluation may come before the first step
        patience += run.config.server.start_timeout_s
    since = run.now - max(last, run.started_at)
    if since <= patience:
        return None
    normal = f" (usually {usual:.1f} s)" if usual else ""
    return alarm(f"no step for {since:.0f} s after step {run.step}{normal}; {_who(run)}")


def _who(run: History) -> str:
    """Say who waits for whom, from the status that the controller writes every second."""
    if (status := read_status(run.run_dir)) is None:
        return "there is no controller: see logs/controller.log"
    silent = run.now - (run.run_dir / CONTROLLER_STATUS_FILE).stat().st_mtime
    if silent > limit("stall_s"):
        return f"the controller hangs: its status, written every second, is {silent:.0f} s old"
    if not status.servers_ready:
        return "the controller waits for a server: see logs/servers.log"
    if status.trainer is not TrainerPhase.WAITING:
        phase = f"step {status.step}, {status.trainer}"
        return f"the controller waits for the trainer ({phase}): see logs/trainer.log"
    need = f"the trainer waits for {status.missing_groups} groups"
    if status.running_groups and not status.requests:
        return (
            f"{need}; {status.running_groups} groups run without a request to a server: the "
            "workflow or the reward function hangs"
        )
    return f"{need}; the servers hold {status.requests} requests: see logs/server-0.log"


@finding(
    "The run ended before its last step",
    flag="no process runs, steps are left, and no stop was requested",
    cause="a role failed, or the run was interrupted or killed (out of memory leaves no error)",
    change="remove the cause; `resume=auto` continues from the newest checkpoint, "
    "`trainer.save_every` writes more of them",
)
def ended_early(run: History) -> Sign | None:
    if run.running or run.complete or run.stopped or run.config.debug != "off":
        return None
    text = f"step {run.step} of {run.config.trainer.steps}"
    errors = "; ".join(f"{name}: {line[:200]}" for name, line in run.errors.items())
    return alarm(f"{text}; {errors}") if errors else hint(f"{text}; no error in the logs")


@finding(
    "Servers failed",
    flag="a server was restarted or left out of a push; alarm: {restarts:g} restarts, or given up",
    cause="a server ran out of memory, crashed or did not answer in time",
    change="read logs/server-N.log; lower `server.args.mem_fraction_static` or "
    "`server.args.max_running_requests` against lack of memory, raise `sync.timeout_s` for a "
    "slow machine",
)
def failed_servers(run: History) -> Sign | None:
    again = run.log_lines("servers.log", " is started again in ")
    given_up = run.log_lines("servers.log", " is given up after ")
    failed = [(m["step"], name) for m in run.metrics for name in m.get("failed") or ()]
    if not (again or given_up or failed):
        return None
    last = (given_up or again or [""])[-1]
    text = (
        f"restarts: {len(again)}, given up: {len(given_up)}, left out of a push: {len(failed)}"
        f"{f'; the last: {last[20:220]}' if last else ''}"
    )
    return alarm(text) if given_up or len(again) >= limit("restarts") else hint(text)


@finding(
    "Controller and trainer were restarted",
    flag="a restart in logs/restarts.log; alarm: {restarts:g} of them",
    cause="one of them failed, was killed or hung; the steps after the newest checkpoint were "
    "trained again",
    change="read logs/restarts.log for the cause of each; `trainer.save_every` bounds the steps "
    "that are trained again",
)
def restarted(run: History) -> Sign | None:
    if not (again := run.log_lines("restarts.log", "(restart ")):
        return None
    text = f"restarts: {len(again)}; the last: {again[-1][:220]}"
    return alarm(text) if len(again) >= limit("restarts") else hint(text)


@finding(
    "Rewards fail",
    flag="above {failures:.0%} of the trajectories; alarm: {failures_alarm:.0%}",
    cause="the reward function raises an error or takes too long",
    change="mend `reward.function`; raise `reward.timeout_s` or `reward.workers` for time-outs",
)
def reward_failures(run: History) -> Sign | None:
    return _failures(run, "reward_failures", ": no reward: ")


@finding(
    "Rollouts fail",
    flag="above {failures:.0%} of the trajectories; alarm: {failures_alarm:.0%}",
    cause="the workflow raises an error, for example for a tool or a context that is too long",
    change="mend `rollout.workflow`; `server.args.context_length` bounds prompt and answer "
    "together",
    unless=("failed_servers",),
)
def workflow_failures(run: History) -> Sign | None:
    return _failures(run, "workflow_failures", " WARNING ")


@finding(
    "Prompts are in quarantine",
    flag="quarantine.json has a prompt",
    cause="its episodes hung, blocked their process or ended it, twice",
    change="mend the code at the place that is named; raise `rollout.episode_timeout_s` if it only "
    "takes long; remove quarantine.json to ask these prompts again",
)
def quarantine(run: History) -> Sign | None:
    if not (held := read_json(run.run_dir / QUARANTINE_FILE)):
        return None
    name, of = list(held.items())[-1]
    return hint(f"{len(held)} prompts; the last: {name}: {of['failure']}")


def _failures(run: History, key: str, mark: str) -> Sign | None:
    failed, scored = run.count(key), float(np.nansum(run.values("trajectories")))
    share = failed / max(failed + scored, 1.0)
    if share <= limit("failures"):
        return None
    lines = [line for line in run.log_lines("controller.log", mark) if "rollout of " in line]
    last = f"; the last: {lines[-1].partition('rollout of ')[2][:200]}" if lines else ""
    text = f"{failed} failures, {share:.1%} of the trajectories{last}"
    return alarm(text) if share > limit("failures_alarm") else hint(text)


@finding(
    "A seed does not reach the samples",
    flag="hardly a second completion of a prompt, in groups whose repetition has less than a "
    "probability of 2e-9 by chance",
    cause="each request is sampled with the same seed",
    change="remove a fixed seed from the requests of `rollout.workflow` and from `server.args`",
)
def lost_seed(run: History) -> Sign | None:
    share, entropy = run.recent("distinct_share"), run.recent("entropy")
    size = run.config.rollout.group_size
    if size < 2 or not (len(share) and len(entropy)) or share.mean() * size > limit("repeated"):
        return None
    length = run.recent("tokens").sum() / run.recent("trajectories").sum()
    nats = float(entropy.mean() * length)
    if nats * (size - 1) < limit("unlikely"):
        return None
    return alarm(
        f"{share.mean() * size:.2f} different completions in a group of {size}, and a completion "
        f"has {nats:.0f} nats of entropy"
    )
