"""Changes of honest bytes, for fuzzers."""

import random
from collections.abc import Sequence


def mutated(rng: random.Random, raw: bytes, words: Sequence[bytes]) -> bytes:
    """Change `raw` at one to four places: another byte, a cut, a repetition, or one of `words`."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randint(1, 30)]
            case 2:
                data[at:at] = rng.choice(words)
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 30)]
    return bytes(data)
