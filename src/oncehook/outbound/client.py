"""The guarded client: a request goes out, an `Answer` comes back or an `Unanswered` is raised.

Every address is judged when a name is looked up and again on the socket that is about to connect, so a name that
changes its mind in between reaches nothing (S17). There are no redirects, cookies or compression here, and no proxy but
one that was named (S20); it then looks names up itself, so only a target written as an address can be judged.
Destinations, senders and alerts call it; it is the only module that imports the HTTP library.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from oncehook.errors import ConfigError
from oncehook.outbound import Answer, Forbidden, Unanswered, Untrusted
from oncehook.outbound.addresses import AddressRefused, Guard, Network
from oncehook.outbound.proxies import Proxy, read_proxy
from oncehook.outbound.urls import host_of

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses a host's name leads to."""

MOST_KEPT: Final = 4096
"""Bytes of an answer's body that are read; what comes after stays unread, and the connection is closed."""
_NAMES_KEPT: Final = 10
"""Seconds for which a name is not looked up again. What it led to is judged at every connection all the same."""
_IDLE_KEPT: Final = 15.0
"""Seconds for which an idle connection is kept for the next call."""
_LARGE: Final = 1 << 20
"""Bytes from which on a body is sent piece by piece, so that it does not hold the loop."""

# The deadline is ours, one over everything; the library's would each cover a part.
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)


@dataclass(slots=True)
class _Call:
    """What one call has done so far."""

    dialled: bool = False
    """A socket was made for its last try; otherwise that went over a connection that was there before."""
    connected: bool = False
    """It had a connection, so that the other end may have received it."""


class ProxyFailed(aiohttp.ClientConnectionError):
    """The proxy did not open the way. Its text holds nothing of the proxy's credentials."""


_call: ContextVar[_Call] = ContextVar("oncehook_outbound_call")


class Outbound:
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
        self._tls: ssl.SSLContext | bool = True if ca is None else _trusting(ca)
        self._look_up = look_up or look_up_name
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Be ready to call, on the running loop."""
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=self._connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "*/*", "Accept-Encoding": "identity"},
            timeout=_NO_TIMEOUT,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=MOST_KEPT,
        )

    def _connector(self) -> aiohttp.BaseConnector:
        common: dict[str, Any] = {
            "ssl": self._tls,
            "limit": 0,  # whoever calls counts
            "keepalive_timeout": self._idle,
        }
        if self._proxy is not None and self._proxy.scheme == "socks5":
            return _socks_connector(self._proxy, common)
        # The one address that is dialled is the proxy's, where there is one.
        way = self._guard if self._proxy is None else Guard(allow_private=True)
        return _Connector(
            resolver=_GuardedResolver(way, self._look_up),
            socket_factory=lambda info: _socket(info, way),
            ttl_dns_cache=_NAMES_KEPT,
            **common,
        )

    async def close(self) -> None:
        """Close what is open; a call under way ends in an error."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- calling -------------------------------------------------------------------------------

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

        An answer counts from its status line on: when its body then does not come in time, it is cut where it stands,
        as it is after `most` bytes. `again` lets a call that met a closing connection be sent twice (see `_send`).
        """
        response: aiohttp.ClientResponse | None = None
        kept = bytearray()
        deadline = asyncio.timeout(within)
        call = _Call()
        try:
            async with deadline:
                response = await self._send(call, method, self._target(url), headers, body, again)
                await _read_start(response, kept, most)
        except (aiohttp.ClientError, OSError) as error:
            if response is None:
                late = deadline.expired()
                raise _no_answer_within(within, call) if late else unanswered(error, host_of(url), call) from None
        finally:
            if response is not None:
                response.close()  # only what was read to its end goes back to be used again; then this does nothing
        if response.status == 407 and self._proxy is not None and self._proxy.makes_requests(url):
            raise Unanswered(f"the proxy {self._proxy.host} does not take these credentials", reached=False)
        return Answer(response.status, bytes(kept), response.headers.get("Retry-After"))

    def _target(self, url: str) -> URL:
        target = _parsed(url)
        if self._proxy is not None and _is_address(target.host or ""):
            self._guard.check(target.host or "")
        return target

    async def _send(
        self, call: _Call, method: str, url: URL, headers: Mapping[str, str], body: bytes | None, again: bool
    ) -> aiohttp.ClientResponse:
        """Send it, once; with `again` once more when it met a connection that the other end was just closing.

        Nothing tells that from a call that was received and not answered, so it may be received twice. What carries
        an Idempotency-Key can bear that, delivery being at least once anyway (R53): the attempt is not worth losing.
        A message to a person cannot.
        """
        assert self._session is not None
        _call.set(call)
        while True:
            call.dialled = False
            data = body if body is None or len(body) < _LARGE else io.BytesIO(body)
            try:
                if self._proxy is None or self._proxy.scheme == "socks5":
                    return await self._session.request(method, url, data=data, headers=headers, allow_redirects=False)
                return await self._by_proxy(self._proxy, method, url, data, headers)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if call.dialled or not again:
                    raise

    async def _by_proxy(
        self, proxy: Proxy, method: str, url: URL, data: bytes | io.BytesIO | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Through an HTTP proxy: in a tunnel where there is TLS, otherwise the proxy itself makes the request."""
        assert self._session is not None
        word = base64.b64encode(proxy.credentials.encode()).decode()
        ours = {"Proxy-Authorization": f"Basic {word}"} if proxy.credentials else {}
        if proxy.makes_requests(str(url)):
            headers = {**headers, **ours}
        return await self._session.request(
            method, url, data=data, headers=headers, allow_redirects=False, proxy=proxy.address, proxy_headers=ours
        )


@lru_cache(maxsize=1024)
def _parsed(url: str) -> URL:
    return URL(url, encoded=True)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _read_start(response: aiohttp.ClientResponse, kept: bytearray, most: int) -> None:
    """Read how the body begins into `kept`, which holds what has come even when the rest does not."""
    content = response.content
    while len(kept) < most and not content.at_eof():
        kept += await content.read(most - len(kept))


def _trusting(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(f'"{ca}" cannot be read as a file of certificates.') from None


# -- connecting --------------------------------------------------------------------------------


class _Connector(aiohttp.TCPConnector):
    """Notes when a call has its connection: before that, nobody can have received it."""

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:  # noqa: ASYNC109
        connection = await super().connect(req, traces, timeout)
        _call.get().connected = True
        return connection


def _socket(info: tuple[int, int, int, str, tuple[object, ...]], guard: Guard) -> socket.socket:
    """The socket for one address: the last place where it can be refused, and the one that counts."""
    _call.get().dialled = True
    family, kind, protocol, _, address = info
    guard.check(str(address[0]))
    return socket.socket(family, kind, protocol)


def _socks_connector(proxy: Proxy, common: Mapping[str, Any]) -> aiohttp.BaseConnector:
    try:
        import aiohttp_socks
    except ImportError:
        raise ConfigError(
            "A SOCKS proxy needs the package aiohttp-socks.", hint="pip install 'oncehook[proxy]'"
        ) from None
    failures = (aiohttp_socks.ProxyError, aiohttp_socks.ProxyConnectionError, aiohttp_socks.ProxyTimeoutError)

    class SocksConnector(aiohttp_socks.ProxyConnector):
        async def connect(self, req: ClientRequest, traces: list[Trace], timeout: Any) -> Connection:  # noqa: ASYNC109
            try:
                connection = await super().connect(req, traces, timeout)
            except failures as error:
                raise ProxyFailed(f"the proxy {proxy.host} does not lead there: {_reason(error)}") from None
            except ssl.SSLCertVerificationError as error:
                raise aiohttp.ClientConnectorCertificateError(req.connection_key, error) from None
            call = _call.get()
            call.dialled = call.connected = True
            return connection

    return SocksConnector(
        proxy.host, proxy.port, username=proxy.username or None, password=proxy.password or None, rdns=True, **common
    )


# -- looking up --------------------------------------------------------------------------------


class _GuardedResolver(AbstractResolver):
    """Leads to the allowed ones among the addresses of a name; when there are none, the name is refused."""

    def __init__(self, guard: Guard, look_up: LookUp) -> None:
        self._guard = guard
        self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        refused: list[AddressRefused] = []
        allowed: list[ResolveResult] = []
        for address in await self._look_up(host, port):
            try:
                self._guard.check(address)
            except AddressRefused as error:
                refused.append(error)
            else:
                allowed.append(_resolved(host, address, port))
        if refused and not allowed:
            raise refused[0]
        if not allowed:
            raise OSError("the name leads to no address")
        return allowed

    async def close(self) -> None:
        pass


def _resolved(host: str, address: str, port: int) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return ResolveResult(
        hostname=host, host=address, port=port, family=family, proto=socket.IPPROTO_TCP, flags=socket.AI_NUMERICHOST
    )


async def look_up_name(host: str, port: int) -> Sequence[str]:
    """Ask the system, on a thread of its own: a name server that hangs must hold up nobody else's work."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[str]] = loop.create_future()

    def tell(error: OSError | None, addresses: Sequence[str] = ()) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(addresses)

    def ask() -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            except (OSError, UnicodeError) as error:
                reason = error if isinstance(error, OSError) else OSError("the name cannot be written for the DNS")
                loop.call_soon_threadsafe(tell, reason)
            else:
                loop.call_soon_threadsafe(tell, None, list(dict.fromkeys(str(info[4][0]) for info in infos)))

    threading.Thread(target=ask, name="oncehook-dns", daemon=True).start()
    return await found


# -- what went wrong ---------------------------------------------------------------------------


def _no_answer_within(seconds: float, call: _Call) -> Unanswered:
    return Unanswered(f"no answer within {seconds:g} s", reached=call.connected)


def unanswered(error: Exception, host: str, call: _Call) -> Unanswered:
    """One line about what went wrong, in which nothing of the address but its host occurs."""
    kind, text = _silence(error, host)
    return kind(text, reached=call.connected)


def _silence(error: Exception, host: str) -> tuple[type[Unanswered], str]:
    cause = getattr(error, "os_error", error)
    if isinstance(cause, AddressRefused):
        return Forbidden, f"{host} is not called: {cause}; see allow_private"
    if isinstance(error, ProxyFailed):
        return Unanswered, str(error)
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Unanswered, f"the proxy does not lead to {host}: HTTP {error.status}"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return Unanswered, f"cannot connect to the proxy: {_reason(cause)}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Unanswered, f"the address of {host} cannot be found: {_reason(cause)}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return Untrusted, f"the certificate of {host} is not trusted: {_reason(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return Unanswered, f"cannot connect to {host}: {_reason(cause)}"
    if isinstance(error, aiohttp.ClientResponseError):
        return Unanswered, f"{host} did not answer in HTTP"
    if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
        return Unanswered, f"{host} closed the connection before it answered"
    return Unanswered, f"{host} could not be called: {type(error).__name__}"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError) and error.errno:
        return os.strerror(error.errno)  # the loops each put it in words of their own
    text = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
    return " ".join(str(text).split()) or type(error).__name__
