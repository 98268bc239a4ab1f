"""Which addresses may be called: our own table of what is not the public internet, and who may go there all the same.

The client asks a `Guard` about every address that a name leads to, and again about the very address a socket is about
to connect to. The table is our own, because `ipaddress.is_global` changes from one Python to the next and lets tunnels
through (S18).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    # What is left outside 2000::/3, which is all that is given out for public use.
    ("::/3", "reserved"),
    ("4000::/2", "reserved"),
    ("8000::/1", "reserved"),
)
"""Networks that are not called unless a destination says so, the narrower before the wider, and what they are."""

_DENIED: Final[Sequence[tuple[Network, str]]] = [(ip_network(text), what) for text, what in TABLE]
_NAT64: Final = IPv6Network("64:ff9b::/96")
_COMPATIBLE: Final = IPv6Network("::/96")
_TRANSLATED: Final = IPv6Network("::ffff:0:0:0/96")


class AddressRefused(OSError):
    """The guard does not let this address be called. An OSError, so that the client goes on to the next address."""


class Guard:
    """Says of an address whether it may be called: public ones always, others when they are allowed."""

    def __init__(self, allow_private: bool | Sequence[Network] = False) -> None:
        self._everything = allow_private is True
        self._allowed = () if isinstance(allow_private, bool) else tuple(allow_private)

    def check(self, text: str) -> None:
        """Raise AddressRefused when this address may not be called."""
        what = self.refuses(text)
        if what is not None:
            raise AddressRefused(f"{text} is not a public address ({what})")

    def refuses(self, text: str) -> str | None:
        """What this address is, when it may not be called; None when it may."""
        try:
            address = ip_address(text.partition("%")[0])
        except ValueError:
            return "no address"
        return self._refuses(address)

    def _refuses(self, address: Address) -> str | None:
        what = None if self._everything else denied(address)
        if what is None:
            return None
        if not any(address in network for network in self._allowed):
            return what
        # Whoever allows a tunnel has not yet allowed what lies behind it.
        inner = embedded(address)
        return None if inner is None else self._refuses(inner)


def denied(address: Address) -> str | None:
    """What the table says about an address; None when it is public."""
    return next((what for network, what in _DENIED if address in network), None)


def embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 address stands for, where its prefix says so."""
    if isinstance(address, IPv4Address):
        return None
    found = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
    if found is None and any(address in network for network in (_NAT64, _COMPATIBLE, _TRANSLATED)):
        return None if int(address) <= 1 else IPv4Address(int(address) & 0xFFFF_FFFF)
    return found


def is_address(host: str) -> bool:
    """Whether a host is written as an address, so that no name has to be looked up."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
