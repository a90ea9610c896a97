"""A grouped workflow: the samples of a group read each other's answers, and answer again.

areal-lite train rollout.workflow=examples.custom_workflow.together:Together model=…
"""

import asyncio

from areal_lite.data.tokenizer import Message
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory


class Together:
    """A grouped workflow of `rounds` answers per sample.

    `say` is the message between two rounds; `{answers}` in it stands for the other samples' last
    answers. A sample whose token budget is used up gives no more answers; its last one stays.
    """

    grouped = True

    def __init__(
        self, rounds: int = 2, say: str = "Others answered:\n\n{answers}\n\nAnswer again."
    ):
        if rounds < 1 or "{answers}" not in say:
            raise ValueError(
                f"rounds={rounds} must be at least 1, and say={say!r} needs {{answers}}"
            )
        self._rounds = rounds
        self._say = say

    async def __call__(self, episodes: list[Episode]) -> list[Trajectory]:
        transcripts = [Transcript(episode) for episode in episodes]
        answers = await asyncio.gather(*(t.sample_text() for t in transcripts))
        active = list(range(len(transcripts)))
        for _ in range(self._rounds - 1):
            active = [i for i in active if transcripts[i].add_messages([self._message(answers, i)])]
            new = await asyncio.gather(*(transcripts[i].sample_text() for i in active))
            for i, answer in zip(active, new):
                answers[i] = answer
        return [transcript.trajectory() for transcript in transcripts]

    def _message(self, answers: list[str], sample_index: int) -> Message:
        others = [answer for i, answer in enumerate(answers) if i != sample_index]
        content = self._say.replace("{answers}", "\n\n".join(others))
        return {"role": "user", "content": content}
