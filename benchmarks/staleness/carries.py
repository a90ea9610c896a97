"""Measure how likely the policy writes a carry, the quantity that the speed limit is about."""

import re
from pathlib import Path

import numpy as np

from areal_lite.run_dir.reader import RunReader

# A line that states a carry of 1, and the carry that the next line takes: `=1z2\nb4+B8+1`.
_CARRY = re.compile(r"=1[a-z]\d\n[a-z]\d\+[A-Z]\d\+([01])(?==)")


def carry_logprobs(store: Path) -> list[float | None]:
    """Return the mean log-prob of a carry that is due, nats, by the version that sampled it.

    Where the policy sampled 0, the probability of 1 is taken for the rest of that of 0: the
    warmed-up model writes nothing else there. None for a version without such a token.
    """
    found: dict[int, list[float]] = {}
    reader = RunReader(store)
    for row in reader.trajectories():
        for match in _CARRY.finditer(row["completion"]):
            # A token is a character.
            place = row["n_prompt"] + match.start(1)
            p = float(np.exp(row["logprobs"][place]))
            due = p if match[1] == "1" else 1.0 - p
            found.setdefault(int(row["versions"][place]), []).append(np.log(max(due, 1e-6)))
    reader.close()
    last = max(found, default=-1)
    return [float(np.mean(found[v])) if v in found else None for v in range(last + 1)]
