"""PostgreSQL: what the server must promise, how it is addressed, how the schema comes to be, which plans it makes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any
from urllib.parse import quote

import pytest

from oncehook.errors import ConfigError, MigrationNeeded, SchemaTooNew, StoreError, StoreUnavailable
from oncehook.model import Engine, Filter, Outcome
from oncehook.store import migrate
from oncehook.store.migrate import Migration, migrations, steps_from
from oncehook.store.postgres import PostgresStore
from oncehook.store.postgres import connection as postgres_connection
from oncehook.store.postgres.connection import Database, connect_hot, fetch_all, session
from tests.servers import Postgres, fresh_schema
from tests.store.conftest import failed_checks
from tests.store.making import enrolled, intake, item, keep, outcomes, record_all
from tests.store.place import Place

ACCEPTED, DUPLICATE = Outcome.accepted, Outcome.duplicate
CRM = ("crm", 1)


# -- what the server must promise --------------------------------------------------------------


def with_setting(place: Place, setting: str) -> str:
    return f"{place.server.url}?options={quote('-c' + setting)}"


@pytest.mark.parametrize("value", ["off", "local"])
async def test_a_commit_that_is_not_durable_is_refused(place: Place, value: str) -> None:
    """R2"""
    with pytest.raises(StoreError, match="synchronous_commit"):
        await place.open(url=with_setting(place, f"synchronous_commit={value}"))
    store = await place.open(url=with_setting(place, f"synchronous_commit={value}"), unsafe=True)
    assert "durability" in failed_checks(await store.check())


@pytest.mark.parametrize("value", ["remote_write", "remote_apply"])
async def test_more_than_durable_is_fine(place: Place, value: str) -> None:
    store = await place.open(url=with_setting(place, f"synchronous_commit={value}"))
    assert outcomes(await keep(store, item("k"))) == [ACCEPTED]


async def test_the_durable_setting_is_pinned_on_connections_for_intake(place: Place) -> None:
    """A change of the server's configuration reaches running sessions, but not these."""
    await place.open()
    link = await connect_hot(Database.parse(place.url, place.schema))
    async with link.connection as connection:
        [(source,)] = await fetch_all(connection, "SELECT source FROM pg_settings WHERE name = 'synchronous_commit'")
    assert source == "session"


@pytest.mark.parametrize("path", ["public", "nowhere", "pg_catalog"])
async def test_a_path_in_the_address_is_not_ours(place: Place, path: str) -> None:
    """It is for the statements of handlers; we find our tables in our schema, at the first start and later."""
    address = with_setting(place, f"search_path={path}")
    for _ in range(2):  # the first makes the tables
        store = await place.open(url=address)
        assert outcomes(await keep(store, item(to=[CRM]))) == [ACCEPTED]
        async with store.transaction() as transaction:
            assert await (await transaction.connection.execute("SHOW search_path")).fetchall() == [(path,)]
        await store.close()
    assert place.sql("SELECT count(*) FROM events") == [(2,)]


async def test_a_server_that_does_not_sync_is_refused() -> None:
    """R2"""
    with Postgres(fsync="off") as server:
        with pytest.raises(StoreError, match="fsync"):
            await PostgresStore(server.url).open()
        store = PostgresStore(server.url, unsafe=True)
        await store.open()
        await store.close()


async def test_an_invalid_dedup_index_is_refused(place: Place) -> None:
    """R66"""
    await place.open()
    place.sql("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'keys_pkey'::regclass")
    with pytest.raises(StoreError, match="unique index"):
        await place.open()
    assert "dedup index" in failed_checks(await place.stores[0].check())


async def test_a_ping_is_a_committed_write(place: Place) -> None:
    store = await place.open()
    await store.ping()
    await store.ping()
    assert place.sql("SELECT value FROM marks WHERE name = 'ping'") == [(2,)]
    place.sql("ALTER ROLE oncehook SET default_transaction_read_only = on")
    try:
        with pytest.raises(StoreUnavailable):
            await PostgresStore(place.url, schema=place.schema).open()
    finally:
        place.sql("ALTER ROLE oncehook RESET default_transaction_read_only")


async def test_a_subject_that_is_held_is_no_fault(place: Place) -> None:
    """Its head is dead and stays, due at infinity, and the others wait behind it on purpose."""
    store = await place.open()
    await record_all(store, [intake(item(f"k{n}", subject="s", to=[CRM])) for n in range(5)])
    place.sql("UPDATE deliveries SET status = 'dead' WHERE NOT behind")
    place.sql("UPDATE counters SET n = n - 1 WHERE what = 'pending'")
    place.sql(
        "INSERT INTO counters SELECT minute, slot, 0, destination_id, 'dead', 1 FROM counters WHERE what = 'pending'"
    )
    assert failed_checks(await store.check()) == ["heads"]
    place.sql("UPDATE heads SET due_at = 'infinity'")
    assert failed_checks(await store.check()) == []


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        ("UPDATE keys SET copies = copies + 1", "copies"),
        ("DELETE FROM batches", "references"),
        ("UPDATE deliveries SET event_id = id", "references"),
    ],
)
async def test_what_only_this_engine_checks(place: Place, damage: str, law: str) -> None:
    store = await place.open()
    await record_all(store, [intake(item("a", to=[CRM]), item("b"), raw=b"raw"), intake(item())])
    assert failed_checks(await store.check()) == []
    place.sql(damage)
    assert law in failed_checks(await store.check())


# -- addresses ---------------------------------------------------------------------------------


async def test_the_schema_may_stand_in_the_address(place: Place) -> None:
    name = f'{place.schema}-Ünïcode "quoted"'
    store = PostgresStore(f"{place.server.url}?schema={quote(name)}&application_name=x")
    await store.open()
    try:
        await enrolled(store)
        assert outcomes(await keep(store, item("k"), item("k"))) == [ACCEPTED, DUPLICATE]
        found = place.connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = %s", [name]).fetchone()
        assert found is not None
        assert found[0] > 10
    finally:
        await store.close()
        quoted = name.replace('"', '""')
        place.sql(f'DROP SCHEMA "{quoted}" CASCADE')


async def test_two_schemas_know_nothing_of_each_other(place: Place) -> None:
    one = await place.open()
    schema = fresh_schema()
    other = PostgresStore(place.server.url, schema=schema)
    await other.open()
    await enrolled(other)
    assert outcomes([*await keep(one, item("k")), *await keep(other, item("k"))]) == [ACCEPTED, ACCEPTED]
    await other.close()
    place.sql(f"DROP SCHEMA {schema} CASCADE")


async def test_a_search_path_in_the_address_that_leads_here_is_left_alone(place: Place) -> None:
    path = f"{place.schema},pg_catalog"
    url = with_setting(place, f"search_path={path}")
    store = await place.open(url=url)
    assert outcomes(await keep(store, item("k"))) == [ACCEPTED]
    async with session(Database.parse(url, place.schema)) as connection:
        [(found,)] = await fetch_all(connection, "SELECT current_setting('search_path')")
    assert found == path


async def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError):
        PostgresStore("postgresql://localhost/db?colour=blue")


async def test_nobody_answers_at_the_address() -> None:
    store = PostgresStore("postgresql://127.0.0.1:1/db")
    with pytest.raises(StoreUnavailable):
        await store.open()
    with pytest.raises(StoreUnavailable):
        await store.schema_state()
    with pytest.raises(StoreUnavailable):
        await store.find_events(Filter())


async def test_a_role_without_rights_is_told_what_to_ask_for(bare_place: Place) -> None:
    role = f"r_{bare_place.schema}"
    bare_place.connection.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with pytest.raises(StoreError, match="may not") as refused:
            await bare_place.open(url=bare_place.server.url.replace("oncehook@", f"{role}@"))
        assert "CREATE SCHEMA" in refused.value.hint
    finally:
        bare_place.connection.execute(f"DROP ROLE {role}")


def test_a_missing_driver_is_named_in_one_sentence() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from oncehook.errors import ConfigError\n"
        "try:\n    import oncehook.store.postgres\n"
        "except ConfigError as error:\n    print(error.hint)"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert "oncehook[postgres]" in done.stdout, done.stderr


# -- migration ---------------------------------------------------------------------------------


async def test_one_migrator_at_a_time(bare_place: Place) -> None:
    """R65"""
    stores = [PostgresStore(bare_place.url, schema=bare_place.schema) for _ in range(6)]
    bare_place.stores += stores
    await asyncio.gather(*[store.open() for store in stores])
    versions = [version for (version,) in bare_place.sql("SELECT version FROM migrations ORDER BY 1")]
    assert versions == list(range(1, len(versions) + 1))
    numbers = await asyncio.gather(*[store.register_names(["a", "b", "c"], ["x"]) for store in stores])
    assert all(one == numbers[0] for one in numbers)
    assert len(set(numbers[0].sources.values())) == 3


async def test_a_migration_that_fails_leaves_nothing_behind(bare_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65: an aborted one resumes."""

    def broken(*arguments: Any, **options: Any) -> Any:
        for step in steps_from(*arguments, **options):
            yield type(step)(step.version, step.name, step.sql + "SELECT 1 / 0;")

    monkeypatch.setattr(postgres_connection, "steps_from", broken)
    with pytest.raises(StoreError, match="migration"):
        await bare_place.open()
    monkeypatch.undo()
    assert bare_place.sql(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{bare_place.schema}'") == [(0,)]
    await bare_place.open()


async def test_a_later_step_brings_an_older_store_along(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65: what is kept stays, and an old program refuses the newer schema."""
    store = await place.open()
    await keep(store, item("k"))
    await store.close()
    later = [
        Migration(2, "tags", "ALTER TABLE events ADD COLUMN tag text;"),
        Migration(3, "tagged", "UPDATE events SET tag = 'old'; CREATE INDEX events_tag ON events (tag);"),
    ]
    known = migrations(Engine.postgres)
    monkeypatch.setattr(migrate, "migrations", lambda engine: [*known, *later])
    with pytest.raises(MigrationNeeded):
        await PostgresStore(place.url, schema=place.schema).open(migrate=False)
    newer = await place.open()
    assert place.sql("SELECT key, tag FROM events") == [("k", "old")]
    assert outcomes(await keep(newer, item("k"), item("k2"))) == [Outcome.duplicate, ACCEPTED]
    assert place.sql("SELECT version, name FROM migrations ORDER BY 1")[1:] == [(2, "tags"), (3, "tagged")]
    monkeypatch.undo()
    with pytest.raises(SchemaTooNew):
        await place.open()


async def test_a_reader_does_not_migrate(bare_place: Place) -> None:
    with pytest.raises(MigrationNeeded):
        await PostgresStore(bare_place.url, schema=bare_place.schema).open(write=False)
