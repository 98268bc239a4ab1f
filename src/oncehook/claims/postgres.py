"""Claims on PostgreSQL: one table, made on first use, one statement per verb, all by the database's clock.

`client` imports this module when an address says `postgresql:`. The table is looked for where the connection's
`search_path` leads, or in the schema that `?schema=` in the address names.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import errors

from oncehook.claims.client import SWEEP_ROWS, Ask, Row
from oncehook.claims.connection import PerLoop, survive_forks
from oncehook.errors import StoreError, StoreUnavailable
from oncehook.store.postgres.connection import (
    BlockingConnection,
    BlockingStoreConnection,
    Connection,
    Database,
    Settings,
    StoreConnection,
    is_alive,
)

CONNECTIONS: Final = 4
"""Connections of one process for each event loop, and for all its threads together."""

TABLE: Final = """
CREATE TABLE IF NOT EXISTS oncehook_claims (
  namespace text NOT NULL,
  key       text NOT NULL,
  done      boolean NOT NULL,
  token     text NOT NULL,
  payload   text,
  result    bytea,
  lapses_at timestamptz NOT NULL,
  PRIMARY KEY (namespace, key)
)
"""
INDEX: Final = "CREATE INDEX IF NOT EXISTS oncehook_claims_lapses_at ON oncehook_claims (lapses_at)"

# Two processes may create the table at once, and IF NOT EXISTS alone lets one of them fail. The lock ends with the
# transaction.
ALONE: Final = "SELECT pg_advisory_xact_lock(hashtext('oncehook.claims'))"

# Another's claim is "updated" to itself, so that this one statement always returns the row as it is now: a SELECT
# beside it would not see what was committed after the statement began.
CLAIM: Final = """
INSERT INTO oncehook_claims AS held (namespace, key, done, token, payload, lapses_at)
VALUES (%(namespace)s, %(key)s, false, %(token)s, %(payload)s, now() + %(span)s * interval '1 second')
ON CONFLICT (namespace, key) DO UPDATE SET
  done      = CASE WHEN held.lapses_at <= now() THEN false              ELSE held.done END,
  token     = CASE WHEN held.lapses_at <= now() THEN excluded.token     ELSE held.token END,
  payload   = CASE WHEN held.lapses_at <= now() THEN excluded.payload   ELSE held.payload END,
  result    = CASE WHEN held.lapses_at <= now() THEN NULL               ELSE held.result END,
  lapses_at = CASE WHEN held.lapses_at <= now() THEN excluded.lapses_at ELSE held.lapses_at END
RETURNING done, token, payload, result, extract(epoch FROM lapses_at - now())::float8
"""

RENEW: Final = """
UPDATE oncehook_claims SET lapses_at = now() + %(span)s * interval '1 second'
WHERE namespace = %(namespace)s AND key = %(key)s AND token = %(token)s AND NOT done AND lapses_at > now()
RETURNING true
"""

COMMIT: Final = """
UPDATE oncehook_claims SET
  done      = true,
  result    = CASE WHEN done THEN result    ELSE %(result)s::bytea END,
  lapses_at = CASE WHEN done THEN lapses_at ELSE now() + %(span)s * interval '1 second' END
WHERE namespace = %(namespace)s AND key = %(key)s AND token = %(token)s AND lapses_at > now()
RETURNING true
"""

ABORT: Final = """
DELETE FROM oncehook_claims
WHERE namespace = %(namespace)s AND key = %(key)s AND token = %(token)s AND NOT done AND lapses_at > now()
RETURNING true
"""

LOOK: Final = """
SELECT done, token, payload, result, extract(epoch FROM lapses_at - now())::float8
FROM oncehook_claims WHERE namespace = %(namespace)s AND key = %(key)s AND lapses_at > now()
"""

FORGET: Final = """
DELETE FROM oncehook_claims WHERE namespace = %(namespace)s AND key = %(key)s RETURNING lapses_at > now()
"""

# A statement of its own that never waits for a row: inside a claim's transaction, two sweeps could deadlock.
SWEEP: Final = """
DELETE FROM oncehook_claims WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM oncehook_claims WHERE lapses_at <= now() ORDER BY lapses_at LIMIT %(rows)s FOR UPDATE SKIP LOCKED))
RETURNING true
"""

SETTINGS: Final = {"statement_timeout": "5s", "default_transaction_isolation": "read committed"}
DURABLE: Final = "SELECT current_setting('synchronous_commit') = 'off'"
_WHEREVER: Final = "*"
"""A schema that was not named: the one that search_path leads to."""


@dataclass(frozen=True, slots=True)
class PostgresRequest:
    statement: str
    parameters: dict[str, object]


class PostgresBackend:
    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def claim(self, key: str, token: str, payload: str | None, ttl: float) -> Ask[Row]:
        return Ask(self._request(CLAIM, key, token=token, payload=payload, span=ttl), lambda rows: _row(rows[0]))

    def renew(self, key: str, token: str, ttl: float) -> Ask[bool]:
        return Ask(self._request(RENEW, key, token=token, span=ttl), bool)

    def commit(self, key: str, token: str, result: bytes | None, keep: float) -> Ask[bool]:
        return Ask(self._request(COMMIT, key, token=token, result=result, span=keep), bool)

    def abort(self, key: str, token: str) -> Ask[bool]:
        return Ask(self._request(ABORT, key, token=token), bool)

    def look(self, key: str) -> Ask[Row | None]:
        return Ask(self._request(LOOK, key), lambda rows: _row(rows[0]) if rows else None)

    def forget(self, key: str) -> Ask[bool]:
        return Ask(self._request(FORGET, key), lambda rows: bool(rows and rows[0][0]))

    def sweep(self) -> Ask[bool]:
        return Ask(PostgresRequest(SWEEP, {"rows": SWEEP_ROWS}), bool)

    def _request(self, statement: str, key: str, **parameters: object) -> PostgresRequest:
        return PostgresRequest(statement, {"namespace": self._namespace, "key": key, **parameters})


def _row(values: tuple[Any, ...]) -> Row:
    done, token, payload, result, left = values
    return Row(done, token, payload, result, max(0.0, left))


class PostgresConnector:
    """A few blocking connections; a thread that finds none free waits for one."""

    def __init__(self, url: str) -> None:
        self._place = Database.parse(url, _WHEREVER)
        self.lock = threading.Lock()
        survive_forks(self)
        self._begin()

    def _begin(self) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._idle: list[BlockingConnection] = []

    def forget(self) -> None:
        # closing an inherited connection would end the parent's
        _left_to_parent.extend(self._idle)
        self._begin()

    def ask(self, request: PostgresRequest) -> list[Any]:
        with self._room:
            connection = self._take()
            try:
                rows = self._rows(connection, request)
            except BaseException as error:
                connection.close()
                if isinstance(error, psycopg.Error):
                    raise _unavailable(error) from error
                raise
            with self.lock:
                self._idle.append(connection)
            return rows

    def close(self) -> None:
        with self.lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> BlockingConnection:
        while True:
            with self.lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if is_alive(connection):
                return connection
            connection.close()
        try:
            connection = BlockingStoreConnection.open(self._place, _settings(self._place), prepare_threshold=None)
            if connection.execute(DURABLE).fetchone() == (True,):
                connection.configure({"synchronous_commit": "on"})
        except psycopg.Error as error:
            raise _unavailable(error) from error
        return connection

    def _rows(self, connection: BlockingConnection, request: PostgresRequest) -> list[Any]:
        try:
            return connection.execute(request.statement.encode(), request.parameters).fetchall()
        except errors.UndefinedTable:
            with connection.transaction():
                for statement in (ALONE, TABLE, INDEX):
                    connection.execute(statement)
            return connection.execute(request.statement.encode(), request.parameters).fetchall()


_left_to_parent: Final[list[BlockingConnection]] = []


class _Pool:
    def __init__(self) -> None:
        self.room = asyncio.Semaphore(CONNECTIONS)
        self.idle: list[Connection] = []

    async def close(self) -> None:
        while self.idle:
            await self.idle.pop().close()


class AsyncPostgresConnector:
    """A few connections for each event loop; a task that finds none free waits for one."""

    def __init__(self, url: str) -> None:
        self._place = Database.parse(url, _WHEREVER)
        self._pools = PerLoop(_Pool, _Pool.close)

    async def ask(self, request: PostgresRequest) -> list[Any]:
        pool = await self._pools.get()
        async with pool.room:
            connection = await self._take(pool)
            try:
                rows = await self._rows(connection, request)
            except BaseException as error:
                await connection.close()
                if isinstance(error, psycopg.Error):
                    raise _unavailable(error) from error
                raise
            pool.idle.append(connection)
            return rows

    async def close(self) -> None:
        await self._pools.close()

    async def _take(self, pool: _Pool) -> Connection:
        while pool.idle:
            connection = pool.idle.pop()
            if is_alive(connection):
                return connection
            await connection.close()
        try:
            connection = await StoreConnection.open(self._place, _settings(self._place), prepare_threshold=None)
            if await (await connection.execute(DURABLE)).fetchone() == (True,):
                await connection.configure({"synchronous_commit": "on"})
        except psycopg.Error as error:
            raise _unavailable(error) from error
        return connection

    async def _rows(self, connection: Connection, request: PostgresRequest) -> list[Any]:
        try:
            return await (await connection.execute(request.statement.encode(), request.parameters)).fetchall()
        except errors.UndefinedTable:
            async with connection.transaction():
                for statement in (ALONE, TABLE, INDEX):
                    await connection.execute(statement)
            return await (await connection.execute(request.statement.encode(), request.parameters)).fetchall()


def _settings(place: Database) -> Settings:
    return SETTINGS if place.schema == _WHEREVER or place.path is None else {**SETTINGS, "search_path": place.path}


def _unavailable(error: psycopg.Error) -> StoreError:
    text = str(error).strip()
    if isinstance(error, errors.InsufficientPrivilege | errors.InvalidSchemaName):
        return StoreError(
            f"The table oncehook_claims cannot be made or used: {text}",
            hint="Let an administrator make it for this role; docs/explanation/claims.md has the statement.",
        )
    return StoreUnavailable(f"PostgreSQL did not answer: {text}")


BACKEND, CONNECTOR, ASYNC_CONNECTOR = PostgresBackend, PostgresConnector, AsyncPostgresConnector
