"""Settling: what became of attempts is written down in groups; what ends while one is written is the next one.

The worker adds; the store answers which leases were still ours; the worker is told. A settlement with an effect or
events of its own goes alone, so that it can fail alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from oncehook import clock
from oncehook.deliveries import Lease, Settlement
from oncehook.destinations.base import Destination, settlement
from oncehook.destinations.handler import failure
from oncehook.errors import StoreUnavailable
from oncehook.store.base import Store

log = logging.getLogger("oncehook.worker")


class Holder(Protocol):
    """Who holds the leases."""

    def settled(self, done: Settlement) -> None:
        """It is written down."""

    def lost(self, lease: Lease) -> None:
        """It belongs to somebody else by now, and nothing was changed."""

    def destination_of(self, lease: Lease) -> Destination:
        """Whom a lease is for."""


class Settling:
    """The line of attempts that have ended and are not settled yet."""

    def __init__(self, store: Store, worker: Holder) -> None:
        self._store = store
        self._worker = worker
        self._ended: list[Settlement] = []
        self._under_way = 0
        self._wanted = asyncio.Event()
        self._turn_over = asyncio.Event()
        """Set when a group is written."""
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin, on the running loop."""
        self._task = asyncio.create_task(self._settle_until_stopped(), name="oncehook-settling")

    async def stop(self) -> None:
        """Settle what is there, and end."""
        self._stopping = True
        self._wanted.set()
        if self._task is not None:
            await self._task

    def add(self, ended: Settlement) -> None:
        """An attempt has ended so."""
        self._ended.append(ended)
        self._wanted.set()

    def is_empty(self) -> bool:
        """Whether everything is written down."""
        return not self._ended and not self._under_way

    async def caught_up(self) -> None:
        """Return when everything that has ended so far is written down."""
        while not self.is_empty() and self._task is not None and not self._task.done():
            self._turn_over.clear()
            await self._turn_over.wait()

    def is_behind(self) -> bool:
        """More has ended than the store takes: begin nothing new."""
        return len(self._ended) + self._under_way > 1000

    async def _settle_until_stopped(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._ended:
                await self._settle_all()
            if self._stopping:
                return

    async def _settle_all(self) -> None:
        ended, self._ended = self._ended, []
        self._under_way = len(ended)
        plain = [s for s in ended if not _may_fail(s)]
        try:
            # Those with an effect of their own can fail by themselves; on SQLite all join the same commit.
            await asyncio.gather(self._settle(plain), *(self._settle([s]) for s in ended if _may_fail(s)))
        finally:
            self._under_way = 0
            self._turn_over.set()

    async def _settle(self, group: list[Settlement]) -> None:
        if not group:
            return
        try:
            ours = await self._persist(group)
        except StoreUnavailable as error:
            log.error("worker.settle_failed", extra={"fields": {"leases": len(group), "error": str(error)}})
            for settled in group:  # their leases run out, and somebody makes the attempts again
                self._worker.lost(settled.lease)
            return
        except Exception as error:
            self._failed(group, error)
            return
        for settled in group:
            if settled.lease.fence in ours:
                self._worker.settled(settled)
                for emission in settled.emits:
                    emission.committed()
            else:
                self._worker.lost(settled.lease)

    async def _persist(self, group: list[Settlement]) -> set[int]:
        """Ask again while the store is away, for as long as the leases can still be ours: they are kept alive."""
        wait, ends_at = 0.05, clock.steady() + max(s.lease.seconds for s in group)
        while True:
            try:
                return await self._store.settle(group)
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
            self.add(settlement(terms, settled.lease, failure(error), settled.duration))


def _may_fail(settled: Settlement) -> bool:
    """Whether it brings something of its handler's own."""
    return settled.commit is not None or bool(settled.emits)
