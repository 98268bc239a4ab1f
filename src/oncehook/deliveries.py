"""The words of the way out as values: leases, attempts, settlements, replays.

A *delivery* is one event for one destination. A worker *leases* it, makes an *attempt*, and *settles* it. Every lease
carries a *fence*: a number drawn anew each time, without which nothing about the delivery can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, IntFlag, StrEnum

from oncehook.model import DeliveryStatus, Mark


class Turn(IntEnum):
    """Whose turn it is: live work first, bulk replay behind it, what may have killed a worker alone."""

    live = 0
    replay = 1
    suspect = 2


class Options(IntFlag):
    """What its route asks of a delivery; kept with it, because routes may change while it waits."""

    none = 0
    coalesce_type = 1
    """Cover with one attempt all that waits on the subject and has the same type."""
    coalesce_any = 2
    """The same, of every type."""
    latest_wins = 4
    """Leave out what a higher rank has overtaken."""
    hold = 8
    """When it goes dead, its successors wait until it is replayed or discarded."""


class Category(StrEnum):
    """What kind of failure an attempt met."""

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


@dataclass(slots=True, frozen=True)
class Want:
    """What a worker asks for: at most so many deliveries of one destination, each for so long."""

    destination_id: int
    limit: int
    lease: float
    turn: Turn = Turn.live
    isolates: bool = False
    """Whether what was found leased after a crash must next run alone (handlers: their code runs in our process)."""


@dataclass(slots=True)
class Lease:
    """A worker's right, for a limited time, to make the next attempt of one delivery."""

    line: bytes
    """The subject's place in `heads`, or the delivery's own id where it has no subject."""
    delivery_id: bytes
    """The delivery this attempt is for: of a coalesced line, the newest that it covers."""
    head_id: bytes
    """The delivery at the head of the line; the same, unless coalesced."""
    destination_id: int
    fence: int
    run: int
    attempt: int
    """Its number within the run, from 1."""
    crashes: int
    turn: Turn
    replay_id: bytes | None
    event_id: bytes
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Mark
    rank: int | None
    rank_scope: str | None
    options: Options
    highest_rank: int | None
    """The highest rank delivered in its scope so far, where the route asks that the latest wins."""
    head: bytes
    body: bytes

    @property
    def is_stale(self) -> bool:
        """Whether a higher rank has overtaken it."""
        return self.rank is not None and self.highest_rank is not None and self.rank < self.highest_rank


@dataclass(slots=True, frozen=True)
class Evidence:
    """What is known about how an attempt went."""

    status: int | None = None
    error: str | None = None
    answer: bytes | None = None
    """The first 4 KB of what the destination said."""


class Settle(StrEnum):
    """What becomes of a leased delivery."""

    done = "done"
    retry = "retry"
    dead = "dead"
    release = "release"
    """Given back untried: stop, rate limit, breaker, lost before start. The attempt does not count (R37)."""


@dataclass(slots=True, frozen=True)
class Settlement:
    """The end of a lease. Refused when the lease is no longer ours."""

    lease: Lease
    what: Settle
    wait: float = 0.0
    """Seconds until the next attempt (retry, release)."""
    category: Category | None = None
    note: str | None = None
    """`stale`: finished without attempt, because a higher rank came before."""
    evidence: Evidence = Evidence()
    started_at: datetime | None = None
    """When the attempt began; None: there was none."""


@dataclass(slots=True, frozen=True)
class Breaker:
    """When a destination is held back: after so many failures in a row, for so long."""

    failures: int = 10
    open: float = 30.0


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
    """Attempts of this run so far."""
    category: Category | None
    last_error: str | None
    due_at: datetime | None
    """When it is tried next; None when it is settled, waits behind another, or is held."""
    received_at: datetime
    settled_at: datetime | None
    last_replay_at: datetime | None
    replay_id: bytes | None


class ReplayState(StrEnum):
    """Where a replay stands."""

    running = "running"
    paused = "paused"
    done = "done"
    aborted = "aborted"


@dataclass(slots=True, frozen=True)
class Selection:
    """Which deliveries a replay is for: those named, or those that match."""

    ids: Sequence[bytes] = ()
    source: str | None = None
    destination: str | None = None
    statuses: Sequence[DeliveryStatus] = (DeliveryStatus.dead,)
    type: str | None = None
    """A pattern with `*`."""
    subject: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(slots=True, frozen=True)
class ReplayOrder:
    """What a person or program asks for."""

    selection: Selection
    actor: str
    reason: str = ""
    force: bool = False
    """Send the done ones too."""
    fresh_id: bool = False
    rate: float | None = None
    bulk: bool = True
    request_key: str | None = None
    """The same request key gets the same replay, and makes no second one (R47)."""


@dataclass(slots=True, frozen=True)
class StoredReplay:
    """A replay as it is kept: what was asked, and how far it is."""

    id: bytes
    state: ReplayState
    order: Mapping[str, object]
    actor: str
    reason: str
    planned: int
    fed: int
    done: int
    failed: int
    skipped: int
    created_at: datetime
    finished_at: datetime | None


@dataclass(slots=True, frozen=True)
class ReplayPlan:
    """What a replay would do, before anybody confirms it."""

    total: int
    by_destination: Mapping[str, int] = field(default_factory=dict)
    by_status: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    oldest: datetime | None = None
    newest: datetime | None = None
    sample: Sequence[StoredDelivery] = ()
