"""The parts that the controller and the dispatcher work with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_lite.controller.sources import Source
from areal_lite.data.prompts import PromptSet
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Workflow
from areal_lite.run_dir.store_thread import StoreThread


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
