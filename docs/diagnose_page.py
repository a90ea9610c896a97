"""The page docs/diagnose.md: `python docs/diagnose_page.py > docs/diagnose.md`.

Its tables are the findings (tools/diagnose) and the metrics (tools/metric_table.py).
"""

import runpy
from pathlib import Path

from areal_lite.tools.diagnose.diagnosis import GUIDE
from areal_lite.tools.diagnose.history import LIMITS
from areal_lite.tools.metric_table import GROUP_OF, MEANINGS

# The other page that is made from the code has the same tables.
table_cell = runpy.run_path(str(Path(__file__).with_name("configuration_page.py")))["table_cell"]

# The metrics that a finding is about. It may look at a part of them only.
METRICS = {
    "failed_servers": "failed",
    "bad_numbers": "skipped nonfinite_tokens masked_nonfinite critic_skipped",
    "lost_seed": "distinct_share distinct_correct",
    "logprob_mismatch": "logprob_diff logprob_diff_sampled logprob_diff_scored",
    "reward_collapse": "reward_mean",
    "falling_accuracy": "reward_mean",
    "entropy_collapse": "entropy",
    "low_ess": "ess weight_max behavior_weight rejected behave_kl behave_kl_k1 behave_abs",
    "reward_failures": "reward_failures",
    "workflow_failures": "workflow_failures failed_rollouts empty_groups",
    "truncated": "truncated_share length_mean length_max masked_truncated",
    "no_signal": "reward_mean reward_std uniform_groups_share truncated_share",
    "few_signals": "uniform_groups_share reward_mean reward_std",
    "gradient_spikes": "grad_norm loss",
    "faint_adapters": "adapter_share",
    "lost_routes": "routes_changed",
    "changed_routes": "routes_changed",
    "distant_teacher": "reference_kl",
    "split_episodes": "traces_mean",
    "rare_source": "trajectories",
    "silent_source": "uniform_groups_share",
    "blind_critic": "value_explained value_error",
    "slow_servers": "wait_s in_flight concurrency_limit staleness_max staleness_mean",
    "slow_trainer": "wait_s train_s queue_depth in_flight",
    "long_pauses": "pause_s push_s total_s megabytes drained drain_s",
    "stragglers": "straggler_wait_s passed_groups length_max",
    "overdue_tokens": "masked_tokens masked_overdue",
    "busy_controller": "loop_lag_p99_s",
}

HEALTHY = {
    "reward_mean": "rising, neither 0 nor the maximum",
    "uniform_groups_share": "below 0.5",
    "distinct_share": "above 0.5 for long answers",
    "staleness_max": "at most `buffer.max_staleness`",
    "masked_tokens": "below 2 % of tokens",
    "passed_groups": "at most `buffer.window`",
    "server_lag": "0 to `sync.every` - 1, in turn",
    "grad_norm": "steady; at most a few steps above `trainer.clip_grad`",
    "skipped": "0",
    "clip_fraction": "0.001 to 0.1 with several updates; 0 with one",
    "ratio": "1 within a percent",
    "extreme_ratios": "0",
    "entropy": "falling slowly, not to 0",
    "masked_nonfinite": "0",
    "behave_kl": "below 0.01; 0 without staleness",
    "ess": "above 0.9",
    "nonfinite_tokens": "0",
    "behavior_weight": "1 within a percent",
    "rejected": "below 0.01",
    "weight_max": "below `algo.correction.cap`",
    "logprob_diff": "below 1e-5 in float32, 0.02 in bfloat16",
    "value_explained": "rising, above 0",
    "critic_skipped": "0",
    "adapter_share": "above 0.002 after some steps",
    "truncated_share": "below 0.05",
    "queue_depth": "0 to a batch",
    "in_flight": "near concurrency_limit",
    "empty_groups": "0",
    "failed_rollouts": "0",
    "workflow_failures": "0",
    "reward_failures": "0",
    "pause_s": "a few percent of time_s",
    "straggler_wait_s": "a few percent of time_s",
    "wait_s": "a small share of time_s when asynchronous",
    "loop_lag_p99_s": "below 0.02",
    "store_mib": "at most 1024 times `store.max_gib`",
    "failed": "empty",
}
"""The values of a good run. A metric without a row depends on the task."""

_PAGE = """\
# Diagnosing a run

```
areal-lite diagnose runs/NAME
```

`diagnose` reads the run directory of a run that ended, was killed, or is still going, and changes
nothing. It prints findings with numbers, cause and remedy. An *alarm* says that the
run is broken or learns nothing, a *hint* that it could be faster or better. Alarms come first, and
a finding that another one explains is left out. A run with an alarm says so when it ends.

This page is made by `python docs/diagnose_page.py`. Most findings look at the newest
{recent_steps:g} steps, and need {least_steps:g} of them. `areal_lite/tools/diagnose/history.py`
gives a reason for each threshold.

## Findings

| finding | found when | likely cause | what to change |
|---|---|---|---|
{findings}

## Metrics

These are the keys of a line of metrics.jsonl. A filter adds `filtered_REASON`, a replay buffer
adds `replay_…`, and Trajectory Balance adds `log_z`. With `data.sources`, `reward_mean`,
`uniform_groups_share`, `length_mean`, `trajectories`, `epochs` and the number of `groups` come for
each source, as in `reward_mean/NAME`. The last column names the findings that a bad value leads to.
In [trackers](operations.md#trackers) the name of a metric begins with its group, as in
`reward/reward_mean`. Metrics without a group are not sent there.

| metric | group | meaning | healthy | findings |
|---|---|---|---|---|
{metrics}
"""


def page() -> str:
    """Return the page."""
    findings = [
        f"| {_anchor(advice.name)} {advice.title} | {table_cell(advice.flag.format(**LIMITS))} "
        f"| {advice.cause} | {advice.change} |"
        for advice in GUIDE
    ]
    metrics = [
        f"| `{key}` | {GROUP_OF[key]} | {table_cell(meaning)} | {HEALTHY.get(key, '')} "
        f"| {_found_by(key)} |"
        for key, meaning in MEANINGS.items()
    ]
    return _PAGE.format(
        findings="\n".join(findings),
        metrics="\n".join(metrics),
        **LIMITS,
    )


def _found_by(key: str) -> str:
    found = [name for name, keys in METRICS.items() if key in keys.split()]
    return ", ".join(name.replace("_", " ") for name in found)


def _anchor(name: str) -> str:
    return f"**{name.replace('_', ' ')}**:"


if __name__ == "__main__":
    print(page(), end="")
