"""Leases in rounds over a value of the events, and by the priority of their route (decision 24)."""

from __future__ import annotations

from collections import Counter

import pytest

from oncehook.model import Filter, Options, Priority, fair_hash
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    finish,
    ids,
    intake,
    item,
    look,
    record,
    replay_all,
    retry,
    settle,
    take,
    take_one,
)

# -- rounds ------------------------------------------------------------------------------------


async def crowd(store: Store, **counts: int) -> dict[bytes, str]:
    """So many deliveries of each value, one value after the other; whose each delivery is."""
    owners: dict[bytes, str] = {}
    for name, count in counts.items():
        made = await deliver(store, *[None] * count, fair=name)
        owners.update(dict.fromkeys(made, name))
    return owners


async def test_each_value_gets_its_turn(store: Store) -> None:
    owners = await crowd(store, big=50, a=2, b=2, c=2)
    for _ in range(2):
        leases = await take(store, 4, fair=True)
        assert Counter(owners[id_] for id_ in ids(leases)) == Counter("abc") + Counter(["big"])
    leases = await take(store, 4, fair=True)
    assert Counter(owners[id_] for id_ in ids(leases)) == {"big": 4}, "what others do not want is not left over"


async def test_a_round_goes_on_where_the_last_one_ended(store: Store) -> None:
    owners = await crowd(store, **{f"v{n}": 3 for n in range(10)})
    found = [owners[id_] for _ in range(10) for id_ in ids(await take(store, 3, fair=True))]
    assert len(found) == 30
    for nth in range(3):
        assert len(set(found[nth * 10 : nth * 10 + 10])) == 10, "nobody has a second turn before all had the first"


async def test_with_few_values_each_gets_as_many(store: Store) -> None:
    owners = await crowd(store, big=30, small=30)
    assert Counter(owners[id_] for id_ in ids(await take(store, 10, fair=True))) == {"big": 5, "small": 5}
    counts: Counter[str] = Counter()
    for _ in range(6):
        counts.update(owners[id_] for id_ in ids(await take(store, 3, fair=True)))
    assert counts == {"big": 9, "small": 9}, "who got one more is the last to begin next time"


async def test_within_a_value_the_longest_waiting_comes_first(store: Store) -> None:
    made = await deliver(store, *[None] * 5, fair="one")
    assert [one for _ in range(5) for one in ids(await take(store, 1, fair=True))] == made


async def test_what_has_no_value_is_reached(store: Store) -> None:
    """Deliveries from before a destination was leased in rounds."""
    made = await deliver(store, None, None)
    owners = await crowd(store, a=1)
    assert set(ids(await take(store, 3, fair=True))) == {*made, *owners}


async def test_what_waits_for_a_retry_keeps_nobody_waiting(ground: Ground, store: Store) -> None:
    """More values than a round passes by have nothing due; the one that has is found all the same."""
    owners = await crowd(store, **{f"v{n}": 1 for n in range(100)})
    leases = await take(store, 100, fair=True)
    await settle(store, *[retry(lease, 3600.0) for lease in leases[:-1]], retry(leases[-1], 0.0))
    assert ids(await take(store, 5, fair=True)) == ids(leases[-1:])
    ground.forward(3601)
    assert len(await take(store, 100, fair=True)) == 99
    assert len(owners) == 100


async def test_a_lease_that_ran_out_is_taken_over_in_its_round(ground: Ground, store: Store) -> None:
    await deliver(store, "s", fair="a")
    lost = await take_one(store, fair=True, lease=10.0)
    ground.forward(11)
    found = await take_one(store, fair=True, crash_tolerance=1)
    assert (found.delivery.id, found.fence > lost.fence) == (lost.delivery.id, True)


async def test_the_next_of_a_subject_has_a_value_of_its_own(ground: Ground, store: Store) -> None:
    [first] = await deliver(store, "s", fair="a")
    [second] = await deliver(store, "s", fair="b")
    for expected, name in ((first, "a"), (second, "b")):
        lease = await take_one(store, fair=True)
        assert lease.delivery.id == expected
        assert ground.sql("SELECT fair FROM heads") == [(fair_hash(name),)]
        await settle(store, done(lease))


async def test_replays_go_in_rounds_too(store: Store) -> None:
    big = await dead_letters(store, *[None] * 20, fair="big")
    small = await dead_letters(store, None, fair="small")
    await replay_all(store, Filter())
    await store.feed_replays()
    assert set(small) < set(ids(await take(store, 2, fair=True, priority=Priority.replay))) < {*small, *big}


async def test_taken_with_the_settlement_before_it(store: Store) -> None:
    await deliver(store, "s", "s", fair="a")
    lease = await take_one(store, fair=True)
    [following] = (await store.settle([done(lease, take_next=30.0)])).next
    await settle(store, done(following))


# -- priorities --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "priority"),
    [(Options.high, Priority.high), (Options.none, Priority.live), (Options.low, Priority.low)],
)
async def test_a_delivery_has_the_priority_of_its_route(store: Store, options: Options, priority: Priority) -> None:
    made = await deliver(store, None, "s", "s", options=options)
    assert {one for one in Priority if (await store.next_due([1])).of(one)} == {priority}
    for other in Priority:
        if other is not priority:
            assert await take(store, priority=other) == []
    leases = await take(store, priority=priority)
    assert set(ids(leases)) == set(made[:2])
    assert {lease.priority for lease in leases} == {priority}
    await settle(store, *[done(lease) for lease in leases])
    assert ids(await take(store, priority=priority)) == made[2:], "the next of a subject, too"


async def test_a_retry_keeps_its_priority(ground: Ground, store: Store) -> None:
    await deliver_one(store, options=Options.high)
    await settle(store, retry(await take_one(store, priority=Priority.high), 5.0))
    ground.forward(6)
    await take_one(store, priority=Priority.high)


async def test_what_joins_a_subject_raises_its_front(store: Store) -> None:
    """A subject goes in order: what is urgent waits for its front, which therefore must not wait."""
    first = await deliver_one(store, "s", options=Options.low)
    await deliver_one(store, "s", options=Options.high)
    lease = await take_one(store, priority=Priority.high)
    assert lease.delivery.id == first
    await settle(store, done(lease))
    assert await finish(store, priority=Priority.high) != []


async def test_what_joins_within_one_commit_raises_its_front(store: Store) -> None:
    items = [item(subject="s", to=[CRM], options=options) for options in (Options.low, Options.none, Options.high)]
    await record(store, intake(*items, raw=b"[]"))
    assert ids(await take(store, priority=Priority.high)) == [items[0].deliveries[0].id]


async def test_a_quarantined_front_is_not_raised(ground: Ground, store: Store) -> None:
    made = await deliver_one(store, "s")
    await take_one(store, lease=5.0)
    ground.forward(6)
    assert await take(store) == []
    await deliver_one(store, "s", options=Options.high)
    lease = await take_one(store, priority=Priority.quarantined)
    assert lease.delivery.id == made
    await settle(store, retry(lease))
    assert (await look(store, made)).status == "pending"
    await take_one(store)


async def test_a_bulk_replay_comes_after_everything_live(store: Store) -> None:
    await deliver_one(store, "s", options=Options.low)
    await settle(store, dead(await take_one(store, priority=Priority.low)))
    await replay_all(store, Filter())
    await store.feed_replays()
    assert await take(store, priority=Priority.low) == []
    await deliver_one(store, "s", options=Options.low)
    await take_one(store, priority=Priority.low)
