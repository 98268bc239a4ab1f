"""What both thin references share: the smallest ASGI application that checks, finds the key and waits for a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.views import genuine

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

ACCEPTED = b'{"status":"accepted"}'
DUPLICATE = b'{"status":"duplicate"}'
REFUSED = b'{"error":"bad signature"}'


@dataclass(slots=True)
class Waiting:
    """An event on its way into the next commit."""

    key: str
    body: bytes
    future: asyncio.Future[bool]
    """Resolves after the commit: whether the event was new."""


class Keyed(msgspec.Struct):
    """The only field that is decoded."""

    id: str


_decode = msgspec.json.Decoder(Keyed).decode


def serve(start: Callable[[], Awaitable[None]], keep: Callable[[Waiting], None]) -> Application:
    """Build an ASGI application that hands every genuine event to `keep`."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = await read_body(receive)
        if not genuine(body, signature_of(scope)):
            await reply(send, 401, REFUSED)
            return
        waiting = Waiting(_decode(body).id, body, asyncio.get_running_loop().create_future())
        keep(waiting)
        await reply(send, 200, ACCEPTED if await waiting.future else DUPLICATE)

    return app


async def read_body(receive: Receive) -> bytes:
    """Read the whole request body."""
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


def signature_of(scope: Message) -> str:
    """Return the signature header, or nothing."""
    for name, value in scope["headers"]:
        if name == b"x-signature":
            signature: bytes = value
            return signature.decode("latin-1")
    return ""


async def reply(send: Send, status: int, body: bytes) -> None:
    """Answer with JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
