"""The turns of several sources, by their weights.

Source k has the weight w_k, a positive integer; W is the sum of all weights, and c_k(n) the number
of turns of source k among the first n. For every n and k

    |c_k(n) - n w_k / W| < 1

The j-th turn of source k (j = 1, 2, …) has a window of numbers n that it may have: it opens with
the first n > (j - 1) W / w_k, and its deadline is ceil(j W / w_k). No turn before its window means
c_k(n) < n w_k / W + 1, and no turn after its deadline means c_k(n) > n w_k / W - 1. These are the
windows of Pfair scheduling (Baruah et al., Algorithmica 15, 1996) on one processor.

`interleave` gives each n to the open turn with the earliest deadline. One is always open: the
differences n w_k / W - c_k(n - 1) add up to 1, so one of them is positive.

No turn misses its deadline. Suppose that one does, with the deadline t. Let s < t be the last
number that was given to a turn with a deadline after t, or 0. The numbers s + 1 … t were then given
to turns with deadlines up to t. None of these t - s turns was open at s, where it would have been
preferred, and nor was the missed one. So t - s + 1 windows lie within s + 1 … t. But a source has
only floor(t w_k / W) - ceil(s w_k / W) <= (t - s) w_k / W of those, which add up to at most t - s.

After W turns c_k(W) is an integer less than one away from w_k, so it is w_k, and the turns repeat.
"""

from collections.abc import Sequence

import numpy as np


def interleave(weights: Sequence[int]) -> np.ndarray:
    """Return the source of each of the first sum(weights) turns, int64. Then they repeat.

    Among equal deadlines the source that comes first in `weights` has its turn first.
    """
    total = sum(weights)
    taken = [0] * len(weights)
    turns = np.empty(total, np.int64)
    for number in range(1, total + 1):
        is_open = (k for k, weight in enumerate(weights) if taken[k] * total < number * weight)
        # The deadline is the ceiling of this quotient.
        chosen = min(is_open, key=lambda k: -(-(taken[k] + 1) * total // weights[k]))
        taken[chosen] += 1
        turns[number - 1] = chosen
    return turns
