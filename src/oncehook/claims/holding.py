"""Holding a claim while its work goes on: a thread or a task renews it, and the work can ask whether it still holds.

`faces` makes a `Held` of every claim that is worked on; `once` and users get it. What a renewal and the end of the work
ask of the store are steps, as the verbs of `base` are: written once, run blocking or on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from oncehook import clock
from oncehook.claims.base import Claim, Steps, Verbs, Wait
from oncehook.errors import AlreadyDone, ClaimLost, InProgress, OncehookError, ResultInvalid, StoreUnavailable

log = logging.getLogger("oncehook.claims")

BEATS: Final = 3
"""Renewals in one ttl: two may fail before it lapses."""

WAITS: Final = (0.2, 1.0, None)
"""Seconds between tries to commit work that is done: a restart of the store need not have it done again."""


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

    def not_renewed(self, error: OncehookError) -> None:
        """A renewal failed: it still holds until it lapses, unless it is somebody else's already."""
        self._lost = self._lost or isinstance(error, ClaimLost)
        log.warning("claim.not_renewed", extra=_told(self, error))

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


# -- while it goes on, and at its end ----------------------------------------------------------


def renewed(verbs: Verbs, held: Held) -> Steps[None]:
    """Hold it for another ttl; a failure is written down, and never the work's own."""
    asked_at = clock.steady()
    try:
        yield from verbs.renew(held.key, held.token, held.ttl)
    except OncehookError as error:
        held.not_renewed(error)
    else:
        held.renewed_at = asked_at


def given_back(verbs: Verbs, held: Held) -> Steps[None]:
    """The work has failed: abort. Its own error matters more than ours; the claim lapses by itself, or has lapsed."""
    try:
        yield from verbs.abort(held.key, held.token)
    except OncehookError as error:
        log.warning("claim.not_aborted", extra=_told(held, error))


def finished(verbs: Verbs, held: Held, keep: str | float | None) -> Steps[None]:
    """The work is done: commit, and without its result where that cannot be kept, before anything is raised."""
    try:
        yield from _committed(verbs, held, keep)
    except ResultInvalid:
        held.result = None
        yield from _committed(verbs, held, keep)
        raise


def _committed(verbs: Verbs, held: Held, keep: str | float | None) -> Steps[None]:
    for wait in WAITS:
        try:
            yield from verbs.commit(held.key, held.token, held.result, keep)
            return
        except StoreUnavailable as error:
            if wait is None or held.lost:
                # The work is done, and only the store does not know: with `fail_open` that is a warning.
                if not verbs.fail_open:
                    raise
                log.warning("claim.not_committed", extra=_told(held, error))
                return
        yield Wait(wait)


def _told(held: Held, error: OncehookError) -> dict[str, object]:
    return {"fields": {"key": held.key, "code": error.code, "error": str(error)}}


@contextlib.contextmanager
def renewing(held: Held, renew: Callable[[], None]) -> Iterator[None]:
    """Renew by a thread until the block ends: a function that blocks its own thread delays nothing."""
    stop = threading.Event()

    def beat() -> None:
        while held.needs_beats and not stop.wait(held.ttl / BEATS):
            renew()

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
            await renew()

    task = asyncio.create_task(beat(), name="oncehook-claim")
    try:
        yield
    finally:
        stop.set()
        await task
