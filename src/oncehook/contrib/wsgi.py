"""Dashboard and API for programs under WSGI: one application, run on the bridge's loop.

`contrib.flask` and `contrib.django` mount it and authorise by their own sessions; any other framework calls
`dashboard` itself. Nothing is streamed here, because a stream would hold one of the server's threads for as long as a
page is open: pages poll every few seconds instead.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from oncehook.contrib.bridge import Bridge, put_off, read_body
from oncehook.errors import OncehookError, Rejected, StoreUnavailable
from oncehook.model import Headers
from oncehook.sources import Reply
from oncehook.web.asgi import call_app
from oncehook.web.auth import AuthorizeBlocking, Authorized
from oncehook.web.dashboard import dashboard as hosted
from oncehook.web.dashboard.context import WAY_IN
from oncehook.web.live import NoBroadcast

__all__ = ["dashboard"]

PATIENCE: Final = 30.0
"""Seconds for one answer."""
MAX_BODY: Final = 1 << 20
"""Bytes of a form or of a request to the API at most; pages and API refuse much less."""

_DECISION: Final = "oncehook.authorized"
Scope = MutableMapping[str, Any]


class Dashboard:
    """Dashboard and API of the bridge's inbox, for frameworks that pass on authorised requests."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._app = hosted(bridge.inbox, NoBroadcast(), authorize=lambda request: request.scope[_DECISION])

    def answer(self, environ: WSGIEnvironment, decision: Authorized, hooks: str | None = None) -> Reply:
        """Answer one request of the person that `decision` names; `hooks` is the path below which sources receive."""
        scope = {**_scope(environ), _DECISION: decision, WAY_IN: hooks}
        try:
            body = _body(scope["headers"], environ)
            return self._bridge.call(call_app(self._app, scope, body), timeout=PATIENCE)
        except Rejected as error:
            return Reply(error.status, str(error).encode(), ((b"content-type", b"text/plain; charset=utf-8"),))
        except OncehookError as error:
            return put_off(None, error)
        except TimeoutError:
            return put_off(None, StoreUnavailable(f"No answer within {PATIENCE:.0f} s."))


def dashboard(
    bridge: Bridge, *, authorize: AuthorizeBlocking[WSGIEnvironment], hooks: str | None = None
) -> WSGIApplication:
    """Build dashboard and API as a WSGI application, to be mounted below any path (`SCRIPT_NAME`).

    `authorize` takes each request's environ, on the request's own thread, and returns who makes it: a name for the
    audit log and the role "viewer", "operator" or "admin", as `("anna", "operator")`; a role alone; or None for nobody.
    `hooks` is the path below which sources receive, to be shown.
    """
    made = Dashboard(bridge)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        reply = made.answer(environ, authorize(environ), hooks)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in reply.headers]
        start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", headers)
        return [reply.body]

    return application


def _scope(environ: WSGIEnvironment) -> Scope:
    """Build a request's ASGI scope. In WSGI's paths each character is one byte (`as_bytes`)."""
    root = _text(environ.get("SCRIPT_NAME", "")).rstrip("/")
    peer = environ.get("REMOTE_ADDR")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": environ["REQUEST_METHOD"],
        "scheme": environ.get("wsgi.url_scheme", "http"),
        "path": root + (_text(environ.get("PATH_INFO", "")) or "/"),
        "root_path": root,
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": _headers(environ),
        "client": (peer, 0) if peer else None,
        "server": (environ.get("SERVER_NAME", ""), int(environ.get("SERVER_PORT") or 0)),
    }


def as_bytes(path: str) -> str:
    """Return a path as WSGI wants it: each character is one byte."""
    return path.encode().decode("latin-1")


def _text(path: str) -> str:
    return path.encode("latin-1", "replace").decode("utf-8", "replace")


def _headers(environ: WSGIEnvironment) -> Headers:
    named = {name.removeprefix("HTTP_"): value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    return [
        (name.lower().replace("_", "-").encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in named.items()
    ]


def _body(headers: Headers, environ: WSGIEnvironment) -> bytes:
    """Read the body up to its Content-Length: reading on could wait for the next request."""
    length = environ.get("CONTENT_LENGTH") or "0"
    left = int(length) if length.isdigit() and len(length) < 19 else 0

    def read(size: int) -> bytes:
        nonlocal left
        part: bytes = environ["wsgi.input"].read(min(size, left)) if left else b""
        left -= len(part)
        return part

    return read_body(headers, read, MAX_BODY)
