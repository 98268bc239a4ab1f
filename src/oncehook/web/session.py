"""Sessions of the dashboard, begun by password, one-time link or OpenID provider; or the host application decides.

Pages pass every request to `Auth.of` and get an `Identity` or None. Sessions are in the store: they survive a restart,
and all servers of an inbox share them. A bearer token is no credential here, as a cookie is none at the API (S29).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oncehook import clock
from oncehook.errors import Forbidden, StoreUnavailable
from oncehook.model import StoredSession
from oncehook.sources import Network
from oncehook.store.base import Store
from oncehook.verify import same
from oncehook.web.auth import (
    SESSION_SECONDS,
    Access,
    Authorize,
    Identity,
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

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cookie = ""

    async def cookie(self) -> str:
        """Return the cookie's name, which differs between inboxes on a machine, because cookies ignore ports."""
        if not self._cookie:
            self._cookie = f"oncehook_{await self._store.inbox_number():x}"
        return self._cookie

    async def begin(self, actor: str, role: str, voucher: bytes, seconds: float = SESSION_SECONDS) -> str:
        """Begin a session and return its name, known only to the browser. It is bound to `voucher`: a hash of the
        password or of whatever else admitted the person."""
        name = clock.random_bytes(32).hex()
        proof = prove(name, voucher)
        await self._store.begin_session(StoredSession(hash_of(name), actor, role, proof), seconds)
        return name

    async def of(self, name: str) -> StoredSession | None:
        return await self._store.get_session(hash_of(name))

    async def end(self, name: str) -> None:
        """End a session, on all servers."""
        await self._store.end_session(hash_of(name))


LINK_SECONDS: Final = 600.0
"""Seconds for which a one-time link is valid."""
LONGEST_PASSWORD: Final = 4096


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
        self._link: bytes | None = None
        self._link_until = 0.0

    @property
    def is_hosted(self) -> bool:
        return self._authorize is not None

    @property
    def has_password(self) -> bool:
        """Tell whether to ask for a password: not where there is none, but another way to sign in."""
        return self.access.has_tokens or self.oidc is None

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
        token = clock.random_bytes(32).hex()
        self._link, self._link_until = hash_of(token), clock.steady() + LINK_SECONDS
        return f"/?token={token}"

    def announce(self, request: Request) -> None:
        """Print a fresh link for somebody at this machine, who can read it there."""
        if self._announce is None or not self.is_own_machine(request):
            raise Forbidden("A link is printed only for direct requests of this machine.")
        self.access.throttle.check("link")
        self.access.throttle.wrong("link")
        self._announce(self.link())

    def is_own_machine(self, request: Request) -> bool:
        # A browser is expected here, so the headers by which `is_local` recognises one are left out.
        headers = [pair for pair in request.scope["headers"] if pair[0] not in (b"origin", b"sec-fetch-site")]
        return is_local(headers, self._peer_of(request.scope))

    def by_link(self, request: Request, token: str) -> Identity | None:
        """Return the link's holder: once, in time, and only directly from this machine."""
        if self._link is None or clock.steady() > self._link_until or not self.is_own_machine(request):
            return None
        if not same(self._link, hash_of(token)):
            return None
        self._link = None
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
        answer.set_cookie(
            await self._sessions.cookie(),
            await self._sessions.begin(identity.name, identity.role.name, voucher, seconds),
            max_age=int(seconds),
            path=request.scope.get("root_path") or "/",
            secure=self.is_https(request),
            httponly=True,
            samesite="strict",
        )

    async def end(self, request: Request, answer: Response) -> None:
        assert self._sessions is not None
        await self._forget(request)
        answer.delete_cookie(await self._sessions.cookie(), path=request.scope.get("root_path") or "/")

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
