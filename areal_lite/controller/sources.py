"""The data sources of a run: their prompts and their rewards."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from areal_lite.config import TrainConfig, naming, source_configs
from areal_lite.config.data import Sampled, weight_of
from areal_lite.data.prompts import MixedPrompts, PromptSet, load_prompts
from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardPool
from areal_lite.rollout.episode import Workflow
from areal_lite.run_dir.store import StoreThread


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data source.

    Args:
        config: the settings of the run, with those of the source.
        prompts: the training prompts; None when nothing is trained.
        eval_prompts: the held-out problems; None without evaluation.
        rewards: scores completions.
    """

    config: Sampled
    prompts: PromptSet | None
    eval_prompts: PromptSet | None
    rewards: RewardPool


@asynccontextmanager
async def open_sources(config: Sampled) -> AsyncIterator[dict[str, Source]]:
    """Load the prompts and start the reward processes of each source, by its name.

    Sources with the same reward share its processes, which end with the block. Raises ValueError
    that names the source and what cannot be used.
    """
    trains = isinstance(config, TrainConfig)
    evaluates = not trains or config.eval.problems > 0
    sources: dict[str, Source] = {}
    async with AsyncExitStack() as pools:
        for name, own in source_configs(config).items():
            with naming(name):
                same = (s.rewards for s in sources.values() if s.config.reward == own.reward)
                reward = own.reward
                rewards = next(same, None) or await pools.enter_async_context(
                    RewardPool(reward.function, reward.workers, reward.timeout_s)
                )
                sources[name] = Source(
                    config=own,
                    prompts=load_prompts(own.data, own.model, "train") if trains else None,
                    eval_prompts=load_prompts(own.data, own.model, "eval") if evaluates else None,
                    rewards=rewards,
                )
        yield sources


def drawn_prompts(sources: Mapping[str, Source]) -> tuple[MixedPrompts, PromptSampler]:
    """Return the training prompts of all sources as one set, and its sampler."""
    prompts, orders = {}, []
    for name, source in sources.items():
        assert source.prompts is not None
        prompts[name] = source.prompts
        size, config = source.prompts.num_prompts, source.config
        orders.append(SourceOrder(size, config.seed, weight_of(config.data), name))
    return MixedPrompts(prompts), PromptSampler(*orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The parts that a simulator may replace.

    Args:
        sources: the data sources by name; a single one may have none.
        tokenizer: decodes completions for the reward function.
        store: keeps groups and trajectories; None when nothing is trained.
        clock: returns seconds since 1970.
        eval_sets: further held-out sets of a single source, by name.
        workflow: plays the episodes; None: that of `rollout.workflow` for each source.
    """

    sources: Mapping[str, Source]
    tokenizer: Tokenizer
    store: StoreThread | None
    clock: Callable[[], float]
    eval_sets: Mapping[str, PromptSet] = field(default_factory=dict)
    workflow: Workflow | None = None
