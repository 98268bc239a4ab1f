"""Requests to `/in/{source}`: the source by its path, the body under its caps, the answer of the receiver.

`connection` reads them from a socket, `asgi` gets them from an application in which an inbox is mounted. Both open a
`HookRequest` here, so that the same request gets the same answer and log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote, unquote

from oncehook.errors import Malformed, Overloaded, Rejected, StoreUnavailable, TooLarge
from oncehook.ingest import Begun, Deferred, Lookup, Receipt, Receiver
from oncehook.model import Arrival, Headers
from oncehook.sources import Network, Reply, Source
from oncehook.web.counts import NetworkCount
from oncehook.web.peers import PeerOf, is_shared_address, network_of

MOST_HELD: Final = 256 << 20
"""Bytes of unfinished bodies at most, over all connections."""
SHARES: Final = 4
"""Networks that can share the budget. Each share has room for two of GitHub's largest bodies."""


class UnfinishedBody:
    """A body that is being read. `refuse` is called when it must be dropped; it no longer counts then."""

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
        """Count received bytes of an incomplete body. May refuse this body, or another one."""
        self._budget.add(self, size)

    def release(self) -> None:
        """Stop counting a body that is complete or dropped."""
        self._budget.remove(self)

    def refuse(self) -> None:
        self.release()
        self.refused = True
        self._refuse()


class BodyBudget:
    """Bytes of incomplete bodies, by network.

    Their senders are not verified yet, so one network gets only a share. Where a share or the whole is used up, the
    largest body of the network with the most is dropped, never a small one that has just begun (S9, S14).
    """

    def __init__(
        self, most: int = MOST_HELD, trusted: Sequence[Network] = (), count: NetworkCount | None = None
    ) -> None:
        self._most = most
        self._trusted = trusted
        self._bodies: dict[str, dict[UnfinishedBody, None]] = {}
        self._count = count or NetworkCount()

    @property
    def held(self) -> int:
        """Bytes of all of them together."""
        return self._count.total

    def twin(self, count: NetworkCount | None = None) -> BodyBudget:
        """Return another one of the same size, of which nothing is used."""
        return BodyBudget(self._most, self._trusted, count)

    def begin(self, peer: str, refuse: Callable[[], None]) -> UnfinishedBody:
        most = self._most if is_shared_address(peer, self._trusted) else self._most // SHARES
        return UnfinishedBody(self, network_of(peer), most, refuse)

    def add(self, body: UnfinishedBody, size: int) -> None:
        network = body.network
        self._bodies.setdefault(network, {})[body] = None
        body.size += size
        self._count.add(network, size)
        self._enforce(network, body.most)

    def enforce(self) -> None:
        """Refuse bodies that are too much by now because of what other processes hold."""
        for network, bodies in list(self._bodies.items()):
            self._enforce(network, next(iter(bodies)).most)

    def _enforce(self, network: str, most: int) -> None:
        """Refuse bodies while all processes together hold too much, if this one holds more than its part of it.

        One of them always does; the bodies of the others are not what is too much.
        """
        count = self._count
        while count.own_of(network) > most // count.processes and count.of(network) > most:
            self._refuse_largest(network)
        while count.own > self._most // count.processes and count.total > self._most:
            self._refuse_largest(max(self._bodies, key=count.of))

    def remove(self, body: UnfinishedBody) -> None:
        bodies = self._bodies.get(body.network)
        if bodies is None or body not in bodies:
            return
        del bodies[body]
        self._count.add(body.network, -body.size)
        if not bodies:
            del self._bodies[body.network]

    def _refuse_largest(self, network: str) -> None:
        max(self._bodies[network], key=lambda body: body.size).refuse()


class HookRequest:
    """One request to a source. Its body is fed in pieces; `finish` passes it to the receiver."""

    __slots__ = ("_arrival", "_body", "_counted", "_hooks", "_size", "_source")

    def __init__(self, hooks: Hooks, source: Source | Lookup | None, arrival: Arrival) -> None:
        self._hooks = hooks
        self._source = source
        """None: there is no source at this path. A look-up: nobody here knows yet; the body is held meanwhile."""
        self._arrival = arrival
        self._body: bytes | bytearray = b""
        self._size = 0
        self._counted: UnfinishedBody | None = None

    def check_head(self) -> None:
        """Refuse a Content-Length above the cap, and a transfer coding that would leave encoded bytes (S15)."""
        for name, value in self._arrival.headers:
            if name == b"content-length":
                if not value.isdigit():
                    raise Malformed("Content-Length is not a number.")
                if len(value) > 18 or int(value) > self._hooks.cap:
                    raise TooLarge
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise Malformed("The only transfer coding accepted here is chunked.")

    def feed(self, piece: bytes) -> None:
        """Add to the body. Raises TooLarge, so that never more than the cap is held (R7, S9)."""
        if not self._size:
            self._body = piece
        elif self._source is not None:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        self._size += len(piece)
        if self._size > self._hooks.cap:
            raise TooLarge

    def count(self, refuse: Callable[[], None]) -> None:
        """Count this body as incomplete; `refuse` is called, now or later, when there are too many bytes."""
        if self._counted is None:
            self._counted = self._hooks.count(self._source, self._arrival.peer, refuse)
        if self._source is None:
            self._body = b""  # a body without a source is not held
        self._counted.grow(self._size - self._counted.size)

    @property
    def is_refused(self) -> bool:
        """Tell whether it was dropped in favour of other bodies."""
        return self._counted is not None and self._counted.refused

    def release(self) -> None:
        if self._counted is not None:
            self._counted.release()
            self._counted = None

    def finish(self) -> Reply | Begun | Deferred | Lookup:
        """Pass the whole request to the receiver; return its reply, or what the store must decide or look up.

        Returns the look-up of its source while that is under way: call again when it is done.
        """
        source = self._source
        if isinstance(source, Lookup):
            if not source.is_done:
                return source
            try:
                self._settle_source(source.result())
            except StoreUnavailable as error:
                self.release()
                return self._hooks.receiver.put_off(None, error)
            source = self._known_source
        if self._counted is not None:
            self.release()
        # Without a source, as many bytes as were sent: the refusal takes as long as for a real one (S8).
        self._arrival.body = bytes(self._body) if len(self._body) == self._size else bytes(self._size)
        if self._arrival.method != "POST":
            return self._hooks.receiver.greet(source, self._arrival)
        begun = self._hooks.receiver.begin(source, self._arrival)
        return begun.reply if isinstance(begun, Receipt) else begun

    def _settle_source(self, source: Source | None) -> None:
        self._source = source
        if source is not None:
            self._arrival.source = source.name
            if source.path != source.name:
                self._arrival.path = _hide_path(source, unquote(self._arrival.path))

    @property
    def _known_source(self) -> Source | None:
        return None if isinstance(self._source, Lookup) else self._source

    def refuse(self, error: Rejected | Overloaded) -> Reply:
        """Drop the body and return the reply to a refused request."""
        self.release()
        self._body = b""
        if isinstance(error, Overloaded):
            return self._hooks.receiver.put_off(self._known_source, error)
        return self._hooks.receiver.turn_away(self._known_source, self._arrival, error)

    def closes(self, error: Rejected | Overloaded) -> bool:
        """Tell whether this refusal must close the connection, because the end of the body is uncertain.

        So it is after refused framing, and while the sender waits for `100 Continue`. Otherwise the rest of the body is
        read and dropped, so that the sender reads the reply.
        """
        return isinstance(error, Malformed) or any(name == b"expect" for name, _ in self._arrival.headers)


class Hooks:
    """All requests below one prefix: the path after it names the source."""

    def __init__(
        self,
        receiver: Receiver,
        prefix: str,
        peer_of: PeerOf,
        budget: BodyBudget | None = None,
        dropped: NetworkCount | None = None,
    ) -> None:
        self.receiver = receiver
        self.prefix = prefix
        self._peer_of = peer_of
        self._by_path: Mapping[str, Source] = {source.path: source for source in receiver.sources.values()}
        self.budget = budget or BodyBudget()
        self._dropped = self.budget.twin(dropped)
        """Bytes of bodies for nobody. They are not held, but who sends too many is answered alike (S8)."""
        self._cap = receiver.largest_body

    @property
    def cap(self) -> int:
        """Bytes of the largest body that is read, the same with and without a source: a 413 must not tell them apart
        (S8)."""
        stored = self.receiver.stored
        return self._cap if stored is None or stored.largest_body < self._cap else stored.largest_body

    def open(
        self,
        method: str,
        path: str,
        raw_path: str,
        query: bytes,
        headers: Headers,
        client: tuple[str, int] | None,
        root: str = "",
    ) -> HookRequest:
        """Begin a request. `raw_path` is not decoded, because a decoded path could contain the line ends that separate
        stored headers. `root` is the path at which an application has mounted us."""
        # A sub-path (Evolution's /messages-upsert) is not part of the name.
        start = len(root) if root and path.startswith(root) else 0
        name, _, rest = path[start + len(self.prefix) :].partition("/")
        source: Source | Lookup | None = self._by_path.get(name)
        if source is None and self.receiver.stored is not None:
            source = self.receiver.stored.at(name)
        if isinstance(source, Source):
            if source.path != source.name:
                raw_path = _hide_path(source, path)
            name = source.name
        peer = self._peer_of({"client": client, "headers": headers})
        return HookRequest(
            self, source, Arrival(name, headers, b"", query, method, raw_path, peer, rest.partition("/")[0])
        )

    def enforce_budget(self) -> None:
        """Refuse bodies that are too much because of what other processes hold."""
        self.budget.enforce()
        self._dropped.enforce()

    def count(self, source: Source | Lookup | None, peer: str, refuse: Callable[[], None]) -> UnfinishedBody:
        return (self._dropped if source is None else self.budget).begin(peer, refuse)


def _hide_path(source: Source, path: str) -> str:
    """Return the path to be stored with an arrival: with the source's name in place of its unguessable path (S25)."""
    return quote(path.replace(source.path, source.name, 1))
