"""The short way in: a small plain POST to `/in/{source}` is answered without ASGI, which costs as much as storing it.

Plain means: one name behind the prefix, whether there is a source of that name or not (S8), a length that is said and
small, nothing that asks for a second thought (another method, chunks, Expect, an escaped or longer path, an answer
before it that is not given or taken yet). Everything else goes the long way through uvicorn and `ingest`, on the same
connection; both ways end in the same receiver and give the same answers. The guard's deadlines and caps hold on both.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from oncehook.ingest import Begun, Receipt
from oncehook.model import Headers
from oncehook.sources import Network, Reply, Source
from oncehook.web.hooks import Ingest, UnfinishedBody, stand_in
from oncehook.web.peers import UNKNOWN, network_of, plain, stands_for_many

log = logging.getLogger("oncehook.web")


@dataclass(slots=True, frozen=True)
class Limits:
    """How much patience one connection gets."""

    head_seconds: float = 10.0
    body_seconds: float = 30.0
    head_bytes: int = 64 << 10
    """What a request may have besides its body; each byte of body buys one more, for the frames of small chunks."""
    pipelined: int = 64
    """Requests of one connection that may wait behind the one being answered: each costs more than its bytes."""
    connections: int = 8192
    per_address: int = 512


OTHER_FILES: Final = 256
"""Open files that are not connections: the store's, and room to spare."""


def affordable(connections: int) -> int:
    """How many of so many connections this process may hold open; asks the system for more where it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(allowed - OTHER_FILES, 1)


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


class Guard:
    """Watches over all connections of one server."""

    def __init__(self, limits: Limits, trusted: Sequence[Network] = ()) -> None:
        self.limits = limits
        self._trusted = trusted
        self._open: set[Guarded] = set()
        self._by_network: Counter[str] = Counter()
        self.resting: dict[Guarded, None] = {}
        """Connections that wait for the whole head of a request, by when they began to."""
        self.refused: Counter[int] = Counter()
        """Connections refused since the last line about it, by status."""

    def protocol(self, kind: type[Guarded] | None = None, **attributes: Any) -> type[HttpToolsProtocol]:
        """The protocol class to give to uvicorn."""
        return type("GuardedProtocol", (kind or Guarded,), {"guard": self, **attributes})

    def admit(self, connection: Guarded) -> bool:
        """Count a connection in; False when it is one too many.

        When all places are taken, the one that has waited longest for a request goes instead. Bytes of a head do not
        make it wait any shorter: otherwise a few of them now and then would keep every place.
        """
        self._open.add(connection)
        self._by_network[connection.network] += 1
        many = self._by_network[connection.network] > self.limits.per_address
        if many and not self.may_hold_many(connection.address):
            return False  # before room is made: one network must not put out all others
        if len(self._open) > self.limits.connections and not self._make_room():
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
        """Whether the cap per address does not count here."""
        return stands_for_many(address, self._trusted)

    def release(self, connection: Guarded) -> None:
        """Count a connection out."""
        if connection in self._open:
            self._open.discard(connection)
            self.resting.pop(connection, None)
            self._by_network[connection.network] -= 1
            if not self._by_network[connection.network]:
                del self._by_network[connection.network]

    async def watch(self) -> None:
        """Close what takes too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for connection in [c for c in self._open if c.is_late(now)]:
                connection.refuse(408)
            for connection in [c for c in self._open if c.is_idle(now)]:
                connection.transport.close()
            if self.refused:  # one line for all: a flood of connections is no flood of lines
                log.warning("connections.refused", extra={"fields": {"statuses": dict(self.refused)}})
                self.refused.clear()


class _RequestLines:
    """Counts the spaces in the first line of each request.

    The parser takes any number of them, and does not say where in a piece of bytes a request begins: that is where the
    one before it ends, by its head and its length. Every request pays for this, so most of it is done only where a head
    is cut, or a request is behind another.
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
        """Take a piece, before the parser does."""
        if self.begun:
            self._known = len(self._data)
            self._data += data
        else:
            self._known, self._data = 0, data
        self._at = self.body = 0
        self.ended = self._head_is_here = False

    def begin_behind(self) -> None:
        """Note that a request begins behind one that ended in the same piece."""
        head_end = self._data.find(b"\r\n\r\n", self._at) + 4 if self._head_is_here else 0
        self._at, self._known = head_end + self.body, 0
        self.body, self.ended, self._head_is_here = 0, False, False
        if b"transfer-encoding" in self._names:
            self._spaces, self._in_line = -1, False  # where chunks end is not known

    def end_head(self, names: Sequence[bytes]) -> int:
        """Return how many spaces the line had; negative where that cannot be told. `names` are those of the headers."""
        self._count()
        spaces = self._spaces
        self.begun, self._head_is_here, self._names = False, True, names
        self._in_line, self._spaces = True, 0
        return spaces

    def forget(self) -> None:
        """Let go of a piece that was parsed, but for what may be the beginning of the end of a head."""
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


class Guarded(HttpToolsProtocol):
    """One connection under watch."""

    guard: Guard

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.address = self.network = UNKNOWN
        self._since: float | None = None
        """When the request that is being read began; None between requests."""
        self._idle_since: float | None = None
        """When the last answer was given, while nothing has come since."""
        self._stuck_since: float | None = None
        """When the other end stopped taking our answers."""
        self._in_head = True
        self._overhead = 0
        """Bytes of this request that are not paid for by its body."""
        self._lines = _RequestLines()
        self._version = ""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered by the application, where others may wait behind it."""
        self._offered: list[tuple[bytes, bytes]] | None = None
        """The headers of a request that offered to change the protocol."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = plain(self.client[0]) if self.client else UNKNOWN
        self.network = network_of(self.address)
        self._since = self.loop.time()
        if not self.guard.admit(self):
            self.refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.release(self)
        # uvicorn tells only the last request of a connection that it is gone. One before it would go on answering, and
        # uvloop raises when a closed transport is written to.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    # -- reading -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        if self._since is None:
            self._since = self.loop.time()
        self._overhead += len(data)
        self._lines.read(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse_malformed()
        self._lines.forget()
        if self._overhead > self.guard.limits.head_bytes:
            self.refuse(431)

    def on_message_begin(self) -> None:
        self._note_begin()
        super().on_message_begin()

    def _note_begin(self) -> None:
        self._idle_since = None
        if self._since is None:  # it came in the same piece as the end of the one before
            self._since = self.loop.time()
        self._lines.begun = True
        if self._lines.ended:
            self._lines.begin_behind()

    def _check_head(self) -> None:
        """Refuse what the parser takes although others would read it in another way, or not at all (S15)."""
        names = [name for name, _ in self.headers]
        version = self._version = self.parser.get_http_version()
        # HTTP/1.0 knows no Host, and health checks of proxies are written in it.
        hosts = (1,) if version == "1.1" else (0, 1) if version == "1.0" else ()
        if self._lines.end_head(names) != 2 or names.count(b"host") not in hosts:
            raise ValueError("bad head")  # ends the parser; nobody sees it

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offered = self.headers
            return
        limit = self.guard.limits.head_bytes
        if self._overhead > limit and self._head_size() > limit:
            self.refuse(431)
            raise ValueError("long head")  # ends the parser; nobody sees it
        if len(self.pipeline) >= self.guard.limits.pipelined:
            raise ValueError("too many at once")  # those before it are answered, and the connection is closed
        if self._offered is not None:
            self.headers[:], self._offered = self._offered, None
        self._in_head = False
        self.guard.resting.pop(self, None)
        self._begin()
        # Trailers come by the same callback. None of them may become a header after the fact: a proxy that
        # vouches for headers has not looked at them (S15).
        self.headers = _NOWHERE  # type: ignore[assignment]

    def _begin(self) -> None:
        """The head is whole and in order: have the request answered."""
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._overhead -= 2 * len(body)
        self._lines.body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered is None:
            super().on_message_complete()
            self._note_end()

    def _note_end(self) -> None:
        self._since, self._in_head, self._overhead = None, True, 0
        self._lines.ended = True

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
            super().on_response_complete()
            return
        # As uvicorn does it, but without a timer for every answer: the guard looks at all connections anyway.
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._idle_since = self.loop.time()
            self.guard.resting[self] = None

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _decline(self, rest: bytes) -> None:
        """Go on in plain HTTP, as the protocol allows: after an offer to upgrade the parser leaves the body unread."""
        if self._offered is None:  # a tunnel, which nobody offers here
            self._refuse_malformed()
            return
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self._offered if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._overhead = 0
        self._lines = _RequestLines()
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    # -- refusing ------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_since = None

    def is_late(self, now: float) -> bool:
        """Whether the request being read has outrun its deadline, or its answer is not taken."""
        limits = self.guard.limits
        if self._stuck_since is not None and now - self._stuck_since > limits.body_seconds:
            return True
        if self.pipeline and self._since is not None:
            # The one before it is still being answered, and nothing is read meanwhile: its time has not begun.
            self._since = now
        return self._since is not None and now - self._since > (
            limits.head_seconds if self._in_head else limits.body_seconds
        )

    def is_idle(self, now: float) -> bool:
        """Whether nothing has come for so long that its place is worth more."""
        return self._idle_since is not None and now - self._idle_since > self.timeout_keep_alive

    def make_way(self) -> None:
        """Give this connection's place to another one."""
        if self.transport.get_write_buffer_size():  # nobody would look whether its end ever takes that
            self.transport.abort()
        elif self._since is None:
            self.transport.close()
        else:
            self.refuse(503)

    def _refuse_malformed(self) -> None:
        if self.transport.is_closing():
            return
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # what came before is whole and gets its answer first
            return
        self.refuse(400)

    def refuse(self, status: int) -> None:
        """End this connection, with a bare answer where one would be read as the answer to this request."""
        if self.transport.is_closing() and self._stuck_since is None:
            return
        self.guard.refused[status] += 1
        if self._stuck_since is not None:
            # Also when it is closing, for that waits until all is taken. With a reset: otherwise the system would go on
            # offering what nobody takes.
            line = self.transport.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
            return
        if self._may_answer():
            self.transport.write(_REFUSALS[status])
        self.transport.close()

    def _may_answer(self) -> bool:
        if self.cycle is None or self.pipeline:
            return not self.pipeline
        return self.cycle.response_complete if self._in_head else not self.cycle.response_started


_NOWHERE: Final[deque[tuple[bytes, bytes]]] = deque(maxlen=0)


SMALL: Final = 64 << 10
"""Bytes of a body that may be gathered here; larger ones are counted on the long way (S9)."""


_ODD: Final = frozenset({b"transfer-encoding", b"expect"})
"""Headers that ask for a second thought."""


class _Heard:
    """An event that nobody waits for."""

    __slots__ = ()

    def set(self) -> None:
        """uvicorn tells its cycle that the connection is gone."""


_HEARD: Final = _Heard()


class _Arriving:
    """A request on the short way, where uvicorn expects a cycle of its own making."""

    __slots__ = ("body", "counted", "disconnected", "headers", "keep_alive", "length", "more_body", "name", "query",
                 "read", "response_complete", "response_started", "source")  # fmt: skip
    message_event: Final = _HEARD

    def __init__(
        self, source: Source | None, name: bytes, query: bytes, headers: Headers, length: int, *, keep_alive: bool
    ) -> None:
        self.source = source
        self.name = name
        self.headers = headers
        self.query = query
        self.length = length
        self.keep_alive = keep_alive
        self.body: bytes | bytearray = b""
        self.read = 0
        """Bytes of a body that comes in pieces."""
        self.counted: UnfinishedBody | None = None
        """Counts them among the unfinished ones; nothing when it came in one piece."""
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False


class Shortcut(Guarded):
    """A connection that knows the short way."""

    ingest: Ingest
    _arriving: _Arriving | None = None
    """The request being read, while it is on the short way."""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._arriving is not None:
            self._let_go(self._arriving)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._note_begin()
        # What uvicorn prepares here for ASGI is prepared when a request turns out to need it.
        self.url = b""
        self.headers = []
        self._length: bytes | None = None
        self._odd = self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self._length = value
        elif name in _ODD:
            self._odd = True
            self.expect_100_continue |= name == b"expect" and value.lower() == b"100-continue"
        self.headers.append((name, value))

    def _begin(self) -> None:
        arriving = self._plain()
        if arriving is not None:
            self._arriving = arriving
            self.cycle = arriving  # type: ignore[assignment]
            return
        headers, url, waits = self.headers, self.url, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)  # not the guard's: it has begun long ago
        self.scope["headers"] = self.headers = headers
        self.url, self.expect_100_continue = url, waits
        super()._begin()

    def _plain(self) -> _Arriving | None:
        path, _, query = self.url.partition(b"?")
        name, length = self.ingest.plain(path), self._length
        if name is None or length is None or self._odd or b"#" in query or self.parser.get_method() != b"POST":
            return None
        if not length.isdigit() or len(length) > 5 or int(length) > min(SMALL, self.ingest.cap):
            return None
        if self.flow.write_paused or (self.cycle is not None and not self.cycle.response_complete):
            return None  # its answer must wait for another
        keeps = self._version != "1.0" and self.parser.should_keep_alive()
        return _Arriving(self.ingest.find(name), name, query, self.headers, int(length), keep_alive=keeps)

    def on_body(self, body: bytes) -> None:
        arriving = self._arriving
        if arriving is None:
            super().on_body(body)
            return
        self._overhead -= 2 * len(body)
        self._lines.body += len(body)
        if len(body) == arriving.length:
            arriving.body = body
        else:
            self._gather(arriving, body)

    def _gather(self, arriving: _Arriving, piece: bytes) -> None:
        """Add to a body that comes in pieces: like those of the long way they count, and may be too much (S9)."""
        arriving.read += len(piece)
        if arriving.source is not None:
            if arriving.counted is None:
                arriving.body = bytearray()
            arriving.body += piece
        elif arriving.read == arriving.length:
            arriving.body = stand_in(arriving.length)
        if arriving.counted is None:
            scope = {"client": self.client, "headers": arriving.headers}
            arriving.counted = self.ingest.unfinished(arriving.source, scope, lambda: self._put_off(arriving))
        if arriving.read < arriving.length:
            arriving.counted.grow(len(piece))

    def _put_off(self, arriving: _Arriving) -> None:
        self._arriving = None
        arriving.body = b""
        self._answer_soon(arriving, self.ingest.put_off(arriving.source))  # its rest is read and dropped

    def _let_go(self, arriving: _Arriving) -> None:
        self._arriving = None
        if arriving.counted is not None:
            arriving.counted.release()

    def on_message_complete(self) -> None:
        arriving = self._arriving
        if arriving is None:
            super().on_message_complete()
            return
        self._let_go(arriving)
        self._note_end()
        arriving.more_body = False
        begun = self.ingest.begin(
            arriving.source, arriving.name, arriving.query, arriving.headers, bytes(arriving.body), self.client
        )
        if isinstance(begun, Receipt):
            self._answer_soon(arriving, begun.reply)
        elif begun.source.revive_dead:
            task = self.loop.create_task(self._complete(arriving, begun))
            self.tasks.add(task)  # uvicorn waits for these before it stops
            task.add_done_callback(self.tasks.discard)
        else:
            begun.pending.future.add_done_callback(lambda _: self._decided(arriving, begun))

    async def _complete(self, arriving: _Arriving, begun: Begun) -> None:
        self._answer(arriving, (await self.ingest.complete(begun)).reply)

    def _decided(self, arriving: _Arriving, begun: Begun) -> None:
        self._answer(arriving, self.ingest.finish(begun).reply)

    def _answer_soon(self, arriving: _Arriving, reply: Reply) -> None:
        # Not while bytes are being read: what stands behind this request in the same piece must find it unanswered, as
        # on the long way. Otherwise a request behind the last one of a connection would be taken, too.
        self.loop.call_soon(self._answer, arriving, reply)

    def _answer(self, arriving: _Arriving, reply: Reply) -> None:
        arriving.response_started = arriving.response_complete = True
        if not self.transport.is_closing():
            self.transport.write(_written(reply, arriving.keep_alive))
            if not arriving.keep_alive:
                self.transport.close()
        self.on_response_complete()


@lru_cache(maxsize=256)
def _head(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return STATUS_LINE[status] + b"".join(b"%s: %s\r\n" % (name.lower(), value) for name, value in headers)


def _written(reply: Reply, keep_alive: bool) -> bytes:
    end = b"" if keep_alive else b"connection: close\r\n"
    head = _head(reply.status, reply.headers)
    if reply.status == 204:  # as `Reply.framed_headers`, in one piece of bytes
        return b"%s%s\r\n" % (head, end)
    return b"%scontent-length: %d\r\n%s\r\n%s" % (head, len(reply.body), end, reply.body)
