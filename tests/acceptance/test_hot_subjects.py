"""Busy subjects, whole: effects that commit with their completion, one after the other, and a stop in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from oncehook import Event, Inbox
from oncehook.model import Filter
from tests.acceptance.conftest import Engine
from tests.acceptance.test_work import FAST, is_sound


async def emit(inbox: Inbox, count: int, subject: str = "s") -> None:
    for n in range(count):
        await inbox.emit("app", "step", {"n": n}, key=f"{subject}{n}", subject=subject)


async def attempts(inbox: Inbox) -> list[list[str]]:
    """How the attempts of every delivery ended, in the order of their events."""
    page = await inbox.store.find_deliveries(Filter())
    found = [await inbox.store.attempts_of(one.id) for one in reversed(page.items)]
    return [[str(attempt.outcome) for attempt in one] for one in found]


async def test_effects_of_a_subject_commit_in_order_on_sqlite(sqlite: Engine) -> None:
    """R42, R51: an effect that fails takes its own completion back, and nothing follows it until it is written."""
    emitter, inbox = Inbox(sqlite.url), Inbox(sqlite.url)

    @emitter.on("app", retry=FAST)
    @inbox.on("app", retry=FAST)
    async def ship(event: Event) -> None:
        n = event.json()["n"]

        def write(db: Any) -> None:
            db.execute("CREATE TABLE IF NOT EXISTS parcels (n INTEGER, attempt INTEGER)")
            db.execute("INSERT INTO parcels VALUES (?, ?)", (n, event.attempt))
            if n == 1 and event.attempt == 1:
                raise ConnectionError("on second thoughts")

        event.commit(write)

    async with emitter.running(work=False):
        await emit(emitter, 4)
    async with inbox.running():
        await inbox.drain()
        ended = await attempts(inbox)
        await is_sound(inbox)
    assert sqlite.rows("SELECT n, attempt FROM parcels ORDER BY rowid") == [(0, 1), (1, 2), (2, 1), (3, 1)]
    assert ended == [["done"], ["retry", "done"], ["done"], ["done"]]


@pytest.fixture
async def parcels(postgres: Engine) -> AsyncIterator[str]:
    """A table of the application's own."""
    url, _, schema = postgres.url.partition("?schema=")
    table = f"public.{schema}_parcels"
    with psycopg.connect(url, autocommit=True) as outside:
        outside.execute(f"CREATE TABLE {table} (id serial, n integer, attempt integer)")
        yield table
        outside.execute(f"DROP TABLE {table}")


@pytest.mark.parametrize("blocking", [True, False])
async def test_effects_of_a_subject_commit_in_order_on_postgres(postgres: Engine, parcels: str, blocking: bool) -> None:
    """R42, R51: in the handler's own transaction, which settles."""
    emitter, inbox = Inbox(postgres.url), Inbox(postgres.url)
    insert = f"INSERT INTO {parcels} (n, attempt) VALUES (%s, %s)"

    def judge(event: Event) -> None:
        if event.json()["n"] == 1 and event.attempt == 1:
            raise ConnectionError("on second thoughts")

    if blocking:

        @emitter.on("app", name="ship", retry=FAST)
        @inbox.on("app", name="ship", retry=FAST)
        def ship(event: Event, tx: Any) -> None:
            tx.execute(insert, [event.json()["n"], event.attempt])
            judge(event)

    else:

        @emitter.on("app", name="ship", retry=FAST)
        @inbox.on("app", name="ship", retry=FAST)
        async def ship_async(event: Event, tx: Any) -> None:
            await tx.execute(insert, [event.json()["n"], event.attempt])
            judge(event)

    async with emitter.running(work=False):
        await emit(emitter, 4)
    async with inbox.running():
        await inbox.drain()
        ended = await attempts(inbox)
        await is_sound(inbox)
    assert postgres.rows(f"SELECT n, attempt FROM {parcels} ORDER BY id") == [(0, 1), (1, 2), (2, 1), (3, 1)]
    assert ended == [["done"], ["retry", "done"], ["done"], ["done"]]


async def test_after_a_stop_another_goes_on_where_it_was(engine: Engine) -> None:
    """R37, R42: the one under way is given back uncounted, those behind it were never begun, none is begun twice."""
    inbox, began = Inbox(engine.url), asyncio.Event()
    seen: list[tuple[int, int]] = []

    @inbox.on("app", name="ship")
    async def ship(event: Event) -> None:
        n = event.json()["n"]
        if n == 2:
            began.set()
            await asyncio.sleep(3600)
        seen.append((n, event.attempt))

    await inbox.start()
    await emit(inbox, 5)
    await began.wait()
    await inbox.stop(patience=0.05)
    again = Inbox(engine.url)

    @again.on("app", name="ship")
    async def ship_now(event: Event) -> None:
        seen.append((event.json()["n"], event.attempt))

    async with again.running():
        await again.drain()
        ended = await attempts(again)
        await is_sound(again)
    assert seen == [(n, 1) for n in range(5)]
    assert ended == [["done"]] * 5
