"""How a PostgreSQL connection is opened so that it keeps its promises, and how the schema is brought up to date.

The promises: a commit that is on disk when it is confirmed (R2), a dedup index that stands (R66), a schema this
program knows (R65). All tables live in one schema of their own, found through `search_path`: SQL stays constant text.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from oncehook import faults
from oncehook.errors import ConfigError, MigrationNeeded, StoreError, StoreUnavailable
from oncehook.model import Engine
from oncehook.store.base import Timeouts
from oncehook.store.migrate import Migration, steps_from
from oncehook.store.postgres.wire import BlockingConnection, Connection, adapt

OLDEST_SERVER: Final = 140000

_SEARCH_PATH: Final = re.compile(r"search_path=((?:\\.|[^\s\\])*)")
_ESCAPED: Final = re.compile(r"\\(.)")

SILENCE: Final = 10.0
"""Seconds without an answer after which a connection is cut: its statement_timeout should have spoken long before."""

DEFAULTS: Final = {
    "fallback_application_name": "oncehook",
    "target_session_attrs": "read-write",  # after a failover: the server that can write, not the one that was first
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


@dataclass(slots=True, frozen=True)
class Place:
    """Where the inbox lives: a database, and a schema in it."""

    conninfo: str
    schema: str
    search_path: str | None
    """Given by the caller; else the schema alone, so that nothing of other schemas is ever meant by our names."""
    keeps_path: bool
    """The address itself sets a search_path that leads here: leave it alone. One that leads elsewhere is for the
    statements of handlers, not for ours."""
    timeouts: Timeouts

    @property
    def settings(self) -> list[object]:
        """The parameters of `_SETTLE`."""
        return [self.keeps_path, self.search_path, self.schema, milliseconds(self.timeouts.statement)]

    @property
    def hot_settings(self) -> list[object]:
        """The parameters of `_HEAT`."""
        return [milliseconds(self.timeouts.lock), milliseconds(self.timeouts.statement)]


def milliseconds(seconds: float) -> str:
    """Return a duration as PostgreSQL's settings take it."""
    return f"{seconds * 1000:.0f}ms"


def place(url: str, schema: str, search_path: str | None, timeouts: Timeouts | None = None) -> Place:
    """Read the address of a store. `?schema=` is ours, everything else is for the driver."""
    address, _, query = url.partition("?")
    others = []
    for pair in query.split("&") if query else []:
        name, _, value = pair.partition("=")
        if name == "schema":
            schema = unquote(value)
        else:
            others.append(pair)
    timeouts = timeouts or Timeouts()
    try:
        settings = conninfo_to_dict(address + ("?" + "&".join(others) if others else ""))
        conninfo = make_conninfo("", **{**DEFAULTS, "connect_timeout": timeouts.connect, **settings})
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"This is not the address of a PostgreSQL database: {str(error).strip()}") from error
    if not schema:
        raise ConfigError("The schema needs a name.")
    return Place(conninfo, schema, search_path, schema in _path_of(str(settings.get("options", ""))), timeouts)


def _path_of(options: str) -> list[str]:
    """The schemas of the last search_path that options for the server set (`-c search_path=…`)."""
    paths = _SEARCH_PATH.findall(options)
    return [name.strip(' "') for name in _ESCAPED.sub(r"\1", paths[-1]).split(",")] if paths else []


# -- connections -------------------------------------------------------------------------------

_SETTLE: Final = """
SELECT set_config('search_path',
    CASE WHEN $1 THEN current_setting('search_path') ELSE coalesce($2, quote_ident($3)) END, false),
  set_config('TimeZone', 'UTC', false), set_config('statement_timeout', $4, false)
"""

# The queue's functions bring their own settings; to call one is planned once, and not anew for each set of arrays.
# synchronous_commit is pinned to what was found good, so that no later change of the server's configuration reaches a
# connection that acknowledges arrivals.
_HEAT: Final = """
SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('lock_timeout', $1, false),
  set_config('idle_in_transaction_session_timeout', $2, false),
  set_config('synchronous_commit', current_setting('synchronous_commit'), false)
"""


async def connect(here: Place) -> Connection:
    """A connection in autocommit that knows our types and our schema. Raises StoreUnavailable."""
    try:
        connection = await psycopg.AsyncConnection.connect(
            here.conninfo, autocommit=True, prepare_threshold=None, cursor_factory=psycopg.AsyncRawCursor
        )
        async with _or_close(connection):
            adapt(connection)
            await connection.execute(_SETTLE, here.settings)
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error
    return connection


@contextlib.asynccontextmanager
async def session(here: Place) -> AsyncIterator[Connection]:
    """A connection for a short while. What the driver says becomes StoreUnavailable."""
    connection = await connect(here)
    try:
        async with connection:
            yield connection
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL did not answer: {str(error).strip()}") from error


@contextlib.asynccontextmanager
async def _or_close(connection: Connection) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await connection.close()
        raise


@contextlib.contextmanager
def blocking_session(here: Place) -> Iterator[psycopg.RawCursor[tuple[Any, ...]]]:
    """A blocking connection's cursor for a short while, whether the store is open or not. Raises StoreUnavailable."""
    try:
        with psycopg.connect(here.conninfo, autocommit=True) as connection:
            cursor = psycopg.RawCursor(connection)
            adapt(cursor)
            cursor.execute(_SETTLE, here.settings)
            yield cursor
    except psycopg.errors.UndefinedTable as error:
        raise MigrationNeeded("The inbox has no tables in this database yet.") from error
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error


async def connect_hot(here: Place, *, unsafe: bool) -> tuple[Connection, int]:
    """Open a connection for intake or work, with the slot of the counters that it alone writes. The promises are proven
    each time anew: after a failover it may be another server."""
    connection = await connect(here)
    async with _or_close(connection):
        await prove(connection, here, unsafe=unsafe)
        await connection.execute(_HEAT, here.hot_settings)
        connection.prepare_threshold = 0
        (slot,) = await one(connection, "SELECT nextval('counter_slot')")
    return connection, slot


def heat_blocking(connection: BlockingConnection, here: Place) -> None:
    """The same settings for a blocking connection that changes nothing a promise hangs on: it was proven by others."""
    cursor = psycopg.RawCursor(connection)
    cursor.execute(_SETTLE, here.settings)
    cursor.execute(_HEAT, here.hot_settings)


def is_alive(connection: Connection | BlockingConnection) -> bool:
    """The server has not said farewell to this connection, which rests. Anything else it said is read and forgotten."""
    with contextlib.suppress(psycopg.Error):
        for _ in range(2):  # its last words, and then the end of the line
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()
    return not connection.closed


def cut(connection: Connection | BlockingConnection) -> None:
    """Break a connection, so that whoever waits for its answer gets an error now.

    Cancelling the waiting task instead would have the driver ask the server to cancel, and wait for that.
    """
    if not connection.closed:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)


async def rows(connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[Any]:
    """All rows of a statement, ids as bytes."""
    cursor = await connection.execute(statement, parameters, binary=True)
    return await cursor.fetchall()


async def one(connection: Connection, statement: str, parameters: Sequence[object] = ()) -> Any:
    """The first row of a statement that has one."""
    return (await rows(connection, statement, parameters))[0]


# -- promises ----------------------------------------------------------------------------------


async def prove(connection: Connection, here: Place, *, unsafe: bool) -> None:
    """Refuse a server that would confirm a commit before it is on disk, or that lost the judge of duplicates."""
    if connection.info.server_version < OLDEST_SERVER:
        raise StoreError(f"PostgreSQL 14 or newer is needed; this is {connection.info.server_version // 10000}.")
    committed, synced = await one(
        connection, "SELECT current_setting('synchronous_commit'), current_setting('fsync')::boolean"
    )
    if committed not in ("on", "remote_write", "remote_apply") and not unsafe:
        raise StoreError(
            f"synchronous_commit is {committed}: an acknowledged event could be lost.",
            hint="Set it to on for this role: ALTER ROLE … SET synchronous_commit = on",
        )
    if not synced and not unsafe:
        raise StoreError("fsync is off: an acknowledged event could be lost.", hint="Set fsync = on in the server.")
    if await version(connection, here) and not await dedup_index_stands(connection, here):
        raise StoreError(
            "The unique index on keys.hash is missing or invalid: duplicates could not be recognised.",
            hint="Build it again (REINDEX INDEX CONCURRENTLY keys_pkey), then start.",
        )


async def dedup_index_stands(connection: Connection, here: Place) -> bool:
    """There is an index that makes a key unique, it is complete, and ON CONFLICT can use it."""
    (count,) = await one(
        connection,
        """
        SELECT count(*) FROM pg_index x
        JOIN pg_class c ON c.oid = x.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = x.indkey[0]
        WHERE n.nspname = $1 AND c.relname = 'keys' AND a.attname = 'hash' AND x.indnkeyatts = 1
          AND x.indisunique AND x.indimmediate AND x.indisvalid AND x.indisready AND x.indpred IS NULL
        """,
        [here.schema],
    )
    return bool(count)


# -- schema ------------------------------------------------------------------------------------


async def version(connection: Connection, here: Place) -> int:
    """The schema's version; 0 when there is none yet."""
    (known,) = await one(connection, "SELECT to_regclass(quote_ident($1) || '.migrations') IS NOT NULL", [here.schema])
    if not known:
        return 0
    (number,) = await one(connection, "SELECT coalesce(max(version), 0) FROM migrations")
    return int(number)


async def migrate(connection: Connection, here: Place, *, migrate: bool) -> None:
    """Bring the schema up to date, each step in one transaction with its row. Any number of processes may try."""
    for step in steps_from(Engine.postgres, await version(connection, here), migrate=migrate):
        try:
            await _apply(connection, here, step)
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreError(
                f"This role may not make the tables: {str(error).strip()}",
                hint="Let an administrator make the schema for this role: CREATE SCHEMA … AUTHORIZATION …",
            ) from error
        except psycopg.DatabaseError as error:
            raise StoreError(f"The migration {step.name} failed: {str(error).strip()}") from error


async def _apply(connection: Connection, here: Place, step: Migration) -> None:
    async with connection.transaction():
        # One migrator at a time (R65). The lock comes in a statement of its own: the ones after it see what a
        # rival committed while we waited.
        await connection.execute(
            "SELECT set_config('statement_timeout', '0', true), set_config('oncehook.schema', $1, true)", [here.schema]
        )
        await connection.execute(
            "SELECT pg_advisory_xact_lock(hashtext('oncehook.migrate'), hashtext($1))", [here.schema]
        )
        await connection.execute(_MAKE_SCHEMA)
        # New tables go to the first schema of the path, whatever the caller put in front of it.
        await connection.execute(
            "SELECT set_config('search_path', quote_ident($1) || ', ' || current_setting('search_path'), true)",
            [here.schema],
        )
        await connection.execute(_MAKE_MIGRATIONS)
        if await version(connection, here) < step.version:
            await connection.execute(step.sql.encode())
            await connection.execute(
                "INSERT INTO migrations (version, name, applied_at) VALUES ($1, $2, now())", [step.version, step.name]
            )
            faults.point("before_migration_commit")


# CREATE SCHEMA takes no parameters, and IF NOT EXISTS asks for a right on the database even where it exists.
_MAKE_SCHEMA: Final = """
DO $$ BEGIN
  IF to_regnamespace(quote_ident(current_setting('oncehook.schema'))) IS NULL THEN
    EXECUTE format('CREATE SCHEMA %I', current_setting('oncehook.schema'));
  END IF;
END $$
"""

_MAKE_MIGRATIONS: Final = """
CREATE TABLE IF NOT EXISTS migrations (version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL)
"""
