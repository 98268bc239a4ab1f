"""Group commit on PostgreSQL: arrivals join a line, a few connections write them in groups, one statement each.

`GroupCommit.record` is called for every verified arrival; the verdicts come out through its future, after the
commit. Nobody waits for a group to fill: a connection that is free takes what waits now, and while it writes the next
group gathers, until it is worth a statement of its own. A connection that is lost is opened again; while none can be,
new arrivals are refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final

import psycopg

from oncehook import clock, faults
from oncehook.errors import Overloaded, StoreError, StoreUnavailable
from oncehook.model import Intake, Mark, Verdict
from oncehook.store.base import Pending, Reserved, Taker, Timeouts, Wake, Watch, answer, bind, refuse, unheeded
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.familiar import Familiar
from oncehook.store.postgres.intake import INTAKE, INTAKE_PROVEN, PROOFS, Rows, read_answer, verdicts
from oncehook.store.postgres.opening import cut, is_alive, milliseconds
from oncehook.store.postgres.wire import Connection, Ids

log = logging.getLogger("oncehook.store")

BATCH_BYTES: Final = 8 << 20
"""A group stops growing here: one huge body must not make its neighbours wait for a second one."""

FEW: Final = 16
"""Fewer arrivals wait for the group that is under way."""

FIRST_WAIT: Final = 0.05
LONGEST_WAIT: Final = 2.0
"""Seconds between two tries to connect: doubled from the first to the longest."""

HASTE: Final = "50ms"
"""lock_timeout while the parts of a blocked group are tried one by one: the free ones are still in time (R9)."""

Connect = Callable[[], Awaitable[tuple[Connection, int]]]
"""Opens a connection for intake, and gives the counters' slot that is its own."""


class GroupCommit:
    """The line of arrivals that wait, and the writers that serve it. Lives on one event loop."""

    def __init__(
        self,
        connect: Connect,
        cipher: Cipher,
        watch: Watch,
        made_due: Wake = unheeded,
        taker: Callable[[], Taker | None] = lambda: None,
        sources: Mapping[int, str] = MappingProxyType({}),
        *,
        timeouts: Timeouts,
        connections: int,
        max_waiting: int,
        max_waiting_bytes: int,
        batch: int,
    ) -> None:
        self.connect = connect
        self.cipher = cipher
        self.watch = watch
        self.made_due = made_due
        self.taker = taker
        self.sources = sources
        """Their names by number."""
        self.timeouts = timeouts
        self.familiar = Familiar()
        self.closing = False
        self.stopped = False
        self._waiting: deque[Pending] = deque()
        self._waiting_bytes = 0
        self._writing = 0
        """Arrivals that are being written, without those that take too long."""
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._batch = batch
        self._writers = [_Writer(self) for _ in range(connections)]
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve the line, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(writer.run(), name="oncehook-intake") for writer in self._writers]

    def record(self, intake: Intake) -> Pending:
        """Join the line. Raises at once when it is too long, when nobody can serve it, or when it is closed."""
        if self._loop is None or self.closing:
            raise StoreUnavailable("The store is not open.")
        if len(self._waiting) >= self._max_waiting or self._waiting_bytes > self._max_waiting_bytes:
            raise Overloaded
        if (reason := self._writers[0].unreachable) and self._is_unreachable():
            raise StoreUnavailable("PostgreSQL cannot be reached.") from reason
        pending = Pending(intake, self._loop.create_future())
        self._waiting.append(pending)
        self._waiting_bytes += pending.size
        self.wake()
        return pending

    def _is_unreachable(self) -> bool:
        return all(writer.unreachable for writer in self._writers)

    def _is_worthwhile(self) -> bool:
        """A statement costs as much as some twenty of its rows, whatever is in it. So another one is begun beside those
        under way only for as many arrivals as they hold, and not for a few."""
        return not self._writing or len(self._waiting) >= max(self._writing, FEW) or self.closing

    def take(self) -> list[Pending]:
        """The next group: what waits now, up to the limit, without those whose sender has gone."""
        batch: list[Pending] = []
        items = size = 0
        if not self._is_worthwhile():
            return batch
        while self._waiting and items < self._batch and size < BATCH_BYTES:
            pending = self._waiting.popleft()
            self._waiting_bytes -= pending.size
            if pending.abandoned or pending.future.done():
                continue
            batch.append(pending)
            items += len(pending.intake.items)
            size += pending.size
        return batch

    def wake(self) -> None:
        """Let one resting writer look at the line, if anything waits in it that is worth it."""
        while self._waiting and self._idle and self._is_worthwhile():
            rest = self._idle.pop()
            if not rest.done():
                rest.set_result(None)
                return

    @contextlib.contextmanager
    def writing(self, batch: Sequence[Pending]) -> Iterator[None]:
        """While inside, others gather, unless it takes too long."""
        counted = len(batch)
        self._writing += counted

        def count_no_more() -> None:
            nonlocal counted
            self._writing -= counted
            counted = 0

        def leave_behind() -> None:
            count_no_more()
            self.wake()

        assert self._loop is not None
        timer = self._loop.call_later(self.timeouts.group, leave_behind)
        try:
            yield
        finally:
            timer.cancel()
            count_no_more()

    @contextlib.contextmanager
    def resting(self, rest: asyncio.Future[None]) -> Iterator[None]:
        """While inside, `wake` may resolve this future."""
        self._idle.append(rest)
        try:
            yield
        finally:
            if rest in self._idle:
                self._idle.remove(rest)

    def is_over(self) -> bool:
        """Nothing more will come, and nothing waits; or the time to finish it is over."""
        return self.stopped or (self.closing and not self._waiting)

    async def close(self) -> None:
        """Write what was taken in, for a few seconds; refuse the rest."""
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
    """Serves the line through one connection after the other."""

    def __init__(self, line: GroupCommit) -> None:
        self._line = line
        self._link: _Link | None = None
        self.unreachable: Exception | None = None
        """Why the last try to connect failed, until one succeeds."""

    async def run(self) -> None:
        while not self._line.is_over():
            try:
                await self._serve_through_one_connection()
            except Exception:  # whatever it is, the line must be served
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

    async def _connect(self) -> _Link | None:
        wait = FIRST_WAIT
        while not self._line.is_over():
            self._line.wake()  # what was left to this writer is for the others meanwhile
            try:
                link = _Link(*await self._line.connect(), self._line)
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

    async def _serve(self, link: _Link) -> None:
        while link.is_open() and not self._line.is_over():
            if batch := self._line.take():
                with self._line.writing(batch):
                    await self._commit_or_refuse(link, batch)
            elif not self._line.closing:
                await self._rest(link)

    async def _rest(self, link: _Link) -> None:
        """Wait to be woken. A server that goes away meanwhile is noticed now, not by the next arrival."""
        rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._line.resting(rest), link.listening(rest):
            await rest

    async def _commit_or_refuse(self, link: _Link, batch: Sequence[Pending]) -> None:
        try:
            await self._commit(link, batch)
        except BaseException as error:
            # Whether it was committed may be unknown. Nobody gets a 2xx; the sender's retry finds out (R4).
            refuse(batch, _unavailable(error))
            if not isinstance(error, Exception):
                raise
            log.error("store.failed", extra={"fields": {"error": str(error), "group": len(batch)}})
            if not _is_passing(error):
                link.drop()

    async def _commit(self, link: _Link, batch: Sequence[Pending]) -> None:
        """Write a group; when one of its rows is to blame, find it by halving, so that only its sender fails."""
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
                refuse(batch, _unavailable(error))
                return
        else:
            answer(batch, outcome)
            self._line.watch("commit", clock.perf() - started)
            if due:
                self._line.made_due(due)  # after the commit, never inside it: NOTIFY there would serialise all commits
            return
        middle = len(batch) // 2
        async with link.haste(needed=blame is _Blame.lock):
            await self._commit(link, batch[:middle])
            await self._commit(link, batch[middle:])

    def cut(self) -> None:
        """End now what this writer waits for, whatever the server does."""
        if self._link is not None:
            self._link.cut()


class _Link:
    """One connection in autocommit, and the counters' slot that it alone writes."""

    def __init__(self, connection: Connection, slot: int, line: GroupCommit) -> None:
        self._connection = connection
        self._cursor = psycopg.AsyncRawCursor(connection)
        self._slot = slot
        self._line = line
        self._hasty = False

    @property
    def descriptor(self) -> int:
        return self._connection.pgconn.socket

    def is_open(self) -> bool:
        return not self._connection.closed

    async def write(self, batch: Sequence[Pending]) -> tuple[list[list[Verdict]], Sequence[int]]:
        """Commit a group: one call; the verdicts, and for which destinations something has become due.

        Raises without having written, unless the connection broke.
        """
        intakes = [pending.intake for pending in batch]
        faults.point("before_intake")
        reserved = Reserved(self._line.taker(), self._line.sources, intakes)
        try:
            answered = read_answer(await self._send(intakes, reserved))
        except BaseException:
            reserved.give_up()
            raise
        faults.point("after_intake")
        reserved.begin(answered.leased, answered.at)
        outcome = verdicts(intakes, answered)
        _mark_repeated(intakes, answered.same_as)
        self._line.familiar.note(intakes, outcome)
        return outcome, answered.made_due

    async def _send(self, intakes: Sequence[Intake], reserved: Reserved) -> list[Any]:
        await self._bind(intakes)
        bare = self._line.familiar.among(intakes)
        try:
            return await self._keep(intakes, bare, reserved)
        except psycopg.IntegrityError:
            if not bare:
                raise
        self._line.familiar.forget()
        return await self._keep(intakes, (), reserved)

    async def _keep(self, intakes: Sequence[Intake], bare: Collection[bytes], reserved: Reserved) -> list[Any]:
        rows, parameters = _rows(intakes, self._line.cipher, bare, self._slot, reserved)
        if rows.proven:
            return await self._execute(INTAKE_PROVEN, parameters)
        return await self._execute(INTAKE, parameters)

    async def _bind(self, intakes: Sequence[Intake]) -> None:
        """Look up the keys of what was signed before, where it is one event whatever its key.

        Of two that come at once through different processes neither is seen here: the later one is only marked.
        """
        bound = [item.proof for intake in intakes for item in intake.items if item.is_bound]
        if bound:
            bind(intakes, dict(await self._execute(PROOFS, [Ids(bound)])))

    async def _execute(self, statement: str, parameters: Sequence[object]) -> list[Any]:
        guard = asyncio.get_running_loop().call_later(self._line.timeouts.silence, self.cut)
        try:
            await self._cursor.execute(statement, parameters, prepare=True, binary=True)
            return await self._cursor.fetchall()
        finally:
            guard.cancel()

    @contextlib.asynccontextmanager
    async def haste(self, *, needed: bool) -> AsyncIterator[None]:
        """While the parts of a group that met a lock are tried, wait less for each."""
        if not needed or self._hasty:
            yield
            return
        await self._connection.execute("SELECT set_config('lock_timeout', $1, false)", [HASTE])
        self._hasty = True
        try:
            yield
        except BaseException:
            self.drop()  # it would stay hasty
            raise
        self._hasty = False
        patience = milliseconds(self._line.timeouts.lock)
        await self._connection.execute("SELECT set_config('lock_timeout', $1, false)", [patience])

    @contextlib.contextmanager
    def listening(self, rest: asyncio.Future[None]) -> Iterator[None]:
        """While inside, `rest` is resolved when the server goes away."""
        loop, descriptor = asyncio.get_running_loop(), self.descriptor
        listens = True

        def hear() -> None:
            """The server spoke without being asked."""
            nonlocal listens
            # libpq closes a socket that it finds dead, and a moment later its number may be that of an arrival's
            # connection, which nobody may stop watching but its owner: so let go of it first.
            loop.remove_reader(descriptor)
            listens = is_alive(self._connection)
            if listens:
                loop.add_reader(descriptor, hear)
            elif not rest.done():
                rest.set_result(None)

        loop.add_reader(descriptor, hear)
        try:
            yield
        finally:
            if listens:
                loop.remove_reader(descriptor)

    def cut(self) -> None:
        """End a statement that waits for its answer."""
        cut(self._connection)

    def drop(self) -> None:
        """Let go of the connection without a word: it may no longer hear one."""
        self._connection.pgconn.finish()


class _UnfitError(Exception):
    """An intake that cannot even be sent: a lone surrogate, an id of the wrong length."""


class _Blame(Enum):
    row = auto()
    lock = auto()
    store = auto()


def _blame(error: Exception) -> _Blame:
    """Who is to blame: one of the rows, a foreign transaction that holds one, or the store as a whole."""
    state = error.sqlstate or "" if isinstance(error, psycopg.Error) else "22"
    if state == "55P03":
        return _Blame.lock
    # 22: data exceptions, 23: constraints, 54: limits, such as an index row that is too long
    return _Blame.row if state[:2] in ("22", "23", "54") else _Blame.store


def _is_passing(error: Exception) -> bool:
    """The connection is as good as before: 40 deadlock, serialisation; 53 resources; 55 locks. Else open a new one."""
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in ("40", "53", "55")


def _unavailable(error: BaseException) -> StoreUnavailable:
    failure = StoreUnavailable(f"The store could not write: {error}")
    failure.__cause__ = error
    return failure


def _mark_repeated(intakes: Sequence[Intake], same_as: Mapping[bytes, bytes]) -> None:
    """Mark the items of which the store has said so."""
    for item in [item for intake in intakes for item in intake.items] if same_as else ():
        if item.event_id in same_as:
            item.same_as = same_as[item.event_id]
            item.marks |= Mark.same_body


def _rows(
    intakes: Sequence[Intake], cipher: Cipher, bare: Collection[bytes], slot: int, reserved: Reserved
) -> tuple[Rows, Sequence[object]]:
    try:
        rows = Rows(intakes, cipher, bare, reserved)
        return rows, rows.parameters(slot)
    except Exception as error:
        raise _UnfitError(str(error)) from error
