"""Drafts of answers: what earlier answers to the same prompt said next (docs/servers.md).

After each context of 8, 4 and 2 tokens the history of a prompt knows the token that followed most
often, and in what part of the cases. A draft follows the longest context that is known, token by
token. Where the history of a prompt knows no context, that of all prompts may. A step computes the
likeliest tokens of all drafts, as many as are worth their time (`Pace`).

How likely a guess is, the history learns as well: whenever a token is noted, it looks whether the
guess for it was right. So it knows how often guesses of a kind are right for this policy now: with
a context of so many tokens, seen so often, and so often with the same next token.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import closing, suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_format import TRACE, WITH_ROUTES, from_row
from areal_lite.trajectory import Trajectory

_CONTEXTS = (8, 4, 2)  # tokens
LONGEST = _CONTEXTS[0]
# Cases that are remembered, of a context and of a kind of guess. The policy changes: old ones fade.
_OF_CONTEXT, _OF_KIND = 32, 256
_SEEN = (1, 2, 4)  # cases of a context from which on a guess is of another kind
_NEWEST = 512  # steps that tell the pace
_GAIN = 1.03  # the least gain to draft for: chances and seconds have errors
Kind = tuple[bool, int, int, int]


class _Context(NamedTuple):
    """The token that follows most often, in `cases` of `total` cases."""

    token: int
    cases: int
    total: int

    def and_then(self, token: int) -> "_Context":
        """Return this with one more case, in which `token` followed."""
        likeliest, cases, total = self
        if total == _OF_CONTEXT:
            cases, total = cases // 2, total // 2
        if token == likeliest:
            return _Context(token, cases + 1, total + 1)
        if 2 * cases < total + 1:
            # Others were more frequent: the newest of them, whose cases were not counted.
            return _Context(token, 1, total + 1)
        return _Context(likeliest, cases, total + 1)


class _Guess(NamedTuple):
    token: int
    kind: Kind  # whether the prompt's own, tokens of the context, how often seen, quarters of cases


class Drafted(NamedTuple):
    """A token of a draft, and the chance that it and the drafted tokens before it are right."""

    token: int
    chance: float


Contexts = dict[int, _Context]  # by hash


class PromptHistory:
    """The tokens that followed each context in one prompt and the answers to it."""

    def __init__(self, shared: "_Shared") -> None:
        self._contexts: Contexts = {}
        self._shared = shared

    def __len__(self) -> int:
        return len(self._contexts)

    def begin(self, prompt: Sequence[int]) -> None:
        """Note the tokens of the prompt, unless there are some notes."""
        if not self._contexts:
            for at in range(1, len(prompt)):
                hashes = _hashes(prompt[max(at - LONGEST, 0) : at])
                self._count(self._contexts, hashes, prompt[at])

    def note(self, before: Sequence[int], token: int) -> None:
        """Note that `token` came after the tokens `before`, of which at most 8 are looked at."""
        hashes = _hashes(before)
        guess = self._guess(hashes)
        if guess is not None:
            self._shared.note(guess.kind, guess.token == token)
        for contexts in (self._contexts, self._shared.of_all):
            self._count(contexts, hashes, token)

    def _count(self, contexts: Contexts, hashes: list[int], token: int) -> None:
        for context in set(hashes):
            known = contexts.get(context)
            self._shared.contexts += known is None
            contexts[context] = (known or _Context(token, 0, 0)).and_then(token)

    def draft(self, before: Sequence[int], most: int, ends: Set[int]) -> list[Drafted]:
        """Return at most `most` tokens to follow `before`, none after one of the tokens `ends`."""
        tokens, chance = list(before[-LONGEST:]), 1.0
        drafted: list[Drafted] = []
        while len(drafted) < most and (guess := self._guess(_hashes(tokens))) is not None:
            chance *= self._shared.rate(guess.kind)
            drafted.append(Drafted(guess.token, chance))
            tokens.append(guess.token)
            if guess.token in ends:
                break
        return drafted

    def _guess(self, hashes: list[int]) -> _Guess | None:
        for contexts in (self._contexts, self._shared.of_all):
            for length, context in zip(_CONTEXTS, hashes):
                if (known := contexts.get(context)) is not None:
                    own, seen = contexts is self._contexts, sum(known.total >= n for n in _SEEN)
                    kind = own, length, seen, 4 * known.cases // known.total
                    return _Guess(known.token, kind)
        return None


def _hashes(before: Sequence[int]) -> list[int]:
    """Return the hashes of the last 8, 4 and 2 tokens, of shorter sequences the same for each."""
    return [hash(tuple(before[-length:])) for length in _CONTEXTS]


class _Shared:
    """The rates of right guesses, by kind, and the contexts of all prompts."""

    def __init__(self) -> None:
        self.of_all: Contexts = {}
        self.contexts = 0  # of all histories
        self._known: dict[Kind, tuple[int, int]] = {}  # right ones, all

    def note(self, kind: Kind, right: bool) -> None:
        hits, tries = self._known.get(kind, (0, 0))
        if tries == _OF_KIND:
            hits, tries = hits // 2, tries // 2
        self._known[kind] = hits + right, tries + 1

    def rate(self, kind: Kind) -> float:
        """Return the rate of a kind: a half before there were any guesses."""
        hits, tries = self._known.get(kind, (0, 0))
        return (hits + 1) / (tries + 2)


class History:
    """The histories of prompts, of at most `most` contexts (0.2 kB each): the last used stay."""

    def __init__(self, most: int = 2**19) -> None:
        self._most, self._shared = most, _Shared()
        self._prompts: OrderedDict[Hashable, PromptHistory] = OrderedDict()

    def of(self, prompt: Hashable) -> PromptHistory:
        """Return the history of a prompt, a new one for an unknown prompt."""
        history = self._prompts.setdefault(prompt, PromptHistory(self._shared))
        self._prompts.move_to_end(prompt)
        return history

    def learn(self, tokens: Sequence[int], sampled: Sequence[int]) -> None:
        """Note an answer of elsewhere: its prompt, and its tokens at the places `sampled`."""
        prompt = tokens[: sampled[0]]
        history = self.of(hash(tuple(prompt)))
        history.begin(prompt)
        for at in sampled:
            history.note(tokens[max(at - LONGEST, 0) : at], tokens[at])

    def trim(self) -> None:
        """Forget the prompts that were used longest ago, down to the bound."""
        if len(self._shared.of_all) > self._most // 2:
            self._shared.contexts -= len(self._shared.of_all)
            self._shared.of_all.clear()
        if self._shared.contexts > self._most:  # requests also note in prompts that are forgotten
            self._shared.contexts = len(self._shared.of_all) + sum(map(len, self._prompts.values()))
        while self._shared.contexts > self._most and len(self._prompts) > 1:
            self._shared.contexts -= len(self._prompts.popitem(last=False)[1])


class _Answers(RunReader):
    def last(self) -> int:
        """Return the number of the newest answer, 0 without any."""
        ((number,),) = self._query("SELECT coalesce(max(rowid), 0) FROM sequences")
        return number

    def newest(self, after: int, last: int, besides: str) -> Iterator[Trajectory]:
        """Yield the answers that `besides` did not give, from number `last` down to `after`."""
        query = f"""
            SELECT {WITH_ROUTES} FROM sequences CROSS JOIN trajectories USING ({TRACE})
            WHERE sequences.rowid > ? AND sequences.rowid <= ? AND server != ?
            ORDER BY sequences.rowid DESC"""
        for row in self._rows(query, (after, last, besides)):
            yield from_row(row, prompt_id="")


class StoredAnswers:
    """The answers in the store of a run that the server `name` has not sampled itself."""

    def __init__(self, path: Path, name: str, vocabulary: int) -> None:
        self._path, self._name, self._vocabulary = path, name, vocabulary
        self._last = 0
        self._besides = ""  # at first, what the server sampled before it started again counts

    def new(self, most: int) -> list[tuple[list[int], list[int]]]:
        """Return the newest answers since the last call, oldest first, of about `most` tokens.

        An answer is its tokens, and the places of those that were sampled.
        """
        found: list[tuple[list[int], list[int]]] = []
        after, besides = self._last, self._besides
        self._besides = self._name
        # There may be no store yet. The controller, not this reader, reports a damaged one.
        with suppress(ValueError), closing(_Answers(self._path)) as store:
            self._last = store.last()
            for answer in store.newest(after, self._last, besides):
                tokens, sampled = answer.tokens, np.flatnonzero(answer.loss_mask)
                if len(sampled) and 0 <= tokens.min() and tokens.max() < self._vocabulary:
                    found.append((tokens.tolist(), sampled.tolist()))
                    most -= len(sampled)
                if most <= 0:
                    break
        return found[::-1]


class Pace:
    """The processor seconds of a decode step by its rows, from the newest steps.

    A row is a token to compute: the next token of a request, or a drafted token. Rows of a wide
    product cost little until the processor's arithmetic is used up, and then all cost the same.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_NEWEST)

    def note(self, rows: int, seconds: float) -> None:
        """Note a step with `rows` rows that took `seconds`."""
        self._steps.append((rows, seconds))

    def floor(self, requests: int, chances: Sequence[float]) -> float:
        """Return the least of the `chances` of drafted rows to compute, above 1 to compute none.

        With the rows down to this chance, a step of `requests` requests is expected to give the
        most tokens a second.
        """
        ordered = np.sort(chances)[::-1]
        tokens = requests + np.concatenate([[0.0], ordered.cumsum()])
        speeds = tokens / self.seconds(requests + np.arange(len(tokens)))
        best = int(speeds.argmax())
        return float(ordered[best - 1]) if speeds[best] > _GAIN * speeds[0] else inf

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """Return the processor seconds of steps with `rows` rows: int64 [n] -> float64 [n].

        It is the median of the newest steps with as many rows, and at most that of steps with more:
        what disturbs a step only makes it longer. Beyond the numbers of rows that were seen, and in
        any unit before the first step, a step has a fixed part that is worth 16 rows.
        """
        if not self._steps:
            return rows + 16.0
        seen, seconds = np.array(self._steps).T
        order = np.lexsort((seconds, seen))
        firsts = np.flatnonzero(np.diff(seen[order], prepend=-1))
        medians = order[(firsts + np.append(firsts[1:], len(order)) - 1) // 2]
        at, known = seen[medians], np.minimum.accumulate(seconds[medians][::-1])[::-1]
        nearest = rows.clip(at[0], at[-1])
        return np.interp(nearest, at, known) * (rows + 16) / (nearest + 16)
