"""The worker on virtual time, with a real store in this process: what it begins, when, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.store.making import MAIL, deliver, deliver_one, enrolled, look, replay_all, settle, take
from tests.store.making import dead as as_dead
from tests.store.working import Noted, Scripted
from tests.torture.virtual import VirtualHeartbeat, VirtualLoop, VirtualStore, on_virtual_time

from oncehook import clock
from oncehook.destinations.base import Result, Terms
from oncehook.errors import StoreUnavailable
from oncehook.model import Category, Lease, Settle, Settled, Settlement
from oncehook.retry import Policy
from oncehook.store.base import Store
from oncehook.worker import MOST_UNSETTLED, TIMEOUTS, DestinationSlots, Heartbeat, SettlementBatcher, Worker

SOON = 0.5
"""Seconds after which whatever can begin has begun: several waits for the disk."""


class Bench:
    """A worker on a store, with the destination `crm` and a clock that jumps."""

    def __init__(self, loop: VirtualLoop, store: Store) -> None:
        self.loop, self.store = loop, store
        self.observer = Noted()
        self.worker: Worker | None = None

    async def hire(self, *destinations: Scripted, concurrency: int = 1000) -> Worker:
        self.worker = Worker(
            self.store, destinations, self.observer, concurrency=concurrency, heartbeat=VirtualHeartbeat
        )
        worker = self.worker
        self.store.observer.wake, self.store.observer.taker = worker.wake, worker  # type: ignore[method-assign]
        self.store.observer.note_expired = worker.note_expired  # type: ignore[method-assign]
        await worker.start()
        return worker


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]:
    """Run a test on virtual time; when it ends, its worker stops and the books of the store must balance."""

    async def live(loop: VirtualLoop, test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        store = VirtualStore(tmp_path / "inbox.db")
        await store.open()
        await enrolled(store)
        bench = Bench(loop, store)
        try:
            await test(bench)
            if bench.worker is not None:
                await bench.worker.stop(0.0)
            assert [check.name for check in await store.check() if not check.ok] == []
        finally:
            await store.close()

    return lambda test: on_virtual_time("worker", lambda loop: live(loop, test))


Run = Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]


# -- what is begun -----------------------------------------------------------------------------


def test_no_more_is_begun_than_a_destination_and_the_worker_have_room_for(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm, mail = Scripted(concurrency=3), Scripted("mail", 2, concurrency=50)
        await deliver(bench.store, *[None] * 9)
        await deliver(bench.store, *[None] * 9, to=MAIL)
        await bench.hire(crm, mail, concurrency=7)
        await asyncio.sleep(SOON)
        assert (len(crm.running), len(mail.running)) == (3, 4)
        crm.end_all()
        mail.end_all()
        await asyncio.sleep(5)
        assert (crm.most, len(crm.begun), len(mail.begun)) == (3, 9, 9)

    run(test)


def test_a_rate_spreads_attempts_over_time(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted(rate=2.0)
        crm.answers = lambda lease: Result()
        await deliver(bench.store, *[None] * 5)
        await bench.hire(crm)
        await asyncio.sleep(1.0)
        assert 2 <= len(crm.begun) <= 3
        await asyncio.sleep(1.5)
        assert len(crm.begun) == 5

    run(test)


def test_what_failed_is_tried_again_when_it_is_due_and_not_before(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm, when = Scripted(retry=Policy(3, base=60.0, jitter="none")), list[float]()

        def answer(lease: Lease) -> Result:
            when.append(bench.loop.moment)
            return Result(Category.transient)

        crm.answers = answer
        delivery = await deliver_one(bench.store)
        worker = await bench.hire(crm)
        await worker.wait_until_drained()
        assert len(when) == 3
        assert 60 <= when[1] - when[0] < 61
        assert [one.what for one in bench.observer.settled] == [Settle.retry, Settle.retry, Settle.dead]
        assert (await look(bench.store, delivery)).status == "dead"

    run(test)


def test_a_subject_is_worked_on_in_order_and_one_at_a_time(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted()
        first, second, other = await deliver(bench.store, "a", "a", "b")
        await bench.hire(crm)
        await asyncio.sleep(SOON)
        assert set(crm.running) == {first, other}
        crm.end(first)
        await asyncio.sleep(SOON)
        assert set(crm.running) == {second, other}

    run(test)


def test_a_bulk_replay_takes_a_tenth_while_there_is_live_work(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted(concurrency=20)
        dead = await deliver(bench.store, *[None] * 30)
        await settle(bench.store, *[as_dead(one) for one in await take(bench.store, limit=30)])
        await replay_all(bench.store)
        await bench.store.feed_replays()
        await deliver(bench.store, *[None] * 40)
        await bench.hire(crm)
        await asyncio.sleep(SOON)
        replayed = [one for one in crm.running if one in dead]
        assert (len(crm.running), len(replayed)) == (20, 2)

    run(test)


def test_what_was_under_way_when_a_process_died_runs_alone(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm, mail = Scripted(), Scripted("mail", 2)
        suspect = await deliver_one(bench.store)
        await take(bench.store, lease=5.0)
        await asyncio.sleep(6)  # its holder is gone
        await bench.hire(crm, mail)
        await asyncio.sleep(TIMEOUTS.longest_rest + SOON)
        assert set(crm.running) == {suspect}
        other = await deliver_one(bench.store, to=MAIL)
        await asyncio.sleep(SOON)
        assert other not in mail.running, "nothing else may begin beside it"
        crm.end(suspect)
        await asyncio.sleep(SOON)
        assert other in mail.running
        assert [one.worker for one in bench.observer.expired] == [None]

    run(test)


# -- ending ------------------------------------------------------------------------------------


def test_what_does_not_end_in_time_is_given_back_uncounted(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted()
        delivery = await deliver_one(bench.store)
        worker = await bench.hire(crm)
        await asyncio.sleep(SOON)
        started = bench.loop.moment
        await worker.stop(3.0)
        bench.worker = None
        assert 3.0 <= bench.loop.moment - started < 3.0 + SOON
        stored = await look(bench.store, delivery)
        assert (stored.status, stored.attempts, worker.left_behind) == ("pending", 0, 0)

    run(test)


def test_a_thread_that_goes_on_keeps_its_lease_and_is_counted(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted()
        crm.is_cancellable = False  # type: ignore[attr-defined]
        delivery = await deliver_one(bench.store)
        worker = await bench.hire(crm)
        await asyncio.sleep(SOON)
        await worker.stop(1.0)
        bench.worker = None
        assert (worker.left_behind, (await look(bench.store, delivery)).status) == (1, "leased")
        crm.end_all()

    run(test)


def test_a_lost_lease_ends_its_attempt_which_does_not_count(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted()
        await deliver_one(bench.store)
        worker = await bench.hire(crm)
        await asyncio.sleep(SOON)
        (lease,) = crm.begun
        worker.heartbeat.let_go(lease)
        worker._stop_lost(lease)
        await asyncio.sleep(SOON)
        assert bench.observer.settled == []
        assert [(one.fence > lease.fence, one.delivery.attempt) for one in crm.begun[1:]] == [(True, 1)]

    run(test)


# -- slots -------------------------------------------------------------------------------------


def test_slots_that_are_asked_for_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [0.0]
    monkeypatch.setattr(clock, "steady", lambda: moments[-1])
    slots = DestinationSlots(cast("Any", SimpleNamespace(terms=Terms(concurrency=5, rate=2.0))))
    assert slots.room(100) == 1
    slots.take()
    assert (slots.room(100), slots.allowed_in()) == (0, 0.5)
    moments.append(10.0)
    assert slots.room(100) == 2, "what was not used is kept for a second at most"
    slots.asked = 1
    assert slots.room(100) == 1
    slots.refund()
    assert slots.allowed_in() is None


# -- the heartbeat -----------------------------------------------------------------------------


class Renewing:
    """A store that renews what it is asked to, unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[set[int]] = []
        self.answer: Callable[[set[int]], set[int]] = lambda fences: fences

    def renew(self, leases: Sequence[Lease]) -> set[int]:
        self.asked.append({lease.fence for lease in leases})
        return self.answer(self.asked[-1])


class HeartbeatCase:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.store, self.lost = Renewing(), list[int]()
        monkeypatch.setattr(clock, "steady", lambda: self.now)
        self.heartbeat = Heartbeat(cast("Store", self.store), lambda lease: self.lost.append(lease.fence), 6.0)

    def hold(self, fence: int, seconds: float = 6.0, ends_at: float | None = 100.0, is_settling: bool = False) -> Lease:
        lease = cast("Lease", SimpleNamespace(fence=fence, seconds=seconds, is_settling=is_settling))
        self.heartbeat.hold(lease, self.now, ends_at)
        return lease

    def beat_at(self, now: float) -> bool:
        self.now = now
        return self.heartbeat.beat()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> HeartbeatCase:
    return HeartbeatCase(monkeypatch)


def test_a_lease_is_renewed_six_times_and_a_long_one_less_often(case: HeartbeatCase) -> None:
    case.hold(1)
    case.hold(2, seconds=60.0)
    for now in range(1, 11):
        assert case.beat_at(float(now))
    assert case.store.asked == [{1}] * 9 + [{1, 2}]
    assert case.lost == []


def test_a_lease_that_is_not_ours_any_more_is_lost_once(case: HeartbeatCase) -> None:
    case.hold(1)
    case.hold(2)
    case.store.answer = lambda fences: fences - {2}
    case.beat_at(1.0)
    case.beat_at(2.0)
    assert (case.lost, len(case.heartbeat)) == ([2], 1)


def test_without_an_answer_a_lease_is_given_up_one_beat_before_its_end(case: HeartbeatCase) -> None:
    def unanswered(fences: set[int]) -> set[int]:
        raise StoreUnavailable("away")

    case.store.answer = unanswered
    case.hold(1)
    case.hold(2, ends_at=None)
    assert not case.beat_at(4.9)
    assert case.lost == []
    assert not case.beat_at(5.0)
    assert case.lost == [1], "and a thread keeps its lease: it goes on all the same"


@pytest.mark.parametrize(("ends_at", "is_settling"), [(0.5, False), (None, True)], ids=["hangs", "is being settled"])
def test_what_hangs_or_is_being_settled_is_not_renewed(
    case: HeartbeatCase, ends_at: float | None, is_settling: bool
) -> None:
    case.hold(1, ends_at=ends_at, is_settling=is_settling)
    case.beat_at(1.0)
    assert case.store.asked == []


# -- settlements -------------------------------------------------------------------------------


class Settling:
    """A store that settles, after it was away for some tries; and a worker that notes what it is told."""

    id = "worker"

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.done: list[Settlement] = []
        self.given_up: list[int] = []
        self.batcher = SettlementBatcher(cast("Store", self), cast("Worker", self))

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        if self.errors:
            raise self.errors.pop(0)
        return Settled({one.lease.fence for one in settlements})

    def note_settled(self, done: Settlement, following: Lease | None = None, asked_at: float = 0.0) -> None:
        self.done.append(done)

    def note_lost(self, lease: Lease) -> None:
        self.given_up.append(lease.fence)

    def count_unsettled(self) -> int:
        return 0

    def destination_of(self, lease: Lease) -> Any:
        return SimpleNamespace(terms=Terms(retry=Policy(3, base=1.0, jitter="none")))

    async def add(self, *ended: Settlement) -> None:
        self.batcher.start()
        for one in ended:
            self.batcher.add(one)
        await self.batcher.catch_up()


def ended(fence: int, **about: Any) -> Settlement:
    delivery = SimpleNamespace(attempt=1, run=1)
    lease = SimpleNamespace(fence=fence, queue_key=bytes([fence]), seconds=10.0, delivery=delivery, more=False)
    return Settlement(cast("Lease", lease), Settle.done, **about)


def test_a_settlement_is_asked_for_again_while_the_store_is_away() -> None:
    world = Settling(StoreUnavailable("away"), StoreUnavailable("away"))
    on_virtual_time(1, lambda loop: world.add(ended(1), ended(2)))
    assert ([one.lease.fence for one in world.done], world.given_up) == ([1, 2], [])


def test_a_store_that_stays_away_costs_the_leases() -> None:
    world = Settling(*[StoreUnavailable("away")] * 100)
    on_virtual_time(1, lambda loop: world.add(ended(1)))
    assert (world.done, world.given_up) == ([], [1])


def test_an_effect_that_cannot_be_written_is_a_failed_attempt_and_harms_no_other() -> None:
    world = Settling()

    async def test(loop: VirtualLoop) -> None:
        settle_group = world.settle

        async def refuse(settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
            if any(one.commit for one in settlements):
                raise ConnectionError("the database is busy")
            return await settle_group(settlements, worker)

        world.settle = refuse  # type: ignore[method-assign]
        await world.add(ended(1), ended(2, commit=lambda connection: None))
        while len(world.done) < 2:
            await asyncio.sleep(0.01)

    on_virtual_time(1, test)
    assert [(one.lease.fence, one.what) for one in world.done] == [(1, Settle.done), (2, Settle.retry)]


def test_nothing_begins_while_too_much_is_unsettled() -> None:
    async def test(loop: VirtualLoop) -> None:
        world = Settling()
        for fence in range(MOST_UNSETTLED):
            world.batcher.add(ended(fence % 250))
        assert not world.batcher.is_behind()
        world.batcher.add(ended(1))
        assert world.batcher.is_behind()

    on_virtual_time(1, test)
