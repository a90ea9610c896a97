"""The controller process: `python -m areal_lite.controller.service RUN_DIR [trainer-runs]`.

It reads `<run_dir>/config.yaml`, finds the servers by their announcements in the run directory, and
answers the trainer until `Finish`, SIGTERM or an error. With `trainer-runs` it takes the place of a
controller that was killed (batches.py).
"""

import asyncio
import gc
import itertools
import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvloop

from areal_lite.config import TrainConfig, load_config
from areal_lite.controller.controller import Controller
from areal_lite.controller.metrics import status_line
from areal_lite.controller.protocol import MessageServer, run_until
from areal_lite.controller.sources import Dependencies, Source, open_sources
from areal_lite.data.prompts import load_eval_sets
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.run_dir.controller_status import remove_status, write_status
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.resume import TRAINER_RUNS, lock_controller, start_version
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.client import SGLangClient
from areal_lite.servers.registry import announced_servers, mark_unhealthy
from areal_lite.system import heartbeat
from areal_lite.system.clock import steady_time
from areal_lite.system.network import LOOPBACK, NODE, allow_many_connections, listen_address
from areal_lite.system.processes import die_with_parent

log = logging.getLogger(__name__)
_STATUS_INTERVAL_S = 1.0
_LOG_EVERY = 10  # statuses


async def serve(run_dir: Path, trainer_runs: bool = False) -> None:
    """Build the controller and run it until `Finish` or SIGTERM. Raises the error of any part."""
    config = load_config(run_dir)
    async with open_sources(config) as sources:
        await _control(config, run_dir, sources, trainer_runs)


async def _control(
    config: TrainConfig, run_dir: Path, sources: Mapping[str, Source], trainer_runs: bool
) -> None:
    """Run the controller with these data sources."""
    store = Store(run_dir / STORE_FILE)
    store_thread = StoreThread(store)
    client = SGLangClient(config.sync.health_timeout_s)
    dependencies = Dependencies(
        sources=sources,
        tokenizer=Tokenizer(config.model),
        store=store_thread,
        clock=steady_time,
        eval_sets=load_eval_sets(config.eval.sets, config.data, config.model),
    )
    controller = Controller(
        config,
        dependencies,
        client,
        partial(announced_servers, run_dir),
        partial(mark_unhealthy, run_dir),
    )
    host = listen_address(NODE) if config.server.host == NODE else LOOPBACK[0]
    server = MessageServer(run_dir, controller.handle, host, trainer_runs)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.finished.set)
    error: BaseException | None = None
    try:
        controller.recover(store, start_version(run_dir), trainer_runs)
        status = _publish_status(controller, run_dir)
        await run_until(server.finished, controller.run(), server.serve(), status)
    except BaseExceptionGroup as group:
        error = _first_error(group)
        raise error from group
    finally:
        await server.close(error=f"the controller failed: {error}" if error else None)
        await client.close()
        await store_thread.close()
        remove_status(run_dir)


async def _publish_status(controller: Controller, run_dir: Path) -> None:
    """Publish the controller's status: to its file every second, to the log every ten."""
    heartbeat.enter("answering the trainer")
    for number in itertools.count(1):
        await asyncio.sleep(_STATUS_INTERVAL_S)
        heartbeat.beat()
        status = controller.status()
        with suppress(OSError):  # a full disk must not end a run because of this file
            await asyncio.to_thread(write_status, run_dir, status)
        await controller.save_totals()
        if number % _LOG_EVERY == 0:
            log.info("%s", status_line(status))


def _first_error(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """Run the service and return the exit status."""
    die_with_parent()
    heartbeat.start("loading the prompts and the store")
    allow_many_connections()
    # Ten thousand requests in flight are a million live objects, and a scan of the garbage
    # collector stops the event loop for all of them. None of them is in a cycle: the collector
    # is here for the tracebacks of errors, which may be.
    gc.set_threshold(5_000_000, 5, 5)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run_dir = Path(sys.argv[1])
    try:
        with lock_controller(run_dir):
            uvloop.run(serve(run_dir, trainer_runs=sys.argv[2:] == [TRAINER_RUNS]))
    except (ValueError, RuntimeError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
