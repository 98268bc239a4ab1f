"""Deadlines and caps on connections, which uvicorn does not have: a sender cannot hold us by being slow or endless.

A request's head must be complete within 10 seconds and 64 KB, its body within 30 seconds (S14), and an answer must be
taken within as long; one address, or one IPv6 /64, holds a bounded share of the connections, and when all places are
taken the longest idle one goes. Deadlines are looked at once a second for all connections, so a request pays for none
of them. Framing that two readers could understand in two ways is refused (S15): by the parser, and here where the
parser is lenient.
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
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from oncehook.sources import Network
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
