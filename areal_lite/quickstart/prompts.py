"""The prompt set `data.source=addition`."""

from __future__ import annotations

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Prompt
from areal_lite.data.rows import Split
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.quickstart import addition


class AdditionPrompts:
    """Addition problems by index, without end; addition.py has the task."""

    num_prompts = None
    num_too_long = 0

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, split: Split) -> None:
        self._tokenizer = tokenizer
        self._split: addition.Split = "train" if split == "train" else "test"
        # Runs of different seeds are compared on the same held-out problems.
        self._seed = config.seed if split == "train" else 0
        self._max_digits = config.max_digits
        self._problem(0)  # raises ValueError now if data.max_digits is wrong

    def __getitem__(self, index: int) -> Prompt:
        problem = self._problem(index)
        text = addition.prompt(problem)
        return Prompt(
            prompt_id=f"addition/{self._split}/{self._seed}:{index}",
            tokens=self._tokenizer.encode(text),
            answer=addition.answer(problem),
            text=text,
        )

    def _problem(self, index: int) -> addition.Problem:
        return addition.make_problem(
            self._split, index, seed=self._seed, max_digits=self._max_digits
        )
