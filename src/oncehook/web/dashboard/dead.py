"""Dead letters: grouped by destination and cause, each group with its rows, its replay and its discard."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

from oncehook.errors import NotFound, PlanChanged
from oncehook.model import Cause, DeliveryStatus, Kind, Preview, StoredAttempt, StoredDelivery, show_id
from oncehook.query import fixed, quoted
from oncehook.replay import ReplayRequest
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.context import Visit

OPENED: Final = 2
"""Groups that are open when the page comes."""
ROWS: Final = 5
_HTTP: Final = re.compile(r"HTTP ([1-9][0-9]{2})")


@dataclass(frozen=True, slots=True)
class Group:
    """Dead letters of one destination that died of the same thing."""

    cause: Cause
    query: str
    """What finds them."""
    rows: Sequence[StoredDelivery] = ()
    previews: Mapping[bytes, Preview] = field(default_factory=dict)
    """What its rows say, and to whom."""
    replayable: Collection[bytes] = ()
    """Those that can be replayed now."""
    last: StoredAttempt | None = None
    """The last attempt of the sample, with its evidence."""
    is_open: bool = False


async def dead(visit: Visit) -> Response:
    """All dead letters, in groups."""
    causes = await visit.admin.causes()
    groups = [await _group(visit, cause, is_open=place < OPENED) for place, cause in enumerate(causes)]
    frame = await visit.frames.get(visit.admin)
    mark = next((mark for mark in frame.system.watermarks if mark.name == "dead"), None)
    return await visit.page(
        "dead.html",
        groups=groups,
        count=sum(cause.count for cause in causes),
        watermark=mark,
        bar=charts.bar,
        callouts=await visit.callouts("replay"),
        discarded=sum(level.discarded for level in frame.levels.values()),
    )


async def group(visit: Visit) -> Response:
    """The rows of one group, when somebody opens it."""
    destination, text = visit.parameter("destination"), visit.parameter("cause")
    found = [cause for cause in await visit.admin.causes(destination) if cause.cause == text]
    if not found:
        raise NotFound("There is no such group any more.")
    return visit.fragment("_group.html", group=await _group(visit, found[0], is_open=True))


async def _group(visit: Visit, cause: Cause, *, is_open: bool) -> Group:
    query = query_of(cause)
    if not is_open:
        return Group(cause, query)
    page = await visit.admin.deliveries(visit.admin.read(query), limit=ROWS)
    try:
        attempts = await visit.admin.attempts(cause.sample)
    except NotFound:
        attempts = []
    return Group(
        cause,
        query,
        page.items,
        await visit.admin.previews(page.items),
        await visit.admin.replayable(page.items),
        attempts[-1] if attempts else None,
        is_open=True,
    )


def query_of(cause: Cause) -> str:
    """The query that finds a group: by status code where the cause is one, else by its words."""
    said = f"destination:{quoted(cause.destination)} status:dead"
    code = _HTTP.fullmatch(cause.cause)
    if code:
        return f"{said} code:{code[1]}"
    text = cause.cause.replace("\\", "\\\\").replace('"', '\\"')
    return f'{said} "{text}"'


# -- discarding --------------------------------------------------------------------------------


async def ask_discard(visit: Visit) -> Response:
    """The dialog before one dead letter is closed."""
    delivery = await visit.admin.delivery(visit.delivery_id())
    return await visit.dialog(
        "discard.html",
        delivery=delivery,
        count=1,
        plan=None,
        note="",
        reason="",
        action=f"/deliveries/{visit.request.path_params['id']}/discard",
    )


async def discard(visit: Visit) -> Response:
    """Close one dead letter."""
    form = await visit.form()
    delivery = await visit.admin.discard(visit.delivery_id(), actor=visit.actor, reason=form.get("reason", ""))
    return visit.back(f"/events/{show_id(Kind.event, delivery.event_id)}", "discard")


async def ask_discard_many(visit: Visit) -> Response:
    """The dialog before a group is closed: how many, and which."""
    return await _show_discard(visit, await _dead_of(visit))


async def _show_discard(visit: Visit, wish: ReplayRequest, note: str = "", reason: str = "") -> Response:
    plan = await visit.admin.plan(wish)
    return await visit.dialog(
        "discard.html",
        status=409 if note else 200,
        delivery=None,
        count=plan.by_status.get(DeliveryStatus.dead, 0),
        plan=plan,
        query=fixed(wish.filter),
        action="/dead/discard",
        note=note,
        reason=reason,
    )


async def discard_many(visit: Visit) -> Response:
    """Close the dead letters that the dialog has shown. When there are more of them, they are shown first."""
    form = await visit.form()
    token, reason = form.get("plan", ""), form.get("reason", "")
    try:
        await visit.admin.discard_planned(token, actor=visit.actor, reason=reason)
    except PlanChanged as changed:
        wish, _ = visit.admin.planned(token)
        return await _show_discard(visit, wish, note=str(changed), reason=reason)
    return visit.back("/dead", "discard")


async def _dead_of(visit: Visit) -> ReplayRequest:
    """What the address means: a query, or events and deliveries by their ids; of these the dead ones."""
    ids = visit.many("ids")
    text = visit.parameter("query")
    if "status:" not in text:
        text = f"{text} status:dead".strip()
    if ids:
        text = " ".join([text, *[f"id:{show_id(Kind.delivery, one)}" for one in await visit.admin.named(ids)]])
    return visit.admin.wish(text)
