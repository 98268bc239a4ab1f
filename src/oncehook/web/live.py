"""What happens, as it happens: a bounded fan-out of arrivals and settlements to whoever watches.

The observer publishes, from the loop and without waiting; each watcher has a queue of its own, and one that does not
keep up loses the oldest and gets their number. `GET stream` and the live page read from it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final

import msgspec

from oncehook.errors import Refused

QUEUE: Final = 500
"""Moments that wait for one watcher at most."""

WATCHERS: Final = 100
KEEP_ALIVE: Final = 15.0


class TooManyWatchers(Refused):
    """As many watch as can be served; close one of the others."""

    code = "too_many_watchers"
    status = 429
    retry_after = 5.0


class NotLive(Refused):
    """Nothing can be watched here: this server would give a whole thread to whoever watches."""

    code = "not_live"
    status = 501
    hint = "Ask again every few seconds, or run `oncehook serve` beside it."


class Watcher:
    def __init__(self, scope: Collection[str] | None = None) -> None:
        """Get the moments of the sources in `scope`; None: of all."""
        self._scope = scope
        self.waiting: deque[bytes] = deque(maxlen=QUEUE)
        self.dropped = 0
        self.stir = asyncio.Event()

    def sees(self, source: object) -> bool:
        """Tell whether a moment of this source, or of none, is for this reader."""
        return self._scope is None or source in self._scope

    def offer(self, moment: bytes) -> None:
        """Take a moment, at the price of the oldest."""
        if len(self.waiting) == QUEUE:
            self.dropped += 1
        self.waiting.append(moment)
        self.stir.set()

    def take(self) -> bytes:
        self.stir.clear()
        moments = list(self.waiting)
        self.waiting.clear()
        if self.dropped:
            moments.insert(0, encode_event("dropped", {"count": self.dropped}))
            self.dropped = 0
        return b"".join(moments)


class Broadcast:
    """The fan-out of moments to everybody who watches now."""

    is_live = True
    """Whether anybody may watch; pages that may not ask again by themselves."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._closed = False

    @property
    def is_there(self) -> bool:
        return bool(self._watchers)

    def publish(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Tell everybody. Never waits; costs nothing while nobody watches. To be called on the loop."""
        if self._watchers:
            moment = encode_event(kind, fields)
            for watcher in self._watchers:
                if watcher.sees(fields.get("source")):
                    watcher.offer(moment)

    def join(self, scope: Collection[str] | None = None) -> Watcher:
        """Return a new watcher, of these sources or of all. Raises TooManyWatchers. Whoever joins must leave."""
        if len(self._watchers) >= WATCHERS:
            raise TooManyWatchers
        watcher = Watcher(scope)
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        """End every watch, so that a server that stops need not wait for them."""
        self._closed = True
        for watcher in self._watchers:
            watcher.stir.set()

    async def watch(self, watcher: Watcher) -> AsyncIterator[bytes]:
        """Yield server-sent events until the stream is closed: what comes in one go is sent in one piece."""
        try:
            yield b"retry: 2000\n: watching\n\n"
            while not self._closed:
                try:
                    async with asyncio.timeout(KEEP_ALIVE):
                        await watcher.stir.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if piece := watcher.take():
                    yield piece
        finally:
            self.leave(watcher)


class NoBroadcast(Broadcast):
    """A stream for servers that give a thread to each request: nobody may watch."""

    is_live = False

    def join(self, scope: Collection[str] | None = None) -> Watcher:
        raise NotLive


def encode_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Return one server-sent event. JSON has no line ends of its own, so untrusted text cannot end it (S35)."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(fields, enc_hook=str) + b"\n\n"
