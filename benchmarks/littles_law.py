"""An estimate of a run's speed without a simulation, to compare the simulator with."""

import numpy as np

from areal_lite.config import TrainConfig
from benchmarks.simulate.workload import Workload

_DRAWN_GROUPS = 2000


def littles_law(config: TrainConfig, work: Workload) -> float:
    """Estimate the trained tokens in a second without simulating.

    Generation has N sequences in flight, as many as admission, concurrency and the KV cache allow.
    A sequence of mean length n takes n decoding steps of a server with its share of N, and the
    host's time for each request of that share. So the rate of tokens is N / (time of a token). A
    group stays until its longest sample ends. Training takes its own time for a batch, and the
    slower of both sets the pace. With `max_staleness` 0 the times add up, and the longest sequence
    of the batch sets the time of generation.
    """
    rollout, trainer, server = config.rollout, config.trainer, work.server
    lengths = np.array(
        [work.lengths.group(config.seed, i, rollout.group_size) for i in range(_DRAWN_GROUPS)]
    )
    batch = trainer.batch_groups * rollout.group_size
    mean, held = float(lengths.mean()), float(lengths.max(axis=1).mean())
    flat = lengths.ravel()
    drawn_s = work.trainer.step_s([flat + work.prompt_tokens]) - work.trainer.fixed_s
    step_s = drawn_s * batch / trainer.data_parallel / len(flat) + work.trainer.fixed_s
    step_s += (work.trainer.prepare_s + work.trainer.pause_s) / config.sync.every
    context = work.prompt_tokens + float((flat**2.0).mean()) / mean / 2

    def token_s(in_flight: float) -> float:
        """Return the seconds of each token with `in_flight` sequences on all servers."""
        each = min(in_flight / config.server.count, server.max_running)
        each = max(1.0, min(each, server.kv_tokens / context))
        return (
            server.steps_s(1, 1, 0)
            + (each - 1) * server.per_sequence_s
            + each * (server.per_context_s * context + server.request_s / mean)
        )

    if config.max_lead == 0 and config.sync.every == 1:
        longest = float(np.resize(flat, batch).max())
        tokens = batch * mean
        # The batch shrinks as its sequences end: on average, mean / longest of it runs.
        generate_s = longest * token_s(batch * mean / longest)
        return tokens / (generate_s + step_s)
    admitted = (config.max_lead + 1) * batch * mean / held
    in_flight = min(rollout.max_concurrent, admitted)
    running = min(in_flight, config.server.count * server.kv_tokens / context)
    kept = 1 - (work.uniform_share if "zero_variance" in rollout.filters else 0)
    return min(kept * running / token_s(in_flight), batch * mean / step_s)
