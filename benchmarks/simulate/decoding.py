"""A modelled server: continuous batching with a KV cache, advanced from event to event.

    add -> waiting -> (prompt is computed) -> running -> finished
              ^------- preempted, retracted ----'

* All running sequences get a token in each decoding step. A step of b sequences with K tokens of
  context in all takes

      step_s + per_sequence_s * b + per_context_s * K        seconds

  The first term is reading the weights, and the work of the host. The second is arithmetic, the
  third reading the KV cache. Each step adds one token to each sequence, so n steps take

      n (step_s + per_sequence_s b + per_context_s K) + per_context_s b n (n - 1) / 2

  which `steps_s` returns and `steps_within` inverts. Both take fractions of a step, so a batch can
  be advanced from event to event and not token by token.
* A prompt is computed before the next decoding step, which waits for it. The host's work for a
  request is done then, too.
* A request starts when a slot is free and the cache has room for it. A share of the cache stays
  free at the start of a request, since running requests grow.
* When the cache is full, the youngest request is preempted. It loses its cache and waits first.
* A pause stops everything. What a push does to running requests is an InterruptMode.

No clock and no I/O: `advance` is given the time.
"""

import math
from collections import deque
from dataclasses import astuple, dataclass, field

from areal_lite.trajectory import InterruptMode

# Share of the KV cache up to which requests are started.
_START_BELOW = 0.9
# Slack of sums of floating-point numbers, in steps and in seconds.
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class ServerSpeed:
    """The speed of a server, and the tokens that it holds."""

    step_s: float  # seconds of a decoding step, apart from the terms below
    per_sequence_s: float = 0.0  # seconds that each sequence adds to a step
    per_context_s: float = 0.0  # seconds that each token of context adds to a step
    prefill_s: float = 0.0  # seconds to compute one token of a prompt
    request_s: float = 0.0  # seconds of each request, apart from its tokens: the work of the host
    kv_tokens: float = math.inf  # tokens that the KV cache holds
    max_running: int = 2**31  # sequences that run at a time

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


@dataclass(eq=False, slots=True)
class Generation:
    """One request on a server."""

    context: int  # tokens that it came with
    target: int  # tokens to generate
    prefill: float  # tokens of its context to compute, those not cached
    done: int = 0  # tokens generated so far, exact when it does not run
    # (version, number of tokens), in order, as far as `done` or the last push
    spans: list[tuple[int, int]] = field(default_factory=list)
    begun_at: float = 0.0  # the server's count of steps when it began to run


@dataclass(slots=True)
class Usage:
    """Sums since the start: seconds by what the server did, tokens, and preemptions.

    `sequence_s` is the integral of the running sequences over the time of decoding.
    """

    decoding_s: float = 0.0
    prefill_s: float = 0.0
    paused_s: float = 0.0
    idle_s: float = 0.0
    sequence_s: float = 0.0
    tokens: float = 0.0
    preempted: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def since(self, before: "Usage") -> "Usage":
        """Return what was added after `before`."""
        return Usage(*(a - b for a, b in zip(astuple(self), astuple(before))))


class DecodingServer:
    """A server. Call `advance` before anything else that happens at a later time."""

    def __init__(self, speed: ServerSpeed, now: float = 0.0):
        self.speed = speed
        self.version = 0
        self.now = now
        self.paused = False
        self.usage = Usage()
        self.waiting: deque[Generation] = deque()
        # In the order in which they began, with the count of steps at which each ends.
        self.running: dict[Generation, float] = {}
        # Tokens in the cache, of running requests.
        self.context = 0.0
        self._steps = 0.0
        self._prefill_s = 0.0

    def add(self, request: Generation) -> None:
        """Queue a request, and start it if there is room."""
        if request.context + request.target > self.speed.kv_tokens:
            raise ValueError(
                f"a sequence of {request.context + request.target} tokens does not fit a KV cache "
                f"of {self.speed.kv_tokens:.0f}: use more tensor parallelism, or shorter sequences"
            )
        self.waiting.append(request)
        self._start()

    def remove(self, request: Generation) -> None:
        """Take a request off the server, with the tokens that it has."""
        if request in self.running:
            self._leave(request)
            self._start()
        else:
            self.waiting.remove(request)

    def advance(self, now: float) -> list[Generation]:
        """Pass the time until `now`; return the requests that finish, in order."""
        finished: list[Generation] = []
        while True:
            finished += self._finish()
            left = now - self.now
            if left <= 0:
                return finished
            if self.paused or not self.running:
                kind = "paused_s" if self.paused else "idle_s"
                setattr(self.usage, kind, getattr(self.usage, kind) + left)
                self.now = now
            elif self._prefill_s > 0:
                seconds = min(left, self._prefill_s)
                self._prefill_s -= seconds
                self.usage.prefill_s += seconds
                self.now += seconds
            else:
                self._decode(left, now)

    def next_event(self) -> float | None:
        """Return when a request finishes or is preempted; None if nothing is going on."""
        if self.paused or not self.running:
            return None
        seconds = self.speed.steps_s(self._steps_to_event(), len(self.running), self.context)
        return self.now + self._prefill_s + seconds

    def pause(self, mode: str) -> list[Generation]:
        """Stop for a push; return the requests that mode `abort` ends."""
        self.paused = True
        ended: list[Generation] = []
        if mode == InterruptMode.RETRACT:
            for request in reversed(list(self.running)):
                self._retract(request)
        elif mode == InterruptMode.ABORT:
            ended = [*self.running, *self.waiting]
            for request in list(self.running):
                self._leave(request)
            self.waiting.clear()
        return ended

    def resume(self, version: int) -> None:
        """Continue with the weights of `version`."""
        for request in self.running:
            self._record(request)
        self.paused = False
        self.version = version
        self._start()

    def _decode(self, left: float, now: float) -> None:
        """Decode until the next event, or until `now`, which is `left` seconds away."""
        sequences = len(self.running)
        steps = self._steps_to_event()
        seconds = self.speed.steps_s(steps, sequences, self.context)
        end = self.now + seconds
        if seconds > left + _EPSILON:
            steps = self.speed.steps_within(left, sequences, self.context)
            seconds, end = left, now
        self._steps += steps
        self.context += sequences * steps
        self.usage.decoding_s += seconds
        self.usage.sequence_s += sequences * seconds
        self.usage.tokens += sequences * steps
        self.now = min(end, now)
        if self.context >= self.speed.kv_tokens - _EPSILON and self._steps_to_end() > _EPSILON:
            self.usage.preempted += 1
            self._retract(next(reversed(self.running)))

    def _steps_to_event(self) -> float:
        """Return the steps until a request ends or the cache is full."""
        room = (self.speed.kv_tokens - self.context) / len(self.running)
        return min(self._steps_to_end(), room)

    def _steps_to_end(self) -> float:
        """Return the steps until the first running request ends."""
        return max(0.0, min(self.running.values()) - self._steps)

    def _finish(self) -> list[Generation]:
        """Take the requests that have all their tokens off the server."""
        finished = []
        while self.running and self._steps_to_end() <= _EPSILON:
            request = min(self.running, key=self.running.__getitem__)
            self._leave(request)
            finished.append(request)
        if finished:
            self._start()
        return finished

    def _start(self) -> None:
        speed = self.speed
        while self.waiting and not self.paused and len(self.running) < speed.max_running:
            request = self.waiting[0]
            held = request.context + request.done
            full = self.context + held > _START_BELOW * speed.kv_tokens
            if full and self.running:
                return
            self.waiting.popleft()
            self._prefill_s += speed.request_s + request.prefill * speed.prefill_s
            request.begun_at = self._steps
            self.running[request] = self._steps + request.target - request.done
            self.context += held

    def _leave(self, request: Generation) -> None:
        """Take a running request off the batch, and record the tokens that it got."""
        self.context -= request.context + request.done + (self._steps - request.begun_at)
        del self.running[request]
        if not self.running:
            self.context = self._prefill_s = 0.0
        request.done += self._record(request)

    def _record(self, request: Generation) -> int:
        """Record the tokens of the present version, and return all since the request began."""
        ran, left = self._steps - request.begun_at, request.target - request.done
        tokens = left if ran >= left - _EPSILON else int(ran + _EPSILON)
        recorded = sum(count for _, count in request.spans) - request.done
        if tokens > recorded:
            request.spans.append((self.version, tokens - recorded))
        return tokens

    def _retract(self, request: Generation) -> None:
        """Move a running request to the front of the queue, without its cache."""
        self._leave(request)
        request.prefill = request.context + request.done
        self.waiting.appendleft(request)
