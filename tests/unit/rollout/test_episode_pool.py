"""Episodes in real worker processes: code that hangs, blocks, crashes and lies costs its own."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from areal_lite.config import DataConfig, RewardConfig, RolloutConfig, TrainConfig
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Rollout
from areal_lite.rollout.pool import EpisodePool, needs_workers
from areal_lite.rollout.worker import EpisodeWorker, Play
from areal_lite.servers.client import GenerationChunk, SamplingParams
from areal_lite.servers.fleet import Completion
from areal_lite.trajectory import Group
from areal_lite.workers.pool import TaskFailed, WorkerProcess
from tests.unit.rollout.episodes import save_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
INFO = {"level": 3, "names": {"ü": [None, 0.5, 2**63]}}

WORKFLOWS = (
    f"TOOLS, INFO = {TOOLS}, {INFO}"
    '''
import asyncio, ctypes, json, os, signal, subprocess, sys, threading, time
from areal_lite.data.prompts import Prompt
from areal_lite.rollout.episode import Transcript, grouped

class Wordless(Exception):
    def __str__(self):
        raise SystemExit("no")

async def exits():
    sys.exit(0)

async def helper_is_cancelled():
    helper = asyncio.ensure_future(asyncio.sleep(60))
    helper.cancel()
    await helper

def naps(seconds):
    time.sleep(seconds)

async def act(episode):
    """Sample twice, and do between what the answer of the prompt says."""
    transcript = Transcript(episode)
    await transcript.sample()
    what = episode.prompt.answer
    if what == "wait":
        await asyncio.Event().wait()
    if what == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if what == "block":
        time.sleep(3600)
    if what == "nap":
        time.sleep(6)
    if what == "spin":
        while True:
            pass
    if what == "segfault":
        ctypes.string_at(0)
    if what == "os._exit":
        os._exit(0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sys.exit":
        sys.exit(0)
    if what == "child exits":
        await asyncio.gather(exits(), asyncio.sleep(0))
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "generator":
        raise GeneratorExit
    if what == "cancelled":
        await helper_is_cancelled()
    if what == "cancels itself":
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
    if what == "surrogate":
        raise ValueError("unknown tool " + json.loads('{"tool": "\\\\ud83d"}')["tool"])
    if what == "wordless":
        raise Wordless
    if what == "endless text":
        raise ValueError("x" * 50_000_000)
    if what == "fork":
        os.fork()
    if what == "fork and wait":
        if not os.fork():
            time.sleep(3600)
    if what == "flood":
        while True:
            print("x" * 10_000)
    if what == "memory":
        bytearray(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2 // 3)
    if what == "thread exits":
        await asyncio.to_thread(naps, 0.01)
        threading.Thread(target=os._exit, args=[1]).start()
        await asyncio.sleep(60)
    if what == "leaves":
        left.append(asyncio.create_task(leave(transcript, 0.3)))
        left.append(asyncio.create_task(leave(transcript, 0.0)))
        await asyncio.sleep(0)
        return transcript.trajectory()
    if what == "right":
        return transcript.trajectory(len(transcript.tokens) == 4)
    if what == "words":
        trajectory = transcript.trajectory()
        trajectory.server = 5
        return trajectory
    while what == "ask for ever":
        await Transcript(episode, [5, len(transcript.tokens)]).sample()
        transcript.add_tokens([5])
    if what == "nothing":
        return None
    await transcript.sample()
    return transcript.trajectory()

left = []

async def leave(transcript, seconds):
    """Sample after so many seconds, and note how that ends."""
    await asyncio.sleep(seconds)
    try:
        await transcript.sample()
    except ValueError as error:
        with open(__file__ + ".left", "a") as file:
            file.write(f"{error}\\n")

def feedback(prompt, answers):
    """Block a thread."""
    if prompt.answer == "feedback":
        time.sleep(3600)
    return 1.0

@grouped
async def together(episodes):
    return [await act(episode) for episode in episodes]

async def rewarded_by_row(episode):
    transcript = Transcript(episode)
    await transcript.sample()
    prompt = episode.prompt
    return transcript.trajectory(float(prompt.info == INFO and prompt.tools == TOOLS))

class Pid:
    """Write what it does to a file."""
    def __init__(self, file):
        self.file = file
    def note(self, what):
        with open(self.file, "a") as file:
            file.write(f"{what} {os.getpid()}\\n")
    async def start(self, config):
        self.note("start")
    async def close(self):
        self.note("close")
    async def __call__(self, episode):
        self.note("play")
        return await act(episode)

class Numbers:
    """Prompts of the user: number 3 cannot be had."""
    num_prompts, num_too_long = 5, 1
    def __getitem__(self, index):
        if index == 3:
            os._exit(7)
        if index == 4:
            return Prompt(prompt_id="n4", tokens=[5], answer=4, text="x")
        return Prompt(prompt_id=f"n{index}", tokens=[5, index], answer=str(os.getpid()), text="x")

def numbers(config, tokenizer, split):
    return Numbers()

def odd(group):
    if group.group_id == 9:
        raise KeyError("no")
    return "odd" if group.group_id % 2 else None
'''
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Path:
    """A model's tokenizer, beside a module `workflows`. Fails a test that leaves a process."""
    (tmp_path / "workflows.py").write_text(WORKFLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    save_chat_tokenizer(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    yield tmp_path
    assert "workflows" not in sys.modules, "code of the user was imported here"
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    for process in left:
        process.kill()
    assert not left, left


def pool_of(model: Path, workflow: str = "workflows:act", **rollout) -> EpisodePool:
    args = {"workers": 1, "episode_timeout_s": 1.5, **rollout}
    config = TrainConfig(
        model=str(model),
        rollout=RolloutConfig(workflow=workflow, **args),
        reward=RewardConfig(function="areal_lite.rewards.exact:exact_reward"),
    )
    return EpisodePool(config, ["train", "eval"])


class Servers:
    """Completions of two tokens. `asked` has the prompts that were completed."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.asked: list[list[int]] = []
        self.delay_s = delay_s

    async def complete(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        self.asked.append(tokens.tolist())
        await asyncio.sleep(self.delay_s)
        chunk = GenerationChunk(
            tokens=np.array([7, 8], np.int32),
            logprobs=np.array([-0.5, -0.25], np.float32),
            versions=np.full(2, len(self.asked), np.int32),
            finish_reason="length",
        )
        return Completion([chunk], 1, "length")


def process_of(worker: WorkerProcess) -> psutil.Process:
    """Return the process that has the worker's file open. Its keeper has not."""
    file = os.fstat(worker._file.fileno()).st_ino
    for process in psutil.Process().children(recursive=True):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            if descriptor.exists() and descriptor.stat().st_ino == file:
                return process
    raise AssertionError("no process has the file")


async def outcome(
    pool: EpisodePool, what: str, servers: Servers, number: int = 0, samples: Sequence[int] = (0,)
) -> list[Rollout] | TaskFailed:
    prompt = Prompt(prompt_id="p", tokens=[5, number], answer=what, text="hi")
    play = Play(number, list(samples), prompt, SamplingParams(50, 1.0, (0,)))
    try:
        return await pool.play(what, play, [servers.complete] * len(samples))
    except TaskFailed as error:
        return error


def test_a_workflow_gets_the_whole_row(model: Path) -> None:
    async def main() -> None:
        row = {"tools": TOOLS, "info": INFO}
        prompt = Prompt(prompt_id="p", tokens=[5], answer="", text="hi", **row)
        play = Play(0, [0], prompt, SamplingParams(50, 1.0, (0,)))
        async with pool_of(model, "workflows:rewarded_by_row") as pool:
            (played,) = await pool.play("row", play, [Servers().complete])
        assert played.traces[0].reward == 1.0

    asyncio.run(main())


def test_a_row_that_no_message_can_carry_costs_its_episode(model: Path) -> None:
    """JSON has integers of any size, as in the schema of a tool."""

    async def main() -> None:
        tools = [{"type": "function", "function": {"name": "f", "maximum": 2**64}}]
        prompt = Prompt(prompt_id="p", tokens=[5], answer="", text="hi", tools=tools)
        play = Play(0, [0], prompt, SamplingParams(50, 1.0, (0,)))
        async with pool_of(model) as pool:
            with pytest.raises(TaskFailed, match="cannot be encoded"):
                await pool.play("row", play, [Servers().complete])
            assert not (await outcome(pool, "fine", Servers()))[0].failure

    asyncio.run(main())


def test_an_episode_is_the_same_as_here(model: Path) -> None:
    async def main() -> None:
        servers = Servers()
        async with pool_of(model) as pool:
            ((played,),) = [await outcome(pool, "fine", servers)]
        assert servers.asked == [[5, 0], [5, 0, 7, 8]]
        assert not played.failure, played
        (trace,) = played.traces
        trace.check()
        assert trace.tokens.tolist() == [5, 0, 7, 8, 7, 8] and trace.tokens.dtype == np.int32
        assert trace.loss_mask.tolist() == [False] * 2 + [True] * 4
        assert trace.behavior_logprobs.tolist() == [0, 0, -0.5, -0.25, -0.5, -0.25]
        assert trace.versions.tolist() == [-1, -1, 1, 1, 2, 2]
        assert (trace.reward, trace.requests, trace.finish_reason) == (None, 2, "length")
        tokenizer = Tokenizer(model)
        assert played.texts == [("hi", tokenizer.decode([7, 8, 7, 8]))]
        assert played.answer == tokenizer.decode([7, 8, 7, 8])

    asyncio.run(main())


RAISES = {
    "cancels itself": "CancelledError",
    "sys.exit": "SystemExit: 0",
    "child exits": "SystemExit: 0",
    "interrupt": "KeyboardInterrupt",
    "generator": "GeneratorExit",
    "cancelled": "CancelledError",
    "surrogate": "ValueError: unknown tool ?",
    "wordless": "its description raises SystemExit",
    "endless text": "ValueError: xxx",
    "memory": "MemoryError",
    "nothing": "not a Trajectory",
}
ENDS = {
    "wait": ("timeout", "workflows.py:27 in act"),
    "stubborn": ("timeout", "workflows.py:31 in act"),
    "block": ("timeout", "workflows.py:35 in act"),
    "spin": ("timeout", "in act"),
    "segfault": ("died", "in act"),
    "os._exit": ("died", "status 0"),
    "killed": ("died", "status 137"),
    "flood": ("timeout", "in act"),
    "thread exits": ("died", "status 1"),
}


async def among_others(pool: EpisodePool, what: str) -> str:
    """Return the failure of an episode while others play, and see that nothing happens to these."""
    asked = [Servers(0.3) for _ in range(5)]
    others = [outcome(pool, "fine", servers, n) for n, servers in enumerate(asked, 1)]
    failed, *played = await asyncio.gather(outcome(pool, what, Servers()), *others)
    for number, (one, servers) in enumerate(zip(played, asked), 1):
        assert isinstance(one, list) and not one[0].failure, one
        assert servers.asked == [[5, number], [5, number, 7, 8]], "a token was sampled twice"
    return str(failed) if isinstance(failed, TaskFailed) else failed[0].failure


def test_what_an_episode_raises_is_its_failure(model: Path) -> None:
    async def main() -> None:
        async with pool_of(model) as pool:
            for what, expected in RAISES.items():
                failure = await among_others(pool, what)
                assert isinstance(failure, str) and expected in failure, failure
                assert len(failure) <= 500 and failure.encode()

    asyncio.run(main())


@pytest.mark.parametrize("what", ENDS)
def test_an_episode_that_ends_its_process_costs_itself_only(model: Path, what: str, capfd) -> None:
    async def main() -> None:
        async with pool_of(model) as pool:
            failure = await among_others(pool, what)
            assert failure.startswith(ENDS[what][0]) and ENDS[what][1] in failure, failure

    asyncio.run(main())
    assert len(capfd.readouterr().err) < 4_000_000


@pytest.mark.parametrize("what", ["fork", "fork and wait"])
def test_a_copy_of_the_process_does_nothing(model: Path, what: str) -> None:
    async def main() -> None:
        async with pool_of(model) as pool:
            for _ in range(3):
                ((played,),) = [await outcome(pool, what, servers := Servers())]
                assert not played.failure and len(servers.asked) == 2

    asyncio.run(main())


def test_an_unknown_cause_costs_an_episode_only_if_it_comes_again(model: Path) -> None:
    """A process that somebody kills between two steps takes no episode with it."""

    async def main() -> None:
        async with pool_of(model, episode_timeout_s=20) as pool:
            servers = Servers(1.0)
            playing = asyncio.create_task(outcome(pool, "fine", servers))
            await asyncio.sleep(0.3)
            process_of(pool.workers[0]).kill()
            (played,) = await playing
            assert not played.failure and len(servers.asked) == 2

    asyncio.run(main())


def test_a_plain_function_that_blocks_costs_its_episode_only(model: Path) -> None:
    async def main() -> None:
        pool = pool_of(
            model,
            "areal_lite.workflows.multi_turn:MultiTurn",
            workflow_args={"feedback": "workflows:feedback"},
        )
        async with pool:
            hung, fine = await asyncio.gather(
                outcome(pool, "feedback", Servers()), outcome(pool, "fine", Servers(2.0), 1)
            )
            assert isinstance(hung, TaskFailed) and hung.reason == "timeout"
            assert isinstance(fine, list) and fine[0].traces[0].reward == 1.0

    asyncio.run(main())


def test_a_grouped_workflow_gets_all_episodes(model: Path) -> None:
    async def main() -> None:
        async with pool_of(model, "workflows:together") as pool:
            assert pool.facts["grouped"]
            played = await outcome(pool, "fine", Servers(), samples=[3, 4])
            assert [p.traces[0].sample_index for p in played] == [3, 4]
            failed = await outcome(pool, "block", Servers(), samples=[0, 1])
            assert isinstance(failed, TaskFailed) and failed.reason == "timeout"

    asyncio.run(main())


def test_a_workflow_is_started_and_closed_in_each_process(model: Path) -> None:
    file = model / "notes"

    async def main() -> None:
        args = {"workflow_args": {"file": str(file)}, "workers": 2}
        async with pool_of(model, "workflows:Pid", **args) as pool:
            await asyncio.gather(*(outcome(pool, "fine", Servers(0.1), n) for n in range(4)))

    asyncio.run(main())
    notes = [line.split() for line in file.read_text().splitlines()]
    pids = {pid for _, pid in notes}
    assert len(pids) == 2 and str(os.getpid()) not in pids
    for what in ("start", "close"):
        assert sorted(pid for event, pid in notes if event == what) == sorted(pids)


def test_filters_and_prompts_of_the_user_run_elsewhere(model: Path) -> None:
    config = TrainConfig(
        model=str(model),
        data=DataConfig(source="workflows:numbers"),
        rollout=RolloutConfig(filters=["zero_variance", "workflows:odd"], workers=1),
        reward=RewardConfig(function="areal_lite.rewards.exact:exact_reward"),
    )
    assert needs_workers(config)

    async def main() -> None:
        async with EpisodePool(config, ["train"]) as pool:
            assert pool.facts["prompts"] == {"train": [5, 1]}
            prompt = await pool.prompt("train", 2)
            assert (prompt.prompt_id, prompt.tokens) == ("n2", [5, 2])
            assert prompt.answer != str(os.getpid())
            with pytest.raises(TaskFailed, match="status 7"):
                await pool.prompt("train", 3)
            with pytest.raises(TaskFailed, match="bad_result: .* `str`, got `int`.*answer"):
                await pool.prompt("train", 4)
            groups = [Group(group_id=n, prompt_id="p", size=1) for n in range(2)]
            assert [await pool.judge("workflows:odd", g) for g in groups] == [None, "odd"]
            with pytest.raises(TaskFailed, match="KeyError: 'no'"):
                await pool.judge("workflows:odd", Group(group_id=9, prompt_id="p", size=1))

    asyncio.run(main())


def test_only_what_is_ours_needs_no_worker(model: Path) -> None:
    config = TrainConfig(model=str(model))
    assert not needs_workers(config)
    config.rollout.filters = ["zero_variance"]
    assert not needs_workers(config)


def test_a_workflow_that_cannot_be_used_is_named(model: Path) -> None:
    async def start(workflow: str) -> None:
        async with pool_of(model, workflow):
            pass

    with pytest.raises(ValueError, match="no callable 'missing'"):
        asyncio.run(start("workflows:missing"))
    with pytest.raises(ValueError, match="must be an `async def`"):
        asyncio.run(start("workflows:naps"))


def test_workers_end_with_the_process_that_owns_them(model: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from tests.unit.rollout.test_episode_pool import Servers, outcome, pool_of
async def main():
    async with pool_of(Path({str(model)!r}), episode_timeout_s=600) as pool:
        await asyncio.gather(outcome(pool, "fine", Servers()), outcome(pool, "block", Servers()))
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:
        process = psutil.Process(owner.pid)
        while len(children := process.children(recursive=True)) < 3:
            time.sleep(0.02)
            assert owner.poll() is None
        time.sleep(1)
    finally:
        owner.kill()
        owner.wait()
    _, left = psutil.wait_procs(children, timeout=10)
    for child in left:
        child.kill()
    assert not left


def test_a_blocked_process_does_not_hold_up_the_others(model: Path) -> None:
    """They go on elsewhere long before it is killed; if it comes back, its episode counts."""

    async def main() -> None:
        async with pool_of(model, episode_timeout_s=60) as pool:
            await outcome(pool, "fine", Servers())
            servers = Servers(0.2)
            slow = asyncio.create_task(outcome(pool, "nap", Servers()))
            blocked = asyncio.create_task(outcome(pool, "block", Servers(0.2)))
            await asyncio.sleep(0.4)
            (fine,) = await outcome(pool, "fine", servers, 1)
            assert len(servers.asked) == 2 and not blocked.done()
            (napped,) = await slow
            assert not fine.failure and not napped.failure
            blocked.cancel()

    asyncio.run(main())


def test_what_servers_take_is_not_the_time_of_an_episode(model: Path) -> None:
    async def main() -> None:
        async with pool_of(model, episode_timeout_s=1.0) as pool:
            (played,) = await outcome(pool, "fine", Servers(2.5))
            assert not played.failure

    asyncio.run(main())


def test_an_episode_that_never_stops_asking_fails(model: Path, monkeypatch) -> None:
    monkeypatch.setattr("areal_lite.workers.pool._MOST_QUESTIONS", 50)

    async def main() -> None:
        async with pool_of(model) as pool:
            servers = Servers()
            (failure,) = await outcome(pool, "ask for ever", servers)
            assert "has asked 50 questions" in failure.failure and len(servers.asked) == 50

    asyncio.run(main())


def test_what_an_episode_leaves_behind_costs_no_other(model: Path) -> None:
    """A completion that is asked for after the end, or that comes then, is an error there."""
    notes = model / "workflows.py.left"

    async def main() -> None:
        async with pool_of(model, episode_timeout_s=20) as pool:
            (worker,) = pool.workers
            slow = asyncio.create_task(outcome(pool, "fine", Servers(1.0), 1))
            (played,) = await outcome(pool, "leaves", Servers(0.2))
            assert not played.failure and not (await slow)[0].failure
            assert pool.workers == [worker], "its process has ended"
            assert notes.read_text().splitlines() == ["its episode has ended"] * 2

    asyncio.run(main())


def test_a_result_that_cannot_be_used_costs_its_episode(model: Path) -> None:
    async def main() -> None:
        async with pool_of(model) as pool:
            (played,) = await outcome(pool, "right", Servers())
            assert played.traces[0].reward == 1.0, "a bool is a reward"
            failed = await outcome(pool, "words", Servers())
            assert isinstance(failed, TaskFailed) and failed.reason == "bad_result"
            assert "workflows:act: Expected `str`, got `int`" in str(failed)

    asyncio.run(main())


def test_what_a_late_worker_kept_does_not_wait_for_a_successor_that_cannot_start(
    model: Path, monkeypatch
) -> None:
    monkeypatch.setattr("areal_lite.workers.pool._MOST_MOVED", 0)

    async def main() -> None:
        pool = pool_of(model, episode_timeout_s=4)
        await pool.start()

        async def cannot_start() -> None:
            raise ValueError("no memory")

        pool._start_worker = cannot_start
        calls = [outcome(pool, "block", Servers()), outcome(pool, "fine", Servers(60.0), 1)]
        async with asyncio.timeout(30):
            blocked, kept = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(blocked, TaskFailed) and "no memory" in str(kept)
        await pool.close()

    asyncio.run(main())


def test_a_worker_whose_pipe_has_ended_gets_nothing_more(model: Path) -> None:
    """The pipe of a process that dies may end before its exit is known.

    Another one that dies at that time must not send it its tasks, and must be gone all the same.
    """

    async def main() -> None:
        pool = pool_of(model, workers=2, episode_timeout_s=20)
        await pool.start()
        playing = [asyncio.create_task(outcome(pool, "fine", Servers(0.5), n)) for n in (1, 2)]
        await asyncio.sleep(0.2)
        first, second = pool.workers
        silent, killed = process_of(first), process_of(second)
        silent.suspend()
        first._frames.shutdown(socket.SHUT_RD)
        killed.kill()
        async with asyncio.timeout(20):
            await second.gone
            silent.kill()
            for played in await asyncio.gather(*playing):
                assert isinstance(played, list) and not played[0].failure, played
            await pool.close()

    uvloop.run(main())


def test_a_completion_that_is_cancelled_is_not_waited_for_any_more() -> None:
    async def cancel() -> Any:
        worker: Any = object.__new__(EpisodeWorker)
        worker._calls, worker._answers, worker._asking = itertools.count(), {}, Counter([1])
        worker._running = {1: None}
        worker._pipes = SimpleNamespace(send=lambda ask: None)
        params = SamplingParams(1, 1.0, (1,))
        asking = asyncio.create_task(worker._complete(1, 0, np.zeros(1, np.int32), params))
        await asyncio.sleep(0)
        assert len(worker._answers) == 1
        asking.cancel()
        await asyncio.wait([asking])
        return worker

    worker = asyncio.run(cancel())
    assert not worker._answers and worker._asking[1] == 1
