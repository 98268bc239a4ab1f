"""FastAPI and Starlette: the inbox's lifespan around the application's own, and arrivals in the application's own
routes.

Most need neither: `FastAPI(lifespan=inbox.lifespan)` and `app.mount("/hooks", inbox.asgi())` are enough. `lifespan` is
for an application that has one already; `received` is a dependency for a route that works with what was received.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from oncehook import payload
from oncehook.contrib.bridge import check_length
from oncehook.errors import ConfigError, Rejected, TooLarge
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt
from oncehook.model import Arrival, Outcome
from oncehook.sources import Reply, Source
from oncehook.web.peers import direct_peer

_KEPT: Final = (Outcome.accepted, Outcome.duplicate, Outcome.conflict)

State = Mapping[str, Any] | None
Lifespan = Callable[[Any], AbstractAsyncContextManager[State]]


def lifespan(inbox: Inbox, own: Lifespan, *, work: bool = True) -> Lifespan:
    """Wrap the application's lifespan: the inbox starts before it and stops after it.

    Without `work` the application only receives; a worker elsewhere does the rest (`oncehook worker app:inbox`).

    >>> app = FastAPI(lifespan=lifespan(inbox, my_lifespan))
    """

    @contextlib.asynccontextmanager
    async def both(app: Any) -> AsyncIterator[State]:
        async with inbox.running(work=work), own(app) as state:
            yield state

    return both


class Answered(HTTPException):
    """A request that is answered already: rejected, deferred, a handshake, or of an ignored type.

    `app.add_exception_handler(Answered, answer)` sends the documented body. Without it, status and headers are right,
    but the body is the framework's.
    """

    def __init__(self, reply: Reply) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reply.headers}
        super().__init__(reply.status, reply.body.decode("utf-8", "replace"), headers)
        self.reply = reply


async def answer(request: Request, error: Exception) -> Response:
    """Send the inbox's answer. An exception handler for `Answered`."""
    assert isinstance(error, Answered)
    return response(error.reply)


def response(reply: Reply) -> Response:
    """Build the framework's response from the inbox's answer."""
    made = Response(reply.body, reply.status)
    made.raw_headers = reply.framed_headers
    return made


@dataclass(slots=True)
class Received:
    """A genuine arrival that is stored, or a copy of one."""

    arrival: Arrival
    receipt: Receipt

    @property
    def is_new(self) -> bool:
        """Return whether it made an event; a duplicate or a conflict did not."""
        return self.receipt.outcome == Outcome.accepted

    @property
    def event_ids(self) -> list[str]:
        """Return the ids of the events it made, or of the existing ones with its keys."""
        return self.receipt.event_ids

    def json(self) -> Any:
        """Parse the body as JSON, by the parser that found the key. Raises ValueError."""
        return payload.parse(self.arrival.body)

    def response(self) -> Response:
        """Build the response that the sender expects."""
        return response(self.receipt.reply)


def received(inbox: Inbox, source: str) -> Callable[[Request], Awaitable[Received]]:
    """Build a dependency that receives a request for a source, and returns what was verified and stored.

    The route only runs for what is genuine and stored; anything else raises `Answered`. A source's GET handshake is
    answered too, where the route takes GET.

    >>> @app.post("/payments")
    ... async def payments(hook: Annotated[Received, Depends(received(inbox, "stripe"))]) -> Response:
    ...     return hook.response()
    """
    known = inbox.sources.get(source)
    if known is None:
        raise ConfigError(f'There is no source "{source}".', hint=f"There are: {', '.join(inbox.sources) or 'none'}.")

    async def take(request: Request) -> Received:
        arrival = _arrival(request, known)
        try:
            arrival.body = await _body(request, known.settings.max_body)
        except Rejected as error:
            raise Answered(inbox.receiver.turn_away(known, arrival, error)) from error
        if request.method != "POST":
            raise Answered(await inbox.receiver.answer_handshake(known, arrival))
        receipt = await inbox.receiver.take(known, arrival)
        if receipt.outcome not in _KEPT or receipt.reply.status >= 400:  # a conflict may be answered 422
            raise Answered(receipt.reply)
        return Received(arrival, receipt)

    return take


def _arrival(request: Request, source: Source) -> Arrival:
    scope = request.scope
    return Arrival(
        source.name,
        scope["headers"],
        b"",
        scope["query_string"],
        request.method,
        quote(scope["path"]),
        direct_peer(scope),
    )


async def _body(request: Request, cap: int) -> bytes:
    """Read the whole body; never hold more than `cap` bytes and one chunk (R7)."""
    check_length(request.scope["headers"], cap)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > cap:
            raise TooLarge
    return b"".join(parts)
