"""The server behind `oncehook serve`: uvicorn with our deadlines in front, our signals, and one clean way to stop.

On SIGTERM or SIGINT readiness falls, no new connection is taken, arrivals that are under way are committed and
answered, and the process ends with 0 (R56). A second signal leaves at once; that is safe too, only less polite.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.sources import Network
from oncehook.web import health
from oncehook.web.guard import Guard, Limits, affordable
from oncehook.web.ingest import Ingest, Receive, Send
from oncehook.web.peers import Scope, is_within, peer_finder

DRAIN_SECONDS = 25


class Face:
    """One address, two worlds: `/in/…` goes straight to ingest, everything else to Starlette."""

    def __init__(self, ingest: Ingest, routes: Sequence[BaseRoute]) -> None:
        self._ingest = ingest
        self._rest = Starlette(routes=list(routes))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Send a request to its world. Not a coroutine of its own: every arrival would pay for it."""
        if scope["type"] == "http" and scope["path"].startswith("/in/"):
            return self._ingest(scope, receive, send)
        return self._rest(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn, but a signal ends it with 0 and tells us first."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_stop()


async def serve_inbox(
    inbox: Inbox, *, host: str, port: int, trusted: Sequence[Network] = (), on_ready: Callable[[str], None]
) -> None:
    """Serve a running inbox until a signal comes: arrivals, health, metrics. Raises ConfigError for a taken port."""

    def ready(address: str) -> None:
        inbox.announce(address)
        on_ready(address)

    def stopping() -> None:
        inbox.draining = True

    ingest = Ingest(inbox.receiver, "/in/", peer_finder(trusted))
    face = Face(ingest, health.routes(inbox.troubles, inbox.metrics))
    try:
        await serve(face, host=host, port=port, trusted=trusted, on_ready=ready, on_stop=stopping)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}") from error


async def serve(
    app: Callable[..., Awaitable[Any]],
    *,
    host: str,
    port: int,
    trusted: Sequence[Network] = (),
    limits: Limits = Limits(),  # noqa: B008 - immutable
    on_ready: Callable[[str], None],
    on_stop: Callable[[], None],
) -> None:
    """Listen until a signal comes. `on_ready` gets the address once the socket is open."""
    limits = replace(limits, connections=affordable(limits.connections))
    guard = Guard(limits, lambda address: is_within(address, trusted))
    config = uvicorn.Config(
        app,
        http=guard.protocol(),
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
    server = _Server(config, on_stop)
    listener = listen(host, port)
    watch = asyncio.create_task(guard.watch())
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{listener.getsockname()[1]}")
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """An open socket on this address. Raises OSError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
