"""Measure how likely the policy writes a carry, the quantity that the speed limit is about."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

# A line that states a carry of 1, and the carry that the next line takes: `=1z2\nb4+B8+1`.
_CARRY = re.compile(r"=1[a-z]\d\n[a-z]\d\+[A-Z]\d\+([01])(?==)")
_ROWS = "SELECT n_prompt, completion, logprobs, versions FROM trajectories"


def carry_logprobs(store: Path) -> list[float | None]:
    """Return the mean log-prob of a carry that is due, nats, by the version that sampled it.

    Where the policy sampled 0, the probability of 1 is taken for the rest of that of 0: the
    warmed-up model writes nothing else there. None for a version without such a token.
    """
    found: dict[int, list[float]] = {}
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        for n_prompt, completion, logprobs, versions in db.execute(_ROWS):
            logprob = np.frombuffer(logprobs, np.float32)
            version = np.frombuffer(versions, np.int32)
            for match in _CARRY.finditer(completion):
                # A token is a character.
                place = n_prompt + match.start(1)
                p = float(np.exp(logprob[place]))
                due = p if match[1] == "1" else 1.0 - p
                found.setdefault(int(version[place]), []).append(np.log(max(due, 1e-6)))
    last = max(found, default=-1)
    return [float(np.mean(found[v])) if v in found else None for v in range(last + 1)]
