"""Transactions shared with others: a handler's writes with the end of its lease, an application's with an event.

A handler gets the driver's own connection, with its role's `search_path`. Its delivery is settled last, in the same
commit and under the fence (R51, R52). With `emit_in` (the outbox), an event exists if and when the application's
transaction commits. During our statements `search_path` is our schema; afterwards it is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from oncehook import faults
from oncehook.errors import ConfigError, LeaseLost, NotStarted, StoreUnavailable
from oncehook.model import Intake, Settlement, Verdict
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import (
    BlockingConnection,
    BlockingStoreConnection,
    Connection,
    Database,
    StoreConnection,
    adapt,
    describe,
    is_alive,
    is_idle,
    unavailable,
)
from oncehook.store.postgres.intake import INTAKE, IntakeRows, read_intake_result, verdicts
from oncehook.store.postgres.queue import (
    SETTLE,
    PostgresQueue,
    SettleResult,
    emit_parameters,
    encode_payload,
    notify_channel,
    read_emitted,
    read_settle_result,
    settle_parameters,
)

C = TypeVar("C", bound="Connection | BlockingConnection")

KEPT: Final = 16
"""Connections that are kept open for the next handlers."""

_SETTINGS: Final = {"idle_in_transaction_session_timeout": "60s"}
# Turns the transaction to our schema: the functions find everything else by themselves.
_TURN: Final = """
SELECT set_config('oncehook.path', current_setting('search_path'), true),
  set_config('search_path', coalesce($1, current_setting('search_path')), true)
"""
_TURN_TO_SETTLE: Final = _TURN + ", set_config('lock_timeout', '5s', true)"
_TURN_BACK: Final = "SELECT set_config('search_path', current_setting('oncehook.path'), true)"
_TURN_BACK_AND_NOTIFY: Final = _TURN_BACK + ", pg_notify($1, $2)"


def counter_slot(connection: Connection | BlockingConnection) -> int:
    """Return a slot of the counters for a connection without one: negative, which the slots of hot connections never
    are."""
    return -1 - connection.info.backend_pid % 32_000


class _Settlements:
    """The settlements of one transaction, followed up after its commit."""

    def __init__(self, database: Database, cipher: Cipher) -> None:
        self.database = database
        self.cipher = cipher
        self.settlements: list[Settlement] = []
        self.results: list[SettleResult] = []

    def add(self, settlement: Settlement, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add a settlement. Raises LeaseLost where it was refused."""
        result = read_settle_result([settlement], rows)
        if not result.fences:
            raise LeaseLost
        self.settlements.append(settlement)
        self.results.append(result)
        faults.point("before_transaction_commit")


class HandlerTransaction:
    """See `Transaction`."""

    def __init__(self, connection: Connection, settled: _Settlements) -> None:
        self.connection: Any = connection
        self._settled = settled

    async def settle(self, settlement: Settlement) -> None:
        connection: Connection = self.connection
        cipher, slot = self._settled.cipher, counter_slot(connection)
        cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
        adapt(cursor)
        try:
            if is_idle(connection):
                await cursor.execute("BEGIN")  # the handler has ended our transaction; the fence still decides
            await cursor.execute(_TURN_TO_SETTLE, [self._settled.database.path])
            if settlement.emits:
                emitted = emit_parameters([settlement], cipher, slot)
                await cursor.execute(INTAKE, emitted, prepare=True, binary=True)
                read_emitted([settlement], await cursor.fetchall())
                faults.point("after_emit")
            await cursor.execute(SETTLE, settle_parameters([settlement], cipher, slot), prepare=True, binary=True)
            rows = await cursor.fetchall()
            await cursor.execute(_TURN_BACK)
        except psycopg.Error as error:
            raise unavailable(error) from error
        self._settled.add(settlement, rows)


class BlockingHandlerTransaction:
    """See `BlockingTransaction`."""

    def __init__(self, connection: BlockingConnection, settled: _Settlements) -> None:
        self.connection: Any = connection
        self._settled = settled

    def settle(self, settlement: Settlement) -> None:
        connection: BlockingConnection = self.connection
        cipher, slot = self._settled.cipher, counter_slot(connection)
        cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
        adapt(cursor)
        try:
            if connection.autocommit and is_idle(connection):
                cursor.execute("BEGIN")  # the handler has ended our transaction; the fence still decides
            cursor.execute(_TURN_TO_SETTLE, [self._settled.database.path])
            if settlement.emits:
                emitted = emit_parameters([settlement], cipher, slot)
                cursor.execute(INTAKE, emitted, prepare=True, binary=True)
                read_emitted([settlement], cursor.fetchall())
                faults.point("after_emit")
            cursor.execute(SETTLE, settle_parameters([settlement], cipher, slot), prepare=True, binary=True)
            rows = cursor.fetchall()
            cursor.execute(_TURN_BACK)
        except psycopg.Error as error:
            raise unavailable(error) from error
        self._settled.add(settlement, rows)


class JoinedTransaction(BlockingHandlerTransaction):
    """A transaction that its owner begins and commits, and then reports as committed."""

    def __init__(
        self, connection: BlockingConnection, settled: _Settlements, follow_up: Callable[[_Settlements], None]
    ) -> None:
        super().__init__(connection, settled)
        self._follow_up = follow_up

    def follow_up(self) -> None:
        """Follow up the settlements, now that the owner has committed them."""
        self._follow_up(self._settled)


class PostgresTransactions(PostgresQueue):
    """Transactions for handlers, each on a connection of its own, and the outbox."""

    def __init__(self, database: Database, cipher: Cipher) -> None:
        super().__init__(database, cipher)
        self._free: list[Connection] = []
        self._free_blocking: list[BlockingConnection] = []
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start_transactions(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop_transactions(self) -> None:
        self._loop = None
        with self._lock:
            for connection in (*self._free, *self._free_blocking):
                connection.pgconn.finish()
            self._free.clear()
            self._free_blocking.clear()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[HandlerTransaction]:
        connection = await self._take()
        settled = _Settlements(self.database, self.cipher)
        raised: BaseException | None = None
        try:
            async with connection.transaction():
                try:
                    yield HandlerTransaction(connection, settled)
                except BaseException as error:  # the handler's own error, raised unchanged
                    raised = error
                    raise
        except psycopg.Error as error:
            if error is raised:
                raise
            raise unavailable(error) from error
        finally:
            if self._is_kept(connection, self._free):
                self._free.append(connection)
        if settled.settlements:
            await self.follow_up(settled.settlements, settled.results)

    @contextlib.contextmanager
    def blocking_transaction(self) -> Iterator[BlockingHandlerTransaction]:
        connection = self._take_blocking()
        settled = _Settlements(self.database, self.cipher)
        raised: BaseException | None = None
        try:
            with connection.transaction():
                try:
                    yield BlockingHandlerTransaction(connection, settled)
                except BaseException as error:
                    raised = error
                    raise
        except psycopg.Error as error:
            if error is raised:
                raise
            raise unavailable(error) from error
        finally:
            with self._lock:
                if self._is_kept(connection, self._free_blocking):
                    self._free_blocking.append(connection)
        self._follow_up_later(settled)

    def join_transaction(self, connection: BlockingConnection) -> JoinedTransaction:
        """Settle in a transaction that its owner has begun on a connection to this database, and will commit."""
        return JoinedTransaction(connection, _Settlements(self.database, self.cipher), self._follow_up_later)

    def _follow_up_later(self, settled: _Settlements) -> None:
        """Follow up on the loop: the settlement is committed, so the thread need not wait."""
        loop = self._loop
        if settled.settlements and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was just closed
                asyncio.run_coroutine_threadsafe(self.follow_up(settled.settlements, settled.results), loop)

    async def _take(self) -> Connection:
        if self._loop is None:
            raise NotStarted("The store is not open.")
        while self._free:
            connection = self._free.pop()
            if is_alive(connection):
                return connection
            connection.pgconn.finish()
        try:
            return await StoreConnection.open(self.database, _SETTINGS)
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {describe(error)}") from error

    def _take_blocking(self) -> BlockingConnection:
        if self._loop is None:
            raise NotStarted("The store is not open.")
        with self._lock:
            while self._free_blocking:
                connection = self._free_blocking.pop()
                if is_alive(connection):
                    return connection
                connection.pgconn.finish()
        try:
            return BlockingStoreConnection.open(self.database, _SETTINGS)
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {describe(error)}") from error

    def _is_kept(self, connection: Connection | BlockingConnection, free: Sequence[object]) -> bool:
        """Tell whether a connection can be reused for the next handler."""
        if self._loop is not None and is_idle(connection) and connection.autocommit and len(free) < KEPT:
            return True
        connection.pgconn.finish()
        return False

    # -- outbox --------------------------------------------------------------------------------
    # The driver's errors come out as they are: the caller's own code knows what to do about them.

    async def record_in(self, tx: Any, intake: Intake) -> list[Verdict]:
        connection = _driver_connection(tx, psycopg.AsyncConnection)
        cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
        adapt(cursor)
        parameters = IntakeRows([intake], self.cipher).parameters(counter_slot(connection))
        try:
            await cursor.execute(_TURN, [self.database.path])
            await cursor.execute(INTAKE, parameters, binary=True)
            rows = await cursor.fetchall()
            await cursor.execute(_TURN_BACK_AND_NOTIFY, self._notification(intake))
        except psycopg.errors.UndefinedFunction as error:
            raise _other_database() from error
        return verdicts([intake], read_intake_result(rows))[0]

    def record_in_blocking(self, tx: Any, intake: Intake) -> list[Verdict]:
        connection = _driver_connection(tx, psycopg.Connection)
        cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
        adapt(cursor)
        parameters = IntakeRows([intake], self.cipher).parameters(counter_slot(connection))
        try:
            cursor.execute(_TURN, [self.database.path])
            cursor.execute(INTAKE, parameters, binary=True)
            rows = cursor.fetchall()
            cursor.execute(_TURN_BACK_AND_NOTIFY, self._notification(intake))
        except psycopg.errors.UndefinedFunction as error:
            raise _other_database() from error
        return verdicts([intake], read_intake_result(rows))[0]

    def _notification(self, intake: Intake) -> list[str]:
        """Return the notification that the commit sends to workers."""
        destination_ids = {planned.destination_id for item in intake.items for planned in item.deliveries}
        return [notify_channel(self.database.schema), encode_payload(destination_ids)]


def _driver_connection(tx: Any, kind: type[C]) -> C:
    """Return the driver's own connection inside a framework's object, with a transaction open on it."""
    found = tx
    while not isinstance(found, psycopg.Connection | psycopg.AsyncConnection):
        found = _inner_connection(found)
        if found is None or callable(found):
            raise ConfigError(
                f"{type(tx).__module__}.{type(tx).__qualname__} is no connection of psycopg, nor holds one.",
                hint="Give psycopg's connection, or that of Django or SQLAlchemy with the psycopg driver.",
            )
    if not isinstance(found, kind):
        raise ConfigError("A blocking connection is for emit_in_blocking, an asynchronous one for `await emit_in`.")
    if found.autocommit and found.pgconn.transaction_status == pq.TransactionStatus.IDLE:
        raise ConfigError(
            "No transaction is open on this connection: the event would be kept whatever becomes of your own writes.",
            hint="Open one around both: connection.transaction(), transaction.atomic(), engine.begin().",
        )
    return found


def _inner_connection(found: Any) -> Any:
    """Unwrap one layer: SQLAlchemy's raw connections, its asynchronous ones, its blocking ones and Django's."""
    for name in ("driver_connection", "sync_connection", "connection"):
        inner = getattr(found, name, None)
        if inner is not None:
            return inner
    return None


def _other_database() -> ConfigError:
    return ConfigError("This connection leads to a database in which this inbox has no tables.")
