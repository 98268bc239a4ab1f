"""Who stands at the dashboard: sessions, the password, the one-time link, and the host application's own word.

Pages show every request to `Door.of` and get an `Identity` or None. Sessions live in memory: a restart ends them all. A
bearer token is no credential here, as a cookie is none at the API (S29).
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from oncehook import clock
from oncehook.errors import Forbidden, Refused
from oncehook.sources import Network
from oncehook.verify import same
from oncehook.web.access import Access, Authorize, Identity, Role, is_local
from oncehook.web.peers import direct_peer, is_within, peer_finder

SESSION_SECONDS: Final = 12 * 3600.0
MOST_SESSIONS: Final = 1000
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


@dataclass(slots=True)
class _Session:
    identity: Identity
    ends_at: float


class Sessions:
    """Who has come in, by the hash of a random 256-bit id: the ids themselves are kept nowhere."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, _Session] = OrderedDict()

    def begin(self, identity: Identity) -> str:
        """A new session; the oldest one makes room when there are too many."""
        name = clock.random_bytes(32).hex()
        self._open[_hash(name)] = _Session(identity, clock.steady() + SESSION_SECONDS)
        while len(self._open) > MOST_SESSIONS:
            self._open.popitem(last=False)
        return name

    def of(self, name: str) -> Identity | None:
        """Whose session this is, while it lasts."""
        session = self._open.get(_hash(name))
        if session is None:
            return None
        if session.ends_at <= clock.steady():
            self.end(name)
            return None
        return session.identity

    def end(self, name: str) -> None:
        """It is over."""
        self._open.pop(_hash(name), None)


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
        while len(self._wrong) > MOST_SESSIONS:
            self._wrong.popitem(last=False)
        minute = int(now // 60)
        self._minute, self._in_minute = minute, (self._in_minute if minute == self._minute else 0) + 1

    def right(self, peer: str) -> None:
        """It was the right one."""
        self._wrong.pop(peer, None)


class Door:
    """Lets people in: by password, by one-time link from this machine, or as the host application says."""

    def __init__(
        self,
        access: Access,
        *,
        trusted: Sequence[Network] = (),
        authorize: Authorize | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """`announce` is told a fresh one-time link's path, to print it where only the machine's owner reads."""
        self._access = access
        self._trusted = trusted
        self._peer_of = peer_finder(trusted)
        self._authorize = authorize
        self._announce = announce
        self._sessions = Sessions()
        self._throttle = Throttle()
        self._link: bytes | None = None

    @property
    def is_hosted(self) -> bool:
        """The host application decides; there is nothing to log in to."""
        return self._authorize is not None

    @property
    def can_announce(self) -> bool:
        """Somebody would read a fresh link."""
        return self._announce is not None

    async def of(self, request: Request) -> Identity | None:
        """Who asks, or None."""
        if self._authorize is not None:
            answer = self._authorize(request)
            role = await answer if inspect.isawaitable(answer) else answer
            return Identity("host", Role[role]) if role is not None and role in Role.__members__ else None
        name = request.cookies.get(self._cookie(request))
        return self._sessions.of(name) if name else None

    def is_open(self, request: Request) -> bool:
        """Whether the session of this request still lasts."""
        name = request.cookies.get(self._cookie(request))
        return name is not None and self._sessions.of(name) is not None

    # -- coming in and going -------------------------------------------------------------------

    def link(self) -> str:
        """A new one-time link, as a path; the one before is void."""
        token = clock.random_bytes(32).hex()
        self._link = _hash(token)
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
        if self._link is None or not self.is_own_machine(request) or not same(self._link, _hash(token)):
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

    def begin(self, request: Request, identity: Identity, answer: Response) -> None:
        """Give a new session with this answer; one that was open before is ended."""
        self._forget(request)
        answer.set_cookie(
            self._cookie(request),
            self._sessions.begin(identity),
            max_age=int(SESSION_SECONDS),
            path=request.scope.get("root_path") or "/",
            secure=self.is_https(request),
            httponly=True,
            samesite="strict",
        )

    def end(self, request: Request, answer: Response) -> None:
        """Log out."""
        self._forget(request)
        answer.delete_cookie(self._cookie(request), path=request.scope.get("root_path") or "/")

    def _forget(self, request: Request) -> None:
        name = request.cookies.get(self._cookie(request))
        if name:
            self._sessions.end(name)

    def _cookie(self, request: Request) -> str:
        # Cookies do not know ports: two inboxes on one machine would log each other out.
        server = request.scope.get("server")
        return f"oncehook_{server[1] if server else 0}"

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


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
