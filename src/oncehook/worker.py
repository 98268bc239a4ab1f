"""The worker: leases what is due, has its destination make the attempt, and settles what came of it.

Leases and settlements go to the store in groups, and a group gathers while the one before it is under way; nobody waits
for a timer. A worker leases no more than it can start at once. It sleeps until the store says that something became
due, or until the next thing does; on PostgreSQL it also looks once a second, in case a notice was lost.

What was being worked on when a process died is a suspect: it is run alone, with nothing else under way in this worker,
so that an event which kills its process condemns nobody but itself (DESIGN.md 8.3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, Protocol

from oncehook import clock, faults
from oncehook.deliveries import DEATHS, Evidence, Expired, Lease, Outlook, Settle, Settlement, StoredWorker, Turn, Want
from oncehook.destinations.base import Destination, settlement
from oncehook.destinations.handler import failure
from oncehook.errors import LeaseLost, StoreError
from oncehook.heartbeat import BEATS, Heartbeat
from oncehook.model import Engine
from oncehook.settling import Settling
from oncehook.store.base import Store

log = logging.getLogger("oncehook.worker")

POLL: Final = 1.0
"""Seconds between two looks where other processes share the store: a notice may be lost, and suspects must be seen."""

LONGEST_REST: Final = 30.0

REPLAYING: Final = 2.0
"""Seconds for which some room is kept for bulk replays after one was seen."""

HELD_SURELY: Final = 1 - 1 / BEATS
"""The part of a lease after which it may soon be somebody else's, if it was not renewed."""

GRACE: Final = 2.0
"""Seconds that a coroutine gets to end after it was cancelled, before its lease is left to run out."""


class Witness(Protocol):
    """Who is told what happened, for logs and metrics. `observe` has the real one."""

    def attempted(self, destination: Destination, settled: Settlement) -> None:
        """A delivery was settled."""

    def lease_lost(self, destination: Destination, lease: Lease) -> None:
        """What was worked on is no longer ours; nothing was written."""

    def lease_expired(self, destination: Destination, expired: Expired) -> None:
        """Somebody let a lease run out, and this worker has taken it over."""


class _Place:
    """One destination in this worker: how much of it is under way, and how much may begin."""

    __slots__ = ("_allowance", "_at", "busy", "destination")

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.busy = 0
        self._allowance = 1.0
        self._at = clock.steady()

    def room(self, most: int) -> int:
        """How many attempts may begin now: by its concurrency, by its rate, by what the worker has left."""
        room = min(self.destination.terms.concurrency - self.busy, most)
        return max(min(room, self._allowed()), 0)

    def _allowed(self) -> int:
        rate = self.destination.terms.rate
        if rate is None:
            return self.destination.terms.concurrency
        now = clock.steady()
        # What was not used is kept for a second at most, so that a pause is not followed by a burst.
        self._allowance = min(self._allowance + (now - self._at) * rate, max(rate, 1.0))
        self._at = now
        return int(self._allowance)

    def take(self) -> None:
        self.busy += 1
        self._allowance -= 1.0

    def give_back(self) -> None:
        self.busy -= 1

    def allowed_in(self) -> float | None:
        """Seconds until its rate allows another one; None: it does now, or has none."""
        rate = self.destination.terms.rate
        if rate is None or self._allowed() >= 1:
            return None
        return (1.0 - self._allowance) / rate


class Worker:
    """Works for some destinations until it is told to stop. Lives on one event loop."""

    def __init__(
        self, store: Store, destinations: Iterable[Destination], witness: Witness, *, concurrency: int = 1000
    ) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{clock.random_bytes(3).hex()}"
        self._store = store
        self._witness = witness
        self._places = {d.number: _Place(d) for d in destinations}
        self._concurrency = concurrency
        self._attempts: dict[int, asyncio.Task[None]] = {}
        """Under way, by fence."""
        self._late_at: dict[int, float] = {}
        """When each should have ended: what goes on beyond that hangs, and nobody waits for it."""
        self._on_threads: set[int] = set()
        """Those of them that cannot be ended, by fence."""
        self.left_behind = 0
        """Threads that were still at work when it stopped: the process must end before anybody else may begin."""
        self._failed: set[int] = set()
        """Ended badly and not settled yet, by fence: they keep their places, so that a breaker opens in time."""
        self._settling = Settling(store, self)
        self._woken = asyncio.Event()
        self._stopping = False
        self._main: asyncio.Task[None] | None = None
        self._first = 0
        self._replaying_until = 0.0
        self._looked_at = 0.0
        self._alone_after = 0.0
        """Not before this moment is the next suspect run: other work gets as much time as the last one took."""
        # By chance: a process that is killed by a suspect must not begin with the same destination for ever.
        self._next_alone = clock.chance.randrange(max(len(self._places), 1))
        shortest = min((p.destination.terms.lease for p in self._places.values()), default=10.0)
        self.heartbeat = Heartbeat(store, self._lost_by_thread, shortest)

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self) -> None:
        """Begin to work, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._store.expired = self._taken_over
        for place in self._places.values():
            await place.destination.open()
        self.heartbeat.start()
        self._settling.start()
        self._main = asyncio.create_task(self._work(), name="oncehook-worker")

    def quiesce(self) -> None:
        """Take no more work."""
        self._stopping = True
        self._woken.set()

    async def stop(self, patience: float = 25.0) -> None:
        """Take no more work, let what is under way end within `patience` seconds, and give back the rest uncounted."""
        self.quiesce()
        if self._main is not None:
            with suppress(asyncio.CancelledError):
                await self._main
        await self._finish(patience)
        await self._settling.stop()
        await asyncio.to_thread(self.heartbeat.stop)
        for place in self._places.values():
            await place.destination.close()

    async def _finish(self, patience: float) -> None:
        if self._attempts:
            await asyncio.wait(self._attempts.values(), timeout=patience)
        late = [task for fence, task in self._attempts.items() if fence not in self._on_threads]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=GRACE)
        # A thread cannot be ended. Its lease is not given back, or somebody would begin beside it: it runs out with
        # the process, and that is no attempt (DESIGN.md 8.16).
        self.left_behind = len(self._attempts)

    def wake(self) -> None:
        """Something may have become due."""
        self._woken.set()

    @property
    def destinations(self) -> Sequence[str]:
        """Whom it works for."""
        return [place.destination.name for place in self._places.values()]

    def as_stored(self, since: datetime) -> StoredWorker:
        """Who it is, for those that ask which workers there are."""
        host, pid, _ = self.id.rsplit(":", 2)
        return StoredWorker(self.id, host, int(pid), since, since, len(self.heartbeat), self.destinations)

    async def drained(self) -> None:
        """Return when nothing is left to do for its destinations, retries included; what is paused does not count."""
        while self._main is not None and not self._main.done():
            if not self._attempts and self._settling.is_empty():
                outlook = await self._outlook(self._places)
                if outlook.due_in is None and not outlook.suspects and not self._attempts:
                    return
                await asyncio.sleep(min(max(outlook.due_in or 0.0, 0.005), 0.2))
            else:
                await asyncio.sleep(0.005)

    # -- the loop ------------------------------------------------------------------------------

    async def _work(self) -> None:
        trouble = 0
        while not self._stopping:
            try:
                if trouble:  # what our threads still work on may have lapsed: keep it, or we take it over ourselves
                    await asyncio.to_thread(self.heartbeat.beat)
                rest = await self._round()
                trouble = 0
            except StoreError as error:
                trouble += 1
                if trouble == 1:
                    log.warning("worker.store_unavailable", extra={"fields": {"error": str(error)}})
                rest = min(0.05 * 2**trouble, 2.0) * clock.chance.uniform(0.5, 1.0)
            except Exception:  # whatever it is, the work must go on
                log.exception("worker.failed")
                rest = 1.0
            if rest > 0 and not self._stopping:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._woken.wait()

    async def _round(self) -> float:
        """Take what there is and room for; returns how long to rest, unless woken."""
        self._woken.clear()
        ready = self._ready()
        wants = self._wants()
        if wants and await self._take(wants):
            await self._look_for_suspects()
            return 0.0
        if self._stopping:
            return 0.0
        # Also for those that were not asked because others took the room: it is their turn in a moment.
        outlook = await self._look_for_suspects(ready if wants else ())
        if wants and outlook is not None and outlook.due_in == 0 and await self._replay(wants):
            return 0.0
        if not self._ready() <= ready:
            return 0.0  # a rate has come to allow more since we asked, and no timer would tell
        return self._rest(outlook, has_room=bool(wants))

    def _ready(self) -> set[int]:
        """The destinations that may begin something, as far as they are concerned."""
        return {number for number, place in self._places.items() if place.room(1)}

    def _rest(self, outlook: Outlook | None, *, has_room: bool) -> float:
        rest = POLL if self._store.engine is Engine.postgres else LONGEST_REST
        waits = [wait for place in self._places.values() if (wait := place.allowed_in()) is not None]
        if has_room and outlook is not None and outlook.due_in is not None:
            waits.append(max(outlook.due_in, 0.002))
        if outlook is not None and outlook.suspects:
            waits.append(max(self._alone_after - clock.steady(), 0.002))
        return min([rest, *waits])

    def _wants(self) -> list[Want]:
        left = self._concurrency - len(self._attempts)
        if left <= 0 or self._settling.is_behind():
            return []
        wants = []
        for place in self._in_turn():
            room = place.room(left)
            if room > 0:
                wants += self._split(place.destination, room)
                left -= room
        return wants

    def _in_turn(self) -> list[_Place]:
        """All places, beginning with another one each time: none may take all the room there is for ever."""
        places = list(self._places.values())
        self._first = (self._first + 1) % len(places)
        return places[self._first :] + places[: self._first]

    def _split(self, destination: Destination, room: int) -> list[Want]:
        """Live work gets the room; while bulk replays run, they get a tenth of it, so that neither starves."""
        if not self._replaying() or room == 1:
            return [_want(destination, room, Turn.live)]
        kept = max(room // 10, 1)
        return [_want(destination, room - kept, Turn.live), _want(destination, kept, Turn.replay)]

    def _replaying(self) -> bool:
        return clock.steady() < self._replaying_until

    async def _take(self, wants: Sequence[Want]) -> int:
        leased = await self._lease(wants)
        if self._replaying() and not self._stopping:
            return len(leased) + await self._replay(wants, leased)
        return len(leased)

    async def _replay(self, wants: Sequence[Want], leased: Sequence[Lease] = ()) -> int:
        """What live work leaves free is for bulk replays."""
        room = Counter[int]()
        for want in wants:
            room[want.destination_id] += want.limit
        room.subtract(lease.destination_id for lease in leased)
        spare = [_want(self._places[n].destination, left, Turn.replay) for n, left in room.items() if left > 0]
        return len(await self._lease(spare)) if spare else 0

    async def _lease(self, wants: Sequence[Want]) -> list[Lease]:
        asked_at = clock.steady()
        leases = await self._store.lease(wants, self.id) if wants else []
        if leases:
            faults.point("after_lease")
        for lease in leases:
            if lease.turn is Turn.replay:
                self._replaying_until = asked_at + REPLAYING
            if clock.steady() < asked_at + lease.seconds * HELD_SURELY:
                self._begin(lease, asked_at)
            else:  # this process slept: what may be somebody else's by now is not begun (R33)
                self._settling.add(Settlement(lease, Settle.release))
        return leases

    # -- suspects ------------------------------------------------------------------------------

    async def _look_for_suspects(self, wanted: Collection[int] = ()) -> Outlook | None:
        """Now for these destinations, which have room; once a second for all, also while there is much to do."""
        moment = clock.steady()
        is_time = moment - self._looked_at >= POLL
        if not wanted and not is_time:
            return None
        if is_time:
            self._looked_at = moment
        # Not for those without room: their backlog is due all the time, and nobody would ever rest.
        outlook = await self._outlook(self._places if is_time else wanted)
        if outlook.suspects and moment >= self._alone_after:
            await self._run_alone()
        if not wanted and self._concurrency > len(self._attempts):
            # While live work never ends, a bulk replay would not be noticed otherwise.
            await self._lease([_want(p.destination, 1, Turn.replay) for p in self._places.values() if p.room(1)])
        return outlook

    async def _outlook(self, destinations: Iterable[int]) -> Outlook:
        return await self._store.outlook(list(destinations))

    async def _run_alone(self) -> None:
        await self._quiet()
        if self._stopping:
            return
        started = clock.steady()
        places = list(self._places.values())
        for step in range(self._next_alone, self._next_alone + len(places)):
            place = places[step % len(places)]
            if await self._lease([_want(place.destination, 1, Turn.suspect)]):
                self._next_alone = (step + 1) % len(places)  # a destination full of suspects must not starve the others
                await self._quiet()
                break
        self._alone_after = clock.steady() + (clock.steady() - started)

    async def _quiet(self) -> None:
        """Until nothing is under way and all that ended is written down, or a crash would be held against it."""
        while (under_way := self._in_time()) and not self._stopping:
            await asyncio.wait(under_way, timeout=0.5)
        await self._settling.caught_up()

    def _in_time(self) -> list[asyncio.Task[None]]:
        """What is under way and does not hang."""
        now = clock.steady()
        return [task for fence, task in self._attempts.items() if now < self._late_at[fence]]

    # -- an attempt ----------------------------------------------------------------------------

    def _begin(self, lease: Lease, asked_at: float) -> None:
        place = self._places[lease.destination_id]
        place.take()
        late_at = self._late_at[lease.fence] = asked_at + place.destination.terms.timeout + GRACE
        ends_by_itself = _ends_by_itself(place.destination)
        if not ends_by_itself:
            self._on_threads.add(lease.fence)
        self.heartbeat.hold(lease, asked_at, late_at if ends_by_itself else None)
        self._attempts[lease.fence] = self._loop.create_task(self._attempt(place, lease))

    async def _attempt(self, place: _Place, lease: Lease) -> None:
        destination = place.destination
        started = clock.perf()
        try:
            settled = _without_attempt(lease)
            if settled is None:
                result = await destination.attempt(lease)
                if result.settled:
                    self.settled(Settlement(lease, Settle.done, duration=clock.perf() - started))
                    return
                settled = settlement(destination.terms, lease, result, clock.perf() - started)
                if result.category is not None:
                    self._failed.add(lease.fence)
            self._settling.add(settled)
        except asyncio.CancelledError:
            # Stopped, or the lease was lost: given back uncounted (R37); refused if it is no longer ours.
            self._settling.add(Settlement(lease, Settle.release))
        except LeaseLost:
            self.lost(lease)
        except Exception as error:  # a destination that raised after all
            log.exception("attempt.failed")
            self._settling.add(settlement(destination.terms, lease, failure(error), clock.perf() - started))
        finally:
            del self._attempts[lease.fence], self._late_at[lease.fence]
            self._on_threads.discard(lease.fence)
            if lease.fence not in self._failed:
                place.give_back()
            self._woken.set()

    # -- after an attempt ----------------------------------------------------------------------

    def settled(self, done: Settlement) -> None:
        """It is written down."""
        self._let_go(done.lease)
        if done.what is not Settle.release:
            self._witness.attempted(self._places[done.lease.destination_id].destination, done)

    def lost(self, lease: Lease) -> None:
        """It belongs to somebody else by now, and nothing was changed."""
        self._let_go(lease)
        self._witness.lease_lost(self._places[lease.destination_id].destination, lease)

    def _taken_over(self, expired: Expired) -> None:
        self._witness.lease_expired(self._places[expired.destination_id].destination, expired)

    def _let_go(self, lease: Lease) -> None:
        self.heartbeat.let_go(lease)
        if lease.fence in self._failed:
            self._failed.discard(lease.fence)
            self._places[lease.destination_id].give_back()
            self._woken.set()

    def destination_of(self, lease: Lease) -> Destination:
        """Whom a lease is for."""
        return self._places[lease.destination_id].destination

    def _lost_by_thread(self, lease: Lease) -> None:
        """The heartbeat says that a lease is lost, or may be in a moment: what works on it must stop (R33)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, lease)

    def _cancel(self, lease: Lease) -> None:
        task = self._attempts.get(lease.fence)
        # A thread goes on whatever we do. To give its lease back now would have somebody begin beside it (DESIGN.md
        # 8.16); what it comes to is settled when it ends, and refused if the lease is somebody else's by then.
        if task is not None and lease.fence not in self._on_threads:
            task.cancel()


def _want(destination: Destination, limit: int, turn: Turn) -> Want:
    terms = destination.terms
    return Want(destination.number, limit, terms.lease, turn, destination.trust, terms.breaker.open)


def _ends_by_itself(destination: Destination) -> bool:
    """A thread cannot be ended: its lease is kept until it ends (DESIGN.md 8.16)."""
    return getattr(destination, "is_cancellable", True)


def _without_attempt(lease: Lease) -> Settlement | None:
    """What is settled without being tried: overtaken by a higher rank, or deadly."""
    if lease.deaths >= DEATHS:
        return Settlement(lease, Settle.dead, evidence=Evidence(error="crash"))
    if lease.is_stale:
        return Settlement(lease, Settle.done, note="stale")
    return None
