"""A place on the session's PostgreSQL where a test may do what it likes: break connections, race, damage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg

from oncehook.store.base import Timeouts
from oncehook.store.postgres import PostgresStore
from tests.schemas import built_schema
from tests.servers import fresh_schema, shared_postgres
from tests.store.making import enrolled


def patient(**limits: float) -> Timeouts:
    """Limits that no busy machine meets, but for the ones given."""
    long = dict.fromkeys(("connect", "statement", "lock", "silence", "turn", "heartbeat", "close", "write_lock"), 60)
    return Timeouts(**{**long, **limits})  # type: ignore[arg-type]


@contextlib.contextmanager
def own_database(url: str, name: str) -> Iterator[str]:
    """A new database of this name on a server, until the end."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield f"{url.rpartition('/')[0]}/{name}"
        connection.execute(f"DROP DATABASE {name}")


class Place:
    """A schema on the session's server, and a connection to look at it from outside. `bare`: it is not there yet.

    `apart`: it is in a database of its own, where no transaction of another test keeps dead rows from being tidied up.
    """

    def __init__(self, *, bare: bool = False, apart: bool = False) -> None:
        self.server = shared_postgres()
        self._lent = contextlib.ExitStack()
        self._bare = bare = bare or apart
        self.schema = fresh_schema() if bare else self._lent.enter_context(built_schema())
        base = self._lent.enter_context(own_database(self.server.url, self.schema)) if apart else self.server.url
        self.url = f"{base}?application_name={self.schema}"
        self.connection = psycopg.connect(base, autocommit=True)
        self.stores: list[PostgresStore] = []

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        self.connection.execute(f"SET search_path = {self.schema}")
        cursor = self.connection.execute(statement)
        return cursor.fetchall() if cursor.description else []

    def tidy(self, how: str = "ANALYZE") -> None:
        """Statistics of what is here; not of all that other tests have made on this server."""
        tables = self.sql(f"SELECT tablename FROM pg_tables WHERE schemaname = '{self.schema}'")
        self.sql(f"{how} {', '.join(table for (table,) in tables)}")

    async def open(self, **options: Any) -> PostgresStore:
        options = {"timeouts": patient(), **options}
        store = PostgresStore(options.pop("url", self.url), schema=self.schema, **options)
        self.stores.append(store)
        await store.open()
        await enrolled(store)
        return store

    async def remove(self) -> None:
        for store in self.stores:
            await store.close()
        if self._bare:
            self.sql("SET lock_timeout = '60s'")  # a test that was stopped half-way may still hold what it locked
            self.sql(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")
        self.connection.close()
        self._lent.close()

    def backends(self) -> list[int]:
        """The server's processes that serve intake: those that have a slot of the counters."""
        rows = self.sql(
            f"SELECT pid FROM pg_stat_activity WHERE application_name = '{self.schema}'"
            " AND (query LIKE '%counter_slot%' OR query LIKE '%FROM intake(%') ORDER BY pid"
        )
        return [pid for (pid,) in rows]
