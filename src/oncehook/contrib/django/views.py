"""The views of a project: hooks, where what follows the prefix names the source, and the dashboard.

They are plain functions: under WSGI they run in the server's thread, under ASGI in one that Django gives each request.
The inbox itself runs on the bridge's loop in both.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.http.request import UnreadablePostError
from django.urls import NoReverseMatch, reverse
from django.views.decorators.csrf import csrf_exempt

from oncehook.contrib.bridge import Read
from oncehook.contrib.django import assembly
from oncehook.contrib.wsgi import Dashboard, as_bytes
from oncehook.errors import Malformed
from oncehook.model import Arrival, Headers, RoleName
from oncehook.sources import Reply
from oncehook.web.auth import AuthorizeBlocking, Authorized
from oncehook.web.peers import PeerOf, peer_finder


def role_of(user: Any) -> RoleName | None:
    """Return a user's role: superusers are admins; staff with permission to act are operators, to view viewers."""
    if not (user.is_active and user.is_staff):
        return None
    if user.is_superuser:
        return "admin"
    if user.has_perms(["oncehook.replay_delivery", "oncehook.discard_delivery"]):
        return "operator"
    return "viewer" if user.has_perms(["oncehook.view_event", "oncehook.view_delivery"]) else None


def authorize_user(user: Any) -> Authorized:
    """Return the user's name, for the audit log, and role; None for one without permissions."""
    role = role_of(user)
    return None if role is None else (user.get_username(), role)


def staff(request: HttpRequest) -> Authorized:
    """Authorise a request by the project's own login."""
    return authorize_user(request.user)


def _outside_transactions(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Exempt a view from ATOMIC_REQUESTS, whose transaction would be unused: the store commits by itself."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


@_outside_transactions
@csrf_exempt
def hook(request: HttpRequest, rest: str) -> HttpResponse:
    """Receive one arrival, or answer a handshake."""
    headers = _headers(request)
    source, _, below = rest.partition("/")  # a sub-path (Evolution's /messages-upsert) is not part of the name
    method, account = request.method or "", below.partition("/")[0]
    arrival = Arrival(source, headers, b"", _query(request), method, request.path, _peer(request, headers), account)
    return _response(assembly.get_bridge().answer(arrival, _reader(request)))


# A sender has no account, so Django 5.1's LoginRequiredMiddleware must let it through.
hook.login_required = False  # type: ignore[attr-defined]


def show_dashboard(authorize: AuthorizeBlocking[HttpRequest]) -> Callable[..., HttpResponse]:
    @_outside_transactions
    @csrf_exempt  # the dashboard checks the origin of a change itself (S29)
    def show(request: HttpRequest, rest: str) -> HttpResponse:
        body = request.body
        environ = {
            **request.META,
            "SCRIPT_NAME": as_bytes(request.path.removesuffix(rest).rstrip("/")),
            "PATH_INFO": as_bytes(f"/{rest}"),
            "HTTP_HOST": request.get_host(),  # checked against ALLOWED_HOSTS
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            "wsgi.url_scheme": request.scheme,
        }
        return _response(_dashboard().answer(environ, authorize(request), _find_hooks()))

    return show


@functools.cache
def _dashboard() -> Dashboard:
    return Dashboard(assembly.get_bridge())


def _find_hooks() -> str | None:
    """Return the path below which the project receives hooks, if it does."""
    try:
        return reverse("oncehook:hook", kwargs={"rest": "x"}).removesuffix("/x")
    except NoReverseMatch:
        return None


# -- the request -------------------------------------------------------------------------------


def _headers(request: HttpRequest) -> Headers:
    scope = getattr(request, "scope", None)
    if scope is not None:
        return list(scope["headers"])
    # WSGI keeps neither order nor case, and joins headers of one name.
    named = ((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items())
    return [(name, value) for name, value in named if value or not name.startswith(b"content-")]


def _query(request: HttpRequest) -> bytes:
    scope = getattr(request, "scope", None)
    return bytes(scope["query_string"]) if scope else str(request.META.get("QUERY_STRING", "")).encode("latin-1")


def _peer(request: HttpRequest, headers: Headers) -> str:
    address = request.META.get("REMOTE_ADDR")
    return _peer_of()({"client": (address, 0) if address else None, "headers": headers})


@functools.cache
def _peer_of() -> PeerOf:
    return peer_finder([ip_network(network) for network in assembly.read_settings().get("TRUSTED_PROXIES", ())])


def _reader(request: HttpRequest) -> Read:
    if getattr(request, "_read_started", False) and not hasattr(request, "_body"):
        raise ImproperlyConfigured("A middleware has read this request's body, and left nothing to verify.")
    length = request.headers.get("content-length", "")
    environ = getattr(request, "environ", {})
    if "HTTP_TRANSFER_ENCODING" in environ and not length:
        # Django takes a body without Content-Length for empty. We read it where the server declares that it ends.
        return environ["wsgi.input"].read if environ.get("wsgi.input_terminated") else _refuse
    return _check_complete(request.read, int(length) if length.isdigit() else 0)


def _refuse(size: int) -> bytes:
    raise Malformed("This server takes a body with its Content-Length only.")


def _check_complete(read: Read, length: int) -> Read:
    """Refuse a body that ends before its Content-Length, which Django does not notice (R7)."""
    left = length

    def read_part(size: int) -> bytes:
        nonlocal left
        try:
            part = read(size)
        except UnreadablePostError:
            part = b""
        left -= len(part)
        if not part and left > 0:
            raise Malformed("The body ended before its Content-Length.")
        return part

    return read_part


# -- the answer --------------------------------------------------------------------------------


def _response(reply: Reply) -> HttpResponse:
    response = HttpResponse(reply.body, status=reply.status)
    del response["content-type"]
    for name, value in reply.headers:
        response[name.decode("latin-1")] = value.decode("latin-1")
    return response
