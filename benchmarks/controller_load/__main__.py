"""The cost of one controller process, without a GPU.

    python -m benchmarks.controller_load compare --rounds 3    # next to a bare HTTP client
    python -m benchmarks.controller_load agents --rounds 3     # next to plain requests
    python -m benchmarks.controller_load scale     # by requests in flight and by tokens, 11 minutes

The server answers POST /generate with prepared completions of log-normal lengths, and parses
nothing. The controller is the real process with its store and a reward worker. A trainer that does
not train pulls its batches and pushes versions.

compare: 2,000 requests in flight, as many answers a second as the machine can take. A bare HTTP
client, which discards its answers, and the controller take turns on the same server. CPU seconds
are those of the process of the client or of the controller, over all threads. They depend less on
other load of the machine.

agents: 256 episodes in flight. In turn, the controller plays them itself, or an agent with OpenAI's
client plays each in the worker processes. CPU seconds count the controller's process only.

scale: answers arrive at 102,400 tokens a second. First 10 to 10,000 requests are in flight, with
100 tokens an answer. Then the answers have 100 to 27,000 tokens.

Writes <out>/controller.json, <out>/controller_agents.json or <out>/controller_scale.json and .md.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.controller_load import bare
from benchmarks.controller_load.load import GROUP_SIZE, Load
from benchmarks.controller_load.measure import measure
from benchmarks.controller_load.server import fresh_server
from benchmarks.launch import ROOT

COMPARED = Load(in_flight=2000, mean_tokens=100, mean_s=0.1, batch_groups=256, max_staleness=3)
AGENTS = Load(
    in_flight=256, mean_tokens=20, mean_s=4.0, batch_groups=32, max_staleness=3, agent=True
)
TOKENS_PER_S = 102_400
STEP_S = 8
"""Rate and seconds of a step in `scale`: 8,192 answers of 100 tokens."""
IN_FLIGHT = (10, 100, 1_000, 10_000)
TOKENS = (100, 1_000, 8_000, 27_000)
COLUMNS = {
    "per_s": ("answers a second", 1, ",.1f"),
    "cpu_s_per_1000": ("CPU ms an answer", 1, ".2f"),
    "cpu_s_per_million_tokens": ("CPU µs a token", 1, ".2f"),
    "loop_lag_p99_s": ("event-loop lag, p99, ms", 1000, ".1f"),
    "ready_batch_s": ("reply with a complete batch, ms", 1000, ".0f"),
    "ready_batch_tokens": ("tokens of that batch", 1, ",.0f"),
    "memory_mib_last_quarter": ("memory, MiB", 1, ".0f"),
}
"""Key of a record -> its label, a factor, and a format."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["compare", "agents", "scale"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--trajectories",
        type=int,
        default=20_000,
        help="of compare, per round and client; 200000 shows whether memory is flat",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {name: version(name) for name in ("aiohttp", "uvloop", "msgspec", "pyzmq")},
        "python": platform.python_version(),
    }
    if args.what == "compare":
        found = compare(args.rounds, args.trajectories)
        write(args.out / "controller.json", facts | found)
        share, by_cpu = found["share_of_bare_client_median"], found["share_by_cpu_time_median"]
        print(f"share of the bare client's rate {share:.2f}, by CPU time {by_cpu:.2f}")
        return
    if args.what == "agents":
        loads = [AGENTS, replace(AGENTS, agent=False)] * args.rounds
        write(args.out / "controller_agents.json", facts | {"rows": [run(load) for load in loads]})
        return
    rows = [run(load) for load in scale() for _ in range(args.rounds)]
    write(args.out / "controller_scale.json", facts | {"rows": rows})
    (args.out / "controller_scale.md").write_text(page(rows))


def scale() -> list[Load]:
    """Return loads that differ in what is in flight, then in the lengths of answers."""
    flights = [(in_flight, TOKENS[0]) for in_flight in IN_FLIGHT]
    lengths = [(IN_FLIGHT[1], tokens) for tokens in TOKENS[1:]]
    return [loaded(in_flight, tokens) for in_flight, tokens in [*flights, *lengths]]


def loaded(in_flight: int, tokens: int) -> Load:
    """Return a load of TOKENS_PER_S tokens a second."""
    arrivals_per_s = TOKENS_PER_S / tokens
    groups = round(STEP_S * arrivals_per_s / GROUP_SIZE)
    staleness = -(-in_flight // (GROUP_SIZE * groups))
    return Load(in_flight, tokens, in_flight / arrivals_per_s, groups, staleness)


def run(load: Load, steps: int = 3) -> dict:
    """Measure one load in a new run directory."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with fresh_server(run_dir, load.config(Path(folder)), load):
            row = asdict(load) | measure(run_dir, load, steps)
    print(json.dumps(row, default=str), flush=True)
    return row


def compare(rounds: int, trajectories: int) -> dict:
    """Let a bare client and the controller take turns."""
    steps = -(-trajectories // (GROUP_SIZE * COMPARED.batch_groups))
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            with fresh_server(run_dir, COMPARED.config(Path(folder)), COMPARED) as url:
                client = bare.measure(url, COMPARED, trajectories)
                found.append({"bare": client, "controller": measure(run_dir, COMPARED, steps)})
        print(json.dumps(found[-1], indent=1), flush=True)
    shares = [pair["controller"]["per_s"] / pair["bare"]["per_s"] for pair in found]
    by_cpu = [
        pair["bare"]["cpu_s_per_1000"] / pair["controller"]["cpu_s_per_1000"] for pair in found
    ]
    return {
        "share_of_bare_client_median": statistics.median(shares),
        "shares": sorted(shares),
        "share_by_cpu_time_median": statistics.median(by_cpu),
        "load": asdict(COMPARED),
        "rounds": found,
    }


def page(rows: list[dict]) -> str:
    """Return the page of `scale`: medians of the rounds."""
    labels = ["in flight", "tokens an answer", *(label for label, _, _ in COLUMNS.values())]
    lines = [
        "# The controller by requests in flight and by tokens",
        "",
        "Command: `python -m benchmarks.controller_load scale`. A real controller process, with a "
        "server that answers at 102,400 tokens a second.",
        "",
        f"| {' | '.join(labels)} |",
        "|" + "---|" * len(labels),
    ]
    for load in scale():
        key = (load.in_flight, load.mean_tokens)
        own = [row for row in rows if (row["in_flight"], row["mean_tokens"]) == key]
        cells = [f"{number:,}" for number in key]
        for name, (_, factor, form) in COLUMNS.items():
            cells.append(format(factor * statistics.median(row[name] for row in own), form))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(path: Path, found: dict) -> None:
    path.write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(path)


if __name__ == "__main__":
    main()
