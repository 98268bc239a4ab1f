"""Claims in a SQLite file of their own, which any number of processes of one machine may use at once.

`client` imports this module when an address says `sqlite:`. Every verb is one `BEGIN IMMEDIATE` transaction. Time is
kept in the file: within one boot of the machine by its steady clock, so that setting the wall clock neither ends a
claim early nor freezes it; from one boot to the next by the wall clock, and never backward.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oncehook import clock
from oncehook.claims.client import SWEEP_ROWS, Ask, Row
from oncehook.claims.connection import survive_forks
from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.store.sqlite.connection import make_local_folder

PATIENCE: Final = 5.0
"""Seconds to wait for the other processes."""

TABLES: Final = (
    """
    CREATE TABLE IF NOT EXISTS oncehook_claims (
      namespace TEXT NOT NULL,
      key       TEXT NOT NULL,
      done      INTEGER NOT NULL,
      token     TEXT NOT NULL,
      payload   TEXT,
      result    BLOB,
      lapses_at INTEGER NOT NULL,  -- microseconds, by oncehook_clock
      PRIMARY KEY (namespace, key)
    )
    """,
    "CREATE INDEX IF NOT EXISTS oncehook_claims_lapses_at ON oncehook_claims (lapses_at)",
    """
    CREATE TABLE IF NOT EXISTS oncehook_clock (
      one    INTEGER PRIMARY KEY CHECK (one = 1),
      now    INTEGER NOT NULL,  -- microseconds since 1970, as last written
      steady INTEGER NOT NULL,  -- the machine's steady clock at that moment
      boot   TEXT NOT NULL      -- of which boot; empty where the system does not tell
    )
    """,
)

TAKE: Final = """
INSERT INTO oncehook_claims (namespace, key, done, token, payload, lapses_at)
VALUES (:namespace, :key, 0, :token, :payload, :now + :span)
ON CONFLICT (namespace, key) DO UPDATE
SET done = 0, token = excluded.token, payload = excluded.payload, result = NULL, lapses_at = excluded.lapses_at
WHERE oncehook_claims.lapses_at <= :now
"""

LOOK: Final = """
SELECT done, token, payload, result, lapses_at - :now FROM oncehook_claims
WHERE namespace = :namespace AND key = :key AND lapses_at > :now
"""

RENEW: Final = """
UPDATE oncehook_claims SET lapses_at = :now + :span
WHERE namespace = :namespace AND key = :key AND token = :token AND NOT done AND lapses_at > :now
"""

COMMIT: Final = """
UPDATE oncehook_claims SET
  done      = 1,
  result    = CASE WHEN done THEN result    ELSE :result END,
  lapses_at = CASE WHEN done THEN lapses_at ELSE :now + :span END
WHERE namespace = :namespace AND key = :key AND token = :token AND lapses_at > :now
"""

ABORT: Final = """
DELETE FROM oncehook_claims
WHERE namespace = :namespace AND key = :key AND token = :token AND NOT done AND lapses_at > :now
"""

FORGET: Final = "DELETE FROM oncehook_claims WHERE namespace = :namespace AND key = :key AND lapses_at > :now"

SWEEP: Final = """
DELETE FROM oncehook_claims WHERE rowid IN (
  SELECT rowid FROM oncehook_claims WHERE lapses_at <= :now ORDER BY lapses_at LIMIT :rows)
"""


@dataclass(frozen=True, slots=True)
class SqliteRequest:
    """Statements of one transaction, which sets `:now`."""

    statements: tuple[str, ...]
    parameters: dict[str, object]


@dataclass(frozen=True, slots=True)
class SqliteReply:
    """The rows of the last statement, and how many it changed."""

    rows: list[tuple[Any, ...]]
    changed: int


class SqliteBackend:
    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def claim(self, key: str, token: str, payload: str | None, ttl: float) -> Ask[Row]:
        request = self._request(TAKE, LOOK, key=key, token=token, payload=payload, span=_microseconds(ttl))
        return Ask(request, lambda reply: _row(reply.rows[0]))

    def renew(self, key: str, token: str, ttl: float) -> Ask[bool]:
        return Ask(self._request(RENEW, key=key, token=token, span=_microseconds(ttl)), _has_changed)

    def commit(self, key: str, token: str, result: bytes | None, keep: float) -> Ask[bool]:
        return Ask(self._request(COMMIT, key=key, token=token, result=result, span=_microseconds(keep)), _has_changed)

    def abort(self, key: str, token: str) -> Ask[bool]:
        return Ask(self._request(ABORT, key=key, token=token), _has_changed)

    def look(self, key: str) -> Ask[Row | None]:
        return Ask(self._request(LOOK, key=key), lambda reply: _row(reply.rows[0]) if reply.rows else None)

    def forget(self, key: str) -> Ask[bool]:
        return Ask(self._request(FORGET, key=key), _has_changed)

    def sweep(self) -> Ask[bool]:
        return Ask(self._request(SWEEP, rows=SWEEP_ROWS), _has_changed)

    def _request(self, *statements: str, **parameters: object) -> SqliteRequest:
        return SqliteRequest(statements, {"namespace": self._namespace, **parameters})


def _row(values: tuple[Any, ...]) -> Row:
    done, token, payload, result, left = values
    return Row(bool(done), token, payload, result, left / 1e6)


def _has_changed(reply: SqliteReply) -> bool:
    return reply.changed > 0


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


# -- connectors --------------------------------------------------------------------------------


class SqliteConnector:
    """One connection, which the threads of a process take in turn."""

    def __init__(self, url: str) -> None:
        name = url.partition(":")[2].removeprefix("//")
        if not name or name == ":memory:":
            raise ConfigError("Claims need a file that other processes find too.", hint="Write sqlite:./claims.db.")
        self._path = Path(name).absolute()
        self._boot = _boot()
        self._connection: sqlite3.Connection | None = None
        self._file = (0, 0)
        self.lock = threading.Lock()
        survive_forks(self)

    def forget(self) -> None:
        # SQLite forbids using an inherited connection, even closing it
        if self._connection is not None:
            _left_to_parent.append(self._connection)
            self._connection = None

    def ask(self, request: SqliteRequest) -> SqliteReply:
        try:
            with self.lock:
                return _run(self._open(), request, self._boot)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"{self._path} cannot be used now: {error}") from error

    def close(self) -> None:
        with self.lock:
            self._disconnect()

    def _open(self) -> sqlite3.Connection:
        # A deleted or replaced file is another store, which all other processes use by now.
        if self._connection is not None and _identity(self._path) == self._file:
            return self._connection
        self._disconnect()
        _make_file(self._path)
        self._connection = _connect(self._path, self._boot)
        self._file = _identity(self._path)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_left_to_parent: Final[list[sqlite3.Connection]] = []


class AsyncSqliteConnector:
    """A connection on its own thread, so that no event loop waits for a disk."""

    def __init__(self, url: str) -> None:
        self._connector = SqliteConnector(url)
        self._thread: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()
        survive_forks(self)

    def forget(self) -> None:
        self._thread = None  # the thread exists in the parent only

    async def ask(self, request: SqliteRequest) -> SqliteReply:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="oncehook-claims")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._connector.ask, request)

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connector.close)
            self._thread.shutdown(wait=False)
            self._thread = None


def _run(connection: sqlite3.Connection, request: SqliteRequest, boot: str) -> SqliteReply:
    before = connection.total_changes
    with _transaction(connection):
        now, steady = _now(connection, boot)
        for statement in request.statements:
            cursor = connection.execute(statement, {**request.parameters, "now": now})
        reply = SqliteReply(cursor.fetchall(), cursor.rowcount)
        if connection.total_changes != before:
            connection.execute("UPDATE oncehook_clock SET now = ?, steady = ?, boot = ?", (now, steady, boot))
    return reply


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit or roll back. Outside WAL mode even COMMIT may find the file busy, which leaves the transaction open."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _now(connection: sqlite3.Connection, boot: str) -> tuple[int, int]:
    """Return the file's time, and the steady clock at this moment."""
    steady = _microseconds(clock.steady())
    kept, then, last_boot = connection.execute("SELECT now, steady, boot FROM oncehook_clock").fetchone()
    if boot == last_boot and steady >= then:
        return kept + steady - then, steady
    return max(kept, _microseconds(clock.now())), steady


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


# -- the file ----------------------------------------------------------------------------------


def _identity(path: Path) -> tuple[int, int]:
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return 0, 0


def _make_file(path: Path) -> None:
    """Make the file if it is not there, readable by its owner only, and refuse a network file system."""
    make_local_folder(path, instead="PostgreSQL or Redis")
    if path.exists():
        return
    # Created under another name: closing a descriptor of the file itself would drop the locks that other connections of
    # this process hold on it.
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".oncehook-")
    os.close(descriptor)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        Path(made).unlink()


def _connect(path: Path, boot: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=PATIENCE)
    try:
        _refuse_an_inbox(connection, path)
        # Not WAL: before SQLite 3.51.3 several writing connections could damage a file in that mode. In this one a
        # commit is durable when the journal is cut and synced, which FULL does.
        for statement in (
            "PRAGMA journal_mode = TRUNCATE",
            "PRAGMA synchronous = FULL",
            "PRAGMA fullfsync = ON",
            "PRAGMA mmap_size = 0",
        ):
            connection.execute(statement)
        if "oncehook_clock" not in _names(connection):
            _make_tables(connection, boot)
    except BaseException:
        connection.close()
        raise
    return connection


def _names(connection: sqlite3.Connection) -> Iterator[str]:
    return (name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall())


def _refuse_an_inbox(connection: sqlite3.Connection, path: Path) -> None:
    if "deliveries" in _names(connection):
        raise ConfigError(
            f"{path} is an inbox's file, which its owner alone writes.", hint="Give the claims a file of their own."
        )


def _make_tables(connection: sqlite3.Connection, boot: str) -> None:
    with _transaction(connection):
        for statement in TABLES:
            connection.execute(statement)
        connection.execute(
            "INSERT INTO oncehook_clock (one, now, steady, boot) VALUES (1, ?, ?, ?) ON CONFLICT DO NOTHING",
            (_microseconds(clock.now()), _microseconds(clock.steady()), boot),
        )


BACKEND, CONNECTOR, ASYNC_CONNECTOR = SqliteBackend, SqliteConnector, AsyncSqliteConnector
