"""PostgreSQL at work: the plans of its lists, races that one snapshot cannot see, wake-ups, heartbeats."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook.errors import StoreUnavailable
from oncehook.model import (
    COVERED,
    Breaker,
    DeliveryStatus,
    Engine,
    Filter,
    Id,
    Lease,
    LeaseRequest,
    Options,
    Priority,
    Settle,
    Settlement,
    new_id,
)
from oncehook.store.base import Timeouts
from oncehook.store.cipher import Cipher
from oncehook.store.migrate import migrations
from oncehook.store.postgres import PostgresStore, queue, read
from oncehook.store.postgres.connection import Database, session
from oncehook.store.postgres.read import read_values
from oncehook.worker import TIMEOUTS
from tests.store.conftest import failed_checks
from tests.store.making import (
    CRM,
    dead,
    deliver,
    deliver_one,
    done,
    failed,
    finish,
    ids,
    intake,
    item,
    keep,
    look,
    record_all,
    release,
    replay,
    replay_all,
    retry,
    settle,
    take,
    take_one,
)
from tests.store.place import Place, patient
from tests.waiting import until

# -- lists -------------------------------------------------------------------------------------


async def fill(place: Place, store: PostgresStore) -> None:
    """Many lines, some of them deep, and statistics that know it."""
    for start in range(0, 6000, 2000):
        items = [
            item(f"k{n}", body=b"x", subject=f"s{n % 500}" if n % 2 else None, to=[CRM])
            for n in range(start, start + 2000)
        ]
        await record_all(store, [intake(one) for one in items])
    place.tidy()


LISTS: list[tuple[Filter, str, str]] = [
    (Filter(), "deliveries", "deliveries_pkey"),
    (Filter(destination="crm"), "deliveries", "deliveries_pkey"),
    (Filter(status=DeliveryStatus.dead), "deliveries", "deliveries_unfinished"),
    (Filter(status=DeliveryStatus.pending), "deliveries", "deliveries_unfinished"),
    (Filter(subject="s3"), "deliveries", "events_subject"),
    (Filter(), "events", "events_pkey"),
    (Filter(source="payments"), "events", "events_source"),
    (Filter(subject="s3"), "events", "events_subject"),
    (Filter(subject="s3", source="orders"), "events", "events_subject"),
    (Filter(status=DeliveryStatus.dead), "events", "deliveries_unfinished"),
]


async def test_every_list_has_its_index(place: Place) -> None:
    store = await place.open()
    await keep(store, *[item(f"other{n}", source="payments") for n in range(30)], source_id=2)
    await fill(place, store)
    place.sql("UPDATE deliveries SET status = 'done' WHERE seq % 200 > 0")
    place.tidy()
    for question, what, index in LISTS:
        plan = await plan_of_list(place, question, what)
        assert index in plan, (question, what)
        assert "Seq Scan on events" not in plan, (question, what)
        assert "Seq Scan on deliveries" not in plan, (question, what)


async def plan_of_list(place: Place, filter: Filter, what: str) -> str:
    way = read.way_to_deliveries(filter) if what == "deliveries" else read.way_to_events(filter)
    async with session(Database.parse(place.url, place.schema)) as connection:
        values = await read_values(connection, filter, Cipher())
        values |= {"before": Id(new_id()), "looked_at": read.LOOKED_AT, "limit": 51}
        cursor = await connection.execute(f"EXPLAIN (COSTS OFF) {way.LIST.TEXT}", way.LIST.parameters(values))
        return "\n".join(str(line) for (line,) in await cursor.fetchall())


async def test_a_list_that_finds_nothing_says_how_far_it_looked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LOOKED_AT", 10)
    store = await place.open()
    scarce = await deliver_one(store, "s", type_="scarce")
    made = await deliver(store, *["s"] * 25)
    for question in (Filter(type="scarce"), Filter(type="scarce", subject="s")):
        page = await store.find_deliveries(question)
        assert list(page.items) == []
        assert page.next is not None
        assert page.next[:13] == made[15][:13]
        pages = 1
        while not page.items:
            assert page.next is not None
            page = await store.find_deliveries(question, before=page.next)
            pages += 1
        assert (pages, [one.id for one in page.items]) == (3, [scarce])
    events = await store.find_events(Filter(type="scarce"))
    assert (list(events.items), events.next) == ([], made[15].event_id)


# -- races -------------------------------------------------------------------------------------


def rival(place: Place) -> psycopg.Connection[Any]:
    """Somebody who holds a lock while the store wants it."""
    connection = psycopg.connect(place.server.url)
    connection.execute(f"SET search_path = {place.schema}")
    connection.commit()
    return connection


def waits_for_a_lock(place: Place) -> Callable[[], bool]:
    return lambda: bool(
        place.sql(
            f"SELECT 1 FROM pg_stat_activity WHERE application_name = '{place.schema}' AND wait_event_type = 'Lock'"
        )
    )


def joining(place: Place, store: PostgresStore) -> tuple[psycopg.Connection[Any], bytes]:
    """An arrival that joins subject `s`, in a transaction that is not committed yet; and its delivery."""
    arriving = item("late", subject="s", to=[CRM])
    connection = rival(place)
    store.record_in_blocking(connection, intake(arriving))
    return connection, arriving.deliveries[0].id


async def test_a_subject_that_seems_empty_is_kept_for_who_is_about_to_join_it(place: Place) -> None:
    """A settle cannot see an arrival that is not committed: its row stays, and whoever leases looks again."""
    store = await place.open()
    first = await deliver_one(store, "s")
    lease = await take_one(store)
    other, second = joining(place, store)
    with other:
        await settle(store, done(lease))
        assert (await look(store, first)).status is DeliveryStatus.done
        assert await take(store) == []
        assert failed_checks(await store.check()) == []
        other.commit()
    await until_taken(store, second)
    assert failed_checks(await store.check()) == []


async def test_a_subject_that_nobody_joined_after_all_goes(place: Place) -> None:
    store = await place.open()
    await deliver_one(store, "s")
    lease = await take_one(store)
    other, _ = joining(place, store)
    with other:
        await settle(store, done(lease))
        other.rollback()
    while place.sql("SELECT * FROM heads"):
        assert await take(store) == []
        await asyncio.sleep(0.01)
    assert ids([await deliver_and_take(store, "s")])
    assert failed_checks(await store.check()) == []


async def test_a_settle_waits_for_an_arrival_that_is_about_to_commit(place: Place) -> None:
    """It then goes on to it, and the subject is never without a head."""
    store = await place.open()
    lease = await deliver_and_take(store, "s")
    for _ in range(30):
        _, made = await asyncio.gather(store.settle([done(lease)]), deliver_one(store, "s"))
        lease = await until_taken(store, made)
    assert failed_checks(await store.check()) == []


async def test_whoever_sees_the_past_takes_no_row_away(place: Place) -> None:
    """A handler's transaction may be REPEATABLE READ: it does not see who has joined since it began."""
    store = await place.open()
    await deliver_one(store, "s")
    lease = await take_one(store)
    with rival(place) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM events")
        second = await deliver_one(store, "s")
        store.join_transaction(other).settle(done(lease))
        other.commit()
    await until_taken(store, second)
    assert failed_checks(await store.check()) == []


async def test_an_arrival_that_sees_the_past_begins_its_line(place: Place) -> None:
    store = await place.open()
    await deliver_one(store, "s")
    lease = await take_one(store)
    with rival(place) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT * FROM heads")
        await settle(store, done(lease))
        arriving = item("late", subject="s", to=[CRM])
        store.record_in_blocking(other, intake(arriving))
        other.commit()
    assert ids(await take(store)) == [arriving.deliveries[0].id]
    assert failed_checks(await store.check()) == []


async def until_taken(store: PostgresStore, delivery: bytes) -> Lease:
    while not (taken := await take(store)):
        await asyncio.sleep(0.01)
    assert ids(taken) == [delivery]
    return taken[0]


async def deliver_and_take(store: PostgresStore, subject: str) -> Lease:
    await deliver_one(store, subject)
    return await take_one(store)


async def test_a_line_that_somebody_holds_is_passed_over(place: Place) -> None:
    """A stopped process blocks nobody: leases skip what is locked."""
    store = await place.open()
    made = await deliver(store, "a", "b", None)
    with rival(place) as other:
        other.execute("SELECT * FROM heads ORDER BY due_at, subject_key LIMIT 1 FOR UPDATE")
        assert len(await take(store)) == 2
        other.rollback()
    assert len(await take(store)) == 1
    assert len(made) == 3


async def test_one_probe_for_all_processes(place: Place) -> None:
    """The breaker is half open: of all who ask at the same time one gets one, whatever the turn."""
    stores = [await place.open() for _ in range(3)]
    await deliver(stores[0], *[None] * 20)
    breaker = Breaker(failures=1, open=0.01)
    await settle(stores[0], failed((await take(stores[0], limit=1))[0], breaker))
    await asyncio.sleep(0.05)
    place.sql("UPDATE heads SET turn = get_byte(uuid_send(subject_key), 12) % 4 WHERE NOT leased")
    wants = [LeaseRequest(1, 5, 30.0, priority) for priority in Priority]
    found = await asyncio.gather(*[store.lease(wants) for store in stores for _ in range(4)])
    assert sum(len(leases) for leases in found) == 1
    [[probe]] = [leases for leases in found if leases]
    assert await stores[1].lease(wants) == []
    await settle(stores[2], Settlement(probe, Settle.done, breaker=breaker))
    assert (
        sum(
            len(leases)
            for leases in await asyncio.gather(*[take(stores[1], priority=priority) for priority in Priority])
        )
        == 19
    )


async def test_who_probes_keeps_nobody_waiting(place: Place) -> None:
    """While one looks whether the breaker may close, the others get nothing, at once."""
    store = await place.open()
    await deliver(store, None, None)
    await settle(store, failed((await take(store, limit=1))[0], Breaker(failures=1, open=0.0)))
    with rival(place) as other:
        other.execute("SELECT * FROM destination_state FOR UPDATE")
        assert await take(store) == []
        other.rollback()
    assert len(await take(store)) == 1


async def test_failures_of_several_processes_add_up(place: Place) -> None:
    stores = [await place.open() for _ in range(3)]
    await deliver(stores[0], *[None] * 12)
    leases = await take(stores[0])
    breaker = Breaker(failures=12, open=60.0)
    await asyncio.gather(*[settle(stores[n % 3], failed(lease, breaker)) for n, lease in enumerate(leases)])
    level = (await stores[0].levels())["crm"]
    assert level.failures == 12
    assert level.open_until is not None


async def test_work_and_arrivals_from_all_sides(place: Place) -> None:
    """R42, R68: no deadlock, no error, every subject in the order of commit, and the books balance."""
    stores = [await place.open() for _ in range(2)]
    order: list[bytes] = []
    arriving = True

    async def arrive(store: PostgresStore) -> None:
        for _ in range(15):
            items = [item(subject=f"s{n % 5}", to=[CRM], options=Options(n % 3)) for n in range(20)]
            assert all(isinstance(one, list) for one in await record_all(store, [intake(one) for one in items]))

    async def work(store: PostgresStore) -> None:
        priority = 0
        while leases := await take(store, limit=7) or arriving:
            if isinstance(leases, bool):
                await asyncio.sleep(0.001)
                continue
            priority += 1
            ends = [retry(one) if (priority + n) % 5 == 0 else done(one) for n, one in enumerate(leases)]
            await settle(store, *ends)
            order.extend(one.lease.delivery.id for one in ends if one.what is Settle.done)

    workers = [asyncio.create_task(work(store)) for store in stores for _ in range(2)]
    await asyncio.gather(*[arrive(store) for store in stores])
    arriving = False
    await asyncio.gather(*workers)
    for store in stores:
        order += await finish(store)
    assert len(set(order)) == len(order)
    await check_all_done_in_order(place, stores[0])


async def check_all_done_in_order(place: Place, store: PostgresStore) -> None:
    """Nothing is left, and in each subject fences rise with seq: nobody overtook anybody."""
    assert place.sql("SELECT DISTINCT status FROM deliveries") == [("done",)]
    overtaken = """
        SELECT count(*) FROM (
          SELECT d.fence, lag(d.fence) OVER (PARTITION BY d.subject_key ORDER BY d.seq) AS before
          FROM deliveries d WHERE d.options = 0
        ) o WHERE o.fence < o.before
    """
    assert place.sql(overtaken) == [(0,)]
    assert place.sql("SELECT count(*) FROM heads") == [(0,)]
    assert failed_checks(await store.check()) == []


def test_the_functions_and_the_program_mean_the_same_numbers() -> None:
    """A migration cannot read our constants: what a lease may cover, and what is left of it when it is prolonged."""
    [schema] = [step.sql for step in migrations(Engine.postgres)]
    assert f"LIMIT {COVERED} -- COVERED" in schema
    assert f"n.seconds * {TIMEOUTS.beats - 1} / {TIMEOUTS.beats}" in schema


async def test_a_replay_leaves_a_head_alone_that_runs_already(place: Place) -> None:
    """An order may mean a delivery that was replayed and leased meanwhile, and another one of its subject."""
    store = await place.open()
    made = await deliver(store, "s", "s")
    for _ in made:
        await settle(store, dead(await take_one(store)))
    ordered = await replay_all(store, Filter(status=DeliveryStatus.dead))
    await replay(store, made[0])
    running = await take_one(store)
    assert await store.feed_replays() == 1
    assert await take(store) == []
    await settle(store, done(running))
    assert ids(await take(store, priority=Priority.replay)) == [made[1]]
    shown = await store.get_replay(ordered.id)
    assert shown is not None
    assert (shown.fed, shown.skipped) == (1, 1)


async def test_prune_waits_for_whoever_makes_a_replay(place: Place) -> None:
    """STORAGE.md 9.12"""
    store = await place.open()
    await deliver(store, None)
    await finish(store)
    with rival(place) as other:
        other.execute("SELECT pg_advisory_xact_lock_shared(hashtext('oncehook.prune'), hashtext(%s))", [place.schema])
        pruning = asyncio.create_task(store.prune({}, 0.0))
        await until(waits_for_a_lock(place))
        assert not pruning.done()
        other.rollback()
        assert (await pruning).events == 1


# -- wake-ups ----------------------------------------------------------------------------------


async def listening(place: Place) -> tuple[PostgresStore, asyncio.Event]:
    """A worker's store, and what it is woken by."""
    woken = asyncio.Event()
    store = PostgresStore(place.url, schema=place.schema)
    store.observer.wake, store.observer.works = (lambda _: woken.set()), True
    place.stores.append(store)
    await store.open()
    await woken.wait()  # as soon as it listens: for what was called before
    woken.clear()
    return store, woken


def listeners(place: Place) -> list[int]:
    found = place.sql(
        f"SELECT pid FROM pg_stat_activity WHERE application_name = '{place.schema}' AND query LIKE '%LISTEN%'"
        " AND query NOT LIKE '%definitions%'"
    )
    return [pid for (pid,) in found]


async def woken_by(woken: asyncio.Event, act: Any) -> Any:
    """Do something elsewhere, and wait until it is heard of here."""
    await asyncio.sleep(2 * queue.NOTIFY_PAUSE)
    woken.clear()
    done = await act
    await woken.wait()
    return done


async def test_another_process_is_woken(place: Place) -> None:
    """By all that may have made something due."""
    store = await place.open()
    _, woken = await listening(place)
    [first, _] = await woken_by(woken, deliver(store, "s", "s"))
    lease = await take_one(store)
    await settle(store, retry(lease, 5.0))  # whoever settles it knows when it is due; the others ask once a second
    await woken_by(woken, store.retry_now(first, "ann"))
    await woken_by(woken, settle(store, dead(await take_one(store))))
    await woken_by(woken, replay(store, first))
    await woken_by(woken, store.resume(1, "ann"))
    await finish(store)
    await replay_all(store, Filter(), force=True)
    await woken_by(woken, store.feed_replays())


async def test_the_own_loop_is_woken_at_once(place: Place) -> None:
    store, woken = await listening(place)
    await keep(store, item(to=[CRM]))
    assert woken.is_set()
    woken.clear()
    await keep(store, item())  # goes nowhere
    assert not woken.is_set()


async def test_notifications_are_few(place: Place) -> None:
    """At once when there was none lately, then one for all that came meanwhile."""
    store = await place.open()
    with psycopg.connect(place.server.url, autocommit=True) as ear:
        heard: list[psycopg.Notify] = []
        ear.add_notify_handler(heard.append)
        ear.execute(f"LISTEN {queue.notify_channel(place.schema)}")
        began = asyncio.get_running_loop().time()
        for _ in range(60):
            await deliver_one(store)
        took = asyncio.get_running_loop().time() - began
        await until(lambda: not store.notifier.sending)
        ear.execute("SELECT 1")  # before the answer comes all that was called by now
    assert 2 <= len(heard) <= took / queue.NOTIFY_PAUSE + 2


async def test_who_only_receives_does_not_listen(place: Place) -> None:
    store = await place.open()
    await deliver_one(store)
    assert listeners(place) == []


async def test_a_listener_that_was_cut_off_listens_again(place: Place) -> None:
    store = await place.open()
    _, woken = await listening(place)
    [old] = listeners(place)
    place.sql(f"SELECT pg_terminate_backend({old})")
    await until(lambda: bool(listeners(place)) and listeners(place) != [old])
    await woken.wait()  # for what it may have missed
    await woken_by(woken, deliver_one(store))


# -- lost connections --------------------------------------------------------------------------


async def cut_off(place: Place, like: str) -> None:
    """End the server processes that ran this last (it keeps the first 1,024 bytes), and wait until they are gone.

    Gone from the list of activity is too early: the socket is closed when the process has ended.
    """
    found = f"FROM pg_stat_activity WHERE application_name = '{place.schema}' AND query LIKE '{like}'"
    pids = [pid for pid, _ in place.sql(f"SELECT pid, pg_terminate_backend(pid) {found}")]
    assert pids
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def test_work_goes_on_over_a_new_connection(place: Place) -> None:
    """R60"""
    store = await place.open()
    await deliver(store, None, None)
    lease = (await take(store, limit=1))[0]
    await cut_off(place, "%FROM lease(%")
    await settle(store, done(lease))
    assert len(await take(store)) == 1


async def test_a_connection_that_breaks_in_a_statement_cannot_tell(place: Place) -> None:
    store = await place.open()
    await deliver_one(store, "s")
    lease = await take_one(store)
    with rival(place) as other:
        other.execute("SELECT * FROM heads FOR UPDATE")
        settling = asyncio.create_task(store.settle([done(lease)]))
        await until(waits_for_a_lock(place))
        await cut_off(place, "%FROM settle(%")
        with pytest.raises(StoreUnavailable):
            await settling
        other.rollback()
    await settle(store, done(lease))


async def test_settling_waits_for_a_lock_only_a_while(place: Place) -> None:
    store = await place.open(timeouts=patient(lock=Timeouts().lock))
    await deliver_one(store, "s")
    lease = await take_one(store)
    with rival(place) as other:
        other.execute("SELECT * FROM heads FOR UPDATE")
        with pytest.raises(StoreUnavailable):
            await store.settle([release(lease)])
        other.rollback()
    await settle(store, release(lease))


# -- heartbeats --------------------------------------------------------------------------------


async def test_a_heartbeat_that_gets_no_answer_cannot_tell(place: Place) -> None:
    """R32: it waits no longer than a sixth of the lease, and the next one tries anew."""
    limits = patient()
    store = await place.open(timeouts=limits)
    await deliver_one(store)
    lease = await take_one(store, lease=1.2)
    with rival(place) as other:
        other.execute("LOCK TABLE heads IN ACCESS EXCLUSIVE MODE")
        limits.heartbeat = 0.1
        with pytest.raises(StoreUnavailable):
            await asyncio.to_thread(store.renew, [lease])
        other.rollback()
    limits.heartbeat = 60.0  # the next one has time
    assert await asyncio.to_thread(store.renew, [lease]) == {lease.fence}


async def test_a_locked_row_holds_up_no_heartbeat(place: Place) -> None:
    """Somebody settles it or adds to its subject: the others are renewed, and it is ours as far as can be seen."""
    store = await place.open()
    await deliver(store, "a", "b")
    locked, free = await take(store, 2, lease=1.2)
    with rival(place) as other:
        other.execute("SELECT * FROM heads WHERE fence = %s FOR UPDATE", [locked.fence])
        before = place.sql(f"SELECT due_at FROM heads WHERE fence = {free.fence}")
        assert await asyncio.to_thread(store.renew, [locked, free]) == {locked.fence, free.fence}
        assert place.sql(f"SELECT due_at FROM heads WHERE fence = {free.fence}") > before
        other.rollback()


async def test_a_heartbeat_over_a_lost_connection(place: Place) -> None:
    store = await place.open()
    await deliver_one(store)
    lease = await take_one(store)
    assert await asyncio.to_thread(store.renew, [lease]) == {lease.fence}
    await cut_off(place, "%FROM renew(%")
    with pytest.raises(StoreUnavailable):
        await asyncio.to_thread(store.renew, [lease])
    assert await asyncio.to_thread(store.renew, [lease]) == {lease.fence}


async def test_a_heartbeat_needs_neither_the_loop_nor_the_other_connections(place: Place) -> None:
    """R32: the loop stands still, all the while."""
    store = await place.open()
    await deliver_one(store)
    lease = await take_one(store, lease=5.0)
    [(before,)] = place.sql("SELECT due_at FROM heads")
    kept: list[set[int]] = []
    beat = threading.Thread(target=lambda: kept.append(store.renew([lease])))
    beat.start()
    beat.join()
    assert kept == [{lease.fence}]
    assert place.sql("SELECT due_at FROM heads")[0][0] > before


async def test_rivals_that_renew_in_any_order_do_not_deadlock(place: Place) -> None:
    stores = [await place.open() for _ in range(2)]
    await deliver(stores[0], *[None] * 200)
    leases = await take(stores[0], limit=200)
    fences = {lease.fence for lease in leases}

    def beat(store: PostgresStore, order: int) -> None:
        for _ in range(10):
            assert store.renew(leases[::order]) == fences

    await asyncio.gather(*[asyncio.to_thread(beat, store, order) for store, order in zip(stores, (1, -1), strict=True)])
