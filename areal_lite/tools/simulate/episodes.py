"""The workflow of simulated rollouts: the server generates as many tokens as the draw says.

It takes the place of `rollout.workflow`. A request asks for exactly the length that was drawn, and
a modelled server generates as many tokens as it is asked for. A completion that moves to another
server therefore still ends after its length.

A simulated token stands for `grain` tokens, which keeps the controller's arrays short.
"""

import asyncio
import hashlib

import numpy as np

from areal_lite.rollout.episode import Episode
from areal_lite.rollout.transcript import Transcript
from areal_lite.tools.simulate.lengths import Lengths
from areal_lite.trajectory import FinishReason, Trajectory


class SimulatedEpisodes:
    """Plays episodes whose lengths are drawn.

    Args:
        lengths: draws the lengths of a group, in tokens.
        seed: of the lengths and of the rewards.
        group_size: samples of a prompt.
        grain: tokens that a simulated token stands for.
        uniform_share: share of the prompts whose answers all get the same reward.
        reward_s: seconds until a completion has its reward.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        seed: int,
        group_size: int,
        grain: int,
        uniform_share: float = 0.0,
        reward_s: float = 0.0,
    ):
        self._lengths = lengths
        self._seed = seed
        self._group_size = group_size
        self._grain = grain
        self._uniform_share = uniform_share
        self._reward_s = reward_s
        # Drawn once for a group; its last sample removes them.
        self._drawn: dict[int, np.ndarray] = {}

    async def __call__(self, episode: Episode) -> Trajectory:
        """Play one episode."""
        length = self._length(episode)
        transcript = Transcript(episode)
        await transcript.sample(max_new_tokens=length)
        if length < episode.params.max_new_tokens:
            transcript.finish_reason = FinishReason.STOP
        if self._reward_s:
            await asyncio.sleep(self._reward_s)
        return transcript.trajectory(self._reward(episode))

    def _length(self, episode: Episode) -> int:
        """Return the length of this sample in simulated tokens, at least one."""
        group, sample = episode.group_id, episode.sample_index
        if group not in self._drawn:
            prompt = int(episode.prompt.prompt_id)
            self._drawn[group] = self._lengths.group(self._seed, prompt, self._group_size)
        drawn = self._drawn[group]
        if sample == self._group_size - 1:
            del self._drawn[group]
        tokens = round(int(drawn[sample]) / self._grain)
        return min(max(1, tokens), episode.params.max_new_tokens)

    def _reward(self, episode: Episode) -> float:
        """Return 1 for every sample of a uniform prompt, else 0 and 1 in turns."""
        key = f"{self._seed} {episode.prompt.prompt_id}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") / 2**32
        return 1.0 if draw < self._uniform_share else float(episode.sample_index % 2)
