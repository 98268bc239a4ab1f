"""The head of a request: what is called and what is said about it come in, bytes that can be sent go out.

No header can end its line or take the place of one that is ours, so nothing that a sender, a person or a setting wrote
can become a second request. `direct` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from oncehook.outbound.urls import host_of

_PORTS: Final = {"http": 80, "https": 443}
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_OURS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "expect", "te"})
"""Headers that say where a request goes and where it ends."""
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Origin(NamedTuple):
    """Where a connection leads; one to the same place can be used again."""

    scheme: str
    host: str
    port: int


@dataclass(slots=True, frozen=True)
class Target:
    """An address that is called, taken apart."""

    origin: Origin
    said: str
    """Host and port as they were written, for sentences about what went wrong."""
    start: str
    """What follows the method: path, version and the Host header."""


@lru_cache(maxsize=1024)
def target_of(url: str) -> Target:
    """The parts of an address that `read_url` has read. Raises ValueError for what no request line can carry."""
    parts = urlsplit(url)
    netloc = host_of(url)
    path = url.partition(f"://{netloc}")[2]
    if parts.scheme not in _PORTS or not parts.hostname or not _TARGET.fullmatch(path):
        raise ValueError("the address cannot be written into a request")
    usual = _PORTS[parts.scheme]
    port = parts.port or usual
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname.rstrip(".")
    named = host if port == usual else f"{host}:{port}"
    return Target(Origin(parts.scheme, parts.hostname, port), netloc, f" {path} HTTP/1.1\r\nHost: {named}\r\n")


def head_of(method: str, target: Target, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Everything up to the body. Raises ValueError, which repeats nothing, for what no header may carry."""
    lines = "\r\n".join([*map(": ".join, headers.items()), "", ""])
    ends = len(headers) + 1
    if lines.count("\r") != ends or lines.count("\n") != ends or "\0" in lines:
        raise ValueError("a header must not hold the end of a line")
    added = _added(method, tuple(headers), body is not None)
    length = "" if body is None and method in _BODILESS else f"Content-Length: {len(body or b'')}\r\n"
    return f"{method}{target.start}{added}{length}{lines}".encode()


@lru_cache(maxsize=512)
def _added(method: str, names: tuple[str, ...], has_body: bool) -> str:
    """The lines that a request gets unless it brings its own. Headers come under the same names again and again."""
    known = {name.lower() for name in names}
    if not all(map(_TOKEN.fullmatch, (method, *names))) or known & _OURS:
        raise ValueError("a header's name cannot be used")
    usual = {"Accept": "*/*", "Accept-Encoding": "identity"}
    if has_body:
        usual["Content-Type"] = "application/octet-stream"
    return "".join(f"{name}: {value}\r\n" for name, value in usual.items() if name.lower() not in known)
