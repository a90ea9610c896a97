"""Rewards of a judge in a run: rollouts that wait for it take no place, and none is worth 0."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from areal_lite.config import TrainConfig
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.sources import Dependencies, judge_facts
from areal_lite.data.prompts import Prompt
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.trajectory import Group
from areal_lite.workflows.judge import Judge, load_rubric
from tests.fake_judge import FakeJudge, said
from tests.unit.controller.one_source import one_source
from tests.unit.controller.test_dispatcher import FakeFleet, FakeWorkflow

SIZE, BATCH = 2, 20
RUBRIC = """---
url: {url}
model: judge
attempts: 2
---
{{prompt}} {{completion}} {{answer}} {{info.level}}
"""


class Prompts:
    num_prompts = 40
    chat = False

    def __getitem__(self, index: int) -> Prompt:
        said = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{index}?"}]
        messages = said if self.chat else ()
        text, info = f"<user>{index}?", {"level": index}
        return Prompt(
            prompt_id=f"p{index}", text=text, answer="!", tokens=[1], messages=messages, info=info
        )


class Unscored(FakeWorkflow):
    """Plays a trace without a reward at once."""

    async def __call__(self, episode):
        return self.trace(episode, None)


async def run(folder: Path, server: FakeJudge, prompts: Prompts) -> tuple[Dispatcher, list[Group]]:
    """Have a judge score a batch, with places for one group."""
    config = TrainConfig(model="m", run_dir="r")
    config.rollout.group_size = config.rollout.max_concurrent = SIZE
    config.trainer.batch_groups = BATCH
    (folder / "rubric.md").write_text(RUBRIC.format(url=server.url))
    thread, delivered, numbers = StoreThread(Store(folder / "store")), [], iter(range(10**6))
    async with Judge(
        load_rubric(str(folder / "rubric.md")), 1, 10.0, folder / "judge.sqlite"
    ) as judge:
        tokenizer: Any = SimpleNamespace(
            eos_ids=(1,), vocab_size=98, decode=lambda _: f"text {next(numbers)}"
        )
        dependencies = Dependencies(
            sources=one_source(config, prompts, judge),
            tokenizer=tokenizer,
            store=thread,
            clock=lambda: 0.0,
            workflow=Unscored(random.Random(0)),
        )
        fleet: Any = FakeFleet()
        dispatcher = Dispatcher(config, dependencies, fleet, delivered.append)
        running = asyncio.create_task(dispatcher.run())
        while len(delivered) < BATCH:
            assert not running.done() and 0 <= dispatcher.in_flight <= SIZE
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])
    await thread.close()
    return dispatcher, delivered


def test_rollouts_that_wait_for_the_judge_take_no_place(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("1"), latency_s=0.5) as server:
            await run(tmp_path, server, Prompts())
        assert server.most > 5 * SIZE
        contents = [body["messages"][0]["content"] for _, body, _ in server.asked]
        level = contents[0].rpartition(" ")[2]
        assert contents[0].startswith(f"<user>{level}? text ")
        assert contents[0].endswith(f" ! {level}")

    asyncio.run(check())


def test_a_judge_with_errors_fails_rollouts_and_never_gives_0(tmp_path) -> None:
    rng = random.Random(1)

    async def check() -> None:
        def answer(_: int) -> web.Response:
            return web.Response(status=500) if rng.random() < 0.4 else said("1")

        async with FakeJudge(answer) as server:
            dispatcher, groups = await run(tmp_path, server, Prompts())
        assert {reward for group in groups for reward in group.rewards} == {1.0}
        assert dispatcher.counts["reward_failures"] > 0
        assert len(server.asked) > BATCH * SIZE
        assert judge_facts(dispatcher.sources)["judge_failed"] > 0

    asyncio.run(check())


def test_a_chat_is_shown_with_its_roles(tmp_path) -> None:
    prompts = Prompts()
    prompts.chat = True

    async def check() -> None:
        async with FakeJudge(lambda _: said("1")) as server:
            await run(tmp_path, server, prompts)
        content = server.asked[0][1]["messages"][0]["content"]
        assert content.startswith("system: Add.\n\nuser: ")

    asyncio.run(check())


def test_the_metrics_of_a_step_are_those_since_the_last_one(tmp_path) -> None:
    (tmp_path / "rubric.md").write_text(RUBRIC.format(url="http://127.0.0.1:1/v1"))
    config = TrainConfig(model="m", run_dir="r")
    judges = [
        Judge(load_rubric(str(tmp_path / "rubric.md")), 1, 1.0, tmp_path / "x") for _ in range(2)
    ]
    sources = {
        str(number): one_source(config, Prompts(), judge)[""]
        for number, judge in enumerate([*judges, judges[0]])
    }
    judges[0].counts.update(calls=3, failed=1, cached=2)
    judges[1].counts.update(calls=1, tokens=40)
    judges[0].seconds, judges[1].seconds = [1.0, 2.0], [6.0]
    facts = judge_facts(sources)
    counts = {"calls": 4, "failed": 1, "cached": 2, "tokens": 40}
    assert facts == pytest.approx(
        {f"judge_{name}": n for name, n in counts.items()}
        | {"judge_p50_s": 2.0, "judge_p99_s": 5.92}
    )
    assert judge_facts(sources)["judge_calls"] == 0
    assert judge_facts(one_source(config, Prompts())) == {}
