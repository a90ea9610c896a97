"""A group that works together: in each round every member reads the others' last answers, then answers again."""

from __future__ import annotations

import asyncio

from areal_lite.rollout.episode import Episode
from areal_lite.rollout.transcript import Transcript
from areal_lite.trajectory import Trajectory


class Together:
    """`rounds` answers per member. A member whose token budget is used up stays silent from then on; the others still read its last answer."""

    grouped = True

    def __init__(
        self, rounds: int = 2, say: str = "Others answered:\n\n{answers}\n\nAnswer again."
    ):
        if rounds < 1 or "{answers}" not in say:
            raise ValueError(
                f"rounds={rounds} must be at least 1, and say={say!r} must have {{answers}} in it"
            )
        self._rounds, self._say = rounds, say

    async def __call__(self, episodes: list[Episode]) -> list[Trajectory]:
        transcripts = [Transcript(episode) for episode in episodes]
        answers = await asyncio.gather(*(transcript.complete() for transcript in transcripts))
        speaking = list(range(len(transcripts)))
        for _ in range(self._rounds - 1):
            speaking = [
                i
                for i in speaking
                if transcripts[i].reply([{"role": "user", "content": self._told(answers, i)}])
            ]
            for i, answer in zip(
                speaking, await asyncio.gather(*(transcripts[i].complete() for i in speaking))
            ):
                answers[i] = answer
        return [transcript.trajectory() for transcript in transcripts]

    def _told(self, answers: list[str], member: int) -> str:
        return self._say.replace(
            "{answers}", "\n\n".join(answer for i, answer in enumerate(answers) if i != member)
        )
