"""The address at the other end of a request: that of the socket, or the one that a trusted proxy names.

Every arrival is asked for it. One that is not known is `unknown`, which no list of networks contains: an address
that we do not know must never look like a program of our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, Sequence
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any, Final

from oncehook.sources import Network

Scope = MutableMapping[str, Any]
PeerOf = Callable[[Scope], str]

UNKNOWN: Final = "unknown"
_DRESSED: Final = re.compile(r"\[(?P<six>[^]]*)](?::[0-9]+)?|(?P<four>[0-9.]+):[0-9]+")


def plain(text: str) -> str:
    """Normalise a peer address: strip the port and unwrap IPv4-mapped IPv6."""
    dressed = _DRESSED.fullmatch(text)
    try:
        address = ip_address(dressed["six"] or dressed["four"] if dressed else text)
    except ValueError:
        return UNKNOWN
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def direct_peer(scope: Scope) -> str:
    # Missing for a socket path or a test client, and also for a sender that was gone before we could ask.
    client: tuple[str, int] | None = scope.get("client")
    if not client:
        return UNKNOWN
    return plain(client[0]) if ":" in client[0] else client[0]


def is_within(address: str, networks: Sequence[Network]) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)


def network_of(address: str) -> str:
    """Return what a count per address counts: an IPv4 address, or the /64 of an IPv6 one.

    Because whoever has one IPv6 address has its whole /64, a count of single ones would bound nobody.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Network((int(parsed) >> 64 << 64, 64)))
    return plain(address)


def is_shared_address(address: str, trusted: Sequence[Network]) -> bool:
    """Tell whether a share per address would be shared by many: a proxy of ours, or a tunnel on this machine."""
    return address != UNKNOWN and (ip_address(address).is_loopback or is_within(address, trusted))


def peer_finder(trusted: Sequence[Network]) -> PeerOf:
    """Find the sender's address. `X-Forwarded-For` is believed only when a configured proxy says it (S16)."""
    if not trusted:
        return direct_peer

    def peer_of(scope: Scope) -> str:
        address = direct_peer(scope)
        if not is_within(address, trusted):
            return address
        named = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        chain = [part.strip() for part in b",".join(named).decode("latin-1").split(",") if part.strip()]
        # The last address no proxy of ours vouches for; what is before it anybody could have written.
        for hop in map(plain, reversed(chain)):
            if not is_within(hop, trusted):
                return hop
        return address

    return peer_of
