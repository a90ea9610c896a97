"""Settings of `areal-lite simulate`: the machines, the lengths, and what is compared."""

from dataclasses import dataclass

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
    length_mean: float = setting(
        4000.0, "Mean length of a completion, in tokens.", minimum=1, maximum=MAX_TOKENS
    )
    length_spread: float = setting(
        0.9,
        "Standard deviation of the logarithm of a length, before rollout.max_new_tokens cuts it. "
        "0: all alike.",
        minimum=0,
        maximum=5,
    )
    length_shared: float = setting(
        0.5, "Share of that variance that the samples of a prompt share.", minimum=0, maximum=1
    )
    prompt_tokens: int = setting(
        200, "Length of a prompt, in tokens.", minimum=1, maximum=MAX_TOKENS
    )
    uniform_share: float = setting(
        0.0, "Share of the groups whose rewards are all equal.", minimum=0, maximum=0.95
    )
    reward_s: float = setting(
        0.0, "Seconds until a completion has its reward.", minimum=0, maximum=WEEK_S
    )
    bandwidth_share: float = setting(
        0.7, "Share of the memory bandwidth that decoding reaches.", above=0, maximum=1
    )
    arithmetic_share: float = setting(
        0.4, "Share of the arithmetic that training and prompts reach.", above=0, maximum=1
    )
    host_ms: float = setting(
        4.0, "Milliseconds of a decoding step besides the GPU's work.", minimum=0, maximum=1e6
    )
    step_fixed_s: float = setting(
        2.0, "Seconds of a training step besides its tokens.", minimum=0, maximum=WEEK_S
    )
    push_gb_s: float = setting(
        10.0, "Weights that a push sends in a second, in gigabytes.", above=0, maximum=1e6
    )
    push_fixed_s: float = setting(
        0.3, "Seconds of a pause besides sending the weights.", minimum=0, maximum=WEEK_S
    )
    warm_up: int | None = setting(
        None,
        "Steps before the measured ones. null: two more than buffer.max_staleness allows.",
        minimum=0,
        maximum=MAX_COUNT,
    )
    steps: int = setting(10, "Measured steps.", minimum=1, maximum=MAX_COUNT)
    grain: int | None = setting(
        None,
        "Tokens that a simulated token stands for. null: a 256th of rollout.max_new_tokens.",
        minimum=1,
        maximum=MAX_TOKENS,
    )
    lost_servers: int = setting(
        0, "Servers that are lost when the measured steps begin.", minimum=0, maximum=1_000_000
    )
    lost_s: float | None = setting(
        None, "Seconds until they are back. null: they stay away.", minimum=0, maximum=WEEK_S
    )
    compare: list[str] = setting(
        [],
        "Questions that are answered by more simulations: the number of servers, staleness, the "
        "steps between pushes, schedules, the loss of a node, and more GPUs.",
        choices=COMPARISONS,
    )
    gpus: list[int] = setting(
        [64, 512, 4096], "compare=[scale]: numbers of GPUs.", minimum=2, maximum=1_000_000
    )
    out: str | None = setting(None, "JSON file for the results, with a picture beside it.")
