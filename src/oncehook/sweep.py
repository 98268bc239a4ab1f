"""The sweep: housekeeping beside the work. Rescues, feeds bulk replays, prunes, rolls up, and watches the watermarks.

Every process of an inbox runs one; what must happen once is decided by the store. Each duty has its own pace, and one
that fails is logged and tried again, so that none can stop the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, Protocol

from oncehook import clock
from oncehook.deliveries import StoredWorker
from oncehook.errors import StoreUnavailable
from oncehook.model import Engine
from oncehook.replays import StoredReplay
from oncehook.store.base import Store
from oncehook.watermarks import Watermark

log = logging.getLogger("oncehook.sweep")

Measure = Callable[[], Awaitable[Sequence[Watermark]]]

STRAY_HINT: Final = "Define it again, or start the program that does, as in: oncehook serve module:inbox"
"""What to do when deliveries wait for a destination that nobody knows."""

FEEDING: Final = 0.05
RESTING: Final = 1.0
"""Seconds between two looks for replays to feed: while there are some, and while there are none."""


class Witness(Protocol):
    """Who is told when a watermark is crossed, and when it is back; and when a replay is over."""

    def watermark(self, mark: Watermark) -> None:
        """It has just been crossed, or is back."""

    def watermarks(self, marks: Sequence[Watermark]) -> None:
        """How they all stand."""

    def replay_over(self, replay: StoredReplay) -> None:
        """This process has brought a replay to its end, or it was aborted here."""

    def sum_up(self) -> None:
        """A second has passed: say how much went well."""


class Sweep:
    """Keeps house for one process."""

    def __init__(
        self,
        store: Store,
        witness: Witness,
        *,
        keep_events: Mapping[int, float],
        otherwise: float,
        measure: Measure,
        works_for: Collection[str] | None,
        worker: Callable[[], StoredWorker | None],
        write_counts: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._witness = witness
        self._keep_events = keep_events
        self._otherwise = otherwise
        self._measure = measure
        self._works_for = works_for
        self._worker = worker
        self._write_counts = write_counts
        self._hungry = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, on the running loop."""
        self._store.finished = self._witness.replay_over
        duties = (
            (1.0, self._sum_up), (1.0, self._write_counts), (10.0, self._greet), (10.0, self._watch),
            (60.0, self._prune), (3600.0, self._roll_up),
        )  # fmt: skip
        self._tasks = [asyncio.create_task(self._every(pace, duty)) for pace, duty in duties]
        self._tasks.append(asyncio.create_task(self._feed_for_ever()))

    async def stop(self) -> None:
        """Stop at the next pause; a duty under way is ended."""
        self._stopping.set()
        self._hungry.set()
        for task in self._tasks:
            task.cancel()
        # A cancellation can get lost inside a driver. Then the task sees that it is to stop when the duty is over.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def nudge(self) -> None:
        """A bulk replay was made or resumed in this process: feed it now."""
        self._hungry.set()

    async def _every(self, pace: float, duty: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            await self._try(duty)
            # Not all processes at the same moment.
            await _rest(self._stopping, pace * clock.chance.uniform(0.9, 1.1))

    async def _try(self, duty: Callable[[], Awaitable[object]]) -> object:
        try:
            return await duty()
        except StoreUnavailable as error:
            log.debug("sweep.store_unavailable", extra={"fields": {"duty": duty.__name__, "error": str(error)}})
        except Exception:
            log.exception("sweep.failed")
        return None

    # -- duties --------------------------------------------------------------------------------

    async def _sum_up(self) -> None:
        self._witness.sum_up()

    async def _feed_for_ever(self) -> None:
        # First what was asked for while nobody was there: what it leads nowhere with waits from then on.
        await self._try(self._store.feed_replays)
        await self._try(self._tell_strays)
        while not self._stopping.is_set():
            self._hungry.clear()
            fed = await self._try(self._store.feed_replays)
            if not self._stopping.is_set():
                await _rest(self._hungry, FEEDING if fed else RESTING)

    async def _tell_strays(self) -> None:
        if self._works_for is None:  # here deliveries are only taken in
            return
        for name, waiting in (await strays(self._store, self._works_for)).items():
            fields = {"destination": name, "waiting": waiting, "hint": STRAY_HINT}
            log.warning("destination.unknown", extra={"fields": fields})

    async def _greet(self) -> None:
        worker = self._worker()
        if worker is not None:
            await self._store.greet_worker(worker)

    async def _prune(self) -> None:
        removed = 0
        while pruned := await self._store.prune(self._keep_events, self._otherwise):
            removed += pruned.events
            await asyncio.sleep(0.05)  # others write too
        if removed:
            log.info("sweep.pruned", extra={"fields": {"events": removed}})

    async def _roll_up(self) -> None:
        await self._store.roll_up()

    async def _watch(self) -> None:
        """Tell each watermark once when it is crossed and once when it is back, by whichever process sees it first."""
        marks = await self._measure()
        self._witness.watermarks(marks)
        known: Mapping[str, datetime] = await self._store.crossings()
        for mark in marks:
            if mark.crossed != (mark.name in known) and await self._store.cross(mark.name, mark.crossed):
                self._witness.watermark(mark)


async def _rest(until: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until.wait()


async def strays(store: Store, known: Collection[str]) -> dict[str, int]:
    """How many deliveries wait for each destination that is known neither here nor to a worker elsewhere."""
    # Workers that a SQLite file speaks of are this process, or have died.
    workers = [] if store.engine is Engine.sqlite else await store.workers()
    known = {*known, *(name for worker in workers for name in worker.destinations)}
    levels = await store.levels()
    return {name: level.pending for name, level in levels.items() if level.pending and name not in known}
