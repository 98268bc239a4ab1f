"""PostgreSQL: when a further group is begun beside one that is being written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from oncehook.model import Outcome
from oncehook.store.base import Pending
from oncehook.store.postgres import PostgresStore, writer
from tests.store.making import intake, item, keep
from tests.store.place import Place
from tests.waiting import until


@asynccontextmanager
async def stuck(place: Place) -> AsyncIterator[tuple[PostgresStore, list[Pending]]]:
    """A store that writes a group of four which cannot go on: somebody holds a key that is in it. Then it goes on."""
    store = await place.open()
    await keep(store, item("held"))
    with psycopg.connect(place.server.url) as foreign, foreign.transaction(force_rollback=True):
        foreign.execute(f"SELECT * FROM {place.schema}.keys FOR UPDATE")
        four = send(store, "held", "a", "b", "c")
        await until(lambda: at_work(place) == 1)
        yield store, four
        assert not any(one.future.done() for one in four)
    assert await accepted(four) == [False, True, True, True]


def send(store: PostgresStore, *keys: str) -> list[Pending]:
    """All in one go of the loop, so that they are one group."""
    return [store.record(intake(item(key))) for key in keys]


def at_work(place: Place) -> int:
    """Intake statements that are under way on the server."""
    mine = f"application_name = '{place.schema}' AND state = 'active'"
    [(count,)] = place.sql(f"SELECT count(*) FROM pg_stat_activity WHERE {mine} AND query LIKE '%FROM intake(%'")
    return int(count)


async def accepted(arrivals: list[Pending]) -> list[bool]:
    verdicts = [await one.future for one in arrivals]
    return [verdict.outcome is Outcome.accepted for (verdict,) in verdicts]


@pytest.fixture
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LATE", 60.0)


@pytest.mark.usefixtures("nothing_is_late")
async def test_another_group_is_begun_for_as_many_as_are_being_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement has its price, whatever is in it: a handful behind a large group waits for that one's end."""
    monkeypatch.setattr(writer, "FEW", 1)
    async with stuck(place) as (store, four):
        few = send(store, "d", "e", "f")
        await asyncio.sleep(0.1)
        assert at_work(place) == 1
        assert not any(one.future.done() for one in [*four, *few])
        enough = send(store, "g")
        assert await accepted([*few, *enough]) == [True] * 4


@pytest.mark.usefixtures("nothing_is_late")
async def test_another_group_is_not_begun_for_a_few(place: Place) -> None:
    async with stuck(place) as (store, four):
        few = send(store, *(f"few-{n}" for n in range(writer.FEW - 1)))
        await asyncio.sleep(0.1)
        assert at_work(place) == 1
        assert not any(one.future.done() for one in [*four, *few])
        assert all(await accepted([*few, *send(store, "enough")]))


async def test_nobody_waits_for_a_group_that_takes_too_long(place: Place) -> None:
    """R9"""
    async with stuck(place) as (store, _):
        assert await accepted(send(store, "d")) == [True]
    assert store._writer._writing == 0  # it was counted out once, though it was late and came to its end


@pytest.mark.usefixtures("nothing_is_late")
async def test_what_waits_behind_a_group_is_written_at_the_end(place: Place) -> None:
    """Too few to be begun for, and nothing more comes."""
    async with stuck(place) as (store, _):
        few = send(store, "d")
        closing = asyncio.create_task(store.close())
        assert await accepted(few) == [True]
    await closing
