"""Live moments: a bounded fan-out of arrivals and settlements to all watchers.

The observer publishes on the event loop, without waiting; each watcher has a queue of its own, and one that is too slow
loses the oldest moments and gets their number. `GET stream` and the live page read from it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import msgspec

from oncehook import clock
from oncehook.errors import Refused
from oncehook.model import EVERYTHING, Scope

QUEUE: Final = 500
"""Moments that may wait for one watcher."""

WATCHERS: Final = 100
OF_CUSTOMERS: Final = 80
"""Watchers who see a part of the inbox: they leave places for those who see all of it."""
OF_ONE: Final = 10
"""Watchers with the same limits: a customer's tabs and programs."""
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
    def __init__(self, scope: Scope = EVERYTHING) -> None:
        """Watch what is in `scope`."""
        self.scope = scope
        self.waiting: deque[bytes] = deque(maxlen=QUEUE)
        self.dropped = 0
        self.stir = asyncio.Event()

    def sees(self, source: object, account: object) -> bool:
        """Tell whether this watcher may see a moment of this source and account; None means a moment without one."""
        return self.scope.sees(source, account)

    def offer(self, moment: bytes) -> None:
        """Add a moment, dropping the oldest one where the queue is full."""
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
    """The fan-out of moments to all current watchers."""

    is_live = True
    """Whether anybody may watch; other pages poll by themselves."""

    def __init__(self, on_watched: Callable[[bool], None] = lambda is_watched: None) -> None:
        """`on_watched` is told when the first watcher joins, and when the last one has left."""
        self._watchers: set[Watcher] = set()
        self._on_watched = on_watched
        self._closed = False

    @property
    def is_there(self) -> bool:
        return bool(self._watchers)

    def publish(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Publish a moment to all watchers. Never waits; costs nothing while nobody watches. Call it on the event
        loop."""
        if self._watchers:
            moment = encode_event(kind, {"at": clock.now_utc().isoformat(timespec="milliseconds"), **fields})
            for watcher in self._watchers:
                if watcher.sees(fields.get("source"), fields.get("account")):
                    watcher.offer(moment)

    def join(self, scope: Scope = EVERYTHING) -> Watcher:
        """Return a new watcher of what is in `scope`. Raises TooManyWatchers. Call `leave` afterwards."""
        limited = [one.scope for one in self._watchers if one.scope.is_limited]
        is_crowded = scope.is_limited and (len(limited) >= OF_CUSTOMERS or limited.count(scope) >= OF_ONE)
        if is_crowded or len(self._watchers) >= WATCHERS:
            raise TooManyWatchers
        watcher = Watcher(scope)
        self._watchers.add(watcher)
        if len(self._watchers) == 1:
            self._on_watched(True)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._on_watched(False)

    def close(self) -> None:
        """End all watchers, so that a stopping server need not wait for them."""
        self._closed = True
        for watcher in self._watchers:
            watcher.stir.set()

    async def watch(self, watcher: Watcher) -> AsyncIterator[bytes]:
        """Yield server-sent events until the stream is closed; moments that come together are sent in one piece."""
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

    def join(self, scope: Scope = EVERYTHING) -> Watcher:
        raise NotLive


def encode_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event. JSON has no line ends, so untrusted text cannot end it (S35)."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(fields, enc_hook=str) + b"\n\n"
