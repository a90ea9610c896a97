"""Reports of the controller: facts of a batch, the totals of the run, a status line."""

from collections.abc import Sequence
from typing import Any

from areal_lite.controller.batch_stats import batch_stats
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.diversity import diversity
from areal_lite.controller.queue import BatchAssignment, GroupQueue
from areal_lite.controller.replay import ReplayBuffer
from areal_lite.servers.fleet import Fleet

# Counts of the dispatcher since the start of this process.
_COUNTS = (
    "dropped_groups",
    "empty_groups",
    "failed_rollouts",
    "workflow_failures",
    "reward_failures",
)


def batch_info(
    assignment: BatchAssignment,
    version: int,
    dispatcher: Dispatcher,
    queue: GroupQueue | ReplayBuffer,
) -> dict[str, Any]:
    """Describe a batch for a trainer at `version` and, with cumulative counts, the run."""
    return {
        **batch_stats(assignment.groups, version, dispatcher.admission.max_staleness),
        **diversity(group.trajectories for group in assignment.groups),
        **(_replay_stats(queue) if isinstance(queue, ReplayBuffer) else {}),
        "masked_tokens": assignment.masked_tokens,
        "queue_depth": len(queue),
        "in_flight": dispatcher.in_flight,
        "concurrency_limit": dispatcher.concurrency.limit,
        **{name: dispatcher.counts[name] for name in _COUNTS},
        "filtered_groups": dispatcher.filtered.total(),
        **{f"filtered_{reason}": groups for reason, groups in dispatcher.filtered.items()},
        "retired_prompts": dispatcher.retired,
    }


def run_totals(
    dispatcher: Dispatcher, queue: GroupQueue | ReplayBuffer, fleet: Fleet
) -> dict[str, Any]:
    """Return the counts of the run at its end."""
    dropped_by_length = sorted(queue.dropped_by_length.items())
    return {
        "requests": fleet.counts["requests"],
        "aborts": fleet.counts["aborts"],
        "retries": fleet.counts["retries"],
        "dropped_by_length": {str(length): groups for length, groups in dropped_by_length},
        **{name: dispatcher.counts[name] for name in _COUNTS},
        "filtered": dict(dispatcher.filtered),
        "retired_prompts": dispatcher.retired,
    }


def status_line(
    dispatcher: Dispatcher,
    queue: GroupQueue | ReplayBuffer,
    fleet: Fleet,
    pending_steps: Sequence[int],
) -> str:
    """Say what the controller has and what it waits for.

    `pending_steps` are the steps whose batch was asked for and is not complete.
    """
    admission = dispatcher.admission
    router = fleet.router
    missing = admission.batch_groups - len(queue)
    if not router.ready:
        need = f"a server ({len(router.servers)} announced, none ready)"
    elif pending_steps and missing > 0:
        need = f"{missing} more groups for the batch of step {pending_steps[0]}"
    elif admission.can_admit():
        need = "trajectories in flight"
    else:
        need = f"the trainer (step {admission.version})"
    return (
        f"version {admission.version}: {len(queue)} groups queued, {admission.running} running, "
        f"capacity for {admission.capacity}; {fleet.gate.in_flight} requests on "
        f"{len(router.ready)} servers; waiting for {need}"
    )


def _replay_stats(buffer: ReplayBuffer) -> dict[str, float]:
    """Describe the content of the buffer, of which a batch is only a sample."""
    content = diversity(buffer)
    return {
        "replay_prompts": len(buffer),
        "replay_trajectories": buffer.num_trajectories,
        "replay_distinct_correct": content["distinct_correct"],
    }
