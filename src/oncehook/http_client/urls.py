"""The canonical spelling of a URL: `read_url` takes what a person wrote and returns what is called.

Whatever two programs could read differently (user names, odd numbers, other alphabets, control characters) is refused
or normalised before the host is checked (S20). Destinations call it when they are built.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from oncehook.errors import ConfigError

_HOST: Final = re.compile(
    r"(?=.{1,253}\.?$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.?"
)
_NUMBER: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
_AS_IT_IS: Final = "%/?:@!$&'()*+,;=-._~[]|"
"""Characters that stay as they are in path and query: an address may be signed, so legal ones are not re-encoded."""

_FORM: Final = 'It is written like "https://example.org/hook".'


def read_url(text: str) -> str:
    """Return the URL as it will be called. Raises ConfigError, which never repeats the URL."""
    parts = _split(text)
    if parts.scheme not in ("http", "https"):
        raise ConfigError("A destination's address begins with http:// or https://.", hint=_FORM)
    if "@" in parts.netloc:
        raise ConfigError(
            "A destination's address must not hold a user name or password.",
            hint="Put them into headers, by reference.",
        )
    if parts.fragment:
        raise ConfigError("A destination's address must not hold a fragment (#…): it would never be sent.")
    host = _host(parts.hostname or "")
    port = f":{parts.port}" if parts.port is not None else ""
    query = f"?{quote(parts.query, safe=_AS_IT_IS)}" if parts.query else ""
    return f"{parts.scheme}://{host}{port}{quote(parts.path or '/', safe=_AS_IT_IS)}{query}"


def _split(text: str) -> SplitResult:
    # urlsplit drops tabs and line breaks, and keeps a backslash, which browsers read as a slash
    if not text.isprintable() or " " in text or "\\" in text:
        raise ConfigError(
            "A destination's address must not hold spaces, backslashes or control characters.", hint=_FORM
        )
    try:
        parts = urlsplit(text)
        usable = parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError("A destination's address cannot be read.", hint=_FORM)
    return parts


def _host(text: str) -> str:
    if ":" in text:
        return f"[{_ipv6(text)}]"
    name = text.lower() if text.isascii() else _ascii(text)
    if not _HOST.fullmatch(name):
        raise ConfigError("A destination's address names no usable host.", hint=_FORM)
    return _ipv4(name) if _NUMBER.fullmatch(name) else name


def _ipv6(text: str) -> IPv6Address:
    try:
        address = IPv6Address(text)
    except ValueError:
        raise ConfigError("A destination's address names no usable host.", hint=_FORM) from None
    if address.scope_id is not None:
        raise ConfigError("A destination's address must not name a network interface (%…).")
    return address


def _ipv4(name: str) -> str:
    """Read a host that ends in a number as IPv4 in any spelling: octal, hexadecimal, short, one number."""
    try:
        return str(IPv4Address(socket.inet_aton(name.removesuffix("."))))
    except OSError:
        raise ConfigError("A destination's address ends in a number that is no IPv4 address.", hint=_FORM) from None


def _ascii(name: str) -> str:
    """Encode an international name for the DNS: IDNA 2008 after the mapping of UTS 46, as browsers do."""
    import idna  # Python's own codec implements IDNA 2003, in which "faß.de" is another domain, "fass.de"

    try:
        return idna.encode(name, uts46=True).decode().lower()
    except UnicodeError:
        raise ConfigError("A destination's address names no usable host.", hint=_FORM) from None


def with_path(url: str, path: str) -> str:
    """Return a base URL with a path appended. Raises ConfigError, which repeats neither of them."""
    if "?" in url or "#" in url:
        raise ConfigError("A path cannot follow an address that has a query.", hint="Put the query into the path.")
    # We add the slash ourselves: a path that begins with "@" or "." would otherwise become part of the host.
    return f"{url.rstrip('/')}/{path.lstrip('/')}"


def shown_url(url: str, *, is_secret: bool = False) -> str:
    """Return a URL as it may be shown: query parameters without values; for a secret URL, the host only."""
    if is_secret:
        return f"{urlsplit(url).scheme}://{host_of(url)}/…"
    before, mark, query = url.partition("?")
    return before + mark + "&".join(_shown_parameter(piece) for piece in query.split("&") if piece)


def _shown_parameter(piece: str) -> str:
    name, sign, _ = piece.partition("=")
    return f"{name}=…" if sign else "…"


def secret_parts(url: str) -> set[str]:
    """Return the parts of a secret URL to mask: everything but the host, as a whole and in pieces."""
    parts = urlsplit(url)
    target = url.partition(f"://{parts.netloc}")[2]
    pieces = {*parts.path.split("/"), *(pair.partition("=")[2] for pair in parts.query.split("&"))}
    return {url, target, parts.path, *pieces, *map(unquote, pieces)}


def is_address(host: str) -> bool:
    """Tell whether a host is an IP address, which needs no look-up."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def host_of(url: str) -> str:
    """Return host and port, for sentences about what went wrong."""
    return urlsplit(url).netloc
