"""Measure one GPU for half an hour and write a page; `bash benchmarks/prove.sh` sets it up.

    bash benchmarks/prove.sh --name h100               # about 20 minutes; again: what is missing
    bash benchmarks/prove.sh --name h100 sampling      # this part, again
    python benchmarks/prove.py --tiny                  # tiny models, also without a GPU

The parts are some of gpu.py's, each with the number that a plain program reaches on the same
machine. Results go to FOLDER/gpu-NAME.json as each part ends, so an interrupted command continues
where it was; the page is FOLDER/prove-NAME.md. Nothing is uploaded, and the only downloads are
packages and the chat model of examples/chat_model (`CHAT_MODEL=…` names another folder).
"""

import json
import sys
from typing import Any

import gpu

from areal_lite.system.files import write_atomically

PARTS = ("machine", "product", "tags", "sampling", "engine", "learns")
MINUTES = 30
_BARS = "▁▂▃▄▅▆▇█"


def page(results: dict[str, dict[str, Any]], name: str) -> str:
    """Return the page in Markdown. Parts without a result are named as missing."""
    found = {part: results[part]["numbers"] for part in PARTS if part in results}
    lines = [f"# What {name} proved", "", _machine(found.get("machine", {})), ""]
    lines += ["| | areal_lite | plain, on the same machine | share |", "|---|--:|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(found)]
    if tags := found.get("tags"):
        lines += ["", f"**Versions.** Weights were pushed into running requests: {tags['seams']}"
                  f" seams, {tags['wrong tags']} tokens with a wrong version."]  # fmt: skip
    if learned := found.get("learns"):
        before, after = map(_percent, learned["held-out accuracy before and after"])
        rewards = learned["rewards"]
        step = f"{len(rewards)} steps of {learned['seconds a step']} s"
        accuracy = f"Held-out accuracy {before} → {after}"
        lines += ["", f"**Learning.** {step}. {accuracy}. Rewards by step, from 0 to 1:", "",
                  f"    {bars(rewards)}"]  # fmt: skip
    failed = [
        f"{part}: {check}"
        for part in found
        for check, holds in results[part]["checks"].items()
        if not holds
    ]
    missing = [part for part in PARTS if part not in results]
    lines += ["", "**Failed:** " + ("; ".join(failed) or "nothing") + "."]
    lines += [f"**Missing:** {', '.join(missing)}."] if missing else []
    seconds = sum(results[part]["seconds"] for part in found)
    lines += ["", f"Measured in {seconds / 60:.0f} minutes by `bash benchmarks/prove.sh --name "
              f"{name}`; [gpu-{name}.json](gpu-{name}.json) has all numbers."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _machine(numbers: dict[str, Any]) -> str:
    versions = numbers.get("python, torch, CUDA, NCCL", ["?"] * 3)
    cards = ", ".join(numbers.get("GPUs", [])) or "no GPU"
    return f"{cards}; Python {versions[0]}, torch {versions[1]}, CUDA {versions[2]}."


def _rows(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return the rows whose parts have a result."""
    rows = []
    if speed := found.get("sampling"):
        own = speed["areal_lite's client, tokens a second"]
        plain = speed["sglang.benchmark.serving, tokens a second"]
        rows.append(("sampling, tokens a second", f"{own:,}", f"{plain:,} (SGLang's own client)",
                     _share(own, plain)))  # fmt: skip
    product = found.get("product", {}).get("matrix product, TFLOP/s")
    if (engine := found.get("engine")) and product:
        own = engine["TFLOP/s of matrices"]
        rows.append(("an update of 0.6B parameters, TFLOP/s", f"{own:,}",
                     f"{product:,} (a product in bfloat16)", _share(own, product)))  # fmt: skip
    copy = found.get("product", {}).get("memory copy, GB/s")
    if (learned := found.get("learns")) and copy:
        pause, size = learned["pause of a push, ms"], learned["a push, MiB"]
        copied = 1e3 * size * 2**20 / (copy * 1e9)
        rows.append((f"pause for {size:,} MiB of weights, ms", f"{pause:,}",
                     f"{copied:,.1f} (a memory copy)", f"{pause / copied:,.0f} ×"))  # fmt: skip
        if learned["mfu"] is not None:
            rows.append(("MFU of that run's updates", _percent(learned["mfu"]), "100.0 %", ""))
    return rows


def _share(own: float, plain: float) -> str:
    return f"{own / plain:.2f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def bars(values: list[float]) -> str:
    """Draw values between 0 and 1, one character each."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * min(max(value, 0.0), 1.0))] for value in values)


def main() -> int:
    arguments = gpu.parse(about=__doc__)
    arguments.minutes = arguments.minutes or MINUTES
    path = arguments.folder / f"gpu-{arguments.name}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    arguments.parts = arguments.parts or [part for part in PARTS if part not in results]
    if not (gpu.visible_gpus() or arguments.tiny):
        print("no GPU is visible: nothing is measured (--tiny shows the way without one)")
        return 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    gpu.run_parts(arguments, results, path)
    out = arguments.folder / f"prove-{arguments.name}.md"
    write_atomically(out, page(results, arguments.name))
    print(f"\n{out.read_text()}\nThe page is {out}")
    parts = [results[part] for part in PARTS if part in results]
    complete = len(parts) == len(PARTS) or arguments.tiny
    return 0 if complete and all(all(part["checks"].values()) for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
