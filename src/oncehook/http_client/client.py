"""The guarded HTTP client: a request goes out, an `HttpAnswer` comes back or an `Unanswered` is raised.

Every address is checked when a name is looked up and again on the socket about to connect, so that a name whose address
changes in between is caught (S17). No redirects, cookies or compression, and only a proxy that was named (S20). A proxy
looks names up itself, so behind one only literal addresses are checked; the proxy's own address is the operator's
choice. Connections are kept between calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from aiohappyeyeballs import start_connection

from oncehook.errors import ConfigError
from oncehook.http_client import AddressForbidden, CallTimes, HttpAnswer, Unanswered, Untrusted
from oncehook.http_client.addresses import AddressRefused, Guard, LookUp, Names, Network
from oncehook.http_client.connection import Closed, Connection, Late, NoHttp, Origin, Target, encode_head, read_target
from oncehook.http_client.proxy import Proxy, ProxyFailed, open_tunnel, read_proxy
from oncehook.http_client.urls import is_address

MOST_KEPT: Final = 4096
"""Bytes of an answer's body that are read; then the connection is closed."""
_IDLE_KEPT: Final = 15.0
"""Seconds for which an idle connection is kept for the next call."""
_MOST_ORIGINS: Final = 64
"""Servers to which idle connections are kept: events that name their addresses could else use up all sockets."""
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
"""Methods whose request may be received twice, by the rules of HTTP."""
_STAGGER: Final = 0.25
"""Seconds after which the next address is tried while the first is silent (RFC 8305)."""
_Info = tuple[
    int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]

gate: Callable[[str], str | None] | None = None
"""Returns why a host is not called, or None; set by tests that must not reach the network."""


class HttpClient:
    """A client with its own rules and connections, so that no destination can use what another one allows."""

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

        `proxy` (`http://user:password@host:port` or `socks5://…`) may be a private address.
        `idle` is for how many seconds an unused connection is kept.
        """
        self._guard = Guard(allow_private)
        self._proxy = None if proxy is None else read_proxy(proxy)
        self._dialled = self._guard if self._proxy is None else Guard(allow_private=True)
        """The guard of the sockets: behind a proxy, only the proxy's address is connected to."""
        self._names = Names(self._dialled, look_up)
        self._idle = idle
        self._tls = None if ca is None else read_certificates(ca)
        self._kept: defaultdict[Origin, list[Connection]] = defaultdict(list)
        """Idle connections, the newest last."""
        self._open: set[Connection] = set()
        self._close_timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_empty = asyncio.Event()

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Close every connection; pending calls fail."""
        self._loop = None
        self._names.close()
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        for connection in list(self._open):
            connection.abort()
        if self._open:
            self._is_empty.clear()
            await self._is_empty.wait()  # the event loop takes a few turns to close a socket

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, within: float) -> HttpAnswer:
        """POST a request that carries an Idempotency-Key: like `request` with `again`."""
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
    ) -> HttpAnswer:
        """Call an address that `read_url` has read, within so many seconds in all. Raises Unanswered.

        An answer counts once its head is complete: a body that does not come in time is cut there, as it is after
        `most` bytes. A header that no request can contain raises ValueError, and nothing is sent.

        With `again`, a call on a connection that the other end was just closing is sent once more. That case looks like
        a call that was received and not answered, so the other end may receive it twice: harmless with an
        Idempotency-Key, because delivery is at least once anyway (R53), and for idempotent methods (GET, PUT, DELETE),
        but not for a message to a person.
        """
        assert self._loop is not None
        target = read_target(url)
        by_proxy = self._proxy is not None and self._proxy.makes_requests(url)
        if by_proxy:
            assert self._proxy is not None
            headers = {**headers, **self._proxy.authorization}
        head = encode_head(method, target, headers, body, absolute=by_proxy)
        times = CallTimes(self._loop.time())
        deadline = times.began + within
        may_repeat = again or method in _IDEMPOTENT
        try:
            return await self._call(target, head, body, times, deadline, most, may_repeat, method == "HEAD", by_proxy)
        except Late as late:
            error = _late(within, reached=late.reached)
        except Unanswered as unanswered:
            error = unanswered
        error.times = times
        times.total = asyncio.get_running_loop().time() - times.began
        raise error from None

    async def _call(
        self,
        target: Target,
        head: bytes,
        body: bytes | None,
        times: CallTimes,
        deadline: float,
        most: int,
        may_repeat: bool,
        bodiless: bool,
        by_proxy: bool,
    ) -> HttpAnswer:
        """Send a request on a kept connection or a new one. Raises Late and Unanswered."""
        connection = self._take(target.origin)
        reached = connection is not None
        answer: HttpAnswer | None = None
        try:
            if connection is not None:
                try:
                    answer = await connection.exchange(
                        head, body, deadline=deadline, most=most, times=times, bodiless=bodiless
                    )
                except Closed as error:
                    if self._loop is None or not (error.silent and may_repeat):
                        raise
            if answer is None:
                connection = await self._dial(target, deadline, reached, times)
                reached = True
                answer = await connection.exchange(
                    head, body, deadline=deadline, most=most, times=times, bodiless=bodiless
                )
        except Late as late:
            late.reached = reached
            raise
        except Closed:
            raise Unanswered(f"{target.host} closed the connection before it answered") from None
        except NoHttp:
            raise Unanswered(f"{target.host} did not answer in HTTP") from None
        if by_proxy and answer.status == 407:
            assert self._proxy is not None
            raise Unanswered(f"the proxy {self._proxy.host} does not take these credentials", reached=False)
        return answer

    async def reach(self, url: str, *, within: float) -> bool:
        """Connect and, with https, check the certificate, but ask nothing. Raises Unanswered.

        False: nothing was tried, because of a proxy in between.
        """
        assert self._loop is not None
        if self._proxy is not None:
            return False
        try:
            now = self._loop.time()
            connection = await self._dial(read_target(url), now + within, reached=False, times=CallTimes(now))
        except Late:
            raise _late(within, reached=False) from None
        connection.abort()
        return True

    # -- connections that are kept -------------------------------------------------------------

    def _take(self, origin: Origin) -> Connection | None:
        assert self._loop is not None
        kept = self._kept.get(origin)
        while kept:
            connection = kept.pop()
            if connection.is_open and self._loop.time() < connection.idle_since + self._idle:
                return connection
            connection.abort()
        return None

    def keep(self, connection: Connection) -> None:
        if self._loop is None:
            connection.abort()
            return
        if len(self._kept) >= _MOST_ORIGINS and connection.origin not in self._kept:
            self._close_oldest()
        connection.idle_since = self._loop.time()
        self._kept[connection.origin].append(connection)
        if self._close_timer is None:
            self._close_timer = self._loop.call_later(self._idle, self._close_idle)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._is_empty.set()
        kept = self._kept.get(connection.origin)
        if kept is not None:
            if connection in kept:
                kept.remove(connection)
            if not kept:
                del self._kept[connection.origin]

    def _close_oldest(self) -> None:
        """Close the idle connections to the server that was called first."""
        for connection in self._kept.pop(next(iter(self._kept))):
            connection.abort()

    def _close_idle(self) -> None:
        """Close connections that were idle for too long; schedule the next check."""
        assert self._loop is not None
        due = self._loop.time() - self._idle
        waiting = [connection for kept in self._kept.values() for connection in kept]
        for connection in waiting:
            if connection.idle_since <= due:
                connection.abort()
        oldest = min((one.idle_since for one in waiting if one.idle_since > due), default=None)
        self._close_timer = None if oldest is None else self._loop.call_at(oldest + self._idle, self._close_idle)

    # -- connecting ----------------------------------------------------------------------------

    async def _dial(self, target: Target, deadline: float, reached: bool, times: CallTimes) -> Connection:
        """Open a new connection. With `reached`, an earlier connection may have carried the call already."""
        if gate is not None and (why := gate(target.origin.host)) is not None:
            raise AddressForbidden(f"{target.host} is not called: {why}", reached=reached)
        limit, loop = asyncio.timeout_at(deadline), asyncio.get_running_loop()
        origin = target.origin
        step = "look up"
        try:
            async with limit:
                if self._proxy is not None and is_address(origin.host):
                    self._guard.check(origin.host)
                host, port = (origin.host, origin.port) if self._proxy is None else (self._proxy.host, self._proxy.port)
                addresses: Sequence[str] = [host]
                if not is_address(host):
                    began = loop.time()
                    addresses = await self._names.addresses(host, port)
                    times.dns = loop.time() - began
                step = "connect"
                connection = await self._connect(origin, [_info(address, port) for address in addresses], times)
        except ProxyFailed as error:
            raise Unanswered(str(error), reached=reached) from None
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError where asyncio raises OSError
            if limit.expired():
                raise Late from None
            raise _not_connected(target.host, self._proxy, step, error, reached) from None
        if self._loop is None:
            connection.abort()
            raise Unanswered(f"{target.host} is not called: this client was closed", reached=reached)
        return connection

    async def _connect(self, origin: Origin, infos: list[_Info], times: CallTimes) -> Connection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        opened = await start_connection(infos, happy_eyeballs_delay=_STAGGER, loop=loop, socket_factory=self._socket)
        connection = Connection(loop, origin, self)
        try:
            if self._proxy is not None:
                await open_tunnel(loop, opened, self._proxy, origin.scheme, origin.host, origin.port)
            times.connect = loop.time() - began
            if origin.scheme == "https":
                began = loop.time()
                tls, name = self._tls or _system_certificates(), origin.host.rstrip(".")
                await loop.create_connection(lambda: connection, sock=opened, ssl=tls, server_hostname=name)
                times.tls = loop.time() - began
            else:
                await loop.create_connection(lambda: connection, sock=opened)
        except BaseException:
            opened.close()
            raise
        self._open.add(connection)
        return connection

    def _socket(self, info: _Info) -> socket.socket:
        """Check an address once more and return a socket for it."""
        family, kind, protocol, _, address = info
        self._dialled.check(address[0])
        return socket.socket(family, kind, protocol)


def _info(address: str, port: int) -> _Info:
    if ":" in address:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)


# -- certificates ------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _system_certificates() -> ssl.SSLContext:
    """Return one TLS context for all clients: it holds every certificate that the system trusts, which takes memory."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def read_certificates(ca: Path) -> ssl.SSLContext:
    """Trust the certificates of a file instead of the system's (S23). Raises ConfigError for a file without any."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(
            f'"{ca}" cannot be read as a file of certificates.', hint="It is PEM, and must be readable for oncehook."
        ) from None
    context.set_alpn_protocols(["http/1.1"])
    return context


# -- failures: one sentence each, in which nothing of an address but its host occurs -------------


def _late(seconds: float, *, reached: bool) -> Unanswered:
    return Unanswered(f"no answer within {seconds:g} s", reached=reached)


def _not_connected(host: str, proxy: Proxy | None, step: str, error: BaseException, reached: bool) -> Unanswered:
    if isinstance(error, AddressRefused):
        return AddressForbidden(f"{host} is not called: {error}; see allow_private", reached=reached)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"the certificate of {host} is not trusted: {_describe(error)}", reached=reached)
    if proxy is not None:
        return Unanswered(f"cannot connect to the proxy: {_describe(error)}", reached=reached)
    if step == "look up":
        return Unanswered(f"the address of {host} cannot be found: {_describe(error)}", reached=reached)
    return Unanswered(f"cannot connect to {host}: {_describe(error)}", reached=reached)


def _describe(error: BaseException) -> str:
    """Describe an operating system's error in a few words."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError) and error.errno:
        return os.strerror(error.errno)  # event loops word these differently
    text = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
    return " ".join(str(text).split()) or type(error).__name__
