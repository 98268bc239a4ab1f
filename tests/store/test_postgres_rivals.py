"""PostgreSQL: many processes at once, and rows that fail, without harm to their neighbours."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psycopg
import pytest

from oncehook.errors import Overloaded, StoreUnavailable
from oncehook.model import Outcome, new_id
from oncehook.store.base import Timeouts
from oncehook.store.postgres import PostgresStore
from tests.store.conftest import failed_checks
from tests.store.making import intake, item, keep, outcomes, record_all
from tests.store.place import Place, patient

ACCEPTED, DUPLICATE = Outcome.accepted, Outcome.duplicate
CRM = ("crm", 1)


async def test_rivals_with_the_same_keys_have_one_winner_each(place: Place) -> None:
    """R11, R13: overlapping groups in any order, and nobody deadlocks."""
    stores = [await place.open() for _ in range(4)]
    keys = [f"k{n}" for n in range(150)]

    async def send(store: PostgresStore) -> list[Any]:
        mine = random.sample(keys, len(keys))
        subjects = {key: f"s{hash(key) % 5}" for key in mine}
        return await record_all(store, [intake(item(key, subject=subjects[key], to=[CRM])) for key in mine])

    answers = await asyncio.gather(*[send(store) for store in stores])
    flat = [verdict for one in answers for [verdict] in one]
    assert outcomes(flat).count(ACCEPTED) == 150
    assert outcomes(flat).count(DUPLICATE) == 450
    assert len({verdict.event_id for verdict in flat}) == 150
    assert failed_checks(await stores[0].check()) == []


async def test_rivals_for_a_lapsed_key_have_one_winner(place: Place) -> None:
    stores = [await place.open() for _ in range(4)]
    keys = [f"k{n}" for n in range(30)]
    await record_all(stores[0], [intake(item(key, keep=3600)) for key in keys])
    place.sql("UPDATE keys SET expires_at = now() - interval '1 second'")

    async def send(store: PostgresStore) -> list[Any]:
        return await record_all(store, [intake(item(key)) for key in random.sample(keys, len(keys))])

    answers = await asyncio.gather(*[send(store) for store in stores])
    flat = [verdict for one in answers for [verdict] in one]
    assert outcomes(flat).count(ACCEPTED) == 30
    assert len({verdict.event_id for verdict in flat}) == 30
    assert place.sql("SELECT count(*) FROM keys WHERE copies <> 4") == [(0,)]


async def test_order_of_commit_is_order_of_seq(place: Place) -> None:
    """R42: a worker that has seen a later delivery of a subject can never meet an earlier one afterwards."""
    stores = [await place.open(batch=4) for _ in range(4)]

    async def send(store: PostgresStore) -> None:
        for _ in range(20):
            items = [item(None, subject=f"s{n % 3}", to=[CRM]) for n in range(12)]
            await record_all(store, [intake(one) for one in items])

    await asyncio.gather(*[send(store) for store in stores])
    rows = place.sql("SELECT subject_key, seq, pg_xact_commit_timestamp(xmin), xmin::text FROM deliveries ORDER BY seq")
    assert len(rows) == 960
    last: dict[Any, Any] = {}
    rivals = 0
    for line, _, committed, transaction in rows:
        before = last.setdefault(line, (committed, transaction))
        assert committed >= before[0]
        rivals += transaction != before[1]
        last[line] = (committed, transaction)
    assert rivals > 50
    assert failed_checks(await stores[0].check()) == []


async def test_a_foreign_lock_blocks_only_its_own_subject(place: Place) -> None:
    store = await place.open(timeouts=patient(lock=Timeouts().lock))
    await keep(store, item("first", subject="blocked", to=[CRM]))
    with psycopg.connect(place.server.url) as foreign:
        store.record_in_blocking(foreign, intake(item("theirs", subject="blocked", to=[CRM])))
        subjects = [f"s{n}" for n in range(30)]
        subjects[11] = "blocked"
        intakes = [intake(item(f"k{n}", subject=subject, to=[CRM])) for n, subject in enumerate(subjects)]
        results = await record_all(store, intakes)
        assert isinstance(results.pop(11), StoreUnavailable)
        assert {verdict.outcome for result in results if isinstance(result, list) for verdict in result} == {ACCEPTED}
        assert len(results) == 29
    assert outcomes(await keep(store, item("k11", subject="blocked", to=[CRM]))) == [ACCEPTED]
    assert failed_checks(await store.check()) == []


async def test_arrivals_wait_for_no_row_that_a_worker_has(place: Place) -> None:
    """Whoever leases, settles or is stopped in the middle of it holds up no sender."""
    store = await place.open(timeouts=patient(lock=Timeouts().lock))
    await keep(store, item("first", subject="s", to=[CRM]))
    with psycopg.connect(place.server.url) as foreign:
        foreign.execute(f"SELECT * FROM {place.schema}.heads FOR UPDATE")
        foreign.execute(f"UPDATE {place.schema}.heads SET fence = fence + 1")
        assert outcomes(await keep(store, item("second", subject="s", to=[CRM]))) == [ACCEPTED]
        foreign.rollback()
    assert failed_checks(await store.check()) == []


async def test_more_subjects_than_there_is_room_for_locks(place: Place) -> None:
    """They are locked all at once: the server's table of locks holds fewer, for everybody together."""
    store = await place.open()
    many = [item(f"k{n}", subject=f"s{n}", to=[CRM]) for n in range(12_000)]
    one, *rest = await record_all(
        store, [intake(*many, raw=b"raw"), *[intake(item(f"x{n}", subject=f"s{n}", to=[CRM])) for n in range(60)]]
    )
    assert isinstance(one, list)
    assert len(one) == 12_000
    assert all(isinstance(result, list) for result in rest)
    assert place.sql("SELECT count(*) FROM heads") == [(12_000,)]
    assert failed_checks(await store.check()) == []


@pytest.mark.parametrize("bad", ["a\x00b", random.Random(1).randbytes(9000).hex()], ids=["nul", "long"])
async def test_text_that_postgres_refuses_fails_alone(place: Place, bad: str) -> None:
    """NUL, and a subject that is too long for its index."""
    store = await place.open()
    intakes = [intake(item(f"k{n}", subject=bad if n == 13 else "s", to=[CRM])) for n in range(30)]
    results = await record_all(store, intakes)
    assert isinstance(results.pop(13), StoreUnavailable)
    assert {verdict.outcome for result in results if isinstance(result, list) for verdict in result} == {ACCEPTED}
    rows = place.sql("SELECT key FROM events JOIN deliveries d ON d.event_id = events.id ORDER BY d.seq")
    assert sorted(key for (key,) in rows) == sorted(f"k{n}" for n in range(30) if n != 13)


async def test_an_id_of_the_wrong_length_fails_alone(place: Place) -> None:
    """It would shift everything behind it in the packed column."""
    store = await place.open()
    intakes = [intake(item(f"k{n}", event_id=b"short" if n == 3 else new_id())) for n in range(8)]
    results = await record_all(store, intakes)
    assert isinstance(results.pop(3), StoreUnavailable)
    assert all(isinstance(result, list) for result in results)


async def test_bodies_that_wait_are_bounded(place: Place) -> None:
    """R57"""
    store = await place.open(max_waiting_bytes=1000)
    pending = [store.record(intake(item(f"k{n}", body=b"x" * 600))) for n in range(2)]
    with pytest.raises(Overloaded):
        store.record(intake(item("k3")))
    await asyncio.gather(*[one.future for one in pending])
    assert outcomes(await keep(store, item("k3"))) == [ACCEPTED]


async def test_counters_of_two_connections_do_not_meet(place: Place) -> None:
    stores = [await place.open() for _ in range(2)]
    await asyncio.gather(*[keep(store, *[item() for _ in range(20)]) for store in stores])
    [(slots,)] = place.sql("SELECT count(DISTINCT slot) FROM counters WHERE what = 'accepted'")
    assert slots >= 2
