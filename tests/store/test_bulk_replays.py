"""Bulk replay: planned, confirmed, fed little by little behind live traffic, and never lost half-way (R49)."""

from __future__ import annotations

import asyncio

import pytest

from oncehook.errors import NotFound, NotReplayable, NotWaiting, PlanChanged
from oncehook.model import (
    DeliveryStatus,
    Filter,
    Options,
    Priority,
    ReplayCommand,
    ReplayState,
    Settle,
    Settlement,
    Trigger,
    new_id,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    DEAD,
    MAIL,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    finish,
    ids,
    look,
    mixture,
    opened,
    progress,
    replay,
    replay_all,
    retry,
    settle,
    statuses,
    take,
    take_one,
)

# -- many: plan ----------------------------------------------------------------------------------


async def test_a_plan_says_what_would_be_done(store: Store) -> None:
    found = await mixture(store)
    plan = await store.plan_replay(Filter(), force=False)
    assert plan.total == 9
    assert plan.by_destination == {"crm": 7, "mail": 2}
    assert plan.by_status == {DeliveryStatus.dead: 8, DeliveryStatus.discarded: 1}
    assert plan.left_out == {DeliveryStatus.done: 3, DeliveryStatus.leased: 1, DeliveryStatus.pending: 2}
    assert len(plan.sample) == 5
    assert plan.oldest == (await look(store, found["dead"][0])).received_at
    assert plan.newest == (await look(store, found["discarded"][0])).received_at
    forced = await store.plan_replay(Filter(), force=True)
    assert (forced.total, forced.by_status[DeliveryStatus.done]) == (12, 3)
    assert forced.left_out == {DeliveryStatus.leased: 1, DeliveryStatus.pending: 2}
    only = await store.plan_replay(Filter(status=DeliveryStatus.dead, destination="mail"), force=False)
    assert (only.total, only.by_destination, only.left_out) == (2, {"mail": 2}, {})


async def test_a_plan_of_nothing(store: Store) -> None:
    plan = await store.plan_replay(DEAD, force=False)
    assert (plan.total, plan.oldest, plan.newest, list(plan.sample)) == (0, None, None, [])
    for expected in (0, None):
        with pytest.raises(NotReplayable, match="nothing to replay"):
            await replay_all(store, DEAD, expected=expected)
    assert (await store.find_replays()).items == []
    assert await store.audit_log() == []


async def test_a_plan_changes_nothing(store: Store) -> None:
    found = await mixture(store)
    before = [await look(store, one) for many in found.values() for one in many]
    await store.plan_replay(Filter(), force=True)
    assert [await look(store, one) for many in found.values() for one in many] == before


@pytest.mark.parametrize("force", [False, True])
async def test_what_was_planned_is_what_is_done(store: Store, force: bool) -> None:
    """R49"""
    found = await mixture(store)
    plan = await store.plan_replay(Filter(), force=force)
    ordered = await replay_all(store, force=force, expected=plan.total)
    assert ordered.planned == plan.total
    late = await dead_letters_beside(store)
    fed = 0
    while count := await store.feed_replays():
        fed += count
    assert fed == plan.total
    expected = [*found["dead"], *found["discarded"], *(found["done"] if force else [])]
    assert sorted(await finish(store, priority=Priority.replay)) == sorted(expected)
    assert sorted(await finish(store, priority=Priority.replay, to=2)) == sorted(found["dead of mail"])
    assert (await look(store, late)).status is DeliveryStatus.dead
    await store.feed_replays()
    ended = await progress(store, ordered)
    assert (ended.state, ended.fed, ended.done, ended.dead, ended.skipped) == (
        ReplayState.done,
        plan.total,
        plan.total,
        0,
        0,
    )


async def dead_letters_beside(store: Store) -> bytes:
    """One more dead letter, in the midst of other work; what was leased for it is given back."""
    made = await deliver_one(store)
    leases = await take(store)
    await settle(
        store,
        *[dead(one) if one.delivery.id == made else Settlement(one, Settle.release, 9999) for one in leases],
    )
    return made


async def test_a_plan_that_has_changed_does_nothing(store: Store) -> None:
    made = await dead_letters(store, None, None)
    with pytest.raises(PlanChanged):
        await replay_all(store, DEAD, expected=3)
    with pytest.raises(PlanChanged):
        await replay_all(store, DEAD, expected=1)
    assert (await store.find_replays()).items == []
    assert await store.audit_log() == []
    assert await store.feed_replays() == 0
    assert await statuses(store, made) == ["dead", "dead"]


async def test_a_request_key_makes_one_bulk_replay(store: Store) -> None:
    await dead_letters(store, None, None)
    first = await replay_all(store, DEAD, request_key="click", expected=2)
    again = await replay_all(store, DEAD, request_key="click", expected=2)
    assert again.id == first.id
    assert await store.feed_replays() == 2
    late = await replay_all(store, DEAD, request_key="click", expected=2)
    assert (late.id, late.fed) == (first.id, 2)


# -- many: feed ----------------------------------------------------------------------------------


async def test_a_bulk_replay_is_fed_in_order_and_behind_live_traffic(store: Store) -> None:
    made = await dead_letters(store, *["s"] * 4)
    ordered = await replay_all(store, DEAD)
    assert await take(store, priority=Priority.replay) == []
    assert await statuses(store, made) == ["dead"] * 4
    assert await store.feed_replays() == 4
    live = await deliver_one(store, "t")
    assert (await take_one(store)).delivery.id == live
    lease = await take_one(store, priority=Priority.replay)
    assert (lease.delivery.id, lease.priority, lease.delivery.run) == (made[0], Priority.replay, 2)
    assert (lease.delivery.replay_id, lease.trigger) == (ordered.id, Trigger.bulk_replay)
    await settle(store, done(lease))
    assert await finish(store, priority=Priority.replay) == made[1:]


async def test_live_work_does_not_wait_behind_a_replay_of_its_subject(store: Store) -> None:
    """An arrival makes its whole subject live: it would else wait for a line that comes last."""
    [made] = await dead_letters(store, "s")
    await replay_all(store, DEAD)
    await store.feed_replays()
    assert await take(store) == []
    live = await deliver_one(store, "s")
    assert await finish(store) == [made, live]


async def test_a_replay_joins_the_tail_of_a_live_subject(store: Store) -> None:
    [made] = await dead_letters(store, "s")
    live = await deliver(store, "s", "s")
    await replay_all(store, DEAD)
    assert await store.feed_replays() == 1
    assert await take(store, priority=Priority.replay) == []
    order = []
    for _ in range(3):
        [lease] = [*await take(store), *await take(store, priority=Priority.replay)]
        order.append(lease.delivery.id)
        await settle(store, done(lease))
    assert order == [*live, made]


async def test_held_heads_keep_their_places_in_a_bulk_replay(store: Store) -> None:
    made = await deliver(store, "a", "a", "b", "b", options=Options.hold)
    await settle(store, *[dead(lease) for lease in await take(store)])
    await replay_all(store, DEAD)
    assert await store.feed_replays() == 2
    order = []
    while leases := [*await take(store), *await take(store, priority=Priority.replay)]:
        await settle(store, *[done(lease) for lease in leases])
        order += ids(leases)
    assert [one for one in order if one in made[:2]] == made[:2]
    assert [one for one in order if one in made[2:]] == made[2:]


async def test_only_so_many_are_open_at_once(store: Store) -> None:
    made = await dead_letters(store, *[None] * 10)
    ordered = await replay_all(store, DEAD)
    assert await store.feed_replays(open_at_most=4) == 4
    assert await store.feed_replays(open_at_most=4) == 0
    leases = await take(store, priority=Priority.replay)
    assert sorted(ids(leases)) == made[:4]
    assert await store.feed_replays(open_at_most=4) == 0
    await settle(store, *[done(lease) for lease in leases[:3]])
    assert await store.feed_replays(open_at_most=4) == 3
    shown = await progress(store, ordered)
    assert (shown.fed, shown.done, shown.planned, shown.state) == (7, 3, 10, ReplayState.running)


async def test_the_rate_is_kept(ground: Ground, store: Store) -> None:
    ground.stand_still()
    await dead_letters(store, *[None] * 40)
    await replay_all(store, DEAD, rate=5.0)
    fed = 0
    for _ in range(20):
        fed += await store.feed_replays()
        ground.forward(0.2)
    assert 5 <= fed <= 4 * 5 + 5  # four seconds by the store's clock, and what a moment may hold
    for _ in range(100):
        fed += await store.feed_replays()
        ground.forward(0.2)
    assert fed == 40


async def test_two_who_feed_feed_each_item_once(ground: Ground, store: Store) -> None:
    made = await dead_letters(store, *[None] * 30)
    ordered = await replay_all(store, DEAD)
    counts = await asyncio.gather(*[store.feed_replays(open_at_most=10) for _ in range(4)])
    assert sum(counts) >= 10
    while await store.feed_replays():
        pass
    assert sorted(await finish(store, priority=Priority.replay)) == made
    assert {(await look(store, one)).run for one in made} == {2}
    assert (await progress(store, ordered)).fed == 30


async def test_several_replays_run_at_once(store: Store) -> None:
    of_crm, of_mail = await dead_letters(store, None, None), await dead_letters(store, None, to=MAIL)
    first = await replay_all(store, Filter(destination="crm"))
    second = await replay_all(store, Filter(destination="mail"))
    while await store.feed_replays():
        pass
    assert sorted(await finish(store, priority=Priority.replay)) == of_crm
    assert await finish(store, priority=Priority.replay, to=2) == of_mail
    await store.feed_replays()
    assert [(await progress(store, one)).state for one in (first, second)] == [ReplayState.done] * 2
    assert [one.id for one in (await store.find_replays()).items] == [second.id, first.id]


async def test_how_it_went_is_told(store: Store) -> None:
    await dead_letters(store, *[None] * 5)
    ordered = await replay_all(store, DEAD, about={"query": "status:dead"}, reason="deploy")
    assert (ordered.about, ordered.reason, ordered.bulk) == ({"query": "status:dead"}, "deploy", True)
    await store.feed_replays()
    leases = await take(store, priority=Priority.replay)
    await settle(store, done(leases[0]), done(leases[1]), dead(leases[2]), retry(leases[3]))
    shown = await progress(store, ordered)
    assert (shown.planned, shown.fed, shown.done, shown.dead, shown.skipped) == (5, 5, 2, 1, 0)
    assert (shown.state, shown.finished_at) == (ReplayState.running, None)
    await settle(store, done(leases[4]), dead((await take(store, priority=Priority.replay))[0]))
    await store.feed_replays()
    shown = await progress(store, ordered)
    assert (shown.done, shown.dead, shown.state) == (3, 2, ReplayState.done)
    assert shown.finished_at is not None


async def test_coalesced_ones_of_a_replay_are_done_too(store: Store) -> None:
    made = await dead_letters(store, *["s"] * 3, options=Options.coalesce_type)
    assert await statuses(store, made) == ["dead"] * 3
    ordered = await replay_all(store, DEAD)
    assert await store.feed_replays() == 3
    lease = await take_one(store, priority=Priority.replay)
    assert (lease.front_id, lease.delivery.id) == (made[0], made[2])
    await settle(store, done(lease))
    await store.feed_replays()
    shown = await progress(store, ordered)
    assert (shown.done, shown.state) == (3, ReplayState.done)


async def test_what_has_moved_since_is_left_out(ground: Ground, store: Store) -> None:
    """Replayed by hand, worked on, or pruned meanwhile: left out when its turn comes, and counted."""
    made = await dead_letters(store, *[None] * 4)
    ordered = await replay_all(store, DEAD)
    await replay(store, made[0])
    await replay(store, made[1])
    [lease] = [lease for lease in await take(store) if lease.delivery.id == made[1]]
    await settle(store, dead(lease))
    assert await store.feed_replays() == 2
    assert [(await look(store, one)).run for one in made] == [2, 2, 2, 2]
    assert sorted(await finish(store, priority=Priority.replay)) == made[2:]
    await store.feed_replays()
    shown = await progress(store, ordered)
    assert (shown.done, shown.skipped, shown.state) == (2, 2, ReplayState.done)


async def test_a_retry_of_a_replayed_one_stays_behind_live_traffic(store: Store) -> None:
    await dead_letters(store, None)
    await replay_all(store, DEAD)
    await store.feed_replays()
    await settle(store, retry(await take_one(store, priority=Priority.replay)))
    assert await take(store) == []
    assert (await take_one(store, priority=Priority.replay)).delivery.attempt == 2


# -- many: steer ---------------------------------------------------------------------------------


async def test_pause_and_resume(store: Store) -> None:
    made = await dead_letters(store, *[None] * 6)
    ordered = await replay_all(store, DEAD)
    assert await store.feed_replays(open_at_most=2) == 2
    paused = await store.set_replay_state(ordered.id, ReplayState.paused, "ann")
    assert (paused.state, paused.fed) == (ReplayState.paused, 2)
    assert len(await finish(store, priority=Priority.replay)) == 2
    assert await store.feed_replays() == 0
    assert await statuses(store, made[2:]) == ["dead"] * 4
    running = await store.set_replay_state(ordered.id, ReplayState.running, "ann")
    assert running.state is ReplayState.running
    assert await store.feed_replays() == 4
    assert len(await finish(store, priority=Priority.replay)) == 4
    await store.feed_replays()
    assert (await progress(store, ordered)).state is ReplayState.done


async def test_abort(store: Store) -> None:
    """What is done stays done, what was fed goes on, what was not fed stays where it was."""
    made = await dead_letters(store, *[None] * 6)
    ordered = await replay_all(store, DEAD)
    assert await store.feed_replays(open_at_most=2) == 2
    aborted = await store.set_replay_state(ordered.id, ReplayState.aborted, "ann")
    assert aborted.state is ReplayState.aborted
    assert aborted.finished_at is not None
    assert await store.feed_replays() == 0
    assert sorted(await finish(store, priority=Priority.replay)) == made[:2]
    assert await statuses(store, made) == ["done"] * 2 + ["dead"] * 4
    for state in (ReplayState.running, ReplayState.paused, ReplayState.aborted):
        with pytest.raises(NotWaiting):
            await store.set_replay_state(ordered.id, state, "ann")
    assert await store.feed_replays() == 0


async def test_what_is_over_cannot_be_steered(store: Store) -> None:
    await dead_letters(store, None)
    ordered = await replay_all(store, DEAD)
    await store.feed_replays()
    await finish(store, priority=Priority.replay)
    await store.feed_replays()
    with pytest.raises(NotWaiting):
        await store.set_replay_state(ordered.id, ReplayState.aborted, "ann")
    with pytest.raises(NotFound):
        await store.set_replay_state(new_id(), ReplayState.paused, "ann")


async def test_a_bulk_replay_goes_on_after_a_restart(ground: Ground) -> None:
    """R49: fed in the middle of it, leased in the middle of it; nothing is fed twice, nothing is left."""
    async with opened(ground) as store:
        made = await dead_letters(store, *[None] * 9)
        ordered = await replay_all(store, DEAD)
        assert await store.feed_replays(open_at_most=4) == 4
        [first] = await take(store, 1, priority=Priority.replay, lease=10.0)
        await settle(store, done(first))
        await take(store, 1, priority=Priority.replay, lease=10.0, crash_tolerance=9)
    ground.forward(11)
    async with opened(ground) as store:
        shown = await progress(store, ordered)
        assert (shown.fed, shown.done, shown.state) == (4, 1, ReplayState.running)
        assert await store.feed_replays() == 5
        assert await store.feed_replays() == 0
        rest = await finish(store, priority=Priority.replay, crash_tolerance=9)
        assert sorted([first.delivery.id, *rest]) == made
        await store.feed_replays()
        shown = await progress(store, ordered)
        assert (shown.done, shown.skipped, shown.state) == (9, 0, ReplayState.done)


async def test_an_order_by_time_and_type(store: Store) -> None:
    """Bulk orders take any filter a list takes."""
    [first] = await dead_letters(store, None, type_="a.x")
    await asyncio.sleep(0.02)
    [second] = await dead_letters(store, None, type_="a.y")
    await asyncio.sleep(0.02)
    [third] = await dead_letters(store, None, type_="b.x")
    since = (await look(store, second)).received_at
    plan = await store.plan_replay(Filter(since=since, type="a.*"), force=False)
    assert plan.total == 1
    await store.make_replay(new_id(), ReplayCommand(Filter(since=since, type="a.*"), "ann", expected=1))
    assert await store.feed_replays() == 1
    assert await statuses(store, [first, second, third]) == ["dead", "pending", "dead"]
