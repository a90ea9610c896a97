"""One conversation of an episode, recorded token by token: it becomes a trace."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.rollout.endpoint.messages import (
    Answer,
    ChatRequest,
    answer_message,
    same_messages,
)
from areal_lite.rollout.episode import Episode
from areal_lite.rollout.transcript import Transcript


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
