"""Calls without a proxy: connections are made past the guard, kept between calls, and used again.

A request comes in from `Outbound`; an `Answer` goes out, or an `Unanswered` is raised. Every address is judged when its
name is looked up and again on the socket that is about to connect to it (S17).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from aiohappyeyeballs import start_connection

from oncehook.outbound import Answer, Unanswered, silence
from oncehook.outbound.addresses import Guard, is_address
from oncehook.outbound.connection import Closed, Connection, Late, NoHttp
from oncehook.outbound.names import LookUp, Names
from oncehook.outbound.requests import Origin, Target, head_of, target_of

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
        """See `Outbound.request`."""
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
        """See `Outbound.reach`."""
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
