"""The faults of a chaos run: a pure function of its seed."""

import random
from dataclasses import dataclass

KILL, STOP, END = "kill", "stop", "end"
"""SIGKILL; SIGSTOP, and SIGCONT some seconds later; SIGTERM."""

CUT, SLOW, FILL, LOCK, JUMP = "cut", "slow", "fill", "write-protect", "jump"
"""Connections are reset or slow; the disk is full or read-only; the wall clock moves."""

SUPERVISOR, CONTROLLER, TRAINER = "supervisor", "controller", "trainer"
WORKER = "worker"
"""A process that plays episodes. No schedule has it: what it plays may end without a reward."""
SERVER, SCHEDULER, DETOKENIZER = "server", "scheduler", "detokenizer"
SERVER_PARTS = (SERVER, SCHEDULER, DETOKENIZER)
TARGETS = (SUPERVISOR, CONTROLLER, TRAINER, *SERVER_PARTS)
NETWORK, DISK, CLOCK = "network", "disk", "clock"

REPLACED_AFTER_S = 4.0
"""A controller or a trainer that is stopped for so long is replaced."""
_SHORTEST_S = 0.3
_LONGEST_JUMP_S = 2 * 3600.0


@dataclass(frozen=True, order=True)
class Kind:
    """A fault: the action, and the process or the part of the world that it happens to."""

    action: str
    target: str


OF_THE_WORLD = (
    Kind(CUT, NETWORK),
    Kind(SLOW, NETWORK),
    Kind(FILL, DISK),
    Kind(LOCK, DISK),
    Kind(JUMP, CLOCK),
)
ALL_KINDS = (
    *(Kind(action, target) for action in (KILL, STOP) for target in TARGETS),
    Kind(END, SUPERVISOR),
    *OF_THE_WORLD,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        step: it happens as soon as metrics.jsonl has this training step.
        in_push: it waits for the push of weights that comes next.
        kind: what happens.
        server: the number of the server, if it is one; modulo those that are announced.
        seconds: how long it lasts; how far the clock moves.
    """

    step: int
    in_push: bool
    kind: Kind
    server: int
    seconds: float

    def __str__(self) -> str:
        momentary = self.kind.action in (KILL, END, CUT)
        for_s = "" if momentary else f" for {self.seconds:.1f} s"
        when = "in the push after" if self.in_push else "at"
        return f"{self.kind.action} {self.kind.target} {when} step {self.step}{for_s}"


def short_schedule(seed: int, steps: int) -> list[Fault]:
    """Return fourteen faults of fourteen kinds, of which two restart real servers.

    A start of a server takes the most time. So one server or a part of it is killed, and the
    supervisor is killed or ended once. The disk is full or read-only.
    """
    draw = random.Random(seed)
    kinds = [
        *(Kind(STOP, target) for target in TARGETS),
        Kind(KILL, CONTROLLER),
        Kind(KILL, TRAINER),
        Kind(KILL, draw.choice(SERVER_PARTS)),
        Kind(draw.choice((KILL, END)), SUPERVISOR),
        *(kind for kind in OF_THE_WORLD if kind.target != DISK),
        Kind(draw.choice((FILL, LOCK)), DISK),
    ]
    return _place(draw, kinds, steps, longest_s=1.5)


def long_schedule(seed: int, steps: int, faults: int) -> list[Fault]:
    """Return `faults` faults: each kind once, and others that leave the supervisor alone.

    Some processes are stopped for so long that they are replaced.
    """
    draw = random.Random(seed)
    others = [kind for kind in ALL_KINDS if kind.target != SUPERVISOR]
    kinds = [*ALL_KINDS, *draw.choices(others, k=faults - len(ALL_KINDS))]
    return _place(draw, kinds, steps, longest_s=1.5 * REPLACED_AFTER_S)


def _place(draw: random.Random, kinds: list[Kind], steps: int, longest_s: float) -> list[Fault]:
    """Give faults an order, their steps and a length. Some come at the same step, at once.

    While a fault waits for its moment, the run makes a step or two. Enough steps are left for that,
    however fast they are.
    """
    draw.shuffle(kinds)
    at = sorted(draw.randint(1, steps - len(kinds)) for _ in kinds)
    return [
        Fault(
            step=step,
            in_push=draw.random() < 0.5,
            kind=kind,
            server=draw.randrange(2),
            seconds=_seconds(draw, kind, longest_s),
        )
        for step, kind in zip(at, kinds)
    ]


def _seconds(draw: random.Random, kind: Kind, longest_s: float) -> float:
    if kind.action == JUMP:
        return draw.choice((-1, 1)) * draw.uniform(60, _LONGEST_JUMP_S)
    return draw.uniform(_SHORTEST_S, longest_s)
