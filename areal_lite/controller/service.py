"""TODO docstring."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from functools import partial
from pathlib import Path

import uvloop

from areal_lite.config import load_config
from areal_lite.controller.controller import Controller
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.message_server import MessageServer, run_until
from areal_lite.data.prompts import load_eval_sets, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardPool
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.resume import start_version
from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_thread import StoreThread
from areal_lite.servers.client import SGLangClient
from areal_lite.servers.registry import announced_servers, mark_unhealthy
from areal_lite.system.network import LOOPBACK, NODE, listen_address
from areal_lite.system.processes import die_with_parent

log = logging.getLogger(__name__)


async def serve(run_dir: Path) -> None:
    """Build the real thing from the run directory and run it until `finish`, SIGTERM or an error, which is raised."""
    config = load_config(run_dir)
    tokenizer = Tokenizer(config.model)
    prompts = load_prompts(config.data, config.model, "train")
    eval_prompts = load_prompts(config.data, config.model, "eval") if config.eval.problems else None
    eval_sets = load_eval_sets(config.eval.sets, config.data, config.model)
    rewards = RewardPool(config.reward.function, config.reward.workers, config.reward.timeout_s)
    await rewards.start()
    books = Store(run_dir / STORE_FILE)
    store = StoreThread(books)
    client = SGLangClient(config.server.health_timeout_s)
    parts = Dependencies(
        prompts=prompts,
        eval_prompts=eval_prompts,
        tokenizer=tokenizer,
        rewards=rewards,
        store=store,
        clock=time.time,
        eval_sets=eval_sets,
    )
    controller = Controller(
        config, parts, client, lambda: announced_servers(run_dir), partial(mark_unhealthy, run_dir)
    )
    host = listen_address(NODE) if config.server.host == NODE else LOOPBACK[0]
    wire = MessageServer(run_dir, controller.handle, host)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, wire.finished.set)
    error: BaseException | None = None
    try:
        controller.recover(books, start_version(run_dir))
        await run_until(wire.finished, controller.run(), wire.serve())
    except BaseExceptionGroup as group:
        error = _root(group)
        raise error from group
    finally:
        await wire.close(error=f"the controller failed: {error}" if error else None)
        await client.close()
        await rewards.close()
        await store.close()


def _root(error: BaseException) -> BaseException:
    """The first real error inside of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    die_with_parent()
    # Thousands of requests in flight are many live objects: looking through them again and again costs a third of the time and long pauses.
    gc.set_threshold(100_000, 20, 50)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        uvloop.run(serve(Path(sys.argv[1])))
    except (ValueError, RuntimeError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
