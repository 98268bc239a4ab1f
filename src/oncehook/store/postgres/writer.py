"""Group commit on PostgreSQL: a few connections write the arrivals that wait in groups, one statement each.

`GroupCommit.record` is called for every verified arrival; it is decided after the commit.
Nobody waits for a group to fill: a connection that is free takes what waits now, and while it writes the next group
gathers, until it is worth a statement of its own. A connection that is lost is opened again; while none can be, new
arrivals are refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

import psycopg

from oncehook import clock, faults
from oncehook.errors import NotStarted, Overloaded, StoreError, StoreUnavailable
from oncehook.model import EventId, Intake, Mark, Outcome, Verdict
from oncehook.store.base import Pending, Reserved, answer, bind, refuse
from oncehook.store.postgres.connection import (
    Ids,
    PooledConnection,
    connect_hot,
    cut,
    is_alive,
    is_refused_data,
    milliseconds,
)
from oncehook.store.postgres.intake import INTAKE, INTAKE_PROVEN, PROOFS, IntakeRows, read_intake_result, verdicts
from oncehook.store.postgres.queue import PostgresQueue

MOST: Final = 30_000
"""Keys that are remembered: about 6 MB. Retries come within minutes; a later copy is sent with its body."""


class RecentKeys:
    """Keys that this process saw in the store recently, latest last: a copy of one is sent without its body.

    This is only a guess. When such a key is gone, or belongs to another body, a constraint refuses the statement
    (events and conflicts need a body), nothing is written, and the group is sent again in full.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()

    def among(self, intakes: Sequence[Intake]) -> frozenset[bytes]:
        """Return the event ids of items that are probably copies."""
        if not self._bodies:
            return frozenset()
        items = [item for intake in intakes for item in intake.items]
        return frozenset(
            item.event_id
            for item in items
            if item.key_hash is not None and self._bodies.get(item.key_hash) == item.body_hash
        )

    def note(self, intakes: Sequence[Intake], verdicts: Sequence[Sequence[Verdict]]) -> None:
        """Add the keys of these verdicts."""
        bodies = self._bodies
        for intake, decided in zip(intakes, verdicts, strict=True):
            for item, verdict in zip(intake.items, decided, strict=True):
                if item.key_hash is not None and verdict.outcome is not Outcome.conflict:
                    bodies[item.key_hash] = item.body_hash
        while len(bodies) > self._most:
            bodies.popitem(last=False)

    def forget(self) -> None:
        self._bodies.clear()


log = logging.getLogger("oncehook.store")

BATCH_BYTES: Final = 8 << 20
"""Bytes at which a group stops growing: one huge body must not make others wait for a second one."""
FEW: Final = 16
"""Fewer arrivals than this wait for the group that is being written."""

FIRST_WAIT: Final = 0.05
LONGEST_WAIT: Final = 2.0
"""Longest of the seconds between two tries to connect, which double each time."""

SHORT_LOCK: Final = 0.05
"""Lock timeout while a blocked group is bisected, so that the others are still in time (R9)."""


class GroupCommit:
    """The queue of waiting arrivals, and the writers that serve it, on one event loop."""

    def __init__(
        self, store: PostgresQueue, *, connections: int, max_waiting: int, max_waiting_bytes: int, batch: int
    ) -> None:
        self.store = store
        self.timeouts = store.database.timeouts
        self.recent_keys = RecentKeys()
        self.closing = False
        self.stopped = False
        self._waiting: deque[Pending] = deque()
        self._waiting_bytes = 0
        self._writing = 0
        """Arrivals that are being written, without groups that take too long."""
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._part = self._part_bytes = 0
        """Arrivals, and bytes of them, that may wait in this process."""
        self._batch = batch
        self._writers = [_Writer(self) for _ in range(connections)]
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, receiver_count: int = 1) -> None:
        """Begin to write, as one of so many processes that divide between them what may wait."""
        self._part, self._part_bytes = self._max_waiting // receiver_count, self._max_waiting_bytes // receiver_count
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(writer.run(), name="oncehook-intake") for writer in self._writers]

    def record(self, intake: Intake) -> Pending:
        """Join the queue. Raises at once when it is too long, no server can be reached, or it is closed."""
        if self._loop is None or self.closing:
            raise NotStarted("The store is not open.")
        if len(self._waiting) >= self._part or self._waiting_bytes > self._part_bytes:
            raise Overloaded
        if (reason := self._writers[0].unreachable) and self._is_unreachable():
            raise StoreUnavailable("PostgreSQL cannot be reached.") from reason
        pending = Pending(intake, self._loop)
        self._waiting.append(pending)
        self._waiting_bytes += pending.size
        self.wake()
        return pending

    def _is_unreachable(self) -> bool:
        return all(writer.unreachable for writer in self._writers)

    def _is_worthwhile(self) -> bool:
        """Tell whether to begin another statement beside those under way: only for as many arrivals as these hold, and
        not for a few, because a statement costs as much as about twenty of its rows."""
        return not self._writing or len(self._waiting) >= max(self._writing, FEW) or self.closing

    def take(self) -> list[Pending]:
        """Return the next group: what waits now, up to the limit, without arrivals whose sender has gone."""
        batch: list[Pending] = []
        items = size = 0
        if not self._is_worthwhile():
            return batch
        while self._waiting and items < self._batch and size < BATCH_BYTES:
            pending = self._waiting.popleft()
            self._waiting_bytes -= pending.size
            if pending.abandoned or pending.is_decided:
                continue
            batch.append(pending)
            items += len(pending.intake.items)
            size += pending.size
        return batch

    def wake(self) -> None:
        """Wake one idle writer, if enough arrivals wait."""
        while self._waiting and self._idle and self._is_worthwhile():
            rest = self._idle.pop()
            if not rest.done():
                rest.set_result(None)
                return

    @contextlib.contextmanager
    def writing(self, batch: Sequence[Pending]) -> Iterator[None]:
        """Count a group as being written, so that others gather meanwhile; stop counting it when it takes too long."""
        counted = len(batch)
        self._writing += counted

        def stop_counting() -> None:
            nonlocal counted
            self._writing -= counted
            counted = 0

        def go_on_without() -> None:
            stop_counting()
            self.wake()

        assert self._loop is not None
        timer = self._loop.call_later(self.timeouts.group, go_on_without)
        try:
            yield
        finally:
            timer.cancel()
            stop_counting()

    @contextlib.contextmanager
    def resting(self, rest: asyncio.Future[None]) -> Iterator[None]:
        """Let `wake` resolve this future inside the block."""
        self._idle.append(rest)
        try:
            yield
        finally:
            if rest in self._idle:
                self._idle.remove(rest)

    def is_over(self) -> bool:
        """Tell whether it is closed and empty, or out of time to finish."""
        return self.stopped or (self.closing and not self._waiting)

    async def close(self) -> None:
        """Write what waits, for a few seconds; refuse the rest."""
        self.closing = True
        for rest in self._idle:
            if not rest.done():
                rest.set_result(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0 if self._is_unreachable() else self.timeouts.close)
            self.stopped = True
            for writer in self._writers:
                writer.cut()
            _, late = await asyncio.wait(self._tasks, timeout=0.5)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        refuse(self._waiting, StoreUnavailable("The store was closed."))
        self._waiting.clear()


class _Writer:
    """A writer of the queue, over one connection at a time."""

    def __init__(self, queue: GroupCommit) -> None:
        self._queue = queue
        self._link: _WriterLink | None = None
        self.unreachable: Exception | None = None
        """Error of the last try to connect, until one succeeds."""

    async def run(self) -> None:
        while not self._queue.is_over():
            try:
                await self._serve_through_one_connection()
            except Exception:  # whatever fails, the queue must be served
                log.exception("store.writer_failed")
                await asyncio.sleep(FIRST_WAIT)

    async def _serve_through_one_connection(self) -> None:
        self._link = await self._connect()
        if self._link is None:
            return
        try:
            await self._serve(self._link)
        finally:
            self._link.drop()

    async def _connect(self) -> _WriterLink | None:
        wait = FIRST_WAIT
        while not self._queue.is_over():
            self._queue.wake()  # other writers take over what this one left
            try:
                link = _WriterLink(await connect_hot(self._queue.store.database), self._queue)
            except (psycopg.Error, OSError, StoreError) as error:
                if self.unreachable is None:
                    log.error("store.unreachable", extra={"fields": {"error": str(error)}})
                self.unreachable = error
                await asyncio.sleep(wait * clock.chance.uniform(0.5, 1.0))
                wait = min(wait * 2, LONGEST_WAIT)
            else:
                if self.unreachable is not None:
                    log.warning("store.reached")
                self.unreachable = None
                return link
        return None

    async def _serve(self, link: _WriterLink) -> None:
        while link.is_open() and not self._queue.is_over():
            if batch := self._queue.take():
                with self._queue.writing(batch):
                    await self._commit_or_refuse(link, batch)
            elif not self._queue.closing:
                await self._rest(link)

    async def _rest(self, link: _WriterLink) -> None:
        """Wait for arrivals, or for the server to go away, which is noticed now and not by the next arrival."""
        rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._queue.resting(rest), link.resolving(rest):
            await rest

    async def _commit_or_refuse(self, link: _WriterLink, batch: Sequence[Pending]) -> None:
        try:
            await self._commit(link, batch)
        except BaseException as error:
            # The commit's outcome may be unknown. Nobody gets a 2xx; the sender's retry settles it (R4).
            refuse(batch, _not_written(error))
            if not isinstance(error, Exception):
                raise
            log.error("store.failed", extra={"fields": {"error": str(error), "group": len(batch)}})
            if not _is_passing(error):
                link.drop()

    async def _commit(self, link: _WriterLink, batch: Sequence[Pending]) -> None:
        """Write a group; when one of its rows is to blame, find it by bisection, so that only its sender fails."""
        started = clock.perf()
        try:
            outcome, due = await link.write(batch)
        except (psycopg.Error, _UnfitError) as error:
            blame = _blame(error)
            if blame is _Blame.store:
                raise
            if len(batch) == 1:
                fields = {"error": str(error), "arrival": batch[0].intake.arrival_id.hex()}
                log.error("store.refused", extra={"fields": fields})
                refuse(batch, _not_written(error))
                return
        else:
            # Not now: the next group is sent first, and while the server works on it, these are answered.
            asyncio.get_running_loop().call_soon(answer, batch, outcome)
            self._queue.store.observer.note_commit("commit", clock.perf() - started)
            if due:
                self._queue.store.notify_due(due)  # outside the commit, because NOTIFY would serialise all commits
            return
        middle = len(batch) // 2
        async with link.haste(needed=blame is _Blame.lock):
            await self._commit(link, batch[:middle])
            await self._commit(link, batch[middle:])

    def cut(self) -> None:
        """Abort the statement that this writer waits for, whatever the server does."""
        if self._link is not None:
            self._link.cut()


class _WriterLink:
    def __init__(self, link: PooledConnection, queue: GroupCommit) -> None:
        self._link = link
        self._connection = link.connection
        self._queue = queue
        self._hasty = False

    def is_open(self) -> bool:
        return not self._connection.closed

    async def write(self, batch: Sequence[Pending]) -> tuple[list[list[Verdict]], Sequence[int]]:
        """Commit a group in one call; return the verdicts, and the destinations with something due.

        An error means that nothing was written, unless the connection broke.
        """
        intakes = [pending.intake for pending in batch]
        faults.point("before_intake")
        reserved = Reserved(self._queue.store.observer.taker, self._queue.store.source_names, intakes)
        try:
            answered = read_intake_result(await self._send(intakes, reserved))
        except BaseException:
            reserved.give_up()
            raise
        faults.point("after_intake")
        reserved.begin(answered.leased, answered.at)
        outcome = verdicts(intakes, answered)
        _mark_repeated(intakes, answered.same_as)
        self._queue.recent_keys.note(intakes, outcome)
        return outcome, answered.made_due

    async def _send(self, intakes: Sequence[Intake], reserved: Reserved) -> list[Any]:
        await self._bind(intakes)
        bare = self._queue.recent_keys.among(intakes)
        try:
            return await self._keep(intakes, bare, reserved)
        except psycopg.IntegrityError:
            if not bare:
                raise
        self._queue.recent_keys.forget()
        return await self._keep(intakes, (), reserved)

    async def _keep(self, intakes: Sequence[Intake], bare: Collection[bytes], reserved: Reserved) -> list[Any]:
        try:
            rows = IntakeRows(intakes, self._queue.store.cipher, bare, reserved)
            parameters = rows.parameters(self._link.slot)
        except Exception as error:
            raise _UnfitError(str(error)) from error
        if rows.proven:
            return await self._execute(INTAKE_PROVEN, parameters)
        return await self._execute(INTAKE, parameters)

    async def _bind(self, intakes: Sequence[Intake]) -> None:
        """Look up the keys of signatures that were seen before, for sources with one event per signature.

        Two requests that come at once through different processes do not see each other here: the later is only marked.
        """
        bound = [item.proof for intake in intakes for item in intake.items if item.is_bound]
        if bound:
            bind(intakes, dict(await self._execute(PROOFS, [Ids(bound)])))

    async def _execute(self, statement: str, parameters: Sequence[object]) -> list[Any]:
        guard = asyncio.get_running_loop().call_later(self._queue.timeouts.silence, self.cut)
        try:
            return await self._link.fetch(statement, parameters)
        finally:
            guard.cancel()

    @contextlib.asynccontextmanager
    async def haste(self, *, needed: bool) -> AsyncIterator[None]:
        """Wait less for locks while a group that met one is bisected."""
        if not needed or self._hasty:
            yield
            return
        await self._connection.configure({"lock_timeout": milliseconds(SHORT_LOCK)})
        self._hasty = True
        try:
            yield
        except BaseException:
            self.drop()  # otherwise it would keep the short timeout
            raise
        self._hasty = False
        await self._connection.configure({"lock_timeout": milliseconds(self._queue.timeouts.lock)})

    @contextlib.contextmanager
    def resolving(self, rest: asyncio.Future[None]) -> Iterator[None]:
        """Resolve `rest` when the server goes away inside the block."""
        loop, descriptor = asyncio.get_running_loop(), self._connection.pgconn.socket
        listening = True

        def hear() -> None:
            nonlocal listening
            # libpq closes a dead socket, and its number may soon belong to an arrival's connection, whose reader we
            # must not remove: so remove ours first.
            loop.remove_reader(descriptor)
            listening = is_alive(self._connection)
            if listening:
                loop.add_reader(descriptor, hear)
            elif not rest.done():
                rest.set_result(None)

        loop.add_reader(descriptor, hear)
        try:
            yield
        finally:
            if listening:
                loop.remove_reader(descriptor)

    def cut(self) -> None:
        cut(self._connection)

    def drop(self) -> None:
        self._link.drop()


class _UnfitError(Exception):
    """An intake that cannot be sent: a lone surrogate, an id of the wrong length."""


class _Blame(Enum):
    row = auto()
    lock = auto()
    store = auto()


def _blame(error: Exception) -> _Blame:
    """Find what is to blame: one of the rows, another transaction's lock, or the store as a whole."""
    if not isinstance(error, psycopg.Error):
        return _Blame.row
    if error.sqlstate == "55P03":
        return _Blame.lock
    return _Blame.row if is_refused_data(error) else _Blame.store


def _is_passing(error: Exception) -> bool:
    """Tell whether the connection is still good: SQLSTATE 40 deadlock, serialisation; 53 resources; 55 locks."""
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in ("40", "53", "55")


def _not_written(error: BaseException) -> StoreUnavailable:
    failure = StoreUnavailable(f"The store could not write: {error}")
    failure.__cause__ = error
    return failure


def _mark_repeated(intakes: Sequence[Intake], same_as: Mapping[bytes, bytes]) -> None:
    """Mark items whose signed body was seen before under another key."""
    for intake in intakes if same_as else ():
        for item in intake.items:
            if item.event_id in same_as:
                item.same_as = EventId(same_as[item.event_id])
                item.marks |= Mark.same_body
