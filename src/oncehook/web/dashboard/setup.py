"""Pages about the setup: sources, destinations, the live page, the system."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from oncehook.errors import BadRequest, Forbidden, NotFound
from oncehook.human import show_span
from oncehook.model import (
    UNKNOWN_SOURCE,
    AttemptOutcome,
    DeliveryStatus,
    Filter,
    ListedEvent,
    StoredAttempt,
    StoredDelivery,
)
from oncehook.query import quote_value
from oncehook.reports import ShownDestination, ShownSource
from oncehook.retry import Policy
from oncehook.store.base import KEPT_REJECTIONS
from oncehook.web.api import schemas
from oncehook.web.api.request import cursor, next_definition
from oncehook.web.auth import Role
from oncehook.web.dashboard import charts, timeline
from oncehook.web.dashboard.charts import SPANS, Spark, fill, spark
from oncehook.web.dashboard.context import PageContext
from oncehook.web.dashboard.pictures import draw_map
from oncehook.web.dashboard.render import first_line

DAY: Final = SPANS[1]
AUDIT: Final = 40
REJECTED: Final = 30
LISTED: Final = 100
CARDS: Final = 50
"""Sources or destinations on one page."""
KINDS: Final = ("all", "arrivals", "attempts", "dead")


T = TypeVar("T")


async def _page_of(
    context: PageContext, kind: str, read_page: Callable[..., Awaitable[list[T]]], read: Callable[[str], Awaitable[T]]
) -> tuple[list[T], dict[str, Any]]:
    """Return a page of definitions, or the one that has the name asked for, and what the page says about itself."""
    after, name = context.after(kind), context.parameter("name").strip()
    following = None
    if name:
        with suppress(NotFound):
            return [await read(name)], {"name": name, "next": None, "is_first": True, "is_long": True}
        found = list[T]()
    else:
        found = await read_page(after=after, limit=CARDS + 1)
        following = next_definition(kind, found, after, CARDS)
    is_long = bool(name or after or following)
    return found[:CARDS], {"name": name, "next": following, "is_first": after is None, "is_long": is_long}


# -- sources -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceCard:
    """A source with its counts of the day and the reasons of its recent rejections."""

    source: ShownSource
    address: str | None
    """URL to send to; None for an unguessable one that this visitor may not see."""
    line: Spark
    reasons: Sequence[tuple[str, int]]
    """Reasons of its latest rejections, with their numbers."""
    has_samples: bool
    """Whether a genuine sample can be signed here."""


async def sources(context: PageContext) -> Response:
    """Show sources: those of file and program, then stored ones, a page of them; or the one that has a name."""
    found, about_page = await _page_of(context, "source", context.admin.sources, context.admin.source)
    rejected = await context.admin.rejection_counts()
    lines = await asyncio.gather(*[_flow(context, ("received",), source=source.name) for source in found])
    cards = [await _source_card(context, source, line, rejected) for source, line in zip(found, lines, strict=True)]
    known = {source.name for source in found}
    strangers = (name for name, _, reason in rejected if reason == UNKNOWN_SOURCE and name not in known)
    unknown = Counter(strangers).most_common(20)
    picture = None
    if about_page["is_first"] and not about_page["name"]:
        about = {one.name: one.state for one in await context.admin.destinations()}
        picture = draw_map(await context.admin.routes(), about)
    return await context.page("sources.html", cards=cards, unknown=unknown, map=picture, **about_page)


async def routes(context: PageContext) -> Response:
    """Show routes: those of file and program, then stored ones, a page of them."""
    after = context.after("route")
    found = await context.admin.routes(after=after, limit=LISTED + 1)
    behind = next_definition("route", found, after, LISTED)
    return await context.page("routes.html", found=found[:LISTED], is_first=after is None, next=behind)


async def rejected(context: PageContext) -> Response:
    """Show rejected arrivals of a source, a cause and a time span, each with a diagnosis."""
    before, source, reason = context.cursor("rejection"), context.parameter("source"), context.parameter("reason")
    span = context.span() if any(context.parameter(name) for name in ("since", "from")) else None
    end = None if span is None else span.end(context.now)
    found = await context.admin.rejections(
        REJECTED,
        before=None if before is None else int.from_bytes(before[:8]),
        source=source or None,
        reason=reason or None,
        since=None if span is None or end is None else end - timedelta(seconds=span.seconds),
        until=None if span is None else span.until,
    )
    last = found[-1].rejection.n.to_bytes(8) if len(found) == REJECTED else None
    names = [one.name for one in await context.admin.sources()]
    reasons = sorted({reason for _, _, reason in await context.admin.rejection_counts()})
    chosen = {"source": source, "reason": reason}
    return await context.page(
        "rejected.html",
        found=found,
        source=source,
        reason=reason,
        span=span,
        names=names if not source or source in names else [*names, source],
        reasons=reasons if not reason or reason in reasons else [*reasons, reason],
        ranges=SPANS,
        filter=urlencode({name: value for name, value in chosen.items() if value}) + (f"&{span.query}" if span else ""),
        is_first=before is None,
        next=cursor("rejection", last),
        kept=KEPT_REJECTIONS,
        command=shlex.join(["oncehook", "rejected", *(["--source", source] if source else [])]),
    )


def address_of(context: PageContext, source: ShownSource) -> str:
    """Return the URL that a source receives at, as the visitor addresses us."""
    return source.public_url or f"{context.way_in}/{source.address.removeprefix('/in/')}"


async def _source_card(
    context: PageContext, source: ShownSource, line: Spark, rejected: Sequence[tuple[str, str, str]]
) -> SourceCard:
    address = address_of(context, source)
    is_secret = source.hidden or "?" in address  # a query may contain a token
    may_see = not is_secret or context.identity.role >= Role.operator
    reasons = Counter(reason for name, _, reason in rejected if name == source.name).most_common(5)
    has_samples = bool(await context.admin.sample_types(source.name))
    return SourceCard(source, address if may_see else None, line, reasons, has_samples)


async def _flow(
    context: PageContext,
    names: Sequence[str],
    failed: Sequence[str] = (),
    *,
    source: str | None = None,
    destination: str | None = None,
) -> Spark:
    """Return the sparkline of the day for the sum of some counters, with the part that `failed` counters are of it."""
    steps = DAY.steps(context.now)
    flows = await context.admin.series(steps[0], DAY.step, source=source, destination=destination)

    def add_up(names: Sequence[str]) -> list[float]:
        columns = [fill(flows.get(name), steps, DAY.step) for name in names]
        return [float(sum(values)) for values in zip(*columns, strict=True)]

    return spark(add_up([*names, *failed]), add_up(failed))


# -- destinations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DestinationCard:
    """A destination with its counts of the day and its retry waits."""

    shown: ShownDestination
    line: Spark
    policy: Policy | None
    tried: int
    well: int
    can_test: bool
    took: Sequence[float | None]
    """Milliseconds of an attempt, p50 and p95, over the day."""

    @property
    def dead_query(self) -> str:
        """Return the query of its dead letters, for the plan of a replay."""
        return f"destination:{quote_value(self.shown.name)} status:dead"

    @property
    def subscribed(self) -> Sequence[str]:
        """Return the types of events that a stored one subscribes to."""
        given = self.shown.settings.get("subscribe", ())
        entries = [given] if isinstance(given, str | dict) else given
        return [str(one.get("type", "*") if isinstance(one, dict) else one) for one in entries]

    @property
    def steps(self) -> Sequence[str]:
        """Return the waits between attempts as text, with equal ones grouped."""
        if self.policy is None:
            return []
        waits = map(show_span, self.policy.waits or self.policy.in_words())
        alike = [(wait, len(list(run))) for wait, run in groupby(waits)]
        return [wait if times == 1 else f"{wait} ×{times}" for wait, times in alike[:12]]


async def destinations(context: PageContext) -> Response:
    """Show destinations: those of file and program, then stored ones, a page of them; or the one that has a name."""
    found, about_page = await _page_of(context, "destination", context.admin.destinations, context.admin.destination)
    lines = await asyncio.gather(
        *[_flow(context, ("succeeded",), ("retry", "died"), destination=one.name) for one in found]
    )
    flows = await context.flows.get(context.admin, DAY, context.now)
    cards = []
    for one, line in zip(found, lines, strict=True):
        well = one.figures.get("succeeded", 0)
        tried = well + one.figures.get("retry", 0) + one.figures.get("died", 0)
        can_test = await context.admin.can_test(one.name)
        took = charts.percentiles(flows.get(one.name, {}))
        cards.append(DestinationCard(one, line, await context.admin.policy(one.name), tried, well, can_test, took))
    return await context.page("destinations.html", cards=cards, **about_page)


async def ask_pause(context: PageContext) -> Response:
    return await context.dialog(
        "pause.html", shown=await context.admin.destination(context.request.path_params["name"])
    )


async def pause(context: PageContext) -> Response:
    name, form = context.request.path_params["name"], await context.form()
    await context.admin.pause(name, actor=context.actor, reason=form.get("reason", ""))
    return context.back(f"/destinations#{name}", "pause")


async def resume(context: PageContext) -> Response:
    name = context.request.path_params["name"]
    await context.admin.resume(name, actor=context.actor)
    return context.back(f"/destinations#{name}", "resume")


async def try_now(context: PageContext) -> Response:
    """Let a destination that is held back try one delivery now."""
    name = context.request.path_params["name"]
    await context.admin.try_now(name, actor=context.actor)
    return context.back(f"/destinations#{name}", "try")


# -- live and system ---------------------------------------------------------------------------


async def live(context: PageContext) -> Response:
    """Show moments as they happen; without scripts, the latest events."""
    kind = context.parameter("kind", "all")
    if kind not in KINDS:
        raise BadRequest(f"`kind` is one of: {', '.join(KINDS)}.")
    source = context.parameter("source")
    return await context.page(
        "live.html",
        latest=await _latest(context, kind, source),
        kind=kind,
        kinds=KINDS,
        source=source,
        sources=[one.name for one in await context.admin.sources()],
    )


LATEST: Final = 50


@dataclass(frozen=True, slots=True)
class PastMoment:
    """Something that has happened, in the form of the live stream."""

    at: datetime
    kind: str
    fields: Mapping[str, Any]


async def _latest(context: PageContext, kind: str, source: str) -> list[PastMoment]:
    """Return what has happened lately, newest first: arrivals, attempts, and how deliveries ended without one."""
    found: list[PastMoment] = []
    meant = Filter(source=source or None)
    if kind in ("all", "arrivals"):
        events = (await context.admin.events(meant, limit=LATEST)).items
        found += [PastMoment(one.received_at, "arrival", _describe_arrival(one)) for one in events]
    if kind != "arrivals":
        status = DeliveryStatus.dead if kind == "dead" else None
        deliveries = (await context.admin.deliveries(replace(meant, status=status), limit=LATEST)).items
        attempts = await asyncio.gather(*[context.admin.attempts(one.id) for one in deliveries])
        for delivery, made in zip(deliveries, attempts, strict=True):
            wanted = [one for one in made if kind != "dead" or one.outcome is AttemptOutcome.dead]
            found += [PastMoment(one.ended_at, "attempt", _describe_attempt(delivery, one)) for one in wanted]
            if not made and delivery.settled_at is not None:
                found.append(PastMoment(delivery.settled_at, "attempt", _describe_end(delivery)))
    return sorted(found, key=lambda one: one.at, reverse=True)[:LATEST]


def _describe_arrival(event: ListedEvent) -> dict[str, Any]:
    about = {"source": event.source, "type": event.type, "subject": event.subject, "event_id": str(event.id)}
    return {**about, "outcome": "accepted", "copies": event.copies}


def _describe_end(delivery: StoredDelivery) -> dict[str, Any]:
    """Describe the end of a delivery as an attempt is described in the live stream."""
    return {
        "source": delivery.source,
        "type": delivery.type,
        "subject": delivery.subject,
        "event_id": str(delivery.event_id),
        "destination": delivery.destination,
        "outcome": str(delivery.status),
        "note": delivery.note,
        "error": delivery.last_error or delivery.reason,
    }


def _describe_attempt(delivery: StoredDelivery, attempt: StoredAttempt) -> dict[str, Any]:
    return {
        **_describe_end(delivery),
        "outcome": "retry" if attempt.outcome is AttemptOutcome.crashed else str(attempt.outcome),
        "attempt": attempt.n,
        "duration_s": (attempt.ended_at - attempt.started_at).total_seconds(),
        "error": first_line(timeline.answer(attempt)),
    }


async def _tokens(context: PageContext) -> Sequence[Any]:
    used = await context.admin.token_uses()
    return [schemas.encode(one, last_used=used.get(one.name)) for one in context.access.holders]


async def system(context: PageContext) -> Response:
    """Show workers, store, watermarks, and the audit log."""
    text = context.parameter("before")
    before = int(text) if text.isascii() and text.isdigit() and len(text) < 18 else None
    audit = await context.admin.audit(before=before, limit=AUDIT)
    minute = context.now - timedelta(seconds=15)
    frame = await context.frames.get(context.admin)
    return await context.page(
        "system.html",
        system=frame.system,
        quiet={worker.id for worker in frame.system.workers if worker.seen_at < minute},
        audit=audit,
        is_limited=context.admin.scope.is_limited,
        tokens=await _tokens(context)
        if context.identity.role >= Role.admin and not context.admin.scope.is_limited
        else (),
        older=audit[-1].n if len(audit) == AUDIT else None,
        bar=charts.bar,
        health=await context.admin.health() if not context.admin.scope.is_limited else None,
        checks=await context.admin.check() if context.is_on("check") and not context.admin.scope.is_limited else None,
    )


# -- samples ---------------------------------------------------------------------------------


async def ask_test(context: PageContext) -> Response:
    one = await context.admin.destination(context.request.path_params["name"])
    if not await context.admin.can_test(one.name):
        raise BadRequest(f"{one.name} has no web address of its own; only those can be tested.")
    return await context.dialog("test.html", shown=one, tested=None)


async def test(context: PageContext) -> Response:
    name = context.request.path_params["name"]
    await context.admin.check_own(name)
    tested = schemas.encode_test(await context.admin.test_destination(name, actor=context.actor), context.identity.role)
    return await context.dialog("test.html", shown=await context.admin.destination(name), tested=tested)


async def ask_sample(context: PageContext) -> Response:
    name = context.request.path_params["name"]
    source = await context.admin.source(name)
    kinds = await context.admin.sample_types(name)
    if not kinds:
        raise BadRequest(f"No sample can be made for {name[:60]}.")
    kind = context.parameter("type") or kinds[0]
    body = await context.admin.sample_body(name, kind) if _may_edit_samples(context) else None
    return await context.dialog(
        "sample.html", source=source, kinds=kinds, kind=kind, body=_lay_out_body(body), sampled=None
    )


def _may_edit_samples(context: PageContext) -> bool:
    """Tell whether somebody may have any body signed as a sender's: it could say that an invoice was paid."""
    return context.identity.role >= Role.admin and not context.admin.scope.is_limited


def _lay_out_body(body: bytes | None) -> str | None:
    """Return a sample's body as a person edits it: JSON indented, other text as it is, and None for other bytes."""
    try:
        return None if body is None else msgspec.json.format(body, indent=2).decode()
    except msgspec.DecodeError:
        with suppress(UnicodeDecodeError):
            return body.decode() if body is not None else None
        return None


async def sample(context: PageContext) -> Response:
    """Send a sample, with the body that somebody has edited: only if it was made from the type that is sent."""
    name, form = context.request.path_params["name"], await context.form()
    kind, text = form.get("type", ""), form.get("body", "").replace("\r\n", "\n")
    is_edited = bool(text) and form.get("shown") == kind
    if is_edited and not _may_edit_samples(context):
        raise Forbidden("A sample can only be changed by an admin who sees everything.")
    sampled = await context.admin.send_sample(
        name, kind, actor=context.actor, body=text.encode() if is_edited else None
    )
    source = await context.admin.source(name)
    return await context.dialog("sample.html", source=source, kinds=(), kind=kind, body=None, sampled=sampled)
