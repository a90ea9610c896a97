"""One push: pause all servers, give them the new weights and version, resume them whatever happens.

    begin_push (controller) -> pause -> begin -> buckets -> end -> resume -> pushed (controller: version bumped, admission reopens)

What counts is the pause window, in which no server produces a token: what can be done before it is done before it (the first bucket is
gathered and flattened, a `disk` checkpoint is written). A server that fails is left out, the bucket it failed at is sent again to the others, and the push
goes on: a bucket received twice is the same bucket. At the end every server that is left holds exactly one version; there may be none
left, then whoever comes back catches up: a push of the same version once more, to those servers only.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal_lite.config import TrainConfig
from areal_lite.servers.control import ServerError, ServersFailed, post_each
from areal_lite.servers.registry import ServerInfo
from areal_lite.weights.broadcast import WeightGroup, flatten
from areal_lite.weights.disk import WeightFolder
from areal_lite.weights.readback import Readback

log = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]


@dataclass
class PushReport:
    """What a push cost: seconds, wall-clock time of the pause, MiB sent. `failed` names the servers that were left out."""

    version: int
    paused_at: float = 0.0
    pause_s: float = 0.0
    total_s: float = 0.0
    megabytes: float = 0.0
    drained: int = 0
    verified: int = 0
    failed: list[str] = field(default_factory=list)


class WeightPusher:
    """Pushes from trainer rank 0; the other ranks that hold a part of the weights call `push` too, to take part in gathering them."""

    def __init__(self, engine, controller, config: TrainConfig, run_dir: Path):
        """`controller` is the ControllerClient of rank 0 and None elsewhere."""
        self.engine, self.controller, self.config = engine, controller, config
        self.timeout_s = config.sync.timeout_s
        self.backend = "nccl" if engine.device.type == "cuda" else "gloo"
        self.folder = WeightFolder(
            Path(config.sync.disk_path or run_dir / "weights"), Path(config.model)
        )
        self.group: WeightGroup | None = None
        self.servers: list[ServerInfo] | None = (
            None  # those that have the version pushed last; None before the first push
        )
        self.version: int | None = None  # the one pushed last
        self.names = (
            f"areal_lite_{secrets.token_hex(8)}" for _ in itertools.count()
        )  # servers may know groups of a trainer before us

    def push(self, version: int) -> PushReport | None:
        """Bring all servers to `version`, or, if that was pushed last, those that are behind. None on ranks other than 0."""
        buckets = self.engine.hf_weights(self.config.sync.bucket_mb * 2**20)
        if self.controller is None:
            for _ in buckets:
                pass
            return None
        started = time.time()
        answer = self.controller.begin_push(version)
        report = PushReport(version=version, drained=answer.drained)
        members = _Members(answer.servers, report, self.timeout_s)
        readback = Readback()
        buckets = readback.watch(_measured(buckets, report))
        again = version == self.version
        of_all, self.group = self.group, None if again else self.group
        if self.config.sync.transport == "disk":
            self._push_folder(members, buckets, report)
        else:
            self._push_broadcast(members, buckets, report)
        if again:
            members.each(self._leave_group)
            self.group = of_all
        if self.config.sync.verify:
            report.verified = members.each_alone(
                lambda server: readback.verify(server, self.timeout_s)
            )
        self.controller.pushed(version, report.failed)
        self.servers = [*(self.servers if again else ()), *members.servers]
        self.version = version
        report.total_s = time.time() - started
        if again or report.failed or not members.servers:
            names = ", ".join(server.name for server in members.servers) or "no server"
            log.warning(
                "version %d was pushed %sto %s in %.1f s",
                version,
                "again, " if again else "",
                names,
                report.total_s,
            )
        return report

    def close(self) -> None:
        """Remove what was written for the servers."""
        self.folder.close()

    def _push_folder(
        self, members: _Members, buckets: Iterable[Bucket], report: PushReport
    ) -> None:
        folder = self.folder.write(buckets, report.version)
        with self._paused(members, report) as paused:
            # Only because they are paused: otherwise this call would wait until every running request has finished.
            body = {
                "model_path": str(folder),
                "weight_version": str(report.version),
                "flush_cache": paused.flush_cache,
            }
            members.post("/update_weights_from_disk", body)
        self.folder.keep_only(folder)

    def _push_broadcast(
        self, members: _Members, buckets: Iterable[Bucket], report: PushReport
    ) -> None:
        members.each(self._ensure_group)
        stream = _with_last(map(flatten, buckets))
        first = next(stream)
        with self._paused(members, report) as paused:
            members.post("/begin_weight_update", {})
            for bucket, last in itertools.chain([first], stream):
                version = str(report.version) if last else None

                def send(servers: list[ServerInfo]) -> None:
                    self._ensure_group(servers)
                    self.group.send(
                        bucket, version=version, flush_cache=paused.flush_cache and last
                    )

                members.each(send)
            members.post("/end_weight_update", {})

    def _paused(self, members: _Members, report: PushReport) -> _Paused:
        # Before the pause a server has no excuse yet: one that hangs must not hold up the others for as long as a transfer may take.
        return _Paused(
            members,
            self.config.rollout.interrupt,
            report,
            min(self.timeout_s, self.config.server.health_timeout_s),
        )

    def _ensure_group(self, servers: list[ServerInfo]) -> None:
        if self.group is None or self.group.servers != servers:
            self._leave_group(servers)
            self.group = WeightGroup(servers, self.backend, self.timeout_s, next(self.names))

    def _leave_group(self, survivors: list[ServerInfo]) -> None:
        old, self.group = self.group, None
        if old is not None:
            old.abandon(survivors)


class _Members:
    """The servers that take part in this push; one that fails leaves it, and stays paused: its weights may be half new."""

    def __init__(self, servers: list[ServerInfo], report: PushReport, timeout_s: float):
        self.servers, self.report, self.timeout_s = list(servers), report, timeout_s

    def post(self, path: str, body: dict, timeout_s: float | None = None) -> None:
        """POST once to each; exactly those that fail leave."""
        self._leave(post_each(self.servers, path, body, timeout_s or self.timeout_s))

    def each(self, action: Callable[[list[ServerInfo]], object]) -> None:
        """Do `action`, which may be repeated, with all servers, and again without those that failed, until it succeeds or none is left."""
        while self.servers:
            try:
                action(list(self.servers))
                return
            except ServersFailed as failed:
                self._leave(failed.errors)

    def each_alone(self, count: Callable[[ServerInfo], int]) -> int:
        """The sum of `count` over the servers; one that fails leaves."""
        total = 0
        for server in list(self.servers):
            try:
                total += count(server)
            except ServerError as error:
                self._leave([error])
        return total

    def _leave(self, errors: list[ServerError]) -> None:
        for error in errors:
            log.warning("push of version %d goes on without %s", self.report.version, error)
            self.report.failed.append(error.server.name)
        self.servers = [server for server in self.servers if server.name not in self.report.failed]


class _Paused:
    """The pause window. Leaving it resumes every member, also after an error: a paused server holds its requests for ever."""

    def __init__(self, members: _Members, interrupt: str, report: PushReport, timeout_s: float):
        self.members, self.report, self.timeout_s = members, report, timeout_s
        # With nothing in flight (`none`) the modes differ only in whether the prefix cache may be flushed.
        self.mode = "retract" if interrupt == "none" else interrupt
        self.flush_cache = (
            self.mode != "in_place"
        )  # flushing under running requests would kill the scheduler

    def __enter__(self) -> _Paused:
        self.report.paused_at = time.time()
        self.members.post("/pause_generation", {"mode": self.mode}, self.timeout_s)
        return self

    def __exit__(self, *_: object) -> None:
        self.members.post("/continue_generation", {}, self.timeout_s)
        self.report.pause_s = time.time() - self.report.paused_at


def _with_last(buckets: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each bucket with whether it is the last one."""
    iterator = iter(buckets)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def _measured(buckets: Iterable[Bucket], report: PushReport) -> Iterator[Bucket]:
    for bucket in buckets:
        report.megabytes += (
            sum(tensor.numel() * tensor.element_size() for _, tensor in bucket) / 2**20
        )
        yield bucket
