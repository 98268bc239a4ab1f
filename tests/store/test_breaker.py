"""The breaker: failures in a row over different deliveries hold a destination back, and burn no attempts (R37)."""

from __future__ import annotations

import asyncio

from oncehook.model import Breaker, Category, Settle, Settlement
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    MAIL,
    deliver,
    deliver_one,
    done,
    failed,
    look,
    opened,
    retry,
    settle,
    take,
    take_one,
)

# -- the breaker -------------------------------------------------------------------------------

THREE = Breaker(3, 300.0)


async def open_breaker(store: Store) -> list[bytes]:
    made = await deliver(store, *[None] * 5)
    leases = await take(store, limit=3)
    await settle(store, *[failed(lease, THREE) for lease in leases])
    return made


async def test_failures_over_different_deliveries_open_the_breaker(store: Store) -> None:
    made = await deliver(store, *[None] * 5)
    leases = await take(store, limit=3)
    await settle(store, failed(leases[0], THREE), failed(leases[1], THREE))
    level = (await store.levels())["crm"]
    assert (level.failures, level.open_until) == (2, None)
    await settle(store, failed(leases[2], THREE))
    level = (await store.levels())["crm"]
    assert level.failures == 3
    assert level.open_until is not None
    assert await take(store) == []
    next_due = await store.next_due([1])
    assert next_due.due_in is not None
    assert 200 < next_due.due_in <= 300
    assert {(await look(store, one)).attempts for one in made} == {0, 1}


async def test_dead_ones_count_too(store: Store) -> None:
    """DESIGN.md 5: a wrong deploy that answers 404 must not kill the backlog."""
    await deliver(store, *[None] * 5)
    leases = await take(store, limit=3)
    for lease in leases:
        await settle(store, Settlement(lease, Settle.dead, category=Category.permanent, breaker=THREE))
    assert await take(store) == []


async def test_one_stubborn_delivery_does_not_open_it(store: Store) -> None:
    await deliver_one(store)
    for expected in (1, 1, 1, 1, 1):
        await settle(store, failed(await take_one(store), THREE))
        assert (await store.levels())["crm"].failures == expected
    assert (await take_one(store)).delivery.attempt == 6


async def test_a_success_starts_the_count_anew(store: Store) -> None:
    await deliver(store, *[None] * 9)
    leases = await take(store, limit=6)
    for lease in leases[:2]:
        await settle(store, failed(lease, THREE))
    await settle(store, done(leases[2], breaker=THREE))
    assert (await store.levels())["crm"].failures == 0
    await settle(store, failed(leases[3], THREE), done(leases[4], breaker=THREE), failed(leases[5], THREE))
    assert (await store.levels())["crm"].failures == 1
    assert await take(store) != []


async def test_what_says_nothing_about_the_destination_is_not_counted(store: Store) -> None:
    await deliver(store, *[None] * 9)
    leases = await take(store, limit=8)
    await settle(store, *[retry(lease) for lease in leases[:4]])
    released = [Settlement(lease, Settle.release, breaker=THREE) for lease in leases[4:]]
    await settle(store, *released)
    assert (await store.levels())["crm"].failures == 0
    assert await take(store) != []


async def test_the_breakers_are_of_one_destination(store: Store) -> None:
    await open_breaker(store)
    other = await deliver_one(store, to=MAIL)
    assert (await take_one(store, to=2)).delivery.id == other


async def test_half_open_gives_one_probe(ground: Ground, store: Store) -> None:
    await open_breaker(store)
    ground.forward(301)
    probes = await asyncio.gather(*[take(store, limit=4, probe=20.0) for _ in range(4)])
    assert sorted(map(len, probes)) == [0, 0, 0, 1]
    assert await take(store, probe=20.0) == []
    ground.forward(21)
    assert len(await take(store, probe=20.0)) == 1


async def test_a_probe_that_goes_well_closes_it(ground: Ground, store: Store) -> None:
    await open_breaker(store)
    ground.forward(301)
    probe = await take_one(store)
    await settle(store, done(probe, breaker=THREE))
    level = (await store.levels())["crm"]
    assert (level.failures, level.open_until) == (0, None)
    assert len(await take(store)) == 4


async def test_a_probe_that_fails_opens_it_again(ground: Ground, store: Store) -> None:
    await open_breaker(store)
    ground.forward(301)
    await settle(store, failed(await take_one(store, probe=1.0), THREE))
    ground.forward(5)
    assert await take(store) == []
    ground.forward(296)
    assert len(await take(store)) == 1


async def test_resuming_starts_the_breaker_anew(store: Store) -> None:
    await open_breaker(store)
    await store.resume(1, "ann")
    level = (await store.levels())["crm"]
    assert (level.failures, level.open_until) == (0, None)
    assert len(await take(store)) == 5


async def test_the_breaker_survives_a_restart(ground: Ground) -> None:
    async with opened(ground) as store:
        await open_breaker(store)
    async with opened(ground) as store:
        assert await take(store) == []


async def test_an_open_breaker_burns_no_attempts(ground: Ground, store: Store) -> None:
    """R37"""
    made = await open_breaker(store)
    before = [(await look(store, one)).attempts for one in made]
    for _ in range(3):
        assert await take(store) == []
        ground.forward(5)
    assert [(await look(store, one)).attempts for one in made] == before


async def test_a_settlement_may_pause_its_destination(store: Store) -> None:
    """R39: 410 pauses; the delivery is dead, the others wait."""
    await deliver(store, None, None)
    [lease] = await take(store, limit=1)
    await settle(store, Settlement(lease, Settle.dead, category=Category.permanent, pause="410 Gone"))
    level = (await store.levels())["crm"]
    assert (level.paused_by, level.paused_why) == ("oncehook", "410 Gone")
    assert await take(store) == []
    [line] = await store.audit_log()
    assert line.actor == "oncehook"
    await store.resume(1, "ann")
    assert len(await take(store)) == 1
