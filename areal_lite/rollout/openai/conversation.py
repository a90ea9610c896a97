"""One conversation of an episode, recorded token by token: it becomes a trace."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.rollout.episode import Episode
from areal_lite.rollout.openai.messages import answer_message, same_messages
from areal_lite.rollout.transcript import Transcript

MODEL = "policy"


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
        self.answer: asyncio.Task[dict[str, Any]] | None = None
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

    async def respond(self, max_tokens: int | None, stop: list[str]) -> dict[str, Any]:
        """Sample an answer to what was asked, and return it as a `chat.completion` object."""
        assert self.transcript is not None
        before = len(self.transcript.tokens)
        text = await self.transcript.sample_text(max_tokens, stop)
        after = len(self.transcript.tokens)
        text = text[: min((i for i in map(text.find, stop) if i >= 0), default=len(text))]
        message = answer_message(text, bool(self.tools))
        self.messages = [*self.asked, message]
        self._ends.append((len(self.messages), after))
        has_calls = "tool_calls" in message
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if has_calls else self.transcript.finish_reason,
            "logprobs": None,
        }
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": before,
                "completion_tokens": after - before,
                "total_tokens": after,
            },
        }
