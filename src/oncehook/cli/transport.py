"""Transports to the JSON API: HTTP to a server, or the same routes called in this process.

Beside a process that owns a SQLite file and takes no clients, the routes are called on the file, opened for reading.
Only `api` imports this module, when the first question is asked: it imports nearly everything.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from oncehook import samples
from oncehook.inbox import Inbox
from oncehook.model import Arrival, Filter
from oncehook.store.base import CommandObserver, NameIds
from oncehook.store.sqlite import SqliteStore

Headers = Mapping[str, str]
T = TypeVar("T")

TIMEOUT: Final = 60.0
"""Seconds for one answer; on a stream, for its next sign of life."""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    status: int
    body: bytes


class Transport(Protocol):
    @property
    def is_alone(self) -> bool:
        """True where nobody else can be at work on this store."""

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> ApiResponse:
        """Make one request. Raises OSError when there is no answer."""

    def sleep(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class HttpTransport:
    is_alone = False

    def __init__(self, address: str, token: str) -> None:
        self._address = address.rstrip("/")
        self._token = token
        self.timeout = TIMEOUT

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> ApiResponse:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in self._with_token(headers).items()]
        response = samples.post(self._address + target, Arrival("", raw, body, method=method), timeout=self.timeout)
        return ApiResponse(response.status, response.body)

    def listen(self, target: str) -> tuple[ApiResponse, Iterator[bytes]]:
        """Return the lines of an endless response as they come. Raises OSError, also when it is cut off."""
        parts = urlsplit(self._address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            connection.request("GET", parts.path + target, headers=self._with_token({"accept": "text/event-stream"}))
            response = connection.getresponse()
        except BaseException as error:
            connection.close()
            if isinstance(error, http.client.HTTPException):
                raise OSError(f"the answer was cut off ({error!r})") from error
            raise
        if response.status == 200:
            return ApiResponse(200, b""), _lines(connection, response)
        with closing(connection):
            return ApiResponse(response.status, response.read()), iter(())

    def _with_token(self, headers: Headers) -> dict[str, str]:
        own = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return {**headers, "user-agent": "oncehook-cli", **own}

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def close(self) -> None:
        """Do nothing: every request had a connection of its own."""

    def __str__(self) -> str:
        return self._address


def _lines(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
    with closing(connection):
        try:
            while line := response.readline():
                yield line.rstrip(b"\r\n")
        except http.client.HTTPException as error:
            raise OSError(f"the stream was cut off ({error!r})") from error


class LocalTransport:
    """A transport that calls the routes in this process: the store is open for as long as the command runs.

    The inbox is not started: its sweep would prune, and would announce a crossed watermark where nobody sees it.
    """

    def __init__(self, inbox: Inbox) -> None:
        logging.getLogger("oncehook").addHandler(logging.NullHandler())
        self._store = inbox.store
        # On a thread: while a person thinks about a question, other processes may need what this one owns.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="oncehook-command", daemon=True)
        self._thread.start()
        try:
            self._run(self._open(inbox))
        except BaseException:
            self._end()
            raise
        self._app = _routes(inbox)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end(self) -> None:
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def is_alone(self) -> bool:
        return self._store.is_alone

    async def _open(self, inbox: Inbox) -> None:
        # A command that only reads must not change the schema under running workers.
        await inbox.store.open(CommandObserver(), migrate=False)
        try:
            _number(inbox, await inbox.store.register_names(inbox.sources, inbox.destinations))
        except BaseException:
            await inbox.store.close()
            raise

    def is_empty(self) -> bool:
        return not self._run(self._store.find_events(Filter(), limit=1)).items

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> ApiResponse:
        return self._run(_call(self._app, method, target, headers, body))

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def close(self) -> None:
        try:
            self._run(self._store.close())
        finally:
            self._end()

    def __str__(self) -> str:
        return "this process"


class ReadOnlyTransport(LocalTransport):
    """A local transport beside a process that owns the SQLite file and takes no clients: only reads are answered.

    It does not write to the file, nor checkpoint its log, even as the last process to close it.
    """

    def __init__(self, inbox: Inbox, pid: int, path: Path) -> None:
        super().__init__(inbox)
        self.pid, self.path = pid, path

    async def _open(self, inbox: Inbox) -> None:
        store = inbox.store
        assert isinstance(store, SqliteStore)
        try:
            await store.open(migrate=False, write=False)
            _number(inbox, await store.name_ids())
        except BaseException:
            await store.close()
            raise

    def __str__(self) -> str:
        return f"{self.path}, beside process {self.pid}"


def _number(inbox: Inbox, numbers: NameIds) -> None:
    """Assign the store's ids to sources and destinations; 0 for a name that the store does not know."""
    for source in inbox.sources.values():
        source.id = numbers.sources.get(source.name, 0)
    for destination in inbox.destinations.values():
        destination.id = numbers.destinations.get(destination.name, 0)


def _routes(inbox: Inbox) -> Callable[..., Any]:
    from starlette.applications import Starlette
    from starlette.requests import Request

    from oncehook.web import api
    from oncehook.web.auth import Access, Identity, Role
    from oncehook.web.live import Broadcast

    class FullAccess(Access):
        """Access without a token: a process that can open the store can do everything with it."""

        async def of(self, request: Request) -> Identity:
            return Identity("cli", Role.admin)

    return Starlette(routes=api.routes(inbox.admin, FullAccess(), Broadcast()))


async def _call(app: Callable[..., Any], method: str, target: str, headers: Headers, body: bytes) -> ApiResponse:
    from oncehook.web.asgi import call_app

    parts = urlsplit(target)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        "server": ("127.0.0.1", 0),
        "client": ("127.0.0.1", 0),
    }
    reply = await call_app(app, scope, body)
    return ApiResponse(reply.status, reply.body)
