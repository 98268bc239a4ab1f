"""Connections to PostgreSQL: encoding of values, opening, checking and lending connections, and the schema's version.

A connection keeps three promises: a confirmed commit is on disk (R2), the dedup index exists (R66), and this program
knows the schema (R65). All tables are in one schema of their own, found through `search_path`, so that SQL stays
constant text. Ids and hashes are `bytes` in Python and `uuid` in the database. Whole columns are sent as binary arrays,
packed at once, so that a group commit makes no object per value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, Self, TypeAlias
from urllib.parse import unquote

import psycopg
from psycopg import pq
from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format
from psycopg.types.string import ByteaBinaryLoader

from oncehook import clock, faults
from oncehook.errors import ConfigError, MigrationNeeded, NotStarted, StoreError, StoreUnavailable
from oncehook.model import Engine, Id
from oncehook.store.base import StoreObserver, Timeouts
from oncehook.store.cipher import Cipher
from oncehook.store.migrate import Migration, migrations, steps_from

Connection: TypeAlias = psycopg.AsyncConnection[tuple[object, ...]]
BlockingConnection: TypeAlias = psycopg.Connection[tuple[object, ...]]

OLDEST_SERVER: Final = 140000
WORK_CONNECTIONS: Final = 3
READ_CONNECTIONS: Final = 4
LONG: Final = 60.0
"""Seconds for a statement over very many deliveries."""
DEFAULTS: Final = {
    "fallback_application_name": "oncehook",
    "target_session_attrs": "read-write",  # after a failover, the server that can write
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

# -- values ------------------------------------------------------------------------------------

_NULL = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("!i")
_SIXTEEN = _LENGTH.pack(16)
_ARRAY_HEAD = struct.Struct("!iiIii")
_BIG = struct.Struct("!iq")
_TRUE, _FALSE = _LENGTH.pack(1) + b"\x01", _LENGTH.pack(1) + b"\x00"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Column:
    """An array, ready to be sent. One with only None values is sent as NULL, which `unnest` fills with NULLs."""

    __slots__ = ("packed",)
    oid: ClassVar[int]
    array_oid: ClassVar[int]

    def __init__(self, parts: Iterable[bytes] | None, count: int) -> None:
        self.packed = None if parts is None else _ARRAY_HEAD.pack(1, 0, self.oid, count, 1) + b"".join(parts)


def _is_uniform(values: Sequence[object]) -> bool:
    """Tell whether all values are the same: most columns of a group hold one source, one type, one destination."""
    return values.count(values[0]) == len(values) if values else False


class Ids(Column):
    __slots__ = ()
    oid, array_oid = 2950, 2951

    def __init__(self, values: Sequence[bytes | None]) -> None:
        # One of another length would shift the rest: the server then finds the array malformed.
        if None not in values:
            super().__init__((_SIXTEEN, _SIXTEEN.join(values)) if values else None, len(values))  # type: ignore[arg-type]
        elif any(values):
            super().__init__([_NULL if value is None else _SIXTEEN + value for value in values], len(values))
        else:
            super().__init__(None, 0)


class Texts(Column):
    __slots__ = ()
    oid, array_oid = 25, 1009

    def __init__(self, values: Sequence[str | None]) -> None:
        if _is_uniform(values):
            only = values[0]
            super().__init__(None if only is None else [_with_length(only.encode())] * len(values), len(values))
            return
        parts = [_NULL if value is None else _with_length(value.encode()) for value in values]
        super().__init__(parts or None, len(values))


class Blobs(Column):
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


class Bools(Column):
    __slots__ = ()
    oid, array_oid = 16, 1000

    def __init__(self, values: Sequence[bool]) -> None:
        if all(values):
            super().__init__([_TRUE] * len(values), len(values))
        else:
            super().__init__([_TRUE if value else _FALSE for value in values], len(values))


class NumberColumn(Column):
    __slots__ = ()
    size: ClassVar[int]
    packer: ClassVar[struct.Struct]

    def __init__(self, values: Sequence[float | None]) -> None:
        size, pack = self.size, self.packer.pack
        if _is_uniform(values):
            only = values[0]
            super().__init__(None if only is None else [pack(size, only)] * len(values), len(values))
            return
        parts = [_NULL if value is None else pack(size, value) for value in values]
        super().__init__(parts or None, len(values))


class Smalls(NumberColumn):
    __slots__ = ()
    oid, array_oid, size, packer = 21, 1005, 2, struct.Struct("!ih")


class Integers(NumberColumn):
    __slots__ = ()
    oid, array_oid, size, packer = 23, 1007, 4, struct.Struct("!ii")


class Bigs(NumberColumn):
    __slots__ = ()
    oid, array_oid, size, packer = 20, 1016, 8, struct.Struct("!iq")


class Floats(NumberColumn):
    __slots__ = ()
    oid, array_oid, size, packer = 701, 1022, 8, struct.Struct("!id")


class Times(Column):
    __slots__ = ()
    oid, array_oid = 1184, 1185

    def __init__(self, values: Sequence[datetime | None]) -> None:
        if values.count(None) == len(values):
            super().__init__(None, 0)
            return
        parts = [_NULL if value is None else _BIG.pack(8, (value - _EPOCH) // _MICROSECOND) for value in values]
        super().__init__(parts, len(values))


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
        # Always the same type, whatever its content: otherwise the driver would prepare a statement for each mixture.
        self.oid = cls.array_oid

    def dump(self, obj: Column) -> bytes | None:
        return obj.packed


def adapt(context: AdaptContext) -> None:
    """Register the types of this module with a connection, or with one cursor."""
    adapters = context.adapters
    adapters.register_loader("uuid", ByteaBinaryLoader)
    adapters.register_dumper(Id, _IdDumper)
    for column in (Ids, Texts, Blobs, Smalls, Bools, Integers, Bigs, Floats, Times):
        adapters.register_dumper(column, _ColumnDumper)


def clean_text(text: str) -> str:
    """Replace NUL and lone surrogates, which PostgreSQL refuses: one sender's text must not fail the others' rows."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


# -- addresses ---------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Database:
    """A database, the inbox's schema in it, and the timeouts for its server."""

    conninfo: str
    schema: str
    path: str | None
    """The `search_path` of our statements: the schema alone, so that our names never mean another schema's tables, or
    the caller's own. None where the address sets a path that contains the schema."""
    timeouts: Timeouts
    unsafe: bool
    """Accept a server that may lose acknowledged events: for tests and benchmarks."""
    listens: bool = True
    """Whether workers listen for notifications; else they look once a second, and a pooler is taken for granted."""

    @classmethod
    def parse(
        cls,
        url: str,
        schema: str = "oncehook",
        *,
        search_path: str | None = None,
        timeouts: Timeouts | None = None,
        unsafe: bool = False,
    ) -> Database:
        """Read the address of a store. `?schema=` and `?listen=` are ours, all else is for the driver.

        Raises ConfigError.
        """
        timeouts = timeouts or Timeouts()
        address, _, query = url.partition("?")
        listens = True
        others = []
        for pair in query.split("&") if query else []:
            name, _, value = pair.partition("=")
            if name == "schema":
                schema = unquote(value)
            elif name == "listen":
                if value not in ("true", "false"):
                    raise ConfigError(f'listen is true or false, not "{value}".')
                listens = value == "true"
            else:
                others.append(pair)
        try:
            settings = conninfo_to_dict(address + ("?" + "&".join(others) if others else ""))
            connect_timeout = str(round(timeouts.connect))
            conninfo = make_conninfo("", **{**DEFAULTS, "connect_timeout": connect_timeout, **settings})
        except psycopg.ProgrammingError as error:
            raise ConfigError(f"This is not the address of a PostgreSQL database: {str(error).strip()}") from error
        if not schema:
            raise ConfigError("The schema needs a name.")
        path: str | None = search_path or '"' + schema.replace('"', '""') + '"'
        if schema in _read_path(settings.get("options")):
            path = None
        return cls(conninfo, schema, path, timeouts, unsafe, listens)


_SEARCH_PATH: Final = re.compile(r"search_path=((?:\\.|[^\s\\])*)")
_ESCAPED: Final = re.compile(r"\\(.)")


def _read_path(options: object) -> list[str]:
    """Return the schemas of the last search_path in the server options (`-c search_path=…`)."""
    paths = _SEARCH_PATH.findall(str(options or ""))
    return [name.strip(' "') for name in _ESCAPED.sub(r"\1", paths[-1]).split(",")] if paths else []


# -- connections -------------------------------------------------------------------------------

_CONFIGURE: Final = "SELECT set_config(name, value, $3) FROM unnest($1::text[], $2::text[]) AS given(name, value)"
_OWN_PID: Final = "SELECT pg_backend_pid()"

Settings: TypeAlias = Mapping[str, str]


class StoreConnection(psycopg.AsyncConnection[tuple[object, ...]]):
    """A connection in autocommit with settings of its own.

    A pooler in transaction mode lends another session of the server to each transaction. Behind one, every statement
    is a transaction that begins with these settings, and nothing is prepared; without one the session keeps them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_pooled = False
        self.settings: Settings = {}

    @classmethod
    async def open(cls, database: Database, settings: Settings, **options: Any) -> Self:
        """Connect. Raises psycopg.Error."""
        connection = await cls.connect(database.conninfo, autocommit=True, **options)
        async with _or_close(connection):
            pid = await (await connection.execute(_OWN_PID)).fetchone() if database.listens else None
            connection.is_pooled = _has_other_pid(connection, pid)
            if connection.is_pooled:
                connection.prepare_threshold = None
                await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            await connection.configure(settings)
        return connection

    async def configure(self, settings: Settings) -> None:
        """Change settings for all that follows."""
        self.settings = {**self.settings, **settings}
        if not self.is_pooled:
            await psycopg.AsyncRawCursor(self).execute(_CONFIGURE, _configuration(settings, is_local=False))

    @contextlib.asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        is_outermost = is_idle(self)
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            if self.is_pooled and is_outermost:
                await psycopg.AsyncRawCursor(self).execute(_CONFIGURE, _configuration(self.settings, is_local=True))
            yield transaction

    async def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.AsyncCursor[tuple[object, ...]]:
        if not self.is_pooled or not is_idle(self):
            return await super().execute(query, params, **options)
        async with self.transaction():
            return await super().execute(query, params, **options)


class BlockingStoreConnection(psycopg.Connection[tuple[object, ...]]):
    """A `StoreConnection` for threads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_pooled = False
        self.settings: Settings = {}

    @classmethod
    def open(cls, database: Database, settings: Settings, **options: Any) -> Self:
        """Connect. Raises psycopg.Error."""
        connection = cls.connect(database.conninfo, autocommit=True, **options)
        try:
            pid = connection.execute(_OWN_PID).fetchone() if database.listens else None
            connection.is_pooled = _has_other_pid(connection, pid)
            if connection.is_pooled:
                connection.prepare_threshold = None
                connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.configure(settings)
        except BaseException:
            connection.close()
            raise
        return connection

    def configure(self, settings: Settings) -> None:
        """Change settings for all that follows."""
        self.settings = {**self.settings, **settings}
        if not self.is_pooled:
            psycopg.RawCursor(self).execute(_CONFIGURE, _configuration(settings, is_local=False))

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        is_outermost = is_idle(self)
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if self.is_pooled and is_outermost:
                psycopg.RawCursor(self).execute(_CONFIGURE, _configuration(self.settings, is_local=True))
            yield transaction

    def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.Cursor[tuple[object, ...]]:
        if not self.is_pooled or not is_idle(self):
            return super().execute(query, params, **options)
        with self.transaction():
            return super().execute(query, params, **options)


def _has_other_pid(connection: Connection | BlockingConnection, pid: tuple[object, ...] | None) -> bool:
    """Tell whether a pooler stands in front: it answers for the server with a process id of its own making."""
    return pid is None or pid[0] != connection.info.backend_pid


def _configuration(settings: Settings, *, is_local: bool) -> list[object]:
    return [list(settings), list(settings.values()), is_local]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"


def describe(error: BaseException) -> str:
    return str(error).strip()


def session_settings(database: Database) -> Settings:
    """Return the settings of every connection to the store."""
    path = {} if database.path is None else {"search_path": database.path}
    return {**path, "TimeZone": "UTC", "statement_timeout": milliseconds(database.timeouts.statement)}


def hot_settings(database: Database) -> Settings:
    """Return the further settings of connections for intake and work.

    The queue's functions bring their own; a call of one is planned once, and not anew for each set of arrays.
    """
    return {
        "plan_cache_mode": "force_generic_plan",
        "lock_timeout": milliseconds(database.timeouts.lock),
        "idle_in_transaction_session_timeout": milliseconds(database.timeouts.statement),
    }


async def connect(database: Database) -> StoreConnection:
    """Open a connection in autocommit that knows our types and our schema. Raises StoreUnavailable."""
    try:
        connection = await StoreConnection.open(
            database, session_settings(database), prepare_threshold=None, cursor_factory=psycopg.AsyncRawCursor
        )
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL cannot be reached: {describe(error)}") from error
    adapt(connection)
    return connection


@contextlib.asynccontextmanager
async def session(database: Database) -> AsyncIterator[StoreConnection]:
    """Open a connection for a short while. Raises StoreUnavailable for the driver's errors."""
    connection = await connect(database)
    try:
        async with connection:
            yield connection
    except psycopg.Error as error:
        raise unavailable(error) from error


@contextlib.asynccontextmanager
async def _or_close(connection: Connection) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await connection.close()
        raise


@contextlib.contextmanager
def blocking_session(database: Database) -> Iterator[BlockingStoreConnection]:
    """Open a blocking connection for a short while, whether the store is open or not. Raises StoreUnavailable."""
    try:
        settings = session_settings(database)
        with BlockingStoreConnection.open(database, settings, cursor_factory=psycopg.RawCursor) as connection:
            adapt(connection)
            yield connection
    except psycopg.errors.UndefinedTable as error:
        raise MigrationNeeded("The inbox has no tables in this database yet.") from error
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL cannot be reached: {describe(error)}") from error


def connect_heartbeat(database: Database, limit: float) -> BlockingStoreConnection:
    """Open a blocking connection for the queue. It does not prove the server's promises: others have. `limit`: seconds
    to connect. Raises StoreUnavailable.
    """
    try:
        connection = BlockingStoreConnection.open(
            database,
            {**session_settings(database), **hot_settings(database)},
            cursor_factory=psycopg.RawCursor,
            connect_timeout=max(2, round(limit + 0.5)),
        )
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL cannot be reached: {describe(error)}") from error
    adapt(connection)
    return connection


def is_alive(connection: Connection | BlockingConnection) -> bool:
    """Tell whether the server has kept this idle connection open. Reads and drops whatever it sent."""
    with contextlib.suppress(psycopg.Error):
        for _ in range(2):  # the last message, and then the end of the stream
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()
    return not connection.closed


def is_idle(connection: Connection | BlockingConnection) -> bool:
    return connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def cut(connection: Connection | BlockingConnection) -> None:
    """Break a connection, so that the task that waits for its answer fails now.

    If that task were cancelled instead, the driver would ask the server to cancel, and wait for it.
    """
    if not connection.closed:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)


async def fetch_all(connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[Any]:
    """Return all rows of a statement, ids as bytes."""
    cursor = await connection.execute(statement, parameters, binary=True)
    return await cursor.fetchall()


async def fetch_one(connection: Connection, statement: str, parameters: Sequence[object] = ()) -> Any:
    """Return the first row of a statement that always has one."""
    return (await fetch_all(connection, statement, parameters))[0]


def unavailable(error: psycopg.Error) -> StoreUnavailable:
    return StoreUnavailable(f"PostgreSQL did not answer: {describe(error)}")


def is_refused_data(error: psycopg.Error) -> bool:
    """Tell whether the written values are to blame: SQLSTATE 22 data exceptions, 23 constraints, 54 limits, such as an
    index row that is too long."""
    return (error.sqlstate or "")[:2] in ("22", "23", "54")


# -- pools -------------------------------------------------------------------------------------

Parameters = Callable[[int], Sequence[object]]
"""A function that builds a statement's parameters for a connection with this slot of the counters."""

Ask = Callable[[str, Parameters], Awaitable[list[Any]]]
"""A function that runs a statement and returns its rows."""


class PooledConnection:
    """A connection in autocommit, its cursor, and a slot of the counters that no other connection writes."""

    __slots__ = ("connection", "slot")

    def __init__(self, connection: StoreConnection, slot: int = 0) -> None:
        self.connection = connection
        self.slot = slot

    async def fetch(self, statement: str, parameters: Sequence[object]) -> list[Any]:
        """Return all rows of one statement, which is planned once per connection."""
        cursor = await self.connection.execute(statement, parameters, prepare=True, binary=True)
        return await cursor.fetchall()

    async def ask(self, statement: str, parameters: Parameters) -> list[Any]:
        """Return all rows of a statement whose parameters depend on this connection's slot."""
        return await self.fetch(statement, parameters(self.slot))

    def drop(self) -> None:
        """Close the connection without a message to the server, which may no longer answer."""
        self.connection.pgconn.finish()


Connect = Callable[[], Awaitable[PooledConnection]]


async def connect_hot(database: Database) -> PooledConnection:
    """Open a connection for intake or work. The server is checked each time: after a failover it may be another one.
    Raises StoreUnavailable, StoreError."""
    connection = await connect(database)
    async with _or_close(connection):
        # Pinned to what was found good, so that no later change of the server's configuration reaches a connection that
        # acknowledges arrivals.
        committed = await check_server(connection, database)
        await connection.configure({**hot_settings(database), "synchronous_commit": committed})
        if not connection.is_pooled:
            connection.prepare_threshold = 0
        (slot,) = await fetch_one(connection, "SELECT nextval('counter_slot')")
    return PooledConnection(connection, slot)


class Pool:
    """A few connections, opened on demand and again when one is lost, on one event loop."""

    def __init__(self, connect: Connect, size: int, timeouts: Timeouts, *, wait: float | None = None) -> None:
        """`wait`: seconds that a caller waits for a free connection; None: without limit."""
        self._connect = connect
        self._places = asyncio.Semaphore(size)
        self._silence = timeouts.silence
        self._wait = wait
        self._free: list[PooledConnection] = []
        self._opened = False

    def open(self) -> None:
        self._opened = True

    def close(self) -> None:
        """Close all idle connections; the others follow when they are returned."""
        self._opened = False
        while self._free:
            self._free.pop().drop()

    @contextlib.asynccontextmanager
    async def link(self, answer: float | None = None) -> AsyncIterator[PooledConnection]:
        """Lend a connection. One that does not answer for `answer` seconds is dropped. Raises StoreUnavailable."""
        if not self._opened:
            raise NotStarted("The store is not open.")
        await self._acquire()
        try:
            link = await self._take()
            guard = asyncio.get_running_loop().call_later(answer or self._silence, cut, link.connection)
            try:
                yield link
            except psycopg.Error as error:
                raise unavailable(error) from error
            finally:
                guard.cancel()
                if self._opened and is_idle(link.connection):
                    self._free.append(link)
                else:
                    link.drop()
        finally:
            self._places.release()

    async def _acquire(self) -> None:
        if self._wait is None or not self._places.locked():
            await self._places.acquire()
            return
        try:
            await asyncio.wait_for(self._places.acquire(), self._wait)
        except TimeoutError as error:
            raise StoreUnavailable("Too many questions wait for an answer already.") from error

    async def _take(self) -> PooledConnection:
        while self._free:
            link = self._free.pop()
            if is_alive(link.connection):  # skips connections that a restart of the server has broken
                return link
            link.drop()
        try:
            return await self._connect()
        except (psycopg.Error, OSError) as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {describe(error)}") from error


class WorkPool(Pool):
    """Connections for work, separate from intake's: leases and settlements are one statement each."""

    async def ask(self, statement: str, parameters: Parameters) -> list[Any]:
        async with self.link() as link:
            return await link.ask(statement, parameters)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Ask]:
        """Begin a short transaction; yield a function that runs statements in it. An exception rolls it back.

        Raises StoreUnavailable, or StoreError for values that the database will never accept.
        """
        async with self.link() as link:
            try:
                async with link.connection.transaction():
                    yield link.ask
            except psycopg.Error as error:
                if is_refused_data(error):
                    raise StoreError(f"PostgreSQL refused this write: {describe(error)}") from error
                raise


AUDIT: Final = "INSERT INTO audit (at, actor, act, target, detail) VALUES (now(), $1, $2, $3, $4)"


def encode_detail(detail: Mapping[str, object]) -> str:
    """Encode the detail of an audit entry; JSON escapes text that PostgreSQL refuses."""
    return json.dumps(detail, default=str)


# Prune decides on its snapshot, so a replay that commits meanwhile could lose its event. So making a replay takes this
# lock shared, pruning takes it exclusively, and both take it before they read.
REPLAYING: Final = """
SELECT pg_advisory_xact_lock_shared(hashtext('oncehook.prune'), hashtext($1)),
  set_config('idle_in_transaction_session_timeout', '5s', true)
"""
PRUNING: Final = """
SELECT pg_advisory_xact_lock(hashtext('oncehook.prune'), hashtext($1)),
  set_config('idle_in_transaction_session_timeout', '5s', true)
"""


class StorePart:
    """The base of every part of `PostgresStore`: a pool for reads and for acts of people.

    A read never waits for an intake and never delays one. The server ends slow ones, because a long query keeps dead
    rows of `heads` from being vacuumed.
    """

    def __init__(self, database: Database, cipher: Cipher) -> None:
        self.database = database
        self.cipher = cipher
        self.observer = StoreObserver()
        self.source_names: dict[int, str] = {}
        self.reading = Pool(self._connect, READ_CONNECTIONS, database.timeouts, wait=database.timeouts.turn)

    async def _connect(self) -> PooledConnection:
        return PooledConnection(await connect(self.database))

    @contextlib.asynccontextmanager
    async def connection(self, answer: float | None = None) -> AsyncIterator[StoreConnection]:
        """Lend a connection with the planner's ordinary settings. Raises StoreUnavailable for the driver's errors."""
        async with self.reading.link(answer) as link:
            yield link.connection

    async def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[Any]:
        async with self.connection() as connection:
            return await fetch_all(connection, statement, parameters)

    async def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        async with self.connection() as connection:
            await connection.execute(statement, parameters)

    @contextlib.asynccontextmanager
    async def snapshot(self, answer: float) -> AsyncIterator[StoreConnection]:
        """Begin a transaction that sees one moment and writes nothing."""
        async with self.connection(answer) as connection:
            usual = connection.isolation_level
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.set_read_only(True)
            try:
                async with connection.transaction():
                    yield connection
            finally:
                if is_idle(connection):  # else it is dropped
                    await connection.set_isolation_level(usual)
                    await connection.set_read_only(None)

    @contextlib.asynccontextmanager
    async def hold_lock(self, statement: str) -> AsyncIterator[StoreConnection]:
        """Begin a transaction under the lock between replay and prune: REPLAYING or PRUNING."""
        async with self.connection(LONG) as connection, connection.transaction():
            await connection.execute(statement, [self.database.schema])
            yield connection

    def notify_due(self, destination_ids: Collection[int] | None = None) -> None:
        """Wake workers: deliveries may have become due for these destinations; None: for any."""


# -- promises ----------------------------------------------------------------------------------


async def check_server(connection: Connection, database: Database) -> str:
    """Refuse a server that would confirm a commit before it is on disk, or that lost the dedup index.

    Returns its `synchronous_commit`.
    """
    if connection.info.server_version < OLDEST_SERVER:
        raise StoreError(f"PostgreSQL 14 or newer is needed; this is {connection.info.server_version // 10000}.")
    committed, synced = await fetch_one(
        connection, "SELECT current_setting('synchronous_commit'), current_setting('fsync')::boolean"
    )
    if committed not in ("on", "remote_write", "remote_apply") and not database.unsafe:
        raise StoreError(
            f"synchronous_commit is {committed}: an acknowledged event could be lost.",
            hint="Set it to on for this role: ALTER ROLE … SET synchronous_commit = on",
        )
    if not synced and not database.unsafe:
        raise StoreError("fsync is off: an acknowledged event could be lost.", hint="Set fsync = on in the server.")
    if await read_version(connection, database) and not await has_dedup_index(connection, database):
        raise StoreError(
            "The unique index on keys.hash is missing or invalid: duplicates could not be recognised.",
            hint="Build it again (REINDEX INDEX CONCURRENTLY keys_pkey), then start.",
        )
    return str(committed)


async def has_dedup_index(connection: Connection, database: Database) -> bool:
    """Tell whether a valid unique index on keys exists that ON CONFLICT can use."""
    (count,) = await fetch_one(
        connection,
        """
        SELECT count(*) FROM pg_index x
        JOIN pg_class c ON c.oid = x.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = x.indkey[0]
        WHERE n.nspname = $1 AND c.relname = 'keys' AND a.attname = 'hash' AND x.indnkeyatts = 1
          AND x.indisunique AND x.indimmediate AND x.indisvalid AND x.indisready AND x.indpred IS NULL
        """,
        [database.schema],
    )
    return bool(count)


# -- rights ------------------------------------------------------------------------------------

_MADE: Final = re.compile(r"CREATE (?:OR REPLACE )?(?:TABLE|SEQUENCE|FUNCTION) (?:IF NOT EXISTS )?(\w+)", re.IGNORECASE)

# Sequences: nextval needs USAGE; setval, by which a restore raises the fences, needs UPDATE. An identity column needs
# no right on its sequence. Only the migrator writes `migrations`.
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


async def check_rights(connection: Connection, database: Database) -> None:
    """Raise StoreError with the rights that this role lacks for receiving or working.

    Without tables nothing is missing: the role that creates them owns them.
    """
    made = {name for step in migrations(Engine.postgres) for name in _MADE.findall(step.sql)}
    missing = await fetch_all(connection, _MISSING, [database.schema, Texts(sorted(made))])
    if missing:
        raise _lacking(missing[0][0], database, [f"{rights} on {kind} {name}" for _, kind, name, rights in missing])


def _lacking(role: str, database: Database, missing: list[str]) -> StoreError:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    schema = f'"{database.schema}"'
    return StoreError(
        f'The role "{role}" has not all rights that it needs: {"; ".join(missing[:_SHOWN])}{more}.',
        hint=f'As the owner of the tables, run: GRANT USAGE ON SCHEMA {schema} TO "{role}";'
        f' GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO "{role}";'
        f' GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO "{role}";'
        f' GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO "{role}";',
    )


# -- schema ------------------------------------------------------------------------------------


async def read_version(connection: Connection, database: Database) -> int:
    """Return the schema's version; 0 where there is none yet."""
    (known,) = await fetch_one(
        connection, "SELECT to_regclass(quote_ident($1) || '.migrations') IS NOT NULL", [database.schema]
    )
    if not known:
        return 0
    (number,) = await fetch_one(connection, "SELECT coalesce(max(version), 0) FROM migrations")
    return int(number)


async def migrate_schema(connection: Connection, database: Database, *, migrate: bool) -> None:
    """Migrate the schema, each step in one transaction with its row. Any number of processes may try."""
    for step in steps_from(Engine.postgres, await read_version(connection, database), migrate=migrate):
        try:
            await _apply(connection, database, step)
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreError(
                f"This role may not make the tables: {str(error).strip()}",
                hint="Let an administrator make the schema for this role: CREATE SCHEMA … AUTHORIZATION …",
            ) from error
        except psycopg.DatabaseError as error:
            raise StoreError(f"The migration {step.name} failed: {str(error).strip()}") from error


async def _apply(connection: Connection, database: Database, step: Migration) -> None:
    async with connection.transaction():
        # One migrator at a time (R65). The lock is a statement of its own, so that later statements see what a rival
        # committed while we waited.
        await connection.execute(
            "SELECT set_config('statement_timeout', '0', true), set_config('oncehook.schema', $1, true)",
            [database.schema],
        )
        await connection.execute(
            "SELECT pg_advisory_xact_lock(hashtext('oncehook.migrate'), hashtext($1))", [database.schema]
        )
        await connection.execute(_MAKE_SCHEMA)
        # New tables go to the first schema of the path, whatever the caller put before it.
        await connection.execute(
            "SELECT set_config('search_path', quote_ident($1) || ', ' || current_setting('search_path'), true)",
            [database.schema],
        )
        await connection.execute(_MAKE_MIGRATIONS)
        if await read_version(connection, database) < step.version:
            for statement in _split_statements(step.sql):
                await connection.execute(statement.encode())
            await connection.execute(
                "INSERT INTO migrations (version, name, applied_at) VALUES ($1, $2, now())", [step.version, step.name]
            )
            faults.point("before_migration_commit")


_STATEMENT: Final = re.compile(r"(?:\$(\w*)\$.*?\$\1\$|'[^']*'|--[^\n]*|[^;])+;", re.DOTALL)


def _split_statements(script: str) -> list[str]:
    """Return the statements of a migration, which poolers take one by one; a function's body is part of its own."""
    return [found[0].strip() for found in _STATEMENT.finditer(script)]


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

# -- throwaway schemas ---------------------------------------------------------------------------

_DROP: Final = (
    "DO $$ BEGIN EXECUTE format('DROP SCHEMA IF EXISTS %I CASCADE', current_setting('oncehook.schema')); END $$"
)


@contextmanager
def throwaway_schema(url: str) -> Iterator[str]:
    """Yield the address of a new schema on the server of `url`, for a measurement; drop it afterwards.

    Raises StoreUnavailable, ConfigError.
    """
    schema = f"oncehook_bench_{clock.random_bytes(6).hex()}"
    database = Database.parse(url, schema)
    if database.schema != schema or database.path is None:
        raise ConfigError(
            "The address must name neither a schema nor a search_path.", hint="One is made for the measurement."
        )
    try:
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            try:
                yield f"{url}{'&' if '?' in url else '?'}schema={schema}"
            finally:
                with connection.transaction():
                    connection.execute("SELECT set_config('oncehook.schema', %s, true)", [schema])
                    connection.execute(_DROP)
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL: {describe(error)}") from error
