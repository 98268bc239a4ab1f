"""The inbox in one SQLite file: a single writer thread, group commit, reads on connections of their own.

Everything that writes goes through one thread and one connection. It takes all that waits now, writes it in one
transaction, and resolves the senders' futures after the commit; while a commit runs the next group gathers.
So no lock decides anything here: order of commit, order of `seq` and order of arrival are the same thing.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import Counter
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
    Item,
    Outcome,
    Rejection,
    SchemaState,
    StoredArrival,
    StoredEvent,
    Verdict,
)
from oncehook.store import migrate as migrations
from oncehook.store import sqlite_open
from oncehook.store.base import (
    CONFLICT_SLOTS,
    KEPT_ARRIVALS,
    KEPT_REJECTIONS,
    Fold,
    Numbers,
    Pending,
    answer,
    fold,
    refuse,
)
from oncehook.store.hold import Hold
from oncehook.store.sqlite_look import Reader

log = logging.getLogger("oncehook.store")
T = TypeVar("T")
Micros = int

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
        self.hold: Hold | None = None
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._queue: SimpleQueue[Pending | _Call | None] = SimpleQueue()
        # Bytes that wait = joined - taken. Each is written by one thread only, so neither needs a lock.
        self._joined = 0
        self._taken = 0
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
        sqlite_open.prepare_folder(self.path)
        self.hold = Hold(self.path)
        try:
            self._connect(migrate)
        except BaseException:
            self.hold.release()
            raise

    def _connect(self, migrate: bool) -> None:
        self._connection = sqlite_open.connect(self.path)
        sqlite_open.migrate(self._connection, migrate=migrate)
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
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        await asyncio.to_thread(self._reader.close)
        if self.hold is not None:
            sqlite_open.disconnect(self._connection)
            self.hold.release()
            self.hold = None

    # -- intake --------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        if self._broken is not None or self._closing:
            raise StoreUnavailable(self._broken or "The store is closing.")
        if self._queue.qsize() >= self._max_waiting or self._joined - self._taken > self._max_waiting_bytes:
            raise Overloaded
        assert self._loop is not None
        pending = Pending(intake, self._loop.create_future())
        self._joined += pending.size
        self._queue.put(pending)
        return pending

    async def record_rejections(self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, str], int]) -> None:
        def write(connection: sqlite3.Connection, now: Micros) -> None:
            (last,) = connection.execute("SELECT value FROM marks WHERE name = 'rejection'").fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO rejections (slot, n, source, at, code, reason, peer, size) VALUES (?,?,?,?,?,?,?,?)",
                [
                    (n % KEPT_REJECTIONS, n, r.source, _micros(r.at), r.code, r.reason, r.peer, r.size)
                    for n, r in enumerate(rejections, last + 1)
                ],
            )
            connection.execute("UPDATE marks SET value = ? WHERE name = 'rejection'", (last + len(rejections),))
            _count(connection, now, {(source_id, 0, what): n for (source_id, what), n in counts.items()})

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
            jobs, closing = self._take()
            intakes = [job for job in jobs if isinstance(job, Pending) and not job.abandoned]
            calls = [job for job in jobs if isinstance(job, _Call)]
            self._commit(intakes, calls)
            if self._broken is not None and not closing:
                self._reopen()
        self._broken = "The store is closed."

    def _take(self) -> tuple[list[Pending | _Call], bool]:
        """All that waits now; blocks until there is something, unless the store is broken and wants mending.

        True: the store is closing, and nothing comes after this.
        """
        jobs: list[Pending | _Call] = []
        try:
            job = self._queue.get(timeout=None if self._broken is None else REOPEN_AFTER)
        except Empty:
            return jobs, False
        while job is not None:
            jobs.append(job)
            if isinstance(job, Pending):
                self._taken += job.size
            if len(jobs) >= GROUP_LIMIT:
                return jobs, False
            try:
                job = self._queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _commit(self, intakes: Sequence[Pending], calls: Sequence[_Call]) -> None:
        """One transaction for the whole group. Data that the database refuses is found by halving the group."""
        if self._broken is not None:
            self._fail(intakes, calls, StoreUnavailable(self._broken))
            return
        try:
            verdicts, results = self._transact(intakes, calls)
        except sqlite3.Error as error:
            self._roll_back()
            if sqlite_open.is_data_error(error) and len(intakes) > 1:
                middle = len(intakes) // 2
                self._commit(intakes[:middle], calls)
                self._commit(intakes[middle:], ())
                return
            if sqlite_open.is_broken(error):
                # A failed fsync may have lost pages that the cache still shows as clean. Never go on with this
                # connection: reopen it and look at what is really on the disk (R59).
                self._broken = f"The database failed ({error}); it is being reopened."
            log.error("store.failed", extra={"error": str(error), "group": len(intakes)})
            self._fail(intakes, calls, StoreUnavailable(f"The store could not write: {error}"), error)
        else:
            self._settle(intakes, verdicts, calls, results)

    def _transact(
        self, intakes: Sequence[Pending], calls: Sequence[_Call]
    ) -> tuple[list[list[Verdict]], list[tuple[Any, BaseException | None]]]:
        connection, now, seq = self._connection, self._now(), self._seq
        connection.execute("BEGIN IMMEDIATE")
        group = _Group(connection, now, seq, intakes)
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
        sqlite_open.disconnect(self._connection)
        try:
            self._connect(migrate=False)
            sqlite_open.verify(self._connection)
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
        return await self._reader.run(
            lambda connection: migrations.state(Engine.sqlite, sqlite_open.version(connection))
        )

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


class _Group:
    """The intakes of one transaction: which are new, which are copies, and the rows they make."""

    def __init__(self, connection: sqlite3.Connection, now: Micros, seq: int, batch: Sequence[Pending]) -> None:
        self.connection = connection
        self.now = now
        self.seq = seq
        self.batch = batch
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.verdicts: dict[int, Verdict] = {}
        """What was decided about the items that are not simply accepted, by their identity."""
        self.copied: list[tuple[Any, ...]] = []
        self.arrivals: list[tuple[Any, ...]] = []

    def write(self) -> list[list[Verdict]]:
        folds, _ = fold(self.batch)
        self._claim_keys(folds)
        self._insert_copies()
        self._insert_events()
        self._insert_deliveries()
        _count(self.connection, self.now, self.counts)
        return [[self._verdict(item) for item in pending.intake.items] for pending in self.batch]

    def _verdict(self, item: Item) -> Verdict:
        return self.verdicts.get(id(item)) or Verdict(Outcome.accepted, item.event_id)

    def _claim_keys(self, folds: Sequence[Fold]) -> None:
        rows = [
            (
                f.candidate.key_hash,
                f.candidate.event_id,
                f.candidate.body_hash,
                f.intake.source_id,
                1 + len(f.copies),
                self.now,
                self.now + int(f.candidate.keep * 1_000_000),
            )
            for f in folds
        ]
        cursor = self.connection.executemany(
            "INSERT INTO keys (hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)"
            " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?7) ON CONFLICT DO NOTHING",
            rows,
        )
        every_key_is_new = cursor.rowcount == len(rows)
        for f, row in zip(folds, rows, strict=True):
            if not every_key_is_new:
                self._judge(f, row)
            elif f.copies:
                self._add_copies(f.candidate.event_id, f.candidate.body_hash, 1, f.copies)

    def _judge(self, f: Fold, row: tuple[Any, ...]) -> None:
        """Some key of this group was known before: see whether it is this one."""
        event_id, body_hash, expires_at, copies = self.connection.execute(
            "SELECT event_id, body_hash, expires_at, copies FROM keys WHERE hash = ?", row[:1]
        ).fetchone()
        if event_id == f.candidate.event_id:
            self._add_copies(event_id, body_hash, 1, f.copies)
        elif expires_at <= self.now:
            self.connection.execute(
                "UPDATE keys SET event_id = ?2, body_hash = ?3, source_id = ?4, copies = ?5, first_seen = ?6,"
                " last_seen = ?6, expires_at = ?7 WHERE hash = ?1",
                row,
            )
            self._add_copies(f.candidate.event_id, f.candidate.body_hash, 1, f.copies)
        else:
            self.copied.append((row[0], 1 + len(f.copies), self.now))
            self._add_copies(event_id, body_hash, copies, [(f.candidate, f.intake), *f.copies])

    def _add_copies(
        self, event_id: bytes, body_hash: bytes, before: int, copies: Sequence[tuple[Item, Intake]]
    ) -> None:
        """Later arrivals of an event: counted exactly, the latest of them kept in a ring."""
        for number, (item, intake) in enumerate(copies, before + 1):
            differs = item.body_hash != body_hash
            outcome = Outcome.conflict if differs else Outcome.duplicate
            self.verdicts[id(item)] = Verdict(outcome, event_id)
            self.counts[intake.source_id, 0, outcome] += 1
            split = intake.raw is not None
            self.arrivals.append(
                (
                    event_id,
                    number % KEPT_ARRIVALS + (CONFLICT_SLOTS if differs else 0),
                    intake.arrival_id,
                    outcome,
                    self.now,
                    intake.arrival_id if split else None,
                    None if split else intake.headers,
                    item.body if differs else None,
                )
            )

    def _insert_copies(self) -> None:
        if self.arrivals:
            self.connection.executemany(
                "UPDATE keys SET copies = copies + ?2, last_seen = ?3 WHERE hash = ?1", self.copied
            )
            self.connection.executemany(
                "INSERT OR REPLACE INTO arrivals (event_id, slot, id, outcome, at, batch_id, head, body)"
                " VALUES (?,?,?,?,?,?,?,?)",
                self.arrivals,
            )

    def _insert_events(self) -> None:
        rows = []
        for pending in self.batch:
            intake = pending.intake
            split = intake.raw is not None
            batch_id, head = (intake.arrival_id, None) if split else (None, intake.headers)
            if split:
                self.connection.execute(
                    "INSERT INTO batches (id, source_id, received_at, head, body) VALUES (?,?,?,?,?)",
                    (batch_id, intake.source_id, self.now, intake.headers, intake.raw),
                )
            self.counts[intake.source_id, 0, "received"] += len(intake.items)
            for i in intake.items:
                if id(i) in self.verdicts:
                    continue
                self.counts[intake.source_id, 0, "accepted"] += 1
                rows.append(
                    (
                        i.event_id,
                        intake.source_id,
                        i.type,
                        i.key,
                        i.subject,
                        self.now,
                        None if i.event_at is None else _micros(i.event_at),
                        int(i.marks),
                        i.rank,
                        i.rank_scope,
                        i.body_hash,
                        i.key_hash,
                        batch_id,
                        head,
                        i.body,
                    )
                )
        self.connection.executemany(
            "INSERT INTO events (id, source_id, type, key, subject, received_at, event_at, marks, rank, rank_scope,"
            " body_hash, key_hash, batch_id, head, body) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            rows,
        )

    def _insert_deliveries(self) -> None:
        deliveries, heads = [], []
        fronts: set[bytes] = set()
        for pending in self.batch:
            for item in pending.intake.items:
                if id(item) in self.verdicts:
                    continue
                for planned in item.deliveries:
                    self.seq += 1
                    behind = planned.subject_key is not None and self._has_head(planned.subject_key, fronts)
                    deliveries.append(
                        (planned.id, item.event_id, planned.destination_id, planned.subject_key, self.seq, behind)
                    )
                    line = planned.subject_key or planned.id
                    heads.append((line, planned.destination_id, self.now, planned.id, item.event_id))
                    self.counts[0, planned.destination_id, "pending"] += 1
        if not deliveries:
            return
        self.connection.executemany(
            "INSERT INTO deliveries (id, event_id, destination_id, subject_key, seq, behind) VALUES (?,?,?,?,?,?)",
            deliveries,
        )
        self.connection.executemany(
            "INSERT INTO heads (subject_key, destination_id, due_at, delivery_id, event_id) VALUES (?,?,?,?,?)"
            " ON CONFLICT DO UPDATE SET waiting = waiting + 1, turn = 0",
            heads,
        )

    def _has_head(self, subject_key: bytes, fronts: set[bytes]) -> bool:
        if subject_key in fronts:
            return True
        fronts.add(subject_key)
        found = self.connection.execute("SELECT 1 FROM heads WHERE subject_key = ?", (subject_key,)).fetchone()
        return found is not None


def _run(call: _Call, connection: sqlite3.Connection, now: Micros) -> tuple[Any, BaseException | None]:
    """One function of the group, in a savepoint: when it fails it takes only itself back."""
    connection.execute("SAVEPOINT call")
    try:
        result = call.function(connection, now)
    except sqlite3.Error as error:
        if not sqlite_open.is_data_error(error):
            raise
        connection.execute("ROLLBACK TO call")
        return None, StoreError(f"The store refused this write: {error}")
    except StoreError as error:
        connection.execute("ROLLBACK TO call")
        return None, error
    finally:
        if connection.in_transaction:
            connection.execute("RELEASE call")
    return result, None


def _count(connection: sqlite3.Connection, now: Micros, counts: Mapping[tuple[int, int, str], int]) -> None:
    minute = now - now % MINUTE
    connection.executemany(
        "INSERT INTO counters (minute, source_id, destination_id, what, n) VALUES (?,?,?,?,?)"
        " ON CONFLICT DO UPDATE SET n = n + excluded.n",
        [(minute, *where, n) for where, n in counts.items()],
    )


def _micros(moment: datetime) -> Micros:
    return int(moment.timestamp() * 1_000_000)
