"""One suite for every engine: `store` is each of them in turn, open and enrolled, on a place of its own.

`ground` is that place: it opens further stores on it, moves the store's clock, and speaks SQL past the store,
to look at what is really there or to damage it.

Nobody here is in a hurry: a machine that stands still for seconds in the middle of a statement is no fault of the
store's. A test of what gives up, and when, hands in its own `Timeouts`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook import clock
from oncehook.model import Check
from oncehook.store.base import Store
from oncehook.store.postgres import PostgresStore
from oncehook.store.sqlite import SqliteStore
from tests.schemas import built_schema, drop_tables
from tests.servers import shared_postgres
from tests.store.making import enrolled
from tests.store.place import Place, patient


class Ground(ABC):
    """Where stores of one test live."""

    engine: str
    address: str
    """What a process of its own needs to open the same store."""
    damaged = False

    def __init__(self) -> None:
        self._changes = pytest.MonkeyPatch()

    @abstractmethod
    def make(self, **options: Any) -> Store: ...

    @abstractmethod
    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def forward(self, seconds: float) -> None: ...

    @abstractmethod
    def make_bare(self) -> None:
        """Leave nothing here, as before the first start."""

    def stand_still(self) -> None:
        """From now on time passes only by `forward`: however long a test takes, for the store it takes no time."""
        now, steady = clock.now() - clock._skew, clock.steady() - clock._skew
        self._changes.setattr(clock, "now", lambda: now + clock._skew)
        self._changes.setattr(clock, "steady", lambda: steady + clock._skew)

    def remove(self) -> None:
        self._changes.undo()

    def damage(self, statement: str) -> None:
        """Change what is kept, so that the books no longer balance."""
        self.sql(statement)
        self.damaged = True


class SqliteGround(Ground):
    engine = "sqlite"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "oncehook.db"
        self.address = str(self.path)
        self._moved = 0.0

    def make(self, **options: Any) -> Store:
        return SqliteStore(self.path, **{"timeouts": patient(), **options})

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as connection:
            return connection.execute(statement, parameters).fetchall()

    def make_bare(self) -> None:
        self.path.unlink(missing_ok=True)

    def forward(self, seconds: float) -> None:
        clock.forward(seconds)
        self._moved += seconds

    def remove(self) -> None:
        super().remove()
        clock.forward(-self._moved)


class PostgresGround(Ground):
    """A schema of its own, with a `now()` of its own in front of the server's."""

    engine = "postgres"

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self.schema = self._stack.enter_context(built_schema(movable_clock=True))
        self.url = shared_postgres().url
        self.address = f"{self.url}?schema={self.schema}"

    @cached_property
    def _connection(self) -> psycopg.Connection[Any]:
        options = f"-csearch_path={self.schema}"
        connection = psycopg.connect(self.url, autocommit=True, cursor_factory=psycopg.RawCursor, options=options)
        self._stack.callback(connection.close)
        return connection

    def make_bare(self) -> None:
        drop_tables(self.schema, movable_clock=True)

    def stand_still(self) -> None:
        super().stand_still()
        self.sql("UPDATE shift SET stands_at = pg_catalog.now()")

    def make(self, **options: Any) -> Store:
        options = {"timeouts": patient(), "search_path": f"{self.schema}, pg_catalog", **options}
        return PostgresStore(self.url, schema=self.schema, **options)

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def forward(self, seconds: float) -> None:
        self.sql("UPDATE shift SET by = by + make_interval(secs => $1)", seconds)

    def remove(self) -> None:
        super().remove()
        self._stack.close()


@pytest.fixture(params=["sqlite", "postgres"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    made: Ground = SqliteGround(tmp_path) if request.param == "sqlite" else PostgresGround()
    yield made
    made.remove()


@pytest.fixture
async def store(ground: Ground) -> AsyncIterator[Store]:
    made = ground.make()
    await made.open()
    await enrolled(made)
    yield made
    # whatever a test did, nothing may be lost or invented (R68)
    failed = [] if ground.damaged else failed_checks(await made.check())
    await made.close()
    assert failed == []


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    await made.remove()


@pytest.fixture
async def bare_place() -> AsyncIterator[Place]:
    """Where nothing is yet."""
    made = Place(bare=True)
    yield made
    await made.remove()


def failed_checks(checks: Sequence[Check]) -> list[str]:
    """The names of the laws that do not hold."""
    return [check.name for check in checks if not check.ok]
