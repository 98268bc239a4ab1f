"""A pooler in transaction mode, as harsh as one may be: the next transaction of a client always gets another session.

It refuses prepared statements that have a name, and gives every client a process id of its own making, as PgBouncer
does. With `TESTS_POOLER=1` the tests of the store take a real PgBouncer instead (see `tests.servers`).
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

SESSIONS = 6
_STARTUP = struct.pack("!i", 196608) + b"user\0oncehook\0database\0postgres\0\0"


class _Message:
    def __init__(self, kind: bytes, body: bytes) -> None:
        self.kind = kind
        self.body = body

    @property
    def wire(self) -> bytes:
        return self.kind + struct.pack("!i", len(self.body) + 4) + self.body


async def _read(reader: asyncio.StreamReader) -> _Message:
    kind = await reader.readexactly(1)
    (length,) = struct.unpack("!i", await reader.readexactly(4))
    return _Message(kind, await reader.readexactly(length - 4))


class _Session:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.greeting: list[_Message] = []

    @classmethod
    async def open(cls, host: str, port: int) -> _Session:
        made = cls(*await asyncio.open_connection(host, port))
        made.writer.write(struct.pack("!i", len(_STARTUP) + 4) + _STARTUP)
        while (message := await _read(made.reader)).kind != b"Z":
            if message.kind == b"S":
                made.greeting.append(message)
        return made


class TransactionPooler:
    def __init__(self, host: str, port: int, sessions: int = SESSIONS) -> None:
        self._server = (host, port)
        self._size = sessions
        self._clients: set[asyncio.Task[None]] = set()
        self._numbers = iter(range(1_000_000, 2_000_000))
        self._greeting: list[_Message] = []

    async def start(self, port: int = 0) -> int:
        """Open all sessions, then listen. Returns the port."""
        self._free: asyncio.Queue[_Session | None] = asyncio.Queue()
        """None stands for a session that has to be opened first."""
        for _ in range(self._size):
            self._free.put_nowait(await _Session.open(*self._server))
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._listener.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        while not self._free.empty():
            if (session := self._free.get_nowait()) is not None:
                session.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                if await self._greet(reader, writer):
                    while True:
                        await self._run_transaction(reader, writer)
        finally:
            writer.close()
            self._clients.discard(task)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while True:
            (length,) = struct.unpack("!i", await reader.readexactly(4))
            (code,) = struct.unpack("!i", (await reader.readexactly(length - 4))[:4])
            if code == 196608:
                break
            if code == 80877102:  # to cancel is left out: nobody listens
                return False
            writer.write(b"N")  # neither TLS nor GSSAPI
        if not self._greeting:
            session = await _Session.open(*self._server)
            self._greeting = session.greeting
            session.writer.close()
        answer = [_Message(b"R", struct.pack("!i", 0)), *self._greeting]
        answer.append(_Message(b"K", struct.pack("!ii", next(self._numbers), 0)))
        writer.write(b"".join(message.wire for message in [*answer, _Message(b"Z", b"I")]))
        return True

    async def _run_transaction(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: _Session | None = None
        try:
            while True:
                asked = await _read_request(reader)
                if session is None:
                    session = await self._take()
                session.writer.write(asked)
                while (answer := await _read(session.reader)).kind != b"Z":
                    writer.write(answer.wire)
                if answer.body == b"I":
                    self._free.put_nowait(session)
                    session = None
                    writer.write(answer.wire)
                    return
                writer.write(answer.wire)
        finally:
            if session is not None:  # its client, or its server, has gone in the middle of a transaction
                session.writer.close()
                self._free.put_nowait(None)

    async def _take(self) -> _Session:
        """The session that was free for the longest."""
        session = await self._free.get()
        try:
            return session or await _Session.open(*self._server)
        except BaseException:
            self._free.put_nowait(None)
            raise


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """All messages up to the one that asks for an answer. Raises ConnectionError when the client goes."""
    asked = b""
    while True:
        message = await _read(reader)
        if message.kind == b"X":
            raise ConnectionError
        if message.kind == b"P" and not message.body.startswith(b"\0"):
            raise ConnectionError("a prepared statement with a name")
        asked += message.wire
        if message.kind in (b"Q", b"S"):
            return asked


@contextmanager
def transaction_pooler(server: str) -> Iterator[str]:
    """The address of a pooler in front of this server, on a thread of its own."""
    where = urlsplit(server)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    pooler = TransactionPooler(where.hostname or "", where.port or 0)
    try:
        port = asyncio.run_coroutine_threadsafe(pooler.start(), loop).result(60)
        yield f"postgresql://oncehook@127.0.0.1:{port}/postgres"
        asyncio.run_coroutine_threadsafe(pooler.stop(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
