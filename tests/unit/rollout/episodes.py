"""Episodes for tests of workflows: a scripted policy on the real fleet, and a chat tokenizer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from functools import partial

import numpy as np

from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Episode, Workflow, is_grouped, play
from areal_lite.routes import ExpertLayout
from areal_lite.servers.client import GenerationChunk, SamplingParams, ServerFailed
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import Trajectory
from areal_lite_quickstart.make_model import build_char_tokenizer

SERVERS = [
    ServerInfo(name=name, url=f"http://{name}", api_key=None, tensor_parallel=1, pid=1)
    for name in "ab"
]

# Like those of current models: earlier answers lose their thoughts and their white space, and tool
# results are a user's messages.
CHAT_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for t in tools %} {{ t['function']['name'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{{ m.content.split('</think>')[-1].strip() + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def save_chat_tokenizer(folder) -> Tokenizer:
    tokenizer = build_char_tokenizer()
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return Tokenizer(folder)


def chat_prompt(tokenizer: Tokenizer, text: str = "Hi") -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(
        prompt_id="p",
        tokens=tokenizer.chat(messages),
        answer="",
        text=tokenizer.render(messages),
        messages=messages,
    )


class Scripted:
    """A client whose servers answer with the texts of `script[sample_index]` in turn.

    A request that continues a text goes on with it, as after a token that may have completed a stop
    text. `seen` records (server, input tokens, answer tokens) of each request. The route of a token
    is its id modulo 250.
    """

    def __init__(self, tokenizer: Tokenizer, script: list[list[str]]):
        self.tokenizer = tokenizer
        self.script = [list(texts) for texts in script]
        self.seen: list[tuple[ServerInfo, list[int], list[int]]] = []
        self.version = 0
        self.dead: set[ServerInfo] = set()
        self.params: list[SamplingParams] = []
        self._left: dict[tuple[int, ...], list[int]] = {}  # of a text, by all tokens before

    async def generate(self, server, input_ids, params, rid, cache_key) -> GenerationChunk:
        if server in self.dead:
            raise ServerFailed(server, "is dead")
        await asyncio.sleep(0)
        tokens = self._left.pop(tuple(input_ids), None)
        texts = self.script[int(rid.split("-")[2])]
        if tokens is None or (len(tokens) == 1 and texts):  # of the text before, only its end
            text = texts.pop(0)
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            tokens.append(self.tokenizer.eos_ids[0])
        end = next((i + 1 for i, token in enumerate(tokens) if token in params.stop_token_ids))
        if end < len(tokens) and end <= params.max_new_tokens:
            self._left[(*input_ids, *tokens[:end])] = tokens[end:]
        finish, tokens = (
            ("stop", tokens[:end])
            if end <= params.max_new_tokens
            else ("length", tokens[: params.max_new_tokens])
        )
        self.seen.append((server, input_ids.tolist(), tokens))
        self.params.append(params)
        routes = None
        if params.experts:
            computed = [*input_ids.tolist(), *tokens][params.first_route : -1]
            routes = (np.array(computed) % 250).astype(np.uint8).reshape(-1, 1, 1)
        logprobs = -0.01 * (len(input_ids) + np.arange(len(tokens), dtype=np.float32))
        return GenerationChunk(
            tokens=np.array(tokens, np.int32),
            logprobs=logprobs,
            versions=np.full(len(tokens), self.version, np.int32),
            finish_reason=finish,
            routes=routes,
        )

    async def weight_version(self, server) -> int:
        return self.version

    async def check_health(self, server) -> None: ...

    async def abort_all(self, server) -> None: ...

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def playing(
    tokenizer: Tokenizer,
    prompt: Prompt,
    *script: list[str],
    max_new_tokens: int = 1000,
    experts: ExpertLayout | None = None,
) -> AsyncIterator[tuple[list[Episode], Scripted, Fleet]]:
    """Yield the episodes 0-0, 0-1, … of one group, one per script, the client and the fleet."""
    client = Scripted(tokenizer, list(script))
    fleet = Fleet(client, lambda: SERVERS, lambda: None)
    watching = asyncio.create_task(fleet.watch())
    try:
        servers = await fleet.place(len(script))
        params = SamplingParams(max_new_tokens, 0.7, tokenizer.eos_ids, experts=experts)
        sessions = [Session(f"0-{number}", server) for number, server in enumerate(servers)]
        yield (
            [
                Episode(
                    prompt=prompt,
                    sample_index=i,
                    group_id=0,
                    tokenizer=tokenizer,
                    params=params,
                    clock=lambda: 0.0,
                    complete=partial(fleet.complete, session),
                )
                for i, session in enumerate(sessions)
            ],
            client,
            fleet,
        )
        for session in sessions:
            fleet.close_session(session)
        assert not any(fleet.router.load.values())
    finally:
        watching.cancel()


class WorkflowFailed(Exception):
    """An episode has no traces."""


def played(workflow: Workflow, episodes: list[Episode]) -> list[Awaitable[list[Trajectory]]]:
    """Play a group; each awaitable gives the traces of one episode, or raises WorkflowFailed."""
    together: list[asyncio.Future] = []

    async def traces(index: int) -> list[Trajectory]:
        if is_grouped(workflow):
            if not together:
                together.append(asyncio.ensure_future(play(workflow, episodes)))
            result = (await together[0])[index]
        else:
            (result,) = await play(workflow, [episodes[index]])
        if result.failure:
            raise WorkflowFailed(result.failure)
        return result.traces

    return [traces(index) for index in range(len(episodes))]
