"""What handlers and programs emit is there if, and only if, what it belongs to is done, whatever dies (R54)."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook import Event, Inbox
from oncehook.errors import ConfigError, MigrationNeeded, StoreUnavailable
from oncehook.model import EventId, Filter, ReplayCommand, new_id
from tests.acceptance.conftest import Engine, make_engine
from tests.acceptance.outbox_app import make
from tests.acceptance.test_crashes import end_leases
from tests.torture.fleet import HANG

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def inbox(engine: Engine) -> AsyncIterator[Inbox]:
    made = Inbox(engine.url)
    yield made
    if not made.draining:
        await made.store.close()


def events_of(engine: Engine, source: str) -> list[tuple[str, str, str | None]]:
    """Key, type and subject of all events of a source, in the order of their ids."""
    return [
        (key, type_, subject)
        for name, key, type_, subject in engine.rows(
            "SELECT s.name, e.key, e.type, e.subject FROM events e JOIN sources s ON s.id = e.source_id ORDER BY e.id"
        )
        if name == source
    ]


async def is_sound(inbox: Inbox) -> None:
    wrong = [check for check in await inbox.store.check() if not check.ok]
    assert not wrong, wrong


# -- handlers ----------------------------------------------------------------------------------


async def test_handlers_of_every_kind_emit_when_they_are_done(engine: Engine) -> None:
    """Attempts that fail leave nothing, also when they had emitted before."""
    async with make(engine.url).running(work=False) as before:
        for n in range(6):
            await before.emit("orders", "order", {"fails": n % 3}, key=f"o{n}", subject=f"s{n % 2}")
    inbox = make(engine.url)
    async with inbox.running():
        await inbox.drain()
        await is_sound(inbox)
    handlers = set(inbox.destinations) - {"audit"}
    assert len(handlers) == (2 if engine.name == "sqlite" else 4)
    wanted = {(f"step.{n}", f"{name} s{order % 2}") for n in (1, 2) for order in range(6) for name in handlers}
    found = events_of(engine, "steps")
    assert len(found) == 12 * len(handlers)
    assert {(type_, subject) for _, type_, subject in found} == wanted
    assert max(engine.copies()) == 1, "nothing was emitted twice and folded"
    assert engine.rows("SELECT status, count(*) FROM deliveries GROUP BY 1") == [("done", 6 * len(handlers) * 3)]


async def test_one_order_of_a_subject_from_end_to_end(inbox: Inbox) -> None:
    """Events of one subject, emitted by attempts of one subject, arrive in that order."""
    seen: list[int] = []

    @inbox.on("orders")
    async def relay(event: Event) -> None:
        for n in range(3):
            event.emit("steps", "step", {"n": event.json()["n"] * 3 + n}, subject="s")

    @inbox.on("steps")
    async def note(event: Event) -> None:
        seen.append(event.json()["n"])

    async with inbox.running():
        for n in range(10):
            await inbox.emit("orders", "order", {"n": n}, key=str(n), subject="o")
        await inbox.drain()
        await is_sound(inbox)
    assert seen == list(range(30))


async def test_a_duplicate_arrival_is_no_second_emission(engine: Engine, inbox: Inbox) -> None:
    inbox.source("shop", verify="none", key="$.id")

    @inbox.on("shop")
    async def relay(event: Event) -> None:
        event.emit("steps", "step", {})

    async with inbox.running():
        receipts = [await inbox.receive("shop", {}, b'{"id": 1}') for _ in range(3)]
        await inbox.drain()
        receipts.append(await inbox.receive("shop", {}, b'{"id": 1}'))
        await inbox.drain()
    assert [one.outcome for one in receipts] == ["accepted", "duplicate", "duplicate", "duplicate"]
    assert events_of(engine, "steps") == [(f"{receipts[0].event_ids[0]}/relay/1", "step", None)]


async def test_a_replay_emits_again_only_under_a_fresh_id(engine: Engine, inbox: Inbox) -> None:
    """The key of what is emitted follows `idempotency_key`: a replay is the same event, unless somebody says not."""
    runs: list[int] = []

    @inbox.on("orders")
    async def relay(event: Event) -> None:
        runs.append(event.run)
        event.emit("steps", "step", {"order": event.key})
        event.emit("steps", "named", {"order": event.key}, key=event.key)

    @inbox.on("steps")
    async def note(event: Event) -> None:
        """Where steps go."""

    async with inbox.running():
        ids = [await inbox.emit("orders", "order", {}, key=key) for key in ("o1", "o2")]
        await inbox.drain()
        first = sorted([(f"{event_id}/relay/1", "step", None) for event_id in ids])
        named = [("o1", "named", None), ("o2", "named", None)]
        assert sorted(events_of(engine, "steps")) == sorted(first + named)
        for event_id, fresh_id in zip(ids, (False, True), strict=True):
            page = await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))
            again = Filter(ids=[page.items[0].id])
            await inbox.store.make_replay(
                new_id(), ReplayCommand(again, "me", force=True, fresh_id=fresh_id, bulk=False)
            )
        await inbox.drain()
        await is_sound(inbox)
    assert runs == [1, 1, 2, 2]
    fresh = (f"{ids[1]}.2/relay/1", "step", None)
    assert sorted(events_of(engine, "steps")) == sorted([*first, *named, fresh])


async def test_what_cannot_be_emitted_fails_the_attempt(engine: Engine, inbox: Inbox) -> None:
    late: list[Event] = []

    @inbox.on("orders", retry=[])
    async def relay(event: Event) -> None:
        event.emit("steps", "step", {"fine": True})
        if event.key == "bad":
            event.emit("steps", "step", object())
        late.append(event)

    async with inbox.running():
        await inbox.emit("orders", "order", {}, key="bad")
        await inbox.drain()
        assert events_of(engine, "steps") == []
        await inbox.emit("orders", "order", {}, key="good")
        await inbox.drain()
        assert len(events_of(engine, "steps")) == 1
        with pytest.raises(ConfigError, match="over"):
            late[0].emit("steps", "step", {})
    assert engine.rows("SELECT status FROM deliveries ORDER BY id") == [("dead",), ("done",)]


async def test_what_the_store_refuses_fails_its_own_attempt(engine: Engine, inbox: Inbox) -> None:
    """Such an attempt has failed like any other; it is neither lost nor tried for ever, and its neighbours are done."""

    @inbox.on("orders", retry=["0.01s"])
    async def relay(event: Event) -> None:
        event.emit("steps", "fine", {})
        event.emit("steps", event.type, {})

    async with inbox.running():
        refuse_poison(engine)
        for type_ in ("poison", "good"):
            await inbox.emit("orders", type_, {}, key=type_)
        await inbox.drain()
        page = await inbox.store.find_deliveries(Filter())
        await is_sound(inbox)
    assert {(one.type, str(one.status), one.attempts) for one in page.items} == {
        ("poison", "dead", 2),
        ("good", "done", 1),
    }
    assert [type_ for _, type_, _ in events_of(engine, "steps")] == ["fine", "good"]


def refuse_poison(engine: Engine) -> None:
    """Have the database say no to a certain event."""
    if engine.name == "sqlite":
        with closing(sqlite3.connect(engine.folder / "inbox.db", timeout=60)) as connection:
            connection.execute(
                "CREATE TRIGGER poison BEFORE INSERT ON events WHEN new.type = 'poison' AND new.source_id <>"
                " (SELECT id FROM sources WHERE name = 'orders') BEGIN SELECT RAISE(ABORT, 'no poison'); END"
            )
        return
    url, _, schema = engine.url.partition("?schema=")
    with psycopg.connect(url) as connection:
        connection.execute("SELECT set_config('search_path', %s, true)", [schema])
        connection.execute("INSERT INTO sources (name) VALUES ('orders') ON CONFLICT DO NOTHING")
        ((orders,),) = connection.execute("SELECT id FROM sources WHERE name = 'orders'").fetchall()
        connection.execute(f"ALTER TABLE events ADD CHECK (type <> 'poison' OR source_id = {orders})")


async def test_emissions_are_counted(inbox: Inbox) -> None:
    @inbox.on("orders")
    async def relay(event: Event) -> None:
        event.emit("steps", "step", {}, key="always the same")

    async with inbox.running():
        for n in range(3):
            await inbox.emit("orders", "order", {}, key=str(n))
        await inbox.drain()
        numbers = (await inbox.metrics()).decode()
    assert 'oncehook_arrivals_total{outcome="accepted",source="orders"} 3.0' in numbers
    assert 'oncehook_arrivals_total{outcome="accepted",source="steps"} 1.0' in numbers
    assert 'oncehook_arrivals_total{outcome="duplicate",source="steps"} 2.0' in numbers


# -- kill -9 -----------------------------------------------------------------------------------

POINTS = {
    "postgres": [
        *("after_lease", "before_settle", "after_emit", "before_transaction_commit", "after_settle"),
        *("before_tx_settle", "after_effect"),
    ],
    "sqlite": ["after_lease", "after_effect", "before_commit", "after_commit"],
}


def worker(engine: Engine, fault: str = "") -> subprocess.Popen[bytes]:
    """A process that works until nothing is left, or until it dies."""
    where = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)]))
    own = {**os.environ, "PYTHONPATH": where, "ONCEHOOK_FAULT": fault, "OUTBOX_STORE": engine.url}
    with (engine.folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "oncehook", "worker", "tests.acceptance.outbox_app:inbox", "--drain"]
        return subprocess.Popen(command, env=own, stdout=log, stderr=log, cwd=engine.folder)


async def fill(engine: Engine, prefix: str, count: int) -> None:
    inbox = make(engine.url)
    async with inbox.running(work=False):
        for n in range(count):
            order = {"fails": n % 2}
            while True:
                # Who is held up in the middle of a transaction keeps others from adding to its subject for a while.
                with suppress(StoreUnavailable):
                    await inbox.emit("orders", "order", order, key=f"{prefix}-{n}", subject=f"s{n % 3}")
                    break


def complaints(engine: Engine, orders: int) -> list[str]:
    """What is not there exactly once."""
    handlers = 2 if engine.name == "sqlite" else 4
    found = events_of(engine, "steps")
    wrong = [] if len(found) == orders * handlers * 2 else [f"{len(found)} steps of {orders} orders"]
    wrong += [] if max(engine.copies()) == 1 else ["an emission was written twice"]
    states = dict(engine.rows("SELECT status, count(*) FROM deliveries GROUP BY 1"))
    return wrong + ([] if set(states) == {"done"} else [str(states)])


async def test_killed_at_every_point_each_emission_exists_once(engine: Engine) -> None:
    chance = random.Random(54)
    for point in POINTS[engine.name]:
        await fill(engine, point, 6)
        fault = f"{point}:{chance.randint(6, 12) if engine.name == 'sqlite' else chance.randint(1, 4)}"
        assert worker(engine, fault).wait(HANG) == -9, f"{fault} was not reached"
        end_leases(engine)
    assert worker(engine).wait(HANG) == 0
    assert complaints(engine, 6 * len(POINTS[engine.name])) == []
    inbox = make(engine.url)
    async with inbox.running(work=False):
        await is_sound(inbox)


async def test_two_processes_at_once(postgres: Engine) -> None:
    """The same lines and, in part, the same keys: nobody waits for nobody for ever, and each thing happens once."""
    await fill(postgres, "first", 40)
    both = [worker(postgres), worker(postgres)]
    await fill(postgres, "second", 20)
    assert [process.wait(HANG) for process in both] == [0, 0]
    assert worker(postgres).wait(HANG) == 0
    assert complaints(postgres, 60) == []
    log = (postgres.folder / "log").read_text()
    assert "deadlock" not in log, log


# -- in a transaction of one's own -------------------------------------------------------------


async def test_an_event_in_a_transaction_of_ones_own(tmp_path: Path) -> None:
    """The inbox need not be started where it is emitted; who works is elsewhere, and woken by the commit."""
    postgres = make_engine("postgres", tmp_path, bare=True)
    seen = asyncio.Queue[tuple[str, str | None]]()
    works, emits = Inbox(postgres.url), Inbox(postgres.url)
    url = postgres.url.partition("?schema=")[0]
    with pytest.raises(MigrationNeeded), psycopg.connect(url) as connection:
        emits.emit_in_blocking(connection, "app", "x", {})

    async def note(event: Event) -> None:
        seen.put_nowait((event.type, event.subject))

    for inbox in (works, emits):
        inbox.on("app")(note)
    async with works.running():
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await emits.emit_in(connection, "app", "undone", {}, key="1")
            await connection.rollback()
            event_id = await emits.emit_in(connection, "app", "kept", {}, key="1", subject="s")
            assert await emits.emit_in(connection, "app", "kept", {}, key="1", subject="s") == event_id
        assert await seen.get() == ("kept", "s")
        with psycopg.connect(url) as blocking:
            emits.emit_in_blocking(blocking, "app", "blocking", {})
        assert await seen.get() == ("blocking", None)
        with psycopg.connect(url) as blocking:  # the one that runs can do it, too
            works.emit_in_blocking(blocking, "app", "from here", {})
        assert await seen.get() == ("from here", None)
        await works.drain()
        await is_sound(works)


DJANGO = """
import sys
from django.conf import settings

host, port, name, user, store = sys.argv[1:]
own = {"ENGINE": "django.db.backends.postgresql", "HOST": host, "PORT": port, "NAME": name, "USER": user}
settings.configure(DATABASES={"default": own}, USE_TZ=True)
import django
django.setup()
from django.db import connection, transaction
from oncehook import Inbox
from oncehook.errors import ConfigError

inbox = Inbox(store)
with transaction.atomic():
    inbox.emit_in_blocking(connection, "app", "kept", {"n": 1}, key="kept")
try:
    with transaction.atomic():
        inbox.emit_in_blocking(connection, "app", "undone", {}, key="undone")
        raise KeyError
except KeyError:
    pass
with transaction.atomic():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    inbox.emit_in_blocking(connection.connection, "app", "raw", {}, key="raw")
try:
    inbox.emit_in_blocking(connection, "app", "loose", {}, key="loose")
except ConfigError:
    print("refused")
"""


async def test_an_event_in_djangos_transaction(postgres: Engine) -> None:
    async with Inbox(postgres.url).running(work=False):
        pass
    at = psycopg.conninfo.conninfo_to_dict(postgres.url.partition("?schema=")[0])
    arguments = [str(at[name]) for name in ("host", "port", "dbname", "user")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DJANGO, *arguments, postgres.url, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert (process.returncode, said) == (0, b"refused\n")
    assert [key for key, _, _ in events_of(postgres, "app")] == ["kept", "raw"]


async def test_on_sqlite_it_says_what_to_do_instead(sqlite: Engine) -> None:
    inbox = Inbox(sqlite.url)
    async with inbox.running(work=False):
        tx: Any = object()
        with pytest.raises(ConfigError) as refused:
            await inbox.emit_in(tx, "app", "x", {})
        with pytest.raises(ConfigError):
            inbox.emit_in_blocking(tx, "app", "x", {})
    assert "event.emit" in refused.value.hint
