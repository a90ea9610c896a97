"""The wall clock of this process, which never jumps, and the wait before a restart."""

import time

_START_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the wall-clock time in seconds, without the changes of the clock since the start.

    Differences are therefore durations, and no later moment has an earlier time.
    """
    return _START_S + time.monotonic()


LONGEST_S = 60.0
_DOUBLINGS = 6


def back_off_s(restarts: int) -> float:
    """Return the wait before a restart in seconds: 1, 2, 4 and so on, at most LONGEST_S.

    `restarts` is the number of this restart, from 1.
    """
    return min(2.0 ** min(restarts - 1, _DOUBLINGS), LONGEST_S)
