"""Acceptance on GPUs: one command, in parts that take at most ten minutes each.

    python benchmarks/gpu.py --name h200              # all parts, or those that are missing
    python benchmarks/gpu.py --name h200 head engine  # these parts, again
    python benchmarks/gpu.py --dry-run                # what there is; needs no GPU
    python benchmarks/gpu.py --tiny attention head    # tiny models, also without a GPU

Each part is a process of its own (gpu_parts.py and gpu_runs.py). Its numbers and checks go to
results/gpu-NAME.json as soon as it ends, so an interrupted command continues where it was. Parts
for more GPUs than there are visible are left out. The exit status is 0 if every check holds.

None of this has run on a GPU. Tiny models have tested the code of the parts that a CPU can run.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.system.files import write_json
from areal_lite.system.gpus import visible_gpus

RESULTS = Path(__file__).with_name("results")
LIMIT_S = 600


class Part(NamedTuple):
    """A part: its module, the GPUs that it needs, and what it checks."""

    module: str
    gpus: int
    checks: str


PARTS = {
    "machine": Part("gpu_parts", 1, "driver, CUDA compiler, imports"),
    "attention": Part("gpu_parts", 1, "varlen attention against float32; FlashAttention 2 and 4"),
    "head": Part("gpu_parts", 1, "output layer: error, speed, memory"),
    "engine": Part("gpu_parts", 1, "updates, memory against the plan, offload, checkpoint"),
    "agree": Part("gpu_runs", 1, "log-probs of server and trainer; tokens a second"),
    "tags": Part("gpu_runs", 1, "versions of tokens around a push"),
    "order": Part("gpu_runs", 1, "the same KV cache beside an empty and a full GPU"),
    "quickstart": Part("gpu_runs", 1, "a whole run on one GPU"),
    "killed": Part("gpu_runs", 1, "the server, then the trainer, killed during a run"),
    "broadcast": Part("gpu_runs", 2, "weights by NCCL within a node"),
}


def run_part(name: str, tiny: bool) -> dict[str, Any]:
    """Run a part in a process of its own and return its numbers, checks and time."""
    started = time.time()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # of everything that it writes
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(out)]
        command += ["--tiny"] if tiny else []
        try:
            environment = os.environ | {"TMPDIR": folder}
            status = subprocess.run(command, env=environment, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = f"more than {LIMIT_S} s"
        result = json.loads(out.read_text()) if out.exists() else {"numbers": {}, "checks": {}}
    result["checks"]["it ends well"] = status == 0
    return result | {"status": status, "seconds": round(time.time() - started, 1)}


def table(results: dict[str, dict]) -> str:
    """Format the results, one line a part, with its numbers below."""
    lines = []
    for name, part in PARTS.items():
        if name not in results:
            lines.append(f"-     {name:<12}{part.checks} ({part.gpus} GPU)")
            continue
        result = results[name]
        failed = [check for check, holds in result["checks"].items() if not holds]
        verdict = "FAIL" if failed else "ok"
        lines.append(f"{verdict:<6}{name:<12}{result['seconds']:.0f} s  {'; '.join(failed)}")
        lines += [f"{'':<18}{key}: {value}" for key, value in result["numbers"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--name", default="this-machine", help="name of the results file")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--dry-run", action="store_true", help="only show the parts and results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        module = importlib.import_module(PARTS[arguments.part].module)
        numbers, checks = getattr(module, arguments.part)(arguments.tiny)
        write_json(Path(arguments.out), {"numbers": numbers, "checks": checks})
        return 0 if all(checks.values()) else 1
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    path = RESULTS / f"gpu-{arguments.name}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if not arguments.dry_run:
        gpus = len(visible_gpus())
        wanted = arguments.parts or [name for name in PARTS if name not in results]
        for name in wanted:
            if PARTS[name].gpus > gpus and not arguments.tiny:
                print(f"{name} needs {PARTS[name].gpus} GPUs, {gpus} are visible: left out")
                continue
            print(f"{name}: {PARTS[name].checks}", flush=True)
            results[name] = run_part(name, arguments.tiny)
            write_json(path, results)
    print(table(results))
    return 0 if all(all(result["checks"].values()) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
