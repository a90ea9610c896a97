"""Pushes of the trainer's weights to the servers; docs/servers.md has a chart of the calls.

* Only the pause window costs generation, so whatever can be done before it is done before it.
* A server that fails leaves the push. The others take the same bucket again, which is harmless,
  and the push goes on.
* After a push every remaining server, if any, holds exactly one version. A server that starts or
  comes back is stale until `push_stale` brings it to the current version: before the first batch,
  too. A transport that does not work thus ends a run before its first episode.
"""

import logging
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import save_file

from areal_lite.config import TrainConfig
from areal_lite.extensions import TRANSPORTS, load
from areal_lite.run_dir.paths import WEIGHTS_DIR
from areal_lite.servers.blocking import post
from areal_lite.servers.client import ServerUnreachable
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.weight_group import CollectiveError
from areal_lite.system.processes import process_namespace, steady_time
from areal_lite.weights.broadcast import Broadcast, pack_adapters
from areal_lite.weights.recipients import FROM_DISK, Bucket, PushRecipients, PushReport
from areal_lite.weights.turns import Turns

log = logging.getLogger(__name__)

BUCKET_BYTES = 512 * 2**20
"""Weights sent at a time."""

# What `sync.verify` compares: tensors with one name on both sides, norms and a projection that
# SGLang does not fuse. Of a matrix only the first rows, which travel as JSON: all of them would be
# 1.3 GB for a 7B model.
_VERIFIED = ("norm.weight", "0.mlp.down_proj.weight")
_VERIFIED_ROWS = 8


class Transport(Protocol):
    """How the weights of one trainer get to its servers."""

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], *, apart: bool
    ) -> None:
        """Give the weights to the servers, and pause them as shortly as can be.

        apart: these are only the servers that missed a push; connections with others stay.
        """
        ...

    def close(self, servers: list[ServerInfo]) -> None:
        """Leave the servers, and remove everything that was written for them."""
        ...


def choose_transport(config: TrainConfig) -> str:
    """Return the transport of a run whose trainer is, or will be, on this machine."""
    if config.sync.transport != "auto":
        return config.sync.transport
    memory = load(TRANSPORTS, "memory")
    return "memory" if memory and memory.fits(config) else "distributed"


def make_transport(config: TrainConfig, device: torch.device, run_dir: Path) -> Transport:
    """Make the transport of a run. `device`: of the trainer's weights."""
    chosen = choose_transport(config)
    log.info("the servers get weights by %s", chosen)
    backend = "nccl" if device.type == "cuda" else "gloo"
    match chosen:
        case "distributed":
            return Broadcast(config, backend)
        case "adapters":
            pack = partial(pack_adapters, config.trainer.lora, backend == "gloo")
            return Broadcast(config, backend, pack)
        case "disk":
            root = Path(config.sync.disk_path or run_dir / WEIGHTS_DIR)
            return Folder(root, Path(config.model), run_dir)
        case _:
            if (transport := load(TRANSPORTS, chosen)) is None:
                raise ValueError(
                    f"sync.transport={chosen} is not installed here: use sync.transport=distributed"
                )
            return transport(config, backend)


class Folder:
    """The checkpoints of one trainer, in a folder of its own under `root`.

    `model` is the folder of the initial checkpoint, for its config.json. What a trainer that is
    killed leaves, the next one of its run on this machine removes, by the beginning of the name.
    """

    def __init__(self, root: Path, model: Path, run_dir: Path):
        self._root = root
        self._model = model
        of_run = zlib.crc32(f"{process_namespace()} {run_dir.resolve()}".encode())
        self._prefix = f"areal_lite-{of_run:08x}-"
        self._own: Path | None = None

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], *, apart: bool
    ) -> None:
        version = recipients.report.version
        folder = self.write(buckets, version)
        with recipients.paused():
            # The servers are paused: otherwise this call would wait until every running request
            # has finished.
            body = {"model_path": str(folder), "weight_version": str(version)}
            recipients.post(FROM_DISK, body | {"flush_cache": recipients.flush_cache})
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def write(self, buckets: Iterable[Bucket], version: int) -> Path:
        """Write all weights and return their folder. The servers still generate meanwhile."""
        if self._own is None:
            self._root.mkdir(parents=True, exist_ok=True)
            for left in self._root.glob(f"{self._prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
            self._own = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._root)).resolve()
        folder = self._own / f"v{version}"
        folder.mkdir(exist_ok=True)  # it exists when a version is pushed again
        shutil.copy(self._model / "config.json", folder / "config.json")
        for number, bucket in enumerate(buckets):
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
            save_file(tensors, folder / f"model-{number:05d}.safetensors")
        return folder

    def close(self, servers: list[ServerInfo]) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


class Pusher:
    """The pushes of one trainer rank. Every rank makes the same calls in the same order.

    Ranks other than 0 only give their shards of `weights`, a WeightStream, to rank 0.
    """

    def __init__(self, weights):
        self._weights = weights
        self.servers: list[ServerInfo] = []  # with the weights of the last push

    def push_all(self, version: int) -> PushReport | None:
        """Push the current weights to every server, as `version`."""
        for _ in self._weights.buckets(BUCKET_BYTES):
            pass

    def push_stale(self, version: int) -> PushReport | None:
        """Push the current weights again, only to servers that do not have `version` yet."""
        self.push_all(version)

    def skip(self, step: int) -> None:
        """Push nothing after `step` steps: only the controller learns that they are complete."""

    def close(self) -> None:
        """Leave the servers, and remove everything that was written for them."""


def make_pusher(
    policy, controller, config: TrainConfig, run_dir: Path, turns: Turns | None = None
) -> Pusher:
    """Build the pusher of this rank, for the weights of `policy`.

    controller: the ControllerClient on rank 0, None on other ranks. turns: after which servers wake
    with a push.
    """
    weights = policy.adapters if config.sync.transport == "adapters" else policy.weights
    if controller is None:
        return Pusher(weights)
    return WeightPusher(weights, policy.device, controller, config, run_dir, turns)


class WeightPusher(Pusher):
    """The pusher of trainer rank 0; device: of the weights, controller: the ControllerClient."""

    def __init__(
        self,
        weights,
        device: torch.device,
        controller,
        config: TrainConfig,
        run_dir: Path,
        turns: Turns | None = None,
    ):
        super().__init__(weights)
        self._turns = turns or Turns(config, run_dir)
        self._controller = controller
        self._config = config
        self._transport = make_transport(config, device, run_dir)
        self._works = False  # some server has taken a push

    def push_all(self, version: int) -> PushReport:
        recipients = self._push(version, apart=False)
        self.servers = recipients.servers
        if not recipients.servers:
            log.warning("version %d reached no server", version)
        elif recipients.report.failed:
            log.warning("version %d reached only %s", version, recipients.names)
        return recipients.report

    def push_stale(self, version: int) -> PushReport:
        # The servers of the first push take the next ones together.
        recipients = self._push(version, apart=bool(self.servers))
        self.servers, report = [*self.servers, *recipients.servers], recipients.report
        what = "version %d was pushed to stale servers only: %s, in %.1f s"
        log.info(what, version, recipients.names, report.total_s)
        return report

    def skip(self, step: int) -> None:
        self._controller.step_done(step)

    def close(self) -> None:
        self._transport.close(self.servers)

    def _push(self, version: int, *, apart: bool) -> PushRecipients:
        """Push to the servers that the controller names; `apart`: those that missed a push.

        Raises ValueError if servers that are up refuse the first push, or if it fails with none to
        blame.
        """
        started = steady_time()
        answer = self._controller.begin_push(version)
        drain_s = steady_time() - started if answer.drained else 0.0
        parked_at, self._turns.parked_at = self._turns.parked_at, 0.0
        report = PushReport(
            version=version, paused_at=parked_at, drained=answer.drained, drain_s=drain_s
        )
        config = self._config
        recipients = PushRecipients(
            answer.servers,
            report,
            config.sync,
            config.rollout.interrupt,
            parked=config.server.takes_turns,
        )
        try:
            sent = self._transfer(recipients, apart=apart)
        except CollectiveError as error:
            raise self._broken(recipients, error) from error
        refusals = [e for e in recipients.errors if not isinstance(e, ServerUnreachable)]
        self._works |= bool(recipients.servers)
        if refusals and not self._works:
            raise self._broken(recipients, refusals[0])
        if config.sync.verify:
            verified = partial(verify, sent=sent, timeout_s=config.sync.timeout_s)
            report.verified = recipients.sum_each(verified)
        self._controller.pushed(version, report.failed)
        report.total_s = steady_time() - started
        return recipients

    def _broken(self, recipients: PushRecipients, cause: Exception) -> ValueError:
        names = ", ".join([server.name for server in recipients.servers] + recipients.report.failed)
        return ValueError(
            f"sync.transport={choose_transport(self._config)} cannot bring version "
            f"{recipients.report.version} to {names}: {cause}; see their logs, or choose another "
            "sync.transport"
        )

    def _transfer(self, recipients: PushRecipients, *, apart: bool = False) -> Bucket:
        """Give the weights to the servers, and return the tensors to verify them with."""
        verified: Bucket = []

        def watched() -> Iterator[Bucket]:
            for bucket in self._weights.buckets(BUCKET_BYTES):
                recipients.report.megabytes += sum(tensor.nbytes for _, tensor in bucket) / 2**20
                if self._config.sync.verify:
                    verified.extend(one for one in bucket if one[0].endswith(_VERIFIED))
                yield bucket

        self._transport.transfer(recipients, watched(), apart=apart)
        return verified


def verify(server: ServerInfo, sent: Bucket, timeout_s: float) -> int:
    """Compare tensors bit by bit with those on `server`, and return how many were compared.

    Raises ValueError if the server has other weights or cannot read them back.
    """
    compared = 0
    for name, tensor in sent:
        if tensor.dim() > 1 and server.tensor_parallel > 1:
            continue  # each rank of the server holds a slice
        rows = len(tensor) if tensor.dim() == 1 else min(_VERIFIED_ROWS, len(tensor))
        body = {"name": name, "truncate_size": rows}
        answer = post(server, "/get_weights_by_name", body, timeout_s)
        if answer is None:
            raise ValueError(
                f"server {server.name} cannot read {name} back:"
                " sync.verify needs servers started with AREAL_LITE_READBACK=1"
            )
        theirs = torch.from_numpy(np.asarray(answer, np.float32)).to(tensor.dtype)
        ours = tensor[:rows].detach().cpu().contiguous()
        if not torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8)):
            raise ValueError(
                f"server {server.name}: {name} differs from the trainer's after the push"
            )
        compared += 1
    return compared
