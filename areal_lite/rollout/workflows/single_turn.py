"""One prompt, one answer: the default workflow."""

from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory


async def single_turn(episode: Episode) -> Trajectory:
    transcript = Transcript(episode)
    await transcript.sample()
    return transcript.trajectory()
