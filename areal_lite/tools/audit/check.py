"""The result of one check of a run: what was looked at, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Ids that a line names, at most.
_SHOWN = 10


@dataclass(kw_only=True)
class Check:
    """One line of the audit.

    Args:
        name: one word.
        looked_at: what was checked, with its numbers.
        wrong: one sentence for each thing that is wrong; none if all is well.
    """

    name: str
    looked_at: str
    wrong: list[str] = field(default_factory=list)

    def expect(self, good: bool, otherwise: str) -> None:
        """Record that something is wrong unless `good`."""
        if not good:
            self.wrong.append(otherwise)

    def none_of(self, found: Iterable[object], what: str) -> None:
        """Record that `found` should be empty. `what` says what they are: "groups that …"."""
        if ids := list(found):
            self.wrong.append(f"{what}: {some(ids)}")


def some(ids: Iterable[object]) -> str:
    """Write the first few of `ids`, and how many more there are."""
    listed = list(ids)
    more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(str, listed[:_SHOWN])) + more


def count(number: int, what: str) -> str:
    """Write a number of things: "1 group", "1,024 groups"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
