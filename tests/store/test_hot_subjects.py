"""A worker and its busy subjects: one follows the other without a round of its own, and nobody else starves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from oncehook import clock
from oncehook.destinations.base import WELL, Result
from oncehook.model import DeliveryStatus, Lease, Options, Outcome, Settle, Settled, Settlement
from oncehook.store.base import Store
from oncehook.worker import TIMEOUTS
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    MAIL,
    deliver,
    deliver_one,
    ids,
    intake,
    item,
    look,
    outcomes,
    record,
    statuses,
    take,
    take_one,
)
from tests.store.place import Place
from tests.store.test_postgres_work import rival, waits_for_a_lock
from tests.store.test_take_next import is_untouched
from tests.store.working import AGAIN, DIES, Noted, Scripted, is_idle, working
from tests.waiting import until


class Gate:
    """Holds settlements up on their way to the store, until it is opened, or makes them fail."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.waiting: list[Settlement] = []
        self.error: Exception | None = None
        self._settle = store.settle
        monkeypatch.setattr(store, "settle", self.settle)

    async def settle(self, settlements: Sequence[Settlement], *about: Any) -> Settled:
        self.waiting += settlements
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return await self._settle(settlements, *about)

    async def until_asked(self) -> Settlement:
        """Wait for the one settlement that is on its way."""
        await until(lambda: self.waiting)
        [one] = self.waiting
        return one


# -- only with the settlement ------------------------------------------------------------------


async def test_the_next_begins_when_the_settlement_is_committed(
    ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R42: not when the attempt has ended, and not when it is about to be written down."""
    ground.stand_still()
    gate = Gate(store, monkeypatch)
    made = await deliver(store, "s", "s")
    crm = Scripted()
    async with working(store, crm) as worker:
        await crm.until_begun(made[0])
        crm.end(made[0])
        asked = await gate.until_asked()
        assert (asked.what, asked.take_next) == (Settle.done, crm.terms.lease)
        await is_idle_but_for_the_gate(worker._woken)
        assert (crm.order, list(crm.running)) == ([made[0]], [])
        assert await statuses(store, made) == ["leased", "pending"]
        gate.open.set()
        await crm.until_begun(made[1])
        assert await statuses(store, made) == ["done", "leased"]


async def is_idle_but_for_the_gate(woken: asyncio.Event) -> None:
    """Give whatever could begin the time to do so."""
    for _ in range(20):
        await asyncio.sleep(0)
    await until(lambda: not woken.is_set())


async def test_a_settlement_that_fails_begins_nothing(
    ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is as it was: its lease runs out, and somebody makes the attempt again."""
    ground.stand_still()
    gate, observer = Gate(store, monkeypatch), Noted()
    made = await deliver(store, "s", "s")
    crm = Scripted()
    gate.error = ValueError("no luck")
    gate.open.set()
    async with working(store, crm, observer=observer) as worker:
        await crm.until_begun(made[0])
        crm.end(made[0])
        await until(lambda: observer.lost)
        await is_idle(worker)
        assert (crm.order, observer.settled) == ([made[0]], [])
        assert await statuses(store, made) == ["leased", "pending"]
        assert await is_untouched(store, made[1])
        assert worker._room() == 1000


async def test_a_lease_that_was_lost_begins_nothing(
    ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: somebody else has it, and the next is for them to begin."""
    ground.stand_still()
    gate, observer = Gate(store, monkeypatch), Noted()
    made = await deliver(store, "s", "s")
    crm = Scripted(crash_tolerance=9)
    async with working(store, crm, observer=observer) as worker:
        await crm.until_begun(made[0])
        crm.end(made[0])
        await gate.until_asked()
        await store.invalidate_leases()
        holder = await take_one(store, crash_tolerance=9)
        gate.open.set()
        await until(lambda: observer.lost)
        await is_idle(worker)
        assert crm.order == [made[0]]
        assert await statuses(store, made) == ["leased", "pending"]
        assert (await gate._settle([Settlement(holder, Settle.done)])).ours == {holder.fence}


async def test_a_process_that_slept_over_a_settlement_does_not_begin_the_next(
    ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R33, R37: its lease may be over by now; it is given back uncounted, and begun with a new one."""
    ground.stand_still()
    gate = Gate(store, monkeypatch)
    made = await deliver(store, "s", "s")
    crm = Scripted(lease=60.0)
    async with working(store, crm) as worker:
        await crm.until_begun(made[0])
        crm.end(made[0])
        await gate.until_asked()
        clock.forward(55.0)
        gate.open.set()
        try:
            await crm.until_begun(made[1])
        finally:
            clock.forward(-55.0)
        (given_back,) = [one for one in gate.waiting if one.what is Settle.release]
        assert given_back.lease.delivery.id == made[1]
        assert crm.begun[1].fence > given_back.lease.fence
        assert crm.begun[1].delivery.attempt == 1
        assert await store.attempts_of(made[1]) == []
        assert worker._room() == 999


# -- order -------------------------------------------------------------------------------------


async def test_a_retry_keeps_its_place(store: Store) -> None:
    """R43: what follows waits with it, also when the line went on without a break until then."""
    made = await deliver(store, *["s"] * 4)
    crm = Scripted()
    crm.answers = lambda lease: AGAIN if lease.delivery.id == made[1] and lease.delivery.attempt < 3 else WELL
    async with working(store, crm) as worker:
        await worker.wait_until_drained()
    assert crm.order == [made[0], made[1], made[1], made[1], made[2], made[3]]
    assert [lease.delivery.attempt for lease in crm.begun] == [1, 1, 2, 3, 1, 1]
    assert crm.most == 1


async def test_a_dead_letter_that_is_held_stops_the_line(store: Store) -> None:
    """R43"""
    made = await deliver(store, *["s"] * 3, options=Options.hold)
    crm = Scripted()
    crm.answers = lambda lease: DIES if lease.delivery.id == made[1] else WELL
    async with working(store, crm) as worker:
        await worker.wait_until_drained()
        await is_idle(worker)
    assert crm.order == made[:2]
    assert await statuses(store, made) == ["done", "dead", "pending"]
    assert await is_untouched(store, made[2])


async def test_a_pause_takes_effect_before_the_next_begins(store: Store) -> None:
    made = await deliver(store, *["s"] * 3)
    crm = Scripted()
    async with working(store, crm) as worker:
        await crm.until_begun(made[0])
        await store.pause(1, "ann", "")
        crm.end(made[0])
        await until(lambda: not worker._attempts)
        await is_idle(worker)
        assert crm.order == [made[0]]
        assert await statuses(store, made) == ["done", "pending", "pending"]
        await store.resume(1, "ann")
        await crm.until_begun(made[1])


async def test_what_coalesces_goes_on_with_the_rest_at_once(store: Store) -> None:
    made = await deliver(store, *["s"] * 2, options=Options.coalesce_any)
    crm = Scripted()
    async with working(store, crm) as worker:
        await crm.until_begun(made[1])
        made += await deliver(store, *["s"] * 5, options=Options.coalesce_any)
        crm.end(made[1])
        await crm.until_begun(made[6])
        crm.end_all()
        await worker.wait_until_drained()
    assert crm.order == [made[1], made[6]]
    assert await statuses(store, made) == ["done"] * 7


async def test_what_was_overtaken_is_left_out(store: Store) -> None:
    made = [await deliver_one(store, "s", rank=rank, options=Options.latest_wins) for rank in (3, 1, 2, 4)]
    crm = Scripted()
    crm.end_all()
    async with working(store, crm) as worker:
        await worker.wait_until_drained()
    assert crm.order == [made[0], made[3]]
    assert [(await look(store, one)).note for one in made] == [None, "stale", "stale", None]


# -- room --------------------------------------------------------------------------------------


async def test_concurrency_holds_for_what_follows(store: Store) -> None:
    made = await deliver(store, *[f"s{n % 6}" for n in range(60)], *[None] * 10)
    crm = Scripted(concurrency=3)
    async with working(store, crm) as worker:
        await until(lambda: len(crm.running) == 3)
        for n in range(8):
            crm.end(*list(crm.running)[: 1 + n % 3])
            await until(lambda: len(crm.running) == 3)
        crm.end_all()
        await worker.wait_until_drained()
        await until(lambda: worker._room() == 1000)
        assert len(worker.heartbeat) == 0
    assert crm.most == 3
    assert sorted(crm.order) == sorted(made)


async def test_a_rate_holds_for_what_follows(ground: Ground, store: Store) -> None:
    ground.stand_still()
    made = await deliver(store, *["s"] * 5)
    crm = Scripted(rate=1.0)
    crm.end_all()
    async with working(store, crm) as worker:
        await until(lambda: crm.begun)
        await is_idle(worker)
        assert crm.order == made[:1]
        assert [await is_untouched(store, one) for one in made[1:]] == [True] * 4


async def test_a_rate_holds_for_all_that_follow_at_once(ground: Ground, store: Store) -> None:
    """Subjects that go on in the same moment share what the rate allows; none of them is given more."""
    ground.stand_still()
    made = await deliver(store, *["a", "b", "c"] * 3)
    crm, passed = Scripted(rate=100.0), 0.0

    def pass_a_moment() -> None:
        nonlocal passed
        ground.forward(0.011)  # the store grants the moments
        if ground.engine == "postgres":  # whose clock is not the worker's
            clock.forward(0.011)
            passed += 0.011

    try:
        async with working(store, crm) as worker:
            for n in (1, 2, 3):
                await until(lambda n=n: len(crm.begun) == n)  # type: ignore[misc]
                await is_idle(worker)  # what is granted counts from when the worker hears of it
                if n < 3:
                    pass_a_moment()
                    worker.wake([1])
            assert sorted(crm.running) == sorted(made[:3])
            pass_a_moment()  # only now, and nobody is woken: one that is granted while nothing waits would be lost
            crm.end(*made[:3])
            await until(lambda: len(crm.begun) > 3)
            await is_idle(worker)
            assert len(crm.begun) == 4
    finally:
        clock.forward(-passed)


@contextmanager
def slow(*destinations: Scripted, seconds: float) -> Iterator[list[int]]:
    """Let so much time pass in each of their attempts, by a clock that is put back; tells whose turn came when."""
    order: list[int] = []
    passed = 0.0

    def answer(lease: Lease) -> Result:
        nonlocal passed
        clock.forward(seconds)
        passed += seconds
        order.append(lease.delivery.destination_id)
        return WELL

    for one in destinations:
        one.answers = answer
    try:
        yield order
    finally:
        clock.forward(-passed)


async def test_a_busy_subject_makes_room_for_others(store: Store) -> None:
    """R44: of one place it has its share of time, and then whoever has waited longer is next."""
    hot = [one for _ in range(10) for one in await deliver(store, *["hot"] * 20)]
    other = await deliver_one(store, "other")
    crm = Scripted(concurrency=1)
    with slow(crm, seconds=TIMEOUTS.subject_share / 10):
        async with working(store, crm) as worker:
            await worker.wait_until_drained()
    assert crm.order.index(other) <= 12, "its share is ten of them"
    assert [one for one in crm.order if one != other] == hot


async def test_a_busy_subject_makes_room_for_other_destinations(store: Store) -> None:
    """R44: the worker's own limit is one; nobody's subject holds that for ever either."""
    for _ in range(5):
        await deliver(store, *["hot"] * 20)
    [other] = await deliver(store, "other", to=MAIL)
    crm, mail = Scripted(), Scripted("mail", 2)
    with slow(crm, mail, seconds=TIMEOUTS.subject_share / 10) as order:
        async with working(store, crm, mail, concurrency=1) as worker:
            await worker.wait_until_drained()
    assert mail.order == [other]
    assert order.index(2) <= 12


async def test_without_others_a_busy_subject_goes_on(store: Store) -> None:
    """Its share over, it is due like any other, and comes again."""
    made = [one for _ in range(2) for one in await deliver(store, *["hot"] * 20)]
    crm = Scripted(concurrency=1)
    with slow(crm, seconds=TIMEOUTS.subject_share / 3):
        async with working(store, crm) as worker:
            await worker.wait_until_drained()
    assert crm.order == made


# -- stop --------------------------------------------------------------------------------------


async def test_who_stops_gives_back_the_next_uncounted(
    ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R37: the settlement that takes it was under way already; another worker begins it at once."""
    ground.stand_still()
    gate = Gate(store, monkeypatch)
    made = await deliver(store, *["s"] * 3)
    crm = Scripted()
    async with working(store, crm) as worker:
        await crm.until_begun(made[0])
        crm.end(made[0])
        assert (await gate.until_asked()).take_next is not None
        stopping = asyncio.create_task(worker.stop(0.0))
        await until(lambda: worker._stopping)
        gate.open.set()
        await stopping
        assert crm.order == [made[0]]
        assert (await look(store, made[0])).status is DeliveryStatus.done
        assert [await is_untouched(store, one) for one in made[1:]] == [True, True]
        lease = await take_one(store)
        assert (lease.delivery.id, lease.delivery.attempt) == (made[1], 1)


async def test_who_stops_asks_for_no_next(ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way ends in peace, and the line is left to others."""
    ground.stand_still()
    made = await deliver(store, *["s"] * 3)
    crm = Scripted()
    async with working(store, crm) as worker:
        await crm.until_begun(made[0])
        gate = Gate(store, monkeypatch)
        gate.open.set()
        stopping = asyncio.create_task(worker.stop(3600.0))
        await until(lambda: worker._stopping)
        crm.end(made[0])
        await stopping
        [asked] = gate.waiting
        assert (asked.what, asked.take_next) == (Settle.done, None)
        assert ids(await take(store)) == [made[1]]


async def test_who_stops_leaves_no_lease_to_an_arrival_that_is_on_its_way(place: Place) -> None:
    """R37: its commit takes longer than all else there is to wait for; what it keeps is for others, at once."""
    store, crm = await place.open(), Scripted()

    async def leave() -> None:
        await worker.stop(0.0)
        await store.close()

    async with working(store, crm) as worker:
        await is_idle(worker)
        with rival(place) as other:
            other.execute("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
            arriving = asyncio.create_task(record(store, intake(item(to=[CRM]))))
            await until(waits_for_a_lock(place))
            leaving = asyncio.create_task(leave())
            await until(lambda: worker._stopping)
            for _ in range(50):  # who does not wait for it has the time to go
                await asyncio.sleep(0.01)
            other.rollback()
        assert outcomes(await arriving) == [Outcome.accepted]
        await leaving
    assert place.sql("SELECT leased, attempts FROM heads") == [(False, 0)]
