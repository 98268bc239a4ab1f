"""What is set up and how it stands: sources, destinations, the live page, the system."""

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
from oncehook.model import Filter, Rejection
from oncehook.reports import ShownDestination, ShownSource, span
from oncehook.retry import Policy
from oncehook.web.api import schemas
from oncehook.web.auth import Role
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.charts import SPANS, Spark, fill, spark
from oncehook.web.dashboard.context import Visit

DAY: Final = SPANS[1]
AUDIT: Final = 40
KINDS: Final = ("all", "arrivals", "attempts", "dead")


# -- sources -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceCard:
    """A source, its day, and what was turned away lately."""

    source: ShownSource
    address: str | None
    """Where to send; None for an unguessable address that this visitor may not see."""
    line: Spark
    reasons: Sequence[tuple[str, int]]
    rejections: Sequence[Rejection]
    has_samples: bool
    """Whether a genuine sample can be made here."""


async def sources(visit: Visit) -> Response:
    """Where hooks come from."""
    found = await visit.admin.sources()
    turned_away = await visit.admin.rejections(500)
    lines = await asyncio.gather(*[_flow(visit, ("received",), source=source.name) for source in found])
    cards = [_source_card(visit, source, line, turned_away) for source, line in zip(found, lines, strict=True)]
    known = {source.name for source in found}
    strangers = [one for one in turned_away if one.source not in known]
    return await visit.page("sources.html", cards=cards, strangers=strangers[:20])


def _source_card(visit: Visit, source: ShownSource, line: Spark, turned_away: Sequence[Rejection]) -> SourceCard:
    mine = [one for one in turned_away if one.source == source.name]
    address = source.public_url or f"{visit.way_in}/{source.address.removeprefix('/in/')}"
    is_secret = source.hidden or "?" in address  # a query may hold a token
    may_see = not is_secret or visit.identity.role >= Role.operator
    reasons = Counter(one.reason for one in mine).most_common(5)
    has_samples = bool(visit.admin.trials.samples(source.name))
    return SourceCard(source, address if may_see else None, line, reasons, mine[:10], has_samples)


async def _flow(
    visit: Visit, names: Sequence[str], *, source: str | None = None, destination: str | None = None
) -> Spark:
    steps = DAY.steps(visit.now)
    flows = await visit.admin.series(steps[0], DAY.step, source=source, destination=destination)
    columns = [fill(flows.get(name), steps, DAY.step) for name in names]
    return spark([float(sum(values)) for values in zip(*columns, strict=True)])


# -- destinations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DestinationCard:
    """A destination, its day, and its waits."""

    shown: ShownDestination
    line: Spark
    policy: Policy | None
    tried: int
    well: int
    can_test: bool

    @property
    def steps(self) -> Sequence[str]:
        """The waits between attempts, in words; those that are alike together."""
        if self.policy is None:
            return []
        waits = map(span, self.policy.waits or self.policy.in_words())
        alike = [(wait, len(list(run))) for wait, run in groupby(waits)]
        return [wait if times == 1 else f"{wait} ×{times}" for wait, times in alike[:12]]


async def destinations(visit: Visit) -> Response:
    """Where deliveries go."""
    found = await visit.admin.destinations()
    lines = await asyncio.gather(*[_flow(visit, ("succeeded", "retry", "died"), destination=one.name) for one in found])
    cards = []
    for one, line in zip(found, lines, strict=True):
        well = one.figures.get("succeeded", 0)
        tried = well + one.figures.get("retry", 0) + one.figures.get("died", 0)
        can_test = visit.admin.trials.can_test(one.name)
        cards.append(DestinationCard(one, line, visit.admin.policy(one.name), tried, well, can_test))
    return await visit.page("destinations.html", cards=cards)


async def ask_pause(visit: Visit) -> Response:
    """The dialog before a destination is paused."""
    return await visit.dialog("pause.html", shown=await visit.admin.destination(visit.request.path_params["name"]))


async def pause(visit: Visit) -> Response:
    """Hold a destination back."""
    name, form = visit.request.path_params["name"], await visit.form()
    await visit.admin.pause(name, actor=visit.actor, reason=form.get("reason", ""))
    return visit.back(f"/destinations#{name}", "pause")


async def resume(visit: Visit) -> Response:
    """Let a destination go on."""
    name = visit.request.path_params["name"]
    await visit.admin.resume(name, actor=visit.actor)
    return visit.back(f"/destinations#{name}", "resume")


# -- live and system ---------------------------------------------------------------------------


async def live(visit: Visit) -> Response:
    """Moments as they come; without script, the latest events."""
    kind = visit.parameter("kind", "all")
    if kind not in KINDS:
        raise BadRequest(f"`kind` is one of: {', '.join(KINDS)}.")
    page = await visit.admin.events(Filter(), limit=50)
    latest = page.items if kind in ("all", "arrivals") else ()
    return await visit.page("live.html", latest=latest, kind=kind, kinds=KINDS)


async def _tokens(visit: Visit) -> Sequence[Any]:
    used = await visit.admin.token_uses()
    return [schemas.encode(one, last_used=used.get(one.name)) for one in visit.access.holders]


async def system(visit: Visit) -> Response:
    """Workers, store, watermarks, and who did what."""
    text = visit.parameter("before")
    before = int(text) if text.isascii() and text.isdigit() and len(text) < 18 else None
    audit = await visit.admin.audit(before=before, limit=AUDIT)
    minute = visit.now - timedelta(seconds=15)
    frame = await visit.frames.get(visit.admin)
    return await visit.page(
        "system.html",
        system=frame.system,
        quiet={worker.id for worker in frame.system.workers if worker.seen_at < minute},
        audit=audit,
        is_limited=visit.admin.scope is not None,
        tokens=await _tokens(visit) if visit.identity.role >= Role.admin and visit.admin.scope is None else (),
        older=audit[-1].n if len(audit) == AUDIT else None,
        bar=charts.bar,
    )


# -- trials ----------------------------------------------------------------------------------


async def ask_test(visit: Visit) -> Response:
    """The dialog before a test: what is sent, and to whom."""
    one = await visit.admin.destination(visit.request.path_params["name"])
    if not visit.admin.trials.can_test(one.name):
        raise BadRequest(f"{one.name} is no web address; only those can be tested.")
    return await visit.dialog("test.html", shown=one, tested=None)


async def test(visit: Visit) -> Response:
    """Send a test, and show how it was answered."""
    name = visit.request.path_params["name"]
    visit.admin.check_own(name)
    tested = schemas.tested(await visit.admin.trials.test(name, actor=visit.actor), visit.identity.role)
    return await visit.dialog("test.html", shown=await visit.admin.destination(name), tested=tested)


async def ask_sample(visit: Visit) -> Response:
    """The dialog before a sample: which one, and where it will go."""
    name = visit.request.path_params["name"]
    found = [one for one in await visit.admin.sources() if one.name == name]
    kinds = visit.admin.trials.samples(name)
    if not found or not kinds:
        raise BadRequest(f"No sample can be made for {name[:60]}.")
    return await visit.dialog("sample.html", source=found[0], kinds=kinds, sampled=None)


async def sample(visit: Visit) -> Response:
    """Send a sample, and show what became of it."""
    name, form = visit.request.path_params["name"], await visit.form()
    sampled = await visit.admin.trials.sample(name, form.get("type", ""), actor=visit.actor)
    source = next(one for one in await visit.admin.sources() if one.name == name)
    return await visit.dialog("sample.html", source=source, kinds=(), sampled=sampled)
