"""Lease on arrival: what the worker of this process has room for is leased in the commit that keeps it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from oncehook.errors import StoreUnavailable
from oncehook.model import AttemptOutcome, Breaker, DeliveryStatus, Expired, Filter, Lease, Options, Outcome, Priority
from oncehook.store.base import Store
from oncehook.store.postgres import PostgresStore, queue
from oncehook.store.sqlite import SqliteStore
from oncehook.worker import Worker
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    MAIL,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    enrolled,
    failed,
    ids,
    intake,
    item,
    keep,
    look,
    opened,
    outcomes,
    record,
    record_all,
    release,
    replay_all,
    settle,
    statuses,
    take,
    take_one,
)
from tests.store.place import Place
from tests.store.test_take_next import is_untouched
from tests.store.working import Noted, Scripted, is_idle, working
from tests.waiting import until

OWNER_ONLY = True
"""On SQLite the owner's worker takes arrivals of clients, too; a client's takes none."""


class Admin:
    """A worker of this process that has some places, and notes what becomes of them."""

    id = "host:1:aa"

    def __init__(self, store: Store, places: int = 100, *, seconds: float = 30.0, only: int | None = None) -> None:
        self.places = places
        self.seconds = seconds
        self.only = only
        self.kept = 0
        self.given_up: list[int] = []
        self.begun: list[Lease] = []
        store.observer.taker = self

    def reserve(self, destination_id: int, priority: Priority) -> float | None:
        if not self.places or self.only not in (None, destination_id):
            return None
        self.places -= 1
        self.kept += 1
        return self.seconds

    def begin_reserved(self, lease: Lease, asked_at: float) -> None:
        self.kept -= 1
        self.begun.append(lease)

    def give_up_reserved(self, destination_id: int) -> None:
        self.kept -= 1
        self.places += 1
        self.given_up.append(destination_id)


# -- what is leased ----------------------------------------------------------------------------


async def test_an_arrival_is_leased_like_any_other(store: Store) -> None:
    """R35, R50: by the same commit, counted as its first attempt, and told no less than by a lease."""
    admin = Admin(store, seconds=17.0)
    about = {"type_": "order.paid", "body": b"\x00raw", "rank": 3, "rank_scope": "m1", "to": [CRM]}
    sent = item("k7", subject="s", **about)  # type: ignore[arg-type]
    assert outcomes(await keep(store, sent)) == [Outcome.accepted]
    [lease] = admin.begun
    made = sent.deliveries[0].id
    assert (lease.delivery.id, lease.delivery.attempt, lease.seconds) == (made, 1, 17.0)
    kept = await look(store, made)
    assert (kept.status, kept.attempts) == (DeliveryStatus.leased, 1)
    assert await take(store) == []
    await settle(store, release(lease))
    ordinary = await take_one(store, lease=17.0)
    assert ordinary.fence > lease.fence
    assert structs.replace(lease, fence=ordinary.fence) == ordinary
    await settle(store, done(ordinary))
    assert (admin.kept, admin.given_up) == (0, [])


async def test_of_a_split_request_only_the_first_of_each_subject_is_leased(store: Store) -> None:
    """R42: the others wait behind it, and nobody has counted anything for them."""
    admin = Admin(store)
    subjects = ["a", "b", "a", None, "a", "b", None]
    sent = [item(f"k{n}", subject=subject, to=[CRM], body=b"%d" % n) for n, subject in enumerate(subjects)]
    await record(store, intake(*sent, raw=b"[]", head=b"POST /split"))
    assert [lease.event.body for lease in admin.begun] == [b"0", b"1", b"3", b"6"]
    assert [lease.more for lease in admin.begun] == [True, True, False, False]
    assert {lease.event.request_head for lease in admin.begun} == {b"POST /split"}
    assert len({lease.fence for lease in admin.begun}) == 4
    for n in (2, 4, 5):
        assert await is_untouched(store, sent[n].deliveries[0].id)
    assert await take(store) == []
    settled = await store.settle([done(admin.begun[0], take_next=30.0)], admin.id)
    assert [lease.event.body for lease in settled.next] == [b"2"]
    assert (admin.kept, admin.given_up) == (0, [])


async def test_every_destination_has_its_own_place(store: Store) -> None:
    """What nobody here has room for is due for anybody, who is told so."""
    woken: list[set[int]] = []
    store.observer.wake = lambda due: woken.append(set(due or ()))
    admin = Admin(store, only=1)
    sent = item("k", subject="s", to=[CRM, MAIL])
    await record(store, intake(sent))
    assert [lease.delivery.destination_id for lease in admin.begun] == [1]
    assert {2} in woken
    assert not any(1 in due for due in woken)
    assert ids(await take(store, to=2)) == [sent.deliveries[1].id]


async def test_who_has_no_room_leases_nothing(store: Store) -> None:
    woken: list[set[int]] = []
    store.observer.wake = lambda due: woken.append(set(due or ()))
    admin = Admin(store, places=2)
    made = await deliver(store, None, None, None, None)
    assert ids(admin.begun) == made[:2]
    assert {1} in woken
    assert [await is_untouched(store, one) for one in made[2:]] == [True, True]
    assert sorted(ids(await take(store))) == sorted(made[2:])


async def test_without_a_worker_nothing_is_leased(store: Store) -> None:
    admin = Admin(store)
    first = await deliver_one(store)
    store.observer.taker = None
    made = await deliver_one(store)
    assert ids(admin.begun) == [first]
    assert await is_untouched(store, made)
    assert ids(await take(store)) == [made]


async def test_what_joins_a_subject_waits_behind_it(store: Store) -> None:
    """R42: whether its head is leased, waits for a retry, or is held."""
    first = await deliver(store, "a", "b", "c", options=Options.hold)
    leases = {lease.event.subject: lease for lease in await take(store)}
    await settle(store, release(leases["b"], 60.0), dead(leases["c"]))
    admin = Admin(store)
    behind = await deliver(store, "a", "b", "c")
    assert admin.begun == []
    assert (admin.kept, admin.given_up) == (0, [1, 1, 1])
    assert [await is_untouched(store, one) for one in behind] == [True] * 3
    assert await statuses(store, first) == ["leased", "pending", "dead"]
    assert await take(store) == []


async def test_live_work_that_joins_a_bulk_replay_is_not_leased(store: Store) -> None:
    """The replay at the head of its subject comes first; but it is live work now, and somebody hears of it."""
    made = await dead_letters(store, "s")
    await replay_all(store, Filter(status=DeliveryStatus.dead))
    assert await store.feed_replays() == 1
    woken: list[set[int]] = []
    store.observer.wake = lambda due: woken.append(set(due or ()))
    admin = Admin(store)
    late = await deliver_one(store, "s")
    assert (admin.begun, admin.kept) == ([], 0)
    assert {1} in woken
    lease = await take_one(store)
    assert lease.delivery.id == made[0]
    await settle(store, done(lease))
    assert ids(await take(store)) == [late]


async def test_a_coalesced_line_begins_with_one_and_goes_on_with_the_rest(store: Store) -> None:
    admin = Admin(store)
    made = await deliver(store, *["s"] * 4, options=Options.coalesce_any)
    [lease] = admin.begun
    assert (lease.front_id, lease.delivery.id) == (made[0], made[0])
    more = structs.replace(lease, more=True)
    [rest] = (await store.settle([done(more, take_next=30.0)], admin.id)).next
    assert (rest.front_id, rest.delivery.id) == (made[1], made[3])
    await settle(store, done(rest))
    assert await statuses(store, made) == ["done"] * 4
    assert [len(await store.attempts_of(one)) for one in made] == [1, 0, 0, 1]


async def test_where_the_latest_wins_nothing_is_leased(store: Store) -> None:
    """What it may have been overtaken by must be looked up first."""
    admin = Admin(store)
    made = await deliver_one(store, "s", rank=3, options=Options.latest_wins)
    assert (admin.begun, admin.kept, admin.given_up, admin.places) == ([], 0, [], 100)
    assert await is_untouched(store, made)
    await settle(store, done(await take_one(store)))
    late = await deliver_one(store, "s", rank=2, options=Options.latest_wins)
    assert admin.begun == []
    lease = await take_one(store)
    assert (lease.delivery.id, lease.is_stale) == (late, True)


# -- copies ------------------------------------------------------------------------------------


async def test_of_copies_in_one_group_only_the_winner_is_leased_once(store: Store) -> None:
    """R11: duplicates and conflicts cause no delivery, and their places are free again."""
    admin = Admin(store)
    sent = [
        item("k", to=[CRM], body=b"1", subject="s"),
        item("k", to=[CRM], body=b"1", subject="s"),
        item("k", to=[CRM], body=b"2", subject="other"),
        item("k2", to=[CRM], body=b"3"),
        item("k2", to=[CRM], body=b"4"),
    ]
    decided = outcomes(await record(store, *[intake(one) for one in sent]))
    assert decided == [
        Outcome.accepted,
        Outcome.duplicate,
        Outcome.conflict,
        Outcome.accepted,
        Outcome.conflict,
    ]
    assert [(lease.event.key, lease.event.body) for lease in admin.begun] == [("k", b"1"), ("k2", b"3")]
    assert (admin.kept, admin.places) == (0, 98)
    assert await take(store) == []
    settled = await store.settle([done(one, take_next=30.0) for one in admin.begun], admin.id)
    assert (len(settled.ours), list(settled.next)) == (2, [])
    assert len((await store.find_deliveries(Filter())).items) == 2


async def test_a_copy_of_what_is_known_is_not_leased(store: Store) -> None:
    """Neither is what comes after it in its group counted for it: the new ones of its subject have their turn."""
    await record(store, intake(item("k", to=[CRM], subject="s")))
    await settle(store, done(await take_one(store)))
    admin = Admin(store)
    sent = [
        item("k", to=[CRM], subject="s"),
        item("k", to=[CRM], subject="s", body=b"differs"),
        item("new", to=[CRM], subject="s"),
        item("newer", to=[CRM], subject="s"),
        item("else", to=[CRM]),
    ]
    decided = outcomes(await record(store, *[intake(one) for one in sent]))
    assert decided == [Outcome.duplicate, Outcome.conflict, *[Outcome.accepted] * 3]
    begun = [lease.event.key for lease in admin.begun] + [lease.event.key for lease in await take(store)]
    assert sorted(str(key) for key in begun) == ["else", "new"]
    assert (admin.kept, admin.places) == (0, 100 - len(admin.begun))
    assert await is_untouched(store, sent[3].deliveries[0].id)


# -- held back ---------------------------------------------------------------------------------


async def test_nothing_of_a_paused_destination_is_leased(store: Store) -> None:
    admin = Admin(store)
    await store.pause(1, "ann", "")
    made = await deliver(store, None, "s")
    others = await deliver(store, None, to=MAIL)
    assert ids(admin.begun) == others
    assert (admin.kept, admin.given_up) == (0, [1, 1])
    assert [await is_untouched(store, one) for one in made] == [True, True]
    await store.resume(1, "ann")
    assert sorted(ids(await take(store))) == sorted(made)


@pytest.mark.parametrize(
    ("failures", "passed"),
    [pytest.param(1, 0.0, id="open"), pytest.param(1, 31.0, id="half open"), pytest.param(9, 0.0, id="failing")],
)
async def test_nothing_of_a_destination_in_trouble_is_leased(
    ground: Ground, store: Store, failures: int, passed: float
) -> None:
    """Its breaker is open, or half open and one probe is for who asks first, or it may open with the next outcome."""
    await deliver_one(store)
    await settle(store, failed(await take_one(store), Breaker(failures=failures, open=30.0)))
    ground.forward(passed)
    admin = Admin(store)
    made = await deliver(store, None, "s")
    assert admin.begun == []
    assert (admin.kept, admin.given_up) == (0, [1, 1])
    assert [await is_untouched(store, one) for one in made] == [True, True]


async def test_a_destination_that_is_well_again_is_leased_for(store: Store) -> None:
    await deliver_one(store)
    breaker = Breaker(failures=9, open=30.0)
    await settle(store, failed(await take_one(store), breaker))
    await settle(store, done(await take_one(store), breaker=breaker))
    admin = Admin(store)
    made = await deliver_one(store)
    assert ids(admin.begun) == [made]


# -- fences and time ---------------------------------------------------------------------------


async def test_fences_rise_whoever_leases(store: Store) -> None:
    """R25: arrivals, leases and settlements that go on, all at once: no fence twice, and each later one is higher."""
    admin = Admin(store)
    seen: list[int] = []
    for _ in range(5):
        admin.places = 3
        _, taken, settled = await asyncio.gather(
            deliver(store, *[None] * 6, "a", "a"),
            take(store),
            store.settle([done(lease, take_next=30.0) for lease in admin.begun], admin.id),
        )
        fresh = [lease.fence for lease in [*taken, *settled.next, *admin.begun] if lease.fence not in seen]
        highest = max(seen, default=0)
        assert all(fence > highest for fence in fresh)
        assert len(set(fresh)) == len(fresh)
        assert len({lease.fence for lease in [*taken, *settled.next]}) == len(taken) + len(settled.next)
        seen += fresh
        seen += [lease.fence for lease in await take(store)]
        admin.begun.clear()
    assert len(set(seen)) == len(seen)


async def test_a_process_that_dies_before_it_begins_is_followed_after_the_lease(ground: Ground, store: Store) -> None:
    """R29, R35, R36: judged like any other lease that ran out; what waits behind it has nothing to its name."""
    expired: list[Expired] = []
    store.observer.note_expired = expired.append
    admin = Admin(store, seconds=10.0)
    made = await deliver(store, "s", "s")
    [lost] = admin.begun
    store.observer.taker = None
    assert await take(store) == []
    ground.forward(11)
    assert await take(store) == []
    [crashed] = await store.attempts_of(made[0])
    assert (crashed.outcome, crashed.fence, crashed.n) == (AttemptOutcome.crashed, lost.fence, 1)
    assert [(one.delivery_id, one.fence, one.worker) for one in expired] == [(made[0], lost.fence, admin.id)]
    alone = await take_one(store, priority=Priority.quarantined)
    assert (alone.delivery.id, alone.delivery.attempt, alone.deaths) == (made[0], 1, 0)
    settled = await store.settle([done(lost, take_next=30.0)], admin.id)
    assert (settled.ours, list(settled.next)) == (set(), [])
    assert await is_untouched(store, made[1])
    await settle(store, done(alone))
    assert ids(await take(store)) == [made[1]]


async def test_a_trusted_destination_takes_it_over_in_company(ground: Ground, store: Store) -> None:
    admin = Admin(store, seconds=10.0)
    made = await deliver_one(store)
    ground.forward(11)
    taken = await take_one(store, crash_tolerance=1)
    assert (taken.delivery.id, taken.delivery.attempt, taken.priority) == (made, 1, Priority.live)
    assert taken.fence > admin.begun[0].fence


async def test_after_a_restart_what_was_leased_on_arrival_is_taken_over(ground: Ground) -> None:
    """R1, R29: SQLite at once, PostgreSQL when the lease has ended."""
    async with opened(ground) as store:
        admin = Admin(store, seconds=60.0)
        made = await deliver_one(store, "s")
        assert ids(admin.begun) == [made]
    async with opened(ground) as store:
        if ground.engine == "postgres":
            assert await take(store, crash_tolerance=1) == []
            ground.forward(61)
        taken = await take_one(store, crash_tolerance=1)
        assert (taken.delivery.id, taken.delivery.attempt) == (made, 1)
        assert taken.fence > admin.begun[0].fence
        await settle(store, done(taken))


async def test_a_heartbeat_keeps_what_was_leased_on_arrival(ground: Ground, store: Store) -> None:
    """R32"""
    admin = Admin(store, seconds=100.0)
    made = await deliver_one(store)
    [lease] = admin.begun
    for _ in range(3):
        ground.forward(80)
        assert await asyncio.to_thread(store.renew, [lease]) == {lease.fence}
        assert await take(store, crash_tolerance=9) == []
    await settle(store, done(lease))
    assert (await look(store, made)).status is DeliveryStatus.done


# -- groups that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 3, 7])
async def test_a_refused_arrival_keeps_no_place(store: Store, position: int) -> None:
    """Its group is written in parts: every other one is leased once, and every place in vain is free again."""
    taken = item()
    await record(store, intake(taken))
    admin = Admin(store)
    items = [item(f"k{n}", to=[CRM]) for n in range(8)]
    items[position] = item("bad", to=[CRM], event_id=taken.event_id)
    answers = await record_all(store, [intake(one) for one in items])
    assert [isinstance(one, StoreUnavailable) for one in answers] == [n == position for n in range(8)]
    assert sorted(ids(admin.begun)) == sorted(one.deliveries[0].id for one in items if one is not items[position])
    assert (admin.kept, admin.places) == (0, 93)
    assert await take(store) == []


async def test_a_group_that_fails_after_its_rows_keeps_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails between the rows and the commit of SQLite: nobody keeps a place for what is not there."""
    store = SqliteStore(tmp_path / "oncehook.db")
    await store.open()
    await enrolled(store)
    admin = Admin(store)
    real = store._writer._connection

    class Failing:
        """The connection, with a disk that fails at the last statement of a group."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def execute(self, statement: str, *parameters: Any) -> object:
            if "name = 'clock'" in statement:
                raise sqlite3.OperationalError("no luck")
            return real.execute(statement, *parameters)

    with monkeypatch.context() as change:
        change.setattr(store._writer, "_connection", Failing())
        [answer] = await record_all(store, [intake(item("k", to=[CRM]))])
    await store.close()
    assert isinstance(answer, StoreUnavailable)
    assert (admin.kept, admin.begun) == (0, [])


# -- a worker ----------------------------------------------------------------------------------


async def test_what_arrives_begins_at_once(ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease is asked for, and the next of the subject comes with the settlement."""
    ground.stand_still()
    crm, asked = Scripted(), 0
    lease = store.lease

    async def counted(*about: object) -> list[Lease]:
        nonlocal asked
        asked += 1
        return await lease(*about)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "lease", counted)
    async with working(store, crm) as worker:
        await is_idle(worker)
        crm.end_all()
        made = await deliver(store, "s", "s", "s")
        await until(lambda: len(crm.begun) == 3)
        await worker.wait_until_drained()
    assert (crm.order, crm.most, asked) == (made, 1, 0)
    assert await statuses(store, made) == ["done"] * 3


async def test_concurrency_holds_for_arrivals(store: Store) -> None:
    """What is leased, what follows in its place and what arrives: never more at once than the destination allows."""
    crm = Scripted(concurrency=3)
    async with working(store, crm) as worker:
        made = await deliver(store, *[f"s{n % 7}" for n in range(20)], None, None)
        await is_idle(worker)
        assert len(crm.running) == 3
        for n in range(10):
            crm.end(*list(crm.running)[: 1 + n % 3])
            made += await deliver(store, f"s{n}", None)
        await until(lambda: len(crm.running) == 3)
        crm.end_all()
        await worker.wait_until_drained()
    assert crm.most == 3
    assert sorted(crm.order) == sorted(made)
    assert set(await statuses(store, made)) == {"done"}


async def test_a_workers_own_limit_holds_for_arrivals(store: Store) -> None:
    crm, mail = Scripted(), Scripted("mail", 2)
    async with working(store, crm, mail, concurrency=2) as worker:
        made = await deliver(store, None, None, None)
        made += await deliver(store, None, None, to=MAIL)
        await is_idle(worker)
        assert len(crm.running) + len(mail.running) == 2
        crm.end_all()
        mail.end_all()
        await worker.wait_until_drained()
    assert sorted(crm.order + mail.order) == sorted(made)


async def test_a_rate_holds_for_arrivals(ground: Ground, store: Store) -> None:
    ground.stand_still()
    crm = Scripted(rate=1.0)
    crm.end_all()
    async with working(store, crm) as worker:
        made = await deliver(store, *[None] * 4)
        await until(lambda: crm.begun)
        await is_idle(worker)
        assert len(crm.begun) == 1
        made += await deliver(store, None)
        await is_idle(worker)
        assert len(crm.begun) == 1
        assert [await is_untouched(store, one) for one in made].count(True) == 4


async def test_a_place_kept_in_vain_uses_up_no_rate(ground: Ground, store: Store) -> None:
    """What begins counts, not what might have: a copy must not use up what the rate allows."""
    await record(store, intake(item("k", to=[MAIL])))
    ground.stand_still()
    crm = Scripted(rate=1.0)
    async with working(store, crm) as worker:
        await is_idle(worker)
        assert outcomes(await keep(store, item("k", to=[CRM]))) == [Outcome.duplicate]
        made = await deliver_one(store)
        await is_idle(worker)
        assert crm.order == [made]


async def test_what_waits_longer_comes_first(store: Store) -> None:
    """While something is due, an arrival does not overtake it."""
    first = await deliver(store, None)
    crm = Scripted(concurrency=1)
    async with working(store, crm):
        await crm.until_begun(first[0])
        second = await deliver(store, None)
        third = await deliver(store, None)
        crm.end(first[0])
        fourth = await deliver(store, None)
        await crm.until_begun(second[0])
        crm.end_all()
        await until(lambda: len(crm.begun) == 4)
    assert crm.order == first + second + third + fourth


async def test_a_suspect_is_alone_whatever_arrives(ground: Ground, store: Store) -> None:
    """DESIGN.md 8.3: what arrives while it runs waits until it has ended."""
    quarantined = await deliver_one(store)
    await take_one(store, lease=10.0)
    ground.forward(11)
    assert await take(store) == []
    crm = Scripted()
    async with working(store, crm) as worker:
        await crm.until_begun(quarantined)
        made = await deliver(store, None, "s", "s")
        assert [await is_untouched(store, one) for one in made] == [True] * 3
        assert list(crm.running) == [quarantined]
        assert crm.begun[0].priority is Priority.quarantined
        crm.end(quarantined)
        await crm.until_begun(*made[:2])
        crm.end_all()
        await worker.wait_until_drained()
    assert await statuses(store, [quarantined, *made]) == ["done"] * 4


async def test_a_suspect_waits_for_what_follows_too(ground: Ground, store: Store) -> None:
    """DESIGN.md 8.3: it runs alone; the next of a busy subject does not begin beside it."""
    ground.stand_still()
    crm = Scripted()
    async with working(store, crm) as worker:
        hot = await deliver(store, *["hot"] * 3)
        await crm.until_begun(hot[0])
        quarantined = await _crashed_elsewhere(ground, store, worker)
        await until(lambda: worker._is_alone)
        crm.end(hot[0])
        await crm.until_begun(quarantined)
        await worker._settling.catch_up()
        assert list(crm.running) == [quarantined]
        crm.end_all()
        await worker.wait_until_drained()
    assert await statuses(store, [quarantined, *hot]) == ["done"] * 4


async def _crashed_elsewhere(ground: Ground, store: Store, worker: Worker) -> bytes:
    """A delivery that somebody was working on when his process died; this worker has heard of it."""
    table = f"{getattr(ground, 'schema', 'main')}.heads"
    store.observer.wake, store.observer.taker = (lambda due: None), None
    made = await deliver_one(store)
    if ground.engine == "postgres":
        ground.sql(f"UPDATE {table} SET turn = 4, crashes = 1 WHERE subject_key = $1::text::uuid", made.hex())
    else:
        ground.sql(f"UPDATE {table} SET turn = 4, crashes = 1 WHERE subject_key = ?", made)
    store.observer.wake, store.observer.taker = worker.wake, worker
    worker.wake()
    return made


async def test_who_stops_before_it_begins_gives_back_uncounted(store: Store) -> None:
    """R37: the commit that keeps an arrival was under way already; another worker begins it at once."""
    crm = Scripted()
    async with working(store, crm) as worker:
        store.observer.taker = Stopping(worker)
        made = await deliver(store, "s", "s")
        await worker.stop(0.0)
        assert crm.begun == []
        assert [await is_untouched(store, one) for one in made] == [True, True]
        lease = await take_one(store)
        assert (lease.delivery.id, lease.delivery.attempt) == (made[0], 1)


class Stopping:
    """A worker that is told to stop while an arrival for which it keeps a place is written."""

    def __init__(self, worker: Worker) -> None:
        self.id = worker.id
        self.reserve = worker.reserve
        self.give_up_reserved = worker.give_up_reserved
        self._worker = worker

    def begin_reserved(self, lease: Lease, asked_at: float) -> None:
        self._worker.quiesce()
        self._worker.begin_reserved(lease, asked_at)


async def test_a_process_that_slept_does_not_begin(store: Store) -> None:
    """R33: the lease may be somebody else's by now; it is given back, uncounted, and begun with a new one."""
    crm, observer = Scripted(lease=60.0), Noted()
    slept: list[Lease] = []
    async with working(store, crm, observer=observer) as worker:

        class Asleep(Stopping):
            def begin_reserved(self, lease: Lease, asked_at: float) -> None:
                slept.append(lease)
                worker.begin_reserved(lease, asked_at - 55.0)

        store.observer.taker = Asleep(worker)
        made = await deliver_one(store)
        store.observer.taker = None
        await crm.until_begun(made)
        assert ids(slept) == [made]
        [lease] = crm.begun
        assert lease.fence > slept[0].fence
        assert lease.delivery.attempt == 1
        assert await store.attempts_of(made) == []
        crm.end_all()
        await worker.wait_until_drained()
    assert [one.lease.fence for one in observer.settled] == [lease.fence]


# -- wake-ups ----------------------------------------------------------------------------------


async def test_a_worker_asks_only_for_whom_it_was_woken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What became due for another destination is none of its business."""
    crm, mail = Scripted(), Scripted("mail", 2)
    wanted: list[int] = []
    lease = store.lease

    async def noted(wants: list[object], *about: object) -> list[Lease]:
        wanted.extend(want.destination_id for want in wants)  # type: ignore[attr-defined]
        return await lease(wants, *about)  # type: ignore[arg-type]

    async with working(store, crm, mail) as worker:
        await is_idle(worker)
        store.observer.taker = None
        monkeypatch.setattr(store, "lease", noted)
        worker.wake([3, 4])
        await is_idle(worker)
        assert wanted == []
        [made] = await deliver(store, None, to=MAIL)
        await mail.until_begun(made)
        assert set(wanted) == {2}


async def test_a_notification_names_the_destinations(place: Place) -> None:
    """Of an arrival that was leased on the spot nobody hears."""
    store = await place.open()
    heard: list[set[int] | None] = []
    other = PostgresStore(place.url, schema=place.schema)
    other.observer.wake, other.observer.works = (lambda due: heard.append(None if due is None else set(due))), True
    place.stores.append(other)
    await other.open()
    await until(lambda: heard)
    heard.clear()
    admin = Admin(store, only=1)
    await deliver(store, None, None)
    assert len(admin.begun) == 2
    await deliver(store, None, to=MAIL)
    await until(lambda: heard)
    await until(lambda: not store.notifier.sending)
    assert heard == [{2}]


def test_too_many_destinations_stand_for_any() -> None:
    assert queue.read_payload(queue.encode_payload({3, 12})) == {3, 12}
    assert queue.read_payload(queue.encode_payload(range(queue.MOST_NAMED + 1))) is None
    assert queue.read_payload(queue.encode_payload(None)) is None
    assert queue.read_payload("not ours") is None


async def test_another_process_begins_what_this_one_has_no_place_for(place: Place) -> None:
    here, there = await place.open(), PostgresStore(place.url, schema=place.schema)
    place.stores.append(there)
    mine, theirs = Scripted(concurrency=1), Scripted()
    there.observer.wake, there.observer.works = (lambda due: None), True
    await there.open()
    await enrolled(there)
    async with working(here, mine) as worker, working(there, theirs):
        await is_idle(worker)
        first = await deliver_one(here)
        await mine.until_begun(first)
        second = await deliver_one(here)
        await theirs.until_begun(second)
        assert (mine.order, theirs.order) == ([first], [second])


async def test_another_process_takes_over_what_this_one_was_given(place: Place) -> None:
    """R29: this one is gone before it could begin; the other waits for the lease to end, and then runs it alone."""
    here, there = await place.open(), PostgresStore(place.url, schema=place.schema)
    place.stores.append(there)
    admin = Admin(here, seconds=0.3)
    made = await deliver_one(here)
    assert ids(admin.begun) == [made]
    crm, observer = Scripted(), Noted()
    there.observer.wake, there.observer.works = (lambda due: None), True
    await there.open()
    await enrolled(there)
    async with working(there, crm, observer=observer):
        await crm.until_begun(made)
        assert (crm.begun[0].delivery.attempt, crm.begun[0].priority) == (1, Priority.quarantined)
        assert [one.worker for one in observer.expired] == [admin.id]
