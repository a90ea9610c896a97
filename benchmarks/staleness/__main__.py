"""Compare objectives on stale data, in paired runs on addition.

    python -m benchmarks.staleness grid      # each clip at three learning rates
    python -m benchmarks.staleness speed     # how fast a clip lets a carry be learned
    python -m benchmarks.staleness limit     # the same with an optimizer that does not rescale
    python -m benchmarks.staleness weight    # what the weight does where no clip acts
    python -m benchmarks.staleness cures     # every clip and addition at lags of 16 to 64
    python -m benchmarks.staleness speed --show        # draws what there is, runs nothing
    python -m benchmarks.staleness.gradients # how well the gradient of a stale batch points

Every run is `areal-lite train` of this checkout, with a real SGLang server and a real Megatron
trainer. A run takes about three minutes on one core. Runs of a seed start from the same warmed-up
model and see the same prompts. Each finished run adds a line to <out>/runs.jsonl, and no study runs
it again. So a command that was stopped continues. At the end, <out>/<study>.png and .md show what
there is, and <out>/drift.png shows the runs of all studies.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.launch import ROOT
from benchmarks.staleness import pictures, records, tables
from benchmarks.staleness.checks import check_study
from benchmarks.staleness.studies import STUDIES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--parallel", type=int, default=2, help="runs side by side, a core each")
    parser.add_argument("--show", action="store_true", help="picture and tables only")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "staleness")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "staleness")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "runs.jsonl"
    if not args.show:
        train(args, path)
    found = records.read(path)
    check_study(found)
    names = {cell.name for seed in args.seeds for cell in STUDIES[args.study](seed)}
    own = [record for record in found if record["name"] in names]
    pictures.draw_drift(found, args.out / "drift.png")
    pictures.draw(args.study, own, args.out / f"{args.study}.png")
    (args.out / f"{args.study}.md").write_text(tables.page(args.study, own))


def train(args: argparse.Namespace, path: Path) -> None:
    """Run the cells that have no record yet, and add their records to `path`."""
    done = {record["name"] for record in records.read(path)}
    cells = [
        cell
        for seed in args.seeds
        for cell in STUDIES[args.study](seed)
        if args.only in cell.name and cell.name not in done
    ]
    for seed in sorted({cell.seed for cell in cells}):
        records.warm(args.work, seed)
    with ThreadPoolExecutor(args.parallel) as pool:
        for number, record in enumerate(
            pool.map(lambda cell: records.run(args.work, cell), cells), start=1
        ):
            with open(path, "a") as file:
                print(json.dumps(record), file=file)
            short = {key: value for key, value in record.items() if not isinstance(value, list)}
            print(f"{number}/{len(cells)} {short}", flush=True)


if __name__ == "__main__":
    main()
