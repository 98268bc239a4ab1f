"""What the store tells as it happens: a lease that was taken over, a replay that is over; each once (UX.md 9)."""

from __future__ import annotations

import asyncio

import pytest

from oncehook.model import Expired, LeaseRequest, Options, Priority, ReplayState, StoredReplay
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    replay,
    replay_all,
    settle,
    take,
    take_one,
)
from tests.store.place import Place


@pytest.fixture
def expired(store: Store) -> list[Expired]:
    told: list[Expired] = []
    store.observer.note_expired = told.append
    return told


@pytest.fixture
def finished(store: Store) -> list[StoredReplay]:
    told: list[StoredReplay] = []
    store.observer.note_finished = told.append
    return told


async def lease_as(store: Store, worker: str | None, **about: int | Priority) -> int:
    """The fence of the one lease that this worker gets."""
    [lease] = await store.lease([LeaseRequest(1, 10, 10.0, **about)], worker)  # type: ignore[arg-type]
    return lease.fence


# -- leases ------------------------------------------------------------------------------------


async def test_a_lease_that_is_set_aside_is_told_once(ground: Ground, store: Store, expired: list[Expired]) -> None:
    made = await deliver_one(store, "s")
    fence = await lease_as(store, "first:1:a")
    assert await store.lease([LeaseRequest(1, 10, 10.0)], "second:2:b") == []
    assert expired == [], "it is held"
    ground.forward(11)
    for _ in range(3):
        assert await store.lease([LeaseRequest(1, 10, 10.0)], "second:2:b") == []
    assert expired == [Expired(made, made.event_id, 1, fence, 1, 1, "first:1:a")]
    assert await lease_as(store, "second:2:b", priority=Priority.quarantined) > fence
    assert len(expired) == 1, "to run it alone takes nothing over"


async def test_each_lease_that_is_taken_over_is_told(ground: Ground, store: Store, expired: list[Expired]) -> None:
    made = await deliver_one(store)
    fences = []
    for worker in ("a", "b", None, "d"):
        fences.append(await lease_as(store, worker, crash_tolerance=99))
        ground.forward(11)
    assert [(one.delivery_id, one.fence, one.attempt, one.worker) for one in expired] == [
        (made, fence, 1, worker) for fence, worker in zip(fences, ("a", "b", None), strict=False)
    ]


async def test_what_is_settled_or_kept_alive_is_not_told(ground: Ground, store: Store, expired: list[Expired]) -> None:
    await deliver(store, None, None)
    [ended, kept] = await take(store, lease=100.0)
    await settle(store, done(ended))
    ground.forward(60)
    assert store.renew([kept]) == {kept.fence}
    ground.forward(60)
    assert await take(store) == []
    await settle(store, done(kept))
    ground.forward(60)
    assert await take(store) == []
    assert expired == []


async def test_of_a_coalesced_line_it_names_what_was_carried(
    ground: Ground, store: Store, expired: list[Expired]
) -> None:
    made = await deliver(store, "s", "s", "s", options=Options.coalesce_any)
    fence = await lease_as(store, "first")
    ground.forward(11)
    assert await take(store) == []
    assert expired == [Expired(made[2], made[2].event_id, 1, fence, 1, 1, "first")]


async def test_a_suspect_that_dies_alone_is_told_each_time(
    ground: Ground, store: Store, expired: list[Expired]
) -> None:
    await deliver_one(store)
    fences = [await lease_as(store, "w0")]
    ground.forward(11)
    assert await take(store) == []
    for worker in ("w1", "w2"):
        fences.append(await lease_as(store, worker, priority=Priority.quarantined))
        ground.forward(11)
    await take_one(store, priority=Priority.quarantined)
    assert [(one.fence, one.worker) for one in expired] == list(zip(fences, ("w0", "w1", "w2"), strict=True))


async def test_of_many_who_look_one_tells(place: Place) -> None:
    """PostgreSQL: whoever takes it over, and nobody else."""
    stores = [await place.open() for _ in range(4)]
    told: list[Expired] = []
    for store in stores:
        store.observer.note_expired = told.append
    made = await deliver(stores[0], *[None] * 40)
    assert len(await stores[0].lease([LeaseRequest(1, 100, 30.0)], "gone")) == 40
    place.sql("UPDATE heads SET due_at = now() - interval '1 second'")
    await asyncio.gather(*[take(store, limit=15) for store in stores for _ in range(4)])
    assert sorted(one.delivery_id for one in told) == sorted(made)


# -- replays -----------------------------------------------------------------------------------


async def test_a_replay_that_is_done_is_told_once(store: Store, finished: list[StoredReplay]) -> None:
    await dead_letters(store, None, None, None)
    made = await replay_all(store)
    await store.feed_replays()
    [first, second, third] = await take(store, priority=Priority.replay)
    await settle(store, done(first), done(second))
    await store.feed_replays()
    assert finished == [], "one is still under way"
    await settle(store, dead(third))
    for _ in range(3):
        await store.feed_replays()
    [told] = finished
    assert (told.id, told.state, told.planned, told.done, told.dead, told.skipped) == (
        made.id, ReplayState.done, 3, 2, 1, 0,
    )  # fmt: skip


async def test_a_single_replay_is_told_too(store: Store, finished: list[StoredReplay]) -> None:
    [letter] = await dead_letters(store, None)
    made = await replay(store, letter)
    await settle(store, done(await take_one(store)))
    await store.feed_replays()
    assert [(told.id, told.done, told.bulk) for told in finished] == [(made.id, 1, False)]


async def test_a_replay_that_is_aborted_is_told_once(store: Store, finished: list[StoredReplay]) -> None:
    await dead_letters(store, None, None)
    made = await replay_all(store)
    await store.feed_replays(open_at_most=1)
    lease = await take_one(store, priority=Priority.replay)
    await store.set_replay_state(made.id, ReplayState.paused, "ann")
    await store.set_replay_state(made.id, ReplayState.running, "ann")
    assert finished == []
    await store.set_replay_state(made.id, ReplayState.aborted, "ann")
    await settle(store, done(lease))
    await store.feed_replays()
    assert [(told.id, told.state, told.planned) for told in finished] == [(made.id, ReplayState.aborted, 2)]


async def test_of_many_who_feed_one_tells(place: Place) -> None:
    stores = [await place.open() for _ in range(3)]
    told: list[StoredReplay] = []
    for store in stores:
        store.observer.note_finished = told.append
    await dead_letters(stores[0], *[None] * 5)
    await replay_all(stores[0])
    await stores[0].feed_replays()
    await settle(stores[1], *[done(lease) for lease in await take(stores[1], priority=Priority.replay)])
    await asyncio.gather(*[store.feed_replays() for store in stores for _ in range(3)])
    await stores[0].feed_replays()
    assert [(one.done, one.state) for one in told] == [(5, ReplayState.done)]
