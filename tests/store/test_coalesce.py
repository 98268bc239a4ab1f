"""Coalesce: one attempt, with the newest, for all that waited when it was leased (DESIGN.md 3)."""

from __future__ import annotations

import pytest

from oncehook.model import AttemptOutcome, Filter, Options, Priority
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    dead,
    deliver,
    deliver_one,
    done,
    ids,
    look,
    release,
    replay,
    retry,
    settle,
    statuses,
    take,
    take_one,
)

TYPE = Options.coalesce_type
ANY = Options.coalesce_any


async def test_one_attempt_covers_all_that_waits(store: Store) -> None:
    made = await deliver(store, *["s"] * 5, options=TYPE)
    lease = await take_one(store)
    assert (lease.delivery.id, lease.front_id, lease.delivery.attempt) == (made[-1], made[0], 1)
    event = await store.get_event(lease.event.id)
    assert event is not None
    assert (await look(store, made[-1])).event_id == event.id
    assert lease.event.body == event.body
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done"] * 5
    notes = [(await look(store, one)).note for one in made]
    assert notes == ["coalesced"] * 4 + [None]
    assert [len(await store.attempts_of(one)) for one in made] == [0, 0, 0, 0, 1]
    assert await take(store) == []


async def test_a_lone_delivery_carries_itself(store: Store) -> None:
    [made] = await deliver(store, "s", options=TYPE)
    lease = await take_one(store)
    assert (lease.delivery.id, lease.front_id) == (made, made)
    await settle(store, done(lease))
    assert (await look(store, made)).note is None


async def test_without_the_option_nothing_is_covered(store: Store) -> None:
    made = await deliver(store, *["s"] * 3)
    lease = await take_one(store)
    assert (lease.delivery.id, lease.front_id) == (made[0], made[0])
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done", "pending", "pending"]


async def test_without_a_subject_nothing_is_covered(store: Store) -> None:
    made = await deliver(store, None, None, options=ANY)
    assert sorted(ids(await take(store))) == sorted(made)


async def test_only_the_same_type(store: Store) -> None:
    made = [await deliver_one(store, "s", type_=kind, options=TYPE) for kind in ("a", "b", "a", "b", "c")]
    lease = await take_one(store)
    assert (lease.delivery.id, lease.event.type) == (made[2], "a")
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done", "pending", "done", "pending", "pending"]
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id, lease.event.type) == (made[1], made[3], "b")
    await settle(store, done(lease))
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (made[4], made[4])
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done"] * 5


async def test_of_every_type(store: Store) -> None:
    made = [await deliver_one(store, "s", type_=kind, options=ANY) for kind in ("a", "b", "a", "c")]
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id, lease.event.type) == (made[0], made[3], "c")
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done"] * 4


@pytest.mark.parametrize("options", [TYPE, ANY])
async def test_what_arrives_after_the_lease_causes_one_more_attempt(store: Store, options: Options) -> None:
    made = await deliver(store, "s", "s", options=options)
    lease = await take_one(store)
    late = await deliver(store, "s", "s", "s", options=options)
    await settle(store, done(lease))
    assert await statuses(store, made + late) == ["done"] * 2 + ["pending"] * 3
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (late[0], late[2])
    await settle(store, done(lease))
    assert await take(store) == []
    assert await statuses(store, made + late) == ["done"] * 5


async def test_while_it_is_leased_the_one_that_is_carried_is_shown_as_leased(store: Store) -> None:
    made = await deliver(store, *["s"] * 3, options=TYPE)
    await take_one(store)
    assert (await look(store, made[2])).status == "leased"
    found = await store.find_deliveries(Filter(status=(await look(store, made[2])).status))
    assert made[2] in [one.id for one in found.items]


@pytest.mark.parametrize("later", [retry, release])
async def test_a_later_attempt_covers_what_came_meanwhile(store: Store, later: object) -> None:
    made = await deliver(store, "s", "s", options=TYPE)
    lease = await take_one(store)
    made += await deliver(store, "s", options=TYPE)
    await settle(store, later(lease))  # type: ignore[operator]
    assert await statuses(store, made) == ["pending"] * 3
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (made[0], made[2])
    assert lease.delivery.attempt == (2 if later is retry else 1)
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done"] * 3


async def test_dead_covers_them_too(store: Store) -> None:
    made = await deliver(store, *["s"] * 3, options=TYPE)
    await settle(store, dead(await take_one(store)))
    assert await statuses(store, made) == ["dead"] * 3
    assert [(await look(store, one)).note for one in made] == ["coalesced", "coalesced", None]
    assert await take(store) == []


async def test_dead_and_held_is_the_head_alone(store: Store) -> None:
    made = await deliver(store, *["s"] * 3, options=TYPE | Options.hold)
    await settle(store, dead(await take_one(store)))
    assert await statuses(store, made) == ["dead", "pending", "pending"]
    assert await take(store) == []
    await replay(store, made[0])
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (made[0], made[2])
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done"] * 3


async def test_a_crash_is_of_the_one_that_was_carried(ground: Ground, store: Store) -> None:
    made = await deliver(store, *["s"] * 3, options=TYPE)
    lost = await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    assert [len(await store.attempts_of(one)) for one in made] == [0, 0, 1]
    [crashed] = await store.attempts_of(made[2])
    assert (crashed.outcome, crashed.fence) == (AttemptOutcome.crashed, lost.fence)
    lease = await take_one(store, priority=Priority.quarantined)
    assert (lease.front_id, lease.delivery.id, lease.delivery.attempt) == (made[0], made[2], 1)
    await settle(store, done(lease))
    assert await statuses(store, made) == ["done"] * 3


async def test_coalesced_ones_are_counted(store: Store) -> None:
    """R68: the level counts deliveries."""
    await deliver(store, *["s"] * 4, options=TYPE)
    await settle(store, done(await take_one(store)))
    level = (await store.levels())["crm"]
    assert (level.pending, level.done) == (0, 4)


async def test_a_coalesced_one_can_be_replayed_by_order(store: Store) -> None:
    made = await deliver(store, *["s"] * 3, options=TYPE)
    await settle(store, done(await take_one(store)))
    await replay(store, made[0], force=True)
    lease = await take_one(store)
    assert (lease.delivery.id, lease.delivery.run) == (made[0], 2)
    await settle(store, done(lease))
    kept = await look(store, made[0])
    assert (kept.status, kept.note, kept.run) == ("done", None, 2)


async def test_a_new_subject_begins_after_a_coalesced_one(store: Store) -> None:
    await deliver(store, *["s"] * 3, options=TYPE)
    await settle(store, done(await take_one(store)))
    [late] = await deliver(store, "s", options=TYPE)
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (late, late)
