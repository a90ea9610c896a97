"""Numbers as short text."""

from typing import Any


def short(value: Any) -> str:
    """Format a number for a glance: 0.71, 1.2, 37.8, 340, 4.1k, 3.9M. Anything else is text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + suffix
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1g}"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Write a number of things: "1 group", "1,024 groups"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def byte_size(num_bytes: float) -> str:
    """Format a number of bytes: 1.5 KiB, 80.00 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"


def duration(seconds: float) -> str:
    """Format seconds as a clock does: 2:10, 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def pause(seconds: float) -> str:
    """Format the length of a pause: 142 ms, 1.5 s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def excerpt(text: str, most: int) -> str:
    """Quote a text, without its middle if it has more than `most` characters."""
    half = most // 2
    return repr(text if len(text) <= most else f"{text[:half]} … {text[-half:]}")
