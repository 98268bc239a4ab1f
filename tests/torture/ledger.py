"""What handlers really did, written down by themselves: beside the store, where no fault of the store can reach it.

`begin` and `end` of every attempt are lines at the end of one file, as with any system that knows nothing of us: a line
is one write, so it outlives its process and stands where it happened. Effects of transactional handlers go through the
store's transaction, into a table of the test's own. Tests read both.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from oncehook import Event


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
    """The ledger that belongs to a store, kept in a file."""

    def __init__(self, store: str, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self.move(store)

    def move(self, store: str) -> None:
        """Effects are in this store."""
        self.is_sqlite = store.startswith("sqlite:")
        self._store, _, schema = store.removeprefix("sqlite:").partition("?schema=")
        self._schema = f"{schema}_ledger"
        self.effects = "effects" if self.is_sqlite else f"{self._schema}.effects"

    def create(self) -> None:
        """Make the file and the table of effects, once."""
        # Longer than a page from the start: a limit on file sizes then refuses a line, and never tears one.
        self.path.write_bytes(b"\n" * 8192)
        if not self.is_sqlite:
            with closing(self._connect()) as connection:
                connection.execute(f"CREATE SCHEMA {self._schema}")
                connection.execute("CREATE TABLE effects (key text, fence bigint)")

    def note(self, moment: str, event: Event) -> None:
        """Write down that an attempt is here."""
        row = [os.getpid(), event.destination, moment, event.key, event.subject, event.fence, event.attempt]
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(self._descriptor, json.dumps([time.time(), *row]).encode() + b"\n")
        except OSError as error:
            if error.errno != errno.EFBIG:  # the test itself forbids this process to write: it sees less, that is all
                raise

    def entries(self) -> list[Entry]:
        """All of it, in the order in which it was written."""
        lines = self.path.read_bytes()[8192:].splitlines()
        return [Entry(n, *json.loads(line)) for n, line in enumerate(lines, 1)]

    def written(self) -> list[str]:
        """The keys of all effects of transactional handlers."""
        with closing(sqlite3.connect(self._store) if self.is_sqlite else self._connect()) as connection:
            return [key for (key,) in connection.execute("SELECT key FROM effects").fetchall()]

    def _connect(self) -> Any:
        return psycopg.connect(self._store, autocommit=True, options=f"-csearch_path={self._schema}")
