"""A workflow of your own: a referee reads along, and ends the episode at the first wrong line.

A workflow turns a prompt into a trajectory. This one asks for one line at a time. It gives its
reward itself, a share for each right line, so the model learns from the lines before its mistake.
Nothing that comes after a mistake is generated.
"""

from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory


class Referee:
    """Reward right lines. `rollout.workflow_args` are the arguments of `__init__`."""

    def __init__(self, all_or_nothing: bool = False):
        self.all_or_nothing = all_or_nothing

    async def __call__(self, episode: Episode) -> Trajectory:
        transcript = Transcript(episode)  # begins with the prompt's tokens
        lines = solution(episode.prompt.text, episode.prompt.answer)
        right = 0
        # The token that completes a text of `stop` belongs to the line.
        while right < len(lines) and transcript.remaining_tokens > 0:
            if await transcript.sample_text(stop=["\n"]) != lines[right]:
                break
            right += 1
        if self.all_or_nothing:
            return transcript.trajectory(reward=float(right == len(lines)))
        return transcript.trajectory(reward=right / len(lines))


def solution(prompt: str, answer: str) -> list[str]:
    """Write the lines that the model should write: `b4a7+B8A5=?` begins with `a7+A5+0=1z2`."""
    first, second = prompt.removesuffix("=?").split("+")
    lines, carry = [], 0
    for column, place in enumerate(range(len(first) - 2, -1, -2)):  # the units come last
        a, b = first[place : place + 2], second[place : place + 2]
        carry_out, digit = divmod(int(a[1]) + int(b[1]) + carry, 10)
        lines.append(f"{a}+{b}+{carry}={carry_out}{'zyx'[column]}{digit}\n")
        carry = carry_out
    return [*lines, f"#{answer}"]
