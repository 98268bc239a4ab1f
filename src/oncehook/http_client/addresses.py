"""The addresses of a host name that may be called, cached for a few seconds.

`client` looks them up before it connects, and checks each once more on the socket (S17).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

TABLE: Final[Sequence[tuple[str, str]]] = (
    ("0.0.0.0/8", "this network"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "shared by a carrier"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16/32", "a cloud's own"),  # Azure's host, in public space but reached from inside only
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "for protocols"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "a 6to4 relay"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "for benchmarks"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("255.255.255.255/32", "broadcast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "IPv4-compatible"),
    ("::ffff:0:0/96", "IPv4-mapped"),
    ("::ffff:0:0:0/96", "IPv4-translated"),
    ("64:ff9b::/96", "NAT64"),
    ("64:ff9b:1::/48", "NAT64"),
    ("100::/64", "discarded"),
    ("100:0:0:1::/64", "a dummy prefix"),
    ("2001::/32", "Teredo"),
    ("2001:2::/48", "for benchmarks"),
    ("2001::/23", "for protocols"),
    ("2001:db8::/32", "documentation"),
    ("2002::/16", "6to4"),
    ("3ffe::/16", "6bone"),
    ("3fff::/20", "documentation"),
    ("5f00::/16", "segment routing"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local"),
    ("ff00::/8", "multicast"),
    # The rest of what lies outside 2000::/3, the only range assigned for public use.
    ("::/3", "reserved"),
    ("4000::/2", "reserved"),
    ("8000::/1", "reserved"),
)
"""Networks that are not called unless a destination allows them, narrower ones first, with a word for each."""

_DENIED: Final[Sequence[tuple[Network, str]]] = [(ip_network(text), what) for text, what in TABLE]
_NAT64: Final = IPv6Network("64:ff9b::/96")
_COMPATIBLE: Final = IPv6Network("::/96")
_TRANSLATED: Final = IPv6Network("::ffff:0:0:0/96")


class AddressRefused(OSError):
    """The guard does not let this address be called. An OSError, so that the client goes on to the next address."""


class Guard:
    """Rules for the addresses that may be called: public ones always, others where they are allowed."""

    def __init__(self, allow_private: bool | Sequence[Network] = False) -> None:
        self._everything = allow_private is True
        self._allowed = () if isinstance(allow_private, bool) else tuple(allow_private)

    def check(self, text: str) -> None:
        """Raise AddressRefused when this address may not be called."""
        what = self.refuses(text)
        if what is not None:
            raise AddressRefused(f"{text} is not a public address ({what})")

    def refuses(self, text: str) -> str | None:
        """Return a word for why this address may not be called; None when it may."""
        try:
            address = ip_address(text.partition("%")[0])
        except ValueError:
            return "no address"
        return self._refuses(address)

    def _refuses(self, address: Address) -> str | None:
        what = None if self._everything else find_denial(address)
        if what is None:
            return None
        if not any(address in network for network in self._allowed):
            return what
        # An allowed tunnel address does not allow the address inside it.
        inner = find_embedded(address)
        return None if inner is None else self._refuses(inner)


def find_denial(address: Address) -> str | None:
    """Return the word of the table for an address; None when it is public."""
    return next((what for network, what in _DENIED if address in network), None)


def find_embedded(address: Address) -> IPv4Address | None:
    """Return the IPv4 address embedded in an IPv6 address with such a prefix."""
    if isinstance(address, IPv4Address):
        return None
    found = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
    if found is None and any(address in network for network in (_NAT64, _COMPATIBLE, _TRANSLATED)):
        return None if int(address) <= 1 else IPv4Address(int(address) & 0xFFFF_FFFF)
    return found


LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function from a host name and a port to its addresses."""

KEPT: Final = 10.0
"""Seconds for which a look-up is cached. Its addresses are checked at every connection anyway."""
_MOST: Final = 1000
"""Names that are kept at a time."""


class Names:
    """Cache of look-ups. Callers that ask for a name while it is looked up share one answer."""

    def __init__(self, guard: Guard, look_up: LookUp | None = None) -> None:
        self._guard = guard
        self._look_up = look_up or look_up_name
        self._kept: dict[tuple[str, int], tuple[float, deque[str]]] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[Sequence[str]]] = {}

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return the allowed addresses, beginning with another one each time. Raises OSError, also AddressRefused."""
        now = asyncio.get_running_loop().time()
        kept = self._kept.get((host, port))
        if kept is not None and now < kept[0] + KEPT:
            kept[1].rotate(-1)
            return list(kept[1])
        found = await _outcome(self._ask(host, port))
        if len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[host, port] = (now, deque(found))
        return found

    def _ask(self, host: str, port: int) -> asyncio.Task[Sequence[str]]:
        task = self._asking.get((host, port))
        if task is None:
            task = self._asking[host, port] = asyncio.create_task(self.resolve(host, port))
            task.add_done_callback(lambda done: self._forget((host, port), done))
        return task

    def _forget(self, key: tuple[str, int], done: asyncio.Task[Sequence[str]]) -> None:
        self._asking.pop(key, None)
        if not done.cancelled():
            done.exception()  # marks the error as seen, because all callers may have given up

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Look a name up and return its allowed addresses. Raises where there are none."""
        refused: list[AddressRefused] = []
        allowed: list[str] = []
        for address in await self._look_up(host, port):
            try:
                self._guard.check(address)
            except AddressRefused as error:
                refused.append(error)
            else:
                allowed.append(address)
        if refused and not allowed:
            raise refused[0]
        if not allowed:
            raise OSError("the name leads to no address")
        return allowed

    def close(self) -> None:
        """Fail the callers that still wait."""
        for task in self._asking.values():
            task.cancel()


async def _outcome(task: asyncio.Task[Sequence[str]]) -> Sequence[str]:
    """Wait for a look-up without cancelling it: other callers may still need it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if task.cancelled() and me is not None and not me.cancelling():
            raise OSError("this client was closed") from None  # the look-up was cancelled, not this caller
        raise


async def look_up_name(host: str, port: int) -> Sequence[str]:
    """Ask the system on a thread of its own: a name server that hangs must not block other look-ups."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[str]] = loop.create_future()

    def tell(error: OSError | None, addresses: Sequence[str] = ()) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(addresses)

    def ask() -> None:
        with suppress(RuntimeError):  # the loop has ended, so nobody waits
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            except (OSError, UnicodeError) as error:
                reason = error if isinstance(error, OSError) else OSError("the name cannot be written for the DNS")
                loop.call_soon_threadsafe(tell, reason)
            else:
                loop.call_soon_threadsafe(tell, None, list(dict.fromkeys(str(info[4][0]) for info in infos)))

    threading.Thread(target=ask, name="oncehook-dns", daemon=True).start()
    return await found
