"""The store in the verbs of the domain: five protocols by reader, and `Store`, their sum.

An engine implements `Store`; nothing above this file knows which one it uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from oncehook import clock
from oncehook.errors import DefinitionChanged, Exists, InUse, NotFound
from oncehook.model import (
    PRIORITIES,
    Allowance,
    ArchivedEvent,
    ArrivalId,
    Audited,
    BreakerChange,
    Cause,
    ChartMark,
    Check,
    DefinitionChanges,
    DefinitionWrite,
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
    LimitRequest,
    ListedEvent,
    Noun,
    Options,
    Outlook,
    Page,
    Planned,
    PlanSnapshot,
    Priority,
    Pruned,
    Rejection,
    ReplayCommand,
    ReplayId,
    ReplayItem,
    ReplayPlan,
    ReplayState,
    SchemaState,
    Settled,
    Settlement,
    StoredArrival,
    StoredAttempt,
    StoredDefinition,
    StoredDelivery,
    StoredMedia,
    StoredReplay,
    StoredSession,
    StoredWorker,
    Total,
    Verdict,
)
from oncehook.store.cipher import Cipher


@dataclass(slots=True)
class Timeouts:
    """Seconds after which an engine gives up."""

    connect: int = 5
    statement: float = 5.0
    """For a statement on PostgreSQL, and an idle transaction there."""
    lock: float = 0.3
    """For a row that a foreign transaction locks, when a group of arrivals needs it (PostgreSQL)."""
    group: float = 0.01
    """For a group that is being written, before other arrivals go ahead: it may wait for a lock, or a slow disk."""
    silence: float = 10.0
    """For a connection that does not answer: its statement timeout should have ended it long before."""
    turn: float = 2.0
    """For a free connection."""
    heartbeat: float = 0.1
    """For a heartbeat, however short its leases are."""
    close: float = 5.0
    """For writing what was accepted, on closing."""
    write_lock: float = 5.0
    """SQLite's writer, for another program that holds the write lock."""
    loan: float = 2.0
    """SQLite's writer, for a client that borrows the write lock to commit an effect of its own."""
    takeover: float = 2.0
    """A new owner of a SQLite file, for clients of the last one to come back, before their leases are taken over."""
    full_disk: float = 1.0
    """Between two checks whether a full disk has space again."""


AHEAD = 0.25
"""Seconds that moments to begin an attempt are reserved ahead, by a rate that counts over all workers."""
MADE_UP_FOR = 0.1
"""Seconds of such moments that may be reserved although they have passed, so that a late request loses none."""

KEPT_ARRIVALS = 20
"""Later arrivals stored per event, the latest ones; `copies` counts all."""

TOKEN_USE_SECONDS = 60.0
"""Seconds between two updates of a token's last use."""

UNSEEN = bytes(16)
"""The body hash of an imported key: its body is unknown, so no copy of it is a conflict."""

MOST_DECRYPTED = 100_000
MOST_DECRYPTED_BYTES = 256 << 20
"""Bytes of encrypted bodies that a replay or a discard searches at most, because only Python can read them."""

Series = dict[str, list[tuple[datetime, int]]]
"""Counts by name, in steps of time."""

KEPT_MARKS = 1000
"""Moments marked in charts that are kept."""

MOST_CHANGES = 1000
"""Changes of definitions that are told one by one; more of them are as if some had been missed."""

KEPT_REJECTIONS = 1000
"""Size of the ring of rejected arrivals."""

REJECTED_KEPT = 7 * 86_400.0
"""Seconds for which the bytes of a rejected arrival are kept."""


@dataclass(slots=True, frozen=True)
class NameIds:
    """The ids of names in the store. An id is never reused."""

    sources: Mapping[str, int]
    destinations: Mapping[str, int]


def bind(intakes: Iterable[Intake], known: Mapping[bytes, bytes | None]) -> None:
    """Give each signed request the key under which it came first, where the source allows one event per signature.

    `known`: keys of signatures that were seen before; None for one that came without a key.
    """
    firsts = dict(known)
    for intake in intakes:
        for item in intake.items:
            if item.proof is None:
                continue
            first = firsts.setdefault(item.proof, item.key_hash)
            if item.is_bound and first is not None:
                item.key_hash = first


def name_taken(name: str, account: str) -> Exists:
    """Build the refusal of a name that is another account's."""
    if name == account:
        return Exists(f'"{name}" is an alias of another account.')
    return Exists(f'"{name}" is another account\'s.', hint="An alias is moved with `move`; an id stays where it is.")


def name_was_anothers(name: str) -> Exists:
    """Build the refusal of a name under which something of another account, or of nobody's, may still be kept."""
    return Exists(f'"{name}" was somebody else\'s, and what was kept under it is theirs.', hint="Choose another name.")


def account_in_use(account: str, noun: str, name: str) -> InUse:
    """Build the refusal to delete an account that has definitions."""
    return InUse(f'Account {account} still has {noun} "{name}".', hint="Delete what is defined for it first.")


def check_expected(write: DefinitionWrite, found: int | None) -> None:
    """Refuse a change of a definition that is not as its author has seen it. `found`: its version; None: none is
    there."""
    if write.expected is None and found is not None:
        article = "an" if write.noun is Noun.account else "a"
        raise Exists(f'There is {article} {write.noun} "{write.name}" already.')
    if write.expected is not None and found is None:
        raise NotFound(f'There is no {write.noun} "{write.name}", or no longer.')
    if write.expected != found:
        raise DefinitionChanged


class Pending:
    """An intake that waits for the next group commit, and whoever waits for the verdicts on it.

    Because every arrival makes one, it has no future unless somebody awaits it; who answers a sender is called back.
    """

    __slots__ = ("_call_back", "_error", "_future", "_verdicts", "abandoned", "intake", "is_decided", "loop", "size")

    def __init__(self, intake: Intake, loop: asyncio.AbstractEventLoop) -> None:
        self.intake = intake
        self.loop = loop
        self.size = 0 if intake.raw is None else len(intake.raw)
        for item in intake.items:
            self.size += len(item.body)
        self.abandoned = False
        """Its sender got 503 meanwhile: do not start writing it."""
        self.is_decided = False
        self._verdicts: list[Verdict] = []
        self._error: BaseException | None = None
        self._call_back: Callable[[], None] | None = None
        self._future: asyncio.Future[list[Verdict]] | None = None

    @property
    def future(self) -> asyncio.Future[list[Verdict]]:
        """Future of the verdicts, made when it is first asked for. Cancelled, it is of a sender that has gone."""
        if self._future is None:
            self._future = self.loop.create_future()
            if self.is_decided:
                self._resolve(self._future)
        return self._future

    def call_back(self, function: Callable[[], None]) -> None:
        """Call this function when it is decided, in the same turn of the loop; in the next one where it is already."""
        if self.is_decided:
            self.loop.call_soon(function)
        else:
            self._call_back = function

    def result(self) -> list[Verdict]:
        """Return one verdict per item, once it is decided. Raises what it failed with."""
        if self._error is not None:
            raise self._error
        return self._verdicts

    def answer(self, verdicts: list[Verdict]) -> None:
        """Hand out the verdicts, after the commit. A sender that was given up on, or has gone, gets none."""
        if not self.is_decided:
            self._verdicts = verdicts
            self._decide()

    def refuse(self, error: BaseException) -> None:
        """Fail, unless it is decided already."""
        if not self.is_decided:
            self._error = error
            self._decide()

    def _decide(self) -> None:
        self.is_decided = True
        if self._future is not None:
            self._resolve(self._future)
        if self._call_back is not None:
            try:
                self._call_back()
            except Exception as error:  # the others of its group get their answers
                self.loop.call_exception_handler({"message": "An answer failed.", "exception": error})

    def _resolve(self, future: asyncio.Future[list[Verdict]]) -> None:
        if future.done():
            return
        if self._error is None:
            future.set_result(self._verdicts)
        else:
            future.set_exception(self._error)
            future.exception()  # seen: its sender may have gone, and that is nothing to log


class Taker(Protocol):
    """A worker in the receiving process: deliveries that it has room for are leased in the commit that stores them."""

    id: str

    def reserve(self, destination_id: int, priority: Priority) -> float | None:
        """Reserve a slot for a delivery to this destination; return the seconds to lease it for, or None without a free
        slot, or where others come first."""

    def begin_reserved(self, lease: Lease, asked_at: float) -> None:
        """Begin a leased delivery. `asked_at`: when the lease was requested, by the steady clock."""

    def give_up_reserved(self, destination_id: int) -> None:
        """Free a reserved slot that was not used."""


class StoreObserver:
    """Callbacks of a store, called on its event loop. They do nothing here; override those that matter."""

    taker: Taker | None = None
    """The worker in this process, while it takes work."""
    works: bool = False
    """Whether anybody here works: then the store listens for what other processes make due."""
    receiver_count: int = 1
    """Receivers of one server: where each has a queue of its own, it may hold its part of what may wait."""
    acts_only: bool = False
    """Whether this is a command: it records no payload, and takes nobody's place."""

    def note_commit(self, operation: str, seconds: float) -> None:
        """Note how long a commit took."""

    def wake(self, destination_ids: Collection[int] | None) -> None:
        """Look for work: deliveries may have become due for these destinations; None: for any."""

    def note_expired(self, expired: Expired) -> None:
        """Note an expired lease that was taken over; called once for each."""

    def note_finished(self, replay: StoredReplay) -> None:
        """Note a replay that ended in this process, done or aborted; called once for each."""

    def note_breaker(self, change: BreakerChange) -> None:
        """Note a breaker that a settlement of this process has opened or closed."""

    def note_definitions(self, changes: DefinitionChanges) -> None:
        """Note changes of stored definitions, in order of commit, wherever they were made."""


class CommandObserver(StoreObserver):
    """The observer of a command: nobody works there, and it takes nothing in."""

    acts_only = True


class Reserved:
    """Deliveries in a group of arrivals for which a worker has reserved slots.

    At most one per subject, because the others wait behind it. None with `latest_wins`, because the highest delivered
    rank must be looked up first.
    """

    def __init__(self, taker: Taker | None, sources: Mapping[int, str], batch: Iterable[Intake]) -> None:
        """`sources`: names by id."""
        self._taker = taker
        self._sources = sources
        self.who = None if taker is None else taker.id
        self.seconds: dict[bytes, float] = {}
        """Seconds to lease each delivery for, by id."""
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
                        seconds = taker.reserve(planned.destination_id, PRIORITIES[planned.options])
                        if seconds is not None:
                            self.seconds[planned.id] = seconds
                            self._meant[planned.id] = (intake, item, planned)

    def begin(self, fences: Mapping[bytes, int], received_at: datetime | None) -> None:
        """Begin the leased deliveries, by delivery id and fence, and free the other slots."""
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
        """Free all slots: the group was not stored."""
        self.begin({}, None)


class Transaction(Protocol):
    """A transaction of the store's database that a handler may write in; its delivery is settled last, in the same
    one."""

    connection: Any
    """The driver's own connection: psycopg's `AsyncConnection`, or its `Connection` for blocking handlers."""

    async def settle(self, settlement: Settlement) -> None:
        """Settle inside this transaction. Raises LeaseLost, after which all of it must be rolled back (R52)."""


class BlockingTransaction(Protocol):
    """A transaction like `Transaction`, for a handler on a thread."""

    connection: Any

    def settle(self, settlement: Settlement) -> None: ...


def answer(batch: Sequence[Pending], verdicts: Sequence[list[Verdict]]) -> None:
    """Hand out the verdicts on a committed group. A sender that has gone is no reason to fail the others."""
    for pending, verdict in zip(batch, verdicts, strict=True):
        pending.answer(verdict)


def refuse(batch: Iterable[Pending], error: BaseException) -> None:
    """Fail the intakes of a group that was not committed."""
    for pending in batch:
        pending.refuse(error)


class IntakeStore(Protocol):
    def record(self, intake: Intake) -> Pending:
        """Join the next group commit: keys, events and deliveries of this arrival, all or nothing.

        It is decided after the commit, with one verdict per item in their order; it fails with
        StoreUnavailable when the outcome is unknown, in which case the sender's retry finds out (R4).
        Raises Overloaded at once when too much waits already. Must be called on the loop that opened the store.
        """

    async def record_in(self, tx: Any, intake: Intake) -> list[Verdict]:
        """Record in a transaction that the caller owns (`lends_transactions`): stored if, and when, that commits.

        `tx` is psycopg's `AsyncConnection`, or SQLAlchemy's. Its commit wakes workers. Errors of the driver pass
        through. Raises ConfigError when no transaction is open on it, or where the store lends none.
        """

    def record_in_blocking(self, tx: Any, intake: Intake) -> list[Verdict]:
        """Record like `record_in`, on a thread: with psycopg's `Connection`, or Django's or SQLAlchemy's."""

    async def record_rejections(
        self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, int, str], int]
    ) -> None:
        """Add to the bounded list of rejections, and to the counters: (source id, destination id, name) -> count."""

    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        """Store keys that were seen elsewhere, for `keep` seconds from now: an arrival with one is a duplicate,
        whatever its body (`UNSEEN`). Returns how many were new; existing keys are not changed. Audited as `import`."""


class QueueStore(Protocol):
    async def lease(self, wants: Sequence[LeaseRequest], worker: str | None = None) -> list[Lease]:
        """Lease what is due: at most one delivery per subject, in order of commit, each with a new fence.

        Nothing is leased for a paused destination or one with an open breaker. Once the breaker's time has passed (half
        open), one delivery is leased as a probe, and no others for `want.probe` seconds. A row whose lease has expired
        is taken over: a `crashed` attempt is stored, which does not count as one of its attempts. A row that crashed
        more often than `want.crash_tolerance` is moved to `Priority.quarantined`, due at once; leased with that
        priority it runs alone, and a crash then counts against it. `worker` is the name that `note_expired` reports if
        its lease expires.
        """

    async def next_due(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        """Return which of these destinations have due deliveries, and when the next delivery of one of them is due.

        With `since`, also any other destination that has had something due since that moment. Pass `looked_at` of the
        last result, or the beginning of time.
        """

    async def allow(self, wants: Sequence[LimitRequest], worker: str) -> list[Allowance]:
        """Reserve moments and places for a worker, by limits that count over all workers.

        Moments are at most AHEAD, and no two workers get the same. Places of all workers together are never more than
        the limit, unless it was lowered. They count for two leases from now, or until they are handed back or a lease
        of their worker has expired; attempts may begin under them for one.
        """

    def renew(self, leases: Sequence[Lease], worker: str | None = None) -> set[int]:
        """Extend these leases by their `seconds`, from now; return the fences that are still ours. `worker`: also
        extend the places that it holds.

        Called on a thread of its own, never on the loop: a blocked handler or loop must not delay it (R32). May block
        for a short while. Raises StoreUnavailable when the outcome is unknown.
        """

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        """End these leases in one commit; return which were still ours. Nothing changes for the others: not state,
        attempts, time or order (R25-R27), and nothing that they emit is stored (R54). Where a `commit` raises, or
        `emits` cannot be stored, that raises here for its own settlement alone, so such a settlement must be passed in
        a call of its own.

        With `take_next`, the next delivery of the subject is leased by `worker` in the same commit; not if nothing
        waits, the destination is paused or failing, or it would be a bulk replay after live work.
        """

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for a handler; commit it on a normal exit, roll it back on an error.

        SQLite cannot lend its one writer: raises ConfigError, which recommends `event.commit`.
        """

    def blocking_transaction(self) -> AbstractContextManager[BlockingTransaction]:
        """Open a transaction like `transaction`, on a thread."""

    async def register_worker(self, worker: StoredWorker) -> None:
        """Register a worker's heartbeat (the store sets its times), and remove workers not heard of for a day."""

    async def dismiss_worker(self, worker_id: str) -> None: ...


class AdminStore(Protocol):
    """Acts of people. Each writes its audit entry in the same transaction."""

    async def make_replay(self, replay_id: ReplayId, order: ReplayCommand) -> StoredReplay:
        """Start a new run for each delivery of the order; never a new event, never touching a key (R46).

        Applies to dead and discarded deliveries, and with `force` to done ones; never to pending or leased ones. A
        single replay is of exactly one delivery, made due at once; raises NotFound, NotReplayable, or ReplayTooSoon
        within REPLAY_PAUSE of its last replay. A bulk replay fixes its items now, in order of commit, and
        `feed_replays` feeds them later. Raises PlanChanged when `expected` is not their number, NotReplayable when
        there are none. A known `request_key` returns the replay that it made before, whatever the rest of the order.
        """

    async def feed_replays(self, open_at_most: int = 500) -> int:
        """Hand the next items of running bulk replays to workers, with a lower priority than live ones, at their rate;
        return how many.

        Any process may call it at any time. A held head that is replayed keeps its position; everything else joins the
        tail of its subject. Finishes replays without remaining items.
        """

    async def set_replay_state(self, replay_id: ReplayId, state: ReplayState, actor: str) -> StoredReplay:
        """Pause, resume (running) or abort a replay. Done items stay done; items not yet fed are not changed.

        Raises NotFound, or NotWaiting for a replay that is over.
        """

    async def retry_now(self, delivery_id: DeliveryId, actor: str) -> None:
        """Make a delivery that waits for a retry due now. Raises NotFound, or NotWaiting."""

    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        """Close dead letters without replay, so that a held subject goes on; return how many. Deliveries that are not
        dead are not changed.

        With `seen`, only those that were dead at that time. Raises PlanChanged when there are more than were counted
        then (a settlement may have been committing at that moment).
        """

    async def erase(self, order: EraseOrder, limit: int = 100) -> Erasure:
        """Erase one short batch of a subject's events (S37); call again while it finds some.

        Erases each event's body, head, key text and subject, the errors and answers of its attempts, heads and bodies
        of later arrivals, and the raw bytes of the split requests it came in. Open deliveries and dead letters are
        discarded first, which ends leases on them. The rows stay, so that counts still add up; the key's hash stays for
        its window, and a copy is a duplicate whatever its body (`UNSEEN`). Audited as `erase`, without the subject's
        text.
        """

    async def erasable(self, order: EraseOrder) -> Erasure: ...

    async def empty_log(self) -> None:
        """Remove erased data from a log of our own: checkpoint it into the database and truncate it.

        Does nothing where the log is the server's (PostgreSQL). Raises StoreUnavailable while a reader needs the log.
        """

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        """Pause a destination: nothing of it is leased until it is resumed, and nothing is lost."""

    async def resume(self, destination_id: int, actor: str) -> None:
        """Resume a destination and reset its breaker."""

    async def try_now(self, destination_id: int, actor: str) -> bool:
        """Let an open breaker try one delivery now, and make one due where none is; return False where it is closed."""

    async def add_mark(self, text: str, actor: str) -> ChartMark:
        """Keep a mark for charts at this moment; the latest KEPT_MARKS stay."""

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        """Write an audit entry about an act outside the store."""

    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        """Store a digest of each setting at this start; where some differ from those of the last start at the same
        place, write an entry `settings` with their names. The first start at a place only stores them."""

    async def write_definition(self, write: DefinitionWrite) -> StoredDefinition | None:
        """Make, change or delete a definition; raise the version of definitions; all processes are told.

        Deleting a source or destination deletes its routes. Returns None for a deleted one. Raises Exists, NotFound,
        DefinitionChanged where `expected` is not its version any more, and InUse.
        """

    async def discard_waiting(self, destination_id: int, before: bytes, reason: str, limit: int = 200) -> int:
        """Discard one short batch of open deliveries and dead letters of a destination, those with a lower id than
        `before`; return how many. Call again while it finds some. Leases on them end."""

    async def invalidate_leases(self) -> int:
        """Raise all fences and end all leases (R69) and sessions after a restore: they may have ended since the backup.
        Returns how many leases ended."""


class ReadStore(Protocol):
    async def get_event(self, event_id: EventId) -> EventDetails | None: ...

    async def find_events(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[ListedEvent]:
        """Return matching events, newest first, older than the cursor `before`.

        For conditions on deliveries (`destination`, `status`, `category`, `note`, `code`, `attempts_…`, `replay_id`,
        `ids`), an event matches when a single delivery of it meets all of them.
        """

    async def events_beside(self, event_id: EventId, source: str) -> tuple[EventId | None, EventId | None]:
        """Return the events of a source before and after one, by their ids."""

    async def count_events(self, filter: Filter) -> Total:
        """Count matching events, as far as a page or MOST_COUNTED go."""

    async def arrivals_of(self, event_id: EventId) -> list[StoredArrival]:
        """Return later arrivals of an event, oldest first; at most KEPT_ARRIVALS duplicates and as many conflicts."""

    async def batch_body(self, batch_id: ArrivalId) -> tuple[bytes, bytes] | None:
        """Return head and raw body of the request that a split event came in."""

    async def find_references(self, ids: Sequence[bytes]) -> dict[bytes, bool]:
        """Return which of these events, later arrivals and split requests exist, and whether each one's body is a
        reference to an object (`bodies`)."""

    async def list_references(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return the ids of rows whose body is a reference, with the reference, in order of ids. Reads all rows after
        that one."""

    async def media_of(self, event_id: EventId) -> list[StoredMedia]:
        """Return the files of an event that are kept, in their order."""

    async def find_media(self, digests: Sequence[bytes]) -> set[bytes]:
        """Return which of these files some event refers to."""

    async def recent_rejections(self, limit: int = 50, *, before: int | None = None) -> list[Rejection]:
        """Return the latest rejections, newest first, with numbers below `before`."""

    async def figures(self, since: datetime | None = None) -> Figures:
        """Sum the counters since a moment: received, accepted, duplicate, conflict, rejected per source."""

    async def get_delivery(self, delivery_id: DeliveryId) -> StoredDelivery | None: ...

    async def find_deliveries(
        self, filter: Filter, *, before: bytes | None = None, limit: int = 50
    ) -> Page[StoredDelivery]:
        """Return matching deliveries, newest first, older than the cursor `before`."""

    async def attempts_of(self, delivery_id: DeliveryId) -> list[StoredAttempt]:
        """Return every attempt of a delivery, oldest first."""

    async def subject_of(self, delivery_id: DeliveryId, around: int = 10) -> list[StoredDelivery]:
        """Return a delivery and its neighbours of the same destination, source and subject, in order of commit."""

    async def causes(
        self,
        destination: str | None = None,
        sources: Collection[str] | None = None,
        accounts: Collection[str] | None = None,
    ) -> list[Cause]:
        """Group dead letters by destination and cause, the most frequent first; with `sources` and `accounts`, of their
        events only. Reads the latest 10,000."""

    async def plan_replay(self, filter: Filter, *, force: bool) -> ReplayPlan: ...

    async def get_replay(self, replay_id: ReplayId) -> StoredReplay | None: ...

    async def find_replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]: ...

    async def replay_items(self, replay_id: ReplayId, *, after: int = 0, limit: int = 50) -> list[ReplayItem]:
        """Return what became of a replay's deliveries, in its order, from behind place `after`."""

    async def replay_outcomes(self, replay_id: ReplayId) -> dict[str, dict[str, int]]:
        """Count a replay's deliveries by destination and outcome, as `ReplayItem` names it."""

    async def chart_marks(self, since: datetime) -> list[ChartMark]:
        """Return the marks since a moment, oldest first."""

    async def sizes(self) -> list[tuple[datetime, int]]:
        """Return the bytes that the store had on disk, by hour, oldest first, as far as `roll_up` has noted them."""

    async def levels(self) -> dict[str, Level]: ...

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        """Count deliveries of events received since a moment, by current status (`leased` separate from `pending`)."""

    async def count_of(
        self,
        sources: Collection[str] | None,
        since: datetime | None = None,
        accounts: Collection[str] | None = None,
    ) -> dict[str, dict[DeliveryStatus, int]]:
        """Count deliveries of these sources' and accounts' events, by destination and status; with `since`, of events
        received since. Counts rows, because counters are kept by source or by destination, not by both."""

    async def figures_of(
        self, accounts: Collection[str], since: datetime, sources: Collection[str] | None = None
    ) -> Figures:
        """Count what arrived for some accounts since a moment, by source. Counts rows, because counters are not kept by
        account."""

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> Series:
        """Return counters by name in steps of so many seconds, for charts."""

    async def destination_series(self, since: datetime, step: float) -> dict[str, Series]:
        """Return the counters of every destination by name, in steps, levels included as signed changes."""

    async def audit_log(self, *, before: int | None = None, limit: int = 50, actor: str | None = None) -> list[Audited]:
        """Return the audit log, newest first; with `actor`, only that actor's entries. The database refuses to change
        an entry, or to remove one except by `prune`; `check` verifies their chain (S34)."""

    async def find_definitions(self, noun: Noun, names: Collection[str]) -> list[StoredDefinition]: ...

    async def find_sources(self, addresses: Collection[bytes]) -> list[StoredDefinition]:
        """Return the sources at these addresses (`address_hash`), enabled or not, and the routes that begin there."""

    async def find_routes(self, sources: Collection[str]) -> list[StoredDefinition]:
        """Return the routes from these sources."""

    async def find_routes_to(self, destinations: Collection[str]) -> list[StoredDefinition]:
        """Return routes to these destinations, at most MOST_CHANGES of them."""

    def find_routes_blocking(self, sources: Collection[str]) -> list[StoredDefinition]:
        """Find like `find_routes`, on a thread, even before `open` (PostgreSQL). Raises StoreUnavailable."""

    async def find_destinations(self, ids: Collection[int]) -> list[StoredDefinition]:
        """Return the stored destinations with these ids."""

    async def find_destination_names(self, ids: Collection[int]) -> dict[int, str]:
        """Return the names that have these ids, whatever defines them."""

    async def list_definitions(
        self, noun: Noun, *, account: str | None = None, after: str = "", limit: int = 50
    ) -> list[StoredDefinition]:
        """Return definitions by name, those after a name; with `account`, only its own."""

    async def find_accounts(self, names: Collection[str]) -> dict[str, StoredDefinition]:
        """Return the accounts that have these ids or aliases, by name."""

    async def aliases_of(self, accounts: Collection[str]) -> dict[str, list[str]]:
        """Return the aliases of these accounts, sorted; accounts without one are left out."""

    async def was_deleted(self, noun: Noun, name: str) -> bool:
        """Tell whether a definition was deleted within the last day, and not made again."""

    async def find_kept_sources(self) -> list[StoredDefinition]:
        """Return the sources that say themselves how long finished events are kept."""

    async def definition_changes(self, since: int) -> DefinitionChanges:
        """Return what has changed since a version; only the version itself, where that is negative or too much has."""

    async def token_uses(self) -> dict[str, datetime]:
        """Return when each token was last used, by name, to the minute."""

    async def workers(self) -> list[StoredWorker]:
        """Return workers heard of in the last minute."""

    async def crossings(self) -> dict[str, datetime]:
        """Return watermarks that are crossed now, and since when."""

    async def check(self) -> list[Check]:
        """Check the conservation laws (R68) by scanning all rows. For `doctor`; may take a while."""

    async def size(self) -> int:
        """Return bytes on disk."""


class UpkeepStore(Protocol):
    """Upkeep of the store itself, and of dashboard sessions."""

    async def register_names(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        """Assign an id to every name, once and for ever."""

    def register_names_blocking(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        """Register like `register_names`, on a thread, even before `open` (PostgreSQL). Raises StoreUnavailable."""

    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        """Store hashes of the destinations' current addresses, by id, so that a replay can report a changed one."""

    async def prune(
        self,
        keep_events: Mapping[int, float],
        otherwise: float,
        limit: int = 500,
        only: Sequence[EventId] | None = None,
    ) -> Pruned:
        """Remove one short batch of what has outlived its time: events with everything about them, keys past their
        window, orphaned batches, old ranks, replays and audit entries, sessions that are over. Call again while it
        finds something.

        `keep_events` is in seconds by source id, `otherwise` for the others. Removes only events whose deliveries are
        all done or discarded; pending ones and dead letters stay (R67). Keys stay for their window (R20). With `only`,
        no other events are removed than these.
        """

    async def keep_media(self, event_id: EventId, media: StoredMedia) -> bool:
        """Note that a file of an event is kept; return False where the event is gone, or erased."""

    async def find_prunable(
        self, source_id: int, keep: float, after: bytes, limit: int
    ) -> tuple[list[EventId], bytes | None]:
        """Return which of a source's next events after that one `prune` would remove, and where to go on; None at the
        end."""

    async def read_archivable(self, ids: Sequence[EventId]) -> list[ArchivedEvent]:
        """Return events with their deliveries, to be archived, with bodies as they are stored: encrypted, or a
        reference."""

    async def restore(self, events: Sequence[ArchivedEvent], keep: float, actor: str) -> int:
        """Bring archived events back, with their deliveries, for so many seconds; return how many were not there.

        The opposite of `prune`: what was counted as purged no longer is. Neither keys nor work come back. Audited as
        `restore`.
        """

    async def roll_up(self) -> int:
        """Fold counters into hours once they are two days old, into days after nine; sums never change. Notes the
        store's size, too. Returns rows removed."""

    async def mark_watermark(self, name: str, crossed: bool) -> bool:
        """Store that a watermark is crossed, or no longer; return True to exactly one caller when that is a change."""

    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        """Begin a session that lasts so many seconds; when there are too many, end the oldest. Those of customers are
        counted apart."""

    async def get_session(self, hash: bytes) -> StoredSession | None:
        """Return a session; None when there is none, or it has ended. Writes nothing."""

    async def end_session(self, hash: bytes) -> None: ...

    async def take_link(self, hash: bytes, seconds: float) -> bool:
        """Store that a link, which is valid for so many more seconds, was used; return False where it was before."""

    async def note_token_use(self, name: str) -> None:
        """Store that a token is used now, unless that was stored within the last TOKEN_USE_SECONDS."""

    async def inbox_number(self) -> int:
        """Return the random number that identifies this store, drawn when it was created."""

    async def ping(self) -> None:
        """Prove that the store can commit a write right now; raises StoreUnavailable."""

    async def schema_state(self) -> SchemaState: ...


class Store(IntakeStore, QueueStore, AdminStore, ReadStore, UpkeepStore, Protocol):
    """Everything that oncehook asks of a database. Each verb is one transaction."""

    engine: Engine
    embedded: bool
    """Whether it is a file of the application's own: then every process of it works, unless it says otherwise."""
    lends_transactions: bool
    """Whether handlers and programs may write in a transaction of the store; else effects go through `event.commit`."""

    @property
    def is_alone(self) -> bool:
        """True where no other process uses the store; False where that cannot be told."""

    @property
    def owner(self) -> int | None:
        """Process that owns the store's file, as far as this one knows; None where the store is a server."""

    @property
    def learns_changes(self) -> bool:
        """True while changes of stored definitions are learnt of within a second, wherever they were made."""

    cipher: Cipher
    """Encrypts payloads; may be given other keys before `open`."""
    observer: StoreObserver

    def announce(self, address: str, token: str) -> None:
        """Let commands on this machine find this server, where it owns the store's file."""

    def free_disk(self) -> float | None:
        """Return the free part of the store's disk, from 0 to 1; None for a server's."""

    def free_bytes(self) -> int | None:
        """Return the free bytes of the store's disk; None for a server's."""

    def warning(self) -> str | None:
        """Return what `doctor` warns of in the database's own software; None where nothing is known against it."""

    async def open(self, observer: StoreObserver | None = None, *, migrate: bool = True, write: bool = True) -> None:
        """Connect, check that the engine keeps its promises (R2, R61, R66), and migrate the schema.

        `write=False` opens for reading only, beside a process that writes.
        Raises MigrationNeeded, SchemaTooNew, StoreHeld or StoreUnavailable.
        """

    async def close(self) -> None:
        """Commit what was accepted, refuse the rest, and close the database."""
