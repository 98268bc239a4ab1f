"""The server of `oncehook serve`: its sockets, its signals, and one clean way to stop.

On SIGTERM or SIGINT it becomes not ready, accepts no new connection, commits and answers pending arrivals, and exits
with 0 (R56). A second signal exits at once, which is safe, too, but less polite.

Health is for machines: `/livez` touches nothing, `/readyz` proves that the store can write, `/metrics` counts. Metrics
name sources and destinations and their traffic. On a public address they are for direct requests of this machine and
for holders of a token; on an operators' address, for everybody who reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oncehook import clock
from oncehook.errors import ConfigError, Forbidden, Refused, Unauthorized
from oncehook.inbox import Inbox
from oncehook.ingest import is_direct
from oncehook.model import Arrival
from oncehook.settings import ServerConfig
from oncehook.settings.values import is_loopback
from oncehook.sources import Network
from oncehook.web.asgi import App, OnDemand, Prefixed
from oncehook.web.auth import Access, OneTimeLink
from oncehook.web.connection import BACKLOG, ConnectionLimits, Connections, limit_connections
from oncehook.web.counts import CONNECTIONS
from oncehook.web.hooks import Hooks
from oncehook.web.live import Broadcast
from oncehook.web.oidc import Oidc
from oncehook.web.peers import direct_peer, peer_finder
from oncehook.web.receivers import Receivers, build_hooks
from oncehook.web.session import Auth, DashboardSessions

if TYPE_CHECKING:  # pages, the API and Starlette are imported by the first request for one of them
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Route

    from oncehook.web.dashboard.context import Guide


# -- listening ---------------------------------------------------------------------------------


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a socket on this address, which others may `shared` have, too. Raises OSError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Declared as TCP: only then asyncio sends small writes at once.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def listen_together(host: str, port: int, number: int) -> list[socket.socket]:
    """Open so many sockets on one address: the system spreads connections over them. Raises OSError when it is taken.

    Another server of the same user could share it, too, so it is tried alone first.
    """
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listen(host, port, shared=True)) for _ in range(number)]
        opened.pop_all()
    return listeners


@contextlib.asynccontextmanager
async def serve_on(
    listener: socket.socket,
    app: App,
    *,
    hooks: Hooks | None = None,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - immutable
    trusted: Sequence[Network] = (),
    is_urgent: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Connections]:
    """Answer connections of this socket while the block runs; afterwards finish pending requests, unless it is urgent.

    `hooks` answers requests below its prefix, `app` all others.
    """
    connections = Connections(app, hooks, bound_limits(limits), trusted)
    async with connections.serving(listener, is_urgent=is_urgent):
        yield connections


def bound_limits(limits: ConnectionLimits) -> ConnectionLimits:
    """Return the limits with no more connections than this process may hold open."""
    return replace(limits, connections=limit_connections(limits.connections))


class StopSignals:
    """SIGINT and SIGTERM: the first one asks to stop, a second one of the same kind ends the process at once."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._received: set[int] = set()
        self._stop = asyncio.Event()

    @contextlib.contextmanager
    def handle(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._receive, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def wait(self) -> None:
        await self._stop.wait()

    def is_urgent(self) -> bool:
        """Tell whether both came: then nobody waits for pending requests."""
        return len(self._received) > 1

    def _receive(self, number: int) -> None:
        # At once: a second one that the loop had yet to hear of would be lost when the server has stopped.
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        self._received.add(number)
        self._stop.set()
        self._on_stop()


async def serve(
    app: App,
    *,
    hooks: Hooks | None = None,
    host: str,
    port: int,
    trusted: Sequence[Network] = (),
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - immutable
    on_ready: Callable[[str], None],
    on_stop: Callable[[], None],
    receivers: Receivers | None = None,
) -> None:
    """Listen until a signal comes, alone or with receivers. `on_ready` gets the address once the socket is open."""
    signals = StopSignals(on_stop)
    listeners = [listen(host, port)] if receivers is None else listen_together(host, port, receivers.count)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listeners[0].getsockname()[1]}"
    # Signals are handled before `on_ready` is called, because its caller may stop the server at once.
    with signals.handle():
        async with contextlib.AsyncExitStack() as serving:
            if receivers is None:
                served = serve_on(
                    listeners[0], app, hooks=hooks, limits=limits, trusted=trusted, is_urgent=signals.is_urgent
                )
                await serving.enter_async_context(served)
            else:
                count = receivers.counts.count_of(CONNECTIONS)
                connections = Connections(app, hooks, bound_limits(limits), trusted, count, receivers)
                await serving.enter_async_context(connections.serving(is_urgent=signals.is_urgent))
                await serving.enter_async_context(receivers.running(listeners, connections, signals.is_urgent))
            on_ready(address)
            await signals.wait()


@contextlib.asynccontextmanager
async def _serve_at(bind: str, app: App, trusted: Sequence[Network] = ()) -> AsyncIterator[None]:
    """Answer at another address (`host:port`) while the block runs. Raises ConfigError."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'"{bind}" is not an address.', hint="Write HOST:PORT, as in 127.0.0.1:4021.")
    try:
        listener = listen(host.strip("[]"), int(port))
    except OSError as error:
        raise ConfigError(f"Cannot listen on {bind}: {error.strerror or error}") from error
    async with serve_on(listener, app, trusted=trusted):
        yield


# -- an inbox ----------------------------------------------------------------------------------


async def serve_inbox(
    inbox: Inbox,
    settings: ServerConfig,
    *,
    ui: bool = True,
    on_ready: Callable[[str, str | None], None],
    on_stop: Callable[[], None] = lambda: None,
    guide: Guide | None = None,
    receiver_command: Sequence[str] = (),
) -> None:
    """Serve a running inbox until a signal comes: arrivals, API and dashboard, health, metrics.

    Where the settings ask for several receivers, `receiver_command` starts one; otherwise this process receives itself.
    `on_ready` gets the address of the inbox and a one-time link to its dashboard, where there is one for this machine;
    `on_stop` is called when the signal comes. `guide` has callouts for the dashboard.
    With `admin_bind` API, dashboard and metrics have an address of their own. Raises ConfigError for a taken port.
    """
    apart = settings.admin_bind
    trusted, host, port = settings.trusted_proxies, settings.host, settings.port
    receivers = Receivers(settings.receivers, receiver_command, inbox.observer) if settings.receivers > 1 else None
    stream = Broadcast() if receivers is None else receivers.stream
    inbox.observer.audience = stream
    admin = _AdminRoutes(inbox, settings, stream, ui=ui, guide=guide)

    def probes() -> list[Route]:
        return probe_routes(inbox.troubles)

    def all_routes() -> list[BaseRoute]:
        portal = [] if apart else admin.portal_routes()
        return [*probes(), metrics_route(inbox.metrics, None if apart else admin.access), *portal, *admin.routes()]

    everything = Prefixed(_app(all_routes), trusted)
    # Customers reach the public address only.
    public = Prefixed(_app(lambda: [*probes(), *admin.portal_routes()]), trusted)

    def ready(address: str) -> None:
        inbox.address = address
        admin.address = f"http://{apart}" if apart else address
        inbox.announce(admin.address)
        on_ready(address, admin.link())

    def stopping() -> None:
        on_stop()
        inbox.wind_down()
        stream.close()

    hooks = build_hooks(inbox, trusted, None if receivers is None else receivers.counts)
    app = public if apart else everything
    async with contextlib.AsyncExitStack() as beside:
        if admin.oidc is not None:
            beside.push_async_callback(admin.oidc.close)
        if apart:
            await beside.enter_async_context(_serve_at(apart, everything, trusted))
        try:
            await serve(
                app,
                hooks=hooks,
                host=host,
                port=port,
                trusted=trusted,
                on_ready=ready,
                on_stop=stopping,
                receivers=receivers,
            )
        except OSError as error:
            taken = "Choose another port with --port; 0 takes any." if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}", hint=taken) from error


def serve_probes(inbox: Inbox, bind: str) -> contextlib.AbstractAsyncContextManager[None]:
    """Answer health and metrics of an inbox that receives nothing, at an address (`host:port`). Raises ConfigError."""
    return _serve_at(bind, _app(lambda: [*probe_routes(inbox.troubles), metrics_route(inbox.metrics, None)]))


def _app(routes: Callable[[], Sequence[BaseRoute]]) -> OnDemand:
    """Return an application of these routes, made when the first request comes."""

    def build() -> App:
        from starlette.applications import Starlette

        app = Starlette(routes=routes())
        gc.freeze()  # as what was loaded at the start: the collector need not look at it again and again
        return app

    return OnDemand(build)


class _AdminRoutes:
    """API and dashboard of one inbox, and access to them."""

    def __init__(
        self, inbox: Inbox, settings: ServerConfig, stream: Broadcast, *, ui: bool, guide: Guide | None
    ) -> None:
        trusted = settings.trusted_proxies
        self.access = Access(
            settings.admin_token,
            settings.tokens,
            inbox.local_token,
            peer_of=peer_finder(trusted),
            on_refused=inbox.observer.access_refused,
            note_use=inbox.store.note_token_use,
            link=OneTimeLink() if ui else None,
        )
        self.address = ""
        self._bind = settings.admin_bind or settings.host
        self.oidc = Oidc(settings.oidc) if settings.oidc is not None and ui else None
        self._auth = Auth(
            self.access, DashboardSessions(inbox.store), trusted=trusted, announce=self._announce, oidc=self.oidc
        )
        self._inbox, self._stream, self._guide = inbox, stream, guide
        self._ui = ui
        self._trusted, self._portal = trusted, settings.portal

    def routes(self) -> list[BaseRoute]:
        from oncehook.web import api

        found = api.routes(self._inbox.admin, self.access, self._stream)
        if self._ui:
            from oncehook.web import dashboard

            found += dashboard.routes(self._inbox.admin, self._auth, self._stream, self._guide)
        return found

    def portal_routes(self) -> list[BaseRoute]:
        if not self._ui:
            return []
        from starlette.routing import Mount

        from oncehook.web.dashboard.portal import portal_routes

        sites = () if self._portal is None else self._portal.frame_ancestors
        routes = portal_routes(self._inbox, self._stream, trusted=self._trusted, frame_ancestors=sites)
        return [Mount("/portal", routes=routes)]

    def link(self) -> str | None:
        """Return the path of a fresh one-time link for a person at this machine; elsewhere there is a password."""
        host = self._bind.rpartition(":")[0] if self._bind.count(":") == 1 or "]" in self._bind else self._bind
        return self.address + self._auth.link() if self._ui and is_loopback(host.strip("[]")) else None

    def _announce(self, path: str) -> None:
        sys.stderr.write(f"dashboard  {self.address}{path}\n")


# -- health ------------------------------------------------------------------------------------


Probe = Callable[[], Awaitable[dict[str, str]]]
"""What is not well, by name; empty when ready."""
Metrics = Callable[[], Awaitable[bytes]]


def probe_routes(probe: Probe) -> list[Route]:
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        troubles = await probe()
        if not troubles:
            return JSONResponse({"status": "ready"})
        # The reason may contain hosts, users and files, so only this machine gets it in full.
        asking = Arrival("", request.scope["headers"], b"", peer=direct_peer(request.scope))
        shown = troubles if is_direct(asking) else dict.fromkeys(troubles, "failing")
        return JSONResponse({"status": "not ready", "checks": shown}, 503, {"Retry-After": "5"})

    return [Route("/livez", livez), Route("/readyz", readyz)]


class MetricsCache:
    """The metrics, cached for a second: many requests, even at once, cost the store no more than one."""

    SECONDS: Final = 1.0

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._text = b""
        self._until = 0.0

    async def get(self) -> bytes:
        async with self._turn:
            if clock.steady() >= self._until:
                self._text = await self._metrics()
                self._until = clock.steady() + self.SECONDS
            return self._text


def metrics_route(metrics: Metrics, access: Access | None) -> Route:
    """Return the route for scrapers. Without `access`, everybody who reaches it may read it."""
    from starlette.responses import Response
    from starlette.routing import Route

    kept = MetricsCache(metrics)

    async def show(request: Request) -> Response:
        try:
            if access is not None and not access.is_local(request):
                identity = await access.of(request)
                if identity is None:
                    raise Unauthorized(hint="Send the token of a viewer, or set admin_bind and ask there.")
                if identity.scope.is_limited:
                    raise Forbidden("Metrics are of the whole inbox, and this token sees a part of it.")
        except Refused as error:
            from oncehook.web import api

            return api.refusal(error)
        return Response(await kept.get(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Route("/metrics", show)
