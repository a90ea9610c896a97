"""One push: pause all servers, give them the new weights and version, resume them whatever happens.

    begin_push (controller) -> pause -> begin -> buckets -> end -> resume -> pushed (controller: version bumped, admission reopens)

What counts is the pause window, in which no server produces a token: what can be done before it is done before it (the first bucket is
gathered, a `disk` checkpoint is written). A server that fails is left out, the bucket it failed at is sent again to the others, and the push
goes on: a bucket received twice is the same bucket. At the end every server that is left holds exactly one version.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from areal_lite.config import TrainConfig
from areal_lite.rollout.server import ServerInfo
from areal_lite.sync.broadcast import WeightGroup
from areal_lite.sync.control import ServerError, post_each
from areal_lite.sync.disk import WeightFolder
from areal_lite.sync.readback import Readback

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
        self.folder = WeightFolder(Path(config.sync.disk_path or run_dir / "weights"), Path(config.model))
        self.group: WeightGroup | None = None
        self.servers: list[ServerInfo] | None = None  # those of the last push; None before the first
        self.names = itertools.count()

    def push(self, version: int) -> PushReport | None:
        """Bring all servers to `version`; None on ranks other than 0. Raises RuntimeError when no server is left."""
        buckets = self.engine.hf_weights(self.config.sync.bucket_mb * 2**20)
        if self.controller is None:
            for _ in buckets:
                pass
            return None
        started = time.time()
        answer = self.controller.begin_push(version)
        report = PushReport(version, drained=answer["drained"])
        members = _Members(answer["servers"], report, self.timeout_s)
        readback = Readback()
        buckets = readback.watch(_measured(buckets, report))
        if self.config.sync.transport == "disk":
            self._push_folder(members, buckets, report)
        else:
            self._push_broadcast(members, buckets, report)
        if self.config.sync.verify:
            report.verified = readback.verify(members.servers, self.timeout_s)
        self.controller.pushed(version, report.failed)
        self.servers = members.servers
        report.total_s = time.time() - started
        return report

    def close(self) -> None:
        """Remove what was written for the servers."""
        self.folder.close()

    def _push_folder(self, members: _Members, buckets: Iterable[Bucket], report: PushReport) -> None:
        folder = self.folder.write(buckets, report.version)
        with _Paused(members, self.config.rollout.interrupt, report) as paused:
            # Only because they are paused: otherwise this call would wait until every running request has finished.
            body = {"model_path": str(folder), "weight_version": str(report.version), "flush_cache": paused.flush_cache}
            members.post("/update_weights_from_disk", body)
        self.folder.keep_only(folder)

    def _push_broadcast(self, members: _Members, buckets: Iterable[Bucket], report: PushReport) -> None:
        members.each(self._ensure_group)
        stream = _with_last(buckets)
        first = next(stream)
        with _Paused(members, self.config.rollout.interrupt, report) as paused:
            members.post("/begin_weight_update", {})
            for bucket, last in itertools.chain([first], stream):
                version = str(report.version) if last else None

                def send(servers: list[ServerInfo]) -> None:
                    self._ensure_group(servers)
                    self.group.send(bucket, version=version, flush_cache=paused.flush_cache and last)

                members.each(send)
            members.post("/end_weight_update", {})

    def _ensure_group(self, servers: list[ServerInfo]) -> None:
        if self.group is not None and self.group.servers == servers:
            return
        old, self.group = self.group, None
        if old is not None:
            old.abandon(servers)
        self.group = WeightGroup(servers, self.backend, self.timeout_s, f"areal_lite_{next(self.names)}")


class _Members:
    """The servers that take part in this push; one that fails leaves it, and stays paused: its weights may be half new."""

    def __init__(self, servers: list[ServerInfo], report: PushReport, timeout_s: float):
        self.servers, self.report, self.timeout_s = list(servers), report, timeout_s

    def post(self, path: str, body: dict) -> None:
        """POST once to each; exactly those that fail leave. Raises RuntimeError when none is left."""
        self._leave(post_each(self.servers, path, body, self.timeout_s))

    def each(self, action: Callable[[list[ServerInfo]], object]) -> None:
        """Do `action`, which may be repeated, with all servers, and again without the one that failed, until it succeeds."""
        while True:
            try:
                action(list(self.servers))
                return
            except ServerError as error:
                self._leave([error])

    def _leave(self, errors: list[ServerError]) -> None:
        for error in errors:
            log.warning("push of version %d goes on without %s", self.report.version, error)
            self.report.failed.append(error.server.name)
        self.servers = [server for server in self.servers if server.name not in self.report.failed]
        if not self.servers:
            failed = ", ".join(self.report.failed) or "none announced"
            raise RuntimeError(f"push of version {self.report.version}: no server is left ({failed})")


class _Paused:
    """The pause window. Leaving it resumes every member, also after an error: a paused server holds its requests for ever."""

    def __init__(self, members: _Members, interrupt: str, report: PushReport):
        self.members, self.report = members, report
        # With nothing in flight (`none`) the modes differ only in whether the prefix cache may be flushed.
        self.mode = "retract" if interrupt == "none" else interrupt
        self.flush_cache = self.mode != "in_place"  # flushing under running requests would kill the scheduler

    def __enter__(self) -> _Paused:
        self.report.paused_at = time.time()
        self.members.post("/pause_generation", {"mode": self.mode})
        return self

    def __exit__(self, *_: object) -> None:
        for error in post_each(self.members.servers, "/continue_generation", {}, self.members.timeout_s):
            log.warning("could not resume: %s", error)
        self.report.pause_s = time.time() - self.report.paused_at


def _with_last(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket with whether it is the last one."""
    iterator = iter(buckets)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def _measured(buckets: Iterable[Bucket], report: PushReport) -> Iterator[Bucket]:
    for bucket in buckets:
        report.megabytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket) / 2**20
        yield bucket
