"""The errors of Hydra and OmegaConf about a command line, in one line that helps.

Theirs take several lines, use their own terms, and do not name the key that was probably meant.
"""

import difflib
import re
from collections.abc import Iterable

from hydra.errors import OverrideParseException

from areal_lite.config.commands import find_command
from areal_lite.config.compose import ADDED_GROUPS
from areal_lite.config.fields import keys_of
from areal_lite.config.rollout import TRUNCATED_SAMPLING, WHOLE_VOCABULARY

_UNKNOWN_KEY = re.compile(
    r"Key '([^']+)' (?:is not in struct|not in '[^']+').*?full_key: (\S+)", re.S
)
_UNKNOWN_OPTION = re.compile(
    r"Could not find '([^/']+)/([^']+)'.*Available options in '\1': (.+?)"
    r"(?: Config search path|$)"
)
# A pattern of a message and what is said instead, once `_NOISE` is out of the message.
_REWORDED = {
    r"Error parsing override '(.+)' missing EQUAL.*": r"\1 has no value: write \1=…",
    r"Could not override '.+'\. No match .* use \+(\S+)": r"\1 would add settings: use +\1",
    r"Error merging override ([^=]+)=(.*?) Invalid type assigned: .* is not a subclass of .*": (
        r"\1=\2: \1 is a section: set its keys, \1.KEY=VALUE"
    ),
    r"Error merging override ([^=]+)=(.*?) Invalid value assigned: .* is not a ListConfig.*": (
        r"\1=\2: write a list, \1=[\2]"
    ),
    r"Error merging override (.+?) ((?:Value|Cannot|Invalid) .*?)(?: full_key: \S+)?": r"\1: \2",
    r"(.*) full_key: (\S+)": r"\2: \1",
}
_NOISE = re.compile(
    # The mark of compose.py at a new key, and what OmegaConf and Hydra append.
    r"(?<=override )\+\+|(?<=override ')\+\+"
    r"| object_type=\S+| reference_type=\S+| See https://hydra\S+(?: for details)?"
)


# Characters of an override and of a whole message that a terminal shows.
_SHOWN = 100
_LONGEST = 2000


def explain(error: Exception, command: str) -> str:
    """Say in one line what is wrong with an override, given the error of Hydra or OmegaConf."""
    cause = f" {error.__cause__}" if error.__cause__ else ""
    text = _NOISE.sub("", " ".join(f"{error}{cause}".split()))
    if unknown := _UNKNOWN_KEY.search(text):
        return _unknown_key(unknown.group(2), command)
    if unknown := _UNKNOWN_OPTION.search(text):
        group, name, options = unknown.group(1), unknown.group(2), unknown.group(3).split()
        hint = did_you_mean(name, options)
        return f"unknown {group}={name}; {f'{hint} ' if hint else ''}there are {', '.join(options)}"
    for pattern, reworded in _REWORDED.items():
        if match := re.fullmatch(pattern, text):
            return match.expand(reworded)
    if isinstance(error, OverrideParseException):
        override = error.override.removeprefix("++")[:_SHOWN]
        return f"cannot read {override}: check its brackets and quotes"
    return text


def one_line(message: str) -> str:
    """Return the message on one line. A long one loses its middle."""
    line = " ".join(message.split())
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} … {line[-half:]}"


def _unknown_key(key: str, command: str) -> str:
    """Name the keys that end in `key`, or else the most similar one."""
    if key.rpartition(".")[2] in TRUNCATED_SAMPLING:
        return f"unknown key {key}; {WHOLE_VOCABULARY}"
    written = find_command(command).written(command)
    keys = [*keys_of(find_command(command).schema), *(f"+{group}" for group in ADDED_GROUPS)]
    same_end = [known for known in keys if known.endswith(f".{key}")]
    hint = f"did you mean {' or '.join(same_end)}?" if same_end else did_you_mean(key, keys)
    return f"unknown key {key}; {hint or f'`{written} --help` lists all settings'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that names the most similar of the `known` words, or an empty string."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""
