"""The words of replays as values: what is asked for, what would happen, and how far it is.

A *replay* asks that kept deliveries be made again: each gets a new run, behind live traffic where there are many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from oncehook.deliveries import DeliveryStatus, Filter, StoredDelivery

NOTHING = "There is nothing to replay."
NOTHING_HINT = "Ask for a plan: it says what matches, and what of it is left out."


class ReplayState(StrEnum):
    """Where a replay stands."""

    running = "running"
    paused = "paused"
    done = "done"
    aborted = "aborted"


@dataclass(slots=True, frozen=True)
class ReplayOrder:
    """What a person or program asks for."""

    filter: Filter
    actor: str
    reason: str = ""
    force: bool = False
    """The done ones too."""
    fresh_id: bool = False
    rate: float | None = None
    """Deliveries a second at most."""
    bulk: bool = True
    """Behind live traffic, fed little by little; else one delivery, at once."""
    request_key: str | None = None
    """The same request key gets the same replay, and makes no second one (R47)."""
    expected: int | None = None
    """How many the plan had said: when it is another number now, nothing is done (PlanChanged)."""
    about: Mapping[str, object] = field(default_factory=dict)
    """The order in the words in which it was given, to be shown."""
    noted: Mapping[str, object] = field(default_factory=dict)
    """The same for the audit log, without the subject: a line stays as it is, also when the subject is erased."""

    def audited(self, count: int) -> dict[str, object]:
        """What the audit log says of it, when it has found so many."""
        return {"count": count, "reason": self.reason, "bulk": self.bulk, **self.noted}


@dataclass(slots=True, frozen=True)
class StoredReplay:
    """A replay as it is kept: what was asked, and how far it is."""

    id: bytes
    state: ReplayState
    about: Mapping[str, object]
    actor: str
    reason: str
    bulk: bool
    rate: float | None
    planned: int
    fed: int
    """Handed to workers so far."""
    done: int
    dead: int
    skipped: int
    """Left out when their turn came: worked on by then, replayed a moment ago, or pruned."""
    created_at: datetime
    finished_at: datetime | None


@dataclass(slots=True, frozen=True)
class Seen:
    """What somebody has been shown, and says yes to."""

    count: int
    at: datetime
    """When, by the store's clock."""


@dataclass(slots=True, frozen=True)
class ReplayPlan:
    """What a replay would do, before anybody confirms it."""

    total: int
    at: datetime
    """When it was made, by the store's clock."""
    by_destination: Mapping[str, int] = field(default_factory=dict)
    by_status: Mapping[DeliveryStatus, int] = field(default_factory=dict)
    left_out: Mapping[DeliveryStatus, int] = field(default_factory=dict)
    """Matching, but not replayed: being worked on, or done and not asked for."""
    oldest: datetime | None = None
    newest: datetime | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    """Those whose first attempt went to another address than their destination has now, by destination."""
    sample: Sequence[StoredDelivery] = ()
    """The first five."""
