"""A server on the loopback that speaks raw bytes: it remembers what it was asked, and misbehaves by script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def answer(status: int, body: object = b"", **headers: str) -> bytes:
    """An answer as bytes; what is not bytes is written as JSON, and `_` in a header's name is a dash."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + raw


def let_time_pass(loop: asyncio.AbstractEventLoop, seconds: float = 60.0) -> None:
    """For deadlines on this loop: so they may be generous, and nobody waits for them all the same."""
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Say nothing until the caller's time is over, which is at once."""
    let_time_pass(asyncio.get_running_loop())
    await asyncio.Event().wait()


async def cut(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Close the connection instead of answering."""
    writer.close()


@dataclass
class Api:
    """Answers with one thing after the other, and with the last of them for ever after."""

    says: list[bytes | Behaviour]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        with suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                asked = await read_request(reader)
                self.asked.append(asked)
                says = self.says[min(len(self.asked), len(self.says)) - 1]
                if callable(says):
                    await says(asked, writer)
                else:
                    writer.write(says)
        writer.transport.abort()

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Api]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, **options)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks)


async def read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in lines)}
    return Asked(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))
