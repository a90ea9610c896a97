"""TODO docstring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_lite.data.tokenizer import Message
from areal_lite.rollout.episode import Episode
from areal_lite.servers.completion import Completion, GenerationChunk
from areal_lite.trajectory import Trajectory


class Transcript:
    """One trajectory in the making: sampled tokens and environment tokens, in the order in which the servers saw them."""

    def __init__(self, episode: Episode, tokens: Sequence[int] | None = None):
        """`tokens`: what it begins with, the episode's prompt if None."""
        self.episode = episode
        self.finish_reason = "abort"
        self._chunks: list[GenerationChunk] = []
        self._requests = 0
        self._started_at = episode.clock()
        self._add(np.asarray(episode.prompt.tokens if tokens is None else tokens, np.int32))
        self._limit = len(self.tokens) + episode.params.max_new_tokens

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]"""
        return np.concatenate([chunk.tokens for chunk in self._chunks])

    @property
    def room(self) -> int:
        """How many tokens may still follow."""
        return self._limit - len(self.tokens)

    async def complete(self, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """Let the policy continue; returns the text that it wrote, without special tokens. There must be room."""
        return self.episode.tokenizer.decode((await self.sample(max_new_tokens, stop)).tokens)

    async def sample(
        self, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """`complete`, for who does not need the text."""
        budget = self.room if max_new_tokens is None else min(max_new_tokens, self.room)
        completion = await self.episode.complete(self.tokens, max_new_tokens=budget, stop=stop)
        self._chunks += completion.chunks
        self._requests += completion.requests
        self.finish_reason = completion.finish_reason
        return completion

    def reply(self, messages: Sequence[Message]) -> bool:
        """`append` environment messages: as the chat template writes them after an answer, or as plain text if the prompt is no chat."""
        tokenizer = self.episode.tokenizer
        if self.episode.prompt.messages:
            return self.append(tokenizer.chat_after_answer(messages))
        return self.append(
            tokenizer.encode(
                "".join(message["content"] for message in messages), add_special_tokens=False
            )
        )

    def append(self, tokens: Sequence[int]) -> bool:
        """Add environment tokens. False, with nothing added, if they would leave no room for an answer: the trajectory is then truncated."""
        if (
            tokens
            and tokens[0] == self._chunks[-1].tokens[-1]
            and tokens[0] in self.episode.params.stop_token_ids
        ):
            tokens = tokens[1:]  # the end of the answer, which the policy has sampled itself
        if len(tokens) >= self.room:
            self.finish_reason = "length"
            return False
        self._add(np.asarray(tokens, np.int32))
        return True

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """What there is; whoever plays the workflow checks it."""
        episode = self.episode
        versions = np.concatenate([chunk.versions for chunk in self._chunks])
        return Trajectory(
            group_id=episode.group_id,
            prompt_id=episode.prompt.prompt_id,
            sample_index=episode.sample_index,
            tokens=self.tokens,
            loss_mask=versions >= 0,
            behavior_logprobs=np.concatenate([chunk.logprobs for chunk in self._chunks]),
            versions=versions,
            finish_reason=self.finish_reason,
            reward=reward,
            started_at=self._started_at,
            finished_at=episode.clock(),
            requests=self._requests,
            kv_version=min(
                (chunk.kv_version for chunk in self._chunks if chunk.finish_reason), default=-1
            ),
        )

    def _add(self, tokens: np.ndarray) -> None:
        count = len(tokens)
        self._chunks.append(
            GenerationChunk(
                tokens=tokens,
                logprobs=np.zeros(count, np.float32),
                versions=np.full(count, -1, np.int32),
                finish_reason="",
            )
        )
