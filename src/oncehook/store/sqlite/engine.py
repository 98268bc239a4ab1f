"""The inbox in one SQLite file, behind the verbs of `Store`, for any number of processes on one machine.

The process that holds the file's lock is its owner: its `writer` commits what `intake`, `queue`, `admin` and `upkeep`
write. Every other process is a client (`client`), which has the owner (`owner`) run each verb that writes; where the
owner goes, one of them takes its place. Reads go to the file, in every process, on threads of its own (`read`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from pathlib import Path
from typing import Final, Literal, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from oncehook import __version__, clock, faults
from oncehook.errors import ConfigError, OncehookError, StoreHeld, StoreUnavailable
from oncehook.logs import ration
from oncehook.model import (
    Allowance,
    ArchivedEvent,
    BreakerChange,
    ChartMark,
    DefinitionChanges,
    DefinitionWrite,
    Engine,
    EraseOrder,
    Erasure,
    EventId,
    Expired,
    Filter,
    Intake,
    Lease,
    LeaseRequest,
    LimitRequest,
    PlanSnapshot,
    Pruned,
    Rejection,
    ReplayCommand,
    ReplayState,
    SchemaState,
    Settle,
    Settled,
    Settlement,
    StoredDefinition,
    StoredMedia,
    StoredReplay,
    StoredSession,
    StoredWorker,
    Verdict,
)
from oncehook.store import migrate as migrations
from oncehook.store.base import (
    KEPT_REJECTIONS,
    BlockingTransaction,
    NameIds,
    Pending,
    Reserved,
    StoreObserver,
    Timeouts,
    Transaction,
    answer,
    refuse,
)
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import admin, definitions, queue, upkeep, wire
from oncehook.store.sqlite.client import HeartbeatClient, StoreClient, connect_to_owner
from oncehook.store.sqlite.connection import (
    Hold,
    Micros,
    Presence,
    StoreClock,
    connect,
    connect_beside,
    count,
    disconnect,
    micros,
    moment,
    opening_errors,
    prepare_folder,
    to_micros,
    transaction,
    version,
    warn_of_old_library,
    write_audit,
)
from oncehook.store.sqlite.intake import find_kept, import_keys
from oncehook.store.sqlite.owner import OwnerServer
from oncehook.store.sqlite.read import SqliteReader, read_name_ids
from oncehook.store.sqlite.wire import Greeting, Moved, verb
from oncehook.store.sqlite.writer import EffectFailed, Loan, Writer

log = logging.getLogger("oncehook.store")
T = TypeVar("T")
P = ParamSpec("P")

JOIN_PAUSE: Final = (0.01, 0.05)
"""Seconds between two looks for an owner, at least and at most."""
EMPTY_LOG_TRIES: Final = 100
EMPTY_LOG_WAIT: Final = 0.05
"""Seconds between two tries to empty the log. Readers are done in milliseconds; a backup or an export may take long."""


class SettlementResult(msgspec.Struct):
    """Outcome of a group of settlements."""

    ours: set[int]
    """The fences that were still held."""
    next: list[Lease]
    verdicts: list[Verdict | None]
    """On what they emit, in their order."""
    replays: list[bytes]
    """Those that have ended with them."""
    breakers: list[BreakerChange]
    """Those that have opened or closed with them."""


class OwnerReports(StoreObserver):
    """Reports of the writer to the observer of its own store, and wake-ups to clients, too."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def note_commit(self, operation: str, seconds: float) -> None:
        self._store.observer.note_commit(operation, seconds)

    def wake(self, destination_ids: Collection[int] | None) -> None:
        self._store.observer.wake(destination_ids)
        if self._store.server is not None:
            self._store.server.wake(destination_ids)

    def note_definitions(self, changes: DefinitionChanges) -> None:
        self._store.definitions = replace(changes, since=changes.version, changed=())
        self._store.observer.note_definitions(changes)
        if self._store.server is not None:
            self._store.server.note_definitions(changes)


class SqliteStore(SqliteReader):
    """See `Store`. `path` is the database file; its folder is created where it is missing."""

    engine = Engine.sqlite
    embedded = True
    lends_transactions = False

    def __init__(
        self,
        path: str | Path,
        *,
        cipher: Cipher | None = None,
        max_waiting: int = 5000,
        max_waiting_bytes: int = 64 << 20,
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__(Path(path), cipher or Cipher())
        self.observer = StoreObserver()
        self.hold: Hold | None = None
        self.server: OwnerServer | None = None
        """Serves the clients, while this process owns the file."""
        self._file = self.path.absolute()
        self._timeouts = timeouts or Timeouts()
        self._reports = OwnerReports(self)
        self._writer = Writer(
            self._file,
            self.cipher,
            self._reports,
            lambda intakes: Reserved(self.observer.taker, self._source_names, intakes),
            self._begin_leased,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            timeouts=timeouts,
        )
        self.client = StoreClient(
            lambda destination_ids: self.observer.wake(destination_ids),
            lambda seconds: self.observer.note_commit("commit", seconds),
            lambda changes: self.observer.note_definitions(changes),
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            patience=self._timeouts.connect,
        )
        self._heartbeat_client = HeartbeatClient(self._file, lambda: self._greeting("heartbeat"))
        self._heartbeats = queue.Heartbeats()
        self._rounds: queue.Rounds = {}
        self._presence: Presence | None = None
        self._standby: asyncio.Task[None] | None = None
        self._announced = ("", "")
        self._worker: str | None = None
        """Id of the worker in this process."""
        self._lent: sqlite3.Connection | None = None
        # Of its own: while handlers keep all others busy, the file must not be without an owner, nor lent for long.
        self._thread: ThreadPoolExecutor | None = None
        """Runs what waits for the file's lock or for the owner, while it is open."""
        self._giving_back: set[asyncio.Future[Settled]] = set()
        self._source_names: dict[int, str] = {}
        self._pruning = upkeep.Pruning()
        self.definitions = DefinitionChanges(0, 0, 0)
        """The version of the stored definitions, in the owner; every client is told when it joins."""

    # -- opening and closing -------------------------------------------------------------------

    async def open(self, observer: StoreObserver | None = None, *, migrate: bool = True, write: bool = True) -> None:
        self.observer = observer or self.observer
        if not write:
            if not self.path.exists():
                raise StoreUnavailable(f"There is no store at {self.path} yet.", hint="Start `oncehook serve` once.")
            self.client.close(StoreHeld("The store is open for reading only."))
            await self.read(lambda c: migrations.steps_from(Engine.sqlite, version(c), migrate=False))
            return
        with opening_errors(self.path):
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="oncehook-file")
            await self._on_thread(self._prepare_files)
        self.client.open(self.observer.receiver_count)
        try:
            await self._join(migrate=migrate)
        except BaseException:
            self.client.close()
            self._let_go()
            raise
        if not self.owns:
            self._standby = asyncio.create_task(self._stand_by(), name="oncehook-standby")

    def _prepare_files(self) -> None:
        prepare_folder(self._file)
        self._presence = Presence(self._file)

    @property
    def owns(self) -> bool:
        """True while this process owns the file."""
        return self._writer.is_started

    @property
    def is_alone(self) -> bool:
        return self.owns and self._presence is not None and self._presence.is_alone()

    @property
    def owner(self) -> int | None:
        return os.getpid() if self.owns else self.client.pid or None

    async def _join(self, *, migrate: bool) -> None:
        """Own the file, or become a client of whoever does. Raises StoreHeld where neither can be had for a while."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._timeouts.connect
        while True:
            try:
                return await self._own(migrate=migrate)
            except StoreHeld as held:
                refusal = held
            try:
                return await self._follow()
            except (OSError, ConfigError) as error:
                refusal.__cause__ = error
            except StoreHeld as refused:
                refusal = refused
            if loop.time() > ends_at:
                raise refusal
            await asyncio.sleep(clock.chance.uniform(*JOIN_PAUSE))

    async def _stand_by(self) -> None:
        """Find the next owner each time that one goes, or become it."""
        while not self.owns:
            await self.client.lost.wait()
            try:
                if not self.observer.acts_only:
                    with suppress(StoreHeld):
                        await self._own(migrate=False)
                        return
                await self._follow()
            except (OSError, OncehookError) as error:
                self.client.give_up()
                ration.log(log, logging.WARNING, "store.no_owner", {"error": str(error)}, kind="owner")
                await asyncio.sleep(clock.chance.uniform(*JOIN_PAUSE))
            else:
                log.info("store.followed", extra={"fields": {"pid": self.client.pid}})
                self.observer.wake(None)

    async def _follow(self) -> None:
        """Become a client of the owner. Raises OSError where nobody answers, StoreHeld where it refuses."""
        patience = float(self._timeouts.connect)
        connecting = self._on_thread(connect_to_owner, self._file, self._greeting(), patience)
        try:
            connected, welcome = await asyncio.shield(connecting)
        except asyncio.CancelledError:  # it closes, and the thread may connect yet
            connecting.add_done_callback(_disconnect_unused)
            raise
        await self.client.follow(connected, welcome)

    def _on_thread(self, function: Callable[P, T], *arguments: P.args, **_: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _greeting(self, role: Literal["client", "command", "heartbeat"] = "client") -> Greeting:
        if role == "client" and self.observer.acts_only:
            role = "command"
        return Greeting(
            wire.PROTOCOL,
            migrations.latest(Engine.sqlite),
            __version__,
            wire.key_of(self.cipher),
            os.getpid(),
            role,
            self.observer.works,
            self._worker,
            {} if role == "heartbeat" else self._heartbeats.left(self.now()),
        )

    async def _own(self, *, migrate: bool) -> None:
        """Take the file's lock and write to it from here on. Raises StoreHeld where another process has it."""
        with opening_errors(self.path):
            preparing = asyncio.ensure_future(self._on_thread(self._prepare, migrate))
            try:
                self.hold = await asyncio.shield(preparing)
            except asyncio.CancelledError:  # it closes: what is half taken is taken, and let go of as a whole
                with suppress(OncehookError, OSError, sqlite3.Error):  # nothing was taken
                    self.hold = await preparing
                    self._writer.start()
                raise
        self._writer.start()
        try:
            self.server = self._listen()
        except (OSError, ConfigError) as error:
            log.warning("store.no_clients", extra={"fields": {"error": str(error)}})
        self.observer.note_definitions(self.definitions)  # before anything that it has not answered yet is decided
        moved = self.client.move()
        if self._standby is not None:
            log.warning("store.owned", extra={"fields": {"pid": os.getpid(), "arrivals": len(moved)}})
        if moved:
            await self._take_over(moved)
        self.observer.wake(None)

    def _prepare(self, migrate: bool) -> Hold:
        hold = Hold(self._file, tries=1)
        assert self._presence is not None
        grace = 0.0 if self._presence.is_alone() else self._timeouts.takeover

        def adopt(connection: sqlite3.Connection, now: Micros) -> None:
            queue.adopt_leases(connection, now, self._heartbeats, now + micros(grace))
            known = read_name_ids(connection)
            self._source_names.update({number: name for name, number in known.sources.items()})
            changes = definitions.definition_changes(connection, -1)
            self.definitions = replace(changes, since=changes.version)

        try:
            self._writer.prepare(migrate=migrate, first=adopt)
            hold.announce(*self._announced)
        except BaseException:
            hold.release()
            raise
        return hold

    def _listen(self) -> OwnerServer:
        return OwnerServer(
            self, wire.listen(self._file), schema=migrations.latest(Engine.sqlite), key=wire.key_of(self.cipher)
        )

    async def _take_over(self, moved: Sequence[Pending]) -> None:
        """Record what this process had sent to the last owner, or was about to."""
        try:
            kept = await self.find_kept([pending.intake for pending in moved])
        except StoreUnavailable as error:
            refuse(moved, error)
            return
        for pending, verdicts in zip(moved, kept, strict=True):
            if verdicts is None:
                self._writer.take(pending)
            else:
                answer([pending], [verdicts])

    def announce(self, address: str, token: str) -> None:
        self._announced = (address, token)
        if self.hold is not None:
            self.hold.announce(address, token)

    def free_disk(self) -> float | None:
        usage = shutil.disk_usage(self.path.parent)
        return usage.free / usage.total

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path.parent).free

    def warning(self) -> str | None:
        return warn_of_old_library()

    def _let_go(self) -> None:
        if self.hold is not None:
            wire.socket_path(self._file).unlink(missing_ok=True)
        for lock in (self.hold, self._presence):
            if lock is not None:
                lock.release()
        self.hold = self._presence = None
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def close(self) -> None:
        if not self.owns:
            await self._leave()
        # Readers first: the last connection to close removes the log, and that must be the writer's.
        await asyncio.to_thread(self.stop_reading)
        if self._lent is not None:
            disconnect(self._lent)
        if self.server is not None:
            await self.server.stop_taking(self._timeouts.close)
        was_client = not self.owns and self._presence is not None
        self.client.close()
        await self._writer.close()
        if self.server is not None:
            await self.server.close()
            self.server = None
        if was_client and not self.observer.acts_only:
            await self._on_thread(self._tidy_up)
        self._heartbeat_client.close()
        self._let_go()

    async def _leave(self) -> None:
        """Wait for what the owner still has to answer, also for the next one; then be nobody's client."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.close):
                await self.client.wait_until_idle()
        if self._standby is not None:
            self._standby.cancel()
            await asyncio.wait([self._standby])

    def _tidy_up(self) -> None:
        """Fold the log into the file where no owner is left to do that."""
        with suppress(OncehookError, OSError, sqlite3.Error):
            hold = Hold(self._file, tries=1)
            try:
                disconnect(connect(self._file, self.cipher))
            finally:
                hold.release()

    # -- intake --------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        return self._writer.record(intake) if self.owns else self.client.record(intake)

    async def find_kept(self, intakes: Sequence[Intake]) -> list[list[Verdict] | None]:
        """Return the verdicts on intakes that an owner before has kept; None for the others. For the owner."""
        return await self._writer.call(lambda c, _: find_kept(c, intakes))

    @verb()
    async def record_rejections(
        self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, int, str], int]
    ) -> None:
        def write(connection: sqlite3.Connection, now: Micros) -> None:
            (last,) = connection.execute("SELECT value FROM marks WHERE name = 'rejection'").fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO rejections (slot, n, source, at, code, reason, peer, size, id, head, body)"
                " VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                [
                    (
                        *(n % KEPT_REJECTIONS, n, r.source, to_micros(r.at), r.code, r.reason, r.peer, r.size, r.id),
                        *self.cipher.encrypt_rejection(r),
                    )
                    for n, r in enumerate(rejections, last + 1)
                ],
            )
            connection.execute("UPDATE marks SET value = ? WHERE name = 'rejection'", (last + len(rejections),))
            count(connection, now, counts)

        await self._writer.call(write)

    @verb()
    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        def write(connection: sqlite3.Connection, now: Micros) -> int:
            added = import_keys(connection, now, source_id, hashes, keep)
            name = connection.execute("SELECT name FROM sources WHERE id = ?", (source_id,)).fetchone()[0]
            write_audit(connection, now, actor, "import", name, {"keys": len(hashes), "new": added})
            return added

        return await self._writer.call(write)

    def now(self) -> Micros:
        if self.owns:
            return self._writer.now()
        return super().now() if self.client.clock is None else self.client.clock.now()

    @property
    def clock(self) -> StoreClock:
        return self._writer.clock

    # -- work ----------------------------------------------------------------------------------

    def _begin_leased(self, reserved: Reserved, leased: Mapping[bytes, int], now: Micros) -> None:
        for delivery_id, fence in leased.items():
            self._heartbeats.begin(fence, now + micros(reserved.seconds[delivery_id]))
        reserved.begin(leased, moment(now))

    async def lease(self, wants: Sequence[LeaseRequest], worker: str | None = None) -> list[Lease]:
        leasing = asyncio.ensure_future(self._lease(wants, worker))
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            # The caller was cancelled, but the leases may be committed: nothing crashed, so release them.
            leasing.add_done_callback(self._give_back)
            raise

    async def _lease(self, wants: Sequence[LeaseRequest], worker: str | None) -> list[Lease]:
        self._worker = worker
        leases, taken_over = await self.lease_due(wants, worker)
        self._hold_leases(leases)
        for expired in taken_over:
            self.observer.note_expired(expired)
        return leases

    def _hold_leases(self, leases: Sequence[Lease]) -> None:
        """Note, in a client, what its worker holds: the next owner is told."""
        if not self.owns:
            now = self.now()
            for lease in leases:
                self._heartbeats.begin(lease.fence, now + micros(lease.seconds))

    @verb(repeats=True)
    async def lease_due(self, wants: Sequence[LeaseRequest], worker: str | None) -> tuple[list[Lease], list[Expired]]:
        """Lease what may be leased now; returns the leases, and those that were taken over from others."""

        def write(connection: sqlite3.Connection, now: Micros) -> tuple[list[Lease], list[Expired]]:
            leasing = queue.Leasing(connection, now, self._heartbeats, self.cipher, worker, rounds=self._rounds)
            return leasing.lease(wants), leasing.expired

        return await self._writer.call(write)

    def _give_back(self, leasing: asyncio.Future[list[Lease]]) -> None:
        if leasing.cancelled() or leasing.exception() is not None or not leasing.result():
            return
        releases = [Settlement(lease, Settle.release) for lease in leasing.result()]
        giving = asyncio.ensure_future(self.settle(releases))
        self._giving_back.add(giving)
        giving.add_done_callback(self._end_giving_back)

    def _end_giving_back(self, giving: asyncio.Future[Settled]) -> None:
        self._giving_back.discard(giving)
        if not giving.cancelled() and (error := giving.exception()) is not None:
            log.warning("store.leases_not_given_back", extra={"fields": {"error": str(error)}})

    @verb(repeats=True)
    async def allow(self, wants: Sequence[LimitRequest], worker: str) -> list[Allowance]:
        return await self._writer.call(
            lambda c, now: queue.Limiting(c, now, self._heartbeats, self.cipher, worker).allow(wants)
        )

    def renew(self, leases: Sequence[Lease], worker: str | None = None) -> set[int]:
        # Places need no renewal beside leases: where they have run out, leases under way count.
        seconds = {lease.fence: lease.seconds for lease in leases}
        if self.owns:
            return self.renew_fences(seconds)
        patience = max(self._timeouts.heartbeat, min(seconds.values(), default=0.0) / 6)
        ours = self._heartbeat_client.renew(seconds, patience)
        self._heartbeats.end(seconds.keys() - ours)
        self._heartbeats.renew({fence: seconds[fence] for fence in ours}, self.now())
        return ours

    def renew_fences(self, seconds: Mapping[int, float]) -> set[int]:
        """Prolong leases, in the owner, on any thread; returns the fences that are still held."""
        if not self.owns:
            raise StoreUnavailable("The store is not open for writing.")
        return self._heartbeats.renew(seconds, self._writer.now())

    async def resume_leases(self, worker: str, held: Mapping[int, float]) -> None:
        """Let the worker of a client that has come back go on with what it holds. For the owner."""
        is_due = await self._writer.call(lambda c, now: queue.resume_leases(c, now, self._heartbeats, worker, held))
        if is_due:
            self._reports.wake(None)

    async def expire_leases(self, worker: str) -> None:
        """Take over the leases of a client that has gone, unless it comes back in time. For the owner."""
        grace = micros(self._timeouts.takeover)
        await self._writer.call(
            lambda c, now: queue.expire_leases(c, self._heartbeats, worker, now + grace), wakes=True
        )

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        if self.owns:
            result = await self.settle_leases(settlements, worker)
        elif any(one.commit is not None for one in settlements):
            result = await self._settle_beside(settlements, worker)
        else:
            light = [replace(one, lease=one.lease.without_payload()) for one in settlements]
            result = await self.settle_leases(light, worker)
        self._heartbeats.end(settlement.lease.fence for settlement in settlements)
        self._hold_leases(result.next)
        emits = [emission for settlement in settlements for emission in settlement.emits]
        for emission, verdict in zip(emits, result.verdicts, strict=True):
            emission.verdict = verdict
        await self._note_finished(result.replays)
        for change in result.breakers:
            self.observer.note_breaker(change)
        return Settled(result.ours, result.next)

    @verb(repeats=True)
    async def settle_leases(
        self, settlements: Sequence[Settlement], worker: str | None, again: bool = False
    ) -> SettlementResult:
        """End these leases. `again`: an owner before may have ended them already, and died before it could tell."""
        settling: queue.SettlementRound | None = None

        def write(connection: sqlite3.Connection, now: Micros) -> SettlementResult:
            nonlocal settling
            settling = queue.SettlementRound(connection, now, self._heartbeats, self.cipher, worker)
            result = _result_of(settlements, settling, settling.settle(settlements))
            if again:
                settling.recall(settlements, result.ours)
                result.verdicts = _verdicts_on(settlements)
            return result

        goes_on = any(one.take_next is not None for one in settlements)
        result = await self._writer.call(write, is_followed=goes_on)
        assert settling is not None
        self._heartbeats.end(settlement.lease.fence for settlement in settlements)
        if settling.made_due:
            self._reports.wake(settling.made_due)
        return result

    # -- the write lock, lent to a client ------------------------------------------------------

    async def lend(self) -> Loan:
        """Lend the write lock to a client. For the owner."""
        return await self._writer.lend()

    async def _settle_beside(self, settlements: Sequence[Settlement], worker: str | None) -> SettlementResult:
        """Settle in a transaction of this process, because an effect cannot travel: the owner lends the write lock."""
        while not self.owns:
            try:
                number, mark, now = await self.client.borrow()
            except Moved:
                continue
            try:
                due, result = await self._on_thread(self._write_lent, settlements, worker, mark, now)
                began = {lease.fence: lease.seconds for lease in result.next}
                ended = [settlement.lease.fence for settlement in settlements]
                with suppress(StoreUnavailable):  # it is committed: a later owner reads it in the file
                    await self.note_lent(began, ended, due)
                return result
            finally:
                await self.client.give_back(number)
        return await self.settle_leases(settlements, worker)

    def _write_lent(
        self, settlements: Sequence[Settlement], worker: str | None, mark: Micros, now: Micros
    ) -> tuple[list[int], SettlementResult]:
        try:
            connection = self._lent = self._lent or connect_beside(self._file, self.cipher)
            with transaction(connection):
                (found,) = connection.execute("SELECT value FROM marks WHERE name = 'clock'").fetchone()
                if found != mark:
                    raise StoreUnavailable("The write lock was lent for too short a time.")
                settling = queue.SettlementRound(connection, now, self._heartbeats, self.cipher, worker)
                settled = settling.settle(settlements)
                connection.execute("UPDATE marks SET value = ? WHERE name = 'clock'", (now,))
        except EffectFailed as failure:
            raise failure.error from None
        except sqlite3.Error as error:
            if self._lent is not None:  # whatever it is, the next one gets a connection that it can trust
                disconnect(self._lent)
                self._lent = None
            raise StoreUnavailable(f"The store could not write: {error}") from error
        return list(settling.made_due), _result_of(settlements, settling, settled)

    @verb(repeats=True)
    async def note_lent(self, began: Mapping[int, float], ended: Sequence[int], made_due: Sequence[int]) -> None:
        """Note what a client has settled in a transaction of its own."""
        for fence, seconds in began.items():
            self._heartbeats.begin(fence, self._writer.now() + micros(seconds))
        self._heartbeats.end(ended)
        if made_due:
            self._reports.wake(made_due)

    async def _note_finished(self, replays: Sequence[bytes]) -> None:
        for replay_id in replays:
            # They are finished whatever happens here.
            with suppress(StoreUnavailable):
                if (finished := await self.get_replay(replay_id)) is not None:
                    self.observer.note_finished(finished)

    async def record_in(self, tx: object, intake: Intake) -> list[Verdict]:
        raise _no_transaction()

    def record_in_blocking(self, tx: object, intake: Intake) -> list[Verdict]:
        raise _no_transaction()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        raise _no_transaction()

    def blocking_transaction(self) -> AbstractContextManager[BlockingTransaction]:
        raise _no_transaction()

    # -- acts ----------------------------------------------------------------------------------

    @verb()
    async def make_replay(self, replay_id: bytes, order: ReplayCommand) -> StoredReplay:
        # The deliveries of a bulk replay are selected beside the writer, because that may take long. What has changed
        # by the time it is written is left out.
        decrypts = self.cipher.has_keys
        meant = await self.read(lambda c: admin.select_replayed(c, order, decrypts=decrypts)) if order.bulk else None
        return await self._writer.call(lambda c, now: admin.Replaying(c, now).make(replay_id, order, meant), wakes=True)

    async def feed_replays(self, open_at_most: int = 500) -> int:
        fed, finished = await self.feed(open_at_most)
        await self._note_finished(finished)
        return fed

    @verb(repeats=True)
    async def feed(self, open_at_most: int) -> tuple[int, list[bytes]]:
        """Feed replays; returns how many deliveries were fed, and the replays that have ended."""

        def write(connection: sqlite3.Connection, now: Micros) -> tuple[int, list[bytes]]:
            replaying = admin.Replaying(connection, now)
            return replaying.feed(open_at_most), replaying.finished

        return await self._writer.call(write, wakes=True)

    async def set_replay_state(self, replay_id: bytes, state: ReplayState, actor: str) -> StoredReplay:
        changed = await self.change_replay(replay_id, state, actor)
        if state is ReplayState.aborted:
            self.observer.note_finished(changed)
        return changed

    @verb()
    async def change_replay(self, replay_id: bytes, state: ReplayState, actor: str) -> StoredReplay:
        return await self._writer.call(
            lambda c, now: admin.set_replay_state(c, now, replay_id, state, actor), wakes=True
        )

    @verb()
    async def retry_now(self, delivery_id: bytes, actor: str) -> None:
        await self._writer.call(lambda c, now: admin.retry_now(c, now, delivery_id, actor), wakes=True)

    @verb()
    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        ids = await self.read(lambda c: admin.select_dead(c, filter, decrypts=self.cipher.has_keys))
        return await self._writer.call(lambda c, now: admin.discard(c, now, ids, actor, reason, seen), wakes=True)

    async def erase(self, order: EraseOrder, limit: int = 100) -> Erasure:
        erased, finished = await self.erase_batch(order, limit)
        await self._note_finished(finished)
        return erased

    @verb(repeats=True)
    async def erase_batch(self, order: EraseOrder, limit: int) -> tuple[Erasure, list[bytes]]:
        """Erase one batch; returns what went, and the replays that have ended with it."""
        batch = await self._writer.call(lambda c, now: admin.ErasureRound(c, now, order).erase(limit), wakes=True)
        self._heartbeats.end(batch.fences)
        return batch.erased, list(batch.finished)

    @verb(repeats=True)
    async def empty_log(self) -> None:
        for _ in range(EMPTY_LOG_TRIES):
            if await self._writer.empty_log():
                return
            await asyncio.sleep(EMPTY_LOG_WAIT)
        raise StoreUnavailable(
            "The events are erased, but their text is still in the log: somebody has been reading it for too long.",
            hint="Ask again when the others are done; a stop of the server empties the log, too.",
        )

    async def erasable(self, order: EraseOrder) -> Erasure:
        return await self.read(lambda c: admin.erasable(c, order))

    @verb(repeats=True)
    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        await self._writer.call(lambda c, now: queue.pause(c, now, destination_id, actor, why))

    @verb(repeats=True)
    async def resume(self, destination_id: int, actor: str) -> None:
        await self._writer.call(lambda c, now: admin.resume(c, now, destination_id, actor), wakes=True)

    @verb(repeats=True)
    async def try_now(self, destination_id: int, actor: str) -> bool:
        return await self._writer.call(lambda c, now: admin.try_now(c, now, destination_id, actor), wakes=True)

    @verb()
    async def add_mark(self, text: str, actor: str) -> ChartMark:
        return await self._writer.call(lambda c, now: admin.add_mark(c, now, text, actor))

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        await self.write_audit(actor, act, target, json.dumps(detail, default=str))

    @verb()
    async def write_audit(self, actor: str, act: str, target: str, detail: str) -> None:
        await self._writer.call(lambda c, now: write_audit(c, now, actor, act, target, json.loads(detail)))

    @verb()
    async def write_definition(self, write: DefinitionWrite) -> StoredDefinition | None:
        def change(connection: sqlite3.Connection, now: Micros) -> tuple[StoredDefinition | None, DefinitionChanges]:
            defining = definitions.Defining(connection, now, write)
            return defining.run(), defining.changes()

        made, changes = await self._writer.call(change)
        faults.point("before_definition_notice")
        if made is not None and made.noun == "source":
            self._source_names[made.id] = made.name
        self._reports.note_definitions(changes)
        return made

    async def discard_waiting(self, destination_id: int, before: bytes, reason: str, limit: int = 200) -> int:
        closed, finished = await self.discard_batch(destination_id, before, reason, limit)
        await self._note_finished(finished)
        return closed

    @verb(repeats=True)
    async def discard_batch(
        self, destination_id: int, before: bytes, reason: str, limit: int
    ) -> tuple[int, list[bytes]]:
        """Discard one batch; returns how many, and the replays that have ended with it."""
        batch = await self._writer.call(
            lambda c, now: admin.ClosingRound(c, now, reason).discard_waiting(destination_id, before, limit), wakes=True
        )
        self._heartbeats.end(batch.fences)
        return batch.erased.deliveries, list(batch.finished)

    @property
    def learns_changes(self) -> bool:
        return self.owns or self.client.is_connected

    @verb(repeats=True)
    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        await self._writer.call(lambda c, now: admin.note_settings(c, now, place, digests))

    @verb(repeats=True)
    async def note_token_use(self, name: str) -> None:
        await self._writer.call(lambda c, now: upkeep.note_token_use(c, now, name))

    # -- upkeep --------------------------------------------------------------------------------

    async def register_names(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        known = await self.register(list(sources), list(destinations))
        self._source_names.update({number: name for name, number in known.sources.items()})
        return known

    @verb(repeats=True)
    async def register(self, sources: Sequence[str], destinations: Sequence[str]) -> NameIds:
        """Give every name its id. For the owner it is also the list of names that it knows."""

        def write(connection: sqlite3.Connection, now: Micros) -> NameIds:
            connection.executemany("INSERT OR IGNORE INTO sources (name) VALUES (?)", [(n,) for n in sources])
            connection.executemany("INSERT OR IGNORE INTO destinations (name) VALUES (?)", [(n,) for n in destinations])
            return read_name_ids(connection)

        known = await self._writer.call(write)
        self._source_names.update({number: name for name, number in known.sources.items()})
        return known

    @verb(repeats=True)
    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        await self._writer.call(lambda c, now: admin.note_recipients(c, now, addresses))

    def find_routes_blocking(self, sources: Collection[str]) -> list[StoredDefinition]:
        raise _no_transaction()

    def register_names_blocking(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        raise _no_transaction()

    @verb(repeats=True)
    async def register_worker(self, worker: StoredWorker) -> None:
        await self._writer.call(lambda c, now: upkeep.register_worker(c, now, worker))

    @verb(repeats=True)
    async def dismiss_worker(self, worker_id: str) -> None:
        def write(connection: sqlite3.Connection, now: Micros) -> None:
            connection.execute("DELETE FROM workers WHERE id = ?", (worker_id,))
            connection.execute("DELETE FROM places WHERE worker = ?", (worker_id,))

        await self._writer.call(write)

    @verb(repeats=True)
    async def prune(
        self,
        keep_events: Mapping[int, float],
        otherwise: float,
        limit: int = 500,
        only: Sequence[EventId] | None = None,
    ) -> Pruned:
        return await self._writer.call(lambda c, now: self._pruning.prune(c, now, keep_events, otherwise, limit, only))

    @verb(repeats=True)
    async def keep_media(self, event_id: EventId, media: StoredMedia) -> bool:
        return await self._writer.call(lambda c, now: upkeep.keep_media(c, now, event_id, media))

    async def find_prunable(
        self, source_id: int, keep: float, after: bytes, limit: int
    ) -> tuple[list[EventId], bytes | None]:
        now = self.now()
        return await self.read(lambda c: upkeep.find_prunable(c, now, source_id, keep, after, limit))

    async def read_archivable(self, ids: Sequence[EventId]) -> list[ArchivedEvent]:
        return await self.read(lambda c: upkeep.read_archivable(c, ids))

    @verb()
    async def restore(self, events: Sequence[ArchivedEvent], keep: float, actor: str) -> int:
        def write(connection: sqlite3.Connection, now: Micros) -> int:
            return upkeep.restore(connection, now, events, read_name_ids(connection), keep, actor)

        return await self._writer.call(write)

    @verb(repeats=True)
    async def roll_up(self) -> int:
        return await self._writer.call(upkeep.roll_up)

    @verb()
    async def mark_watermark(self, name: str, crossed: bool) -> bool:
        return await self._writer.call(lambda c, now: upkeep.mark_watermark(c, now, name, crossed))

    @verb()
    async def invalidate_leases(self) -> int:
        ended = await self._writer.call(upkeep.invalidate_leases, wakes=True)
        self._heartbeats.end_all()
        return ended

    @verb()
    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        await self._writer.call(lambda c, now: upkeep.begin_session(c, now, session, seconds, at_most))

    async def get_session(self, hash: bytes) -> StoredSession | None:
        now = self.now()
        return await self.read(lambda connection: upkeep.get_session(connection, now, hash))

    @verb(repeats=True)
    async def end_session(self, hash: bytes) -> None:
        await self._writer.call(lambda c, _: c.execute("DELETE FROM sessions WHERE hash = ?", (hash,)))

    @verb()
    async def take_link(self, hash: bytes, seconds: float) -> bool:
        return await self._writer.call(lambda c, now: upkeep.take_link(c, now, hash, seconds))

    async def inbox_number(self) -> int:
        row = await self.read(lambda c: c.execute("SELECT value FROM marks WHERE name = 'inbox'").fetchone())
        return int(row[0])

    @verb(repeats=True)
    async def ping(self) -> None:
        self._writer.check_space()
        await self._writer.call(lambda connection, now: None)

    async def schema_state(self) -> SchemaState:
        if not self.path.exists():
            return migrations.state(self.engine, 0)
        return await self.read(lambda connection: migrations.state(Engine.sqlite, version(connection)))

    async def size(self) -> int:
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())


def _result_of(
    settlements: Sequence[Settlement], settling: queue.SettlementRound, settled: Settled
) -> SettlementResult:
    return SettlementResult(
        set(settled.ours),
        list(settled.next),
        _verdicts_on(settlements),
        list(settling.replays_done),
        list(settling.breakers),
    )


def _verdicts_on(settlements: Sequence[Settlement]) -> list[Verdict | None]:
    return [emission.verdict for settlement in settlements for emission in settlement.emits]


def _disconnect_unused(connecting: asyncio.Future[tuple[socket.socket, wire.Welcome]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].close()


def _no_transaction() -> ConfigError:
    return ConfigError(
        "SQLite has one writer, and a handler cannot keep it waiting.",
        hint="In a handler, hand your writes to `event.commit(function)` and your events to `event.emit(…)`: they are"
        " committed together with the delivery.",
    )
