"""A workflow for games with partial credit, such as TextArena's."""

from areal_lite.environments.games import Play
from areal_lite.rollout.episode import Episode
from areal_lite.trajectory import Trajectory


class Win(Play):
    """Play a game for a reward of 1 if it is won, and 0 otherwise."""

    async def __call__(self, episode: Episode) -> Trajectory:
        trajectory = await super().__call__(episode)
        trajectory.reward = float((trajectory.reward or 0.0) >= 1)
        return trajectory
