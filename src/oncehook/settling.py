"""Settling: what became of attempts is written down in groups; what ends while one is written is the next one.

The worker adds; the store answers which leases were still ours; the worker is told. A settlement with an effect or
events of its own goes alone, so that it can fail alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from oncehook import clock
from oncehook.deliveries import Lease, Settled, Settlement
from oncehook.destinations.base import Destination, settlement
from oncehook.destinations.handler import failure
from oncehook.errors import StoreUnavailable
from oncehook.store.base import Store

log = logging.getLogger("oncehook.worker")


class Holder(Protocol):
    """The worker, as its settlements see it."""

    id: str

    def settled(self, done: Settlement, following: Lease | None = None, asked_at: float = 0.0) -> None:
        """Handle a committed settlement; `following`: the next of its subject, leased with it, asked for then."""

    def lost(self, lease: Lease) -> None:
        """Handle a lease that was lost; nothing was changed."""

    def unsettled(self) -> int:
        """Return how many attempts are under way, or have ended and keep their place."""

    def destination_of(self, lease: Lease) -> Destination:
        """Return the destination of a lease."""


GROUPS: Final = 2
"""Groups under way at once: a subject that goes on must not wait for the others' commit."""


TURNS: Final = 8
"""Turns of the loop for which subjects that go on wait for each other, to share a commit: short when little happens."""


class Settling:
    """Attempts that have ended and are not settled yet."""

    def __init__(self, store: Store, worker: Holder) -> None:
        self._store = store
        self._worker = worker
        self._ended: list[Settlement] = []
        self._under_way = 0
        """Settlements that are being written."""
        self._groups = 0
        self._tasks: set[asyncio.Task[None]] = set()
        """Held, or they could be collected while they run."""
        self._turn_over = asyncio.Event()
        """Set when a group is written."""
        self._is_planned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Settle what is there, and end."""
        self._stopping = True
        await self.caught_up()

    def add(self, ended: Settlement) -> None:
        """Add a settlement to the next group."""
        self._ended.append(ended)
        self._plan()

    def is_empty(self) -> bool:
        """Tell whether everything is settled."""
        return not self._ended and not self._under_way

    async def caught_up(self) -> None:
        """Return when everything that has ended so far is written down."""
        while not self.is_empty() and self._loop is not None:
            self._turn_over.clear()
            await self._turn_over.wait()

    def is_behind(self) -> bool:
        """Tell whether so much is unsettled that nothing new may begin."""
        return len(self._ended) + self._under_way > 1000

    def _plan(self) -> None:
        """Begin soon, and not at once: whatever else ends in this turn of the loop belongs to the same group."""
        if not self._is_planned and self._loop is not None:
            self._is_planned = True
            self._loop.call_soon(self._gather, TURNS)

    def _gather(self, turns: int) -> None:
        """Begin the next group; where all of it are subjects that go on, others may join for so many turns."""
        assert self._loop is not None
        is_short = 0 < len(self._ended) < self._worker.unsettled()
        if turns and is_short and all(one.take_next is not None for one in self._ended):
            self._loop.call_soon(self._gather, turns - 1)
        else:
            self._begin()

    def _begin(self) -> None:
        """Begin the next group; beside another one only if as many wait as that holds: a commit has its price."""
        self._is_planned = False
        if self._ended and self._groups < GROUPS and len(self._ended) >= self._under_way:
            assert self._loop is not None
            group, self._ended = self._ended, []
            self._under_way += len(group)
            self._groups += 1
            task = self._loop.create_task(self._settle_all(group), name="oncehook-settling")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _settle_all(self, ended: list[Settlement]) -> None:
        single = [s for s in ended if _may_fail(s)]
        plain = [s for s in ended if not _may_fail(s)] if single else ended
        try:
            if single:
                # Those with an effect of their own can fail by themselves; on SQLite all join the same commit.
                await asyncio.gather(self._settle(plain), *(self._settle([s]) for s in single))
            else:
                await self._settle(plain)
        finally:
            self._under_way -= len(ended)
            self._groups -= 1
            self._turn_over.set()
            self._plan()

    async def _settle(self, group: list[Settlement]) -> None:
        if not group:
            return
        asked_at = clock.steady()
        try:
            settled = await self._persist(group)
        except StoreUnavailable as error:
            log.error("worker.settle_failed", extra={"fields": {"leases": len(group), "error": str(error)}})
            for one in group:  # their leases run out, and somebody makes the attempts again
                self._worker.lost(one.lease)
            return
        except Exception as error:
            self._failed(group, error)
            return
        following = {lease.line: lease for lease in settled.next}
        for one in group:
            if one.lease.fence in settled.ours:
                self._worker.settled(one, following.get(one.lease.line), asked_at)
                for emission in one.emits:
                    emission.committed()
            else:
                self._worker.lost(one.lease)

    async def _persist(self, group: list[Settlement]) -> Settled:
        """Ask again while the store is away, for as long as the leases can still be ours: they are kept alive."""
        wait, ends_at = 0.05, clock.steady() + max(s.lease.seconds for s in group)
        while True:
            try:
                return await self._store.settle(group, self._worker.id)
            except StoreUnavailable:
                if clock.steady() + wait > ends_at or self._stopping:
                    raise
                await asyncio.sleep(wait)
                wait = min(wait * 2, 1.0)

    def _failed(self, group: list[Settlement], error: Exception) -> None:
        """What a handler wanted written could not be: it is undone, and the attempt has failed like any other."""
        for settled in group:
            if not _may_fail(settled):
                log.error("worker.settle_failed", exc_info=error)
                self._worker.lost(settled.lease)
                continue
            terms = self._worker.destination_of(settled.lease).terms
            self.add(settlement(terms, settled.lease, failure(error, terms.rules), settled.duration))


def _may_fail(settled: Settlement) -> bool:
    """Tell whether it carries an effect or events of its handler."""
    return settled.commit is not None or bool(settled.emits)
