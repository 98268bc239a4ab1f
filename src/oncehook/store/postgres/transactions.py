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
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from oncehook import faults
from oncehook.errors import LeaseLost, StoreUnavailable
from oncehook.model import Settlement
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.intake import INTAKE
from oncehook.store.postgres.opening import Place, is_alive
from oncehook.store.postgres.settle import (
    SETTLE,
    Answer,
    emit_parameters,
    read_answer,
    read_emitted,
    settle_parameters,
)
from oncehook.store.postgres.wire import BlockingConnection, Connection, adapt

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
        self.answers: list[Answer] = []

    def take(self, settlement: Settlement, rows: Sequence[tuple[Any, ...]]) -> None:
        answer = read_answer([settlement], rows)
        if not answer.fences:
            raise LeaseLost
        self.settlements.append(settlement)
        self.answers.append(answer)

    def path(self) -> list[object]:
        return [self.here.keeps_path, self.here.search_path, self.here.schema]


Committed = Callable[[Sequence[Settlement], Sequence[Answer]], Awaitable[None]]
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
