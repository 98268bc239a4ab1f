"""The hot connections of work: a few, apart from intake's, on which leases and settles run as one statement each.

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

from oncehook.errors import StoreUnavailable
from oncehook.store.postgres.commit import Connect
from oncehook.store.postgres.opening import SILENCE, cut, is_alive
from oncehook.store.postgres.wire import Connection

CONNECTIONS: Final = 2

Parameters = Callable[[int], Sequence[object]]
"""Makes the parameters of a statement for a connection with this slot of the counters."""


class _Link:
    """One connection in autocommit, its cursor, and the counters' slot that it alone writes."""

    __slots__ = ("connection", "cursor", "slot")

    def __init__(self, connection: Connection, slot: int) -> None:
        self.connection = connection
        self.cursor = psycopg.AsyncRawCursor(connection)
        self.slot = slot

    def is_fit(self) -> bool:
        """Ready for the next statement."""
        return not self.connection.closed and self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


class HotConnections:
    """Lives on one event loop."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
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
        """All rows of one statement, which is planned once per connection. Raises StoreUnavailable."""
        async with self._link() as link:
            guard = asyncio.get_running_loop().call_later(SILENCE, cut, link.connection)
            try:
                await link.cursor.execute(statement, parameters(link.slot), prepare=True, binary=True)
                return await link.cursor.fetchall()
            except psycopg.Error as error:
                raise StoreUnavailable(f"PostgreSQL did not answer: {str(error).strip()}") from error
            finally:
                guard.cancel()

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[_Link]:
        async with self._places:
            link = await self._take()
            try:
                yield link
            finally:
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
