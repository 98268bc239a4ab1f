"""The hot connections of work: a few, apart from intake's, on which leases and settles run as one statement each, or as
few as can be in a short transaction.

They are opened when first needed, and again when one is lost; whoever asked then gets StoreUnavailable and asks again.
The engine hands them a statement and what makes its parameters, and gets rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, TypeAlias
from urllib.parse import unquote

import psycopg
from psycopg import pq
from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format
from psycopg.types.string import ByteaBinaryLoader

from oncehook import clock, faults
from oncehook.errors import ConfigError, MigrationNeeded, StoreError, StoreUnavailable
from oncehook.model import Engine
from oncehook.store.migrate import Migration, migrations, steps_from
from oncehook.store.postgres.queue import Ask
from oncehook.store.postgres.writer import Connect

Connection: TypeAlias = psycopg.AsyncConnection[tuple[object, ...]]
BlockingConnection: TypeAlias = psycopg.Connection[tuple[object, ...]]

_NULL = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("!i")
_SIXTEEN = _LENGTH.pack(16)
_ARRAY_HEAD = struct.Struct("!iiIii")
_SMALL = struct.Struct("!ih")
_INTEGER = struct.Struct("!ii")
_BIG = struct.Struct("!iq")
_FLOAT = struct.Struct("!id")
_TRUE, _FALSE = _LENGTH.pack(1) + b"\x01", _LENGTH.pack(1) + b"\x00"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Id(bytes):
    """16 bytes that PostgreSQL is to take as a `uuid`."""

    __slots__ = ()


class Column:
    """An array, ready to be sent. One made of nothing but None is sent as NULL: `unnest` fills it up with NULLs."""

    __slots__ = ("packed",)
    oid: ClassVar[int]
    array_oid: ClassVar[int]

    def __init__(self, parts: Sequence[bytes] | None, count: int) -> None:
        self.packed = None if parts is None else b"".join((_ARRAY_HEAD.pack(1, 0, self.oid, count, 1), *parts))


class Ids(Column):
    """A column of ids or hashes."""

    __slots__ = ()
    oid, array_oid = 2950, 2951

    def __init__(self, values: Sequence[bytes | None]) -> None:
        if not any(values):
            super().__init__(None, 0)
            return
        # one of another length would shift the rest: the server then finds the array malformed
        super().__init__([_NULL if value is None else _SIXTEEN + value for value in values], len(values))


class Texts(Column):
    """A column of text."""

    __slots__ = ()
    oid, array_oid = 25, 1009

    def __init__(self, values: Sequence[str | None]) -> None:
        parts = [_NULL if value is None else _with_length(value.encode()) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Blobs(Column):
    """A column of bytes."""

    __slots__ = ()
    oid, array_oid = 17, 1001

    def __init__(self, values: Sequence[bytes | None]) -> None:
        parts: list[bytes] = []
        for value in values:
            if value is None:
                parts.append(_NULL)
            else:
                parts += (_LENGTH.pack(len(value)), value)
        super().__init__(parts, len(values))


class Smalls(Column):
    """A column of `smallint`."""

    __slots__ = ()
    oid, array_oid = 21, 1005

    def __init__(self, values: Sequence[int | None]) -> None:
        parts = [_NULL if value is None else _SMALL.pack(2, value) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Bools(Column):
    """A column of `boolean`."""

    __slots__ = ()
    oid, array_oid = 16, 1000

    def __init__(self, values: Sequence[bool]) -> None:
        super().__init__([_TRUE if value else _FALSE for value in values], len(values))


class Integers(Column):
    """A column of `integer`."""

    __slots__ = ()
    oid, array_oid = 23, 1007

    def __init__(self, values: Sequence[int | None]) -> None:
        parts = [_NULL if value is None else _INTEGER.pack(4, value) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Bigs(Column):
    """A column of `bigint`."""

    __slots__ = ()
    oid, array_oid = 20, 1016

    def __init__(self, values: Sequence[int]) -> None:
        super().__init__([_BIG.pack(8, value) for value in values], len(values))


class Floats(Column):
    """A column of `float8`."""

    __slots__ = ()
    oid, array_oid = 701, 1022

    def __init__(self, values: Sequence[float | None]) -> None:
        parts = [_NULL if value is None else _FLOAT.pack(8, value) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Times(Column):
    """A column of `timestamptz`."""

    __slots__ = ()
    oid, array_oid = 1184, 1185

    def __init__(self, values: Sequence[datetime | None]) -> None:
        parts = [_NULL if value is None else _BIG.pack(8, (value - _EPOCH) // _MICROSECOND) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


def _with_length(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


class _IdDumper(Dumper):
    format = Format.BINARY
    oid = Ids.oid

    def dump(self, obj: Id) -> bytes:
        return obj


class _ColumnDumper(Dumper):
    format = Format.BINARY

    def __init__(self, cls: type[Column], context: AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        # Always the same type, whatever is in it: else the driver would prepare one statement per mixture.
        self.oid = cls.array_oid

    def dump(self, obj: Column) -> bytes | None:
        return obj.packed


def adapt(context: AdaptContext) -> None:
    """Teach a connection, or one cursor of it, the types of this module."""
    adapters = context.adapters
    adapters.register_loader("uuid", ByteaBinaryLoader)
    adapters.register_dumper(Id, _IdDumper)
    for column in (Ids, Texts, Blobs, Smalls, Bools, Integers, Bigs, Floats, Times):
        adapters.register_dumper(column, _ColumnDumper)


def storable(text: str) -> str:
    """PostgreSQL takes neither NUL nor half a character, and one stranger's must not cost the others' rows."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


OLDEST_SERVER: Final = 140000

PATIENCE: Final = "300ms"
"""lock_timeout: how long a group of arrivals waits for a row that a foreign transaction holds."""

_SEARCH_PATH: Final = re.compile(r"search_path=((?:\\.|[^\s\\])*)")
_ESCAPED: Final = re.compile(r"\\(.)")

SILENCE: Final = 10.0
"""Seconds without an answer after which a connection is cut: its statement_timeout should have spoken long before."""

DEFAULTS: Final = {
    "fallback_application_name": "oncehook",
    "target_session_attrs": "read-write",  # after a failover: the server that can write, not the one that was first
    "connect_timeout": "5",
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


def place(url: str, schema: str, search_path: str | None) -> Place:
    """Read the address of a store. `?schema=` is ours, everything else is for the driver."""
    address, _, query = url.partition("?")
    others = []
    for pair in query.split("&") if query else []:
        name, _, value = pair.partition("=")
        if name == "schema":
            schema = unquote(value)
        else:
            others.append(pair)
    try:
        settings = conninfo_to_dict(address + ("?" + "&".join(others) if others else ""))
        conninfo = make_conninfo("", **{**DEFAULTS, **settings})
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"This is not the address of a PostgreSQL database: {str(error).strip()}") from error
    if not schema:
        raise ConfigError("The schema needs a name.")
    return Place(conninfo, schema, search_path, schema in _path_of(str(settings.get("options", ""))))


def _path_of(options: str) -> list[str]:
    """The schemas of the last search_path that options for the server set (`-c search_path=…`)."""
    paths = _SEARCH_PATH.findall(options)
    return [name.strip(' "') for name in _ESCAPED.sub(r"\1", paths[-1]).split(",")] if paths else []


# -- connections -------------------------------------------------------------------------------

_SETTLE: Final = """
SELECT set_config('search_path',
    CASE WHEN $1 THEN current_setting('search_path') ELSE coalesce($2, quote_ident($3)) END, false),
  set_config('TimeZone', 'UTC', false), set_config('statement_timeout', '5s', false)
"""

# The queue's functions bring their own settings; to call one is planned once, and not anew for each set of arrays.
# synchronous_commit is pinned to what was found good, so that no later change of the server's configuration reaches a
# connection that acknowledges arrivals.
_HEAT: Final = """
SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('lock_timeout', $1, false),
  set_config('idle_in_transaction_session_timeout', '5s', false),
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
            await connection.execute(_SETTLE, [here.keeps_path, here.search_path, here.schema])
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
            cursor.execute(_SETTLE, [here.keeps_path, here.search_path, here.schema])
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
        await connection.execute(_HEAT, [PATIENCE])
        connection.prepare_threshold = 0
        (slot,) = await one(connection, "SELECT nextval('counter_slot')")
    return connection, slot


def heat_blocking(connection: BlockingConnection, here: Place) -> None:
    """The same settings for a blocking connection that changes nothing a promise hangs on: it was proven by others."""
    cursor = psycopg.RawCursor(connection)
    cursor.execute(_SETTLE, [here.keeps_path, here.search_path, here.schema])
    cursor.execute(_HEAT, [PATIENCE])


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


_MADE: Final = re.compile(r"CREATE (?:OR REPLACE )?(?:TABLE|SEQUENCE|FUNCTION) (?:IF NOT EXISTS )?(\w+)", re.IGNORECASE)

# Sequences: nextval needs USAGE; a restore raises the fences, and setval needs UPDATE. A column that is an identity
# needs no right on its sequence. Of `migrations` only the migrator writes.
_MISSING: Final = """
WITH here AS (SELECT oid, nspname FROM pg_namespace WHERE nspname = $1)
SELECT current_user::text, kind, name, string_agg(wanted, ', ' ORDER BY place) FROM (
  SELECT 'schema' AS kind, h.nspname::text AS name, 'USAGE' AS wanted, 1::bigint AS place
  FROM here h WHERE NOT has_schema_privilege(h.oid, 'USAGE')
  UNION ALL
  SELECT 'table', c.relname::text, w.wanted, w.place
  FROM here h JOIN pg_class c ON c.relnamespace = h.oid AND c.relkind IN ('r', 'p'),
    unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) WITH ORDINALITY AS w(wanted, place)
  WHERE (c.relname = ANY($2::text[]) OR (c.relname = 'migrations' AND w.wanted = 'SELECT'))
    AND NOT has_table_privilege(c.oid, w.wanted)
  UNION ALL
  SELECT 'sequence', c.relname::text, w.wanted, w.place
  FROM here h JOIN pg_class c ON c.relnamespace = h.oid AND c.relkind = 'S',
    unnest(ARRAY['USAGE', 'UPDATE']) WITH ORDINALITY AS w(wanted, place)
  WHERE c.relname = ANY($2::text[]) AND NOT has_sequence_privilege(c.oid, w.wanted)
  UNION ALL
  SELECT 'function', p.proname::text, 'EXECUTE', 1
  FROM here h JOIN pg_proc p ON p.pronamespace = h.oid
  WHERE p.proname = ANY($2::text[]) AND NOT has_function_privilege(p.oid, 'EXECUTE')
) AS m
GROUP BY kind, name ORDER BY array_position(ARRAY['schema', 'table', 'sequence', 'function'], kind), name
"""
_SHOWN: Final = 5


async def check_rights(connection: Connection, here: Place) -> None:
    """Raise StoreError where this role may not do what a receiver or a worker does; names the rights that it lacks.

    Where there are no tables yet, nothing is missing: whoever makes them owns them.
    """
    made = {name for step in migrations(Engine.postgres) for name in _MADE.findall(step.sql)}
    missing = await rows(connection, _MISSING, [here.schema, Texts(sorted(made))])
    if missing:
        raise _lacking(missing[0][0], here, [f"{rights} on {kind} {name}" for _, kind, name, rights in missing])


def _lacking(role: str, here: Place, missing: list[str]) -> StoreError:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    schema = f'"{here.schema}"'
    return StoreError(
        f'The role "{role}" has not all rights that it needs: {"; ".join(missing[:_SHOWN])}{more}.',
        hint=f'As the owner of the tables, run: GRANT USAGE ON SCHEMA {schema} TO "{role}";'
        f' GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO "{role}";'
        f' GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO "{role}";'
        f' GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO "{role}";',
    )


_DROP: Final = (
    "DO $$ BEGIN EXECUTE format('DROP SCHEMA IF EXISTS %I CASCADE', current_setting('oncehook.schema')); END $$"
)


@contextmanager
def throw_away(url: str) -> Iterator[str]:
    """The address of a store that nobody else knows, on the server of `url`. Raises StoreUnavailable, ConfigError."""
    schema = f"oncehook_bench_{clock.random_bytes(6).hex()}"
    here = place(url, schema, None)
    if here.schema != schema or here.keeps_path:
        raise ConfigError(
            "The address must name neither a schema nor a search_path.", hint="One is made for the measurement."
        )
    try:
        with psycopg.connect(here.conninfo, autocommit=True) as connection:
            try:
                yield f"{url}{'&' if '?' in url else '?'}schema={schema}"
            finally:
                connection.execute("SELECT set_config('oncehook.schema', %s, false)", [schema])
                connection.execute(_DROP)
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL: {str(error).strip()}") from error


WORK_CONNECTIONS: Final = 3

Parameters = Callable[[int], Sequence[object]]
"""Makes the parameters of a statement for a connection with this slot of the counters."""


def unavailable(error: psycopg.Error) -> StoreUnavailable:
    """A statement failed: try again."""
    return StoreUnavailable(f"PostgreSQL did not answer: {str(error).strip()}")


def refusal(error: psycopg.Error) -> StoreError:
    """What a failed transaction means: try again, unless its data are to blame (22, 23, 54: as in `commit`)."""
    if (error.sqlstate or "")[:2] in ("22", "23", "54"):
        return StoreError(f"PostgreSQL refused this write: {str(error).strip()}")
    return unavailable(error)


class _WorkLink:
    """One connection in autocommit, its cursor, and the counters' slot that it alone writes."""

    __slots__ = ("connection", "cursor", "slot")

    def __init__(self, connection: Connection, slot: int) -> None:
        self.connection = connection
        self.cursor = psycopg.AsyncRawCursor(connection)
        self.slot = slot

    async def rows(self, statement: str, parameters: Parameters) -> list[Any]:
        """All rows of one statement, which is planned once per connection."""
        await self.cursor.execute(statement, parameters(self.slot), prepare=True, binary=True)
        return await self.cursor.fetchall()

    def is_fit(self) -> bool:
        """Ready for the next statement."""
        return not self.connection.closed and self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


class WorkPool:
    """Lives on one event loop."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._places = asyncio.Semaphore(WORK_CONNECTIONS)
        self._free: list[_WorkLink] = []
        self._closed = True

    def start(self) -> None:
        """Begin; connections are made when they are first needed."""
        self._closed = False

    async def close(self) -> None:
        """Let go of all connections."""
        self._closed = True
        while self._free:
            await self._free.pop().connection.close()

    async def rows(self, statement: str, parameters: Parameters) -> list[Any]:
        """All rows of one statement. Raises StoreUnavailable."""
        try:
            async with self._link() as link:
                return await link.rows(statement, parameters)
        except psycopg.Error as error:
            raise unavailable(error) from error

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Ask]:
        """A short transaction: gives what runs its statements, and is rolled back by what is raised inside.

        Raises StoreUnavailable, or StoreError for what the database will never take.
        """
        try:
            async with self._link() as link, link.connection.transaction():
                yield link.rows
        except psycopg.Error as error:
            raise refusal(error) from error

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[_WorkLink]:
        async with self._places:
            link = await self._take()
            guard = asyncio.get_running_loop().call_later(SILENCE, cut, link.connection)
            try:
                yield link
            finally:
                guard.cancel()
                if link.is_fit() and not self._closed:
                    self._free.append(link)
                else:
                    # without a word: it may no longer hear one
                    link.connection.pgconn.finish()

    async def _take(self) -> _WorkLink:
        if self._closed:
            raise StoreUnavailable("The store is not open.")
        while self._free:
            link = self._free.pop()
            if is_alive(link.connection):  # not one that a restart of the server left behind
                return link
            link.connection.pgconn.finish()
        try:
            return _WorkLink(*await self._connect())
        except (psycopg.Error, OSError) as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error
