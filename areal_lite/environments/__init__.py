"""Adapters to packages with tasks and games: the data, the turns and the rewards of each."""


def no_reward(completion: str, answer: str) -> float:
    """Refuse to score an episode that its environment did not score."""
    raise ValueError("the environment has given no reward")
