"""A small world on virtual time: orders arrive, a worker works for a few destinations, is stopped and begins anew.

Everything about it is drawn from a seed. Handlers tell the world when they begin and end, and it complains of whatever
must not happen (R37, R38, R42, R43, R56, DESIGN.md 3): `live` returns what was seen, and `complaints` must be empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from oncehook import Event, GiveUp, RetryLater
from oncehook.destinations.base import Destination, Terms
from oncehook.destinations.handler import HandlerDestination
from oncehook.ingest import Emitter
from oncehook.model import Breaker, DeliveryId, Expired, Lease, Options, Settle, Settlement
from oncehook.retry import Policy
from oncehook.worker import ATTENDED, TIMEOUTS, Worker
from tests.store.making import intake, item
from tests.torture.virtual import VirtualHeartbeat, VirtualLoop, VirtualStore

DELAYS: Final = 0.5
"""Seconds of disk between two things at most: several waits of 0.05."""
SOON: Final = 1e-3
"""Seconds after which what was leased has surely begun."""
LONG: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Diced(Policy):
    """A policy whose chance comes from the loop."""

    chance: Callable[[], float] = field(kw_only=True)

    def wait(self, attempt: int, chance: Callable[[], float] | None = None) -> float | None:
        return Policy.wait(self, attempt, self.chance)


@dataclass
class Place:
    """What the world knows of one destination."""

    destination: HandlerDestination
    running: set[str] = field(default_factory=set)
    begun: list[list[float]] = field(default_factory=list)
    """When attempts began, for each worker in turn."""
    failures: int = 0
    last_failed: bytes | None = None
    open_from: float = 0.0
    open_until: float = 0.0
    paused_from: float = LONG
    due_since: float | None = None


@dataclass
class Order:
    """One delivery as the world sees it."""

    place: Place
    subject: str | None
    state: str = "waiting"
    """waiting, running, ended (and not settled yet), retrying, finished"""
    attempt: int = 1
    due: float = 0.0
    ended: float = 0.0


class World:
    """See above; also the worker's witness."""

    def __init__(self, loop: VirtualLoop, folder: Path) -> None:
        self.loop, self.dice = loop, loop.dice
        self.store = VirtualStore(folder / "inbox.db")
        self.complaints: list[str] = []
        self.history: list[tuple[float, str, str]] = []
        self.seen: Counter[str] = Counter()
        self.orders: dict[tuple[str, str], Order] = {}
        self.lines: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self.places = [Place(self._make(n)) for n in range(self.dice.randint(1, 3))]
        self.most = self.dice.choice((2, 5, 1000))
        self.rounds: Counter[int] = Counter()
        """How often the worker looked, by the second."""
        self.worker: Worker | None = None
        self.resting = False
        """Between two workers, or while one stops."""

    def _make(self, number: int) -> HandlerDestination:
        dice = self.dice
        retry = Diced(
            attempts=dice.randint(1, 5),
            base=dice.choice((0.0, 0.3, 2.0)),
            factor=dice.choice((1.0, 2.0)),
            cap=dice.choice((1.0, 10.0)),
            jitter=dice.choice((0.5, "full", "none")),
            chance=dice.random,
        )
        terms = Terms(
            retry=retry,
            timeout=dice.choice((0.7, 3.0)),
            lease=dice.choice((0.6, 2.0)),
            concurrency=dice.choice((1, 3, 16)),
            is_shared=dice.random() < 0.4,
            fair=dice.choice((None, "$.account")),
            rate=dice.choice((None, None, 0.7, 4.0, 30.0)),
            breaker=Breaker(failures=dice.choice((2, 5, 1000)), open=dice.choice((1.0, 7.0))),
        )
        emitter = Emitter(cast("Any", SimpleNamespace(store=self.store)))
        return HandlerDestination(f"d{number}", self._handle, terms, emitter)

    def complain(self, sentence: str) -> None:
        self.complaints.append(f"{self.loop.moment:.4f} {sentence}")

    def note(self, what: str, about: str) -> None:
        self.history.append((round(self.loop.moment, 6), what, about))
        self.seen[what] += 1

    # -- what handlers do ----------------------------------------------------------------------

    async def _handle(self, event: Event) -> None:
        order = self.orders[event.destination, event.key or ""]
        name = f"{event.destination} {event.key}"
        self._begin(order, name, event)
        takes = self.dice.choice((0.0, 0.001, 0.05, 0.4, 1.5, 4.0))
        try:
            await asyncio.sleep(takes)
            self._fare()
        except asyncio.CancelledError:
            self.note("cancelled", name)
            await asyncio.sleep(self.dice.choice((0.0, 0.0, 0.5)))  # some take their time to clean up
            raise
        finally:
            order.state, order.ended = "ended", self.loop.moment
            order.place.running.discard(name)
            self.note("end", name)

    def _fare(self) -> None:
        roll = self.dice.random()
        if roll < 0.05:
            raise GiveUp("no")
        if roll < 0.15:
            raise RetryLater(after=self.dice.choice((0.1, 4.0)))
        if roll < 0.35:
            raise ConnectionError("gone")

    # -- what must hold when one begins --------------------------------------------------------

    def _begin(self, order: Order, name: str, event: Event) -> None:
        now, place, terms = self.loop.moment, order.place, order.place.destination.terms
        self.note("begin", f"{name} {event.attempt}")
        if order.state == "running":
            self.complain(f"{name} begins beside itself")
        if now < order.due - 1e-5:
            self.complain(f"{name} begins {order.due - now:.4f} s before it is due")
        if event.attempt != order.attempt:
            self.complain(f"{name} begins attempt {event.attempt}, not {order.attempt} (R37)")
        self._check_line(order, event.key or "", name)
        place.running.add(name)
        place.begun[-1].append(now)
        if len(place.running) > terms.concurrency:
            self.complain(f"{name} is one too many: {len(place.running)} of {terms.concurrency}")
        if sum(len(other.running) for other in self.places) > self.most:
            self.complain(f"{name} is one too many for the worker")
        if place.open_from + SOON < now < place.open_until:
            self.complain(f"{name} begins while the breaker is open")
        if place.open_until and now >= place.open_until:
            self.note("probe", name)
            place.open_from, place.open_until = now, now + terms.breaker.open - DELAYS
        if now > place.paused_from + SOON:
            self.complain(f"{name} begins while its destination is paused")
        if self.resting:
            self.complain(f"{name} begins while nobody may")
        order.state = "running"

    def _check_line(self, order: Order, key: str, name: str) -> None:
        """All that came before it on its subject is over, or at least ended and about to be settled."""
        if order.subject is None:
            return
        line = self.lines[order.place.destination.name, order.subject]
        for earlier in line[: line.index(key)]:
            state = self.orders[order.place.destination.name, earlier].state
            if state not in ("ended", "finished"):
                self.complain(f"{name} begins while {earlier} before it is {state} (R42, R43)")

    # -- as the worker's witness ---------------------------------------------------------------

    def note_attempt(self, destination: Destination, settled: Settlement) -> None:
        lease, name = settled.lease, f"{destination.name} {settled.lease.event.key}"
        order = self.orders[destination.name, lease.event.key or ""]
        self.note(str(settled.what), name)
        if order.state != "ended":
            self.complain(f"{name} is settled while {order.state}")
        self._note_streak(order.place, settled)
        if settled.what is Settle.retry:
            self._check_wait(order, settled)
            order.state, order.attempt, order.due = "retrying", lease.delivery.attempt + 1, order.ended + settled.wait
        else:
            order.state = "finished"

    def lease_lost(self, destination: Destination, lease: Lease) -> None:
        self.complain(f"{destination.name} {lease.event.key}: its lease was lost though its worker lives (R32)")

    def lease_expired(self, destination: Destination, expired: Expired) -> None:
        self.note("expired", f"{destination.name} {expired.attempt}")

    def _check_wait(self, order: Order, settled: Settlement) -> None:
        retry = order.place.destination.terms.retry
        longest = min(retry.cap, retry.base * retry.factor ** (settled.lease.delivery.attempt - 1))
        longest += 0.5 if retry.jitter == 0.5 else 0.0
        if not 0.0 <= settled.wait <= max(longest, min(4.0, retry.cap)):
            self.complain(f"a wait of {settled.wait}, and its policy says {longest} (R38)")
        later = self.lines[order.place.destination.name, order.subject] if order.subject else []
        behind = later[later.index(settled.lease.event.key or "") + 1 :] if later else []
        if any(self.orders[order.place.destination.name, key].state != "waiting" for key in behind):
            self.complain(f"{settled.lease.event.key} is tried again after its successor has begun (R43)")

    def _note_streak(self, place: Place, settled: Settlement) -> None:
        if settled.what is Settle.done:
            place.failures, place.last_failed, place.open_until = 0, None, 0.0
            return
        place.failures += settled.lease.delivery.id != place.last_failed
        place.last_failed = settled.lease.delivery.id
        breaker = place.destination.terms.breaker
        if place.failures >= breaker.failures:
            self.note("open", place.destination.name)
            place.open_from, place.open_until = self.loop.moment, self.loop.moment + breaker.open - DELAYS

    # -- what happens --------------------------------------------------------------------------

    async def live(self) -> World:
        """Until everything that arrived is over."""
        await self.store.open()
        numbers = await self.store.register_names(["orders"], [place.destination.name for place in self.places])
        for place in self.places:
            place.destination.id = numbers.destinations[place.destination.name]
        await self._hire()
        watch = asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._disturb())
        try:
            async with asyncio.timeout(LONG):
                while any(order.state != "finished" for order in self.orders.values()):
                    await asyncio.sleep(0.5)
                assert self.worker is not None
                await self.worker.wait_until_drained()
        except TimeoutError:
            self.complain("it never comes to an end")
        watch.cancel()
        await self._dismiss()
        self._check_rates()
        self._check_end([check.name for check in await self.store.check() if not check.ok])
        await self.store.close()
        return self

    async def _hire(self) -> None:
        destinations = [place.destination for place in self.places]
        worker = Worker(self.store, destinations, self, concurrency=self.most, heartbeat=VirtualHeartbeat)
        worker._round = self._counted(worker._round)  # type: ignore[method-assign]
        self.store.observer.wake, self.store.observer.taker = worker.wake, worker  # type: ignore[method-assign]
        self.store.observer.note_expired = worker.note_expired  # type: ignore[method-assign]
        self.resting = False
        for place in self.places:
            place.begun.append([])
        await worker.start()
        self.worker = worker

    def _counted(self, look: Callable[[], Awaitable[float]]) -> Callable[[], Coroutine[Any, Any, float]]:
        """The worker's rounds, counted: nobody polls fast (DESIGN.md 3)."""

        async def counted() -> float:
            second = int(self.loop.moment)
            self.rounds[second] += 1
            return await look()

        return counted

    async def _dismiss(self) -> None:
        assert self.worker is not None
        patience, started = self.dice.choice((0.0, 0.3, 5.0)), self.loop.moment
        await self.worker.stop(patience)
        await self.store.dismiss_worker(self.worker.id)
        self.resting = True
        self.note("stop", str(patience))
        if self.loop.moment - started > patience + TIMEOUTS.grace + DELAYS * 4:
            self.complain(f"stopping took {self.loop.moment - started:.2f} s (R56)")
        if self.worker.left_behind or any(place.running for place in self.places):
            self.complain("something goes on after the worker has stopped (R56)")
        for order in self.orders.values():
            if order.state == "ended":  # given back: the same attempt is made again
                order.state, order.due = "waiting" if order.attempt == 1 else "retrying", 0.0

    async def _send(self) -> None:
        number = 0
        for _ in range(self.dice.randint(3, 12)):
            await asyncio.sleep(self.dice.choice((0.0, 0.01, 0.3, 3.0)))
            for _ in range(self.dice.choice((1, 1, 3, 8))):
                number += 1
                self._record(f"k{number:03}", self.dice.choice((None, "a", "a", "b")))

    def _record(self, key: str, subject: str | None) -> None:
        chosen = self.dice.sample(self.places, self.dice.randint(1, len(self.places)))
        to = [(place.destination.name, place.destination.id) for place in chosen]
        options = self.dice.choice((Options.none, Options.none, Options.high, Options.low))
        made = item(key, subject=subject, to=to, options=options, fair=self.dice.choice((None, "x", "y", "z")))
        for place in chosen:
            self.orders[place.destination.name, key] = Order(place, subject)
            assert DeliveryId.of(made.event_id, place.destination.id)
            if subject is not None:
                self.lines[place.destination.name, subject].append(key)
        self.store.record(intake(made))
        self.note("send", key)

    async def _disturb(self) -> None:
        """Now and then the worker is replaced, or a destination paused."""
        for _ in range(self.dice.randint(0, 3)):
            await asyncio.sleep(self.dice.uniform(0.0, 6.0))
            if self.dice.random() < 0.6:
                await self._dismiss()
                await asyncio.sleep(self.dice.choice((0.0, 2.0)))
                await self._hire()
            else:
                await self._pause(self.dice.choice(self.places))

    async def _pause(self, place: Place) -> None:
        await self.store.pause(place.destination.id, "world", "to see")
        self.note("pause", place.destination.name)
        place.paused_from = self.loop.moment
        await asyncio.sleep(self.dice.uniform(0.0, 3.0))
        place.paused_from = LONG
        await self.store.resume(place.destination.id, "world")
        place.failures, place.last_failed, place.open_until = 0, None, 0.0  # its breaker starts anew

    async def _watch(self) -> None:
        """Whatever is due and has room is begun within one poll: otherwise a wake-up is lost."""
        while True:
            await asyncio.sleep(0.25)
            for place in self.places:
                late = await self._is_due(place)
                place.due_since = (place.due_since or self.loop.moment) if late else None
                if place.due_since is not None and self.loop.moment - place.due_since > TIMEOUTS.poll + DELAYS:
                    self.complain(
                        f"{place.destination.name} has work that is due, and room, since {place.due_since:.2f}"
                    )
                    place.due_since = None

    async def _is_due(self, place: Place) -> bool:
        worker, number = self.worker, place.destination.id
        if worker is None or worker._stopping or worker._room() < 1:
            return False
        terms, slots = place.destination.terms, worker._slots[number]
        room = slots.room(1) if terms.rate is not None else terms.concurrency - slots.busy - slots.asked
        if room < 1:
            return False
        due = await self.store.next_due([number])
        return any(number in due.of(priority) for priority in ATTENDED)

    # -- what must hold in the end -------------------------------------------------------------

    def _check_rates(self) -> None:
        for place in self.places:
            rate = place.destination.terms.rate
            for begun in place.begun if rate is not None else ():
                self._check_rate(place.destination.name, rate or 0.0, begun)

    def _check_rate(self, name: str, rate: float, begun: list[float]) -> None:
        for first, start in enumerate(begun):
            for count, end in enumerate(begun[first:], 1):
                # What may begin is reckoned when it is asked for; it begins when the disk has answered.
                if count > max(rate, 1.0) + rate * (end - start + DELAYS / 2) + 1e-6:
                    self.complain(f"{name} began {count} within {end - start:.3f} s, and its rate is {rate}/s")
                    return

    def _check_end(self, unsound: list[str]) -> None:
        happened = Counter(int(moment) for moment, _, _ in self.history)
        for second, rounds in self.rounds.items():
            if rounds > 30 + 3 * happened[second]:
                self.complain(f"{rounds} looks in second {second}, in which {happened[second]} things happened")
        if unsound:
            self.complain(f"the books do not balance: {unsound}")
        for (destination, key), order in self.orders.items():
            if order.state != "finished":
                self.complain(f"{destination} {key} is {order.state} in the end")
