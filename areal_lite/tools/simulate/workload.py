"""The workload that the settings describe: measured in a run, or from data sheets and lengths."""

from pathlib import Path

from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.calibrate import measured_workload
from areal_lite.tools.simulate.hardware import server_speed, trainer_speed
from areal_lite.tools.simulate.lengths import LogNormalLengths
from areal_lite.tools.simulate.run import Loss, Workload

_GRAINS = 256


def workload(config: SimulateConfig) -> Workload:
    """Return what `simulate` runs. Raises ValueError for settings that cannot be."""
    simulation = config.simulate
    warm_up = simulation.warm_up
    if warm_up is None:
        warm_up = config.buffer.max_staleness + 2
    if simulation.measured_run is not None:
        return measured_workload(Path(simulation.measured_run), warm_up, simulation.steps)
    longest = config.rollout.max_new_tokens
    loss = None
    if simulation.lost_servers:
        loss = Loss(servers=simulation.lost_servers, after_s=0.0, return_s=simulation.lost_s)
    return Workload(
        lengths=LogNormalLengths(
            mean=simulation.length_mean,
            spread=simulation.length_spread,
            longest=longest,
            shared=simulation.length_shared,
        ),
        server=server_speed(config),
        trainer=trainer_speed(config),
        prompt_tokens=simulation.prompt_tokens,
        share_prompts=not config.server.args.get("disable_radix_cache", False),
        uniform_share=simulation.uniform_share,
        reward_s=simulation.reward_s,
        warm_up=warm_up,
        steps=simulation.steps,
        grain=simulation.grain or max(1, longest // _GRAINS),
        loss=loss,
    )


def check_simulation(config: SimulateConfig) -> None:
    """Check what a simulation cannot model. Raises ValueError."""
    if config.buffer.replay.capacity:
        raise ValueError("buffer.replay is not simulated: set buffer.replay.capacity=0")
    if config.simulate.lost_servers >= config.server.count:
        raise ValueError(
            f"simulate.lost_servers={config.simulate.lost_servers} leaves none of server.count="
            f"{config.server.count}: lose fewer"
        )
