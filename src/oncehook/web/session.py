"""Who stands at the dashboard: sessions, the password, the one-time link, the OpenID provider, and the host
application's own word.

Pages show every request to `Door.of` and get an `Identity` or None. Sessions are kept in the store: they outlast a
restart, and every server of an inbox knows them. A bearer token is no credential here, as a cookie is none at the API
(S29).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from oncehook import clock
from oncehook.errors import Forbidden, Refused, StoreUnavailable
from oncehook.model import StoredSession
from oncehook.sessions import SESSION_SECONDS, Sessions, hash_of, prove
from oncehook.sources import Network
from oncehook.verify import same
from oncehook.web.access import Access, Authorize, Identity, Role, authorized, is_local
from oncehook.web.oidc import SIGN_IN_SECONDS, NoRole, Oidc, Person, SignIn, SignInFailed
from oncehook.web.peers import direct_peer, is_within, peer_finder

MOST_ADDRESSES: Final = 1000
"""Whose wrong passwords are remembered."""
TRIES: Final = 5
"""Wrong passwords from one address before it has to wait."""
LONGEST_WAIT: Final = 60.0
ALL_TRIES: Final = 200
"""Wrong passwords from everywhere within a minute: beyond, nobody gets in by password."""
LONGEST_PASSWORD: Final = 4096


class TooManyTries(Refused):
    """Too many wrong passwords; wait a little."""

    code = "too_many_tries"
    status = 429

    def __init__(self, seconds: float) -> None:
        super().__init__(hint=f"Try again in {seconds:.0f} s.")
        self.retry_after = seconds


class Throttle:
    """Makes guessing slow: each wrong password beyond the first few doubles the wait of its address."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._minute = 0
        self._in_minute = 0

    def check(self, peer: str) -> None:
        """Raises TooManyTries while this address, or everybody, has to wait."""
        now = clock.steady()
        tries, last = self._wrong.get(peer, (0, now))
        wait = 0.0 if tries < TRIES else min(2.0 ** (tries - TRIES + 1), LONGEST_WAIT) - (now - last)
        if wait <= 0 and self._in_minute >= ALL_TRIES and self._minute == int(now // 60):
            wait = 60 - now % 60
        if wait > 0:
            raise TooManyTries(wait)

    def wrong(self, peer: str) -> None:
        """One more wrong password."""
        now = clock.steady()
        tries, last = self._wrong.pop(peer, (0, now))
        self._wrong[peer] = (1 if now - last > 10 * LONGEST_WAIT else tries + 1, now)
        while len(self._wrong) > MOST_ADDRESSES:
            self._wrong.popitem(last=False)
        minute = int(now // 60)
        self._minute, self._in_minute = minute, (self._in_minute if minute == self._minute else 0) + 1

    def right(self, peer: str) -> None:
        """It was the right one."""
        self._wrong.pop(peer, None)


class Door:
    """Lets people in: by password, by one-time link from this machine, as an OpenID provider or the host application
    says.
    """

    def __init__(
        self,
        access: Access,
        sessions: Sessions | None = None,
        *,
        trusted: Sequence[Network] = (),
        authorize: Authorize | None = None,
        announce: Callable[[str], None] | None = None,
        oidc: Oidc | None = None,
    ) -> None:
        """`sessions` are needed unless the host application decides. `announce` is told a fresh one-time link's path,
        to print it where only the machine's owner reads.
        """
        self._access = access
        self._trusted = trusted
        self._peer_of = peer_finder(trusted)
        self._authorize = authorize
        self._announce = announce
        self._sessions = sessions
        self.oidc = oidc
        self._throttle = Throttle()
        self._link: bytes | None = None

    @property
    def is_hosted(self) -> bool:
        """The host application decides; there is nothing to log in to."""
        return self._authorize is not None

    @property
    def has_password(self) -> bool:
        """Whether to ask for a password: not where there is none, and another way in."""
        return self._access.has_tokens or self.oidc is None

    @property
    def can_announce(self) -> bool:
        """Somebody would read a fresh link."""
        return self._announce is not None

    async def of(self, request: Request) -> Identity | None:
        """Who asks, or None."""
        if self._authorize is not None:
            return await authorized(self._authorize, request)
        name = await self._name(request)
        session = await self._sessions.of(name) if self._sessions is not None and name else None
        return None if session is None else self._holder(name, session)

    def _holder(self, name: str, session: StoredSession) -> Identity | None:
        """Whose it is; with the role that it was begun with, and not more than its password still gives."""
        role = Role[session.role]
        if session.proof:
            if self.oidc is not None and same(prove(name, hash_of(self.oidc.mark)), session.proof):
                return Identity(session.actor, role)
            vouched = self._access.vouches(name, session.proof)
            return None if vouched is None else Identity(session.actor, min(role, vouched.role))
        return Identity(session.actor, role)

    async def is_open(self, request: Request) -> bool:
        """Whether the session of this request still lasts, as far as can be told now."""
        try:
            return await self.of(request) is not None
        except StoreUnavailable:
            return False

    # -- coming in and going -------------------------------------------------------------------

    def link(self) -> str:
        """A new one-time link, as a path; the one before is void."""
        token = clock.random_bytes(32).hex()
        self._link = hash_of(token)
        return f"/?token={token}"

    def announce(self, request: Request) -> None:
        """Print a fresh link, for somebody who asks from this machine and can read it there."""
        if self._announce is None or not self.is_own_machine(request):
            raise Forbidden("A link is printed only for direct requests of this machine.")
        self._throttle.check("link")
        self._throttle.wrong("link")
        self._announce(self.link())

    def is_own_machine(self, request: Request) -> bool:
        """Whether it comes straight from this machine and is meant for it (DESIGN.md 8.11)."""
        # A browser is expected here: what tells one from a program says nothing about the way it came.
        headers = [pair for pair in request.scope["headers"] if pair[0] not in (b"origin", b"sec-fetch-site")]
        return is_local(headers, self._peer_of(request.scope))

    def by_link(self, request: Request, token: str) -> Identity | None:
        """The link's holder, once, and only straight from this machine."""
        if self._link is None or not self.is_own_machine(request) or not same(self._link, hash_of(token)):
            return None
        self._link = None
        return Identity("local", Role.admin)

    def by_password(self, request: Request, password: str) -> Identity | None:
        """The holder of the admin token or of one of the configured tokens. Raises TooManyTries."""
        peer = self._peer_of(request.scope)
        self._throttle.check(peer)
        found = None
        if 0 < len(password) <= LONGEST_PASSWORD:
            found = self._access.identify([(b"authorization", b"Bearer " + password.encode())], peer)
        if found is None:
            self._throttle.wrong(peer)
        else:
            self._throttle.right(peer)
        return found

    async def begin_sign_in(self, to: str, answer: Callable[[str], Response]) -> Response:
        """Send a browser to the OpenID provider, by an `answer` that takes its address. Raises ProviderUnavailable."""
        assert self.oidc is not None
        sign_in = SignIn.begin(to)
        made = answer(await self.oidc.address(sign_in))
        # The browser comes back from another site, with which a strict cookie would not come.
        made.set_cookie(
            await self._sign_in_cookie(),
            sign_in.cookie,
            max_age=SIGN_IN_SECONDS,
            secure=self.oidc.is_secure,
            httponly=True,
            samesite="lax",
        )
        return made

    async def by_oidc(self, request: Request) -> tuple[Person, str]:
        """Tell whom the provider has sent back, and the page they wanted. Raises what `Oidc.finish` and the throttle
        raise.
        """
        assert self.oidc is not None
        peer = self._peer_of(request.scope)
        self._throttle.check(peer)
        sign_in = SignIn.read(request.cookies.get(await self._sign_in_cookie(), ""))
        try:
            person = await self.oidc.finish(sign_in, request.query_params)
        except (SignInFailed, NoRole):
            self._throttle.wrong(peer)
            raise
        self._throttle.right(peer)
        return person, "/" if sign_in is None else sign_in.to

    async def begin_person(self, request: Request, person: Person, answer: Response) -> None:
        """Give a session to somebody whom the provider has named; it lasts no longer than what it said of them, nor
        than the settings that let them in.
        """
        assert self.oidc is not None
        identity = Identity(person.name, person.role)
        await self.begin(request, identity, answer, self.oidc.mark, seconds=person.seconds)

    async def end_sign_in(self, answer: Response) -> None:
        """Forget a sign-in, however it ended."""
        assert self.oidc is not None
        answer.delete_cookie(await self._sign_in_cookie(), secure=self.oidc.is_secure, httponly=True, samesite="lax")

    async def _sign_in_cookie(self) -> str:
        assert self.oidc is not None
        assert self._sessions is not None
        # The prefix keeps other hosts of the same domain from planting a sign-in of theirs.
        return f"{'__Host-' if self.oidc.is_secure else ''}{await self._sessions.cookie()}_sign_in"

    async def begin(
        self,
        request: Request,
        identity: Identity,
        answer: Response,
        password: str = "",
        seconds: float = SESSION_SECONDS,
    ) -> None:
        """Give a new session with this answer; one that was open before is ended. It lasts no longer than `password`
        does, where it is begun with one.
        """
        assert self._sessions is not None
        await self._forget(request)
        answer.set_cookie(
            await self._sessions.cookie(),
            # As it is compared: a bearer token has no space around it.
            await self._sessions.begin(identity.name, identity.role.name, password.strip(" \t\n\r\v\f"), seconds),
            max_age=int(seconds),
            path=request.scope.get("root_path") or "/",
            secure=self.is_https(request),
            httponly=True,
            samesite="strict",
        )

    async def end(self, request: Request, answer: Response) -> None:
        """Log out."""
        assert self._sessions is not None
        await self._forget(request)
        answer.delete_cookie(await self._sessions.cookie(), path=request.scope.get("root_path") or "/")

    async def _forget(self, request: Request) -> None:
        name = await self._name(request)
        if self._sessions is not None and name:
            await self._sessions.end(name)

    async def _name(self, request: Request) -> str:
        """What the browser holds; empty when it holds nothing."""
        return "" if self._sessions is None else request.cookies.get(await self._sessions.cookie(), "")

    def is_https(self, request: Request) -> bool:
        """Whether the browser speaks TLS, with us or with a proxy that we trust."""
        if request.scope.get("scheme") == "https":
            return True
        proxied = is_within(direct_peer(request.scope), self._trusted)
        return proxied and request.headers.get("x-forwarded-proto", "").lower() == "https"


def check_same_origin(request: Request) -> None:
    """Raises Forbidden unless a browser made this request for a page of ours (S29)."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site == "same-origin":
            return
        raise Forbidden("This change comes from another site.")
    # Plain HTTP from another machine: browsers leave the better header out.
    origin = request.headers.get("origin", "")
    if not origin or origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden("This change does not come from a page of this inbox.")
