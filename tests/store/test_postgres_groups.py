"""PostgreSQL: when a further group is begun beside one that is being written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from oncehook.model import Outcome
from oncehook.store.base import Pending
from oncehook.store.postgres import PostgresStore, commit, opening
from tests.store.making import intake, item, keep
from tests.store.place import Place, until


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that meets a lock stays one group, however slow this machine is."""
    monkeypatch.setattr(opening, "PATIENCE", "20s")


@contextmanager
def held_up(place: Place) -> Iterator[None]:
    """Somebody holds the key "held", so that whatever is in its group waits."""
    with psycopg.connect(place.server.url) as foreign, foreign.transaction(force_rollback=True):
        foreign.execute(f"SELECT * FROM {place.schema}.keys FOR UPDATE")
        yield


def send(store: PostgresStore, *keys: str) -> list[Pending]:
    """All in one go of the loop, so that they are one group."""
    return [store.record(intake(item(key))) for key in keys]


def at_work(place: Place) -> int:
    """Intake statements that are under way on the server."""
    mine = f"application_name = '{place.schema}' AND state = 'active'"
    [(count,)] = place.sql(f"SELECT count(*) FROM pg_stat_activity WHERE {mine} AND query LIKE '%unnest($1::uuid[]%'")
    return int(count)


async def accepted(arrivals: list[Pending]) -> list[bool]:
    verdicts = [await asyncio.wait_for(one.future, 20) for one in arrivals]
    return [verdict.outcome is Outcome.accepted for (verdict,) in verdicts]


async def test_another_group_is_begun_for_as_many_as_are_being_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement has its price, whatever is in it: a handful behind a large group waits for that one's end."""
    monkeypatch.setattr(commit, "LATE", 60.0)
    store = await place.open()
    await keep(store, item("held"))
    with held_up(place):
        first = send(store, "held", "a", "b", "c")
        await until(lambda: at_work(place) == 1)
        few = send(store, "d", "e", "f")
        await asyncio.sleep(0.1)
        assert at_work(place) == 1
        assert not any(one.future.done() for one in [*first, *few])
        enough = send(store, "g")
        assert await accepted([*few, *enough]) == [True] * 4
    assert await accepted(first) == [False, True, True, True]


async def test_nobody_waits_for_a_group_that_takes_too_long(place: Place) -> None:
    """R9"""
    store = await place.open()
    await keep(store, item("held"))
    with held_up(place):
        first = send(store, "held", "a", "b", "c")
        await until(lambda: at_work(place) == 1)
        assert await accepted(send(store, "d")) == [True]
        assert not any(one.future.done() for one in first)
    assert await accepted(first) == [False, True, True, True]


async def test_what_waits_behind_a_group_is_written_at_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few to be begun for, and nothing more comes."""
    monkeypatch.setattr(commit, "LATE", 60.0)
    store = await place.open()
    await keep(store, item("held"))
    with held_up(place):
        first = send(store, "held", "a", "b", "c")
        await until(lambda: at_work(place) == 1)
        few = send(store, "d")
        closing = asyncio.create_task(store.close())
        assert await accepted(few) == [True]
    await closing
    assert await accepted(first) == [False, True, True, True]
