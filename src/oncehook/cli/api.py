"""The JSON API as commands use it: every command that reads or acts asks through `Api`, and through nothing else.

Three transports lead to it, and commands do not know which: HTTP to the server that is named (`--server`), HTTP
to the server that owns this SQLite file, and, when no server is needed or runs, the same routes called in this
process, as a client of whatever program owns the file. One that takes no clients can only be read beside.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import click

from oncehook.cli.options import address_of, app_option, build_setup, config_option, loopback, voice, warn
from oncehook.cli.output import message, say
from oncehook.errors import ConfigError, StoreHeld, Unauthorized
from oncehook.human import suggest
from oncehook.logs import plain

if TYPE_CHECKING:  # transports import nearly everything: a command's --help must not wait for that
    from oncehook.cli.transport import ApiResponse, Headers, HttpTransport, ReadOnlyTransport, Transport
    from oncehook.inbox import Inbox
    from oncehook.settings import Config
    from oncehook.store.sqlite.connection import FileHolder

T = TypeVar("T")
PREFIX: Final = "/api/v1/"
PAGE_SIZE: Final = 200
"""Items that one page may have."""

SETTLED: Final = 2.0
"""Seconds after which the process that owns a file has its address, has ended, or is a program without one."""

TOKEN_ENV: Final = "ONCEHOOK_TOKEN"  # noqa: S105 - the variable's name
OTHER_STORE: Final = "A program's own store is found with --app module:inbox, another one by ONCEHOOK_STORE."
"""A hint for when no store is named and the default one is empty."""

SEARCHED: Final = 2000
"""The newest events, deliveries or replays among which a short id is looked up."""

_SHORT_ID: Final = re.compile(r"(evt|dlv|rpl|arr)_(?:…|\.{2,3})?([0-9a-f]{4,31})(?:-([0-9a-f]{1,6}))?")
_DOTTED_ID: Final = re.compile(r"(?<!\w)(?:evt|dlv|rpl)_(?:…|\.{2,3})[0-9a-f]{4,31}(?:-[0-9a-f]{1,6})?(?!\w)")
_LISTS: Final = {"evt": "events", "arr": "events", "dlv": "deliveries", "rpl": "replays"}

_WRONG_USE: Final = frozenset({400, 401, 403, 405, 413})


class Failed(click.ClickException):
    """A failure of the work, with a sentence and a hint."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Misused(Failed):
    exit_code = 2


class Unreachable(Failed):
    exit_code = 3


# -- finding the server ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """The options that name a server, or the store that one owns."""

    config_file: Path | None = None
    app: str | None = None
    server: str | None = None
    token_env: str | None = None

    def connect(self) -> Transport:
        """Return the transport for one command: to the server that owns a SQLite file, or else in this process."""
        return self._connect(self._share_file)

    def connect_live(self, *, or_read: bool = False) -> Transport:
        """Return the transport for a long-running command, which must not keep a server from opening the SQLite file.

        With `or_read` a store without a server is opened for reading; without it, that raises Unreachable.
        """
        return self._connect(functools.partial(self._follow_file, or_read=or_read), needs_server=not or_read)

    def _connect(
        self, open_file: Callable[[Path, Inbox | None, bool], Transport], *, needs_server: bool = False
    ) -> Transport:
        from oncehook.cli.transport import LocalTransport
        from oncehook.settings import load
        from oncehook.settings.build import open_store
        from oncehook.store.sqlite import SqliteStore

        if self.server is not None:
            return self._connect_to(self.server)
        inbox = build_setup(self.app, self.config_file).inbox if self.app else None
        if inbox is not None:
            store, is_named = inbox.store, True
        else:
            # Enough to find the store; an app that is not named here may define the rest.
            settings = load(self.config_file, secrets=False, whole=False)
            store, is_named = open_store(settings.config.store), settings.where("store") != "default"
        if not isinstance(store, SqliteStore):
            if needs_server:
                raise Unreachable("No server is named to listen to.", hint="Name it with --server URL.")
            return LocalTransport(inbox or self._inbox())
        if not store.path.exists():
            also = "" if is_named else f" {OTHER_STORE}"
            raise Unreachable(f"There is no store at {store.path} yet.", hint=f"Start one with `oncehook serve`.{also}")
        return open_file(store.path, inbox, is_named)

    def _inbox(self) -> Inbox:
        return build_setup(None, self.config_file).inbox

    def _connect_to(self, server: str) -> HttpTransport:
        from oncehook.cli.transport import HttpTransport
        from oncehook.settings.values import is_loopback

        token, host = self._token(), _host(server)
        if token and server.startswith("http:") and not is_loopback(host):
            warn([f"the token goes to {host} unencrypted; use https"])
        return HttpTransport(server, token)

    def _token(self) -> str:
        name = self.token_env or TOKEN_ENV
        token = os.environ.get(name, "").strip()
        if self.token_env and not token:
            raise ConfigError(f"{name} is not set.", hint="--token-env names the variable that holds the token.")
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(f"{name} does not hold a token.", hint="A token is one line of plain characters.")
        return token

    def _share_file(self, path: Path, inbox: Inbox | None, is_named: bool) -> Transport:
        from oncehook.cli.transport import LocalTransport

        held = _holder(path)
        if held is not None and held.address:
            return self._ask_holder(held)
        if inbox is None:
            inbox = self._inbox() if held is None else self._inbox_beside(path, held)
        try:
            transport = LocalTransport(inbox)
        except StoreHeld:
            return self._read_file(path, inbox, _holder(path))
        if not is_named and transport.is_empty():
            say(message(f"nothing is kept in {path} yet. {OTHER_STORE}"), err=True)
        return transport

    def _follow_file(self, path: Path, inbox: Inbox | None, is_named: bool, *, or_read: bool) -> Transport:
        held = _holder(path)
        if held is None:
            raise Unreachable(f"Nobody serves {path} now.", hint="Start it with: oncehook serve")
        if held.address:
            return self._ask_holder(held)
        if or_read:
            return self._read_file(path, inbox, held)
        raise Unreachable(f"Process {held.pid} owns {path}, and has no address to listen at.")

    def _ask_holder(self, held: FileHolder) -> HttpTransport:
        from oncehook.cli.transport import HttpTransport

        return HttpTransport(loopback(held.address), self._token() if self.token_env else held.token)

    def _read_file(self, path: Path, inbox: Inbox | None, held: FileHolder | None) -> ReadOnlyTransport:
        from oncehook.cli.transport import ReadOnlyTransport

        return ReadOnlyTransport(inbox or self._inbox_beside(path, held), held.pid if held else 0, path)

    def _inbox_beside(self, path: Path, held: FileHolder | None) -> Inbox:
        from oncehook.inbox import Inbox
        from oncehook.settings import load

        pid = held.pid if held else 0
        say(message(f"using {path} beside process {pid}; what it defines is known with --app module:inbox"), err=True)
        return Inbox.from_config(load(self.config_file).config)  # not the development inbox: `serve` alone is that


def _holder(path: Path) -> FileHolder | None:
    """Return the process that owns the file. Wait for one that has just begun: a command ends, a server listens."""
    from oncehook.store.sqlite.connection import holder

    for _ in range(round(SETTLED / 0.1)):
        held = holder(path)
        if held is None or held.address or held.age > SETTLED:
            break
        threading.Event().wait(0.1)
    return held


def running_address(config: Config) -> str:
    """Return where the server of these settings receives: on the port that it really has, or else on theirs."""
    from oncehook.settings.build import open_store
    from oncehook.store.sqlite import SqliteStore

    store = open_store(config.store)
    if config.server.admin_bind is None and isinstance(store, SqliteStore) and store.path.exists():
        held = _holder(store.path)
        if held is not None and held.address:
            return loopback(held.address)
    return address_of(config.server)


def _host(server: str) -> str:
    try:
        parts = urlsplit(server)
        host, _ = parts.hostname or "", parts.port  # either property may raise ValueError
        host.encode("idna")
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https") or parts.query:
        raise ConfigError(f"{server} is not a web address.", hint="It begins with http:// or https://.")
    return host


# -- asking ------------------------------------------------------------------------------------


def at(*parts: str) -> str:
    """Return a path below the API's, with each part quoted, so that a slash in an id or a name separates nothing."""
    return "/".join(quote(part, safe="") for part in parts)


class Api:
    """The JSON API. The transport is chosen at the first request; `with` closes it."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._transport: Transport | None = None

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            return self._use(self._where.connect())
        return self._transport

    def connect_live(self, *, or_read: bool = False) -> Transport:
        """Connect anew for a long-running command, so that a restarted server is found."""
        return self._use(self._where.connect_live(or_read=or_read))

    def _use(self, transport: Transport) -> Transport:
        if self._transport is not None:
            self._transport.close()
        self._transport = transport
        if voice.verbose:
            click.echo(f"asking {transport}", err=True)
        return transport

    @property
    def knows_no_program(self) -> bool:
        """Tell whether the routes are called in this process, which knows what the settings define and no more."""
        from oncehook.cli.transport import HttpTransport

        return self._where.app is None and not isinstance(self.transport, HttpTransport)

    def check_may_act(self) -> None:
        """Raise Unreachable where the store can only be read."""
        from oncehook.cli.transport import ReadOnlyTransport

        if isinstance(held := self.transport, ReadOnlyTransport):
            raise Unreachable(
                f"Process {held.pid} owns {held.path}, and takes no clients: commands can only look beside it.",
                hint="Stop it, and ask again; or use the version of oncehook that it uses.",
            )

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask on a terminal; elsewhere only --yes confirms. Raises where the answer is no, and where acts are
        refused."""
        self.check_may_act()
        if yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError("There is no terminal to ask on; say --yes.")
        if not click.confirm(question, err=True):
            raise Failed("nothing was done")

    def full_id(self, id: str) -> str:
        """Return the whole of a short id (`evt_…3a5d2c`, `evt_3a5d2c`), which must be unique among recent ones.

        Text that is no short id is returned as is.
        """
        match = _SHORT_ID.fullmatch(id)
        if match is None:
            return id
        kind, tail, number = match.groups()
        things = _LISTS[kind]
        found = {one["id"] for one in self.pages(things, most=SEARCHED) if _ends(one["id"], tail, number)}
        if len(found) == 1:
            return f"{kind}_{found.pop().partition('_')[2]}"
        whole = f"`oncehook {'replay --list' if kind == 'rpl' else 'events'} --wide` prints whole ids."
        if not found:
            raise Failed(f"None of the newest {SEARCHED:,} {things} is {plain(id)}.", hint=f"Older ones: {whole}")
        raise Failed(f"{plain(id)} is short for {len(found)} {things}: {', '.join(sorted(found)[:5])}.", hint=whole)

    def full_query(self, words: Iterable[str]) -> str:
        """Join the words of a query; a short id in it, which has the sign … or dots, becomes a whole one."""
        return " ".join(_DOTTED_ID.sub(lambda found: self.full_id(found[0]), word) for word in words)

    def link(self, path: str) -> str:
        """Return the address of a page of the dashboard; empty where no server is asked."""
        address = str(self.transport)
        return f"{address}/{path}" if address.startswith("http") else ""

    def login_link(self, page: str) -> str:
        """Return a link that logs somebody at this machine in, once; or the page's address, which asks who they are."""
        try:
            token = self.post("login-link")["token"]
        except Unreachable:
            raise
        except Failed:  # a server elsewhere, or a token that may not
            return self.link(page.lstrip("/"))
        return self.link("?" + urlencode({"token": token, **({} if page == "/" else {"to": page})}))

    def get(self, path: str, **parameters: object) -> dict[str, Any]:
        return self._decode(self._ask("GET", path, parameters))

    def raw(self, path: str) -> bytes:
        return self.check(self._ask("GET", path, {})).body

    def pages(self, path: str, *, most: int | None = None, **parameters: object) -> Iterator[dict[str, Any]]:
        """Yield the items of a list across pages: all of them, or at most `most`."""
        left, cursor = most, None
        while left is None or left > 0:
            size = PAGE_SIZE if left is None else min(PAGE_SIZE, left)
            page = self.get(path, limit=size, cursor=cursor, **parameters)
            yield from page["items"]
            left = None if left is None else left - len(page["items"])
            cursor = page["next"]
            if cursor is None:
                return

    def post(self, path: str, body: Mapping[str, object] | None = None, *, key: str | None = None) -> dict[str, Any]:
        """Do one act. With a request key, retry when the answer is lost: the server does it once (R47)."""
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["idempotency-key"] = key
        content = json.dumps(body or {}).encode()
        return self._decode(self._ask("POST", path, {}, headers, content, tries=2 if key else 1))

    def act(self, method: str, path: str, body: Mapping[str, object] | None, **parameters: object) -> dict[str, Any]:
        """Do one act by any method."""
        content = b"" if body is None else json.dumps(body, default=str).encode()
        return self._decode(self._ask(method, path, parameters, {"content-type": "application/json"}, content))

    def _ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, object],
        headers: Headers | None = None,
        body: bytes = b"",
        tries: int = 1,
    ) -> ApiResponse:
        query = urlencode({name: value for name, value in parameters.items() if value not in (None, "")})
        target = PREFIX + path + (f"?{query}" if query else "")
        while True:
            tries -= 1
            try:
                return self.transport.ask(method, target, headers or {}, body)
            except OSError as error:
                if tries <= 0 or isinstance(error, ConnectionRefusedError):
                    raise no_answer(self.transport, error) from error

    def _decode(self, response: ApiResponse) -> dict[str, Any]:
        fields = _fields(self.check(response).body)
        if fields is None:
            raise self._not_oncehook()
        return fields

    def check(self, response: ApiResponse) -> ApiResponse:
        """Return the response if it is a success; otherwise raise Failed, Misused or Unreachable."""
        if 200 <= response.status < 300:
            return response
        problem = _fields(response.body)
        if problem is None or "error" not in problem:
            raise self._not_oncehook()
        if problem.get("code") == StoreHeld.code:
            self.check_may_act()
        hint = str(problem.get("hint", ""))
        if listed := problem.get("errors"):  # of settings: each with its own remedy
            hint = "; ".join(f"{one['setting'] or 'settings'}: {one['hint']}" for one in listed if one["hint"])
        if response.status == 401 and hint == Unauthorized.hint:  # where a host's own login decides, no token helps
            hint = f"Put a token into {TOKEN_ENV}, or name the variable that holds one with --token-env."
        raise _failure(response.status)(str(problem["error"]), hint=hint)

    def _not_oncehook(self) -> Failed:
        return Unreachable(f"{self.transport} does not answer as an oncehook server does.", hint="Check the address.")


def _ends(id: str, tail: str, number: str | None) -> bool:
    """Tell whether an id ends so, with or without its last six digits, which are zero or a destination's number."""
    digits = id.partition("_")[2]
    if number is None:
        return digits.endswith(tail) or digits[:26].endswith(tail)
    return digits[:26].endswith(tail) and int(digits[26:], 16) == int(number, 16)


def no_answer(address: object, error: OSError, hint: str = "Is `oncehook serve` running?") -> Unreachable:
    return Unreachable(f"nobody answers at {address} ({error})", hint=hint)


def check_known(name: str, known: Mapping[str, object] | list[str], what: str) -> None:
    if name not in known:
        raise Misused(f'There is no {what} "{plain(name)[:60]}".', hint=plain(suggest(name, known)))


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


def asks_api(function: Callable[..., T]) -> Callable[..., T]:
    """Give a command its `Api` as the first argument, and the options that say where the server is."""

    @config_option
    @app_option
    @click.option("--server", metavar="URL", help="Server to query, over HTTP.")
    @click.option("--token-env", metavar="NAME", help=f"Variable that holds the token for it (default: {TOKEN_ENV}).")
    @functools.wraps(function)
    def run(config_file: Path | None, app: str | None, server: str | None, token_env: str | None, **rest: Any) -> T:
        with Api(Where(config_file, app, server, token_env)) as api:
            return function(api, **rest)

    return run
