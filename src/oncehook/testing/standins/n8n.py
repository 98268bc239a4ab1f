"""A stand-in for n8n's Webhook node: `POST /webhook/{path}` starts an execution, which is recorded.

Like n8n, it does not deduplicate: two deliveries of one event are two executions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from oncehook.model import Arrival
from oncehook.testing.standins.base import StandIn
from oncehook.testing.standins.server import Reply, Request


@dataclass(slots=True, frozen=True)
class Execution:
    """One run of a flow."""

    n: int
    path: str
    body: Any
    headers: dict[str, str] = field(repr=False)
    at: datetime


class N8nStandIn(StandIn[Any]):
    """A server of n8n. A webhook that it sends is any JSON value, as the author of a flow builds it.

    >>> async with N8nStandIn() as n8n:
    ...     inbox.destination("n8n", url=n8n.webhook(), allow_private=True)
    ...     n8n.fail(502)
    """

    preset = "n8n"

    def __init__(
        self,
        *paths: str,
        auth: tuple[str, str] | None = None,
        secret: str = "n8n-bearer-token",  # noqa: S107 - of a stand-in
        port: int = 0,
    ) -> None:
        """Activate flows at `paths` (`orders` by default); `auth` is a header and its required value."""
        super().__init__(secret=secret, port=port)
        self.active = set(paths or ("orders",))
        self.auth = auth
        self.executions: list[Execution] = []

    def webhook(self, path: str | None = None) -> str:
        """Return the production URL of a flow."""
        return f"{self.url}/webhook/{path or min(self.active)}"

    # -- what goes wrong -----------------------------------------------------------------------

    def error(self, status: int, message: object = None) -> Reply:
        return Reply(status, {"code": 0, "message": "Error in workflow" if message is None else message})

    def restart(self, *, times: int = 1) -> None:
        """Answer the next calls as n8n does while it starts: `times` in each state before it is ready.

        It listens without routes (404, a page), waits for its database (503), migrates it (200 for every request), and
        has not loaded its workflows yet (404, a page, then as for an inactive one).
        """
        for state in (_no_such_page, _no_database, _migrating, _no_such_page, _not_loaded):
            self.script(state, times)

    def deactivate(self, path: str | None = None) -> None:
        """Switch a flow off: its URL is no longer registered."""
        self.active.discard(path or min(self.active))

    def activate(self, path: str) -> None:
        """Switch a flow on."""
        self.active.add(path)

    # -- the node ------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        path = request.path.removeprefix("/webhook/")
        if path not in self.active or path == request.path or request.method != "POST":
            return _not_registered(request.method, path)
        if self.auth is not None and request.headers.get(self.auth[0].lower()) != self.auth[1]:
            return Reply(403, b"Authorization data is wrong!", {"content-type": "text/plain"})
        self.executions.append(
            Execution(len(self.executions) + 1, path, _content(request), dict(request.headers), request.at)
        )
        return Reply(200, {"message": "Workflow was started"})

    # -- webhooks ------------------------------------------------------------------------------

    def signed(self, *hooks: Any) -> list[Arrival]:
        """Add a bearer token, as an HTTP Request node with Header Auth does."""
        drafts = self.webhooks(*hooks)
        for draft in drafts:
            draft.headers = [*draft.headers, (b"authorization", f"Bearer {self.secret}".encode())]
        return list(drafts)


def _content(request: Request) -> Any:
    try:
        return msgspec.json.decode(request.body)
    except msgspec.DecodeError:
        return request.body.decode("utf-8", "replace")


def _no_such_page(request: Request) -> Reply:
    text = f"Cannot {request.method} {request.path}"
    page = f"<!DOCTYPE html>\n<html><head><title>Error</title></head><body><pre>{text}</pre></body></html>"
    return Reply(404, page.encode(), {"content-type": "text/html; charset=utf-8"})


def _no_database(request: Request) -> Reply:
    return Reply(503, {"code": 503, "message": "Database is not ready!"})


def _migrating(request: Request) -> Reply:
    return Reply(200, b"n8n is starting up. Please wait", {"content-type": "text/html; charset=utf-8"})


def _not_loaded(request: Request) -> Reply:
    return _not_registered(request.method, request.path.removeprefix("/webhook/"))


def _not_registered(method: str, path: str) -> Reply:
    return Reply(
        404,
        {
            "code": 404,
            "message": f'The requested webhook "{method} {path}" is not registered.',
            "hint": "The workflow must be active for a production URL to run successfully.",
        },
    )
