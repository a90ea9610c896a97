"""Several turns: after each answer a function of the user says something to it, or that it is over."""

from __future__ import annotations

import inspect
from numbers import Real

from areal_lite.rollout.episode import Episode
from areal_lite.rollout.transcript import Transcript
from areal_lite.system.imports import load_object
from areal_lite.trajectory import Trajectory


class MultiTurn:
    """`feedback` names `module:function`, sync (and quick) or async, called as f(prompt, answers) with all answers of the policy so far.

    It returns a text, which the policy is told as the user's next message; None, when it is over; or a number, which is the reward, and it is
    over. It also ends after `max_turns` answers, and when the token budget (rollout.max_new_tokens, over all turns and
    what is said between them) is used up. Without a reward of its own the reward function scores the last answer.
    """

    def __init__(self, feedback: str, max_turns: int = 4):
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: at least 1")
        self._feedback, self._max_turns = (
            load_object("rollout.workflow_args.feedback", feedback),
            max_turns,
        )

    async def __call__(self, episode: Episode) -> Trajectory:
        transcript, answers = Transcript(episode), []
        while True:
            answers.append(await transcript.complete())
            said = self._feedback(episode.prompt, list(answers))
            if inspect.isawaitable(said):
                said = await said
            if isinstance(said, Real):
                return transcript.trajectory(float(said))
            if (
                said is None
                or len(answers) == self._max_turns
                or not transcript.reply([{"role": "user", "content": said}])
            ):
                return transcript.trajectory()
