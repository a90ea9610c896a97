"""Rewards computed in worker processes: a verifier that hangs or crashes costs one sample only.

The time-out counts from the start of a sample's execution, however long the sample waited.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from areal_lite.rewards.worker import Sample
from areal_lite.workers.pool import Task, WorkerPool
from areal_lite.workers.process import Done, Failed, unpack

# A worker gets samples ahead only if they take less time than a switch between processes.
_PIPELINE_DEPTH = 8
_PIPELINE_BELOW_S = 1e-3


class RewardPool(WorkerPool):
    """`workers` processes that call the reward function `module:function`, one sample at a time."""

    def __init__(self, function: str, workers: int = 1, timeout_s: float = 15.0) -> None:
        super().__init__(
            function,
            "areal_lite.rewards.worker",
            (function, timeout_s),
            size=workers,
            silence_s=timeout_s,
            sequential=True,
        )
        self._mean_s = 1.0  # moving average of execution times; assume slow samples at first

    async def score(
        self, completion: str, answer: str, info: dict[str, Any] | None = None
    ) -> float:
        """Return the finite reward of a completion; `info` is of its prompt. Raises as `call`."""
        return unpack(await self.call(Sample(completion, answer, info or {})), float)

    def depth(self) -> int:
        return _PIPELINE_DEPTH if self._mean_s < _PIPELINE_BELOW_S else 1

    def settle(self, task: Task, reply: Done | Failed) -> None:
        self._mean_s += 0.1 * (reply.seconds - self._mean_s)
        super().settle(task, reply)


class JudgePool(RewardPool):
    """A judge, whose workers read what it says. `reward.function=module:rubric.md` makes one.

    It is called as f(workers, timeout_s, path of a file that the run keeps). `counts` (calls,
    failed, cached, tokens) and `seconds` describe its requests until others reset them.
    """

    counts: Counter[str]
    seconds: list[float]

    @abstractmethod
    async def verdict(self, values: Mapping[str, str], begun: Callable[[], None]) -> float:
        """Return the reward of an answer, given the values of the rubric's placeholders.

        `begun` is called when it waits for the judge, no longer for its turn. Raises as `score`.
        """
