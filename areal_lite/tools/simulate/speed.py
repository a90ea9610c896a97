"""The time that a server takes: a step of decoding, a prompt, and a preemption's recomputation.

A decoding step of b sequences with K tokens of context in all takes

    step_s + per_sequence_s * b + per_context_s * K        seconds

The first term is reading the weights, and the work of the host. The second is arithmetic, the
third reading the KV cache. Each step adds one token to each sequence, so n steps take

    n (step_s + per_sequence_s b + per_context_s K) + per_context_s b n (n - 1) / 2

which `steps_s` returns and `steps_within` inverts. Both take fractions of a step, so a batch can be
advanced from event to event and not token by token.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerSpeed:
    """The speed of a server, and the tokens that it holds.

    Args:
        step_s: seconds of a decoding step, apart from the terms below.
        per_sequence_s: seconds that each sequence adds to a step.
        per_context_s: seconds that each token of context adds to a step.
        prefill_s: seconds to compute one token of a prompt.
        request_s: seconds of each request, apart from its tokens: the work of the host.
        kv_tokens: tokens that the KV cache holds.
        max_running: sequences that run at a time.
    """

    step_s: float
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0
    prefill_s: float = 0.0
    request_s: float = 0.0
    kv_tokens: float = math.inf
    max_running: int = 2**31

    def steps_s(self, steps: float, sequences: int, context: float) -> float:
        """Return the seconds of `steps` steps that begin with `context` tokens of context."""
        first = self.step_s + self.per_sequence_s * sequences + self.per_context_s * context
        growth = self.per_context_s * sequences
        return steps * first + growth * steps * (steps - 1) / 2

    def steps_within(self, seconds: float, sequences: int, context: float) -> float:
        """Return how many steps fit into `seconds`, a fraction of a step included."""
        growth = self.per_context_s * sequences
        linear = self.step_s + self.per_sequence_s * sequences + self.per_context_s * context
        linear -= growth / 2
        # The positive root of growth / 2 n^2 + linear n = seconds, stable for small growth.
        root = math.sqrt(linear * linear + 2 * growth * seconds)
        return 2 * seconds / (linear + root)
