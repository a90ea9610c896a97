"""Messages between the trainer's ranks and the controller: msgpack over ZeroMQ, no pickle.

    request                        reply
    PullBatch(step, rank, world)   BatchReady, followed by the frames of this rank's TrainBatch; or
                                   Resync: push version `step` to the stale servers, and ask again
    StepDone(step)                 Recorded
    BeginPush(version)             PushTargets: the servers to push to
    Pushed(version, failed)        Recorded
    Evaluate(version)              Evaluation: accuracy on held-out problems
    AwaitEvaluation(version)       EvaluationEnded; or Resync: push `version` and ask again
    Finish()                       RunTotals; then the controller exits

A repeated request gets the answer that the first one got or would have got. A client repeats one
after a loss of its connection: the server knows it by the client's name and the request's number.
If the controller is killed, the client waits for the next one and asks that (handover.py).

A request that fails is answered by `Failed`. A request is one frame (`Envelope`). A reply is one
frame (`Reply`), plus the frames of the batch after a `BatchReady`.

The connections are those of CurveZMQ (https://rfc.zeromq.org/spec/26): encrypted, and only for
clients that know the controller's random key. libzmq refuses all others before the controller
sees a byte of theirs. The address and the key are in `<run_dir>/controller.json`, which only its
owner can read. The controller listens on loopback, or on this machine's address for a run on
several machines.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from areal_lite.servers.registry import ServerInfo


class PullBatch(msgspec.Struct, tag="pull_batch", frozen=True):
    """Ask for one rank's shard of the batch that takes the trainer from `step` to `step + 1`.

    `resyncs` counts the `Resync` replies that this rank has had.
    """

    step: int
    rank: int
    world: int
    resyncs: int = 0

    def __str__(self) -> str:
        return f"the batch of step {self.step} (rank {self.rank} of {self.world})"


class StepDone(msgspec.Struct, tag="step_done", frozen=True):
    """Report that `step` steps are complete and that no push follows the last one."""

    step: int

    def __str__(self) -> str:
        return f"the controller to record that {self.step} steps are complete"


class BeginPush(msgspec.Struct, tag="begin_push", frozen=True):
    """Announce a push of `version`. In interrupt mode `none` the reply waits for idle servers."""

    version: int

    def __str__(self) -> str:
        return f"permission to push version {self.version}"


class Pushed(msgspec.Struct, tag="pushed", frozen=True):
    """Report the end of a push. `failed` names the servers that did not get `version`."""

    version: int
    failed: list[str]

    def __str__(self) -> str:
        return f"the controller to record the push of version {self.version}"


class Evaluate(msgspec.Struct, tag="evaluate", frozen=True):
    """Ask for an evaluation on the held-out problems, labelled with `version`."""

    version: int

    def __str__(self) -> str:
        return f"the evaluation at version {self.version}"


class AwaitEvaluation(msgspec.Struct, tag="await_evaluation", frozen=True):
    """Wait until the evaluation of the last version has succeeded or failed. Every rank asks.

    `resyncs` counts the `Resync` replies that this rank has had.
    """

    version: int
    resyncs: int = 0

    def __str__(self) -> str:
        return f"the end of the evaluation at version {self.version}"


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """End the run and ask for its totals."""

    def __str__(self) -> str:
        return "the totals of the run"


Request = PullBatch | StepDone | BeginPush | Pushed | Evaluate | AwaitEvaluation | Finish


class BatchReady(msgspec.Struct, tag="batch_ready"):
    """The batch exists. `info` describes all ranks' shards together, for the metrics."""

    info: dict[str, Any]


class Resync(msgspec.Struct, tag="resync"):
    """The trainer waits and some servers are stale: push the current version to them first."""


class PushTargets(msgspec.Struct, tag="push_targets"):
    """The servers to push to, possibly none: servers that start later are resynced then.

    `drained` is the number of requests in flight that were waited for (interrupt mode `none`).
    """

    servers: list[ServerInfo]
    drained: int = 0


class Recorded(msgspec.Struct, tag="recorded"):
    """The step, or the push, is recorded. Admission is open for the version of a push."""


class Evaluation(msgspec.Struct, tag="evaluation"):
    """A finished evaluation: `record` is one line of evals.jsonl."""

    record: dict[str, Any]


class EvaluationEnded(msgspec.Struct, tag="evaluation_ended"):
    """The evaluation has ended. Only the client that sent `Evaluate` gets its result."""


class RunTotals(msgspec.Struct, tag="run_totals"):
    """The end of the run: `totals` is the content of controller_totals.json."""

    totals: dict[str, Any]


class Failed(msgspec.Struct, tag="failed"):
    """The request failed; `error` is the message for the trainer."""

    error: str


Response = (
    BatchReady | Resync | PushTargets | Recorded | Evaluation | EvaluationEnded | RunTotals | Failed
)


class Envelope(msgspec.Struct):
    """One request on the wire."""

    id: int
    request: Request


class Reply(msgspec.Struct):
    """The answer to the request with the same `id`."""

    id: int
    response: Response


class Address(msgspec.Struct):
    """The content of controller.json."""

    url: str
    # CurveZMQ's public key of the controller. It is given to this run's clients only.
    key: str
    pid: int
    # where `pid` is valid: process_namespace()
    namespace: str
    # whether it took the place of a controller that was killed, and answers the same trainer
    takes_over: bool = False


HEARTBEAT_MS = 30_000
"""Each side of a connection sends something so often."""

SILENCE_MS = 120_000
"""A peer that is gone without a word is noticed after this time."""

Answer = tuple[Response, Sequence[bytes | memoryview]]
"""A response, and the frames of the batch if it is a `BatchReady`."""

Handler = Callable[[Request], Awaitable[Answer]]
