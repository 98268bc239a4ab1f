"""`POST /in/{source}`: bare ASGI in front of everything else, because every arrival pays for each layer.

It reads the body under a cap that counts streamed bytes, hands it to the receiver, and writes the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from oncehook.errors import Malformed, Overloaded, Rejected, TooLarge
from oncehook.model import Arrival, Headers
from oncehook.receive import Begun, Receipt, Receiver
from oncehook.sources import DEFAULT_MAX_BODY, Reply, Source
from oncehook.web.peers import PeerOf, Scope, direct_peer

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLOSE: Final = (b"connection", b"close")

MOST_HELD: Final = 256 << 20
"""Bytes of unfinished bodies at most, over all connections: nothing is known yet about who sends them."""


class Ingest:
    """An ASGI application for one prefix: what follows it in the path names the source."""

    def __init__(self, receiver: Receiver, prefix: str, peer_of: PeerOf) -> None:
        self._receiver = receiver
        self._prefix = prefix
        self._peer_of = peer_of
        self._by_path: Mapping[str, Source] = {source.path: source for source in receiver.sources.values()}
        self._held = 0
        self.plain: Mapping[bytes, Source] = {
            f"{prefix}{source.name}".encode(): source
            for source in receiver.sources.values()
            if source.path == source.name and not source.revive_dead
        }
        """Sources by their whole path, where nothing about an arrival needs a second thought (see `shortcut`)."""

    def begin(
        self, source: Source, path: str, query: bytes, headers: Headers, body: bytes, client: tuple[str, int] | None
    ) -> Begun | Receipt:
        """Hand a whole POST at a plain path to the receiver."""
        peer = self._peer_of({"client": client, "headers": headers})
        return self._receiver.begin(source, Arrival(source.name, headers, body, query, "POST", path, peer))

    def finish(self, begun: Begun) -> Receipt:
        """The answer, once the store has decided."""
        return self._receiver.finish(begun)

    def put_off(self, source: Source) -> Reply:
        """The answer while too many unfinished bodies are held."""
        return self._receiver.put_off(source, Overloaded())

    def hold(self, size: int) -> bool:
        """Count bytes of an unfinished body; False: together they are too many."""
        self._held += size
        return self._held <= MOST_HELD

    def let_go(self, size: int) -> None:
        """They are finished, or dropped."""
        self._held -= size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        name = self._name(scope)
        source = self._by_path.get(name)
        try:
            body = await self._body(receive, scope, DEFAULT_MAX_BODY if source is None else source.max_body)
        except (Rejected, Overloaded) as error:
            if isinstance(error, Overloaded):
                reply = self._receiver.put_off(source, error)
            else:
                reply = self._receiver.turn_away(source, self._arrival(scope, name, source, b""), error)
            await _send(send, reply, () if _will_be_read(scope, error) else (CLOSE,))
            return
        if body is None:
            return  # the sender went away in the middle: nothing was acknowledged, nothing is kept
        arrival = self._arrival(scope, name, source, body)
        if scope["method"] == "POST":
            await _send(send, (await self._receiver.take(source, arrival)).reply)
        else:
            await _send(send, self._receiver.greet(source, arrival))

    async def _body(self, receive: Receive, scope: Scope, cap: int) -> bytes | None:
        """The whole body, or None when the sender broke off. Never more than `cap` bytes are held (R7, S9)."""
        _check_framing(scope, cap)
        message = await receive()
        body: bytes = message.get("body", b"")
        if message["type"] == "http.request" and not message.get("more_body", False):
            if len(body) > cap:
                raise TooLarge
            return body
        parts, size = [body], len(body)
        self._held += size
        try:
            while message["type"] == "http.request" and message.get("more_body", False):
                if size > cap:
                    raise TooLarge
                if self._held > MOST_HELD:
                    raise Overloaded
                message = await receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._held += len(parts[-1])
        finally:
            self._held -= size
        if message["type"] != "http.request":
            return None
        if size > cap:
            raise TooLarge
        return b"".join(parts)

    def _name(self, scope: Scope) -> str:
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        # Where we are mounted, `root_path` is ours to take off; what a sub-path adds (Evolution's
        # /messages-upsert) belongs to the sender, not to the name.
        start = len(root) if path.startswith(root) else 0
        return path[start + len(self._prefix) :].partition("/")[0]

    def _arrival(self, scope: Scope, name: str, source: Source | None, body: bytes) -> Arrival:
        # The path as it was written: decoded, it could hold the line ends that part one stored header from the next.
        raw: bytes | None = scope.get("raw_path")
        path = quote(scope["path"]) if raw is None else raw.decode("latin-1")
        if source is not None and source.path != source.name:
            # an unguessable path is not for the store (S25)
            path = quote(scope["path"].replace(source.path, source.name, 1))
        return Arrival(
            name if source is None else source.name,
            scope["headers"],
            body,
            scope["query_string"],
            scope["method"],
            path,
            self._peer_of(scope),
        )


def _check_framing(scope: Scope, cap: int) -> None:
    """Refuse what is too large by its own word, and a transfer coding that would leave us with encoded bytes (S15)."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise Malformed("Content-Length is not a number.")
            if len(value) > 18 or int(value) > cap:
                raise TooLarge
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise Malformed("The only transfer coding accepted here is chunked.")


def _will_be_read(scope: Scope, error: Rejected | Overloaded) -> bool:
    """Whether the server may read and drop what is left of the body, so that its sender comes to see the answer.

    Not where its end is in doubt: framing that we refused, or a sender that waits to be told to continue.
    """
    return not isinstance(error, Malformed) and not any(name == b"expect" for name, _ in scope["headers"])


async def _send(send: Send, reply: Reply, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send({"type": "http.response.start", "status": reply.status, "headers": [*reply.framed_headers, *more]})
    await send({"type": "http.response.body", "body": reply.body})


class Mount:
    """The way in as a part of somebody else's application; answers 503 until the inbox is started (its lifespan)."""

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
