"""The JSON API under `/api/v1`: the desk, spoken over HTTP with a bearer token.

`ENDPOINTS` is the whole of it, one line each; `routes` makes Starlette routes of them for the server, or for a host
application under any prefix. Every answer is JSON that no browser will take for a page; every refusal says why, in a
word for programs, and what to do next.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from oncehook.deliveries import Page
from oncehook.desk import Desk
from oncehook.errors import BadRequest, ConfigError, Forbidden, NotFound, Refused, StoreError, Unauthorized
from oncehook.model import Kind, show_id
from oncehook.plans import Wish
from oncehook.replays import ReplayState
from oncehook.units import seconds
from oncehook.web import answers, remembering
from oncehook.web.access import Access, Role
from oncehook.web.asking import (
    Ask,
    Choose,
    DiscardMatching,
    Reason,
    ReplayOne,
    StartReplay,
    check_word,
    cursor,
    rate,
)
from oncehook.web.live import Stream, Watcher
from oncehook.web.openapi import FILTER, KEY, LIMIT, PAGED, PREFIX, Endpoint, document

log = logging.getLogger("oncehook.api")

SAFE: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""A stranger's text is in nearly every answer: no browser may take one for anything but data (S30)."""


# -- events and deliveries ---------------------------------------------------------------------


async def list_events(ask: Ask) -> dict[str, Any]:
    page = await ask.desk.events(ask.filter(), before=ask.cursor("event"), limit=ask.limit())
    return _page("event", page, answers.listed_event)


async def get_event(ask: Ask) -> answers.Event:
    return answers.event(await ask.desk.event(ask.id(Kind.event)))


async def get_body(ask: Ask) -> Response:
    event_id = ask.id(Kind.event)
    name = f'attachment; filename="{show_id(Kind.event, event_id)}.bin"'
    return Response(
        await ask.desk.body(event_id), media_type="application/octet-stream", headers={"Content-Disposition": name}
    )


async def list_arrivals(ask: Ask) -> dict[str, Any]:
    found = await ask.desk.arrivals(ask.id(Kind.event))
    return _whole([answers.arrival(one) for one in found])


async def list_deliveries(ask: Ask) -> dict[str, Any]:
    page = await ask.desk.deliveries(ask.filter(), before=ask.cursor("delivery"), limit=ask.limit())
    return _page("delivery", page, answers.delivery)


async def get_delivery(ask: Ask) -> answers.Delivery:
    return answers.delivery(await ask.desk.delivery(ask.id(Kind.delivery)))


async def list_attempts(ask: Ask) -> dict[str, Any]:
    return _whole([answers.attempt(one) for one in await ask.desk.attempts(ask.id(Kind.delivery))])


async def list_neighbours(ask: Ask) -> dict[str, Any]:
    return _whole([answers.delivery(one) for one in await ask.desk.neighbours(ask.id(Kind.delivery))])


async def retry_delivery(ask: Ask) -> answers.Delivery:
    return answers.delivery(await ask.desk.retry(ask.id(Kind.delivery), actor=ask.actor))


async def discard_delivery(ask: Ask) -> answers.Delivery:
    delivery_id, body = ask.id(Kind.delivery), await ask.body(Reason)
    return answers.delivery(await ask.desk.discard(delivery_id, actor=ask.actor, reason=body.reason))


async def list_causes(ask: Ask) -> dict[str, Any]:
    return _whole([answers.cause(one) for one in await ask.desk.causes(ask.parameter("destination") or None)])


async def discard_matching(ask: Ask) -> answers.Discarded:
    body = await ask.body(DiscardMatching)
    meant = ask.desk.read(body.query)
    return answers.Discarded(
        discarded=await ask.desk.discard_matching(meant, actor=ask.actor, reason=body.reason),
    )


# -- replays -----------------------------------------------------------------------------------


async def replay_delivery(ask: Ask) -> answers.Replayed:
    delivery_id, body = ask.id(Kind.delivery), await ask.body(ReplayOne)
    made = await ask.desk.replay_one(
        delivery_id,
        actor=ask.actor,
        force=body.force,
        fresh_id=body.fresh_id,
        reason=body.reason,
        request_key=ask.request_key(),
    )
    return answers.Replayed(replay_id=show_id(Kind.replay, made.id))


async def plan_replay(ask: Ask) -> answers.Plan:
    return answers.plan(await ask.desk.plan(await _wish(ask, await ask.body(Choose))))


async def start_replay(ask: Ask) -> answers.Replayed:
    body = await ask.body(StartReplay)
    if body.plan is None:
        wish, expected = await _wish(ask, body), None
    else:
        wish, expected = ask.desk.planned(body.plan)
        if body != StartReplay(plan=body.plan, rate=body.rate, fresh_id=body.fresh_id, reason=body.reason):
            raise BadRequest("A plan says already what is meant.", hint="For other deliveries, plan anew.")
        wish = replace(wish, fresh_id=body.fresh_id or wish.fresh_id, rate=rate(body.rate) or wish.rate)
    made = await ask.desk.start_replay(
        wish, actor=ask.actor, reason=body.reason, request_key=ask.request_key(), expected=expected
    )
    return answers.Replayed(replay_id=show_id(Kind.replay, made.id))


async def _wish(ask: Ask, body: Choose) -> Wish:
    return ask.desk.wish(
        body.query,
        ids=None if body.ids is None else await ask.desk.named(body.ids),
        destination=body.destination,
        until=body.until,
        force=body.force,
        fresh_id=body.fresh_id,
        rate=rate(body.rate),
    )


async def list_replays(ask: Ask) -> dict[str, Any]:
    page = await ask.desk.replays(before=ask.cursor("replay"), limit=ask.limit())
    return _page("replay", page, answers.replay_of)


async def get_replay(ask: Ask) -> answers.Replay:
    return answers.replay_of(await ask.desk.replay(ask.id(Kind.replay)))


def steer(state: ReplayState) -> Callable[[Ask], Awaitable[answers.Replay]]:
    """A handler that brings a replay into this state."""

    async def handler(ask: Ask) -> answers.Replay:
        return answers.replay_of(await ask.desk.steer(ask.id(Kind.replay), state, actor=ask.actor))

    return handler


# -- what is set up, and how it goes -----------------------------------------------------------


async def list_sources(ask: Ask) -> dict[str, Any]:
    may_see = ask.identity.role >= Role.operator
    return _whole([answers.source(one, with_address=may_see) for one in await ask.desk.sources()])


async def list_destinations(ask: Ask) -> dict[str, Any]:
    return _whole([answers.destination(one) for one in await ask.desk.destinations()])


async def pause_destination(ask: Ask) -> answers.Destination:
    body = await ask.body(Reason)
    return answers.destination(
        await ask.desk.pause(ask.request.path_params["name"], actor=ask.actor, reason=body.reason)
    )


async def resume_destination(ask: Ask) -> answers.Destination:
    return answers.destination(await ask.desk.resume(ask.request.path_params["name"], actor=ask.actor))


async def get_stats(ask: Ask) -> answers.Stats:
    by = ask.parameter("by")
    if by not in ("", "source", "destination"):
        raise BadRequest("`by` is source or destination.")
    since = ask.desk.moment(ask.parameter("since", "24h"))
    return answers.stats_of(await ask.desk.stats(since, by or None))  # type: ignore[arg-type]


async def get_series(ask: Ask) -> answers.Series:
    since = ask.desk.moment(ask.parameter("since", "24h"))
    try:
        step = seconds(ask.parameter("step", "5m"))
    except ConfigError as error:
        raise BadRequest(str(error)) from None
    if not 60 <= step <= 86_400:
        raise BadRequest("`step` is a duration from 1m to 1d.")
    found = await ask.desk.series(
        since, step, source=ask.parameter("source") or None, destination=ask.parameter("destination") or None
    )
    points = {name: [answers.Point(at=at, count=n) for at, n in flow] for name, flow in found.items()}
    return answers.Series(since=since, step=step, series=points)


async def list_rejections(ask: Ask) -> dict[str, Any]:
    return _whole([answers.rejection(one) for one in await ask.desk.rejections(ask.limit())])


async def list_audit(ask: Ask) -> dict[str, Any]:
    before, limit = ask.cursor("audit"), ask.limit()
    lines = await ask.desk.audit(before=None if before is None else int.from_bytes(before[:8]), limit=limit)
    last = lines[-1].n.to_bytes(8) if len(lines) == limit else None
    return {"items": [answers.audit(line) for line in lines], "next": cursor("audit", last)}


async def get_system(ask: Ask) -> answers.System:
    return answers.system(await ask.desk.system())


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
    return _Watching(ask.stream, ask.stream.join())


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
    _get("/events/{id}", get_event, answers.Event, "One event.", refusals=(404,)),
    _get("/events/{id}/body", get_body, None, "Its bytes.", media="application/octet-stream", refusals=(404,)),
    _get("/events/{id}/arrivals", list_arrivals, answers.Arrival, "Every time it came.", listed=True, refusals=(404,)),
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
    _post("/dead/discard", discard_matching, answers.Discarded, "Close all that match.", body=DiscardMatching),
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
    _get("/sources", list_sources, answers.Source, "What is set up to receive.", listed=True),
    remembering.ENDPOINT,
    _get("/destinations", list_destinations, answers.Destination, "Where events go.", listed=True),
    _post(
        "/destinations/{name}/pause",
        pause_destination,
        answers.Destination,
        "Hold it back; nothing is lost.",
        body=Reason,
        refusals=(404,),
    ),
    _post("/destinations/{name}/resume", resume_destination, answers.Destination, "Let it go on.", refusals=(404,)),
    _get(
        "/stats",
        get_stats,
        answers.Stats,
        "The numbers since a moment.",
        parameters=(_SINCE, ("by", "source or destination: the same for each.")),
    ),
    _get(
        "/series",
        get_series,
        answers.Series,
        "Flows for charts.",
        parameters=(_SINCE, ("step", "5m unless said."), ("source", "Of this one."), ("destination", "Of this one.")),
    ),
    _get("/rejections", list_rejections, answers.Rejection, "Turned away lately.", listed=True, parameters=(LIMIT,)),
    _get("/system", get_system, answers.System, "Version, store, workers, watermarks."),
    _get("/stream", watch, None, "What happens, as it happens.", media="text/event-stream", refusals=(429,)),
    _get(
        "/audit", list_audit, answers.Audit, "What was done, and by whom.", Role.operator, listed=True, parameters=PAGED
    ),
)


# -- routes ------------------------------------------------------------------------------------


def routes(desk: Desk, access: Access, stream: Stream) -> list[BaseRoute]:
    """Every address of the API, `/openapi.json`, and a refusal for whatever else is asked below `/api/v1`."""
    described = msgspec.json.encode(document(ENDPOINTS))

    async def openapi(request: Request) -> Response:
        return Response(described, media_type="application/json", headers=SAFE)

    async def elsewhere(request: Request) -> Response:
        return _refusal(await _nothing_here(request, access))

    made: list[BaseRoute] = [Route("/openapi.json", openapi)]
    made += [
        Route(PREFIX + endpoint.path, _serve(endpoint, desk, access, stream), methods=[endpoint.method])
        for endpoint in ENDPOINTS
    ]
    every = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return [*made, Route(PREFIX + "/{rest:path}", elsewhere, methods=every)]


def _serve(endpoint: Endpoint, desk: Desk, access: Access, stream: Stream) -> Callable[[Request], Awaitable[Response]]:
    known = [name for name, _ in endpoint.parameters]

    async def answer(request: Request) -> Response:
        try:
            identity = await access.of(request)
            if identity is None:
                raise Unauthorized
            if identity.role < endpoint.role:
                raise Forbidden(f"This needs the role {endpoint.role.name}; {identity.name} is {identity.role.name}.")
            for name in request.query_params:
                check_word(name, known, "parameter here")
            return _written(await endpoint.handler(Ask(request, identity, desk, stream)), endpoint.status)
        except Refused as error:
            return _refusal(error)
        except StoreError as error:
            return _unavailable(error)
        except Exception:
            log.exception("api.failed", extra={"fields": {"path": endpoint.path}})
            return _json(500, answers.Error(error="Something went wrong here.", code="internal", hint="See the log."))

    return answer


async def _nothing_here(request: Request, access: Access) -> Refused:
    """Why there is nothing: a stranger does not learn which addresses there are."""
    if await access.of(request) is None:
        return Unauthorized()
    path = "/" + request.path_params["rest"]
    methods = [endpoint.method for endpoint in ENDPOINTS if _fits(endpoint.path, path)]
    if methods:
        return WrongMethod(methods)
    return NotFound("There is nothing at this address.", hint="/openapi.json says what there is.")


class WrongMethod(Refused):
    """This address does not know that method."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, methods: Sequence[str]) -> None:
        super().__init__(hint=f"Use {' or '.join(methods)}.")
        self.methods = methods


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) is not None


# -- answers -----------------------------------------------------------------------------------


def _page(kind: str, page: Page[Any], show: Callable[[Any], Any]) -> dict[str, Any]:
    return {"items": [show(item) for item in page.items], "next": cursor(kind, page.next)}


def _whole(items: Sequence[Any]) -> dict[str, Any]:
    return {"items": items, "next": None}


def _written(answer: Any, status: int) -> Response:
    if isinstance(answer, Response):
        answer.headers.update(SAFE)
        return answer
    return _json(status, answer)


def _json(status: int, value: Any, more: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, {**SAFE, **(more or {})}, media_type="application/json")


def _refusal(error: Refused) -> Response:
    more = {}
    if error.retry_after is not None:
        # Rounded up: who comes a moment early is refused again.
        more["Retry-After"] = str(int(-(-error.retry_after // 1)))
    if isinstance(error, Unauthorized):
        more["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongMethod):
        more["Allow"] = ", ".join(error.methods)
    return _json(error.status, answers.Error(error=str(error), code=error.code, hint=error.hint), more)


def _unavailable(error: StoreError) -> Response:
    # What the database said may name hosts, users and files of ours: it is for the log.
    log.warning("api.store_unavailable", extra={"fields": {"code": error.code, "error": str(error)}})
    said = answers.Error(error="The store cannot answer now; try again.", code=error.code, hint="")
    return _json(503, said, {"Retry-After": "1"})
