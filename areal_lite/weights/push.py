"""Pushes of the trainer's weights to the servers.

    begin_push   the controller names the servers, and stops sending requests if the mode says so
    pause        the servers stop generating: the pause window begins
    transfer     the servers take the weights and their version
    resume       the servers continue: the pause window ends
    pushed       the controller learns which servers have the version, and opens admission for it

* Only the pause window costs generation. Whatever can be done before it is done before it: the
  first bucket is gathered and flattened, a `disk` checkpoint is written, the weights in `memory`
  are written and checked.
* A server that fails leaves the push. The others take the same bucket again, which is harmless,
  and the push goes on.
* After a push every remaining server holds exactly one version. Perhaps no server remains. A
  server that comes back is stale until `push_stale` brings it to the current version.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from areal_lite.config import TrainConfig
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.clock import steady_time
from areal_lite.weights.readback import Readback
from areal_lite.weights.recipients import Bucket, PauseWindow, PushRecipients, PushReport
from areal_lite.weights.transport import BUCKET_BYTES, make_transport

log = logging.getLogger(__name__)


class Pusher:
    """The pushes of one trainer rank. Every rank makes the same calls in the same order.

    `servers` are those that have the version of the last push; None before the first one, when
    all announced servers have version 0.
    """

    servers: list[ServerInfo] | None = None

    def push_all(self, version: int) -> PushReport | None:
        """Push the current weights to every server, as `version`."""
        self.contribute()

    def push_stale(self, version: int) -> PushReport | None:
        """Push the current weights again, only to servers that do not have `version` yet."""
        self.contribute()

    def skip(self, step: int) -> None:
        """Push nothing after `step` steps: only the controller learns that they are complete."""

    def contribute(self) -> None:
        """Give this rank's shards of the weights to rank 0."""

    def close(self) -> None:
        """Leave the servers, and remove everything that was written for them."""


def make_pusher(
    policy, controller, config: TrainConfig, run_dir: Path, *, servers_stale: bool
) -> Pusher:
    """Build the pusher of this rank.

    Args:
        policy: the Policy whose weights are pushed.
        controller: the ControllerClient on rank 0, None on other ranks.
        servers_stale: whether the trainer resumes at a later version than the servers start with.
    """
    weights = policy.adapters if config.sync.transport == "adapters" else policy.weights
    if not weights.takes_part:
        return NullPusher()
    if controller is None:
        return WeightContributor(weights, config)
    pusher = WeightPusher(weights, policy.device, controller, config, run_dir)
    if servers_stale:
        pusher.servers = []
    return pusher


class NullPusher(Pusher):
    """The pusher of a rank that holds no part of the weights that are pushed."""


class WeightContributor(Pusher):
    """The pusher of a rank that only gives its shards of the weights to rank 0."""

    def __init__(self, weights, config: TrainConfig):
        self._weights = weights
        self._bucket_bytes = BUCKET_BYTES

    def contribute(self) -> None:
        for _ in self._weights.buckets(self._bucket_bytes):
            pass


class WeightPusher(Pusher):
    """The pusher of trainer rank 0.

    Args:
        weights: the WeightStream that is pushed, which may be one of adapters.
        device: of the weights.
        controller: the ControllerClient.
    """

    def __init__(
        self, weights, device: torch.device, controller, config: TrainConfig, run_dir: Path
    ):
        self._weights = weights
        self._controller = controller
        self._config = config
        self._timeout_s = config.sync.timeout_s
        self._transport = make_transport(config, device, run_dir)

    def push_all(self, version: int) -> PushReport:
        started = steady_time()
        recipients = self._begin(version)
        readback = self._transfer(recipients)
        self._finish(recipients, readback, started)
        self.servers = recipients.servers
        if not recipients.servers:
            log.warning("version %d reached no server", version)
        elif recipients.report.failed:
            log.warning("version %d reached only %s", version, recipients.names)
        return recipients.report

    def push_stale(self, version: int) -> PushReport:
        started = steady_time()
        recipients = self._begin(version)
        readback = self._transfer(recipients, apart=True)
        self._finish(recipients, readback, started)
        if self.servers is not None:
            self.servers = [*self.servers, *recipients.servers]
        log.warning(
            "version %d was pushed to stale servers only: %s, in %.1f s",
            version,
            recipients.names,
            recipients.report.total_s,
        )
        return recipients.report

    def skip(self, step: int) -> None:
        self._controller.step_done(step)

    def close(self) -> None:
        self._transport.close(self.servers or [])

    def _begin(self, version: int) -> PushRecipients:
        asked = steady_time()
        answer = self._controller.begin_push(version)
        drain_s = steady_time() - asked if answer.drained else 0.0
        report = PushReport(version=version, drained=answer.drained, drain_s=drain_s)
        return PushRecipients(answer.servers, report, self._timeout_s)

    def _transfer(self, recipients: PushRecipients, *, apart: bool = False) -> Readback:
        """Give the weights to the servers, and return the tensors to verify them with."""
        readback = Readback()
        buckets = self._weights.buckets(BUCKET_BYTES)
        buckets = readback.watch(_measured(buckets, recipients.report))
        self._transport.transfer(recipients, buckets, self._pause, apart=apart)
        return readback

    def _pause(self, recipients: PushRecipients, *, between_steps: bool = False) -> PauseWindow:
        # A server has no reason to be slow before the pause. One that hangs must not hold up the
        # others for as long as a transfer may take.
        timeout_s = self._config.sync.health_timeout_s
        interrupt = self._config.rollout.interrupt
        return PauseWindow(recipients, interrupt, timeout_s, between_steps)

    def _finish(self, recipients: PushRecipients, readback: Readback, started: float) -> None:
        report = recipients.report
        if self._config.sync.verify:
            report.verified = recipients.sum_each(
                lambda server: readback.verify(server, self._timeout_s)
            )
        self._controller.pushed(report.version, report.failed)
        report.total_s = steady_time() - started


def _measured(buckets: Iterable[Bucket], report: PushReport) -> Iterator[Bucket]:
    """Pass buckets on and add their sizes to `report.megabytes`."""
    for bucket in buckets:
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        report.megabytes += size / 2**20
        yield bucket
