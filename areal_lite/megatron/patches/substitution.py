"""Text substitutions in the source of one release of Megatron-core."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Substitution:
    """Replace the regular expression `pattern` by `replacement`.

    counts: module below megatron.core -> number of matches that its source must have.
    """

    name: str
    pattern: str
    replacement: str
    counts: dict[str, int]


def adapt(module: str, source: str, table: tuple[Substitution, ...]) -> str:
    """Apply `table` to the source of `module`, named from below megatron.core.

    Raises ImportError when a pattern matches another number of times than its table says.
    """
    for substitution in table:
        expected = substitution.counts.get(module, 0)
        if not expected:
            continue
        source, count = re.subn(substitution.pattern, substitution.replacement, source)
        if count != expected:
            raise ImportError(
                f"megatron.core.{module}: '{substitution.name}' matches {count} times, not"
                f" {expected}: areal_lite.megatron needs megatron-core 0.16.1"
            )
    return source
