"""Define the settings of a simulation: of `train`, of the machines, and the questions."""

from dataclasses import dataclass, field

from areal_lite.config import TrainConfig
from areal_lite.config.commands import LOCAL, Command
from areal_lite.config.fields import MAX_COUNT, MAX_TOKENS, WEEK_S, setting

GPUS = ("a100", "h100", "h800", "h200", "b200")
SHAPES = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "olmo3-7b")
COMPARISONS = ("servers", "staleness", "pushes", "schedules", "loss", "scale")


@dataclass
class SimulationConfig:
    """The modelled servers and trainer, and what a simulation answers."""

    gpu: str = setting("h100", "Kind of GPU: memory, bandwidth and arithmetic.", choices=GPUS)
    shape: str = setting(
        "qwen2.5-7b", "Model, unless `model` names a checkpoint folder.", choices=SHAPES
    )
    measured_run: str | None = setting(
        None,
        "Run directory of a run: lengths, speeds and pushes are measured in it, and the settings "
        "below are not used.",
    )
    length_mean: float = setting(4000.0, "Mean response, in tokens.", within=(1, MAX_TOKENS))
    length_spread: float = setting(
        0.9,
        "Standard deviation of the logarithm of a length, before rollout.max_new_tokens cuts it. "
        "0: all equal.",
        within=(0, 5),
    )
    prompt_tokens: int = setting(200, "Prompt length, in tokens.", within=(1, MAX_TOKENS))
    uniform_share: float = setting(0.0, "Share of groups with equal rewards.", within=(0, 0.95))
    reward_s: float = setting(0.0, "Seconds to score a completion.", within=(0, WEEK_S))
    bandwidth_share: float = setting(
        0.7, "Share of the memory bandwidth that decoding reaches.", within=(0.001, 1)
    )
    arithmetic_share: float = setting(
        0.4, "Share of the arithmetic that training and prompts reach.", within=(0.001, 1)
    )
    host_ms: float = setting(4.0, "Host's milliseconds in a decoding step.", within=(0, 1e6))
    step_fixed_s: float = setting(2.0, "Fixed seconds of a step.", within=(0, WEEK_S))
    push_gb_s: float = setting(10.0, "Speed of a push, in gigabytes a second.", within=(0.001, 1e6))
    push_fixed_s: float = setting(0.3, "Fixed seconds of a pause.", within=(0, WEEK_S))
    warm_up: int | None = setting(
        None,
        "Steps before the measured ones. null: buffer.max_staleness + 2.",
        within=(0, MAX_COUNT),
    )
    steps: int = setting(10, "Measured steps.", within=(1, MAX_COUNT))
    compare: list[str] = setting(
        [], "Questions to answer by more simulations.", choices=COMPARISONS
    )
    gpus: list[int] = setting(
        [64, 512, 4096], "compare=[scale]: numbers of GPUs.", within=(2, 1_000_000)
    )
    out: str | None = setting(None, "JSON file for the results.")


@dataclass
class SimulateConfig(TrainConfig):
    """A training run in virtual time: the settings of `train`, and of the modelled parts."""

    model: str | None = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "Folder with the model's config.json. null: simulate.shape."
    )
    simulate: SimulationConfig = field(default_factory=SimulationConfig)


LOCAL["simulate"] = Command(schema=SimulateConfig, entry="benchmarks.simulate:run")
