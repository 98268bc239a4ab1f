"""Bodies that are not whole yet: how many bytes of them are held, for whom, and whose are dropped when it is too much.

Nothing is known yet about who sends them, so one network gets a share only; and where a share or the whole is used up,
the largest body of the network that holds the most goes, never a small one that has just begun (S9, S14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from oncehook.sources import Network
from oncehook.web.peers import network_of, stands_for_many

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
