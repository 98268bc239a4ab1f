"""Outbox: what a handler emits exists if its delivery is done, what a program emits if it commits; else not (R54)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from oncehook.errors import ConfigError, LeaseLost, StoreError, StoreUnavailable
from oncehook.model import DeliveryStatus, Emission, Intake, Item, Outcome, Settled, Settlement, Verdict
from oncehook.store.base import Store
from oncehook.store.postgres import PostgresStore
from tests.store.conftest import Ground, failed_checks
from tests.store.making import (
    CRM,
    MAIL,
    deliver,
    deliver_one,
    done,
    event_of,
    finish,
    ids,
    intake,
    is_lost,
    item,
    keep,
    look,
    release,
    settle,
    take,
    take_one,
)
from tests.store.place import Place

ACCEPTED, DUPLICATE, CONFLICT = Outcome.accepted, Outcome.duplicate, Outcome.conflict


def emission(one: Item) -> Emission:
    return Emission(intake(one, source_id=2), lambda verdict: None)


def emitted(key: str | None = None, **about: Any) -> Emission:
    """An event of the source `payments`, for `mail` unless said otherwise."""
    return emission(item(key, source="payments", **{"to": [MAIL], **about}))


def decided(*emits: Emission) -> list[Outcome | None]:
    return [None if one.verdict is None else one.verdict.outcome for one in emits]


def standing(ground: Ground) -> list[object]:
    """All that an emission could leave."""
    return [
        ground.sql("SELECT id FROM events ORDER BY id"),
        ground.sql("SELECT hash, copies FROM keys ORDER BY hash"),
        ground.sql("SELECT id, status FROM deliveries ORDER BY id"),
        ground.sql("SELECT subject_key, delivery_id, seq, fence, leased FROM heads ORDER BY subject_key"),
        ground.sql("SELECT source_id, destination_id, what, sum(n) FROM counters GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"),
        ground.sql("SELECT count(*) FROM arrivals"),
    ]


# -- settled together --------------------------------------------------------------------------


async def test_what_is_emitted_is_there_when_the_delivery_is_done(store: Store) -> None:
    made = await deliver_one(store)
    one = emitted("k", subject="s")
    await settle(store, done(await take_one(store), emits=[one]))
    assert (await look(store, made)).status is DeliveryStatus.done
    assert one.verdict == Verdict(ACCEPTED, one.intake.items[0].event_id)
    assert (await event_of(store, one.verdict)).key == "k"
    lease = await take_one(store, to=2)
    assert (lease.event.id, lease.event.source, lease.event.subject) == (one.verdict.event_id, "payments", "s")
    figures = (await store.figures()).by_source["payments"]
    assert (figures["received"], figures["accepted"]) == (1, 1)


async def test_a_lost_lease_emits_nothing(ground: Ground, store: Store) -> None:
    """R52, R54: not an event, not a key, not a number."""
    await deliver_one(store, "s")
    lost = await take_one(store)
    await settle(store, release(lost))
    held = await take_one(store)
    before = standing(ground)
    assert await is_lost(store, done(lost, emits=[emitted("k", subject="x"), emitted(None, subject="s", to=[CRM])]))
    assert standing(ground) == before
    await settle(store, done(held, emits=[one := emitted("k", subject="x")]))
    assert decided(one) == [ACCEPTED]


async def test_a_lease_whose_line_is_gone_emits_nothing(ground: Ground, store: Store) -> None:
    await deliver_one(store, "s")
    lease = await take_one(store)
    await settle(store, done(lease))
    before = standing(ground)
    assert await is_lost(store, done(lease, emits=[emitted("k")]))
    assert standing(ground) == before


async def test_it_keeps_its_order_behind_what_waits(store: Store) -> None:
    [before] = await deliver(store, "s", to=MAIL, source="payments")
    await deliver_one(store)
    emits = [emitted(f"k{n}", subject="s") for n in range(5)]
    await settle(store, done(await take_one(store), emits=emits))
    expected = [before, *[one.intake.items[0].deliveries[0].id for one in emits]]
    assert await finish(store, to=2) == expected


async def test_it_may_join_the_line_that_its_delivery_leaves(store: Store) -> None:
    """A handler that emits for itself, on its own subject: behind what waits, and at once when nothing does."""
    made = await deliver(store, "s", "s")
    emits = [emission(item(f"k{n}", subject="s", to=[CRM])) for n in range(3)]
    order = [lease := await take_one(store)]
    await settle(store, done(lease, emits=emits[:2]))
    while leases := await take(store):
        order += leases
        await settle(store, done(leases[0], emits=emits[2:] if len(order) == 4 else []))
    assert ids(order) == made + [one.intake.items[0].deliveries[0].id for one in emits]


async def test_it_goes_to_all_its_destinations(store: Store) -> None:
    await deliver_one(store)
    one = emitted("k", subject="s", to=[CRM, MAIL])
    await settle(store, done(await take_one(store), emits=[one]))
    assert ids(await take(store, to=1)) + ids(await take(store, to=2)) == [
        planned.id for planned in one.intake.items[0].deliveries
    ]


async def test_a_key_makes_one_event(store: Store) -> None:
    """The same one twice, one that stood before, and another body under it."""
    [stood] = await keep(store, item("known", source="payments", to=[MAIL]), source_id=2)
    await deliver_one(store)
    emits = [emitted("k"), emitted("k"), emitted("known"), emitted("known", body=b"{}"), emitted()]
    await settle(store, done(await take_one(store), emits=emits))
    assert decided(*emits) == [ACCEPTED, DUPLICATE, DUPLICATE, CONFLICT, ACCEPTED]
    assert emits[2].verdict == Verdict(DUPLICATE, stood.event_id)
    assert len(await take(store, to=2)) == 3


async def test_workers_are_woken(store: Store) -> None:
    await deliver_one(store)
    lease = await take_one(store)
    woken = asyncio.Event()
    store.observer.wake = lambda _: woken.set()
    await settle(store, done(lease, emits=[emitted()]))
    await woken.wait()


async def test_what_cannot_be_kept_fails_its_own_settlement(ground: Ground, store: Store) -> None:
    """It is no trouble of the store: the attempt has failed, its neighbours have not."""
    made = await deliver(store, None, None)
    bad, good = await take(store)
    taken = bad.event.id
    before = standing(ground)
    one = emitted("good")
    results = await asyncio.gather(
        store.settle([done(bad, emits=[emitted("fine"), emitted(None, event_id=taken)])]),
        store.settle([done(good, emits=[one])]),
        return_exceptions=True,
    )
    assert isinstance(results[0], StoreError)
    assert not isinstance(results[0], StoreUnavailable)
    assert isinstance(results[1], Settled)
    assert results[1].ours == {good.fence}
    assert decided(one) == [ACCEPTED]
    assert len(standing(ground)[1]) == len(before[1]) + 1  # type: ignore[arg-type]
    assert (await look(store, made[0])).status is DeliveryStatus.leased
    await settle(store, done(bad))


async def test_plain_settlements_may_come_with_it(store: Store) -> None:
    await deliver(store, None, None, "s", "s")
    leases = await take(store)
    emits = [emitted("a"), emitted("b")]
    await settle(store, done(leases[0], emits=emits[:1]), done(leases[1]), done(leases[2], emits=emits[1:]))
    assert decided(*emits) == [ACCEPTED, ACCEPTED]


async def test_with_an_effect_it_is_one_commit(ground: Ground, store: Store) -> None:
    if ground.engine != "sqlite":
        return  # there an effect is written in the handler's own transaction: see below
    await deliver_one(store)
    lease = await take_one(store)
    ground.sql("CREATE TABLE effects (what TEXT)")
    before = standing(ground)

    def write(db: Any) -> None:
        db.execute("INSERT INTO effects VALUES ('paid')")

    def fail(db: Any) -> None:
        write(db)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await store.settle([done(lease, commit=fail, emits=[emitted("k")])])
    assert (standing(ground), ground.sql("SELECT * FROM effects")) == (before, [])
    await settle(store, done(lease, commit=write, emits=[one := emitted("k")]))
    assert (decided(one), ground.sql("SELECT * FROM effects")) == ([ACCEPTED], [("paid",)])


# -- in a handler's own transaction --------------------------------------------------------------

Handle = Callable[[PostgresStore, Settlement], Awaitable[None]]


async def on_the_loop(store: PostgresStore, end: Settlement) -> None:
    async with store.transaction() as transaction:
        transaction.connection.row_factory = dict_row  # a handler's own liberty
        await transaction.settle(end)


async def on_a_thread(store: PostgresStore, end: Settlement) -> None:
    def handle() -> None:
        with store.blocking_transaction() as transaction:
            transaction.connection.row_factory = dict_row
            transaction.settle(end)

    await asyncio.to_thread(handle)


both = pytest.mark.parametrize("handle", [on_the_loop, on_a_thread])


@both
async def test_a_handlers_transaction_keeps_what_it_emits(place: Place, handle: Handle) -> None:
    store = await place.open()
    await deliver_one(store, "s")
    lost = await take_one(store)
    await settle(store, release(lost))
    held = await take_one(store)
    one, own = emitted("k", subject="x"), emission(item("own", subject="s", to=[CRM]))
    with pytest.raises(LeaseLost):
        await handle(store, done(lost, emits=[one, own]))
    assert place.sql("SELECT count(*) FROM events") == [(1,)]
    woken = asyncio.Event()
    store.observer.wake = lambda _: woken.set()
    await handle(store, done(held, emits=[one, own]))
    await woken.wait()
    assert decided(one, own) == [ACCEPTED, ACCEPTED]
    assert [lease.event.key for lease in [*await take(store, to=2), *await take(store, to=1)]] == ["k", "own"]
    assert failed_checks(await store.check()) == []


# -- nobody deadlocks --------------------------------------------------------------------------


async def test_handlers_that_emit_for_each_other_do_not_deadlock(place: Place) -> None:
    """Each settles its own line and adds to the others', beside arrivals on all of them, under keys that all share."""
    stores = [await place.open() for _ in range(3)]
    chance = random.Random(54)
    subjects = [f"s{n}" for n in range(6)]
    both_ways = (("orders", 1, CRM, 1), ("payments", 2, MAIL, 2))
    rounds = 0

    def some(prefix: str) -> Intake:
        source, source_id, to, _ = chance.choice(both_ways)
        about = {"source": source, "subject": chance.choice(subjects), "to": [to]}
        return intake(item(f"{prefix}{chance.randrange(400)}", body=b"1", **about), source_id=source_id)

    async def work(store: PostgresStore) -> None:
        nonlocal rounds
        while rounds < 400:
            for number in (1, 2):
                for lease in await take(store, 3, to=number):
                    emits = [Emission(some("k"), lambda verdict: None) for _ in range(3)]
                    assert (await store.settle([done(lease, emits=emits)])).ours == {lease.fence}
                    rounds += 1
            await asyncio.sleep(0)

    async def arrive(store: PostgresStore) -> None:
        while rounds < 400:
            await asyncio.gather(*[store.record(some(chance.choice("ka"))).future for _ in range(8)])

    for source, _, to, _ in both_ways:
        await deliver(stores[0], *subjects, to=to, source=source)
    await asyncio.gather(*[work(store) for store in stores], *[arrive(store) for store in stores])
    assert failed_checks(await stores[0].check()) == []


# -- in a transaction of the application's own ---------------------------------------------------


async def test_it_exists_when_the_callers_transaction_commits(place: Place) -> None:
    store = await place.open()
    one, other = (intake(item(key, subject="s", to=[CRM])) for key in ("one", "other"))
    async with await psycopg.AsyncConnection.connect(place.server.url, row_factory=dict_row) as connection:
        [verdict] = await store.record_in(connection, one)
        assert verdict.outcome is ACCEPTED
        assert place.sql("SELECT * FROM events") == []
        await connection.rollback()
        assert place.sql("SELECT * FROM keys") == []
        [verdict] = await store.record_in(connection, one)
        await connection.commit()
        [again] = await store.record_in(connection, intake(item("one", subject="s", to=[CRM])))
        assert again == Verdict(DUPLICATE, verdict.event_id)
        [verdict] = await store.record_in(connection, other)
    assert [lease.event.key for lease in await take(store)] == ["one"]
    assert place.sql("SELECT count(*), sum(behind::integer) FROM deliveries") == [(2, 1)]
    assert failed_checks(await store.check()) == []


async def test_several_of_a_subject_in_one_transaction_keep_their_order(place: Place) -> None:
    store = await place.open()
    intakes = [intake(item(f"k{n}", subject="s", to=[CRM])) for n in range(4)]
    with psycopg.connect(place.server.url) as connection:
        for one in intakes:
            store.record_in_blocking(connection, one)
    assert await finish(store) == [one.items[0].deliveries[0].id for one in intakes]
    assert failed_checks(await store.check()) == []


async def test_the_callers_transaction_is_left_as_it_was(place: Place) -> None:
    store = await place.open()
    show = (
        "SELECT name, setting FROM pg_settings WHERE name LIKE 'enable%' OR name IN"
        " ('search_path', 'jit', 'plan_cache_mode', 'lock_timeout') ORDER BY name"
    )
    with psycopg.connect(place.server.url) as connection:
        connection.execute("SET LOCAL search_path = pg_catalog, public")
        connection.execute("SET LOCAL plan_cache_mode = force_custom_plan")
        before = connection.execute(show).fetchall()
        store.record_in_blocking(connection, intake(item("k", to=[CRM])))
        assert connection.execute(show).fetchall() == before


async def test_the_callers_commit_wakes_workers_elsewhere(place: Place) -> None:
    store = PostgresStore(place.url, schema=place.schema)
    place.stores.append(store)
    woken = asyncio.Event()
    store.observer.wake, store.observer.works = (lambda _: woken.set()), True
    await store.open()
    writer = await place.open()
    await woken.wait()  # as soon as it listens: for what was called before
    woken.clear()
    async with await psycopg.AsyncConnection.connect(place.server.url) as connection:
        await writer.record_in(connection, intake(item("k", to=[CRM])))
        assert not woken.is_set()
    await woken.wait()


async def test_without_a_transaction_it_is_refused(place: Place) -> None:
    store = await place.open()
    one = intake(item("k", to=[CRM]))
    with (
        psycopg.connect(place.server.url, autocommit=True) as connection,
        pytest.raises(ConfigError, match="No transaction"),
    ):
        store.record_in_blocking(connection, one)
    with psycopg.connect(place.server.url, autocommit=True) as connection, connection.transaction():
        store.record_in_blocking(connection, one)
    with psycopg.connect(place.server.url) as connection:
        with pytest.raises(ConfigError, match="emit_in_blocking"):
            await store.record_in(connection, one)
        with pytest.raises(ConfigError, match="no connection of psycopg"):
            store.record_in_blocking(object(), one)
        with pytest.raises(ConfigError, match="no connection of psycopg"):
            store.record_in_blocking(connection.cursor().execute, one)
    assert place.sql("SELECT count(*) FROM events") == [(1,)]


async def test_a_connection_to_another_database_is_refused(place: Place) -> None:
    store = await place.open()
    with (
        psycopg.connect(place.server.url, dbname="template1") as connection,
        pytest.raises(ConfigError, match="no tables"),
    ):
        store.record_in_blocking(connection, intake(item("k")))


async def test_on_sqlite_nobody_lends_a_transaction(ground: Ground, store: Store) -> None:
    if ground.engine == "sqlite":
        with pytest.raises(ConfigError):
            await store.record_in(object(), intake(item("k")))
        with pytest.raises(ConfigError):
            store.record_in_blocking(object(), intake(item("k")))


async def test_names_get_the_same_numbers_from_a_store_that_is_not_open(place: Place) -> None:
    store = await place.open()
    closed = PostgresStore(place.url, schema=place.schema)
    numbers = closed.register_names_blocking(["orders", "app"], ["crm", "shop"])
    assert numbers == await store.register_names(["app"], ["shop"])
    assert numbers.sources["orders"] == 1
    elsewhere = PostgresStore(place.url, schema=f"{place.schema}_not_there")
    with pytest.raises(StoreError, match="no tables"):
        elsewhere.register_names_blocking(["orders"], [])


async def test_connections_of_sqlalchemy(place: Place) -> None:
    """SQLAlchemy's, blocking and not. Django's is in the acceptance tests."""
    store = await place.open()
    address = place.server.url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(address)
    with engine.begin() as connection:
        store.record_in_blocking(connection, intake(item("sqlalchemy", to=[CRM])))
    with Session(engine) as session, session.begin():
        store.record_in_blocking(session.connection(), intake(item("session", to=[CRM])))
    engine.dispose()
    slow = create_async_engine(address)
    async with slow.begin() as waiting:
        await store.record_in(waiting, intake(item("asynchronous", to=[CRM])))
    await slow.dispose()
    keys = {key for (key,) in place.sql("SELECT key FROM events")}
    assert keys == {"sqlalchemy", "session", "asynchronous"}
