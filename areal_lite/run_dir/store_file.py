"""The SQLite file of the trajectory store: how it is made, opened, queried and changed."""

import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_lite.run_dir.store_schema import SCHEMA
from areal_lite.system.files import sync_path

# A write-ahead log that has grown larger shrinks to this when it starts over.
_LOG_BYTES = 64 * 2**20

REMEDY = "restore the file from a copy, or start anew in another run_dir"
_NOT_WRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
_DISK_REMEDY = "make room on its disk, or make it writable, then continue with resume=auto"


class StoreError(ValueError):
    """The store cannot be read or written. The message names the file and the remedy."""


class StoreFile:
    """An open file, for one thread at a time. Every error of SQLite is a StoreError."""

    def __init__(self, path: Path, read_only: bool = False):
        """Open the store, and create it if there is none.

        With `read_only` it is never created, and its run may still be going on. Raises ValueError
        if there is none to read.
        """
        if read_only and not path.exists():
            raise ValueError(f"{path} does not exist: give a run directory that has a {path.name}")
        self._path = path
        if not path.exists():
            _create(path)
        # Autocommit outside explicit transactions: Python's implicit ones would be one more state.
        with self._explained():
            self._db = sqlite3.connect(
                f"file:{path}?mode=ro" if read_only else path,
                uri=read_only,
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

    def _execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> int:
        """Execute a statement and return the number of changed rows."""
        with self._explained():
            return self._db.execute(statement, values).rowcount

    def _query(
        self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> Iterator[tuple[Any, ...]]:
        with self._explained():
            yield from self._db.execute(query, values)

    def begin(self, durable: bool = False) -> None:
        """Begin a transaction. The commit of a `durable` one is on disk, and so are all before."""
        self._execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._execute("BEGIN IMMEDIATE")

    def snapshot(self) -> None:
        """Begin a transaction: every query until `close` sees this moment."""
        self._execute("BEGIN")
        next(self._query("SELECT count(*) FROM sqlite_schema"))

    def commit(self) -> None:
        """Commit the transaction."""
        self._execute("COMMIT")

    def rollback(self) -> None:
        """Undo the changes since `begin`, if a transaction is open."""
        if self._db.in_transaction:
            self._execute("ROLLBACK")

    def _rows(
        self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> Iterator[dict[str, Any]]:
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
