"""PostgreSQL: when a further group is begun beside one that is being written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg

from oncehook.model import Outcome
from oncehook.store.base import Pending, Timeouts
from oncehook.store.postgres import PostgresStore, writer
from tests.store.making import intake, item, keep
from tests.store.place import Place, patient
from tests.waiting import until

PATIENT = patient(group=60.0)
"""No group is late."""


@asynccontextmanager
async def stuck(
    place: Place, timeouts: Timeouts = PATIENT, many: int = 4
) -> AsyncIterator[tuple[PostgresStore, list[Pending]]]:
    """A store that writes a group which cannot go on: somebody holds a key that is in it. Then it goes on."""
    store = await place.open(timeouts=timeouts)
    await keep(store, item("held"))
    with psycopg.connect(place.server.url) as foreign, foreign.transaction(force_rollback=True):
        foreign.execute(f"SELECT * FROM {place.schema}.keys FOR UPDATE")
        group = send(store, "held", *(f"group-{n}" for n in range(1, many)))
        await until(lambda: at_work(place) == 1)
        yield store, group
        assert not any(one.future.done() for one in group)
    assert await accepted(group) == [False] + [True] * (many - 1)


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


async def test_another_group_is_begun_for_as_many_as_are_being_written(place: Place) -> None:
    """A statement has its price, whatever is in it: fewer behind a large group wait for that one's end."""
    many = writer.FEW + 4
    async with stuck(place, many=many) as (store, group):
        fewer = send(store, *(f"fewer-{n}" for n in range(many - 1)))
        await asyncio.sleep(0.1)
        assert at_work(place) == 1
        assert not any(one.future.done() for one in [*group, *fewer])
        enough = send(store, "enough")
        assert await accepted([*fewer, *enough]) == [True] * many


async def test_another_group_is_not_begun_for_a_few(place: Place) -> None:
    async with stuck(place) as (store, four):
        few = send(store, *(f"few-{n}" for n in range(writer.FEW - 1)))
        await asyncio.sleep(0.1)
        assert at_work(place) == 1
        assert not any(one.future.done() for one in [*four, *few])
        assert all(await accepted([*few, *send(store, "enough")]))


async def test_nobody_waits_for_a_group_that_takes_too_long(place: Place) -> None:
    """R9"""
    async with stuck(place, patient(group=Timeouts().group)) as (store, _):
        assert await accepted(send(store, "d")) == [True]
    assert store._writer._writing == 0  # it was counted out once, though it was late and came to its end


async def test_what_waits_behind_a_group_is_written_at_the_end(place: Place) -> None:
    """Too few to be begun for, and nothing more comes."""
    async with stuck(place) as (store, _):
        few = send(store, "d")
        closing = asyncio.create_task(store.close())
        assert await accepted(few) == [True]
    await closing
