"""Reinforcement learning for language models in which generation never waits for training.

`areal_lite.train` trains from Python what `areal-lite train` trains from the command line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_lite.api import TrainResult, train

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is used: every role of a run imports this file first."""
    if name in __all__:
        from areal_lite import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
