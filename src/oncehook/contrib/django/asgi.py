"""Django under ASGI: the dashboard for the project's staff, and hooks received before Django reads their bodies.

    application = with_inbox(get_asgi_application(), hooks="/hooks", dashboard="/inbox")

Everything else goes to Django. The inbox runs on the bridge's loop, as it does for views and the admin; requests are
handed over to that loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.db import close_old_connections
from django.http import HttpRequest
from starlette.requests import Request

from oncehook.contrib.bridge import Bridge, put_off
from oncehook.contrib.django import assembly
from oncehook.contrib.django.views import authorize_user
from oncehook.errors import OncehookError
from oncehook.web.auth import Authorize, Authorized

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
App = Callable[[Any, Any, Any], Awaitable[None]]


async def staff(request: Request) -> Authorized:
    """Authorise a request by the project's own session; see `contrib.django.views.staff`."""
    return await sync_to_async(_authorize_session)(request.cookies)


def _authorize_session(cookies: Mapping[str, str]) -> Authorized:
    close_old_connections()
    try:
        request = HttpRequest()
        engine = import_module(settings.SESSION_ENGINE)
        request.session = engine.SessionStore(cookies.get(settings.SESSION_COOKIE_NAME))
        return authorize_user(get_user(request))
    finally:
        close_old_connections()


def with_inbox(
    django: App, *, hooks: str | None = None, dashboard: str | None = None, authorize: Authorize = staff
) -> App:
    """Wrap Django's application: hooks and dashboard are served below a path each, if they have one."""
    bridge = assembly.get_bridge()
    ours: dict[str, App] = {}
    if hooks is not None:
        ours[hooks.rstrip("/")] = _Across(bridge.inbox.asgi(), bridge)
    if dashboard is not None:
        ours[dashboard.rstrip("/")] = _Across(bridge.inbox.dashboard(authorize=authorize), bridge)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        for prefix, app in ours.items():
            if scope["type"] == "http" and scope["path"].startswith(prefix + "/"):
                await app({**scope, "root_path": scope.get("root_path", "") + prefix}, receive, send)
                return
        await django(scope, receive, send)

    return application


class _Across:
    """An application on the bridge's loop, for requests that come on the server's loop."""

    def __init__(self, app: App, bridge: Bridge) -> None:
        self._app = app
        self._bridge = bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        here = asyncio.get_running_loop()

        async def receive_there() -> Message:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(receive(), here))

        async def send_there(message: Message) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(send(message), here))

        answer = _begin(self._app(scope, receive_there, send_there))
        try:
            # On a thread, because the first request starts the inbox, which takes a while.
            under_way = await asyncio.to_thread(self._bridge.call, answer)
        except OncehookError as error:
            reply = put_off(None, error)
            await send({"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)})
            await send({"type": "http.response.body", "body": reply.body})
            return
        await asyncio.wrap_future(under_way)


async def _begin(answer: Awaitable[T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on this loop, to be awaited on another."""

    async def finish() -> T:
        return await answer

    return asyncio.run_coroutine_threadsafe(finish(), asyncio.get_running_loop())
