"""What only PostgreSQL has: rivals in other processes, connections that break, servers that promise too little."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from oncehook.errors import ConfigError, MigrationNeeded, Overloaded, StoreError, StoreUnavailable
from oncehook.model import Outcome, new_id
from oncehook.store import postgres_commit, postgres_intake, postgres_look, postgres_open
from oncehook.store.migrate import steps_from
from oncehook.store.postgres import PostgresStore
from oncehook.store.postgres_wire import Id
from tests.servers import Postgres, fresh_schema, shared_postgres
from tests.store.conftest import failed_checks
from tests.store.making import enrolled, intake, item, keep, outcomes, record, record_all

ACCEPTED, DUPLICATE = Outcome.accepted, Outcome.duplicate
CRM = ("crm", 1)


class Place:
    """A schema on the session's server, and a connection to look at it from outside."""

    def __init__(self) -> None:
        self.server = shared_postgres()
        self.schema = fresh_schema()
        self.url = f"{self.server.url}?application_name={self.schema}"
        self.connection = psycopg.connect(self.server.url, autocommit=True)
        self.stores: list[PostgresStore] = []

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        self.connection.execute(f"SET search_path = {self.schema}")
        cursor = self.connection.execute(statement)
        return cursor.fetchall() if cursor.description else []

    async def open(self, **options: Any) -> PostgresStore:
        store = PostgresStore(options.pop("url", self.url), schema=self.schema, **options)
        self.stores.append(store)
        await store.open()
        await enrolled(store)
        return store

    def backends(self) -> list[int]:
        """The server's processes that serve intake: those that have a slot of the counters."""
        rows = self.sql(
            f"SELECT pid FROM pg_stat_activity WHERE application_name = '{self.schema}'"
            " AND (query LIKE '%counter_slot%' OR query LIKE '%unnest($1::uuid[]%') ORDER BY pid"
        )
        return [pid for (pid,) in rows]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    for store in made.stores:
        await store.close()
    made.sql(f"DROP SCHEMA IF EXISTS {made.schema} CASCADE")
    made.connection.close()


async def until(happened: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own time limit is the only one."""
    while not happened():
        await asyncio.sleep(0.01)


async def insist(store: PostgresStore, key: str) -> Outcome:
    """What a sender does: try again until it gets an answer."""
    while True:
        try:
            [verdict] = await record(store, intake(item(key, to=[CRM])))
            return verdict.outcome
        except StoreUnavailable:
            await asyncio.sleep(0.02)


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
    connection, _ = await postgres_open.connect_hot(postgres_open.place(place.url, place.schema, None), unsafe=False)
    async with connection:
        [(source,)] = await postgres_open.rows(
            connection, "SELECT source FROM pg_settings WHERE name = 'synchronous_commit'"
        )
    assert source == "session"


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
    other = PostgresStore(place.server.url, schema=fresh_schema())
    await other.open()
    await enrolled(other)
    assert outcomes([*await keep(one, item("k")), *await keep(other, item("k"))]) == [ACCEPTED, ACCEPTED]
    await other.close()


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
        await store.find_events()


async def test_a_role_without_rights_is_told_what_to_ask_for(place: Place) -> None:
    role = f"r_{place.schema}"
    place.connection.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with pytest.raises(StoreError, match="may not") as refused:
            await place.open(url=place.server.url.replace("oncehook@", f"{role}@"))
        assert "CREATE SCHEMA" in refused.value.hint
    finally:
        place.connection.execute(f"DROP ROLE {role}")


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


async def test_one_migrator_at_a_time(place: Place) -> None:
    """R65"""
    stores = [PostgresStore(place.url, schema=place.schema) for _ in range(6)]
    place.stores += stores
    await asyncio.gather(*[store.open() for store in stores])
    versions = [version for (version,) in place.sql("SELECT version FROM migrations ORDER BY 1")]
    assert versions == list(range(1, len(versions) + 1))
    numbers = await asyncio.gather(*[store.enroll(["a", "b", "c"], ["x"]) for store in stores])
    assert all(one == numbers[0] for one in numbers)
    assert len(set(numbers[0].sources.values())) == 3


async def test_a_migration_that_fails_leaves_nothing_behind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65: an aborted one resumes."""

    def broken(*arguments: Any, **options: Any) -> Any:
        for step in steps_from(*arguments, **options):
            yield type(step)(step.version, step.name, step.sql + "SELECT 1 / 0;")

    monkeypatch.setattr(postgres_open, "steps_from", broken)
    with pytest.raises(StoreError, match="migration"):
        await place.open()
    monkeypatch.undo()
    assert place.sql(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{place.schema}'") == [(0,)]
    await place.open()


async def test_a_reader_does_not_migrate(place: Place) -> None:
    with pytest.raises(MigrationNeeded):
        await PostgresStore(place.url, schema=place.schema).open(write=False)


# -- rivals ------------------------------------------------------------------------------------


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
    store = await place.open()
    await keep(store, item("first", subject="blocked", to=[CRM]))
    with psycopg.connect(place.server.url) as foreign:
        foreign.execute(f"SELECT * FROM {place.schema}.heads FOR UPDATE")
        subjects = [f"s{n}" for n in range(30)]
        subjects[11] = "blocked"
        intakes = [intake(item(f"k{n}", subject=subject, to=[CRM])) for n, subject in enumerate(subjects)]
        results = await record_all(store, intakes)
        assert isinstance(results.pop(11), StoreUnavailable)
        assert {verdict.outcome for result in results if isinstance(result, list) for verdict in result} == {ACCEPTED}
        assert len(results) == 29
    assert outcomes(await keep(store, item("k11", subject="blocked", to=[CRM]))) == [ACCEPTED]
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


# -- connections that break --------------------------------------------------------------------


async def test_a_connection_that_dies_at_rest_costs_nobody_anything(place: Place) -> None:
    """R60"""
    store = await place.open()
    await keep(store, item("k1"))
    await until(lambda: len(place.backends()) == 2)
    before = place.backends()
    for pid in before:
        place.sql(f"SELECT pg_terminate_backend({pid})")
    await until(lambda: len(set(place.backends()) - set(before)) == 2)
    assert outcomes(await keep(store, item("k1"), item("k2"))) == [DUPLICATE, ACCEPTED]


async def test_a_reader_never_gets_a_connection_that_died_at_rest(place: Place) -> None:
    store = await place.open()
    [verdict] = await keep(store, item("k"))
    await asyncio.gather(*[store.find_events() for _ in range(4)])
    mine = f"FROM pg_stat_activity WHERE application_name = '{place.schema}'"
    before = [pid for (pid,) in place.sql(f"SELECT pid {mine}")]
    place.sql(f"SELECT pg_terminate_backend(pid) {mine}")
    await until(lambda: not {pid for (pid,) in place.sql(f"SELECT pid {mine}")} & set(before))
    assert [event.id for event in await store.find_events()] == [verdict.event_id]


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


async def test_connections_that_die_at_work_lose_and_double_nothing(place: Place) -> None:
    """R3, R4, R60"""
    store = await place.open()
    finished = False

    async def assassin() -> None:
        while not finished:
            for pid in place.backends():
                place.sql(f"SELECT pg_terminate_backend({pid})")
            await asyncio.sleep(random.uniform(0, 0.05))

    async def sender(first: int) -> list[Outcome]:
        return [await insist(store, f"k{n}") for n in range(first, first + 40)]

    killing = asyncio.create_task(assassin())
    answers = await asyncio.gather(*[sender(first) for first in range(0, 400, 40)])
    finished = True
    await killing
    assert all(outcome in (ACCEPTED, DUPLICATE) for one in answers for outcome in one)
    assert place.sql("SELECT count(*), count(DISTINCT key) FROM events") == [(400, 400)]
    assert place.sql("SELECT count(*) FROM deliveries") == [(400,)]
    assert failed_checks(await store.check()) == []


class Cutter:
    """A wire between the store and the server that swallows the server's next answer and breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._serving: list[asyncio.Task[Any] | None] = []
        self.armed = False

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*[task for task in self._serving if task])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.append(asyncio.current_task())
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        ends = [asyncio.create_task(self._pump(reader, to_server, answers=False))]
        ends.append(asyncio.create_task(self._pump(from_server, writer, answers=True)))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for wire in (writer, to_server):
            wire.close()
            with contextlib.suppress(ConnectionError):
                await wire.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await source.read(1 << 16):
            if answers and self.armed:
                self.armed = False
                return
            sink.write(data)
            await sink.drain()


async def test_an_answer_that_is_lost_after_the_commit(place: Place) -> None:
    """R4, R5: 503, and the truth is decided by the unique index at the next delivery."""
    async with Cutter(place.server.port) as wire:
        url = place.url.replace(f":{place.server.port}/", f":{wire.port}/")
        store = await place.open(url=url, intake_connections=1)
        await keep(store, item("before"))  # the statement is prepared: from here one answer is one commit
        first = item("k", to=[CRM])
        wire.armed = True
        [failure] = await record_all(store, [intake(first)])
        assert isinstance(failure, StoreUnavailable)
        [again] = await keep(store, item("k", to=[CRM]))
        assert (again.outcome, again.event_id) == (DUPLICATE, first.event_id)
        assert place.sql("SELECT count(*) FROM deliveries") == [(1,)]
        await store.close()


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


def refuses_at_once(store: PostgresStore) -> bool:
    try:
        store.record(intake(item(None))).future.cancel()
    except StoreUnavailable:
        return True
    return False


async def test_a_server_that_restarts(own_server: Postgres) -> None:
    """R60: refused at once while it is away, and well again without anybody's help."""
    store = PostgresStore(own_server.url)
    await store.open()
    await enrolled(store)
    [first] = await keep(store, item("k"))
    await asyncio.to_thread(own_server.stop, immediate=True)
    await until(lambda: refuses_at_once(store))
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await asyncio.to_thread(own_server.start)
    assert await insist(store, "new") is ACCEPTED
    [again] = await keep(store, item("k"))
    assert (again.outcome, again.event_id) == (DUPLICATE, first.event_id)
    await store.ping()
    assert await store.get_event(first.event_id) is not None
    assert failed_checks(await store.check()) == []
    await store.close()


async def test_what_waits_while_the_server_is_away_is_written_when_it_is_back(own_server: Postgres) -> None:
    store = PostgresStore(own_server.url, intake_connections=1)
    await store.open()
    await enrolled(store)
    await keep(store, item("k"))
    pending = [store.record(intake(item(f"k{n}"))) for n in range(100)]
    own_server.stop(immediate=True)  # without giving way to the loop: all of them are still in the line
    await until(lambda: refuses_at_once(store))
    await asyncio.to_thread(own_server.start)
    results = await asyncio.gather(*[one.future for one in pending], return_exceptions=True)
    written = [result for result in results if isinstance(result, list)]
    assert all(isinstance(result, list | StoreUnavailable) for result in results)
    with psycopg.connect(own_server.url) as look:
        kept = look.execute("SELECT count(*) FROM oncehook.events WHERE key LIKE 'k_%'").fetchone()
    assert kept == (len(written),)
    assert len(written) >= 100 - 32  # all but a group that was on its way
    await store.close()


async def test_a_server_that_falls_silent_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """R9: a frozen backend still acknowledges packets, so only the silence tells."""
    monkeypatch.setattr(postgres_commit, "SILENCE", 0.3)
    store = await place.open(intake_connections=1)
    await keep(store, item("k"))
    [frozen] = place.backends()
    os.kill(frozen, signal.SIGSTOP)
    try:
        [result] = await record_all(store, [intake(item("k2"))])
        assert isinstance(result, StoreUnavailable)
        assert await insist(store, "k3") is ACCEPTED
    finally:
        os.kill(frozen, signal.SIGCONT)


async def test_close_does_not_wait_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """R56"""
    monkeypatch.setattr(postgres_commit, "CLOSE_SECONDS", 0.2)
    store = await place.open(intake_connections=1, batch=1)
    await keep(store, item("k"))
    [frozen] = place.backends()
    os.kill(frozen, signal.SIGSTOP)
    try:
        pending = [store.record(intake(item(f"k{n}"))) for n in range(3)]
        await asyncio.sleep(0.05)
        await store.close()
        assert all(isinstance(one.future.exception(), StoreUnavailable) for one in pending)
    finally:
        os.kill(frozen, signal.SIGCONT)


# -- plans -------------------------------------------------------------------------------------


async def fill(place: Place, store: PostgresStore) -> None:
    for start in range(0, 10_000, 2000):
        items = [
            item(f"k{n}", body=b"x", subject=f"s{n % 500}" if n % 2 else None, to=[CRM])
            for n in range(start, start + 2000)
        ]
        await record_all(store, [intake(one) for one in items])
    place.sql("ANALYZE")


async def test_the_intake_statement_scans_no_table(place: Place) -> None:
    store = await place.open()
    await fill(place, store)
    here = postgres_open.place(place.url, place.schema, None)
    connection, _ = await postgres_open.connect_hot(here, unsafe=False)
    async with connection:
        cursor = await connection.execute(f"EXPLAIN (GENERIC_PLAN, COSTS OFF) {postgres_intake.INTAKE}", prepare=False)
        plan = "\n".join(str(line) for (line,) in await cursor.fetchall())
    assert "Insert on heads" in plan
    assert "Seq Scan" not in plan
    assert "Bitmap" not in plan
    # a join of one part with another is quadratic in the size of the group
    assert "Join Filter" not in plan


@pytest.mark.parametrize(
    ("source", "subject", "index"),
    [
        (None, None, "events_pkey"),
        (2, None, "events_source"),
        (None, "s3", "events_subject"),
        (1, "s3", "events_subject"),
    ],
)
async def test_every_list_has_its_index(place: Place, source: int | None, subject: str | None, index: str) -> None:
    store = await place.open()
    await keep(store, *[item(f"other{n}", source="payments") for n in range(30)], source_id=2)
    await fill(place, store)
    connection = await postgres_open.connect(postgres_open.place(place.url, place.schema, None))
    async with connection:
        question = [source, subject, Id(new_id()), 50]
        found = await connection.execute(f"EXPLAIN (COSTS OFF) {postgres_look._FIND}", question)
        plan = "\n".join(str(line) for (line,) in await found.fetchall())
    assert index in plan
    assert "Seq Scan on events" not in plan
