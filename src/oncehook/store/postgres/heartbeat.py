"""Heartbeats on PostgreSQL: a blocking connection of their own, for the thread on which a worker renews its leases.

Nothing that blocks the loop can delay them (R32), and no try takes longer than a sixth of the shortest lease: a server
that does not answer in time cannot tell, and the next beat opens a new connection. `PostgresStore.renew` calls it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import psycopg

from oncehook.deliveries import Lease
from oncehook.errors import StoreUnavailable
from oncehook.store.postgres import opening
from oncehook.store.postgres.lease import RENEW, renew_parameters
from oncehook.store.postgres.wire import BlockingConnection, adapt

PER_LEASE: Final = 6


class Heartbeat:
    """Owns the connection; one thread at a time."""

    def __init__(self, here: opening.Place) -> None:
        self._here = here
        self._connection: BlockingConnection | None = None
        self._turn = threading.Lock()

    def renew(self, leases: Sequence[Lease]) -> set[int]:
        """Prolong these; returns the fences that are still ours."""
        if not leases:
            return set()
        limit = max(min(lease.seconds for lease in leases) / PER_LEASE, self._here.timeouts.heartbeat)
        with self._turn:
            connection = self._connection or self._connect(limit)
            # The server's own limits come first; the cut is for a server that does not speak at all.
            guard = threading.Timer(2 * limit, opening.cut, [connection])
            guard.daemon = True
            guard.start()
            try:
                return self._beat(connection, leases, limit)
            except psycopg.Error as error:
                self._drop()
                raise StoreUnavailable(f"The heartbeat got no answer: {str(error).strip()}") from error
            finally:
                guard.cancel()

    def _beat(self, connection: BlockingConnection, leases: Sequence[Lease], limit: float) -> set[int]:
        cursor = psycopg.RawCursor(connection)
        cursor.execute("SELECT set_config('statement_timeout', $1, false)", [str(math.ceil(limit * 1000))])
        cursor.execute(RENEW, renew_parameters(leases), prepare=True, binary=True)
        found: list[Any] = cursor.fetchall()
        return {row[0] for row in found}

    def _connect(self, limit: float) -> BlockingConnection:
        try:
            connection = psycopg.Connection.connect(
                self._here.conninfo, autocommit=True, connect_timeout=max(2, math.ceil(limit))
            )
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error).strip()}") from error
        try:
            adapt(connection)
            opening.heat_blocking(connection, self._here)
        except psycopg.Error as error:
            connection.close()
            raise StoreUnavailable(f"PostgreSQL did not answer: {str(error).strip()}") from error
        self._connection = connection
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.pgconn.finish()
            self._connection = None

    def close(self) -> None:
        """Let go of the connection."""
        with self._turn:
            self._drop()
