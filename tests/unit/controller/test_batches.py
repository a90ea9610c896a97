"""The batches of a controller without servers: what a step waits for, and what it reports."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from areal_lite.config import TrainConfig
from areal_lite.controller import buffer as queue
from areal_lite.controller.protocol import Resync
from areal_lite.controller.service import Controller
from areal_lite.controller.sources import Dependencies
from areal_lite.servers.registry import UNTRUSTED, ServerInfo
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Group
from tests.unit.controller.one_source import one_source
from tests.unit.controller.test_queue import group


class RecordedStore:
    """A store that only records the calls: (method, arguments, durable)."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def submit(self, method, *args, durable=False) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        self.calls.append((method.__name__, args, durable))
        return future


def controller_with(*running: int, clock, store=None, replay: int = 0) -> Controller:
    """Return a controller of batches of two, in which these groups run and none may pass one."""
    config = TrainConfig(model="m", run_dir="r")
    config.trainer.batch_groups, config.buffer.window = 2, 1
    config.buffer.replay.capacity = replay
    parts = Dependencies(
        sources=one_source(config, SimpleNamespace(num_prompts=1)),
        tokenizer=SimpleNamespace(eos_ids=(1,), vocab_size=98),
        store=store or RecordedStore(),
        clock=clock,
    )
    controller = Controller(config, parts, client=None, announced=list)
    for group_id in running:
        controller.dispatcher.running.add(group_id)
        controller.dispatcher.admission.on_admitted()
    return controller


async def pull_while(controller: Controller, event) -> dict:
    """Pull the first batch, which is not assigned until `event()` happens; return the facts."""
    reply = asyncio.ensure_future(controller.pull(0, 0, 1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reply.done()
    event()
    return (await asyncio.wait_for(reply, 5))[0]


def test_a_whole_batch_waits_for_a_straggler_and_reports_for_how_long() -> None:
    times = iter([100.0, 103.0, 107.5])

    async def run() -> dict:
        controller = controller_with(0, 3, clock=lambda: next(times))
        for group_id in (1, 2):
            controller.batches.put(group(group_id, [0]))

        def finish() -> None:
            controller.dispatcher.running.remove(0)
            controller.batches.put(group(0, [0]))

        return await pull_while(controller, finish)

    info = asyncio.run(run())
    assert (info["straggler_wait_s"], info["wait_s"], info["passed_groups"]) == (4.5, 7.5, 0)


def test_a_straggler_that_is_filtered_lets_the_batch_go() -> None:
    """No group is delivered then, so nothing else would wake the trainer's request."""

    async def run() -> dict:
        controller = controller_with(0, 3, clock=lambda: 0.0)
        for group_id in (1, 2):
            controller.batches.put(group(group_id, [0]))
        return await pull_while(controller, lambda: controller.dispatcher._reject(0))

    assert asyncio.run(run())["queue_depth"] == 0


def test_a_batch_of_replay_is_described_without_a_look_at_all_tokens_of_the_buffer() -> None:
    """These are gigabytes in a large buffer, and the event loop would wait for them."""

    async def run() -> dict:
        controller = controller_with(clock=lambda: 0.0, replay=4)
        for number, rewards in enumerate(([1.0, 0.0], [1.0, 1.0], [1.0])):
            lengths = range(1, len(rewards) + 1)
            controller.batches.put(group(number, *([0] * n for n in lengths), rewards=rewards))
        *_, ((trajectory,),) = controller.batches.queue  # of a prompt that cannot be drawn
        trajectory.tokens = None
        return (await controller.pull(0, 0, 1))[0]

    info = asyncio.run(run())
    assert info["replay_distinct_correct"] == pytest.approx(4 / 3)
    assert (info["replay_prompts"], info["replay_trajectories"]) == (2, 5)


def test_the_first_step_of_a_resumed_run_waits_for_a_server_that_was_taken_over() -> None:
    """The evaluation before it needs one, and the next push comes after the step."""

    async def run() -> dict:
        controller = controller_with(clock=lambda: 0.0)
        server = ServerInfo(name="a", url="http://a:1", api_key=None, tensor_parallel=1, pid=1)
        fleet = controller.fleet
        fleet.taken_over.add(server)
        fleet.router.update_servers([server])
        fleet.router.record_version(server, UNTRUSTED)
        for group_id in (0, 1):
            controller.batches.put(group(group_id, [0]))
        with pytest.raises(Resync):
            await controller.pull(0, 0, 1)

        def resync() -> None:
            fleet.begin_push(0, [server])
            fleet.finish_push(0, [])
            controller.batches.notify()

        reply = asyncio.ensure_future(controller.pull(0, 0, 1, resyncs=1))
        await asyncio.sleep(0)
        assert not reply.done()
        resync()
        return (await asyncio.wait_for(reply, 5))[0]

    assert asyncio.run(run())["trajectories"] == 2


def test_the_end_of_a_step_is_on_disk_before_the_trainer_goes_on() -> None:
    store = RecordedStore()

    async def run() -> None:
        controller = controller_with(clock=lambda: 0.0, store=store)
        for group_id in (0, 1):
            controller.dispatcher.admission.on_admitted()
            controller.dispatcher.admission.on_accepted()
            controller.batches.put(group(group_id, [0]))
        await controller.pull(0, 0, 1)
        assert store.calls == [("assign", ([0, 1], 0), False)]
        store.calls.clear()
        await controller.step_done(1)

    asyncio.run(run())
    assert ("use", ([0, 1], 0, []), True) in store.calls
    assert {name for name, _, durable in store.calls if not durable} == {"set_totals"}


def test_routes_are_joined_while_the_event_loop_goes_on(monkeypatch) -> None:
    """Those of a large mixture take seconds, in which requests must not wait."""
    begun, others_ran, join = threading.Event(), threading.Event(), queue.join_routes

    def slow(*args):
        begun.set()
        assert others_ran.wait(5), "nothing else ran meanwhile"
        return join(*args)

    monkeypatch.setattr(queue, "join_routes", slow)

    async def run() -> TrainBatch:
        controller = controller_with(clock=lambda: 0.0)
        controller.config.algo.routing_replay = True
        for group_id in (0, 1):
            controller.batches.put(routed(group_id))
        reply = asyncio.ensure_future(controller.pull(0, 0, 1))
        while not begun.is_set():
            await asyncio.sleep(0)
        others_ran.set()
        return TrainBatch.from_frames((await reply)[1])

    batch = asyncio.run(run())
    for group_id in (0, 1):
        assert (
            batch.routes[np.repeat(batch.group_ids, batch.lengths) == group_id] == group_id
        ).all()


def routed(group_id: int) -> Group:
    """Return a group whose tokens all have the route `group_id` in each of two layers."""
    made = group(group_id, [0], [0, 0])
    traces = [
        replace(t, routes=np.full((len(t.tokens), 2, 1), group_id, np.uint8))
        for t in made.trajectories
    ]
    return replace(made, trajectories=traces)
