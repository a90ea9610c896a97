"""Weights & Biases: the metrics of a run in groups, as long as wandb works.

The axis of a training step's metrics is `step`. An evaluation may end after later steps, so its
axis is `eval/version`, and wandb's own step, which must rise, is not used.

wandb never ends a run: after an error there is one warning, and nothing more is sent. metrics.jsonl
and evals.jsonl have everything.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_lite.config import LoggerConfig
from areal_lite.system.files import to_plain
from areal_lite.system.threads import start_daemon

log = logging.getLogger(__name__)

GROUPS = {
    "reward": "reward_mean reward_std uniform_groups_share distinct_share distinct_correct",
    "staleness": "staleness_mean staleness_max interrupted_share segments_mean masked_tokens "
    "masked_overdue dropped_groups stale_square server_lag passed_groups",
    "loss": "loss grad_norm grad_cosine average_kl reference_kl lr skipped trained_tokens "
    "clip_fraction clip_fraction_high clip_fraction_low ratio ratio_max ratio_chi2 entropy "
    "masked_truncated masked_nonfinite",
    "behavior": "behave_kl behave_kl_k1 behave_abs ess behavior_weight weight_max rejected "
    "mismatch_square logprob_diff logprob_diff_sampled logprob_diff_scored nonfinite_tokens",
    "critic": "value value_error value_explained value_clip_fraction critic_loss critic_grad_norm "
    "critic_lr critic_skipped",
    "rollout": "tokens trajectories length_mean length_max truncated_share queue_depth in_flight "
    "concurrency_limit filtered_groups retired_prompts empty_groups failed_rollouts "
    "workflow_failures reward_failures",
    "push": "pause_s total_s megabytes drained verified",
    "time": "time_s wait_s straggler_wait_s train_s push_s loop_lag_p99_s",
}
"""The metrics of a training step by group, in which wandb shows them: `group/metric`."""

OTHER = "other"
# The axis, what it tells as well, wall-clock times, and lists.
NOT_SENT = ("step", "version", "logged_at", "paused_at", "failed")
NOT_SENT += ("tokens_by_staleness", "behave_abs_by_staleness")
_GROUP_OF = {key: group for group, keys in GROUPS.items() for key in keys.split()}
_INIT_TIMEOUT_S = 60.0
_FINISH_TIMEOUT_S = 120.0


def wandb_name(key: str) -> str | None:
    """Return the name of a metric in wandb; None for one that is not sent there."""
    return None if key in NOT_SENT else f"{_GROUP_OF.get(key, OTHER)}/{key}"


class WandbLog:
    """The run in wandb. Every call returns, whatever wandb does."""

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, Any]):
        self._run: Any = None
        self._try("start", lambda: self._start(run_dir, config, run_config))

    def _start(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, Any]) -> None:
        import wandb  # it is slow to import, and only needed here

        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            dir=str(run_dir),
            config=to_plain(run_config),
            # None is wandb's default: online, unless the environment has another WANDB_MODE.
            mode="offline" if config.wandb == "offline" else None,
            settings=wandb.Settings(init_timeout=_INIT_TIMEOUT_S),
        )
        for group in (*GROUPS, OTHER):
            self._run.define_metric(f"{group}/*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="eval/version")

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a training step."""
        named = {wandb_name(key): value for key, value in record.items() if _is_number(value)}
        named.pop(None, None)
        self._try("log", lambda: self._run.log({**named, "step": record["step"]}))

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Send the accuracies of an evaluation, on the axis of the version that it evaluated."""
        values = {f"pass_at_{k}": value for k, value in record.get("pass_at_k", {}).items()}
        values |= {key: record.get(key) for key in ("greedy", "sampled")}
        named = {
            f"eval/{record['name']}/{key}": value
            for key, value in values.items()
            if _is_number(value)
        }
        self._try("log", lambda: self._run.log({**named, "eval/version": record["version"]}))

    def finish(self) -> None:
        """End the run in wandb. What is not sent within two minutes stays in its folder."""
        self._try("end", lambda: start_daemon(self._run.finish).result(_FINISH_TIMEOUT_S))

    def _try(self, action: str, call: Callable[[], object]) -> None:
        if action != "start" and self._run is None:
            return
        try:
            call()
        except Exception as error:  # whatever wandb raises
            self._run = None
            kind = type(error).__name__
            log.warning(
                "wandb could not %s the run, which goes on without it: %s: %s", action, kind, error
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
