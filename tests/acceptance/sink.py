"""A real HTTP server on the loopback that answers as a test says, and remembers what it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = int | tuple[int, dict[str, str], bytes]


@dataclass
class Request:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Sink:
    """Answers one after the other with what it was given, and with the last of it for ever after."""

    answers: Sequence[Answer] | Callable[[Request], Answer] = (200,)
    requests: list[Request] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    delay: float = 0.0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def _answer(self, request: Request) -> Answer:
        if callable(self.answers):
            return self.answers(request)
        return self.answers[min(len(self.requests), len(self.answers)) - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                answer = self._answer(request)
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                await asyncio.sleep(self.delay)
                self.at_once -= 1
                status, headers, body = (answer, {}, b"") if isinstance(answer, int) else answer
                lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sink]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(first.split(" ")[1], headers, await reader.readexactly(int(headers.get("content-length", 0))))
