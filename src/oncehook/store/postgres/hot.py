"""The hot connections of work: a few, apart from intake's, on which leases and settles run as one statement each, or as
few as can be in a short transaction.

They are opened when first needed, and again when one is lost; whoever asked then gets StoreUnavailable and asks again.
The engine hands them a statement and what makes its parameters, and gets rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import psycopg
from psycopg import pq

from oncehook.errors import StoreError, StoreUnavailable
from oncehook.store.base import Timeouts
from oncehook.store.postgres.commit import Connect
from oncehook.store.postgres.opening import cut, is_alive
from oncehook.store.postgres.settle import Ask
from oncehook.store.postgres.wire import Connection

CONNECTIONS: Final = 3

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


class _Link:
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


class HotConnections:
    """Lives on one event loop."""

    def __init__(self, connect: Connect, timeouts: Timeouts) -> None:
        self._connect = connect
        self._timeouts = timeouts
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._free: list[_Link] = []
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
    async def _link(self) -> AsyncIterator[_Link]:
        async with self._places:
            link = await self._take()
            guard = asyncio.get_running_loop().call_later(self._timeouts.silence, cut, link.connection)
            try:
                yield link
            finally:
                guard.cancel()
                if link.is_fit() and not self._closed:
                    self._free.append(link)
                else:
                    # without a word: it may no longer hear one
                    link.connection.pgconn.finish()

    async def _take(self) -> _Link:
        if self._closed:
            raise StoreUnavailable("The store is not open.")
        while self._free:
            link = self._free.pop()
            if is_alive(link.connection):  # not one that a restart of the server left behind
                return link
            link.connection.pgconn.finish()
        try:
            return _Link(*await self._connect())
        except (psycopg.Error, OSError) as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error
