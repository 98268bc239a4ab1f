"""PostgreSQL behind a pooler in transaction mode: nothing is kept in a session, and nothing leaks into one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from oncehook.claims import AsyncClaims
from oncehook.errors import ConfigError
from oncehook.model import DeliveryStatus, Outcome, Priority
from oncehook.store.base import StoreObserver
from oncehook.store.postgres import PostgresStore
from oncehook.store.postgres.connection import Database, StoreConnection, _split_statements
from tests.pooler import SESSIONS, transaction_pooler
from tests.servers import fresh_schema, shared_postgres
from tests.store.conftest import failed_checks
from tests.store.making import (
    DEAD,
    dead_letters,
    deliver_one,
    done,
    enrolled,
    finish,
    ids,
    item,
    keep,
    look,
    outcomes,
    replay_all,
    settle,
    take,
    take_one,
)
from tests.store.place import Place, patient


@pytest.fixture(scope="module")
def pooler() -> Iterator[str]:
    with transaction_pooler(shared_postgres().url) as url:
        yield url


@pytest.fixture
async def pooled(place: Place, pooler: str) -> PostgresStore:
    return await place.open(url=pooler)


def sessions(pooler: str) -> list[tuple[str, ...]]:
    """What every session of the server has set, once all of them are free again."""
    shown = "SELECT current_setting('search_path'), current_setting('TimeZone'), current_setting('lock_timeout'),"
    shown += " current_setting('statement_timeout'), current_setting('synchronous_commit')"
    with psycopg.connect(pooler, autocommit=True, prepare_threshold=None) as connection:
        return [connection.execute(shown).fetchone() or () for _ in range(SESSIONS)]


async def test_a_pooler_is_noticed(pooler: str) -> None:
    async with await StoreConnection.open(Database.parse(pooler), {}) as through:
        assert through.is_pooled
    async with await StoreConnection.open(Database.parse(shared_postgres().url), {}) as straight:
        assert not straight.is_pooled
    async with await StoreConnection.open(Database.parse(shared_postgres().url + "?listen=false"), {}) as polling:
        assert polling.is_pooled


async def test_every_statement_has_the_settings(pooler: str) -> None:
    async with await StoreConnection.open(Database.parse(pooler), {"search_path": "one, two"}) as connection:
        for _ in range(SESSIONS + 1):
            assert await (await connection.execute("SHOW search_path")).fetchone() == ("one, two",)
        await connection.configure({"search_path": "three"})
        async with connection.transaction():
            assert await (await connection.execute("SHOW search_path")).fetchone() == ("three",)
        with pytest.raises(psycopg.errors.DivisionByZero):
            await connection.execute("SELECT 1 / 0")
        assert await (await connection.execute("SHOW search_path")).fetchone() == ("three",)


async def test_an_inbox_works_and_leaves_no_trace_in_any_session(
    place: Place, pooled: PostgresStore, pooler: str
) -> None:
    before = sessions(pooler)
    first = await keep(pooled, item("a"), item("b"), item("a"))
    assert outcomes(first) == [Outcome.accepted, Outcome.accepted, Outcome.duplicate]
    letters = await dead_letters(pooled, "s1", "s2", None)
    await replay_all(pooled, DEAD)
    await pooled.feed_replays()
    assert sorted(await finish(pooled, priority=Priority.replay)) == sorted(letters)
    assert failed_checks(await pooled.check()) == []
    assert sessions(pooler) == before
    assert {settings[0] for settings in before} == {'"$user", public'}


async def test_two_inboxes_behind_one_pooler_do_not_meet(place: Place, pooled: PostgresStore, pooler: str) -> None:
    other = PostgresStore(pooler, schema=(schema := fresh_schema()), timeouts=patient())
    await other.open()  # its tables are made through the pooler, too
    try:
        await enrolled(other)
        kept = await asyncio.gather(*(keep(store, item(f"k{n}")) for n in range(30) for store in (pooled, other)))
        assert {verdict.outcome for verdicts in kept for verdict in verdicts} == {Outcome.accepted}
        assert failed_checks(await other.check()) == []
    finally:
        await other.close()
        place.sql(f"DROP SCHEMA {schema} CASCADE")


async def test_copies_at_once_are_kept_once(place: Place, pooled: PostgresStore, pooler: str) -> None:
    second = await place.open(url=pooler)
    for n in range(20):
        both = await asyncio.gather(*(keep(store, item(f"k{n}")) for store in (pooled, second) for _ in range(4)))
        assert sorted(verdicts[0].outcome for verdicts in both) == [Outcome.accepted, *[Outcome.duplicate] * 7]
        assert len({verdicts[0].event_id for verdicts in both}) == 1


async def test_leases_are_renewed_and_fenced(pooled: PostgresStore) -> None:
    made = await deliver_one(pooled, "s")
    lease = await take_one(pooled)
    assert await asyncio.to_thread(pooled.renew, [lease]) == {lease.fence}
    await settle(pooled, done(lease))
    assert await asyncio.to_thread(pooled.renew, [lease]) == set()
    assert (await look(pooled, made)).status is DeliveryStatus.done


async def test_a_handler_writes_in_its_own_transaction(place: Place, pooled: PostgresStore) -> None:
    table = f"effects_{place.schema}"
    place.sql(f"CREATE TABLE public.{table} (what text)")
    first, second = await deliver_one(pooled), await deliver_one(pooled)
    for lease in await take(pooled, 2):
        if lease.delivery.id == first:
            async with pooled.transaction() as transaction:
                await transaction.connection.execute(f"INSERT INTO {table} VALUES ('async')")
                await transaction.settle(done(lease))
        else:
            await asyncio.to_thread(_write_on_a_thread, pooled, table, lease)
    assert sorted(what for (what,) in place.sql(f"SELECT what FROM public.{table}")) == ["async", "thread"]
    for made in (first, second):
        assert (await look(pooled, made)).status is DeliveryStatus.done
    place.sql(f"DROP TABLE public.{table}")


def _write_on_a_thread(store: PostgresStore, table: str, lease: object) -> None:
    with store.blocking_transaction() as transaction:
        transaction.connection.execute(f"INSERT INTO {table} VALUES ('thread')")
        transaction.settle(done(lease))  # type: ignore[arg-type]


async def test_what_becomes_due_is_found_without_listening(place: Place, pooler: str) -> None:
    class Worker(StoreObserver):
        works = True

    store = PostgresStore(pooler, schema=place.schema, timeouts=patient())
    await store.open(Worker())
    place.stores.append(store)
    await enrolled(store)
    made = await deliver_one(store)
    assert ids(await take(store)) == [made]


async def test_claims_hold(pooler: str, place: Place) -> None:
    async with AsyncClaims(f"{pooler}?schema={place.schema}") as claims:
        for n in range(SESSIONS + 1):
            assert [(await claims.claim(f"k{n}")).status for _ in range(2)] == ["new", "in_progress"]


async def test_doctor_says_what_stands_in_front(place: Place, pooled: PostgresStore) -> None:
    shown = {check.name: check.detail for check in await pooled.check()}
    assert "through a pooler" in shown["connection"]
    straight = {check.name: check.detail for check in await (await place.open()).check()}
    assert "straight to the server" in straight["connection"]


def test_listen_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match='listen is true or false, not "no"'):
        Database.parse("postgresql://h/db?listen=no")


def test_a_migration_is_cut_into_its_statements() -> None:
    script = """
    -- a comment; with a semicolon
    CREATE TABLE a (b text DEFAULT ';');
    CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM 1; PERFORM 2; END $$;
    DO $body$ BEGIN PERFORM '$$;'; END $body$;
    """
    first, second, third = _split_statements(script)
    assert first.endswith("DEFAULT ';');")
    assert second.startswith("CREATE FUNCTION")
    assert second.endswith("END $$;")
    assert third.startswith("DO")
