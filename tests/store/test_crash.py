"""Crash: a worker may die at any moment; the poison is found out, and its neighbours are not condemned (R36)."""

from __future__ import annotations

import pytest

from oncehook.model import DEATHS, AttemptOutcome, DeliveryStatus, Evidence, Priority, Settle, Settlement
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    deliver,
    deliver_one,
    done,
    ids,
    look,
    release,
    retry,
    settle,
    take,
    take_one,
)


async def outcomes(store: Store, delivery: bytes) -> list[AttemptOutcome]:
    return [attempt.outcome for attempt in await store.attempts_of(delivery)]


# -- crashes -----------------------------------------------------------------------------------


async def test_after_a_crash_it_runs_alone(ground: Ground, store: Store) -> None:
    """DESIGN.md 8.3: all that was leased is suspect: set aside, due at once, its attempt given back."""
    made = await deliver(store, None, None, None)
    assert len(await take(store, lease=10.0)) == 3
    ground.forward(11)
    assert await take(store) == []
    next_due = await store.next_due([1])
    assert set(next_due.of(Priority.quarantined)) == {1}
    assert {one.status for one in [await look(store, one) for one in made]} == {DeliveryStatus.pending}
    assert [(await look(store, one)).attempts for one in made] == [0, 0, 0]
    alone = await take_one(store, limit=1, priority=Priority.quarantined)
    assert (alone.priority, alone.delivery.attempt, alone.deaths) == (Priority.quarantined, 1, 0)
    assert await outcomes(store, alone.delivery.id) == [AttemptOutcome.crashed]
    assert (await store.next_due([1])).of(Priority.quarantined)
    await settle(store, done(alone))
    rest = await take(store, priority=Priority.quarantined)
    assert len(rest) == 2
    assert not (await store.next_due([1])).of(Priority.quarantined)
    await settle(store, *[done(lease) for lease in rest])
    assert {one.status for one in [await look(store, one) for one in made]} == {DeliveryStatus.done}


async def test_three_deaths_alone_are_the_end(ground: Ground, store: Store) -> None:
    """R36: it is given out once more, only to be settled dead, and the reason says why."""
    made = await deliver_one(store, "s")
    behind = await deliver_one(store, "s")
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    for deaths in range(DEATHS):
        lease = await take_one(store, lease=10.0, priority=Priority.quarantined)
        assert (lease.delivery.id, lease.deaths, lease.delivery.attempt) == (made, deaths, 1)
        ground.forward(11)
    lease = await take_one(store, priority=Priority.quarantined)
    assert (lease.delivery.id, lease.deaths) == (made, DEATHS)
    await settle(store, Settlement(lease, Settle.dead, evidence=Evidence(error="crash")))
    ended = await look(store, made)
    assert (ended.status, ended.reason) == (DeliveryStatus.dead, "crash")
    assert await outcomes(store, made) == [AttemptOutcome.crashed] * (DEATHS + 1)
    assert [cause.cause for cause in await store.causes()] == ["crash"]
    assert (await take_one(store)).delivery.id == behind


async def test_neighbours_are_not_condemned(ground: Ground, store: Store) -> None:
    """DESIGN.md 8.3: who was in the same process as the poison, however often, dies of nothing."""
    [poison, neighbour] = await deliver(store, "a", "b")
    for _ in range(DEATHS + 2):
        leases = await take(store, lease=10.0, crash_tolerance=99)
        assert sorted(ids(leases)) == sorted([poison, neighbour])
        assert [lease.deaths for lease in leases] == [0, 0]
        assert [lease.delivery.attempt for lease in leases] == [1, 1]
        ground.forward(11)
    assert await take(store) == []
    [first, second] = await take(store, priority=Priority.quarantined)
    assert (first.deaths, second.deaths) == (0, 0)
    await settle(store, done(first), done(second))


async def test_a_trusted_destination_crashes_more_often_before_it_runs_alone(ground: Ground, store: Store) -> None:
    made = await deliver_one(store)
    for _ in range(3):
        assert (await take_one(store, lease=10.0, crash_tolerance=2)).delivery.id == made
        ground.forward(11)
    assert await take(store, crash_tolerance=2) == []
    lease = await take_one(store, priority=Priority.quarantined, crash_tolerance=2)
    assert (lease.deaths, lease.delivery.attempt) == (0, 1)
    assert len(await outcomes(store, made)) == 3


@pytest.mark.parametrize("settlement", [done, retry])
async def test_after_it_ran_alone_its_subject_is_live_again(ground: Ground, store: Store, settlement: object) -> None:
    [made, behind] = await deliver(store, "s", "s")
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    alone = await take_one(store, priority=Priority.quarantined)
    await settle(store, settlement(alone))  # type: ignore[operator]
    assert await take(store, priority=Priority.quarantined) == []
    assert (await take_one(store)).delivery.id == (behind if settlement is done else made)


async def test_one_that_was_given_back_untried_still_has_to_run_alone(ground: Ground, store: Store) -> None:
    made = await deliver_one(store)
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    await settle(store, release(await take_one(store, priority=Priority.quarantined)))
    assert await take(store) == []
    assert (await take_one(store, priority=Priority.quarantined)).delivery.id == made


async def test_an_arrival_does_not_free_a_suspect(ground: Ground, store: Store) -> None:
    [made] = await deliver(store, "s")
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    await deliver_one(store, "s")
    assert await take(store) == []
    assert (await take_one(store, priority=Priority.quarantined)).delivery.id == made


async def test_a_crash_is_counted(ground: Ground, store: Store) -> None:
    await deliver_one(store)
    await take_one(store, lease=10.0)
    ground.forward(11)
    await take(store)
    assert (await store.figures()).by_destination["crm"]["crashed"] == 1
