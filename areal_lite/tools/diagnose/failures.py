"""Findings about failures and hangs, and about samples of a group that are the same.

Equal samples are a fault only if they are unlikely: equal tokens of probability p have it again by
chance with probability p. The tokens of at most `_GROUPS` groups are read, so memory stays bounded.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from areal_lite.run_dir.controller_status import TrainerPhase, read_status
from areal_lite.run_dir.paths import CONTROLLER_STATUS_FILE, QUARANTINE_FILE, STORE_FILE
from areal_lite.system.files import read_json
from areal_lite.tools.diagnose.history import History, Sign, alarm, finding, hint, limit
from areal_lite.tools.report.run_data import Columns
from areal_lite.tools.store_columns import ColumnReader

_GROUPS = 100
# A chance of 2e-9, in nats.
UNLIKELY = -20.0


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
    if not run.metrics:  # servers start, and an evaluation may come before the first step
        patience += run.config.server.start_timeout_s
    since = run.now - (run.metrics[-1]["logged_at"] if run.metrics else run.started_at)
    if since <= patience:
        return None
    normal = f" (usually {usual:.1f} s)" if usual else ""
    return alarm(f"no step for {since:.0f} s after step {run.step}{normal}; {_who(run)}")


def _who(run: History) -> str:
    """Say who waits for whom, from the status that the controller writes every second."""
    status = read_status(run.run_dir)
    if status is None:
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
    again = run.log_lines("restarts.log", "(restart ")
    if not again:
        return None
    text = f"restarts: {len(again)}; the last: {again[-1][:220]}"
    return alarm(text) if len(again) >= limit("restarts") else hint(text)


@finding(
    "Rewards fail",
    flag="above {failures:.0%} of the trajectories; alarm: {failures_alarm:.0%}",
    cause="the reward function raises an error or takes too long",
    change="mend `reward.function`; raise `reward.timeout_s` or `reward.workers` for time-outs; ",
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


def repeated_samples(columns: Columns, store: Path) -> str | None:
    """Find a group whose samples are the same although that is unlikely.

    Groups whose tokens are not kept are left out.
    """
    used = np.flatnonzero((columns.step >= 0) & columns.kept)
    groups, first, size = np.unique(columns.group[used], return_index=True, return_counts=True)
    shortest = np.minimum.reduceat(columns.sampled[used], first) if len(used) else first
    longest = np.maximum.reduceat(columns.sampled[used], first) if len(used) else first
    alike = np.flatnonzero((size > 1) & (shortest == longest))[-_GROUPS:]
    found: list[tuple[int, int, float]] = []
    with closing(ColumnReader(store)) as reader:
        for index in alike.tolist():
            samples = list(samples_of(reader, int(groups[index])))
            # A run may have removed the tokens meanwhile.
            chance = (len(samples) - 1) * samples[0][1] if samples else 0.0
            if len({tokens for tokens, _ in samples}) == 1 and chance < UNLIKELY:
                found.append((index, len(samples), chance))
    if not found:
        return None
    index, samples, chance = found[0]
    step = int(columns.step[used][first[index]]) + 1
    return (
        f"{len(found)} of the newest {len(alike)} groups of equal lengths have equal samples; "
        f"group {groups[index]} of step {step}: {samples} times the same tokens, "
        f"{probability(chance)}"
    )


def samples_of(reader: ColumnReader, group: int) -> Iterator[tuple[bytes, float]]:
    """Yield the tokens of each sample of a group and its log-probability, in nats."""
    for tokens, logprobs in reader.samples(group):
        yield tokens.tobytes(), float(np.nansum(logprobs.astype(np.float64)))


def probability(chance: float) -> str:
    """Write a log-probability, in nats, as a power of ten."""
    return f"which has a probability of 1e{chance / np.log(10):.0f} by chance"


@finding(
    "A seed does not reach the samples",
    flag="the samples of a group are equal although the policy makes that unlikely",
    cause="each request is sampled with the same seed",
    change="remove a fixed seed from the requests of `rollout.workflow` and from `server.args`",
)
def lost_seed(run: History) -> Sign | None:
    if not len(run.columns):
        return None
    fault = repeated_samples(run.columns, run.run_dir / STORE_FILE)
    return alarm(fault) if fault else None
