"""Wake-ups: whoever works on this database is told, soon after a commit, that something may have become due.

`Bell.ring` is called on the loop after each such commit. It wakes this process at once and the others by NOTIFY, from a
connection of its own and at most every 50 ms: inside the commits it would serialise them over the whole database. Where
somebody works, LISTEN has a connection too. A notification that is lost costs nothing but time: workers also look by
themselves, now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from hashlib import blake2b
from typing import Any, Final

import psycopg

from oncehook import clock
from oncehook.errors import StoreError
from oncehook.store.postgres.opening import SILENCE, Place, connect, cut, is_alive
from oncehook.store.postgres.wire import Connection

log = logging.getLogger("oncehook.store")

PAUSE: Final = 0.05
"""Seconds between two notifications."""

MOST_NAMED: Final = 500
"""Destinations that one notification names: PostgreSQL takes less than 8,000 bytes."""

FIRST_WAIT: Final = 0.1
LONGEST_WAIT: Final = 5.0
"""Seconds between two tries to connect: doubled from the first to the longest."""

# LISTEN takes no parameters.
_LISTEN: Final = """
DO $$ BEGIN EXECUTE format('LISTEN %I', current_setting('oncehook.channel')); END $$
"""


def channel(schema: str) -> str:
    """Where the stores of one schema call each other; short, whatever the schema is called."""
    return f"oncehook_{blake2b(schema.encode(), digest_size=12).hexdigest()}"


def payload(destination_ids: Collection[int] | None) -> str:
    """Write whom a notification is about; nothing stands for any, as too many do."""
    return "" if destination_ids is None or len(destination_ids) > MOST_NAMED else " ".join(map(str, destination_ids))


def read_payload(text: str) -> set[int] | None:
    """Read what `payload` wrote; what somebody else sent stands for any."""
    try:
        return {int(word) for word in text.split()} or None
    except ValueError:
        return None


class Bell:
    """Lives on one event loop."""

    def __init__(self, here: Place, wake: Callable[[Collection[int] | None], None]) -> None:
        self._here = here
        self._channel = channel(here.schema)
        self._wake = wake
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._caller: Connection | None = None
        self._own_pid = 0
        """The server's process that sends our notifications: we need not hear those."""
        self._calling = False
        self._due: set[int] | None = set()
        """Destinations that the others have not been told of; None: any."""

    def start(self, *, listen: bool) -> None:
        """Begin, on the running loop; `listen` where somebody works."""
        self._loop = asyncio.get_running_loop()
        if listen:
            self._spawn(self._listen())

    async def close(self) -> None:
        """Be silent."""
        self._loop = None
        pending = set(self._tasks)
        while pending:  # more than once: inside the driver a cancellation can get lost
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.5)
        if self._caller is not None:
            self._caller.pgconn.finish()

    def ring(self, destination_ids: Collection[int] | None) -> None:
        """Say that something may have become due for these destinations (None: for any): on the loop."""
        self._wake(destination_ids)
        if destination_ids is None:
            self._due = None
        elif self._due is not None:
            self._due.update(destination_ids)
        if not self._calling and self._loop is not None:
            self._calling = True
            self._spawn(self._call())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="oncehook-bell")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- calling -------------------------------------------------------------------------------

    async def _call(self) -> None:
        """Call the others now, and once more after the pause for all that came meanwhile."""
        try:
            while self._due is None or self._due:
                due, self._due = self._due, set()
                await self._notify(payload(due))
                await asyncio.sleep(PAUSE)
        finally:
            self._calling = False

    async def _notify(self, due: str) -> None:
        try:
            connection = await self._open_caller()
            guard = asyncio.get_running_loop().call_later(SILENCE, cut, connection)
            try:
                await connection.execute("SELECT pg_notify($1, $2)", [self._channel, due])
            finally:
                guard.cancel()
        except (psycopg.Error, OSError, StoreError) as error:
            log.debug("store.notify_failed", extra={"fields": {"error": str(error)}})
            if self._caller is not None:
                self._caller.pgconn.finish()
                self._caller = None
            await asyncio.sleep(FIRST_WAIT)

    async def _open_caller(self) -> Connection:
        if self._caller is None or not is_alive(self._caller):
            self._caller = await connect(self._here)
            # A wake-up need not be on disk.
            await self._caller.execute("SELECT set_config('synchronous_commit', 'off', false)")
            self._own_pid = self._caller.info.backend_pid
        return self._caller

    # -- listening -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        wait = FIRST_WAIT
        while True:
            try:
                async with await connect(self._here) as connection:
                    await connection.execute("SELECT set_config('oncehook.channel', $1, false)", [self._channel])
                    await connection.execute(_LISTEN)
                    wait = FIRST_WAIT
                    self._wake(None)  # for what was called while nobody listened
                    async for notification in connection.notifies():
                        if notification.pid != self._own_pid:
                            self._wake(read_payload(notification.payload))
            except (psycopg.Error, OSError, StoreError) as error:
                log.debug("store.listen_failed", extra={"fields": {"error": str(error)}})
            await asyncio.sleep(wait * clock.chance.uniform(0.5, 1.0))
            wait = min(wait * 2, LONGEST_WAIT)
