"""Speed and staleness of eager admission under each bound, and of admission that is kept fresh.

    python -m benchmarks.freshness                     # ten minutes on one core
    python -m benchmarks.freshness long_tail --seeds 3
    python -m benchmarks.freshness --run runs/RUN      # lengths and speeds of a run

Every row is a simulation (benchmarks/simulate), in which the real controller admits. A scenario
is simulated with the bounds `BOUNDS`, eagerly, and with the largest of them, fresh. The best bound
is the one with the least mean staleness among those that reach 0.98 of the trajectories a second of
the largest.

Writes <out>/freshness.json and <out>/freshness.md.
"""

import argparse
import json
import logging
from pathlib import Path
from statistics import mean

from areal_lite.cli import checked_config
from areal_lite.system.files import write_json
from benchmarks.simulate.command import simulated
from benchmarks.simulate.workload import Loss

RESULTS = Path(__file__).with_name("results")
BOUNDS = (1, 2, 3, 4, 8)
ENOUGH = 0.98
_64 = (
    "simulate.shape=qwen2.5-1.5b rollout.max_concurrent={in_flight} trainer.batch_groups=128 "
    "rollout.group_size=8 trainer.minibatches=4 server.count={servers} "
    "trainer.data_parallel={ranks} simulate.steps=24 simulate.warm_up=30 "
    "rollout.max_new_tokens=8192"
)
_SHORT = "simulate.length_mean=400 simulate.length_spread=0.5"
_LONG = "simulate.length_mean=2000 simulate.length_spread=1.1"


def _gpus(servers: int, ranks: int, in_flight: int) -> str:
    return _64.format(servers=servers, ranks=ranks, in_flight=in_flight)


SCENARIOS = {
    # 64 GPUs
    "trainer_slow": f"{_gpus(56, 8, 4096)} {_SHORT}",
    "servers_slow": f"{_gpus(16, 32, 1024)} {_LONG}",
    "long_tail": f"{_gpus(48, 16, 4096)} {_LONG} simulate.length_spread=1.5",
    "filtered": f"{_gpus(48, 16, 4096)} {_LONG} simulate.uniform_share=0.5 "
    "rollout.filters=[zero_variance]",
    "pushes_every_2": f"{_gpus(48, 16, 4096)} {_LONG} sync.every=2",
    # servers are gone for five minutes
    "node_lost": f"{_gpus(48, 16, 4096)} {_LONG}",
    "half_lost": f"{_gpus(48, 16, 4096)} {_LONG}",
}
LOST = {"node_lost": 8, "half_lost": 24}


def run(scenario: str, extra: str, freshness: str, bound: int, seed: int) -> dict[str, float]:
    """Simulate one row."""
    overrides = f"{extra} buffer.freshness={freshness} buffer.max_staleness={bound} seed={seed}"
    config = checked_config("simulate", overrides.split())
    servers = LOST.get(scenario)
    loss = Loss(servers, after_s=0.0, return_s=300.0) if servers else None
    summary = simulated(config, loss)
    return {
        "trajectories_per_s": config.trainer.batch_groups
        * config.rollout.group_size
        / summary.step_s,
        "tokens_per_s": summary.tokens_per_s,
        "staleness": summary.staleness_mean,
        "wait_share": summary.wait_share,
        "masked_share": summary.masked_share,
    }


def measure(scenario: str, extra: str, seeds: int) -> dict[str, dict[str, float]]:
    """Simulate all rows of a scenario; means over the seeds."""
    rows = {}
    top = max(BOUNDS)
    variants = [(str(bound), "eager", bound) for bound in BOUNDS] + [("fresh", "auto", top)]
    for name, freshness, bound in variants:
        try:
            runs = [run(scenario, extra, freshness, bound, seed + 1) for seed in range(seeds)]
        except ValueError as error:
            print(f"{scenario} {name}: {error}")
            continue
        rows[name] = {key: mean(one[key] for one in runs) for key in runs[0]}
        row = rows[name]
        print(
            f"{scenario:<16}{name:<7}{row['trajectories_per_s']:>9,.1f} trajectories/s, "
            f"{row['tokens_per_s']:>9,.0f} tokens/s  staleness "
            f"{row['staleness']:.2f}  waits {row['wait_share']:.1%}  "
            f"too stale {row['masked_share']:.1%}",
            flush=True,
        )
    return rows


def verdict(rows: dict[str, dict[str, float]]) -> dict[str, float | str]:
    """Compare the fresh row with the best bound, and with the largest."""
    eager = {name: row for name, row in rows.items() if name != "fresh"}
    fast = eager[str(max(BOUNDS))]["trajectories_per_s"]
    best = min(
        (name for name, row in eager.items() if row["trajectories_per_s"] >= ENOUGH * fast),
        key=lambda name: eager[name]["staleness"],
    )
    fresh = rows["fresh"]
    return {
        "best bound": best,
        "speed": fresh["trajectories_per_s"] / fast,
        "staleness": fresh["staleness"] / eager[best]["staleness"],
    }


def table(results: dict[str, dict]) -> str:
    """Format all scenarios as a page."""
    top = str(max(BOUNDS))
    lines = [
        "# Fresh admission",
        "",
        "Simulated; a bound is `buffer.max_staleness`. The best bound has the least staleness of "
        f"those with {ENOUGH} of the trajectories a second of bound {top}.",
        "",
        f"| scenario | staleness, eager, bound {top} | best bound | its staleness | fresh: "
        f"staleness | of the best bound's | fresh: trajectories a second, of bound {top}'s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        found = verdict(rows)
        lines.append(
            f"| {name} | {rows[top]['staleness']:.2f} | {found['best bound']} | "
            f"{rows[str(found['best bound'])]['staleness']:.2f} | {rows['fresh']['staleness']:.2f} "
            f"| {found['staleness']:.2f} | {found['speed']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--run", type=Path, action="append", default=[], help="a run's directory")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.getLogger("areal_lite").setLevel(logging.CRITICAL)  # servers are lost on purpose
    chosen = {name: SCENARIOS[name] for name in arguments.scenarios}
    for path in arguments.run:
        chosen[path.name] = f"simulate.measured_run={path} simulate.steps=40"
    path = arguments.out / "freshness.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name, extra in (chosen or SCENARIOS).items():
        results[name] = measure(name, extra, arguments.seeds)
        print(verdict(results[name]))
    write_json(path, results)
    (arguments.out / "freshness.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
