"""Events: the list with its query, and one event with its timeline, body, headers, arrivals, deliveries and subject."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace
from starlette.responses import RedirectResponse, Response

from oncehook.errors import NotFound, QueryInvalid, Undecryptable
from oncehook.human import nearest
from oncehook.model import (
    REPLAY_PAUSE,
    DeliveryStatus,
    EventId,
    Filter,
    Level,
    ListedDelivery,
    ListedEvent,
    Outcome,
    Page,
    StoredAttempt,
    StoredDelivery,
    StoredEvent,
    StoredReplay,
)
from oncehook.query import BODY, WORDS, quote_value, with_words
from oncehook.replay import some_id
from oncehook.reports import (
    ReceivedResponse,
    SentRequest,
    ShownArrival,
    ShownEvent,
    ShownRequest,
    call_steps,
    received_response,
    sent_request,
)
from oncehook.web.api import schemas
from oncehook.web.api.request import cursor
from oncehook.web.dashboard import bodies, timeline
from oncehook.web.dashboard.context import SAFE, PageContext
from oncehook.web.dashboard.render import first_line, utc
from oncehook.web.dashboard.timeline import EventHistory
from oncehook.web.language import translate

SHOWN: Final = 50
CHIPS: Final = 3
"""Deliveries of an event that the list names one by one."""
_URGENT: Final = (
    *(DeliveryStatus.dead, DeliveryStatus.leased, DeliveryStatus.pending, DeliveryStatus.discarded),
    DeliveryStatus.done,
)
"""Of several deliveries, the state of the first in this order is the event's last outcome."""
NEW: Final = 20
OFTEN: Final = (
    *("status:dead", "status:pending", "-status:done", "is:replayed", "outcome:conflict", "arrivals:>1", "code:5xx"),
    *("attempts:>3", "since:2h", "note:stale"),
)
CHOICES: Final = ("source", "status", "since")
"""Words with a list to choose from, above the events."""
RANGES: Final = (
    *(("15m", "last 15 minutes"), ("1h", "last hour"), ("24h", "last 24 hours"), ("7d", "last 7 days")),
    ("30d", "last 30 days"),
)
TABS: Final = ("body", "headers", "arrivals", "deliveries", "subject")
_WORD: Final = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*+")++|\S+')
_SKEW: Final = timedelta(minutes=5)
"""Seconds by which the clocks of receivers may differ."""
NOTHING_MORE: Final[Page[ListedEvent]] = Page(())


# -- the list ----------------------------------------------------------------------------------


async def events(context: PageContext) -> Response:
    """Show events that match the query, newest first."""
    query = context.parameter("query")
    if any(f"choose-{word}" in context.request.query_params for word in CHOICES):
        for word in CHOICES:
            query = choose_value(query, word, context.parameter(f"choose-{word}"))
        return RedirectResponse(f"{context.root}/events?{urlencode({'query': query})}", 303, headers=dict(SAFE))
    before, error = context.cursor("event"), None
    page, total = NOTHING_MORE, None
    try:
        meant = context.admin.read(query)
        page, total = await asyncio.gather(
            context.admin.events(meant, before=before, limit=SHOWN), context.admin.count_events(meant)
        )
    except QueryInvalid as refused:
        error = refused
    sources = await _source_names(context)
    return await context.page(
        "events.html",
        status=200 if error is None else 400,
        query=query,
        error=error,
        suggested=_suggest(context, query) if error else "",
        page=page,
        rows=await _describe_rows(context, page.items),
        is_first=before is None,
        next=cursor("event", page.next),
        total=total,
        choices=[
            ("source", translate("Source"), translate("any source"), [(name, name) for name in sources]),
            (
                "status",
                translate("Status"),
                translate("any status"),
                [(str(one), translate(one)) for one in DeliveryStatus],
            ),
            (
                "since",
                translate("Time range"),
                translate("any time"),
                [(word, translate(text)) for word, text in RANGES],
            ),
        ],
        chosen={word: find_value(query, word) for word in CHOICES},
        parts=_parts(query),
        chips=_chips(query),
        groups=await _completions(context, query),
        command=shlex.join(["oncehook", "events", *([query] if query else [])]),
    )


def _suggest(context: PageContext, query: str) -> str:
    """Return the query that was probably meant instead of one that was refused; empty where nothing is near."""
    words = _WORD.findall(query)
    for place, whole in enumerate(words):
        lead = whole[: len(whole) - len(whole.lstrip("(-"))]
        name, colon, value = whole.removeprefix(lead).partition(":")
        if not colon or name.startswith(BODY):
            continue
        known = WORDS[name].values if name in WORDS else ()
        near = nearest(name, WORDS) if name not in WORDS else nearest(value, known) if value not in known else None
        if near is None:
            continue
        words[place] = f"{lead}{near}:{value}" if name not in WORDS else f"{lead}{name}:{near}"
    meant = " ".join(words)
    try:
        context.admin.read(meant)
    except QueryInvalid:
        return ""
    return meant


async def _source_names(context: PageContext) -> list[str]:
    return [source.name for source in await context.admin.sources()]


@dataclass(frozen=True, slots=True)
class ListedState:
    """The state of a listed event that is not simply done."""

    outcome: str = ""
    again: frozenset[str] = frozenset()
    """Destinations that were tried before and wait for another attempt."""


@dataclass(frozen=True, slots=True)
class ListedRow:
    """An event in the list, with the deliveries that get a chip of their own."""

    event: ListedEvent
    state: ListedState

    @property
    def done(self) -> int:
        return sum(one.status is DeliveryStatus.done for one in self.event.deliveries)

    @property
    def has_progress(self) -> bool:
        """Tell whether the deliveries are too many for a chip each, so that a number says how many are done."""
        return len(self.event.deliveries) > CHIPS

    @property
    def chips(self) -> Sequence[ListedDelivery]:
        """Return the deliveries to name: all of a few, of many those that are not done, dead ones first."""
        if not self.has_progress:
            return self.event.deliveries
        unfinished = [one for one in self.event.deliveries if one.status is not DeliveryStatus.done]
        return sorted(unfinished, key=lambda one: _URGENT.index(one.status))[:CHIPS]

    @property
    def unnamed(self) -> int:
        """Return the number of unfinished deliveries without a chip."""
        return len(self.event.deliveries) - self.done - len(self.chips) if self.has_progress else 0

    @property
    def names(self) -> str:
        return ", ".join(one.destination for one in self.event.deliveries)


async def _describe_rows(context: PageContext, shown: Sequence[ListedEvent]) -> list[ListedRow]:
    """Describe each event that is not simply done, from one short query of its deliveries."""
    odd = [event for event in shown if any(one.status is not DeliveryStatus.done for one in event.deliveries)]
    pages = await asyncio.gather(*[context.admin.deliveries(Filter(event_id=event.id), limit=20) for event in odd])
    levels = (await context.frames.get(context.admin)).levels
    states = {
        event.id: ListedState(
            _outcome(page.items, levels, context.now),
            frozenset(one.destination for one in page.items if one.status is DeliveryStatus.pending and one.attempts),
        )
        for event, page in zip(odd, pages, strict=True)
    }
    return [ListedRow(event, states.get(event.id, ListedState())) for event in shown]


def _outcome(deliveries: Sequence[StoredDelivery], levels: Mapping[str, Level], now: datetime) -> str:
    ranked = sorted(deliveries, key=lambda one: _URGENT.index(one.status))
    return _describe(ranked[0], levels.get(ranked[0].destination), now) if ranked else ""


def _describe(delivery: StoredDelivery, level: Level | None, now: datetime) -> str:
    error = first_line(delivery.last_error) or (str(delivery.last_status) if delivery.last_status else "")
    match delivery.status:
        case DeliveryStatus.dead:
            return delivery.reason or error or translate("dead")
        case DeliveryStatus.discarded:
            return f"{translate('discarded')}: {delivery.reason}" if delivery.reason else translate("discarded")
        case DeliveryStatus.leased:
            return f"{delivery.destination}: {translate('in progress')}"
        case DeliveryStatus.pending:
            next_ = timeline.next_step(delivery, level, now)
            return f"{error}, {next_}" if error and delivery.blocked_by is None else next_
        case _:
            return ""


async def rows(context: PageContext) -> Response:
    """Show the rows of a list that is in view as they are now, whether or not they still match its query."""
    ids = [some_id(EventId, text) for text in context.parameter("ids").split(",")[:SHOWN] if text]
    pages = await asyncio.gather(*[context.admin.events(Filter(event_id=one), limit=1) for one in ids])
    items = [event for page in pages for event in page.items]
    return context.fragment("_event_rows.html", rows=await _describe_rows(context, items))


async def fresh(context: PageContext) -> Response:
    """Show how many matching events are newer than the list in view."""
    query, latest = context.parameter("query"), context.parameter("after")
    after = some_id(EventId, latest) if latest else b""
    page = await context.admin.events(_newer(context.admin.read(query), after, context.now), limit=NEW)
    count = sum(event.id > after for event in page.items)
    return context.fragment("_fresh.html", count=count, many=count == NEW, query=query, after=latest)


def _newer(filter: Filter, after: bytes, now: datetime) -> Filter:
    """Return a filter for events newer than one: queried at every tick, it must not read all bodies."""
    # An id begins with its milliseconds, which may be in the future if the clock was set back.
    made = min(int.from_bytes(after[:6]) / 1000, now.timestamp())
    since = datetime.fromtimestamp(made, UTC) - _SKEW
    return replace(filter, since=max(filter.since or since, since))


# -- the query ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A word of the query, and the query without it."""

    name: str
    value: str
    rest: str


def _has_groups(query: str) -> bool:
    """Tell whether words cannot be taken out one by one, because OR or parentheses join them."""
    return any(word in ("OR", "AND") or word.startswith(("(", "OR(")) for word in _WORD.findall(query))


def choose_value(query: str, word: str, value: str) -> str:
    """Return the query with this value of a word instead of another; without the word where the value is empty."""
    if find_value(query, word) == value:
        return query
    if not _has_groups(query):
        query = " ".join(one for one in _WORD.findall(query) if not one.startswith(f"{word}:"))
    return with_words(query, f"{word}:{quote_value(value)}") if value else query


def find_value(query: str, word: str) -> str:
    """Return the value of a word that the whole query has."""
    values = [one.partition(":")[2] for one in _WORD.findall(query) if one.startswith(f"{word}:")]
    return values[-1].strip('"') if values and not _has_groups(query) else ""


def _parts(query: str) -> list[Part]:
    if _has_groups(query):
        return []
    words = _WORD.findall(query)
    parts = []
    for place, word in enumerate(words):
        name, colon, value = word.partition(":")
        rest = " ".join(words[:place] + words[place + 1 :])
        parts.append(Part(name if colon else "text", value if colon else word, rest))
    return parts


def _chips(query: str) -> list[tuple[str, str]]:
    """Return words that would narrow the list, each with the resulting query."""
    used = {word.lstrip("-(").partition(":")[0] for word in _WORD.findall(query)}
    offered = [] if "status" in used else ["status:dead", "-status:done"]
    offered += [] if used & {"arrivals", "outcome"} else ["arrivals:>1", "outcome:conflict"]
    offered += [] if "is" in used else ["is:replayed"]
    return [(word, with_words(query, word)) for word in offered]


async def complete(context: PageContext) -> Response:
    return context.fragment("_complete.html", groups=await _completions(context, context.parameter("query")))


async def _completions(context: PageContext, query: str) -> list[tuple[str, list[str]]]:
    whole = query.rpartition(" ")[2]
    last = whole.lstrip("(").removeprefix("-")
    lead = whole[: len(whole) - len(last)]
    word, colon, begun = last.partition(":")
    if colon:
        known = await _values(context, word)
        matching = [f"{lead}{word}:{value}" for value in known if value.startswith(begun)]
        return [(f"{word}:", matching[:20])] if matching else []
    words = [word for word in (*(f"{name}:" for name in WORDS), BODY) if word.startswith(last) and word != last]
    words = [lead + word for word in words]
    often = [value for value in OFTEN if value.partition(":")[0] + ":" not in query and value.startswith(whole)]
    joining = ["OR"] if query.strip() and not whole and not query.rstrip().endswith("OR") else []
    return [group for group in (("Narrow by", words), ("Often next", [*often, *joining])) if group[1]]


async def _values(context: PageContext, word: str) -> list[str]:
    match word:
        case "source":
            return await _source_names(context)
        case "destination" | "to":
            return [one.name for one in await context.admin.destinations()]
        case _:
            return list(WORDS[word].values) if word in WORDS else []


# -- one event ---------------------------------------------------------------------------------


async def event(context: PageContext) -> Response:
    event_id = context.id(EventId)
    shown = await context.admin.event(event_id, with_body=True)
    arrivals = await context.admin.arrivals(event_id)
    history = await _read_history(context, shown, arrivals)
    tab = context.parameter("tab", "body")
    tab = tab if tab in TABS else "body"
    near = await _neighbours(context, shown)
    replayable = await context.admin.replayable(shown.deliveries)
    return await context.page(
        "event.html",
        shown=shown,
        event=shown.event,
        history=history,
        moments=timeline.moments(history),
        lanes=timeline.draw(history),
        tab=tab,
        near=near,
        beside=await context.admin.beside(shown.event),
        waits={
            one.id: timeline.next_step(one, history.levels.get(one.destination), context.now)
            for one in shown.deliveries
            if one.status is DeliveryStatus.pending
        },
        held={
            one.id
            for one in shown.deliveries
            if timeline.is_held(one, history.levels.get(one.destination), context.now)
        },
        message=next(iter((await context.admin.previews(shown.deliveries)).values()), None),
        replayable=replayable,
        no_replay="" if replayable else _why_no_replay(shown.deliveries, context.now),
        curl=_curl(shown, context.origin) if context.admin.sees_payloads else None,
        fixture=_fixture(shown, await context.admin.kinds(one.destination for one in shown.deliveries)),
        has_conflict=any(one.outcome is Outcome.conflict for one in arrivals),
        exchange=_show_exchange if context.admin.sees_payloads else lambda event, attempt: None,
        attempt_state=timeline.attempt_state,
        sender=_find_sender,
        answer=timeline.answer,
        **await _detail(context, shown, arrivals, tab),
    )


def _why_no_replay(deliveries: Sequence[StoredDelivery], now: datetime) -> str:
    """Return why none of an event's deliveries can be replayed now; empty where none was replayed lately."""
    again = [one for one in deliveries if one.last_replay_at is not None]
    if any(one.status in (DeliveryStatus.pending, DeliveryStatus.leased) for one in again):
        return translate("a replay is under way")
    rested = [one.last_replay_at + timedelta(seconds=REPLAY_PAUSE) for one in again if one.last_replay_at is not None]
    if not rested or min(rested) <= now:
        return ""
    return translate("just replayed, possible again at {}").format(utc(min(rested)))


def _find_sender(request: ShownRequest) -> tuple[str, str]:
    """Return the sender's address, if a proxy has written it into the request, and the name of its program."""
    values = dict(reversed(request.headers))  # of a repeated header, the first
    found = [values.get(name, "").partition(",")[0].strip() for name in ("x-forwarded-for", "x-real-ip")]
    return next(filter(None, found), ""), values.get("user-agent", "")


@dataclass(frozen=True, slots=True)
class ShownExchange:
    """What an attempt sent and got, side by side."""

    request: SentRequest
    response: ReceivedResponse | None
    steps: Sequence[tuple[str, float]]
    curl: str


def _show_exchange(event: StoredEvent, attempt: StoredAttempt) -> ShownExchange | None:
    request, times = sent_request(attempt), call_steps(attempt)
    if request is None or times is None:
        return None
    named = (
        *(("DNS", times.dns), (translate("connect"), times.connect), ("TLS", times.tls)),
        *((translate("first byte"), times.first_byte), (translate("in all"), times.total)),
    )
    words = ["curl", "-X", request.method]
    for name, value in request.headers:
        words += ["-H", f"{name}: {value}"]
    curl = shlex.join([*words, "--data-binary", _curl_body(event.body), request.url])
    return ShownExchange(
        request, received_response(attempt), [(name, seconds) for name, seconds in named if seconds is not None], curl
    )


async def _read_history(context: PageContext, shown: ShownEvent, arrivals: Sequence[ShownArrival]) -> EventHistory:
    found = await asyncio.gather(*[context.admin.attempts(one.id) for one in shown.deliveries[:50]])
    attempts: Mapping[bytes, Sequence[StoredAttempt]] = {
        one.id: made for one, made in zip(shown.deliveries, found, strict=False)
    }
    replays: dict[bytes, StoredReplay] = {}
    for replay_id in {one.replay_id for one in shown.deliveries if one.replay_id}:
        try:
            replays[replay_id] = await context.admin.replay(replay_id)
        except NotFound:
            continue
    policies = {one.destination: await context.admin.policy(one.destination) for one in shown.deliveries}
    copies, now, levels = shown.event.copies, context.now, await context.admin.levels()
    return EventHistory(arrivals, copies, shown.deliveries, attempts, replays, policies, now, levels)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The neighbours of an event at one destination, in order."""

    destination: str
    deliveries: Sequence[StoredDelivery]
    mine: StoredDelivery

    @property
    def behind(self) -> int:
        return sum(one.blocked_by == self.mine.id for one in self.deliveries)


async def _neighbours(context: PageContext, shown: ShownEvent) -> Neighbours | None:
    if shown.event.subject is None or not shown.deliveries:
        return None
    unfinished = [one for one in shown.deliveries if one.status is not DeliveryStatus.done]
    mine = (unfinished or list(shown.deliveries))[0]
    return Neighbours(mine.destination, await context.admin.neighbours(mine.id), mine)


async def _detail(
    context: PageContext, shown: ShownEvent, arrivals: Sequence[ShownArrival], tab: str
) -> dict[str, Any]:
    body = shown.event.body
    found: dict[str, Any] = {"view": "tree", "tree": None, "raw": None, "dump": None, "diff": None, "compared": None}
    if not context.admin.sees_payloads:
        return found
    if tab == "body" and shown.unreadable is not None:
        found |= {"view": "raw", "raw": bodies.raw(f"({shown.unreadable})".encode())}
    elif tab == "body":
        view = context.parameter("view", "tree")
        found["tree"] = bodies.tree(body) if view == "tree" else None
        found["view"] = "raw" if view == "tree" and found["tree"] is None else view
        found["raw"] = bodies.raw(body) if found["view"] == "raw" else None
        found["dump"] = bodies.dump(body) if found["view"] == "hex" else None
    elif tab == "arrivals":
        number = _choose_arrival(context.parameter("with"), arrivals)
        with suppress(Undecryptable):  # the list is shown without differences
            other = (
                None if number is None else await context.admin.arrival_body(shown.event.id, arrivals[number - 1].id)
            )
            if number is not None and other is not None:
                found["diff"], found["compared"] = bodies.differences(body, other), number
    return found


def _choose_arrival(text: str, arrivals: Sequence[ShownArrival]) -> int | None:
    """Return the number of the arrival to compare with: the one asked for, or the latest that differs."""
    differing = [number for number, arrival in enumerate(arrivals, 1) if arrival.body_differs]
    asked = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
    return asked if asked in differing else (differing[-1] if differing else None)


def _curl(shown: ShownEvent, origin: str) -> str | None:
    """Return the request as a curl command; masked values stay masked. None for an event that was no request."""
    if not shown.request.target.startswith("/"):
        return None
    left_out = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}
    words = ["curl", "-X", shown.request.method]
    for name, value in shown.request.headers:
        if name not in left_out:
            words += ["-H", f"{name}: {value}"]
    words += ["--data-binary", _curl_body(shown.event.body)]
    return shlex.join([*words, origin + shown.request.target.partition("?")[0]])


def _curl_body(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    return text if len(body) <= 4096 and text.encode() == body else "@body.bin"


def _fixture(shown: ShownEvent, kinds: Mapping[str, str]) -> str:
    """Return a test that begins with this event, for the pytest plugin's `inbox`; it sends nothing over the network."""
    kept = shown.event
    small = len(kept.body) <= 4096
    body = repr(kept.body) if small else f'Path("{kept.id}.bin").read_bytes()'
    name = re.sub(r"[^0-9a-z]+", "_", f"{kept.source} {kept.type}".lower(), flags=re.ASCII).strip("_")
    kind = f", {kept.type!r}" if kept.type else ""  # its headers are needed, in which some senders name the type
    call = f"send({kept.source!r}{kind}, body={body})"
    if shown.request.method == "EMIT":
        call = f"emit({kept.source!r}, {kept.type!r}, {body}, key={kept.key!r}, subject={kept.subject!r})"
    sent = [f"assert len(inbox.sent({one!r})) == 1" for one, kind in kinds.items() if kind not in ("handler", "gone")]
    steps = ["inbox.use(app.inbox)", f"inbox.{call}", "inbox.drain()", *sent]
    imports = [*([] if small else ["from pathlib import Path", ""]), "import app  # the module that has your inbox"]
    return "\n".join([*imports, "", "", f"def test_{name[:60]}(inbox):", *(f"    {step}" for step in steps), ""])


async def as_json(context: PageContext) -> Response:
    """Show the event as the API answers it, for a person who is logged in and has no token."""
    event = schemas.encode(await context.admin.event(context.id(EventId)))
    headers = {**SAFE, "Content-Security-Policy": "default-src 'none'; sandbox"}
    return Response(msgspec.json.encode(event), media_type="application/json", headers=headers)


async def body(context: PageContext) -> Response:
    """Return the stored bytes as a download, never displayed (S30)."""
    event_id = context.id(EventId)
    headers = {
        **SAFE,
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "Content-Disposition": f'attachment; filename="{event_id}.bin"',
    }
    return Response(await context.admin.body(event_id), media_type="application/octet-stream", headers=headers)
