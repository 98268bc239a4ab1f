"""Requests to `/in/{source}`: the source by its path, the body under its caps, the answer of the receiver.

`connection` reads them off a socket, `asgi` takes them from the application in which an inbox is mounted. Both open a
`HookRequest` here, so that the same request gets the same answer and leaves the same traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from oncehook.errors import Malformed, Overloaded, Rejected, TooLarge
from oncehook.ingest import Begun, Receipt, Receiver
from oncehook.model import Arrival, Headers
from oncehook.sources import Network, Reply, Source
from oncehook.web.peers import PeerOf, is_shared_address, network_of

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
        self.release()
        self.refused = True
        self._refuse()


class BodyBudget:
    """Bytes of unfinished bodies, by the network they come from.

    Because nothing is known yet about their senders, one network gets a share only; where a share or the whole is used
    up, the largest body of the network that holds the most goes, never a small one that has just begun (S9, S14).
    """

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
        most = self._most if is_shared_address(peer, self._trusted) else self._most // SHARES
        return UnfinishedBody(self, network_of(peer), most, refuse)

    def add(self, body: UnfinishedBody, size: int) -> None:
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


class HookRequest:
    """One request to a source. Its body is fed in pieces; `finish` hands it to the receiver."""

    __slots__ = ("_arrival", "_body", "_counted", "_hooks", "_size", "_source")

    def __init__(self, hooks: Hooks, source: Source | None, arrival: Arrival) -> None:
        self._hooks = hooks
        self._source = source
        """None: there is no source at this path."""
        self._arrival = arrival
        self._body: bytes | bytearray = b""
        self._size = 0
        self._counted: UnfinishedBody | None = None

    def check_head(self) -> None:
        """Refuse a stated length above the cap, and a transfer coding that would leave encoded bytes (S15)."""
        for name, value in self._arrival.headers:
            if name == b"content-length":
                if not value.isdigit():
                    raise Malformed("Content-Length is not a number.")
                if len(value) > 18 or int(value) > self._hooks.cap:
                    raise TooLarge
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise Malformed("The only transfer coding accepted here is chunked.")

    def feed(self, piece: bytes) -> None:
        """Add to the body. Raises TooLarge: never more than the cap is held (R7, S9)."""
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
        """Count what has come among the unfinished bodies; `refuse` is called, now or later, when they are too many."""
        if self._counted is None:
            self._counted = self._hooks.count(self._source, self._arrival.peer, refuse)
        if self._source is None:
            self._body = b""  # bytes for nobody are not held
        self._counted.grow(self._size - self._counted.size)

    @property
    def is_refused(self) -> bool:
        """Tell whether it had to make way for other bodies."""
        return self._counted is not None and self._counted.refused

    def release(self) -> None:
        if self._counted is not None:
            self._counted.release()
            self._counted = None

    def finish(self) -> Reply | Begun:
        """Hand the whole request to the receiver; return its answer, or what the store has to decide first."""
        if self._counted is not None:
            self.release()
        # For nobody, as many bytes as were sent: they take as long to be refused as real ones (S8).
        self._arrival.body = bytes(self._body) if len(self._body) == self._size else bytes(self._size)
        if self._arrival.method != "POST":
            return self._hooks.receiver.greet(self._source, self._arrival)
        begun = self._hooks.receiver.begin(self._source, self._arrival)
        return begun.reply if isinstance(begun, Receipt) else begun

    def refuse(self, error: Rejected | Overloaded) -> Reply:
        """Drop the body and return the answer to a request that is not taken."""
        self.release()
        self._body = b""
        if isinstance(error, Overloaded):
            return self._hooks.receiver.put_off(self._source, error)
        return self._hooks.receiver.turn_away(self._source, self._arrival, error)

    def closes(self, error: Rejected | Overloaded) -> bool:
        """Tell whether the connection must end with this refusal, because the end of the body is in doubt.

        That is so after framing that was refused, and where the sender waits for a word to continue. Otherwise the rest
        of the body is read and dropped, so that its sender comes to see the answer.
        """
        return isinstance(error, Malformed) or any(name == b"expect" for name, _ in self._arrival.headers)


class Hooks:
    """All requests below one prefix: what follows it in the path names the source."""

    def __init__(self, receiver: Receiver, prefix: str, peer_of: PeerOf, budget: BodyBudget | None = None) -> None:
        self.receiver = receiver
        self.prefix = prefix
        self._peer_of = peer_of
        self._by_path: Mapping[str, Source] = {source.path: source for source in receiver.sources.values()}
        self.budget = budget or BodyBudget()
        self._dropped = self.budget.twin()
        """Bytes of bodies for nobody. They are not held, but who sends too many is answered alike (S8)."""
        self.cap = receiver.largest_body
        """Bytes of the largest body that is read, for any source and for none: a 413 must not tell them apart (S8)."""

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
        """Begin a request. `raw_path` is the path as it was written: decoded, it could hold the line ends that part one
        stored header from the next. `root` is where an application has mounted us.
        """
        # What a sub-path adds (Evolution's /messages-upsert) belongs to the sender, not to the name.
        start = len(root) if root and path.startswith(root) else 0
        name = path[start + len(self.prefix) :].partition("/")[0]
        source = self._by_path.get(name)
        if source is not None:
            if source.path != source.name:  # an unguessable path is not for the store (S25)
                raw_path = quote(path.replace(source.path, source.name, 1))
            name = source.name
        peer = self._peer_of({"client": client, "headers": headers})
        return HookRequest(self, source, Arrival(name, headers, b"", query, method, raw_path, peer))

    def count(self, source: Source | None, peer: str, refuse: Callable[[], None]) -> UnfinishedBody:
        return (self._dropped if source is None else self.budget).begin(peer, refuse)
