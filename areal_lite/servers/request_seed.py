"""Seeds of requests: a request draws the same random numbers on any server and at any time.

A request is named by what it is for: `GROUP-SAMPLE-TURN` in training, `evalVERSION-PROBLEM-SAMPLE-
TURN` in an evaluation. A server with `server.deterministic` hashes the seed with the position in
the sequence and the token (MurmurHash3, `multinomial_with_seed` in SGLang). A request that
continues elsewhere after an abort therefore continues the same stream of random numbers. Without
that setting SGLang ignores the seed.
"""

import hashlib


def request_seed(run_seed: int, request: str) -> int:
    """Return the seed of a request: 63 bits, the same in every release.

    Args:
        run_seed: the setting `seed`.
        request: its name within the run.
    """
    digest = hashlib.blake2b(f"{run_seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
