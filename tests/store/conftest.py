"""One suite for every engine: `store` is each of them in turn, open and enrolled, on a place of its own.

`ground` is that place: it opens further stores on it, moves the store's clock, and speaks SQL past the store,
to look at what is really there or to damage it.

Nobody here is in a hurry: a machine that stands still for seconds in the middle of a statement is no fault of the
store's. A test of what gives up, and when, hands in its own `Timeouts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook import clock
from oncehook.model import Check
from oncehook.store.base import Store, StoreObserver
from oncehook.store.postgres import PostgresStore
from oncehook.store.sqlite import SqliteStore
from tests.schemas import built_schema, drop_tables
from tests.servers import shared_postgres, store_url
from tests.store.making import enrolled
from tests.store.place import Place, patient


class Ground(ABC):
    """Where stores of one test live."""

    engine: str
    address: str
    """What a process of its own needs to open the same store."""
    damaged = False
    has_owner = False

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
        self.url = store_url()
        self.address = f"{self.url}?schema={self.schema}"

    @cached_property
    def _connection(self) -> psycopg.Connection[Any]:
        options = f"-csearch_path={self.schema}"
        connection = psycopg.connect(
            shared_postgres().url, autocommit=True, cursor_factory=psycopg.RawCursor, options=options
        )
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


class Working(StoreObserver):
    """Wants to be woken: a client says so when it connects."""

    works = True


class ClientGround(SqliteGround):
    """A file that another store owns: what the tests use is its client."""

    has_owner = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave clients out where a module says so: OWNER_ONLY."""
    left_out = [
        item
        for item in items
        if getattr(getattr(item, "module", None), "OWNER_ONLY", False)
        and getattr(item, "callspec", None) is not None
        and item.callspec.params.get("ground") == "client"  # type: ignore[attr-defined]
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=["sqlite", "client", "postgres"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    kinds = {"sqlite": SqliteGround, "client": ClientGround}
    made: Ground = kinds[request.param](tmp_path) if request.param in kinds else PostgresGround()
    yield made
    made.remove()


@pytest.fixture
def owner(ground: Ground) -> Iterator[Store | None]:
    """The store that owns the file, where the one under test is its client: on a loop of its own, as in a process."""
    if not ground.has_owner:
        yield None
        return
    made, loop = ground.make(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.open(), loop).result()
    yield made
    asyncio.run_coroutine_threadsafe(made.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
async def store(ground: Ground, owner: Store | None) -> AsyncIterator[Store]:
    made = ground.make()
    await made.open(Working() if ground.has_owner else None)
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
