"""The prompt set `data.source=addition`."""

from collections.abc import Sequence
from functools import partial

from areal_lite.config import DataConfig
from areal_lite.data.prompts import Prompt, Split
from areal_lite.data.tokenizer import Tokenizer
from areal_lite_quickstart import addition


class AdditionPrompts:
    """Addition problems by index, without end; addition.py has the task and `weights`."""

    num_prompts = None
    chat = False
    num_too_long = 0

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        split: Split,
        *,
        max_digits: int = 8,
        seed: int = 1,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        own_split: addition.Split = "train" if split == "train" else "test"
        # Runs of different seeds are compared on the same held-out problems.
        seed = seed if split == "train" else 0
        self._prefix = f"addition/{own_split}/{seed}"
        self._problem = partial(
            addition.make_problem, own_split, seed=seed, max_digits=max_digits, weights=weights
        )
        self._problem(0)  # raises ValueError now if the arguments are wrong

    def __getitem__(self, index: int) -> Prompt:
        problem = self._problem(index)
        text = addition.prompt(problem)
        return Prompt(
            prompt_id=f"{self._prefix}:{index}",
            tokens=self._tokenizer.encode(text),
            answer=addition.answer(problem),
            text=text,
        )
