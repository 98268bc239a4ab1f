"""The inbox in PostgreSQL: any number of processes on any number of machines share one database.

Intake, work and reads have connections of their own (`writer`, `queue`, a pool), so none waits for another.
"""

from __future__ import annotations

from oncehook.errors import ExtraMissing
from oncehook.model import Engine, Intake, SchemaState
from oncehook.store import migrate as migrations
from oncehook.store.base import Pending, StoreObserver, Timeouts
from oncehook.store.cipher import Cipher

try:
    import psycopg as psycopg
except ImportError as missing:
    raise ExtraMissing("PostgreSQL", "postgres") from missing

from oncehook.store.postgres.admin import PostgresAdmin
from oncehook.store.postgres.connection import (
    Database,
    check_rights,
    check_server,
    migrate_schema,
    read_version,
    session,
)
from oncehook.store.postgres.definitions import PostgresDefinitions
from oncehook.store.postgres.intake import PostgresIntake
from oncehook.store.postgres.read import PostgresRead
from oncehook.store.postgres.transactions import PostgresTransactions
from oncehook.store.postgres.upkeep import PostgresUpkeep
from oncehook.store.postgres.writer import GroupCommit


class PostgresStore(
    PostgresTransactions, PostgresIntake, PostgresAdmin, PostgresDefinitions, PostgresRead, PostgresUpkeep
):
    """See `Store`. `url` is the driver's, plus `?schema=`; the schema is created where it is missing.

    `search_path` replaces the schema as the path on which names are found; `unsafe` accepts a server that may lose
    acknowledged events (fsync or synchronous_commit off), and is for tests and benchmarks.
    """

    engine = Engine.postgres
    embedded = False
    is_alone = False
    owner = None
    lends_transactions = True

    def __init__(
        self,
        url: str,
        *,
        schema: str = "oncehook",
        cipher: Cipher | None = None,
        intake_connections: int = 2,
        max_waiting: int = 5000,
        max_waiting_bytes: int = 64 << 20,
        batch: int = 32,
        search_path: str | None = None,
        timeouts: Timeouts | None = None,
        unsafe: bool = False,
    ) -> None:
        database = Database.parse(url, schema, search_path=search_path, timeouts=timeouts, unsafe=unsafe)
        super().__init__(database, cipher or Cipher())
        self._writer = GroupCommit(
            self,
            connections=intake_connections,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            batch=batch,
        )

    def announce(self, address: str, token: str) -> None:
        """Do nothing: commands reach the server themselves."""

    def free_disk(self) -> float | None:
        return None

    def free_bytes(self) -> int | None:
        return None

    def warning(self) -> str | None:
        return None

    async def open(self, observer: StoreObserver | None = None, *, migrate: bool = True, write: bool = True) -> None:
        self.observer = observer or self.observer
        async with session(self.database) as connection:
            if write:
                await check_rights(connection, self.database)
            await check_server(connection, self.database)
            await migrate_schema(connection, self.database, migrate=migrate and write)
            await check_server(connection, self.database)
            if write and not self.observer.acts_only:
                await self.watch.look(connection)
        self.reading.open()
        if write:
            self._writer.start(self.observer.receiver_count)
            self.work.open()
            self.start_transactions()
            self.notifier.start(listen=self.observer.works)
            if not self.observer.acts_only:
                self.watch.start()

    async def close(self) -> None:
        await self._writer.close()
        await self.notifier.close()
        await self.watch.close()
        self.work.close()
        self.stop_transactions()
        self.heartbeat.close()
        self.reading.close()

    def record(self, intake: Intake) -> Pending:
        return self._writer.record(intake)

    async def ping(self) -> None:
        await self.execute("UPDATE marks SET value = value + 1 WHERE name = 'ping'")

    async def schema_state(self) -> SchemaState:
        async with session(self.database) as connection:
            return migrations.state(self.engine, await read_version(connection, self.database))
