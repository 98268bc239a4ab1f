"""The dashboard: all of its pages and acts, with the role that each needs.

`PAGES` is the table, one line each; `routes` makes Starlette routes of them for the server, `dashboard` an application
to mount under any prefix. Pages ask the admin only. Every page works without scripts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from oncehook.admin import Admin
from oncehook.errors import Forbidden, NotFound, OncehookError, Refused, StoreError
from oncehook.logs import ration
from oncehook.web import api
from oncehook.web.api.request import check_parameters
from oncehook.web.asgi import OnDemand
from oncehook.web.auth import Access, Authorize, Identity, Role, is_refused_act
from oncehook.web.dashboard import accounts, context, dead, define, events, feed, overview, pictures, replays, setup
from oncehook.web.dashboard.charts import Latency
from oncehook.web.dashboard.context import SAFE, WAY_IN, Frames, Guide, PageContext, html, language_of, root_of
from oncehook.web.dashboard.render import STATIC
from oncehook.web.language import COOKIE, LANGUAGES, speaking
from oncehook.web.live import Broadcast
from oncehook.web.oidc import CALLBACK, NoRole, own_path
from oncehook.web.session import Auth, PortalHost, check_same_origin

log = logging.getLogger("oncehook.web")

PageHandler = Callable[[PageContext], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class PageRoute:
    path: str
    endpoint: PageHandler
    role: Role = Role.viewer
    method: str = "GET"
    menu: tuple[str, str] | None = None
    """Icon and name of a page in the rail."""
    customers: bool = False
    """Whether the portal has it, too."""


def _act(path: str, endpoint: PageHandler, *, customers: bool = False) -> PageRoute:
    return PageRoute(path, endpoint, Role.operator, "POST", customers=customers)


def _ask(path: str, endpoint: PageHandler, *, customers: bool = False) -> PageRoute:
    """Return a dialog before an act; for a viewer who may not act, none."""
    return PageRoute(path, endpoint, Role.operator, customers=customers)


# -- hints for open pages ----------------------------------------------------------------------


async def stream(context: PageContext) -> Response:
    """Stream hints that something has happened; with `page=live`, what it was."""
    event_id, kind, source = context.parameter("event"), context.parameter("kind", "all"), context.parameter("source")
    watcher = context.stream.join(context.admin.scope)

    async def is_welcome() -> bool:
        return context.auth.is_hosted or await context.auth.is_open(context.request)

    def about(moment: feed.Moment) -> bool:
        name, fields = moment
        if source and fields.get("source") != source:
            return False
        if event_id:
            return event_id in (fields.get("event_id"), *fields.get("event_ids", ()))
        if kind == "dead":
            return fields.get("outcome") == "dead"
        return kind == "all" or name == kind.removesuffix("s")

    # The rows of the live page also tell of destinations that are not a customer's.
    if context.parameter("page") == "live" and not context.auth.is_portal:
        pieces = feed.stream_rows(
            context.stream, watcher, is_welcome, about, context.root, language_of(context.request)
        )
    else:
        pieces = feed.stream_ticks(context.stream, watcher, is_welcome, about)
    return StreamingResponse(pieces, media_type="text/event-stream", headers={**SAFE, "X-Accel-Buffering": "no"})


PAGES: Final[Sequence[PageRoute]] = (
    PageRoute("/", overview.overview, menu=("overview", "Overview")),
    PageRoute("/events", events.events, menu=("events", "Events"), customers=True),
    PageRoute("/events/fresh", events.fresh, customers=True),
    PageRoute("/events/rows", events.rows, customers=True),
    PageRoute("/events/complete", events.complete, customers=True),
    PageRoute("/events/{id}", events.event, customers=True),
    PageRoute("/events/{id}/body", events.body, customers=True),
    PageRoute("/events/{id}/json", events.as_json, customers=True),
    PageRoute("/dead", dead.dead, menu=("dead", "Dead letters"), customers=True),
    PageRoute("/dead/group", dead.group, customers=True),
    _ask("/dead/discard", dead.ask_discard_many),
    _act("/dead/discard", dead.discard_many),
    _ask("/deliveries/{id}/discard", dead.ask_discard),
    _act("/deliveries/{id}/discard", dead.discard),
    _ask("/deliveries/{id}/retry", replays.ask_retry, customers=True),
    _act("/deliveries/{id}/retry", replays.retry, customers=True),
    PageRoute("/rejected", setup.rejected, menu=("rejected", "Rejected")),
    PageRoute("/replays", replays.replays, menu=("replay", "Replays"), customers=True),
    _ask("/replays/plan", replays.plan, customers=True),
    PageRoute("/replays/{id}", replays.replay, customers=True),
    _act("/replays", replays.start, customers=True),
    _ask("/replays/{id}/abort", replays.ask_abort, customers=True),
    _act("/replays/{id}/pause", replays.pause, customers=True),
    _act("/replays/{id}/resume", replays.resume, customers=True),
    _act("/replays/{id}/abort", replays.abort, customers=True),
    PageRoute("/sources", setup.sources, menu=("sources", "Sources")),
    _ask("/sources/{name}/sample", setup.ask_sample),
    _act("/sources/{name}/sample", setup.sample),
    PageRoute("/routes", setup.routes),
    PageRoute("/destinations", setup.destinations, menu=("destinations", "Destinations"), customers=True),
    _ask("/destinations/{name}/test", setup.ask_test, customers=True),
    _act("/destinations/{name}/test", setup.test, customers=True),
    _ask("/destinations/{name}/pause", setup.ask_pause, customers=True),
    _act("/destinations/{name}/pause", setup.pause, customers=True),
    _act("/destinations/{name}/resume", setup.resume, customers=True),
    _act("/destinations/{name}/try", setup.try_now, customers=True),
    PageRoute("/accounts", accounts.accounts, Role.admin, menu=("accounts", "Accounts")),
    *(PageRoute(path, form, Role.admin, method) for path, form, method in accounts.FORMS),
    PageRoute("/charts", pictures.pictures, menu=("charts", "Charts")),
    *(
        PageRoute(path, partial(form, noun=noun), Role.admin, method, customers=noun == "destination")
        for noun, path, form, method in define.FORMS
    ),
    PageRoute("/live", setup.live, menu=("live", "Live")),
    PageRoute("/system", setup.system, menu=("system", "System")),
    PageRoute("/ui/stream", stream, customers=True),
)

CALLOUTS: Final[Sequence[PageRoute]] = (
    _act("/callouts/{name}/dismiss", context.dismiss),
    _act("/callouts/{name}/act", context.act),
)
"""Routes of the guide's callouts, where there is a guide."""


# -- from a request to a page ------------------------------------------------------------------


class DashboardRoutes:
    """Routes of all pages: authentication, the role, the page, and a page for errors."""

    def __init__(
        self,
        admin: Admin,
        auth: Auth,
        live: Broadcast,
        guide: Guide | None = None,
        pages: Sequence[PageRoute] = PAGES,
    ) -> None:
        self._admin = admin
        self._auth = auth
        self._live = live
        self._pages = pages
        self._frames = Frames([(page.path, *page.menu) for page in pages if page.menu is not None])
        self._latency = Latency()
        self._flows = pictures.DestinationFlows()
        self._guide = guide

    def routes(self) -> list[BaseRoute]:
        """Return all routes, including the page for unknown addresses, so they must come after all other routes."""
        pages = self._pages if self._guide is None else (*self._pages, *CALLOUTS)
        return [
            Mount("/static", _Static(directory=STATIC), name="static"),
            *self._ways_in(),
            Route("/language", self._choose_language, methods=["GET"]),
            Route("/logout", self._login_route(self._log_out), methods=["POST"]),
            *(Route(page.path, self._page_route(page), methods=[page.method]) for page in pages),
            Route("/{rest:path}", self._page_route(PageRoute("", _not_found)), methods=["GET"]),
        ]

    def _ways_in(self) -> list[Route]:
        return [
            Route("/login", self._login_route(self._show_login), methods=["GET"]),
            Route("/login", self._login_route(self._log_in), methods=["POST"]),
            Route("/login/oidc", self._login_route(self._begin_sign_in), methods=["GET"]),
            Route(CALLBACK, self._login_route(self._end_sign_in), methods=["GET"]),
            Route("/login/link", self._login_route(self._send_link), methods=["POST"]),
        ]

    def _page_route(self, page: PageRoute) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            context: PageContext | None = None
            try:
                token = request.query_params.get("token")
                if token and page.path == "/" and not (self._auth.is_hosted or self._auth.is_portal):
                    return await self._log_in_by_link(request, token)
                if page.method == "POST":
                    check_same_origin(request)
                identity = await self._auth.of(request)
                if identity is None:
                    return self._send_to_login(request)
                context = await self._enter(request, identity)
                if identity.role < page.role:
                    raise Forbidden(f"That needs the role {page.role.name}; yours is {identity.role.name}.")
                with speaking(language_of(request)):
                    return await page.endpoint(context)
            except (Refused, StoreError) as error:
                if context is not None and isinstance(error, Refused) and is_refused_act(request, error):
                    await context.admin.note_refused(f"{request.method} {request.url.path}", error.code)
                return await self._error_page(request, error, context)
            except Exception:
                fields = {"path": request.url.path[:200]}
                ration.log(log, logging.ERROR, "page.failed", fields, kind=page.path, exc_info=True)
                return await self._error_page(request, OncehookError("This page could not be made."), None)

        return endpoint

    async def _enter(self, request: Request, identity: Identity) -> PageContext:
        """Return the context of somebody who is in."""
        return self._context_of(request, identity)

    def _context_of(self, request: Request, identity: Identity) -> PageContext:
        admin, shared = identity.admin(self._admin), (self._frames, self._latency, self._flows, self._guide)
        return PageContext(request, identity, admin, self._live, self._auth.access, self._auth, *shared)

    # -- coming in and going -------------------------------------------------------------------

    def _login_route(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                if self._auth.is_hosted:
                    raise NotFound("The application around this page decides who comes in.")
                check_parameters(request)
                if request.method == "POST":
                    check_same_origin(request)
                return await endpoint(request)
            except (Refused, StoreError) as error:
                return await self._error_page(request, error, None)

        return answer

    def _send_to_login(self, request: Request) -> Response:
        if self._auth.is_hosted:
            return self._bare(request, NotForYou(), 403)
        if request.headers.get("hx-request"):  # a script cannot log in, so the whole page goes there
            back = _with_return(_current_page(request))
            return Response(status_code=401, headers={**SAFE, "HX-Redirect": f"{root_of(request)}/login{back}"})
        if request.method == "GET" and request.url.path.rstrip("/") in (root_of(request), ""):
            return self._login_page(request)
        back = _with_return(_own_page(request, request.url.path, request.url.query)) if request.method == "GET" else ""
        return RedirectResponse(f"{root_of(request)}/login{back}", 303, headers=dict(SAFE))

    async def _show_login(self, request: Request) -> Response:
        if await self._auth.of(request) is not None:
            return _go_to(request)
        return self._login_page(request)

    def _login_page(self, request: Request, error: Refused | None = None) -> Response:
        can_link = self._auth.can_announce and self._auth.is_own_machine(request)
        status = 401 if error is None else error.status
        oidc = self._auth.oidc
        shown = {
            "error": error,
            "can_link": can_link,
            "sentence": request.query_params.get("said", ""),
            "provider": "" if oidc is None else oidc.name,
            "to": own_path(request.query_params.get("to", "")),
            "has_password": self._auth.has_password,
        }
        answer = html(request, "login.html", 200 if error is None else status, **shown)
        if error is not None and error.retry_after is not None:
            answer.headers["Retry-After"] = str(int(error.retry_after) + 1)
        return answer

    async def _log_in(self, request: Request) -> Response:
        password = (await self._context_of(request, _NOBODY).form()).get("password", "")
        try:
            identity = self._auth.by_password(request, password)
        except Refused as error:
            return self._login_page(request, error)
        if identity is None:
            return self._login_page(request, WrongPassword())
        await self._admin.note(identity.name, "login", "session", by="password")
        answer = _go_to(request)
        await self._auth.begin(request, identity, answer, password)
        return answer

    async def _log_in_by_link(self, request: Request, token: str) -> Response:
        home = _go_to(request)
        if await self._auth.of(request) is not None:  # a second click on a used link: they are logged in already
            return home
        identity = self._auth.by_link(request, token)
        if identity is None:
            return self._login_page(request, LinkUsed())
        await self._admin.note(identity.name, "login", "session", by="one-time link")
        await self._auth.begin(request, identity, home)
        return home

    async def _begin_sign_in(self, request: Request) -> Response:
        self._check_oidc()
        to = request.query_params.get("to", "")
        try:
            return await self._auth.begin_sign_in(to, lambda url: RedirectResponse(url, 303, headers=dict(SAFE)))
        except Refused as error:
            return self._login_page(request, error)

    async def _end_sign_in(self, request: Request) -> Response:
        self._check_oidc()
        try:
            signed_in, to = await self._auth.by_oidc(request)
        except NoRole as error:
            detail = {"by": "oidc", "subject": error.subject, "reason": error.reason}
            await self._admin.note(error.name, "login_refused", "session", **detail)
            answer = self._bare(request, error, error.status)
        except Refused as error:
            answer = self._login_page(request, error)
        else:
            identity = signed_in.identity
            detail = {"by": "oidc", "subject": signed_in.subject, "role": identity.role.name}
            await self._admin.note(identity.name, "login", "session", **detail)
            # A page that continues by itself instead of a redirect: on one that began at another site, browsers would
            # not send the strict cookie that this answer sets.
            answer = html(request, "signed_in.html", 200, name=identity.name, to=to)
            await self._auth.begin_signed_in(request, signed_in, answer)
        await self._auth.end_sign_in(answer)
        answer.headers["Referrer-Policy"] = "no-referrer"  # this page's address contains the code
        return answer

    def _check_oidc(self) -> None:
        if self._auth.oidc is None:
            raise NoSuchPage

    async def _send_link(self, request: Request) -> Response:
        to = own_path(request.query_params.get("to", ""))
        self._auth.announce(request, to)
        return RedirectResponse(f"{root_of(request)}/login{_with_return(to, said='link')}", 303, headers=dict(SAFE))

    async def _choose_language(self, request: Request) -> Response:
        """Remember the language that a visitor chooses, and go back to the page it was chosen on."""
        chosen = request.query_params.get("to", "")
        answer = RedirectResponse(_back(request) or f"{root_of(request)}/", 303, headers=dict(SAFE))
        if chosen in LANGUAGES:
            path = f"{root_of(request)}/"
            answer.set_cookie(COOKIE, chosen, max_age=31_536_000, path=path, httponly=True, samesite="lax")
        return answer

    async def _log_out(self, request: Request) -> Response:
        answer = RedirectResponse(f"{root_of(request)}/login?said=logout", 303, headers=dict(SAFE))
        await self._auth.end(request, answer)
        return answer

    # -- what goes wrong -----------------------------------------------------------------------

    async def _error_page(self, request: Request, error: OncehookError, context: PageContext | None) -> Response:
        """Show a page with the error and its hint; with the frame, where that is available."""
        status = error.status if isinstance(error, Refused) else 503 if isinstance(error, StoreError) else 500
        answer: Response | None = None
        if context is not None and not isinstance(error, StoreError):
            try:
                answer = await context.dialog("error.html", status=status, error=error, code=status, is_known=True)
            except StoreError:
                answer = None
        if answer is None:
            answer = self._bare(request, error, status)
        if isinstance(error, Refused) and error.retry_after is not None:
            answer.headers["Retry-After"] = str(int(error.retry_after) + 1)
        return answer

    def _bare(self, request: Request, error: OncehookError, status: int) -> Response:
        auth = self._auth
        shown = {
            "error": error,
            "code": status,
            "is_known": False,
            "is_hosted": auth.is_hosted,
            "is_portal": auth.is_portal,
        }
        return html(request, "error.html", status, base="bare.html", sentence="", back=_back(request), **shown)


def _own_page(request: Request, path: str, query: str) -> str:
    """Return a page's path below the dashboard's own, with its query; `/` for what is no page of ours."""
    return own_path(path.removeprefix(root_of(request)) + (f"?{query}" if query else ""))


def _current_page(request: Request) -> str:
    """Return the page that a script of ours runs on."""
    try:
        address = urlsplit(request.headers.get("hx-current-url", ""))
    except ValueError:
        return "/"
    return _own_page(request, address.path, address.query)


def _with_return(to: str, **more: str) -> str:
    """Return the query string that brings a visitor back to a page after signing in."""
    fields = {**more, **({} if to == "/" else {"to": to})}
    return f"?{urlencode(fields)}" if fields else ""


def _go_to(request: Request) -> Response:
    """Redirect somebody who is logged in to the page that they wanted."""
    to = own_path(request.query_params.get("to", ""))
    return RedirectResponse(root_of(request) + to, 303, headers=dict(SAFE))


def _back(request: Request) -> str:
    """Return the page of this site that the visitor came from; empty for other sites."""
    came = request.headers.get("referer", "")
    scheme, _, rest = came.partition("://")
    return came if scheme in ("http", "https") and rest.partition("/")[0] == request.headers.get("host") else ""


async def _not_found(context: PageContext) -> Response:
    raise NoSuchPage


class NoSuchPage(NotFound):
    """There is no page at this address."""

    hint = "Check the address for a typing mistake, or begin at the first page."


class NotForYou(Forbidden):
    """This page is not for you."""

    hint = "Go back, or sign in to the application around it as somebody who may see it."


class WrongPassword(Refused):
    """That is not the password of this inbox."""

    code = "unauthorized"
    status = 401


class LinkUsed(Refused):
    """This link has been used, is too old, or is not for this machine."""

    code = "unauthorized"
    status = 401
    hint = "A link works once, within 10 minutes, and only on the machine that the inbox runs on."


class _Static(StaticFiles):
    """Our static files, revalidated at each request."""

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        answer = super().file_response(*arguments, **named)
        answer.headers["Cache-Control"] = "no-cache"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return answer


_NOBODY: Final = Identity("", Role.viewer)


def routes(admin: Admin, auth: Auth, live: Broadcast, guide: Guide | None = None) -> list[BaseRoute]:
    """Return the dashboard's routes. They must come last, because the last one answers everything."""
    return DashboardRoutes(admin, auth, live, guide).routes()


class _Hosted(Starlette):
    """Dashboard and API inside another application, whose routes tell where hooks are received."""

    def __init__(self, own: list[BaseRoute], ways_in: Sequence[object]) -> None:
        super().__init__(routes=own)
        self._ways_in = ways_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # of Starlette and FastAPI; other frameworks put it into the scope
        around = getattr(scope.get("app"), "routes", ())
        mounts = [one.path for one in around if isinstance(one, Mount) and one.app in self._ways_in]
        scope.setdefault(WAY_IN, scope.get("app_root_path", "") + mounts[0] if mounts else None)
        await super().__call__(scope, receive, send)


def dashboard(
    host: PortalHost,
    live: Broadcast,
    *,
    authorize: Authorize,
    ways_in: Sequence[object] = (),
    frame_ancestors: Sequence[str] = (),
) -> Starlette:
    """Build dashboard and API as an application to mount in another one, which decides who is admitted; and the portal,
    where links do.

    `ways_in` are the applications that receive hooks, which the other one may have mounted as well; `frame_ancestors`
    the sites that may show the portal in a frame.
    """
    from oncehook.web.dashboard.portal import portal_app

    access = Access(authorize=authorize)
    own = [
        *api.routes(host.admin, access, live),
        Mount("/portal", OnDemand(lambda: portal_app(host, live, frame_ancestors))),
        *routes(host.admin, Auth(access, authorize=authorize), live),
    ]
    return _Hosted(own, ways_in)
