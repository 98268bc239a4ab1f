"""The hosts that an address from an event may name.

An entry of `allow_hosts` is a host, `*.` before a domain for every host below it, or an IP address; with a port where
it is not the usual one, and with `http://` where the address may be without TLS. Whatever an entry does not say is not
allowed: an event may not choose another port or scheme. Compared are canonical spellings, as `read_url` returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from oncehook.errors import ConfigError
from oncehook.http_client.urls import is_address, read_url

_PORTS: Final = {"https": 443, "http": 80}
_BELOW: Final = "*."
_FORM: Final = 'write for example "hooks.example.org", "*.example.org" or "http://10.0.0.7:8080"'


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of the list, read."""

    scheme: str
    host: str
    """Canonical; of `*.example.org` it is `.example.org`."""
    port: int

    def allows(self, scheme: str, host: str, port: int) -> bool:
        if (scheme, port) != (self.scheme, self.port):
            return False
        return host.endswith(self.host) if self.host.startswith(".") else host == self.host


def read_allowed_host(text: str) -> AllowedHost:
    """Read an entry of the list. Raises ConfigError."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "https", text
    is_below = rest.startswith(_BELOW)
    if scheme not in _PORTS or any(mark in rest for mark in "/?#@") or "*" in rest.removeprefix(_BELOW):
        raise ConfigError(f'"{text}" is not a host; {_FORM}')
    try:
        parts = urlsplit(read_url(f"{scheme}://{rest.removeprefix(_BELOW)}/"))
    except ConfigError:
        raise ConfigError(f'"{text}" is not a host; {_FORM}') from None
    host = _plain(parts.hostname or "")
    if is_below and (is_address(host) or "." not in host):
        raise ConfigError(f'"{text}" is not a domain of somebody\'s own; {_FORM}')
    return AllowedHost(scheme, f".{host}" if is_below else host, parts.port or _PORTS[scheme])


def _plain(host: str) -> str:
    """Return a host without the dot that ends an absolute name: with and without it is one host."""
    return host.removesuffix(".")


class AllowedHosts:
    """The list, compared with addresses."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._hosts = [read_allowed_host(text) for text in entries]

    def allow(self, url: str) -> str | None:
        """Return an address that `read_url` has read as it may be called, without a dot after its host; None where the
        list does not allow it."""
        parts = urlsplit(url)
        host, port = _plain(parts.hostname or ""), parts.port or _PORTS[parts.scheme]
        if not any(one.allows(parts.scheme, host, port) for one in self._hosts):
            return None
        dotted = (parts.hostname or "").endswith(".")
        return url.replace(f"{host}.", host, 1) if dotted else url
