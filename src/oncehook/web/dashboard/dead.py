"""Dead letters: grouped by destination and cause, each group with its rows, its replay and its discard."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

from oncehook.errors import NotFound, PlanChanged
from oncehook.model import Cause, DeliveryId, DeliveryPreview, DeliveryStatus, StoredAttempt, StoredDelivery
from oncehook.query import quote_value, with_words, write_query
from oncehook.replay import ReplayRequest
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.context import PageContext

OPENED: Final = 2
"""Groups that are open when the page loads."""
ROWS: Final = 5
_HTTP: Final = re.compile(r"HTTP ([1-9][0-9]{2})")


@dataclass(frozen=True, slots=True)
class CauseGroup:
    """Dead letters of one destination with the same cause."""

    cause: Cause
    query: str
    rows: Sequence[StoredDelivery] = ()
    previews: Mapping[bytes, DeliveryPreview] = field(default_factory=dict)
    """Text and recipient of its rows."""
    replayable: Collection[bytes] = ()
    attempts: Mapping[bytes, int] = field(default_factory=dict)
    """Attempts of its rows over all runs."""
    last: StoredAttempt | None = None
    """The last attempt of the sample, with its evidence."""
    is_open: bool = False

    @property
    def line(self) -> charts.Spark:
        """Return when they died for the first time, over the last 24 hours."""
        return charts.spark([float(n) for n in self.cause.per_hour])


async def dead(context: PageContext) -> Response:
    destination, source = context.parameter("destination"), context.parameter("source")
    causes = await context.admin.causes(destination or None, source or None)
    groups = [await _group(context, cause, source, is_open=place < OPENED) for place, cause in enumerate(causes)]
    frame = await context.frames.get(context.admin)
    mark = next((mark for mark in frame.system.watermarks if mark.name == "dead"), None)
    return await context.page(
        "dead.html",
        groups=groups,
        destination=destination,
        source=source,
        destinations=sorted(({one.destination for one in await context.admin.causes()} | {destination}) - {""}),
        sources=sorted(({one.name for one in await context.admin.sources()} | {source}) - {""})
        if not context.auth.is_portal
        else (),
        query=_query("status:dead", destination, source),
        count=sum(cause.count for cause in causes),
        watermark=mark,
        bar=charts.bar,
        callouts=await context.callouts("replay"),
        discarded=sum(level.discarded for level in frame.levels.values()),
    )


async def group(context: PageContext) -> Response:
    """Show the rows of one group, when somebody opens it."""
    destination, text, source = (context.parameter(name) for name in ("destination", "cause", "source"))
    found = [cause for cause in await context.admin.causes(destination, source or None) if cause.cause == text]
    if not found:
        raise NotFound("There is no such group any more.")
    return context.fragment("_group.html", group=await _group(context, found[0], source, is_open=True), source=source)


async def _group(context: PageContext, cause: Cause, source: str, *, is_open: bool) -> CauseGroup:
    query = _query(query_of(cause), "", source)
    if not is_open:
        return CauseGroup(cause, query)
    page = await context.admin.deliveries(context.admin.read(query), limit=ROWS)
    try:
        attempts = await context.admin.attempts(cause.sample)
    except NotFound:
        attempts = []
    return CauseGroup(
        cause,
        query,
        page.items,
        await context.admin.previews(page.items),
        await context.admin.replayable(page.items),
        {one.id: len(await context.admin.attempts(one.id)) for one in page.items if one.run > 1},
        attempts[-1] if attempts else None,
        is_open=True,
    )


def _query(query: str, destination: str, source: str) -> str:
    """Return a query that is limited to a destination and a source, where they are chosen."""
    chosen = {"destination": destination, "source": source}
    return " ".join([*(f"{word}:{quote_value(value)}" for word, value in chosen.items() if value), query])


def query_of(cause: Cause) -> str:
    """Return the query of a group: by status code where the cause is one, otherwise by its text."""
    found = f"destination:{quote_value(cause.destination)} status:dead"
    code = _HTTP.fullmatch(cause.cause)
    if code:
        return f"{found} code:{code[1]}"
    text = cause.cause.replace("\\", "\\\\").replace('"', '\\"')
    return f'{found} "{text}"'


async def ask_discard(context: PageContext) -> Response:
    delivery = await context.admin.delivery(context.id(DeliveryId))
    return await context.dialog(
        "discard.html",
        delivery=delivery,
        count=1,
        plan=None,
        note="",
        reason="",
        action=f"/deliveries/{context.request.path_params['id']}/discard",
    )


async def discard(context: PageContext) -> Response:
    form = await context.form()
    delivery = await context.admin.discard(context.id(DeliveryId), actor=context.actor, reason=form.get("reason", ""))
    return context.back(f"/events/{delivery.event_id}", "discard")


async def ask_discard_many(context: PageContext) -> Response:
    """Show the dialog before a group is closed, with its number and rows."""
    return await _show_discard(context, await _request_dead(context))


async def _show_discard(context: PageContext, request: ReplayRequest, note: str = "", reason: str = "") -> Response:
    plan = await context.admin.plan(request)
    return await context.dialog(
        "discard.html",
        status=409 if note else 200,
        delivery=None,
        count=plan.by_status.get(DeliveryStatus.dead, 0),
        plan=plan,
        query=write_query(request.filter),
        action="/dead/discard",
        note=note,
        reason=reason,
    )


async def discard_many(context: PageContext) -> Response:
    """Close the dead letters that the dialog has shown. If there are more by now, show those first."""
    form = await context.form()
    token, reason = form.get("plan", ""), form.get("reason", "")
    try:
        await context.admin.discard_planned(token, actor=context.actor, reason=reason)
    except PlanChanged as changed:
        request, _ = context.admin.read_plan(token)
        return await _show_discard(context, request, note=str(changed), reason=reason)
    return context.back("/dead", "discard")


async def _request_dead(context: PageContext) -> ReplayRequest:
    """Return the request of the parameters: a query, or events and deliveries by id; limited to dead ones."""
    ids = context.many("ids")
    text = context.parameter("query")
    if "status:" not in text:
        text = with_words(text, "status:dead")
    if ids:
        text = " ".join([text, *[f"id:{one}" for one in await context.admin.find_named(ids)]])
    return context.admin.build_request(text)
