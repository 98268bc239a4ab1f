"""A real HTTP server on the loopback, on threads of its own; a subclass answers the requests.

`StandIn` and `Tunnel` are built on it. It serves `def` and `async def` tests alike, because it shares no event loop
with them. Stopping it closes every connection, including those that wait for an answer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email import message_from_bytes, message_from_string
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError

S = TypeVar("S", bound="LoopbackServer")

_JSON: Final = "application/json"
_LONGEST_LINE: Final = 65_536


@dataclass(slots=True, frozen=True)
class Request:
    """A received request."""

    method: str
    path: str
    """Without the query."""
    query: str
    headers: Mapping[str, str]
    """Values by name in lower case; of a repeated header, the last."""
    body: bytes = field(repr=False)
    at: datetime

    def json(self) -> dict[str, Any]:
        """Return the body's fields; empty when it is not a JSON object."""
        try:
            fields = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return fields if isinstance(fields, dict) else {}

    def form(self) -> dict[str, FormPart]:
        """Return the parts of a multipart body by name."""
        about = message_from_string(f"content-type: {self.headers.get('content-type', '')}\n\n")
        boundary = about.get_boundary()
        if boundary is None:
            return {}
        pieces = (b"\r\n" + self.body).split(b"\r\n--" + boundary.encode("latin-1"))
        return dict(map(_form_part, pieces[1:-1]))

    def fields(self, file_field: str) -> dict[str, Any]:
        """Return the fields of JSON or of a form, where the name of the uploaded file becomes `file_field`."""
        if not self.headers.get("content-type", "").startswith("multipart/"):
            return self.json()
        parts = self.form()
        fields: dict[str, Any] = {name: part.text for name, part in parts.items() if name != "file"}
        return {**fields, file_field: parts["file"].filename or "file"} if "file" in parts else fields


@dataclass(slots=True, frozen=True)
class FormPart:
    content: bytes = field(repr=False)
    filename: str | None
    content_type: str

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


def _form_part(piece: bytes) -> tuple[str, FormPart]:
    head, _, content = piece.partition(b"\r\n\r\n")
    about = message_from_bytes(head.strip() + b"\r\n\r\n")
    name = about.get_param("name", header="content-disposition")
    return str(name), FormPart(content, about.get_filename(), about.get_content_type())


@dataclass(slots=True, frozen=True)
class Reply:
    """An answer: a status and a body, which is bytes or a value to be encoded as JSON."""

    status: int
    body: object = b""
    headers: Mapping[str, str] = field(default_factory=dict)


CUT: Final = Reply(0)
"""No answer: the connection is closed."""


ADDRESSES: Final[set[str]] = set()
"""`host:port` of every server that was started in this process, stopped or not. A `TestInbox` sends to these, and to
nobody else."""


class LoopbackServer:
    """An HTTP server that `with …:` or `async with …:` starts and stops."""

    def __init__(self, *, port: int = 0) -> None:
        self.requests: list[Request] = []
        """Every received request."""
        self._port = port
        self._stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._listening: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    # -- for subclasses ------------------------------------------------------------------------

    def reply(self, request: Request) -> Reply:
        """Answer one request, or return CUT; called on the connection's own thread."""
        raise NotImplementedError

    def wait(self, seconds: float | None) -> None:
        """Wait for so many seconds, or until the server stops."""
        self._stopping.wait(seconds)

    # -- starting and stopping -----------------------------------------------------------------

    @property
    def url(self) -> str:
        """Return the base URL, `http://127.0.0.1:…`, without a trailing slash."""
        if self._listening is None:
            raise ConfigError("This server is not started.", hint="Use `with …:` or `async with …:`.")
        return f"http://127.0.0.1:{self._listening.server_port}"

    def start(self: S) -> S:
        self._stopping.clear()
        server = self

        class Handler(_Handler):
            home = server

        self._listening = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._listening.daemon_threads = False
        self._thread = threading.Thread(target=self._listening.serve_forever, args=(0.01,), name="oncehook-stand-in")
        self._thread.start()
        ADDRESSES.add(urlsplit(self.url).netloc)
        return self

    def stop(self) -> None:
        """Close the listener and every connection."""
        if self._listening is None or self._thread is None:
            return
        self._stopping.set()
        self._listening.shutdown()
        self._thread.join()
        for connection in list(self._open):
            _cut(connection)
        self._listening.server_close()  # waits for the threads of all connections
        self._listening = self._thread = None

    def __enter__(self: S) -> S:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self: S) -> S:
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)


class _Handler(BaseHTTPRequestHandler):
    home: LoopbackServer
    protocol_version = "HTTP/1.1"
    server_version = "stand-in"

    def setup(self) -> None:
        super().setup()
        self.home._open.add(self.connection)
        if self.home._stopping.is_set():  # accepted in the last moment
            _cut(self.connection)

    def finish(self) -> None:
        self.home._open.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the other end has gone
            self.close_connection = True

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, parts.path, parts.query, headers, self._body(headers), clock.now_utc())
        self.home.requests.append(request)
        reply = self.home.reply(request)
        if reply is CUT or self.home._stopping.is_set():
            self.close_connection = True
            _cut(self.connection)
            return
        self._answer(reply)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the standard library calls them

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", "").lower():
            return self.rfile.read(int(headers.get("content-length", "0")))
        pieces = []
        while size := int(self.rfile.readline(_LONGEST_LINE).split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline(_LONGEST_LINE)
        while self.rfile.readline(_LONGEST_LINE).strip():
            """Skip the trailers."""
        return b"".join(pieces)

    def _answer(self, reply: Reply) -> None:
        body = reply.body if isinstance(reply.body, bytes) else msgspec.json.encode(reply.body)
        headers = {"content-type": _JSON, **{name.lower(): value for name, value in reply.headers.items()}}
        self.send_response(reply.status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: `requests` holds them."""


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        """The other end was faster."""
