"""Several turns: a function of the user replies to each answer, or ends the episode."""

import asyncio
from numbers import Real

from areal_lite.data.tokenizer import Message
from areal_lite.extensions import load_object
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory
from areal_lite.workers.marks import called


class MultiTurn:
    """A conversation between the policy and a function `feedback(prompt, answers)`.

    `feedback` is `module:function`. A plain function runs in a thread. It gets all answers so far
    and returns
      * a text, which becomes the user's next message;
      * None, to end the episode;
      * a number, to end the episode with this reward.

    The episode also ends after `max_turns` answers, and when the token budget is used up. Without a
    reward from `feedback`, the reward function scores the last answer.
    """

    def __init__(self, feedback: str, max_turns: int = 4):
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1")
        self._feedback = load_object("rollout.workflow_args.feedback", feedback)
        self._max_turns = max_turns

    async def __call__(self, episode: Episode) -> Trajectory:
        transcript = Transcript(episode)
        answers: list[str] = []
        while True:
            answers.append(await transcript.sample_text())
            reply = await called(self._feedback, episode.prompt, list(answers))
            if isinstance(reply, Real):
                return transcript.trajectory(float(reply))
            if (
                reply is None
                or len(answers) == self._max_turns
                or not transcript.add_messages([{"role": "user", "content": reply}])
            ):
                return transcript.trajectory()


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
