"""Under a path of somebody else's: a proxy that serves us at `/hooks/` says so in `X-Forwarded-Prefix`.

It takes the prefix off before it hands a request on; here it is put back as ASGI's `root_path`, from which pages make
their links and cookies their path. Only a configured proxy is believed (S16).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from oncehook.errors import Malformed, Overloaded, Rejected, TooLarge
from oncehook.ingest import Begun, Receipt, Receiver
from oncehook.model import Arrival, Headers
from oncehook.sources import Network, Reply, Source
from oncehook.web.peers import PeerOf, Scope, direct_peer, is_within, network_of, stands_for_many

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_HELD: Final = 256 << 20
"""Bytes of unfinished bodies at most, over all connections."""
SHARES: Final = 4
"""How many networks it takes to use all of it. The share of each has room for two of GitHub's largest bodies."""


class UnfinishedBody:
    """One body that is being read. `refuse` is called when it has to go; it is not counted any more then."""

    __slots__ = ("_budget", "_refuse", "most", "network", "refused", "size")

    def __init__(self, budget: BodyBudget, network: str, most: int, refuse: Callable[[], None]) -> None:
        self._budget = budget
        self._refuse = refuse
        self.network = network
        self.most = most
        """Bytes that its whole network may hold."""
        self.size = 0
        self.refused = False

    def grow(self, size: int) -> None:
        """Count bytes that came while more are missing. May refuse this body, or another one."""
        self._budget.add(self, size)

    def release(self) -> None:
        """Stop counting: it is whole, or dropped."""
        self._budget.remove(self)

    def refuse(self) -> None:
        """Drop it for others."""
        self.release()
        self.refused = True
        self._refuse()


class BodyBudget:
    """Bytes of unfinished bodies, by the network they come from."""

    def __init__(self, most: int = MOST_HELD, trusted: Sequence[Network] = ()) -> None:
        self._most = most
        self._trusted = trusted
        self._bodies: dict[str, dict[UnfinishedBody, None]] = {}
        self._sizes: dict[str, int] = {}
        self.held = 0
        """Bytes of all of them together."""

    def twin(self) -> BodyBudget:
        """Return another one of the same size, of which nothing is used."""
        return BodyBudget(self._most, self._trusted)

    def begin(self, peer: str, refuse: Callable[[], None]) -> UnfinishedBody:
        """Return a body of which nothing is counted yet."""
        most = self._most if stands_for_many(peer, self._trusted) else self._most // SHARES
        return UnfinishedBody(self, network_of(peer), most, refuse)

    def add(self, body: UnfinishedBody, size: int) -> None:
        """See `UnfinishedBody.grow`."""
        network = body.network
        self._bodies.setdefault(network, {})[body] = None
        self._sizes[network] = self._sizes.get(network, 0) + size
        body.size += size
        self.held += size
        while self._sizes.get(network, 0) > body.most:
            self._refuse_largest(network)
        while self.held > self._most:
            self._refuse_largest(max(self._sizes, key=self._sizes.__getitem__))

    def remove(self, body: UnfinishedBody) -> None:
        """See `UnfinishedBody.release`."""
        bodies = self._bodies.get(body.network)
        if bodies is None or body not in bodies:
            return
        del bodies[body]
        self._sizes[body.network] -= body.size
        self.held -= body.size
        if not bodies:
            del self._bodies[body.network], self._sizes[body.network]

    def _refuse_largest(self, network: str) -> None:
        max(self._bodies[network], key=lambda body: body.size).refuse()


CLOSE: Final = (b"connection", b"close")
_NAME: Final = re.compile(rb"[A-Za-z0-9_-]+")
"""What a source may be named by in a path, before and without any escaping."""


class Ingest:
    """An ASGI application for one prefix: what follows it in the path names the source."""

    def __init__(self, receiver: Receiver, prefix: str, peer_of: PeerOf, budget: BodyBudget | None = None) -> None:
        self._receiver = receiver
        self._prefix = prefix
        self._peer_of = peer_of
        self._by_path: Mapping[str, Source] = {source.path: source for source in receiver.sources.values()}
        self.budget = budget or BodyBudget()
        self._dropped = self.budget.twin()
        """Bytes of bodies for nobody. They are not held, but who sends too many is answered alike (S8)."""
        self.cap = receiver.largest_body
        """Bytes of the largest body that is read, for any source and for none: a 413 must not tell them apart (S8)."""
        self._start = prefix.encode()
        self._by_name: Mapping[bytes, Source] = {path.encode(): source for path, source in self._by_path.items()}

    def plain(self, path: bytes) -> bytes | None:
        """Return what names the source in a path that has no second meaning; None for any other path."""
        start, slash, name = path.rpartition(b"/")
        return name if start + slash == self._start and (name.isalnum() or _NAME.fullmatch(name)) else None

    def find(self, name: bytes) -> Source | None:
        """Return the source that is named so in a plain path."""
        return self._by_name.get(name)

    def begin(
        self,
        source: Source | None,
        name: bytes,
        query: bytes,
        headers: Headers,
        body: bytes,
        client: tuple[str, int] | None,
    ) -> Begun | Receipt:
        """Hand a whole POST at a plain path to the receiver."""
        shown = name.decode() if source is None else source.name  # an unguessable path is not for the store (S25)
        peer = self._peer_of({"client": client, "headers": headers})
        arrival = Arrival(shown, headers, body, query, "POST", self._prefix + shown, peer)
        return self._receiver.begin(source, arrival)

    def finish(self, begun: Begun) -> Receipt:
        """The answer, once the store has decided."""
        return self._receiver.finish(begun)

    async def complete(self, begun: Begun) -> Receipt:
        """The answer, when more is to be done once the store has decided."""
        return await self._receiver.complete(begun)

    def put_off(self, source: Source | None) -> Reply:
        """The answer while too many unfinished bodies are held."""
        return self._receiver.put_off(source, Overloaded())

    def unfinished(self, source: Source | None, scope: Scope, refuse: Callable[[], None]) -> UnfinishedBody:
        """Return what counts the bytes of a body that comes in pieces; `refuse` is called when they are too many."""
        return (self._dropped if source is None else self.budget).begin(self._peer_of(scope), refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        name = self._name(scope)
        source = self._by_path.get(name)
        try:
            body = await self._body(receive, scope, source)
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

    async def _body(self, receive: Receive, scope: Scope, source: Source | None) -> bytes | None:
        """Return the whole body, or None when the sender broke off. Never more than the cap is held (R7, S9)."""
        _check_framing(scope, self.cap)
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            if len(body) > self.cap:
                raise TooLarge
            return body
        try:
            async with asyncio.timeout(None) as timeout:
                # Another body may be what is too much: then this one is refused while it waits for its next piece.
                counted = self.unfinished(source, scope, lambda: timeout.reschedule(0))
                try:
                    return await self._gather(receive, message, counted, dropped=source is None)
                finally:
                    counted.release()
        except TimeoutError:
            raise Overloaded from None

    async def _gather(
        self, receive: Receive, message: Message, counted: UnfinishedBody, *, dropped: bool
    ) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while message["type"] == "http.request":
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > self.cap:
                raise TooLarge
            if not dropped:
                parts.append(piece)
            if not message.get("more_body", False):
                return stand_in(size) if dropped else b"".join(parts)
            counted.grow(len(piece))
            if counted.refused:
                raise Overloaded
            message = await receive()
        return None

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


def stand_in(size: int) -> bytes:
    """Return as many bytes as a body for nobody had: it takes as long to be refused as a real one (S8)."""
    return bytes(size)


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


_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


class Prefixed:
    """An ASGI application in front of another."""

    def __init__(self, app: Callable[..., Awaitable[Any]], trusted: Sequence[Network]) -> None:
        self._app = app
        self._trusted = trusted

    def __call__(self, scope: Scope, receive: Any, send: Any) -> Awaitable[Any]:
        prefix = self._prefix(scope) if self._trusted and scope["type"] == "http" else ""
        if prefix:
            scope = {**scope, "root_path": prefix, "path": prefix + scope["path"]}
        return self._app(scope, receive, send)

    def _prefix(self, scope: Scope) -> str:
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-prefix"]
        said = named[0].rstrip("/") if len(named) == 1 else ""
        return said if _PREFIX.fullmatch(said) and is_within(direct_peer(scope), self._trusted) else ""
