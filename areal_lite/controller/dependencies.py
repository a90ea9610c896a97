"""TODO docstring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_lite.data.prompts import PromptSet
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardPool
from areal_lite.run_dir.store_thread import StoreThread


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What controller and dispatcher are made of; a simulator replaces those that wait for the world. `clock` is in seconds since 1970."""

    prompts: PromptSet | None
    eval_prompts: PromptSet | None
    tokenizer: Tokenizer
    rewards: RewardPool
    store: StoreThread
    clock: Callable[[], float]
    eval_sets: Mapping[str, PromptSet] = field(default_factory=dict)  # further ones, by name
