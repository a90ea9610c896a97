"""Routes: the experts of a mixture that computed each token, in every layer.

The router of a layer chooses `top_k` experts for each token: the token's route in that layer.
Routes of n tokens are an array [n, layers, top_k] of expert numbers, in ascending order within a
route. Its dtype is uint8 for fewer than 256 experts, otherwise uint16: Qwen3-30B-A3B takes
48 x 8 = 384 bytes a token. A token without a recorded route has the largest number of the dtype in
all places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """The sizes of a model: `experts` experts in each of `layers`, `top_k` of them for a token."""

    layers: int
    experts: int
    top_k: int
    dense: int = 0  # layers before these, which have no experts

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the model's routes. Its largest number marks no record."""
        return DTYPES[self.experts > np.iinfo(np.uint8).max]

    @property
    def choices(self) -> int:
        """Return the number of experts that compute a token, over all layers."""
        return self.layers * self.top_k


def unrecorded(count: int, like: np.ndarray) -> np.ndarray:
    """Return the routes of `count` tokens without a record, in layout and dtype of `like`."""
    return np.full((count, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def is_recorded(routes: np.ndarray) -> np.ndarray:
    """Return which tokens have a recorded route, bool [n]."""
    return routes[:, 0, 0] != np.iinfo(routes.dtype).max


def join_routes(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Lay the routes of sequences end to end.

    The tokens of a part that is None have no record. Returns None if all parts are None. Raises
    ValueError for routes of different models.
    """
    if not (known := [part for part in parts if part is not None]):
        return None
    if len({(part.shape[1:], part.dtype) for part in known}) > 1:
        found = sorted({f"{part.dtype}{list(part.shape[1:])}" for part in known})
        raise ValueError(f"routes of different models: {', '.join(found)} for each token")
    return np.concatenate(
        [
            unrecorded(length, known[0]) if part is None else part
            for part, length in zip(parts, lengths, strict=True)
        ]
    )
