"""The wait before a process that failed is started again."""

LONGEST_S = 60.0
_DOUBLINGS = 6


def back_off_s(restarts: int) -> float:
    """Return the wait before a restart in seconds: 1, 2, 4 and so on, at most LONGEST_S.

    `restarts` is the number of this restart, from 1.
    """
    return min(2.0 ** min(restarts - 1, _DOUBLINGS), LONGEST_S)
