"""Holding a claim while its work goes on: a thread or a task renews it, and the work can ask whether it still holds.

`faces` makes a `Held` of every claim that is worked on; `once` and users get it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from oncehook import clock
from oncehook.claims.base import Claim
from oncehook.errors import AlreadyDone, ClaimLost, InProgress, OncehookError

log = logging.getLogger("oncehook.claims")

BEATS: Final = 3
"""Renewals in one ttl: two may fail before it lapses."""


class Held:
    """A claim that is being worked on. Set `result` to keep something for those who ask later."""

    def __init__(self, key: str, claim: Claim, ttl: float, asked_at: float) -> None:
        if claim.token is None:
            raise AssertionError("only a new claim can be held")
        self.key = key
        self.token = claim.token
        self.degraded = claim.degraded
        self.result: bytes | None = None
        self.ttl = ttl
        self.renewed_at = asked_at
        """When the last renewal was asked for, by the steady clock: from then on it is surely ours for `ttl`."""
        self._lost = False

    @property
    def lost(self) -> bool:
        """It lapsed, or may have: somebody else may be working on it. Look here before what cannot be undone."""
        return not self.degraded and (self._lost or clock.steady() >= self.renewed_at + self.ttl)

    def renewed(self, asked_at: float, error: OncehookError | None) -> None:
        """What became of a renewal."""
        if error is None:
            self.renewed_at = asked_at
            return
        self._lost = self._lost or isinstance(error, ClaimLost)
        log.warning("claim.not_renewed", extra={"fields": {"key": self.key, "code": error.code, "error": str(error)}})

    @property
    def needs_beats(self) -> bool:
        """Whether there is still something to renew."""
        return not self.degraded and not self._lost


def begun(key: str, claim: Claim, ttl: float, asked_at: float) -> Held:
    """A new claim as one that is worked on; raises what any other answer means to somebody who wanted to work."""
    if claim.status == "in_progress":
        raise InProgress(retry_after=claim.retry_after)
    if claim.status == "done":
        raise AlreadyDone(result=claim.result)
    return Held(key, claim, ttl, asked_at)


@contextlib.contextmanager
def renewing(held: Held, renew: Callable[[], None]) -> Iterator[None]:
    """Renew by a thread until the block ends: a function that blocks its own thread delays nothing."""
    stop = threading.Event()

    def beat() -> None:
        while held.needs_beats and not stop.wait(held.ttl / BEATS):
            asked_at, error = clock.steady(), None
            try:
                renew()
            except OncehookError as caught:
                error = caught
            held.renewed(asked_at, error)

    thread = threading.Thread(target=beat, name="oncehook-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.asynccontextmanager
async def renewing_async(held: Held, renew: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Renew by a task until the block ends: a coroutine that blocks the event loop for `ttl` loses its claim."""
    stop = asyncio.Event()

    async def beat() -> None:
        while held.needs_beats:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(held.ttl / BEATS):
                    await stop.wait()
            if stop.is_set():
                return
            asked_at, error = clock.steady(), None
            try:
                await renew()
            except OncehookError as caught:
                error = caught
            held.renewed(asked_at, error)

    task = asyncio.create_task(beat(), name="oncehook-claim")
    try:
        yield
    finally:
        stop.set()
        await task
