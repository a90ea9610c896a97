"""The page docs/diagnose.md: `python docs/diagnose_page.py > docs/diagnose.md`.

Its tables are the findings (diagnose/guide.py), the thresholds (diagnose/history.py) and
the metrics (run_dir/metric_table.py).
"""

from areal_lite.config.reference import table_cell
from areal_lite.run_dir.metric_table import GROUP_OF, HEALTHY, MEANINGS
from areal_lite.tools.diagnose.guide import GUIDE
from areal_lite.tools.diagnose.history import LIMITS

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

This page is made from the code: `python docs/diagnose_page.py`. Most findings look at
the newest {recent_steps:g} steps, and need {least_steps:g} of them.

## Findings

| finding | found when | likely cause | what to change |
|---|---|---|---|
{findings}

## Metrics

These are the keys of a line of metrics.jsonl. A filter adds `filtered_REASON`, a replay buffer
adds `replay_…`, and Trajectory Balance adds `log_z`. With `data.sources`, `reward_mean`,
`uniform_groups_share`, `length_mean`, `trajectories`, `epochs` and the number of `groups` come for
each source, as in `reward_mean/NAME`. The last column names the findings that a bad value leads to.
In [wandb](operations.md#wandb) the name of a metric begins with its group, as in
`reward/reward_mean`. Metrics without a group are not sent there.

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
        f"| `{key}` | {GROUP_OF[key]} | {table_cell(meaning)} | {HEALTHY.get(key, '')} "
        f"| {_found_by(key)} |"
        for key, meaning in MEANINGS.items()
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


def _found_by(key: str) -> str:
    found = [advice.name for advice in GUIDE if key in advice.metrics]
    return ", ".join(name.replace("_", " ") for name in found)


def _anchor(name: str) -> str:
    return f"**{name.replace('_', ' ')}**:"


if __name__ == "__main__":
    print(page(), end="")
