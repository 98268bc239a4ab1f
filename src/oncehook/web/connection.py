"""One HTTP/1.1 connection: parsed by httptools, held to deadlines and caps, answered by `hooks` or an ASGI application.

A request's head must be complete within 10 seconds and 64 KB, its body within 30 seconds (S14), and an answer must be
read within as long. One address, or one IPv6 /64, gets a bounded share of the connections, and when all are in use the
longest idle one is closed. Deadlines are checked once a second for all connections, so a request pays for none of them.
Framing that two programs could read differently is refused (S15): by the parser, and here where the parser is lenient.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools

from oncehook.errors import Overloaded, Rejected
from oncehook.ingest import Begun, Deferred, Lookup
from oncehook.logs import ration
from oncehook.model import Headers
from oncehook.sources import Network, Reply
from oncehook.web.asgi import App, Message
from oncehook.web.counts import NetworkCount
from oncehook.web.hooks import HookRequest, Hooks
from oncehook.web.peers import UNKNOWN, Scope, is_shared_address, network_of, plain

log = logging.getLogger("oncehook.web")


@dataclass(slots=True, frozen=True)
class ConnectionLimits:
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 75.0
    head_bytes: int = 64 << 10
    """What a request may have besides its body; each byte of body buys one more, for the frames of small chunks."""
    pipelined: int = 64
    """Requests of one connection that may wait behind the one being answered: each costs more than its bytes."""
    connections: int = 8192
    per_address: int = 512


DRAIN_SECONDS: Final = 25.0
BACKLOG: Final = 2048
OTHER_FILES: Final = 256
"""Open files that are not connections: the store's, and room to spare."""


def limit_connections(connections: int) -> int:
    """Return how many connections this process may hold open; raise its limit of open files if allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(allowed - OTHER_FILES, 1)


class HandOver(Protocol):
    """Other processes of this server, which answer some of the requests."""

    def answers(self, *, is_hook: bool) -> bool:
        """Tell whether a request below the prefix of `hooks`, or another one, is for them."""

    def take(self, descriptor: int, data: bytes) -> bool:
        """Take a connection, with the request that was read off it. False: too many are on their way."""


class Connections:
    """All connections of one listener, what answers them, and their tasks."""

    def __init__(
        self,
        app: App,
        hooks: Hooks | None = None,
        limits: ConnectionLimits | None = None,
        trusted: Sequence[Network] = (),
        count: NetworkCount | None = None,
        others: HandOver | None = None,
    ) -> None:
        self.accept = partial(InboundConnection, self)
        """Makes the protocol of one connection."""
        self.app = app
        self.hooks = hooks
        """Answers what comes below its prefix, without ASGI."""
        self.limits = limits or ConnectionLimits()
        self._trusted = trusted
        self._count = count or NetworkCount()
        self.others = others
        self.open: set[InboundConnection] = set()
        self.drain_until: float | None = None
        """When what is under way must have ended, by the loop's clock; None while nothing stops."""
        self.resting: dict[InboundConnection, None] = {}
        """Connections that wait for the whole head of a request, by when they began to."""
        self.refused: Counter[int] = Counter()
        """Connections refused since the last line about it, by status."""
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, connection: InboundConnection) -> bool:
        """Count a connection in; return False when it is one too many.

        When all are in use, the one that has waited longest for a request is closed instead. Bytes of a head do not
        shorten that wait: otherwise a few of them now and then would keep every connection.
        """
        self.open.add(connection)
        self._count.add(connection.network, 1)
        many = self._count.of(connection.network) > self.limits.per_address
        if many and not self.may_hold_many(connection.address):
            return False  # checked first, so that one network cannot displace all others
        if self._count.total > self.limits.connections and not self._make_room():
            return False
        self.resting[connection] = None
        return True

    def _make_room(self) -> bool:
        longest = next(iter(self.resting), None)
        if longest is None:
            return False
        self.release(longest)
        longest.make_way()
        return True

    def may_hold_many(self, address: str) -> bool:
        return is_shared_address(address, self._trusted)

    def release(self, connection: InboundConnection) -> None:
        if connection in self.open:
            self.open.discard(connection)
            self.resting.pop(connection, None)
            self._count.add(connection.network, -1)

    async def adopt(self, descriptor: int, data: bytes) -> None:
        """Go on with a connection of another process, from the request that it read off it."""
        taken = socket.socket(fileno=descriptor)
        try:
            taken.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(partial(self.accept, data), taken)
        except OSError:  # its sender is gone
            taken.close()

    def run(self, answer: Coroutine[Any, Any, None]) -> None:
        """Run the task that answers a request; a stopping server waits for it."""
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for connection in [c for c in self.open if c.is_late(now)]:
                connection.refuse(408)
            for connection in [c for c in self.open if c.is_idle(now)]:
                connection.transport.close()
            if self.hooks is not None:
                self.hooks.enforce_budget()
            if self.refused:  # one record for all, so that a flood of connections does not flood the log
                log.warning("connections.refused", extra={"fields": {"statuses": dict(self.refused)}})
                self.refused.clear()

    def shut_down(self) -> None:
        """Close idle connections, and the others behind the answers to what is under way."""
        if self.drain_until is None:
            self.drain_until = asyncio.get_running_loop().time() + DRAIN_SECONDS
        for connection in list(self.open):
            connection.shut_down()

    @contextlib.asynccontextmanager
    async def serving(self, *listeners: socket.socket, is_urgent: Callable[[], bool]) -> AsyncIterator[None]:
        """Answer connections of these sockets while the block runs; behind it, finish what is under way, unless it is
        urgent."""
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(self.accept, sock=listener, backlog=BACKLOG) for listener in listeners]
        watch = asyncio.create_task(self.watch())
        try:
            yield
        finally:
            for server in servers:
                server.close()
            await self.drain(is_urgent)
            watch.cancel()
            for listener in listeners:
                listener.close()

    async def drain(self, is_urgent: Callable[[], bool]) -> None:
        """Close idle connections, answer what is under way on the others, and cut off what takes too long."""
        self.shut_down()
        try:
            async with asyncio.timeout_at(self.drain_until):
                while (self.open or self._tasks) and not is_urgent():  # noqa: ASYNC110 - once in a server's life
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("server.drain_timeout", extra={"fields": {"requests": len(self._tasks)}})
            for task in self._tasks:
                task.cancel()
        for _ in range(5):  # one that was accepted a moment ago comes to be in the next rounds of the loop
            for connection in list(self.open):
                connection.transport.abort()
            await asyncio.sleep(0)


# -- answers -----------------------------------------------------------------------------------


_PHRASES: Final = {int(status): status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)
}


@lru_cache(maxsize=256)
def _encode_head(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return _STATUS_LINES[status] + b"".join(b"%s: %s\r\n" % (name.lower(), value) for name, value in headers)


def encode_reply(reply: Reply, *, keep_alive: bool, has_body: bool = True) -> bytes:
    """Return the whole answer as bytes; headers are those of `Reply.framed_headers`."""
    end = b"" if keep_alive else b"connection: close\r\n"
    head = _encode_head(reply.status, reply.headers)
    if reply.status == 204:
        return b"%s%s\r\n" % (head, end)
    return b"%scontent-length: %d\r\n%s\r\n%s" % (head, len(reply.body), end, reply.body if has_body else b"")


def _refusal(line: str, code: str, *headers: str) -> bytes:
    body = f'{{"error":"{line[4:]}.","code":"{code}"}}'
    lines = [f"HTTP/1.1 {line}", *headers, "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "connection: close", "", body]).encode()


_REFUSALS: Final = {
    400: _refusal("400 Bad Request", "malformed"),
    408: _refusal("408 Request Timeout", "too_slow"),
    431: _refusal("431 Request Header Fields Too Large", "too_large"),
    503: _refusal("503 Service Unavailable", "overloaded", "retry-after: 5"),
}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


# -- one request -------------------------------------------------------------------------------


class Exchange:
    """One request of a connection, and its answer."""

    is_started = is_complete = False
    """Whether its answer has begun, and ended."""

    def __init__(self, connection: InboundConnection, keep_alive: bool, expects: bool) -> None:
        self._connection = connection
        self.keep_alive = keep_alive
        self._expects = expects
        """Whether the sender waits for a word to continue."""

    def begin(self) -> None:
        """Have it answered, because all requests before it are."""
        raise NotImplementedError

    def feed(self, piece: bytes) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Note that its body is complete."""
        raise NotImplementedError

    def pause(self) -> None:
        """Note that all received bytes are read, and some are missing."""

    def disconnect(self) -> None:
        """Note that its sender is gone."""


class HookExchange(Exchange):
    """A request to a source: its body is gathered here, and its answer is written when its commit is done."""

    _waiting: list[bytes] | None = None
    """Pieces of the body that came while a request before it was answered."""
    _is_begun = _is_refused = _is_whole = False
    _begun: Begun

    def __init__(
        self,
        connection: InboundConnection,
        keep_alive: bool,
        expects: bool,
        hook: HookRequest,
        is_plain: bool,
        has_body: bool,
    ) -> None:
        self._connection = connection  # without `super`, because every arrival pays for each call here
        self.keep_alive = keep_alive
        self._expects = expects
        self._hook = hook
        self._is_plain = is_plain
        """Whether its head needs no further look."""
        self._has_body = has_body
        """Whether its answer has one; that to HEAD has none."""

    def begin(self) -> None:
        self._is_begun = True
        if not self._is_plain:
            try:
                self._hook.check_head()
            except Rejected as error:
                self._refuse(error)
                return
            if self._expects:
                self._connection.transport.write(_CONTINUE)
        for piece in self._waiting or ():
            self.feed(piece)
        self._waiting = None
        if self._is_whole and not self._is_refused:
            self._finish()

    def feed(self, piece: bytes) -> None:
        if self._is_refused:
            return  # the rest of the body is read and dropped
        if not self._is_begun:
            self._waiting = self._waiting or []
            self._waiting.append(piece)
            return
        try:
            self._hook.feed(piece)
        except Rejected as error:
            self._refuse(error)

    def pause(self) -> None:
        if self._is_begun and not self._is_refused:
            self._hook.count(self._put_off)

    def end(self) -> None:
        self._is_whole = True
        if self._is_begun and not self._is_refused:
            self._finish()

    def disconnect(self) -> None:
        self._hook.release()

    def _put_off(self) -> None:
        self._refuse(Overloaded())

    def _refuse(self, error: Rejected | Overloaded) -> None:
        self._is_refused = True
        if self._hook.closes(error):
            self.keep_alive = False
        self._answer_soon(self._hook.refuse(error))

    def _finish(self) -> None:
        decided = self._hook.finish()
        if isinstance(decided, Reply):
            self._answer_soon(decided)
        elif isinstance(decided, Lookup):
            decided.call_back(self._finish)
        elif isinstance(decided, Deferred) or decided.source.settings.revive_dead:
            self._connection.server.run(self._complete(decided))
        else:
            self._begun = decided
            decided.pending.call_back(self._decide)

    async def _complete(self, begun: Begun | Deferred) -> None:
        self.answer((await self._connection.hooks.receiver.complete(begun)).reply)

    def _decide(self) -> None:
        self.answer(self._connection.hooks.receiver.finish(self._begun).reply)

    def _answer_soon(self, reply: Reply) -> None:
        # Not while bytes are being parsed: a request behind this one in the same piece must find it unanswered.
        # Otherwise a request behind the last one of a connection would be accepted, too.
        self._connection.loop.call_soon(self.answer, reply)

    def answer(self, reply: Reply) -> None:
        """Write the answer, once the sender reads answers."""
        connection = self._connection
        if connection.is_write_paused and not connection.transport.is_closing():
            connection.unsent = self, reply
            return
        self.is_started = self.is_complete = True
        if not connection.transport.is_closing():
            connection.transport.write(encode_reply(reply, keep_alive=self.keep_alive, has_body=self._has_body))
            if not self.keep_alive:
                connection.transport.close()
        connection.answer_next()


_HIGH_WATER: Final = 64 << 10
"""Bytes of a body that may wait for an application."""
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_FAILED: Final = Reply(500, b"Internal Server Error", ((b"content-type", b"text/plain; charset=utf-8"),))


class AppExchange(Exchange):
    """A request that the ASGI application answers."""

    def __init__(self, connection: InboundConnection, keep_alive: bool, expects: bool, scope: Scope) -> None:
        super().__init__(connection, keep_alive, expects)
        self._scope = scope
        self._news = asyncio.Event()
        self._body = bytearray()
        self._is_whole = self._is_gone = self._is_chunked = False
        self._left = 0
        """Bytes that the answer has still to have, by its own length."""

    def begin(self) -> None:
        self._connection.server.run(self._run())

    def feed(self, piece: bytes) -> None:
        if not self.is_complete:
            self._body += piece
            if len(self._body) > _HIGH_WATER:
                self._connection.pause_reading()
            self._news.set()

    def end(self) -> None:
        self._is_whole = True
        self._news.set()

    def disconnect(self) -> None:
        self._is_gone = True
        self._news.set()

    @property
    def _is_over(self) -> bool:
        return self.is_complete or self._is_gone or self._connection.transport.is_closing()

    async def _run(self) -> None:
        try:
            await self._connection.server.app(self._scope, self._receive, self._send)
            if not self._is_over:
                raise RuntimeError("The application ended without a complete answer.")
        except Exception:
            fields = {"path": self._scope["path"]}
            ration.log(log, logging.ERROR, "request.failed", fields, kind="request", exc_info=True)
            if not self._is_over:
                if not self.is_started:
                    self._connection.transport.write(encode_reply(_FAILED, keep_alive=False))
                self._connection.transport.close()

    async def _receive(self) -> Message:
        if self._expects and not self._connection.transport.is_closing():
            self._expects = False
            self._connection.transport.write(_CONTINUE)
        if not self._is_gone and not self.is_complete:
            self._connection.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self._is_whole}

    async def _send(self, message: Message) -> None:
        await self._connection.wait_until_writable()
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            self._continue(message.get("body", b""), is_last=not message.get("more_body", False))

    def _start(self, status: int, headers: Headers) -> None:
        lines = [_STATUS_LINES[status]]
        has_length = False
        for name, value in headers:
            if _CONTROL.search(value):
                raise RuntimeError("An answer's header has a control character.")
            if name == b"content-length":
                has_length, self._left = True, int(value)
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            lines.append(b"%s: %s\r\n" % (name.lower(), value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self._scope["method"] == "HEAD":
            self._left = 0
        elif not has_length and status not in (204, 304):
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self.is_started, self._expects = True, False
        self._connection.transport.write(b"".join(lines))

    def _continue(self, body: bytes, *, is_last: bool) -> None:
        write = self._connection.transport.write
        if self._scope["method"] == "HEAD":
            pass
        elif self._is_chunked:
            piece = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            write(piece + b"0\r\n\r\n" if is_last else piece)
        else:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("The answer is not as long as its head says.")
            write(body)
        if is_last:
            self.is_complete = True
            self._news.set()
            if not self.keep_alive:
                self._connection.transport.close()
            self._connection.answer_next()


# -- one connection ----------------------------------------------------------------------------


class _RequestLines:
    """A count of the spaces in the first line of each request.

    The parser accepts any number of them, and does not tell where in a piece of bytes a request begins: that is where
    the one before ends, by its head and its length. Every request pays for this, so most of it is done only where a
    head is cut, or a request follows another.
    """

    __slots__ = ("_at", "_data", "_head_is_here", "_in_line", "_known", "_names", "_spaces", "begun", "body", "ended")

    def __init__(self) -> None:
        self._data = b""
        """The piece that is being parsed, behind the last bytes of the one before it where those are of one head."""
        self._known = 0
        """How many of these there are."""
        self._at = 0
        """Where in it the head that is being read begins, or goes on."""
        self._head_is_here = False
        """Whether the head of the body that is being read ended in it."""
        self.body = 0
        """Bytes of the body in it."""
        self.ended = False
        """Whether a request ended in it."""
        self.begun = False
        """Whether a head is being read."""
        self._names: Sequence[bytes] = ()
        self._in_line = True
        self._spaces = 0

    def read(self, data: bytes) -> None:
        """Read a piece, before the parser does."""
        if self.begun:
            self._known = len(self._data)
            self._data += data
        else:
            self._known, self._data = 0, data
        self._at = self.body = 0
        self.ended = self._head_is_here = False

    def begin_behind(self) -> None:
        """Note that a request begins after one that ended in the same piece."""
        head_end = self._data.find(b"\r\n\r\n", self._at) + 4 if self._head_is_here else 0
        self._at, self._known = head_end + self.body, 0
        self.body, self.ended, self._head_is_here = 0, False, False
        if b"transfer-encoding" in self._names:
            self._spaces, self._in_line = -1, False  # the end of chunks is not known

    def end_head(self, names: Sequence[bytes]) -> int:
        """Return the number of spaces in the line; negative where it is unknown. `names` are those of the headers."""
        self._count()
        spaces = self._spaces
        self.begun, self._head_is_here, self._names = False, True, names
        self._in_line, self._spaces = True, 0
        return spaces

    def rest(self) -> bytes:
        """Return what came behind the head that has just ended."""
        return self._data[self._data.find(b"\r\n\r\n", self._at) + 4 :]

    def forget(self) -> None:
        """Drop a parsed piece, except for what may be the beginning of a head's end."""
        if self.begun:
            self._count()
            self._data = self._data[-3:]
        else:
            self._data = b""

    def _count(self) -> None:
        if not self._in_line:
            return
        data, start = self._data, self._known or self._at
        while not self._known and data[start : start + 1] in (b"\r", b"\n"):  # the parser skips empty lines, too
            start += 1
        end = data.find(b"\n", start)
        self._in_line, self._at = end < 0, start if not self._known else 0
        self._spaces += data.count(b" ", start, len(data) if end < 0 else end)


_NOWHERE: Final[deque[tuple[bytes, bytes]]] = deque(maxlen=0)
_ODD: Final = frozenset({b"transfer-encoding", b"expect"})
"""Headers because of which a head is looked at again."""


class InboundConnection(asyncio.Protocol):
    """One connection: the parser's callbacks, its requests in order, and the limits on its sender."""

    transport: asyncio.Transport

    def __init__(self, server: Connections, first: bytes = b"") -> None:
        """`first` are bytes that another process has read off it."""
        self.server = server
        self._first = first
        self.loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self._client: tuple[str, int] | None = None
        self._local: tuple[str, int] | None = None
        self.address = self.network = UNKNOWN
        self._url = b""
        self._headers: Any = []
        self._length: bytes | None = None
        self._is_odd = self._expects = False
        self._version = ""
        self._lines = _RequestLines()
        self._offered: list[tuple[bytes, bytes]] | None = None
        """The headers of a request that offered to change the protocol."""
        self._reading = self._answering = Exchange(self, keep_alive=True, expects=False)
        """The requests that are being read and answered, or were last; none yet, which counts as answered."""
        self._reading.is_complete = True
        self.pipeline: deque[Exchange] = deque()
        self.unsent: tuple[HookExchange, Reply] | None = None
        """An answer that waits until the sender takes the ones before it."""
        self._writable: asyncio.Event | None = None
        self.is_write_paused = self._is_read_paused = False
        self._since: float | None = None
        """When the request that is being read began; None between requests."""
        self._idle_since: float | None = None
        """When the last answer was given, while nothing has come since."""
        self._stuck_since: float | None = None
        """When the other end stopped taking our answers."""
        self._in_head = True
        self._overhead = 0
        """Bytes of this request that are not paid for by its body."""
        self._leaving: bytes | None = None
        """The request with which another process will go on here, once those before it are answered."""

    @property
    def hooks(self) -> Hooks:
        assert self.server.hooks is not None
        return self.server.hooks

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # Bytes after the last request of a connection are no error: that request still gets its answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._client, self._local = _address(transport, "getpeername"), _address(transport, "getsockname")
        self.address = plain(self._client[0]) if self._client else UNKNOWN
        self.network = network_of(self.address)
        self._since = self.loop.time()
        if not self.server.admit(self):
            self.refuse(503)
            return
        if self._first:
            self.data_received(self._first)
            self._first = b""
        if self.server.drain_until is not None:  # it was on its way when everything else was shut down
            self.shut_down()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.release(self)
        for exchange in (self._answering, self._reading):
            if not exchange.is_complete:
                exchange.disconnect()
        self.unsent = None
        self.is_write_paused = False
        if self._writable is not None:
            self._writable.set()
        self._parser = None  # the two refer to each other

    # -- reading -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        if self._since is None:
            self._since = self.loop.time()
        self._overhead += len(data)
        self._lines.read(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            if self._leaving is not None:
                self._leave()
                return
            self._refuse_malformed()
        self._lines.forget()
        if self._overhead > self.server.limits.head_bytes:
            self.refuse(431)
        if not self._in_head:
            self._reading.pause()

    def on_message_begin(self) -> None:
        self._idle_since = None
        if self._since is None:  # it came in the same piece as the end of the one before
            self._since = self.loop.time()
        lines = self._lines
        lines.begun = True
        if lines.ended:
            lines.begin_behind()
        self._url = b""
        self._headers = []
        self._length = None
        self._is_odd = self._expects = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self._length = value
        elif name in _ODD:
            self._is_odd = True
            self._expects |= name == b"expect" and value.lower() == b"100-continue"
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._check_head()
        parser = self._parser
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            self._offered = self._headers
            return
        limit = self.server.limits.head_bytes
        if self._overhead > limit and self._head_size() > limit:
            self.refuse(431)
            raise ValueError("long head")  # stops the parser; nobody else sees it
        if len(self.pipeline) >= self.server.limits.pipelined:
            raise ValueError("too many at once")  # earlier requests are answered, then the connection is closed
        if self._offered is not None:
            self._headers[:], self._offered = self._offered, None
        exchange = self._new_exchange(self._version != "1.0" and parser.should_keep_alive())
        self._in_head = False
        self.server.resting.pop(self, None)
        # Trailers use the same callback. None of them may become a header: a proxy that vouches for headers has not
        # checked them (S15).
        self._headers = _NOWHERE
        before, self._reading = self._reading, exchange
        if before.is_complete:
            self._answering = exchange
            exchange.begin()
        else:
            self.pause_reading()
            self.pipeline.append(exchange)

    def _check_head(self) -> None:
        """Refuse a head that our parser accepts but other programs would read differently, or not at all (S15)."""
        names = [name for name, _ in self._headers]
        version = self._version = self._parser.get_http_version()
        # HTTP/1.0 has no Host, and health checks of proxies use it.
        hosts = (1,) if version == "1.1" else (0, 1) if version == "1.0" else ()
        if self._lines.end_head(names) != 2 or names.count(b"host") not in hosts:
            raise ValueError("bad head")  # stops the parser; nobody else sees it

    def _new_exchange(self, keep_alive: bool) -> Exchange:
        """Read the target; raise where it cannot be read, which stops the parser."""
        method, headers, hooks = self._parser.get_method().decode("ascii"), self._headers, self.server.hooks
        raw, _, query = self._url.partition(b"?")
        # only one meaning is possible
        if raw[:1] == b"/" and raw.translate(None, b"/-_").isalnum() and b"#" not in query:
            path = raw_path = raw.decode("ascii")
        else:
            parsed = httptools.parse_url(self._url)
            raw, query = parsed.path, parsed.query or b""
            raw_path = raw.decode("ascii")
            path = unquote(raw_path) if "%" in raw_path else raw_path
        is_hook = hooks is not None and path.startswith(hooks.prefix)
        if self.server.others is not None and self.server.others.answers(is_hook=is_hook):
            self._leaving = self._encode_head(headers) + self._lines.rest()
            raise ValueError("for another process")  # ends the parser; nobody sees it
        if hooks is not None and is_hook:
            hook = hooks.open(method, path, raw_path, query, headers, self._client)
            length = b"" if self._is_odd or self._length is None else self._length
            is_plain = length.isdigit() and len(length) < 10 and int(length) <= hooks.cap
            return HookExchange(self, keep_alive, self._expects, hook, is_plain, method != "HEAD")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._version,
            "server": self._local,
            "client": self._client,
            "scheme": "http",
            "root_path": "",
            "method": method,
            "path": path,
            "raw_path": raw,
            "query_string": query,
            "headers": headers,
        }
        return AppExchange(self, keep_alive, self._expects, scope)

    def on_body(self, body: bytes) -> None:
        self._overhead -= 2 * len(body)
        self._lines.body += len(body)
        self._reading.feed(body)

    def on_message_complete(self) -> None:
        if self._offered is None:
            self._since, self._in_head, self._overhead = None, True, 0
            self._lines.ended = True
            self._reading.end()

    def _head_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _decline(self, rest: bytes) -> None:
        """Continue in plain HTTP, as the protocol allows: after an upgrade offer the parser leaves the body unread."""
        if self._offered is None:  # a tunnel, which is not offered here
            self._refuse_malformed()
            return
        head = self._encode_head([header for header in self._offered if header[0] != b"upgrade"])
        self._parser = self._new_parser()
        self._overhead = 0
        self._lines = _RequestLines()
        self.data_received(head + rest)

    def _encode_head(self, headers: Headers) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._url, version)]
        lines += [name + b": " + value for name, value in headers]
        return b"\r\n".join([*lines, b"", b""])

    def _leave(self) -> None:
        """Have another process go on, once nothing is under way here and the sender has taken every answer."""
        assert self.server.others is not None
        assert self._leaving is not None
        self._since, self._overhead = None, 0
        self.pause_reading()
        if not self._reading.is_complete or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(0)  # tells when it is empty
            return
        self.server.release(self)
        try:
            descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError:  # too many files are open
            self.refuse(503)
            return
        if self.server.others.take(descriptor, self._leaving):
            self.transport.close()  # here only: the sender does not notice
        else:
            os.close(descriptor)
            self.refuse(503)

    # -- answering -----------------------------------------------------------------------------

    def answer_next(self) -> None:
        """Continue after a complete answer: with the next waiting request, or idle."""
        if self.transport.is_closing():
            return
        if self._is_read_paused:
            self.resume_reading()
        if self._leaving is not None and not self.pipeline:
            self._leave()
        elif self.pipeline:
            self._answering = self.pipeline.popleft()
            self._answering.begin()
        else:
            self._idle_since = self.loop.time()
            self.server.resting[self] = None

    def pause_reading(self) -> None:
        """Read no more until a request is answered or its application asks for more."""
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and self._leaving is None:
            self._is_read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._stuck_since = self.loop.time()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._stuck_since = None
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self.unsent is not None:
            (exchange, reply), self.unsent = self.unsent, None
            exchange.answer(reply)
        elif self._leaving is not None:
            self._leave()

    async def wait_until_writable(self) -> None:
        while self.is_write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def shut_down(self) -> None:
        """Close the connection: now, or after the pending answers."""
        if self._leaving is not None:
            return  # its request is answered elsewhere
        if self._reading.is_complete:
            self.transport.close()
        else:
            self._reading.keep_alive = False

    # -- refusing ------------------------------------------------------------------------------

    def is_late(self, now: float) -> bool:
        """Tell whether the request being read, or the sender that does not read its answer, is over its deadline."""
        limits = self.server.limits
        if self._stuck_since is not None and now - self._stuck_since > limits.body_seconds:
            return True
        if self.pipeline and self._since is not None:
            # The request before is still being answered, and nothing is read meanwhile: this one's time has not begun.
            self._since = now
        return self._since is not None and now - self._since > (
            limits.head_seconds if self._in_head else limits.body_seconds
        )

    def is_idle(self, now: float) -> bool:
        """Tell whether nothing has come for so long that the connection may be closed for another."""
        return self._idle_since is not None and now - self._idle_since > self.server.limits.idle_seconds

    def make_way(self) -> None:
        if self.transport.get_write_buffer_size():  # nobody would check whether its end ever comes
            self.transport.abort()
        elif self._since is None:
            self.transport.close()
        else:
            self.refuse(503)

    def _refuse_malformed(self) -> None:
        if self.transport.is_closing():
            return
        if self._in_head and not self._reading.is_complete:
            self._reading.keep_alive = False  # earlier requests are complete and get their answers first
            return
        self.refuse(400)

    def refuse(self, status: int) -> None:
        """End this connection, with a bare answer where the sender would read it as the answer to this request."""
        if self.transport.is_closing() and self._stuck_since is None:
            return
        self.server.refused[status] += 1
        if self._stuck_since is not None:
            # Also while it is closing, because that waits until everything is sent. With a reset: otherwise the system
            # would keep offering what nobody reads.
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            self.transport.abort()
            return
        if self._may_answer():
            self.transport.write(_REFUSALS[status])
        self.transport.close()

    def _may_answer(self) -> bool:
        if self.pipeline:
            return False
        return self._reading.is_complete if self._in_head else not self._reading.is_started


def _address(transport: asyncio.Transport, ask: str) -> tuple[str, int] | None:
    """Return an address of the socket; None where it has none, or the other end is gone."""
    try:
        address = getattr(transport.get_extra_info("socket"), ask)()
    except OSError:
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
