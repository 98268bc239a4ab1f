"""The inbox in one SQLite file: a single writer thread, group commit, reads on connections of their own.

Everything that writes goes through one thread and one connection. It takes all that waits now, writes it in one
transaction, and resolves the senders' futures after the commit; while a commit runs the next group gathers.
So no lock decides anything here: order of commit, order of `seq` and order of arrival are the same thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from oncehook import clock, faults
from oncehook.errors import Overloaded, StoreError, StoreUnavailable
from oncehook.model import (
    Check,
    Engine,
    Figures,
    Intake,
    Rejection,
    SchemaState,
    StoredArrival,
    StoredEvent,
    Verdict,
)
from oncehook.store import migrate as migrations
from oncehook.store.base import (
    KEPT_REJECTIONS,
    Numbers,
    Pending,
    Watch,
    answer,
    refuse,
    unwatched,
)
from oncehook.store.sqlite import opening
from oncehook.store.sqlite.hold import Hold
from oncehook.store.sqlite.intake import Group, Micros, count, to_micros
from oncehook.store.sqlite.look import Reader

log = logging.getLogger("oncehook.store")
T = TypeVar("T")

GROUP_LIMIT: Final = 256
"""Arrivals per commit at most: enough to make the fsync cheap, few enough to keep the wait short."""

REOPEN_AFTER: Final = 0.5
"""Seconds between two tries to open a database that failed."""

MINUTE: Final = 60_000_000


class _Call:
    """Any other write: a function of the connection, run inside the group's transaction."""

    __slots__ = ("function", "future")

    def __init__(self, function: Callable[[sqlite3.Connection, Micros], Any]) -> None:
        self.function = function
        self.future: ThreadFuture[Any] = ThreadFuture()


class SqliteStore:
    """See `Store`. `path` is the database file; its folder is made when it is not there."""

    engine = Engine.sqlite

    def __init__(self, path: str | Path, *, max_waiting: int = 5000, max_waiting_bytes: int = 64 << 20) -> None:
        self.path = Path(path)
        self.watch: Watch = unwatched
        self.hold: Hold | None = None
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._queue: SimpleQueue[list[Pending] | _Call | None] = SimpleQueue()
        self._gathering: list[Pending] = []
        # What waits = joined - taken. Each is written by one thread only, so none needs a lock.
        self._joined = self._joined_bytes = 0
        self._taken = self._taken_bytes = 0
        self._broken: str | None = "The store is not open."
        self._closing = False
        self._reader = Reader(self.path)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- opening and closing -------------------------------------------------------------------

    async def open(self, *, migrate: bool = True, write: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        if write:
            await asyncio.to_thread(self._prepare, migrate)
            self._thread = threading.Thread(target=self._write_until_closed, name="oncehook-writer", daemon=True)
            self._thread.start()
        elif not self.path.exists():
            raise StoreUnavailable(f"There is no store at {self.path} yet.", hint="Start `oncehook serve` once.")

    def _prepare(self, migrate: bool) -> None:
        opening.prepare_folder(self.path)
        self.hold = Hold(self.path)
        try:
            self._connect(migrate)
        except BaseException:
            self.hold.release()
            self.hold = None
            raise

    def _connect(self, migrate: bool) -> None:
        self._connection = opening.connect(self.path)
        opening.migrate(self._connection, migrate=migrate)
        marks = dict(self._connection.execute("SELECT name, value FROM marks"))
        self._seq: int = marks["seq"]
        # "Now" starts at the wall clock, or where the last process left off if that is later, and from there
        # only ever grows: a clock set forward and back again does not freeze anything (R64, DESIGN.md 8.9).
        self._started_at: Micros = max(int(clock.now() * 1_000_000), marks["clock"])
        self._started_steady = clock.steady()
        self._broken = None

    def _now(self) -> Micros:
        return self._started_at + int((clock.steady() - self._started_steady) * 1_000_000)

    async def close(self) -> None:
        if self._thread is not None:
            self._closing = True  # from here nothing can join behind the end mark
            self._hand_over()
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        await asyncio.to_thread(self._reader.close)
        if self.hold is not None:
            opening.disconnect(self._connection)
            self.hold.release()
            self.hold = None

    # -- intake --------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        if self._broken is not None or self._closing:
            raise StoreUnavailable(self._broken or "The store is closing.")
        waiting_bytes = self._joined_bytes - self._taken_bytes
        if self._joined - self._taken >= self._max_waiting or waiting_bytes > self._max_waiting_bytes:
            raise Overloaded
        assert self._loop is not None
        pending = Pending(intake, self._loop.create_future())
        self._joined += 1
        self._joined_bytes += pending.size
        if not self._gathering:
            # Handed over when the loop has served all that is ready now: a writer that is woken for every single
            # arrival fights the loop for the interpreter's lock, and commits groups of one.
            self._loop.call_soon(self._hand_over)
        self._gathering.append(pending)
        return pending

    def _hand_over(self) -> None:
        gathered, self._gathering = self._gathering, []
        if gathered:
            self._queue.put(gathered)

    async def record_rejections(self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, str], int]) -> None:
        def write(connection: sqlite3.Connection, now: Micros) -> None:
            (last,) = connection.execute("SELECT value FROM marks WHERE name = 'rejection'").fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO rejections (slot, n, source, at, code, reason, peer, size)"
                " VALUES (?,?,?,?,?,?,?,?)",
                [
                    (n % KEPT_REJECTIONS, n, r.source, to_micros(r.at), r.code, r.reason, r.peer, r.size)
                    for n, r in enumerate(rejections, last + 1)
                ],
            )
            connection.execute("UPDATE marks SET value = ? WHERE name = 'rejection'", (last + len(rejections),))
            count(connection, now, {(source_id, 0, what): n for (source_id, what), n in counts.items()})

        await self._write(write)

    # -- the writer thread -----------------------------------------------------------------------

    async def _write(self, function: Callable[[sqlite3.Connection, Micros], T]) -> T:
        """Run a function inside the next group's transaction, and wait for its commit."""
        if self._broken is not None or self._closing:
            raise StoreUnavailable(self._broken or "The store is closing.")
        call = _Call(function)
        self._queue.put(call)
        result: T = await asyncio.wrap_future(call.future)
        return result

    def _write_until_closed(self) -> None:
        closing = False
        while not closing:
            intakes, calls, closing = self._take()
            self._commit([pending for pending in intakes if not pending.abandoned], calls)
            if self._broken is not None and not closing:
                self._reopen()
        self._broken = "The store is closed."

    def _take(self) -> tuple[list[Pending], list[_Call], bool]:
        """All that waits now; blocks until there is something, unless the store is broken and wants mending.

        True: the store is closing, and nothing comes after this.
        """
        intakes: list[Pending] = []
        calls: list[_Call] = []
        closing = False
        with contextlib.suppress(Empty):
            found = self._queue.get(timeout=None if self._broken is None else REOPEN_AFTER)
            while found is not None:
                if isinstance(found, list):
                    intakes += found
                else:
                    calls.append(found)
                if len(intakes) >= GROUP_LIMIT:
                    break
                found = self._queue.get_nowait()
            closing = found is None
        self._taken += len(intakes)
        self._taken_bytes += sum(pending.size for pending in intakes)
        return intakes, calls, closing

    def _commit(self, intakes: Sequence[Pending], calls: Sequence[_Call]) -> None:
        """One transaction for the whole group. Data that the database refuses is found by halving the group."""
        if self._broken is not None:
            self._fail(intakes, calls, StoreUnavailable(self._broken))
            return
        started = clock.perf()
        try:
            verdicts, results = self._transact(intakes, calls)
        except Exception as error:  # whatever it is, this thread must live on
            self._roll_back()
            if opening.is_data_error(error) and len(intakes) > 1:
                middle = len(intakes) // 2
                self._commit(intakes[:middle], calls)
                self._commit(intakes[middle:], ())
                return
            if opening.is_broken(error):
                # A failed fsync may have lost pages that the cache still shows as clean. Never go on with this
                # connection: reopen it and look at what is really on the disk (R59).
                self._broken = f"The database failed ({error}); it is being reopened."
            log.error("store.failed", extra={"error": str(error), "group": len(intakes)})
            self._fail(intakes, calls, StoreUnavailable(f"The store could not write: {error}"), error)
        else:
            self._on_loop(self.watch, "commit", clock.perf() - started)
            self._settle(intakes, verdicts, calls, results)

    def _transact(
        self, intakes: Sequence[Pending], calls: Sequence[_Call]
    ) -> tuple[list[list[Verdict]], list[tuple[Any, BaseException | None]]]:
        connection, now, seq = self._connection, self._now(), self._seq
        connection.execute("BEGIN IMMEDIATE")
        group = Group(connection, now, seq, intakes)
        verdicts = group.write() if intakes else []
        results = [_run(call, connection, now) for call in calls]
        connection.execute("UPDATE marks SET value = ? WHERE name = 'clock'", (now,))
        if group.seq != seq:
            connection.execute("UPDATE marks SET value = ? WHERE name = 'seq'", (group.seq,))
        faults.point("before_commit")
        connection.execute("COMMIT")
        self._seq = group.seq
        faults.point("after_commit")
        return verdicts, results

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._broken = f"The database failed ({error}); it is being reopened."

    def _reopen(self) -> None:
        """Open the file again and believe only what is on the disk."""
        opening.disconnect(self._connection)
        try:
            self._connect(migrate=False)
            opening.verify(self._connection)
        except (sqlite3.Error, StoreError) as error:
            self._broken = f"The database cannot be opened ({error})."
            log.error("store.broken", extra={"error": str(error)})
        else:
            log.warning("store.reopened")

    def _settle(
        self,
        intakes: Sequence[Pending],
        verdicts: list[list[Verdict]],
        calls: Sequence[_Call],
        results: list[tuple[Any, BaseException | None]],
    ) -> None:
        if intakes:
            self._on_loop(answer, intakes, verdicts)
        for call, (result, error) in zip(calls, results, strict=True):
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)

    def _fail(
        self, intakes: Sequence[Pending], calls: Sequence[_Call], error: StoreError, cause: Exception | None = None
    ) -> None:
        error.__cause__ = cause
        if intakes:
            self._on_loop(refuse, intakes, error)
        for call in calls:
            call.future.set_exception(error)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        # One hop to the loop for the whole group, not one per sender.
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- house -----------------------------------------------------------------------------------

    async def enroll(self, sources: Iterable[str], destinations: Iterable[str]) -> Numbers:
        source_names, destination_names = list(sources), list(destinations)

        def write(connection: sqlite3.Connection, now: Micros) -> Numbers:
            connection.executemany("INSERT OR IGNORE INTO sources (name) VALUES (?)", [(n,) for n in source_names])
            connection.executemany(
                "INSERT OR IGNORE INTO destinations (name) VALUES (?)", [(n,) for n in destination_names]
            )
            return Numbers(
                dict(connection.execute("SELECT name, id FROM sources")),
                dict(connection.execute("SELECT name, id FROM destinations")),
            )

        return await self._write(write)

    async def ping(self) -> None:
        if self._thread is None:
            raise StoreUnavailable(self._broken or "The store is open for reading only.")
        await self._write(lambda connection, now: None)

    async def schema_state(self) -> SchemaState:
        if not self.path.exists():
            return migrations.state(self.engine, 0)
        return await self._reader.run(lambda connection: migrations.state(Engine.sqlite, opening.version(connection)))

    async def check(self) -> list[Check]:
        return await self._reader.check()

    async def size(self) -> int:
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    # -- look: on connections of their own ---------------------------------------------------------

    async def get_event(self, event_id: bytes) -> StoredEvent | None:
        return await self._reader.get_event(event_id)

    async def find_events(
        self, *, source: str | None = None, subject: str | None = None, before: bytes | None = None, limit: int = 50
    ) -> list[StoredEvent]:
        return await self._reader.find_events(source, subject, before, limit)

    async def find_key(self, key_hash: bytes) -> bytes | None:
        return await self._reader.find_key(key_hash, self._now())

    async def arrivals_of(self, event_id: bytes) -> list[StoredArrival]:
        return await self._reader.arrivals_of(event_id)

    async def batch_body(self, batch_id: bytes) -> tuple[bytes, bytes] | None:
        return await self._reader.batch_body(batch_id)

    async def recent_rejections(self, limit: int = 50) -> list[Rejection]:
        return await self._reader.recent_rejections(limit)

    async def figures(self, since: datetime | None = None) -> Figures:
        return await self._reader.figures(since)


def _run(call: _Call, connection: sqlite3.Connection, now: Micros) -> tuple[Any, BaseException | None]:
    """One function of the group, in a savepoint: when it fails it takes only itself back."""
    connection.execute("SAVEPOINT call")
    try:
        result = call.function(connection, now)
    except StoreError as error:
        connection.execute("ROLLBACK TO call")
        return None, error
    except Exception as error:
        if not opening.is_data_error(error):
            raise
        connection.execute("ROLLBACK TO call")
        return None, StoreError(f"The store refused this write: {error}")
    finally:
        if connection.in_transaction:
            connection.execute("RELEASE call")
    return result, None
