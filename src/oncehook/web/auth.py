"""Access to the API: bearer tokens, three roles, and one throttle for wrong tokens and passwords everywhere.

The API passes every request to `Access.identify` and gets an `Identity` or None. Only hashes of tokens are kept, and
compared in constant time; a cookie is no credential here (S29). A host application may decide instead, with a function
of its own (`Authorize`).
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from oncehook import clock
from oncehook.admin import Admin
from oncehook.errors import ConfigError, Forbidden, Refused, StoreError, TokenExpired, Unauthorized
from oncehook.ingest import is_direct
from oncehook.logs import ration
from oncehook.model import Arrival, Headers, Person, RoleName, Scope
from oncehook.secret import Secret, is_random
from oncehook.settings.tables import TokenConfig
from oncehook.store.base import TOKEN_USE_SECONDS
from oncehook.verify import same
from oncehook.web.peers import PeerOf, direct_peer, network_of

if TYPE_CHECKING:  # what `serve` needs before its first page
    from starlette.requests import Request

MOST_NETWORKS: Final = 1000
"""Networks whose wrong tokens are remembered."""
TRIES: Final = 5
"""Wrong tokens from one network before it must wait."""
LONGEST_WAIT: Final = 60.0
ALL_TRIES: Final = 200
"""Wrong tokens from everywhere within a minute; beyond that, no guessable token is accepted."""


class TooManyTries(Refused):
    """Too many wrong tokens or passwords; wait a little."""

    code = "too_many_tries"
    status = 429

    def __init__(self, seconds: float) -> None:
        super().__init__(hint=f"Try again in {seconds:.0f} s.")
        self.retry_after = seconds


class Throttle:
    """A throttle for wrong tokens: each one beyond the first few doubles the wait of its network."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._minute = 0
        self._in_minute = 0

    def check(self, network: str) -> None:
        """Raise TooManyTries while this network, or everybody, must wait."""
        now = clock.steady()
        tries, last = self._wrong.get(network, (0, now))
        wait = 0.0 if tries < TRIES else min(2.0 ** (tries - TRIES + 1), LONGEST_WAIT) - (now - last)
        if wait <= 0 and self._in_minute >= ALL_TRIES and self._minute == int(now // 60):
            wait = 60 - now % 60
        if wait > 0:
            raise TooManyTries(wait)

    def wrong(self, network: str) -> None:
        now = clock.steady()
        tries, last = self._wrong.pop(network, (0, now))
        self._wrong[network] = (1 if now - last > 10 * LONGEST_WAIT else tries + 1, now)
        while len(self._wrong) > MOST_NETWORKS:
            self._wrong.popitem(last=False)
        minute = int(now // 60)
        self._minute, self._in_minute = minute, (self._in_minute if minute == self._minute else 0) + 1

    def right(self, network: str) -> None:
        self._wrong.pop(network, None)


SESSION_SECONDS: Final = 12 * 3600.0


def hash_of(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def prove(name: str, voucher: bytes) -> bytes:
    """Return a proof that a session was begun with this voucher; it can be checked only with the session's name."""
    return hmac.digest(name.encode("utf-8", "surrogateescape"), voucher, "sha256")


LINK_SECONDS: Final = 600.0
"""Seconds for which a one-time link is valid."""


class OneTimeLink:
    """The link that logs somebody at this machine in, once. A new one makes the one before invalid."""

    def __init__(self) -> None:
        self._digest: bytes | None = None
        self._until = 0.0

    def new(self) -> str:
        """Return the token of a new link, valid for 10 minutes."""
        token = clock.random_bytes(32).hex()
        self._digest, self._until = hash_of(token), clock.steady() + LINK_SECONDS
        return token

    def take(self, token: str) -> bool:
        """Tell whether the token is that of the link, in time; it is not a second time."""
        if self._digest is None or clock.steady() > self._until or not same(self._digest, hash_of(token)):
            return False
        self._digest = None
        return True


log = logging.getLogger("oncehook.web")

LONGEST_TOKEN: Final = 4096
LONGEST_NAME: Final = 200


class Role(IntEnum):
    """A role of `model.RoleName` with its rank: each may do what lower ones may."""

    viewer = 1
    operator = 2
    """Act: replay, retry, discard, pause."""
    admin = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """The person or program that asks: its name in the audit log, its role, and what it may see."""

    name: str
    role: Role
    sources: frozenset[str] | None = None
    """The sources that it sees and acts on; None: all."""
    accounts: frozenset[str] | None = None
    """The accounts that it sees and acts on; None: all, and what has none."""
    payloads: bool = True
    """Whether it sees bodies, header values, previews and answers."""
    expires: datetime | None = None
    """The end of its token's validity."""
    is_token: bool = False
    """Whether the settings name it, so that its last use is stored."""

    @property
    def scope(self) -> Scope:
        return Scope(self.sources, self.accounts)

    def admin(self, admin: Admin) -> Admin:
        return admin.seen_by(self.name, self.scope, payloads=self.payloads)

    @property
    def has_expired(self) -> bool:
        return self.expires is not None and clock.now_utc() >= self.expires


Authorized = RoleName | tuple[str, RoleName] | Person | None
"""A host application's decision: the person's name and role, a role alone, a `Person`, or None for nobody."""
Authorize = Callable[["Request"], Authorized | Awaitable[Authorized]]
"""A host application's function that decides, given each request."""
R = TypeVar("R")
AuthorizeBlocking = Callable[[R], Authorized]
"""Decide who a request is from, for a framework without an event loop and with its own kind of request."""

UNNAMED: Final = "host"
"""The actor in the audit log where the host application gives a role without a name."""


async def authorize_request(authorize: Authorize, request: Request) -> Identity | None:
    """Ask the host application who makes this request. An unreadable decision admits nobody."""
    answer: Any = authorize(request)
    if inspect.isawaitable(answer):
        answer = await answer
    if answer is None:
        return None
    scope, payloads = Scope(), True
    if isinstance(answer, Person):
        scope = Scope(_limit(answer.sources), _limit(answer.accounts))
        answer, payloads = (answer.name, answer.role), answer.payloads
    name, role = answer if isinstance(answer, tuple) and len(answer) == 2 else (UNNAMED, answer)
    if not isinstance(name, str) or not name.strip() or not isinstance(role, str) or role not in Role.__members__:
        hint = 'Return (name, role) with a role of "viewer", "operator" or "admin"; a role; a Person; or None.'
        fields = {"answer": repr(answer)[:LONGEST_NAME], "hint": hint}
        ration.log(log, logging.ERROR, "authorize.invalid", fields, kind="answer")
        return None
    return Identity(name.strip()[:LONGEST_NAME], Role[role], scope.sources, scope.accounts, payloads)


def _limit(names: Collection[str | int] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(map(str, names))


async def _ignore_use(name: str) -> None:
    """Do nothing."""


class OnRefused(Protocol):
    """A function called for each refusal: with the way (`token`, `password`, `oidc`), the network, and the reason."""

    def __call__(self, way: str, network: str, reason: str) -> None: ...


def _ignore_refusal(way: str, network: str, reason: str) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Holder:
    digest: bytes
    identity: Identity
    is_unguessable: bool


_LOCAL: Final = _Holder(b"", Identity("local", Role.admin), is_unguessable=True)


class Access:
    """The tokens and their holders."""

    def __init__(
        self,
        admin_token: Secret | None = None,
        tokens: Sequence[TokenConfig] = (),
        local_token: str = "",
        *,
        authorize: Authorize | None = None,
        peer_of: PeerOf = direct_peer,
        on_refused: OnRefused = _ignore_refusal,
        note_use: Callable[[str], Awaitable[None]] = _ignore_use,
        link: OneTimeLink | None = None,
    ) -> None:
        """Read every token once. Raises ConfigError for one that is missing, empty, or has two holders.

        `note_use` is called with the name of a token in use, once a minute.
        """
        self.throttle = Throttle()
        self.link = link
        """The way into the dashboard for somebody at this machine; None where there is no dashboard of our own."""
        self._note_use = note_use
        self._used: dict[str, float] = {}
        self._authorize = authorize
        self._peer_of = peer_of
        self._on_refused = on_refused
        self._local = hash_token(local_token.encode()) if local_token else None
        self._holders: list[_Holder] = []
        if admin_token is not None:
            self._add(admin_token, Identity("admin", Role.admin, is_token=True))
        for token in tokens:
            sources, accounts = _limit(token.sources), _limit(token.accounts)
            holder = Identity(
                token.name, Role[token.role], sources, accounts, token.payloads, token.expires, is_token=True
            )
            self._add(token.token, holder)

    def _add(self, token: Secret, identity: Identity) -> None:
        value = token.reveal()
        digest = hash_token(value)
        for holder in self._holders:
            if same(holder.digest, digest):
                raise ConfigError(f'"{holder.identity.name}" and "{identity.name}" have the same token.')
        self._holders.append(_Holder(digest, identity, is_random(value)))

    @property
    def tokens_digest(self) -> bytes:
        """Return a digest of all tokens: sessions that were begun without a token end when it changes."""
        return hash_token(b"".join(sorted(holder.digest for holder in self._holders)))

    @property
    def has_tokens(self) -> bool:
        return bool(self._holders)

    @property
    def holders(self) -> Sequence[Identity]:
        return [holder.identity for holder in self._holders]

    def identify(self, headers: Headers, peer: str) -> Identity | None:
        """Return the holder of this request's bearer token. Raises TooManyTries, and TokenExpired for one that has
        expired."""
        presented = _bearer(headers)
        return None if presented is None else self.find_holder(presented, headers, peer, "token")

    def find_holder(self, token: bytes, headers: Headers, peer: str, way: str) -> Identity | None:
        """Return the holder of a token that came by this `way`, or None. Raises TooManyTries.

        All tokens are compared, so that timing reveals nothing (S3). While a network must wait, a right token is
        refused like a wrong one; otherwise guessing could go on. A token that nobody could guess passes, so that others
        behind the same address cannot lock its holder out.
        """
        digest = hash_token(token)
        found: _Holder | None = None
        for holder in self._holders:
            if same(holder.digest, digest):
                found = holder
        if self._local is not None and same(self._local, digest) and is_local(headers, peer):
            found = _LOCAL
        if found is None or not found.is_unguessable:
            if not self._holders and self._local is None:
                return None  # nothing to guess
            network = network_of(peer)
            self.check_tries(network, way)
            if found is None:
                self.note_wrong(network, way)
                return None
            self.throttle.right(network)
        if found.identity.has_expired:
            raise TokenExpired(f"This token expired at {found.identity.expires:%Y-%m-%d %H:%M} UTC.")
        return found.identity

    def check_tries(self, network: str, way: str) -> None:
        """Raise TooManyTries while this network must wait, and report the try."""
        try:
            self.throttle.check(network)
        except TooManyTries:
            self._on_refused(way, network, "too many tries")
            raise

    def note_wrong(self, network: str, way: str) -> None:
        """Count and report a wrong token or password, or a failed sign-in."""
        self.throttle.wrong(network)
        self._on_refused(way, network, "wrong")

    async def note_use(self, identity: Identity) -> None:
        """Store that a token is used, once a minute for each. A store that is unavailable locks nobody out."""
        now, last = clock.steady(), self._used.get(identity.name)
        if not identity.is_token or (last is not None and now - last < TOKEN_USE_SECONDS):
            return
        self._used[identity.name] = now
        try:
            await self._note_use(identity.name)
        except StoreError:
            self._used.pop(identity.name, None)

    def find_session_holder(self, session: str, proof: bytes) -> Identity | None:
        """Return the holder of the token that a session was begun with, while that token exists; for a session begun by
        a link, the local admin, while all tokens stay the same."""
        found: Identity | None = None
        for holder in self._holders:
            if same(prove(session, holder.digest), proof):
                found = holder.identity
        for known in (self.tokens_digest, *([] if self._local is None else [self._local])):
            if same(prove(session, known), proof):
                found = _LOCAL.identity
        return None if found is None or found.has_expired else found

    def is_local(self, request: Request) -> bool:
        return is_local(request.scope["headers"], self._peer_of(request.scope))

    def challenge(self) -> Unauthorized:
        """Return the error for a request that nobody stands behind, with what would be accepted here."""
        if self._authorize is None or self._holders:
            return Unauthorized()
        return Unauthorized(
            "This application does not admit the request.",
            hint="The application's own login decides here; tokens of oncehook are not used.",
        )

    async def of(self, request: Request) -> Identity | None:
        """Return who asks: the token's holder, or whom the host application admits."""
        found = self.identify(request.scope["headers"], self._peer_of(request.scope))
        if found is not None:
            await self.note_use(found)
        if found is not None or self._authorize is None:
            return found
        found = await authorize_request(self._authorize, request)
        if found is not None and request.method not in ("GET", "HEAD") and not is_same_origin(request):
            # The host may use a cookie, which browsers also send with requests from other sites.
            raise Forbidden("This change comes from another site.")
        return found


def _bearer(headers: Headers) -> bytes | None:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:  # two Authorization headers: a proxy may have checked the other one
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    return token if scheme.lower() == b"bearer" and 0 < len(token) <= LONGEST_TOKEN else None


def hash_token(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def is_local(headers: Headers, peer: str) -> bool:
    """Tell whether a request comes directly from this machine and is addressed to it.

    False for a request through a tunnel or proxy on this machine, and for a browser that was given another host's name
    for our address (DNS rebinding).
    """
    # An arrival that a program passes in has no peer; here an unknown peer is not local.
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
    """Tell whether a browser made this request from our own page, or the client is no browser (S29)."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def is_refused_act(request: Request, error: Refused) -> bool:
    """Tell whether a refusal is audited: forbidden views and acts, and acts that failed.

    Unreadable and throttled requests are no acts.
    """
    if isinstance(error, Forbidden):
        return True
    return request.method not in ("GET", "HEAD") and error.status in (404, 409)
