"""The JSON API as commands speak it: every command that looks or acts asks through `Api`, and through nothing else.

Three lines lead to it, and a command cannot tell them apart: HTTP to the server that is named (`--server`), HTTP to the
process that writes this SQLite file, and, when no server is needed or runs, the same routes called in this process. A
program that writes the file and serves no API is read beside; what acts is refused then.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import click

from oncehook.cli.manners import voice
from oncehook.cli.setup import OTHER_STORE, config_option, from_app, from_settings
from oncehook.cli.showing import say
from oncehook.errors import ConfigError, StoreHeld
from oncehook.logs import plain

if TYPE_CHECKING:  # whoever asks brings nearly everything with them: a command's --help must not wait for that
    from oncehook.cli.lines import Answer, Beside, Headers, Line, Wire
    from oncehook.inbox import Inbox
    from oncehook.settings import Loaded
    from oncehook.store.sqlite.connection import FileHolder

T = TypeVar("T")
PREFIX: Final = "/api/v1/"
MOST: Final = 200
"""Items that one page may have."""

SETTLED: Final = 2.0
"""Seconds after which whoever writes a file has its address, is done with it, or is a program that stays."""

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
        return self._line(self._beside)

    def live(self, *, or_read: bool = False) -> Line:
        """The same for whoever stays: a SQLite file is not kept from the server that may want it.

        With `or_read` a program that has no address is read beside; otherwise it is nobody to listen to.
        """
        return self._line(functools.partial(self._beside_server, or_read=or_read))

    def _line(self, beside: Callable[[Path, Inbox | None, bool], Line]) -> Line:
        from oncehook.cli.lines import Inside
        from oncehook.settings.build import open_store
        from oncehook.store.sqlite import SqliteStore

        if self.server is not None:
            return self._named(self.server)
        inbox = from_app(self.app, self.config_file).inbox if self.app else None
        if inbox is not None:
            store, is_named = inbox.store, True
        else:
            settings = self._settings()
            store, is_named = open_store(settings.config.store), settings.where("store") != "default"
        if not isinstance(store, SqliteStore):
            return Inside(inbox or self._inbox())
        if not store.path.exists():
            also = "" if is_named else f" {OTHER_STORE}"
            raise Unreachable(f"There is no store at {store.path} yet.", hint=f"Start one with `oncehook serve`.{also}")
        return beside(store.path, inbox, is_named)

    def _settings(self) -> Loaded:
        """Enough to find the store: an app that is not named here may have the rest."""
        from oncehook.settings import load

        return load(self.config_file, secrets=False, whole=False)

    def _named(self, server: str) -> Line:
        from oncehook.cli.lines import Wire
        from oncehook.settings.forms import is_loopback

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

    def _beside(self, path: Path, inbox: Inbox | None, is_named: bool) -> Line:
        """SQLite: the process that writes the file, or nobody but us."""
        held = _holder(path)
        for _ in range(5):
            if held is not None:
                break
            try:
                return self._inside(path, inbox, is_named)
            except StoreHeld:  # somebody was quicker
                held = _holder(path)
        return self._wire(held) if held and held.address else self._reading(path, inbox, held)

    def _beside_server(self, path: Path, inbox: Inbox | None, is_named: bool, *, or_read: bool) -> Line:
        """SQLite: the process that writes the file, which must be there."""
        held = _holder(path)
        if held is None:
            raise Unreachable(f"Nobody serves {path} now.", hint="Start it with: oncehook serve")
        if held.address:
            return self._wire(held)
        if or_read:
            return self._reading(path, inbox, held)
        raise Unreachable(f"Process {held.pid} writes {path}, and has no address to listen at.")

    def _wire(self, held: FileHolder) -> Wire:
        from oncehook.cli.lines import Wire

        return Wire(_reachable(held.address), self._token() if self.token_env else held.token)

    def _inside(self, path: Path, inbox: Inbox | None, is_named: bool) -> Line:
        from oncehook.cli.lines import Inside

        line = Inside(inbox or self._inbox())
        if not is_named and line.is_empty():
            say([f"nothing is kept in {path} yet. {OTHER_STORE}"], err=True)
        return line

    def _reading(self, path: Path, inbox: Inbox | None, held: FileHolder | None) -> Line:
        """SQLite: what the process that writes the file has written, which it cannot be asked about."""
        from oncehook.cli.lines import Beside
        from oncehook.inbox import Inbox
        from oncehook.settings import load

        pid = held.pid if held else 0
        if inbox is None:
            say([f"reading {path} beside process {pid}; what it defines is known with --app module:inbox"], err=True)
            inbox = Inbox.from_config(load(self.config_file).config)  # not the development inbox: `serve` alone is that
        return Beside(inbox, pid, path)


def _holder(path: Path) -> FileHolder | None:
    """Which process writes the file. One that has just begun is waited for: another command is done in a moment, and a
    server opens its door."""
    from oncehook.store.sqlite.connection import holder

    for _ in range(round(SETTLED / 0.1)):
        held = holder(path)
        if held is None or held.address or held.age > SETTLED:
            break
        threading.Event().wait(0.1)
    return held


def _cannot_act(line: Beside) -> Unreachable:
    return Unreachable(
        f"Process {line.pid} writes {line.path}, and takes nothing from commands: they can only look beside it.",
        hint="Act in that program: mount inbox.dashboard(…), or call inbox.desk. Or stop it, and ask again.",
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
            self._take(self._where.line())
        assert self._line is not None
        return self._line

    def live(self, *, or_read: bool = False) -> Line:
        """The way there for whoever stays, looked for anew with each call: a server that was started again is found."""
        self._take(self._where.live(or_read=or_read))
        return self.line

    def check_may_act(self) -> None:
        """Raise Unreachable where all that can be done is to look."""
        from oncehook.cli.lines import Beside

        if isinstance(self.line, Beside):
            raise _cannot_act(self.line)

    def _take(self, line: Line) -> None:
        if self._line is not None:
            self._line.close()
        self._line = line
        if voice.verbose:
            click.echo(f"asking {line}", err=True)

    def get(self, path: str, **parameters: object) -> dict[str, Any]:
        """One answer."""
        return self._read(self._ask("GET", path, parameters))

    def raw(self, path: str) -> bytes:
        """An answer that is not JSON."""
        return self.checked(self._ask("GET", path, {})).body

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
        return self._read(self._ask("POST", path, {}, headers, json.dumps(body or {}).encode(), tries=2 if key else 1))

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
        fields = _fields(self.checked(answer).body)
        if fields is None:
            raise self._stranger()
        return fields

    def checked(self, answer: Answer) -> Answer:
        """The answer, if it is a good one. Raises Failed, or what it is called in its case."""
        if 200 <= answer.status < 300:
            return answer
        said = _fields(answer.body)
        if said is None or "error" not in said:
            raise self._stranger()
        if said.get("code") == StoreHeld.code:
            self.check_may_act()
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
        fields = json.loads(body)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def speaks(function: Callable[..., T]) -> Callable[..., T]:
    """Give a command its `Api`, as its first argument, and the options that say where it is."""

    @config_option
    @click.option("--app", metavar="MODULE:INBOX", help="The inbox that a program makes, instead of the settings'.")
    @click.option("--server", metavar="URL", help="Ask this server, over HTTP.")
    @click.option("--token-env", metavar="NAME", help=f"Variable that holds the token for it (default: {TOKEN_ENV}).")
    @functools.wraps(function)
    def wrapped(config_file: Path | None, app: str | None, server: str | None, token_env: str | None, **rest: Any) -> T:
        with Api(Where(config_file, app, server, token_env)) as api:
            return function(api, **rest)

    return wrapped


json_option = click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
