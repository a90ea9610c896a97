"""The trajectory store, `<run_dir>/trajectories.sqlite`: every rollout group of a run.

Any SQLite client can read it at any time.

* A group has a row in `groups` before its first request is sent. It moves through the states of
  GroupState. Only `recover` moves it back, when a run resumes: a group that a lost step used is
  finished again, dropped, or in flight again.
* A finished group with a `step` is in the batch of that step, whose end is not recorded.
* A finished, used or filtered group has `num_trajectories` rows in `trajectories`: the traces of
  its episodes that did not fail, each numbered from 0.
* Tokens, log-probs, texts and routes are in `sequences`, compressed (store_format.py). `kept_bytes`
  of a group is their size.
* `draws` has the episodes of each batch that was drawn from a replay buffer. `totals` has the
  counts of the run that no row shows, and `prompts`, the size of the data set if it has one.
* Each row has a checksum. A damaged group that waits is dropped when a run resumes. Other damage is
  a ValueError that names the file.
* The write-ahead log survives the death of any process at any moment. A power cut does not damage
  the file. It may lose the commits after the last durable one, such as the end of a step.

When the file reaches its bound, old groups lose their rows in `sequences`, each in one transaction
(docs/checkpoints.md, The store, says in which order). Their other columns stay, so what the audit
proves stays provable. New groups fill the pages that become free. What is left beyond the bound
returns to the file system (`auto_vacuum = INCREMENTAL`).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec

from areal_lite.run_dir.reader import DamagedGroup, RunReader
from areal_lite.run_dir.store_format import ADMISSION, REMEDY, StoreError, checksum, to_rows
from areal_lite.trajectory import Group, GroupState

# A call removes or returns about this many bytes, so that other calls do not wait for long.
_BYTES_AT_ONCE = 8 * 2**20
# At the bound, groups are removed down to this share of it. The room is for the next steps: without
# it, each step would move pages to the end of the file and back.
_TARGET = 0.9

_REMOVABLE = """
SELECT group_id, kept_bytes, finished_at FROM groups
WHERE kept_bytes > 0 AND finished_at >= ?
  AND (state = 'used' OR num_trajectories < size) = ?
  AND NOT (state = 'used' AND step >= ?)
  AND CASE WHEN ? IS NULL THEN state != 'finished'
           ELSE group_id NOT IN (SELECT value FROM json_each(?)) END
ORDER BY finished_at
"""


log = logging.getLogger(__name__)

# Draws that `recover` returns to check the data set: another order of prompts agrees on so many
# only by an unlikely chance.
_NUM_DRAWS = 100

# The beginnings of statements that lose groups when a run resumes.
_DROP = "UPDATE groups SET state = 'dropped', step = NULL, finished_at = :now, reason = :reason"
_PLAY_AGAIN = (
    "UPDATE groups SET state = 'in_flight', step = NULL, finished_at = NULL, reason = NULL,"
    " num_trajectories = NULL, kept_bytes = NULL"
)

_ROWS_AT_ONCE = 1000  # Rows per INSERT. SQLite takes at most 32766 values in a statement.

_AMONG = "group_id IN (SELECT value FROM json_each(?))"  # one of the ids in a list


def _ids(group_ids: Sequence[int]) -> str:
    return msgspec.json.encode(list(group_ids)).decode()


class Recovered(NamedTuple):
    """State recovered from the store when a run resumes."""

    drawn: int  # prompts that the sampler had drawn
    put_back: list[int]  # prompt indices that the sampler must serve again, in order
    draws: list[tuple[int, int]]  # (`drawn` after the draw, prompt index) of the last draws
    again: list[tuple[int, int, int]]  # (group_id, prompt_index, drawn) to play again, in order


class Store(RunReader):
    """A run's store, for one thread at a time. `begin` ... `commit` make several changes one."""

    read_only = False
    # Groups that ended before this time, and of which nothing was learned, have lost their tokens.
    _unlearned_since = 0.0

    def mib(self) -> float:
        """Return the size of the file, without its write-ahead log, in MiB."""
        return self._pragma("page_count") * self._pragma("page_size") / 2**20

    def trim(self, max_bytes: int, since: int, held: Sequence[int] | None = None) -> bool:
        """Bring a file of more than `max_bytes` nearer to it; return whether another call may.

        A resume may need what step `since` and later ones have used. `held` has the ids of the
        groups of a replay buffer; None without one: what waits is needed.
        """
        page, pages = self._pragma("page_size"), self._pragma("page_count")
        if page * pages <= max_bytes:
            return False
        free = self._pragma("freelist_count")
        surplus = page * (pages - free) - int(_TARGET * max_bytes)
        if surplus > 0 and self._remove(min(surplus, _BYTES_AT_ONCE), since, held):
            return True
        spare, at_once = min(free, pages - max_bytes // page), _BYTES_AT_ONCE // page
        for _ in range(min(spare, at_once)):
            # Python ends a statement without columns after its first step, which is one page.
            self._execute("PRAGMA incremental_vacuum(1)")
        return spare > at_once

    def _remove(self, num_bytes: int, since: int, held: Sequence[int] | None) -> bool:
        """Remove the tokens of groups with `num_bytes` or more; return whether there were any."""
        ids = None if held is None else _ids(held)
        chosen: list[int] = []
        for learned in (False, True):
            # A group may leave a replay buffer long after it has ended.
            first = self._unlearned_since if held is None and not learned else 0.0
            for group_id, kept, ended in self._query(_REMOVABLE, (first, learned, since, ids, ids)):
                if num_bytes <= 0:
                    break
                chosen.append(group_id)
                num_bytes -= kept
                if not learned:
                    self._unlearned_since = ended
        values = (_ids(chosen),)
        self._execute(f"DELETE FROM sequences WHERE {_AMONG}", values)
        self._execute(f"UPDATE groups SET kept_bytes = 0 WHERE {_AMONG}", values)
        return bool(chosen)

    def _pragma(self, name: str) -> Any:
        ((value,),) = self._query(f"PRAGMA {name}")
        return value

    def admit(
        self, group_id: int, prompt_id: str, prompt_index: int, drawn: int, size: int, now: float
    ) -> None:
        """Insert a group in flight, of `size` episodes. `now` is in wall-clock seconds.

        `prompt_index` is the place of the prompt in the data set, and `drawn` is
        PromptSampler.drawn after it gave that.
        """
        values = (group_id, prompt_id, prompt_index, drawn, size, float(now))
        self._execute(
            f"INSERT INTO groups ({', '.join(ADMISSION)}, state, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?, 'in_flight', ?)",
            (*values, checksum(values)),
        )

    def finish(
        self,
        group: Group,
        texts: Sequence[tuple[str | None, str | None]],
        reason: str | None,
        now: float,
        state: str = GroupState.FINISHED,
    ) -> None:
        """Move a group from in_flight to finished or filtered, and insert its trajectories.

        `texts` has (prompt, completion) of each trajectory. `reason` says why the group was
        filtered, or why trajectories are missing.
        """
        assert state in (GroupState.FINISHED, GroupState.FILTERED)
        rows = [
            to_rows(trajectory, *text)
            for trajectory, text in zip(group.trajectories, texts, strict=True)
        ]
        self._insert("trajectories", [row.facts for row in rows])
        self._insert("sequences", [row.sequence for row in rows])
        self._move(
            group.group_id,
            (GroupState.IN_FLIGHT,),
            state,
            reason=reason,
            num_trajectories=len(rows),
            kept_bytes=sum(row.num_bytes for row in rows),
            finished_at=now,
        )

    def _insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows, many in one statement: each waits for the interpreter lock once."""
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            marks = f"({', '.join('?' * len(some[0]))})"
            self._execute(
                f"INSERT INTO {table} VALUES {', '.join([marks] * len(some))}",
                list(chain.from_iterable(some)),
            )

    def assign(self, group_ids: Sequence[int], step: int) -> None:
        """Record that finished groups are the batch of `step`, which has not ended."""
        finished = f"state = 'finished' AND {_AMONG}"
        self._execute(f"UPDATE groups SET step = ? WHERE {finished}", (step, _ids(group_ids)))

    def use(
        self, group_ids: Sequence[int], step: int, draws: Sequence[Sequence[tuple[int, int]]] = ()
    ) -> None:
        """Move groups from finished to used at `step`. Raises RuntimeError if one is not.

        `draws` of a replay buffer: (group id, sample index) of each episode of each drawn group.
        """
        done = self._execute(
            f"UPDATE groups SET state = 'used', step = ? WHERE state = 'finished' AND {_AMONG}",
            (step, _ids(group_ids)),
        )
        if done != len(group_ids):
            raise RuntimeError(
                f"of the {len(group_ids)} groups of step {step} only {done} are finished"
            )
        rows = [
            (step, draw, position, *member)
            for draw, members in enumerate(draws)
            for position, member in enumerate(members)
        ]
        self._insert("draws", rows)

    def drop(self, group_id: int, reason: str, now: float) -> None:
        """Move a group from in_flight or finished to dropped."""
        before = (GroupState.IN_FLIGHT, GroupState.FINISHED)
        self._move(group_id, before, GroupState.DROPPED, reason=reason, finished_at=now)

    def set_totals(self, totals: Mapping[str, int]) -> None:
        """Set counts of the whole run that no row shows."""
        for name, value in totals.items():
            self._execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (name, value))

    def _move(self, group_id: int, before: tuple[str, ...], state: str, **columns: Any) -> None:
        """Set state and columns (except to None). Raises RuntimeError in another state."""
        assignments = "".join(f", {name} = coalesce(?, {name})" for name in columns)
        done = self._execute(
            f"UPDATE groups SET state = ?{assignments} "
            f"WHERE group_id = ? AND state IN ({', '.join('?' * len(before))})",
            (state, *columns.values(), group_id, *before),
        )
        if done != 1:
            raise RuntimeError(
                f"group {group_id} was to become {state}, but is not {' or '.join(before)}"
            )

    def recover(
        self, version: int, now: float, play_again: bool = False, trainer_runs: bool = False
    ) -> Recovered:
        """Resume at `version`: forget the training steps from `version` on. Call this first.

        Finished groups, and used groups of a lost step, wait again if weights up to `version`
        sampled them. Groups in flight, damaged groups, groups that lost weights sampled and groups
        of a lost step whose tokens are not kept are lost: they are dropped.

        With `play_again` they are in flight again: the caller plays them under their numbers. A
        filtered group is then lost, too, if lost weights sampled it. If the trainer runs, it may
        have the batch of its present step, which stays assigned.
        """
        self._execute("REINDEX groups")  # SQLite does not compare an index with its table
        self.begin()
        self._forget_steps(version, now, play_again)
        if not trainer_runs:
            self._execute("UPDATE groups SET step = NULL WHERE state = 'finished'")
        in_flight = "FROM groups WHERE state = 'in_flight'"
        for table in ("trajectories", "sequences"):
            self._execute(f"DELETE FROM {table} WHERE group_id IN (SELECT group_id {in_flight})")
        self.commit()
        again = self._query(f"SELECT group_id, prompt_index, drawn {in_flight} ORDER BY group_id")
        return Recovered(*self._sampler_state(), list(again))

    def _forget_steps(self, version: int, now: float, play_again: bool) -> None:
        values = {"version": version, "now": now}
        lose = _PLAY_AGAIN if play_again else _DROP
        unused = "(state = 'finished' OR (state = 'used' AND step >= :version))"
        filtered = " OR state = 'filtered'" if play_again else ""
        lost_weights = (
            "EXISTS (SELECT 1 FROM trajectories WHERE trajectories.group_id = groups.group_id "
            "AND max_version > :version)"
        )
        used = "state = 'used' AND step >= :version"
        for reason, where in (
            ("was in flight", "state = 'in_flight'"),
            ("its weights are lost", f"({unused}{filtered}) AND {lost_weights}"),
            ("its tokens are not kept", f"{used} AND kept_bytes = 0"),
        ):
            self._execute(f"{lose} WHERE {where}", {**values, "reason": f"resume: {reason}"})
        self._execute(f"UPDATE groups SET state = 'finished', step = NULL WHERE {used}", values)
        self._execute("DELETE FROM draws WHERE step >= :version", values)
        self._lose_damaged(lose, {"now": now, "reason": "resume: damaged"})

    def _lose_damaged(self, lose: str, values: dict[str, Any]) -> None:
        """Run the statement `lose` on each group that waits and is damaged."""
        # A finished group without tokens has left the replay buffer.
        waiting = "SELECT * FROM groups WHERE state = 'finished' AND kept_bytes IS NOT 0"
        for row in list(self._rows(waiting)):
            try:
                self._group(row)
            except DamagedGroup as error:
                log.warning("dropped group %d: %s", row["group_id"], error)
                self._execute(f"{lose} WHERE group_id = {row['group_id']}", values)

    def _sampler_state(self) -> tuple[int, list[int], list[tuple[int, int]]]:
        """Return `drawn`, `put_back` and `draws` of Recovered. Check the admission of all groups.

        The prompt of a dropped group was put back, and a group that did not raise `drawn` took one.
        """
        draws: deque[tuple[int, int]] = deque(maxlen=_NUM_DRAWS)
        served_again: Counter[int] = Counter()
        drawn = 0
        columns = ", ".join(ADMISSION)
        for *admission, state, expected in self._query(
            f"SELECT {columns}, state, checksum FROM groups ORDER BY group_id"
        ):
            group_id, _, index, drawn_now, *_ = admission
            if checksum(admission) != expected or state not in set(GroupState):
                raise ValueError(f"{self._path}: group {group_id} is damaged: {REMEDY}")
            if drawn_now > drawn:
                draws.append((drawn_now, index))
            else:
                served_again[index] += 1
            drawn = drawn_now
        put_back = []
        for (index,) in self._query(
            "SELECT prompt_index FROM groups WHERE state = 'dropped' ORDER BY finished_at, group_id"
        ):
            if served_again[index]:
                served_again[index] -= 1
            else:
                put_back.append(index)
        return drawn, put_back, list(draws)


T = TypeVar("T")

# Each result may wake a whole group that has requests to send. The event loop serves others after
# this many.
_RESULTS_AT_ONCE = 2


@dataclass(slots=True)
class _Call:
    """A call to run, then its result or error."""

    future: asyncio.Future[Any]
    method: Callable[..., Any]
    args: tuple[Any, ...]
    durable: bool
    result: Any = None
    error: Exception | None = None


class StoreThread:
    """Runs the methods of a Store. Create it inside a running event loop.

    * Calls take effect in the order of submission.
    * A power cut does not undo a call that was `durable`, nor a call before it.
    * Calls that are queued at the same time are committed together. If one of them fails, all of
      them are undone and get its exception: nothing is ever half-written.
    """

    def __init__(self, store: Store):
        self._store = store
        self._queued: deque[_Call] = deque()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "store")

    def submit(
        self, method: Callable[..., T], *args: Any, durable: bool = False
    ) -> asyncio.Future[T]:
        """Queue `method(store, *args)` and return the future of its result."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queued.append(_Call(future, method, args, durable))
        if len(self._queued) == 1:  # otherwise the commit that is due has this one, too
            self._thread.submit(self._commit_queued)
        return future

    async def close(self) -> None:
        """Commit all submitted calls, then close the store."""
        await self._loop.run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    def _commit_queued(self) -> None:
        """Commit all queued calls at once. A commit that has just begun may have left none."""
        calls = []
        while self._queued:
            calls.append(self._queued.popleft())
        try:
            self._store.begin(durable=any(call.durable for call in calls))
            for call in calls:
                call.result = call.method(self._store, *call.args)
            self._store.commit()
        except Exception as error:  # raised to every caller
            with suppress(StoreError):  # a disk that is full may refuse this, too
                self._store.rollback()
            for call in calls:
                call.error = error
        self._loop.call_soon_threadsafe(self._settle, calls)

    def _settle(self, calls: list[_Call], first: int = 0) -> None:
        """Set the futures, a few in each turn of the event loop."""
        for call in calls[first : first + _RESULTS_AT_ONCE]:
            if call.future.cancelled():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.result)
        if first + _RESULTS_AT_ONCE < len(calls):
            self._loop.call_soon(self._settle, calls, first + _RESULTS_AT_ONCE)
