"""Engines for acceptance tests: a store URL for processes, and a way to count what it holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.acceptance.processes import Receiver
from tests.schemas import built_schema
from tests.servers import fresh_schema, store_url


@dataclass
class Engine:
    name: str
    url: str
    folder: Path
    receivers: list[Receiver] = field(default_factory=list)
    lent: ExitStack = field(default_factory=ExitStack)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Read the store from outside, with the database's own client."""
        if self.name == "sqlite":
            with closing(sqlite3.connect(self.folder / "inbox.db", timeout=60)) as connection:
                return connection.execute(statement).fetchall()
        url, _, schema = self.url.partition("?schema=")
        with psycopg.connect(url) as connection:
            # For the transaction: a pooler takes no options at the start, and gives the next one another session.
            connection.execute("SELECT set_config('search_path', %s, true)", [schema])
            return connection.execute(statement).fetchall()

    def copies(self) -> list[int]:
        """How often each key came."""
        of_sqlite = "SELECT coalesce(c.n, k.copies) FROM keys k LEFT JOIN copies c ON c.event_id = k.event_id"
        return [n for (n,) in self.rows(of_sqlite if self.name == "sqlite" else "SELECT copies FROM keys")]

    def receiver(self, name: str = "receiver") -> Receiver:
        made = Receiver(self.folder / name, self.url)
        self.receivers.append(made)
        return made

    def end(self) -> None:
        """Leave nothing running, also after a test that failed in the middle."""
        for receiver in self.receivers:
            if receiver.process is not None and receiver.process.poll() is None:
                receiver.kill()
        self.lent.close()

    def events(self) -> dict[str, bytes]:
        """Key to event id; fails when a key has two events."""
        rows = self.rows("SELECT key, id FROM events")
        found = {key: bytes(id_) if isinstance(id_, bytes) else id_.bytes for key, id_ in rows}
        assert len(found) == len(rows), "a key has two events"
        return found


def make_engine(name: str, folder: Path, *, bare: bool = False) -> Engine:
    """A store for one test; `bare`: its tables are not there yet, and it is not given back."""
    if name == "sqlite":
        return Engine("sqlite", f"sqlite:{folder / 'inbox.db'}", folder)
    lent = ExitStack()
    schema = fresh_schema() if bare else lent.enter_context(built_schema())
    return Engine("postgres", f"{store_url()}?schema={schema}", folder, lent=lent)


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = make_engine(request.param, tmp_path)
    yield made
    made.end()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    made = make_engine("sqlite", tmp_path)
    yield made
    made.end()


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[Engine]:
    made = make_engine("postgres", tmp_path)
    yield made
    made.end()
