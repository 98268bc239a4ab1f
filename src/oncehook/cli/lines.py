"""The lines that lead to the JSON API: HTTP to a server, or the same routes called in this process.

Beside a process that writes a SQLite file and serves no API, they are called on the file itself, opened for reading.

`api` takes one of them when the first question is asked, and nobody else does: what is imported here is nearly
everything there is.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from oncehook import samples
from oncehook.inbox import Inbox
from oncehook.model import Arrival, Engine, Filter
from oncehook.store.base import Numbers
from oncehook.store.sqlite import SqliteStore

Headers = Mapping[str, str]

PATIENCE: Final = 60.0
"""Seconds for one answer; on a stream, for its next sign of life."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API said."""

    status: int
    body: bytes


class Line(Protocol):
    """A way to the API."""

    is_alone: bool
    """Nobody else can be at work on this store."""

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        """One request. Raises OSError when nobody answers."""

    def rest(self, seconds: float) -> None:
        """Let some time pass."""

    def close(self) -> None:
        """Let go."""


class Wire:
    """HTTP to a server."""

    is_alone = False

    def __init__(self, address: str, token: str) -> None:
        self._address = address.rstrip("/")
        self._token = token

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in self._signed(headers).items()]
        answer = samples.post(self._address + target, Arrival("", raw, body, method=method), timeout=PATIENCE)
        return Answer(answer.status, answer.body)

    def listen(self, target: str) -> tuple[Answer, Iterator[bytes]]:
        """An answer that does not end: its lines as they come. Raises OSError, also when the line goes dead."""
        parts = urlsplit(self._address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=PATIENCE)
        try:
            connection.request("GET", parts.path + target, headers=self._signed({"accept": "text/event-stream"}))
            response = connection.getresponse()
        except BaseException as error:
            connection.close()
            if isinstance(error, http.client.HTTPException):
                raise OSError(f"the answer was cut off ({error!r})") from error
            raise
        if response.status == 200:
            return Answer(200, b""), _lines(connection, response)
        with closing(connection):
            return Answer(response.status, response.read()), iter(())

    def _signed(self, headers: Headers) -> dict[str, str]:
        own = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return {**headers, "user-agent": "oncehook-cli", **own}

    def rest(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def close(self) -> None:
        """Every request had a connection of its own."""

    def __str__(self) -> str:
        return self._address


def _lines(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
    with closing(connection):
        try:
            while line := response.readline():
                yield line.rstrip(b"\r\n")
        except http.client.HTTPException as error:
            raise OSError(f"the stream was cut off ({error!r})") from error


class Inside:
    """The same routes, called in this process: the store is open for as long as the command runs.

    The inbox is not started: its sweep would prune, and would tell of a crossed watermark where nobody reads it.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.is_alone = inbox.store.engine is Engine.sqlite
        logging.getLogger("oncehook").addHandler(logging.NullHandler())
        self._store = inbox.store
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._open(inbox))
        except BaseException:
            self._runner.close()
            raise
        self._app = _routes(inbox)

    async def _open(self, inbox: Inbox) -> None:
        """Open the store, and let every name have its number."""
        # Whoever only wants to look must not change the schema under those who work.
        await inbox.store.open(migrate=False)
        try:
            _number(inbox, await inbox.store.register_names(inbox.sources, inbox.destinations))
        except BaseException:
            await inbox.store.close()
            raise

    def is_empty(self) -> bool:
        """Whether no event is kept."""
        return not self._runner.run(self._store.find_events(Filter(), limit=1)).items

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        return self._runner.run(_call(self._app, method, target, headers, body))

    def rest(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._store.close())

    def __str__(self) -> str:
        return "this process"


class Beside(Inside):
    """The same beside a process that writes a SQLite file and has no address: what only looks is answered.

    The file is opened for reading. Nothing is written to it, and its log is left alone, also by the last who closes it.
    """

    def __init__(self, inbox: Inbox, pid: int, path: Path) -> None:
        super().__init__(inbox)
        self.is_alone = False
        self.pid, self.path = pid, path

    async def _open(self, inbox: Inbox) -> None:
        store = inbox.store
        assert isinstance(store, SqliteStore)
        try:
            await store.open(migrate=False, write=False)
            _number(inbox, await store.numbers())
        except BaseException:
            await store.close()
            raise

    def __str__(self) -> str:
        return f"{self.path}, beside process {self.pid}"


def _number(inbox: Inbox, numbers: Numbers) -> None:
    """Give every name its number; one that the store has never heard of has none."""
    for source in inbox.sources.values():
        source.number = numbers.sources.get(source.name, 0)
    for destination in inbox.destinations.values():
        destination.number = numbers.destinations.get(destination.name, 0)


def _routes(inbox: Inbox) -> Callable[..., Any]:
    from starlette.applications import Starlette
    from starlette.requests import Request

    from oncehook.web import api
    from oncehook.web.auth import Access, Identity, Role
    from oncehook.web.live import Broadcast

    class Own(Access):
        """Whoever can open the store can do everything with it: no token would keep them from it."""

        async def of(self, request: Request) -> Identity:
            return Identity("cli", Role.admin)

    return Starlette(routes=api.routes(inbox.admin, Own(), Broadcast()))


async def _call(app: Callable[..., Any], method: str, target: str, headers: Headers, body: bytes) -> Answer:
    """One ASGI request, without a server."""
    parts = urlsplit(target)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
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
    status, pieces = 0, []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, b"".join(pieces))
