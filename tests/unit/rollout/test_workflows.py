"""Workflows: exact tokens in and out, whatever stands between the turns."""

import asyncio
import math
import os
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.config import RolloutConfig
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.sandbox.run import Limits, Outcome
from areal_lite.rollout.episode import (
    Transcript,
    grouped,
    load_workflow,
    sampled_turns,
    single_turn,
)
from areal_lite.routes import ExpertLayout, is_recorded
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.multi_turn import MultiTurn
from areal_lite.workflows.tools import Tools
from examples.custom_workflow.calculator import calculator
from examples.custom_workflow.together import Together
from tests.unit.rollout.episodes import (
    SERVERS,
    Scripted,
    WorkflowFailed,
    chat_prompt,
    played,
    playing,
    save_chat_tokenizer,
)

END, START = "<|im_end|>", "<|im_start|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """user_code(source) writes a module `users`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> None:
        (tmp_path / "users.py").write_text(source)

    yield write
    sys.modules.pop("users", None)


def play_one(
    tokenizer, workflow, prompt, script: list[str], **settings
) -> tuple[Trajectory, Scripted]:
    async def main():
        async with playing(tokenizer, prompt, script, **settings) as (episodes, client, _):
            if hasattr(workflow, "start"):
                await workflow.start(None)
            return await workflow(episodes[0]), client

    return asyncio.run(main())


def text_of(tokenizer: Tokenizer, tokens) -> str:
    return tokenizer._fast.decode(list(map(int, tokens)), skip_special_tokens=False)


def assert_recorded(trajectory: Trajectory, client: Scripted) -> None:
    """Exactly the sampled tokens are in the mask, with log-probs; each request was a prefix."""
    tokens, position = trajectory.tokens.tolist(), 0
    expected = np.zeros(len(tokens), bool)
    for _, given_tokens, answer in client.seen:
        assert tokens[: len(given_tokens)] == given_tokens
        position = len(given_tokens)
        assert tokens[position : position + len(answer)] == answer
        expected[position : position + len(answer)] = True
        np.testing.assert_allclose(
            trajectory.behavior_logprobs[position : position + len(answer)],
            -0.01 * np.arange(position, position + len(answer)),
            rtol=1e-5,
        )
    assert (trajectory.loss_mask == expected).all()
    trajectory.check()


def test_single_turn(tokenizer) -> None:
    prompt = chat_prompt(tokenizer)
    trajectory, client = play_one(tokenizer, single_turn, prompt, ["Hello"])
    assert_recorded(trajectory, client)
    assert (
        text_of(tokenizer, trajectory.tokens)
        == f"{START}user\nHi{END}\n{START}assistant\nHello{END}"
    )
    assert (trajectory.finish_reason, trajectory.reward, trajectory.requests) == ("stop", None, 1)


FEEDBACK = """
seen = []
def until_right(prompt, answers):
    seen.append(list(answers))
    return None if answers[-1] == "right" else f"{answers[-1]} is wrong"
async def graded(prompt, answers):
    return 0.25 if len(answers) == 2 else "again"
def never(prompt, answers):
    return "again"
def credited(prompt, answers):
    return [("again", 0.5), ("again", -1), (None, 2)][len(answers) - 1]
"""


def test_several_turns_keep_what_was_sampled(tokenizer, user_code) -> None:
    """Thoughts and white space stay in earlier answers, though the template would drop them."""
    user_code(FEEDBACK)
    script = ["<think>so</think> a ", "b", "right"]
    trajectory, client = play_one(
        tokenizer, MultiTurn("users:until_right"), chat_prompt(tokenizer), script
    )
    assert_recorded(trajectory, client)
    assert text_of(tokenizer, trajectory.tokens) == (
        f"{START}user\nHi{END}\n{START}assistant\n<think>so</think> a {END}"
        f"\n{START}user\n<think>so</think> a  is wrong{END}\n{START}assistant\nb{END}"
        f"\n{START}user\nb is wrong{END}\n{START}assistant\nright{END}"
    )
    assert [text_of(tokenizer, trajectory.tokens[turn]) for turn in sampled_turns(trajectory)] == [
        text + END for text in script
    ]
    assert sys.modules["users"].seen == [script[:1], script[:2], script]
    assert (trajectory.finish_reason, trajectory.reward, trajectory.requests) == ("stop", None, 3)


def test_tokens_equal_the_rendered_conversation(tokenizer, user_code) -> None:
    """Without trimming, the tokens equal those of the whole rendered conversation."""
    user_code(FEEDBACK)
    trajectory, _ = play_one(
        tokenizer, MultiTurn("users:never", max_turns=3), chat_prompt(tokenizer), ["a", "b", "c"]
    )
    says = [
        ("user", "Hi"),
        ("assistant", "a"),
        ("user", "again"),
        ("assistant", "b"),
        ("user", "again"),
    ]
    assert trajectory.tokens[:-2].tolist() == tokenizer.chat(
        [{"role": role, "content": content} for role, content in says]
    )


def test_feedback_may_be_the_reward(tokenizer, user_code) -> None:
    user_code(FEEDBACK)
    trajectory, client = play_one(
        tokenizer, MultiTurn("users:graded"), chat_prompt(tokenizer), ["a", "b"]
    )
    assert trajectory.reward == 0.25 and len(client.seen) == 2


@pytest.mark.parametrize(
    "number", ["numpy.True_", "numpy.float32(1)", "torch.tensor(1.0)", "decimal.Decimal(1)"]
)
def test_the_reward_may_be_any_number(tokenizer, user_code, number: str) -> None:
    user_code(f"import decimal, numpy, torch\ndef scored(prompt, answers):\n    return {number}\n")
    workflow, prompt = MultiTurn("users:scored"), chat_prompt(tokenizer)
    trajectory, client = play_one(tokenizer, workflow, prompt, ["a"])
    assert trajectory.reward == 1.0 and len(client.seen) == 1


def test_feedback_may_say_what_each_answer_has_earned(tokenizer, user_code) -> None:
    user_code(FEEDBACK)
    prompt = chat_prompt(tokenizer)
    trajectory, _ = play_one(tokenizer, MultiTurn("users:credited"), prompt, ["a", "b", "c"])
    assert trajectory.turn_rewards == [0.5, -1.0, 2.0] and trajectory.reward == 1.5
    workflow = MultiTurn("users:credited", max_turns=1)
    trajectory, _ = play_one(tokenizer, workflow, prompt, ["a"])
    assert trajectory.turn_rewards == [0.5] and trajectory.reward == 0.5


def test_turns_without_a_gap_are_one_turn(tokenizer) -> None:
    async def workflow(episode):
        transcript = Transcript(episode)
        for reward in (1.0, 2.0):
            await transcript.sample()
            transcript.credit(reward)
        transcript.add_tokens(tokenizer.encode("next"))
        transcript.credit(4.0)  # of the turn that was sampled last
        await transcript.sample()
        return transcript.trajectory(0.0)

    trajectory, _ = play_one(tokenizer, workflow, chat_prompt(tokenizer), ["a", "b", "c"])
    assert trajectory.turn_rewards == [7.0, 0.0]


@pytest.mark.parametrize("token", [-100, 2**31])
def test_a_token_that_the_model_lacks_is_refused(tokenizer, token: int) -> None:
    """No server may have seen it, and the trainer would fail with it, again after each restart."""

    async def workflow(episode):
        transcript = Transcript(episode)
        await transcript.sample()
        trajectory = transcript.trajectory()
        trajectory.tokens = trajectory.tokens.astype(np.int64)
        trajectory.tokens[-1] = token
        return trajectory

    async def main() -> None:
        async with playing(tokenizer, chat_prompt(tokenizer), ["a"]) as (episodes, _, _):
            (episode,) = played(workflow, episodes)
            with pytest.raises(WorkflowFailed, match=f"token {token} is not one of the model's"):
                await episode

    asyncio.run(main())


def test_plain_prompts_get_plain_feedback(tokenizer, user_code) -> None:
    user_code(FEEDBACK)
    prompt = Prompt(prompt_id="p", tokens=tokenizer.encode("Hi"), answer="", text="Hi")
    trajectory, client = play_one(tokenizer, MultiTurn("users:until_right"), prompt, ["a", "right"])
    assert_recorded(trajectory, client)
    assert text_of(tokenizer, trajectory.tokens) == f"Hia{END}a is wrongright{END}"


@pytest.mark.parametrize("budget", range(1, 60))
def test_the_budget_holds_over_all_turns(tokenizer, user_code, budget: int) -> None:
    user_code(FEEDBACK)
    prompt = chat_prompt(tokenizer)
    trajectory, client = play_one(
        tokenizer, MultiTurn("users:never"), prompt, ["abcdefgh"] * 4, max_new_tokens=budget
    )
    assert_recorded(trajectory, client)
    assert len(trajectory.tokens) - len(prompt.tokens) <= budget
    assert trajectory.finish_reason == "length" and trajectory.loss_mask[-1]


def test_a_truncated_answer_is_closed_by_the_template(tokenizer) -> None:
    """The end token that the template writes is then not a sampled one."""

    async def cut_off(episode):
        transcript = Transcript(episode)
        await transcript.sample_text(max_new_tokens=3)
        assert transcript.finish_reason == "length" and transcript.add_messages(
            [{"role": "user", "content": "?"}]
        )
        await transcript.sample_text()
        return transcript.trajectory()

    trajectory, client = play_one(tokenizer, cut_off, chat_prompt(tokenizer), ["abcdef", "g"])
    assert_recorded(trajectory, client)
    assert text_of(tokenizer, trajectory.tokens).endswith(
        f"assistant\nabc{END}\n{START}user\n?{END}\n{START}assistant\ng{END}"
    )


@pytest.mark.parametrize(
    ("stop", "kept", "finish"),
    [
        (["cd", "zz"], "abcd", "stop"),
        (["e", "cd"], "abcd", "stop"),
        (["x"], f"abcdef{END}", "stop"),
        (["d"], "abcd", "stop"),
    ],
)
def test_a_completion_ends_with_its_stop(
    tokenizer, stop: list[str], kept: str, finish: str
) -> None:
    async def stopped(episode):
        transcript = Transcript(episode)
        await transcript.sample_text(stop=stop)
        return transcript.trajectory()

    trajectory, client = play_one(tokenizer, stopped, chat_prompt(tokenizer), ["abcdef"])
    start = len(client.seen[0][1])
    assert (
        text_of(tokenizer, trajectory.tokens[start:]) == kept and trajectory.finish_reason == finish
    )
    np.testing.assert_allclose(
        trajectory.behavior_logprobs[start:],
        -0.01 * np.arange(start, len(trajectory.tokens)),
        rtol=1e-5,
    )


def test_turns_stay_on_their_server_and_versions_move_forward(tokenizer) -> None:
    async def main() -> None:
        async with playing(tokenizer, chat_prompt(tokenizer), ["a", "b", "c"], ["x"]) as (
            episodes,
            client,
            fleet,
        ):
            transcript = Transcript(episodes[0])
            servers = []
            for turn in range(3):
                await transcript.sample_text()
                transcript.add_messages([{"role": "user", "content": "?"}])
                servers.append(client.seen[-1][0])
                fleet.begin_push(turn + 1, SERVERS)
                client.version += 1
                fleet.finish_push(turn + 1, [])
                fleet.router.load[servers[0].name] += 5  # though others are less loaded
                if turn == 1:
                    client.dead.add(servers[0])
            fleet.router.load[servers[0].name] -= 15
            assert servers[0] == servers[1] != servers[2] and set(servers) == set(SERVERS)
            trajectory = transcript.trajectory()
            assert [s.version for s in trajectory.segments] == [0, 1, 2]
            assert_recorded(trajectory, client)

    asyncio.run(main())


def call(name: str, **arguments) -> str:
    import json

    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def test_tools(tokenizer, user_code) -> None:
    user_code('''
async def capital(country: str) -> str:
    """
    Capital of a country.

    Args:
        country: its name
    """
    if country != "France":
        raise KeyError(country)
    return "Paris"
''')
    script = [
        "Let me see. " + call("calculator", expression="2 + 3 * 4") + call("users_capital"),
        call("python", code="print(6 * 7)"),
        call("python", code="open('/etc/passwd')"),
        call("capital", country="France") + call("capital", country="Atlantis") + call("capital"),
        "<tool_call>{broken</tool_call>",
        "42",
    ]
    trajectory, client = play_one(
        tokenizer,
        Tools(["examples.custom_workflow.calculator:calculator", "python", "users:capital"]),
        chat_prompt(tokenizer),
        script,
        max_new_tokens=5000,
    )
    assert_recorded(trajectory, client)
    text = text_of(tokenizer, trajectory.tokens)
    assert text.startswith(f"{START}system\nTools: calculator python capital{END}")
    answers = [part.partition("</tool_response>")[0] for part in text.split("<tool_response>")[1:]]
    assert answers[0] == "14" and answers[1].startswith(
        "error: there is no tool 'users_capital', only calculator, python, capital"
    )
    assert answers[2] == "42\n" and "PermissionError" in answers[3]
    assert (
        answers[4] == "Paris"
        and answers[5] == "error: KeyError: 'Atlantis'"
        and "missing 1 required" in answers[6]
    )
    assert answers[7].startswith("error: not a tool call") and len(answers) == 8
    assert text.endswith(f"42{END}") and trajectory.reward is None


def test_no_more_sandboxes_run_at_once_than_this_process_has_cores(monkeypatch) -> None:
    """More would pass their limit of time with programs that are fast."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    running = [0]

    async def run_python(code: str, limits: Limits) -> Outcome:
        running.append(running[-1] + 1)
        await asyncio.sleep(0.01)
        running.append(running[-1] - 1)
        return Outcome(ended="exit", status=0, stdout="1", stderr="")

    async def main() -> None:
        python = Tools(["python"]).python
        await asyncio.gather(*(python("print(1)") for _ in range(4)))

    monkeypatch.setattr("areal_lite.workflows.tools.run_python", run_python)
    asyncio.run(main())
    assert max(running) == 1


def test_two_tools_of_one_name_are_refused(user_code) -> None:
    user_code("def python(code):\n    return code\n")
    with pytest.raises(ValueError, match="users:python: there is another tool python"):
        Tools(["python", "users:python"])


def test_a_tool_is_not_called_in_a_thought_that_the_prompt_has_begun(
    tokenizer, monkeypatch
) -> None:
    begun = tokenizer.chat_template.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif"
    )
    assert begun != tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", begun)
    script = ["Or " + call("python", code="print(1)"), "never asked"]
    trajectory, client = play_one(
        tokenizer, Tools(["python"]), chat_prompt(tokenizer), script, max_new_tokens=5000
    )
    assert_recorded(trajectory, client)
    text = text_of(tokenizer, trajectory.tokens)
    assert text.endswith(f"<think>{script[0]}{END}") and "<tool_response>" not in text


def test_tools_end_after_their_turns_and_long_answers_are_cut(tokenizer) -> None:
    tools = Tools(["python"], max_turns=2, max_characters=50)
    trajectory, client = play_one(
        tokenizer, tools, chat_prompt(tokenizer), [call("python", code="print('x' * 999)")] * 2
    )
    text = text_of(tokenizer, trajectory.tokens)
    assert (
        len(client.seen) == 2
        and f"<tool_response>{'x' * 50}</tool_response>" in text
        and text.endswith(f"</tool_call>{END}")
    )


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | inner.map(lambda e: f"-{e}")
    ),
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_calculator_is_arithmetic(expression: str) -> None:
    assert calculator(expression) == str(eval(expression))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1/3", str(1 / 3)),
        ("6/3", "2"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        (" 1e3 ", "1000"),
    ],
)
def test_calculator_knows(expression: str, value: str) -> None:
    assert calculator(expression) == value and Fraction(calculator(expression)) is not None


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "__import__('os')",
        "'a' * 9",
        "True",
        "[1]",
        "1 if 1 else 2",
        "9 ** 9 ** 9",
        "2 ** 99999",
        "(-8) ** 0.5",
        "1/0",
        "1;2",
        "f(1)",
        "((" * 400,
        "*".join(["9" * 300] * 3 + ["1"]) * 2,
    ],
)
def test_calculator_refuses(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ArithmeticError, MemoryError)):
        calculator(expression)


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_cancelled_group_leaves_nothing_that_runs(tokenizer, passes) -> None:
    """`passes` of the event loop come before the cancellation. The workflow runs after two."""

    @grouped
    async def waits(episodes):
        await asyncio.Event().wait()

    async def main() -> None:
        async with playing(tokenizer, chat_prompt(tokenizer), ["a"], ["b"]) as (episodes, _, _):
            before = asyncio.all_tasks()
            group = asyncio.gather(*played(waits, episodes))
            for _ in range(passes):
                await asyncio.sleep(0)
            group.cancel()
            await asyncio.wait([group])
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before

    asyncio.run(main())


def test_a_group_works_together(tokenizer) -> None:
    async def main() -> None:
        async with playing(
            tokenizer, chat_prompt(tokenizer), ["one", "uno"], ["two", "due"], ["three", "tre"]
        ) as (episodes, client, _):
            results = await asyncio.gather(*played(Together(), episodes))
            trajectories = [trajectory for (trajectory,) in results]
            assert [t.sample_index for t in trajectories] == [0, 1, 2]
            texts = [text_of(tokenizer, t.tokens) for t in trajectories]
            others = "Others answered:\n\ntwo\n\nthree\n\nAnswer again."
            turns = f"one{END}\n{START}user\n{others}{END}\n{START}assistant\nuno{END}"
            assert turns in texts[0]
            assert "Others answered:\n\none\n\nthree\n\nAnswer" in texts[1] and texts[2].endswith(
                f"tre{END}"
            )
            assert all(
                t.num_sampled == len(a) + len(b) + 2
                for t, (a, b) in zip(
                    trajectories, [("one", "uno"), ("two", "due"), ("three", "tre")]
                )
            )

    asyncio.run(main())


def test_every_error_of_a_workflow_is_a_workflow_failure(tokenizer) -> None:
    async def raises(episode):
        raise KeyError("oops")

    async def nothing(episode):
        return None

    async def silent(episode):
        return Transcript(episode).trajectory()

    async def swapped(episode):
        trajectory = await single_turn(episode)
        trajectory.sample_index += 1
        return trajectory

    async def infinite(episode):
        trajectory = await single_turn(episode)
        trajectory.reward = math.inf
        return trajectory

    async def no_trace(episode):
        return []

    async def twice(episode):
        return [await single_turn(episode)] * 2

    async def half_scored(episode):
        trajectory = await single_turn(episode)
        return [trajectory, replace(trajectory, reward=1.0)]

    async def with_text(episode):
        return [await single_turn(episode), "text"]

    @grouped
    async def too_few(episodes):
        return []

    @grouped
    async def one_lost(episodes):
        return [await single_turn(episodes[0]), None]

    async def outcomes(workflow) -> list[str]:
        async with playing(tokenizer, chat_prompt(tokenizer), ["a"], ["b"]) as (episodes, _, _):
            results = await asyncio.gather(*played(workflow, episodes), return_exceptions=True)
            assert all(isinstance(r, (list, WorkflowFailed)) for r in results)
            return [str(r) if isinstance(r, WorkflowFailed) else "fine" for r in results]

    async def main() -> None:
        line = raises.__code__.co_firstlineno + 1
        assert (
            await outcomes(raises) == [f"workflow: KeyError: 'oops' (test_workflows.py:{line})"] * 2
        )
        assert "not a Trajectory" in (await outcomes(nothing))[0]
        assert "not sample a single token" in (await outcomes(silent))[0]
        assert "0/1 for 0/0" in (await outcomes(swapped))[0]
        assert "set the reward inf" in (await outcomes(infinite))[0]
        assert "0 results for 2 episodes" in (await outcomes(too_few))[1]
        assert "an empty list" in (await outcomes(no_trace))[0]
        assert "the same Trajectory twice" in (await outcomes(twice))[0]
        assert "a reward for some traces only" in (await outcomes(half_scored))[0]
        assert "'text', not a Trajectory" in (await outcomes(with_text))[1]
        first, second = await outcomes(one_lost)
        assert first == "fine" and "None, not a Trajectory" in second

    asyncio.run(main())


def test_the_traces_of_an_episode_are_numbered_in_their_order(tokenizer) -> None:
    """A workflow that writes a summary, and goes on from it alone."""

    async def compacts(episode):
        first, summary = Transcript(episode), None
        summary = await first.sample_text()
        request = [{"role": "user", "content": f"Known: {summary}"}]
        second = Transcript(episode, episode.tokenizer.chat(request))
        await second.sample_text()
        return [first.trajectory(0.25), second.trajectory(1.0)]

    async def main() -> None:
        async with playing(tokenizer, chat_prompt(tokenizer), ["s0", "a0"], ["s1", "a1"]) as (
            episodes,
            client,
            _,
        ):
            results = await asyncio.gather(*played(compacts, episodes))
        for number, traces in enumerate(results):
            assert [t.name for t in traces] == [f"0/{number}", f"0/{number}.1"]
            assert [t.reward for t in traces] == [0.25, 1.0]
            own = [
                seen for seen in client.seen if seen[2] in [t.tokens[-3:].tolist() for t in traces]
            ]
            for trace, (_, before, answer) in zip(traces, own, strict=True):
                assert trace.tokens.tolist() == before + answer
                assert trace.num_sampled == len(answer)

    asyncio.run(main())


USER_WORKFLOWS = """
def plain(episode): ...
async def coroutine(episode): ...
class Doubled:
    def __init__(self, times=2): self.times = times
    async def __call__(self, episode): ...
class NotCalled: ...
"""


def test_workflows_are_loaded_by_name(user_code) -> None:
    user_code(USER_WORKFLOWS)
    assert load_workflow(RolloutConfig()) is single_turn
    assert (
        load_workflow(RolloutConfig(workflow="users:Doubled", workflow_args={"times": 3})).times
        == 3
    )
    assert load_workflow(RolloutConfig(workflow="users:coroutine")).__name__ == "coroutine"


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("users", {}, "must be module:name"),
        ("no_such_module:f", {}, "cannot import no_such_module"),
        ("users:missing", {}, "no callable 'missing'"),
        ("users:plain", {}, "must be an `async def`"),
        ("users:NotCalled", {}, "must be an `async def`"),
        ("users:coroutine", {"a": 1}, "only a class takes any"),
        ("users:Doubled", {"twice": 1}, "do not fit users:Doubled: .*twice"),
        (
            "areal_lite.workflows.multi_turn:MultiTurn",
            {"feedback": "users:missing"},
            "no callable 'missing'",
        ),
        (
            "areal_lite.workflows.agent:Agent",
            {"agent": "users:plain"},
            "must be an `async def`",
        ),
    ],
)
def test_an_unusable_workflow_is_refused(
    user_code, name: str, arguments: dict, complaint: str
) -> None:
    user_code(USER_WORKFLOWS)
    with pytest.raises(ValueError, match=complaint):
        load_workflow(RolloutConfig(workflow=name, workflow_args=arguments))


def test_routes_follow_the_tokens_through_turns(tokenizer) -> None:
    """Every token has a route, but the last that was sampled and what nothing was sampled after."""
    layout = ExpertLayout(layers=1, experts=250, top_k=1)

    async def workflow(episode) -> list[Transcript]:
        first = Transcript(episode)
        await first.sample_text(stop=["st"])
        assert first.add_messages([{"role": "user", "content": "go on"}])
        fork = first.fork(len(first.tokens) - 2)
        await first.sample()
        await fork.sample()
        assert first.add_messages([{"role": "user", "content": "unanswered"}])
        return [first, fork]

    script = ["first and more", "second", "third"]
    (first, fork), client = play_one(
        tokenizer, workflow, chat_prompt(tokenizer), script, experts=layout
    )
    for transcript in (first, fork):
        made = transcript.trajectory(1.0).check()
        recorded = is_recorded(made.routes)
        last = np.flatnonzero(made.loss_mask)[-1]
        assert recorded.tolist() == [i < last for i in range(len(made.tokens))]
        np.testing.assert_array_equal(made.routes[:last, 0, 0], made.tokens[:last] % 250)
    cut = int(first.trajectory().segments[0].end)
    assert [params.first_route for params in client.params] == [0, cut - 1, 0]
