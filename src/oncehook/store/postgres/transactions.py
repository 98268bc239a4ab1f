"""Transactions for handlers: their effect and the end of their lease in one commit, under the fence (R51, R52).

A handler gets the driver's own connection, with its role's own `search_path`. Right before the settle, which comes
last, the transaction is turned to our schema, and back after it. `PostgresStore.transaction` and `blocking_transaction`
hand these out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from oncehook import faults
from oncehook.errors import ConfigError, LeaseLost, StoreUnavailable
from oncehook.model import Intake, Settlement, Verdict
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import BlockingConnection, Connection, Place, adapt, is_alive
from oncehook.store.postgres.intake import INTAKE, IntakeRows, read_intake_result, verdicts
from oncehook.store.postgres.queue import (
    SETTLE,
    SettleResult,
    emit_parameters,
    encode_payload,
    notify_channel,
    read_emitted,
    read_settle_result,
    settle_parameters,
)

C = TypeVar("C", bound="Connection | BlockingConnection")

_OUTBOX_PATH: Final = """
SELECT current_setting('search_path'), set_config('search_path',
  CASE WHEN $1 THEN current_setting('search_path') ELSE coalesce($2, quote_ident($3)) END, true)
"""
_PATH_AND_CALL: Final = "SELECT set_config('search_path', $1, true), pg_notify($2, $3)"


async def record_in(tx: Any, intake: Intake, here: Place, cipher: Cipher) -> list[Verdict]:
    """Record in the transaction of an asynchronous connection."""
    connection = _driver_connection(tx, psycopg.AsyncConnection)
    cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
    adapt(cursor)
    try:
        path = (await (await cursor.execute(_OUTBOX_PATH, _path(here))).fetchall())[0][0]
        await cursor.execute(INTAKE, IntakeRows([intake], cipher).parameters(slot_of(connection)), binary=True)
        rows = await cursor.fetchall()
        await cursor.execute(_PATH_AND_CALL, [path, notify_channel(here.schema), encode_payload(_destinations(intake))])
    except psycopg.errors.UndefinedFunction as error:
        raise _elsewhere() from error
    return verdicts([intake], read_intake_result(rows))[0]


def record_in_blocking(tx: Any, intake: Intake, here: Place, cipher: Cipher) -> list[Verdict]:
    """Record in the transaction of a blocking connection."""
    connection = _driver_connection(tx, psycopg.Connection)
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    adapt(cursor)
    try:
        path = cursor.execute(_OUTBOX_PATH, _path(here)).fetchall()[0][0]
        cursor.execute(INTAKE, IntakeRows([intake], cipher).parameters(slot_of(connection)), binary=True)
        rows = cursor.fetchall()
        cursor.execute(_PATH_AND_CALL, [path, notify_channel(here.schema), encode_payload(_destinations(intake))])
    except psycopg.errors.UndefinedFunction as error:
        raise _elsewhere() from error
    return verdicts([intake], read_intake_result(rows))[0]


def _destinations(intake: Intake) -> set[int]:
    return {planned.destination_id for item in intake.items for planned in item.deliveries}


def _path(here: Place) -> Sequence[object]:
    return [here.keeps_path, here.search_path, here.schema]


def _driver_connection(tx: Any, kind: type[C]) -> C:
    """The driver's own connection inside whatever a framework has around it, with a transaction open on it."""
    found = tx
    while not isinstance(found, psycopg.Connection | psycopg.AsyncConnection):
        found = _inside(found)
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


def _inside(found: Any) -> Any:
    """In this order: SQLAlchemy's raw connections, its asynchronous ones, its blocking ones and Django's."""
    for name in ("driver_connection", "sync_connection", "connection"):
        inner = getattr(found, name, None)
        if inner is not None:
            return inner
    return None


def _elsewhere() -> ConfigError:
    return ConfigError("This connection leads to a database in which this inbox has no tables.")


KEPT: Final = 16
"""Connections that are kept open for the next handlers."""

_PREPARE: Final = """
SELECT set_config('idle_in_transaction_session_timeout', '60s', false)
"""

# Ours for the length of the settle: the functions find everything else by themselves.
_OUR_PATH: Final = """
SELECT current_setting('search_path'), set_config('lock_timeout', '5s', true), set_config('search_path',
  CASE WHEN $1 THEN current_setting('search_path') ELSE coalesce($2, quote_ident($3)) END, true)
"""
_PATH: Final = "SELECT set_config('search_path', $1, true)"


class _Settled:
    """What was settled in a transaction, to be followed up when it is committed."""

    def __init__(self, here: Place, cipher: Cipher) -> None:
        self.here = here
        self.cipher = cipher
        self.settlements: list[Settlement] = []
        self.answers: list[SettleResult] = []

    def take(self, settlement: Settlement, rows: Sequence[tuple[Any, ...]]) -> None:
        answer = read_settle_result([settlement], rows)
        if not answer.fences:
            raise LeaseLost
        self.settlements.append(settlement)
        self.answers.append(answer)

    def path(self) -> list[object]:
        return [self.here.keeps_path, self.here.search_path, self.here.schema]


Committed = Callable[[Sequence[Settlement], Sequence[SettleResult]], Awaitable[None]]
"""Is told what was settled, when it is committed."""


def slot_of(connection: Connection | BlockingConnection) -> int:
    """A slot of the counters for a connection that has drawn none: below zero, where the hot ones never are."""
    return -1 - connection.info.backend_pid % 32_000


class HandlerTransaction:
    """See `Transaction`."""

    def __init__(self, connection: Connection, settled: _Settled) -> None:
        self.connection: Any = connection
        self._settled = settled

    async def settle(self, settlement: Settlement) -> None:
        connection: Connection = self.connection
        cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
        adapt(cursor)
        try:
            if connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
                await cursor.execute("BEGIN")  # the handler has ended ours; the fence is still asked
            path = (await (await cursor.execute(_OUR_PATH, self._settled.path())).fetchall())[0][0]
            if settlement.emits:
                await cursor.execute(
                    INTAKE,
                    emit_parameters([settlement], self._settled.cipher, slot_of(connection)),
                    prepare=True,
                    binary=True,
                )
                read_emitted([settlement], await cursor.fetchall())
                faults.point("after_emit")
            await cursor.execute(
                SETTLE,
                settle_parameters([settlement], self._settled.cipher, slot_of(connection)),
                prepare=True,
                binary=True,
            )
            rows = await cursor.fetchall()
            await cursor.execute(_PATH, [path])
        except psycopg.Error as error:
            raise _unavailable(error) from error
        self._settled.take(settlement, rows)
        faults.point("before_transaction_commit")


class BlockingHandlerTransaction:
    """See `BlockingTransaction`."""

    def __init__(self, connection: BlockingConnection, settled: _Settled) -> None:
        self.connection: Any = connection
        self._settled = settled

    def settle(self, settlement: Settlement) -> None:
        connection: BlockingConnection = self.connection
        cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
        adapt(cursor)
        try:
            if connection.autocommit and connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
                cursor.execute("BEGIN")  # the handler has ended ours; the fence is still asked
            path = cursor.execute(_OUR_PATH, self._settled.path()).fetchall()[0][0]
            if settlement.emits:
                cursor.execute(
                    INTAKE,
                    emit_parameters([settlement], self._settled.cipher, slot_of(connection)),
                    prepare=True,
                    binary=True,
                )
                read_emitted([settlement], cursor.fetchall())
                faults.point("after_emit")
            cursor.execute(
                SETTLE,
                settle_parameters([settlement], self._settled.cipher, slot_of(connection)),
                prepare=True,
                binary=True,
            )
            rows = cursor.fetchall()
            cursor.execute(_PATH, [path])
        except psycopg.Error as error:
            raise _unavailable(error) from error
        self._settled.take(settlement, rows)
        faults.point("before_transaction_commit")


class JoinedTransaction(BlockingHandlerTransaction):
    """The same in a transaction that is not ours: whoever began it commits it, and then says so."""

    def __init__(self, connection: BlockingConnection, settled: _Settled, tell: Callable[[_Settled], None]) -> None:
        super().__init__(connection, settled)
        self._tell = tell

    def committed(self) -> None:
        """It is committed: what follows from it can be done."""
        self._tell(self._settled)


def _unavailable(error: psycopg.Error) -> StoreUnavailable:
    return StoreUnavailable(f"PostgreSQL did not answer: {str(error).strip()}")


class Transactions:
    """The connections of handlers: as many as there are handlers at work, a few kept for the next ones."""

    def __init__(self, here: Place, cipher: Cipher, committed: Committed) -> None:
        self._here = here
        self._cipher = cipher
        self._committed = committed
        self._free: list[Connection] = []
        self._free_blocking: list[BlockingConnection] = []
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Let go of what is not in use."""
        self._loop = None
        while self._free:
            await self._free.pop().close()
        with self._turn:
            while self._free_blocking:
                self._free_blocking.pop().close()

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[HandlerTransaction]:
        """A transaction on the loop; what the handler raises comes out as it is, and rolls back."""
        connection = await self._take()
        found = _Settled(self._here, self._cipher)
        raised: BaseException | None = None
        try:
            async with connection.transaction():
                try:
                    yield HandlerTransaction(connection, found)
                except BaseException as error:
                    raised = error
                    raise
        except psycopg.Error as error:
            if error is raised:
                raise
            raise _unavailable(error) from error
        finally:
            await self._give_back(connection)
        if found.settlements:
            await self._committed(found.settlements, found.answers)

    @contextlib.contextmanager
    def begin_blocking(self) -> Iterator[BlockingHandlerTransaction]:
        """The same, on a thread."""
        connection = self._take_blocking()
        found = _Settled(self._here, self._cipher)
        raised: BaseException | None = None
        try:
            with connection.transaction():
                try:
                    yield BlockingHandlerTransaction(connection, found)
                except BaseException as error:
                    raised = error
                    raise
        except psycopg.Error as error:
            if error is raised:
                raise
            raise _unavailable(error) from error
        finally:
            self._give_back_blocking(connection)
        self._tell(found)

    def join(self, connection: BlockingConnection) -> JoinedTransaction:
        """A transaction that somebody else has begun on a connection of their own, and will commit: Django's."""
        return JoinedTransaction(connection, _Settled(self._here, self._cipher), self._tell)

    def _tell(self, found: _Settled) -> None:
        loop = self._loop
        if found.settlements and loop is not None:
            # Nothing of it decides anything any more: the thread need not wait.
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                asyncio.run_coroutine_threadsafe(self._told(found), loop)

    async def _told(self, found: _Settled) -> None:
        with contextlib.suppress(StoreUnavailable):  # the sweep finds what is left
            await self._committed(found.settlements, found.answers)

    async def _take(self) -> Connection:
        if self._loop is None:
            raise StoreUnavailable("The store is not open.")
        while self._free:
            connection = self._free.pop()
            if is_alive(connection):
                return connection
            connection.pgconn.finish()
        try:
            connection = await psycopg.AsyncConnection.connect(self._here.conninfo, autocommit=True)
            await connection.execute(_PREPARE)
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error
        return connection

    def _take_blocking(self) -> BlockingConnection:
        if self._loop is None:
            raise StoreUnavailable("The store is not open.")
        with self._turn:
            while self._free_blocking:
                connection = self._free_blocking.pop()
                if is_alive(connection):
                    return connection
                connection.pgconn.finish()
        try:
            connection = psycopg.Connection.connect(self._here.conninfo, autocommit=True)
            connection.execute(_PREPARE)
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error
        return connection

    async def _give_back(self, connection: Connection) -> None:
        if self._loop is not None and _is_fit(connection) and len(self._free) < KEPT:
            self._free.append(connection)
        else:
            connection.pgconn.finish()

    def _give_back_blocking(self, connection: BlockingConnection) -> None:
        with self._turn:
            if self._loop is not None and _is_fit(connection) and len(self._free_blocking) < KEPT:
                self._free_blocking.append(connection)
            else:
                connection.pgconn.finish()


def _is_fit(connection: Connection | BlockingConnection) -> bool:
    idle = connection.pgconn.transaction_status == pq.TransactionStatus.IDLE
    return idle and connection.autocommit and not connection.closed
