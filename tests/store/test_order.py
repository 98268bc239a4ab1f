"""Order: one at a time per subject, in order of commit, and nobody waits for another's subject (R42-R45)."""

from __future__ import annotations

import asyncio

import pytest

from oncehook.model import DeliveryId, DeliveryStatus, Filter, Lease, Options, Priority
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    MAIL,
    dead,
    deliver,
    deliver_one,
    done,
    finish,
    ids,
    intake,
    item,
    keep,
    look,
    opened,
    record,
    release,
    replay,
    retry,
    settle,
    statuses,
    take,
    take_one,
)


async def test_one_by_one_in_order_of_commit(store: Store) -> None:
    """R42"""
    made = await deliver(store, *["s"] * 5)
    for number, expected in enumerate(made):
        lease = await take_one(store)
        assert lease.delivery.id == expected
        assert await take(store) == []
        shown = [await look(store, one) for one in made]
        assert [one.status for one in shown].count(DeliveryStatus.leased) == 1
        assert [one.blocked_by for one in shown[number + 1 :]] == [expected] * (4 - number)
        assert [one.due_at for one in shown[number + 1 :]] == [None] * (4 - number)
        assert shown[number].blocked_by is None
        await settle(store, done(lease))
    assert await take(store) == []


async def test_in_one_commit_the_order_of_arrival_counts(store: Store) -> None:
    """R42: items of one request, and requests of one group, keep their order."""
    items = [item(subject="s", to=[CRM]) for _ in range(6)]
    await record(store, intake(*items[:3], raw=b"raw"), intake(*items[3:], raw=b"raw"))
    assert await finish(store) == [one.deliveries[0].id for one in items]


async def test_the_order_is_that_of_commits_and_not_of_ids(store: Store) -> None:
    """R42: an id may have been made long before its event was kept."""
    early, late = item(subject="s", to=[CRM]), item(subject="s", to=[CRM])
    await keep(store, late)
    await keep(store, early)
    assert await finish(store) == [late.deliveries[0].id, early.deliveries[0].id]


async def test_subjects_do_not_wait_for_each_other(store: Store) -> None:
    made = await deliver(store, "a", "a", "b", "b", None, None)
    leases = await take(store)
    assert sorted(ids(leases)) == sorted([made[0], made[2], made[4], made[5]])
    [of_b] = [lease for lease in leases if lease.event.subject == "b"]
    await settle(store, done(of_b))
    assert ids(await take(store)) == [made[3]]


async def test_a_subject_is_of_one_source_and_one_destination(store: Store) -> None:
    """Two sources that both say 42 are two subjects."""
    made = await deliver(store, "42")
    other_source = await deliver(store, "42", source="payments")
    assert sorted(ids(await take(store))) == sorted(made + other_source)
    other_destination = await deliver(store, "42", to=MAIL)
    assert ids(await take(store, to=2)) == other_destination


async def test_a_limit_does_not_break_the_order(store: Store) -> None:
    made = await deliver(store, *["a", "b", "c"] * 3)
    order = await finish(store, limit=1)
    for n in range(3):
        assert [one for one in order if one in made[n::3]] == made[n::3]
    assert len(order) == 9


@pytest.mark.parametrize("later", [retry, release])
async def test_a_head_that_waits_holds_only_its_own_subject(ground: Ground, store: Store, later: object) -> None:
    """R43"""
    [head, behind, other] = await deliver(store, "a", "a", "b")
    leases = {lease.delivery.id: lease for lease in await take(store)}
    await settle(store, later(leases[head], 50.0), done(leases[other]))  # type: ignore[operator]
    assert await take(store) == []
    more = await deliver_one(store, "b")
    assert (await take_one(store)).delivery.id == more
    ground.forward(51)
    assert await finish(store) == [head, behind]


async def test_arrivals_do_not_hurry_a_head_that_waits(ground: Ground, store: Store) -> None:
    head = await deliver_one(store, "a")
    await settle(store, retry(await take_one(store), 50.0))
    behind = await deliver_one(store, "a")
    assert await take(store) == []
    ground.forward(51)
    assert await finish(store) == [head, behind]


async def test_a_crashed_head_keeps_its_place(ground: Ground, store: Store) -> None:
    """R45"""
    made = await deliver(store, *["s"] * 3)
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    made.append(await deliver_one(store, "s"))
    alone = await take_one(store, priority=Priority.quarantined)
    assert alone.delivery.id == made[0]
    assert await take(store) == []
    await settle(store, retry(alone))
    assert await finish(store) == made


async def test_a_head_that_crashed_with_its_process_keeps_its_place(ground: Ground) -> None:
    """R45, over a restart."""
    async with opened(ground) as store:
        made = await deliver(store, *["s"] * 3)
        await take_one(store, lease=10.0, crash_tolerance=1)
    ground.forward(11)
    async with opened(ground) as store:
        assert await finish(store, crash_tolerance=1) == made


# -- when the head dies ------------------------------------------------------------------------


async def test_a_dead_head_lets_its_successors_go_on(store: Store) -> None:
    """R43, `continue`: and what is replayed later joins the tail."""
    made = await deliver(store, *["s"] * 3)
    await settle(store, dead(await take_one(store)))
    lease = await take_one(store)
    assert lease.delivery.id == made[1]
    await replay(store, made[0])
    assert await take(store) == []
    await settle(store, done(lease))
    assert await finish(store) == [made[2], made[0]]


async def test_a_replay_has_a_place_of_its_own_in_the_order_of_commit(ground: Ground, store: Store) -> None:
    """R42: arrivals before and after it, in one go and one by one; no two share a number."""
    made = await deliver(store, *["s"] * 3)
    await settle(store, dead(await take_one(store)))
    await settle(store, dead(await take_one(store)))
    order = [made[2]]
    for replayed in made[:2]:
        order.append(await deliver_one(store, "s"))
        [late, _] = await asyncio.gather(deliver_one(store, "t"), replay(store, replayed))
        order += [replayed, *await deliver(store, "s", "s")]
        assert (await look(store, late)).blocked_by != replayed
    assert ground.sql("SELECT count(*) - count(DISTINCT seq) FROM deliveries") == [(0,)]
    assert [one for one in await finish(store) if one in order] == order


async def test_a_dead_head_may_hold_its_successors(ground: Ground, store: Store) -> None:
    """R43, `hold`: only its own subject, and however long it takes."""
    made = await deliver(store, *["s"] * 3, options=Options.hold)
    await settle(store, dead(await take_one(store)))
    other = await deliver_one(store, "t", options=Options.hold)
    assert await finish(store) == [other]
    ground.forward(1_000_000)
    made.append(await deliver_one(store, "s", options=Options.hold))
    assert await take(store) == []
    assert await statuses(store, made) == ["dead", "pending", "pending", "pending"]
    held = await look(store, made[0])
    assert (held.due_at, held.blocked_by) == (None, None)
    assert (await look(store, made[1])).blocked_by == made[0]
    assert (await store.next_due([1])).due_in is None
    assert (await store.levels())["crm"].oldest_due is None


async def test_a_held_head_survives_a_restart(ground: Ground) -> None:
    async with opened(ground) as store:
        made = await deliver(store, *["s"] * 2, options=Options.hold)
        await settle(store, dead(await take_one(store)))
    async with opened(ground) as store:
        assert await take(store) == []
        assert await statuses(store, made) == ["dead", "pending"]


async def test_a_held_head_that_is_replayed_keeps_its_place(store: Store) -> None:
    """R43: its successors wait on, and follow it when it is done."""
    made = await deliver(store, *["s"] * 3, options=Options.hold)
    await settle(store, dead(await take_one(store)))
    await replay(store, made[0])
    lease = await take_one(store)
    assert (lease.delivery.id, lease.delivery.run, lease.delivery.attempt) == (made[0], 2, 1)
    assert await take(store) == []
    await settle(store, done(lease))
    assert await finish(store) == made[1:]


async def test_a_held_head_that_dies_again_holds_again(ground: Ground, store: Store) -> None:
    made = await deliver(store, *["s"] * 2, options=Options.hold)
    await settle(store, dead(await take_one(store)))
    ordered = await replay(store, made[0])
    await settle(store, dead(await take_one(store)))
    assert await take(store) == []
    shown = await store.get_replay(ordered.id)
    assert shown is not None
    assert (shown.done, shown.dead) == (0, 1)
    ground.forward(61)
    await replay(store, made[0])
    assert await finish(store) == made


async def test_a_held_head_that_is_discarded_lets_its_successors_go_on(store: Store) -> None:
    made = await deliver(store, *["s"] * 3, options=Options.hold)
    await settle(store, dead(await take_one(store)))
    assert await store.discard(Filter(ids=made[:1]), "ann", "test order") == 1
    assert await finish(store) == made[1:]
    assert (await look(store, made[0])).status is DeliveryStatus.discarded


async def test_a_held_head_with_nobody_behind_leaves_nothing_when_it_is_discarded(ground: Ground, store: Store) -> None:
    [made] = await deliver(store, "s", options=Options.hold)
    await settle(store, dead(await take_one(store)))
    assert await store.discard(Filter(ids=[made]), "ann", "") == 1
    assert ground.sql("SELECT count(*) FROM heads") == [(0,)]
    assert await finish(store) == []
    assert (await deliver_one(store, "s")) in await finish(store)


async def test_the_options_are_those_of_each_delivery(store: Store) -> None:
    """Routes may change while deliveries wait: what counts is what was kept with each."""
    first = await deliver_one(store, "s")
    second = await deliver_one(store, "s", options=Options.hold)
    third = await deliver_one(store, "s")
    lease = await take_one(store)
    assert lease.delivery.options == Options.none
    await settle(store, dead(lease))
    lease = await take_one(store)
    assert (lease.delivery.id, lease.delivery.options) == (second, Options.hold)
    await settle(store, dead(lease))
    assert await take(store) == []
    assert await statuses(store, [first, second, third]) == ["dead", "dead", "pending"]


# -- deep subjects -----------------------------------------------------------------------------


async def test_a_deep_subject_leaves_one_row_to_lease(ground: Ground, store: Store) -> None:
    """R44: what waits behind a head is in no table that a lease reads."""
    await deliver(store, *["deep"] * 300, *[f"s{n}" for n in range(20)])
    assert ground.sql("SELECT count(*) FROM heads") == [(21,)]
    assert len(await take(store)) == 21


async def test_the_neighbours_of_a_delivery(store: Store) -> None:
    made = await deliver(store, *["s"] * 7)
    await deliver(store, "t", None)
    await deliver(store, "s", source="payments")
    await deliver(store, "s", to=MAIL)
    await settle(store, done(await take_one_of(store, made[0])))
    around = await store.subject_of(made[3], around=2)
    assert [one.id for one in around] == made[1:6]
    assert [one.id for one in await store.subject_of(made[3])] == made
    assert [one.id for one in await store.subject_of(made[0], around=2)] == made[:3]


async def test_who_has_no_subject_has_no_neighbours(store: Store) -> None:
    made = await deliver(store, None, None)
    assert [one.id for one in await store.subject_of(made[0])] == made[:1]


async def take_one_of(store: Store, delivery: bytes) -> Lease:
    [lease] = [lease for lease in await take(store) if lease.delivery.id == delivery]
    return lease


async def test_a_million_destinations_fit_into_an_id(ground: Ground, store: Store) -> None:
    """A delivery's id holds the id of its destination: neighbours, lists and replays find it by that."""
    wide = 1_000_003
    table = f"{getattr(ground, 'schema', 'main')}.destinations"
    override = "OVERRIDING SYSTEM VALUE " if ground.engine == "postgres" else ""
    ground.sql(f"INSERT INTO {table} (id, name) {override}VALUES ({wide}, 'wide'), ({wide + 1}, 'wider')")
    others = await deliver(store, "s", to=("wider", wide + 1))
    made = await deliver(store, "s", "s", "s", to=("wide", wide))
    assert [(DeliveryId(one).destination_id, DeliveryId(one).event_id[-3:]) for one in made] == [(wide, bytes(3))] * 3
    assert [one.id for one in await store.subject_of(made[1])] == made
    assert {one.id for one in (await store.find_deliveries(Filter(status=DeliveryStatus.pending))).items} == {
        *made,
        *others,
    }
    assert len((await store.find_events(Filter(status=DeliveryStatus.pending, destination="wide"))).items) == 3
    for one in made:
        lease = await take_one(store, to=wide)
        assert lease.delivery.id == one
        await settle(store, dead(lease))
    assert (await store.plan_replay(Filter(destination="wide"), force=False)).total == 3
    assert len((await store.find_events(Filter(status=DeliveryStatus.dead))).items) == 3
