"""A worker that dies after it has sent something, without reading what it was sent."""

import asyncio
from types import SimpleNamespace

import pytest
import uvloop

from areal_lite.workers import process
from areal_lite.workers.pool import WorkerProcess


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_its_end_is_noticed_after_its_last_words(run) -> None:
    """Its socket is then in error and has something to read, which uvloop reports once."""

    async def live_and_die() -> WorkerProcess:
        ends = []
        template = SimpleNamespace(fork=lambda *given: ends.extend(end.dup() for end in given[:2]))
        pool = SimpleNamespace(
            template=template,
            name="fake",
            workers=[],
            sequential=True,
            silence_s=60.0,
            on_retired=lambda *_, **__: None,
            dispatch=lambda: None,
        )
        worker = WorkerProcess(pool)  # pyright: ignore[reportArgumentType]
        control, frames = ends
        await asyncio.sleep(0.05)  # both are watched
        worker._write(process.Cancel(number=1))
        frames.sendall(process.frame(process.Ready(facts={"said": "at last"})))
        control.sendall(process.STATUS.pack(3))
        for end in ends:
            end.close()
        await asyncio.wait_for(worker.gone, 10)
        return worker

    worker = run(live_and_die())
    assert worker.facts == {"said": "at last"} and worker.status == 3
