"""The inbox in one SQLite file, behind the verbs of `Store`: one writer, readers beside it, a hold on the file.

`writer` commits what `intake`, `queue`, `admin` and `upkeep` write; `read` reads on threads of its own.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from pathlib import Path
from typing import Final, TypeVar

from oncehook.errors import ConfigError, StoreHeld, StoreUnavailable
from oncehook.model import (
    Engine,
    EraseOrder,
    Erasure,
    Expired,
    Filter,
    Intake,
    Lease,
    LeaseRequest,
    PlanSnapshot,
    Pruned,
    Rejection,
    ReplayCommand,
    ReplayState,
    SchemaState,
    Settle,
    Settled,
    Settlement,
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
)
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import admin, queue, upkeep
from oncehook.store.sqlite.connection import (
    Hold,
    Micros,
    count,
    micros,
    moment,
    opening_errors,
    prepare_folder,
    to_micros,
    version,
    warn_of_old_library,
    write_audit,
)
from oncehook.store.sqlite.intake import import_keys
from oncehook.store.sqlite.read import SqliteReader, read_name_ids
from oncehook.store.sqlite.writer import Writer

log = logging.getLogger("oncehook.store")
T = TypeVar("T")

EMPTY_LOG_TRIES: Final = 100
EMPTY_LOG_WAIT: Final = 0.05
"""Seconds between two tries to empty the log. Readers are done in milliseconds; a backup or an export may take long."""


class SqliteStore(SqliteReader):
    """See `Store`. `path` is the database file; its folder is made when it is not there."""

    engine = Engine.sqlite
    shared = False
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
        self._writer = Writer(
            self.path,
            self.cipher,
            lambda: self.observer,
            lambda intakes: Reserved(self.observer.taker, self._source_names, intakes),
            self._begin_leased,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            timeouts=timeouts,
        )
        self._heartbeats = queue.Heartbeats()
        self._giving_back: set[asyncio.Future[Settled]] = set()
        self._source_names: dict[int, str] = {}
        self._pruning = upkeep.Pruning()

    # -- opening and closing -------------------------------------------------------------------

    async def open(self, observer: StoreObserver | None = None, *, migrate: bool = True, write: bool = True) -> None:
        self.observer = observer or self.observer
        if write:
            with opening_errors(self.path):
                await asyncio.to_thread(self._prepare, migrate)
            self._writer.start()
            return
        if not self.path.exists():
            raise StoreUnavailable(f"There is no store at {self.path} yet.", hint="Start `oncehook serve` once.")
        self._writer = _ReadOnlyWriter(self.path, self.cipher)
        await self.read(lambda c: migrations.steps_from(Engine.sqlite, version(c), migrate=False))

    def _prepare(self, migrate: bool) -> None:
        prepare_folder(self.path)
        if warning := warn_of_old_library():
            log.warning("store.old_library", extra={"fields": {"warning": warning}})
        self.hold = Hold(self.path)
        try:
            self._writer.prepare(migrate=migrate, first=lambda c, now: queue.abandon_leases(c, now, self._heartbeats))
        except BaseException:
            self._let_go()
            raise

    def announce(self, address: str, token: str) -> None:
        if self.hold is not None:
            self.hold.announce(address, token)

    def free_disk(self) -> float | None:
        usage = shutil.disk_usage(self.path.parent)
        return usage.free / usage.total

    def _let_go(self) -> None:
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    async def close(self) -> None:
        # Readers first: the last connection to close tidies up the log, and that must be the one that writes.
        await asyncio.to_thread(self.stop_reading)
        await self._writer.close()
        self._let_go()

    # -- intake --------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        return self._writer.record(intake)

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

        await self._writer.call(write)

    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        def write(connection: sqlite3.Connection, now: Micros) -> int:
            added = import_keys(connection, now, source_id, hashes, keep)
            name = connection.execute("SELECT name FROM sources WHERE id = ?", (source_id,)).fetchone()[0]
            write_audit(connection, now, actor, "import", name, {"keys": len(hashes), "new": added})
            return added

        return await self._writer.call(write)

    def now(self) -> Micros:
        return self._writer.now() if self._writer.is_started else super().now()

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
            # Whoever asked has gone, and the leases may be committed all the same: nobody crashed, so give them back.
            leasing.add_done_callback(self._give_back)
            raise

    async def _lease(self, wants: Sequence[LeaseRequest], worker: str | None) -> list[Lease]:
        def write(connection: sqlite3.Connection, now: Micros) -> tuple[list[Lease], list[Expired]]:
            leasing = queue.Leasing(connection, now, self._heartbeats, self.cipher, worker)
            return leasing.lease(wants), leasing.expired

        leases, taken_over = await self._writer.call(write)
        for expired in taken_over:
            self.observer.note_expired(expired)
        return leases

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

    def renew(self, leases: Sequence[Lease]) -> set[int]:
        if not self._writer.is_started:
            raise StoreUnavailable("The store is not open for writing.")
        return self._heartbeats.renew(leases, self._writer.now())

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        settling: queue.SettlementRound | None = None

        def write(connection: sqlite3.Connection, now: Micros) -> Settled:
            nonlocal settling
            settling = queue.SettlementRound(connection, now, self._heartbeats, self.cipher, worker)
            return settling.settle(settlements)

        goes_on = any(one.take_next is not None for one in settlements)
        settled = await self._writer.call(write, is_followed=goes_on)
        assert settling is not None
        self._heartbeats.end(settlement.lease.fence for settlement in settlements)
        if settling.made_due:
            self.observer.wake(settling.made_due)
        await self._note_finished(settling.replays_done)
        return settled

    async def _note_finished(self, replays: Sequence[bytes]) -> None:
        for replay_id in replays:
            # They are finished whatever becomes of this.
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

    async def make_replay(self, replay_id: bytes, order: ReplayCommand) -> StoredReplay:
        # What a bulk replay means is looked for beside the writer: that may take long. What has moved by the time it
        # is its turn is left out then.
        decrypts = self.cipher.has_keys
        meant = await self.read(lambda c: admin.select_replayed(c, order, decrypts=decrypts)) if order.bulk else None
        return await self._writer.call(lambda c, now: admin.Replaying(c, now).make(replay_id, order, meant), wakes=True)

    async def feed_replays(self, open_at_most: int = 500) -> int:
        def write(connection: sqlite3.Connection, now: Micros) -> tuple[int, list[bytes]]:
            replaying = admin.Replaying(connection, now)
            return replaying.feed(open_at_most), replaying.finished

        fed, finished = await self._writer.call(write, wakes=True)
        await self._note_finished(finished)
        return fed

    async def set_replay_state(self, replay_id: bytes, state: ReplayState, actor: str) -> StoredReplay:
        changed = await self._writer.call(
            lambda c, now: admin.set_replay_state(c, now, replay_id, state, actor), wakes=True
        )
        if state is ReplayState.aborted:
            self.observer.note_finished(changed)
        return changed

    async def retry_now(self, delivery_id: bytes, actor: str) -> None:
        await self._writer.call(lambda c, now: admin.retry_now(c, now, delivery_id, actor), wakes=True)

    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        ids = await self.read(lambda c: admin.select_dead(c, filter, decrypts=self.cipher.has_keys))
        return await self._writer.call(lambda c, now: admin.discard(c, now, ids, actor, reason, seen), wakes=True)

    async def erase(self, order: EraseOrder, limit: int = 100) -> Erasure:
        batch = await self._writer.call(lambda c, now: admin.ErasureRound(c, now, order).erase(limit), wakes=True)
        self._heartbeats.end(batch.fences)
        await self._note_finished(batch.finished)
        return batch.erased

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

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        await self._writer.call(lambda c, now: queue.pause(c, now, destination_id, actor, why))

    async def resume(self, destination_id: int, actor: str) -> None:
        await self._writer.call(lambda c, now: admin.resume(c, now, destination_id, actor), wakes=True)

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        await self._writer.call(lambda c, now: write_audit(c, now, actor, act, target, detail))

    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        await self._writer.call(lambda c, now: admin.note_settings(c, now, place, digests))

    async def note_token_use(self, name: str) -> None:
        await self._writer.call(lambda c, now: upkeep.note_token_use(c, now, name))

    # -- upkeep --------------------------------------------------------------------------------

    async def register_names(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        source_names, destination_names = list(sources), list(destinations)

        def write(connection: sqlite3.Connection, now: Micros) -> NameIds:
            connection.executemany("INSERT OR IGNORE INTO sources (name) VALUES (?)", [(n,) for n in source_names])
            connection.executemany(
                "INSERT OR IGNORE INTO destinations (name) VALUES (?)", [(n,) for n in destination_names]
            )
            return read_name_ids(connection)

        known = await self._writer.call(write)
        self._source_names.update({number: name for name, number in known.sources.items()})
        return known

    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        await self._writer.call(lambda c, now: admin.note_recipients(c, now, addresses))

    def register_names_blocking(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        raise _no_transaction()

    async def register_worker(self, worker: StoredWorker) -> None:
        await self._writer.call(lambda c, now: upkeep.register_worker(c, now, worker))

    async def dismiss_worker(self, worker_id: str) -> None:
        await self._writer.call(lambda c, _: c.execute("DELETE FROM workers WHERE id = ?", (worker_id,)))

    async def prune(self, keep_events: Mapping[int, float], otherwise: float, limit: int = 500) -> Pruned:
        return await self._writer.call(lambda c, now: self._pruning.prune(c, now, keep_events, otherwise, limit))

    async def roll_up(self) -> int:
        return await self._writer.call(upkeep.roll_up)

    async def mark_watermark(self, name: str, crossed: bool) -> bool:
        return await self._writer.call(lambda c, now: upkeep.mark_watermark(c, now, name, crossed))

    async def invalidate_leases(self) -> int:
        ended = await self._writer.call(upkeep.invalidate_leases, wakes=True)
        self._heartbeats.end_all()
        return ended

    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        await self._writer.call(lambda c, now: upkeep.begin_session(c, now, session, seconds, at_most))

    async def get_session(self, hash: bytes) -> StoredSession | None:
        now = self.now()
        return await self.read(lambda connection: upkeep.get_session(connection, now, hash))

    async def end_session(self, hash: bytes) -> None:
        await self._writer.call(lambda c, _: c.execute("DELETE FROM sessions WHERE hash = ?", (hash,)))

    async def inbox_number(self) -> int:
        row = await self.read(lambda c: c.execute("SELECT value FROM marks WHERE name = 'inbox'").fetchone())
        return int(row[0])

    async def ping(self) -> None:
        if not self._writer.is_started:
            raise StoreUnavailable("The store is not open for writing.")
        self._writer.check_space()
        await self._writer.call(lambda connection, now: None)

    async def schema_state(self) -> SchemaState:
        if not self.path.exists():
            return migrations.state(self.engine, 0)
        return await self.read(lambda connection: migrations.state(Engine.sqlite, version(connection)))

    async def size(self) -> int:
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())


class _ReadOnlyWriter(Writer):
    """The writer of a store that is opened for reading: it writes nothing."""

    def __init__(self, path: Path, cipher: Cipher) -> None:
        super().__init__(path, cipher, StoreObserver, max_waiting=0, max_waiting_bytes=0)

    def _check(self) -> None:
        raise StoreHeld("The store is open for reading only.")


def _no_transaction() -> ConfigError:
    return ConfigError(
        "SQLite has one writer, and it is lent to nobody.",
        hint="In a handler, hand your writes to `event.commit(function)` and your events to `event.emit(…)`: they are"
        " committed together with the delivery.",
    )
