"""The sweep, beside receiving and work: feed bulk replays, prune, roll up counters, check watermarks.

Every process of an inbox runs one; the store makes sure that what must happen once does. Each duty has its own
interval, and one that fails is logged and repeated, so that it cannot stop the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, Protocol

from oncehook import clock
from oncehook.archive import Archive
from oncehook.errors import StoreUnavailable
from oncehook.human import show_span
from oncehook.model import Level, Noun, StoredWorker, media_source
from oncehook.store.base import Store


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of watermarks; None or empty: no limit."""

    dead: int | None = None
    oldest_due: float | None = None
    """Seconds for which the oldest delivery has been due."""
    daily_volume: Mapping[str, int] = field(default_factory=dict)
    """Events since midnight UTC, by source, of the types that count; 0: no limit, whatever the source's preset says."""
    disk: float | None = None
    """The free part of the disk, from 0 to 1: a lower limit."""

    def with_usual(self, usual: Mapping[str, int]) -> Limits:
        """Return the limits, with presets' daily volumes for sources without a limit of their own."""
        volumes = {source: limit for source, limit in {**usual, **self.daily_volume}.items() if limit}
        return replace(self, daily_volume=volumes)


@dataclass(frozen=True, slots=True)
class Watermark:
    name: str
    """`dead`, `oldest_due`, `disk`, or `daily_volume.SOURCE`."""
    level: float | None
    """None where it is unknown."""
    limit: float
    crossed: bool

    @property
    def source(self) -> str | None:
        """Source whose volume it measures, which is a notice; None for the others, which are alarms."""
        kind, _, source = self.name.partition(".")
        return source if kind == "daily_volume" else None


def measure(
    limits: Limits, levels: Mapping[str, Level], volumes: Mapping[str, int], free: float | None
) -> list[Watermark]:
    """Return every watermark that has a limit, given the destinations' levels, today's volumes and the free part of the
    disk."""
    found = []
    if limits.dead is not None:
        found.append(_above("dead", sum(level.dead for level in levels.values()), limits.dead))
    if limits.oldest_due is not None:
        waits = [level.oldest_due for level in levels.values() if level.oldest_due is not None]
        found.append(_above("oldest_due", max(waits, default=0.0), limits.oldest_due))
    for source, limit in limits.daily_volume.items():
        found.append(_above(f"daily_volume.{source}", volumes.get(source, 0), limit))
    if limits.disk is not None:
        found.append(Watermark("disk", free, limits.disk, free is not None and free < limits.disk))
    return found


def _above(name: str, level: float, limit: float) -> Watermark:
    return Watermark(name, level, limit, level > limit)


log = logging.getLogger("oncehook.sweep")

FindPatience = Callable[[Collection[str]], Awaitable[Mapping[str, tuple[int, float]]]]
Measure = Callable[[], Awaitable[Sequence[Watermark]]]

OLD_LIBRARY_HINT: Final = (
    "Nothing need be done while only oncehook writes to it. SQLite comes with Python or the operating system: a newer"
    " image or release of these brings a newer one, and a PostgreSQL store needs none."
)
"""Hint for a SQLite library that is too old to let other programs write."""
STRAY_HINT: Final = "Define it again, or start the program that does, as in: oncehook serve module:inbox"
"""Hint for deliveries that wait for a destination that no process has."""

BATCH_SECONDS: Final = 0.005
"""Time that a batch of what is pruned should take."""
SMALLEST_BATCH: Final = 50
LARGEST_BATCH: Final = 500
"""Events in a batch; even the smallest ones end more in a second than an inbox on one machine takes in."""
FEEDING: Final = 0.05
RESTING: Final = 1.0
"""Seconds between two checks for replays to feed: while there are some, and while there are none."""


class UpkeepObserver(Protocol):
    """Observer of the sweep, for logs and metrics."""

    def watermark(self, mark: Watermark) -> None:
        """Note a watermark that was just crossed, or is back below its limit."""

    def watermarks(self, marks: Sequence[Watermark]) -> None: ...

    def disabled(self, destination: str, reason: str) -> None:
        """Note a destination that was paused because it has failed for too long."""

    def sum_up(self) -> None:
        """Log a summary of successes; called once a second."""


class Sweep:
    def __init__(
        self,
        store: Store,
        observer: UpkeepObserver,
        *,
        keep_events: Callable[[], Awaitable[Mapping[int, float]]],
        otherwise: float,
        measure: Measure,
        works_for: Collection[str] | None,
        worker: Callable[[], StoredWorker | None],
        write_counts: Callable[[], Awaitable[None]],
        sweep_objects: Callable[[], Awaitable[None]],
        find_patience: FindPatience,
        archive: Archive | None = None,
    ) -> None:
        """`find_patience` returns the id and `disable_after` of those of these destinations that have one."""
        self._store = store
        self._observer = observer
        self._keep_events = keep_events
        self._otherwise = otherwise
        self._measure = measure
        self._works_for = works_for
        self._worker = worker
        self._write_counts = write_counts
        self._find_patience = find_patience
        self._sweep_objects = sweep_objects
        self._archive = archive
        self._has_replays = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        duties = (
            (1.0, self._sum_up), (1.0, self._write_counts), (10.0, self._register_worker),
            (10.0, self._check_watermarks), (60.0, self._disable_failing), (60.0, self._prune), (3600.0, self._roll_up),
            (3600.0, self._sweep_objects),
        )  # fmt: skip
        self._tasks = [asyncio.create_task(self._every(pace, duty)) for pace, duty in duties]
        self._tasks.append(asyncio.create_task(self._feed_until_stopped()))

    async def stop(self) -> None:
        """Stop at the next pause; a running duty is cancelled."""
        self._stopping.set()
        self._has_replays.set()
        for task in self._tasks:
            task.cancel()
        # A driver can lose a cancellation. Then the task sees the flag when the duty is over.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def nudge(self) -> None:
        """Feed bulk replays now, because one was made or resumed in this process."""
        self._has_replays.set()

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
        self._observer.sum_up()

    async def _feed_until_stopped(self) -> None:
        # Replays that were requested while no process ran come first: what they feed to an unknown destination is a
        # stray then.
        await self._try(self._store.feed_replays)
        await self._try(self._log_strays)
        while not self._stopping.is_set():
            self._has_replays.clear()
            fed = await self._try(self._store.feed_replays)
            if not self._stopping.is_set():
                await _rest(self._has_replays, FEEDING if fed else RESTING)

    async def _log_strays(self) -> None:
        if self._works_for is None:  # this process only receives
            return
        for name, waiting in (await strays(self._store, self._works_for)).items():
            fields = {"destination": name, "waiting": waiting, "hint": STRAY_HINT}
            log.warning("destination.unknown", extra={"fields": fields})

    async def _register_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            await self._store.register_worker(worker)

    async def _disable_failing(self) -> None:
        """Pause the destinations that have failed for longer than they may."""
        levels = await self._store.levels()
        failing = [name for name, level in levels.items() if level.failures and level.paused_at is None]
        for name, (destination_id, patience) in (await self._find_patience(failing)).items() if failing else ():
            since = await failing_since(self._store, name, patience)
            if since is not None and clock.now_utc() - since >= timedelta(seconds=patience):
                reason = f"failed for {show_span(patience)} without a success"
                await self._store.pause(destination_id, "oncehook", reason)
                self._observer.disabled(name, reason)

    async def _prune(self) -> None:
        removed, only = 0, None
        keep_events = await self._keep_events()
        if self._archive is not None:
            removed, only = await self._archive.prune(keep_events, self._otherwise), ()
        limit = SMALLEST_BATCH
        while True:
            began = clock.perf()
            if not (pruned := await self._store.prune(keep_events, self._otherwise, limit, only=only)):
                break
            removed += pruned.events
            took = max(clock.perf() - began, BATCH_SECONDS / 10)
            # Arrivals wait behind a batch on SQLite, so it is short; and for as long again they have the store alone.
            limit = min(max(int(limit * BATCH_SECONDS / took), SMALLEST_BATCH), LARGEST_BATCH)
            await asyncio.sleep(max(took, BATCH_SECONDS))
        if removed:
            log.info("sweep.pruned", extra={"fields": {"events": removed}})

    async def _roll_up(self) -> None:
        await self._store.roll_up()

    async def _check_watermarks(self) -> None:
        """Report each watermark once when it is crossed and once when it is back, by the process that notices first."""
        marks = await self._measure()
        self._observer.watermarks(marks)
        known: Mapping[str, datetime] = await self._store.crossings()
        for mark in marks:
            if mark.crossed != (mark.name in known) and await self._store.mark_watermark(mark.name, mark.crossed):
                self._observer.watermark(mark)


async def failing_since(store: Store, destination: str, patience: float) -> datetime | None:
    """Return the first failure of a destination after its last success, to the minute; None where there is none. Looks
    back twice as far as `patience`."""
    flows = await store.series(clock.now_utc() - timedelta(seconds=2 * patience + 120), 60.0, destination=destination)
    succeeded = max((at for at, count in flows.get("succeeded", ()) if count), default=None)
    failed = [at for what in ("retry", "died") for at, count in flows.get(what, ()) if count]
    return min((at for at in failed if succeeded is None or at > succeeded), default=None)


async def _rest(until: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until.wait()


async def strays(store: Store, known: Collection[str]) -> dict[str, int]:
    """Return how many deliveries wait for each destination that is known neither here nor to a worker elsewhere."""
    workers = await store.workers()
    known = {*known, *(name for worker in workers for name in worker.destinations)}
    levels = await store.levels()
    waiting = {name: level.pending for name, level in levels.items() if level.pending and name not in known}
    waiting = {name: count for name, count in waiting.items() if media_source(name) is None}  # every worker keeps media
    stored = await store.find_definitions(Noun.destination, waiting) if waiting else []
    return {name: count for name, count in waiting.items() if all(one.name != name for one in stored)}
