"""Lease: what is due is given to exactly one worker, with a fence, and taken over when that worker is gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import pytest
from msgspec import structs

from oncehook.model import (
    AttemptOutcome,
    Breaker,
    DeliveryStatus,
    Lease,
    LeaseRequest,
    Mark,
    Outlook,
    Priority,
    Settle,
    Settlement,
    Trigger,
    new_id,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    HEAD,
    MAIL,
    deliver,
    deliver_one,
    done,
    failed,
    ids,
    intake,
    is_lost,
    item,
    look,
    opened,
    record,
    release,
    retry,
    settle,
    take,
    take_one,
)


async def renew(store: Store, *leases: Lease) -> set[int]:
    """As a worker does it: from a thread of its own (R32)."""
    return await asyncio.to_thread(store.renew, leases)


async def outcomes(store: Store, delivery: bytes) -> list[AttemptOutcome]:
    return [attempt.outcome for attempt in await store.attempts_of(delivery)]


@pytest.fixture
async def rivals(ground: Ground, store: Store) -> AsyncIterator[list[Store]]:
    """Several who lease from the same place: processes on PostgreSQL, workers of one process on SQLite."""
    if ground.engine == "sqlite":
        yield [store] * 3
        return
    async with AsyncExitStack() as stack:
        yield [store, await stack.enter_async_context(opened(ground)), await stack.enter_async_context(opened(ground))]


# -- what a lease holds ------------------------------------------------------------------------


async def test_nothing_waits(store: Store) -> None:
    assert await store.lease([]) == []
    assert await take(store) == []
    next_due = await store.next_due([1, 2])
    assert (next_due.due_in, next_due.is_due) == (None, False)


async def test_a_lease_tells_all_that_an_attempt_needs(store: Store) -> None:
    """R50"""
    sent = item("k7", subject="s", to=[("crm", 1)], type_="order.paid", body=b"\x00raw", rank=3, rank_scope="m1")
    sent.marks = Mark.unparsed
    await record(store, intake(sent))
    lease = await take_one(store, lease=17.0)
    planned = sent.deliveries[0]
    assert (lease.delivery.id, lease.front_id, lease.queue_key) == (planned.id, planned.id, planned.subject_key)
    assert (lease.delivery.destination_id, lease.delivery.run, lease.delivery.attempt, lease.deaths) == (1, 1, 1, 0)
    assert (lease.priority, lease.delivery.options, lease.delivery.replay_id, lease.seconds) == (
        Priority.live,
        0,
        None,
        17.0,
    )
    assert (lease.event.id, lease.event.source_id, lease.event.source, lease.event.type) == (
        sent.event_id,
        1,
        "orders",
        "order.paid",
    )
    assert (lease.event.key, lease.event.subject, lease.event.marks) == ("k7", "s", Mark.unparsed)
    assert (lease.event.rank, lease.event.rank_scope, lease.highest_rank) == (3, "m1", None)
    assert (lease.event.request_head, lease.event.body, lease.event.event_at) == (HEAD, b"\x00raw", None)
    event = await store.get_event(sent.event_id)
    assert event is not None
    assert lease.event.received_at == event.received_at
    assert lease.trigger is Trigger.initial


async def test_a_delivery_without_subject_is_a_line_of_its_own(store: Store) -> None:
    [first, second] = await deliver(store, None, None)
    leases = await take(store)
    assert sorted(ids(leases)) == sorted([first, second])
    assert {lease.queue_key for lease in leases} == {first, second}


async def test_an_item_of_a_split_request_comes_with_the_head_of_that_request(store: Store) -> None:
    split = [item(f"k{n}", to=[("crm", 1)], body=b"%d" % n) for n in range(2)]
    await record(store, intake(*split, raw=b"[0, 1]", head=b"POST /split"))
    leases = await take(store)
    assert {lease.event.request_head for lease in leases} == {b"POST /split"}
    assert {lease.event.body for lease in leases} == {b"0", b"1"}


async def test_each_want_gets_its_own(store: Store) -> None:
    await deliver(store, None, None, None)
    await deliver(store, None, None, to=MAIL)
    leases = await store.lease([LeaseRequest(1, 2, 10.0), LeaseRequest(2, 10, 20.0), LeaseRequest(1, 0, 10.0)])
    assert (
        sorted((lease.delivery.destination_id, lease.seconds) for lease in leases) == [(1, 10.0)] * 2 + [(2, 20.0)] * 2
    )
    assert len(await take(store)) == 1


async def test_what_waits_longest_comes_first(ground: Ground, store: Store) -> None:
    made = []
    for _ in range(5):
        made.append(await deliver_one(store))
        ground.forward(1)
    assert [(await take_one(store, limit=1)).delivery.id for _ in made] == made


async def test_a_leased_delivery_is_shown_as_leased(ground: Ground, store: Store) -> None:
    made = await deliver_one(store)
    waiting = await look(store, made)
    assert (waiting.status, waiting.attempts) == (DeliveryStatus.pending, 0)
    assert waiting.due_at is not None
    await take_one(store, lease=30.0)
    leased = await look(store, made)
    assert (leased.status, leased.attempts) == (DeliveryStatus.leased, 1)
    assert leased.due_at is not None
    assert 25 < (leased.due_at - waiting.due_at).total_seconds() < 60


# -- exactly one winner ------------------------------------------------------------------------


async def test_every_delivery_is_leased_once(store: Store, rivals: list[Store]) -> None:
    """R23: the sum of leases over all who ask is the number of deliveries, each of them once."""
    made = await deliver(store, *[None] * 60, *[f"s{n}" for n in range(60)])
    rounds = [take(rival, limit=7) for _ in range(12) for rival in rivals]
    leases = [lease for taken in await asyncio.gather(*rounds) for lease in taken]
    assert sorted(ids(leases)) == sorted(made)
    assert len({lease.fence for lease in leases}) == len(made)


async def test_somebody_wins(store: Store, rivals: list[Store]) -> None:
    """R24: whoever contends for one delivery, one of them gets it, every time."""
    for _ in range(10):
        made = await deliver_one(store, "s")
        rounds = await asyncio.gather(*[take(rival, limit=5) for rival in rivals * 2])
        won = [lease for taken in rounds for lease in taken]
        assert ids(won) == [made]
        await settle(store, done(won[0]))


async def test_rivals_never_hold_two_of_one_subject(store: Store, rivals: list[Store]) -> None:
    """R42"""
    made = await deliver(store, *["s"] * 12)
    order: list[bytes] = []
    while len(order) < len(made):
        rounds = await asyncio.gather(*[take(rival, limit=5) for rival in rivals])
        won = [lease for taken in rounds for lease in taken]
        assert len(won) == 1
        await settle(rivals[len(order) % len(rivals)], done(won[0]))
        order += ids(won)
    assert order == made


# -- fences ------------------------------------------------------------------------------------


async def test_every_lease_has_a_higher_fence(ground: Ground, store: Store) -> None:
    """R25: over deliveries, releases, take-overs and retries, no fence comes twice and none is lower."""
    await deliver(store, "a", None)
    highest = 0
    for after in (release, release, retry, None, retry):
        leases = await take(store, lease=10.0, crash_tolerance=9)
        assert len(leases) == 2
        fences = {lease.fence for lease in leases}
        assert len(fences) == 2
        assert min(fences) > highest
        highest = max(fences)
        if after is None:
            ground.forward(11)
        else:
            await settle(store, *[after(lease) for lease in leases])


async def test_fences_rise_over_a_restart(ground: Ground) -> None:
    async with opened(ground) as store:
        await deliver(store, None, None)
        before = max(lease.fence for lease in await take(store, lease=1.0))
    ground.forward(2)
    async with opened(ground) as store:
        assert all(lease.fence > before for lease in await take(store, crash_tolerance=9))
        await deliver_one(store)
        assert (await take_one(store)).fence > before


# -- take-over ---------------------------------------------------------------------------------


async def test_a_lease_that_ran_out_is_taken_over(ground: Ground, store: Store) -> None:
    """R29, R35: by the ordinary lease, with no configuration; the attempt is not used up, and the crash is told."""
    made = await deliver_one(store)
    lost = await take_one(store, lease=10.0, crash_tolerance=1)
    assert await take(store, crash_tolerance=1) == []
    ground.forward(10.5)
    taken = await take_one(store, crash_tolerance=1)
    assert (taken.delivery.id, taken.delivery.attempt, taken.deaths, taken.priority) == (made, 1, 0, Priority.live)
    assert taken.fence > lost.fence
    [crashed] = await store.attempts_of(made)
    assert (crashed.outcome, crashed.fence, crashed.n, crashed.run) == (AttemptOutcome.crashed, lost.fence, 1, 1)
    assert (await look(store, made)).attempts == 1


async def test_a_lease_is_taken_over_in_real_time(store: Store) -> None:
    """R29: nothing but waiting is needed; lease + 1 s is the promise, and what is due may be leased at once."""
    made = await deliver_one(store)
    began = time.monotonic()
    await take_one(store, lease=0.2, crash_tolerance=9)
    next_due = await store.next_due([1])
    assert next_due.due_in is not None
    assert 0 <= next_due.due_in <= 0.2
    while not (taken := await take(store, crash_tolerance=9)):
        await asyncio.sleep(0.01)
    assert ids(taken) == [made]
    assert time.monotonic() - began > 0.19, "not before its end; the server measures by a clock of its own"


async def test_a_taken_over_lease_gives_no_rights(ground: Ground, store: Store) -> None:
    """R25-R27, R30: late success, failure, release and heartbeat of one who lost its lease change nothing."""
    made = await deliver_one(store, "s")
    behind = await deliver_one(store, "s")
    zombie = await take_one(store, lease=10.0, crash_tolerance=9)
    ground.forward(11)
    holder = await take_one(store, crash_tolerance=9)
    before = await look(store, made), await look(store, behind), await store.attempts_of(made), await store.levels()
    for late in (
        done(zombie),
        retry(zombie),
        release(zombie),
        Settlement(zombie, Settle.dead, breaker=Breaker(1), pause="gone"),
        failed(zombie, Breaker(1)),
    ):
        assert await is_lost(store, late)
    assert await renew(store, zombie) == set()
    after = await look(store, made), await look(store, behind), await store.attempts_of(made), await store.levels()
    assert after == before
    assert await take(store, crash_tolerance=9) == []
    assert await renew(store, holder) == {holder.fence}
    await settle(store, done(holder))


async def test_a_settled_lease_gives_no_rights(store: Store) -> None:
    """R26, R27: not after done, and not after the delivery was given back and leased again."""
    made = await deliver_one(store, "s")
    first = await take_one(store)
    await settle(store, release(first))
    assert await is_lost(store, done(first))
    second = await take_one(store)
    assert await is_lost(store, done(first))
    await settle(store, done(second))
    for late in (done(second), retry(second), release(second)):
        assert await is_lost(store, late)
    assert await renew(store, first, second) == set()
    assert (await look(store, made)).status is DeliveryStatus.done
    assert await outcomes(store, made) == [AttemptOutcome.done]


async def test_one_who_was_late_but_not_replaced_may_still_settle(ground: Ground, store: Store) -> None:
    """R28: the fence decides, not the time. Nobody else has worked on it, so its success is good."""
    made = await deliver_one(store)
    late = await take_one(store, lease=10.0)
    ground.forward(60)
    await settle(store, done(late))
    assert (await look(store, made)).status is DeliveryStatus.done


async def test_a_fence_without_its_line_is_no_right(store: Store) -> None:
    """R25: a settlement needs line, delivery and fence; a true fence on another's line is refused."""
    await deliver(store, "a", "b")
    [one, other] = await take(store)
    forged = structs.replace(one, queue_key=other.queue_key, delivery=other.delivery, front_id=other.front_id)
    assert await is_lost(store, done(forged))
    await settle(store, done(one), done(other))


async def test_after_a_restart_work_is_taken_over(ground: Ground) -> None:
    """R1, R29: SQLite at once, for the only process that could hold it is gone; PostgreSQL when the lease has ended."""
    async with opened(ground) as store:
        made = await deliver_one(store, "s")
        lost = await take_one(store, lease=60.0, crash_tolerance=1)
    async with opened(ground) as store:
        if ground.engine == "postgres":
            assert await take(store, crash_tolerance=1) == []
            ground.forward(61)
        taken = await take_one(store, crash_tolerance=1)
        assert (taken.delivery.id, taken.delivery.attempt) == (made, 1)
        assert await outcomes(store, made) == [AttemptOutcome.crashed]
        assert await is_lost(store, done(lost))
        await settle(store, done(taken))


# -- heartbeat ---------------------------------------------------------------------------------


async def test_a_heartbeat_keeps_the_lease(ground: Ground, store: Store) -> None:
    """R32: from a thread, and for as long as it comes."""
    made = await deliver_one(store)
    lease = await take_one(store, lease=100.0)
    for _ in range(4):
        ground.forward(80)
        assert await renew(store, lease) == {lease.fence}
        assert await take(store) == []
    assert await outcomes(store, made) == []
    await settle(store, done(lease))
    assert (await look(store, made)).status is DeliveryStatus.done


async def test_a_heartbeat_that_stops_loses_the_lease(ground: Ground, store: Store) -> None:
    """R34"""
    await deliver_one(store)
    lease = await take_one(store, lease=100.0, crash_tolerance=9)
    ground.forward(80)
    assert await renew(store, lease) == {lease.fence}
    ground.forward(40)
    assert await take(store, crash_tolerance=9) == []
    ground.forward(61)
    taken = await take_one(store, crash_tolerance=9)
    assert taken.fence > lease.fence
    assert await renew(store, lease, taken) == {taken.fence}


async def test_a_heartbeat_while_the_loop_is_blocked(ground: Ground, store: Store) -> None:
    """R32: the loop does nothing at all while the heartbeat is made."""
    await deliver_one(store)
    lease = await take_one(store, lease=100.0)
    ground.forward(60)
    kept: list[set[int]] = []
    thread = threading.Thread(target=lambda: kept.append(store.renew([lease])))
    thread.start()
    thread.join()
    assert kept == [{lease.fence}]
    ground.forward(60)
    assert await take(store) == []
    await settle(store, done(lease))


async def test_those_that_are_kept_do_not_stand_in_the_way(ground: Ground, store: Store) -> None:
    await deliver(store, *[None] * 20)
    kept = await take(store, lease=100.0)
    ground.forward(80)
    assert await renew(store, *kept) == {lease.fence for lease in kept}
    ground.forward(40)
    late = await deliver_one(store)
    assert (await take_one(store, limit=1)).delivery.id == late
    await settle(store, *[done(lease) for lease in kept])


async def test_a_heartbeat_of_nothing(store: Store) -> None:
    assert await renew(store) == set()


# -- attempts ----------------------------------------------------------------------------------


async def test_attempts_count_when_leased_and_come_back_when_released(store: Store) -> None:
    """R35, R37"""
    made = await deliver_one(store)
    for expected in (1, 1, 1):
        lease = await take_one(store)
        assert lease.delivery.attempt == expected
        assert (await look(store, made)).attempts == 1
        await settle(store, release(lease))
        assert (await look(store, made)).attempts == 0
    for expected in (1, 2, 3):
        lease = await take_one(store)
        assert lease.delivery.attempt == expected
        assert lease.trigger is (Trigger.initial if expected == 1 else Trigger.retry)
        await settle(store, retry(lease))
    lease = await take_one(store)
    await settle(store, release(lease))
    assert (await take_one(store)).delivery.attempt == 4
    assert [attempt.n for attempt in await store.attempts_of(made)] == [1, 2, 3]


async def test_a_released_delivery_may_have_to_wait(ground: Ground, store: Store) -> None:
    await deliver_one(store)
    await settle(store, release(await take_one(store), 20.0))
    assert await take(store) == []
    ground.forward(21)
    assert (await take_one(store)).delivery.attempt == 1


# -- held back ---------------------------------------------------------------------------------


async def test_a_paused_destination_gives_nothing(store: Store) -> None:
    made = await deliver_one(store)
    other = await deliver_one(store, to=MAIL)
    await store.pause(1, "ann", "they moved")
    assert await take(store) == []
    assert (await store.next_due([1])).due_in is None
    assert (await take_one(store, to=2)).delivery.id == other
    level = (await store.levels())["crm"]
    assert (level.paused_by, level.paused_why, level.pending) == ("ann", "they moved", 1)
    assert level.paused_at is not None
    late = await deliver_one(store)
    await store.resume(1, "ann")
    assert sorted(ids(await take(store))) == sorted([made, late])
    level = (await store.levels())["crm"]
    assert (level.paused_at, level.paused_by, level.paused_why) == (None, None, None)


async def test_what_was_leased_before_the_pause_may_be_settled(store: Store) -> None:
    made = await deliver_one(store)
    lease = await take_one(store)
    await store.pause(1, "ann", "")
    assert await renew(store, lease) == {lease.fence}
    await settle(store, done(lease))
    assert (await look(store, made)).status is DeliveryStatus.done


# -- outlook and wake --------------------------------------------------------------------------


async def test_the_outlook(ground: Ground, store: Store) -> None:
    await deliver_one(store)
    assert set((await store.next_due([1])).of(Priority.live)) == {1}
    assert not (await store.next_due([2])).is_due
    assert await store.next_due([]) == Outlook({priority: set() for priority in Priority})
    await settle(store, retry(await take_one(store), 400.0))
    due_in = (await store.next_due([1, 2])).due_in
    assert due_in is not None
    assert 300 < due_in <= 400
    await deliver_one(store, to=MAIL)
    next_due = await store.next_due([1, 2])
    assert (set(next_due.of(Priority.live)), next_due.due_in is not None) == ({2}, True)
    ground.forward(401)
    assert set((await store.next_due([1])).of(Priority.live)) == {1}


async def test_what_has_become_due_since(ground: Ground, store: Store) -> None:
    """Also for destinations that are not asked about: an inbox may have too many of them."""
    ground.stand_still()
    beginning = datetime(2000, 1, 1, tzinfo=UTC)
    first = await store.next_due([], beginning)
    assert not first.is_due
    await deliver_one(store)
    await settle(store, retry(await take_one(store), 400.0))
    ground.forward(1)
    await deliver_one(store, to=MAIL)
    second = await store.next_due([], first.looked_at)
    assert {priority for priority in Priority if second.of(priority)} == {Priority.live}
    assert set(second.of(Priority.live)) == {2}
    ground.forward(100)
    third = await store.next_due([], second.looked_at)
    ground.forward(100)
    assert not (await store.next_due([], third.looked_at)).is_due
    ground.forward(300)
    assert set((await store.next_due([], third.looked_at)).of(Priority.live)) == {1}


async def test_a_breaker_whose_time_has_passed_is_noticed(ground: Ground, store: Store) -> None:
    await deliver(store, None, None)
    [lease, _] = await take(store)
    await settle(store, failed(lease, Breaker(failures=1, open=300.0)))
    ground.forward(10)
    looked_at = (await store.next_due([], datetime(2000, 1, 1, tzinfo=UTC))).looked_at
    ground.forward(100)
    looked_at = (await store.next_due([], looked_at)).looked_at
    ground.forward(200)
    assert 1 in (await store.next_due([], looked_at)).of(Priority.live)


async def test_somebody_is_woken_when_something_may_be_due(ground: Ground) -> None:
    store = ground.make()
    woken = asyncio.Event()
    store.observer.wake, store.observer.works = (lambda _: woken.set()), True
    await store.open()
    try:
        await store.register_names(["orders", "payments"], ["crm", "mail"])
        lost = await deliver_one(store, "s")
        await woken.wait()
        await deliver_one(store, "s")
        lease = await take_one(store)
        await asyncio.sleep(0.2)  # what was told of the arrivals has been told by now
        woken.clear()
        await settle(store, done(lease))
        await woken.wait()
        assert (await look(store, lost)).status is DeliveryStatus.done
        await store.pause(1, "ann", "")
        await asyncio.sleep(0.2)
        woken.clear()
        await store.resume(1, "ann")
        await woken.wait()
    finally:
        await store.close()


async def test_an_unknown_destination_has_nothing(store: Store) -> None:
    assert await take(store, to=99) == []
    assert await store.get_delivery(new_id()) is None
    assert await store.attempts_of(new_id()) == []
