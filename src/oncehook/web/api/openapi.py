"""The table of the API: each endpoint's name, role, parameters and answer.

`api` makes its routes from the table and `document` its OpenAPI description, so that both agree. Shapes are described
by the types that requests are parsed into and answers are encoded from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from oncehook import __version__
from oncehook.query import WORDS
from oncehook.web.api.request import MOST, USUAL, ApiCall, Body
from oncehook.web.api.schemas import ApiAnswer, Error, SettingsError
from oncehook.web.auth import Role

Handler = Callable[[ApiCall], Awaitable[Any]]
PREFIX: Final = "/api/v1"

LIMIT: Final = ("limit", f"How many at most, from 1 to {MOST}; {USUAL} unless said.")
CURSOR: Final = ("cursor", "Where to go on: `next` of the page before, with the same query.")
QUERY: Final = ("query", "What to look for, in the query language.")
FILTER: Final = (QUERY, LIMIT, CURSOR, *((word, f"The same as `{word}:` in the query.") for word in WORDS))
PAGED: Final = (LIMIT, CURSOR)
KEY: Final = ("Idempotency-Key", "The same key gets the same answer and makes no second replay.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    method: str
    path: str
    """Below `/api/v1`."""
    role: Role
    handler: Handler
    summary: str
    answer: type[ApiAnswer] | None = None
    """None: not JSON; see `media`."""
    listed: bool = False
    """Answers a page of such answers: `{"items": […], "next": cursor or null}`."""
    status: int = 200
    body: type[Body] | None = None
    parameters: Sequence[tuple[str, str]] = ()
    headers: Sequence[tuple[str, str]] = ()
    refusals: Sequence[int] = ()
    """Statuses of its own, beside those that every endpoint may answer."""
    media: str = "application/json"


ALWAYS: Final = (400, 401, 403, 429, 503)

_MEANINGS: Final[Mapping[int, str]] = {
    400: "The request cannot be read.",
    401: "No token, or a wrong one.",
    403: "The token's role does not allow it.",
    404: "There is no such thing, or no longer.",
    409: "It does not stand where that could be done.",
    413: "The body is larger than 64 KB.",
    422: "Settings are wrong, or a secret cannot be kept; `code` says which.",
    429: "Too soon; `Retry-After` says when.",
    503: "The store cannot answer now; `Retry-After` says when.",
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    shapes: list[type] = [Error, SettingsError]
    for endpoint in endpoints:
        shapes += [shape for shape in (endpoint.answer, endpoint.body) if shape is not None]
    _, components = msgspec.json.schema_components(
        list(dict.fromkeys(shapes)), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(PREFIX + endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "oncehook", "version": __version__, "summary": "The webhook inbox for Python."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    refusals = sorted({*ALWAYS, *endpoint.refusals, *([413] if endpoint.body else [])})
    parts = [part for part in endpoint.path.split("/") if part]
    words = [endpoint.method.lower(), *(part for part in parts if not part.startswith("{"))]
    operation: dict[str, Any] = {
        "operationId": "_".join(words) + ("_one" if endpoint.path.endswith("}") else ""),
        "summary": endpoint.summary,
        "description": f"For the role {endpoint.role.name} and above.",
        "parameters": [
            *(_parameter(part[1:-1], "path", "", required=True) for part in parts if part.startswith("{")),
            *(_parameter(name, "query", about) for name, about in endpoint.parameters),
            *(_parameter(name, "header", about) for name, about in endpoint.headers),
        ],
        "responses": {
            str(endpoint.status): _response(endpoint),
            **{
                str(status): {"description": _MEANINGS[status], "content": _describe_refusal(status)}
                for status in refusals
            },
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": _ref(endpoint.body)}}}
    return operation


def _describe_refusal(status: int) -> dict[str, Any]:
    # A key that is missing is no error of one setting.
    schema = {"anyOf": [_ref(SettingsError), _ref(Error)]} if status == 422 else _ref(Error)
    return {"application/json": {"schema": schema}}


def _parameter(name: str, place: str, about: str, *, required: bool = False) -> dict[str, Any]:
    described = {"name": name, "in": place, "required": required, "schema": {"type": "string"}}
    return {**described, "description": about} if about else described


def _response(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answer is None:
        return {"description": endpoint.summary, "content": {endpoint.media: {"schema": {"type": "string"}}}}
    schema = _ref(endpoint.answer)
    if endpoint.listed:
        schema = {
            "type": "object",
            "properties": {"items": {"type": "array", "items": schema}, "next": {"type": ["string", "null"]}},
            "required": ["items", "next"],
        }
    return {"description": endpoint.summary, "content": {endpoint.media: {"schema": schema}}}


def _ref(shape: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
