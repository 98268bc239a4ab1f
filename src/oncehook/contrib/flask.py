"""Flask: a blueprint that receives hooks, and one for the dashboard; the inbox runs beside the application (`bridge`).

`init_app(inbox, app)` is all most need. The application may run in any number of processes. On PostgreSQL the work is
done by `oncehook worker app:inbox`; on SQLite these processes do it, too.
"""

from __future__ import annotations

from oncehook.contrib.bridge import Bridge
from oncehook.contrib.wsgi import Dashboard, as_bytes
from oncehook.errors import ConfigError, ExtraMissing
from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.sources import Reply
from oncehook.web.auth import AuthorizeBlocking
from oncehook.web.peers import UNKNOWN, plain

try:
    import flask
except ImportError as error:
    raise ExtraMissing("An inbox in Flask", "flask") from error

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def init_app(
    inbox: Inbox | Bridge,
    app: flask.Flask,
    *,
    url_prefix: str = "/hooks",
    work: bool | None = None,
    dashboard: str | None = None,
    authorize: AuthorizeBlocking[flask.Request] | None = None,
) -> Bridge:
    """Receive hooks at `url_prefix/{source}`. The bridge is also found as `app.extensions["oncehook"]`.

    Nothing is opened before the first request of a process. With `work` this process also makes attempts, by default
    on SQLite only. `dashboard` is the path of dashboard and API, with `authorize` as for `dashboard_blueprint`.

    >>> bridge = init_app(inbox, app)
    >>> bridge.call(inbox.emit("app", "order_placed", {"order": 42}, key="order-42"))
    """
    if (dashboard is None) != (authorize is None):
        raise ConfigError(
            "`dashboard` and `authorize` belong together.",
            hint='Write init_app(inbox, app, dashboard="/inbox", authorize=…), with a function of the request.',
        )
    bridge = inbox if isinstance(inbox, Bridge) else Bridge(inbox, work=work)
    app.register_blueprint(blueprint(bridge), url_prefix=url_prefix)
    if dashboard is not None and authorize is not None:
        made = dashboard_blueprint(bridge, authorize=authorize, hooks=url_prefix)
        app.register_blueprint(made, url_prefix=dashboard)
    app.extensions["oncehook"] = bridge
    return bridge


def blueprint(bridge: Bridge, name: str = "oncehook") -> flask.Blueprint:
    """Build the blueprint that receives hooks."""
    made = flask.Blueprint(name, __name__)

    # A sub-path (Evolution's /messages-upsert) is not part of the name.
    @made.route("/<source>", methods=METHODS)
    @made.route("/<source>/<path:rest>", methods=METHODS)
    def receive(source: str, rest: str = "") -> flask.Response:
        request = flask.request
        arrival = arrival_of(request, source)
        arrival.account = rest.partition("/")[0]
        return response(bridge.answer(arrival, request.stream.read))

    return made


def dashboard_blueprint(
    bridge: Bridge,
    *,
    authorize: AuthorizeBlocking[flask.Request],
    hooks: str | None = None,
    name: str = "oncehook_dashboard",
) -> flask.Blueprint:
    """Build the blueprint of dashboard and API.

    `authorize` takes Flask's request, within its context, and returns who makes it: a name for the audit log and the
    role "viewer", "operator" or "admin", as `("anna", "operator")`; a role alone; or None for nobody. `hooks` is the
    prefix of the blueprint that receives, to be shown.
    """
    shown, made = Dashboard(bridge), flask.Blueprint(name, __name__)

    @made.route("/", methods=METHODS)
    @made.route("/<path:rest>", methods=METHODS)
    def show(rest: str = "") -> flask.Response:
        request = flask.request
        below = (request.script_root + request.path.removesuffix(rest)).rstrip("/")
        environ = {**request.environ, "SCRIPT_NAME": as_bytes(below), "PATH_INFO": as_bytes(f"/{rest}")}
        where = None if hooks is None else request.script_root + hooks.rstrip("/")
        return response(shown.answer(environ, authorize(request), where))

    return made


def arrival_of(request: flask.Request, source: str, body: bytes = b"") -> Arrival:
    """Build an arrival from Flask's request."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
    peer = plain(request.remote_addr) if request.remote_addr else UNKNOWN
    return Arrival(source, headers, body, request.query_string, request.method, request.path, peer)


def response(reply: Reply) -> flask.Response:
    """Build Flask's response from the inbox's answer."""
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in reply.headers]
    return flask.Response(reply.body, reply.status, headers)
