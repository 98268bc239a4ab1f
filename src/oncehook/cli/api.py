"""The JSON API as commands speak it: every command that looks or acts asks through `Api`, and through nothing else.

Three lines lead to it, and a command cannot tell them apart: HTTP to the server that is named (`--server`), HTTP to the
process that writes this SQLite file, and, when no server is needed or runs, the same routes called in this process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import click
import msgspec

from oncehook import sending
from oncehook.assembly import open_store
from oncehook.cli.setup import config_option, from_app, from_settings
from oncehook.config import load
from oncehook.config.forms import is_loopback
from oncehook.errors import ConfigError, StoreHeld
from oncehook.inbox import Inbox
from oncehook.logs import plain
from oncehook.model import Arrival, Engine
from oncehook.store.base import Store

T = TypeVar("T")
Headers = Mapping[str, str]

PREFIX: Final = "/api/v1/"
MOST: Final = 200
"""Items that one page may have."""

PATIENCE: Final = 60.0
"""Seconds for one answer."""

TOKEN_ENV: Final = "ONCEHOOK_TOKEN"  # noqa: S105 - the variable's name

_WRONG_USE: Final = frozenset({400, 401, 403, 405, 413})


class Failed(click.ClickException):
    """The command ends here, with a sentence and a hint: the work found failures."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        """Say it on stderr."""
        click.echo(f"oncehook: {plain(self.message)}", err=True)
        if self.hint:
            click.echo(f"  {plain(self.hint)}", err=True)


class Misused(Failed):
    """It was asked for in a way that cannot be answered."""

    exit_code = 2


class Unreachable(Failed):
    """Nobody answers."""

    exit_code = 3


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


# -- the lines ---------------------------------------------------------------------------------


class Wire:
    """HTTP to a server."""

    is_alone = False

    def __init__(self, address: str, token: str) -> None:
        self._address = address.rstrip("/")
        self._token = token

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        sent = {**headers, "user-agent": "oncehook-cli"}
        if self._token:
            sent["authorization"] = f"Bearer {self._token}"
        raw = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        answer = sending.post(self._address + target, Arrival("", raw, body, method=method), timeout=PATIENCE)
        return Answer(answer.status, answer.body)

    def rest(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def close(self) -> None:
        """Every request had a connection of its own."""

    def __str__(self) -> str:
        return self._address


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
            self._runner.run(_open(inbox))
        except BaseException:
            self._runner.close()
            raise
        self._app = _routes(inbox)

    def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        return self._runner.run(_call(self._app, method, target, headers, body))

    def rest(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._store.close())

    def __str__(self) -> str:
        return "this process"


async def _open(inbox: Inbox) -> None:
    """Open the store, and let every name have its number."""
    # Whoever only wants to look must not change the schema under those who work.
    await inbox.store.open(migrate=False)
    try:
        numbers = await inbox.store.enroll(inbox.sources, inbox.destinations)
    except BaseException:
        await inbox.store.close()
        raise
    for source in inbox.sources.values():
        source.number = numbers.sources[source.name]
    for destination in inbox.destinations.values():
        destination.number = numbers.destinations[destination.name]


def _routes(inbox: Inbox) -> Callable[..., Any]:
    from starlette.applications import Starlette
    from starlette.requests import Request

    from oncehook.web import api
    from oncehook.web.access import Access, Identity, Role
    from oncehook.web.live import Stream

    class Own(Access):
        """Whoever can open the store can do everything with it: no token would keep them from it."""

        async def of(self, request: Request) -> Identity:
            return Identity("cli", Role.admin)

    return Starlette(routes=api.routes(inbox.desk, Own(), Stream()))


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


# -- finding the server ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """What the command line says about the server."""

    config_file: Path | None = None
    app: str | None = None
    server: str | None = None
    token_env: str | None = None

    def line(self) -> Line:
        """The way to the API that holds."""
        if self.server is not None:
            return self._named(self.server)
        inbox = from_app(self.app, self.config_file).inbox if self.app else None
        store = inbox.store if inbox else open_store(load(self.config_file, secrets=False).config.store)
        if store.engine is Engine.sqlite:
            return self._beside(store, inbox)
        return Inside(inbox or self._inbox())

    def _named(self, server: str) -> Line:
        token, host = self._token(), _host(server)
        if token and server.startswith("http:") and not is_loopback(host):
            click.echo(f"warning: the token goes to {host} unencrypted; use https", err=True)
        return Wire(server, token)

    def _token(self) -> str:
        name = self.token_env or TOKEN_ENV
        token = os.environ.get(name, "").strip()
        if self.token_env and not token:
            raise ConfigError(f"{name} is not set.", hint="--token-env names the variable that holds the token.")
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(f"{name} does not hold a token.", hint="A token is one line of plain characters.")
        return token

    def _inbox(self) -> Inbox:
        return from_settings(self.config_file).inbox

    def _beside(self, store: Store, inbox: Inbox | None) -> Line:
        """SQLite: the process that writes the file, or nobody but us."""
        from oncehook.store.sqlite import SqliteStore
        from oncehook.store.sqlite.hold import Holder, holder

        assert isinstance(store, SqliteStore)
        if not store.path.exists():
            raise Unreachable(f"There is no store at {store.path} yet.", hint="Start one with: oncehook serve")
        held: Holder | None = None
        for _ in range(20):
            held = holder(store.path)
            if held is not None and held.address:
                return Wire(_reachable(held.address), self._token() if self.token_env else held.token)
            if held is None:
                try:
                    return Inside(inbox or self._inbox())
                except StoreHeld:
                    pass
            # Another command is at it, or a server that has not opened its door yet.
            threading.Event().wait(0.1)
        pid = held.pid if held else 0
        raise Unreachable(
            f"Process {pid} writes {store.path}, and has no address to ask it at.",
            hint="Work with `oncehook serve`, which has one, or stop that process first.",
        )


def _host(server: str) -> str:
    try:
        parts = urlsplit(server)
        host, _ = parts.hostname or "", parts.port  # both may be wrong
        host.encode("idna")
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https") or parts.query:
        raise ConfigError(f"{server} is not a web address.", hint="It begins with http:// or https://.")
    return host


def _reachable(address: str) -> str:
    """Who listens on every address is asked on the loopback one, where the local token counts."""
    return address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


# -- asking ------------------------------------------------------------------------------------


def at(*parts: str) -> str:
    """An address below the API's: whatever stands in an id or a name, it is one part of the way."""
    return "/".join(quote(part, safe="") for part in parts)


class Api:
    """The JSON API. The line is taken when the first question is asked; `with` lets go of it."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._line: Line | None = None

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.close()

    @property
    def line(self) -> Line:
        """The way that leads there."""
        if self._line is None:
            self._line = self._where.line()
        return self._line

    def get(self, path: str, **parameters: object) -> dict[str, Any]:
        """One answer."""
        return self._read(self._ask("GET", path, parameters))

    def raw(self, path: str) -> bytes:
        """An answer that is not JSON."""
        return self._checked(self._ask("GET", path, {})).body

    def pages(self, path: str, *, most: int | None = None, **parameters: object) -> Iterator[dict[str, Any]]:
        """The items of a list, page after page, as many as are wanted; without `most`, all of them."""
        left, cursor = most, None
        while left is None or left > 0:
            size = MOST if left is None else min(MOST, left)
            page = self.get(path, limit=size, cursor=cursor, **parameters)
            yield from page["items"]
            left = None if left is None else left - len(page["items"])
            cursor = page["next"]
            if cursor is None:
                return

    def post(self, path: str, body: Mapping[str, object] | None = None, *, key: str | None = None) -> dict[str, Any]:
        """One act. With a key it is asked for again when the answer is lost: the server does it once (R47)."""
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["idempotency-key"] = key
        return self._read(self._ask("POST", path, {}, headers, msgspec.json.encode(body or {}), tries=2 if key else 1))

    def _ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, object],
        headers: Headers | None = None,
        body: bytes = b"",
        tries: int = 1,
    ) -> Answer:
        given = {name: value for name, value in parameters.items() if value not in (None, "")}
        target = PREFIX + path + (f"?{urlencode(given)}" if given else "")
        while True:
            tries -= 1
            try:
                return self.line.ask(method, target, headers or {}, body)
            except OSError as error:
                if tries <= 0 or isinstance(error, ConnectionRefusedError):
                    raise Unreachable(
                        f"nobody answers at {self.line} ({error})", hint="Is `oncehook serve` running?"
                    ) from error

    def _read(self, answer: Answer) -> dict[str, Any]:
        fields = _fields(self._checked(answer).body)
        if fields is None:
            raise self._stranger()
        return fields

    def _checked(self, answer: Answer) -> Answer:
        if 200 <= answer.status < 300:
            return answer
        said = _fields(answer.body)
        if said is None or "error" not in said:
            raise self._stranger()
        hint = str(said.get("hint", ""))
        if answer.status == 401:
            hint = f"Put a token into {TOKEN_ENV}, or name the variable that holds one with --token-env."
        raise _failure(answer.status)(str(said["error"]), hint=hint)

    def _stranger(self) -> Failed:
        return Unreachable(f"{self.line} does not answer as an oncehook server does.", hint="Check the address.")


def _failure(status: int) -> type[Failed]:
    if status in _WRONG_USE:
        return Misused
    return Unreachable if status in (502, 503, 504) else Failed


def _fields(body: bytes) -> dict[str, Any] | None:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def speaks(function: Callable[..., T]) -> Callable[..., T]:
    """Give a command its `Api`, as its first argument, and the options that say where it is."""

    @config_option
    @click.option("--app", metavar="MODULE:INBOX", help="The inbox that a program makes, instead of the settings'.")
    @click.option(
        "--server", metavar="URL", envvar="ONCEHOOK_SERVER", show_envvar=True, help="Ask this server, over HTTP."
    )
    @click.option("--token-env", metavar="NAME", help=f"Variable that holds the token for it (default: {TOKEN_ENV}).")
    @functools.wraps(function)
    def wrapped(config_file: Path | None, app: str | None, server: str | None, token_env: str | None, **rest: Any) -> T:
        with Api(Where(config_file, app, server, token_env)) as api:
            return function(api, **rest)

    return wrapped


json_option = click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
