"""Reports of the controller: facts of a batch, the totals of the run, its status."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from areal_lite.controller.batch_stats import batch_stats, of_source, source_stats
from areal_lite.controller.dispatcher import FAILURE_COUNTS, Dispatcher
from areal_lite.controller.diversity import diversity
from areal_lite.controller.queue import BatchAssignment, GroupQueue
from areal_lite.controller.replay import ReplayBuffer
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase
from areal_lite.servers.fleet import Fleet

# Counts of the dispatcher.
_COUNTS = (
    "dropped_groups",
    "empty_groups",
    "failed_rollouts",
    "workflow_failures",
    "reward_failures",
)

REQUEST_COUNTS = ("requests", "aborts", "retries")
"""Counts of the fleet."""


def unrecorded_counts(dispatcher: Dispatcher, fleet: Fleet) -> dict[str, int]:
    """Return the counts of the run that the rows of the store do not show."""
    return {
        **{name: fleet.counts[name] for name in REQUEST_COUNTS},
        **{name: dispatcher.counts[name] for name in FAILURE_COUNTS},
    }


def batch_info(
    assignment: BatchAssignment,
    version: int,
    max_staleness: int | None,
    dispatcher: Dispatcher,
    queue: GroupQueue | ReplayBuffer,
) -> dict[str, Any]:
    """Describe a batch for a trainer at `version` and, with cumulative counts, the run."""
    return {
        **batch_stats(assignment.groups, version, max_staleness),
        **source_stats(assignment.groups, [source.name for source in dispatcher.sampler.sources]),
        **diversity(group.episodes for group in assignment.groups),
        **(_replay_stats(queue) if isinstance(queue, ReplayBuffer) else {}),
        "masked_tokens": assignment.masked_tokens,
        "passed_groups": assignment.passed,
        "queue_depth": len(queue),
        "in_flight": dispatcher.in_flight,
        "concurrency_limit": dispatcher.concurrency.limit,
        **{name: dispatcher.counts[name] for name in _COUNTS},
        "filtered_groups": dispatcher.filtered.total(),
        **{f"filtered_{reason}": groups for reason, groups in dispatcher.filtered.items()},
        "retired_prompts": len(dispatcher.sampler.retired),
        "resting_prompts": dispatcher.sampler.num_resting,
        **{of_source("epochs", name): n for name, n in dispatcher.sampler.epochs.items()},
    }


def run_totals(
    dispatcher: Dispatcher, queue: GroupQueue | ReplayBuffer, fleet: Fleet
) -> dict[str, Any]:
    """Return the counts of the run at its end."""
    dropped_by_length = sorted(queue.dropped_by_length.items())
    return {
        **{name: fleet.counts[name] for name in REQUEST_COUNTS},
        "dropped_by_length": {str(length): groups for length, groups in dropped_by_length},
        **{name: dispatcher.counts[name] for name in _COUNTS},
        "filtered": dict(dispatcher.filtered),
        "retired_prompts": len(dispatcher.sampler.retired),
    }


def controller_status(
    dispatcher: Dispatcher,
    queue: GroupQueue | ReplayBuffer,
    fleet: Fleet,
    trainer: TrainerPhase,
    pending_steps: Sequence[int],
    evaluating: Iterable[int],
) -> ControllerStatus:
    """Describe what the controller has and what it waits for.

    Args:
        dispatcher: what is being generated.
        queue: what waits for the trainer.
        fleet: the servers.
        trainer: what the trainer does.
        pending_steps: the steps whose batch was asked for and is not complete.
        evaluating: the versions that are being evaluated.
    """
    admission = dispatcher.admission
    router = fleet.router
    oldest = min(dispatcher.running, default=None)
    held_back = bool(pending_steps) and queue.held_back(admission.batch_groups, oldest)
    return ControllerStatus(
        version=admission.version,
        step=admission.step,
        trainer=trainer,
        batch_step=pending_steps[0] if pending_steps else None,
        missing_groups=max(0, admission.batch_groups - len(queue)),
        held_by=oldest if held_back else None,
        queued_groups=len(queue),
        running_groups=admission.running,
        capacity=None if math.isinf(admission.capacity) else int(admission.capacity),
        in_flight=dispatcher.in_flight,
        concurrency_limit=dispatcher.concurrency.limit,
        requests=fleet.gate.in_flight,
        servers_ready=len(router.ready),
        servers_announced=len(router.servers),
        evaluating=sorted(evaluating),
    )


def status_line(status: ControllerStatus) -> str:
    """Write a status as a line of the log."""
    if not status.servers_ready:
        need = f"a server ({status.servers_announced} announced, none ready)"
    elif status.batch_step is not None and status.missing_groups:
        need = f"{status.missing_groups} more groups for the batch of step {status.batch_step}"
    elif status.held_by is not None:
        need = f"group {status.held_by}, which no more groups may pass"
    elif status.can_admit:
        need = "trajectories in flight"
    else:
        need = f"the trainer (step {status.step})"
    capacity = "any number" if status.capacity is None else status.capacity
    return (
        f"version {status.version}: {status.queued_groups} groups queued, "
        f"{status.running_groups} running, capacity for {capacity}; {status.requests} requests on "
        f"{status.servers_ready} servers; waiting for {need}"
    )


def _replay_stats(buffer: ReplayBuffer) -> dict[str, float]:
    """Describe the content of the buffer, of which a batch is only a sample."""
    content = diversity(buffer)
    return {
        "replay_prompts": len(buffer),
        "replay_trajectories": buffer.num_trajectories,
        "replay_distinct_correct": content["distinct_correct"],
    }
