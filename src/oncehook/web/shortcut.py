"""The short way in: a small plain POST to `/in/{source}` is answered without ASGI, which costs as much as storing it.

Plain means: one name behind the prefix, whether there is a source of that name or not (S8), a length that is said and
small, nothing that asks for a second thought (another method, chunks, Expect, an escaped or longer path, an answer
before it that is not given or taken yet). Everything else goes the long way through uvicorn and `ingest`, on the same
connection; both ways end in the same receiver and give the same answers. The guard's deadlines and caps hold on both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from oncehook.ingest import Begun, Receipt
from oncehook.model import Headers
from oncehook.sources import Reply, Source
from oncehook.web.guard import Guarded
from oncehook.web.ingest import Ingest, stand_in
from oncehook.web.unfinished import UnfinishedBody

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
        elif begun.source.settings.revive_dead:
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
