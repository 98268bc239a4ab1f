"""Health for machines: `/livez` touches nothing, `/readyz` proves that the store can write, `/metrics` counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from oncehook.model import Arrival
from oncehook.receive import is_direct
from oncehook.web.peers import direct_peer

Probe = Callable[[], Awaitable[dict[str, str]]]
"""What is not well, by name; empty when ready."""


def routes(probe: Probe, metrics: Callable[[], Awaitable[bytes]]) -> list[Route]:
    """The three addresses that probes and scrapers ask."""

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

    async def show_metrics(request: Request) -> Response:
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", show_metrics)]
