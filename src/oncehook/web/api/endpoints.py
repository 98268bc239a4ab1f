"""Every endpoint of the JSON API: its method, path, role, parameters and answer, one function each.

`ENDPOINTS` is the table; `web.api` makes routes of it and `openapi` its description.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from oncehook.define import Defined, NounName
from oncehook.errors import BadRequest, ConfigError, Forbidden, InvalidSettings, NotFound
from oncehook.human import seconds
from oncehook.model import ArrivalId, DeliveryId, EventId, Noun, Page, ReplayId, ReplayState, subject_hash
from oncehook.replay import ReplayRequest
from oncehook.reports import ShownSource
from oncehook.rules import bound_text
from oncehook.settings.stored import show
from oncehook.web.api import schemas
from oncehook.web.api.openapi import FILTER, KEY, PAGED, Endpoint, Handler
from oncehook.web.api.request import (
    AddMark,
    ApiCall,
    Body,
    ChangeAccount,
    ChangeDefinition,
    Choose,
    DefineDestination,
    DefineRoute,
    DefineSource,
    DiscardMatching,
    Erase,
    MakeAccount,
    MakePortalLink,
    Reason,
    Remember,
    ReplayOne,
    Rotate,
    RotateSecret,
    Sample,
    StartReplay,
    cursor,
    next_definition,
    rate,
)
from oncehook.web.auth import Identity, Role
from oncehook.web.live import Broadcast, Watcher

_SINCE: Final = ("since", 'A duration ("24h" ago, unless said otherwise) or an ISO time.')
BYTES: Final = "application/octet-stream"
_SOURCE: Final = ("source", "Only of this source.")
ENDPOINTS: Final[list[Endpoint]] = []


def get(path: str, answer: Any, summary: str, role: Role = Role.viewer, **more: Any) -> Callable[[Handler], Handler]:
    return _registering("GET", path, answer, summary, role, more)


def post(path: str, answer: Any, summary: str, role: Role = Role.operator, **more: Any) -> Callable[[Handler], Handler]:
    return _registering("POST", path, answer, summary, role, more)


def endpoint(
    method: str, path: str, answer: Any, summary: str, role: Role, **more: Any
) -> Callable[[Handler], Handler]:
    return _registering(method, path, answer, summary, role, more)


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


@get("/events/{id}/media", schemas.Media, "Its files that are kept.", listed=True, refusals=(403, 404, 409))
async def list_media(call: ApiCall) -> Any:
    return _whole(await call.admin.media(call.id(EventId)))


@get("/events/{id}/media/{n}", None, "The bytes of one of its files.", media=BYTES, refusals=(403, 404, 409))
async def get_media(call: ApiCall) -> Response:
    event_id, n = call.id(EventId), call.request.path_params["n"]
    content = await call.admin.media_content(event_id, int(n) if n.isascii() and n.isdigit() and len(n) < 4 else -1)
    return _bytes(content, f"{event_id}-{n}")


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
    if body.destination is not None:
        await call.admin.check_destination(body.destination)
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


@get(
    "/replays/{id}/items",
    schemas.ReplayItem,
    "What became of each delivery of it, in its order.",
    listed=True,
    parameters=PAGED,
    refusals=(404,),
)
async def list_replay_items(call: ApiCall) -> Any:
    place, limit = call.cursor("item"), call.limit()
    items = await call.admin.replay_items(
        call.id(ReplayId), after=0 if place is None else int.from_bytes(place[:8]), limit=limit
    )
    last = items[-1].n.to_bytes(8) if len(items) == limit else None
    return {"items": items, "next": cursor("item", last)}


for _act, _state, _summary in (
    ("pause", ReplayState.paused, "Hold it."),
    ("resume", ReplayState.running, "Let it go on."),
    ("abort", ReplayState.aborted, "End it; what is done stays done."),
):

    @post(f"/replays/{{id}}/{_act}", schemas.Replay, _summary, refusals=(404, 409))
    async def set_replay_state(call: ApiCall, state: ReplayState = _state) -> Any:
        return await call.admin.set_replay_state(call.id(ReplayId), state, actor=call.actor)


# -- what is set up, and how it goes -----------------------------------------------------------


@get(
    "/sources",
    schemas.Source,
    "What is set up to receive: by file and program, then what is stored.",
    listed=True,
    parameters=PAGED,
)
async def list_sources(call: ApiCall) -> Any:
    limit, after = call.limit(), call.after("source")
    found = await call.admin.sources(after=after, limit=limit + 1)
    return {
        "items": [_source(call, one) for one in found[:limit]],
        "next": next_definition("source", found, after, limit),
    }


def _source(call: ApiCall, shown: ShownSource) -> Any:
    may_see = call.identity.role >= Role.operator
    return schemas.encode(shown, **({} if may_see or not shown.hidden else {"address": None}))


@get("/sources/{name}", schemas.Source, "One source.", refusals=(404,))
async def get_source(call: ApiCall) -> Any:
    return _source(call, await call.admin.source(call.name))


@get(
    "/destinations",
    schemas.Destination,
    "Where events go: by file and program, then what is stored.",
    listed=True,
    parameters=PAGED,
)
async def list_destinations(call: ApiCall) -> Any:
    limit, after = call.limit(), call.after("destination")
    found = await call.admin.destinations(after=after, limit=limit + 1)
    return {"items": found[:limit], "next": next_definition("destination", found, after, limit)}


@get("/destinations/{name}", schemas.Destination, "One destination.", refusals=(404,))
async def get_destination(call: ApiCall) -> Any:
    return await call.admin.destination(call.name)


@get(
    "/routes",
    schemas.Route,
    "Which events go where: by file and program, then what is stored.",
    listed=True,
    parameters=PAGED,
)
async def list_routes(call: ApiCall) -> Any:
    limit, after = call.limit(), call.after("route")
    found = await call.admin.routes(after=after, limit=limit + 1)
    return {"items": found[:limit], "next": next_definition("route", found, after, limit)}


@get("/routes/{name}", schemas.Route, "One stored route.", refusals=(404,))
async def get_route(call: ApiCall) -> Any:
    return await call.admin.route(call.name)


# -- definitions that are stored ---------------------------------------------------------------

_NOUNS: Final[Mapping[NounName, type[Body]]] = {
    "source": DefineSource,
    "destination": DefineDestination,
    "route": DefineRoute,
}
_REPLACE: Final = "give it these settings and no others"
_PUT: Final[Mapping[NounName, str]] = {
    "source": f"Make a source, or {_REPLACE}; a secret that is left out stays.",
    "destination": f"Make a destination, or {_REPLACE}; a secret that is left out stays.",
    "route": f"{_REPLACE.capitalize()}. Only POST makes a route, and its id.",
}
_DISCARD: Final = ("discard", "true: discard deliveries that still wait for it, and its dead letters, with it.")


def _encode_defined(made: Defined) -> schemas.Defined:
    definition = made.definition
    return schemas.Defined(
        name=made.name,
        id=made.name if definition.noun is Noun.route else None,
        address=made.address,
        secret=made.secret,
        account=definition.account,
        enabled=definition.is_enabled,
        settings=show(definition),
    )


async def _settings(call: ApiCall, noun: NounName) -> tuple[dict[str, Any], str | None]:
    """Return the settings in the body, and the account that a route belongs to, of which that is no setting."""
    given = await call.object()
    return given, given.pop("account", None) if noun == "route" else None


for _noun, _shape in _NOUNS.items():

    @post(
        f"/{_noun}s",
        schemas.Defined,
        f"Make a {_noun}.",
        Role.admin,
        status=201,
        body=_shape,
        refusals=(409, 422),
    )
    async def create_definition(call: ApiCall, noun: NounName = _noun) -> Any:
        given, account = await _settings(call, noun)
        name = "" if noun == "route" else given.pop("name", None)
        if not isinstance(name, str):
            raise InvalidSettings([{"setting": "name", "error": f"a {noun} needs a name", "hint": "give it one"}])
        return _encode_defined(await call.admin.define(call.actor).create(noun, name, given, account=account))

    @endpoint(
        "PATCH",
        f"/{_noun}s/{{name}}",
        schemas.Defined,
        f"Change some settings of a {_noun}.",
        Role.admin,
        body=ChangeDefinition,
        refusals=(404, 409, 422),
    )
    async def change_definition(call: ApiCall, noun: NounName = _noun) -> Any:
        return _encode_defined(await call.admin.define(call.actor).change(noun, call.name, **await call.object()))

    @endpoint(
        "PUT",
        f"/{_noun}s/{{name}}",
        schemas.Defined,
        _PUT[_noun],
        Role.admin,
        body=_shape,
        refusals=(404, 409, 422),
    )
    async def put_definition(call: ApiCall, noun: NounName = _noun) -> Any:
        given, account = await _settings(call, noun)
        given.pop("name", None)
        made, is_new = await call.admin.define(call.actor).put(noun, call.name, given, account=account)
        if not is_new:
            return _encode_defined(made)
        return Response(msgspec.json.encode(_encode_defined(made)), 201, media_type="application/json")

    @endpoint(
        "DELETE",
        f"/{_noun}s/{{name}}",
        schemas.Deleted,
        f"Delete a {_noun}" + ("." if _noun == "route" else ", and its routes."),
        Role.admin,
        parameters=(_DISCARD,) if _noun == "destination" else (),
        refusals=(404, 409),
    )
    async def delete_definition(call: ApiCall, noun: NounName = _noun) -> Any:
        discard = call.flag("discard") or (await call.object()).get("discard") is True
        await call.admin.define(call.actor).delete(noun, call.name, discard=discard)
        return schemas.Deleted(name=call.name)

    if _noun != "route":

        @post(
            f"/{_noun}s/{{name}}/rotate",
            schemas.Defined,
            "Give it a new secret; the old one is valid for a while.",
            Role.admin,
            body=Rotate,
            refusals=(404, 409, 422),
        )
        async def rotate_secret(call: ApiCall, noun: NounName = _noun) -> Any:
            body = await call.body(Rotate)
            define = call.admin.define(call.actor)
            return _encode_defined(await define.rotate(noun, call.name, overlap=body.overlap, secret=body.secret))

    for _act, _summary in (("enable", "Let it count again."), ("disable", "Keep it, but as if it were not there.")):

        @post(f"/{_noun}s/{{name}}/{_act}", schemas.Defined, _summary, Role.admin, refusals=(404, 409))
        async def switch_definition(call: ApiCall, noun: NounName = _noun, act: str = _act) -> Any:
            define = call.admin.define(call.actor)
            return _encode_defined(await (define.enable if act == "enable" else define.disable)(noun, call.name))


@post("/destinations/{name}/pause", schemas.Destination, "Hold it back; nothing is lost.", body=Reason, refusals=(404,))
async def pause_destination(call: ApiCall) -> Any:
    body = await call.body(Reason)
    return await call.admin.pause(call.name, actor=call.actor, reason=body.reason)


@post("/destinations/{name}/resume", schemas.Destination, "Let it go on.", refusals=(404,))
async def resume_destination(call: ApiCall) -> Any:
    return await call.admin.resume(call.name, actor=call.actor)


@post("/destinations/{name}/try", schemas.Destination, "Try one, though it is held back.", refusals=(404, 409))
async def try_destination(call: ApiCall) -> Any:
    return await call.admin.try_now(call.name, actor=call.actor)


@get("/marks", schemas.ChartMark, "Moments that charts show.", listed=True, parameters=(_SINCE,))
async def list_marks(call: ApiCall) -> Any:
    return _whole(await call.admin.marks(call.admin.moment(call.parameter("since", "24h"))))


@post("/marks", schemas.ChartMark, "Mark this moment in every chart: a deploy, say.", status=201, body=AddMark)
async def add_mark(call: ApiCall) -> Any:
    body = await call.body(AddMark)
    return await call.admin.mark(body.text, actor=call.actor)


@get(
    "/stats",
    schemas.Stats,
    "The numbers since a moment.",
    parameters=(_SINCE, ("by", "source or destination: the same for each."), ("account", "Of this one only.")),
)
async def get_stats(call: ApiCall) -> Any:
    by = call.parameter("by")
    if by not in ("", "source", "destination"):
        raise BadRequest("`by` is source or destination.")
    since = call.admin.moment(call.parameter("since", "24h"))
    return await call.admin.stats(since, by or None, call.parameter("account") or None)  # type: ignore[arg-type]


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


@get(
    "/rejections",
    schemas.Rejection,
    "Rejected arrivals, newest first, and why.",
    listed=True,
    parameters=(_SOURCE, *PAGED),
)
async def list_rejections(call: ApiCall) -> Any:
    before, limit = call.cursor("rejection"), call.limit()
    number = None if before is None else int.from_bytes(before[:8])
    found = await call.admin.rejections(limit, before=number, source=call.parameter("source") or None)
    last = found[-1].rejection.n.to_bytes(8) if len(found) == limit else None
    return _page("rejection", Page(found, last))


@get("/audit", schemas.Audit, "What was done, and by whom.", Role.operator, listed=True, parameters=PAGED)
async def list_audit(call: ApiCall) -> Any:
    before, limit = call.cursor("audit"), call.limit()
    lines = await call.admin.audit(before=None if before is None else int.from_bytes(before[:8]), limit=limit)
    last = lines[-1].n.to_bytes(8) if len(lines) == limit else None
    return {"items": lines, "next": cursor("audit", last)}


@get("/tokens", schemas.Token, "Who holds a token, and when it was last used.", Role.admin, listed=True)
async def list_tokens(call: ApiCall) -> Any:
    if call.admin.scope.is_limited:
        raise Forbidden("Tokens are for who sees all sources and accounts.")
    used = await call.admin.token_uses()
    return _whole([schemas.encode(one, last_used=used.get(one.name)) for one in call.access.holders])


@post(
    "/login-link",
    schemas.LoginLink,
    "A link into the dashboard that works once, on this machine.",
    Role.admin,
    refusals=(404,),
)
async def make_login_link(call: ApiCall) -> schemas.LoginLink:
    if call.access.link is None:
        raise NotFound("This server has no dashboard of its own.")
    if call.identity.is_token or not call.access.is_local(call.request):
        # The link makes a session of its own: longer than a token may last, and without its limits.
        raise NotFound("A link is given to commands on this machine only.", hint="Log in with the token.")
    return schemas.LoginLink(token=call.access.link.new())


@get("/system", schemas.System, "Version, store, owner of the file, workers, receivers, watermarks.")
async def get_system(call: ApiCall) -> Any:
    return await call.admin.system()


# -- accounts ----------------------------------------------------------------------------------


@get("/accounts", schemas.Account, "Accounts, by id.", listed=True, parameters=PAGED)
async def list_accounts(call: ApiCall) -> Any:
    limit = call.limit()
    found = await call.admin.define(call.actor).accounts.all(after=call.after("account") or "", limit=limit + 1)
    last = found[limit - 1].id.encode() if len(found) > limit else None
    return {"items": found[:limit], "next": cursor("account", last)}


@post(
    "/accounts",
    schemas.Account,
    "Make an account; generated secrets are told once.",
    Role.admin,
    status=201,
    body=MakeAccount,
    refusals=(409, 422),
)
async def make_account(call: ApiCall) -> Any:
    body = await call.body(MakeAccount)
    return await call.admin.define(call.actor).accounts.create(
        body.id, name=body.name, aliases=body.aliases, secrets=body.secrets, move=body.move
    )


@get("/accounts/{id}", schemas.Account, "One account.", refusals=(404,))
async def get_account(call: ApiCall) -> Any:
    return await call.admin.define(call.actor).accounts.get(call.request.path_params["id"])


@endpoint(
    "PATCH",
    "/accounts/{id}",
    schemas.Account,
    "Change an account: its name, all of its aliases, some of its secrets.",
    Role.admin,
    body=ChangeAccount,
    refusals=(404, 409, 422),
)
async def change_account(call: ApiCall) -> Any:
    accounts = call.admin.define(call.actor).accounts
    body = await call.body(ChangeAccount)
    return await accounts.change(
        call.request.path_params["id"],
        name=body.name,
        aliases=body.aliases,
        secrets=body.secrets,
        enabled=body.enabled,
        move=body.move,
    )


@endpoint(
    "DELETE",
    "/accounts/{id}",
    schemas.Deleted,
    "Delete an account, its names and secrets; its events stay.",
    Role.admin,
    refusals=(404, 409),
)
async def delete_account(call: ApiCall) -> schemas.Deleted:
    await call.admin.define(call.actor).accounts.delete(call.request.path_params["id"])
    return schemas.Deleted(name=call.request.path_params["id"])


@post(
    "/accounts/{id}/rotate",
    schemas.Account,
    "Give an account a new secret for a source, told once.",
    Role.admin,
    body=RotateSecret,
    refusals=(404, 409, 422),
)
async def rotate_account(call: ApiCall) -> Any:
    accounts = call.admin.define(call.actor).accounts
    body = await call.body(RotateSecret)
    return await accounts.rotate(call.request.path_params["id"], body.source, overlap=body.overlap)


@post(
    "/accounts/{id}/portal",
    schemas.PortalLink,
    "Make a link to the portal of an account, which works once.",
    Role.admin,
    status=201,
    body=MakePortalLink,
    refusals=(404, 422),
)
async def make_portal_link(call: ApiCall) -> schemas.PortalLink:
    body, account = await call.body(MakePortalLink), call.request.path_params["id"]
    url = await call.admin.portal_link(account, actor=call.actor, name=body.name, expires=body.expires)
    return schemas.PortalLink(url=url, account=account)


# -- samples, imported keys, erasure -----------------------------------------------------------


@post("/destinations/{name}/test", schemas.Tested, "Send it one harmless, signed test.", refusals=(404, 429))
async def test_destination(call: ApiCall) -> Any:
    name = call.name
    await call.admin.check_own(name)
    return schemas.encode_test(await call.admin.test_destination(name, actor=call.actor), call.identity.role)


@post("/sources/{name}/sample", schemas.Sampled, "Send it one signed sample.", body=Sample, refusals=(404,))
async def sample_source(call: ApiCall) -> Any:
    body = await call.body(Sample)
    return await call.admin.send_sample(call.name, body.type, actor=call.actor)


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
    new = await call.admin.import_keys(call.name, body.keys, actor=call.actor, account=body.account)
    return schemas.Remembered(new=new, known=len(body.keys) - new)


@post(
    "/erase",
    schemas.Erased,
    "Erase everything that is kept of a subject, or of an account.",
    Role.admin,
    body=Erase,
    refusals=(404,),
)
async def erase(call: ApiCall) -> Any:
    body = await call.body(Erase)
    if body.dry_run:
        counted = await call.admin.count_erasable(body.subject, body.source, body.account)
        remaining = counted.events
    else:
        counted, remaining = await call.admin.erase(
            body.subject, body.source, body.account, actor=call.actor, reason=body.reason
        )
    hashed = "" if body.subject is None else subject_hash(bound_text(body.subject))
    return schemas.encode(counted, subject_hash=hashed, dry_run=body.dry_run, remaining=remaining)


class _Watching(StreamingResponse):
    """A stream whose watcher is removed at its end, even if the client was gone before it began."""

    def __init__(self, stream: Broadcast, watcher: Watcher, identity: Identity) -> None:
        pieces = watch_while_valid(stream, watcher, identity)
        super().__init__(pieces, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._stream, self._watcher = stream, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.leave(self._watcher)


async def watch_while_valid(stream: Broadcast, watcher: Watcher, identity: Identity) -> AsyncIterator[bytes]:
    """Yield what happens until the watcher's token expires."""
    async for piece in stream.watch(watcher):
        if identity.has_expired:
            return
        yield piece


@get("/stream", None, "What happens, as it happens.", media="text/event-stream", refusals=(429,))
async def watch(call: ApiCall) -> Response:
    if call.request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return _Watching(call.stream, call.stream.join(call.admin.scope), call.identity)


# -- lists ------------------------------------------------------------------------------------


def _page(kind: str, page: Page[Any]) -> dict[str, Any]:
    return {"items": page.items, "next": cursor(kind, page.next)}


def _whole(items: Sequence[Any]) -> dict[str, Any]:
    return {"items": items, "next": None}
