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
from ipaddress import ip_address
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from oncehook.sources import Network
from oncehook.web.guard import Guard, Limits
from oncehook.web.ingest import Ingest, Receive, Scope, Send

DRAIN_SECONDS = 25


class Face:
    """One address, two worlds: `/in/…` goes straight to ingest, everything else to Starlette."""

    def __init__(self, ingest: Ingest, routes: Sequence[BaseRoute]) -> None:
        self._ingest = ingest
        self._rest = Starlette(routes=list(routes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request to its world."""
        if scope["type"] == "http" and scope["path"].startswith("/in/"):
            await self._ingest(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


def peer_finder(trusted: Sequence[Network]) -> Callable[[Scope], str]:
    """Who is at the other end. `X-Forwarded-For` is believed only when a configured proxy says it (S16)."""

    def is_trusted(address: str) -> bool:
        with contextlib.suppress(ValueError):
            return any(ip_address(address) in network for network in trusted)
        return False

    def peer_of(scope: Scope) -> str:
        client: tuple[str, int] | None = scope.get("client")
        address = client[0] if client else ""
        if not trusted or not is_trusted(address):
            return address
        named = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        chain = [part.strip() for part in b",".join(named).decode("latin-1").split(",") if part.strip()]
        # The last address no proxy of ours vouches for; what stands before it anybody could have written.
        for hop in reversed(chain):
            if not is_trusted(hop):
                return hop
        return address

    return peer_of


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
    guard = Guard(limits, lambda address: any(ip_address(address) in network for network in trusted))
    config = uvicorn.Config(
        app,
        http=guard.protocol(),
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
