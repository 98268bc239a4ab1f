"""Links to media: whoever wrote a message must not have the API fetch from inside the network it stands in (S20).

A link comes in, and out goes why it may not be handed on. Only what is written as an address can be judged: a name is
looked up where the API is, which for Meta is elsewhere. Senders ask about links in messages, not about those that they
make themselves to their own storage.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from oncehook.errors import ConfigError
from oncehook.http_client.addresses import Guard
from oncehook.http_client.urls import read_url

_LOOPBACK: Final = "127.0.0.1"


def why_not(link: str, guard: Guard) -> str | None:
    """Why this link may not be fetched, as the end of a sentence; None when it may."""
    try:
        host = urlsplit(read_url(link.partition("#")[0])).hostname or ""
    except ConfigError:
        return "is no plain web address"
    address = _address(host)
    what = None if address is None else guard.refuses(address)
    return None if what is None else f"leads to no public address ({what})"


def _address(host: str) -> str | None:
    """The address that a host is, in whatever spelling it was written; None for names."""
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):  # the machine that looks it up (RFC 6761)
        return _LOOPBACK
    return name if ":" in name or name.rpartition(".")[2].isdigit() else None
