"""The words of the way out as values: leases, attempts, settlements, replays, and what is shown of them.

A *delivery* is one event for one destination. A worker *leases* it, makes an *attempt*, and *settles* it. Every lease
carries a *fence*: a number drawn anew each time, without which nothing about the delivery can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum, IntFlag, StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from oncehook.clauses import Clause
from oncehook.model import Intake, Item, Mark, Planned, Verdict

T = TypeVar("T")

DEATHS = 3
"""Crashes while it ran alone after which a delivery is dead, with reason `crash` (R36)."""

COVERED = 5000
"""Deliveries that one coalesced attempt covers at most."""

REPLAY_PAUSE = 60.0
"""Seconds between two replays of one delivery."""

ANSWER_KEPT = 4096
"""Bytes of a destination's answer that are kept."""

RESULT_KEPT = 16384
"""Bytes of a handler's result, as JSON, up to which it is kept whole."""


class Turn(IntEnum):
    """Whose turn it is: live work first, bulk replay behind it, what may have killed a worker alone."""

    live = 0
    replay = 1
    suspect = 2


class Options(IntFlag):
    """What its route or its replay asks of a delivery; kept with it, because routes may change while it waits."""

    none = 0
    coalesce_type = 1
    """Cover with one attempt all that waits on the subject and has the same type."""
    coalesce_any = 2
    """The same, of every type."""
    latest_wins = 4
    """Leave out what a higher rank has overtaken."""
    hold = 8
    """When it goes dead, its successors wait until it is replayed or discarded."""
    fresh_id = 16
    """This run is sent under a new id, for receivers that deduplicate."""


class DeliveryStatus(StrEnum):
    """Where a delivery stands. The store keeps `pending` for what is leased too; `leased` is read off its head."""

    pending = "pending"
    leased = "leased"
    done = "done"
    dead = "dead"
    discarded = "discarded"


class Category(StrEnum):
    """What kind of failure an attempt met: one that passes, one for good, or one that nobody can tell."""

    transient = "transient"
    permanent = "permanent"
    unknown = "unknown"


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    done = "done"
    retry = "retry"
    dead = "dead"
    crashed = "crashed"


class Trigger(StrEnum):
    """Why an attempt is made, as told in `Oncehook-Trigger`."""

    initial = "initial"
    retry = "retry"
    replay = "replay"
    bulk_replay = "bulk-replay"
    test = "test"
    """A person tries the destination out: no event stands behind it."""


# -- leasing -----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Want:
    """What a worker asks for: at most so many deliveries of one destination, each for so long."""

    destination_id: int
    limit: int
    lease: float
    """Seconds."""
    turn: Turn = Turn.live
    trust: int = 0
    """Crashes after which it must run alone: none for a handler, whose code runs in our process; some for HTTP."""
    probe: float = 30.0
    """Seconds until the next probe, when this lease is the one probe of a destination whose breaker is half open."""


@dataclass(slots=True)
class Lease:
    """A worker's right, for a limited time, to make the next attempt of one delivery."""

    line: bytes
    """The subject's row in `heads`; where there is no subject, the delivery's own id."""
    delivery_id: bytes
    """The delivery this attempt is for: of a coalesced line, the newest that it covers."""
    head_id: bytes
    """The delivery at the head of the line; the same, unless coalesced."""
    destination_id: int
    fence: int
    run: int
    attempt: int
    """Its number within the run, from 1."""
    deaths: int
    """Crashes while it ran alone. At DEATHS it is given out only to be settled dead."""
    turn: Turn
    options: Options
    replay_id: bytes | None
    seconds: float
    """For how long, from the moment it was given."""
    event_id: bytes
    source_id: int
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Mark
    rank: int | None
    rank_scope: str | None
    highest_rank: int | None
    """The highest rank delivered in its scope so far, where the latest wins; else None."""
    head: bytes
    """Of the request: see `unpack_head`."""
    body: bytes
    more: bool = False
    """Something waited behind it when it was given."""
    failing: bool = False
    """Failures were counted against its destination then: a success takes them off."""
    unreadable: str | None = None
    """Why head and body are missing: they cannot be decrypted. It is given out to be settled as a failure."""
    is_settling: bool = False
    """Its handler's own transaction settles it: the row is locked until the commit, and needs no heartbeat."""

    @classmethod
    def on_arrival(
        cls,
        intake: Intake,
        item: Item,
        planned: Planned,
        *,
        fence: int,
        seconds: float,
        source: str,
        received_at: datetime,
        more: bool,
    ) -> Lease:
        """Make the lease on a delivery that was leased in the commit which kept it."""
        return cls(
            line=planned.subject_key or planned.id,
            delivery_id=planned.id,
            head_id=planned.id,
            destination_id=planned.destination_id,
            fence=fence,
            run=1,
            attempt=1,
            deaths=0,
            turn=Turn.live,
            options=Options(planned.options),
            replay_id=None,
            seconds=seconds,
            event_id=item.event_id,
            source_id=intake.source_id,
            source=source,
            type=item.type,
            key=item.key,
            subject=item.subject,
            received_at=received_at,
            event_at=item.event_at,
            marks=item.marks,
            rank=item.rank,
            rank_scope=item.rank_scope,
            highest_rank=None,
            head=intake.headers,
            body=item.body,
            more=more,
        )

    @property
    def is_stale(self) -> bool:
        """Whether a higher rank has overtaken it. What a person asks for again is never stale."""
        return (
            self.run == 1 and self.rank is not None and self.highest_rank is not None and self.rank < self.highest_rank
        )

    @property
    def trigger(self) -> Trigger:
        """Why this attempt is made."""
        if self.attempt > 1:
            return Trigger.retry
        if self.replay_id is None:
            return Trigger.initial
        return Trigger.bulk_replay if self.turn is Turn.replay else Trigger.replay


@dataclass(slots=True, frozen=True)
class Expired:
    """A lease that ran out before its holder settled it, and was taken over: the holder died, hung, or is cut off."""

    delivery_id: bytes
    event_id: bytes
    destination_id: int
    fence: int
    run: int
    attempt: int
    """The one that its holder was making; it is given back."""
    worker: str | None
    """Who held it, where that is known."""


@dataclass(slots=True, frozen=True)
class Outlook:
    """Destinations that have work, and when the next will have. Paused ones do not count."""

    live: Collection[int] = ()
    """Destinations that have something live to be leased now."""
    replay: Collection[int] = ()
    """Destinations that have a bulk replay's delivery to be leased now."""
    suspect: Collection[int] = ()
    """Destinations that have a delivery to be leased now which must run alone."""
    due_in: float | None = None
    """Seconds until the next delivery of the destinations that were asked about may be leased; None when there is none.
    Those that may be leased now do not count."""
    looked_at: datetime | None = None
    """The moment to ask from next time, where that was asked."""

    @property
    def is_due(self) -> bool:
        """Whether anything may be leased now."""
        return bool(self.live or self.replay or self.suspect)


# -- settling ----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Breaker:
    """When a destination is held back: after so many failures in a row, for so long."""

    failures: int = 10
    open: float = 30.0


@dataclass(slots=True, frozen=True)
class Evidence:
    """What is known about how an attempt went."""

    status: int | None = None
    error: str | None = None
    answer: bytes | None = None
    """The first 4 KB of what the destination said, a traceback, or what a handler returned, as JSON."""


NOTHING = Evidence()


class Settle(StrEnum):
    """What becomes of a leased delivery."""

    done = "done"
    retry = "retry"
    dead = "dead"
    release = "release"
    """Given back untried: stop, rate limit, breaker, lost before start. The attempt does not count (R37)."""


@dataclass(slots=True)
class Emission:
    """An event that a handler emits: it exists if, and only if, its delivery is settled as done (R54)."""

    intake: Intake
    tell: Callable[[Verdict], None]
    """Is told on the loop what became of it."""
    verdict: Verdict | None = None
    """What the store decided; it holds once the settlement is committed."""

    def committed(self) -> None:
        """Tell whoever wants to know."""
        if self.verdict is not None:
            self.tell(self.verdict)


@dataclass(slots=True, frozen=True)
class Settlement:
    """The end of a lease. Refused when the lease is no longer ours."""

    lease: Lease
    what: Settle
    wait: float = 0.0
    """Seconds until the next attempt (retry, release)."""
    category: Category | None = None
    note: str | None = None
    """`stale`: finished without attempt, because a higher rank came before. No attempt row is written for it."""
    evidence: Evidence = NOTHING
    duration: float = 0.0
    """Seconds that the attempt took."""
    breaker: Breaker | None = None
    """The destination's, where this outcome says something about it; None where it does not."""
    pause: str | None = None
    """Why the destination is to be paused along with it (410)."""
    commit: Callable[[Any], object] | None = None
    """SQLite: the handler's effect, run inside the transaction that settles, with a connection that cannot commit."""
    emits: Sequence[Emission] = ()
    """Events that are kept in the same commit; for what is done only."""
    take_next: float | None = None
    """Lease the next delivery of the subject in the same commit, for so many seconds; for what is done only."""

    @property
    def reached(self) -> set[int]:
        """The destinations of what it emits."""
        return {d.destination_id for emission in self.emits for item in emission.intake.items for d in item.deliveries}


@dataclass(slots=True, frozen=True)
class Settled:
    """Result of a group of settlements."""

    ours: Collection[int] = frozenset()
    """The fences that were still ours."""
    next: Sequence[Lease] = ()
    """Leases on what comes next, where that was asked for."""


def is_over(settlement: Settlement) -> bool:
    """Tell whether it finishes the head of its line, so that the line goes on; a held dead letter stays the head."""
    if settlement.what is Settle.dead:
        return not settlement.lease.options & Options.hold
    return settlement.what is Settle.done


def is_crash(settlement: Settlement) -> bool:
    """Tell whether it is given up because it keeps killing its worker, and was not even tried (R36)."""
    return settlement.what is Settle.dead and settlement.evidence.error == "crash" and settlement.lease.deaths >= DEATHS


def was_tried(settlement: Settlement) -> bool:
    """Tell whether there was an attempt to write down."""
    return settlement.what is not Settle.release and settlement.note != "stale" and not is_crash(settlement)


@dataclass(slots=True)
class Streak:
    """What a group of settlements says about one destination: whether any was well, and how many failed since."""

    breaker: Breaker
    reset: bool = False
    failures: int = 0
    last_failed: bytes | None = None
    """Failures in a row count over different deliveries: one stubborn delivery does not open a breaker."""


def streaks(settlements: Sequence[Settlement]) -> dict[int, Streak]:
    """The streaks of a group of settlements, in their order, by destination."""
    found: dict[int, Streak] = {}
    for settlement in settlements:
        if settlement.breaker is None or settlement.what is Settle.release:
            continue
        streak = found.setdefault(settlement.lease.destination_id, Streak(settlement.breaker))
        if settlement.what is Settle.done:
            streak.reset, streak.failures, streak.last_failed = True, 0, None
        elif streak.last_failed != settlement.lease.delivery_id:
            streak.failures += 1
            streak.last_failed = settlement.lease.delivery_id
    return found


# -- looking -----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Page(Generic[T]):
    """Part of a list, newest first."""

    items: Sequence[T]
    next: bytes | None = None
    """Where to go on; None at the end. A page may hold less than was asked for and still have a next one."""


@dataclass(slots=True, frozen=True)
class Filter:
    """What a list or a replay is about. Everything that is given must hold."""

    ids: Sequence[bytes] | None = None
    """Deliveries by their own ids."""
    event_id: bytes | None = None
    source: str | None = None
    sources: Sequence[str] | None = None
    """Only events of these: what somebody may see of what they ask for. No word of a query."""
    destination: str | None = None
    status: DeliveryStatus | None = None
    type: str | None = None
    """A pattern with `*` and `?`."""
    subject: str | None = None
    key: str | None = None
    category: Category | None = None
    note: str | None = None
    code: str | None = None
    """Status code of the last attempt: `503`, or a class of them, `5xx`."""
    attempts_above: int | None = None
    attempts_below: int | None = None
    is_replayed: bool | None = None
    """True: only those that a replay has run again."""
    replay_id: bytes | None = None
    since: datetime | None = None
    """Received at or after."""
    until: datetime | None = None
    """Received before."""
    text: str | None = None
    """Occurs in key, subject, type or last error."""
    body: Sequence[Clause] | None = None
    """What the body must say; all of it."""


@dataclass(slots=True, frozen=True)
class StoredAttempt:
    """One try, as it is kept."""

    delivery_id: bytes
    fence: int
    run: int
    n: int
    started_at: datetime
    ended_at: datetime
    outcome: AttemptOutcome
    category: Category | None
    evidence: Evidence

    @property
    def id(self) -> bytes:
        """16 bytes that stand for it: where its delivery's id begins, and its fence."""
        return self.delivery_id[:8] + self.fence.to_bytes(8)

    @property
    def result(self) -> bytes | None:
        """What a handler returned, as JSON: kept as the answer of an attempt that went well without any status."""
        is_handlers = self.outcome is AttemptOutcome.done and self.evidence.status is None
        return self.evidence.answer if is_handlers else None

    def without_answer(self) -> StoredAttempt:
        """Return it without what the destination answered, or the handler returned."""
        return replace(self, evidence=replace(self.evidence, answer=None))


@dataclass(slots=True, frozen=True)
class StoredDelivery:
    """A delivery as it is shown."""

    id: bytes
    event_id: bytes
    source: str
    destination: str
    type: str
    key: str | None
    subject: str | None
    status: DeliveryStatus
    note: str | None
    run: int
    attempts: int
    """Of this run so far, one under way included."""
    category: Category | None
    """Of the last attempt."""
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    """When it may be tried next; while leased, when the lease ends. None when settled, behind another, or held."""
    received_at: datetime
    settled_at: datetime | None
    last_replay_at: datetime | None
    replay_id: bytes | None
    reason: str | None
    """Why it was discarded, or why it is dead without an attempt to blame (`crash`)."""
    blocked_by: bytes | None = None
    """The delivery at the head of its subject, when that is another one."""

    @property
    def is_replayed(self) -> bool:
        """Whether a replay has run it again."""
        return self.replay_id is not None


class ListedDelivery(NamedTuple):
    """A delivery beside its event in a list."""

    id: bytes
    destination: str
    status: DeliveryStatus
    note: str | None
    run: int
    replay_id: bytes | None
    """The latest replay that has run it again."""

    @property
    def is_replayed(self) -> bool:
        return self.replay_id is not None


@dataclass(slots=True, frozen=True)
class ListedEvent:
    """An event in a list: without its body, with what became of it."""

    id: bytes
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Mark
    size: int
    copies: int
    deliveries: Sequence[ListedDelivery]


@dataclass(slots=True, frozen=True)
class Cause:
    """Dead letters that died of the same thing."""

    destination: str
    cause: str
    """The first line of the error, or `HTTP 404`, or `crash`."""
    count: int
    first_at: datetime
    last_at: datetime
    sample: bytes
    """The latest of them."""


@dataclass(slots=True, frozen=True)
class Level:
    """How a destination stands now."""

    pending: int = 0
    """Those that are leased included."""
    leased: int = 0
    done: int = 0
    dead: int = 0
    discarded: int = 0
    oldest_due: float | None = None
    """Seconds for which the oldest has been due; None when nothing is."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    paused_why: str | None = None
    failures: int = 0
    """In a row, as the breaker counts them."""
    open_until: datetime | None = None
    """The breaker is open: nothing is tried before."""


@dataclass(slots=True, frozen=True)
class StoredWorker:
    """A worker that has lately been heard of."""

    id: str
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    leases: int
    destinations: Sequence[str]


@dataclass(slots=True, frozen=True)
class Audited:
    """Something a person or program did."""

    n: int
    at: datetime
    actor: str
    act: str
    target: str
    detail: Mapping[str, object]


# -- sweeping ----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Pruned:
    """What one short batch of pruning removed."""

    events: int = 0
    keys: int = 0
    batches: int = 0
    others: int = 0
    """Ranks, finished replays, old audit lines, sessions that are over."""

    def __bool__(self) -> bool:
        return bool(self.events or self.keys or self.batches or self.others)
