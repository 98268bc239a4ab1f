"""One connection to one origin: the bytes of a request go out, an `HttpAnswer` comes back, one at a time.

An answer counts once its head is complete: where the rest is missing, malformed or too long, it is cut there. A
connection is reused only after an answer was read to its end, and closed when it sends anything unasked. The client
makes connections and keeps them between calls.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from oncehook.http_client import CallTimes, HttpAnswer
from oncehook.http_client.urls import host_of

if TYPE_CHECKING:
    from oncehook.http_client.client import HttpClient

_PORTS: Final = {"http": 80, "https": 443}
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_OURS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "expect", "te"})
"""Headers that frame or route a request, which we set ourselves."""
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Origin(NamedTuple):
    """Scheme, host and port that a connection leads to; one to the same origin can be used again."""

    scheme: str
    host: str
    port: int


@dataclass(slots=True, frozen=True)
class Target:
    """A URL to be called, split into its parts."""

    origin: Origin
    host: str
    """Host and port as written, for error messages."""
    start: str
    """Path, version and Host header, which follow the method."""
    absolute_start: str
    """Whole address, version and Host header, for a proxy that makes the request itself."""


@lru_cache(maxsize=1024)
def read_target(url: str) -> Target:
    """Split a URL that `read_url` has read. Raises ValueError for what no request can contain."""
    parts = urlsplit(url)
    netloc = host_of(url)
    path = url.partition(f"://{netloc}")[2]
    if parts.scheme not in _PORTS or not parts.hostname or not _TARGET.fullmatch(path):
        raise ValueError("the address cannot be written into a request")
    usual = _PORTS[parts.scheme]
    port = parts.port or usual
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname.rstrip(".")
    named = host if port == usual else f"{host}:{port}"
    end = f"{path} HTTP/1.1\r\nHost: {named}\r\n"
    return Target(Origin(parts.scheme, parts.hostname, port), netloc, f" {end}", f" {parts.scheme}://{named}{end}")


def encode_head(
    method: str, target: Target, headers: Mapping[str, str], body: bytes | None, *, absolute: bool = False
) -> bytes:
    """Encode everything before the body. Raises ValueError, without repeating the value, for an invalid header."""
    encoded = "\r\n".join([*map(": ".join, headers.items()), "", ""])
    ends = len(headers) + 1
    if encoded.count("\r") != ends or encoded.count("\n") != ends or "\0" in encoded:
        raise ValueError("a header must not hold the end of a line")
    added = _encode_added(method, tuple(headers), body is not None)
    length = "" if body is None and method in _BODILESS else f"Content-Length: {len(body or b'')}\r\n"
    start = target.absolute_start if absolute else target.start
    return f"{method}{start}{added}{length}{encoded}".encode()


@lru_cache(maxsize=512)
def _encode_added(method: str, names: tuple[str, ...], has_body: bool) -> str:
    """Encode the headers that a request gets by default; cached by the names of those it has itself.

    No header can end early or replace one of ours, so nothing that a sender, a person or a setting wrote can become a
    second request.
    """
    known = {name.lower() for name in names}
    if not all(map(_TOKEN.fullmatch, (method, *names))) or known & _OURS:
        raise ValueError("a header's name cannot be used")
    usual = {"Accept": "*/*", "Accept-Encoding": "identity"}
    if has_body:
        usual["Content-Type"] = "application/octet-stream"
    return "".join(f"{name}: {value}\r\n" for name, value in usual.items() if name.lower() not in known)


HEAD_MOST: Final = 32 << 10
"""Bytes that may come before the body: the head, and informational answers (1xx) before it."""
HEADERS_MOST: Final = 100
CHUNK_MOST: Final = 16
"""Bytes that may come per byte of body that is kept; a chunk of one byte takes six."""
LARGE: Final = 1 << 20
"""Bytes from which a body is sent in pieces, so that it does not block the loop."""
_PIECE: Final = 256 << 10


class NoHttp(Exception):
    """What came back is no answer."""


class Late(Exception):
    """The deadline passed before there was an answer."""

    reached = False
    """Whether the other end may have received the call."""


class Closed(Exception):
    """The connection ended before there was an answer."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        """True where nothing at all came back."""


class Connection(asyncio.Protocol):
    """Connection that makes one call at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin, home: HttpClient) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._loop = loop
        self._home = home
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiting: asyncio.Future[HttpAnswer] | None = None
        """Future of the answer; None while there is no call."""
        self._timer: asyncio.TimerHandle
        self._rest: memoryview | None = None
        """Rest of a large body that is still to be sent."""
        self._is_paused = self._was_unasked = False
        self._received = 0

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    # -- calling -------------------------------------------------------------------------------

    async def exchange(
        self,
        head: bytes,
        body: bytes | None,
        *,
        deadline: float,
        most: int,
        times: CallTimes,
        bodiless: bool = False,
    ) -> HttpAnswer:
        """Send a request and wait for the answer. Raises NoHttp, Late or Closed. Cancelling it closes the
        connection."""
        if self._was_unasked:
            raise NoHttp
        if not self.is_open:
            raise Closed(silent=True)
        waiting: asyncio.Future[HttpAnswer] = self._loop.create_future()
        self._waiting = waiting
        self._timer = self._loop.call_at(deadline, self._end, Late())
        self._most, self._bodiless = most, bodiless
        self._received = self._headers = self._header_bytes = self._length = self._status = 0
        self._allowed = HEAD_MOST
        self._is_complete = self._keeps = False
        self._retry_after: str | None = None
        self._location: str | None = None
        self._pieces: list[bytes] = []
        self._lines: list[tuple[bytes, bytes]] = []
        self._times = times
        self._sent_at = self._loop.time()
        self._send(head, body)
        try:
            return await waiting
        except asyncio.CancelledError:
            # otherwise the answer has come, and the connection may be in use for another call
            if self._waiting is waiting:
                self._settle()
                self.abort()
            raise

    def _send(self, head: bytes, body: bytes | None) -> None:
        if not body:
            self._transport.write(head)
        elif len(body) < LARGE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._rest = memoryview(body)
            if not self._is_paused:
                self._send_more()

    def _send_more(self) -> None:
        """Send the next piece once the one before is written, so that the event loop can work in between."""
        if self._rest is None or self._is_paused:
            return
        piece, rest = self._rest[:_PIECE], self._rest[_PIECE:]
        self._rest = rest or None
        self._transport.write(piece)
        if rest:
            self._loop.call_soon(self._send_more)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send_more()

    # -- what comes back -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:  # unasked bytes must not become the answer to the next call
            self._was_unasked = True
            self.abort()
            return
        if not self._received:
            self._times.first_byte = self._loop.time() - self._sent_at
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._end(NoHttp())
            return
        if self._is_complete:
            self._finish(reuse=self._keeps)
        elif self._status and self._length >= self._most:
            self._finish()
        elif self._received > self._allowed:
            self._end(NoHttp())

    def eof_received(self) -> None:
        self._end(Closed(silent=not self._received))
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Closed(silent=not self._received))
        self._home.forget(self)

    # -- the parser's calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse anything after a complete answer."""
        if self._is_complete:
            raise NoHttp

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header that we need; ignore trailers, which come after the body."""
        if self._status:
            return
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        if self._headers > HEADERS_MOST or self._header_bytes > HEAD_MOST:
            raise NoHttp
        self._lines.append((name, value))
        if len(name) == 11 and self._retry_after is None and name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1").strip()
        elif len(name) == 8 and self._location is None and name.lower() == b"location":
            self._location = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Take the status as the answer's, unless it is informational (1xx)."""
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101:
                raise NoHttp
            self._retry_after = self._location = None
            self._lines.clear()
            return
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise NoHttp
        self._status = status
        self._allowed += CHUNK_MOST * self._most
        if self._bodiless:
            # an answer to HEAD has no body; the parser would wait for one, so the connection is not reused
            self._is_complete = True
        else:
            self._keeps = version == "1.1" and self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._length < self._most:
            self._pieces.append(body)
        self._length += len(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._status != 0  # status 0: only an informational answer (1xx) so far

    # -- how it ends ---------------------------------------------------------------------------

    def _end(self, error: NoHttp | Late | Closed) -> None:
        """End a pending call: with the answer so far, or with an error where there is no status."""
        if self._waiting is not None:
            self._finish() if self._status else self._fail(error)

    def _finish(self, *, reuse: bool = False) -> None:
        self._times.total = self._loop.time() - self._times.began
        is_complete = self._is_complete and self._length <= self._most
        body = b"".join(self._pieces)[: self._most]
        answer = HttpAnswer(
            self._status, body, self._retry_after, self._lines, self._times, self._location, is_complete
        )
        reuse = reuse and self._rest is None and not self._is_paused and self.is_open
        waiting = self._settle()
        if reuse:
            self._home.keep(self)
        else:
            self.abort()
        if not waiting.done():
            waiting.set_result(answer)

    def _fail(self, error: NoHttp | Late | Closed) -> None:
        waiting = self._settle()
        self.abort()
        if not waiting.done():
            waiting.set_exception(error)

    def _settle(self) -> asyncio.Future[HttpAnswer]:
        """Detach the pending call: later bytes belong to no call."""
        assert self._waiting is not None
        waiting, self._waiting = self._waiting, None
        self._timer.cancel()
        self._rest = None
        return waiting
