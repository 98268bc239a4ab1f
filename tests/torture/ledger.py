"""What handlers really did, written down by themselves: beside the store, where no fault of the store can reach it.

`begin` and `end` of every attempt are lines at the end of one file, as with any system that knows nothing of us: a line
is one write, so it outlives its process and stands where it happened. Effects of transactional handlers go through the
store's transaction, into a table of the test's own. Processes also write down when they were held up by the machine
(`watch`). Tests read all of it.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import time
from collections import defaultdict
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


TICK, SLEPT = 0.02, 0.1
"""Seconds between two looks at the time, and between which it must have stood still."""

Sleep = tuple[float, float]
"""From when to when a process did not run."""


class Ledger:
    """The ledger that belongs to a store, kept in a file."""

    def __init__(self, store: str, path: Path) -> None:
        self.path = path
        self.sleeps = path.with_name(f"{path.name}-slept")
        self._descriptors: dict[Path, int] = {}
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
        for path in (self.path, self.sleeps):
            path.write_bytes(b"\n" * 8192)
        if not self.is_sqlite:
            with closing(self._connect()) as connection:
                connection.execute(f"CREATE SCHEMA {self._schema}")
                connection.execute("CREATE TABLE effects (key text, fence bigint)")
                connection.commit()

    def note(self, moment: str, event: Event) -> None:
        """Write down that an attempt is here."""
        row = [os.getpid(), event.destination, moment, event.key, event.subject, event.fence, event.attempt]
        self._write(self.path, time.time(), *row)

    def watch(self) -> None:
        """Have a thread write down when this process did not run for a while: a machine may hold it up, as the nemesis
        does, and nobody else would know."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        looked_at = time.time()
        while True:
            time.sleep(TICK)
            before, looked_at = looked_at, time.time()
            if looked_at - before > SLEPT:
                self._write(self.sleeps, os.getpid(), before, looked_at)

    def _write(self, path: Path, *row: object) -> None:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(self._descriptors[path], json.dumps(row).encode() + b"\n")
        except OSError as error:
            if error.errno != errno.EFBIG:  # the test itself forbids this process to write: it sees less, that is all
                raise

    def entries(self) -> list[Entry]:
        """All of it, in the order in which it was written."""
        return [Entry(n, *row) for n, row in enumerate(_rows(self.path), 1)]

    def slept(self) -> dict[int, list[Sleep]]:
        """When each process was held up."""
        found: defaultdict[int, list[Sleep]] = defaultdict(list)
        for pid, start, end in _rows(self.sleeps):
            found[pid].append((start, end))
        return found

    def written(self) -> list[str]:
        """The keys of all effects of transactional handlers."""
        with closing(sqlite3.connect(self._store) if self.is_sqlite else self._connect()) as connection:
            return [key for (key,) in connection.execute("SELECT key FROM effects").fetchall()]

    def _connect(self) -> Any:
        """For one transaction: a pooler takes no options at the start, and gives the next one another session."""
        connection = psycopg.connect(self._store)
        connection.execute("SELECT set_config('search_path', %s, true)", [self._schema])
        return connection


def _rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes()[8192:].splitlines()]
