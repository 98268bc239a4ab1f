"""The server behind `oncehook serve`: uvicorn with our deadlines in front, our signals, and one clean way to stop.

On SIGTERM or SIGINT readiness falls, no new connection is taken, arrivals that are under way are committed and
answered, and the process ends with 0 (R56). A second signal leaves at once; that is safe too, only less polite.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oncehook import clock
from oncehook.errors import ConfigError, Refused, Unauthorized
from oncehook.inbox import Inbox
from oncehook.ingest import is_direct
from oncehook.model import Arrival
from oncehook.settings import ServerConfig
from oncehook.settings.forms import is_loopback
from oncehook.sources import Network
from oncehook.web import api, dashboard
from oncehook.web.api import refusal
from oncehook.web.auth import Access
from oncehook.web.connection import Guard, Limits, Shortcut, affordable
from oncehook.web.dashboard.callouts import Guide
from oncehook.web.hooks import BodyBudget, Ingest, Prefixed, Receive, Send
from oncehook.web.live import Stream
from oncehook.web.oidc import Oidc
from oncehook.web.peers import Scope, direct_peer, peer_finder
from oncehook.web.session import Door, Sessions

DRAIN_SECONDS = 25


class Face:
    """One address, two worlds: `/in/…` goes straight to ingest, everything else to Starlette."""

    def __init__(self, ingest: Ingest, routes: Sequence[BaseRoute], trusted: Sequence[Network] = ()) -> None:
        self._ingest = ingest
        self._rest = Prefixed(Starlette(routes=list(routes)), trusted)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Send a request to its world. Not a coroutine of its own: every arrival would pay for it."""
        if scope["type"] == "http" and scope["path"].startswith("/in/"):
            return self._ingest(scope, receive, send)
        return self._rest(scope, receive, send)


class _Quiet(uvicorn.Server):
    """uvicorn that leaves signals to somebody else."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server(_Quiet):
    """uvicorn, but a signal ends it with 0 and tells us first, also one that comes before it has begun."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._heard: set[int] = set()

    @contextlib.contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """While the block runs, a signal stops it in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _signalled(self, number: int) -> None:
        if number in self._heard:  # force_exit is for uvicorn only: the rest would still stop in its own time
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._heard.add(number)
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_stop()


async def serve_inbox(
    inbox: Inbox,
    settings: ServerConfig,
    *,
    ui: bool = True,
    on_ready: Callable[[str, str | None], None],
    on_stop: Callable[[], None] = lambda: None,
    guide: Guide | None = None,
) -> None:
    """Serve a running inbox until a signal comes: arrivals, API and dashboard, health, metrics.

    `on_ready` gets the address of the inbox and a one-time link to its dashboard, where there is one for this machine;
    `on_stop` is called when the signal comes. `guide` has callouts for the dashboard.
    With `admin_bind` API, dashboard and metrics have an address of their own. Raises ConfigError for a taken port.
    """
    apart = settings.admin_bind
    stream = Stream()
    inbox.observer.audience = stream
    admin = _Desk(inbox, settings, stream, ui=ui, guide=guide)
    probes = probe_routes(inbox.troubles)
    metrics = metrics_route(inbox.metrics, None if apart else admin.access)

    def ready(address: str) -> None:
        admin.address = f"http://{apart}" if apart else address
        inbox.announce(admin.address)
        on_ready(address, admin.link())

    def stopping() -> None:
        on_stop()
        inbox.wind_down()
        stream.close()

    budget = BodyBudget(trusted=settings.trusted_proxies)
    ingest = Ingest(inbox.receiver, "/in/", peer_finder(settings.trusted_proxies), budget)
    trusted, host, port = settings.trusted_proxies, settings.host, settings.port
    face = Face(ingest, probes if apart else [*probes, metrics, *admin.routes], trusted)
    async with contextlib.AsyncExitStack() as beside:
        if admin.oidc is not None:
            beside.push_async_callback(admin.oidc.close)
        if apart:
            app = Prefixed(Starlette(routes=[*probes, metrics, *admin.routes]), trusted)
            await beside.enter_async_context(_served_beside(app, apart, trusted))
        try:
            await serve(face, ingest=ingest, host=host, port=port, trusted=trusted, on_ready=ready, on_stop=stopping)
        except OSError as error:
            raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}") from error


def answering_probes(inbox: Inbox, bind: str) -> contextlib.AbstractAsyncContextManager[None]:
    """Health and metrics of an inbox that receives nothing, at an address (`host:port`). Raises ConfigError."""
    routes = [*probe_routes(inbox.troubles), metrics_route(inbox.metrics, None)]
    return _served_beside(Starlette(routes=routes), bind, ())


class _Desk:
    """API and dashboard of one inbox, and who may come in."""

    def __init__(self, inbox: Inbox, settings: ServerConfig, stream: Stream, *, ui: bool, guide: Guide | None) -> None:
        trusted = settings.trusted_proxies
        self.access = Access(
            settings.admin_token,
            settings.tokens,
            inbox.local_token,
            peer_of=peer_finder(trusted),
            on_refused=inbox.observer.access_refused,
            note_use=inbox.store.note_token_use,
        )
        self.address = ""
        self._bind = settings.admin_bind or settings.host
        self.oidc = Oidc(settings.oidc) if settings.oidc is not None and ui else None
        self._door = Door(self.access, Sessions(inbox.store), trusted=trusted, announce=self._say, oidc=self.oidc)
        self._ui = ui
        self.routes = api.routes(inbox.admin, self.access, stream)
        if ui:
            self.routes += dashboard.routes(inbox.admin, self._door, stream, guide)

    def link(self) -> str | None:
        """A fresh way in for who sits at this machine; elsewhere there is a password."""
        host = self._bind.rpartition(":")[0] if self._bind.count(":") == 1 or "]" in self._bind else self._bind
        return self.address + self._door.link() if self._ui and is_loopback(host.strip("[]")) else None

    def _say(self, path: str) -> None:
        sys.stderr.write(f"dashboard  {self.address}{path}\n")


@contextlib.asynccontextmanager
async def _served_beside(
    app: Callable[..., Awaitable[Any]], bind: str, trusted: Sequence[Network]
) -> AsyncIterator[None]:
    """Another listener in the same process, which goes when the first one does."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'"{bind}" is not an address.', hint="Write HOST:PORT, as in 127.0.0.1:4021.")
    guard = Guard(Limits(), trusted)
    try:
        listener = listen(host.strip("[]"), int(port))
    except OSError as error:
        raise ConfigError(f"Cannot listen on {bind}: {error.strerror or error}") from error
    server = _Quiet(_settings(app, guard.protocol()))
    watch = asyncio.create_task(guard.watch())
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        watch.cancel()
        listener.close()


async def serve(
    app: Callable[..., Awaitable[Any]],
    *,
    ingest: Ingest | None = None,
    host: str,
    port: int,
    trusted: Sequence[Network] = (),
    limits: Limits = Limits(),  # noqa: B008 - immutable
    on_ready: Callable[[str], None],
    on_stop: Callable[[], None],
) -> None:
    """Listen until a signal comes. `on_ready` gets the address once the socket is open.

    With `ingest`, plain arrivals for it take the short way past `app`.
    """
    limits = replace(limits, connections=affordable(limits.connections))
    guard = Guard(limits, trusted)
    protocol = guard.protocol() if ingest is None else guard.protocol(Shortcut, ingest=ingest)
    server = _Server(_settings(app, protocol), on_stop)
    listener = listen(host, port)
    watch = asyncio.create_task(guard.watch())
    shown = f"[{host}]" if ":" in host else host
    try:
        with server.heeding_signals():  # from before the first word on: who is told that it is ready may stop it
            on_ready(f"http://{shown}:{listener.getsockname()[1]}")
            await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        listener.close()


def _settings(app: Callable[..., Awaitable[Any]], protocol: type[HttpToolsProtocol]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        interface="asgi3",
        loop="none",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """An open socket on this address. Raises OSError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: only then does asyncio send the small writes of its connections at once.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


Probe = Callable[[], Awaitable[dict[str, str]]]
"""What is not well, by name; empty when ready."""
Metrics = Callable[[], Awaitable[bytes]]


def probe_routes(probe: Probe) -> list[Route]:
    """Return the two addresses that probes ask."""

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        troubles = await probe()
        if not troubles:
            return JSONResponse({"status": "ready"})
        # What is wrong may name hosts, users and files of ours: in full only for who sits on this machine.
        asking = Arrival("", request.scope["headers"], b"", peer=direct_peer(request.scope))
        told = troubles if is_direct(asking) else dict.fromkeys(troubles, "failing")
        return JSONResponse({"status": "not ready", "checks": told}, 503, {"Retry-After": "5"})

    return [Route("/livez", livez), Route("/readyz", readyz)]


class Kept:
    """Keeps the metrics for a second: many who ask, even at once, cost the store no more than one."""

    SECONDS: Final = 1.0

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._text = b""
        self._until = 0.0

    async def get(self) -> bytes:
        """Return the text as of a second ago at most."""
        async with self._turn:
            if clock.steady() >= self._until:
                self._text = await self._metrics()
                self._until = clock.steady() + self.SECONDS
            return self._text


def metrics_route(metrics: Metrics, access: Access | None) -> Route:
    """Return the address that scrapers ask. Without `access`, everybody may who reaches it."""
    kept = Kept(metrics)

    async def show(request: Request) -> Response:
        try:
            if access is not None and not access.is_local(request) and await access.of(request) is None:
                raise Unauthorized(hint="Send the token of a viewer, or set admin_bind and ask there.")
        except Refused as error:
            return refusal(error)
        return Response(await kept.get(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Route("/metrics", show)
