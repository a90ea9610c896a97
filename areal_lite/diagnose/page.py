"""The page docs/diagnose.md: `python -m areal_lite.diagnose.page > docs/diagnose.md`.

Its tables are the findings (guide.py), the thresholds (limits.py) and the meanings of the metrics,
which are here.
"""

from areal_lite.config.reference import table_cell
from areal_lite.diagnose.guide import GUIDE
from areal_lite.diagnose.limits import LIMITS
from areal_lite.run_dir.metrics import STEP_KEYS
from areal_lite.run_dir.wandb_log import wandb_name

# Metrics besides STEP_KEYS.
MEANINGS = {
    "logged_at": "wall-clock seconds at which the line was written",
    "reward_std": "standard deviation of the rewards of all trajectories",
    "uniform_groups_share": "share of groups whose rewards are all equal",
    "interrupted_share": "share of trajectories that several versions sampled",
    "length_mean": "mean sampled tokens of a trajectory",
    "length_max": "sampled tokens of the longest trajectory",
    "truncated_share": "share of trajectories that reached the limit of new tokens",
    "trajectories": "trajectories of the batch",
    "nonfinite_tokens": "sampled tokens whose log-prob is not finite",
    "distinct_share": "different completions of a prompt, as a share of all",
    "distinct_correct": "different completions of a prompt with a positive reward",
    "masked_tokens": "sampled tokens that are too stale to train on",
    "passed_groups": "used groups that are younger than the oldest group that still runs",
    "straggler_wait_s": "seconds that a whole batch waited for an older group (`buffer.window`)",
    "queue_depth": "groups that are left in the queue after the batch was taken",
    "in_flight": "trajectories that are being generated",
    "concurrency_limit": "trajectories that may be generated at a time",
    "dropped_groups": "groups dropped because they were too stale, since the controller started",
    "empty_groups": "groups in which every rollout failed, since the controller started",
    "failed_rollouts": "rollouts without a trajectory, since the controller started",
    "workflow_failures": "rollouts whose workflow failed, since the controller started",
    "reward_failures": "trajectories without a reward, since the controller started",
    "filtered_groups": "groups that a filter left out, in all",
    "retired_prompts": "prompts that are solved and no longer asked",
    "wait_s": "seconds that the trainer waited for the batch",
    "loop_lag_p99_s": "lateness of the controller's event loop, in seconds, 99th percentile",
    "lr": "learning rate",
    "skipped": "updates that were skipped, because a loss or gradient was not finite",
    "trained_tokens": "tokens in the loss",
    "clip_fraction": "share of tokens whose gradient the clip removed",
    "clip_fraction_high": "the same, of tokens with a positive advantage",
    "clip_fraction_low": "the same, of tokens with a negative advantage",
    "ratio": "mean ratio of the policy in training to the proximal policy",
    "ratio_max": "largest ratio of a token",
    "ratio_chi2": "mean squared distance of the ratio from 1",
    "behavior_weight": "mean weight of a token after the correction",
    "rejected": "share of tokens that the correction and the rejection left out",
    "behave_kl_k1": "the same as behave_kl, by the estimator -d, which can be negative",
    "behave_abs": "mean absolute difference of proximal and behavior log-probs, in nats",
    "entropy": "mean entropy of the policy per token, in nats",
    "weight_max": "largest behavior weight before the correction",
    "masked_truncated": "tokens left out because their trajectory was truncated",
    "masked_overdue": "tokens left out because they are too stale",
    "masked_nonfinite": "tokens left out because their log-prob is not finite",
    "tokens_by_staleness": "tokens in the loss by staleness, from 0",
    "behave_abs_by_staleness": "behave_abs by staleness, from 0",
    "mismatch_square": "mean squared log-ratio of tokens of the current version, in nats^2: "
    "the disagreement of servers and trainer",
    "grad_cosine": "cosine of the gradients of consecutive updates, with trainer.gradient_cosine: "
    "near 0 for fresh batches, near 1 if stale ones move the weights the same way",
    "average_kl": "estimated KL(policy in training || averaged policy) per trained token, in nats, "
    "with `algo.prox=average` or `algo.kl.to=average`",
    "reference_kl": "estimated KL(policy in training || reference policy) per trained token, in "
    "nats, with `algo.kl.to=reference` or Trajectory Balance",
    "value": "mean value that the critic gives to a trained token",
    "value_error": "mean squared difference of the critic's values and the returns",
    "value_explained": "share of the variance of the returns that the critic explains: 1 is "
    "perfect, 0 knows their mean; missing where all returns are equal",
    "value_clip_fraction": "share of tokens whose value moved beyond the clip",
    "critic_loss": "mean loss of the critic's updates",
    "critic_grad_norm": "mean gradient norm of the critic before clipping",
    "critic_lr": "learning rate of the critic",
    "critic_skipped": "updates of the critic that were skipped, as in `skipped`",
    "stale_square": "how much larger it is for older tokens: the part of staleness",
    "server_lag": "steps from the weights of the servers to those of the trainer, at its start",
    "train_s": "seconds of training",
    "push_s": "seconds of the push and the comparison of log-probs before it",
    "paused_at": "wall-clock seconds at which the pause began",
    "total_s": "seconds of the push, preparation included",
    "megabytes": "size of the pushed weights, in MiB",
    "drained": "requests that the push waited for",
    "verified": "tensors that were read back and compared",
    "failed": "servers that were left out of the push",
    "logprob_diff_sampled": "log-prob difference on tokens of the current version, in nats",
    "logprob_diff_scored": "log-prob difference on sequences that a server scored, in nats",
    "logprob_diff": "the larger of the two: disagreement of servers and trainer",
}
# Without a row the value depends on the task.
HEALTHY = {
    "staleness_max": "at most `buffer.max_staleness`",
    "server_lag": "0 to `sync.every` - 1, in turn",
    "behave_kl": "below 0.01; 0 without staleness",
    "ess": "above 0.9",
    "grad_norm": "steady; at most a few steps above `trainer.clip_grad`",
    "pause_s": "a few percent of time_s",
    "reward_mean": "rising, neither 0 nor the maximum",
    "uniform_groups_share": "below 0.5",
    "truncated_share": "below 0.05",
    "nonfinite_tokens": "0",
    "distinct_share": "above 0.5 for long answers",
    "masked_tokens": "below 2 % of tokens",
    "passed_groups": "at most `buffer.window`",
    "straggler_wait_s": "a few percent of time_s",
    "queue_depth": "0 to a batch",
    "in_flight": "near concurrency_limit",
    "dropped_groups": "0",
    "empty_groups": "0",
    "failed_rollouts": "0",
    "workflow_failures": "0",
    "reward_failures": "0",
    "wait_s": "a small share of time_s when asynchronous",
    "loop_lag_p99_s": "below 0.02",
    "skipped": "0",
    "clip_fraction": "0.001 to 0.1 with several updates; 0 with one",
    "ratio": "1 within a percent",
    "behavior_weight": "1 within a percent",
    "rejected": "below 0.01",
    "entropy": "falling slowly, not to 0",
    "weight_max": "below `algo.correction.cap`",
    "masked_nonfinite": "0",
    "failed": "empty",
    "value_explained": "rising, above 0",
    "critic_skipped": "0",
    "logprob_diff": "below 1e-5 in float32, 0.02 in bfloat16",
}

_PAGE = """\
# Diagnosing a run

```
areal-lite diagnose runs/NAME
areal-lite diagnose --demo
```

`diagnose` reads the run directory of a run that ended, was killed, or is still going, and changes
nothing. It prints findings, each with its numbers, its likely cause, and the settings to change.
An *alarm* says that the run is broken or learns nothing. A *hint* says that it could be faster or
better. Alarms come first, and a finding that another one explains is left out. A run whose records
show an alarm says so when it ends.

This page is made from the code: `python -m areal_lite.diagnose.page`. Most findings look at the
newest {recent_steps:g} steps, and need {least_steps:g} of them.

## Findings

| finding | found when | likely cause | what to change |
|---|---|---|---|
{findings}

## Metrics

These are the keys of a line of metrics.jsonl. A filter adds `filtered_REASON`, a replay buffer
adds `replay_…`, and Trajectory Balance adds `log_z`. The last column names the findings that a bad
value leads to. In [wandb](operations.md#wandb) the name of a metric
begins with its group, as in `reward/reward_mean`.

| metric | group | meaning | healthy | findings |
|---|---|---|---|---|
{metrics}

## Thresholds

| threshold | value | reason |
|---|---|---|
{limits}
"""


def page() -> str:
    """Return the page."""
    values = {name: limit.value for name, limit in LIMITS.items()}
    findings = [
        f"| {_anchor(advice.name)} {advice.title} | {table_cell(advice.flag.format(**values))} "
        f"| {advice.cause} | {advice.change} |"
        for advice in GUIDE
    ]
    metrics = [
        f"| `{key}` | {_group(key)} | {table_cell(meaning)} | {HEALTHY.get(key, '')} "
        f"| {_found_by(key)} |"
        for key, meaning in {**STEP_KEYS, **MEANINGS}.items()
    ]
    limits = [
        f"| {name.replace('_', ' ')} | {limit.value:g} | {table_cell(limit.reason)} |"
        for name, limit in LIMITS.items()
    ]
    return _PAGE.format(
        findings="\n".join(findings),
        metrics="\n".join(metrics),
        limits="\n".join(limits),
        **values,
    )


def _group(key: str) -> str:
    return (wandb_name(key) or "").rpartition("/")[0]


def _found_by(key: str) -> str:
    found = [advice.name for advice in GUIDE if key in advice.metrics]
    return ", ".join(name.replace("_", " ") for name in found)


def _anchor(name: str) -> str:
    return f"**{name.replace('_', ' ')}**:"


if __name__ == "__main__":
    print(page(), end="")
