"""Pages about the setup: sources, destinations, the live page, the system."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, Final

from starlette.responses import Response

from oncehook.errors import BadRequest
from oncehook.human import show_span
from oncehook.model import Filter, Rejection
from oncehook.reports import ShownDestination, ShownSource
from oncehook.retry import Policy
from oncehook.web.api import schemas
from oncehook.web.auth import Role
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.charts import SPANS, Spark, fill, spark
from oncehook.web.dashboard.context import PageContext

DAY: Final = SPANS[1]
AUDIT: Final = 40
KINDS: Final = ("all", "arrivals", "attempts", "dead")


# -- sources -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceCard:
    """A source with its counts of the day and its recent rejections."""

    source: ShownSource
    address: str | None
    """URL to send to; None for an unguessable one that this visitor may not see."""
    line: Spark
    reasons: Sequence[tuple[str, int]]
    rejections: Sequence[Rejection]
    has_samples: bool
    """Whether a genuine sample can be signed here."""


async def sources(context: PageContext) -> Response:
    found = await context.admin.sources()
    turned_away = await context.admin.rejections(500)
    lines = await asyncio.gather(*[_flow(context, ("received",), source=source.name) for source in found])
    cards = [_source_card(context, source, line, turned_away) for source, line in zip(found, lines, strict=True)]
    known = {source.name for source in found}
    unknown = [one for one in turned_away if one.source not in known]
    return await context.page("sources.html", cards=cards, unknown=unknown[:20])


def _source_card(
    context: PageContext, source: ShownSource, line: Spark, turned_away: Sequence[Rejection]
) -> SourceCard:
    mine = [one for one in turned_away if one.source == source.name]
    address = source.public_url or f"{context.way_in}/{source.address.removeprefix('/in/')}"
    is_secret = source.hidden or "?" in address  # a query may contain a token
    may_see = not is_secret or context.identity.role >= Role.operator
    reasons = Counter(one.reason for one in mine).most_common(5)
    has_samples = bool(context.admin.sample_types(source.name))
    return SourceCard(source, address if may_see else None, line, reasons, mine[:10], has_samples)


async def _flow(
    context: PageContext, names: Sequence[str], *, source: str | None = None, destination: str | None = None
) -> Spark:
    steps = DAY.steps(context.now)
    flows = await context.admin.series(steps[0], DAY.step, source=source, destination=destination)
    columns = [fill(flows.get(name), steps, DAY.step) for name in names]
    return spark([float(sum(values)) for values in zip(*columns, strict=True)])


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

    @property
    def steps(self) -> Sequence[str]:
        """Return the waits between attempts as text, with equal ones grouped."""
        if self.policy is None:
            return []
        waits = map(show_span, self.policy.waits or self.policy.in_words())
        alike = [(wait, len(list(run))) for wait, run in groupby(waits)]
        return [wait if times == 1 else f"{wait} ×{times}" for wait, times in alike[:12]]


async def destinations(context: PageContext) -> Response:
    found = await context.admin.destinations()
    lines = await asyncio.gather(
        *[_flow(context, ("succeeded", "retry", "died"), destination=one.name) for one in found]
    )
    cards = []
    for one, line in zip(found, lines, strict=True):
        well = one.figures.get("succeeded", 0)
        tried = well + one.figures.get("retry", 0) + one.figures.get("died", 0)
        can_test = context.admin.can_test(one.name)
        cards.append(DestinationCard(one, line, context.admin.policy(one.name), tried, well, can_test))
    return await context.page("destinations.html", cards=cards)


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


# -- live and system ---------------------------------------------------------------------------


async def live(context: PageContext) -> Response:
    """Show moments as they happen; without scripts, the latest events."""
    kind = context.parameter("kind", "all")
    if kind not in KINDS:
        raise BadRequest(f"`kind` is one of: {', '.join(KINDS)}.")
    page = await context.admin.events(Filter(), limit=50)
    latest = page.items if kind in ("all", "arrivals") else ()
    return await context.page("live.html", latest=latest, kind=kind, kinds=KINDS)


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
        is_limited=context.admin.scope is not None,
        tokens=await _tokens(context) if context.identity.role >= Role.admin and context.admin.scope is None else (),
        older=audit[-1].n if len(audit) == AUDIT else None,
        bar=charts.bar,
    )


# -- samples ---------------------------------------------------------------------------------


async def ask_test(context: PageContext) -> Response:
    one = await context.admin.destination(context.request.path_params["name"])
    if not context.admin.can_test(one.name):
        raise BadRequest(f"{one.name} is no web address; only those can be tested.")
    return await context.dialog("test.html", shown=one, tested=None)


async def test(context: PageContext) -> Response:
    name = context.request.path_params["name"]
    context.admin.check_own(name)
    tested = schemas.encode_test(await context.admin.test_destination(name, actor=context.actor), context.identity.role)
    return await context.dialog("test.html", shown=await context.admin.destination(name), tested=tested)


async def ask_sample(context: PageContext) -> Response:
    name = context.request.path_params["name"]
    found = [one for one in await context.admin.sources() if one.name == name]
    kinds = context.admin.sample_types(name)
    if not found or not kinds:
        raise BadRequest(f"No sample can be made for {name[:60]}.")
    return await context.dialog("sample.html", source=found[0], kinds=kinds, sampled=None)


async def sample(context: PageContext) -> Response:
    name, form = context.request.path_params["name"], await context.form()
    sampled = await context.admin.send_sample(name, form.get("type", ""), actor=context.actor)
    source = next(one for one in await context.admin.sources() if one.name == name)
    return await context.dialog("sample.html", source=source, kinds=(), sampled=sampled)
