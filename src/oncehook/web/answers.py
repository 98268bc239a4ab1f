"""What the API answers about events, deliveries and replays, as shapes: each says which fields there are.

Values of the desk come in; `api` encodes what goes out as JSON, and `openapi` describes it. Ids leave in their text
form, times in UTC. Names are those of DESIGN.md; the fields of a delivery are part of the public contract. The shapes
of everything else are in `reports`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from oncehook import model, replay, reports
from oncehook.model import Id, StoredReplay
from oncehook.query import fixed


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """Something that is answered."""


T = TypeVar("T", bound=Answer)


def fill(kind: type[T], *values: object, **given: object) -> T:
    """An answer whose fields are those of the same name in these values of the desk's, but for those that are given."""
    fields = {name: given[name] if name in given else _named(name, values) for name in kind.__struct_fields__}
    return kind(**fields)


def _named(name: str, values: Sequence[object]) -> object:
    return getattr(next(value for value in values if hasattr(value, name)), name)


def _id(value: Id | None) -> str | None:
    return None if value is None else str(value)


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
        id=str(one.id),
        replayed=one.is_replayed,
        replay_id=_id(one.replay_id),
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
        id=str(event.id),
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
        id=str(kept.id),
        event_id=str(kept.event_id),
        replayed=kept.is_replayed,
        replay_id=_id(kept.replay_id),
        blocked_by=_id(kept.blocked_by),
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
        same_body_as=_id(kept.same_as),
        id=str(kept.id),
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
    return fill(Arrival, came, came.request, id=str(came.id))


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
        id=str(made.id),
        delivery_id=str(made.delivery_id),
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
        sample=str(found.sample),
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
        id=str(kept.id),
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
        made.request,
        plan=made.token,
        query=fixed(made.request.filter),
        command=replay.command(made.request),
        by_destination={recipient.destination: recipient.count for recipient in made.recipients},
        recipients=[fill(Recipient, one) for one in made.recipients],
        by_status={str(status): n for status, n in made.by_status.items()},
        left_out={str(status): n for status, n in made.left_out.items()},
        sample=[delivery(one) for one in made.sample],
        previews={
            str(one.id): fill(Preview, made.previews[one.id], at=one.received_at)
            for one in made.sample
            if one.id in made.previews
        },
    )
