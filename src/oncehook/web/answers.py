"""What the API answers, as shapes: each says which fields there are, and how they are filled from the desk's values.

`api` encodes them as JSON, `openapi` describes them. Ids leave in their text form, times in UTC. Names are those of
DESIGN.md; the fields of a delivery and of the stats are part of the public contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from oncehook import deliveries, model, plans, shown, stats, watermarks
from oncehook.model import Kind, show_id
from oncehook.query import fixed
from oncehook.replays import StoredReplay


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """Something that is answered."""


T = TypeVar("T", bound=Answer)


def _fill(kind: type[T], *values: object, **given: object) -> T:
    """An answer whose fields are those of the same name in these values of the desk's, but for those that are given."""
    fields = {name: given[name] if name in given else _named(name, values) for name in kind.__struct_fields__}
    return kind(**fields)


def _named(name: str, values: Sequence[object]) -> object:
    return getattr(next(value for value in values if hasattr(value, name)), name)


def _id(kind: Kind, value: bytes | None) -> str | None:
    return None if value is None else show_id(kind, value)


class Error(Answer, frozen=True):
    """Why something was not done."""

    error: str
    code: str
    hint: str


# -- events ------------------------------------------------------------------------------------


class DeliveryChip(Answer, frozen=True):
    """A delivery in a word."""

    destination: str
    status: str
    note: str | None


class ListedEvent(Answer, frozen=True):
    """An event in a list."""

    id: str
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Sequence[str]
    size: int
    copies: int
    deliveries: Sequence[DeliveryChip]


def listed_event(event: deliveries.ListedEvent) -> ListedEvent:
    return _fill(
        ListedEvent,
        event,
        id=show_id(Kind.event, event.id),
        marks=_marks(event.marks),
        deliveries=[DeliveryChip(destination=d, status=s, note=n) for d, s, n in event.deliveries],
    )


def _marks(marks: model.Mark) -> list[str]:
    return [mark.name for mark in marks if mark.name]


class Delivery(Answer, frozen=True):
    """One event for one destination."""

    id: str
    event_id: str
    source: str
    destination: str
    type: str
    key: str | None
    subject: str | None
    status: str
    category: str | None
    note: str | None
    attempts: int
    run: int
    due_at: datetime | None
    last_status: int | None
    last_error: str | None
    last_replay_at: datetime | None
    replay_id: str | None
    reason: str | None
    received_at: datetime
    settled_at: datetime | None
    blocked_by: str | None


def delivery(kept: deliveries.StoredDelivery) -> Delivery:
    return _fill(
        Delivery,
        kept,
        id=show_id(Kind.delivery, kept.id),
        event_id=show_id(Kind.event, kept.event_id),
        replay_id=_id(Kind.replay, kept.replay_id),
        blocked_by=_id(Kind.delivery, kept.blocked_by),
    )


class Event(Answer, frozen=True):
    """An event with everything about it but its body."""

    id: str
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Sequence[str]
    size: int
    copies: int
    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    deliveries: Sequence[Delivery]


def event(found: shown.ShownEvent) -> Event:
    kept = found.event
    return _fill(
        Event,
        kept,
        found.request,
        id=show_id(Kind.event, kept.id),
        marks=_marks(kept.marks),
        size=len(kept.body),
        deliveries=[delivery(one) for one in found.deliveries],
    )


class Arrival(Answer, frozen=True):
    """One time that an event came."""

    id: str
    outcome: str
    at: datetime
    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body_differs: bool


def arrival(came: shown.ShownArrival) -> Arrival:
    return _fill(Arrival, came, came.request, id=show_id(Kind.arrival, came.id))


class Attempt(Answer, frozen=True):
    """One try of a delivery. `attempt` counts within the run; `duration` is in seconds."""

    id: str
    delivery_id: str
    run: int
    attempt: int
    outcome: str
    category: str | None
    status: int | None
    error: str | None
    answer: str | None
    started_at: datetime
    ended_at: datetime
    duration: float


def attempt(made: deliveries.StoredAttempt) -> Attempt:
    told = made.evidence.answer
    return _fill(
        Attempt,
        made,
        made.evidence,
        id=show_id(Kind.attempt, made.id),
        delivery_id=show_id(Kind.delivery, made.delivery_id),
        attempt=made.n,
        answer=None if told is None else told.decode("utf-8", "replace"),
        duration=round((made.ended_at - made.started_at).total_seconds(), 6),
    )


class Cause(Answer, frozen=True):
    """Dead letters that died of the same thing."""

    destination: str
    cause: str
    count: int
    first_at: datetime
    last_at: datetime
    sample: str


def cause(found: deliveries.Cause) -> Cause:
    return _fill(
        Cause,
        found,
        sample=show_id(Kind.delivery, found.sample),
    )


class Discarded(Answer, frozen=True):
    """How many dead letters were closed."""

    discarded: int


# -- replays -----------------------------------------------------------------------------------


class Replayed(Answer, frozen=True):
    """The replay that was made, or had been made by the same request."""

    replay_id: str


class Replay(Answer, frozen=True):
    """A replay and how far it is."""

    id: str
    state: str
    query: str
    command: str
    actor: str
    reason: str
    bulk: bool
    rate: float | None
    planned: int
    fed: int
    done: int
    dead: int
    skipped: int
    created_at: datetime
    finished_at: datetime | None


def replay_of(kept: StoredReplay) -> Replay:
    return _fill(
        Replay,
        kept,
        id=show_id(Kind.replay, kept.id),
        query=str(kept.about.get("query", "")),
        command=str(kept.about.get("command", "")),
    )


class Recipient(Answer, frozen=True):
    """Who would get it."""

    destination: str
    count: int
    kind: str
    address: str
    paused: bool
    failing: bool


class Plan(Answer, frozen=True):
    """What a replay would do. `plan` stands for it: hand it to POST replays to have exactly that done."""

    plan: str
    total: int
    query: str
    command: str
    force: bool
    fresh_id: bool
    rate: float | None
    by_destination: Mapping[str, int]
    recipients: Sequence[Recipient]
    by_status: Mapping[str, int]
    left_out: Mapping[str, int]
    oldest: datetime | None
    newest: datetime | None
    sample: Sequence[Delivery]
    previews: Mapping[str, Mapping[str, str]]
    expected_seconds: float | None
    notes: Sequence[str]


def plan(made: plans.Plan) -> Plan:
    return _fill(
        Plan,
        made,
        made.wish,
        plan=made.token,
        query=fixed(made.wish.filter),
        command=plans.command(made.wish),
        by_destination={recipient.destination: recipient.count for recipient in made.recipients},
        recipients=[_fill(Recipient, one) for one in made.recipients],
        by_status={str(status): n for status, n in made.by_status.items()},
        left_out={str(status): n for status, n in made.left_out.items()},
        sample=[delivery(one) for one in made.sample],
        previews={show_id(Kind.delivery, one): {"to": it.to, "text": it.text} for one, it in made.previews.items()},
    )


# -- what is set up, and how it goes -----------------------------------------------------------


class Source(Answer, frozen=True):
    """A source. `address` is null for a viewer where it is a secret itself; `secrets` says only how many there are."""

    name: str
    preset: str | None
    title: str | None
    address: str | None
    verifier: str
    unverified: bool
    loopback_only: bool
    secrets: int
    key: str
    subject: str
    type: str
    destinations: Sequence[str]
    last_arrival: datetime | None
    figures: Mapping[str, int]


def source(found: shown.ShownSource, *, with_address: bool) -> Source:
    return _fill(Source, found, address=found.address if with_address or not found.hidden else None)


class Destination(Answer, frozen=True):
    """A destination: whom it reaches, on what terms, how it stands. Spans are in seconds."""

    name: str
    kind: str
    address: str
    retry: str
    timeout: float
    lease: float
    concurrency: int
    rate: float | None
    sources: Sequence[str]
    pending: int
    leased: int
    done: int
    dead: int
    discarded: int
    oldest_due: float | None
    paused: bool
    paused_at: datetime | None
    paused_by: str | None
    paused_why: str | None
    breaker: str
    failures: int
    open_until: datetime | None
    figures: Mapping[str, int]


def destination(found: shown.ShownDestination) -> Destination:
    level = found.level
    pending, paused = level.pending - level.leased, level.paused_at is not None
    return _fill(Destination, found, level, pending=pending, paused=paused)


class Watermark(Answer, frozen=True):
    """A level and its limit."""

    name: str
    level: float | None
    limit: float
    crossed: bool


def watermark(mark: watermarks.Watermark) -> Watermark:
    return _fill(Watermark, mark)


class Stats(Answer, frozen=True):
    """The numbers since a moment."""

    since: datetime
    total: int
    by_status: Mapping[str, int]
    dead: int
    duplicates: int
    conflicts: int
    rejected: int
    retries: int
    replays: int
    last_replay_at: datetime | None
    per_day: Mapping[str, Mapping[str, int]]
    volume_today: int
    watermarks: Sequence[Watermark]
    by: Mapping[str, Mapping[str, int]] | None


def stats_of(counted: stats.Stats) -> Stats:
    return _fill(
        Stats,
        counted,
        by_status={str(status): n for status, n in counted.by_status.items()},
        watermarks=[watermark(mark) for mark in counted.watermarks],
    )


class Point(Answer, frozen=True):
    """What was counted in the step that begins at a moment."""

    at: datetime
    count: int


class Series(Answer, frozen=True):
    """Flows by name."""

    since: datetime
    step: float
    series: Mapping[str, Sequence[Point]]


class Rejection(Answer, frozen=True):
    """An arrival that was turned away."""

    source: str
    at: datetime
    code: str
    reason: str
    peer: str
    size: int


def rejection(found: model.Rejection) -> Rejection:
    return _fill(Rejection, found)


class Audit(Answer, frozen=True):
    """Something a person or program did."""

    n: int
    at: datetime
    actor: str
    act: str
    target: str
    detail: Mapping[str, Any]


def audit(line: deliveries.Audited) -> Audit:
    return _fill(Audit, line)


class Worker(Answer, frozen=True):
    """A worker that has lately been heard of."""

    id: str
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    leases: int
    destinations: Sequence[str]


class System(Answer, frozen=True):
    """The whole, from outside."""

    version: str
    store: str
    schema: int
    schema_target: int
    size: int
    workers: Sequence[Worker]
    watermarks: Sequence[Watermark]


def system(found: shown.System) -> System:
    return _fill(
        System,
        found,
        store=found.engine,
        schema=found.schema.current,
        schema_target=found.schema.target,
        workers=[_fill(Worker, one) for one in found.workers],
        watermarks=[watermark(mark) for mark in found.watermarks],
    )
