"""Replays: the plan, the confirmation, and the list with progress. Nothing is sent without a confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from oncehook import clock
from oncehook.errors import BadRequest, PlanChanged
from oncehook.human import replay_state
from oncehook.model import DeliveryId, DeliveryStatus, Filter, ReplayId, ReplayState, StoredDelivery, StoredReplay
from oncehook.query import write_query
from oncehook.replay import BEHIND, Plan, ReplayRequest, command
from oncehook.web.api.request import cursor, rate
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.context import PageContext
from oncehook.web.dashboard.events import RANGES, choose_value, find_value
from oncehook.web.dashboard.render import names, number
from oncehook.web.language import translate

TYPED_ABOVE: Final = 100
RATES: Final = (("", "as fast as they go"), ("20/s", "20 a second"), ("5/s", "5 a second"), ("1/s", "1 a second"))
OPEN: Final = (ReplayState.running, ReplayState.paused)


# -- the list ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    replay: StoredReplay
    now: datetime

    @property
    def left(self) -> int:
        kept = self.replay
        return max(kept.planned - kept.done - kept.dead - kept.skipped, 0)

    @property
    def rate(self) -> float | None:
        """Return deliveries per second so far."""
        ended = self.replay.planned - self.left
        seconds = (self.now - self.replay.created_at).total_seconds()
        return ended / seconds if ended and seconds > 1 else None

    @property
    def seconds_left(self) -> float | None:
        pace = self.rate
        return self.left / pace if pace and self.replay.state is ReplayState.running else None

    @property
    def pieces(self) -> Sequence[charts.Piece]:
        kept = self.replay
        return charts.bar([("done", kept.done), ("dead", kept.dead), ("twin", kept.skipped)], kept.planned)

    @property
    def state(self) -> str:
        """Return its state as it is shown."""
        kept = self.replay
        return replay_state(kept.state, kept.planned, kept.dead, kept.skipped)

    @property
    def word(self) -> str:
        kept = self.replay
        words = {"failed": translate("all failed"), "partly": f"{number(kept.dead)} {translate('failed')}"}
        return words.get(self.state, self.state)

    @property
    def unbegun(self) -> int:
        """Return how many an aborted replay has left where they were."""
        kept = self.replay
        return kept.planned - kept.fed - kept.skipped if kept.state is ReplayState.aborted else 0

    @property
    def is_forced(self) -> bool:
        return bool(self.replay.about.get("force"))

    @property
    def title(self) -> str:
        return str(self.replay.about.get("query", "")) or translate("one delivery")

    @property
    def to(self) -> str:
        """Return its destinations; empty for replays that did not store them."""
        known = self.replay.about.get("to")
        return names(known) if isinstance(known, list) else ""


async def replays(context: PageContext) -> Response:
    """Show all replays: those under way as cards, the others as rows."""
    page = await context.admin.replays(before=context.cursor("replay"), limit=50)
    runs = [ReplayProgress(replay, context.now) for replay in page.items]
    return await context.page(
        "replays.html",
        running=[run for run in runs if run.replay.state in OPEN],
        finished=[run for run in runs if run.replay.state not in OPEN],
        next=cursor("replay", page.next),
        count=len(runs),
    )


ITEMS: Final = 100


async def replay(context: PageContext) -> Response:
    """Show one replay: what became of it, by destination and delivery by delivery."""
    replay_id = context.id(ReplayId)
    run = ReplayProgress(await context.admin.replay(replay_id), context.now)
    place = context.cursor("item")
    items = await context.admin.replay_items(
        replay_id, after=0 if place is None else int.from_bytes(place[:8]), limit=ITEMS
    )
    outcomes = await context.admin.replay_outcomes(replay_id)
    return await context.page(
        "replay.html",
        run=run,
        items=items,
        outcomes=sorted(outcomes.items()),
        names=OUTCOMES,
        next=cursor("item", items[-1].n.to_bytes(8)) if len(items) == ITEMS else None,
        is_first=place is None,
        bar=charts.bar,
    )


OUTCOMES: Final = ("done", "dead", "skipped", "running", "left")


async def ask_abort(context: PageContext) -> Response:
    return await context.dialog(
        "abort.html", run=ReplayProgress(await context.admin.replay(context.id(ReplayId)), context.now)
    )


async def pause(context: PageContext) -> Response:
    """Pause a replay: what was fed to workers is still processed."""
    return await _set_state(context, ReplayState.paused, "pause")


async def resume(context: PageContext) -> Response:
    return await _set_state(context, ReplayState.running, "resume")


async def abort(context: PageContext) -> Response:
    """Abort a replay: what is done stays done, the rest is not changed."""
    return await _set_state(context, ReplayState.aborted, "abort")


async def _set_state(context: PageContext, state: ReplayState, note: str) -> Response:
    await context.admin.set_replay_state(context.id(ReplayId), state, actor=context.actor)
    return context.back("/replays", note)


# -- the plan ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """One delivery of an event, or all of them."""

    name: str
    status: str
    link: str
    is_chosen: bool


async def plan(context: PageContext) -> Response:
    """Show the plan of a replay: recipients, numbers, times, and what is left out. Changes nothing."""
    ids = context.many("ids")
    query = context.parameter("query")
    request = await _build_request(context, query, ids)
    return await _show(context, request, ids, query)


async def _build_request(context: PageContext, query: str, ids: Sequence[str]) -> ReplayRequest:
    named = await context.admin.find_named(ids) if ids else None
    return context.admin.build_request(
        query,
        ids=named,
        force=context.is_on("force"),
        fresh_id=context.is_on("fresh_id"),
        rate=rate(context.parameter("rate") or None),
    )


async def _show(
    context: PageContext, request: ReplayRequest, ids: Sequence[str], query: str, note: str = ""
) -> Response:
    made = await context.admin.plan(request)
    one = await _only(context, request)
    return await context.dialog(
        "plan.html",
        status=409 if note else 200,
        plan=made,
        one=one,
        message=(await context.admin.previews([one])).get(one.id) if one else None,
        note=note,
        must_type=must_type(made),
        request_key=clock.random_bytes(16).hex(),
        command=command(request),
        query=write_query(request.filter),
        is_query=bool(query),
        choices=await _choices(context, one),
        again=[("ids", one_id) for one_id in ids] + ([("query", query)] if query else []),
        rates=RATES,
        ranges=_ranges(query),
        behind=BEHIND,
        to=", ".join(recipient.destination for recipient in made.recipients),
        policy=await context.admin.policy(one.destination) if one else None,
    )


def _ranges(query: str) -> list[Choice]:
    """Return the same plan for other time ranges; none where the query names deliveries, or an end of its own."""
    if not query or "until:" in query:
        return []
    chosen = find_value(query, "since")
    return [
        Choice(
            translate(text),
            "",
            "/replays/plan?" + urlencode({"query": choose_value(query, "since", word)}),
            word == chosen,
        )
        for word, text in (("", "any time"), *RANGES[1:4])
    ]


def must_type(plan: Plan) -> bool:
    """Tell whether the number must be typed: there are many, or some are already done."""
    return plan.total > TYPED_ABOVE or plan.by_status.get(DeliveryStatus.done, 0) > 0


async def _only(context: PageContext, request: ReplayRequest) -> StoredDelivery | None:
    """Return the delivery if exactly one is named."""
    ids = request.filter.ids
    if ids is None or len(ids) != 1 or request.filter != Filter(ids=ids):
        return None
    return await context.admin.delivery(ids[0])


async def _choices(context: PageContext, one: StoredDelivery | None) -> list[Choice]:
    """Return the other deliveries of the same event, as alternatives."""
    if one is None:
        return []
    found = (await context.admin.deliveries(Filter(event_id=one.event_id), limit=20)).items
    if len(found) < 2:
        return []
    return [
        Choice(
            other.destination,
            str(other.status),
            "/replays/plan?" + urlencode({"ids": str(other.id)}),
            other.id == one.id,
        )
        for other in sorted(found, key=lambda delivery: delivery.id)
    ]


async def start(context: PageContext) -> Response:
    """Start a confirmed plan. If the set has changed meanwhile, show the new plan instead."""
    form = await context.form()
    request, seen = context.admin.read_plan(form.get("plan", ""))
    request = msgspec.structs.replace(request, fresh_id=form.get("fresh_id") == "1")
    expected = seen.count
    _check_typed(form.get("typed"), request, expected)
    reason, key = form.get("reason", ""), form.get("request_key") or None
    one = await _only(context, request)
    if one is not None:
        await context.admin.replay_one(
            one.id, actor=context.actor, force=request.force, fresh_id=request.fresh_id, reason=reason, request_key=key
        )
        return context.back(f"/events/{one.event_id}", "replay")
    try:
        made = await context.admin.start_replay(
            request, actor=context.actor, reason=reason, request_key=key, expected=expected
        )
    except PlanChanged as changed:
        return await _show(context, request, [], write_query(request.filter), note=str(changed))
    return context.back(f"/replays#{made.id}", "replay")


def _check_typed(typed: str | None, request: ReplayRequest, expected: int) -> None:
    # With `force` some may be done already: then the page asks for the number, and we check it.
    if expected <= TYPED_ABOVE and not request.force:
        return
    digits = "".join(character for character in typed or "" if character not in " ,.")
    if digits != str(expected):
        raise BadRequest(f"Type {expected} to confirm.", hint="Go back and type the number that the plan says.")


# -- the next attempt --------------------------------------------------------------------------


async def ask_retry(context: PageContext) -> Response:
    delivery = await context.admin.delivery(context.id(DeliveryId))
    known = {one.name: one for one in await context.admin.destinations()}
    return await context.dialog(
        "retry.html",
        delivery=delivery,
        destination=known.get(delivery.destination),
        policy=await context.admin.policy(delivery.destination),
        message=(await context.admin.previews([delivery])).get(delivery.id),
    )


async def retry(context: PageContext) -> Response:
    """Make the next attempt due now."""
    delivery = await context.admin.retry(context.id(DeliveryId), actor=context.actor)
    return context.back(f"/events/{delivery.event_id}", "retry")
