"""The short way in: a small plain POST to `/in/{source}` is answered without ASGI, which costs as much as storing it.

Plain means: a known source under its own name, a length that is said and small, nothing that asks for a second
thought (another method, chunks, Expect, an escaped or longer path, an answer before it that is not given or taken yet).
Everything else goes the long way through uvicorn and `ingest`, on the same connection; both ways end in the same
receiver and give the same answers. The guard's deadlines and caps hold on both.
"""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Final

from oncehook.model import Headers
from oncehook.receive import Begun, Receipt
from oncehook.sources import Reply, Source
from oncehook.web.guard import Guarded
from oncehook.web.ingest import Ingest

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

    __slots__ = ("body", "disconnected", "headers", "keep_alive", "more_body", "path", "query", "response_complete",
                 "response_started", "source")  # fmt: skip
    message_event: Final = _HEARD

    def __init__(self, source: Source, path: bytes, query: bytes, headers: Headers, *, keep_alive: bool) -> None:
        self.source = source
        self.headers = headers
        self.path = path
        self.query = query
        self.keep_alive = keep_alive
        self.body = b""
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False


class Shortcut(Guarded):
    """A connection that knows the short way."""

    ingest: Ingest
    _arriving: _Arriving | None = None
    """The request being read, while it is on the short way."""

    def on_message_begin(self) -> None:
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
        super().on_message_begin()
        self.scope["headers"] = self.headers = headers
        self.url, self.expect_100_continue = url, waits
        super()._begin()

    def _plain(self) -> _Arriving | None:
        path, _, query = self.url.partition(b"?")
        source, length = self.ingest.plain.get(path), self._length
        if source is None or length is None or self._odd or b"#" in query or self.parser.get_method() != b"POST":
            return None
        if not length.isdigit() or len(length) > 5 or int(length) > min(SMALL, source.max_body):
            return None
        if self.flow.write_paused or (self.cycle is not None and not self.cycle.response_complete):
            return None  # its answer must wait for another
        keeps = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        return _Arriving(source, path, query, self.headers, keep_alive=keeps)

    def on_body(self, body: bytes) -> None:
        arriving = self._arriving
        if arriving is None:
            super().on_body(body)
            return
        self._overhead -= 2 * len(body)
        arriving.body = arriving.body + body if arriving.body else body

    def on_message_complete(self) -> None:
        arriving = self._arriving
        if arriving is None:
            super().on_message_complete()
            return
        self._arriving = None
        self._since, self._in_head, self._overhead = None, True, 0
        arriving.more_body = False
        begun = self.ingest.begin(
            arriving.source, arriving.path.decode(), arriving.query, arriving.headers, arriving.body, self.client
        )
        if isinstance(begun, Receipt):
            self._answer(arriving, begun.reply)
        else:
            begun.pending.future.add_done_callback(lambda _: self._decided(arriving, begun))

    def _decided(self, arriving: _Arriving, begun: Begun) -> None:
        self._answer(arriving, self.ingest.finish(begun).reply)

    def _answer(self, arriving: _Arriving, reply: Reply) -> None:
        arriving.response_started = arriving.response_complete = True
        if not self.transport.is_closing():
            self.transport.write(_written(reply, arriving.keep_alive))
            if not arriving.keep_alive:
                self.transport.close()
        self.on_response_complete()


@lru_cache(maxsize=256)
def _head(status: int, headers: tuple[tuple[bytes, bytes], ...], keep_alive: bool) -> bytes:
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"content-length: "])


def _written(reply: Reply, keep_alive: bool) -> bytes:
    return b"%s%d\r\n\r\n%s" % (_head(reply.status, reply.headers, keep_alive), len(reply.body), reply.body)
