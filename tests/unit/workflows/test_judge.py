"""A judge, with a real HTTP server in its place and real workers that read its scores."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from areal_lite.rewards.worker import load_reward_function
from areal_lite.workers.pool import TaskFailed
from areal_lite.workflows import judge
from areal_lite.workflows.judge import Judge, Rubric, read_score
from tests.fake_judge import FakeJudge, said

VALUES = {"prompt": "1+1=", "completion": "It is {answer}.", "answer": "2", "info.level": "easy"}
MODULE = "areal_lite.workflows.judge"
HOW = json.dumps([Rubric(model="", question="").score, {}, 0, 10])
RUBRIC = """---
url: {url}
model: wise
range: [0, 10]
{more}
---
{{prompt}} {{answer}} {{info.level}} {{"json": 1}}
{{completion}}
"""


def judging(folder: Path, server: FakeJudge, more: str = "", timeout_s: float = 10.0) -> Judge:
    text = RUBRIC.format(url=server.url, more=more)
    (folder / "rubric.md").write_text(text, encoding="utf-8-sig")  # as some editors write it
    return load_reward_function(f"{MODULE}:{folder}/rubric.md")(
        1, timeout_s, folder / "judge.sqlite"
    )


async def outcome(judge: Judge, **values: str) -> float | str:
    try:
        return await judge.verdict(VALUES | values, lambda: None)
    except TaskFailed as error:
        return str(error)


def test_it_asks_what_the_rubric_says_and_returns_the_place_in_the_range(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "a-secret")

    async def check() -> None:
        async with FakeJudge(lambda _: said("I say 8/10.")) as server:
            more = "key: JUDGES_KEY\nrequest: {temperature: 0, max_tokens: 9}"
            async with judging(tmp_path, server, more) as judge:
                assert await outcome(judge) == 0.8
        ((_, body, authorization),) = server.asked
        assert authorization == "Bearer a-secret"
        content = '1+1= 2 easy {"json": 1}\nIt is {answer}.'
        assert body == {
            "model": "wise",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 9,
        }

    asyncio.run(check())


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("8", 8),
        ("**Score: 7.5**", 7.5),
        ("Step 1 is right, so 10", 10),
        ("a 9/10", 9),
        ("a 9 / 10.", 9),
        ("From 1-10 I say: 0", 0),
        ("GPT4 gives 3.", 3),
    ],
)
def test_the_score_is_the_last_number(text: str, score: float) -> None:
    assert read_score(text, HOW) == pytest.approx(score / 10)


@pytest.mark.parametrize("text", ["", "no idea", "11", "-1", "score8", "8" * 3000])
def test_a_text_without_a_score_in_the_range_is_no_verdict(text: str) -> None:
    with pytest.raises(ValueError, match="from 0 to 10"):
        read_score(text, HOW)


def test_a_pattern_finds_its_last_match() -> None:
    how = json.dumps([r"score=(\d)", {}, 1, 5])
    assert read_score("score=1 score=3, of 9", how) == 0.5
    assert read_score("rated 4", json.dumps([r"\d", {}, 0, 4])) == 1.0


def test_the_last_of_several_words_may_be_the_score() -> None:
    how = json.dumps(["[0-9]", {"Yes": 1, "no": 0, "c++": 0.5}, 0, 1])
    assert read_score("Not a yes or a no: YES, with 7 doubts", how) == 1.0
    assert read_score("yes, no", how) == 0.0
    with pytest.raises(ValueError, match="no score is from 0 to 1"):
        read_score("nobody knows 1", how)


def test_the_longest_word_counts_and_marks_belong_to_words() -> None:
    how = json.dumps(
        ["[0-9]", {"A": 0.9, "A+": 1, "[[B]]": 0.5, "yes": 0.8, "yes, partly": 0.4}, 0, 1]
    )
    for text, score in (("A+", 1), ("an A.", 0.9), ("So: [[B]]", 0.5), ("Yes, partly", 0.4)):
        assert read_score(text, how) == score


def test_it_asks_again_until_there_is_a_verdict(tmp_path) -> None:
    answers = [
        web.Response(status=500, text="overloaded"),
        said("no number here"),
        said(None),
        web.json_response({"choices": []}),
        web.Response(text="<html>"),
        said("a 6"),
    ]

    async def check() -> None:
        async with FakeJudge(lambda number: answers[number - 1]) as server:
            async with judging(tmp_path, server, "attempts: 6") as judge:
                assert await outcome(judge) == 0.6
                # Tokens and seconds are of the answers that could be read.
                assert judge.counts == {"calls": 6, "failed": 5, "tokens": 21}
                assert len(judge.seconds) == 4 and all(0 < value < 5 for value in judge.seconds)

    asyncio.run(check())


def test_without_a_verdict_there_is_no_reward(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("no number")) as server:
            async with judging(tmp_path, server) as judge:
                failure = await outcome(judge)
                assert isinstance(failure, str)
                assert "no verdict of the judge: " in failure
                assert "'no number'" in failure and len(server.asked) == 4
                server.answer = lambda _: said("5")
                assert await outcome(judge) == 0.5, "a failure is not kept"

    asyncio.run(check())


def test_a_refusal_is_not_asked_again_and_does_not_show_the_key(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JUDGES_KEY", "a-secret")

    async def check() -> None:
        async with FakeJudge(lambda _: web.Response(status=401, text="bad key a-secret")) as server:
            async with judging(tmp_path, server, "key: JUDGES_KEY") as judge:
                failure = await outcome(judge)
        assert "answered 401: bad key ***" in str(failure) and len(server.asked) == 1

    asyncio.run(check())


def test_a_judge_that_is_slow_or_gone_fails_with_a_reason(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("5"), latency_s=5.0) as server:
            async with judging(tmp_path, server, "attempts: 2", timeout_s=0.05) as judge:
                failure = await outcome(judge)
                assert "timeout: " in str(failure) and "reward.timeout_s=0.05" in str(failure)
        async with judging(tmp_path, server) as judge:
            assert "Cannot connect" in str(await outcome(judge))

    asyncio.run(check())


def test_only_a_judge_that_asks_for_it_is_left_alone(tmp_path) -> None:
    busy = web.Response(status=429, headers={"Retry-After": "0.4"}, text="busy")

    async def check() -> None:
        async with FakeJudge(lambda number: busy if number == 1 else said("5")) as server:
            async with judging(tmp_path, server) as judge:
                assert await outcome(judge) == 0.5
                first, second = (at for at, *_ in server.asked)
                assert second - first >= 0.4
                await asyncio.gather(*(outcome(judge, completion=str(n)) for n in range(4)))
                assert server.asked[-1][0] - server.asked[2][0] < 0.4

    asyncio.run(check())


def test_equal_answers_and_a_resumed_run_do_not_ask_again(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("5"), latency_s=0.05) as server:
            async with judging(tmp_path, server) as judge:
                assert await asyncio.gather(*(outcome(judge) for _ in range(5))) == [0.5] * 5
                assert len(server.asked) == 1
                assert judge.counts["cached"] == 4
            async with judging(tmp_path, server) as judge:
                assert await outcome(judge) == 0.5 and len(server.asked) == 1
                assert await outcome(judge, completion="another") == 0.5
                assert len(server.asked) == 2
            async with judging(tmp_path, server, "score: '(5)'") as judge:
                await outcome(judge)
                assert len(server.asked) == 3, "another pattern may read another score"

    asyncio.run(check())


def test_requests_keep_to_the_limits(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("5"), latency_s=0.05) as server:
            begun: list[int] = []
            async with judging(tmp_path, server, "concurrency: 3") as judge:
                asking = [
                    judge.verdict(VALUES | {"completion": str(n)}, lambda n=n: begun.append(n))
                    for n in range(9)
                ]
                rewards = asyncio.gather(*asking)
                while not begun:
                    await asyncio.sleep(0)
                assert len(begun) == 3, "the others wait for their turn"
                assert await rewards == [0.5] * 9 and server.most == 3
        async with FakeJudge(lambda _: said("5")) as server:
            async with judging(tmp_path, server, "per_minute: 1200") as judge:
                await asyncio.gather(*(outcome(judge, completion=f"b{n}") for n in range(5)))
        times = [at for at, *_ in server.asked]
        assert times[-1] - times[0] >= 0.19

    asyncio.run(check())


def test_a_pattern_that_hangs_costs_its_sample(tmp_path) -> None:
    answers = [said("a" * 60 + "b"), said("aaa")]

    async def check() -> None:
        async with FakeJudge(lambda number: answers[number - 1]) as server:
            more = "score: '(?:a+)+$()'\nattempts: 1"
            async with judging(tmp_path, server, more) as judge:
                failure = await outcome(judge)
                assert "timeout" in str(failure)

    asyncio.run(check())


def test_a_row_without_a_column_of_the_rubric_fails(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("5")) as server:
            async with judging(tmp_path, server) as judge:
                values = {name: v for name, v in VALUES.items() if name != "info.level"}
                with pytest.raises(TaskFailed, match="cannot be filled in: 'info.level'"):
                    await judge.verdict(values, lambda: None)
                assert not server.asked

    asyncio.run(check())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{completion}", "a rubric has settings between two lines of ---"),
        ("---\nurl: u\n---\n{completion}", "missing required field `model`"),
        ("---\nurl: u\nmodel: m\ncolor: red\n---\n{completion}", "unknown field `color`"),
        ("---\nurl: u\nmodel: m\n---\n{prompt}", "the question lacks {completion}"),
        (
            "---\nurl: u\nmodel: m\n---\n{question} {completion}",
            "{question} is unknown: choose from",
        ),
        ("---\nurl: u\nmodel: m\nscore: '('\n---\n{completion}", "unterminated subpattern"),
        ("---\nurl: u\nmodel: m\nrange: [1, 0]\n---\n{completion}", "give the lower end first"),
        ("---\nurl: u\nmodel: m\nattempts: 0\n---\n{completion}", "`int` >= 1"),
        ("---\nurl: u\nmodel: m\nkey: NO_SUCH_KEY\n---\n{completion}", "set this environment"),
        ("---\n[\n---\n{completion}", "a rubric has settings"),
        ("---\nurl: u\nmodel: m\nrange: [0, .inf]\n---\n{completion}", "give the lower end first"),
        ("---\nurl: u\nmodel: m\nrange: [.nan, 1]\n---\n{completion}", "give the lower end first"),
        ("---\nurl: u\nmodel: m\nwords: {good: 10}\n---\n{completion}", "words={'good': 10.0}"),
        ("---\nurl: u\nmodel: m\nwords: {yes: 1}\n---\n{completion}", "yes and no need quotes"),
        ("---\nmodel: m\n---\n{completion}", "give either the url"),
        ("---\nurl: u\nmodel: m\nserver: {}\n---\n{completion}", "give either the url"),
        ("---\nmodel: m\nserver: {size: 1}\n---\n{completion}", "argument 'size'"),
        ("---\nmodel: m\nserver: {host: h}\n---\n{completion}", "argument 'host'"),
        ("---\nmodel: m\nserver: {count: 0}\n---\n{completion}", "count=0: "),
        ("---\nmodel: /no\nserver: {}\n---\n{completion}", "/no/tokenizer.json does not exist"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_refused(tmp_path, text: str, complaint: str) -> None:
    path = tmp_path / "rubric.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"the rubric .*rubric\.md: ") as error:
        load_reward_function(f"{MODULE}:{path}")
    assert complaint in str(error.value)


@pytest.mark.parametrize(("gpus", "fits"), [([2, 3], True), ([3], False), ([3, 4], False)])
def test_its_own_servers_get_the_gpus_that_it_names(monkeypatch, gpus, fits) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(judge, "check_cuda", lambda: None)
    monkeypatch.setattr(judge, "check_model_folder", lambda folder: None)
    server = {"device": "cuda", "tensor_parallel": 2}
    rubric = Rubric(model="m", question="", server=server, gpus=gpus)
    if fits:
        return judge.Servers.check(rubric)
    with pytest.raises(ValueError, match="name 2 of the GPUs 0, 1, 2, 3"):
        judge.Servers.check(rubric)


def test_a_judge_that_cannot_start_says_why(monkeypatch, tmp_path) -> None:
    """Not that its servers, which have not been started, cannot be ended."""

    async def fail(self) -> None:
        raise ValueError("no worker can start")

    monkeypatch.setattr(Judge, "_start_worker", fail)
    rubric = Rubric(model="m", question="{completion}", server={})
    with pytest.raises(ValueError, match="no worker can start"):
        asyncio.run(Judge(rubric, 1, 1.0, tmp_path / "judge.sqlite").start())


def test_a_rubric_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load_reward_function(f"{MODULE}:{tmp_path}/rubric.md")


def test_a_file_that_keeps_no_rewards_is_refused(tmp_path) -> None:
    async def check() -> None:
        async with FakeJudge(lambda _: said("5")) as server:
            (tmp_path / "judge.sqlite").write_bytes(b"not a database" * 100)
            with pytest.raises(ValueError, match="remove it"):
                await judging(tmp_path, server).start()

    asyncio.run(check())
