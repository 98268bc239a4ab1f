"""Under a path of somebody else's: a proxy that serves us at `/hooks/` says so in `X-Forwarded-Prefix`.

It takes the prefix off before it hands a request on; here it is put back as ASGI's `root_path`, from which pages make
their links and cookies their path. Only a configured proxy is believed (S16).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from oncehook.sources import Network
from oncehook.web.peers import Scope, direct_peer, is_within

_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


class Prefixed:
    """An ASGI application in front of another."""

    def __init__(self, app: Callable[..., Awaitable[Any]], trusted: Sequence[Network]) -> None:
        self._app = app
        self._trusted = trusted

    def __call__(self, scope: Scope, receive: Any, send: Any) -> Awaitable[Any]:
        prefix = self._prefix(scope) if self._trusted and scope["type"] == "http" else ""
        if prefix:
            scope = {**scope, "root_path": prefix, "path": prefix + scope["path"]}
        return self._app(scope, receive, send)

    def _prefix(self, scope: Scope) -> str:
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-prefix"]
        said = named[0].rstrip("/") if len(named) == 1 else ""
        return said if _PREFIX.fullmatch(said) and is_within(direct_peer(scope), self._trusted) else ""
