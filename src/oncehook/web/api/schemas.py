"""Answers of the API: for each domain value, the fields that are answered, and their form.

`shape` takes the types from the domain's own class; `encode` builds the answer. Ids are answered as text, times in UTC.
The fields of a delivery and of the stats are part of the public contract.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import reduce
from operator import attrgetter, or_
from typing import Any, Final, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from oncehook import model, replay, reports, samples, upkeep
from oncehook.account_definitions import DefinedAccount
from oncehook.query import write_query
from oncehook.web.auth import Identity, Role


class ApiAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """A JSON object that the API answers."""


Made = tuple[Any, Callable[[Any], Any]]
"""The type of a field, and the function that makes it from a value of the domain."""
_SHAPES: Final[dict[type, tuple[type[ApiAnswer], Mapping[str, Callable[[Any], Any]]]]] = {}


def shape(name: str, kind: type, doc: str, fields: str, parts: Sequence[str] = (), **made: Made) -> type[ApiAnswer]:
    """Describe how values of a domain class are answered: by these of its fields and those of its `parts`.

    `made` has functions for fields that the domain does not have under this name.
    """
    hints = _hints(kind)
    places = dict.fromkeys(hints, "")
    for part in parts:
        for field, hint in _hints(hints[part]).items():
            places.setdefault(field, f"{part}.")
            hints.setdefault(field, hint)
    described: list[tuple[str, Any]] = []
    getters: dict[str, Callable[[Any], Any]] = {}
    for field in fields.split():
        described_as, get = made.get(field) or (_describe_type(hints[field]), attrgetter(places[field] + field))
        described.append((field, described_as))
        getters[field] = get
    options: Any = {"bases": (ApiAnswer,), "namespace": {"__doc__": doc}, "kw_only": True, "frozen": True}
    made_type = cast("type[ApiAnswer]", msgspec.defstruct(name, described, **options))
    _SHAPES[kind] = made_type, getters
    return made_type


def _hints(kind: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("_")}


def _describe_type(hint: Any) -> Any:
    """Return the type as seen through the API: enums and ids are text, shaped values their shape."""
    origin, inner = get_origin(hint), tuple(_describe_type(one) for one in get_args(hint))
    if origin in (Union, types.UnionType):
        return reduce(or_, inner)
    if origin is not None:
        return origin[inner]
    if hint in _SHAPES:
        return _SHAPES[hint][0]
    return str if isinstance(hint, type) and issubclass(hint, Enum | model.Id) else hint


def encode(value: Any, **given: Any) -> Any:
    """Encode a domain value as its answer; `fields` replace its own."""
    if type(value) in _SHAPES:
        kind, getters = _SHAPES[type(value)]
        return kind(**{name: given[name] if name in given else encode(get(value)) for name, get in getters.items()})
    if isinstance(value, model.Id):
        return str(value)
    return [encode(one) for one in value] if isinstance(value, list | tuple) else value


class Error(ApiAnswer, frozen=True):
    """Why something was not done."""

    error: str
    code: str
    hint: str


class SettingError(ApiAnswer, frozen=True):
    """What is wrong with one setting."""

    setting: str
    error: str
    hint: str


class SettingsError(Error, frozen=True):
    """Why settings were refused, one error each."""

    errors: Sequence[SettingError]


# -- events ------------------------------------------------------------------------------------

_REPLAYED: Final[Made] = (bool, attrgetter("is_replayed"))
_MARKS: Final = Sequence[str]


def _marks(marks: model.Mark) -> list[str]:
    return [mark.name for mark in marks if mark.name]


DeliveryChip = shape(
    "DeliveryChip",
    model.ListedDelivery,
    "A delivery in a word. `replay_id` is the latest replay that has run it again, as `run`.",
    "id destination status note replayed run replay_id",
    replayed=_REPLAYED,
)
ListedEvent = shape(
    "ListedEvent",
    model.ListedEvent,
    "An event in a list.",
    "id source account type key subject received_at event_at marks size copies has_conflict deliveries",
    marks=(_MARKS, lambda event: _marks(event.marks)),
)
Delivery = shape(
    "Delivery",
    model.StoredDelivery,
    "One event for one destination.",
    "id event_id source account destination type key subject status category note attempts run due_at last_status"
    " last_error replayed last_replay_at replay_id reason received_at settled_at blocked_by",
    replayed=_REPLAYED,
)
Event = shape(
    "Event",
    reports.ShownEvent,
    """An event with everything about it but its body.

    `same_body_as` is the event in which the same signed body came before, under another key. What its source's check
    covers is null where there is no such source any more.
    """,
    "id source account type key subject received_at event_at marks size copies same_body_as body_authenticated"
    " key_authenticated method target headers deliveries",
    ("event", "request"),
    marks=(_MARKS, lambda found: _marks(found.event.marks)),
    same_body_as=(str | None, attrgetter("event.same_as")),
)
Media = shape(
    "Media",
    model.StoredMedia,
    "A file that an event refers to, as it is kept.",
    "n type size filename sha256",
    sha256=(str, lambda kept: kept.digest.hex()),
)
Arrival = shape(
    "Arrival",
    reports.ShownArrival,
    "One time that an event came.",
    "id outcome at method target headers body_differs",
    ("request",),
)


def _attempt_answer(made: model.StoredAttempt) -> str | None:
    answer = made.evidence.answer if made.result is None else None
    return None if answer is None else answer.decode("utf-8", "replace")


SentRequest = shape(
    "SentRequest",
    reports.SentRequest,
    "What was sent, with secrets masked. The body is the event's; `signed` is what the signature is over.",
    "method url headers signed",
)
ReceivedResponse = shape(
    "ReceivedResponse",
    reports.ReceivedResponse,
    "What came back: headers masked, and the first bytes of the body.",
    "status headers body",
)
CallSteps = shape(
    "CallSteps",
    reports.CallSteps,
    "Seconds that the steps of a call took; null for a step that was not needed, or did not end.",
    "dns connect tls first_byte total",
)
Attempt = shape(
    "Attempt",
    model.StoredAttempt,
    """One try of a delivery. `attempt` counts within the run; `duration` is in seconds.

    `request` and `response` are those of an HTTP destination, `times` the steps of the call. `answer` is what a
    destination said, or a traceback; `result` what a handler returned. All of them are null for who may not see
    payloads.
    """,
    "id delivery_id run attempt outcome category status error answer result request response times started_at ended_at"
    " duration",
    ("evidence",),
    id=(str, attrgetter("id")),
    attempt=(int, attrgetter("n")),
    answer=(str | None, _attempt_answer),
    result=(Any, lambda made: None if made.result is None else msgspec.json.decode(made.result)),
    request=(SentRequest | None, reports.sent_request),
    response=(ReceivedResponse | None, reports.received_response),
    times=(CallSteps | None, reports.call_steps),
    duration=(float, lambda made: round((made.ended_at - made.started_at).total_seconds(), 6)),
)
Cause = shape(
    "Cause",
    model.Cause,
    "Dead letters that died of the same thing.",
    "destination cause count first_at last_at sample per_hour",
)


class Discarded(ApiAnswer, frozen=True):
    """How many dead letters were closed."""

    discarded: int


# -- replays -----------------------------------------------------------------------------------


class Replayed(ApiAnswer, frozen=True):
    """The replay that was made, or had been made by the same request."""

    replay_id: str


Replay = shape(
    "Replay",
    model.StoredReplay,
    "A replay and how far it is.",
    "id state query command actor reason bulk rate planned fed done dead skipped created_at finished_at",
    query=(str, lambda kept: str(kept.about.get("query", ""))),
    command=(str, lambda kept: str(kept.about.get("command", ""))),
)
ReplayItem = shape(
    "ReplayItem",
    model.ReplayItem,
    """One delivery of a replay. `outcome` is done, dead, skipped, running or left; type, subject and time are null for
    an event that is no longer there.
    """,
    "n delivery_id event_id destination outcome type subject received_at error",
    event_id=(str, attrgetter("event_id")),
)
Recipient = shape(
    "Recipient",
    replay.Recipient,
    "Who would get it. `refused` is how many were refused for good when they were tried last.",
    "destination count kind address paused failing changed by_status left_out refused",
)


class Preview(ApiAnswer, frozen=True):
    """What a delivery says: who gets it, what a person reads, and when it was received."""

    to: str
    text: str
    at: datetime


def _previews(made: replay.Plan) -> dict[str, Preview]:
    return {
        str(one.id): Preview(to=preview.to, text=preview.text, at=one.received_at)
        for one in made.sample
        if (preview := made.previews.get(one.id)) is not None
    }


Plan = shape(
    "Plan",
    replay.Plan,
    """What a replay would do. `plan` stands for it: hand it to POST replays to have exactly that done, or to
    POST dead/discard to close what it has shown.
    """,
    "plan total query command force fresh_id rate by_destination recipients by_status left_out oldest newest sample"
    " previews expected_seconds notes",
    ("request",),
    plan=(str, attrgetter("token")),
    query=(str, lambda made: write_query(made.request.filter)),
    command=(str, lambda made: replay.command(made.request)),
    by_destination=(Mapping[str, int], lambda made: {one.destination: one.count for one in made.recipients}),
    previews=(Mapping[str, Preview], _previews),
    notes=(Sequence[str], attrgetter("notes")),
)


# -- what is set up ----------------------------------------------------------------------------

_ENABLED: Final[Made] = (bool, attrgetter("is_enabled"))

Source = shape(
    "Source",
    reports.ShownSource,
    "A source. `address` is null for a viewer where it is a secret itself; `secrets` says only how many there are,"
    " `secret_names` where they are kept.",
    "name preset title address verifier unverified body_authenticated key_authenticated loopback_only secrets"
    " secret_names key subject type destinations last_arrival figures origin place account enabled settings trouble",
    address=(str | None, attrgetter("address")),
    enabled=_ENABLED,
)
Destination = shape(
    "Destination",
    reports.ShownDestination,
    "A destination: whom it reaches, on what terms, how it stands. Spans are in seconds.",
    "name kind address retry timeout lease concurrency rate sources pending leased done dead discarded oldest_due state"
    " paused paused_at paused_by paused_why breaker failures open_until figures origin place account enabled settings"
    " trouble signs_with",
    ("level",),
    enabled=_ENABLED,
    pending=(int, lambda found: found.level.pending - found.level.leased),
    state=(str, attrgetter("state")),
    paused=(bool, lambda found: found.level.paused_at is not None),
)


_FROM: Final[Any] = {"from": (str, attrgetter("source"))}
Route = shape(
    "Route",
    reports.ShownRoute,
    "A route. `id` is null for one that a file or a program defines.",
    "id from to when coalesce latest_wins on_dead priority origin place account enabled settings",
    to=(str, attrgetter("destination")),
    enabled=_ENABLED,
    **_FROM,
)


class Defined(ApiAnswer, frozen=True):
    """A definition that was made or changed. `secret` is one that was generated: told here, and never again."""

    name: str
    id: str | None
    address: str | None
    secret: str | None
    account: str | None
    enabled: bool
    settings: Mapping[str, Any]


class Deleted(ApiAnswer, frozen=True):
    """What was deleted."""

    name: str
    deleted: bool = True


# -- how it goes ------------------------------------------------------------------------------

Watermark = shape("Watermark", upkeep.Watermark, "A level and its limit.", "name level limit crossed")
Stats = shape(
    "Stats",
    reports.Stats,
    "The numbers since a moment.",
    "since total by_status dead duplicates conflicts rejected retries replays last_replay_at per_day volume_today"
    " watermarks by",
)


class Point(ApiAnswer, frozen=True):
    """What was counted in the step that begins at a moment."""

    at: datetime
    count: int


class Series(ApiAnswer, frozen=True):
    """Flows by name."""

    since: datetime
    step: float
    series: Mapping[str, Sequence[Point]]


ChartMark = shape("ChartMark", model.ChartMark, "A moment that every chart shows, such as a deploy.", "at text actor")
Rejection = shape("Rejection", model.Rejection, "An arrival that was turned away.", "source at code reason peer size")
Rejection = shape(
    "Rejection",
    reports.ShownRejection,
    """An arrival that was rejected. Of a known source, `headers` (credentials masked) and the first KiB of the `body`
    (redacted) may be kept; `diagnosis` says why it was rejected, as far as that can be told. All three are null for who
    may not see payloads.
    """,
    "id source at code reason peer size method target headers body diagnosis",
    ("rejection",),
    method=(str | None, lambda shown: shown.request and shown.request.method),
    target=(str | None, lambda shown: shown.request and shown.request.target),
    headers=(Sequence[tuple[str, str]] | None, lambda shown: shown.request and shown.request.headers),
    body=(str | None, attrgetter("text")),
)
Audit = shape(
    "Audit",
    model.Audited,
    "Something a person or program did.",
    "n at actor act target detail",
    detail=(Mapping[str, Any], attrgetter("detail")),
)
Token = shape(
    "Token",
    Identity,
    """Who holds a token and what it may do; never the token. `sources` and `accounts` are null where it sees all of
    them, `last_used` is to the minute.
    """,
    "name role sources accounts payloads expires expired last_used",
    role=(str, attrgetter("role.name")),
    sources=(Sequence[str] | None, lambda holder: None if holder.sources is None else sorted(holder.sources)),
    accounts=(Sequence[str] | None, lambda holder: None if holder.accounts is None else sorted(holder.accounts)),
    expired=(bool, attrgetter("has_expired")),
    last_used=(datetime | None, lambda _: None),
)
Worker = shape(
    "Worker",
    model.StoredWorker,
    "A worker that has lately been heard of.",
    "id host pid started_at seen_at leases destinations",
)
Receiver = shape(
    "Receiver",
    reports.RunningReceiver,
    """A process that takes arrivals in for a server that has several, as it last reported. `arrivals` is how many it
    has answered since it started, `cpu` in seconds, `memory` in bytes.
    """,
    "number pid started_at connections arrivals cpu memory",
)
System = shape(
    "System",
    reports.System,
    "The whole, from outside.",
    "version store schema schema_target size owner workers receivers watermarks",
    store=(str, attrgetter("engine")),
    schema=(int, attrgetter("schema.current")),
    schema_target=(int, attrgetter("schema.target")),
)


Account = shape(
    "Account",
    DefinedAccount,
    """An account. `secrets` holds those that were generated just now, by source: told here, and never again.
    `secret_sources` are all sources for which it has one.
    """,
    "id name aliases secret_sources secrets enabled created_at changed_at",
)


# -- acts of an admin, and samples -------------------------------------------------------------


class LoginLink(ApiAnswer, frozen=True):
    """The token of a link, `/?token=…`, with `&to=` for a page."""

    token: str


class PortalLink(ApiAnswer, frozen=True):
    """The whole address of a link, which works once, and the account that it shows."""

    url: str
    account: str


class Remembered(ApiAnswer, frozen=True):
    """How many of them were new, and how many were known already."""

    new: int
    known: int


Erased = shape(
    "Erased",
    model.Erasure,
    """How much was erased, or would be. `shared_batches` are raw requests that held events of others too; these stay.

    `subject_hash` is what the audit log says in place of the subject.
    """,
    "subject_hash dry_run events deliveries attempts arrivals batches shared_batches remaining",
    subject_hash=(str, lambda _: ""),
    dry_run=(bool, lambda _: False),
    remaining=(int, lambda _: 0),
)
Tested = shape(
    "Tested",
    samples.Tested,
    "How a destination answered a test. `status`, `error` and `seconds` are for an admin; for others they are null.",
    "destination answered status error seconds",
    seconds=(float | None, lambda outcome: round(outcome.seconds, 3)),
)
Sampled = shape(
    "Sampled",
    samples.Sampled,
    "What became of a sample: the status its sender would have got, and the events it stands for.",
    "source type status outcome event_ids",
)


def encode_test(outcome: samples.Tested, role: Role) -> Any:
    """Encode a test's result: only an admin sees more than the class of the status (S22)."""
    hidden = {} if role >= Role.admin else {"status": None, "error": None, "seconds": None}
    return encode(outcome, **hidden)
