"""What charts and the pages of replays read: counters by destination, marks, sizes, items of a replay, breakers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from oncehook.model import (
    Breaker,
    BreakerChange,
    Category,
    DeliveryStatus,
    Filter,
    Priority,
    ReplayState,
    Settle,
    Settlement,
)
from oncehook.store.base import KEPT_MARKS, Store
from tests.store.conftest import Ground
from tests.store.making import (
    DAY,
    DEAD,
    MAIL,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    failed,
    finish,
    look,
    replay_all,
    settle,
    take,
    take_one,
)

THREE = Breaker(3, 300.0)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


# -- replays -----------------------------------------------------------------------------------


async def test_a_replay_tells_what_became_of_each_delivery(store: Store) -> None:
    crm = await dead_letters(store, *[None] * 3)
    mail = await dead_letters(store, *[None] * 1, to=MAIL)
    made = await replay_all(store)
    items = await store.replay_items(made.id)
    assert [item.delivery_id for item in items] == [*crm, *mail]
    assert {item.outcome for item in items} == {"left"}
    assert [item.n for item in items] == [1, 2, 3, 4]
    assert [item.destination for item in items] == ["crm", "crm", "crm", "mail"]
    assert {item.type for item in items} == {"order.created"}
    await store.feed_replays(2)
    [one] = await take(store, limit=1, priority=Priority.replay)
    await settle(store, Settlement(one, Settle.dead, category=Category.permanent))
    assert await store.replay_outcomes(made.id) == {"crm": {"dead": 1, "running": 1, "left": 1}, "mail": {"left": 1}}
    assert [item.n for item in await store.replay_items(made.id, after=1, limit=2)] == [2, 3]


async def test_the_rest_of_an_aborted_replay_can_be_found_and_run(store: Store) -> None:
    crm = await dead_letters(store, *[None] * 4)
    made = await replay_all(store)
    await store.feed_replays(1)
    await store.set_replay_state(made.id, ReplayState.aborted, "ana")
    rest = Filter(left_of=made.id)
    page = await store.find_deliveries(rest)
    assert {one.id for one in page.items} == set(crm[1:])
    assert len((await store.find_events(rest)).items) == 3
    plan = await store.plan_replay(rest, force=False)
    assert plan.total == 3
    again = await replay_all(store, rest)
    assert again.planned == 3
    assert {item.delivery_id for item in await store.replay_items(again.id)} == set(crm[1:])


async def test_a_plan_has_a_part_for_each_destination(store: Store) -> None:
    tired = await deliver(store, None, None)
    for lease in await take(store):
        await settle(store, Settlement(lease, Settle.dead, category=Category.transient))
    [refused] = await dead_letters(store, None)
    await dead_letters(store, *[None] * 1, to=MAIL)
    await deliver_one(store, to=MAIL)
    plan = await store.plan_replay(Filter(), force=False)
    assert set(plan.parts) == {"crm", "mail"}
    assert plan.parts["crm"].by_status == {DeliveryStatus.dead: 3}
    assert plan.parts["mail"].by_status == {DeliveryStatus.dead: 1}
    assert plan.parts["mail"].left_out == {DeliveryStatus.pending: 1}
    assert plan.parts["crm"].refused == 1
    assert (await look(store, refused)).category == Category.permanent
    only = await store.plan_replay(Filter(ids=tired), force=False)
    assert only.parts["crm"].refused == 0


# -- causes ------------------------------------------------------------------------------------


async def test_a_cause_keeps_its_beginning_through_a_replay(ground: Ground, store: Store) -> None:
    await dead_letters(store, *[None] * 2)
    [before] = await store.causes()
    ground.forward(2 * 3600)
    await replay_all(store, DEAD)
    await store.feed_replays()
    for lease in await take(store, priority=Priority.replay):
        await settle(store, dead(lease))
    [after] = await store.causes()
    assert after.first_at == before.first_at
    assert after.last_at > before.last_at
    assert len(after.per_hour) == 24
    assert after.per_hour[-1] == 0  # they died two hours ago, and again just now
    assert after.per_hour[-3] == after.count == 2
    ground.forward(3 * 3600)
    [later] = await store.causes()
    assert later.per_hour[-3] == 0
    assert later.per_hour[-6] == 2


# -- counters ----------------------------------------------------------------------------------


async def test_counters_of_all_destinations_in_one_read(store: Store) -> None:
    began = datetime.now(UTC) - timedelta(minutes=5)
    await deliver(store, None, None)
    await deliver_one(store, to=MAIL)
    await finish(store)
    await finish(store, to=2)
    await store.record_rejections([], {(0, 1, "took:0.1"): 4, (0, 1, "failed:2"): 1, (2, 0, "rejected"): 1})
    flows = await store.destination_series(began, 60.0)
    assert set(flows) == {"crm", "mail"}
    sums = {what: sum(n for _, n in points) for what, points in flows["crm"].items()}
    assert (sums["succeeded"], sums["took:0.1"], sums["failed:2"]) == (2, 4, 1)
    assert sums["pending"] == 0  # two came and two went: levels are signed changes
    assert sum(n for _, n in flows["mail"]["succeeded"]) == 1
    assert (await store.figures()).by_source["payments"]["rejected"] == 1


async def test_a_week_is_kept_by_hour(ground: Ground, store: Store) -> None:
    for _ in range(3):
        await deliver_one(store)
        await finish(store)
        ground.forward(3700)
    ground.forward(4 * DAY)
    assert await store.roll_up() > 0
    flows = await store.series(LONG_AGO, 3600.0)
    assert [n for _, n in flows["accepted"]] == [1, 1, 1]
    ground.forward(10 * DAY)
    await store.roll_up()
    by_day = await store.series(LONG_AGO, 3600.0)
    assert sum(n for _, n in by_day["accepted"]) == 3
    assert len(by_day["accepted"]) <= 2


async def test_its_size_is_noted_once_an_hour(ground: Ground, store: Store) -> None:
    await store.roll_up()
    await store.roll_up()
    ground.forward(3700)
    await store.roll_up()
    noted = await store.sizes()
    assert len(noted) == 2
    assert all(size > 0 for _, size in noted)
    assert noted == sorted(noted)


# -- marks -------------------------------------------------------------------------------------


async def test_marks_are_kept_and_audited(ground: Ground, store: Store) -> None:
    first = await store.add_mark("v1.2", "ana")
    ground.forward(60)
    await store.add_mark("v1.3 → Süd", "otto")
    found = await store.chart_marks(LONG_AGO)
    assert [(mark.text, mark.actor) for mark in found] == [("v1.2", "ana"), ("v1.3 → Süd", "otto")]
    assert [mark.text for mark in await store.chart_marks(first.at + timedelta(seconds=1))] == ["v1.3 → Süd"]
    assert [(line.act, line.target) for line in await store.audit_log(limit=1)] == [("mark", "v1.3 → Süd")]


async def test_only_the_latest_marks_stay(ground: Ground, store: Store) -> None:
    await store.add_mark("old", "ana")
    engine = "INSERT INTO chart_marks (at, text, actor) SELECT at, 'many', actor FROM chart_marks"
    for _ in range(10):
        ground.sql(engine)
    await store.add_mark("new", "ana")
    found = [mark.text for mark in await store.chart_marks(LONG_AGO)]
    assert len(found) == KEPT_MARKS
    assert (found[0], found[-1]) == ("many", "new")


# -- the breaker -------------------------------------------------------------------------------


@pytest.fixture
def changes(store: Store) -> list[BreakerChange]:
    told: list[BreakerChange] = []
    store.observer.note_breaker = told.append  # type: ignore[method-assign]
    return told


async def test_a_breaker_that_opens_and_closes_is_told_once(
    ground: Ground, store: Store, changes: list[BreakerChange]
) -> None:
    await deliver(store, *[None] * 6)
    leases = await take(store, limit=4)
    await settle(store, failed(leases[0], THREE), failed(leases[1], THREE))
    assert changes == []
    await settle(store, failed(leases[2], THREE))
    assert [(change.destination_id, change.failures) for change in changes] == [(1, 3)]
    level = (await store.levels())["crm"]
    assert changes[0].open_until == level.open_until
    await settle(store, failed(leases[3], THREE))
    assert len(changes) == 1
    ground.forward(301)
    await settle(store, done(await take_one(store), breaker=THREE))
    assert [change.open_until is None for change in changes] == [False, True]


async def test_one_may_be_tried_before_its_time(store: Store) -> None:
    await deliver(store, *[None] * 3)
    leases = await take(store, limit=3)
    await settle(store, *[replace(failed(lease, THREE), wait=3600.0) for lease in leases])
    assert await take(store) == []
    assert await store.try_now(1, "otto")
    assert len(await take(store)) == 1  # though all of them wait for their retries
    assert await take(store) == []
    assert (await store.audit_log(limit=1))[0].act == "try"
    assert not await store.try_now(2, "otto")


# -- neighbours --------------------------------------------------------------------------------


async def test_events_beside_one_are_of_its_source(store: Store) -> None:
    first, middle, last = await deliver(store, None, None, None)
    await deliver_one(store, source="payments")
    ids = [(await look(store, one)).event_id for one in (first, middle, last)]
    assert await store.events_beside(ids[1], "orders") == (ids[0], ids[2])
    assert (await store.events_beside(ids[0], "orders"))[0] is None
    assert await store.events_beside(ids[2], "orders") == (ids[1], None)
