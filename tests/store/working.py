"""A worker on a store, and a destination whose attempts begin and end as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from oncehook import clock
from oncehook.destinations.base import WELL, Destination, Result, Terms
from oncehook.model import BreakerChange, Category, Expired, Lease, Settlement
from oncehook.store.base import Store
from oncehook.worker import Worker
from tests.waiting import until

AGAIN = Result(Category.transient, wait=0.0)
DIES = Result(Category.permanent)
FOREVER = 3600.0


class Scripted:
    """A destination that notes what begins, and ends it when it is told to."""

    kind, address = "handler", "tests"

    def __init__(self, name: str = "crm", number: int = 1, *, crash_tolerance: int = 0, **terms: object) -> None:
        self.name = name
        self.id = number
        self.terms = Terms(**{"lease": FOREVER, "timeout": FOREVER, **terms})  # type: ignore[arg-type]
        self.crash_tolerance = crash_tolerance
        self.begun: list[Lease] = []
        """All that ever began, in order."""
        self.running: dict[bytes, asyncio.Future[Result]] = {}
        """What is under way and has not been told to end."""
        self.most = 0
        """Attempts that were under way at once."""
        self._under_way = 0
        self.answers: Callable[[Lease], Result] | None = None
        """Ends each attempt by itself; None: each waits for `end`."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def attempt(self, lease: Lease) -> Result:
        self.begun.append(lease)
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        try:
            if self.answers is not None:
                await asyncio.sleep(0)
                return self.answers(lease)
            ends: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
            self.running[lease.delivery.id] = ends
            return await ends
        finally:
            self.running.pop(lease.delivery.id, None)
            self._under_way -= 1

    def end(self, *deliveries: bytes, result: Result = WELL) -> None:
        """End these attempts."""
        for one in deliveries:
            self.running.pop(one).set_result(result)

    def end_all(self, result: Result = WELL) -> None:
        """End what is under way, and whatever comes after it."""
        self.answers = lambda lease: result
        self.end(*self.running, result=result)

    @property
    def order(self) -> list[bytes]:
        return [lease.delivery.id for lease in self.begun]

    async def until_begun(self, *deliveries: bytes) -> None:
        """Wait until these are under way."""
        await until(lambda: all(one in self.running for one in deliveries))


class Noted:
    """A witness that keeps what it was told."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []
        self.lost: list[Lease] = []
        self.expired: list[Expired] = []
        self.breakers: list[BreakerChange] = []

    def note_attempt(self, destination: Destination, settled: Settlement) -> None:
        self.settled.append(settled)

    def lease_lost(self, destination: Destination, lease: Lease) -> None:
        self.lost.append(lease)

    def lease_expired(self, destination: Destination, expired: Expired) -> None:
        self.expired.append(expired)

    def breaker(self, destination: Destination, change: BreakerChange) -> None:
        self.breakers.append(change)


@asynccontextmanager
async def working(
    store: Store, *destinations: Scripted, concurrency: int = 1000, observer: Noted | None = None
) -> AsyncIterator[Worker]:
    """A worker for these destinations on this store; when it is left, it stops."""
    worker = Worker(store, destinations, observer or Noted(), concurrency=concurrency)
    store.observer.wake, store.observer.taker = worker.wake, worker  # type: ignore[method-assign]
    store.observer.note_expired = worker.note_expired  # type: ignore[method-assign]
    store.observer.note_breaker = worker.note_breaker  # type: ignore[method-assign]
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(0.0)
        store.observer.taker = None


async def is_idle(worker: Worker) -> None:
    """Wait until a worker has looked at everything it was told of and rests, with nothing on its way to the store."""
    rounds = 0
    while rounds < 3:
        await asyncio.sleep(0.01)
        waits = worker._woken._waiters and not worker._woken.is_set()  # and not for an answer of the store
        rests = waits and not worker._reserved and worker._settling.is_empty()
        rounds = rounds + 1 if rests and clock.steady() < worker._look_at else 0
