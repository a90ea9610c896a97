"""Settings of the prompts, of their rewards and of the held-out problems."""

from dataclasses import dataclass
from typing import Any

from areal_lite.config.fields import MAX_COUNT, MAX_SEED, MAX_TOKENS, WEEK_S, setting


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
        "More arguments of that function: data.args.KEY=VALUE. hf takes name (of the data set's "
        "configuration), train_split (train) and eval_split (test).",
    )
    path: str | None = setting(None, "jsonl: the file. hf: a name on the hub, or a folder.")
    eval_path: str | None = setting(
        None, "Held-out problems. jsonl: the file. hf: a name or folder; null is data.path."
    )
    prompt_key: str = setting("question", "Field of a row with the prompt.")
    answer_key: str = setting("answer", "Field of a row with the answer to compare with.")
    chat: bool = setting(True, "jsonl, hf: apply the tokenizer's chat template to the prompt.")
    system_prompt: str | None = setting(None, "System message in front of each prompt.")
    max_prompt_tokens: int = setting(
        1024, "Longer prompts are left out.", minimum=1, maximum=MAX_TOKENS
    )
    shuffle: bool = setting(True, "Draw the prompts in a new random order in each epoch.")
    seed: int = setting(
        1, "Seed of that order, and of generated problems.", minimum=0, maximum=MAX_SEED
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
        "", "module:function, called as f(completion: str, answer: str) -> float. It may be async."
    )
    workers: int = setting(1, "Processes that run the function.", minimum=1, maximum=1024)
    timeout_s: float = setting(
        15.0, "Longest time for one reward, in seconds.", minimum=0.001, maximum=WEEK_S
    )
    on_failure: str = setting(
        "drop",
        "After an error or a timeout: drop the trajectory, or give it reward zero.",
        choices=("drop", "zero"),
    )


@dataclass
class EvalConfig:
    """Evaluation on held-out problems, on the same servers, while training continues."""

    problems: int = setting(
        200, "Problems of each set. 0 turns evaluation off.", minimum=0, maximum=1_000_000
    )
    every: int = setting(
        0,
        "Steps between evaluations. 0: only before and after training. With sync.every, the first "
        "push from then on is evaluated.",
        minimum=0,
        maximum=MAX_COUNT,
    )
    samples: int = setting(
        1,
        "Completions of each problem sampled at rollout.temperature, besides a greedy one.",
        minimum=0,
        maximum=10_000,
    )
    sets: list[str] = setting(
        [],
        "More sets of held-out problems: .jsonl files, or names and folders as in data.path.",
    )
    servers: int = setting(
        0,
        "Servers that an evaluation during training has to itself. They keep its version until it "
        "has ended. 0: it shares all servers, and pushes change the weights meanwhile.",
        minimum=0,
        maximum=1023,
    )
