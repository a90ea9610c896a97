"""An HTTP endpoint in front of the policy, for agents, in their worker process.

* it serves the APIs of apis.py, and `GET /v1/models`;
* the requests under an episode's API key are its conversations, each of which becomes a trace;
* messages that are known, apart from white space around them, stand for the recorded tokens: only
  new messages are tokenized.

docs/workflows.md (Agents) says which requests continue a conversation, and which settings work.
"""

import asyncio
import contextlib
import json
import resource
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.servers.client import ServerRefused
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.endpoint import apis
from areal_lite.workflows.endpoint import chat_request as chat
from areal_lite.workflows.endpoint.apis import Api
from areal_lite.workflows.endpoint.chat_request import Answer, ChatRequest, RequestRefused
from areal_lite.workflows.tool_calls import AnswerParser, answer_parser, check_parsers

# A request has the whole conversation, as JSON and with the names of its fields.
_BYTES_PER_TOKEN = 64
_OTHER_BYTES = 1 << 20

_BODY_TIMEOUT_S = 30.0
# Between two requests of a connection, and for the headers of one.
_IDLE_S = 15.0


@dataclass(slots=True, eq=False)
class Conversation:
    """Requests that begin with all messages before them, the policy's answers included.

    `transcript` has the tokens of `messages`; None if there are none. `tools` are of every request.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    transcript: Transcript | None = None
    # The messages of the last request, and the task that answers it, perhaps here and elsewhere.
    asked: list[Message] = field(default_factory=list)
    answers: asyncio.Task[list[Answer]] | None = None
    # The number of messages and of tokens at the end of each answer.
    _ends: list[tuple[int, int]] = field(default_factory=list)
    # By the number of messages at its end, the whole text of each answer that a stop text ended.
    _stopped: dict[int, str] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Return whether a request waits for its answer."""
        return self.answers is not None and not self.answers.done()

    @property
    def has_answers(self) -> bool:
        return bool(self._ends)

    def known(self, messages: list[Message]) -> int:
        """Return how many messages, up to an answer and without the last, both begin with."""
        equal = 0
        for given, recorded in zip(messages[:-1], self.messages):
            same = chat.same_messages([given], [recorded])
            if not same and self._appended(equal + 1, messages) is None:
                break
            equal += 1
        return max((count for count, _ in self._ends if count <= equal), default=0)

    def _appended(self, count: int, messages: list[Message]) -> str | None:
        """Return what the agent writes after the stop text of the answer in `count` messages.

        None for another message, and if the agent repeats the answer otherwise.
        """
        whole, given = self._stopped.get(count), messages[count - 1]
        text = given["content"].strip()
        is_text = given["role"] == "assistant" and not given.get("tool_calls")
        if whole is None or not is_text or not text.startswith(whole):
            return None
        return text.removeprefix(whole)

    def fork(self, known: int) -> "Conversation":
        """Return another conversation that begins with the first `known` messages, as tokens."""
        assert self.transcript is not None
        transcript, stopped = self.transcript.fork(dict(self._ends)[known]), self._stopped
        stopped = {known: stopped[known]} if known in stopped else {}
        return Conversation(self.messages[:known], self.tools, transcript, _stopped=stopped)

    async def add(self, request: ChatRequest, episode: Episode, most_first: int | None) -> bool:
        """Add the new messages of `request` to the transcript, or return False if they do not fit.

        Threads render and encode: a long text must not hold up everything else.
        """
        tokenizer: Tokenizer = episode.tokenizer
        new = request.messages[len(self.messages) :]
        if self.transcript is None:
            text = await asyncio.to_thread(tokenizer.render, new, self.tools)
        else:
            text = await asyncio.to_thread(tokenizer.render_after_answer, new)
            text = (self._appended(len(self.messages), request.messages) or "") + text
            if not self.transcript.may_fit(text):
                return False
        text += request.begins
        tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
        if self.transcript is not None:
            return self.transcript.add_tokens(tokens)
        self.transcript = Transcript(episode, tokens)
        return most_first is None or len(tokens) <= most_first

    async def respond(self, request: ChatRequest, parser: AnswerParser, split: bool) -> Answer:
        """Sample an answer to `request`, whose messages the transcript has.

        If `split` is true, the answer's thought is beside its content.
        """
        assert self.transcript is not None
        tokenizer, before = self.transcript.episode.tokenizer, len(self.transcript.tokens)
        end_text = self.transcript.end_text()
        sampled = await self.transcript.sample(request.max_tokens, request.stop)
        text, after = tokenizer.decode(sampled.tokens), len(self.transcript.tokens)
        stops = [(place, stop) for stop in request.stop if (place := text.find(stop)) >= 0]
        end, stop_text = min(stops, default=(len(text), None))
        text, marked = request.begins + text[:end], self.transcript.text(sampled)
        marked = request.begins + (marked.partition(stop_text)[0] if stop_text else marked)
        tools = self.tools if request.most_calls != 0 else []
        parsed = parser.parse(marked, tools, end_text)
        calls = parsed.calls[: request.most_calls]
        said = parsed.said if split else parsed.thought_text + parsed.said
        said = said if calls or (split and parsed.thought) else text
        message = chat.answer_message(said, calls, parsed.thought if split else "")
        self.messages = [*request.messages, message]
        self._ends.append((len(self.messages), after))
        if stop_text and not calls:
            self._stopped[len(self.messages)] = (text + stop_text).strip()
        logprobs = None
        if request.wants_logprobs:
            texts = await asyncio.to_thread(tokenizer.texts, sampled.tokens)
            logprobs = list(zip(texts, sampled.logprobs.tolist()))
        return Answer(
            id=secrets.token_hex(8),
            message=message,
            finish_reason="tool_calls" if calls else self.transcript.finish_reason,
            stop_text=stop_text,
            prompt_tokens=before,
            completion_tokens=after - before,
            logprobs=logprobs,
        )


@dataclass(slots=True)
class Conversations:
    """The requests and answers of one episode.

    `truncated` tells that a request was refused because the budget of tokens of a trace, or
    `max_traces`, is used up. `stored` has the messages up to the answers that a request may name.
    """

    episode: Episode
    max_traces: int
    parser: AnswerParser
    splits_thoughts: bool
    most_first: int | None = None
    truncated: bool = False
    stored: dict[str, list[Message]] = field(default_factory=dict)
    # The most recently answered conversation is last.
    _conversations: list[Conversation] = field(default_factory=list)
    _failure: str | None = None

    async def ask(self, request: ChatRequest, is_retry: bool) -> list[Answer]:
        """Sample the answers to one request, each in a conversation. Raises RequestRefused."""
        for conversation in reversed(self._conversations) if is_retry else ():
            answers = conversation.answers
            if answers and chat.same_messages(request.messages, conversation.asked):
                return await asyncio.shield(answers)
        if self._failure:
            raise RequestRefused(self._failure, "episode_failed")
        if request.requires is not None:
            # A required call is begun for the policy, which samples the rest as it always does: a
            # mask would change its distribution.
            if (begins := self.parser.begin_call(request.requires)) is None:
                raise RequestRefused(
                    "tool_choice must be auto or none: it is not known how a call begins in the"
                    f" model's format ({self.parser.tool_parser})"
                )
            request = replace(request, begins=begins)
        places: list[Conversation] = []
        while len(places) < request.samples:
            places.append(self._continued(request, places))
        answers = asyncio.create_task(self._answers(places, request))
        for conversation in places:
            conversation.asked, conversation.answers = request.messages, answers
        return await asyncio.shield(answers)

    def traces(self, reward: float | None) -> list[Trajectory]:
        """Return the traces by their last answers. Raises ValueError if there is none."""
        answered = [c.transcript for c in self._conversations if c.has_answers]
        traces = [transcript.trajectory(reward) for transcript in answered if transcript]
        if not traces:
            raise ValueError("the policy has answered nothing that the agent asked")
        return traces

    def _continued(self, request: ChatRequest, taken: list[Conversation]) -> Conversation:
        """Return the conversation that knows most of the first messages, or a new one."""
        best = 0, False, -1
        for index, conversation in enumerate(self._conversations):
            if conversation.tools == request.tools:
                common = conversation.known(request.messages)
                is_free = not conversation.is_busy and conversation not in taken
                is_whole = common == len(conversation.messages) and is_free
                best = max(best, (common, is_whole and common > 0, index))
        known, continues, number = best
        if continues:
            return self._conversations[number]
        opened = [c for c in self._conversations if c.is_busy or c.has_answers or c in taken]
        if len(opened) >= self.max_traces:
            self.truncated = True
            raise RequestRefused(
                f"this request begins another conversation, and the episode has "
                f"{self.max_traces} (rollout.workflow_args.max_traces)",
                "too_many_traces",
            )
        new = Conversation([], request.tools)
        if known:
            new = self._conversations[number].fork(known)
        self._conversations.append(new)
        return new

    async def _answers(self, places: list[Conversation], request: ChatRequest) -> list[Answer]:
        """Answer a request in each of `places`; when this ends, none of them is busy."""
        answering = (self._answer(place, request) for place in places)
        answers = await asyncio.gather(*answering, return_exceptions=True)
        for failure in (answer for answer in answers if isinstance(answer, BaseException)):
            raise failure
        return [answer for answer in answers if isinstance(answer, Answer)]

    async def _answer(self, conversation: Conversation, request: ChatRequest) -> Answer:
        try:
            # Clients know such a refusal by the words "context length".
            full = "the context length of this conversation (rollout.max_new_tokens) is used up"
            if conversation.transcript is None:
                full = f"the messages have more than data.max_prompt_tokens={self.most_first}"
            if not await conversation.add(request, self.episode, self.most_first):
                self.truncated = True
                raise RequestRefused(full, "context_length_exceeded")
            answer = await conversation.respond(request, self.parser, self.splits_thoughts)
        except (ValueError, RecursionError, ServerRefused) as error:
            # The chat template or a server refuses, or a call is nested too deeply.
            self._failure = f"the episode cannot continue: {error}"
            raise RequestRefused(self._failure, "episode_failed") from error
        self._conversations.remove(conversation)
        self._conversations.append(conversation)
        if request.history is not None:
            self.stored[answer.id] = [*request.history, answer.message]
        return answer


class AgentEndpoint:
    """The HTTP server. `base_url` is known after `listen()`; port 0 picks a free one.

    `AnswerParser` describes the parsers. Without a `reasoning_parser`, thoughts are content.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        tool_parser: str = "auto",
        reasoning_parser: str = "",
    ):
        check_parsers(tool_parser, reasoning_parser)
        self._host = host
        self._port = port
        self._parsers = tool_parser, reasoning_parser or "auto"
        self._splits_thoughts = bool(reasoning_parser)
        self._episodes: dict[str, Conversations] = {}
        self._most_first: int | None = None
        # Half of the descriptors that this process may open.
        self._most_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self.base_url = ""

    async def listen(self, context_tokens: int = 1 << 15, most_first: int | None = None) -> None:
        """Start. The largest request has room for a conversation of `context_tokens`.

        The messages that begin a conversation may have `most_first` tokens; None: any number.
        """
        self._most_first = most_first
        app = web.Application(client_max_size=_OTHER_BYTES + _BYTES_PER_TOKEN * context_tokens)
        for path, api in apis.APIS.items():
            app.router.add_post(path, partial(self._ask, api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        app.on_response_prepare.append(self._end_strangers)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            auto_decompress=False,
            keepalive_timeout=_IDLE_S,
        )
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(
            self._accept, self._host, self._port, backlog=self._most_connections
        )
        port = self._listener.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.base_url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        self._listener.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < self._most_connections else _Refused()

    async def _end_strangers(self, request: web.Request, response: web.StreamResponse) -> None:
        """End a connection after one answer without a key: nobody may hold it by not reading."""
        if self._episode_of(request) is None:
            response.headers["Connection"] = "close"
            response.force_close()

    @contextlib.contextmanager
    def conversations(
        self, episode: Episode, max_traces: int = 16
    ) -> Iterator[tuple[str, Conversations]]:
        """Record an episode under a new API key, which is valid inside the block."""
        key = secrets.token_urlsafe(24)
        parser = answer_parser(episode.tokenizer, *self._parsers)
        own = Conversations(episode, max_traces, parser, self._splits_thoughts, self._most_first)
        self._episodes[key] = own
        try:
            yield key, own
        finally:
            del self._episodes[key]

    def _episode_of(self, request: web.Request) -> Conversations | None:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._episodes.get(request.headers.get("x-api-key", key))

    async def _models(self, request: web.Request) -> web.Response:
        if self._episode_of(request) is None:
            return _refusal(apis.OPENAI, 401, "no episode has this API key", "invalid_api_key")
        model = {"id": apis.MODEL, "object": "model", "created": 0, "owned_by": "areal_lite"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.Response:
        message = f"{request.method} {request.path:.100} is not served, but {', '.join(apis.APIS)}"
        return _refusal(apis.OPENAI, 404, message, "not_found")

    async def _ask(self, api: Api, request: web.Request) -> web.Response:
        refusal = partial(_refusal, api)
        if (conversations := self._episode_of(request)) is None:
            return refusal(401, "no episode has this API key (it may be over)", "invalid_api_key")
        # The clients of both APIs count their retries of a request in this header.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                raw = await request.read()
            if (charset := request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
                raise RequestRefused(f"charset {charset!r:.100}: JSON is UTF-8", "invalid_json")
            params = conversations.episode.params
            temperature = None if params.evaluates else params.temperature
            body = chat.parse_body(raw)
            asked = api.parse_request(body, temperature, conversations.stored)
            response = api.response(await conversations.ask(asked, is_retry), body)
            if body.get("stream"):
                return _streamed(api, response, body)
            return web.json_response(response)
        except TimeoutError:
            return refusal(408, f"no complete request within {_BODY_TIMEOUT_S:g} s", "timeout")
        except web.HTTPRequestEntityTooLarge as error:
            return refusal(413, f"{error.text}: give shorter messages", "request_too_large")
        except RequestRefused as error:
            return refusal(400, str(error), error.code)
        except RecursionError:  # the decoder takes deeper values than the rest can handle
            return refusal(400, "the request is nested too deeply", "invalid_value")


def _streamed(api: Api, response: dict[str, Any], body: dict[str, Any]) -> web.Response:
    events = [
        (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n"
        for event in api.events(response, body)
    ]
    text = "".join(events) + api.end
    return web.Response(text=text, content_type="text/event-stream", charset="utf-8")


def _refusal(api: Api, status: int, message: str, code: str) -> web.Response:
    return web.json_response(api.error(status, message, code), status=status)


class _Refused(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
