"""The peer address of a request: that of the socket, or the one that a trusted proxy names.

It is read for every arrival. An unknown one is `unknown`, which no list of networks contains: an unknown address must
never count as local.
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
    # Missing for a Unix socket or a test client, and for a sender that was gone already.
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
    """Return the unit of a limit per address: an IPv4 address, or the /64 of an IPv6 one.

    An owner of one IPv6 address usually has its whole /64, so a limit per single address would limit nobody.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Network((int(parsed) >> 64 << 64, 64)))
    return plain(address)


def is_shared_address(address: str, trusted: Sequence[Network]) -> bool:
    """Tell whether many senders share this address: a proxy of ours, or a tunnel on this machine."""
    return address != UNKNOWN and (ip_address(address).is_loopback or is_within(address, trusted))


def peer_finder(trusted: Sequence[Network]) -> PeerOf:
    """Return a function that finds the sender's address. `X-Forwarded-For` counts only from a configured proxy
    (S16)."""
    if not trusted:
        return direct_peer

    def peer_of(scope: Scope) -> str:
        address = direct_peer(scope)
        if not is_within(address, trusted):
            return address
        named = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        chain = [part.strip() for part in b",".join(named).decode("latin-1").split(",") if part.strip()]
        # The last address that is not one of our proxies; anybody could have written those before it.
        for hop in map(plain, reversed(chain)):
            if not is_within(hop, trusted):
                return hop
        return address

    return peer_of
