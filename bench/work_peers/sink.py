"""Where HTTP deliveries go: a server that reads a request and says 200, with as little work as Python can do.

Run as `python -m bench.work_peers.sink PORT`, in a process of its own, until it is stopped.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nok"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Sink(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember whom to answer."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._waiting += data
        while (head := self._waiting.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._waiting, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._waiting) < end:
                return
            self._waiting = self._waiting[end:]
            self._transport.write(ANSWER)


async def serve(port: int) -> None:
    """Listen until stopped."""
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
