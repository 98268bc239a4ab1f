"""The guarded client: a request goes out, an `Answer` comes back or an `Unanswered` is raised.

Every address is judged when a name is looked up and again on the socket that is about to connect, so a name that
changes its mind in between reaches nothing (S17). There are no redirects, cookies or compression here, and no proxy but
one that was named (S20). Destinations, senders and alerts call it; `direct` or, with a proxy, `proxied` does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oncehook.errors import ConfigError
from oncehook.outbound import Answer
from oncehook.outbound.addresses import Guard, Network
from oncehook.outbound.certificates import read_certificates
from oncehook.outbound.direct import Direct
from oncehook.outbound.names import LookUp
from oncehook.outbound.proxies import read_proxy

if TYPE_CHECKING:
    from oncehook.outbound.proxied import Proxied

MOST_KEPT: Final = 4096
"""Bytes of an answer's body that are read; what comes after stays unread, and the connection is closed."""
_IDLE_KEPT: Final = 15.0
"""Seconds for which an idle connection is kept for the next call."""


class Outbound:
    """A client with its own rules and its own connections: what one destination allows, no other one can use."""

    def __init__(
        self,
        *,
        allow_private: bool | Sequence[Network] = False,
        ca: Path | None = None,
        look_up: LookUp | None = None,
        proxy: str | None = None,
        idle: float = _IDLE_KEPT,
    ) -> None:
        """`ca` is a file of certificates that are trusted instead of the system's; there is no way not to check.

        `proxy` (`http://user:password@host:port` or `socks5://…`) is the operator's word and may be a private address.
        `idle` is for how many seconds an unused connection is kept.
        """
        self._guard = Guard(allow_private)
        self._proxy = None if proxy is None else read_proxy(proxy)
        self._idle = idle
        self._tls = None if ca is None else read_certificates(ca)
        self._look_up = look_up
        self._way: Direct | Proxied | None = None

    async def open(self) -> None:
        """Be ready to call, on the running loop."""
        if self._way is not None:
            return
        if self._proxy is None:
            self._way = Direct(self._guard, self._look_up, self._tls, self._idle)
            return
        try:
            from oncehook.outbound.proxied import Proxied
        except ImportError:
            raise ConfigError("A proxy needs the package aiohttp.", hint="pip install 'oncehook[proxy]'") from None

        self._way = Proxied(self._proxy, self._guard, self._look_up, self._tls, self._idle)

    async def close(self) -> None:
        """Close what is open; a call under way ends in an error."""
        way, self._way = self._way, None
        if way is not None:
            await way.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, within: float) -> Answer:
        """POST what carries an Idempotency-Key: see `request`, with `again`."""
        return await self.request("POST", url, headers, body, within=within, again=True)

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        within: float,
        most: int = MOST_KEPT,
        again: bool = False,
    ) -> Answer:
        """Call an address that `read_url` has read, within so many seconds in all. Raises Unanswered.

        An answer counts from its head on: when its body then does not come in time, it is cut where it stands, as it
        is after `most` bytes. A header that no request can carry raises ValueError, and nothing is sent.

        `again` lets a call that met a connection which the other end was just closing be sent once more. Nothing tells
        that from a call that was received and not answered, so it may be received twice. What carries an
        Idempotency-Key can bear that, delivery being at least once anyway (R53): the attempt is not worth losing. So
        can what HTTP calls idempotent (GET, PUT, DELETE). A message to a person cannot.
        """
        assert self._way is not None
        return await self._way.call(method, url, headers, body, within=within, most=most, again=again)

    async def reach(self, url: str, *, within: float) -> bool:
        """Connect and, with https, see that the other end is whom it says, but ask nothing. Raises Unanswered.

        False: nothing was tried, since a proxy stands between.
        """
        if not isinstance(self._way, Direct):
            return False
        await self._way.reach(url, within=within)
        return True
