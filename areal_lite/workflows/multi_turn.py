"""Several turns: a function of the user replies to each answer, or ends the episode."""

from typing import SupportsFloat

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
      * a number, to end the episode with this reward;
      * a pair of such a text or None, and a number: what the answer has earned.

    The episode also ends after `max_turns` answers, and when the token budget is used up. Its
    reward is what `feedback` has given for it, or for its answers together. Without any, the
    reward function scores the last answer.
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
            if isinstance(reply, SupportsFloat):
                return transcript.trajectory(float(reply))
            if isinstance(reply, tuple):
                reply, earned = reply
                transcript.credit(earned)
            is_over = reply is None or len(answers) == self._max_turns
            if is_over or not transcript.add_messages([{"role": "user", "content": reply}]):
                return transcript.trajectory(transcript.earned)
