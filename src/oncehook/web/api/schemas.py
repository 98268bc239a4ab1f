"""What the API answers about the inbox itself, as shapes: what is set up, how it goes, who did what.

As in `answers`, values of the desk come in. The fields of the stats are part of the public contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from oncehook import model, replay, reports, upkeep
from oncehook.model import Kind, StoredReplay, show_id
from oncehook.query import fixed
from oncehook.samples import Tested as Outcome
from oncehook.web.auth import Identity, Role


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """Something that is answered."""


T = TypeVar("T", bound=Answer)


def fill(kind: type[T], *values: object, **given: object) -> T:
    """An answer whose fields are those of the same name in these values of the desk's, but for those that are given."""
    fields = {name: given[name] if name in given else _named(name, values) for name in kind.__struct_fields__}
    return kind(**fields)


def _named(name: str, values: Sequence[object]) -> object:
    return getattr(next(value for value in values if hasattr(value, name)), name)


def show_optional_id(kind: Kind, value: bytes | None) -> str | None:
    return None if value is None else show_id(kind, value)


class Error(Answer, frozen=True):
    """Why something was not done."""

    error: str
    code: str
    hint: str


# -- events ------------------------------------------------------------------------------------


class DeliveryChip(Answer, frozen=True):
    """A delivery in a word. `replay_id` is the latest replay that has run it again, as `run`."""

    id: str
    destination: str
    status: str
    note: str | None
    replayed: bool
    run: int
    replay_id: str | None


def _chip(one: model.ListedDelivery) -> DeliveryChip:
    return fill(
        DeliveryChip,
        one,
        id=show_id(Kind.delivery, one.id),
        replayed=one.is_replayed,
        replay_id=show_optional_id(Kind.replay, one.replay_id),
    )


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


def listed_event(event: model.ListedEvent) -> ListedEvent:
    return fill(
        ListedEvent,
        event,
        id=show_id(Kind.event, event.id),
        marks=_marks(event.marks),
        deliveries=[_chip(one) for one in event.deliveries],
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
    replayed: bool
    last_replay_at: datetime | None
    replay_id: str | None
    reason: str | None
    received_at: datetime
    settled_at: datetime | None
    blocked_by: str | None


def delivery(kept: model.StoredDelivery) -> Delivery:
    return fill(
        Delivery,
        kept,
        id=show_id(Kind.delivery, kept.id),
        event_id=show_id(Kind.event, kept.event_id),
        replayed=kept.is_replayed,
        replay_id=show_optional_id(Kind.replay, kept.replay_id),
        blocked_by=show_optional_id(Kind.delivery, kept.blocked_by),
    )


class Event(Answer, frozen=True):
    """An event with everything about it but its body.

    `same_body_as` is the event in which the same signed body came before, under another key. What its source's check
    covers is null where there is no such source any more.
    """

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
    same_body_as: str | None
    body_authenticated: bool | None
    key_authenticated: bool | None
    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    deliveries: Sequence[Delivery]


def event(found: reports.ShownEvent) -> Event:
    kept = found.event
    return fill(
        Event,
        kept,
        found,
        found.request,
        same_body_as=show_optional_id(Kind.event, kept.same_as),
        id=show_id(Kind.event, kept.id),
        marks=_marks(kept.marks),
        size=found.size,
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


def arrival(came: reports.ShownArrival) -> Arrival:
    return fill(Arrival, came, came.request, id=show_id(Kind.arrival, came.id))


class Attempt(Answer, frozen=True):
    """One try of a delivery. `attempt` counts within the run; `duration` is in seconds.

    `answer` is what a destination said, or a traceback; `result` what a handler returned.
    """

    id: str
    delivery_id: str
    run: int
    attempt: int
    outcome: str
    category: str | None
    status: int | None
    error: str | None
    answer: str | None
    result: Any
    started_at: datetime
    ended_at: datetime
    duration: float


def attempt(made: model.StoredAttempt) -> Attempt:
    told = made.evidence.answer if made.result is None else None
    return fill(
        Attempt,
        made,
        made.evidence,
        id=show_id(Kind.attempt, made.id),
        delivery_id=show_id(Kind.delivery, made.delivery_id),
        attempt=made.n,
        answer=None if told is None else told.decode("utf-8", "replace"),
        result=None if made.result is None else msgspec.json.decode(made.result),
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


def cause(found: model.Cause) -> Cause:
    return fill(
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
    return fill(
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
    changed: int


class Preview(Answer, frozen=True):
    """What a delivery says: who gets it, what a person reads, and when it was received."""

    to: str
    text: str
    at: datetime


class Plan(Answer, frozen=True):
    """What a replay would do. `plan` stands for it: hand it to POST replays to have exactly that done, or to
    POST dead/discard to close what it has shown.
    """

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
    previews: Mapping[str, Preview]
    expected_seconds: float | None
    notes: Sequence[str]


def plan(made: replay.Plan) -> Plan:
    return fill(
        Plan,
        made,
        made.wish,
        plan=made.token,
        query=fixed(made.wish.filter),
        command=replay.command(made.wish),
        by_destination={recipient.destination: recipient.count for recipient in made.recipients},
        recipients=[fill(Recipient, one) for one in made.recipients],
        by_status={str(status): n for status, n in made.by_status.items()},
        left_out={str(status): n for status, n in made.left_out.items()},
        sample=[delivery(one) for one in made.sample],
        previews={
            show_id(Kind.delivery, one.id): fill(Preview, made.previews[one.id], at=one.received_at)
            for one in made.sample
            if one.id in made.previews
        },
    )


# -- what is set up ----------------------------------------------------------------------------


class Source(Answer, frozen=True):
    """A source. `address` is null for a viewer where it is a secret itself; `secrets` says only how many there are."""

    name: str
    preset: str | None
    title: str | None
    address: str | None
    verifier: str
    unverified: bool
    body_authenticated: bool
    key_authenticated: bool
    loopback_only: bool
    secrets: int
    key: str
    subject: str
    type: str
    destinations: Sequence[str]
    last_arrival: datetime | None
    figures: Mapping[str, int]


def source(found: reports.ShownSource, *, with_address: bool) -> Source:
    return fill(Source, found, address=found.address if with_address or not found.hidden else None)


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
    state: str
    paused: bool
    paused_at: datetime | None
    paused_by: str | None
    paused_why: str | None
    breaker: str
    failures: int
    open_until: datetime | None
    figures: Mapping[str, int]


def destination(found: reports.ShownDestination) -> Destination:
    level = found.level
    pending, paused = level.pending - level.leased, level.paused_at is not None
    return fill(Destination, found, level, pending=pending, paused=paused)


# -- how it goes ------------------------------------------------------------------------------


class Watermark(Answer, frozen=True):
    """A level and its limit."""

    name: str
    level: float | None
    limit: float
    crossed: bool


def watermark(mark: upkeep.Watermark) -> Watermark:
    return fill(Watermark, mark)


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


def stats_of(counted: reports.Stats) -> Stats:
    return fill(
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
    return fill(Rejection, found)


class Audit(Answer, frozen=True):
    """Something a person or program did."""

    n: int
    at: datetime
    actor: str
    act: str
    target: str
    detail: Mapping[str, Any]


def audit(line: model.Audited) -> Audit:
    return fill(Audit, line)


class Token(Answer, frozen=True):
    """Who holds a token and what it may do; never the token. `sources` is null where it sees all of them, `last_used`
    is to the minute.
    """

    name: str
    role: str
    sources: Sequence[str] | None
    payloads: bool
    expires: datetime | None
    expired: bool
    last_used: datetime | None


def token(holder: Identity, last_used: datetime | None) -> Token:
    return fill(
        Token,
        holder,
        role=holder.role.name,
        sources=None if holder.sources is None else sorted(holder.sources),
        expired=holder.has_expired,
        last_used=last_used,
    )


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


def system(found: reports.System) -> System:
    return fill(
        System,
        found,
        store=found.engine,
        schema=found.schema.current,
        schema_target=found.schema.target,
        workers=[fill(Worker, one) for one in found.workers],
        watermarks=[watermark(mark) for mark in found.watermarks],
    )


# -- acts of an admin, and trials ---------------------------------------------------------------


class Remembered(Answer, frozen=True):
    """How many of them were new, and how many were known already."""

    new: int
    known: int


class Erased(Answer, frozen=True):
    """How much was erased, or would be. `shared_batches` are raw requests that held events of others too; these stay.

    `subject_hash` is what the audit log says in place of the subject.
    """

    subject_hash: str
    dry_run: bool
    events: int
    deliveries: int
    attempts: int
    arrivals: int
    batches: int
    shared_batches: int
    remaining: int


class Tested(Answer, frozen=True):
    """How a destination answered a test. `status`, `error` and `seconds` are for an admin; for others they are null."""

    destination: str
    answered: str
    status: int | None
    error: str | None
    seconds: float | None


def tested(outcome: Outcome, identity: Identity) -> Tested:
    """What somebody may learn of a test."""
    if identity.role >= Role.admin:
        return fill(Tested, outcome, seconds=round(outcome.seconds, 3))
    return fill(Tested, outcome, status=None, error=None, seconds=None)


class Sampled(Answer, frozen=True):
    """What became of a sample: the status its sender would have got, and the events it stands for."""

    source: str
    type: str
    status: int
    outcome: str
    event_ids: Sequence[str]
