"""The simulator against published tables, fitted on one row of each.

    python -m benchmarks.simulator                 # about a minute on one core
    python -m benchmarks.simulator --fit "η = 0"   # another row of AReaL's table to fit on

Everything but one number comes from data sheets, from the publications, or from the assumptions in
`ASSUMED`. That number is a factor on all times of a system. All times of a simulation scale with
it, so each row is simulated once with the factor 1, and the fit divides. Ratios need no fit.

AReaL's rows are simulated at an eighth of their size: GPUs, batch and sequences in flight.

Writes <out>/simulator.json, <out>/simulator.png and <out>/simulator.md.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from areal_lite.cli import checked_config
from benchmarks.littles_law import littles_law
from benchmarks.simulate.command import simulated, workload
from benchmarks.simulate.run import Summary

ROOT = Path(__file__).resolve().parents[1]
AREAL_PAPER = "AReaL, arXiv 2505.24298"
OLMO_PAPER = "Olmo 3, arXiv 2512.13961, Table 23"
ASSUMED = {
    "AReaL": [
        "Mean length 9,600, for all models. 14.8 h of the 1.5B run at 371,700 tokens/s (η = 8) "
        "are 2,420 tokens for each of the 8,192 answers of 1,000 steps, or 9,670 if the 1,000 PPO "
        "updates are 250 steps of 4 minibatches. The latter is assumed.",
        "Log-normal lengths with a spread of 0.9 before the cut at 27,648; half of the variance is "
        "the prompt's.",
        "16 nodes for the staleness table, 128 sequences in flight for each server, no prefix "
        "cache, KV cache computed again after a push.",
        "The synchronous system generates and trains on all GPUs in turns.",
        "One GPU for each server.",
        "The proximal policy has a forward pass over all tokens, as algo.kl.into=reward makes "
        "this project compute it.",
    ],
    "OlmoRL": [
        "8 prompts x 8 answers a step. 6.34 million tokens in 2 hours are 434 answers of the "
        "published mean of 14,628, so the batch of 512 of the final runs would not make one step.",
        "Log-normal lengths with a spread of 0.9 before the cut at 32,768.",
        "32 sequences in flight for each server; the KV cache decides. max_staleness 8.",
        "`OLMo 2` takes turns (sync). `continuous batching` waits for all servers at a push "
        "(interrupt=none), `in-flight updates` does not (in_place).",
        "`better threading` (1,358) lets each server wait for its own requests only, and removes "
        "host work. A push of this project goes to all servers together: not predicted.",
    ],
}
_ALL_TOKENS = "algo.reference=m algo.kl={coef:1e-6,into:reward}"
_AREAL = (
    "+experiment=areal simulate.gpu=h800 simulate.length_mean=9600 simulate.length_spread=0.9 "
    "rollout.interrupt=retract server.args={disable_radix_cache:true} trainer.batch_groups=64 "
    f"trainer.minibatches=1 {_ALL_TOKENS} simulate.steps=6 simulate.warm_up=8 "
    "buffer.freshness=eager"
)
_SYNC = "buffer.max_staleness=0 rollout.interrupt=none simulate.warm_up=1"
_OLMO = (
    f"algo=olmorl {_ALL_TOKENS} simulate.shape=olmo3-7b simulate.gpu=a100 "
    "simulate.length_mean=14628 "
    "simulate.length_spread=0.9 rollout.max_new_tokens=32768 server.count=8 "
    "trainer.data_parallel=8 trainer.batch_groups=8 rollout.group_size=8 trainer.recompute=full "
    "rollout.max_concurrent=256 buffer.max_staleness=8 simulate.steps=24 simulate.warm_up=10 "
    "buffer.freshness=eager"
)


def _areal(shape: str, servers: int, ranks: int, rank_gpus: int = 1, extra: str = "") -> str:
    """Return the overrides of an eighth of a cluster."""
    return (
        f"{_AREAL} simulate.shape={shape} server.count={servers} trainer.data_parallel={ranks} "
        f"trainer.tensor_parallel={rank_gpus} rollout.max_concurrent={128 * servers} {extra}"
    )


@dataclass(frozen=True)
class Rate:
    """A published number of tokens a second, and the settings that predict it.

    `size` is how many times larger the published system is than the simulated one.
    """

    system: str
    name: str
    published: float
    overrides: str
    source: str
    size: int = 1


@dataclass(frozen=True)
class Ratio:
    """A published ratio of two speeds. `measure` is the field of Summary that it compares."""

    system: str
    name: str
    published: float
    faster: str
    slower: str
    source: str
    measure: str = "tokens_per_s"


def _staleness(bound: int) -> str:
    if bound == 0:
        return _areal("qwen2.5-1.5b", 12, 4, extra=_SYNC)
    return _areal("qwen2.5-1.5b", 12, 4, extra=f"buffer.max_staleness={bound}")


_TABLE = f"{AREAL_PAPER}, throughput against η, 1.5B"
_BLOG = f"{AREAL_PAPER}, ablation of interruptible generation, 4 nodes"
_HOURS = f"{AREAL_PAPER}, Table 1"
_NO_BOUND = 64
RATES = [
    *(
        Rate("AReaL", f"η = {name}", speed, _staleness(bound), _TABLE, 8)
        for name, bound, speed in (
            ("0", 0, 128_700), ("1", 1, 269_300), ("2", 2, 356_600), ("4", 4, 356_600),
            ("8", 8, 371_700), ("16", 16, 382_400), ("∞", _NO_BOUND, 396_800),
        )
    ),
    Rate("OlmoRL", "OLMo 2", 881, f"{_OLMO} {_SYNC}", OLMO_PAPER),
    Rate("OlmoRL", "+ continuous batching", 975, f"{_OLMO} rollout.interrupt=none", OLMO_PAPER),
    Rate("OlmoRL", "+ in-flight updates", 2949, _OLMO, OLMO_PAPER),
]  # fmt: skip
FITTED = {"AReaL": "η = ∞", "OlmoRL": "+ in-flight updates"}


def _interruptible(shape: str, mode: str) -> str:
    """Four nodes, of which an eighth is 3 GPUs that generate and 1 that trains."""
    extra = f"buffer.max_staleness={_NO_BOUND} rollout.interrupt={mode} simulate.warm_up=2"
    return _areal(shape, 3, 1, extra=extra)


RATIOS = [
    Ratio(
        "AReaL", "1.5B, hours of sync / AReaL", 41.0 / 14.8, _staleness(8),
        _areal("qwen2.5-1.5b", 16, 16, extra=_SYNC), _HOURS,
    ),
    Ratio(
        "AReaL", "7B, hours of sync / AReaL", 57.7 / 25.4,
        _areal("qwen2.5-7b", 18, 2, 3, "buffer.max_staleness=8"),
        _areal("qwen2.5-7b", 24, 8, 3, _SYNC), _HOURS,
    ),
    Ratio(
        "AReaL", "14B, hours of sync / AReaL", 48.8 / 21.9,
        _areal("qwen2.5-14b", 24, 8, 1, "buffer.max_staleness=4"),
        _areal("qwen2.5-14b", 32, 32, 1, _SYNC), _HOURS,
    ),
    Ratio(
        "AReaL", "1.5B, interruptible", 231 / 207, _interruptible("qwen2.5-1.5b", "retract"),
        _interruptible("qwen2.5-1.5b", "none"), _BLOG, "generated_per_s",
    ),
    Ratio(
        "AReaL", "7B, interruptible", 130 / 111, _interruptible("qwen2.5-7b", "retract"),
        _interruptible("qwen2.5-7b", "none"), _BLOG, "generated_per_s",
    ),
]  # fmt: skip
_SUMMARIES: dict[str, Summary] = {}


def summary(overrides: str) -> Summary:
    """Simulate settings, once."""
    if overrides not in _SUMMARIES:
        started = time.perf_counter()
        _SUMMARIES[overrides] = simulated(checked_config("simulate", overrides.split()))
        seconds = time.perf_counter() - started
        print(f"{seconds:5.0f} s  {_SUMMARIES[overrides].tokens_per_s:9,.0f} tokens/s", flush=True)
    return _SUMMARIES[overrides]


def estimate(overrides: str) -> float:
    """Estimate the trained tokens in a second by Little's law."""
    config = checked_config("simulate", overrides.split())
    return littles_law(config, workload(config))


def rate_records(fitted: dict[str, str]) -> list[dict]:
    """Predict the rates of each system, fitted on one of its rows."""
    factors = {}
    for rate in RATES:
        if fitted[rate.system] == rate.name:
            factors[rate.system] = summary(rate.overrides).tokens_per_s * rate.size / rate.published
    return [_rate_record(rate, factors[rate.system], fitted) for rate in RATES]


def _rate_record(rate: Rate, factor: float, fitted: dict[str, str]) -> dict:
    result = summary(rate.overrides)
    predicted = result.tokens_per_s * rate.size / factor
    little = estimate(rate.overrides) * rate.size / factor
    return {
        "system": rate.system,
        "row": rate.name,
        "published": rate.published,
        "predicted": round(predicted),
        "error": round(predicted / rate.published - 1, 4),
        "fitted": fitted[rate.system] == rate.name,
        "factor": round(factor, 4),
        "little": round(little),
        "little_error": round(little / rate.published - 1, 4),
        "source": rate.source,
        "overrides": rate.overrides,
        "summary": result.as_dict(),
    }


def ratio_records() -> list[dict]:
    """Predict the ratios, which need no fit."""
    records = []
    for ratio in RATIOS:
        faster, slower = summary(ratio.faster), summary(ratio.slower)
        predicted = getattr(faster, ratio.measure) / getattr(slower, ratio.measure)
        little = estimate(ratio.faster) / estimate(ratio.slower)
        records.append(
            {
                "system": ratio.system,
                "row": ratio.name,
                "published": round(ratio.published, 4),
                "predicted": round(predicted, 4),
                "error": round(predicted / ratio.published - 1, 4),
                "little": round(little, 4),
                "little_error": round(little / ratio.published - 1, 4),
                "source": ratio.source,
                "overrides": [ratio.faster, ratio.slower],
                "summaries": [faster.as_dict(), slower.as_dict()],
            }
        )
    return records


def table(rates: list[dict], ratios: list[dict]) -> str:
    """Write both tables in Markdown."""
    lines = [
        "| system | row | published | simulated | error | Little's law | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rates:
        error = "fitted" if r["fitted"] else f"{r['error']:+.1%}"
        lines.append(
            f"| {r['system']} | {r['row']} | {r['published']:,} | {r['predicted']:,} | {error} "
            f"| {r['little']:,} | {r['little_error']:+.1%} |"
        )
    for r in ratios:
        lines.append(
            f"| {r['system']} | {r['row']} | {r['published']:.2f} x | {r['predicted']:.2f} x "
            f"| {r['error']:+.1%} | {r['little']:.2f} x | {r['little_error']:+.1%} |"
        )
    return "\n".join(lines)


def plot(rates: list[dict], ratios: list[dict], path: Path) -> None:
    """Draw published and simulated numbers side by side."""
    areal = [r for r in rates if r["system"] == "AReaL"]
    olmo = [r for r in rates if r["system"] == "OlmoRL"]
    panels = {
        "AReaL: thousand tokens/s": (areal, 1e3),
        "OlmoRL: tokens/s": (olmo, 1),
        "AReaL: ratios": (ratios, 1),
    }
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for panel, (title, (records, unit)) in zip(axes, panels.items()):
        series = {"published": "#4a5568", "predicted": "#1f6fb4", "little": "#d1662b"}
        for number, (key, color) in enumerate(series.items()):
            places = [i + 0.27 * (number - 1) for i in range(len(records))]
            label = {"predicted": "simulated", "little": "Little's law"}.get(key, key)
            panel.bar(places, [r[key] / unit for r in records], 0.25, color=color, label=label)
        names = [r["row"] + (" (fitted)" if r.get("fitted") else "") for r in records]
        panel.set(title=title, xticks=range(len(records)))
        panel.set_xticklabels(names, rotation=25, ha="right", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--fit", default=FITTED["AReaL"], help="row of AReaL's to fit on")
    args = parser.parse_args()
    fitted = {**FITTED, "AReaL": args.fit}
    rates, ratios = rate_records(fitted), ratio_records()
    # The same simulations, fitted on each row in turn: the largest error of the others.
    others = {}
    for rate in RATES:
        refit = rate_records({**fitted, rate.system: rate.name})
        errors = [abs(r["error"]) for r in refit if r["system"] == rate.system]
        others[f"{rate.system}, {rate.name}"] = max(errors)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"assumed": ASSUMED, "rates": rates, "ratios": ratios, "largest_error_by_fit": others}
    (args.out / "simulator.json").write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    )
    plot(rates, ratios, args.out / "simulator.png")
    print(table(rates, ratios))
    print(json.dumps(others, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
