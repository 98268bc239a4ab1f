"""The proxy of a client: from a setting, or from environment variables such as Webshare's.

`read_proxy` reads `http://user:password@host:port` or `socks5://…`. `proxy_from` finds such a value for an instance in
`ONCEHOOK_PROXY_<INSTANCE>`, `ONCEHOOK_PROXY`, or `PROXY_HOST` or `WEBSHARE_PROXY_HOST` and the variables beside it;
where there is none it raises, unless the value is `none`. Error messages never contain credentials. Used by the client,
by senders and wherever an instance is given its proxy.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import SplitResult, quote, unquote, urlsplit

from oncehook.errors import ConfigError
from oncehook.http_client.urls import host_of, read_url

NONE: Final = "none"
"""Value of an instance's own variable that turns the general proxy off."""

_FORM: Final = 'It is written like "http://user:password@proxy.example:8080" or "socks5://…".'
_PREFIXES: Final = ("PROXY", "WEBSHARE_PROXY")
_NAMES: Final = (
    "Set ONCEHOOK_PROXY, or PROXY_HOST or WEBSHARE_PROXY_HOST with _PORT, _USERNAME and _PASSWORD; "
    "ONCEHOOK_PROXY=none goes without."
)
_SCHEMES: Final[Mapping[str, Literal["http", "socks5"]]] = {"http": "http", "socks5": "socks5", "socks5h": "socks5"}


@dataclass(frozen=True, slots=True, repr=False)
class Proxy:
    """Address of a proxy, and the credentials for it."""

    scheme: Literal["http", "socks5"]
    """`socks5` looks names up at the proxy, which others call `socks5h`."""
    host: str
    port: int
    username: str = ""
    password: str = ""

    @property
    def address(self) -> str:
        """Address as it may be shown, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def credentials(self) -> str:
        """`user:password`; empty where there are none."""
        return f"{self.username}:{self.password}" if self.username or self.password else ""

    @property
    def authorization(self) -> dict[str, str]:
        """Header by which an HTTP proxy knows who asks; empty without credentials."""
        if not self.credentials:
            return {}
        return {"Proxy-Authorization": f"Basic {base64.b64encode(self.credentials.encode()).decode()}"}

    def makes_requests(self, url: str) -> bool:
        """Tell whether the proxy makes the request itself (HTTP without TLS) and may answer in its own name."""
        return self.scheme == "http" and url.startswith("http://")

    def __repr__(self) -> str:
        return f"Proxy({self.address})"


def read_proxy(text: str) -> Proxy:
    """Read the proxy of a setting. Raises ConfigError, which never repeats the setting."""
    parts, port = _split(text)
    if parts.scheme not in _SCHEMES:
        raise ConfigError("A proxy's address begins with http:// or socks5://.", hint=_FORM)
    if port is None:
        raise ConfigError("A proxy's address names its port.", hint=_FORM)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError("A proxy's address ends after its port.", hint=_FORM)
    return Proxy(
        _SCHEMES[parts.scheme],
        _host(parts.hostname or ""),
        port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )


def _split(text: str) -> tuple[SplitResult, int | None]:
    try:
        if not text.isprintable() or " " in text:
            raise ValueError
        parts = urlsplit(text)
        return parts, parts.port
    except ValueError:
        raise ConfigError("The proxy's address cannot be read.", hint=_FORM) from None


def _host(text: str) -> str:
    """Return a host in its canonical spelling."""
    try:
        return host_of(read_url(f"http://{f'[{text}]' if ':' in text else text}/")).strip("[]")
    except ConfigError:
        raise ConfigError("A proxy's address names no usable host.", hint=_FORM) from None


def proxy_from(environ: Mapping[str, str], instance: str | None = None) -> str | None:
    """Return the proxy that the environment names for this instance; None where it says `none`.

    Raises ConfigError where it names none: without the proxy that was asked for, the own address would show.
    """
    found = named_proxy(environ, instance)
    if found is None:
        raise ConfigError('proxy = "env", and the environment names no proxy.', hint=_NAMES)
    return None if found == NONE else found


def named_proxy(environ: Mapping[str, str], instance: str | None = None) -> str | None:
    """Return the proxy that variables set for this instance, possibly `none`; None where they set nothing."""
    name = re.sub(r"[^A-Z0-9]", "_", (instance or "").upper())  # SHOP_1 for shop-1
    own = environ.get(f"ONCEHOOK_PROXY_{name}", "").strip() if instance else ""
    named = own or environ.get("ONCEHOOK_PROXY", "").strip()
    return named or next(filter(None, (_from_pieces(environ, prefix) for prefix in _PREFIXES)), None)


def _from_pieces(environ: Mapping[str, str], prefix: str) -> str | None:
    host, port, username, password, protocol = (
        environ.get(f"{prefix}_{name}", "").strip() for name in ("HOST", "PORT", "USERNAME", "PASSWORD", "PROTOCOL")
    )
    if not host:
        return None
    if not port:
        raise ConfigError(f"{prefix}_HOST is set, and {prefix}_PORT is not.")
    user = f"{quote(username, safe='')}:{quote(password, safe='')}@" if username or password else ""
    where = f"[{host}]" if ":" in host else host
    return f"{(protocol or 'http').lower()}://{user}{where}:{port}"


# -- going through a proxy ---------------------------------------------------------------------


class ProxyFailed(Exception):
    """A proxy that did not open the tunnel. The text contains no credentials."""


_MOST_HEAD: Final = 16 << 10
"""Bytes that a proxy may send before the tunnel is open."""
_SOCKS_REFUSALS: Final = {
    1: "general failure",
    2: "not allowed by its rules",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "TTL expired",
    7: "command not supported",
    8: "address type not supported",
}


async def open_tunnel(
    loop: asyncio.AbstractEventLoop, opened: socket.socket, proxy: Proxy, scheme: str, host: str, port: int
) -> None:
    """Have a proxy tunnel a connected socket to the target. Raises ProxyFailed or OSError.

    Without TLS an HTTP proxy makes the request itself, so no tunnel is needed.
    """
    if proxy.scheme == "socks5":
        await _open_socks(loop, opened, proxy, host, port)
    elif scheme == "https":
        await _open_connect(loop, opened, proxy, host, port)


async def _open_connect(
    loop: asyncio.AbstractEventLoop, opened: socket.socket, proxy: Proxy, host: str, port: int
) -> None:
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head_lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *map(": ".join, proxy.authorization.items()), "", ""]
    await loop.sock_sendall(opened, "\r\n".join(head_lines).encode())
    head = b""
    while b"\r\n\r\n" not in head:
        piece = await loop.sock_recv(opened, 4096)
        head += piece
        if not piece or len(head) > _MOST_HEAD:
            raise ProxyFailed(f"the proxy {proxy.host} closed the connection before it answered")
    found = re.match(rb"HTTP/1\.[01] ([0-9]{3})[ \r]", head)
    if found is None:
        raise ProxyFailed(f"the proxy {proxy.host} did not answer in HTTP")
    if found[1] == b"407":
        raise ProxyFailed(f"the proxy {proxy.host} does not take these credentials")
    if found[1][:1] != b"2":
        raise ProxyFailed(f"the proxy does not lead to {target}: HTTP {found[1].decode()}")
    if not head.endswith(b"\r\n\r\n"):  # in TLS the client speaks first, so the proxy must not have sent more
        raise ProxyFailed(f"the proxy {proxy.host} said more than an answer")


async def _open_socks(
    loop: asyncio.AbstractEventLoop, opened: socket.socket, proxy: Proxy, host: str, port: int
) -> None:
    """Greet, log in, and ask for the target (RFC 1928, 1929). The proxy looks up the name."""

    async def receive(length: int) -> bytes:
        received = b""
        while len(received) < length:
            piece = await loop.sock_recv(opened, length - len(received))
            if not piece:
                raise ProxyFailed(f"the proxy {proxy.host} closed the connection before it answered")
            received += piece
        return received

    await loop.sock_sendall(opened, b"\x05\x02\x00\x02" if proxy.credentials else b"\x05\x01\x00")
    version, method = await receive(2)
    if version != 5:
        raise ProxyFailed(f"the proxy {proxy.host} did not answer in SOCKS5")
    if method == 2 and proxy.credentials:
        user, password = proxy.username.encode(), proxy.password.encode()
        if len(user) > 255 or len(password) > 255:
            raise ProxyFailed(f"the proxy {proxy.host} cannot be given so long a user name or password")
        await loop.sock_sendall(opened, bytes([1, len(user)]) + user + bytes([len(password)]) + password)
        if (await receive(2))[1] != 0:
            raise ProxyFailed(f"the proxy {proxy.host} does not take these credentials")
    elif method != 0:
        raise ProxyFailed(f"the proxy {proxy.host} does not take these credentials")
    await loop.sock_sendall(opened, b"\x05\x01\x00" + _socks_address(host) + port.to_bytes(2))
    _, refusal, _, form = await receive(4)
    if refusal:
        reason = _SOCKS_REFUSALS.get(refusal, f"error {refusal}")
        raise ProxyFailed(f"the proxy {proxy.host} does not lead there: {reason}")
    length = {1: 4, 4: 16}.get(form)
    await receive((length if length is not None else (await receive(1))[0]) + 2)


def _socks_address(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        name = host.rstrip(".").encode()
        return bytes([3, len(name)]) + name
    return bytes([1 if address.version == 4 else 4]) + address.packed
