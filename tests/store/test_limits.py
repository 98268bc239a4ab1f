"""Limits that count over all workers: moments of a rate, and places for attempts under way (decision 24)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from oncehook.model import Allowance, LeaseRequest, LimitRequest
from oncehook.store.base import AHEAD, MADE_UP_FOR, Store
from tests.store.conftest import Ground
from tests.store.making import deliver, release, settle
from tests.store.working import Scripted, working
from tests.waiting import until

LEASE = 10.0


async def reserve(store: Store, slots: int, rate: float = 50.0, worker: str = "a") -> Allowance:
    [allowance] = await store.allow([LimitRequest(1, LEASE, rate, slots)], worker)
    return allowance


async def place(store: Store, worker: str, wanted: int, busy: int = 0, limit: int = 16, to: int = 1) -> int:
    [allowance] = await store.allow([LimitRequest(to, LEASE, limit=limit, busy=busy, wanted=wanted)], worker)
    return allowance.places


# -- rate --------------------------------------------------------------------------------------


async def test_no_two_workers_get_the_same_moment(ground: Ground, store: Store) -> None:
    ground.stand_still()
    first, second = await reserve(store, 3), await reserve(store, 3, worker="b")
    assert (first.slots, second.slots) == (3, 3)
    assert second.first_in - first.first_in == pytest.approx(3 / 50)


async def test_moments_are_reserved_a_little_ahead_and_no_more(ground: Ground, store: Store) -> None:
    ground.stand_still()
    first = await reserve(store, 1000)
    assert first.first_in == pytest.approx(0.0)
    assert first.slots == int(AHEAD * 50) + 1
    none = await reserve(store, 10, worker="b")
    assert none.slots == 0
    ground.forward(none.first_in + 0.001)
    assert (await reserve(store, 10, worker="b")).slots == 1, "when it makes sense to ask again, it does"


async def test_a_rate_is_kept_to_by_whoever_comes_and_goes(ground: Ground, store: Store) -> None:
    """Ten seconds at 50 a second, with workers that ask at random: 500, and what is made up for or lies ahead."""
    ground.stand_still()
    dice, granted = random.Random(7), 0
    for _ in range(400):
        ground.forward(0.025)
        worker = dice.choice(["a", "b", "c"] if dice.random() < 0.5 else ["a"])
        granted += (await reserve(store, dice.randint(1, 12), worker=worker)).slots
    assert 500 * 0.98 <= granted <= 500 + 50 * (AHEAD + MADE_UP_FOR) + 1


async def test_a_pause_is_not_made_up_for(ground: Ground, store: Store) -> None:
    ground.stand_still()
    await reserve(store, 1)
    ground.forward(60)
    assert (await reserve(store, 1000)).slots <= 50 * (AHEAD + MADE_UP_FOR) + 1


async def test_a_slow_rate_has_one_moment_at_a_time(ground: Ground, store: Store) -> None:
    ground.stand_still()
    assert (await reserve(store, 5, rate=1 / 60)).slots == 1
    later = await reserve(store, 5, rate=1 / 60, worker="b")
    assert later.slots == 0
    assert later.first_in == pytest.approx(60 - AHEAD)


# -- concurrency -------------------------------------------------------------------------------


async def test_a_worker_alone_gets_all_places(store: Store) -> None:
    assert await place(store, "a", 16) == 16
    assert await place(store, "a", 3) == 3, "it hands back what it does not want"
    assert await place(store, "b", 16, to=2) == 16, "another destination has places of its own"


async def test_who_comes_later_gets_what_is_free_and_then_its_part(store: Store) -> None:
    assert await place(store, "a", 16) == 16
    assert await place(store, "b", 16) == 0
    assert await place(store, "a", 16, busy=12) == 8
    assert await place(store, "b", 16) == 4, "what is under way counts until it ends"
    assert await place(store, "a", 16, busy=3) == 8
    assert await place(store, "b", 16, busy=4) == 8


async def test_who_wants_little_leaves_the_rest(store: Store) -> None:
    assert await place(store, "a", 2) == 2
    assert await place(store, "b", 16) == 14


async def test_one_place_for_many_workers(store: Store) -> None:
    assert [await place(store, worker, 1, limit=1) for worker in "abc"] == [1, 0, 0]
    assert await place(store, "a", 0, limit=1) == 0
    assert [await place(store, worker, 1, limit=1) for worker in "bc"] == [1, 0]


async def test_a_worker_that_stops_gives_its_places_back_at_once(store: Store) -> None:
    await place(store, "a", 16)
    await store.dismiss_worker("a")
    assert await place(store, "b", 16) == 16


async def test_places_of_a_worker_that_died_count_for_two_leases(ground: Ground, store: Store) -> None:
    await place(store, "a", 16)
    ground.forward(2 * LEASE - 1)
    assert await place(store, "b", 16) == 0
    ground.forward(2)
    assert await place(store, "b", 16) == 16


async def test_places_of_a_worker_with_an_expired_lease_are_free_for_good(ground: Ground, store: Store) -> None:
    """What a dead worker held is taken over when its lease has ended (R29), and the heir keeps the places."""
    await deliver(store, "a")
    assert await place(store, "a", 1, limit=1) == 1
    [lost] = await store.lease([LeaseRequest(1, 1, LEASE)], "a")
    assert await place(store, "b", 1, limit=1) == 0
    ground.forward(LEASE + 1)
    assert await place(store, "b", 1, limit=1) == 1
    [taken] = await store.lease([LeaseRequest(1, 1, LEASE, crash_tolerance=1)], "b")
    assert taken.fence > lost.fence
    assert await place(store, "b", 1, busy=1, limit=1) == 1
    assert await place(store, "a", 1, limit=1) == 0
    await settle(store, release(taken))


async def test_heartbeats_keep_the_places_of_what_is_under_way(ground: Ground, store: Store) -> None:
    """A worker whose loop is blocked asks for nothing, but its attempts go on (R32)."""
    await deliver(store, *"abcd")
    await place(store, "a", 4, limit=4)
    leases = await store.lease([LeaseRequest(1, 4, LEASE)], "a")
    for _ in range(6):
        ground.forward(LEASE * 0.9)
        assert await asyncio.to_thread(store.renew, leases, "a") == {lease.fence for lease in leases}
    assert await place(store, "b", 4, limit=4) == 0
    await settle(store, *[release(lease) for lease in leases])


async def test_a_restore_gives_all_places_back(store: Store) -> None:
    await place(store, "a", 16)
    await store.invalidate_leases()
    assert await place(store, "b", 16) == 16


async def test_whoever_asks_in_whatever_order_there_are_never_more(ground: Ground, store: Store) -> None:
    """Workers come, go, die, and begin and end attempts: what they may have under way is never more than the limit."""
    dice = random.Random(3)
    places: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    """Attempts under way: as many as a worker may begin, and those from before that have not ended."""
    for _ in range(150):
        worker = dice.choice("abcde")
        deed = dice.random()
        if deed < 0.05:
            await store.dismiss_worker(worker)
            places[worker] = busy[worker] = 0
        else:
            busy[worker] = dice.randint(0, max(places[worker], busy[worker]))
            places[worker] = await place(store, worker, dice.choice([busy[worker], 7, 7]), busy[worker], limit=7)
        assert sum(max(places[one], busy[one]) for one in "abcde") <= 7
        ground.forward(dice.random() / 10)


# -- workers -----------------------------------------------------------------------------------


async def test_two_workers_share_a_concurrency(ground: Ground, store: Store) -> None:
    """Each has a store of its own; together they have as many attempts under way as one may."""
    other = ground.make()
    await other.open()
    try:
        await other.register_names(["orders", "payments"], ["crm", "mail"])
        await deliver(store, *[None] * 500)
        here, there = (Scripted(concurrency=6, is_shared=True, lease=10.0) for _ in range(2))
        async with working(store, here), working(other, there):
            most = 0
            while min(len(here.begun), len(there.begun)) < 10:
                await asyncio.sleep(0.01)
                most = max(most, len(here.running) + len(there.running))
                for one in (here, there):
                    one.end(*[running for running in one.running if random.random() < 0.1])
            assert most == 6
            here.end_all()
            there.end_all()
            await until(lambda: len(here.begun) + len(there.begun) >= 500)
    finally:
        await other.close()
