"""Acceptance on GPUs: one command, in parts that take at most ten minutes each.

    python benchmarks/gpu.py --name h200               # the parts that have no result yet
    python benchmarks/gpu.py --name h200 --minutes 9   # as many of them as fit; call it again
    python benchmarks/gpu.py --name h200 head engine   # these parts, again
    python benchmarks/gpu.py --name h200 --dry-run     # what there is; needs no GPU
    python benchmarks/gpu.py --tiny head layouts       # tiny models, also without a GPU

Each part is a process of its own. Its numbers and checks go to FOLDER/gpu-NAME.json as soon as it
ends, so an interrupted command continues where it was. What it prints, and the logs of the servers
and runs of a part that fails, go to FOLDER/gpu-NAME.log. Parts for more GPUs than there are visible
are left out. Without a GPU the command only shows what there is. The exit status is 0 if every
check that was made holds.

A machine that can install nothing needs a folder of wheels, made where there is a package index:

    pip wheel --no-deps -w bundle .                    # this project, with its plugins
    pip download --no-deps -d bundle PACKAGE==VERSION  # of each package that the machine lacks

and then, on the machine, in the checkout:

    pip install --no-index --no-deps --target /tmp/site bundle/*.whl
    export PYTHONPATH=$PWD:/tmp/site HF_HUB_OFFLINE=1
    python benchmarks/gpu.py --name h200 machine       # says what is still missing

`--server-args` gives every server more options of SGLang, for example those that avoid a package
that is not there: `--server-args attention_backend=triton sampling_backend=pytorch`.

One H200 has run most parts for one GPU (results/gpu-h200.md). Tiny models have tested the code of
the others that a CPU can run; parts for more GPUs have run nowhere.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from areal_lite.system.files import write_json
from areal_lite.system.gpus import visible_gpus
from areal_lite.system.processes import tail

LIMIT_S = 590.0
_LOG_LINES = 150
_SCRATCH_BYTES = 20 * 2**30


class Part(NamedTuple):
    """A part: its module, the GPUs that it needs, what it checks, whether a CPU can run it tiny."""

    module: str
    gpus: int
    checks: str
    on_cpu: bool = True


PARTS = {
    "machine": Part("gpu_parts", 1, "driver, CUDA compiler, packages, plugins", on_cpu=False),
    "attention": Part("gpu_parts", 1, "varlen attention against float32; FlashAttention 2 and 4"),
    "head": Part("gpu_parts", 1, "output layer: error, speed, memory"),
    "engine": Part("gpu_parts", 1, "updates, memory against the plan, offload, checkpoint"),
    "fused": Part("gpu_parts", 1, "an update with operators fused, and without"),
    "prefixes": Part("gpu_prefixes", 1, "prefixes computed once; attention over spans, windows"),
    "experts": Part("gpu_experts", 1, "experts at once and one after the other"),
    "families": Part("gpu_families", 1, "each family of models, against transformers"),
    "agree": Part("gpu_runs", 1, "log-probs of server and trainer; tokens a second"),
    "tags": Part("gpu_runs", 1, "versions of tokens around a push"),
    "product": Part("gpu_proof", 1, "a matrix product and a memory copy"),
    "sampling": Part("gpu_proof", 1, "tokens a second beside SGLang's own benchmark"),
    "learns": Part("gpu_proof", 1, "a real chat model, a reward curve, pauses"),
    "drafts": Part("gpu_runs", 1, "decoding with drafts and without, and their log-probs"),
    "order": Part("gpu_runs", 1, "the same KV cache beside an empty and a full GPU", on_cpu=False),
    "quickstart": Part("gpu_runs", 1, "a whole run on one GPU"),
    "killed": Part("gpu_runs", 1, "the server, then the trainer, killed during a run"),
    "tests": Part("gpu_parts", 1, "tests of GPU code on the GPU, unit tests beside it"),
    "layouts": Part("gpu_layouts", 2, "tensor, pipeline, context, data, expert parallel by NCCL"),
    "broadcast": Part("gpu_runs", 2, "weights by NCCL within a node", on_cpu=False),
    "servers": Part("gpu_runs", 3, "weights by NCCL to two servers, each killed once"),
    "layouts4": Part("gpu_layouts", 4, "combinations of parallel sizes by NCCL"),
}


def run_part(
    name: str, log: Path, *, tiny: bool, server_args: list[str], limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Run a part in a process of its own and return its numbers, checks, status and time.

    What it prints is appended to `log`, and so are the logs that it leaves if it fails.
    """
    started = time.time()
    with tempfile.TemporaryDirectory(
        dir=scratch_folder()
    ) as folder:  # of everything that it writes
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(out)]
        command += ["--tiny"] if tiny else []
        command += ["--server-args", *server_args]
        environment = os.environ | {"TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        with open(log, "ab") as output:
            output.write(f"\n===== {name} =====\n".encode())
            output.flush()
            status = _run(command, environment, output, limit_s)
            if status != 0:
                for path in sorted(Path(folder).rglob("*.log")):
                    text = f"--- {path.relative_to(folder)}\n{tail(path, _LOG_LINES)}\n"
                    output.write(text.encode())
        result = json.loads(out.read_text()) if out.exists() else {"numbers": {}, "checks": {}}
    result["checks"]["it ends well"] = status == 0
    return result | {"status": status, "seconds": round(time.time() - started, 1)}


def _run(
    command: list[str], environment: dict[str, str], output: IO[bytes], limit_s: float
) -> int | str:
    """Run a command, and end all that it started. Return its status, or that it took too long."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"more than {limit_s:.0f} s"
    finally:
        # A run that it started is in the same group, and servers and trainers die with their run.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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


def server_arg(item: str) -> tuple[str, str | bool]:
    """Split KEY=VALUE. SGLang's switches are true or false."""
    key, _, value = item.partition("=")
    return key, {"true": True, "false": False}.get(value.lower(), value)


def scratch_folder() -> str | None:
    """Return the folder for models and checkpoints: a tmpfs with room, or None for the usual."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free > _SCRATCH_BYTES else None


def runnable(wanted: list[str], gpus: int, tiny: bool) -> Iterator[str]:
    """Yield the parts that this machine can run, and say why it leaves out the others."""
    for name in wanted:
        part = PARTS[name]
        if gpus >= part.gpus or (tiny and part.on_cpu and not gpus):
            yield name
        else:
            print(f"{name} needs {part.gpus} GPUs, {gpus} are visible: left out")


def parse(argv: list[str] | None = None, about: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--name", default="this-machine", help="name of the results file")
    folder = Path(__file__).with_name("results")
    parser.add_argument("--folder", type=Path, default=folder, help="folder of the results file")
    parser.add_argument("--minutes", type=float, help="the time that this command may take")
    parser.add_argument("--server-args", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--dry-run", action="store_true", help="only show the parts and results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if wrong := [item for item in arguments.server_args if "=" not in item]:
        parser.error(f"--server-args {wrong[0]} has no value: write {wrong[0]}=…")
    return arguments


def run_parts(arguments: argparse.Namespace, results: dict[str, dict], path: Path) -> None:
    """Run the wanted parts while there is time, and write each result as soon as it is there."""
    end = time.monotonic() + 60 * (arguments.minutes or float("inf"))
    wanted = arguments.parts or [name for name in PARTS if name not in results]
    for name in runnable(wanted, len(visible_gpus()), arguments.tiny):
        left = end - time.monotonic()
        if left <= 0:
            print(f"{name}: no time is left, call it again")
            continue
        print(f"{name}: {PARTS[name].checks}", flush=True)
        result = run_part(
            name,
            path.with_suffix(".log"),
            tiny=arguments.tiny,
            server_args=arguments.server_args,
            limit_s=min(LIMIT_S, left),
        )
        was_first = left > 0.9 * 60 * (arguments.minutes or 0)
        if isinstance(result["status"], str) and left < LIMIT_S and not was_first:
            print(f"{name}: not enough time was left, call it again")
            continue
        results[name] = result
        write_json(path, results)


def main() -> int:
    arguments = parse()
    if arguments.part:
        module = importlib.import_module(PARTS[arguments.part].module)
        module.SERVER_ARGS.update(map(server_arg, arguments.server_args))
        numbers, checks = getattr(module, arguments.part)(arguments.tiny)
        write_json(arguments.out, {"numbers": numbers, "checks": checks})
        return 0 if all(checks.values()) else 1
    path = arguments.folder / f"gpu-{arguments.name}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if not arguments.dry_run and (visible_gpus() or arguments.tiny):
        arguments.folder.mkdir(parents=True, exist_ok=True)
        run_parts(arguments, results, path)
    elif not arguments.dry_run:
        print("no GPU is visible: nothing is measured")
    print(table(results))
    if not results:
        print(f"No number exists yet: there is no {path}")
    return 0 if all(all(result["checks"].values()) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
