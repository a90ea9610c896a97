"""Settings of the prompts, of their rewards and of the held-out problems.

Each source of `data.sources` has the settings of the run, with its own on top. A run without them
has one source without a name.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from areal_lite.config.fields import (
    MAX_COUNT,
    MAX_TOKENS,
    SECONDS,
    as_text,
    check_fields,
    did_you_mean,
    keys_of,
    setting,
)
from areal_lite.config.sections import RolloutConfig, Sampling, ServerConfig

SAMPLING_HELP = (
    "Sampling settings that override `rollout`: temperature (0: greedy), top_p, top_k, "
    "max_new_tokens, stop."
)


@dataclass
class DataConfig:
    """The prompts."""

    source: str = setting(
        "",
        "Kind of data: jsonl (a file), hf (a data set in Hugging Face format), or module:function, "
        "called as f(config, tokenizer, split) and returning a PromptSet.",
    )
    args: dict[str, Any] = setting(
        {},
        "Further arguments of that function: data.args.KEY=VALUE. hf takes name (of the data set's "
        "configuration), train_split (train) and eval_split (test).",
    )
    path: str | None = setting(None, "jsonl: the file. hf: a name on the hub, or a folder.")
    eval_path: str | None = setting(
        None, "Held-out problems. jsonl: the file. hf: a name or folder; null is data.path."
    )
    prompt_key: str = setting("question", "Field of a row with the prompt.")
    answer_key: str = setting("answer", "Field of a row with the reference answer. Empty: none.")
    chat: bool = setting(True, "jsonl, hf: apply the tokenizer's chat template to the prompt.")
    chat_template_kwargs: dict[str, Any] = setting(
        {}, "Variables of the chat template: {enable_thinking: false, today: 2026-12-31}."
    )
    system_prompt: str | None = setting(None, "System message in front of each prompt.")
    max_prompt_tokens: int = setting(
        1024, "Longest prompt, in tokens. Longer ones are left out.", within=(1, MAX_TOKENS)
    )
    sources: dict[str, Any] = setting(
        {},
        "Several sources by name: data.sources.NAME.KEY=VALUE. KEY is one of data; weight, the "
        "relative frequency of its prompts (1 to 1000); reward.KEY; workflow or workflow_args. "
        "Without it, a key is as in data, reward and rollout.",
    )


@dataclass
class RewardConfig:
    """The rewards of completions."""

    function: str = setting(
        "",
        "module:function, called as f(completion: str, answer: str) -> float. It may be async. A "
        "parameter `info` gets the other fields of the row. For a judge: module:rubric.md.",
    )
    workers: int = setting(1, "Processes that run the function.", within=(1, 1024))
    timeout_s: float = setting(15.0, "Time limit of a reward or judge, in seconds.", within=SECONDS)


@dataclass
class EvalConfig:
    """Evaluation on held-out problems, on the same servers, while training continues."""

    problems: int = setting(
        200, "Problems of each set. 0 turns evaluation off.", within=(0, 1_000_000)
    )
    every: int = setting(
        0,
        "Steps between evaluations, each at the next push. 0: only before and after training.",
        within=(0, MAX_COUNT),
    )
    samples: int = setting(
        1, "Sampled completions of each problem, besides a greedy one.", within=(0, 10_000)
    )
    sets: list[str] = setting(
        [], "More sets of held-out problems: .jsonl files, or names and folders as in data.path."
    )
    sampling: dict[str, Any] = setting({}, SAMPLING_HELP)


# A name is a part of the names of metrics and of the ids of prompts.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_WEIGHT = 1000


class Sampled(Protocol):
    """The settings of a command that samples completions and scores them: `train`, `eval`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    model: str
    seed: int
    data: DataConfig
    reward: RewardConfig
    server: ServerConfig
    rollout: RolloutConfig


C = TypeVar("C", bound=Sampled)
S = TypeVar("S")


@dataclass
class SourceConfig(DataConfig):
    """The settings of one source: the settings of `data`, and its own."""

    weight: int = setting(1, "Relative frequency of its prompts.", within=(1, _MAX_WEIGHT))
    reward: RewardConfig = field(default_factory=RewardConfig)
    workflow: str = setting("", "As rollout.workflow.")
    workflow_args: dict[str, Any] = setting({}, "As rollout.workflow_args.")
    reference: str | None = setting(
        None, "train: as algo.reference, such as a teacher for these prompts."
    )


def source_configs(config: C) -> dict[str, C]:
    """Return by source the settings of the run as they are for its prompts. Raises ValueError."""
    configs = {}
    for name, own in config.data.sources.items():
        if not _NAME.fullmatch(str(name)):
            raise ValueError(
                f"data.sources.{name}: a name has 1 to 64 letters, digits, dashes and underscores"
            )
        with naming(name):
            source = _source(config, own)
        own_rollout = {"workflow": source.workflow, "workflow_args": source.workflow_args}
        parts: dict[str, Any] = {"data": source, "reward": source.reward}
        parts["rollout"] = replace(config.rollout, **own_rollout)
        if algo := getattr(config, "algo", None):  # only a training run has an objective
            parts["algo"] = replace(algo, reference=source.reference)
        configs[name] = replace(config, **parts)
    return configs or {"": config}


def longest_sequence(config: Any) -> int:
    """Count the tokens of the longest sequence that a run can have."""
    sources = source_configs(config).values()
    return max(source.data.max_prompt_tokens for source in sources) + config.rollout.max_new_tokens


def sampling_of_evaluation(config: Any) -> Sampling:
    """Return how evaluations sample: as in training, with its own on top. Raises ValueError."""
    in_run = hasattr(config, "eval")
    try:
        return _overridden(config.rollout.sampling, (config.eval if in_run else config).sampling)
    except ValueError as error:
        raise ValueError(f"{'eval.' if in_run else ''}sampling: {error}") from None


def reference_folders(config: Any) -> dict[str, str | None]:
    """Return by the name of each source of a training run the folder of its reference policy."""
    return {name: own.algo.reference for name, own in source_configs(config).items()}


def weight_of(data: DataConfig) -> int:
    """Return the weight of a source, given its `data` in `source_configs`."""
    return data.weight if isinstance(data, SourceConfig) else 1


def shares(configs: Mapping[str, C]) -> dict[str, float]:
    """Return by name the share of the draws that each source has, of 1."""
    total = sum(weight_of(own.data) for own in configs.values())
    return {name: weight_of(own.data) / total for name, own in configs.items()}


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the name of a source in front of a ValueError that its settings cause."""
    try:
        yield
    except ValueError as error:
        if not source:
            raise
        raise ValueError(f"data.sources.{source}: {error}") from error


def _source(config: Sampled, own: Any) -> SourceConfig:
    """Override the settings of the run with a source's own. Raises ValueError."""
    if not isinstance(own, Mapping):
        raise ValueError(f"{own} is not a set of keys and values")
    if "sources" in own:
        raise ValueError("a source has no sources of its own")
    if not isinstance(reward := own.get("reward", {}), Mapping):
        raise ValueError(f"reward={reward}: set its keys, such as reward.function={reward}")
    # The arguments of another source or workflow would not fit.
    data: dict[str, Any] = vars(config.data) | {"sources": {}}
    data |= {"args": {}} if "source" in own else {}
    shared = SourceConfig(
        **data,
        reward=config.reward,
        workflow=config.rollout.workflow,
        workflow_args={} if "workflow" in own else config.rollout.workflow_args,
        reference=algo.reference if (algo := getattr(config, "algo", None)) else None,
    )
    return _overridden(shared, own)


def _overridden(shared: S, own: Mapping[str, Any]) -> S:
    """Override the settings of a section. Raises ValueError."""
    section: Any = shared
    try:
        parts = OmegaConf.structured(type(shared)), as_text(asdict(section)), as_text(dict(own))
        merged: Any = OmegaConf.to_object(OmegaConf.merge(*parts))
    except ConfigKeyError as error:
        keys = [key for key in keys_of(type(shared)) if key != "sources"]
        remedy = f"{did_you_mean(str(error.full_key), keys)} choose one of {', '.join(keys)}"
        raise ValueError(f"unknown key {error.full_key}; {remedy.lstrip()}") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    check_fields(merged)
    return merged
