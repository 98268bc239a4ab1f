"""What handlers really did, written down by themselves: beside the store, in tables of the test's own.

`begin` and `end` of every attempt go through a connection of the handler's own, as with any system that knows nothing
of us. Effects of transactional handlers go through the store's transaction. Tests read both.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from oncehook import Event

COLUMNS = (
    "at double precision, pid integer, destination text, moment text,"
    " key text, subject text, fence bigint, attempt integer"
)

NAMES = "at, pid, destination, moment, key, subject, fence, attempt"


@dataclass(frozen=True, slots=True)
class Entry:
    """One moment of one attempt."""

    n: int
    at: float
    pid: int
    destination: str
    moment: str
    key: str
    subject: str | None
    fence: int
    attempt: int


class Ledger:
    """The ledger that belongs to a store: a schema beside its own, or a file beside its file."""

    def __init__(self, store: str) -> None:
        self._here = threading.local()
        self.is_sqlite = store.startswith("sqlite:")
        self._store, _, schema = store.removeprefix("sqlite:").partition("?schema=")
        self._schema = f"{schema}_ledger"
        self.effects = "effects" if self.is_sqlite else f"{self._schema}.effects"

    def create(self) -> None:
        """Make its tables, once."""
        with closing(self._connect()) as connection:
            if self.is_sqlite:
                connection.execute(f"CREATE TABLE entries (n INTEGER PRIMARY KEY, {COLUMNS})")
                return
            connection.execute(f"CREATE SCHEMA {self._schema}")
            connection.execute(f"CREATE TABLE entries (n bigint GENERATED ALWAYS AS IDENTITY, {COLUMNS})")
            connection.execute("CREATE TABLE effects (key text, fence bigint)")

    def note(self, moment: str, event: Event) -> None:
        """Write down that an attempt is here, on a connection of this thread, made anew when the last one failed."""
        row = [
            time.time(),
            os.getpid(),
            event.destination,
            moment,
            event.key,
            event.subject,
            event.fence,
            event.attempt,
        ]
        marks = ", ".join(["?" if self.is_sqlite else "%s"] * len(row))
        if not hasattr(self._here, "connection"):
            self._here.connection = self._connect()
        try:
            self._here.connection.execute(f"INSERT INTO entries ({NAMES}) VALUES ({marks})", row)
        except psycopg.OperationalError:
            self._here.connection.close()
            del self._here.connection
            raise

    def entries(self) -> list[Entry]:
        """All of it, in the order in which it was written."""
        with closing(self._connect()) as connection:
            return [Entry(*row) for row in connection.execute(f"SELECT n, {NAMES} FROM entries ORDER BY n").fetchall()]

    def written(self) -> list[str]:
        """The keys of all effects of transactional handlers."""
        with closing(sqlite3.connect(self._store) if self.is_sqlite else self._connect()) as connection:
            return [key for (key,) in connection.execute("SELECT key FROM effects").fetchall()]

    def _connect(self) -> Any:
        if not self.is_sqlite:
            return psycopg.connect(self._store, autocommit=True, options=f"-csearch_path={self._schema}")
        connection = sqlite3.connect(Path(self._store).with_name("ledger.db"), isolation_level=None, timeout=30)
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute("PRAGMA synchronous = off")  # it must outlive processes, not the machine
        return connection
