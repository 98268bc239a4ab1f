"""The worker: lease what is due, have its destination make the attempt, settle the outcome.

Leases and settlements go to the store in groups; a group gathers while the one before is under way. A worker leases no
more than it can start at once. The store reports destinations with something due; the worker itself asks again when the
next known delivery is due, and on a shared store once a second, in case a notification was lost. The settlement of a
delivery leases the next one of its subject, for a limited time: then the subject makes room for others.

A delivery that was under way when a process died is quarantined: it runs alone in its worker, so that an event that
kills its process counts against no other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Final, Protocol

from oncehook import clock, faults
from oncehook.bodies import Bodies
from oncehook.destinations.base import Destination, Result, Terms, settlement
from oncehook.destinations.handler import failure
from oncehook.errors import BodyMissing, LeaseLost, ObjectsUnavailable, StoreError, StoreUnavailable, Undecryptable
from oncehook.logs import ration
from oncehook.model import (
    DEATHS,
    Allowance,
    BreakerChange,
    Category,
    Evidence,
    Expired,
    Lease,
    LeaseRequest,
    LimitRequest,
    Priority,
    Settle,
    Settled,
    Settlement,
    StoredWorker,
)
from oncehook.store.base import AHEAD, Store

log = logging.getLogger("oncehook.worker")

LOOKED_AT: Final = 500
"""Destinations that one look asks about, in turn; of the others it learns only what became due since the last one."""
FEW: Final = 4
"""With fewer leases than this, wake-ups gather before the next request."""
LOWER_SHARE: Final = 10
"""One of so many deliveries is of a lower priority, while there is work of a higher one."""
ACCOUNT_SHARE: Final = 4
"""While a worker is more than half full, one account has at most one of so many slots, so that an account whose
destinations hang does not hold up the others."""
OLDEST_SHARE: Final = 10
"""One of so many requests for a destination that is leased in rounds goes by due time, for what has no value."""
MOST_UNSETTLED: Final = 1000
"""Ended attempts that may wait for their settlement before no new ones begin."""
ATTENDED: Final = (Priority.high, Priority.live, Priority.low, Priority.replay)
"""Priorities of what runs beside others, the first first."""
THE_PAST: Final = datetime(2000, 1, 1, tzinfo=UTC)
MOST_LOADED: Final = 2000
"""Destinations that were loaded from the store and are kept open; one that is idle makes way for another."""


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Times of a worker, in seconds."""

    poll: float = 1.0
    """Between two looks where other processes share the store: a notification may be lost, and quarantine must be
    noticed."""
    longest_rest: float = 30.0
    """Between two looks otherwise."""
    look_pause: float = 0.1
    """Between two looks after a lease brought less than was requested."""
    gather: float = 0.002
    """Time in which wake-ups gather after a lease brought little."""
    renew_places: float = 1.0
    """Between two renewals of places that are shared with other workers, at most."""
    limit_pause: float = 0.1
    """Between two requests for places that others hold; doubled each time, up to `longest_limit_pause`."""
    longest_limit_pause: float = 0.5
    """At most that: what a dead worker held is taken over within a second of its lease's end (R29)."""
    subject_share: float = 0.1
    """Time for which one subject is worked on while others of its destination wait."""
    grace: float = 2.0
    """Time for a cancelled coroutine to end, before its lease is left to expire."""
    idle: float = 120.0
    """After which a destination that was loaded from the store may make way for another."""
    unknown: float = 5.0
    """Before a destination that nobody here knows is looked for again."""
    beats: int = 6
    """Heartbeats in one lease; it is given up one beat before its end, because another worker may take it then."""

    @property
    def safe_part(self) -> float:
        """Part of a lease for which it is surely ours without a renewal."""
        return 1 - 1 / self.beats


TIMEOUTS: Final = WorkerTimeouts()


class AttemptObserver(Protocol):
    """Observer of attempts, for logs and metrics."""

    def note_attempt(self, destination: Destination, settled: Settlement) -> None: ...

    def lease_lost(self, destination: Destination, lease: Lease) -> None: ...

    def lease_expired(self, destination: Destination, expired: Expired) -> None: ...

    def breaker(self, destination: Destination, change: BreakerChange) -> None: ...


Load = Callable[[Collection[int]], Awaitable[dict[int, Destination]]]
"""A function that returns those of these destinations, by id, that are stored."""


class Worker:
    """A worker for some destinations, on one event loop."""

    def __init__(
        self,
        store: Store,
        destinations: Iterable[Destination],
        observer: AttemptObserver,
        *,
        concurrency: int = 1000,
        priorities: Mapping[int, Collection[Priority]] | None = None,
        timeouts: WorkerTimeouts = TIMEOUTS,
        heartbeat: type[Heartbeat] | None = None,
        load: Load | None = None,
        bodies: Bodies | None = None,
    ) -> None:
        """`priorities`: those that routes give, by destination; others are noticed when they are due. `load`: finds
        destinations that are stored while it works; None: there are none."""
        self.id = f"{socket.gethostname()}:{os.getpid()}:{clock.random_bytes(3).hex()}"
        self._store = store
        self._bodies = bodies or Bodies(lambda: store, None)
        self._observer = observer
        self._timeouts = timeouts
        self._slots = {d.id: _make_slots(d, timeouts) for d in destinations}
        for number, found in (priorities or {}).items():
            if number in self._slots:
                self._slots[number].priorities.update(found)
        self._limited = [slots for slots in self._slots.values() if isinstance(slots, LimitedSlots)]
        self._load = load
        self._loaded: dict[int, None] = {}
        """Destinations that were loaded, the longest unused first."""
        self._missing: dict[int, None] = {}
        """Destinations that may have something due and are to be loaded, or to be loaded anew."""
        self._loading: set[int] = set()
        """Destinations that are being loaded: what is known of them may be out of date."""
        self._nobody: dict[int, float] = {}
        """Destinations that were not found, and the time from which on to look again."""
        self._gone: dict[int, DestinationSlots] = {}
        """Destinations that were let go, the latest ones: attempts may be under way."""
        self._closing: set[asyncio.Task[None]] = set()
        self._concurrency = concurrency
        self._attempts: dict[int, RunningAttempt] = {}  # by fence
        self.left_behind = 0
        """Threads that still ran when it stopped: the process must end before another worker may begin."""
        self._kept: dict[int, RunningAttempt] = {}
        """Ended attempts that keep their slot until they are settled, by fence: failed ones, so that a breaker opens in
        time, and those whose slot goes to the next of the subject."""
        self._settling = SettlementBatcher(store, self)
        self._woken = asyncio.Event()
        self._stopping = False
        self._main: asyncio.Task[None] | None = None
        self._due: dict[Priority, dict[int, None]] = {priority: {} for priority in ATTENDED}
        """Destinations that may have something due, by priority, the longest waiting first."""
        self._reserved = 0
        """Slots reserved for lease requests under way, and for arrivals on their way to the store."""
        self._is_alone = False
        """True while a quarantined delivery runs, or is about to: nothing else may begin."""
        self._quarantined: set[int] = set()
        """Destinations with quarantined deliveries."""
        self._rounds = 0
        self._looked_at = -timeouts.longest_rest
        self._look_at = 0.0
        """Time of the next look, at the latest."""
        self._order = list(self._slots)
        self._since: datetime | None = THE_PAST if len(self._slots) > LOOKED_AT or load is not None else None
        """Time up to which it is known what has become due, where it cannot be asked for each destination."""
        self._gathers_until = 0.0
        # In random order: a process that a quarantined delivery kills must not begin with the same one for ever.
        self._last_alone = clock.chance.choice([0, *self._slots])
        self._alone_after = 0.0
        """Earliest time of the next quarantined delivery: other work gets as much time as the last one took."""
        shortest = min((slots.destination.terms.lease for slots in self._slots.values()), default=Terms().lease)
        self.heartbeat = (heartbeat or Heartbeat)(
            store, self._stop_lost, shortest, timeouts.beats, self.id if self._limited else None
        )

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for slots in self._slots.values():
            await slots.destination.open()
        self.heartbeat.start()
        self._settling.start()
        self._main = asyncio.create_task(self._work(), name="oncehook-worker")

    def quiesce(self) -> None:
        self._stopping = True
        self._woken.set()

    async def stop(self, patience: float) -> None:
        """Take no more work, let attempts end within `patience` seconds, and release the rest uncounted."""
        self.quiesce()
        if self._main is not None:
            with suppress(asyncio.CancelledError):
                await self._main
        await self._finish(patience)
        for _ in range(100):  # arrivals may be on their way to the store: what is leased with them is released
            if not self._reserved:
                break
            await asyncio.sleep(self._timeouts.grace / 100)
        await self._settling.stop()
        await asyncio.to_thread(self.heartbeat.stop)
        for closing in self._closing:
            closing.cancel()
        for slots in self._slots.values():
            await slots.destination.close()

    async def _finish(self, patience: float) -> None:
        if self._attempts:
            await asyncio.wait([one.task for one in self._attempts.values()], timeout=patience)
        late = [one.task for one in self._attempts.values() if not one.on_thread]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=self._timeouts.grace)
        # A thread cannot be ended. Its lease is not released, because another worker would begin beside it; it expires
        # with the process, and counts as no attempt.
        self.left_behind = len(self._attempts)

    def wake(self, destination_ids: Collection[int] | None = None) -> None:
        """Note that deliveries may have become due for these destinations; None: for any."""
        if destination_ids is None:
            self._look_at = 0.0
        else:
            for number in self._know(destination_ids):
                for priority in self._slots[number].priorities:
                    self._due[priority][number] = None
        self._woken.set()

    def describe(self, since: datetime) -> StoredWorker:
        """Return this worker as the store lists it."""
        host, pid, _ = self.id.rsplit(":", 2)
        names = [slots.destination.name for n, slots in self._slots.items() if n not in self._loaded]
        return StoredWorker(self.id, host, int(pid), since, since, len(self.heartbeat), names)

    async def wait_until_drained(self) -> None:
        """Wait until nothing is left for its destinations, retries included; paused ones do not count."""
        while self._main is not None and not self._main.done():
            if not self._attempts and self._settling.is_empty():
                next_due = await self._store.next_due(self._order, None if self._load is None else THE_PAST)
                due = self._know(set(chain.from_iterable(next_due.due.values())))
                if next_due.due_in is None and not due and not self._missing and not self._attempts:
                    return
                if self._missing:
                    self._woken.set()
                await asyncio.sleep(min(max(next_due.due_in or 0.0, 0.005), 0.2))
            else:
                await asyncio.sleep(0.005)

    # -- rounds --------------------------------------------------------------------------------

    async def _work(self) -> None:
        trouble = 0
        while not self._stopping:
            try:
                # Leases of threads that still run may have lapsed: keep them, or this worker would take them over
                # itself.
                if trouble and not await asyncio.to_thread(self.heartbeat.beat):
                    raise StoreUnavailable("The store does not answer heartbeats.")
                rest = await self._round()
                trouble = 0
            except StoreError as error:
                trouble += 1
                if trouble == 1:
                    log.warning("worker.store_unavailable", extra={"fields": {"error": str(error)}})
                rest = min(0.05 * 2**trouble, 2.0) * clock.chance.uniform(0.5, 1.0)
            except Exception:  # whatever fails, the work must go on
                log.exception("worker.failed")
                rest = 1.0
            if rest > 0 and not self._stopping:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._woken.wait()

    async def _round(self) -> float:
        """Lease what is due and fits; return how long to rest, unless woken."""
        self._woken.clear()
        if clock.steady() >= self._look_at:
            await self._look()
        if self._missing:
            await self._load_missing()
        if self._quarantined and clock.steady() >= self._alone_after:
            self._is_alone = True
            try:
                await self._run_quarantined()
            finally:
                self._is_alone = False
        if self._limited:
            await self._refresh_limits()
        requests = self._build_requests()
        if requests and (pause := self._gathers_until - clock.steady()) > 0:
            await asyncio.sleep(pause)
            requests = self._build_requests()
        if self._stopping:
            return 0.0
        if requests:
            await self._lease_due(requests)
            return 0.0
        return self._rest()

    def _rest(self) -> float:
        now = clock.steady()
        waits = [self._look_at - now]
        if self._quarantined:
            waits.append(max(self._alone_after - now, 0.002))
        waits += [slots.rests(self._is_due(slots), now) for slots in self._limited]
        return max(min(waits), 0.0)

    # -- limits over all workers ---------------------------------------------------------------

    async def _refresh_limits(self) -> None:
        """Ask the store for allowances where work waits for them, or places must be renewed."""
        now = clock.steady()
        wanted = [slots for slots in self._limited if slots.needs(self._is_due(slots), now)]
        if not wanted:
            return
        asked = [slots.build_request(self._is_due(slots)) for slots in wanted]
        for slots, allowance in zip(wanted, await self._store.allow(asked, self.id), strict=True):
            slots.grant(allowance, now)

    def _is_due(self, slots: DestinationSlots) -> bool:
        number = slots.destination.id
        return number in self._quarantined or any(number in due for due in self._due.values())

    # -- what is due ---------------------------------------------------------------------------

    async def _look(self) -> None:
        """Ask the store what is due and when the next delivery is; with many destinations, for some in turn."""
        self._looked_at = clock.steady()
        self._look_at = self._looked_at + self._timeouts.poll
        asked, rest = self._order[:LOOKED_AT], self._order[LOOKED_AT:]
        self._order = rest + asked
        since = self._since
        next_due = await self._store.next_due(asked, since)
        if self._since is since:  # not where `load_by` has begun to ask for more meanwhile
            self._since = next_due.looked_at
        for priority in ATTENDED:
            for number in self._know(next_due.of(priority)):
                self._slots[number].priorities.add(priority)
                self._due[priority][number] = None
        self._quarantined.difference_update(asked)
        self._quarantined.update(self._know(next_due.of(Priority.quarantined)))
        for number in [n for n, again_at in self._nobody.items() if again_at <= self._looked_at][:LOOKED_AT]:
            del self._nobody[number]
            self._missing[number] = None
        if next_due.due_in is not None:
            self._look_in(next_due.due_in)

    # -- destinations that are stored -----------------------------------------------------------

    def _know(self, destination_ids: Iterable[int]) -> list[int]:
        """Return those of these that this worker works for; note the others, to be loaded."""
        if self._load is None:
            return [n for n in destination_ids if n in self._slots]
        known = []
        for number in destination_ids:
            if number in self._slots and number not in self._missing:
                known.append(number)
            elif number not in self._nobody:
                self._missing[number] = None
        return known

    def forget(self, destination_ids: Collection[int] | None) -> None:
        """Load these destinations anew before their next attempt (None: all that were loaded); they have changed."""
        for number in [*self._loaded, *self._nobody, *self._loading] if destination_ids is None else destination_ids:
            if number in self._loaded or number in self._nobody or number in self._loading:
                self._nobody.pop(number, None)
                self._missing[number] = None
        self._woken.set()

    def _has_changed(self, number: int) -> bool:
        """Tell whether a destination is to be loaded anew, or is being loaded, before its next attempt."""
        return number in self._missing or number in self._loading

    def load_by(self, load: Load) -> None:
        """Work for stored destinations, too, from now on: there were none before."""
        if self._load is None:
            self._load, self._since, self._look_at = load, THE_PAST, 0.0
            self._woken.set()

    async def _load_missing(self) -> None:
        assert self._load is not None
        meant = list(self._missing)[:LOOKED_AT]
        for number in meant:  # before the query, so that a change meanwhile is noted again
            del self._missing[number]
        self._loading.update(meant)
        try:
            found = await self._load(meant)
            for number in meant:
                if (made := found.get(number)) is not None and await _try_open(made):
                    self._take_in(made)
                elif number not in self._slots or number in self._loaded:
                    self._nobody[number] = clock.steady() + self._timeouts.unknown
                    self._let_go(number)
        except BaseException:
            self._missing.update(dict.fromkeys(meant))
            raise
        finally:
            self._loading.clear()
        self._make_room()
        self._limited = [slots for slots in self._slots.values() if isinstance(slots, LimitedSlots)]
        if self._limited:
            self.heartbeat.keep_places(self.id)

    def _take_in(self, made: Destination) -> None:
        """Work for a destination that was loaded, or loaded anew."""
        slots = fresh = _make_slots(made, self._timeouts)
        if (known := self._slots.get(made.id)) is not None:
            self._close_later(known.destination)
        else:
            self._order.append(made.id)
            known = self._gone.pop(made.id, None)
        if known is not None and type(known) is type(fresh):
            slots, known.destination, known.used_at = known, made, fresh.used_at
        elif known is not None:  # a limit was added or taken away: what is under way counts on
            fresh.busy, fresh.asked, fresh.priorities = known.busy, known.asked, known.priorities
        self._slots[made.id] = slots
        self._loaded[made.id] = None
        self._due[Priority.live][made.id] = None
        self.heartbeat.expect(made.terms.lease)

    def _make_room(self) -> None:
        """Let go of idle destinations while too many are loaded."""
        old = clock.steady() - self._timeouts.idle
        for number in list(self._loaded)[: max(len(self._loaded) - MOST_LOADED, 0)]:
            if self._slots[number].is_idle_since(old):
                self._let_go(number)
            else:  # look at it again when others have had their turn
                del self._loaded[number]
                self._loaded[number] = None

    def _let_go(self, number: int) -> None:
        """Stop working for a destination; what it has under way ends by itself."""
        self._loaded.pop(number, None)
        if (slots := self._slots.pop(number, None)) is None:
            return
        self._order.remove(number)
        for due in self._due.values():
            due.pop(number, None)
        self._quarantined.discard(number)
        self._gone[number] = slots
        while len(self._gone) > MOST_LOADED:
            self._gone.pop(next(iter(self._gone)))
        self._close_later(slots.destination)

    def _close_later(self, destination: Destination) -> None:
        """Close a destination when its attempts have ended."""

        async def close() -> None:
            await asyncio.sleep(destination.terms.timeout + self._timeouts.grace)
            await destination.close()

        task = self._loop.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _slots_of(self, lease: Lease) -> DestinationSlots:
        """Return the slots that a lease is counted in, also of a destination that was let go since. Not to be kept
        while something is awaited: a change of its limits may replace them."""
        number = lease.delivery.destination_id
        return self._slots.get(number) or self._gone[number]

    # -- lease requests ------------------------------------------------------------------------

    def _look_in(self, seconds: float) -> None:
        look_at = clock.steady() + max(seconds, 0.002)
        if look_at < self._look_at:
            self._look_at = look_at
            self._woken.set()  # it may rest longer than that

    def _build_requests(self) -> list[LeaseRequest]:
        """Return the lease requests for which destinations and this worker have room."""
        left = self._room()
        if left <= 0 or self._settling.is_behind():
            return []
        self._rounds += 1
        requests: list[LeaseRequest] = []
        planned: Counter[str] = Counter()
        held: Counter[str] | None = None
        for number in dict.fromkeys(chain.from_iterable(self._due.values())):
            if number in self._missing:
                continue  # it has changed, and is loaded anew first
            slots = self._slots[number]
            room, account = slots.room(left), slots.destination.terms.account
            if account is not None:
                share = max(self._concurrency // ACCOUNT_SHARE, 1) - planned[account]
                if left < self._concurrency // 2:
                    held = self._count_by_account() if held is None else held
                    share -= held[account]
                room = min(room, share)
            if room <= 0:
                continue
            if account is not None:
                planned[account] += room
            left -= room
            requests += self._split(slots.destination, room, [p for p, due in self._due.items() if number in due])
            if left <= 0:
                break
        return requests

    def _count_by_account(self) -> Counter[str]:
        """Return how many slots the destinations of each account hold."""
        held: Counter[str] = Counter()
        for slots in self._slots.values():
            if (account := slots.destination.terms.account) is not None:
                held[account] += slots.busy + slots.asked
        return held

    def _split(self, destination: Destination, room: int, priorities: Sequence[Priority]) -> list[LeaseRequest]:
        """Divide the room: most of it for the first of these priorities, a small part for those below it, and so on."""
        requests, rounds = [], self._rounds
        is_fair = destination.terms.fair is not None and rounds % OLDEST_SHARE != 0
        for below, priority in zip(reversed(range(len(priorities))), priorities, strict=True):
            kept = max(room // LOWER_SHARE, min(room, int(rounds % LOWER_SHARE == 0))) if below else 0
            if room > kept:
                requests.append(_request(destination, room - kept, priority, is_fair=is_fair))
            room, rounds = kept, rounds // LOWER_SHARE
        return requests

    async def _lease_due(self, requests: Sequence[LeaseRequest]) -> None:
        """Lease; clear the due flag of destinations that returned less than requested."""
        for one in requests:  # cleared before the query, so that what becomes due meanwhile is noted again
            self._due[one.priority].pop(one.destination_id, None)
        began = clock.steady()
        try:
            leases = await self._lease(requests)
        except BaseException:
            for one in requests:
                self._due[one.priority][one.destination_id] = None
            raise
        self._gathers_until = began + self._timeouts.gather if len(leases) < FEW else 0.0
        came = Counter((lease.delivery.destination_id, lease.priority) for lease in leases)
        for one in requests:
            if came[one.destination_id, one.priority] >= one.limit:
                self._due[one.priority][one.destination_id] = None
            else:  # nothing more is due, or it is held back; the store knows until when
                self._look_in(self._looked_at + self._timeouts.look_pause - clock.steady())

    async def _lease(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        asked_at = clock.steady()
        self._keep_slots(requests, 1)
        try:
            leases = await self._store.lease(requests, self.id)
        finally:
            self._keep_slots(requests, -1)
        for lease in leases:
            self._slots_of(lease).take()
            self._begin(lease, asked_at, clock.steady())
        return leases

    def _keep_slots(self, requests: Sequence[LeaseRequest], sign: int) -> None:
        """Reserve slots for a lease request, or free them, so that arrivals do not take them meanwhile."""
        for one in requests:
            (self._slots.get(one.destination_id) or self._gone[one.destination_id]).asked += sign * one.limit
            self._reserved += sign * one.limit

    def _room(self) -> int:
        return self._concurrency - self.count_unsettled() - self._reserved

    def count_unsettled(self) -> int:
        """Return how many attempts are under way, or have ended but still hold their slot."""
        return len(self._attempts) + len(self._kept)

    # -- arrivals ------------------------------------------------------------------------------

    def reserve(self, destination_id: int, priority: Priority) -> float | None:
        slots = self._slots.get(destination_id)
        if self._load is not None and (slots is None or self._has_changed(destination_id)):
            return None  # its arrival wakes this worker, which loads it
        if slots is None or self._is_alone or self._stopping or destination_id in self._due[priority]:
            return None  # the longest waiting come first
        if len(slots.priorities) > 1 and self._is_outranked(destination_id, priority):
            return None
        left = self._room()
        if not slots.room(left) or self._settling.is_behind():
            return None
        if slots.destination.terms.account is not None and left < self._concurrency // 2:
            return None  # the next round divides what is left among accounts
        slots.take()
        self._reserved += 1
        return slots.destination.terms.lease

    def _is_outranked(self, destination_id: int, priority: Priority) -> bool:
        """Tell whether something of this priority or a higher one waits for the destination."""
        return any(destination_id in due for other, due in self._due.items() if other <= priority)

    def begin_reserved(self, lease: Lease, asked_at: float) -> None:
        self._reserved -= 1
        self._begin(lease, asked_at, clock.steady())

    def give_up_reserved(self, destination_id: int) -> None:
        self._reserved -= 1
        slots = self._slots.get(destination_id) or self._gone[destination_id]
        slots.refund()
        self._free(slots)

    # -- quarantine ----------------------------------------------------------------------------

    async def _run_quarantined(self) -> None:
        await self._wait_until_idle()
        if self._stopping:
            return
        started = clock.steady()
        # In turn, so that a destination with many does not starve the others.
        number = min((n for n in self._quarantined if n > self._last_alone), default=min(self._quarantined))
        self._last_alone = number
        if not self._slots[number].room(1):  # others hold its places, or its rate is used up
            await self._refresh_limits()
        if not self._slots[number].room(1):
            self._alone_after = clock.steady() + self._timeouts.limit_pause
            return
        if await self._lease([_request(self._slots[number].destination, 1, Priority.quarantined)]):
            await self._wait_until_idle()
        else:
            self._quarantined.discard(number)
            self._look_at = 0.0
        self._alone_after = clock.steady() + (clock.steady() - started)

    async def _wait_until_idle(self) -> None:
        """Wait until nothing is under way and everything is settled, so that a crash counts against nothing else."""
        while not self._stopping:
            now = clock.steady()
            if running := [one.task for one in self._attempts.values() if now < one.late_at]:
                await asyncio.wait(running, timeout=0.5)
            elif self._reserved:
                await asyncio.sleep(0.001)
            elif not self._settling.is_empty():  # a settlement may begin the next delivery of its subject
                await self._settling.catch_up()
            else:
                return

    # -- an attempt ----------------------------------------------------------------------------

    def _begin(self, lease: Lease, asked_at: float, began: float) -> None:
        """Begin an attempt in a slot that is taken for it. `asked_at`: the time from which the lease is surely ours."""
        slots = self._slots_of(lease)
        faults.point("after_lease")
        is_old = clock.steady() >= asked_at + lease.seconds * self._timeouts.safe_part
        if self._stopping or is_old or self._has_changed(lease.delivery.destination_id):
            # This process was suspended: a lease that may belong to another by now is not begun (R33). Nor is one that
            # was under way when its destination changed: it would go to the old address.
            slots.give_back()
            self._settling.add(Settlement(lease, Settle.release))
            return
        slots.used_at = began
        destination = slots.destination
        is_cancellable = getattr(destination, "is_cancellable", True)
        late_at = asked_at + destination.terms.timeout + self._timeouts.grace
        running = self._attempts[lease.fence] = RunningAttempt(began, late_at, not is_cancellable)
        self._look_in(lease.seconds)  # in case it is not settled by then
        self.heartbeat.hold(lease, asked_at, late_at if is_cancellable else None)
        running.task = self._loop.create_task(self._attempt(destination, lease, running))

    async def _attempt(self, destination: Destination, lease: Lease, running: RunningAttempt) -> None:
        started = clock.perf()
        try:
            settled = _settle_unattempted(lease)
            if settled is None:
                if lease.event.is_apart:
                    await self._load_body(lease)
                result = _refuse(destination, lease) or await destination.attempt(lease)
                if result.settled:
                    self.note_settled(Settlement(lease, Settle.done, duration=clock.perf() - started))
                    return
                goes_on = self._goes_on(lease, running)
                settled = settlement(destination.terms, lease, result, clock.perf() - started, take_next=goes_on)
            if settled.take_next is not None:
                running.takes_next = True
                self._slots_of(lease).spend()
            if running.takes_next or settled.category is not None:
                self._kept[lease.fence] = running
            self._settling.add(settled)
        except asyncio.CancelledError:
            # Stopped, or the lease was lost: released uncounted (R37); refused if it is no longer ours.
            self._settling.add(Settlement(lease, Settle.release))
        except LeaseLost:
            self.note_lost(lease)
        except Exception as error:  # a destination that raises although it must not
            log.exception("attempt.failed")
            terms = destination.terms
            self._settling.add(settlement(terms, lease, failure(error, terms.rules), clock.perf() - started))
        finally:
            del self._attempts[lease.fence]
            if lease.fence not in self._kept:
                self._free(self._slots_of(lease))

    async def _load_body(self, lease: Lease) -> None:
        """Load a body that is kept apart; mark the lease where that fails."""
        try:
            lease.event = await self._bodies.load(lease.event)
        except (BodyMissing, ObjectsUnavailable, Undecryptable) as error:
            lease.unreadable = f"{error.code}: {error}"

    def _goes_on(self, lease: Lease, running: RunningAttempt) -> bool:
        """Tell whether the next delivery of the subject may follow at once: its share of time is not used up."""
        slots = self._slots_of(lease)
        return (
            lease.more
            and lease.priority is not Priority.quarantined
            and not (self._is_alone or self._stopping)
            and clock.steady() < running.began + self._timeouts.subject_share
            and slots.may_go_on()
            and not (slots.is_ordered and self._is_outranked(slots.destination.id, lease.priority))
        )

    def _free_kept(self, slots: DestinationSlots, lease: Lease) -> None:
        """Free the slot that an attempt still holds, if any, because nothing follows."""
        if (kept := self._kept.pop(lease.fence, None)) is not None:
            if kept.takes_next:
                slots.refund()
            self._free(slots)

    def _free(self, slots: DestinationSlots) -> None:
        slots.give_back()
        if any(self._due.values()) or self._stopping:
            self._woken.set()

    # -- after an attempt ----------------------------------------------------------------------

    def note_settled(self, done: Settlement, following: Lease | None = None, asked_at: float = 0.0) -> None:
        """Free the slot of a settled attempt, or begin `following` in it: the next of its subject."""
        lease = done.lease
        self.heartbeat.let_go(lease)
        if done.what in (Settle.retry, Settle.release):
            self._look_in(done.wait)
        slots = self._slots_of(lease)
        if following is not None and (kept := self._kept.pop(lease.fence, None)) is not None:
            # A lease taken with a settlement is renewed only after a full beat.
            self._begin(following, asked_at - following.seconds / self._timeouts.beats, kept.began)
        else:
            self._free_kept(slots, lease)
        if done.what is not Settle.release:
            self._observer.note_attempt(slots.destination, done)
            self._note_trial(slots, done)

    def note_lost(self, lease: Lease) -> None:
        """Drop a lease that belongs to another worker by now; nothing was changed."""
        self.heartbeat.let_go(lease)
        slots = self._slots_of(lease)
        self._free_kept(slots, lease)
        self._observer.lease_lost(slots.destination, lease)

    def destination_of(self, lease: Lease) -> Destination:
        return self._slots_of(lease).destination

    @property
    def takes(self) -> bool:
        """True while arrivals may be leased to it in the commit that stores them."""
        return self._main is not None and not self._stopping

    def note_expired(self, expired: Expired) -> None:
        """Note an expired lease that was taken over."""
        self._look_at = 0.0  # it may be quarantined now
        if (slots := self._slots.get(expired.destination_id)) is not None:
            self._observer.lease_expired(slots.destination, expired)

    def note_breaker(self, change: BreakerChange) -> None:
        """Note a breaker that an outcome of this worker has opened or closed."""
        if (slots := self._slots.get(change.destination_id)) is not None:
            slots.opened = None if change.open_until is None else change
            self._observer.breaker(slots.destination, change)

    def _note_trial(self, slots: DestinationSlots, done: Settlement) -> None:
        """Note a breaker that stays open because a trial has failed: the store reports only changes."""
        opened, now = slots.opened, clock.now_utc()
        is_another, slots.last_tried = done.lease.delivery.id != slots.last_tried, done.lease.delivery.id
        if opened is None or opened.open_until is None:
            return
        began = now - timedelta(seconds=done.duration)
        if not done.lease.failing:
            if began >= opened.open_until:  # its failures were cleared, by a person or by another worker's success
                slots.opened = None
        elif done.breaker is not None and done.what is not Settle.done:
            open_for = timedelta(seconds=done.breaker.open)
            # Not later: a busy process hears of an opening late, and the trial begins when it ends in the store.
            if began < opened.open_until - open_for:
                return  # it was under way when the breaker opened
            slots.opened = BreakerChange(opened.destination_id, now + open_for, opened.failures + is_another)
            self._observer.breaker(slots.destination, slots.opened)

    def _stop_lost(self, lease: Lease) -> None:
        """Stop the attempt of a lease that the heartbeat has lost, or is about to lose (R33)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, lease)

    def _cancel(self, lease: Lease) -> None:
        running = self._attempts.get(lease.fence)
        # A thread cannot be stopped. Releasing its lease now would let another worker begin beside it; its outcome is
        # settled when it ends, and refused if the lease is another's by then.
        if running is not None and not running.on_thread:
            running.task.cancel()


async def _try_open(destination: Destination) -> bool:
    """Open a destination that was loaded; where that fails, only this one is looked for again later."""
    try:
        await destination.open()
    except Exception as error:
        fields = {"destination": destination.name, "error": str(error)}
        ration.log(log, logging.ERROR, "destination.unusable", fields, kind=destination.name)
        return False
    return True


def _request(destination: Destination, limit: int, priority: Priority, *, is_fair: bool = False) -> LeaseRequest:
    terms = destination.terms
    tolerance, probe = destination.crash_tolerance, terms.breaker.open
    return LeaseRequest(destination.id, limit, terms.lease, priority, tolerance, probe, is_fair)


def _refuse(destination: Destination, lease: Lease) -> Result | None:
    """Fail an attempt before it is made: its event cannot be read now, and a key, or the place of its body, may be back
    before the last retry; or its destination has become another account's since it was planned (S32)."""
    if lease.unreadable is not None:
        return Result(Category.transient, Evidence(error=lease.unreadable), counts=False)
    if destination.terms.account not in (None, lease.event.account):
        return Result(Category.permanent, Evidence(error="its destination is another account's now"), counts=False)
    return None


def _settle_unattempted(lease: Lease) -> Settlement | None:
    """Settle a delivery without an attempt: a higher rank overtook it, or it has killed too many processes."""
    if lease.deaths >= DEATHS:
        return Settlement(lease, Settle.dead, evidence=Evidence(error="crash"))
    if lease.is_stale:
        return Settlement(lease, Settle.done, note="stale")
    return None


class DestinationSlots:
    """Slots of one destination in this worker: attempts under way, and how many more may begin."""

    __slots__ = ("asked", "busy", "destination", "last_tried", "opened", "priorities", "used_at")

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.busy = 0
        self.asked = 0
        """Slots reserved for a lease request under way."""
        self.priorities = {Priority.live}
        """Priorities that its deliveries are known to have."""
        self.opened: BreakerChange | None = None
        """Last opening of its breaker; None while it is closed."""
        self.last_tried: bytes | None = None
        """The delivery of the last attempt: one that fails again is no further failure in a row."""
        self.used_at = clock.steady()

    @property
    def is_ordered(self) -> bool:
        """True where due time is not all that decides what comes next."""
        return self.destination.terms.fair is not None or len(self.priorities) > 1

    def room(self, most: int) -> int:
        """Return how many attempts may begin now, by its limits and the worker's free slots."""
        return max(min(self.destination.terms.concurrency - self.busy, most) - self.asked, 0)

    def may_go_on(self) -> bool:
        """Tell whether the next attempt may begin in the slot of one that ends."""
        return True

    def is_idle_since(self, moment: float) -> bool:
        """Tell whether nothing is under way, and nothing was since a moment of the steady clock."""
        return not self.busy and not self.asked and self.used_at < moment

    def take(self) -> None:
        self.busy += 1
        self.spend()

    def give_back(self) -> None:
        self.busy -= 1

    def spend(self) -> None:
        """Count an attempt against the rate."""

    def refund(self) -> None:
        """Take back an attempt from the rate: it is not made."""


class LimitedSlots(DestinationSlots):
    """Slots of a destination whose rate or concurrency counts over all workers: the store grants both ahead."""

    __slots__ = (
        *(
            "_ask_moments_at",
            "_ask_places_at",
            "_is_due",
            "_moments",
            "_not_before",
            "_pause",
            "_peak",
            "_places",
            "_places_until",
        ),
        *("_renew_at", "_step", "_timeouts"),
    )

    def __init__(self, destination: Destination, timeouts: WorkerTimeouts) -> None:
        super().__init__(destination)
        self._timeouts = timeouts
        self._moments: deque[float] = deque()
        """Moments reserved to begin an attempt at, by the steady clock."""
        self._step = 1
        """Moments to reserve next: doubled while they are used, one after some were not."""
        self._ask_moments_at = 0.0
        self._not_before = 0.0
        """Earliest moment of the next attempt, at a slow rate."""
        self._places = 0
        self._places_until = 0.0
        """Attempts may begin under these places for one lease: then each ends before they do."""
        self._peak = 0
        """Attempts under way at once since the last renewal."""
        self._renew_at = 0.0
        self._ask_places_at = 0.0
        self._pause = timeouts.limit_pause
        self._is_due = False
        """True where work waited at the last request."""

    def room(self, most: int) -> int:
        terms, room = self.destination.terms, most
        if terms.rate is not None:
            room = min(room, self._count_moments(clock.steady()))
        if terms.is_shared and clock.steady() >= self._places_until:
            return 0
        limit = self._places if terms.is_shared else terms.concurrency
        return max(min(limit - self.busy, room) - self.asked, 0)

    def may_go_on(self) -> bool:
        now, terms = clock.steady(), self.destination.terms
        if terms.is_shared and (now >= self._places_until or self.busy > self._places):
            return False
        return terms.rate is None or self._count_moments(now) > self.asked

    def take(self) -> None:
        super().take()
        self._peak = max(self._peak, self.busy)

    def give_back(self) -> None:
        super().give_back()
        if self.busy == self._places:  # it was more: others wait for what has just become free
            self._renew_at = 0.0

    def spend(self) -> None:
        if not self._moments:
            return
        self._moments.popleft()
        rate = self.destination.terms.rate
        if rate is not None and _is_slow(rate):  # a moment may be used late, but the next must not follow at once
            self._not_before = clock.steady() + 1 / rate
            self._moments = deque(max(moment, self._not_before) for moment in self._moments)

    def refund(self) -> None:
        if self.destination.terms.rate is not None:
            now = clock.steady()
            self._moments.appendleft(min(now, self._moments[0]) if self._moments else now)

    def _count_moments(self, now: float) -> int:
        """Return how many reserved moments have come. Those that were not used in time are lost, so that no burst
        follows a pause; of a slow rate, each is kept until the next, and only one counts: two would begin at once."""
        rate = self.destination.terms.rate
        assert rate is not None
        kept_since = now - max(2 * AHEAD, 1 / rate)
        while self._moments and self._moments[0] < kept_since:
            self._moments.popleft()
            self._step = 1
        come = bisect_right(self._moments, now)
        return min(come, 1) if _is_slow(rate) else come

    # -- what the store grants -----------------------------------------------------------------

    def needs(self, is_due: bool, now: float) -> bool:
        """Tell whether to ask the store for allowances now."""
        terms = self.destination.terms
        if terms.is_shared and self._places and now >= self._renew_at:
            return True
        if not is_due:
            return False
        if terms.rate is not None and not self._is_full():
            self._count_moments(now)
            if len(self._moments) <= self._step // 2 and now >= self._ask_moments_at:
                return True
        return terms.is_shared and now >= self._ask_places_at and self._is_short(now)

    def _is_full(self) -> bool:
        """True where it could not use a moment: another worker should have it."""
        return self.busy + self.asked >= (self._places or self.destination.terms.concurrency)

    def _is_short(self, now: float) -> bool:
        is_held = now < self._places_until
        return not is_held or self.busy + self.asked >= self._places < self.destination.terms.concurrency

    def build_request(self, is_due: bool) -> LimitRequest:
        terms, self._is_due = self.destination.terms, is_due
        wanted = 0
        if terms.is_shared:
            wanted = terms.concurrency if is_due else min(self._peak + 1, terms.concurrency) if self._peak else 0
        return LimitRequest(
            self.destination.id,
            terms.lease,
            terms.rate,
            self._step if is_due and terms.rate is not None and not self._is_full() else 0,
            terms.concurrency if terms.is_shared else None,
            self.busy + self.asked,
            max(wanted, self.busy + self.asked),
        )

    def grant(self, allowance: Allowance, asked_at: float) -> None:
        """Take what the store grants. `asked_at`: when it was asked, by the steady clock."""
        terms, now = self.destination.terms, clock.steady()
        if terms.rate is not None:
            first = max(now + allowance.first_in, self._not_before)
            if allowance.slots:
                # In order: the answer before may have taken longer on its way than this one.
                granted = (first + n / terms.rate for n in range(allowance.slots))
                self._moments = deque(sorted(chain(self._moments, granted)))
                self._ask_moments_at = now
                if allowance.slots == self._step:
                    self._step = min(self._step * 2, max(int(terms.rate * AHEAD), 1))
            else:
                self._ask_moments_at = first
        if terms.is_shared:
            self._places, self._peak = allowance.places, self.busy
            self._places_until = asked_at + terms.lease * self._timeouts.safe_part
            self._renew_at = asked_at + min(self._timeouts.renew_places, terms.lease / self._timeouts.beats)
            if self._is_due and self._places < terms.concurrency:  # others hold the rest
                self._ask_places_at = now + self._pause
                self._pause = min(self._pause * 2, self._timeouts.longest_limit_pause)
            else:
                self._ask_places_at, self._pause = now, self._timeouts.limit_pause

    def rests(self, is_due: bool, now: float) -> float:
        """Return the seconds until there may be something to begin or to ask for, by these limits."""
        terms = self.destination.terms
        moments = [now + self._timeouts.longest_rest]
        if terms.is_shared and self._places:
            moments.append(self._renew_at)
        if is_due and terms.rate is not None:
            moments.append(self._moments[0] if self._moments else self._ask_moments_at)
        if is_due and terms.is_shared and self._is_short(now):
            moments.append(self._ask_places_at)
        # A moment that has come needs no waiting: something else is what it waits for.
        return min(moment for moment in moments if moment > now) - now


def _is_slow(rate: float) -> bool:
    """Tell whether a moment of this rate is kept until the next one."""
    return 1 / rate > 2 * AHEAD


def _make_slots(destination: Destination, timeouts: WorkerTimeouts) -> DestinationSlots:
    terms = destination.terms
    is_limited = terms.rate is not None or terms.is_shared
    return LimitedSlots(destination, timeouts) if is_limited else DestinationSlots(destination)


class RunningAttempt:
    __slots__ = ("began", "late_at", "on_thread", "takes_next", "task")

    def __init__(self, began: float, late_at: float, on_thread: bool) -> None:
        self.began = began
        """Time at which its subject was leased, possibly for an earlier delivery."""
        self.late_at = late_at
        """Time at which it should have ended; beyond that it hangs, and nobody waits for it."""
        self.on_thread = on_thread
        """It runs on a thread, and cannot be stopped."""
        self.takes_next = False
        """Its settlement requests the next of its subject, which is counted against the rate already."""
        self.task: asyncio.Task[None]


class HeldLease:
    __slots__ = ("ends_at", "lease", "renewed_at")

    def __init__(self, lease: Lease, renewed_at: float, ends_at: float | None) -> None:
        self.lease = lease
        self.renewed_at = renewed_at
        """Time of the last renewal's request: the lease is surely ours for `lease.seconds` from then."""
        self.ends_at = ends_at


class Heartbeat:
    """Renewal of leases until they are released. `lost` is called on the heartbeat's own threads."""

    def __init__(
        self,
        store: Store,
        lost: Callable[[Lease], None],
        shortest: float,
        beats: int = TIMEOUTS.beats,
        worker: str | None = None,
    ) -> None:
        """`shortest`: seconds of the shortest lease; `beats`: renewals per lease; `worker`: one that may hold
        places."""
        self._store = store
        self._lost = lost
        self._beats = beats
        self._worker = worker
        self._interval = shortest / beats
        self._held: dict[int, HeldLease] = {}
        self._unanswered: list[HeldLease] = []
        """Leases of the last renewal, until it is answered."""
        self._stop = threading.Event()
        # A renewal may hang longer than its leases last: their holder must be told without waiting for it (R33).
        self._threads = [
            self._thread("oncehook-heartbeat", 1.0, self.beat),
            self._thread("oncehook-heartbeat-mind", 0.5, lambda: self._give_up(self._unanswered)),
        ]

    def _thread(self, name: str, part: float, repeated: Callable[[], object]) -> threading.Thread:
        """Return a thread that calls a function at intervals of this part of the heartbeat's."""

        def repeat() -> None:
            while not self._stop.wait(self._interval * part):
                try:
                    repeated()
                except Exception:  # whatever fails, the next beat must come
                    log.exception("heartbeat.failed")

        return threading.Thread(target=repeat, name=name, daemon=True)

    def keep_places(self, worker: str) -> None:
        """Renew the places that this worker holds, too: it has a destination with a shared limit now."""
        self._worker = worker

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop; leases that are still held expire."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def expect(self, lease: float) -> None:
        """Beat often enough for leases of so many seconds."""
        self._interval = min(self._interval, lease / self._beats)

    def hold(self, lease: Lease, asked_at: float, ends_at: float | None) -> None:
        """Renew a lease from now on. `asked_at`: when it was requested, by the steady clock.

        `ends_at`: renew no longer than this; None: until it is released, because its attempt cannot be stopped.
        """
        self._held[lease.fence] = HeldLease(lease, asked_at, ends_at)

    def let_go(self, lease: Lease) -> bool:
        """Stop renewing a lease. Returns whether it was held until now."""
        return self._held.pop(lease.fence, None) is not None

    def __len__(self) -> int:
        return len(self._held)

    def beat(self) -> bool:
        """Renew what is due for renewal; also out of turn, and always on a thread. Returns whether it is known which
        leases are ours."""
        now = clock.steady()
        # A copy, because the loop adds and removes meanwhile.
        held = [h for h in list(self._held.values()) if now - h.renewed_at >= h.lease.seconds / self._beats]
        held = [h for h in held if not h.lease.is_settling]
        wanted = [h for h in held if h.ends_at is None or now < h.ends_at]
        is_known = not wanted or self._renew(wanted, now)
        self._give_up(held)
        return is_known

    def _renew(self, wanted: list[HeldLease], now: float) -> bool:
        self._unanswered = wanted
        try:
            ours = self._store.renew([h.lease for h in wanted], self._worker)
        except StoreError as error:
            log.warning("heartbeat.unanswered", extra={"fields": {"leases": len(wanted), "error": str(error)}})
            return False
        for h in wanted:
            if h.lease.fence in ours:
                h.renewed_at = now
            else:
                self._lose(h.lease)
        self._unanswered = []
        return True

    def _give_up(self, held: list[HeldLease]) -> None:
        """Give up leases one beat before another worker may take them."""
        now = clock.steady()
        for h in held:
            # A thread goes on without a lease, and another worker would begin beside it. So it keeps trying: when the
            # store is back before anybody has looked, the lease can still be renewed.
            if h.ends_at is not None and now >= h.renewed_at + h.lease.seconds * (1 - 1 / self._beats):
                self._lose(h.lease)

    def _lose(self, lease: Lease) -> None:
        if not lease.is_settling and self.let_go(lease):  # its settlement will be refused
            self._lost(lease)


GROUPS: Final = 2
"""Groups of settlements under way at once: a subject that goes on must not wait for another's commit."""
TURNS: Final = 8
"""Turns of the loop for which subjects that go on wait for each other, to share a commit: short when little happens."""


class SettlementBatcher:
    """Ended attempts that are not settled yet, written in groups."""

    def __init__(self, store: Store, worker: Worker) -> None:
        self._store = store
        self._worker = worker
        self._ended: list[Settlement] = []
        self._under_way = 0
        self._groups = 0
        self._tasks: set[asyncio.Task[None]] = set()
        """References to the tasks, without which they could be garbage-collected."""
        self._group_written = asyncio.Event()
        self._is_planned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        self._stopping = True
        await self.catch_up()

    def add(self, ended: Settlement) -> None:
        self._ended.append(ended)
        self._plan()

    def is_empty(self) -> bool:
        return not self._ended and not self._under_way

    def is_behind(self) -> bool:
        return len(self._ended) + self._under_way > MOST_UNSETTLED

    async def catch_up(self) -> None:
        """Wait until everything that has ended so far is written."""
        while not self.is_empty() and self._loop is not None:
            self._group_written.clear()
            await self._group_written.wait()

    def _plan(self) -> None:
        """Begin soon, but not at once: everything else that ends in this turn of the loop joins the group."""
        if not self._is_planned and self._loop is not None:
            self._is_planned = True
            self._loop.call_soon(self._gather, TURNS)

    def _gather(self, turns: int) -> None:
        """Begin the next group; if it has only subjects that go on, wait some turns for others to join."""
        assert self._loop is not None
        is_short = 0 < len(self._ended) < self._worker.count_unsettled()
        if turns and is_short and all(one.take_next is not None for one in self._ended):
            self._loop.call_soon(self._gather, turns - 1)
            return
        self._is_planned = False
        # Beside another group only if as many wait as that one has, because a commit has a fixed cost.
        if self._ended and self._groups < GROUPS and len(self._ended) >= self._under_way:
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
                # Those with an effect of their own can fail alone; on SQLite all join the same commit.
                await asyncio.gather(self._settle(plain), *(self._settle([s]) for s in single))
            else:
                await self._settle(plain)
        finally:
            self._under_way -= len(ended)
            self._groups -= 1
            self._group_written.set()
            self._plan()

    async def _settle(self, group: list[Settlement]) -> None:
        if not group:
            return
        asked_at = clock.steady()
        try:
            settled = await self._persist(group)
        except StoreUnavailable as error:
            log.error("worker.settle_failed", extra={"fields": {"leases": len(group), "error": str(error)}})
            for one in group:  # their leases expire, and the attempts are made again
                self._worker.note_lost(one.lease)
            return
        except Exception as error:
            self._fail(group, error)
            return
        following = {lease.queue_key: lease for lease in settled.next}
        for one in group:
            if one.lease.fence in settled.ours:
                self._worker.note_settled(one, following.get(one.lease.queue_key), asked_at)
                for emission in one.emits:
                    emission.report()
            else:
                self._worker.note_lost(one.lease)

    async def _persist(self, group: list[Settlement]) -> Settled:
        """Write a group; retry while the store is unavailable, as long as the leases can still be ours."""
        wait, ends_at = 0.05, clock.steady() + max(s.lease.seconds for s in group)
        while True:
            try:
                return await self._store.settle(group, self._worker.id)
            except StoreUnavailable:
                if clock.steady() + wait > ends_at or self._stopping:
                    raise
                await asyncio.sleep(wait)
                wait = min(wait * 2, 1.0)

    def _fail(self, group: list[Settlement], error: Exception) -> None:
        """Turn settlements whose effect failed, and was rolled back, into failed attempts."""
        for settled in group:
            if not _may_fail(settled):
                log.error("worker.settle_failed", exc_info=error)
                self._worker.note_lost(settled.lease)
                continue
            terms = self._worker.destination_of(settled.lease).terms
            self.add(settlement(terms, settled.lease, failure(error, terms.rules), settled.duration))


def _may_fail(settled: Settlement) -> bool:
    return settled.commit is not None or bool(settled.emits)
