"""The guarded client: a request goes out, an `Answer` comes back or an `Unanswered` is raised.

Every address is judged when a name is looked up and again on the socket that is about to connect, so a name that
changes its mind in between reaches nothing (S17). There are no redirects, cookies or compression here, and no proxy but
one that was named (S20). Destinations, senders and alerts call it; `direct` or, with a proxy, `proxied` does the work.
"""

from __future__ import annotations
import ssl
from pathlib import Path
from oncehook.errors import ConfigError
import os
import socket
from oncehook.http_client import Forbidden, Unanswered, Untrusted
from oncehook.http_client.addresses import AddressRefused
import asyncio
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from aiohappyeyeballs import start_connection
from oncehook.http_client import Answer, Unanswered, silence
from oncehook.http_client.addresses import Guard, is_address
from oncehook.http_client.connection import Closed, Connection, Late, NoHttp
from oncehook.http_client.addresses import LookUp, Names
from oncehook.http_client.connection import Origin, Target, head_of, target_of
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from oncehook.http_client import Answer
from oncehook.http_client.addresses import Guard, Network
from oncehook.http_client.addresses import LookUp
from oncehook.http_client.proxy import read_proxy


if TYPE_CHECKING:
    from oncehook.outbound.proxied import Proxied

def read_certificates(ca: Path) -> ssl.SSLContext:
    """Trust the certificates of a file instead of the system's. Raises ConfigError where it holds none."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(
            f'"{ca}" cannot be read as a file of certificates.', hint="It is PEM, and must be readable for oncehook."
        ) from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def late(seconds: float, *, reached: bool) -> Unanswered:
    """The deadline passed."""
    return Unanswered(f"no answer within {seconds:g} s", reached=reached)


def no_http(host: str) -> Unanswered:
    """Something came back, and it was no answer."""
    return Unanswered(f"{host} did not answer in HTTP")


def closed(host: str) -> Unanswered:
    """The connection ended first."""
    return Unanswered(f"{host} closed the connection before it answered")


def not_found(host: str, error: BaseException, *, reached: bool = False) -> Unanswered:
    """Its name led nowhere, or only where nobody may go."""
    if isinstance(error, AddressRefused):
        return forbidden(host, error, reached=reached)
    return Unanswered(f"the address of {host} cannot be found: {reason(error)}", reached=reached)


def not_connected(host: str, error: BaseException, *, reached: bool = False) -> Unanswered:
    """No connection came about."""
    if isinstance(error, AddressRefused):
        return forbidden(host, error, reached=reached)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"the certificate of {host} is not trusted: {reason(error)}", reached=reached)
    return Unanswered(f"cannot connect to {host}: {reason(error)}", reached=reached)


def forbidden(host: str, error: AddressRefused, *, reached: bool = False) -> Forbidden:
    """The guard said no."""
    return Forbidden(f"{host} is not called: {error}; see allow_private", reached=reached)


def reason(error: BaseException) -> str:
    """An error of the system, in one line."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError) and error.errno:
        return os.strerror(error.errno)  # the loops each put it in words of their own
    text = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
    return " ".join(str(text).split()) or type(error).__name__


_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
"""What may be received twice, by the rules of HTTP."""
_STAGGER: Final = 0.25
"""Seconds after which the next address is tried while the one before is silent (RFC 8305)."""
_Info = tuple[
    int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]


class Direct:
    """A way out with connections of its own. It lives on one loop, once."""

    def __init__(self, guard: Guard, look_up: LookUp | None, tls: ssl.SSLContext | None, idle: float) -> None:
        """`tls` None: trust whom the system trusts."""
        self._guard = guard
        self._names = Names(guard, look_up)
        self._tls = tls
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._kept: defaultdict[Origin, list[Connection]] = defaultdict(list)
        """Idle ones, the newest last."""
        self._open: set[Connection] = set()
        self._look: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_empty = asyncio.Event()

    async def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        within: float,
        most: int,
        again: bool,
    ) -> Answer:
        """See `HttpClient.request`."""
        target = target_of(url)
        head = head_of(method, target, headers, body)
        deadline = self._loop.time() + within
        connection = self._take(target.origin)
        reached = connection is not None
        bodiless = method == "HEAD"
        try:
            if connection is not None:
                try:
                    return await connection.exchange(head, body, deadline=deadline, most=most, bodiless=bodiless)
                except Closed as error:
                    if self._is_closed or not (error.silent and (again or method in _IDEMPOTENT)):
                        raise
            connection = await self._dial(target, deadline, reached)
            reached = True
            return await connection.exchange(head, body, deadline=deadline, most=most, bodiless=bodiless)
        except Late:
            raise silence.late(within, reached=reached) from None
        except Closed:
            raise silence.closed(target.said) from None
        except NoHttp:
            raise silence.no_http(target.said) from None

    async def reach(self, url: str, *, within: float) -> None:
        """See `HttpClient.reach`."""
        target = target_of(url)
        try:
            connection = await self._dial(target, self._loop.time() + within, reached=False)
        except Late:
            raise silence.late(within, reached=False) from None
        connection.abort()

    async def close(self) -> None:
        """Close everything; calls under way end in an error."""
        self._is_closed = True
        self._names.close()
        if self._look is not None:
            self._look.cancel()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            await self._is_empty.wait()  # the loop takes a turn or two to let go of a socket

    # -- connections that are kept -------------------------------------------------------------

    def _take(self, origin: Origin) -> Connection | None:
        kept = self._kept.get(origin)
        while kept:
            connection = kept.pop()
            if connection.is_open and self._loop.time() < connection.idle_since + self._idle:
                return connection
            connection.abort()
        return None

    def keep(self, connection: Connection) -> None:
        """It is free for the next call."""
        connection.idle_since = self._loop.time()
        self._kept[connection.origin].append(connection)
        if self._look is None:
            self._look = self._loop.call_later(self._idle, self._close_idle)

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        self._open.discard(connection)
        if self._is_closed and not self._open:
            self._is_empty.set()
        kept = self._kept.get(connection.origin)
        if kept is not None:
            if connection in kept:
                kept.remove(connection)
            if not kept:
                del self._kept[connection.origin]

    def _close_idle(self) -> None:
        """Close what nobody has used for too long, and look again when the next one is due."""
        due = self._loop.time() - self._idle
        waiting = [connection for kept in self._kept.values() for connection in kept]
        for connection in waiting:
            if connection.idle_since <= due:
                connection.abort()
        oldest = min((one.idle_since for one in waiting if one.idle_since > due), default=None)
        self._look = None if oldest is None else self._loop.call_at(oldest + self._idle, self._close_idle)

    # -- connecting ----------------------------------------------------------------------------

    async def _dial(self, target: Target, deadline: float, reached: bool) -> Connection:
        """A new connection. `reached`: an earlier one may have carried the call already."""
        limit = asyncio.timeout_at(deadline)
        host, port = target.origin.host, target.origin.port
        fault = silence.not_found
        try:
            async with limit:
                addresses = [host] if is_address(host) else await self._names.addresses(host, port)
                fault = silence.not_connected
                connection = await self._connect(target.origin, [_info(address, port) for address in addresses])
        except (OSError, RuntimeError) as error:  # uvloop raises the latter where others raise the former
            if limit.expired():
                raise Late from None
            raise fault(target.said, error, reached=reached) from None
        if self._is_closed:
            connection.abort()
            raise Unanswered(f"{target.said} is not called: this client was closed", reached=reached)
        return connection

    async def _connect(self, origin: Origin, infos: list[_Info]) -> Connection:
        line = await start_connection(
            infos, happy_eyeballs_delay=_STAGGER, loop=self._loop, socket_factory=self._socket
        )
        connection = Connection(self._loop, origin, self)
        try:
            if origin.scheme == "https":
                await self._loop.create_connection(
                    lambda: connection,
                    sock=line,
                    ssl=self._tls or _trusting_as_the_system(),
                    server_hostname=origin.host.rstrip("."),
                )
            else:
                await self._loop.create_connection(lambda: connection, sock=line)
        except BaseException:
            line.close()
            raise
        self._open.add(connection)
        return connection

    def _socket(self, info: _Info) -> socket.socket:
        """The socket for one address: the last place where it can be refused, and the one that counts."""
        family, kind, protocol, _, address = info
        self._guard.check(address[0])
        return socket.socket(family, kind, protocol)


def _info(address: str, port: int) -> _Info:
    if ":" in address:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)


@lru_cache(maxsize=1)
def _trusting_as_the_system() -> ssl.SSLContext:
    """One for all: it holds every certificate that the system trusts."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


MOST_KEPT: Final = 4096
"""Bytes of an answer's body that are read; what comes after stays unread, and the connection is closed."""
_IDLE_KEPT: Final = 15.0
"""Seconds for which an idle connection is kept for the next call."""


class HttpClient:
    """A client with its own rules and its own connections: what one destination allows, no other one can use."""

    def __init__(
        self,
        *,
        allow_private: bool | Sequence[Network] = False,
        ca: Path | None = None,
        look_up: LookUp | None = None,
        proxy: str | None = None,
        idle: float = _IDLE_KEPT,
    ) -> None:
        """`ca` is a file of certificates that are trusted instead of the system's; there is no way not to check.

        `proxy` (`http://user:password@host:port` or `socks5://…`) is the operator's word and may be a private address.
        `idle` is for how many seconds an unused connection is kept.
        """
        self._guard = Guard(allow_private)
        self._proxy = None if proxy is None else read_proxy(proxy)
        self._idle = idle
        self._tls = None if ca is None else read_certificates(ca)
        self._look_up = look_up
        self._way: Direct | Proxied | None = None

    async def open(self) -> None:
        """Be ready to call, on the running loop."""
        if self._way is not None:
            return
        if self._proxy is None:
            self._way = Direct(self._guard, self._look_up, self._tls, self._idle)
            return
        try:
            from oncehook.outbound.proxied import Proxied
        except ImportError:
            raise ConfigError("A proxy needs the package aiohttp.", hint="pip install 'oncehook[proxy]'") from None

        self._way = Proxied(self._proxy, self._guard, self._look_up, self._tls, self._idle)

    async def close(self) -> None:
        """Close what is open; a call under way ends in an error."""
        way, self._way = self._way, None
        if way is not None:
            await way.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, within: float) -> Answer:
        """POST what carries an Idempotency-Key: see `request`, with `again`."""
        return await self.request("POST", url, headers, body, within=within, again=True)

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        within: float,
        most: int = MOST_KEPT,
        again: bool = False,
    ) -> Answer:
        """Call an address that `read_url` has read, within so many seconds in all. Raises Unanswered.

        An answer counts from its head on: when its body then does not come in time, it is cut where it stands, as it
        is after `most` bytes. A header that no request can carry raises ValueError, and nothing is sent.

        `again` lets a call that met a connection which the other end was just closing be sent once more. Nothing tells
        that from a call that was received and not answered, so it may be received twice. What carries an
        Idempotency-Key can bear that, delivery being at least once anyway (R53): the attempt is not worth losing. So
        can what HTTP calls idempotent (GET, PUT, DELETE). A message to a person cannot.
        """
        assert self._way is not None
        return await self._way.call(method, url, headers, body, within=within, most=most, again=again)

    async def reach(self, url: str, *, within: float) -> bool:
        """Connect and, with https, see that the other end is whom it says, but ask nothing. Raises Unanswered.

        False: nothing was tried, since a proxy stands between.
        """
        if not isinstance(self._way, Direct):
            return False
        await self._way.reach(url, within=within)
        return True
