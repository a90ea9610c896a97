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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from areal_lite.config import TrainConfig
from areal_lite.run_dir.paths import WEIGHTS_DIR
from areal_lite.servers.adapted_weights import ADAPTERS
from areal_lite.servers.client import ServersFailed
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.clock import steady_time
from areal_lite.system.network import address_towards
from areal_lite.weights.broadcast import BroadcastGroup, flatten
from areal_lite.weights.disk import WeightFolder
from areal_lite.weights.memory import WeightMemory
from areal_lite.weights.readback import Readback
from areal_lite.weights.recipients import PauseWindow, PushRecipients, PushReport
from areal_lite.weights.transport import choose_transport

log = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]
_FROM_DISK = "/update_weights_from_disk"


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
    weights = policy.adapters if config.sync.adapters_only else policy.weights
    if not weights.takes_part:
        return NullPusher()
    if controller is None:
        return WeightContributor(weights, config)
    pusher = WeightPusher(weights, policy.device, controller, config, run_dir)
    log.info("the servers get weights by %s", pusher.transport)
    if servers_stale:
        pusher.servers = []
    return pusher


class NullPusher(Pusher):
    """The pusher of a rank that holds no part of the weights that are pushed."""


class WeightContributor(Pusher):
    """The pusher of a rank that only gives its shards of the weights to rank 0."""

    def __init__(self, weights, config: TrainConfig):
        self._weights = weights
        self._bucket_bytes = config.sync.bucket_mb * 2**20

    def contribute(self) -> None:
        for _ in self._weights.buckets(self._bucket_bytes):
            pass


class WeightPusher(Pusher):
    """The pusher of trainer rank 0.

    `transport` is how the weights get to the servers.

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
        self.transport = choose_transport(config)
        self._folder = WeightFolder(
            Path(config.sync.disk_path or run_dir / WEIGHTS_DIR), Path(config.model)
        )
        self._memory = WeightMemory()
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._group = BroadcastGroup(self._backend, self._timeout_s)
        lora = config.trainer.lora
        self._load_format = (
            f"{ADAPTERS}:{lora.alpha / lora.rank}"
            if config.sync.adapters_only
            else "flattened_bucket"
        )

    def push_all(self, version: int) -> PushReport:
        started = steady_time()
        recipients = self._begin(version)
        readback = self._transfer(recipients, self._group)
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
        # The group of the other servers stays as it is.
        group = BroadcastGroup(self._backend, self._timeout_s)
        readback = self._transfer(recipients, group)
        recipients.run_together(group.leave)
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
        self._folder.close()
        self._memory.close()
        # A group that torch destroys at the end would wait for its servers.
        with suppress(ServersFailed):
            self._group.leave(self.servers or [])

    def _begin(self, version: int) -> PushRecipients:
        asked = steady_time()
        answer = self._controller.begin_push(version)
        drain_s = steady_time() - asked if answer.drained else 0.0
        report = PushReport(version=version, drained=answer.drained, drain_s=drain_s)
        return PushRecipients(answer.servers, report, self._timeout_s)

    def _transfer(self, recipients: PushRecipients, group: BroadcastGroup) -> Readback:
        """Give the weights to the servers, and return the tensors to verify them with."""
        readback = Readback()
        buckets = self._weights.buckets(self._config.sync.bucket_mb * 2**20)
        buckets = readback.watch(_measured(buckets, recipients.report))
        match self.transport:
            case "memory":
                self._transfer_memory(recipients, buckets)
            case "disk":
                self._transfer_folder(recipients, buckets)
            case _:
                self._transfer_buckets(recipients, buckets, group)
        return readback

    def _transfer_memory(self, recipients: PushRecipients, buckets: Iterable[Bucket]) -> None:
        staged = self._memory.write(buckets, recipients.report.version)
        address = address_towards(server.url for server in recipients.servers)
        recipients.post(_FROM_DISK, staged.check_request(self._memory.source(address)))
        with self._pause(recipients, between_steps=True) as window:
            body = staged.activate_request() | {"flush_cache": window.flush_cache}
            window.take(_FROM_DISK, body)

    def _transfer_folder(self, recipients: PushRecipients, buckets: Iterable[Bucket]) -> None:
        version = recipients.report.version
        folder = self._folder.write(buckets, version)
        with self._pause(recipients) as window:
            # The servers are paused: otherwise this call would wait until every running request
            # has finished.
            body = {
                "model_path": str(folder),
                "weight_version": str(version),
                "flush_cache": window.flush_cache,
            }
            recipients.post(_FROM_DISK, body)
        self._folder.keep_only(folder)

    def _transfer_buckets(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], group: BroadcastGroup
    ) -> None:
        recipients.run_together(group.join)
        stream = with_last(map(flatten, buckets))
        first = next(stream)  # gathered and flattened before the pause
        with self._pause(recipients) as window:
            recipients.post("/begin_weight_update", {})
            with ThreadPoolExecutor(1) as wire:
                sending: Future[None] | None = None
                # Each round gathers a bucket while another is on the wire.
                for bucket, last in chain([first], stream):
                    send = partial(
                        group.send,
                        bucket,
                        version=str(recipients.report.version) if last else None,
                        flush_cache=window.flush_cache and last,
                        load_format=self._load_format,
                    )
                    if sending:
                        sending.result()
                    sending = wire.submit(recipients.run_together, send)
                assert sending is not None
                sending.result()
            recipients.post("/end_weight_update", {})

    def _pause(self, recipients: PushRecipients, *, between_steps: bool = False) -> PauseWindow:
        # A server has no reason to be slow before the pause. One that hangs must not hold up the
        # others for as long as a transfer may take.
        timeout_s = min(self._timeout_s, self._config.server.health_timeout_s)
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


def with_last(buckets: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    iterator = iter(buckets)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def _measured(buckets: Iterable[Bucket], report: PushReport) -> Iterator[Bucket]:
    """Pass buckets on and add their sizes to `report.megabytes`."""
    for bucket in buckets:
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        report.megabytes += size / 2**20
        yield bucket
