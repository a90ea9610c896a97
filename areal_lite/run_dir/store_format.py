"""The format of the trajectory store: its tables, checksums, rows, compression and file.

**Tables.** A trajectory has a row in `trajectories`, which stays. What takes the space is in its
row in `sequences`, which goes when the store reaches its bound (store.py). Each row has a checksum:
SQLite does not notice a flipped bit in a blob, a reward or a prompt index.

**Rows.** Per token the store has an id, a log-prob and its text, and with `algo.routing_replay` the
route. Versions and the loss mask follow from the segments, which name each run of sampled tokens
with its version.

**Compression** is without loss. Items of four bytes are split into byte planes: the first byte of
every item, then the second byte of every item, and so on. The high bytes of ids and the exponents
of log-probs are alike, so zlib (RFC 1950) makes them small. The low bytes of log-probs are noise,
in which a search for repetitions finds none and takes twice the time. Log-probs therefore get
Huffman codes and runs only (`Z_RLE`). So do routes: the experts of a route ascend, each is kept as
its distance from the expert before, which is small, and those of one layer and place stand
together. `benchmarks/store.py` measures the bytes per token and the time.
"""

import math
import secrets
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from areal_lite.routes import DTYPES
from areal_lite.system.files import sync_path
from areal_lite.trajectory import GroupState, Trajectory, trace_name

SCHEMA = f"""
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,
    prompt_id TEXT NOT NULL,
    prompt_index INTEGER NOT NULL,
    drawn INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ({", ".join(f"'{state}'" for state in GroupState)})),
    reason TEXT,
    size INTEGER NOT NULL,
    num_trajectories INTEGER,
    kept_bytes INTEGER,
    admitted_at REAL NOT NULL,
    finished_at REAL,
    step INTEGER,
    checksum INTEGER NOT NULL
) STRICT;
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_with_tokens ON groups (finished_at) WHERE kept_bytes > 0;
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL REFERENCES groups,
    sample_index INTEGER NOT NULL,
    trace_index INTEGER NOT NULL,
    reward REAL,
    turn_rewards TEXT,
    finish_reason TEXT NOT NULL,
    n_prompt INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    min_version INTEGER,
    max_version INTEGER,
    num_segments INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    kv_version INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    server TEXT NOT NULL,
    segments TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample_index, trace_index)
) STRICT, WITHOUT ROWID;
CREATE TABLE sequences (
    group_id INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    trace_index INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    texts BLOB,
    routes BLOB,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample_index, trace_index)
) STRICT;
CREATE TABLE draws (
    step INTEGER NOT NULL,
    draw INTEGER NOT NULL,
    position INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    PRIMARY KEY (step, draw, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE totals (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""


# The columns of `groups` that never change. The checksum is over these.
ADMISSION = ("group_id", "prompt_id", "prompt_index", "drawn", "size", "admitted_at")
TRACE = "group_id, sample_index, trace_index"  # name a trajectory, in the order of traces
TOKENS = f"LEFT JOIN sequences USING ({TRACE})"  # joins the tokens to `trajectories`
# The columns of both rows of a trajectory. Those of `sequences` are NULL where it has none.
WITH_TOKENS = "trajectories.*, tokens, logprobs, texts, sequences.checksum AS sequence_checksum"
# The same with the routes, which take more space than the rest. The checksum covers them.
WITH_ROUTES = f"{WITH_TOKENS}, routes"
# The words that readers show for a trajectory without a row in `sequences`.
NOT_KEPT = "tokens not kept (store.max_gib)"


def checksum(values: Sequence[Any]) -> int:
    """Return the CRC-32 of the values of a row."""
    return zlib.crc32(msgspec.msgpack.encode(values))


_ITEM_BYTES = 4
_LEVEL = 1
_TEXTS = msgspec.msgpack.Decoder(tuple[str | None, str | None])
_MAX_TEXT_BYTES = 2**30  # texts are expanded to at most this many bytes
_ROUTES = msgspec.msgpack.Decoder(tuple[tuple[str, tuple[int, int, int]], bytes])
_MAX_ROUTE_BYTES = 2**16  # the routes of a token have at most this many bytes


def pack_tokens(tokens: np.ndarray) -> bytes:
    """Compress token ids, int32 [L]."""
    return zlib.compress(_planes(tokens.astype(np.int32, copy=False)), _LEVEL)


def pack_logprobs(logprobs: np.ndarray) -> bytes:
    """Compress log-probs, float32 [L], bit for bit."""
    return _huffman(_planes(logprobs.astype(np.float32, copy=False)))


def unpack(packed: bytes, dtype: type, length: int) -> np.ndarray:
    """Return the array of `length` items of `dtype`. Raises ValueError for any other content."""
    if len(planes := _expand(packed, _ITEM_BYTES * length)) != _ITEM_BYTES * length:
        raise ValueError(f"{len(planes)} bytes are packed, not those of {length} tokens")
    items = np.frombuffer(planes, np.uint8).reshape(_ITEM_BYTES, length).T
    return np.ascontiguousarray(items).view(dtype).reshape(length)


def pack_routes(routes: np.ndarray | None) -> bytes | None:
    """Compress routes, [L, layers, top_k] of uint8 or uint16; None if there are none."""
    if routes is None:
        return None
    steps = routes.copy()
    steps[..., 1:] -= routes[..., :-1]  # where it wraps, so does the sum
    header = (routes.dtype.name, routes.shape)
    return msgspec.msgpack.encode((header, _huffman(steps.transpose(1, 2, 0).tobytes())))


def unpack_routes(packed: bytes | None, length: int) -> np.ndarray | None:
    """Return the routes of `length` tokens. Raises ValueError for any other content."""
    if packed is None:
        return None
    (dtype, shape), content = _ROUTES.decode(packed)
    if dtype not in [known.name for known in DTYPES] or shape[0] != length or min(shape[1:]) < 1:
        raise ValueError(f"routes of {dtype}{list(shape)} are packed, not those of {length} tokens")
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if count > _MAX_ROUTE_BYTES * length or len(steps := _expand(content, count)) != count:
        raise ValueError(f"the packed routes are not those of {length} tokens")
    planes = np.frombuffer(steps, dtype).reshape(*shape[1:], length)
    return np.cumsum(planes.transpose(2, 0, 1), axis=-1, dtype=dtype)


def pack_texts(prompt: str | None, completion: str | None) -> bytes | None:
    """Compress the texts of a trajectory; None if it has none."""
    if prompt is None and completion is None:
        return None
    return zlib.compress(msgspec.msgpack.encode((prompt, completion)), _LEVEL)


def unpack_texts(packed: bytes | None) -> tuple[str | None, str | None]:
    """Return prompt and completion. Raises ValueError for any other content."""
    return (None, None) if packed is None else _TEXTS.decode(_expand(packed, _MAX_TEXT_BYTES))


def _huffman(content: bytes) -> bytes:
    coder = zlib.compressobj(_LEVEL, strategy=zlib.Z_RLE)
    return coder.compress(content) + coder.flush()


def _planes(items: np.ndarray) -> bytes:
    return items.view(np.uint8).reshape(-1, _ITEM_BYTES).T.tobytes()


def _expand(packed: bytes, most: int) -> bytes:
    """Expand zlib data to at most `most` bytes. Raises ValueError for more, and for other data."""
    expander = zlib.decompressobj()
    try:
        content = expander.decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(f"a packed column is damaged: {error}") from error
    if len(content) > most or not expander.eof:
        raise ValueError("a packed column is damaged: it is too long or incomplete")
    return content


_SEGMENTS = msgspec.json.Decoder(list[tuple[int, int, int]])
_TURN_REWARDS = msgspec.json.Decoder(list[float] | None)
_KEY = ("group_id", "sample_index", "trace_index")
_SEQUENCE = (*_KEY, "tokens", "logprobs", "texts", "routes")
# The columns that are fields of Trajectory.
_FIELDS = (*_KEY, "reward", "finish_reason", "requests", "kv_version")
_FIELDS += ("started_at", "finished_at", "server")


class Rows(NamedTuple):
    """The values of one trajectory in its two tables; `num_bytes` of those that go at the bound."""

    facts: tuple[Any, ...]
    sequence: tuple[Any, ...]
    num_bytes: int


def to_rows(t: Trajectory, prompt: str | None, completion: str | None) -> Rows:
    """Return the rows of a trajectory, with their columns in the order of the tables."""
    segments = [[s.version, s.start, s.end] for s in t.segments]
    min_version, n_prompt, _ = segments[0] if segments else (None, len(t.tokens), None)
    max_version = segments[-1][0] if segments else None
    facts = (
        t.group_id,
        t.sample_index,
        t.trace_index,
        # SQLite has no negative zero.
        None if t.reward is None else float(t.reward) + 0.0,
        None if t.turn_rewards is None else msgspec.json.encode(t.turn_rewards).decode(),
        t.finish_reason,
        n_prompt,
        len(t.tokens),
        min_version,
        max_version,
        len(segments),
        t.requests,
        t.kv_version,
        float(t.started_at),
        float(t.finished_at),
        t.server,
        msgspec.json.encode(segments).decode(),
    )
    tokens, logprobs = pack_tokens(t.tokens), pack_logprobs(t.behavior_logprobs)
    texts, routes = pack_texts(prompt, completion), pack_routes(t.routes)
    sequence = (t.group_id, t.sample_index, t.trace_index, tokens, logprobs, texts, routes)
    return Rows(
        facts=(*facts, checksum(facts)),
        sequence=(*sequence, checksum(sequence)),
        num_bytes=len(tokens) + len(logprobs) + len(texts or b"") + len(routes or b""),
    )


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of WITH_TOKENS with its arrays and texts unpacked.

    `versions` is int32 [L]. `tokens`, int32 [L], and `logprobs`, float32 [L], are None where they
    are not kept. `segments` is a list of (version, start, end). Raises ValueError for content that
    does not fit.
    """
    row = dict(row)
    del row["sequence_checksum"]
    length, packed = row["n_tokens"], row["tokens"]
    if packed is not None:
        row["tokens"] = unpack(packed, np.int32, length)
        row["logprobs"] = unpack(row["logprobs"], np.float32, length)
    row["segments"] = _SEGMENTS.decode(row["segments"])
    row["turn_rewards"] = _TURN_REWARDS.decode(row["turn_rewards"] or "null")
    row["versions"] = np.full(length, -1, np.int32)
    for version, start, end in row["segments"]:
        row["versions"][start:end] = version
    row["prompt"], row["completion"] = unpack_texts(row.pop("texts"))
    return row


def check_sums(row: Mapping[str, Any]) -> None:
    """Raise ValueError if a row of WITH_ROUTES, with or without tokens, has a wrong checksum."""
    # The columns of `trajectories` come first, and their checksum ends them.
    columns = list(row)
    good = checksum([row[name] for name in columns[: columns.index("checksum")]]) == row["checksum"]
    if row["tokens"] is not None:
        good &= checksum([row[name] for name in _SEQUENCE]) == row["sequence_checksum"]
    if not good:
        raise ValueError(f"{_name(row)} is damaged: its checksum is wrong")


def from_row(row: Mapping[str, Any], prompt_id: str) -> Trajectory:
    """Return the trajectory of a row of WITH_ROUTES. Raises ValueError if it is damaged."""
    check_sums(row)
    if row["tokens"] is None:
        raise ValueError(f"{_name(row)} lacks its tokens")
    whole = decoded(row)
    trajectory = Trajectory(
        **{name: row[name] for name in _FIELDS},
        prompt_id=prompt_id,
        tokens=whole["tokens"],
        loss_mask=whole["versions"] >= 0,
        behavior_logprobs=whole["logprobs"],
        versions=whole["versions"],
        turn_rewards=whole["turn_rewards"],
        routes=unpack_routes(row["routes"], row["n_tokens"]),
    ).check()
    if [(s.version, s.start, s.end) for s in trajectory.segments] != whole["segments"]:
        raise ValueError(f"{_name(row)} is damaged: its segments do not fit its tokens")
    return trajectory


def _name(row: Mapping[str, Any]) -> str:
    return f"trajectory {row['group_id']}/{trace_name(row['sample_index'], row['trace_index'])}"


# A write-ahead log that has grown larger shrinks to this when it starts over.
_LOG_BYTES = 64 * 2**20

REMEDY = "restore the file from a copy, or start anew in another run_dir"
_NOT_WRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
_DISK_REMEDY = "make room on its disk, or make it writable, then continue with resume=auto"


Values = Sequence[Any] | Mapping[str, Any]  # of a statement, by place or by name


class StoreError(ValueError):
    """The store cannot be read or written. The message names the file and the remedy."""


class StoreFile:
    """An open file, for one thread at a time. Every error of SQLite is a StoreError."""

    read_only = True

    def __init__(self, path: Path):
        """Open the store, and create it if there is none, unless `read_only`.

        Its run may still be going on. Raises ValueError if there is none to read.
        """
        if self.read_only and not path.is_file():
            raise ValueError(f"{path} does not exist: give a run directory that has a {path.name}")
        self._path = path
        if not path.exists():
            _create(path)
        # Autocommit outside explicit transactions: Python's implicit ones would be one more state.
        with self._explained():
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro" if self.read_only else path,
                uri=self.read_only,
                isolation_level=None,
                check_same_thread=False,
            )
        tables = [sql for (sql,) in self._query("SELECT sql FROM sqlite_schema WHERE sql != ''")]
        if tables != [part.strip() for part in SCHEMA.split(";") if part.strip()]:
            raise StoreError(
                f"{path} is empty, no trajectory store, or that of another version of the package: "
                f"{REMEDY}"
            )
        self._execute("PRAGMA synchronous = NORMAL")  # no sync per commit
        self._execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite into a StoreError."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            reason = " ".join(str(error).split())
            # The lowest byte is the kind of the error. Nothing of the file is lost then.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            remedy = _DISK_REMEDY if code in _NOT_WRITABLE else REMEDY
            raise StoreError(f"{self._path}: {reason}: {remedy}") from error

    def _execute(self, statement: str, values: Values = ()) -> int:
        """Execute a statement and return the number of changed rows."""
        with self._explained():
            return self._db.execute(statement, values).rowcount

    def _query(self, query: str, values: Values = ()) -> Iterator[tuple[Any, ...]]:
        with self._explained():
            yield from self._db.execute(query, values)

    def begin(self, durable: bool = False) -> None:
        """Begin a transaction. The commit of a `durable` one is on disk, and so are all before."""
        self._execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._execute("COMMIT")

    def rollback(self) -> None:
        """Undo the changes since `begin`, if a transaction is open."""
        if self._db.in_transaction:
            self._execute("ROLLBACK")

    def _rows(self, query: str, values: Values = ()) -> Iterator[dict[str, Any]]:
        with self._explained():
            cursor = self._db.execute(query, values)
            names = [column[0] for column in cursor.description]
            for row in cursor:
                yield dict(zip(names, row))


def _create(path: Path) -> None:
    """Make an empty store that appears complete: a file without tables is never a new store."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        db = sqlite3.connect(scratch)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(SCHEMA)
        db.close()
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be made: {error}") from error
    scratch.rename(path)
    sync_path(path.parent)
