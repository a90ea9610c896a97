"""The conversations of one episode: which of them a request continues, and when one begins.

Rules:
  * a request continues the conversation that it begins with: its messages are those so far, the
    policy's answers as they were given (apart from white space around them), and new ones;
  * any other request begins a conversation, which becomes a trace of its own. Shortened and edited
    histories, sub-agents, further samples of an answer and requests to a conversation that is
    waiting for an answer do so;
  * where it has messages up to some answer in common with a conversation, it begins with their
    tokens. They are its prompt: the policy is trained on them where it wrote them;
  * messages that are known stand for the recorded tokens: only new messages are tokenized;
  * a retry of the last request of a conversation gets the same answer.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.rollout.endpoint.messages import (
    Answer,
    ChatRequest,
    RequestRefused,
    answer_message,
    same_messages,
)
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.servers.client import ServerRefused
from areal_lite.trajectory import Trajectory


class Conversation:
    """Requests that begin with all messages before them, the policy's answers included.

    Args:
        messages: those that it begins with, which its transcript has.
        tools: the tools of every request.
        transcript: the tokens of `messages`; None if there are none.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        transcript: Transcript | None = None,
    ):
        self.messages = list(messages)
        self.tools = tools
        self.transcript = transcript
        # The messages of the last request, and the task that answers it.
        self.asked: list[Message] = []
        self.answer: asyncio.Task[Answer] | None = None
        # The number of messages and of tokens at the end of each answer.
        self._ends: list[tuple[int, int]] = []

    @property
    def is_busy(self) -> bool:
        """Return whether a request waits for its answer."""
        return self.answer is not None and not self.answer.done()

    @property
    def has_answers(self) -> bool:
        return bool(self._ends)

    def known(self, messages: list[Message]) -> int:
        """Return how many messages, up to an answer, `messages` has in common with this one.

        At least one of `messages` is new.
        """
        equal = 0
        for given, recorded in zip(messages[:-1], self.messages):
            if not same_messages([given], [recorded]):
                break
            equal += 1
        return max((count for count, _ in self._ends if count <= equal), default=0)

    def fork(self, known: int) -> "Conversation":
        """Return another conversation that begins with the first `known` messages, as tokens."""
        assert self.transcript is not None
        transcript = self.transcript.fork(dict(self._ends)[known])
        return Conversation(self.messages[:known], self.tools, transcript)

    async def add(self, new: list[Message], episode: Episode) -> bool:
        """Add messages to the transcript, or return False if they do not fit.

        Threads render and encode: a long text must not hold up everything else.
        """
        tokenizer: Tokenizer = episode.tokenizer
        if self.transcript is None:
            tokens = await asyncio.to_thread(tokenizer.chat, new, self.tools)
            self.transcript = Transcript(episode, tokens)
            return True
        text = await asyncio.to_thread(tokenizer.render_after_answer, new)
        if not self.transcript.may_fit(text):
            return False
        tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
        return self.transcript.add_tokens(tokens)

    async def respond(self, request: ChatRequest) -> Answer:
        """Sample an answer to `request`, whose messages the transcript has."""
        assert self.transcript is not None
        before = len(self.transcript.tokens)
        text = await self.transcript.sample_text(request.max_tokens, request.stop)
        after = len(self.transcript.tokens)
        stops = [(place, stop) for stop in request.stop if (place := text.find(stop)) >= 0]
        end, stop_text = min(stops, default=(len(text), None))
        message = answer_message(text[:end], bool(self.tools))
        self.messages = [*request.messages, message]
        self._ends.append((len(self.messages), after))
        has_calls = "tool_calls" in message
        return Answer(
            id=secrets.token_hex(8),
            message=message,
            finish_reason="tool_calls" if has_calls else self.transcript.finish_reason,
            stop_text=stop_text,
            prompt_tokens=before,
            completion_tokens=after - before,
        )


class Conversations:
    """The requests and answers of one episode.

    `truncated` tells that a request was refused because a budget is used up: that of tokens of a
    trace, or `max_traces`.
    """

    def __init__(self, episode: Episode, max_traces: int):
        self.episode = episode
        self.truncated = False
        self._max_traces = max_traces
        # The one that was answered last comes last.
        self._conversations: list[Conversation] = []
        self._failure: str | None = None

    async def ask(self, request: ChatRequest, is_retry: bool) -> Answer:
        """Answer one request. Raises RequestRefused."""
        if is_retry and (answer := self._asked_before(request.messages)):
            return await asyncio.shield(answer)
        if self._failure:
            raise RequestRefused(self._failure, "episode_failed")
        conversation = self._continued(request.messages, request.tools)
        conversation.asked = request.messages
        conversation.answer = asyncio.create_task(self._answer(conversation, request))
        return await asyncio.shield(conversation.answer)

    def traces(self, reward: float | None) -> list[Trajectory]:
        """Return the traces in the order of their last answers.

        Raises ValueError if there is none.
        """
        traces = [
            conversation.transcript.trajectory(reward)
            for conversation in self._conversations
            if conversation.transcript is not None and conversation.has_answers
        ]
        if not traces:
            raise ValueError("the policy has answered nothing that the agent asked")
        return traces

    def _asked_before(self, messages: list[Message]) -> asyncio.Task[Answer] | None:
        """Return the answer to a last request with these messages, which may be running."""
        asked = (c for c in reversed(self._conversations) if same_messages(messages, c.asked))
        return next((conversation.answer for conversation in asked), None)

    def _continued(self, messages: list[Message], tools: list[dict[str, Any]]) -> Conversation:
        """Return the conversation that a request continues, or a new one for it.

        Its messages are the longest known beginning of `messages`.
        """
        known, continues, number = 0, False, -1
        for index, conversation in enumerate(self._conversations):
            if conversation.tools == tools:
                common = conversation.known(messages)
                is_whole = common == len(conversation.messages) and not conversation.is_busy
                known, continues, number = max(
                    (known, continues, number), (common, is_whole and common > 0, index)
                )
        if continues:
            return self._conversations[number]
        open_conversations = [c for c in self._conversations if c.is_busy or c.has_answers]
        if len(open_conversations) >= self._max_traces:
            self.truncated = True
            raise RequestRefused(
                f"this request begins another conversation, and the episode has "
                f"{self._max_traces} (rollout.workflow_args.max_traces)",
                "too_many_traces",
            )
        new = self._conversations[number].fork(known) if known else Conversation([], tools)
        self._conversations.append(new)
        return new

    async def _answer(self, conversation: Conversation, request: ChatRequest) -> Answer:
        """Add the new messages of a request, and sample the answer."""
        new = request.messages[len(conversation.messages) :]
        try:
            if not await conversation.add(new, self.episode):
                self.truncated = True
                raise RequestRefused(
                    "the token budget of this conversation (rollout.max_new_tokens) is used up",
                    "context_length_exceeded",
                )
            answer = await conversation.respond(request)
        except (ValueError, RecursionError, ServerRefused) as error:
            # The chat template or a server refuses, or a call is nested too deeply.
            self._failure = f"the episode cannot continue: {error}"
            raise RequestRefused(self._failure, "episode_failed") from error
        self._conversations.remove(conversation)
        self._conversations.append(conversation)
        return answer
