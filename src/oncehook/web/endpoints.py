"""What can be asked of the JSON API: a handler for each address, and `ENDPOINTS`, the table of them all.

A handler is given an `Ask` (who asks, the desk, the words of the request) and returns a value of `answers` or
`reports`; `api` serves the table, `openapi` describes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from oncehook.errors import BadRequest, ConfigError, Forbidden, NotFound
from oncehook.human import seconds
from oncehook.model import ArrivalId, DeliveryId, EventId, Page, ReplayId, ReplayState
from oncehook.replay import ReplayRequest
from oncehook.web import answers, erasing, remembering, reports, trials
from oncehook.web.access import Role
from oncehook.web.asking import Ask, Choose, DiscardMatching, Reason, ReplayOne, StartReplay, cursor, rate
from oncehook.web.live import Stream, Watcher
from oncehook.web.openapi import FILTER, KEY, LIMIT, PAGED, Endpoint

# -- events and deliveries ---------------------------------------------------------------------


async def list_events(ask: Ask) -> dict[str, Any]:
    page = await ask.admin.events(ask.filter(), before=ask.cursor("event"), limit=ask.limit())
    return _page("event", page, answers.listed_event)


async def get_event(ask: Ask) -> answers.Event:
    return answers.event(await ask.admin.event(ask.id(EventId)))


async def get_body(ask: Ask) -> Response:
    event_id = ask.id(EventId)
    return _bytes(await ask.admin.body(event_id), str(event_id))


async def list_arrivals(ask: Ask) -> dict[str, Any]:
    found = await ask.admin.arrivals(ask.id(EventId))
    return _whole([answers.arrival(one) for one in found])


async def get_arrival_body(ask: Ask) -> Response:
    event_id, arrival_id = ask.id(EventId), ask.id(ArrivalId, "arrival")
    if all(one.id != arrival_id for one in await ask.admin.arrivals(event_id)):
        raise NotFound("This event has no such arrival, or no longer.")
    own = await ask.admin.arrival_body(event_id, arrival_id)
    body = await ask.admin.body(event_id) if own is None else own
    return _bytes(body, str(arrival_id))


def _bytes(body: bytes, name: str) -> Response:
    """A stranger's bytes, to be saved and never to be shown (S30)."""
    attached = {"Content-Disposition": f'attachment; filename="{name}.bin"'}
    return Response(body, media_type="application/octet-stream", headers=attached)


async def list_deliveries(ask: Ask) -> dict[str, Any]:
    page = await ask.admin.deliveries(ask.filter(), before=ask.cursor("delivery"), limit=ask.limit())
    return _page("delivery", page, answers.delivery)


async def get_delivery(ask: Ask) -> answers.Delivery:
    return answers.delivery(await ask.admin.delivery(ask.id(DeliveryId)))


async def list_attempts(ask: Ask) -> dict[str, Any]:
    return _whole([answers.attempt(one) for one in await ask.admin.attempts(ask.id(DeliveryId))])


async def list_neighbours(ask: Ask) -> dict[str, Any]:
    return _whole([answers.delivery(one) for one in await ask.admin.neighbours(ask.id(DeliveryId))])


async def retry_delivery(ask: Ask) -> answers.Delivery:
    return answers.delivery(await ask.admin.retry(ask.id(DeliveryId), actor=ask.actor))


async def discard_delivery(ask: Ask) -> answers.Delivery:
    delivery_id, body = ask.id(DeliveryId), await ask.body(Reason)
    return answers.delivery(await ask.admin.discard(delivery_id, actor=ask.actor, reason=body.reason))


async def list_causes(ask: Ask) -> dict[str, Any]:
    return _whole([answers.cause(one) for one in await ask.admin.causes(ask.parameter("destination") or None)])


async def discard_matching(ask: Ask) -> answers.Discarded:
    body = await ask.body(DiscardMatching)
    if body.plan is None:
        meant = ask.admin.read(body.query)
        closed = await ask.admin.discard_matching(meant, actor=ask.actor, reason=body.reason)
    elif body.query:
        raise _says_already()
    else:
        closed = await ask.admin.discard_planned(body.plan, actor=ask.actor, reason=body.reason)
    return answers.Discarded(discarded=closed)


# -- replays -----------------------------------------------------------------------------------


async def replay_delivery(ask: Ask) -> answers.Replayed:
    delivery_id, body = ask.id(DeliveryId), await ask.body(ReplayOne)
    made = await ask.admin.replay_one(
        delivery_id,
        actor=ask.actor,
        force=body.force,
        fresh_id=body.fresh_id,
        reason=body.reason,
        request_key=ask.request_key(),
    )
    return answers.Replayed(replay_id=str(made.id))


async def plan_replay(ask: Ask) -> answers.Plan:
    return answers.plan(await ask.admin.plan(await _wish(ask, await ask.body(Choose))))


async def start_replay(ask: Ask) -> answers.Replayed:
    body = await ask.body(StartReplay)
    if body.plan is None:
        wish, expected = await _wish(ask, body), None
    else:
        wish, seen = ask.admin.read_plan(body.plan)
        expected = seen.count
        if body != StartReplay(plan=body.plan, rate=body.rate, fresh_id=body.fresh_id, reason=body.reason):
            raise _says_already()
        wish = replace(wish, fresh_id=body.fresh_id or wish.fresh_id, rate=rate(body.rate) or wish.rate)
    made = await ask.admin.start_replay(
        wish, actor=ask.actor, reason=body.reason, request_key=ask.request_key(), expected=expected
    )
    return answers.Replayed(replay_id=str(made.id))


def _says_already() -> BadRequest:
    return BadRequest("A plan says already what is meant.", hint="For other deliveries, plan anew.")


async def _wish(ask: Ask, body: Choose) -> ReplayRequest:
    return ask.admin.build_request(
        body.query,
        ids=None if body.ids is None else await ask.admin.find_named(body.ids),
        destination=body.destination,
        until=body.until,
        force=body.force,
        fresh_id=body.fresh_id,
        rate=rate(body.rate),
    )


async def list_replays(ask: Ask) -> dict[str, Any]:
    page = await ask.admin.replays(before=ask.cursor("replay"), limit=ask.limit())
    return _page("replay", page, answers.replay_of)


async def get_replay(ask: Ask) -> answers.Replay:
    return answers.replay_of(await ask.admin.replay(ask.id(ReplayId)))


def steer(state: ReplayState) -> Callable[[Ask], Awaitable[answers.Replay]]:
    """A handler that brings a replay into this state."""

    async def handler(ask: Ask) -> answers.Replay:
        return answers.replay_of(await ask.admin.set_replay_state(ask.id(ReplayId), state, actor=ask.actor))

    return handler


# -- what is set up, and how it goes -----------------------------------------------------------


async def list_sources(ask: Ask) -> dict[str, Any]:
    may_see = ask.identity.role >= Role.operator
    return _whole([reports.source(one, with_address=may_see) for one in await ask.admin.sources()])


async def list_destinations(ask: Ask) -> dict[str, Any]:
    return _whole([reports.destination(one) for one in await ask.admin.destinations()])


async def pause_destination(ask: Ask) -> reports.Destination:
    body = await ask.body(Reason)
    return reports.destination(
        await ask.admin.pause(ask.request.path_params["name"], actor=ask.actor, reason=body.reason)
    )


async def resume_destination(ask: Ask) -> reports.Destination:
    return reports.destination(await ask.admin.resume(ask.request.path_params["name"], actor=ask.actor))


async def get_stats(ask: Ask) -> reports.Stats:
    by = ask.parameter("by")
    if by not in ("", "source", "destination"):
        raise BadRequest("`by` is source or destination.")
    since = ask.admin.moment(ask.parameter("since", "24h"))
    return reports.stats_of(await ask.admin.stats(since, by or None))  # type: ignore[arg-type]


async def get_series(ask: Ask) -> reports.Series:
    since = ask.admin.moment(ask.parameter("since", "24h"))
    try:
        step = seconds(ask.parameter("step", "5m"))
    except ConfigError as error:
        raise BadRequest(str(error)) from None
    if not 60 <= step <= 86_400:
        raise BadRequest("`step` is a duration from 1m to 1d.")
    found = await ask.admin.series(
        since, step, source=ask.parameter("source") or None, destination=ask.parameter("destination") or None
    )
    points = {name: [reports.Point(at=at, count=n) for at, n in flow] for name, flow in found.items()}
    return reports.Series(since=since, step=step, series=points)


async def list_rejections(ask: Ask) -> dict[str, Any]:
    return _whole([reports.rejection(one) for one in await ask.admin.rejections(ask.limit())])


async def list_audit(ask: Ask) -> dict[str, Any]:
    before, limit = ask.cursor("audit"), ask.limit()
    lines = await ask.admin.audit(before=None if before is None else int.from_bytes(before[:8]), limit=limit)
    last = lines[-1].n.to_bytes(8) if len(lines) == limit else None
    return {"items": [reports.audit(line) for line in lines], "next": cursor("audit", last)}


async def list_tokens(ask: Ask) -> dict[str, Any]:
    if ask.admin.scope is not None:
        raise Forbidden("Tokens are for who sees all sources.")
    used = await ask.admin.token_uses()
    return _whole([reports.token(one, used.get(one.name)) for one in ask.access.holders])


async def get_system(ask: Ask) -> reports.System:
    return reports.system(await ask.admin.system())


class _Watching(StreamingResponse):
    """A stream that is left again, even by who was gone before it began."""

    def __init__(self, stream: Stream, watcher: Watcher) -> None:
        super().__init__(stream.watch(watcher), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._stream, self._watcher = stream, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.leave(self._watcher)


async def watch(ask: Ask) -> Response:
    if ask.request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return _Watching(ask.stream, ask.stream.join(ask.admin.scope))


# -- lists ------------------------------------------------------------------------------------


def _page(kind: str, page: Page[Any], show: Callable[[Any], Any]) -> dict[str, Any]:
    return {"items": [show(item) for item in page.items], "next": cursor(kind, page.next)}


def _whole(items: Sequence[Any]) -> dict[str, Any]:
    return {"items": items, "next": None}


# -- the table ---------------------------------------------------------------------------------


def _get(path: str, handler: Any, answer: Any, summary: str, role: Role = Role.viewer, **more: Any) -> Endpoint:
    return Endpoint(method="GET", path=path, role=role, handler=handler, answer=answer, summary=summary, **more)


def _post(path: str, handler: Any, answer: Any, summary: str, **more: Any) -> Endpoint:
    return Endpoint(
        method="POST", path=path, role=Role.operator, handler=handler, answer=answer, summary=summary, **more
    )


_SINCE: Final = ("since", 'A duration ("24h" ago, unless said otherwise) or an ISO time.')

ENDPOINTS: Final[Sequence[Endpoint]] = (
    _get("/events", list_events, answers.ListedEvent, "Events, newest first.", listed=True, parameters=FILTER),
    _get("/events/{id}", get_event, answers.Event, "One event.", refusals=(404, 409)),
    _get("/events/{id}/body", get_body, None, "Its bytes.", media="application/octet-stream", refusals=(403, 404, 409)),
    _get(
        "/events/{id}/arrivals", list_arrivals, answers.Arrival, "Every time it came.", listed=True, refusals=(404, 409)
    ),
    _get(
        "/events/{id}/arrivals/{arrival}/body",
        get_arrival_body,
        None,
        "The bytes that came then.",
        media="application/octet-stream",
        refusals=(403, 404, 409),
    ),
    _get("/deliveries", list_deliveries, answers.Delivery, "Deliveries, newest first.", listed=True, parameters=FILTER),
    _get("/deliveries/{id}", get_delivery, answers.Delivery, "One delivery.", refusals=(404,)),
    _get(
        "/deliveries/{id}/attempts",
        list_attempts,
        answers.Attempt,
        "Its attempts, oldest first.",
        listed=True,
        refusals=(404,),
    ),
    _get(
        "/deliveries/{id}/subject",
        list_neighbours,
        answers.Delivery,
        "Deliveries of the same subject around it, in order.",
        listed=True,
        refusals=(404,),
    ),
    _post(
        "/deliveries/{id}/replay",
        replay_delivery,
        answers.Replayed,
        "Deliver it again, at once.",
        status=202,
        body=ReplayOne,
        headers=(KEY,),
        refusals=(404, 409, 429),
    ),
    _post("/deliveries/{id}/retry", retry_delivery, answers.Delivery, "Try it now, not later.", refusals=(404, 409)),
    _post(
        "/deliveries/{id}/discard",
        discard_delivery,
        answers.Delivery,
        "Close a dead letter without replay.",
        body=Reason,
        refusals=(404, 409),
    ),
    _get(
        "/dead",
        list_causes,
        answers.Cause,
        "Dead letters by destination and cause.",
        listed=True,
        parameters=(("destination", "Only this one's."),),
    ),
    _post(
        "/dead/discard",
        discard_matching,
        answers.Discarded,
        "Close what a plan has shown, or all that match.",
        body=DiscardMatching,
        refusals=(409,),
    ),
    _post("/replays/plan", plan_replay, answers.Plan, "What a replay would do.", body=Choose, refusals=(404,)),
    _post(
        "/replays",
        start_replay,
        answers.Replayed,
        "Deliver many again, behind live traffic.",
        status=202,
        body=StartReplay,
        headers=(KEY,),
        refusals=(404, 409),
    ),
    _get("/replays", list_replays, answers.Replay, "Replays, newest first.", listed=True, parameters=PAGED),
    _get("/replays/{id}", get_replay, answers.Replay, "One replay and how far it is.", refusals=(404,)),
    *(
        _post(f"/replays/{{id}}/{act}", steer(state), answers.Replay, summary, refusals=(404, 409))
        for act, state, summary in (
            ("pause", ReplayState.paused, "Hold it."),
            ("resume", ReplayState.running, "Let it go on."),
            ("abort", ReplayState.aborted, "End it; what is done stays done."),
        )
    ),
    _get("/sources", list_sources, reports.Source, "What is set up to receive.", listed=True),
    remembering.ENDPOINT,
    trials.SAMPLE,
    erasing.ENDPOINT,
    _get("/destinations", list_destinations, reports.Destination, "Where events go.", listed=True),
    _post(
        "/destinations/{name}/pause",
        pause_destination,
        reports.Destination,
        "Hold it back; nothing is lost.",
        body=Reason,
        refusals=(404,),
    ),
    _post("/destinations/{name}/resume", resume_destination, reports.Destination, "Let it go on.", refusals=(404,)),
    trials.TEST,
    _get(
        "/stats",
        get_stats,
        reports.Stats,
        "The numbers since a moment.",
        parameters=(_SINCE, ("by", "source or destination: the same for each.")),
    ),
    _get(
        "/series",
        get_series,
        reports.Series,
        "Flows for charts.",
        parameters=(_SINCE, ("step", "5m unless said."), ("source", "Of this one."), ("destination", "Of this one.")),
    ),
    _get("/rejections", list_rejections, reports.Rejection, "Turned away lately.", listed=True, parameters=(LIMIT,)),
    _get("/system", get_system, reports.System, "Version, store, workers, watermarks."),
    _get("/stream", watch, None, "What happens, as it happens.", media="text/event-stream", refusals=(429,)),
    _get(
        "/audit", list_audit, reports.Audit, "What was done, and by whom.", Role.operator, listed=True, parameters=PAGED
    ),
    _get(
        "/tokens", list_tokens, reports.Token, "Who holds a token, and when it was last used.", Role.admin, listed=True
    ),
)
