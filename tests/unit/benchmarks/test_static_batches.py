"""Static batches: no answer begins before the batch before it has ended."""

import asyncio
import random

import pytest

from benchmarks import static_batches

SIZE = 4


def test_a_batch_begins_when_the_one_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    rng = random.Random(0)

    async def single_turn(episode: int) -> int:
        events.append(("begin", episode))
        for _ in range(rng.randrange(1, 20)):
            await asyncio.sleep(0)
        events.append(("end", episode))
        return episode

    async def play() -> list[int]:
        workflow = static_batches.StaticBatches(SIZE)
        return await asyncio.gather(*(workflow(episode) for episode in range(5 * SIZE)))

    monkeypatch.setattr(static_batches, "single_turn", single_turn)
    assert asyncio.run(play()) == list(range(5 * SIZE))
    for number in range(5):
        batch = events[2 * SIZE * number : 2 * SIZE * (number + 1)]
        assert {episode // SIZE for _, episode in batch} == {number}
        assert [kind for kind, _ in batch[:SIZE]] == ["begin"] * SIZE


def test_a_failed_answer_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def single_turn(episode: int) -> int:
        raise ValueError(episode)

    async def play() -> list[int | BaseException]:
        workflow = static_batches.StaticBatches(1)
        async with asyncio.timeout(10):  # the next batch would wait without end
            return await asyncio.gather(*(workflow(e) for e in range(3)), return_exceptions=True)

    monkeypatch.setattr(static_batches, "single_turn", single_turn)
    assert [type(result) for result in asyncio.run(play())] == [ValueError] * 3
