"""A TCP proxy that stands between two programs and breaks what passes through it, at a byte of one's choice.

Every connection is a `Link`; a `Fault` strikes it when so many bytes have passed in one direction. Some are laid when
the connection is made (`plan`), some while it is in use (`Proxy.strike`). Runs on the driver's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

KINDS = ("cut", "reset", "half_open", "delay", "drip", "lose_answer")
"""Closed in order; reset; open and silent; late; byte by byte; handed on, and the answer to it withheld."""

_ABORT = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Fault:
    """What happens to a link, when this many bytes have gone `up` (to the target) or `down`."""

    kind: str
    side: str
    after: int
    seconds: float = 0.5


@dataclass(eq=False, slots=True)
class Link:
    """One connection through the proxy."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    fault: Fault | None
    number: int
    passed: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def abort(self, *, reset: bool) -> None:
        for writer in (self.near, self.far):
            wire = writer.get_extra_info("socket")
            if reset and wire is not None and wire.fileno() >= 0:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            writer.transport.abort() if reset else writer.close()


class Proxy:
    """Listens on a port of the loopback and hands on to another one, unless a fault says otherwise."""

    def __init__(self, target: int, told: Callable[[str], None], plan: Callable[[], Fault | None]) -> None:
        self.target = target
        self.port = 0
        self.links: set[Link] = set()
        self.plan = plan
        self._told = told
        self._count = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for link in list(self.links):
                link.abort(reset=True)

    def strike(self, link: Link, kind: str, side: str, after: int, seconds: float) -> None:
        """Lay a fault for a link in use: so many bytes from now."""
        link.fault = Fault(kind, side, link.passed[side] + after, seconds)

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            answers, far = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            near.transport.abort()
            return
        self._count += 1
        link = Link(near, far, self.plan(), self._count)
        self.links.add(link)
        ways = [asyncio.create_task(self._pass(link, "up", reader, far))]
        ways.append(asyncio.create_task(self._pass(link, "down", answers, near)))
        # Who has gone away must not be spoken for: when one side ends, so does the other.
        with contextlib.suppress(asyncio.CancelledError):  # at the end of all
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        link.abort(reset=False)
        self.links.discard(link)

    async def _pass(self, link: Link, side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                fault = link.fault
                if fault and fault.side == side and link.passed[side] + len(data) > fault.after:
                    link.fault = None
                    await self._break(link, fault, data, writer)
                else:
                    writer.write(data)
                    await writer.drain()
                link.passed[side] += len(data)

    async def _break(self, link: Link, fault: Fault, data: bytes, writer: asyncio.StreamWriter) -> None:
        """May end in ConnectionError: then the link is over."""
        self._told(fault.kind)
        whole = max(fault.after - link.passed[fault.side], 0)
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
            writer.write(data)
        elif fault.kind == "drip":
            for n in range(0, len(data), piece := max(len(data) // 20, 1)):
                writer.write(data[n : n + piece])
                await asyncio.sleep(fault.seconds / 20)
        else:
            writer.write(data[:whole] if fault.kind != "lose_answer" else b"")
            await writer.drain()
            if fault.kind == "half_open":
                await asyncio.sleep(fault.seconds)
            link.abort(reset=fault.kind != "cut")
            raise ConnectionResetError
        await writer.drain()
