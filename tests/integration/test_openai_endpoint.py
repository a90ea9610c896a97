"""The OpenAI-compatible endpoint and the real `openai` client: a conversation is one trace."""

import asyncio
import contextlib
import json
import time
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Episode, sampled_turns
from areal_lite.servers.client import SamplingParams, SGLangClient
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.endpoint.server import AgentEndpoint
from tests.fake_sglang import EOS, FakeSGLang, completion, logprob
from tests.integration.controller_run import Run, push
from tests.integration.test_sglang_server import reference  # noqa: F401
from tests.unit.rollout.episodes import chat_prompt, playing, save_chat_tokenizer

BUDGET = 400


class Policy:
    """An endpoint in front of servers, and its episodes."""

    def __init__(self, fleet: Fleet, tokenizer: Tokenizer, temperature: float):
        self.fleet, self.tokenizer = fleet, tokenizer
        self.temperature = temperature
        self.endpoint = AgentEndpoint()
        self.episodes = 0

    @contextlib.asynccontextmanager
    async def episode(self, budget: int = BUDGET):
        """An openai client and its conversations."""
        params = SamplingParams(budget, self.temperature, self.tokenizer.eos_ids)
        sample_index, self.episodes = self.episodes, self.episodes + 1
        session = await self.fleet.open_session(f"0-{sample_index}")
        prompt = Prompt(prompt_id="p", tokens=[2], answer="", text="")
        with self.endpoint.conversations(
            Episode(
                prompt=prompt,
                sample_index=sample_index,
                group_id=0,
                tokenizer=self.tokenizer,
                params=params,
                clock=time.time,
                complete=partial(self.fleet.complete, session),
            )
        ) as (key, conversations):
            async with AsyncOpenAI(base_url=self.endpoint.base_url, api_key=key) as client:
                yield client, conversations
        self.fleet.close_session(session)


@contextlib.asynccontextmanager
async def serving(tokenizer_folder: str, server: ServerInfo, temperature: float = 1.0):
    client = SGLangClient(timeout_s=60)
    fleet = Fleet(client, lambda: [server], lambda: None)
    watching = asyncio.create_task(fleet.watch())
    policy = Policy(fleet, Tokenizer(tokenizer_folder), temperature)
    await policy.endpoint.listen()
    try:
        yield policy
    finally:
        await policy.endpoint.close()
        watching.cancel()
        await client.close()


def with_policy(folder: str, test, temperature: float = 0.7) -> None:
    async def main() -> None:
        fake = FakeSGLang()
        try:
            async with serving(
                folder,
                ServerInfo(
                    name="s", url=await fake.start(), api_key=None, tensor_parallel=1, pid=1
                ),
                temperature,
            ) as policy:
                await test(policy, fake)
        finally:
            await fake.stop()

    asyncio.run(main())


async def ask(client: AsyncOpenAI, messages: list, **settings):
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assert_exact(trajectory: Trajectory, budgets: list[int]) -> None:
    """Each turn is what the server makes of exactly the tokens before it."""
    tokens = trajectory.tokens.tolist()
    turns = sampled_turns(trajectory)
    assert len(turns) == len(budgets)
    for turn, budget in zip(turns, budgets):
        assert tokens[turn] == completion(tokens[: turn.start], budget)
        expected = [logprob(tokens[:i]) for i in range(turn.start, turn.stop)]
        assert trajectory.behavior_logprobs[turn].tolist() == pytest.approx(expected)


def test_a_conversation_is_one_trajectory(tokenizer_only) -> None:
    async def test(policy: Policy, fake: FakeSGLang) -> None:
        async with policy.episode() as (client, conversations):
            assert [m.id for m in (await client.models.list()).data] == ["policy"]
            messages = [{"role": "system", "content": "Be kind."}, user("Hi")]
            for turn in range(4):
                answer = await ask(client, messages, temperature=0.7, max_tokens=20, n=1, top_p=1)
                message = answer.choices[0].message
                assert answer.choices[0].finish_reason in ("stop", "length")
                assert answer.usage.prompt_tokens == len(fake.requests[-1]["input_ids"])
                messages += [
                    {"role": "assistant", "content": message.content.strip()},
                    user(f"Why? {turn}"),
                ]
                policy.fleet.begin_push(turn + 1, [*policy.fleet.router.servers.values()])
                fake.weight_version = str(turn + 1)
                policy.fleet.finish_push(turn + 1, [])
        (trajectory,) = conversations.traces(0.5)
        assert_exact(trajectory, [20] * 4)
        assert trajectory.reward == 0.5 and [s.version for s in trajectory.segments] == [0, 1, 2, 3]
        tokens = trajectory.tokens.tolist()
        for request in fake.requests:
            assert request["input_ids"] == tokens[: len(request["input_ids"])]
        # The tokens between two answers are those of the chat template.
        turns = sampled_turns(trajectory)
        for number, (turn, following) in enumerate(zip(turns, turns[1:])):
            between = tokens[turn.stop : following.start]
            closing = [] if tokens[turn.stop - 1] == EOS else [EOS]
            assert between == closing + policy.tokenizer.encode(f"Why? {number}")

    with_policy(tokenizer_only, test)


def test_conversations_side_by_side_do_not_mix(tokenizer_only) -> None:
    async def test(policy: Policy, fake: FakeSGLang) -> None:
        async def one(number: int) -> None:
            async with policy.episode() as (client, conversations):
                first = await ask(client, [user(f"I am {number}")], max_completion_tokens=10)
                await ask(
                    client,
                    [user(f"I am {number}"), first.choices[0].message.model_dump(), user("More")],
                    max_completion_tokens=10,
                )
            (trajectory,) = conversations.traces(None)
            assert_exact(trajectory, [10, 10])
            assert (
                policy.tokenizer.decode(trajectory.tokens).startswith(f"I am {number}")
                and trajectory.sample_index < 20
            )

        await asyncio.gather(*(one(number) for number in range(20)))

    with_policy(tokenizer_only, test)


REFUSALS = [
    ({"temperature": 0.5}, "temperature=0.5 must be 0.7, rollout.temperature"),
    ({"n": 0}, "n=0 must be an integer of at least 1"),
    ({"n": 17}, "max_traces"),
    ({"modalities": ["text", "audio"]}, "modalities=.* the policy reads and writes text only"),
    ({"audio": {"voice": "a", "format": "mp3"}}, "audio is not supported: the policy reads"),
    ({"web_search_options": {}}, "web_search_options is not supported: give a function as a tool"),
    ({"top_p": 0.9}, "top_p=0.9 must be 1: to train, sample from the whole"),
    ({"presence_penalty": 1}, "presence_penalty=1 must be 0"),
    ({"logit_bias": {"5": 1}}, "logit_bias="),
    ({"extra_body": {"top_k": 5}}, "top_k=5 must be -1 or 0: to train, sample from the"),
    ({"extra_body": {"regex": "a*"}}, "regex is not supported: to train, sample from the whole"),
    ({"response_format": {"type": "json_object"}}, "response_format=.* ask for JSON in a message"),
    ({"max_tokens": 0}, "max_tokens=0 must be an integer of at least 1"),
    ({"tool_choice": "required"}, "tool_choice='required' must be .* the tools are: none"),
    ({"stop": [""]}, "stop=.* none empty"),
    ({"messages": []}, "messages must be a list"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "content has .*image_url.* which is no text: the policy reads and writes text only",
    ),
]


def test_unsupported_settings_are_refused_by_name(tokenizer_only) -> None:
    async def test(policy: Policy, fake: FakeSGLang) -> None:
        async with policy.episode() as (client, conversations):
            for settings, complaint in REFUSALS:
                with pytest.raises(openai.BadRequestError, match=complaint):
                    await client.chat.completions.create(
                        **{"model": "policy", "messages": [user("Hi")], **settings}
                    )
            assert not fake.requests
            parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
            await ask(
                client,
                [{"role": "user", "content": parts}],
                max_tokens=5,
                user="me",
                tool_choice="auto",
                logit_bias={},
                stop=None,
            )
        assert_exact(*conversations.traces(None), [5])
        async with AsyncOpenAI(base_url=policy.endpoint.base_url, api_key=client.api_key) as late:
            with pytest.raises(openai.AuthenticationError, match="no episode has this API key"):
                await ask(late, [user("Hi")])
            with pytest.raises(openai.AuthenticationError):
                await late.models.list()
        async with aiohttp.ClientSession() as session, policy.episode() as (client, _):
            headers = {
                "Authorization": f"Bearer {client.api_key}",
                "Content-Type": "application/json",
            }
            for body in ("{", "[]"):
                async with session.post(
                    f"{policy.endpoint.base_url}/chat/completions", data=body, headers=headers
                ) as response:
                    assert (
                        response.status == 400
                        and (await response.json())["error"]["code"] == "invalid_json"
                    )

    with_policy(tokenizer_only, test)


def test_a_request_that_is_no_extension_begins_a_trace(tokenizer_only) -> None:
    async def test(policy: Policy, fake: FakeSGLang) -> None:
        async with policy.episode() as (client, conversations):
            first = (await ask(client, [user("Hi")], max_tokens=10)).choices[0].message.content
            answered = [user("Hi"), {"role": "assistant", "content": first}]
            edited = [user("Hi"), {"role": "assistant", "content": first + "!"}, user("?")]
            for diverging in ([user("Hello")], [user("Hi")], edited):
                await ask(client, diverging, max_tokens=5)
            # A retry gets the answer that the client missed.
            retried = await ask(
                client,
                [user("Hello")],
                max_tokens=5,
                extra_headers={"x-stainless-retry-count": "1"},
            )
            assert retried.choices[0].message.content and len(fake.requests) == 4
            await ask(client, [*answered, user("?")], max_tokens=10)
        *others, last = conversations.traces(None)
        for trace in others:
            assert_exact(trace, [5])
        assert len(others) == 3
        assert_exact(last, [10, 10])

    with_policy(tokenizer_only, test)


def test_the_budget_of_an_episode(tokenizer_only) -> None:
    async def test(policy: Policy, fake: FakeSGLang) -> None:
        async with policy.episode(budget=30) as (client, conversations):
            messages, turns = [user("Hi")], 0
            with pytest.raises(openai.BadRequestError, match="context length") as error:
                while True:
                    answer = await ask(client, messages, max_tokens=10)
                    turns += 1
                    messages += [answer.choices[0].message.model_dump(), user("Go on")]
            assert (
                error.value.code == "context_length_exceeded"
                and conversations.truncated
                and turns > 1
            )
        (trajectory,) = conversations.traces(None)
        assert (
            trajectory.finish_reason == "length"
            and len(trajectory.tokens) <= len(policy.tokenizer.encode("Hi")) + 30
        )

    with_policy(tokenizer_only, test)


def test_stop_texts_and_tools_with_a_policy_that_uses_them(tmp_path: Path) -> None:
    tokenizer = save_chat_tokenizer(tmp_path)
    said = 'I look.<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    tools = [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]

    async def main() -> None:
        endpoint = AgentEndpoint()
        await endpoint.listen()
        async with playing(
            tokenizer, chat_prompt(tokenizer), ["one, two, three", said, "It is red."]
        ) as (episodes, scripted, _):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
                    messages = [user("Count")]
                    answer = (await ask(client, messages, stop=", three", tools=tools)).choices[0]
                    assert answer.message.content == "one, two" and answer.finish_reason == "stop"
                    messages += [answer.message.model_dump(exclude_none=True), user("Look")]
                    answer = (await ask(client, messages, tools=tools)).choices[0]
                    assert (
                        answer.finish_reason == "tool_calls" and answer.message.content == "I look."
                    )
                    (call,) = answer.message.tool_calls
                    assert call.function.name == "look" and json.loads(call.function.arguments) == {
                        "at": "it"
                    }
                    messages += [
                        answer.message.model_dump(exclude_none=True),
                        {"role": "tool", "tool_call_id": call.id, "content": "red"},
                    ]
                    answer = (await ask(client, messages, tools=tools)).choices[0]
                    assert answer.message.content == "It is red."
            (trajectory,) = conversations.traces(None)
        await endpoint.close()
        text = tokenizer._fast.decode(trajectory.tokens.tolist(), skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nTools: look<|im_end|>")
        turns = [
            "one, two, three<|im_end|>\n",
            "<|im_start|>user\nLook<|im_end|>\n",
            f"<|im_start|>assistant\n{said}<|im_end|>\n",
            "<|im_start|>user\n<tool_response>red</tool_response><|im_end|>\n",
            "<|im_start|>assistant\nIt is red.<|im_end|>",
        ]
        assert text.endswith("".join(turns))
        spoken = [tokenizer.decode(trajectory.tokens[turn]) for turn in sampled_turns(trajectory)]
        assert spoken == ["one, two, three", said, "It is red."]

    asyncio.run(main())


@pytest.fixture
def run(tmp_path, tokenizer_only):
    runs: list[Run] = []

    def make(agent: str, **settings) -> Run:
        arguments = {"agent": f"tests.integration.toy_agent:{agent}"}
        workflow = "areal_lite.workflows.agent:Agent"
        runs.append(
            Run(
                tmp_path / f"run{len(runs)}",
                tokenizer_only,
                rollout__workflow=workflow,
                rollout__workflow_args=arguments,
                **settings,
            )
        )
        return runs[-1]

    yield make
    for made in runs:
        made.stop()


def test_agents_in_the_real_controller(run) -> None:
    """Batches of agents' conversations while weights are pushed: every token is in its session."""
    r = run("three_turns", max_staleness=2)
    r.start_server("s0"), r.start_server("s1")
    client = r.start_controller()
    evaluated = client.evaluate(0)  # by agents too, greedy ones and others
    assert (
        evaluated["failures"] == 0
        and 0.25 <= evaluated["greedy"] <= 1
        and 0.25 <= evaluated["sampled"] <= 1
    )
    for step in range(3):
        batch, _ = client.batch(step, 0, 1)
        assert set(batch.rewards.tolist()) <= {0.25, 0.5, 0.75, 1.0}
        for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
            tokens, mask = batch.tokens[start:end].tolist(), batch.loss_mask[start:end]
            edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(
                -1, 2
            )
            assert len(edges) > 1
            for turn, (first, after) in enumerate(edges):
                # rollout.max_new_tokens=40 bounds everything that follows the prompt.
                left = int(edges[0][0]) + 40 - first
                assert tokens[first:after] == completion(tokens[:first], min(8, left)), turn
        push(client, step + 1, "in_place")
    client.finish()
    assert r.processes["controller"].wait(20) == 0


def test_an_agent_that_raises_costs_its_trajectory_only(run) -> None:
    r = run("fails_often", reward__function="tests.integration.toy_reward:always")
    r.start_server()
    client = r.start_controller()
    client.batch(0, 0, 1)
    r.wait_for("KeyError: 'odd'")
    assert client.finish()["workflow_failures"] > 0


@pytest.mark.slow
def test_a_real_server_scored_these_tokens_and_no_others(
    sglang_server,
    tiny_model,
    reference,  # noqa: F811
) -> None:
    """transformers gives the tokens of a recorded conversation the same log-probs.

    Its turns are asked for in three ways.
    """

    async def main() -> None:
        async with (
            serving(tiny_model, sglang_server.info) as policy,
            policy.episode() as (client, conversations),
        ):
            messages, reported = [user("12 + 34 = ")], []
            limits = {"max_tokens": 25, "temperature": 1.0}
            answer = (await ask(client, messages, logprobs=True, **limits)).choices[0]
            reported += [token.logprob for token in answer.logprobs.content]
            messages += [answer.message.model_dump(exclude_none=True), user(" no! ")]
            said = ""
            stream = await ask(client, messages, logprobs=True, stream=True, **limits)
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                if logprobs := chunk.choices[0].logprobs:
                    reported += [token.logprob for token in logprobs.content]
            messages += [{"role": "assistant", "content": said}, user(" no? ")]
            response = await client.responses.create(
                model="policy",
                input=messages,
                max_output_tokens=25,
                include=["message.output_text.logprobs"],
            )
            reported += [token.logprob for token in response.output[0].content[0].logprobs]
            (trajectory,) = conversations.traces(None)
        sampled = trajectory.behavior_logprobs[trajectory.loss_mask].tolist()
        assert reported == pytest.approx(sampled)
        tokens = trajectory.tokens.tolist()
        turns = sampled_turns(trajectory)
        assert len(turns) == 3
        for turn in turns:
            expected = reference(tokens[: turn.start], tokens[turn], 1.0).numpy()
            np.testing.assert_allclose(trajectory.behavior_logprobs[turn], expected, atol=2e-5)

    asyncio.run(main())
