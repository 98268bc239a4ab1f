"""Health for machines: `/livez` touches nothing, `/readyz` proves that the store can write, `/metrics` counts.

Metrics name sources and destinations and tell how much goes through them. Where the world can ask, they are for direct
requests of this machine and for holders of a token; on an address that is for operators only, for all who reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from oncehook import clock
from oncehook.errors import Refused, Unauthorized
from oncehook.ingest import is_direct
from oncehook.model import Arrival
from oncehook.web.access import Access
from oncehook.web.api import refusal
from oncehook.web.peers import direct_peer

Probe = Callable[[], Awaitable[dict[str, str]]]
"""What is not well, by name; empty when ready."""
Metrics = Callable[[], Awaitable[bytes]]


def routes(probe: Probe) -> list[Route]:
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
