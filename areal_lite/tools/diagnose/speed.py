"""Findings about waits: which part of a run holds up the others. Each is a pure function."""

import numpy as np

from areal_lite.tools.diagnose.history import History, Sign, finding, hint, limit
from areal_lite.tools.report.summary import age_label

_STALEST = "staleness_max"
_HELD_BACK = {
    "title": "The staleness bound holds generation back while the trainer waits",
    "cause": "a few long trajectories keep a batch open, and no others may start",
    "change": "raise `buffer.max_staleness` by one, or lower `rollout.max_new_tokens`",
}


@finding(
    "The trainer waits for the servers",
    flag="above {wait_share:.0%} of the time; the staleness bound may be the reason, where tokens "
    "are at the bound and fewer requests in flight than allowed",
    cause="generation is slower than training",
    change="raise `server.count`, or `rollout.max_concurrent` if the servers have memory for more "
    "requests; lower `rollout.max_new_tokens`",
    unless=("failed_servers", "stalled"),
)
def slow_servers(run: History) -> Sign | None:
    wait, share, staleness = run.share_of_time("wait_s"), _in_flight(run), run.middle(_STALEST)
    if run.takes_turns or wait is None or wait <= limit("wait_share"):
        return None
    found = hint(
        f"the trainer waits {wait:.0%} of the time; requests in flight {share:.0%} of the limit; "
        f"largest staleness {np.nanmax(run.values(_STALEST)):.0f}, {age_label(run.config.buffer)}"
    )
    # Between two pushes the age of the oldest tokens rises to the bound.
    lowest = run.config.max_lead - run.config.sync.every + 1
    replays = run.config.buffer.replay.capacity  # then nothing bounds it
    at_bound = not replays and len(staleness) and np.median(staleness) >= lowest
    return found._replace(words=_HELD_BACK) if at_bound and share < limit("full_share") else found


def _in_flight(run: History) -> float:
    """Return the median number of trajectories in flight, as a share of the limit."""
    flying, most = run.middle("in_flight"), run.middle("concurrency_limit")
    return (
        float(np.median(flying) / max(np.median(most), 1.0)) if len(flying) and len(most) else 1.0
    )


@finding(
    "Servers idle because the trainer is slow",
    flag="waits below {busy_share:.0%}, a whole batch in the queue or generation slowed for it, "
    "and requests below {in_flight_share:.0%} of the limit",
    cause="training is slower than generation",
    change="move devices from `server.count` to `trainer.data_parallel`, or raise "
    "`trainer.tokens_per_microbatch`",
    unless=("no_signal",),  # the trainer then runs the model on few sequences, or on none
)
def slow_trainer(run: History) -> Sign | None:
    wait, queue = run.share_of_time("wait_s"), run.middle("queue_depth")
    if run.takes_turns or wait is None or not len(queue):
        return None
    batch, lead = run.config.trainer.batch_groups, run.middle("admission_lead")
    slowed = len(lead) > 0 and np.median(lead) < run.config.max_lead * batch
    full = slowed or np.median(queue) >= batch
    if wait >= limit("busy_share") or not full or _in_flight(run) > limit("in_flight_share"):
        return None
    return hint(
        f"the trainer waits {wait:.1%} of the time, {np.median(queue):.0f} groups wait for it "
        f"(a batch: {batch}), and requests in flight are {_in_flight(run):.0%} of the limit"
    )


@finding(
    "Pushes pause generation for long",
    flag="above {pause_share:.0%} of the time",
    cause="weights take long compared with a step, or the interrupt mode waits",
    change="set `rollout.interrupt=in_place`; raise `sync.every` or `trainer.batch_groups` for "
    "fewer pushes; try another `sync.transport`",
)
def long_pauses(run: History) -> Sign | None:
    share = run.share_of_time("pause_s")
    if run.takes_turns or share is None or share <= limit("pause_share"):
        return None
    pause_s, time_s = np.median(run.middle("pause_s")), np.median(run.middle("time_s"))
    return hint(
        f"pushes pause generation {share:.0%} of the time; medians: {pause_s:.2f} s of a step of "
        f"{time_s:.2f} s"
    )


@finding(
    "Batches wait for slow groups",
    flag="above {straggler_share:.0%} of the time",
    cause="a few groups last much longer than the others, and no more may pass them",
    change="raise `buffer.window` and `buffer.max_staleness`, or lower `rollout.max_new_tokens`",
)
def stragglers(run: History) -> Sign | None:
    share = run.share_of_time("straggler_wait_s")
    if share is None or share <= limit("straggler_share"):
        return None
    return hint(
        f"whole batches wait {share:.0%} of the time for a group that more than "
        f"buffer.window={run.config.buffer.window} younger groups would pass"
    )


@finding(
    "Many tokens are too stale to train on",
    flag="above {overdue_share:.0%} of the tokens masked",
    cause="trajectories last longer than the staleness bound allows",
    change="raise `buffer.max_staleness`, or lower `rollout.max_concurrent` or "
    "`rollout.max_new_tokens`",
)
def overdue_tokens(run: History) -> Sign | None:
    tokens, masked = np.nansum(run.values("tokens")), np.nansum(run.values("masked_tokens"))
    share = masked / max(tokens, 1.0)
    if len(run.metrics) < limit("least_steps") or share <= limit("overdue_share"):
        return None
    bound = run.config.buffer.max_staleness
    return hint(f"{share:.0%} of the tokens masked; buffer.max_staleness={bound}")


@finding(
    "The controller is overloaded",
    flag="above {loop_lag_s:g} s",
    cause="more episodes are in flight than it can serve, or it has no core",
    change="lower `rollout.max_concurrent`, or leave it a core",
)
def busy_controller(run: History) -> Sign | None:
    lag = run.recent("loop_lag_p99_s")
    if not len(lag) or np.median(lag) <= limit("loop_lag_s"):
        return None
    return hint(f"its event loop is late by {np.median(lag):.2f} s (p99, median of recent steps)")
