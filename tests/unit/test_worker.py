"""The worker on virtual time, with a real store in this process: what it begins, when, and what it gives back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
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
from oncehook.model import Allowance, Category, Lease, LimitRequest, Priority, Settle, Settled, Settlement
from oncehook.retry import Policy
from oncehook.store.base import Store
from oncehook.worker import (
    MOST_UNSETTLED,
    TIMEOUTS,
    DestinationSlots,
    Heartbeat,
    LimitedSlots,
    Load,
    SettlementBatcher,
    Worker,
)

SOON = 0.5
"""Seconds after which whatever can begin has begun: several waits for the disk."""


class Bench:
    """A worker on a store, with the destination `crm` and a clock that jumps."""

    def __init__(self, loop: VirtualLoop, store: Store) -> None:
        self.loop, self.store = loop, store
        self.observer = Noted()
        self.worker: Worker | None = None

    async def hire(self, *destinations: Scripted, concurrency: int = 1000, load: Load | None = None) -> Worker:
        self.worker = Worker(
            self.store, destinations, self.observer, concurrency=concurrency, heartbeat=VirtualHeartbeat, load=load
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


def test_an_account_whose_destinations_hang_leaves_room_for_others(run: Run) -> None:
    async def test(bench: Bench) -> None:
        hog, other = Scripted(account="42", concurrency=100), Scripted("mail", 2, account="43", concurrency=100)
        await deliver(bench.store, *[None] * 100, account="42")
        await bench.hire(hog, other, concurrency=40)
        await asyncio.sleep(SOON)
        held = len(hog.running)
        assert 10 <= held <= 30, "a quarter at a time, and none of the last half beyond it"
        await deliver(bench.store, *[None] * 5, to=MAIL, account="43")
        await asyncio.sleep(SOON)
        assert (len(other.running), len(hog.running)) == (5, held)
        hog.end_all()
        other.end_all()
        await asyncio.sleep(5)
        assert (len(hog.begun), len(other.begun)) == (100, 5)

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


# -- destinations that are stored ----------------------------------------------------------------


class Shelf:
    """Stored destinations, as a worker loads them."""

    def __init__(self, *destinations: Scripted) -> None:
        self.stored = {one.id: one for one in destinations}

    async def load(self, ids: Collection[int]) -> dict[int, Any]:
        return {number: self.stored[number] for number in ids if number in self.stored}

    def put(self, worker: Worker, destination: Scripted) -> Scripted:
        self.stored[destination.id] = destination
        worker.forget([destination.id])
        return destination


@pytest.mark.parametrize("limits", [({}, {"rate": 100.0}), ({"rate": 100.0}, {}), ({}, {"is_shared": True})])
def test_what_is_under_way_when_a_limit_changes_frees_its_place(
    run: Run, limits: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    async def test(bench: Bench) -> None:
        before, after = limits
        crm = Scripted(concurrency=2, **before)
        shelf = Shelf(crm)
        await deliver(bench.store, *[None] * 6)
        worker = await bench.hire(load=shelf.load)
        await asyncio.sleep(SOON)
        assert len(crm.running) == 2
        changed = shelf.put(worker, Scripted(concurrency=2, **after))
        await asyncio.sleep(SOON)
        assert not changed.running, "what is under way counts on"
        crm.end_all()
        await asyncio.sleep(SOON)
        assert len(changed.running) == 2
        changed.end_all()
        await asyncio.sleep(SOON)
        assert (crm.most, changed.most, len(crm.begun) + len(changed.begun)) == (2, 2, 6)

    run(test)


def test_what_is_under_way_when_a_destination_goes_and_comes_back_counts(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm = Scripted(concurrency=2)
        shelf = Shelf(crm)
        await deliver(bench.store, *[None] * 6)
        worker = await bench.hire(load=shelf.load)
        await asyncio.sleep(SOON)
        del shelf.stored[crm.id]
        worker.forget([crm.id])
        await asyncio.sleep(SOON)
        again = shelf.put(worker, Scripted(concurrency=2))
        await asyncio.sleep(SOON)
        assert (len(crm.running), again.running) == (2, {})
        crm.end_all()
        await asyncio.sleep(SOON)
        assert len(again.running) == 2
        again.end_all()
        await asyncio.sleep(SOON)
        assert (again.most, len(again.begun)) == (2, 4)

    run(test)


def test_what_is_being_leased_when_its_destination_changes_goes_to_the_new_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the worker's own request, with an arrival, and behind another of its subject."""

    async def test(bench: Bench) -> None:
        first, second, third, fourth = (Scripted() for _ in range(4))
        shelf = Shelf(first)
        worker = await bench.hire(load=shelf.load)
        lease, settle_all = bench.store.lease, bench.store.settle

        async def change_after_lease(requests: Sequence[Any], worker_id: str) -> list[Lease]:
            leases = await lease(requests, worker_id)
            if leases and shelf.stored[1] is first:
                shelf.put(worker, second)
            return leases

        async def change_after_settle(group: Sequence[Settlement], worker_id: str) -> Settled:
            settled = await settle_all(group, worker_id)
            if settled.next and shelf.stored[1] is second:
                shelf.put(worker, third)
            return settled

        monkeypatch.setattr(bench.store, "lease", change_after_lease)
        monkeypatch.setattr(bench.store, "settle", change_after_settle)
        second.answers = lambda lease: Result()  # at once: the next is leased with its settlement
        await deliver(bench.store, "a", "a")
        await asyncio.sleep(SOON)
        assert (len(first.begun), len(second.begun), len(third.begun)) == (0, 1, 1)
        third.end_all()
        await asyncio.sleep(SOON)
        begin = worker.begin_reserved

        def change_after_arrival(lease: Lease, asked_at: float) -> None:
            shelf.put(worker, fourth)
            begin(lease, asked_at)

        monkeypatch.setattr(worker, "begin_reserved", change_after_arrival)
        await deliver(bench.store, "b")
        await asyncio.sleep(SOON)
        assert (len(third.begun), [one.delivery.attempt for one in fourth.begun]) == (1, [1])
        fourth.end_all()
        await asyncio.sleep(SOON)

    run(test)


def test_a_change_while_a_destination_is_loaded_for_the_first_time_is_not_lost(run: Run) -> None:
    async def test(bench: Bench) -> None:
        old, new = Scripted(), Scripted()
        shelf = Shelf(old)

        async def change_after_read(ids: Collection[int]) -> dict[int, Any]:
            found = await shelf.load(ids)
            if old in found.values():
                shelf.put(worker, new)
            return found

        worker = await bench.hire(load=change_after_read)
        await deliver_one(bench.store)
        await asyncio.sleep(SOON)
        assert (len(old.begun), len(new.begun)) == (0, 1)
        new.end_all()
        await asyncio.sleep(SOON)

    run(test)


def test_one_that_cannot_be_opened_holds_up_no_other(run: Run) -> None:
    async def test(bench: Bench) -> None:
        crm, mail = Scripted(), Scripted("mail", 2)

        async def fail() -> None:
            raise OSError("its certificates are gone")

        crm.open = fail  # type: ignore[method-assign]
        await deliver_one(bench.store)
        await deliver_one(bench.store, to=MAIL)
        shelf = Shelf(crm, mail)
        worker = await bench.hire(load=shelf.load)
        await asyncio.sleep(SOON)
        assert (len(crm.begun), len(mail.begun)) == (0, 1)
        mail.end_all()
        shelf.put(worker, Scripted()).end_all()
        await asyncio.sleep(SOON)
        assert len(shelf.stored[1].begun) == 1

    run(test)


# -- slots -------------------------------------------------------------------------------------


def test_slots_that_are_asked_for_are_not_free() -> None:
    slots = DestinationSlots(cast("Any", SimpleNamespace(terms=Terms(concurrency=5))))
    assert slots.room(100) == 5
    slots.take()
    slots.asked = 3
    assert (slots.room(100), slots.room(4)) == (1, 1)
    slots.give_back()
    assert slots.room(100) == 2


class LimitCase:
    """Slots of a destination with limits, on a clock that a test moves; the test grants what the store would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **terms: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(clock, "steady", lambda: self.now)
        self.slots = LimitedSlots(cast("Any", SimpleNamespace(id=1, terms=Terms(lease=6.0, **terms))), TIMEOUTS)

    def needs(self, is_due: bool = True) -> bool:
        return self.slots.needs(is_due, self.now)

    def grant(self, is_due: bool = True, **granted: Any) -> LimitRequest:
        asked = self.slots.build_request(is_due)
        self.slots.grant(Allowance(1, **granted), self.now)
        return asked


def test_attempts_begin_at_the_moments_that_were_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LimitCase(monkeypatch, rate=20.0)
    slots = case.slots
    assert (slots.room(100), case.needs(is_due=False), case.needs()) == (0, False, True)
    assert [case.grant(slots=1).slots, case.grant(slots=2, first_in=0.05).slots] == [1, 2], "twice as many, while used"
    assert slots.room(100) == 1
    slots.take()
    assert (slots.room(100), round(slots.rests(True, case.now), 3)) == (0, 0.05)
    case.now += 0.1
    assert slots.room(100) == 2
    slots.take()
    slots.refund()
    assert slots.room(100) == 2
    case.now += 1.0
    assert slots.room(100) == 0, "no burst follows a pause"
    assert case.grant(slots=1).slots == 1, "what was not used is not asked for again"


def test_moments_are_used_in_their_order_however_late_an_answer_was(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LimitCase(monkeypatch, rate=100.0)
    case.grant(slots=2, first_in=0.03)  # its answer took long, and counts from when it came
    case.grant(slots=1, first_in=0.01)
    case.now += 0.02
    assert case.slots.room(100) == 1


def test_a_moment_of_a_slow_rate_is_kept_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LimitCase(monkeypatch, rate=1 / 60)
    case.grant(slots=1)
    case.now += 59.0
    assert case.slots.room(100) == 1
    case.slots.take()
    assert case.needs()
    case.grant(first_in=1.0)
    case.now += 1.0
    assert not case.needs(), "it was used late: the next does not follow at once"
    case.now += 59.0
    assert case.needs()


def test_moments_of_a_slow_rate_that_came_together_are_used_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LimitCase(monkeypatch, rate=0.5)
    case.grant(slots=1, first_in=0.7)
    case.grant(slots=1, first_in=1.4)
    case.now += 1.5
    assert case.slots.room(100) == 1
    case.slots.take()
    case.now += 1.9
    assert case.slots.room(100) == 0
    case.now += 0.1
    assert case.slots.room(100) == 1


def test_places_are_asked_for_held_renewed_and_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LimitCase(monkeypatch, concurrency=4, is_shared=True)
    slots = case.slots
    assert (slots.room(100), case.needs(is_due=False), case.needs()) == (0, False, True)
    asked = case.grant(places=2)
    assert (asked.limit, asked.busy, asked.wanted) == (4, 0, 4)
    slots.take()
    slots.take()
    assert (slots.room(100), case.needs()) == (0, False), "others hold the rest: not again at once"
    case.now += TIMEOUTS.limit_pause
    assert case.needs()
    slots.give_back()
    slots.give_back()
    case.now += 1.0
    assert case.needs(is_due=False), "renewed, though nothing waits"
    asked = case.grant(is_due=False, places=3)
    assert (asked.busy, asked.wanted) == (0, 3), "as many as were used at once, and one more"
    case.now += 1.0
    assert case.grant(is_due=False, places=0).wanted == 0
    assert (case.needs(is_due=False), case.needs()) == (False, True), "after a pause it asks at once"


def test_nothing_begins_under_places_that_may_be_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lease ends before the places do, under which it began: they are used for one lease, and count for two."""
    case = LimitCase(monkeypatch, concurrency=4, is_shared=True)
    case.grant(places=4)
    case.now += 4.9
    assert (case.slots.room(100), case.slots.may_go_on()) == (4, True)
    case.now += 0.1
    assert (case.slots.room(100), case.slots.may_go_on(), case.needs()) == (0, False, True)


def test_lower_priorities_get_a_part(run: Run) -> None:
    async def test(bench: Bench) -> None:
        worker = await bench.hire(Scripted())
        counts: Counter[Priority] = Counter()
        for worker._rounds in range(1000):
            for one in worker._split(Scripted(), 1, [Priority.high, Priority.live, Priority.low, Priority.replay]):
                counts[one.priority] += one.limit
        assert counts == {Priority.high: 900, Priority.live: 90, Priority.low: 9, Priority.replay: 1}
        shares = worker._split(Scripted(), 100, [Priority.live, Priority.replay])
        assert [(one.priority, one.limit) for one in shares] == [(Priority.live, 90), (Priority.replay, 10)]
        assert [one.limit for one in worker._split(Scripted(), 7, [Priority.low])] == [7]

    run(test)


# -- the heartbeat -----------------------------------------------------------------------------


class Renewing:
    """A store that renews what it is asked to, unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[set[int]] = []
        self.answer: Callable[[set[int]], set[int]] = lambda fences: fences

    def renew(self, leases: Sequence[Lease], worker: str | None = None) -> set[int]:
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
