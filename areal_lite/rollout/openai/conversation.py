"""One conversation: the chat completion requests of an episode, recorded token by token.

Rules:
  * a request's messages begin with all messages of the conversation so far, the policy's answers as
    they were given (apart from white space around them), and add at least one;
  * messages that are known stand for the recorded tokens: only new messages are tokenized;
  * a request that begins differently (an edited history, a second conversation, another sample of
    an answer) is refused: the policy must have seen the tokens of an episode in one order;
  * a retry of the last request gets the same answer.
"""

import asyncio
import secrets
import time
from typing import Any

from areal_lite.data.tokenizer import Message
from areal_lite.rollout.episode import Episode
from areal_lite.rollout.openai.messages import (
    RequestRefused,
    answer_message,
    check_settings,
    parse_messages,
    parse_stop,
    parse_tools,
    same_messages,
)
from areal_lite.rollout.transcript import Transcript
from areal_lite.servers.client import ServerRefused
from areal_lite.trajectory import Trajectory

MODEL = "policy"


class Conversation:
    """The requests and answers of one episode; `truncated` if one exceeded its token budget."""

    def __init__(self, episode: Episode):
        self.episode = episode
        self.truncated = False
        self._transcript: Transcript | None = None
        self._messages: list[Message] = []  # so far, with the policy's answers
        self._tools: list[dict[str, Any]] = []
        self._response: dict[str, Any] = {}
        self._failure: str | None = None
        self._lock = asyncio.Lock()

    async def chat(self, body: dict[str, Any], is_retry: bool) -> dict[str, Any]:
        """Answer one request. Raises RequestRefused."""
        async with self._lock:
            messages = parse_messages(body.get("messages"))
            if is_retry and self._messages and same_messages(messages, self._messages[:-1]):
                return self._response
            if self._failure:
                raise RequestRefused(self._failure, "episode_failed")
            check_settings(body, self.episode.params.temperature)
            new = self._new_messages(messages)
            tools = parse_tools(body.get("tools"))
            if self._messages and tools != self._tools:
                raise RequestRefused("tools must be the same in every request of an episode")
            stop = parse_stop(body.get("stop"))
            max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
            try:
                transcript = await self._extend(new, tools)
                self._response = await _respond(transcript, max_tokens, stop, bool(tools))
            except (ValueError, RecursionError, ServerRefused) as error:
                # The chat template or a server refuses, or a call is nested too deeply.
                self._failure = f"the episode cannot continue: {error}"
                raise RequestRefused(self._failure, "episode_failed") from error
            self._messages = [*messages, self._response["choices"][0]["message"]]
            self._tools = tools
            return self._response

    def trajectory(self, reward: float | None) -> Trajectory:
        """Return the trajectory. Raises ValueError if there was no request."""
        if self._transcript is None:
            raise ValueError("the agent asked the policy nothing")
        if self.truncated:
            self._transcript.finish_reason = "length"
        return self._transcript.trajectory(reward)

    def _new_messages(self, messages: list[Message]) -> list[Message]:
        known = len(self._messages)
        for index, (given, recorded) in enumerate(zip(messages, self._messages)):
            if not same_messages([given], [recorded]):
                raise RequestRefused(
                    f"messages[{index}] is not what this episode's conversation has there:"
                    " an episode is one conversation",
                    "conversation_diverged",
                )
        if len(messages) <= known:
            raise RequestRefused(
                f"the conversation has {known} messages already,"
                f" and none of the {len(messages)} given is new",
                "conversation_diverged",
            )
        return messages[known:]

    async def _extend(self, new: list[Message], tools: list[dict[str, Any]]) -> Transcript:
        """Begin the transcript, or add messages to it.

        Threads render and encode: a long text must not hold up everything else.
        """
        tokenizer = self.episode.tokenizer
        if self._transcript is None:
            tokens = await asyncio.to_thread(tokenizer.chat, new, tools)
            self._transcript = Transcript(self.episode, tokens)
        elif not await self._add(self._transcript, new):
            self.truncated = True
            raise RequestRefused(
                "the token budget of the episode (rollout.max_new_tokens) is used up",
                "context_length_exceeded",
            )
        return self._transcript

    async def _add(self, transcript: Transcript, new: list[Message]) -> bool:
        """Add messages, or return False if they do not fit."""
        tokenizer = self.episode.tokenizer
        text = await asyncio.to_thread(tokenizer.render_after_answer, new)
        if not transcript.may_fit(text):
            return False
        tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
        return transcript.add_tokens(tokens)


async def _respond(
    transcript: Transcript, max_tokens: int | None, stop: list[str], has_tools: bool
) -> dict[str, Any]:
    """Sample an answer as a `chat.completion` object."""
    before = len(transcript.tokens)
    text = await transcript.sample_text(max_tokens, stop)
    after = len(transcript.tokens)
    text = text[: min((i for i in map(text.find, stop) if i >= 0), default=len(text))]
    message = answer_message(text, has_tools)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls"
                if "tool_calls" in message
                else transcript.finish_reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": before,
            "completion_tokens": after - before,
            "total_tokens": after,
        },
    }
