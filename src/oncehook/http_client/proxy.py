"""The proxy a client goes through: read from one word, or from the environment in the form that Webshare hands out.

`read_proxy` takes `http://user:password@host:port` or `socks5://…`; `proxy_from` finds such a word for an instance in
`ONCEHOOK_PROXY_<INSTANCE>`, `ONCEHOOK_PROXY`, or `PROXY_HOST` or `WEBSHARE_PROXY_HOST` and its companions, and refuses
to go without one unless that is said (`none`). Neither ever repeats credentials.
Called by the client, by senders and by whoever tells an instance which proxy to use.
"""

from __future__ import annotations
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import SplitResult, quote, unquote, urlsplit
from oncehook.errors import ConfigError
from oncehook.http_client.urls import host_of, read_url

NONE: Final = "none"
"""What an instance's own variable says to go without the proxy that all others use."""

_FORM: Final = 'It is written like "http://user:password@proxy.example:8080" or "socks5://…".'
_PREFIXES: Final = ("PROXY", "WEBSHARE_PROXY")
_NAMES: Final = (
    "Set ONCEHOOK_PROXY, or PROXY_HOST or WEBSHARE_PROXY_HOST with _PORT, _USERNAME and _PASSWORD; "
    "ONCEHOOK_PROXY=none goes without."
)
_SCHEMES: Final[Mapping[str, Literal["http", "socks5"]]] = {"http": "http", "socks5": "socks5", "socks5h": "socks5"}


@dataclass(frozen=True, slots=True, repr=False)
class Proxy:
    """Where a proxy is, and who may use it."""

    scheme: Literal["http", "socks5"]
    """`socks5` looks names up at the proxy, which others call `socks5h`."""
    host: str
    port: int
    username: str = ""
    password: str = ""

    @property
    def address(self) -> str:
        """What may be shown: without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def credentials(self) -> str:
        """`user:password`; empty where there are none."""
        return f"{self.username}:{self.password}" if self.username or self.password else ""

    def makes_requests(self, url: str) -> bool:
        """Whether it asks for this address itself, and may answer in its own name, instead of opening a tunnel."""
        return self.scheme == "http" and url.startswith("http://")

    def __repr__(self) -> str:
        return f"Proxy({self.address})"


def read_proxy(text: str) -> Proxy:
    """The proxy that a setting means. Raises ConfigError, whose sentence never repeats it."""
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
    """One spelling for a proxy's host as for any other."""
    try:
        return host_of(read_url(f"http://{f'[{text}]' if ':' in text else text}/")).strip("[]")
    except ConfigError:
        raise ConfigError("A proxy's address names no usable host.", hint=_FORM) from None


def proxy_from(environ: Mapping[str, str], instance: str | None = None) -> str | None:
    """Return the proxy that the environment names for this instance, for `read_proxy`; None where it says `none`.

    Raises ConfigError where it names none: who asked for a proxy must not be seen without one.
    """
    found = named_proxy(environ, instance)
    if found is None:
        raise ConfigError('proxy = "env", and the environment names no proxy.', hint=_NAMES)
    return None if found == NONE else found


def named_proxy(environ: Mapping[str, str], instance: str | None = None) -> str | None:
    """Return what the environment says about this instance's proxy, which may be `none`; None where it says nothing."""
    own = environ.get(f"ONCEHOOK_PROXY_{_variable(instance)}", "").strip() if instance else ""
    named = own or environ.get("ONCEHOOK_PROXY", "").strip()
    return named or next(filter(None, (_from_pieces(environ, prefix) for prefix in _PREFIXES)), None)


def _variable(instance: str) -> str:
    """`shop-1` is `SHOP_1` in a variable's name."""
    return re.sub(r"[^A-Z0-9]", "_", instance.upper())


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
