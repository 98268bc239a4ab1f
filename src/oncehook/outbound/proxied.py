"""Calls through a proxy: over HTTP (in a tunnel where there is TLS) or SOCKS5. Loaded when a proxy was named.

The proxy looks names up itself, so only a target written as an address can be judged; its own address is the operator's
word and is not. A request comes in from `HttpClient`; an `Answer` goes out, or an `Unanswered` is raised. The only module
that imports aiohttp.
"""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from oncehook.errors import ConfigError
from oncehook.http_client import Answer, Unanswered, Untrusted, silence
from oncehook.http_client.addresses import AddressRefused, Guard, is_address
from oncehook.http_client.addresses import LookUp, Names
from oncehook.http_client.proxy import Proxy
from oncehook.http_client.urls import host_of

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_LARGE: Final = 1 << 20
"""Bytes from which on a body is sent piece by piece, so that it does not hold the loop."""
_BUFFER: Final = 4096

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


class Proxied:
    """A way out through one proxy, with connections of its own. It lives on one loop, once."""

    def __init__(
        self, proxy: Proxy, guard: Guard, look_up: LookUp | None, tls: ssl.SSLContext | None, idle: float
    ) -> None:
        """`tls` None: trust whom the system trusts."""
        self._proxy = proxy
        self._guard = guard
        self._session = aiohttp.ClientSession(
            connector=_connector(proxy, look_up, tls, idle),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "*/*", "Accept-Encoding": "identity"},
            timeout=_NO_TIMEOUT,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_BUFFER,
        )

    async def close(self) -> None:
        """Close everything; calls under way end in an error."""
        await self._session.close()

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
                if deadline.expired():
                    raise silence.late(within, reached=call.connected) from None
                raise _unanswered(error, host_of(url), call) from None
        finally:
            if response is not None:
                response.close()  # only what was read to its end goes back to be used again; then this does nothing
        if response.status == 407 and self._proxy.makes_requests(url):
            raise Unanswered(f"the proxy {self._proxy.host} does not take these credentials", reached=False)
        return Answer(response.status, bytes(kept), response.headers.get("Retry-After"))

    def _target(self, url: str) -> URL:
        target = _parsed(url)
        if is_address(target.host or ""):
            self._guard.check(target.host or "")
        return target

    async def _send(
        self, call: _Call, method: str, url: URL, headers: Mapping[str, str], body: bytes | None, again: bool
    ) -> aiohttp.ClientResponse:
        _call.set(call)
        while True:
            call.dialled = False
            data = body if body is None or len(body) < _LARGE else io.BytesIO(body)
            try:
                if self._proxy.scheme == "socks5":
                    return await self._session.request(method, url, data=data, headers=headers, allow_redirects=False)
                return await self._by_request(method, url, data, headers)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if call.dialled or not again:
                    raise

    async def _by_request(
        self, method: str, url: URL, data: bytes | io.BytesIO | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Through an HTTP proxy: in a tunnel where there is TLS, otherwise the proxy itself makes the request."""
        proxy = self._proxy
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


async def _read_start(response: aiohttp.ClientResponse, kept: bytearray, most: int) -> None:
    """Read how the body begins into `kept`, which holds what has come even when the rest does not."""
    content = response.content
    while len(kept) < most and not content.at_eof():
        kept += await content.read(most - len(kept))


# -- connecting --------------------------------------------------------------------------------


def _connector(proxy: Proxy, look_up: LookUp | None, tls: ssl.SSLContext | None, idle: float) -> aiohttp.BaseConnector:
    common: dict[str, Any] = {
        "ssl": tls or True,
        "limit": 0,  # whoever calls counts
        "keepalive_timeout": idle,
    }
    if proxy.scheme == "socks5":
        return _socks_connector(proxy, common)
    # The one address that is dialled is the proxy's.
    names = Names(Guard(allow_private=True), look_up)
    return _Connector(resolver=_Resolver(names), socket_factory=_socket, **common)


class _Connector(aiohttp.TCPConnector):
    """Notes when a call has its connection: before that, nobody can have received it."""

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:  # noqa: ASYNC109
        connection = await super().connect(req, traces, timeout)
        _call.get().connected = True
        return connection


def _socket(info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    _call.get().dialled = True
    return socket.socket(*info[:3])


class _Resolver(AbstractResolver):
    """Our names in the library's words."""

    def __init__(self, names: Names) -> None:
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [_resolved(host, address, port) for address in await self._names.resolve(host, port)]

    async def close(self) -> None:
        pass


def _resolved(host: str, address: str, port: int) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return ResolveResult(
        hostname=host, host=address, port=port, family=family, proto=socket.IPPROTO_TCP, flags=socket.AI_NUMERICHOST
    )


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
                raise ProxyFailed(f"the proxy {proxy.host} does not lead there: {silence.reason(error)}") from None
            except ssl.SSLCertVerificationError as error:
                raise aiohttp.ClientConnectorCertificateError(req.connection_key, error) from None
            call = _call.get()
            call.dialled = call.connected = True
            return connection

    return SocksConnector(
        proxy.host, proxy.port, username=proxy.username or None, password=proxy.password or None, rdns=True, **common
    )


# -- what went wrong ---------------------------------------------------------------------------


def _unanswered(error: Exception, host: str, call: _Call) -> Unanswered:
    """One line about what went wrong, in which nothing of the address but its host occurs."""
    said = _silence(error, host)
    said.reached = call.connected
    return said


def _silence(error: Exception, host: str) -> Unanswered:
    cause = getattr(error, "os_error", error)
    if isinstance(cause, AddressRefused):
        return silence.forbidden(host, cause)
    if isinstance(error, ProxyFailed):
        return Unanswered(str(error))
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Unanswered(f"the proxy does not lead to {host}: HTTP {error.status}")
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return Unanswered(f"cannot connect to the proxy: {silence.reason(cause)}")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return silence.not_found(host, cause)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        wrong = silence.reason(error.certificate_error)
        return Untrusted(f"the certificate of {host} is not trusted: {wrong}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return silence.not_connected(host, cause)
    if isinstance(error, aiohttp.ClientResponseError):
        return silence.no_http(host)
    if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
        return silence.closed(host)
    return Unanswered(f"{host} could not be called: {type(error).__name__}")
