"""Rules about staleness and replay: the buffer's settings with those of the pushes and the steps.

Each broken rule is a ValueError of one line, as in rules.py.
"""

from areal_lite.config.commands import TrainConfig


def check_buffer(config: TrainConfig) -> None:
    """Check that batches can be made within the staleness bound, or drawn for replay."""
    if config.buffer.window is not None:
        _window(config)
    if config.buffer.replay.capacity:
        _replay(config)
    else:
        _staleness(config)


def _staleness(config: TrainConfig) -> None:
    """Check that the steps between two pushes may use what the weights of the first sampled."""
    every, bound = config.sync.every, config.buffer.max_staleness
    needed = min(every, config.trainer.steps) - 1
    if bound < needed:
        raise ValueError(
            f"sync.every={every} trains {needed + 1} steps on what one version of the weights "
            f"sampled, and buffer.max_staleness={bound} forbids tokens that are {needed} steps "
            f"old: set it to {needed} or more, or sync.every=1"
        )
    if config.max_lead < needed:
        window, batch = config.buffer.window, config.trainer.batch_groups
        least = bound - config.max_lead + needed
        raise ValueError(
            f"buffer.window={window} can make a group {bound - config.max_lead} steps older "
            f"(trainer.batch_groups={batch}), more than buffer.max_staleness={bound} allows with "
            f"sync.every={every}: set buffer.max_staleness to {least} or more, or lower the window"
        )


def _window(config: TrainConfig) -> None:
    """Check that batches are taken in the order in which a window limits them."""
    window = f"buffer.window={config.buffer.window}"
    if config.buffer.replay.capacity:
        raise ValueError(f"{window} is for batches in order, and replay draws them: unset one")
    if config.buffer.fixed_lag:
        raise ValueError(
            f"{window} does not go with buffer.fixed_lag, with which no group runs when a batch is "
            "taken: unset one"
        )


def _replay(config: TrainConfig) -> None:
    replay, group_size = config.buffer.replay, config.rollout.group_size
    capacity = f"buffer.replay.capacity={replay.capacity}"
    if config.algo.loss != "tb":
        raise ValueError(
            f"{capacity} trains on tokens of any age, which algo.loss={config.algo.loss} cannot: "
            "set algo.loss=tb"
        )
    if replay.capacity < group_size:
        raise ValueError(f"{capacity} holds less than a group (rollout.group_size={group_size})")
    if group_size == 1:
        raise ValueError(
            f"{capacity} balances the trajectories of a prompt against each other: "
            "rollout.group_size must be 2 or more"
        )
    if replay.max_prompts < config.trainer.batch_groups:
        raise ValueError(
            f"buffer.replay.max_prompts={replay.max_prompts} is less than a batch "
            f"(trainer.batch_groups={config.trainer.batch_groups})"
        )
    conflicts = {
        "buffer.fixed_lag": config.buffer.fixed_lag,
        "rollout.retire_above": config.rollout.retire_above is not None,
    }
    for key, is_set in conflicts.items():
        if is_set:
            raise ValueError(
                f"{key} does not go with {capacity}, for which generation never stops: unset one"
            )
