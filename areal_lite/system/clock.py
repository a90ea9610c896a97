"""The wall clock of this process, which never jumps."""

import time

_START_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the wall-clock time in seconds, without the changes of the clock since the start.

    Differences are therefore durations, and no later moment has an earlier time.
    """
    return _START_S + time.monotonic()
