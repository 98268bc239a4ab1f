"""`POST /in/{source}`: bare ASGI in front of everything else, because every arrival pays for each layer.

It reads the body under a cap that counts streamed bytes, hands it to the receiver, and writes the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from oncehook.errors import Malformed, Rejected, TooLarge
from oncehook.model import Arrival
from oncehook.receive import Receiver
from oncehook.sources import DEFAULT_MAX_BODY, Reply, Source

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

log = logging.getLogger("oncehook.web")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
PeerOf = Callable[[Scope], str]

CLOSE: Final = (b"connection", b"close")


class Ingest:
    """An ASGI application for one prefix: what follows it in the path names the source."""

    def __init__(self, receiver: Receiver, prefix: str, peer_of: PeerOf) -> None:
        self._receiver = receiver
        self._prefix = prefix
        self._peer_of = peer_of
        self._by_path: Mapping[str, Source] = {source.path: source for source in receiver.sources.values()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        # Where we are mounted, `root_path` is ours to take off; what a sub-path adds (Evolution's
        # /messages-upsert) belongs to the sender, not to the name.
        name, _, _ = path[len(scope.get("root_path", "")) + len(self._prefix) :].partition("/")
        source = self._by_path.get(name)
        try:
            body = await _body(receive, scope, DEFAULT_MAX_BODY if source is None else source.max_body)
        except Rejected as error:
            # The rest of the body is not read: this connection cannot carry another request.
            await _send(send, _refusal(error), (CLOSE,))
            return
        if body is None:
            return  # the sender went away in the middle: nothing was acknowledged, nothing is kept
        arrival = Arrival(
            name if source is None else source.name,
            scope["headers"],
            body,
            scope["query_string"],
            scope["method"],
            path,
            self._peer_of(scope),
        )
        if scope["method"] == "POST":
            receipt = await self._receiver.receive(arrival)
            await _send(send, receipt.reply)
        else:
            await _send(send, self._receiver.greet(arrival))


async def _body(receive: Receive, scope: Scope, cap: int) -> bytes | None:
    """The whole body, or None when the sender broke off. Never more than `cap` bytes are held (R7, S9)."""
    _check_length(scope, cap)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body", False):
        if len(body) > cap:
            raise TooLarge
        return body
    parts, size = [body], len(body)
    while message["type"] == "http.request" and message.get("more_body", False):
        if size > cap:
            raise TooLarge
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if message["type"] != "http.request":
        return None
    if size > cap:
        raise TooLarge
    return b"".join(parts)


def _check_length(scope: Scope, cap: int) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise Malformed("Content-Length is not a number.")
            if int(value) > cap:
                raise TooLarge


def _refusal(error: Rejected) -> Reply:
    return Reply(error.status, msgspec.json.encode({"error": str(error), "code": error.code}))


async def _send(send: Send, reply: Reply, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    length = (b"content-length", str(len(reply.body)).encode())
    await send({"type": "http.response.start", "status": reply.status, "headers": [*reply.headers, length, *more]})
    await send({"type": "http.response.body", "body": reply.body})


class Mount:
    """The way in as a part of somebody else's application; works while the inbox runs (its lifespan)."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._receiver: Receiver | None = None
        self._ingest: Ingest | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the last part of its path names the source."""
        receiver = self._inbox.receiver
        if self._ingest is None or receiver is not self._receiver:
            self._receiver, self._ingest = receiver, Ingest(receiver, "/", direct_peer)
        await self._ingest(scope, receive, send)


def direct_peer(scope: Scope) -> str:
    """The address at the other end of the socket."""
    client: tuple[str, int] | None = scope.get("client")
    # Without a peer we cannot call it direct: a socket path or a test client is treated as a stranger.
    return client[0] if client else "unknown"
