"""Deadlines and caps on connections, which uvicorn does not have: a sender cannot hold us by being slow.

A request's head must be complete within 10 seconds and 64 KB, its body within 30 seconds (S14); one address holds a
bounded share of the connections. Deadlines are looked at once a second for all connections, so a request pays for
none of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


@dataclass(slots=True, frozen=True)
class Limits:
    """How much patience one connection gets."""

    head_seconds: float = 10.0
    body_seconds: float = 30.0
    head_bytes: int = 64 << 10
    connections: int = 8192
    per_address: int = 512


_REFUSALS: Final = {
    408: b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    503: b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
}


class Guard:
    """Watches over all connections of one server."""

    def __init__(self, limits: Limits, is_proxy: Callable[[str], bool]) -> None:
        self.limits = limits
        self._is_proxy = is_proxy
        self._open: set[_Guarded] = set()
        self._by_address: Counter[str] = Counter()

    def protocol(self) -> type[HttpToolsProtocol]:
        """The protocol class to give to uvicorn."""
        return type("GuardedProtocol", (_Guarded,), {"guard": self})

    def admit(self, connection: _Guarded) -> bool:
        """Count a connection in; False when it is one too many."""
        address = connection.client[0] if connection.client else ""
        connection.address = address
        self._open.add(connection)
        self._by_address[address] += 1
        if len(self._open) > self.limits.connections:
            return False
        return self._by_address[address] <= self.limits.per_address or self._may_hold_many(address)

    def _may_hold_many(self, address: str) -> bool:
        # Behind a proxy everybody has the proxy's address, and this machine is not a stranger.
        try:
            return ip_address(address).is_loopback or self._is_proxy(address)
        except ValueError:
            return True

    def release(self, connection: _Guarded) -> None:
        """Count a connection out."""
        if connection in self._open:
            self._open.discard(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    async def watch(self) -> None:
        """Close what takes too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for connection in [c for c in self._open if c.is_late(now)]:
                connection.refuse(408)


class _Guarded(HttpToolsProtocol):
    guard: Guard

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.address = ""
        self._since: float | None = None
        """When the request that is being read began; None between requests."""
        self._in_head = True
        self._head_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        if not self.guard.admit(self):
            self.refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.release(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._since is None:
            self._since = self.loop.time()
        if self._in_head:
            self._head_size += len(data)
        super().data_received(data)
        if self._in_head and self._head_size > self.guard.limits.head_bytes:
            self.refuse(431)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._since, self._in_head, self._head_size = None, True, 0

    def is_late(self, now: float) -> bool:
        """Whether the request being read has outrun its deadline."""
        if self._since is None:
            return False
        limits = self.guard.limits
        return now - self._since > (limits.head_seconds if self._in_head else limits.body_seconds)

    def refuse(self, status: int) -> None:
        """End this connection with a bare answer."""
        if not self.transport.is_closing():
            if self.cycle is None or not self.cycle.response_started:
                self.transport.write(_REFUSALS[status])
            self.transport.close()
