"""TODO docstring."""

from __future__ import annotations

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Prompt, Split
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.quickstart import addition


class AdditionPrompts:
    """Addition problems, by index; see `areal_lite.quickstart.addition`."""

    num_prompts = None
    num_too_long = 0

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, split: Split) -> None:
        self._tokenizer = tokenizer
        self._split: addition.Split = "train" if split == "train" else "test"
        self._seed = (
            config.seed if split == "train" else 0
        )  # runs of different seeds are compared on the same problems
        self._max_digits = config.max_digits
        addition.make_problem(
            self._split, 0, max_digits=config.max_digits
        )  # refuses a bad max_digits now

    def __getitem__(self, index: int) -> Prompt:
        problem = addition.make_problem(
            self._split, index, seed=self._seed, max_digits=self._max_digits
        )
        text = addition.prompt(problem)
        name = f"addition/{self._split}/{self._seed}:{index}"
        return Prompt(
            prompt_id=name,
            tokens=self._tokenizer.encode(text),
            answer=addition.answer(problem),
            text=text,
        )
