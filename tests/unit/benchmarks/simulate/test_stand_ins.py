"""Virtual time: the order and the times of events, and what it refuses."""

import asyncio
import time

import pytest

from benchmarks.simulate.stand_ins import VirtualLoop, run_virtual


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(wait("late", 3600), wait("early", 0.5), wait("middle", 1800))
        return seen

    started = time.monotonic()
    assert run_virtual(main()) == [("early", 0.5), ("middle", 1800), ("late", 3600)]
    assert time.monotonic() - started < 5


def test_work_takes_no_virtual_time() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0


def test_many_short_sleeps_add_up() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10)


def test_timeouts_and_cancellation_are_those_of_asyncio() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 7


def test_a_wait_without_an_end_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never happens"):
        run_virtual(main())


def test_threads_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no threads"):
        run_virtual(asyncio.to_thread(time.sleep, 0))


def test_each_run_starts_at_zero() -> None:
    async def main() -> float:
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        await asyncio.sleep(3)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == run_virtual(main()) == 3
