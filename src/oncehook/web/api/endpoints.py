"""Every endpoint of the JSON API: its method, path, role, parameters and answer, one function each.

`ENDPOINTS` is the table; `web.api` makes routes of it and `openapi` its description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from oncehook.errors import BadRequest, ConfigError, Forbidden, NotFound
from oncehook.human import seconds
from oncehook.model import ArrivalId, DeliveryId, EventId, Page, ReplayId, ReplayState, subject_hash
from oncehook.replay import ReplayRequest
from oncehook.rules import bound_text
from oncehook.web.api import schemas
from oncehook.web.api.openapi import FILTER, KEY, LIMIT, PAGED, Endpoint, Handler
from oncehook.web.api.request import (
    ApiCall,
    Choose,
    DiscardMatching,
    Erase,
    Reason,
    Remember,
    ReplayOne,
    Sample,
    StartReplay,
    cursor,
    rate,
)
from oncehook.web.auth import Role
from oncehook.web.live import Broadcast, Watcher

_SINCE: Final = ("since", 'A duration ("24h" ago, unless said otherwise) or an ISO time.')
BYTES: Final = "application/octet-stream"
ENDPOINTS: Final[list[Endpoint]] = []


def get(path: str, answer: Any, summary: str, role: Role = Role.viewer, **more: Any) -> Callable[[Handler], Handler]:
    return _registering("GET", path, answer, summary, role, more)


def post(path: str, answer: Any, summary: str, role: Role = Role.operator, **more: Any) -> Callable[[Handler], Handler]:
    return _registering("POST", path, answer, summary, role, more)


def _registering(
    method: str, path: str, answer: Any, summary: str, role: Role, more: dict[str, Any]
) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        ENDPOINTS.append(
            Endpoint(method=method, path=path, role=role, handler=handler, answer=answer, summary=summary, **more)
        )
        return handler

    return register


# -- events and deliveries ---------------------------------------------------------------------


@get("/events", schemas.ListedEvent, "Events, newest first.", listed=True, parameters=FILTER)
async def list_events(call: ApiCall) -> Any:
    page = await call.admin.events(call.filter(), before=call.cursor("event"), limit=call.limit())
    return _page("event", page)


@get("/events/{id}", schemas.Event, "One event.", refusals=(404, 409))
async def get_event(call: ApiCall) -> Any:
    return await call.admin.event(call.id(EventId))


@get("/events/{id}/body", None, "Its bytes.", media=BYTES, refusals=(403, 404, 409))
async def get_body(call: ApiCall) -> Response:
    event_id = call.id(EventId)
    return _bytes(await call.admin.body(event_id), str(event_id))


@get("/events/{id}/arrivals", schemas.Arrival, "Every time it came.", listed=True, refusals=(404, 409))
async def list_arrivals(call: ApiCall) -> Any:
    return _whole(await call.admin.arrivals(call.id(EventId)))


@get("/events/{id}/arrivals/{arrival}/body", None, "The bytes that came then.", media=BYTES, refusals=(403, 404, 409))
async def get_arrival_body(call: ApiCall) -> Response:
    event_id, arrival_id = call.id(EventId), call.id(ArrivalId, "arrival")
    if all(one.id != arrival_id for one in await call.admin.arrivals(event_id)):
        raise NotFound("This event has no such arrival, or no longer.")
    own = await call.admin.arrival_body(event_id, arrival_id)
    body = await call.admin.body(event_id) if own is None else own
    return _bytes(body, str(arrival_id))


def _bytes(body: bytes, name: str) -> Response:
    """Return untrusted bytes as a download, never displayed (S30)."""
    attached = {"Content-Disposition": f'attachment; filename="{name}.bin"'}
    return Response(body, media_type="application/octet-stream", headers=attached)


@get("/deliveries", schemas.Delivery, "Deliveries, newest first.", listed=True, parameters=FILTER)
async def list_deliveries(call: ApiCall) -> Any:
    page = await call.admin.deliveries(call.filter(), before=call.cursor("delivery"), limit=call.limit())
    return _page("delivery", page)


@get("/deliveries/{id}", schemas.Delivery, "One delivery.", refusals=(404,))
async def get_delivery(call: ApiCall) -> Any:
    return await call.admin.delivery(call.id(DeliveryId))


@get("/deliveries/{id}/attempts", schemas.Attempt, "Its attempts, oldest first.", listed=True, refusals=(404,))
async def list_attempts(call: ApiCall) -> Any:
    return _whole(await call.admin.attempts(call.id(DeliveryId)))


@get(
    "/deliveries/{id}/subject",
    schemas.Delivery,
    "Deliveries of the same subject around it, in order.",
    listed=True,
    refusals=(404,),
)
async def list_neighbours(call: ApiCall) -> Any:
    return _whole(await call.admin.neighbours(call.id(DeliveryId)))


@post("/deliveries/{id}/retry", schemas.Delivery, "Try it now, not later.", refusals=(404, 409))
async def retry_delivery(call: ApiCall) -> Any:
    return await call.admin.retry(call.id(DeliveryId), actor=call.actor)


@post(
    "/deliveries/{id}/discard",
    schemas.Delivery,
    "Close a dead letter without replay.",
    body=Reason,
    refusals=(404, 409),
)
async def discard_delivery(call: ApiCall) -> Any:
    delivery_id, body = call.id(DeliveryId), await call.body(Reason)
    return await call.admin.discard(delivery_id, actor=call.actor, reason=body.reason)


@get(
    "/dead",
    schemas.Cause,
    "Dead letters by destination and cause.",
    listed=True,
    parameters=(("destination", "Only this one's."),),
)
async def list_causes(call: ApiCall) -> Any:
    return _whole(await call.admin.causes(call.parameter("destination") or None))


@post(
    "/dead/discard",
    schemas.Discarded,
    "Close what a plan has shown, or all that match.",
    body=DiscardMatching,
    refusals=(409,),
)
async def discard_matching(call: ApiCall) -> schemas.Discarded:
    body = await call.body(DiscardMatching)
    if body.plan is None:
        meant = call.admin.read(body.query)
        closed = await call.admin.discard_matching(meant, actor=call.actor, reason=body.reason)
    elif body.query:
        raise _says_already()
    else:
        closed = await call.admin.discard_planned(body.plan, actor=call.actor, reason=body.reason)
    return schemas.Discarded(discarded=closed)


# -- replays -----------------------------------------------------------------------------------


@post(
    "/deliveries/{id}/replay",
    schemas.Replayed,
    "Deliver it again, at once.",
    status=202,
    body=ReplayOne,
    headers=(KEY,),
    refusals=(404, 409, 429),
)
async def replay_delivery(call: ApiCall) -> schemas.Replayed:
    delivery_id, body = call.id(DeliveryId), await call.body(ReplayOne)
    made = await call.admin.replay_one(
        delivery_id,
        actor=call.actor,
        force=body.force,
        fresh_id=body.fresh_id,
        reason=body.reason,
        request_key=call.request_key(),
    )
    return schemas.Replayed(replay_id=str(made.id))


@post("/replays/plan", schemas.Plan, "What a replay would do.", body=Choose, refusals=(404,))
async def plan_replay(call: ApiCall) -> Any:
    return await call.admin.plan(await _build_request(call, await call.body(Choose)))


@post(
    "/replays",
    schemas.Replayed,
    "Deliver many again, behind live traffic.",
    status=202,
    body=StartReplay,
    headers=(KEY,),
    refusals=(404, 409),
)
async def start_replay(call: ApiCall) -> schemas.Replayed:
    body = await call.body(StartReplay)
    if body.plan is None:
        request, expected = await _build_request(call, body), None
    else:
        request, seen = call.admin.read_plan(body.plan)
        expected = seen.count
        if body != StartReplay(plan=body.plan, rate=body.rate, fresh_id=body.fresh_id, reason=body.reason):
            raise _says_already()
        request = replace(request, fresh_id=body.fresh_id or request.fresh_id, rate=rate(body.rate) or request.rate)
    made = await call.admin.start_replay(
        request, actor=call.actor, reason=body.reason, request_key=call.request_key(), expected=expected
    )
    return schemas.Replayed(replay_id=str(made.id))


def _says_already() -> BadRequest:
    return BadRequest("A plan says already what is meant.", hint="For other deliveries, plan anew.")


async def _build_request(call: ApiCall, body: Choose) -> ReplayRequest:
    return call.admin.build_request(
        body.query,
        ids=None if body.ids is None else await call.admin.find_named(body.ids),
        destination=body.destination,
        until=body.until,
        force=body.force,
        fresh_id=body.fresh_id,
        rate=rate(body.rate),
    )


@get("/replays", schemas.Replay, "Replays, newest first.", listed=True, parameters=PAGED)
async def list_replays(call: ApiCall) -> Any:
    page = await call.admin.replays(before=call.cursor("replay"), limit=call.limit())
    return _page("replay", page)


@get("/replays/{id}", schemas.Replay, "One replay and how far it is.", refusals=(404,))
async def get_replay(call: ApiCall) -> Any:
    return await call.admin.replay(call.id(ReplayId))


for _act, _state, _summary in (
    ("pause", ReplayState.paused, "Hold it."),
    ("resume", ReplayState.running, "Let it go on."),
    ("abort", ReplayState.aborted, "End it; what is done stays done."),
):

    @post(f"/replays/{{id}}/{_act}", schemas.Replay, _summary, refusals=(404, 409))
    async def set_replay_state(call: ApiCall, state: ReplayState = _state) -> Any:
        return await call.admin.set_replay_state(call.id(ReplayId), state, actor=call.actor)


# -- what is set up, and how it goes -----------------------------------------------------------


@get("/sources", schemas.Source, "What is set up to receive.", listed=True)
async def list_sources(call: ApiCall) -> Any:
    may_see = call.identity.role >= Role.operator
    return _whole(
        [
            schemas.encode(one, **({} if may_see or not one.hidden else {"address": None}))
            for one in await call.admin.sources()
        ]
    )


@get("/destinations", schemas.Destination, "Where events go.", listed=True)
async def list_destinations(call: ApiCall) -> Any:
    return _whole(await call.admin.destinations())


@post("/destinations/{name}/pause", schemas.Destination, "Hold it back; nothing is lost.", body=Reason, refusals=(404,))
async def pause_destination(call: ApiCall) -> Any:
    body = await call.body(Reason)
    return await call.admin.pause(call.request.path_params["name"], actor=call.actor, reason=body.reason)


@post("/destinations/{name}/resume", schemas.Destination, "Let it go on.", refusals=(404,))
async def resume_destination(call: ApiCall) -> Any:
    return await call.admin.resume(call.request.path_params["name"], actor=call.actor)


@get(
    "/stats",
    schemas.Stats,
    "The numbers since a moment.",
    parameters=(_SINCE, ("by", "source or destination: the same for each.")),
)
async def get_stats(call: ApiCall) -> Any:
    by = call.parameter("by")
    if by not in ("", "source", "destination"):
        raise BadRequest("`by` is source or destination.")
    since = call.admin.moment(call.parameter("since", "24h"))
    return await call.admin.stats(since, by or None)  # type: ignore[arg-type]


@get(
    "/series",
    schemas.Series,
    "Flows for charts.",
    parameters=(_SINCE, ("step", "5m unless said."), ("source", "Of this one."), ("destination", "Of this one.")),
)
async def get_series(call: ApiCall) -> schemas.Series:
    since = call.admin.moment(call.parameter("since", "24h"))
    try:
        step = seconds(call.parameter("step", "5m"))
    except ConfigError as error:
        raise BadRequest(str(error)) from None
    if not 60 <= step <= 86_400:
        raise BadRequest("`step` is a duration from 1m to 1d.")
    found = await call.admin.series(
        since, step, source=call.parameter("source") or None, destination=call.parameter("destination") or None
    )
    points = {name: [schemas.Point(at=at, count=n) for at, n in flow] for name, flow in found.items()}
    return schemas.Series(since=since, step=step, series=points)


@get("/rejections", schemas.Rejection, "Turned away lately.", listed=True, parameters=(LIMIT,))
async def list_rejections(call: ApiCall) -> Any:
    return _whole(await call.admin.rejections(call.limit()))


@get("/audit", schemas.Audit, "What was done, and by whom.", Role.operator, listed=True, parameters=PAGED)
async def list_audit(call: ApiCall) -> Any:
    before, limit = call.cursor("audit"), call.limit()
    lines = await call.admin.audit(before=None if before is None else int.from_bytes(before[:8]), limit=limit)
    last = lines[-1].n.to_bytes(8) if len(lines) == limit else None
    return {"items": lines, "next": cursor("audit", last)}


@get("/tokens", schemas.Token, "Who holds a token, and when it was last used.", Role.admin, listed=True)
async def list_tokens(call: ApiCall) -> Any:
    if call.admin.scope is not None:
        raise Forbidden("Tokens are for who sees all sources.")
    used = await call.admin.token_uses()
    return _whole([schemas.encode(one, last_used=used.get(one.name)) for one in call.access.holders])


@get("/system", schemas.System, "Version, store, owner of the file, workers, receivers, watermarks.")
async def get_system(call: ApiCall) -> Any:
    return await call.admin.system()


# -- samples, imported keys, erasure -----------------------------------------------------------


@post("/destinations/{name}/test", schemas.Tested, "Send it one harmless, signed test.", refusals=(404, 429))
async def test_destination(call: ApiCall) -> Any:
    name = call.request.path_params["name"]
    call.admin.check_own(name)
    return schemas.encode_test(await call.admin.test_destination(name, actor=call.actor), call.identity.role)


@post("/sources/{name}/sample", schemas.Sampled, "Send it one signed sample.", body=Sample, refusals=(404,))
async def sample_source(call: ApiCall) -> Any:
    body = await call.body(Sample)
    return await call.admin.send_sample(call.request.path_params["name"], body.type, actor=call.actor)


@post(
    "/sources/{name}/keys",
    schemas.Remembered,
    "Take keys as seen elsewhere.",
    Role.admin,
    body=Remember,
    refusals=(404,),
)
async def import_keys(call: ApiCall) -> schemas.Remembered:
    body = await call.body(Remember)
    new = await call.admin.import_keys(call.request.path_params["name"], body.keys, actor=call.actor)
    return schemas.Remembered(new=new, known=len(body.keys) - new)


@post("/erase", schemas.Erased, "Erase everything that is kept of a subject.", Role.admin, body=Erase, refusals=(404,))
async def erase(call: ApiCall) -> Any:
    body = await call.body(Erase)
    if body.dry_run:
        counted = await call.admin.count_erasable(body.subject, body.source)
        remaining = counted.events
    else:
        counted, remaining = await call.admin.erase(body.subject, body.source, actor=call.actor, reason=body.reason)
    hashed = subject_hash(bound_text(body.subject))
    return schemas.encode(counted, subject_hash=hashed, dry_run=body.dry_run, remaining=remaining)


class _Watching(StreamingResponse):
    """A stream whose watcher is removed at its end, even if the client was gone before it began."""

    def __init__(self, stream: Broadcast, watcher: Watcher) -> None:
        super().__init__(stream.watch(watcher), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._stream, self._watcher = stream, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.leave(self._watcher)


@get("/stream", None, "What happens, as it happens.", media="text/event-stream", refusals=(429,))
async def watch(call: ApiCall) -> Response:
    if call.request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return _Watching(call.stream, call.stream.join(call.admin.scope))


# -- lists ------------------------------------------------------------------------------------


def _page(kind: str, page: Page[Any]) -> dict[str, Any]:
    return {"items": page.items, "next": cursor(kind, page.next)}


def _whole(items: Sequence[Any]) -> dict[str, Any]:
    return {"items": items, "next": None}
