"""Replay: a new run of the same delivery, by a person's order, never refused by its own key (R46-R49)."""

from __future__ import annotations

import asyncio

import pytest

from oncehook.errors import NotFound, NotReplayable, ReplayTooSoon
from oncehook.model import (
    AttemptOutcome,
    DeliveryStatus,
    Filter,
    Options,
    Outcome,
    Priority,
    ReplayState,
    Trigger,
    new_id,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    is_lost,
    item,
    keep,
    look,
    progress,
    replay,
    retry,
    settle,
    statuses,
    take,
    take_one,
)

# -- one -----------------------------------------------------------------------------------------


async def test_a_dead_letter_runs_again(store: Store) -> None:
    """R46, R48: the same delivery and event, one run more, attempts from 1, and it says why."""
    [made] = await dead_letters(store, None)
    before = await look(store, made)
    ordered = await replay(store, made, reason="fixed")
    assert (ordered.planned, ordered.bulk, ordered.actor, ordered.reason) == (1, False, "ann", "fixed")
    waiting = await look(store, made)
    assert (waiting.status, waiting.run, waiting.attempts) == (DeliveryStatus.pending, 2, 0)
    assert (waiting.replay_id, waiting.event_id, waiting.settled_at) == (ordered.id, before.event_id, None)
    assert waiting.last_replay_at is not None
    lease = await take_one(store)
    assert (lease.delivery.id, lease.delivery.run, lease.delivery.attempt) == (made, 2, 1)
    assert (lease.delivery.replay_id, lease.priority, lease.trigger) == (ordered.id, Priority.live, Trigger.replay)
    assert lease.event.id == before.event_id
    await settle(store, retry(lease))
    lease = await take_one(store)
    assert (lease.delivery.run, lease.delivery.attempt, lease.trigger, lease.delivery.replay_id) == (
        2,
        2,
        Trigger.retry,
        ordered.id,
    )
    await settle(store, done(lease))
    kept = await look(store, made)
    assert (kept.status, kept.run, kept.attempts) == (DeliveryStatus.done, 2, 2)
    attempts = await store.attempts_of(made)
    assert [(one.run, one.n, one.outcome) for one in attempts] == [
        (1, 1, AttemptOutcome.dead),
        (2, 1, AttemptOutcome.retry),
        (2, 2, AttemptOutcome.done),
    ]
    await store.feed_replays()
    ended = await progress(store, ordered)
    assert (ended.state, ended.fed, ended.done, ended.dead, ended.skipped) == (ReplayState.done, 1, 1, 0, 0)
    assert ended.finished_at is not None


async def test_a_replay_is_never_refused_by_its_key(ground: Ground, store: Store) -> None:
    """R46: no second event, the key untouched, and the sender's copy is a duplicate before, meanwhile and after."""
    await keep(store, item("k", to=[CRM]))
    lease = await take_one(store)
    await settle(store, dead(lease))
    rows = ground.sql("SELECT hash, event_id, body_hash, copies, expires_at FROM keys")
    await replay(store, lease.delivery.id)
    assert ground.sql("SELECT hash, event_id, body_hash, copies, expires_at FROM keys") == rows
    assert ground.sql("SELECT count(*) FROM events") == [(1,)]
    assert ground.sql("SELECT count(*) FROM deliveries") == [(1,)]
    for _ in range(2):
        [verdict] = await keep(store, item("k", to=[CRM]))
        assert (verdict.outcome, verdict.event_id) == (Outcome.duplicate, lease.event.id)
    again = await take_one(store)
    assert (again.delivery.id, again.event.key, again.delivery.run) == (lease.delivery.id, "k", 2)
    await settle(store, done(again))
    assert (await look(store, lease.delivery.id)).status is DeliveryStatus.done
    [verdict] = await keep(store, item("k", to=[CRM]))
    assert verdict.outcome is Outcome.duplicate
    assert await take(store) == []


async def test_what_can_be_replayed(ground: Ground, store: Store) -> None:
    made = await deliver_one(store)
    with pytest.raises(NotReplayable):
        await replay(store, made, force=True)
    lease = await take_one(store)
    with pytest.raises(NotReplayable):
        await replay(store, made, force=True)
    await settle(store, done(lease))
    with pytest.raises(NotReplayable):
        await replay(store, made)
    await replay(store, made, force=True)
    await settle(store, dead(await take_one(store)))
    assert await store.discard(Filter(ids=[made]), "ann", "") == 1
    ground.forward(61)
    await replay(store, made)
    assert (await take_one(store)).delivery.run == 3


async def test_what_is_not_there_cannot_be_replayed(store: Store) -> None:
    with pytest.raises(NotFound):
        await replay(store, new_id())
    assert (await store.find_replays()).items == []
    assert await store.audit_log() == []


async def test_not_twice_within_a_minute(ground: Ground, store: Store) -> None:
    [made] = await dead_letters(store, None)
    ground.stand_still()
    await replay(store, made)
    await settle(store, dead(await take_one(store)))
    ground.forward(20)
    with pytest.raises(ReplayTooSoon) as refused:
        await replay(store, made)
    assert refused.value.retry_after == pytest.approx(40)
    assert (await look(store, made)).status is DeliveryStatus.dead
    ground.forward(41)
    await replay(store, made)
    assert (await take_one(store)).delivery.run == 3


async def test_a_request_key_makes_one_replay(ground: Ground, store: Store) -> None:
    """R47: a double click, a repeated call, whatever has become of it meanwhile."""
    [made, other] = await dead_letters(store, None, None)
    first = await replay(store, made, request_key="click")
    again = await replay(store, made, request_key="click")
    assert again.id == first.id
    await settle(store, dead(await take_one(store)))
    assert (await replay(store, made, request_key="click")).id == first.id
    assert (await replay(store, other, request_key="click")).id == first.id
    assert await statuses(store, [made, other]) == ["dead", "dead"]
    assert ground.sql("SELECT count(*) FROM replays") == [(1,)]
    assert (await replay(store, other, request_key="another click")).id != first.id


async def test_clicks_at_the_same_time_make_one_replay(ground: Ground, store: Store) -> None:
    [made] = await dead_letters(store, None)
    found = await asyncio.gather(*[replay(store, made, request_key="click") for _ in range(5)])
    assert len({one.id for one in found}) == 1
    assert (await look(store, made)).run == 2
    assert len(await take(store)) == 1


async def test_without_a_request_key_the_second_click_is_refused(store: Store) -> None:
    [made] = await dead_letters(store, None)
    answers = await asyncio.gather(*[replay(store, made) for _ in range(4)], return_exceptions=True)
    refused = [one for one in answers if isinstance(one, NotReplayable | ReplayTooSoon)]
    assert len(refused) == 3
    assert (await look(store, made)).run == 2


async def test_a_fresh_id_is_of_this_run_only(ground: Ground, store: Store) -> None:
    """R48"""
    [made] = await dead_letters(store, "s", options=Options.hold)
    await replay(store, made, fresh_id=True)
    lease = await take_one(store)
    assert lease.delivery.options == Options.fresh_id | Options.hold
    await settle(store, dead(lease))
    ground.forward(61)
    await replay(store, made)
    assert (await take_one(store)).delivery.options == Options.hold


async def test_a_fresh_id_for_one_that_joins_the_tail(store: Store) -> None:
    [made] = await dead_letters(store, "s")
    await deliver_one(store, "s")
    await replay(store, made, fresh_id=True)
    lease = await take_one(store)
    assert lease.delivery.options == Options.none
    await settle(store, done(lease))
    assert (await take_one(store)).delivery.options == Options.fresh_id


async def test_a_stale_or_overtaken_one_is_not_stale_when_a_person_asks_for_it(store: Store) -> None:
    for rank in (3, 1):
        made = await deliver_one(store, "s", rank=rank, options=Options.latest_wins)
        lease = await take_one(store)
        await settle(store, done(lease, note="stale" if lease.is_stale else None))
    assert (await look(store, made)).note == "stale"
    await replay(store, made, force=True)
    lease = await take_one(store)
    assert (lease.delivery.run, lease.is_stale) == (2, False)
    await settle(store, done(lease))
    assert (await look(store, made)).note is None
    await deliver_one(store, "s", rank=2, options=Options.latest_wins)
    assert (await take_one(store)).highest_rank == 3


async def test_a_lease_from_before_the_replay_gives_no_rights(ground: Ground, store: Store) -> None:
    """R26, R27: a zombie of the first run cannot settle the second."""
    made = await deliver_one(store)
    zombie = await take_one(store, lease=10.0, crash_tolerance=9)
    ground.forward(11)
    await settle(store, dead(await take_one(store, crash_tolerance=9)))
    await replay(store, made)
    assert await is_lost(store, done(zombie))
    lease = await take_one(store)
    assert lease.fence > zombie.fence
    assert await is_lost(store, done(zombie))
    assert await is_lost(store, dead(zombie))
    assert (await look(store, made)).status is DeliveryStatus.leased


async def test_crashes_of_an_earlier_run_are_forgiven(ground: Ground, store: Store) -> None:
    [made] = await deliver(store, "s", options=Options.hold)
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    await take_one(store, lease=10.0, priority=Priority.quarantined)
    ground.forward(11)
    lease = await take_one(store, priority=Priority.quarantined)
    assert lease.deaths == 1
    await settle(store, dead(lease))
    await replay(store, made)
    lease = await take_one(store)
    assert (lease.deaths, lease.priority, lease.delivery.attempt, lease.delivery.run) == (0, Priority.live, 1, 2)


async def test_a_replay_waits_behind_what_runs(store: Store) -> None:
    """R42: never beside another of its subject."""
    [made] = await dead_letters(store, "s")
    running = await deliver_one(store, "s")
    lease = await take_one(store)
    assert lease.delivery.id == running
    await replay(store, made)
    assert await take(store) == []
    assert (await look(store, made)).blocked_by == running
    await settle(store, done(lease))
    assert (await take_one(store)).delivery.id == made


async def test_a_replay_behind_a_suspect_does_not_free_it(ground: Ground, store: Store) -> None:
    [made] = await dead_letters(store, "s")
    quarantined = await deliver_one(store, "s")
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    await replay(store, made)
    assert await take(store) == []
    assert (await take_one(store, priority=Priority.quarantined)).delivery.id == quarantined


async def test_replays_are_counted(store: Store) -> None:
    [made] = await dead_letters(store, None)
    await replay(store, made)
    counted = (await store.figures()).by_destination["crm"]
    assert (counted["replays"], counted["dead"], counted["pending"], counted["died"]) == (1, 0, 1, 1)
