"""The store in the verbs of the domain: five protocols by reader, and `Store`, their sum.

An engine implements `Store`; nothing above this file knows which one it uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from oncehook import clock
from oncehook.model import (
    ArrivalId,
    Audited,
    Cause,
    Check,
    DeliveryId,
    DeliveryStatus,
    Engine,
    EraseOrder,
    Erasure,
    EventDetails,
    EventId,
    Expired,
    Figures,
    Filter,
    Intake,
    Item,
    Lease,
    LeaseRequest,
    Level,
    ListedEvent,
    Options,
    Outlook,
    Page,
    Planned,
    PlanSnapshot,
    Pruned,
    Rejection,
    ReplayCommand,
    ReplayId,
    ReplayPlan,
    ReplayState,
    SchemaState,
    Settled,
    Settlement,
    StoredArrival,
    StoredAttempt,
    StoredDelivery,
    StoredReplay,
    StoredSession,
    StoredWorker,
    Verdict,
)
from oncehook.store.cipher import Cipher


@dataclass(slots=True)
class Timeouts:
    """Seconds after which an engine gives up."""

    connect: int = 5
    statement: float = 5.0
    """A statement on PostgreSQL, and a transaction there that does not go on."""
    lock: float = 0.3
    """A group of arrivals on PostgreSQL, for a row that a foreign transaction holds."""
    group: float = 0.01
    """Other arrivals, for a group that is being written: it may have met a lock, or a slow disk."""
    silence: float = 10.0
    """A connection that does not answer: its statement timeout should have ended the wait long before."""
    turn: float = 2.0
    """A question, for a connection to ask it on."""
    heartbeat: float = 0.1
    """A heartbeat, however short its leases are."""
    close: float = 5.0
    """Closing, for what was taken in."""
    write_lock: float = 5.0
    """SQLite's writer, for another program that holds the write lock."""
    full_disk: float = 1.0
    """Between two looks whether a full disk has space again."""


KEPT_ARRIVALS = 20
"""Later arrivals kept per event, the latest ones; `copies` counts them all."""

TOKEN_USE_SECONDS = 60.0
"""A token's last use is written at most this often, however many requests it makes."""

UNSEEN = bytes(16)
"""The body hash of a key that was imported: nobody here knows its body, so no copy of it is a conflict."""

MOST_DECRYPTED = 100_000
MOST_DECRYPTED_BYTES = 256 << 20
"""Encrypted bodies that a replay or a discard looks into, at most: only Python can read them."""

KEPT_REJECTIONS = 1000
"""Size of the ring of rejected arrivals."""


@dataclass(slots=True, frozen=True)
class NameIds:
    """The ids of names in the store. An id is never given twice."""

    sources: Mapping[str, int]
    destinations: Mapping[str, int]


def bind(intakes: Iterable[Intake], known: Mapping[bytes, bytes | None]) -> None:
    """Give what was signed once the key under which it came first, where it is one event whatever its key.

    `known`: the keys of proofs that came before; they may have come without one.
    """
    firsts = dict(known)
    for intake in intakes:
        for item in intake.items:
            if item.proof is None:
                continue
            first = firsts.setdefault(item.proof, item.key_hash)
            if item.is_bound and first is not None:
                item.key_hash = first


class Pending:
    """An intake that waits for the next group commit, and the future its sender waits on."""

    __slots__ = ("abandoned", "future", "intake", "size")

    def __init__(self, intake: Intake, future: asyncio.Future[list[Verdict]]) -> None:
        self.intake = intake
        self.future = future
        self.size = len(intake.raw or b"") + sum(len(item.body) for item in intake.items)
        self.abandoned = False
        """Its sender got 503 meanwhile: do not start writing it."""


class Taker(Protocol):
    """A worker in the process that takes arrivals in: what it has room for is leased in the commit that keeps it."""

    id: str

    def reserve(self, destination_id: int) -> float | None:
        """Keep a place for a delivery to this destination, and tell for how many seconds to lease it; None: no room."""

    def begin_reserved(self, lease: Lease, asked_at: float) -> None:
        """Begin what was leased; `asked_at`: when that was asked for, by the steady clock."""

    def give_up_reserved(self, destination_id: int) -> None:
        """Free a place that was kept in vain."""


class StoreObserver:
    """Callbacks of a store, called on the loop that opened it. Here each does nothing; override what matters."""

    taker: Taker | None = None
    """The worker in this process, while it takes work."""
    works: bool = False
    """Whether anybody here works: then the store listens for what other processes make due."""

    def note_commit(self, operation: str, seconds: float) -> None:
        """Note how long a commit took."""

    def wake(self, destination_ids: Collection[int] | None) -> None:
        """Look for work: something may have become due for these destinations; None: for any."""

    def note_expired(self, expired: Expired) -> None:
        """Note a lease that was taken over because its holder let it run out; called once for each."""

    def note_finished(self, replay: StoredReplay) -> None:
        """Note a replay that has ended here, done or aborted; called once for each."""


class Reserved:
    """Deliveries of a group of arrivals for which a worker keeps places.

    At most one of a subject, because the others wait behind it. `latest_wins` is left out, because the highest rank
    that was delivered must be looked up first.
    """

    def __init__(self, taker: Taker | None, sources: Mapping[int, str], batch: Iterable[Intake]) -> None:
        """`sources`: their names by id."""
        self._taker = taker
        self._sources = sources
        self.who = None if taker is None else taker.id
        self.seconds: dict[bytes, float] = {}
        """For how long each is to be leased, by its id."""
        self._meant: dict[bytes, tuple[Intake, Item, Planned]] = {}
        self._followed: set[bytes] = set()
        self._asked_at = clock.steady()
        if taker is not None:
            self._reserve(taker, batch)

    def _reserve(self, taker: Taker, batch: Iterable[Intake]) -> None:
        firsts: dict[bytes, bytes] = {}
        for intake in batch:
            if intake.source_id not in self._sources:
                continue
            for item in intake.items:
                for planned in item.deliveries:
                    first = firsts.setdefault(planned.subject_key or planned.id, planned.id)
                    if first != planned.id:
                        self._followed.add(first)
                    elif not planned.options & Options.latest_wins:
                        seconds = taker.reserve(planned.destination_id)
                        if seconds is not None:
                            self.seconds[planned.id] = seconds
                            self._meant[planned.id] = (intake, item, planned)

    def begin(self, fences: Mapping[bytes, int], received_at: datetime | None) -> None:
        """Hand out what was leased, by delivery and fence, and give the other places up."""
        if self._taker is None:
            return
        for delivery_id, (intake, item, planned) in self._meant.items():
            if delivery_id not in fences:
                self._taker.give_up_reserved(planned.destination_id)
                continue
            assert received_at is not None
            lease = Lease.on_arrival(
                intake,
                item,
                planned,
                fence=fences[delivery_id],
                seconds=self.seconds[delivery_id],
                source=self._sources[intake.source_id],
                received_at=received_at,
                more=delivery_id in self._followed,
            )
            self._taker.begin_reserved(lease, self._asked_at)

    def give_up(self) -> None:
        """Give all places up: nothing was kept."""
        self.begin({}, None)


class Transaction(Protocol):
    """A transaction of the store's database that a handler may write in; its delivery is settled in it, last."""

    connection: Any
    """The driver's own connection: psycopg's `AsyncConnection`, or its `Connection` for blocking handlers."""

    async def settle(self, settlement: Settlement) -> None:
        """Settle inside this transaction. Raises LeaseLost: then everything in it must be rolled back (R52)."""


class BlockingTransaction(Protocol):
    """The same, for a handler that runs on a thread."""

    connection: Any

    def settle(self, settlement: Settlement) -> None: ...


def answer(batch: Sequence[Pending], verdicts: Sequence[list[Verdict]]) -> None:
    """Resolve the futures of a committed group. A sender that has gone is no reason to fail the others."""
    for pending, verdict in zip(batch, verdicts, strict=True):
        if not pending.future.done():
            pending.future.set_result(verdict)


def refuse(batch: Sequence[Pending], error: BaseException) -> None:
    """Fail the futures of a group that was not committed."""
    for pending in batch:
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.future.exception()  # seen: its sender may have gone, and that is nothing to log


class IntakeStore(Protocol):
    def record(self, intake: Intake) -> Pending:
        """Join the next group commit: keys, events and deliveries of this arrival, all or nothing.

        `pending.future` resolves after the commit, with one verdict per item in their order; it fails with
        StoreUnavailable when the outcome is unknown, in which case the sender's retry finds out (R4).
        Raises Overloaded at once when too much waits already. Must be called on the loop that opened the store.
        """

    async def record_in(self, tx: Any, intake: Intake) -> list[Verdict]:
        """Record in a transaction that the caller owns (`lends_transactions`): it is kept if, and when, that commits.

        `tx` is psycopg's `AsyncConnection`, or SQLAlchemy's. Workers are woken by its commit. What the driver raises
        passes through. Raises ConfigError when no transaction is open on it, or where none is lent.
        """

    def record_in_blocking(self, tx: Any, intake: Intake) -> list[Verdict]:
        """Do what `record_in` does on a thread, with psycopg's `Connection`, or Django's or SQLAlchemy's."""

    async def record_rejections(self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, str], int]) -> None:
        """Add to the bounded ring of rejections, and to the counters: (source id, what) -> how many."""

    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        """Take keys as seen elsewhere, for `keep` seconds from now: an arrival with one is a duplicate, whatever its
        body (`UNSEEN`). Returns how many were not known; a known one is left alone. Audited as `import`.
        """


class QueueStore(Protocol):
    async def lease(self, wants: Sequence[LeaseRequest], worker: str | None = None) -> list[Lease]:
        """Lease what may be leased now: at most one delivery per subject, in order of commit, each with a new fence.

        Nothing of a paused destination or one whose breaker is open; one delivery, as a probe, when the breaker is half
        open (its time has passed), and then the breaker stays closed to others for `want.probe` seconds.
        A row whose lease has run out is taken over, after a `crashed` attempt is written and the attempt given back. A
        row that crashed more often than `want.crash_tolerance` is set aside for `Priority.quarantined`, due at once;
        leased with that priority it runs alone, and a crash then is a death of its own.
        `worker` is named by `note_expired` in case it lets a lease run out.
        """

    async def next_due(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        """Return which of these destinations have something to be leased now, and when the next of them will have.

        With `since`, also any other destination for which something has become due after that moment, however many
        there are. Take `looked_at` of the last result, or the beginning of time.
        """

    def renew(self, leases: Sequence[Lease]) -> set[int]:
        """Prolong these leases by their `seconds`, from now; returns the fences that are still ours.

        Called on a thread of its own, never on the loop: a blocked handler or loop must not delay it (R32). May block
        for a short while. Raises StoreUnavailable when the outcome is unknown.
        """

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        """End these leases, all in one commit; returns which were still ours. For the others nothing is changed at all:
        not state, attempts, time or order (R25-R27), and nothing that they emit is kept (R54). A `commit` that raises,
        raises here for its own settlement alone, and so do `emits` that cannot be kept: such a settlement must be given
        in a call of its own.

        Where `take_next` is set, the next delivery of the subject is leased in the same commit, by `worker`; unless
        nothing waits, the destination is paused or failing, or a bulk replay comes after live work.
        """

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for a handler; committed when left without an error, rolled back otherwise.

        SQLite has one writer and lends it to nobody: raises ConfigError, with the advice to use `event.commit`.
        """

    def blocking_transaction(self) -> AbstractContextManager[BlockingTransaction]:
        """Do what `transaction` does, on a thread."""

    async def register_worker(self, worker: StoredWorker) -> None:
        """Note that a worker is there (the store sets its times), and forget those not heard of for a day."""

    async def dismiss_worker(self, worker_id: str) -> None: ...


class AdminStore(Protocol):
    """Acts of people. Each writes its audit entry in the same transaction."""

    async def make_replay(self, replay_id: ReplayId, order: ReplayCommand) -> StoredReplay:
        """Make a new run for each delivery that the order means; never a new event, never touching a key (R46).

        Dead and discarded ones, done ones with `force`; never pending or leased ones. Not bulk: exactly one delivery
        is meant, and it is made due at once; raises NotFound, NotReplayable, or ReplayTooSoon within REPLAY_PAUSE of
        its last replay. Bulk: its items are fixed now, in order of commit, and fed later (`feed_replays`). Raises
        PlanChanged when `expected` is not their number, NotReplayable when there are none. A known
        `request_key` returns the replay it made, whatever else is asked.
        """

    async def feed_replays(self, open_at_most: int = 500) -> int:
        """Hand the next items of running bulk replays to workers, behind live traffic, at their rate; returns how many.

        Any process may call it at any time. A held head that is replayed keeps its place; everything else joins the
        tail of its subject. Finishes replays of which nothing is left.
        """

    async def set_replay_state(self, replay_id: ReplayId, state: ReplayState, actor: str) -> StoredReplay:
        """Pause, resume (running) or abort. What is done stays done, what was not fed stays where it was.

        Raises NotFound, or NotWaiting when it is over already.
        """

    async def retry_now(self, delivery_id: DeliveryId, actor: str) -> None:
        """Make a delivery that waits for its next attempt due now. Raises NotFound, or NotWaiting."""

    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        """Close dead letters without replay; a held subject goes on. Returns how many; others are left alone.

        With `seen`, only those that were dead by then; raises PlanChanged when these are more than were seen (some
        were about to be written down as dead at that very moment).
        """

    async def erase(self, order: EraseOrder, limit: int = 100) -> Erasure:
        """Erase one short batch of a subject's events (S37); call again while it finds some.

        Of each go body, head, key text and subject, the errors and answers of its attempts, heads and bodies of later
        arrivals, and the raw bytes of the split requests it came in. Open deliveries and dead letters are discarded
        first; whoever holds a lease on one loses it. The rows stay, so every count holds; the key's hash stays for its
        window, and no copy of it is a conflict any more (`UNSEEN`). Audited as `erase`, without the subject's text.
        """

    async def erasable(self, order: EraseOrder) -> Erasure: ...

    async def empty_log(self) -> None:
        """Leave nothing of what was erased in a log of our own: fold it into the database and cut it off.

        Where the log is the server's (PostgreSQL), nothing happens. Raises StoreUnavailable while a reader needs it.
        """

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        """Hold a destination back: nothing of it is leased until it is resumed; nothing is lost."""

    async def resume(self, destination_id: int, actor: str) -> None:
        """Let a destination go on; its breaker starts anew."""

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        """Write an entry about something that was done elsewhere."""

    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        """Keep a digest for each setting of this start; where some differ from those of the last start at the same
        place, write an entry `settings` with their names. The first start at a place is the one to compare with.
        """

    async def invalidate_leases(self) -> int:
        """Raise all fences, end all leases (R69) and all sessions: after a restore from a backup, they may have been
        ended since. Returns how many leases ended.
        """


class ReadStore(Protocol):
    async def get_event(self, event_id: EventId) -> EventDetails | None: ...

    async def find_events(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[ListedEvent]:
        """Return events that match, newest first, older than the cursor `before`.

        Of the filter's conditions on deliveries (`destination`, `status`, `category`, `note`, `code`, `attempts_…`,
        `replay_id`, `ids`), an event matches when one delivery of it meets them all.
        """

    async def arrivals_of(self, event_id: EventId) -> list[StoredArrival]:
        """Return later arrivals of an event, oldest first; at most KEPT_ARRIVALS duplicates and as many conflicts."""

    async def batch_body(self, batch_id: ArrivalId) -> tuple[bytes, bytes] | None:
        """Return head and raw body of the request that a split event came in."""

    async def recent_rejections(self, limit: int = 50) -> list[Rejection]: ...

    async def figures(self, since: datetime | None = None) -> Figures:
        """Sum the counters since a moment: received, accepted, duplicate, conflict, rejected per source."""

    async def get_delivery(self, delivery_id: DeliveryId) -> StoredDelivery | None: ...

    async def find_deliveries(
        self, filter: Filter, *, before: bytes | None = None, limit: int = 50
    ) -> Page[StoredDelivery]:
        """Return deliveries that match, newest first, older than the cursor `before`."""

    async def attempts_of(self, delivery_id: DeliveryId) -> list[StoredAttempt]:
        """Return every attempt of a delivery, oldest first."""

    async def subject_of(self, delivery_id: DeliveryId, around: int = 10) -> list[StoredDelivery]:
        """Return a delivery and its neighbours: same destination, source and subject, in order of commit."""

    async def causes(self, destination: str | None = None, sources: Collection[str] | None = None) -> list[Cause]:
        """Group dead letters by destination and cause, the most frequent first; with `sources`, of their events only.
        Looks at the latest 10,000.
        """

    async def plan_replay(self, filter: Filter, *, force: bool) -> ReplayPlan: ...

    async def get_replay(self, replay_id: ReplayId) -> StoredReplay | None: ...

    async def find_replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]: ...

    async def levels(self) -> dict[str, Level]: ...

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        """Count deliveries of events received since, by their status now (`leased` apart from `pending`)."""

    async def count_of(
        self, sources: Collection[str], since: datetime | None = None
    ) -> dict[str, dict[DeliveryStatus, int]]:
        """Count deliveries of these sources' events, by destination and status; with `since`, of events received since.
        Counted row by row: counters do not know a source and a destination together.
        """

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> dict[str, list[tuple[datetime, int]]]:
        """Return what was counted, by name, in steps of so many seconds: for charts."""

    async def audit_log(self, *, before: int | None = None, limit: int = 50, actor: str | None = None) -> list[Audited]:
        """Return what was done, newest first; with `actor`, by this one only. Entries are only ever added: the database
        refuses to change one, and to remove one otherwise than by `prune`; `check` follows their chain (S34).
        """

    async def token_uses(self) -> dict[str, datetime]:
        """Return when each token was last used, by name, to the minute."""

    async def workers(self) -> list[StoredWorker]:
        """Return workers heard of in the last minute."""

    async def crossings(self) -> dict[str, datetime]:
        """Return watermarks that are crossed now, and since when."""

    async def check(self) -> list[Check]:
        """Look for what must never be: the conservation laws (R68), by scanning. For `doctor`; may take a while."""

    async def size(self) -> int:
        """Return bytes on disk."""


class UpkeepStore(Protocol):
    """Looks after the store itself, and after sessions of the dashboard."""

    async def register_names(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        """Give every name its id, once and for ever."""

    def register_names_blocking(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        """Do what `register_names` does on a thread, even before `open` (PostgreSQL). Raises StoreUnavailable."""

    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        """Note the addresses of destinations now, by their ids, as hashes; so that a replay can report a change."""

    async def prune(self, keep_events: Mapping[int, float], otherwise: float, limit: int = 500) -> Pruned:
        """Remove one short batch of what has outlived its time: events with everything about them, keys past their
        window, orphaned batches, old ranks, replays and audit entries, sessions that are over. Call again while it
        finds something.

        `keep_events` is seconds per source id, `otherwise` for the others. Only events whose deliveries are all done or
        discarded go; pending ones and dead letters stay (R67). Keys stay for their window (R20).
        """

    async def roll_up(self) -> int:
        """Fold counters older than two days from minutes into days; sums never change. Returns rows removed."""

    async def mark_watermark(self, name: str, crossed: bool) -> bool:
        """Note that a watermark is crossed, or back; returns whether that is news, True to exactly one caller."""

    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        """Begin a session for so long; when there are too many, the oldest ones end."""

    async def get_session(self, hash: bytes) -> StoredSession | None:
        """Return a session that lasts; None when there is none, or no longer. Writes nothing."""

    async def end_session(self, hash: bytes) -> None: ...

    async def note_token_use(self, name: str) -> None:
        """Note that a token is used now, unless that was noted within the last TOKEN_USE_SECONDS."""

    async def inbox_number(self) -> int:
        """Return a number that tells this store from others, drawn when it was made."""

    async def ping(self) -> None:
        """Prove that the store can commit a write right now; raises StoreUnavailable."""

    async def schema_state(self) -> SchemaState: ...


class Store(IntakeStore, QueueStore, AdminStore, ReadStore, UpkeepStore, Protocol):
    """Everything that oncehook asks of a database. Each verb is one transaction."""

    engine: Engine
    shared: bool
    """Whether several processes may write at once; else one process holds it, and does all the work."""
    lends_transactions: bool
    """Whether handlers and programs may write in a transaction of the store; else effects go through `event.commit`."""
    cipher: Cipher
    """Encrypts what is kept of payloads; may be given other keys before `open`."""
    observer: StoreObserver

    def announce(self, address: str, token: str) -> None:
        """Let commands on this machine find the process that writes the store, where only one can."""

    def free_disk(self) -> float | None:
        """Return the free part of the disk that the store is on, from 0 to 1; None: it is a server's."""

    async def open(self, observer: StoreObserver | None = None, *, migrate: bool = True, write: bool = True) -> None:
        """Connect, check that the engine keeps its promises (R2, R61, R66), bring the schema up to date.

        `write=False` opens for reading only, beside a process that writes.
        Raises MigrationNeeded, SchemaTooNew, StoreHeld or StoreUnavailable.
        """

    async def close(self) -> None:
        """Commit what was taken in, refuse what was not, and let go of the database."""
