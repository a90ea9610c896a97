"""Problems that the package reasoning-gym makes, and their own scores.

    +task=reasoning_gym data.args.tasks={chain_sum: {max_terms: 3}, maze: {}}

`tasks` lists tasks by name, or has the fields of the config of each. Their problems take turns.
Held-out problems are the same for every seed, and are never trained on.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Row, Split, TextPrompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.extensions import require

# A task makes its problem i from the seed and i, by their sum.
_HELD_OUT_SEED = 10**9


def problems(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    tasks: Any = (),
    size: int = 1000,
    held_out: int = 200,
    seed: int = 1,
) -> TextPrompts:
    """Open the problems of a split. Raises ValueError if the arguments cannot be used.

    Args:
        tasks: names, or names and the fields of their configs.
        size: problems to train on.
        held_out: problems to evaluate on.
        seed: of the problems to train on.
    """
    if not tasks or min(size, held_out) < 1 or not 0 <= seed <= _HELD_OUT_SEED - size:
        raise ValueError(
            "data.args: name tasks; size and held_out must be positive, and seed from 0 to"
            f" {_HELD_OUT_SEED} - size"
        )
    configs = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks, {})
    rows = list(_rows(configs, held_out, _HELD_OUT_SEED))
    if split == "train":
        known = {row["question"] for _, row in rows}
        rows = [row for row in _rows(configs, size, seed) if row[1]["question"] not in known]
    if not rows:
        raise ValueError("data.args.tasks: every problem is a held-out one: use larger configs")
    own = replace(config, prompt_key="question", answer_key="answer")
    return TextPrompts(iter(rows), own, tokenizer)


def reward(completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return the task's score of what stands in the last `<answer>` of a completion.

    An answer that makes the task's evaluator raise is worth 0. `info` is of a row of `problems`.
    """
    utils = require("reasoning_gym.utils", "reasoning-gym")
    task, entry = _task(info["task"], json.dumps(info["config"])), ast.literal_eval(info["entry"])
    try:
        return float(task.score_answer(answer=utils.extract_answer(completion), entry=entry))
    except Exception:  # the answer is any text, and the evaluators of most tasks parse it
        return 0.0


def _rows(configs: Mapping[str, Mapping[str, Any]], size: int, seed: int) -> Iterator[Row]:
    """Yield the problems of all tasks in turn, `size` in total. Raises ValueError."""
    gym = require("reasoning_gym", "reasoning-gym")
    made = {}
    for name, config in configs.items():
        try:
            made[name] = gym.create_dataset(name, **config, seed=seed, size=size)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"data.args.tasks.{name}={dict(config)}: {error}") from None
    for number in range(size):
        name = list(made)[number % len(made)]
        entry = made[name][number // len(made)]
        answer = "" if entry["answer"] is None else str(entry["answer"])
        # In another process, some tasks make another problem from the same seed.
        info = {"task": name, "config": dict(configs[name]), "entry": repr(_plain(entry))}
        yield f"{name}/{seed}:{number}", {"question": entry["question"], "answer": answer, **info}


def _plain(value: Any) -> Any:
    """Return a value with Python's own types in place of numpy's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


@lru_cache(maxsize=256)
def _task(name: str, config: str) -> Any:
    return require("reasoning_gym", "reasoning-gym").create_dataset(name, **json.loads(config))
