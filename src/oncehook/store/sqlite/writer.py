"""Everything that writes to a SQLite store: one connection, one transaction at a time, group commit.

Arrivals gather while a commit runs. When it is done, everything that waits is inserted on the event loop and committed
on a thread, so that a slow disk blocks nobody else; then the arrivals of the last commit are answered. Inserting on a
thread, too, would be slower: at every step SQLite releases the interpreter's lock, and two busy threads would spend
more time handing it over than working. No lock decides anything here: order of commit, order of `seq` and order of
arrival are the same.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from oncehook import clock, faults
from oncehook.errors import OncehookError, Overloaded, StoreError, StoreUnavailable
from oncehook.model import Intake, Verdict
from oncehook.store.base import Pending, Reserved, StoreObserver, Timeouts, answer, refuse
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite.connection import (
    SIZE,
    Micros,
    Reserve,
    StoreClock,
    apply_migrations,
    connect,
    disconnect,
    empty_log,
    is_blocked,
    is_broken,
    is_data_error,
    is_full,
    transaction,
    verify,
)
from oncehook.store.sqlite.intake import IntakeGroup

log = logging.getLogger("oncehook.store")
T = TypeVar("T")
Function = Callable[[sqlite3.Connection, Micros], T]

GROUP_LIMIT: Final = 128
"""Arrivals per commit at most: enough to make the fsync cheap, few enough to keep the loop and the wait short."""

TURNS: Final = 16
"""Turns of the loop for which a group waits for the settlement of an attempt that the last commit let begin: enough for
one that takes no time, and for those that settle with it."""

REOPEN_AFTER: Final = 0.5
"""Seconds between two tries to open a database that failed."""


ReservePlaces = Callable[[Sequence[Intake]], Reserved]
"""Keeps places for what these intakes may cause to be worked on."""

Begin = Callable[[Reserved, Mapping[bytes, int], Micros], None]
"""Called with what of it is leased, by delivery and fence, and when that was committed."""

DISK_FULL: Final = "The disk is full; nothing new is taken in until there is space."


class Call:
    """Any other write: a function of the connection, run in the next group's transaction."""

    __slots__ = ("empties_log", "error", "function", "future", "is_followed", "result", "wakes")

    def __init__(
        self,
        function: Function[Any],
        future: asyncio.Future[Any],
        *,
        wakes: bool = False,
        is_followed: bool = False,
        empties_log: bool = False,
    ) -> None:
        self.function = function
        self.empties_log = empties_log
        self.future = future
        self.wakes = wakes
        self.is_followed = is_followed
        self.result: Any = None
        self.error: BaseException | None = None


class EffectFailed(Exception):
    """An error of a user's function inside a call. The caller gets the original error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Work:
    """A group that is inserted and waits for its commit."""

    __slots__ = ("calls", "intakes", "leased", "made_due", "now", "reserved", "seq", "started", "verdicts", "wakes")

    def __init__(self, intakes: Sequence[Pending], calls: Sequence[Call], now: Micros, seq: int) -> None:
        self.started = clock.perf()
        self.intakes = intakes
        self.calls = calls
        self.now = now
        self.seq = seq
        self.verdicts: list[list[Verdict]] = []
        self.wakes = any(call.wakes for call in calls)
        """Something may be due once this is committed, for any destination."""
        self.made_due: Collection[int] = ()
        self.reserved: Reserved | None = None
        self.leased: Mapping[bytes, int] = {}
        """Deliveries of the intakes that are leased along with them, and their fences."""


class Loan:
    """The write lock, lent to a client for one transaction of its own: this writer does nothing until it is back."""

    __slots__ = ("future", "mark", "now", "over")

    def __init__(self, future: asyncio.Future[Loan]) -> None:
        self.future = future
        """Resolved when it is granted."""
        self.over = threading.Event()
        """Set when it is back, or its borrower has gone."""
        self.mark: Micros = 0
        """Value of the clock in `marks`: where another one is found, the loan has lapsed."""
        self.now: Micros = 0
        """The time of what the borrower writes."""


class Writer:
    """The one writer of a file, on the loop that `start` is called on; all but `prepare` must be called there."""

    def __init__(
        self,
        path: Path,
        cipher: Cipher,
        observer: StoreObserver,
        reserve: ReservePlaces = lambda intakes: Reserved(None, {}, intakes),
        begin: Begin = lambda reserved, leased, now: None,
        *,
        max_waiting: int,
        max_waiting_bytes: int,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._path = path
        self._timeouts = timeouts or Timeouts()
        self._cipher = cipher
        self._observer = observer
        self._reserve_places = reserve
        self._begin = begin
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[Pending] = deque()
        self._waiting_bytes = 0
        self._calls: list[Call] = []
        self._loans: deque[Loan] = deque()
        self._has_lent = False
        """The last turn was a loan: the next one is for what waits."""
        self._is_seq_unsure = False
        """Something was lent, and nothing committed here since: only then its borrower may have drawn numbers."""
        self._halves: deque[list[Pending]] = deque()
        """Parts of a group in which the database refused something: each is tried alone."""
        self._expects_copies = False
        """The last group held some: copies come in storms."""
        self._busy = False
        """A commit is under way, or the next turn is planned already."""
        self._rest = asyncio.Event()
        self._blocked_since: float | None = None
        self.broken: str | None = "The store is not open."
        self._closing = False
        self._reserve = Reserve(path)
        self._is_full = False
        """The disk is full, and the reserve given up: arrivals are refused, so that what makes room has it."""
        self._commits: SimpleQueue[_Work | Loan | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- opening and closing -------------------------------------------------------------------

    def prepare(self, *, migrate: bool, first: Function[None] | None = None) -> None:
        """Open the file and migrate its schema. May take long: call it on a thread.

        `first` runs in a transaction of its own, before anything else writes.
        """
        connection = connect(self._path, self._cipher)
        try:
            apply_migrations(connection, migrate=migrate)
            marks = dict(connection.execute("SELECT name, value FROM marks"))
            self._seq: int = marks["seq"]
            # "Now" starts at the wall clock, or at the last process's time if that is later, and from there only grows:
            # a clock that is set forward and back again freezes nothing (R64).
            self.clock = StoreClock(max(int(clock.now() * 1_000_000), marks["clock"]), clock.held or clock.steady())
            if first is not None:
                with transaction(connection):
                    first(connection, self.now())
            # Waiting for another program's lock happens between turns of the loop, never inside one.
            connection.execute("PRAGMA busy_timeout = 0")
            self._reserve.make()
        except BaseException:
            disconnect(connection)
            raise
        self._connection = connection

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.broken = None
        self._thread = threading.Thread(target=self._commit_until_closed, name="oncehook-commits", daemon=True)
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    async def close(self) -> None:
        if self._thread is None:
            return
        self._closing = True
        if self._busy and self.broken is None:
            await self._rest.wait()
        self._commits.put(None)
        await asyncio.to_thread(self._thread.join)
        self._thread, self.broken = None, "The store is closed."
        disconnect(self._connection)

    def now(self) -> Micros:
        """Return the store's own time: it never runs backward."""
        return self.clock.now()

    # -- joining -------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        """Join the next group. Raises at once when too many wait, or nothing can be written."""
        if self.broken is not None or self._closing or self._is_full:
            self._check()
            self.check_space()
        if len(self._waiting) >= self._max_waiting or self._waiting_bytes > self._max_waiting_bytes:
            raise Overloaded
        pending = Pending(intake, self._loop)
        self.take(pending)
        return pending

    def take(self, pending: Pending) -> None:
        """Have an intake join the next group that waited elsewhere before."""
        self._waiting.append(pending)
        self._waiting_bytes += pending.size
        if not self._busy:
            self._plan_turn()

    async def call(self, function: Function[T], *, wakes: bool = False, is_followed: bool = False) -> T:
        """Run a function inside the next group's transaction, and wait for its commit.

        `wakes`: it may make something due. `is_followed`: the caller is likely to call again at once.
        """
        result: T = await self._join(function, wakes=wakes, is_followed=is_followed)
        return result

    async def empty_log(self) -> bool:
        """Checkpoint the log into the database after the next commit and truncate it; False where a reader still needs
        it."""
        is_empty: bool = await self._join(_nothing, empties_log=True)
        return is_empty

    async def lend(self) -> Loan:
        """Lend the write lock as soon as it is free; returns when it is granted."""
        self._check()
        loan = Loan(self._loop.create_future())
        self._loans.append(loan)
        if not self._busy:
            self._plan_turn()
        return await loan.future

    async def _join(self, function: Function[Any], **marks: bool) -> Any:
        self._check()
        call = Call(function, self._loop.create_future(), **marks)
        self._calls.append(call)
        if not self._busy:
            self._plan_turn()
        return await call.future

    def check_space(self) -> None:
        """Raise StoreUnavailable while nothing new is accepted: what frees space may still be written."""
        if self._is_full:
            raise StoreUnavailable(DISK_FULL)

    def _check(self) -> None:
        if self.broken is not None or self._closing:
            raise StoreUnavailable(self.broken or "The store is closing.")

    # -- a turn: insert on the loop, commit on the thread ----------------------------------------

    def _plan_turn(self) -> None:
        # Not at once: everything that is ready in this turn of the loop joins the same group.
        self._busy = True
        self._rest.clear()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._loans and not self._has_lent:
            self._has_lent = self._is_seq_unsure = True
            self._commits.put(self._loans.popleft())
            return
        self._has_lent = False
        intakes, calls = self._take()
        if not intakes and not calls:
            if self._loans:
                self._turn()
                return
            self._busy = False
            self._rest.set()
            return
        try:
            self._commits.put(self._insert(intakes, calls))
        except Exception as error:  # whatever fails, the next group must be written
            self._roll_back()
            self._recover(intakes, calls, error)

    def _take(self) -> tuple[list[Pending], list[Call]]:
        if self._halves:
            return self._halves.popleft(), []
        intakes: list[Pending] = []
        while self._waiting and len(intakes) < GROUP_LIMIT:
            pending = self._waiting.popleft()
            self._waiting_bytes -= pending.size
            if not pending.abandoned:
                intakes.append(pending)
        calls, self._calls = self._calls, []
        return intakes, calls

    def _insert(self, intakes: Sequence[Pending], calls: Sequence[Call]) -> _Work:
        self._connection.execute("BEGIN IMMEDIATE")
        if self._is_seq_unsure:
            (self._seq,) = self._connection.execute("SELECT value FROM marks WHERE name = 'seq'").fetchone()
        work = _Work(intakes, calls, self.now(), self._seq)
        batch = [pending.intake for pending in intakes]
        if batch:
            work.reserved = self._reserve_places(batch)
        try:
            self._write(work, batch)
        except BaseException:
            if work.reserved is not None:
                work.reserved.give_up()
            raise
        return work

    def _write(self, work: _Work, batch: Sequence[Intake]) -> None:
        if batch:
            group = IntakeGroup(
                *(self._connection, work.now, work.seq, batch, self._cipher),
                expects_copies=self._expects_copies,
                reserved=work.reserved,
            )
            work.verdicts, work.seq = group.write(), group.seq
            self._expects_copies = group.met_copies
            work.made_due, work.leased = group.made_due, group.leased
        self._connection.execute("UPDATE marks SET value = ? WHERE name = 'clock'", (work.now,))
        if work.seq != self._seq:
            self._connection.execute("UPDATE marks SET value = ? WHERE name = 'seq'", (work.seq,))

    def _recover(self, intakes: list[Pending], calls: Sequence[Call], error: Exception) -> None:
        """Write a failed group again, without the item that is to blame."""
        if is_blocked(error) and not self._has_waited_long():
            self._waiting.extendleft(reversed(intakes))
            self._waiting_bytes += sum(pending.size for pending in intakes)
            self._calls[:0] = calls
            self._loop.call_later(0.02, self._turn)
            return
        if is_data_error(error) and len(intakes) > 1:
            middle = len(intakes) // 2
            self._halves.extendleft((intakes[middle:], intakes[:middle]))
            self._calls[:0] = calls
        else:
            self._fail(intakes, calls, error)
        self._go_on()

    def _has_waited_long(self) -> bool:
        self._blocked_since = self._blocked_since or clock.steady()
        return clock.steady() - self._blocked_since > self._timeouts.write_lock

    def _commit_until_closed(self) -> None:
        """Run the calls of each group and commit it, one by one, on the writer's thread."""
        while (work := self._commits.get()) is not None:
            error: Exception | None = None
            if isinstance(work, Loan):
                self._lend(work)
                continue
            try:
                for call in work.calls:
                    run_call(call, self._connection, work.now)
                if work.calls:  # a replay uses sequence numbers, too
                    work.seq = self._connection.execute("SELECT value FROM marks WHERE name = 'seq'").fetchone()[0]
                _pass("before", work)
                self._connection.execute("COMMIT")
                _pass("after", work)
                for call in work.calls:
                    if call.empties_log:
                        call.result = empty_log(self._connection)
                if self._is_full:
                    self._is_full = not self._has_space()
            except Exception as failure:  # whatever fails, this thread must go on
                error = failure
                self._roll_back()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._end_group, work, error)

    def _lend(self, loan: Loan) -> None:
        """Grant a loan and wait, on the writer's thread, until it is back or has lasted long enough.

        A borrower that is late does no harm: what it holds is SQLite's own lock, or it finds that its mark has changed.
        """
        failure: Exception | None = None
        try:
            (loan.mark,) = self._connection.execute("SELECT value FROM marks WHERE name = 'clock'").fetchone()
            loan.now = self.now()
        except sqlite3.Error as error:
            failure = StoreUnavailable(f"The store could not be read: {error}")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_grant, loan, failure)
            if failure is None:
                loan.over.wait(self._timeouts.loan)
            self._loop.call_soon_threadsafe(self._go_on)

    def _end_group(self, work: _Work, error: Exception | None) -> None:
        self._blocked_since = None
        if error is not None:
            if work.reserved is not None:
                work.reserved.give_up()
            self._fail(work.intakes, work.calls, error)
            self._go_on()
            return
        self._seq = work.seq
        self._is_seq_unsure = False
        self._observer.note_commit("commit", clock.perf() - work.started)
        # The next group first: while the disk writes it, the loop answers this one. But a subject that goes on would
        # miss that group each time, and wait for two commits.
        if any(call.is_followed for call in work.calls):
            self._await_call(TURNS)
        else:
            self._turn()
        answer(work.intakes, work.verdicts)
        for call in work.calls:
            _resolve(call)
        if work.reserved is not None:
            self._begin(work.reserved, work.leased, work.now)
        if work.wakes or work.made_due:
            self._observer.wake(None if work.wakes else work.made_due)

    def _await_call(self, turns: int) -> None:
        """Begin the next group when a call waits, or after a number of turns of the loop, whichever comes first."""
        if turns and not self._calls:
            self._loop.call_soon(self._await_call, turns - 1)
        else:
            self._turn()

    def _go_on(self) -> None:
        if self.broken is None:
            self._plan_turn()

    def _fail(self, intakes: Sequence[Pending], calls: Sequence[Call], error: Exception) -> None:
        log.error("store.failed", extra={"fields": {"error": str(error), "group": len(intakes)}})
        failure = StoreUnavailable(f"The store could not write: {error}")
        failure.__cause__ = error
        refuse(intakes, failure)
        for call in calls:
            call.error = failure
            _resolve(call)
        self._blocked_since = None
        if is_full(error):
            self._run_dry()
        if is_broken(error):
            self._break(f"The database failed ({error}); it is being reopened.")

    # -- a full disk -----------------------------------------------------------------------------

    def _run_dry(self) -> None:
        """Give the reserve up, for what frees space; unless there is space after all."""
        self._reserve.give_up()
        if self._reserve.make() or self._is_full:
            return
        self._is_full = True
        log.error("store.disk_full")
        refuse(self._drop_waiting(), StoreUnavailable(DISK_FULL))
        self._loop.call_later(self._timeouts.full_disk, self._look_for_space)

    def _look_for_space(self) -> None:
        """Commit something small, to see whether there is space again."""
        if not self._is_full or self._closing:
            return
        if self.broken is None:
            self._calls.append(Call(_nothing, self._loop.create_future()))
            if not self._busy:
                self._plan_turn()
        self._loop.call_later(self._timeouts.full_disk, self._look_for_space)

    def _has_space(self) -> bool:
        """Tell whether the reserve can be created again, or pruning has freed as much inside the file."""
        (pages,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (page_size,) = self._connection.execute("PRAGMA page_size").fetchone()
        return self._reserve.make() or pages * page_size >= SIZE

    # -- mending -------------------------------------------------------------------------------

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.error("store.rollback_failed", extra={"fields": {"error": str(error)}})

    def _break(self, why: str) -> None:
        """Stop writing. A failed fsync may have lost pages that the cache still shows as clean: do not continue with
        this connection, but reopen it and read what is really on the disk (R59)."""
        self.broken, self._busy = why, False
        self._rest.set()
        refuse(self._drop_waiting(), StoreUnavailable(why))
        for call in self._calls:
            call.error = StoreUnavailable(why)
            _resolve(call)
        self._calls.clear()
        for loan in self._loans:
            _grant(loan, StoreUnavailable(why))
        self._loans.clear()
        self._loop.create_task(self._mend())

    def _drop_waiting(self) -> list[Pending]:
        waiting = [*self._waiting, *(pending for half in self._halves for pending in half)]
        self._waiting.clear()
        self._halves.clear()
        self._waiting_bytes = 0
        return waiting

    async def _mend(self) -> None:
        while self.broken is not None and not self._closing:
            await asyncio.sleep(REOPEN_AFTER)
            try:
                await asyncio.to_thread(self._reopen)
            except Exception as error:
                self.broken = f"The database cannot be opened ({error})."
                log.error("store.broken", extra={"fields": {"error": str(error)}})
            else:
                self.broken = None
                log.warning("store.reopened")

    def _reopen(self) -> None:
        disconnect(self._connection)
        self.prepare(migrate=False)
        verify(self._connection)


def _nothing(connection: sqlite3.Connection, now: Micros) -> None:
    """Write nothing, but commit."""


def _pass(when: str, work: _Work) -> None:
    """Pass named points for tests: every commit, and those with arrivals."""
    faults.point(f"{when}_commit")
    if work.intakes:
        faults.point(f"{when}_intake")


def run_call(call: Call, connection: sqlite3.Connection, now: Micros) -> None:
    """Run one function of the group in a savepoint, so that a failure undoes only itself."""
    connection.execute("SAVEPOINT call")
    try:
        call.result = call.function(connection, now)
    except EffectFailed as failure:
        connection.execute("ROLLBACK TO call")
        call.error = failure.error
    except Exception as error:
        if not isinstance(error, OncehookError) and not is_data_error(error):
            raise
        connection.execute("ROLLBACK TO call")
        call.error = error if isinstance(error, OncehookError) else StoreError(f"The store refused this write: {error}")
    connection.execute("RELEASE call")


def _grant(loan: Loan, failure: Exception | None) -> None:
    if loan.future.done():  # whoever asked has gone
        loan.over.set()
    elif failure is not None:
        loan.future.set_exception(failure)
    else:
        loan.future.set_result(loan)


def _resolve(call: Call) -> None:
    if call.future.done():
        return
    if call.error is None:
        call.future.set_result(call.result)
    else:
        call.future.set_exception(call.error)
        call.future.exception()  # marks the exception as seen: the caller may have gone
