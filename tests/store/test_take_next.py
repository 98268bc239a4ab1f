"""Settle and take the next: who settles a delivery may get the next of its subject in the same commit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from oncehook.errors import StoreError, StoreUnavailable
from oncehook.model import (
    AttemptOutcome,
    Breaker,
    DeliveryStatus,
    EraseOrder,
    Expired,
    Filter,
    Lease,
    Options,
    Priority,
    Settle,
    Settled,
    Settlement,
)
from oncehook.store.base import Store
from oncehook.store.postgres import PostgresStore
from tests.store.conftest import Ground, failed_checks
from tests.store.making import (
    CRM,
    MAIL,
    dead,
    deliver,
    deliver_one,
    done,
    failed,
    finish,
    ids,
    intake,
    item,
    look,
    record,
    record_all,
    release,
    replay,
    replay_all,
    settle,
    statuses,
    take,
    take_one,
)
from tests.store.place import Place
from tests.store.test_outbox import emitted
from tests.store.test_postgres_work import check_all_done_in_order, cut_off, rival, waits_for_a_lock
from tests.waiting import until

WORKER = "host:1:aa"


async def go_on(store: Store, lease: Lease, seconds: float = 30.0, **about: Any) -> Settled:
    """Settle as done, and ask for the next of the subject."""
    return await store.settle([done(lease, take_next=seconds, **about)], WORKER)


async def following(store: Store, lease: Lease, seconds: float = 30.0, **about: Any) -> Lease:
    """The next of its subject, which must be given."""
    settled = await go_on(store, lease, seconds, **about)
    assert settled.ours == {lease.fence}
    [found] = settled.next
    return found


async def is_the_end(store: Store, lease: Lease, **about: Any) -> bool:
    """Whether it is settled, and nothing follows."""
    settled = await go_on(store, lease, **about)
    assert settled.ours == {lease.fence}
    return not settled.next


async def is_untouched(store: Store, delivery: bytes) -> bool:
    """Whether a delivery waits as if nobody had ever looked at it."""
    kept = await look(store, delivery)
    return (kept.status, kept.attempts) == (DeliveryStatus.pending, 0) and not await store.attempts_of(delivery)


def deaths(ground: Ground, lease: Lease) -> tuple[int, int]:
    """Crashes and deaths that are held against the head of a line."""
    line = lease.queue_key.hex() if ground.engine == "postgres" else lease.queue_key
    mark = "$1::text::uuid" if ground.engine == "postgres" else "?"
    [row] = ground.sql(f"SELECT crashes, deaths FROM heads WHERE subject_key = {mark}", line)
    return (row[0], row[1])


# -- what is given -----------------------------------------------------------------------------


async def test_the_next_is_told_like_any_other_lease(store: Store) -> None:
    """R35, R50: all that an attempt needs, counted as its first one."""
    await deliver_one(store, "s")
    split = [item(f"k{n}", subject="s", to=[CRM], body=b"%d" % n, rank=n, type_="order.paid") for n in range(2)]
    await record(store, intake(*split, raw=b"[0, 1]", head=b"POST /split"))
    lease = await take_one(store)
    given = await following(store, lease, 17.0)
    assert given.fence > lease.fence
    assert (given.delivery.attempt, given.deaths, given.seconds, given.more) == (1, 0, 17.0, True)
    assert (await look(store, given.delivery.id)).attempts == 1
    assert (await look(store, given.delivery.id)).status is DeliveryStatus.leased
    await settle(store, release(given))
    ordinary = await take_one(store, lease=17.0)
    assert structs.replace(given, fence=ordinary.fence) == ordinary


async def test_a_subject_goes_on_in_the_order_of_commit_one_at_a_time(store: Store) -> None:
    """R42: nobody else gets any of it meanwhile, and in the end nothing is left of its line."""
    made = await deliver(store, *["s"] * 6)
    lease = await take_one(store)
    order, fences = [lease.delivery.id], [lease.fence]
    while (settled := await go_on(store, lease)).next:
        [lease] = settled.next
        order.append(lease.delivery.id)
        fences.append(lease.fence)
        assert await take(store) == []
        assert (await statuses(store, made)).count("leased") == 1
    assert order == made
    assert fences == sorted(set(fences))
    assert await statuses(store, made) == ["done"] * 6
    assert await take(store) == []
    assert [len(await store.attempts_of(one)) for one in made] == [1] * 6


async def test_what_arrives_meanwhile_comes_after_what_waits(store: Store) -> None:
    made = await deliver(store, "s", "s")
    lease = await take_one(store)
    made += await deliver(store, "s")
    lease = await following(store, lease)
    assert lease.delivery.id == made[1]
    made += await deliver(store, "s")
    lease = await following(store, lease)
    assert lease.delivery.id == made[2]
    assert (await following(store, lease)).delivery.id == made[3]


async def test_many_subjects_go_on_in_one_commit(store: Store) -> None:
    """Each gets its own next, for its own time; who does not ask gets none."""
    made = await deliver(store, *[f"s{n % 16}" for n in range(32)])  # one group: of two, the second may commit first
    firsts = {lease.event.subject: lease for lease in await take(store)}
    asked = {subject: None if n % 4 == 0 else 10.0 + n for n, subject in enumerate(firsts)}
    settled = await store.settle([done(one, take_next=asked[subject]) for subject, one in firsts.items()], WORKER)
    assert settled.ours == {one.fence for one in firsts.values()}
    assert {one.event.subject: one.seconds for one in settled.next} == {s: n for s, n in asked.items() if n is not None}
    assert {one.delivery.id for one in settled.next} < set(made[16:])
    assert {one.event.subject for one in await take(store)} == {s for s, n in asked.items() if n is None}


async def test_without_a_subject_nothing_follows(store: Store) -> None:
    await deliver(store, None, None)
    [lease, other] = await take(store)
    assert await is_the_end(store, lease)
    assert await is_the_end(store, other)


async def test_other_lines_of_the_same_text_are_none_of_its_business(store: Store) -> None:
    """A line is of one destination and one source."""
    await deliver(store, "s")
    await deliver(store, "s", to=MAIL)
    await deliver(store, "s", source="payments")
    lease = next(one for one in await take(store) if one.event.source == "orders")
    assert await is_the_end(store, lease)


# -- only with the settlement ------------------------------------------------------------------


async def test_who_lost_its_lease_gets_no_next(ground: Ground, store: Store) -> None:
    """R25-R27: it settles nothing, and the line is as it was."""
    made = await deliver(store, "s", "s")
    lost = await take_one(store, lease=10.0, crash_tolerance=9)
    ground.forward(11)
    holder = await take_one(store, crash_tolerance=9)
    settled = await go_on(store, lost)
    assert (settled.ours, list(settled.next)) == (set(), [])
    assert await statuses(store, made) == ["leased", "pending"]
    assert await is_untouched(store, made[1])
    assert (await following(store, holder)).delivery.id == made[1]


async def test_who_settles_twice_gets_one_next(store: Store) -> None:
    made = await deliver(store, "s", "s", "s")
    lease = await take_one(store)
    answers = await asyncio.gather(*[go_on(store, lease) for _ in range(4)])
    assert ids([one for settled in answers for one in settled.next]) == [made[1]]
    assert await is_untouched(store, made[2])


async def test_a_lost_one_takes_nobodys_next_away(store: Store) -> None:
    """In one group: it gets nothing, the other its own."""
    made = await deliver(store, "a", "b", "a", "b")
    leases = {lease.event.subject: lease for lease in await take(store)}
    await settle(store, release(leases["a"]))
    settled = await store.settle([done(one, take_next=30.0) for one in leases.values()], WORKER)
    assert settled.ours == {leases["b"].fence}
    assert ids(settled.next) == [made[3]]
    assert await is_untouched(store, made[0])
    assert await is_untouched(store, made[2])


@pytest.mark.parametrize("what", [Settle.retry, Settle.release])
async def test_a_head_that_stays_gives_no_next(ground: Ground, store: Store, what: Settle) -> None:
    """R43: what waits for its retry keeps its place, and its successors wait with it."""
    made = await deliver(store, "s", "s")
    lease = await take_one(store)
    settled = await store.settle([Settlement(lease, what, 30.0, take_next=30.0)], WORKER)
    assert (settled.ours, list(settled.next)) == ({lease.fence}, [])
    assert await take(store) == []
    assert await is_untouched(store, made[1])
    ground.forward(31)
    again = await take_one(store)
    assert (again.delivery.id, again.delivery.attempt) == (made[0], 2 if what is Settle.retry else 1)
    assert (await following(store, again)).delivery.id == made[1]


async def test_a_dead_letter_that_is_held_stops_the_line(store: Store) -> None:
    """R43: until it is discarded, whatever is asked for."""
    made = await deliver(store, "s", "s", "s", options=Options.hold)
    lease = await following(store, await take_one(store))
    assert lease.delivery.id == made[1]
    settled = await store.settle([structs.replace(dead(lease), take_next=30.0)], WORKER)
    assert (settled.ours, list(settled.next)) == ({lease.fence}, [])
    assert await take(store) == []
    assert await is_untouched(store, made[2])
    await store.discard(Filter(ids=[made[1]]), "ann", "")
    assert ids(await take(store)) == [made[2]]


async def test_a_settlement_whose_effect_fails_gives_no_next(ground: Ground, store: Store) -> None:
    """R51, R54: the lease is as it was, and so is what waits behind it."""
    taken = item()
    await record(store, intake(taken))
    made = await deliver(store, "s", "s")
    lease = await take_one(store)

    def effect(connection: Any) -> None:
        raise ValueError("the handler's own")

    if ground.engine == "sqlite":
        with pytest.raises(ValueError, match="the handler's own"):
            await go_on(store, lease, commit=effect)
    with pytest.raises(StoreError, match="refused this write"):
        await go_on(store, lease, emits=[emitted(None, event_id=taken.event_id)])
    assert await statuses(store, made) == ["leased", "pending"]
    assert await is_untouched(store, made[1])
    assert await take(store) == []
    assert (await following(store, lease)).delivery.id == made[1]


async def test_a_settlement_that_was_cut_off_gives_no_next(place: Place) -> None:
    store = await place.open()
    made = await deliver(store, "s", "s")
    lease = await take_one(store)
    with rival(place) as other:
        other.execute("SELECT * FROM heads FOR UPDATE")
        settling = asyncio.create_task(go_on(store, lease))
        await until(waits_for_a_lock(place))
        await cut_off(place, "%FROM settle(%")
        with pytest.raises(StoreUnavailable):
            await settling
        other.rollback()
    assert await statuses(store, made) == ["leased", "pending"]
    assert await is_untouched(store, made[1])
    assert (await following(store, lease)).delivery.id == made[1]
    assert failed_checks(await store.check()) == []


# -- effects -----------------------------------------------------------------------------------


async def test_effect_settlement_and_next_are_one_commit(ground: Ground, store: Store) -> None:
    """R51, R54: what the handler wrote and emitted is kept, and the next is its own."""
    made = await deliver(store, "s", "s")
    lease = await take_one(store)
    told = emitted("k")
    about: dict[str, Any] = {"emits": [told]}
    if ground.engine == "sqlite":
        ground.sql("CREATE TABLE effects (n integer)")
        about["commit"] = lambda connection: connection.execute("INSERT INTO effects VALUES (1)")
    given = await following(store, lease, **about)
    assert given.delivery.id == made[1]
    assert told.verdict is not None
    assert await store.get_event(told.verdict.event_id) is not None
    if ground.engine == "sqlite":
        assert ground.sql("SELECT count(*) FROM effects") == [(1,)]
    assert ids(await take(store, to=2)) == [told.intake.items[0].deliveries[0].id]


async def test_what_is_emitted_to_the_own_subject_comes_last(store: Store) -> None:
    made = await deliver(store, "s", "s", source="payments")
    told = emitted("k", subject="s", to=[CRM])
    given = await following(store, await take_one(store), emits=[told])
    assert given.delivery.id == made[1]
    assert await take(store) == []
    assert (await following(store, given)).delivery.id == told.intake.items[0].deliveries[0].id


# -- a holder that dies ------------------------------------------------------------------------


async def test_a_crash_is_of_the_one_under_way_alone(ground: Ground, store: Store) -> None:
    """R36: what was settled stays so, and what waits has no attempt and no death to its name."""
    expired: list[Expired] = []
    store.observer.note_expired = expired.append
    made = await deliver(store, *["s"] * 4)
    lost = await following(store, await take_one(store, lease=10.0), 10.0)
    ground.forward(11)
    assert await take(store) == []
    assert await statuses(store, made) == ["done", "pending", "pending", "pending"]
    [crashed] = await store.attempts_of(made[1])
    assert (crashed.outcome, crashed.fence, crashed.n) == (AttemptOutcome.crashed, lost.fence, 1)
    assert [(one.delivery_id, one.fence, one.attempt, one.worker) for one in expired] == [
        (made[1], lost.fence, 1, WORKER)
    ]
    assert deaths(ground, lost) == (1, 0)
    alone = await take_one(store, priority=Priority.quarantined)
    assert (alone.delivery.id, alone.delivery.attempt, alone.deaths) == (made[1], 1, 0)
    assert await is_untouched(store, made[2])
    await settle(store, done(alone))
    given = await following(store, await take_one(store))
    assert (given.delivery.id, given.delivery.attempt, given.deaths, given.priority) == (made[3], 1, 0, Priority.live)
    assert await statuses(store, made) == ["done", "done", "done", "leased"]


async def test_crashes_are_not_handed_on(ground: Ground, store: Store) -> None:
    """R36: the next begins with a clean sheet, whatever became of the one before it."""
    made = await deliver(store, "s", "s")
    for crashes in (1, 2, 3):
        await take_one(store, lease=10.0, crash_tolerance=9)
        ground.forward(11)
        lease = await take_one(store, lease=10.0, crash_tolerance=9)
        assert deaths(ground, lease) == (2 * crashes - 1, 0)
        ground.forward(11)
    lease = await take_one(store, lease=10.0, crash_tolerance=9)
    given = await following(store, lease, 10.0)
    assert (given.delivery.id, given.delivery.attempt, given.deaths, given.priority) == (made[1], 1, 0, Priority.live)
    assert deaths(ground, given) == (0, 0)
    ground.forward(11)
    assert ids(await take(store, crash_tolerance=1)) == [made[1]], "its first crash"


async def test_the_next_is_held_for_its_own_time(ground: Ground, store: Store) -> None:
    """R29: at least five sixths of what was asked for, however much of the first one's time is over."""
    made = await deliver(store, *["s"] * 5)
    ground.stand_still()
    lease = await take_one(store, lease=60.0, crash_tolerance=9)
    for _ in range(3):
        ground.forward(49)
        assert await take(store, crash_tolerance=9) == []
        lease = await following(store, lease, 60.0)
    assert lease.delivery.id == made[3]
    ground.forward(49)
    assert await take(store, crash_tolerance=9) == []
    ground.forward(12)
    taken = await take_one(store, crash_tolerance=9)
    assert (taken.delivery.id, taken.delivery.attempt) == (made[3], 1)


async def test_a_heartbeat_keeps_the_next(ground: Ground, store: Store) -> None:
    """R32: the former fence prolongs nothing any more."""
    await deliver(store, "s", "s")
    first = await take_one(store, lease=100.0, crash_tolerance=9)
    given = await following(store, first, 100.0)
    for _ in range(3):
        ground.forward(80)
        assert await asyncio.to_thread(store.renew, [first, given]) == {given.fence}
        assert await take(store, crash_tolerance=9) == []
    assert await is_the_end(store, given)


# -- what takes effect before the next begins --------------------------------------------------


async def test_a_destination_that_is_paused_gives_no_next(store: Store) -> None:
    made = await deliver(store, "s", "s")
    lease = await take_one(store)
    await store.pause(1, "ann", "")
    assert await is_the_end(store, lease)
    assert await is_untouched(store, made[1])
    await store.resume(1, "ann")
    assert ids(await take(store)) == [made[1]]


async def test_a_settlement_that_pauses_its_destination_ends_the_line(store: Store) -> None:
    """410: of others of its group the next is not begun either, once it is committed."""
    made = await deliver(store, "a", "a")
    gone = await take_one(store)
    await store.settle([Settlement(gone, Settle.dead, pause="410", take_next=30.0)], WORKER)
    assert (await store.levels())["crm"].paused_at is not None
    assert await take(store) == []
    assert (await statuses(store, made))[0] == "dead"


async def test_an_open_breaker_gives_no_next(ground: Ground, store: Store) -> None:
    """R37: nor one that is half open, where one probe is given to whoever asks first."""
    made = await deliver(store, "s", "s", None)
    leases = {lease.event.subject: lease for lease in await take(store)}
    await settle(store, failed(leases[None], Breaker(failures=1, open=30.0)))
    ground.forward(31)
    assert await is_the_end(store, leases["s"])
    assert await is_untouched(store, made[1])
    assert len(await take(store)) == 1, "the one probe"


async def test_a_breaker_that_opens_in_the_same_group_gives_no_next(ground: Ground, store: Store) -> None:
    """On PostgreSQL failures are told right after the commit: there what follows begins at most once more."""
    made = await deliver(store, "s", "s", "s", None)
    leases = {lease.event.subject: lease for lease in await take(store)}
    breaker = Breaker(failures=1, open=30.0)
    settled = await store.settle([done(leases["s"], take_next=30.0), failed(leases[None], breaker)], WORKER)
    if ground.engine == "sqlite":
        assert list(settled.next) == []
        assert await is_untouched(store, made[1])
    for one in settled.next:
        assert await is_the_end(store, one)
    assert await is_untouched(store, made[2])
    assert await take(store) == []


async def test_a_worker_hears_of_what_it_could_not_take(store: Store) -> None:
    """What was not given is due, or will be when the breaker may close: nobody else would ask for it soon."""
    woken: list[set[int]] = []
    store.observer.wake = lambda due: woken.append(set(due or ()))
    await deliver(store, "s", "s", None)
    leases = {lease.event.subject: lease for lease in await take(store)}
    woken.clear()
    breaker = Breaker(failures=1, open=30.0)
    well = done(leases["s"], take_next=30.0, breaker=breaker)
    settled = await store.settle([well, Settlement(leases[None], Settle.dead, breaker=breaker)], WORKER)
    assert list(settled.next) or {1} in woken


async def test_what_is_taken_wakes_nobody(store: Store) -> None:
    """Whoever has it need not look for it."""
    woken: list[set[int]] = []
    store.observer.wake = lambda due: woken.append(set(due or ()))
    await deliver(store, "s", "s", "s")
    lease = await following(store, await take_one(store))
    woken.clear()
    lease = await following(store, lease)
    assert woken == []
    made = await deliver(store, "s", "s")
    assert woken == []
    assert list((await store.settle([done(lease)], WORKER)).next) == []
    assert woken == [{1}]
    assert ids(await take(store)) == [made[0]]


async def test_an_erased_subject_has_no_next(store: Store) -> None:
    """S37: who holds one of its deliveries loses it, and nothing of it is given to anybody."""
    made = await deliver(store, "s", "s", "s")
    lease = await take_one(store)
    while (await store.erase(EraseOrder("s", actor="ann"))).events:
        pass
    settled = await go_on(store, lease)
    assert (settled.ours, list(settled.next)) == (set(), [])
    assert await statuses(store, made) == ["discarded"] * 3
    assert await take(store) == []
    late = await deliver_one(store, "s")
    assert ids(await take(store)) == [late]


async def test_what_is_replayed_takes_its_turn_behind_what_waits(store: Store) -> None:
    """R46: the replay of one that is over joins the tail, as a run of its own."""
    made = await deliver(store, "s", "s", "s")
    lease = await take_one(store)
    await settle(store, dead(lease))
    lease = await take_one(store)
    await replay(store, made[0])
    lease = await following(store, lease)
    assert (lease.delivery.id, lease.delivery.run) == (made[2], 1)
    lease = await following(store, lease)
    assert (lease.delivery.id, lease.delivery.run, lease.delivery.attempt) == (made[0], 2, 1)
    assert lease.delivery.replay_id is not None
    assert await is_the_end(store, lease)
    assert [one.run for one in await store.attempts_of(made[0])] == [1, 2]


async def test_a_bulk_replay_waits_for_its_turn(store: Store) -> None:
    """Live work that comes first does not draw it along; within the replay one follows the other."""
    made = await deliver(store, "s", "s", "s")
    for _ in made[:2]:
        await settle(store, dead(await take_one(store)))
    lease = await take_one(store)
    ordered = await replay_all(store, Filter(status=DeliveryStatus.dead))
    assert await store.feed_replays() == 2
    assert await is_the_end(store, structs.replace(lease, more=True))
    assert await take(store) == []
    lease = await take_one(store, priority=Priority.replay)
    assert (lease.delivery.id, lease.delivery.run) == (made[0], 2)
    lease = await following(store, lease)
    assert (lease.delivery.id, lease.delivery.run, lease.priority) == (made[1], 2, Priority.replay)
    assert await is_the_end(store, lease)
    await store.feed_replays()
    shown = await store.get_replay(ordered.id)
    assert shown is not None
    assert str(shown.state) == "done"


# -- coalesce, latest wins ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [Options.coalesce_type, Options.coalesce_any])
async def test_the_rest_is_handed_over_as_one_attempt(store: Store, options: Options) -> None:
    """What waited at the first lease is covered by it, what came since by the next one, each once."""
    made = await deliver(store, *["s"] * 3, options=options)
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (made[0], made[2])
    made += await deliver(store, *["s"] * 4, options=options)
    # a worker asks where it knows that something waits
    given = await following(store, structs.replace(lease, more=True))
    assert (given.front_id, given.delivery.id, given.delivery.attempt) == (made[3], made[6], 1)
    assert await take(store) == []
    assert given.event.id == (await look(store, made[6])).event_id
    assert await is_the_end(store, given)
    assert await statuses(store, made) == ["done"] * 7
    assert [len(await store.attempts_of(one)) for one in made] == [0, 0, 1, 0, 0, 0, 1]
    level = (await store.levels())["crm"]
    assert (level.pending, level.done) == (0, 7)


async def test_the_next_covers_its_own_type_alone(store: Store) -> None:
    kinds = ("a", "b", "a", "b", "c")
    made = [await deliver_one(store, "s", type_=kind, options=Options.coalesce_type) for kind in kinds]
    lease = await take_one(store)
    assert (lease.event.type, lease.delivery.id) == ("a", made[2])
    lease = await following(store, lease)
    assert (lease.event.type, lease.front_id, lease.delivery.id, lease.more) == ("b", made[1], made[3], True)
    lease = await following(store, lease)
    assert (lease.event.type, lease.front_id, lease.delivery.id, lease.more) == ("c", made[4], made[4], False)
    assert await is_the_end(store, lease)
    assert await statuses(store, made) == ["done"] * 5


async def test_a_rank_that_was_just_delivered_overtakes_the_next(store: Store) -> None:
    made = [await deliver_one(store, "s", rank=rank, options=Options.latest_wins) for rank in (3, 1, 4)]
    lease = await following(store, await take_one(store))
    assert (lease.delivery.id, lease.highest_rank, lease.is_stale) == (made[1], 3, True)
    lease = await following(store, lease, note="stale")
    assert (lease.delivery.id, lease.highest_rank, lease.is_stale) == (made[2], 3, False)
    assert await is_the_end(store, lease)
    assert [(await look(store, one)).note for one in made] == [None, "stale", None]


# -- from all sides ----------------------------------------------------------------------------


async def test_work_that_goes_on_and_arrivals_from_all_sides(place: Place) -> None:
    """R42, R68: no deadlock, no error, nothing twice, every subject in the order of commit."""
    stores = [await place.open() for _ in range(2)]
    order: list[bytes] = []
    arriving = True

    async def arrive(store: PostgresStore) -> None:
        for _ in range(15):
            items = [item(subject=f"s{n % 5}", to=[CRM], options=Options(n % 3)) for n in range(20)]
            assert all(isinstance(one, list) for one in await record_all(store, [intake(one) for one in items]))

    async def work(store: PostgresStore) -> None:
        while leases := list(await take(store, limit=3)) or arriving:
            if isinstance(leases, bool):
                await asyncio.sleep(0.001)
                continue
            while leases:
                settled = await store.settle([done(one, take_next=30.0) for one in leases], WORKER)
                assert settled.ours == {one.fence for one in leases}
                order.extend(ids(leases))
                leases = list(settled.next)

    workers = [asyncio.create_task(work(store)) for store in stores for _ in range(2)]
    await asyncio.gather(*[arrive(store) for store in stores])
    arriving = False
    await asyncio.gather(*workers)
    for store in stores:
        order += await finish(store)
    assert len(set(order)) == len(order)
    await check_all_done_in_order(place, stores[0])
