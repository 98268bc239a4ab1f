"""An unreliable development tunnel: it forwards every request twice, and fails now and then.

A small reverse proxy in front of one server. It forwards requests byte for byte and returns the last answer; a request
that fails is answered 502, or its connection is closed.
"""

from __future__ import annotations

import threading
from typing import Final
from urllib.parse import urlsplit

from oncehook import samples
from oncehook.errors import ConfigError
from oncehook.model import Arrival
from oncehook.testing.standins.server import CUT, LoopbackServer, Reply, Request

_HOP_BY_HOP: Final = ("connection", "keep-alive", "transfer-encoding", "content-length", "host")


class Tunnel(LoopbackServer):
    """A reverse proxy that duplicates requests and fails now and then.

    >>> async with Tunnel(n8n.url, copies=2, flap_every=2) as tunnel:
    ...     await meta.deliver(f"{tunnel.url}/in/whatsapp", meta.message(from_="5511988880142", text="Hi"), retries=3)
    """

    def __init__(
        self,
        target: str,
        *,
        copies: int = 2,
        flap_every: int = 0,
        flap_first: bool = False,
        cut: bool = False,
        port: int = 0,
    ) -> None:
        """Forward to `target`, the URL of a server without a path.

        Every `flap_every`-th request fails, or with `flap_first` the first of so many; 0: none. It is answered 502, or
        with `cut` not at all, and is not forwarded.
        """
        super().__init__(port=port)
        parts = urlsplit(target)
        if parts.scheme not in ("http", "https") or parts.path not in ("", "/"):
            raise ConfigError(f"{target} is not the address of a server.", hint="Such as http://127.0.0.1:4020.")
        self.target = f"{parts.scheme}://{parts.netloc}"
        self.copies = copies
        self.flap_every = flap_every
        self.flap_first = flap_first
        self.cut = cut
        self.handed_on = 0
        """Requests that reached the server behind it, copies included."""
        self.flapped = 0
        """Requests that failed here."""
        self._counting = threading.Lock()
        self._n = 0

    def reply(self, request: Request) -> Reply:
        if self._flaps():
            self.flapped += 1
            return CUT if self.cut else Reply(502, b"tunnel connection failed\n", {"content-type": "text/plain"})
        answer = Reply(502, b"nobody behind the tunnel\n", {"content-type": "text/plain"})
        for _ in range(self.copies):
            answer = self._hand_on(request) or answer
        return answer

    def _flaps(self) -> bool:
        if not self.flap_every:
            return False
        with self._counting:
            self._n += 1
            return self._n % self.flap_every == (1 % self.flap_every if self.flap_first else 0)

    def _hand_on(self, request: Request) -> Reply | None:
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in request.headers.items()
            if name not in _HOP_BY_HOP
        ]
        arrival = Arrival("", headers, request.body, request.query.encode("latin-1"), request.method)
        try:
            answer = samples.post(self.target + request.path, arrival)
        except OSError:
            return None
        self.handed_on += 1
        return Reply(answer.status, answer.body)
