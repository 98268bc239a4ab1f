"""The sweep: housekeeping beside the work. Rescues, feeds bulk replays, prunes, rolls up, and watches the watermarks.

Every process of an inbox runs one; what must happen once is decided by the store. Each duty has its own pace, and one
that fails is logged and tried again, so that none can stop the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Final, Protocol

from oncehook import clock, query
from oncehook.errors import BadRequest, NotFound, StoreUnavailable
from oncehook.model import Engine, EraseOrder, Erasure, Level, StoredReplay, StoredWorker, subject_hash
from oncehook.rules import bounded
from oncehook.sources import Source
from oncehook.store.base import Store


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too much; None or empty: nobody asked."""

    dead: int | None = None
    """Dead letters."""
    oldest_due: float | None = None
    """Seconds for which the oldest delivery has been due."""
    daily_volume: Mapping[str, int] = field(default_factory=dict)
    """Events since midnight UTC, by source, of the types that count; 0: nobody wants to know, whatever the source's
    preset says."""
    disk: float | None = None
    """The free part of the disk, from 0 to 1: here less is worse."""

    def with_usual(self, usual: Mapping[str, int]) -> Limits:
        """With the usual daily volumes of some sources, where nothing else was said about them."""
        volumes = {source: limit for source, limit in {**usual, **self.daily_volume}.items() if limit}
        return replace(self, daily_volume=volumes)


@dataclass(frozen=True, slots=True)
class Watermark:
    """One level and its limit."""

    name: str
    """`dead`, `oldest_due`, `disk`, or `daily_volume.SOURCE`."""
    level: float | None
    """None: it cannot be told."""
    limit: float
    crossed: bool

    @property
    def source(self) -> str | None:
        """The source whose volume it measures: a notice, where the others are alarms. None for those."""
        kind, _, source = self.name.partition(".")
        return source if kind == "daily_volume" else None


def measure(
    limits: Limits, levels: Mapping[str, Level], volumes: Mapping[str, int], free: float | None
) -> list[Watermark]:
    """Every watermark that has a limit: how destinations stand, what came today, the free part of the disk."""
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


AT_ONCE: Final = 2000
"""Events that one request erases at most; whoever wants more asks again."""
BATCH: Final = 100
LONGEST_REASON: Final = 1000
LONGEST_SUBJECT: Final = 10_000


class Erasing:
    """Erases subjects of one store."""

    def __init__(self, store: Store, sources: Mapping[str, Source], *, is_limited: bool = False) -> None:
        """`is_limited`: there are other sources, which are not to be touched."""
        self._store = store
        self._sources = sources
        self._is_limited = is_limited

    async def count(self, subject: str, source: str | None = None) -> Erasure:
        """What is there to be erased. Nothing happens."""
        return await self._store.erasable(self._order(subject, source))

    async def erase(
        self, subject: str, source: str | None = None, *, actor: str, reason: str, at_most: int = AT_ONCE
    ) -> tuple[Erasure, int]:
        """Erase, and say how many events are left: none, unless there were more than `at_most`.

        What arrives for the subject while it runs is erased too. Asked again, it goes on where it ended.
        """
        order = self._order(subject, source, actor, reason)
        total = Erasure()
        while total.events < at_most:
            batch = await self._store.erase(order, min(BATCH, at_most - total.events))
            total += batch
            if not batch.events:
                break
        await self._store.empty_log()
        if not total.events:  # that somebody looked, and there was nothing, is worth a line too
            said = {"reason": reason, **asdict(total)}
            await self._store.audit(actor, "erase", f"subject {subject_hash(order.subject)}", said)
        return total, (await self._store.erasable(order)).events

    def _order(self, subject: str, source: str | None, actor: str = "", reason: str | None = None) -> EraseOrder:
        query.check_text(subject, "The subject", LONGEST_SUBJECT)
        kept = bounded(subject)
        if not kept:
            raise BadRequest("Whose events? An empty subject means nobody's.")
        if reason is not None:
            _check_reason(reason, subject)
        return EraseOrder(kept, self._number(source), actor, reason or "", query.quoted(kept))

    def _number(self, name: str | None) -> int | None:
        if name is None and self._is_limited:
            raise BadRequest(
                "Say of which source: you may not see all of them.", hint=f"One of: {', '.join(self._sources)}."
            )
        if name is None:
            return None
        if (source := self._sources.get(name)) is None:
            raise NotFound(f'There is no source "{name[:60]}".')
        return source.id


def _check_reason(reason: str, subject: str) -> None:
    query.check_text(reason, "The reason", LONGEST_REASON)
    if not reason.strip():
        raise BadRequest("Say why: a subject is erased only with a reason.")
    if re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", reason):
        raise BadRequest(
            "The reason names the subject, and stays in the audit log.", hint="Name the request by its number instead."
        )


log = logging.getLogger("oncehook.sweep")

Measure = Callable[[], Awaitable[Sequence[Watermark]]]

STRAY_HINT: Final = "Define it again, or start the program that does, as in: oncehook serve module:inbox"
"""What to do when deliveries wait for a destination that nobody knows."""

FEEDING: Final = 0.05
RESTING: Final = 1.0
"""Seconds between two looks for replays to feed: while there are some, and while there are none."""


class UpkeepObserver(Protocol):
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
        observer: UpkeepObserver,
        *,
        keep_events: Mapping[int, float],
        otherwise: float,
        measure: Measure,
        works_for: Collection[str] | None,
        worker: Callable[[], StoredWorker | None],
        write_counts: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._observer = observer
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
        self._observer.sum_up()

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
            await self._store.register_worker(worker)

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
        self._observer.watermarks(marks)
        known: Mapping[str, datetime] = await self._store.crossings()
        for mark in marks:
            if mark.crossed != (mark.name in known) and await self._store.mark_watermark(mark.name, mark.crossed):
                self._observer.watermark(mark)


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
