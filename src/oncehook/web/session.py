"""Sessions of the dashboard, begun by password, one-time link or OpenID provider; or the host application decides.
Sessions of customers at the portal, begun by a signed link.

Pages pass every request to `Auth.of` and get an `Identity` or None. Sessions are in the store: they survive a restart,
and all servers of an inbox share them. A bearer token is no credential here, as a cookie is none at the API (S29).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlencode

from oncehook import clock, portal
from oncehook.admin import Admin
from oncehook.errors import Forbidden, StoreUnavailable
from oncehook.model import Noun, StoredSession
from oncehook.portal import LinkRefused, PortalLink
from oncehook.settings.stored import Vault
from oncehook.sources import Network
from oncehook.store.base import Store
from oncehook.verify import same
from oncehook.web.auth import (
    SESSION_SECONDS,
    Access,
    Authorize,
    Identity,
    OneTimeLink,
    Role,
    authorize_request,
    hash_of,
    hash_token,
    is_local,
    prove,
)
from oncehook.web.oidc import SIGN_IN_SECONDS, NoRole, Oidc, SignedIn, SignIn, SignInFailed
from oncehook.web.peers import direct_peer, is_within, network_of, peer_finder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class DashboardSessions:
    """The sessions of the store. Looking one up writes nothing."""

    def __init__(self, store: Store, suffix: str = "") -> None:
        """`suffix` tells its cookie from others of the same inbox."""
        self._store = store
        self._suffix = suffix
        self._cookie = ""

    async def cookie(self) -> str:
        """Return the cookie's name, which differs between inboxes on a machine, because cookies ignore ports."""
        if not self._cookie:
            self._cookie = f"oncehook_{await self._store.inbox_number():x}{self._suffix}"
        return self._cookie

    async def begin(self, actor: str, role: str, voucher: bytes, seconds: float = SESSION_SECONDS) -> str:
        """Begin a session and return its name, known only to the browser. It is bound to `voucher`: a hash of the
        password or of whatever else admitted the person."""
        name = clock.random_bytes(32).hex()
        proof = prove(name, voucher)
        await self._store.begin_session(StoredSession(hash_of(name), actor, role, proof), seconds)
        return name

    async def begin_portal(self, link: PortalLink, voucher: bytes) -> str | None:
        """Begin the session of a customer, bound to the key that signed the link; None where the link was used before.

        Customers' sessions are counted apart, so that they never end those of the inbox's own people.
        """
        # Its maker's clock may be a little ahead of the store's.
        if not await self._store.take_link(hash_of(f"link {link.nonce}"), link.until - clock.now() + _SKEW):
            return None
        name = clock.random_bytes(32).hex()
        session = StoredSession(hash_of(name), link.actor, Role.admin.name, prove(name, voucher), link.account)
        await self._store.begin_session(session, portal.SESSION_SECONDS, MOST_CUSTOMERS)
        return name

    async def is_closed(self, link: PortalLink) -> bool:
        """Tell whether the account of a link is disabled or deleted, or was made again after the link."""
        found = await self._store.find_definitions(Noun.account, [link.account])
        if not found:  # an account need not be stored
            return await self._store.was_deleted(Noun.account, link.account)
        return not found[0].is_enabled or found[0].created_at.timestamp() > link.made_at + _CLOCKS_APART

    async def of(self, name: str) -> StoredSession | None:
        return await self._store.get_session(hash_of(name))

    async def end(self, name: str) -> None:
        """End a session, on all servers."""
        await self._store.end_session(hash_of(name))


LONGEST_PASSWORD: Final = 4096
MOST_CUSTOMERS: Final = 10_000
"""Sessions of customers that are kept; beyond that, the oldest end."""
_SKEW: Final = 3600.0
_CLOCKS_APART: Final = 60.0
"""Seconds that the clock of whoever makes a link may be behind the store's."""


class Auth:
    """Sign-in to the dashboard: password, one-time link from this machine, OpenID provider, or host application."""

    def __init__(
        self,
        access: Access,
        sessions: DashboardSessions | None = None,
        *,
        trusted: Sequence[Network] = (),
        authorize: Authorize | None = None,
        announce: Callable[[str], None] | None = None,
        oidc: Oidc | None = None,
    ) -> None:
        """Take `sessions` unless the host application decides. `announce` is called with the path of a fresh one-time
        link, and prints it where only the machine's owner reads."""
        self.access = access
        """Holders of tokens, which are passwords here."""
        self._trusted = trusted
        self._peer_of = peer_finder(trusted)
        self._authorize = authorize
        self._announce = announce
        self._sessions = sessions
        self.oidc = oidc
        self._link = access.link or OneTimeLink()

    is_portal = False
    """Whether it lets customers in, each to one account."""

    @property
    def is_hosted(self) -> bool:
        return self._authorize is not None

    @property
    def has_password(self) -> bool:
        """Tell whether there is a password to ask for."""
        return self.access.has_tokens

    @property
    def can_announce(self) -> bool:
        return self._announce is not None

    async def of(self, request: Request) -> Identity | None:
        if self._authorize is not None:
            return await authorize_request(self._authorize, request)
        name = await self._name(request)
        session = await self._sessions.of(name) if self._sessions is not None and name else None
        found = None if session is None else self._holder(name, session)
        if found is not None:
            await self.access.note_use(found)
        return found

    def _holder(self, name: str, session: StoredSession) -> Identity | None:
        """Return a session's holder, with the role that it was begun with, or a lower one if its password now gives
        less."""
        role = Role[session.role]
        if session.account is not None:
            return None  # a customer's, begun at the portal
        if self.oidc is not None and same(prove(name, hash_of(self.oidc.mark)), session.proof):
            return Identity(session.actor, role)
        vouched = self.access.find_session_holder(name, session.proof)
        return None if vouched is None else replace(vouched, name=session.actor, role=min(role, vouched.role))

    async def is_open(self, request: Request) -> bool:
        """Tell whether this request's session is still valid; False while the store is unavailable."""
        try:
            return await self.of(request) is not None
        except StoreUnavailable:
            return False

    # -- coming in and going -------------------------------------------------------------------

    def link(self) -> str:
        """Return the path of a new one-time link, valid for 10 minutes; the one before becomes invalid."""
        return f"/?token={self._link.new()}"

    def announce(self, request: Request, to: str = "/") -> None:
        """Print a fresh link to a page for somebody at this machine, who can read it there."""
        if self._announce is None or not self.is_own_machine(request):
            raise Forbidden("A link is printed only for direct requests of this machine.")
        self.access.throttle.check("link")
        self.access.throttle.wrong("link")
        self._announce(self.link() + ("" if to == "/" else f"&{urlencode({'to': to})}"))

    def is_own_machine(self, request: Request) -> bool:
        # A browser is expected here, so the headers by which `is_local` recognises one are left out.
        headers = [pair for pair in request.scope["headers"] if pair[0] not in (b"origin", b"sec-fetch-site")]
        return is_local(headers, self._peer_of(request.scope))

    def by_link(self, request: Request, token: str) -> Identity | None:
        """Return the link's holder: once, in time, and only directly from this machine."""
        if not self.is_own_machine(request) or not self._link.take(token):
            return None
        return Identity("local", Role.admin)

    def by_password(self, request: Request, password: str) -> Identity | None:
        """Return the holder of the admin token or of one of the configured tokens. Raises TooManyTries."""
        if not 0 < len(password) <= LONGEST_PASSWORD:
            return None
        return self.access.find_holder(_as_token(password), (), self._peer_of(request.scope), "password")

    async def begin_sign_in(self, to: str, answer: Callable[[str], Response]) -> Response:
        """Send a browser to the OpenID provider by an `answer` with its address. Raises ProviderUnavailable."""
        assert self.oidc is not None
        sign_in = SignIn.begin(to)
        made = answer(await self.oidc.address(sign_in))
        # Not a strict cookie: the browser returns from another site, and would not send one.
        made.set_cookie(
            await self._sign_in_cookie(),
            sign_in.cookie,
            max_age=SIGN_IN_SECONDS,
            secure=self.oidc.is_secure,
            httponly=True,
            samesite="lax",
        )
        return made

    async def by_oidc(self, request: Request) -> tuple[SignedIn, str]:
        """Return who has signed in at the provider, and the page they wanted. Raises what `Oidc.finish` and the
        throttle raise."""
        assert self.oidc is not None
        network = network_of(self._peer_of(request.scope))
        self.access.check_tries(network, "oidc")
        sign_in = SignIn.read(request.cookies.get(await self._sign_in_cookie(), ""))
        try:
            signed_in = await self.oidc.finish(sign_in, request.query_params)
        except SignInFailed:
            self.access.note_wrong(network, "oidc")
            raise
        except NoRole:
            self.access.throttle.wrong(network)  # audited separately, with the name
            raise
        self.access.throttle.right(network)
        return signed_in, "/" if sign_in is None else sign_in.to

    async def begin_signed_in(self, request: Request, signed_in: SignedIn, answer: Response) -> None:
        """Begin a session for a person whom the provider has confirmed. It ends when the provider's confirmation does,
        or when the settings that admitted them change."""
        assert self.oidc is not None
        await self._begin(request, signed_in.identity, answer, hash_of(self.oidc.mark), signed_in.seconds)

    async def end_sign_in(self, answer: Response) -> None:
        assert self.oidc is not None
        answer.delete_cookie(await self._sign_in_cookie(), secure=self.oidc.is_secure, httponly=True, samesite="lax")

    async def _sign_in_cookie(self) -> str:
        assert self.oidc is not None
        assert self._sessions is not None
        # The prefix keeps other hosts of the domain from setting this cookie.
        return f"{'__Host-' if self.oidc.is_secure else ''}{await self._sessions.cookie()}_sign_in"

    async def begin(self, request: Request, identity: Identity, answer: Response, password: str = "") -> None:
        """Begin a session with this answer; end an open one. It ends with `password`; one begun by a link ends when any
        password changes."""
        voucher = hash_token(_as_token(password)) if password else self.access.tokens_digest
        await self._begin(request, identity, answer, voucher, SESSION_SECONDS)

    async def _begin(
        self, request: Request, identity: Identity, answer: Response, voucher: bytes, seconds: float
    ) -> None:
        assert self._sessions is not None
        await self._forget(request)
        name = await self._sessions.begin(identity.name, identity.role.name, voucher, seconds)
        await self._set_cookie(request, answer, name, seconds)

    async def _set_cookie(self, request: Request, answer: Response, value: str, seconds: float) -> None:
        assert self._sessions is not None
        answer.set_cookie(
            await self._sessions.cookie(),
            value,
            max_age=int(seconds),
            path=root_path(request),
            secure=self.is_https(request),
            httponly=True,
            samesite="strict",
        )

    async def end(self, request: Request, answer: Response) -> None:
        assert self._sessions is not None
        await self._forget(request)
        answer.delete_cookie(await self._sessions.cookie(), path=root_path(request))

    async def _forget(self, request: Request) -> None:
        name = await self._name(request)
        if self._sessions is not None and name:
            await self._sessions.end(name)

    async def _name(self, request: Request) -> str:
        return "" if self._sessions is None else request.cookies.get(await self._sessions.cookie(), "")

    def is_https(self, request: Request) -> bool:
        """Tell whether the browser uses TLS, to us or to a trusted proxy."""
        if request.scope.get("scheme") == "https":
            return True
        proxied = is_within(direct_peer(request.scope), self._trusted)
        return proxied and request.headers.get("x-forwarded-proto", "").lower() == "https"


class PortalHost(Protocol):
    """The inbox as the portal needs it."""

    @property
    def admin(self) -> Admin: ...

    @property
    def store(self) -> Store: ...

    @property
    def vault(self) -> Vault: ...


class PortalAuth(Auth):
    """Sign-in to the portal: a link that works once, and a session of one account.

    Its cookie has a name and a path of its own, so that an operator who opens a customer's link stays logged in.
    """

    is_portal = True

    def __init__(
        self, host: PortalHost, *, trusted: Sequence[Network] = (), frame_ancestors: Sequence[str] = ()
    ) -> None:
        super().__init__(Access(), DashboardSessions(host.store, "_portal"), trusted=trusted)
        self._vault = host.vault
        self.frame_ancestors = frame_ancestors
        """Sites that may show its pages in a frame."""

    def _holder(self, name: str, session: StoredSession) -> Identity | None:
        if session.account is None or not self._vault.has_key:
            return None
        keys = self._vault.derive_keys(portal.PURPOSE)
        if not any(same(prove(name, key), session.proof) for key in keys):
            return None
        return Identity(session.actor, Role[session.role], accounts=frozenset({session.account}))

    def check_link(self, text: str) -> PortalLink:
        """Return whom a link lets in; it is not used up. Raises LinkRefused."""
        return portal.read_link(self._vault, text)[0]

    async def enter(self, request: Request, text: str, answer: Response) -> PortalLink | None:
        """Begin a session with a link and return whom it lets in; None for somebody who is in by that link already.
        Raises LinkRefused.

        The session's name is new, whatever cookie the browser came with.
        """
        assert self._sessions is not None
        link, key = portal.read_link(self._vault, text)
        if await self._sessions.is_closed(link):
            raise LinkRefused
        before = await self.of(request)
        name = await self._sessions.begin_portal(link, key)
        if name is None:
            if before is not None and before.name == link.actor:
                return None
            raise LinkRefused
        await self._forget(request)
        await self._set_cookie(request, answer, name, portal.SESSION_SECONDS)
        return link

    async def _set_cookie(self, request: Request, answer: Response, value: str, seconds: float) -> None:
        assert self._sessions is not None
        is_framed = request.headers.get("sec-fetch-dest") in ("iframe", "frame")
        if not (is_framed and self.frame_ancestors and self.is_https(request)):
            await super()._set_cookie(request, answer, value, seconds)
            return
        # In a frame of another site a browser sends no other cookie than this kind, and this one in no other site's
        # frames. Changes are safe nevertheless: they are refused unless they come from our own page.
        cookie = f"{await self._sessions.cookie()}={value}; Max-Age={int(seconds)}; Path={root_path(request)}"
        answer.headers.append("set-cookie", f"{cookie}; HttpOnly; Secure; SameSite=None; Partitioned")


def root_path(request: Request) -> str:
    """Return the path that cookies of this application are sent to."""
    return request.scope.get("root_path") or "/"


def _as_token(password: str) -> bytes:
    """Return a password in the form in which tokens are compared: stripped."""
    return password.encode("utf-8", "surrogateescape").strip()


def check_same_origin(request: Request) -> None:
    """Raise Forbidden unless the request comes from a page of ours (S29)."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site == "same-origin":
            return
        raise Forbidden("This change comes from another site.")
    # Over plain HTTP from another machine, browsers omit Sec-Fetch-Site.
    origin = request.headers.get("origin", "")
    if not origin or origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden("This change does not come from a page of this inbox.")
