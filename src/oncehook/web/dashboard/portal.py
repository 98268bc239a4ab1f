"""The portal: the dashboard of a customer, below `/portal`, narrowed to one account and its own destinations.

Its pages are those of `PAGES` that are for customers; every other address is unknown there. A visitor is somebody
limited to one account, as the holder of a token may be, and comes in by a signed link (`oncehook.portal`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from oncehook.errors import Unauthorized
from oncehook.sources import Network
from oncehook.web.auth import Identity
from oncehook.web.dashboard import _NOBODY, PAGES, DashboardRoutes, PageRoute
from oncehook.web.dashboard.context import NO_FRAMES, POLICY, SAFE, PageContext, html, root_of
from oncehook.web.live import Broadcast
from oncehook.web.session import PortalAuth, PortalHost

HOME: Final = "/destinations"
Endpoint = Callable[[Request], Awaitable[Response]]


async def _go_home(context: PageContext) -> Response:
    return RedirectResponse(context.root + HOME, 303, headers=dict(SAFE))


def _portal_pages() -> list[PageRoute]:
    offered = [page for page in PAGES if page.customers]
    # The page that a visitor comes to is the first one in the rail.
    return [PageRoute("/", _go_home), *sorted(offered, key=lambda page: page.path != HOME)]


class PortalClosed(Unauthorized):
    """You are not in, or no longer."""

    hint = (
        "Open the link again where you found it. If this is part of another page, the browser must allow its cookies."
    )


class PortalRoutes(DashboardRoutes):
    """Routes of all pages of the portal."""

    _auth: PortalAuth

    def __init__(self, host: PortalHost, auth: PortalAuth, live: Broadcast) -> None:
        super().__init__(host.admin, auth, live, pages=_portal_pages())

    def _page_route(self, page: PageRoute) -> Endpoint:
        return self._allow_frames(super()._page_route(page))

    def _login_route(self, endpoint: Endpoint) -> Endpoint:
        return self._allow_frames(super()._login_route(endpoint))

    def _allow_frames(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with answers that the named sites may show in a frame."""

        async def answer(request: Request) -> Response:
            made = await endpoint(request)
            if self._auth.frame_ancestors and made.headers.get("content-security-policy") == POLICY:
                sites = " ".join(self._auth.frame_ancestors)
                made.headers["content-security-policy"] = POLICY.replace(NO_FRAMES, f"frame-ancestors {sites}")
                del made.headers["x-frame-options"]
            return made

        return answer

    def _ways_in(self) -> list[Route]:
        return [
            Route("/enter", self._login_route(self._show_enter), methods=["GET"]),
            Route("/enter", self._login_route(self._take_link), methods=["POST"]),
        ]

    async def _enter(self, request: Request, identity: Identity) -> PageContext:
        context = self._context_of(request, identity)
        context.admin = await context.admin.within_own_destinations()
        return context

    async def _show_enter(self, request: Request) -> Response:
        """Show a page that uses the link by a form of its own.

        Programs that look at links in messages would otherwise use them up; and a browser sends the strict cookie,
        which the answer to the form sets, only where a page of ours leads on.
        """
        text = request.query_params.get("link", "")
        self._auth.check_link(text)
        return html(request, "enter.html", 200, link=text)

    async def _take_link(self, request: Request) -> Response:
        text = (await self._context_of(request, _NOBODY).form()).get("link", "")
        answer = RedirectResponse(root_of(request) + HOME, 303, headers=dict(SAFE))
        link = await self._auth.enter(request, text, answer)
        if link is not None:
            await self._admin.note(link.actor, "login", "session", by="portal link", account=link.account)
        return answer

    async def _log_out(self, request: Request) -> Response:
        answer = self._bare(request, PortalClosed("You are logged out."), 200)
        await self._auth.end(request, answer)
        return answer

    def _send_to_login(self, request: Request) -> Response:
        if request.headers.get("hx-request"):  # the whole page tells it, and not a part of one
            return Response(status_code=401, headers={**SAFE, "HX-Redirect": f"{root_of(request)}/"})
        return self._bare(request, PortalClosed(), 401)


def portal_routes(
    host: PortalHost, live: Broadcast, *, trusted: Sequence[Network] = (), frame_ancestors: Sequence[str] = ()
) -> list[BaseRoute]:
    """Return the portal's routes, for a mount at `/portal`."""
    return PortalRoutes(host, PortalAuth(host, trusted=trusted, frame_ancestors=frame_ancestors), live).routes()


def portal_app(host: PortalHost, live: Broadcast, frame_ancestors: Sequence[str]) -> Starlette:
    """Build the portal of an inbox that is mounted in another application."""
    return Starlette(routes=portal_routes(host, live, frame_ancestors=frame_ancestors))
