"""The JSON API under `/api/v1`: every question and act of the admin, over HTTP with a bearer token.

`endpoints` has all of it; `routes` makes Starlette routes of them for the server, or for a host application under any
prefix. Every answer is JSON that no browser takes for a page; every refusal has a code for programs, a reason, and a
hint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from oncehook.admin import Admin
from oncehook.errors import Forbidden, InvalidSettings, NotFound, Refused, StoreError, Unauthorized
from oncehook.logs import ration
from oncehook.web.api import schemas
from oncehook.web.api.endpoints import ENDPOINTS
from oncehook.web.api.openapi import PREFIX, Endpoint, document
from oncehook.web.api.request import ApiCall, check_parameters, check_word
from oncehook.web.auth import Access, Identity, is_refused_act
from oncehook.web.live import Broadcast

log = logging.getLogger("oncehook.api")

SAFE: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Nearly every answer contains untrusted text: no browser may take it for anything but data (S30)."""


# -- routes ------------------------------------------------------------------------------------


def routes(admin: Admin, access: Access, stream: Broadcast) -> list[BaseRoute]:
    """Return all routes of the API, `/openapi.json`, and an answer for unknown addresses below `/api/v1`."""

    async def openapi(request: Request) -> Response:
        return Response(_encode_document(), media_type="application/json", headers=SAFE)

    async def elsewhere(request: Request) -> Response:
        try:
            return refusal(await _nothing_here(request, access))
        except Refused as error:
            return refusal(error)

    made: list[BaseRoute] = [Route("/openapi.json", openapi)]
    made += [
        Route(PREFIX + endpoint.path, _serve(endpoint, admin, access, stream), methods=[endpoint.method])
        for endpoint in ENDPOINTS
    ]
    every = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return [*made, Route(PREFIX + "/{rest:path}", elsewhere, methods=every)]


@cache
def _encode_document() -> bytes:
    return msgspec.json.encode(document(ENDPOINTS))


def _serve(
    endpoint: Endpoint, admin: Admin, access: Access, stream: Broadcast
) -> Callable[[Request], Awaitable[Response]]:
    known = [name for name, _ in endpoint.parameters]

    async def answer(request: Request) -> Response:
        identity: Identity | None = None
        try:
            identity = await access.of(request)
            if identity is None:
                raise access.challenge()
            if identity.role < endpoint.role:
                raise Forbidden(f"This needs the role {endpoint.role.name}; {identity.name} is {identity.role.name}.")
            for name in request.query_params:
                check_word(name, known, "parameter here")
            call = ApiCall(request, identity, identity.admin(admin), stream, access)
            return _encode(await endpoint.handler(call), endpoint.status)
        except Refused as error:
            if identity is not None and is_refused_act(request, error):
                await identity.admin(admin).note_refused(f"{request.method} {request.url.path}", error.code)
            return refusal(error)
        except StoreError as error:
            return _unavailable(error)
        except Exception:
            fields = {"path": endpoint.path}
            ration.log(log, logging.ERROR, "api.failed", fields, kind=endpoint.path, exc_info=True)
            return _json(500, schemas.Error(error="Something went wrong here.", code="internal", hint="See the log."))

    return answer


async def _nothing_here(request: Request, access: Access) -> Refused:
    """Return the error for an unknown address; without a token, one that does not reveal which addresses exist."""
    try:
        if await access.of(request) is None:
            return access.challenge()
        check_parameters(request)
    except Refused as error:
        return error
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


def _encode(answer: Any, status: int) -> Response:
    if isinstance(answer, Response):
        answer.headers.update(SAFE)
        return answer
    if isinstance(answer, dict):
        return _json(status, {**answer, "items": schemas.encode(answer["items"])})
    return _json(status, schemas.encode(answer))


def _json(status: int, value: Any, more: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, {**SAFE, **(more or {})}, media_type="application/json")


def refusal(error: Refused) -> Response:
    more = {}
    if error.retry_after is not None:
        # Rounded up, because a caller that comes a moment early is refused again.
        more["Retry-After"] = str(int(-(-error.retry_after // 1)))
    if isinstance(error, Unauthorized):
        more["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongMethod):
        more["Allow"] = ", ".join(error.methods)
    answer = schemas.Error(error=str(error), code=error.code, hint=error.hint)
    if isinstance(error, InvalidSettings):
        listed = [schemas.SettingError(**one) for one in error.errors]
        answer = schemas.SettingsError(error=str(error), code=error.code, hint=error.hint, errors=listed)
    return _json(error.status, answer, more)


def _unavailable(error: StoreError) -> Response:
    # The database's message may contain hosts, users and files, so it is only logged.
    fields = {"code": error.code, "error": str(error)}
    ration.log(log, logging.WARNING, "api.store_unavailable", fields, kind=error.code)
    answer = schemas.Error(error="The store cannot answer now; try again.", code=error.code, hint="")
    return _json(503, answer, {"Retry-After": "1"})
