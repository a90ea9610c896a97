"""Findings about the processes: hangs, failures, waits. Each is a pure function of a history."""

from __future__ import annotations

import re

import numpy as np

from areal_lite.tools.diagnose.history import History, Sign, alarm, hint, limit

_STATUS = re.compile(
    r"(?P<running>\d+) running, .*; (?P<requests>\d+) requests on \d+ servers; "
    r"waiting for (?P<need>.*)"
)


def stalled(run: History) -> Sign | None:
    """Find a running run without progress, and the role that holds it back."""
    if not run.running or run.complete:
        return None
    usual = float(np.median(run.values("time_s")[1:])) if len(run.metrics) > 1 else 0.0
    patience = max(limit("stall_s"), limit("stall_factor") * usual)
    if not run.metrics:  # servers start, and an evaluation may come before the first step
        patience += run.config.server.start_timeout_s
    since = run.now - (run.metrics[-1]["logged_at"] if run.metrics else run.started_at)
    if since <= patience:
        return None
    normal = f" (usually {usual:.1f} s)" if usual else ""
    return alarm(f"no step for {since:.0f} s after step {run.step}{normal}; {_who(run)}")


def _who(run: History) -> str:
    """Say who waits for whom, from the last status line of the controller."""
    log = run.logs.get("controller.log")
    if log is None:
        return "the controller has no log: it did not start"
    silent = run.now - log.changed_at
    if silent > limit("stall_s"):
        return f"the controller hangs: its log, a line every 10 s, is {silent:.0f} s old"
    status = [found for line in log.lines if (found := _STATUS.search(line))]
    if not status:
        return "the controller waits for its first server: see logs/servers.log"
    running, requests, need = (status[-1][name] for name in ("running", "requests", "need"))
    if need.startswith("the trainer"):
        return f"the controller waits for {need}: see logs/trainer.log"
    if need.startswith("a server"):
        return f"the controller waits for {need}: see logs/servers.log"
    if int(running) and not int(requests):
        return (
            f"the trainer waits for {need}; {running} groups run without a request to a server: "
            "the workflow or the reward function hangs"
        )
    return (
        f"the trainer waits for {need}; the servers hold {requests} requests: see logs/server-0.log"
    )


def ended_early(run: History) -> Sign | None:
    """Find a run that ended before its last step without being asked to."""
    if run.running or run.complete or run.stopped or run.config.debug != "off":
        return None
    text = f"step {run.step} of {run.config.trainer.steps}"
    errors = "; ".join(f"{name}: {line[:200]}" for name, line in run.errors.items())
    return alarm(f"{text}; {errors}") if errors else hint(f"{text}; no error in the logs")


def failed_servers(run: History) -> Sign | None:
    """Find servers that were restarted, given up, or left out of a push."""
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


def restarted(run: History) -> Sign | None:
    """Find restarts of controller and trainer."""
    again = run.log_lines("restarts.log", "(restart ")
    if not again:
        return None
    text = f"restarts: {len(again)}; the last: {again[-1][:220]}"
    return alarm(text) if len(again) >= limit("restarts") else hint(text)


def reward_failures(run: History) -> Sign | None:
    """Find trajectories without a reward: the function failed or ran out of time."""
    return _failures(run, "reward_failures", ": no reward: ")


def workflow_failures(run: History) -> Sign | None:
    """Find rollouts that their workflow could not finish."""
    return _failures(run, "workflow_failures", " WARNING ")


def _failures(run: History, key: str, mark: str) -> Sign | None:
    failed, scored = run.count(key), float(np.nansum(run.values("trajectories")))
    share = failed / max(failed + scored, 1.0)
    if share <= limit("failures"):
        return None
    lines = [line for line in run.log_lines("controller.log", mark) if "rollout of " in line]
    last = f"; the last: {lines[-1].partition('rollout of ')[2][:200]}" if lines else ""
    text = f"{failed} failures, {share:.1%} of the trajectories{last}"
    return alarm(text) if share > limit("failures_alarm") else hint(text)


def slow_servers(run: History) -> Sign | None:
    """Find a trainer that waits for servers with all the requests that they may have."""
    waits = _waiting(run)
    return None if waits is None or _held_back(run) else hint(waits)


def tight_staleness(run: History) -> Sign | None:
    """Find a trainer that waits while the staleness bound keeps servers from generating."""
    waits = _waiting(run)
    return hint(waits) if waits is not None and _held_back(run) else None


def _waiting(run: History) -> str | None:
    """Describe a trainer that waits long; None if it does not, or if the schedule makes it."""
    wait, share = run.share_of_time("wait_s"), _in_flight(run)
    if run.takes_turns or wait is None or wait <= limit("wait_share"):
        return None
    return (
        f"the trainer waits {wait:.0%} of the time; requests in flight {share:.0%} of the limit; "
        f"staleness up to {np.nanmax(run.values('staleness_max')):.0f} of "
        f"{run.config.buffer.max_staleness}"
    )


def _held_back(run: History) -> bool:
    """Return whether tokens are as stale as allowed while fewer requests run than allowed."""
    staleness = run.middle("staleness_max")
    # Between two pushes the age of the oldest tokens rises to the bound.
    lowest = run.config.max_lead - run.config.sync.every + 1
    at_bound = len(staleness) and np.median(staleness) >= lowest
    return bool(at_bound) and _in_flight(run) < limit("full_share")


def _in_flight(run: History) -> float:
    """Return the median number of trajectories in flight, as a share of the limit."""
    flying, most = run.middle("in_flight"), run.middle("concurrency_limit")
    return (
        float(np.median(flying) / max(np.median(most), 1.0)) if len(flying) and len(most) else 1.0
    )


def slow_trainer(run: History) -> Sign | None:
    """Find servers that idle because the trainer has all the batches it can use."""
    wait, queue = run.share_of_time("wait_s"), run.middle("queue_depth")
    if run.takes_turns or wait is None or not len(queue):
        return None
    full = np.median(queue) >= run.config.trainer.batch_groups
    if wait >= limit("busy_share") or not full or _in_flight(run) > limit("in_flight_share"):
        return None
    return hint(
        f"the trainer waits {wait:.1%} of the time, {np.median(queue):.0f} groups wait for it "
        f"(a batch: {run.config.trainer.batch_groups}), and requests in flight are "
        f"{_in_flight(run):.0%} of the limit"
    )


def long_pauses(run: History) -> Sign | None:
    """Find pushes that stop generation for a large part of the time."""
    share = run.share_of_time("pause_s")
    if run.takes_turns or share is None or share <= limit("pause_share"):
        return None
    pause_s, time_s = np.median(run.middle("pause_s")), np.median(run.middle("time_s"))
    return hint(
        f"pushes pause generation {share:.0%} of the time; medians: {pause_s:.2f} s of a step of "
        f"{time_s:.2f} s"
    )


def stragglers(run: History) -> Sign | None:
    """Find batches that wait for an older group, because of the window."""
    share = run.share_of_time("straggler_wait_s")
    if share is None or share <= limit("straggler_share"):
        return None
    return hint(
        f"whole batches wait {share:.0%} of the time for a group that more than "
        f"buffer.window={run.config.buffer.window} younger groups would pass"
    )


def overdue_tokens(run: History) -> Sign | None:
    """Find tokens that were sampled for nothing, because they got too stale."""
    tokens, masked = np.nansum(run.values("tokens")), np.nansum(run.values("masked_tokens"))
    dropped = run.count("dropped_groups")
    groups = dropped + len(run.metrics) * run.config.trainer.batch_groups
    share = max(masked / max(tokens, 1.0), dropped / max(groups, 1))
    if len(run.metrics) < limit("least_steps") or share <= limit("overdue_share"):
        return None
    return hint(
        f"{masked / max(tokens, 1.0):.0%} of the tokens masked, {dropped} groups dropped; "
        f"buffer.max_staleness={run.config.buffer.max_staleness}"
    )


def busy_controller(run: History) -> Sign | None:
    """Find a controller whose event loop answers late."""
    lag = run.recent("loop_lag_p99_s")
    if not len(lag) or np.median(lag) <= limit("loop_lag_s"):
        return None
    return hint(f"its event loop is late by {np.median(lag):.2f} s (p99, median of recent steps)")
