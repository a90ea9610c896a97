"""Measure the trajectory store: bytes per token, seconds to write and to remove, and its bound.

    python benchmarks/store.py [--length 27000] [--groups 8] [--steps 12] [--max-gib 0.05]
    python benchmarks/store.py --run runs/NAME

Without a run, the trajectories are made up. Tokens are pieces of the documentation's words,
numbered by their frequency in a vocabulary of 151,000, because what is repeated in a text decides
how far it can be compressed. Log-probs are those of a model that is sure of most tokens:
-log(1 + exp(-m)), where the margin m is normal with mean 6 and deviation 5.

`before` is a store that compresses nothing: 12 bytes a token for id, log-prob and version, and the
text. `row_bytes` is what a trajectory takes when its tokens are removed.
"""

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_format import pack_logprobs, pack_texts, pack_tokens
from areal_lite.trajectory import Group, Trajectory

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 151_000
PROMPT = 200
GROUP_SIZE = 8


class Writer:
    """Makes trajectories of `length` tokens."""

    def __init__(self, length: int):
        text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        self._pieces = re.findall(r" ?\w{1,6}|\W", text)
        ranks = {piece: i for i, (piece, _) in enumerate(Counter(self._pieces).most_common())}
        ids = np.arange(VOCABULARY)
        np.random.default_rng(2).shuffle(ids[2000:])  # rare pieces may have any number
        self._ids = ids[[ranks[piece] for piece in self._pieces]].astype(np.int32)
        self._length = length
        self._random = np.random.default_rng(1)

    def group(self, group_id: int) -> tuple[Group, list[tuple[str | None, str | None]]]:
        """Return a group and the texts of its trajectories."""
        made = [self._trajectory(group_id, index) for index in range(GROUP_SIZE)]
        trajectories = [trajectory for trajectory, _ in made]
        group = Group(group_id=group_id, prompt_id="p", size=GROUP_SIZE, trajectories=trajectories)
        return group, [text for _, text in made]

    def _trajectory(self, group_id: int, index: int) -> tuple[Trajectory, tuple[str, str]]:
        length = self._length
        start = int(self._random.integers(len(self._ids)))
        chosen = np.arange(start, start + length) % len(self._ids)
        versions = np.full(length, 3, np.int32)
        versions[: min(PROMPT, length // 2)] = -1
        margin = self._random.normal(6, 5, length).astype(np.float32)
        logprobs = -np.log(np.float32(1) + np.exp(-margin)).astype(np.float32)
        texts = [self._pieces[i] for i in chosen.tolist()]
        prompt = int((versions < 0).sum())
        trajectory = Trajectory(
            group_id=group_id,
            prompt_id="p",
            sample_index=index,
            tokens=self._ids[chosen],
            loss_mask=versions >= 0,
            behavior_logprobs=np.where(versions >= 0, logprobs, np.float32(0)),
            versions=versions,
            finish_reason="stop",
            reward=1.0,
        )
        return trajectory, ("".join(texts[:prompt]), "".join(texts[prompt:]))


def bytes_per_token(store: Store) -> dict[str, float]:
    """Return the bytes per token of each packed column, and of all as they were before."""
    sums: Counter[str] = Counter()
    for row in store.trajectories():
        if row["tokens"] is None:
            continue
        texts = [text for text in (row["prompt"], row["completion"]) if text is not None]
        sums["number"] += row["n_tokens"]
        sums["tokens"] += len(pack_tokens(row["tokens"]))
        sums["logprobs"] += len(pack_logprobs(row["logprobs"]))
        sums["texts"] += len(pack_texts(row["prompt"], row["completion"]) or b"")
        sums["before"] += 12 * row["n_tokens"] + sum(len(text.encode()) for text in texts)
    number = sums.pop("number")
    found = {name: total / number for name, total in sums.items()}
    return found | {"after": sum(found[name] for name in ("tokens", "logprobs", "texts"))}


def fill(path: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Fill a store step by step, keep it within its bound, and return what was measured."""
    writer, max_bytes = Writer(arguments.length), int(arguments.max_gib * 2**30)
    store, found, number = Store(path), Counter[str](), 0
    for step in range(arguments.steps):
        for _ in range(arguments.groups):
            write(store, *writer.group(number), step, found)
            number += 1
        trim(store, max_bytes, step, found)
        found["largest_mib"] = max(found["largest_mib"], path.stat().st_size / 2**20)
    tokens = number * GROUP_SIZE * arguments.length
    found["written_tokens"], found["write_s_per_million"] = tokens, 1e6 * found["write_s"] / tokens
    found |= bytes_per_token(store)
    trim(store, 1, arguments.steps, found)
    store.close()
    found["row_bytes"] = path.stat().st_size / (number * GROUP_SIZE)
    return dict(found)


def write(store: Store, group: Group, texts: list, step: int, found: Counter[str]) -> None:
    """Write a used group, and add the seconds to `found`."""
    number = group.group_id
    began = time.perf_counter()
    store.begin()
    store.admit(number, "p", number, number + 1, GROUP_SIZE, 0.0)
    store.finish(group, texts, None, float(number))
    store.use([number], step)
    store.commit()
    found["write_s"] += time.perf_counter() - began


def trim(store: Store, max_bytes: int, since: int, found: Counter[str]) -> None:
    """Bring a store to its bound, and add the seconds to `found`."""
    more = True
    while more:
        began = time.perf_counter()
        store.begin()
        more = store.trim(max_bytes, since)
        store.commit()
        call_s = time.perf_counter() - began
        found["trim_s"] += call_s
        found["longest_call_s"] = max(found["longest_call_s"], call_s)


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, help="run directory: measure its store only")
    parser.add_argument("--length", type=int, default=27_000, help="tokens of a trajectory")
    parser.add_argument("--groups", type=int, default=8, help="groups of a step, of 8 each")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-gib", type=float, default=0.05, help="store.max_gib")
    arguments = parser.parse_args()
    if arguments.run:
        store = RunReader(arguments.run / STORE_FILE)
        result = bytes_per_token(store)
        store.close()
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = fill(Path(folder) / STORE_FILE, arguments)
    print(json.dumps({name: float(f"{value:.4g}") for name, value in result.items()}, indent=1))


if __name__ == "__main__":
    main()
