"""Who asks at the desk, and what they may do: bearer tokens and three roles.

The API shows every request to `Access.identify` and gets an `Identity` or None. Tokens are kept as hashes only and
compared in constant time; a cookie is no credential here (S29). A host application may decide instead, with a function
of its own (`Authorize`).
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request

from oncehook.config.tables import TokenConfig
from oncehook.errors import ConfigError, Forbidden
from oncehook.model import Arrival, Headers
from oncehook.receive import is_direct
from oncehook.secret import Secret
from oncehook.sessions import prove
from oncehook.verify import same
from oncehook.web.peers import PeerOf, direct_peer

log = logging.getLogger("oncehook.web")

LONGEST_TOKEN: Final = 4096
LONGEST_NAME: Final = 200


class Role(IntEnum):
    """What somebody may do; each may do what those before it may."""

    viewer = 1
    """Look."""
    operator = 2
    """Act: replay, retry, discard, pause."""
    admin = 3
    """Everything."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks: the name that goes into the audit log, and the role."""

    name: str
    role: Role


RoleName = Literal["viewer", "operator", "admin"]
Authorized = RoleName | tuple[str, RoleName] | None
"""A host application's decision: the person's name and role, a role alone, or None for nobody."""
Authorize = Callable[[Request], Authorized | Awaitable[Authorized]]
"""A host application's function that decides, given each request."""
R = TypeVar("R")
AuthorizeBlocking = Callable[[R], Authorized]
"""The same for a framework without an event loop, given its own kind of request."""

UNNAMED: Final = "host"
"""The actor in the audit log where the host application says a role and no name."""


async def authorized(authorize: Authorize, request: Request) -> Identity | None:
    """Ask the host application who makes this request. A decision that cannot be read lets nobody in."""
    answer: Any = authorize(request)
    if inspect.isawaitable(answer):
        answer = await answer
    if answer is None:
        return None
    name, role = answer if isinstance(answer, tuple) and len(answer) == 2 else (UNNAMED, answer)
    if not isinstance(name, str) or not name.strip() or not isinstance(role, str) or role not in Role.__members__:
        hint = 'Return (name, role) with a role of "viewer", "operator" or "admin"; a role alone; or None for nobody.'
        log.error("authorize.invalid", extra={"fields": {"answer": repr(answer)[:LONGEST_NAME], "hint": hint}})
        return None
    return Identity(name.strip()[:LONGEST_NAME], Role[role])


class Access:
    """Knows the tokens, and who holds them."""

    def __init__(
        self,
        admin_token: Secret | None = None,
        tokens: Sequence[TokenConfig] = (),
        local_token: str = "",
        *,
        authorize: Authorize | None = None,
        peer_of: PeerOf = direct_peer,
    ) -> None:
        """Reads every token once. Raises ConfigError for one that is missing, empty, or given to two holders."""
        self._authorize = authorize
        self._peer_of = peer_of
        self._local = _hash(local_token.encode()) if local_token else None
        self._holders: list[tuple[bytes, Identity]] = []
        if admin_token is not None:
            self._add(admin_token, Identity("admin", Role.admin))
        for token in tokens:
            self._add(token.token, Identity(token.name, Role[token.role]))

    def _add(self, token: Secret, identity: Identity) -> None:
        digest = _hash(token.reveal())
        for other, holder in self._holders:
            if same(other, digest):
                raise ConfigError(f'"{holder.name}" and "{identity.name}" have the same token.')
        self._holders.append((digest, identity))

    @property
    def has_tokens(self) -> bool:
        """Whether there is any token to know."""
        return bool(self._holders)

    def identify(self, headers: Headers, peer: str) -> Identity | None:
        """Who holds the bearer token of this request. All tokens are compared, so that time tells nothing (S3)."""
        presented = _bearer(headers)
        if presented is None:
            return None
        digest = _hash(presented)
        found: Identity | None = None
        for known, identity in self._holders:
            if same(known, digest):
                found = identity
        if self._local is not None and same(self._local, digest) and is_local(headers, peer):
            found = Identity("local", Role.admin)
        return found

    def vouches(self, session: str, proof: bytes) -> Identity | None:
        """Whose token a session was begun with, while there is such a token."""
        found: Identity | None = None
        for known, identity in self._holders:
            if same(prove(session, known), proof):
                found = identity
        if self._local is not None and same(prove(session, self._local), proof):
            found = Identity("local", Role.admin)
        return found

    async def of(self, request: Request) -> Identity | None:
        """Who asks: the holder of the token, or whom the host application lets in."""
        found = self.identify(request.scope["headers"], self._peer_of(request.scope))
        if found is not None or self._authorize is None:
            return found
        found = await authorized(self._authorize, request)
        if found is not None and request.method not in ("GET", "HEAD") and not is_same_origin(request):
            # The host may go by a cookie, which a browser also sends for a stranger's page.
            raise Forbidden("This change comes from another site.")
        return found


def _bearer(headers: Headers) -> bytes | None:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:  # two of them: a proxy may have looked at the other one
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    return token if scheme.lower() == b"bearer" and 0 < len(token) <= LONGEST_TOKEN else None


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def is_local(headers: Headers, peer: str) -> bool:
    """Whether a request comes straight from this machine and was meant for it (DESIGN.md 8.11).

    Not through a tunnel or a proxy that ends here, nor from a browser that was told that a stranger's name is ours.
    """
    # A program that hands over an arrival has no peer. Here an unknown peer is a stranger.
    return bool(peer) and is_direct(Arrival("", headers, b"", peer=peer)) and _is_own_host(headers)


def _is_own_host(headers: Headers) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    try:
        host = urlsplit(f"//{hosts[0]}").hostname or ""
        address = ip_address(host)
    except ValueError:
        return hosts[0].partition(":")[0].lower() == "localhost"
    return address.is_loopback or address.is_unspecified


def is_same_origin(request: Request) -> bool:
    """Whether a browser made this request for our own page, or no browser made it at all (S29)."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")
