"""Later arrivals on SQLite: how they hang together, how many rows they leave, and when they go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oncehook.model import Outcome
from oncehook.store.base import KEPT_ARRIVALS, Store
from tests.store.conftest import SqliteGround
from tests.store.making import CRM, DAY, enrolled, event_of, finish, intake, item, keep, record


@pytest.fixture
def ground(tmp_path: Path) -> SqliteGround:
    return SqliteGround(tmp_path)


@pytest.fixture
async def store(ground: SqliteGround) -> AsyncIterator[Store]:
    made = ground.make()
    await made.open()
    await enrolled(made)
    yield made
    await made.close()
    ground.remove()


def rows(ground: SqliteGround, table: str) -> int:
    return int(ground.sql(f"SELECT count(*) FROM {table}")[0][0])


async def prune(store: Store, keep_for: float = DAY) -> None:
    while await store.prune({}, keep_for, 500):
        pass


async def test_a_storm_on_one_key_leaves_few_rows(ground: SqliteGround, store: Store) -> None:
    """R57: at most twice what is shown of each kind, whether copies come one by one or by the hundred."""
    [first] = await keep(store, item("k", body=b"a"))
    most = 0
    for n in range(130):
        await record(store, *[intake(item("k", body=b"a" if (n + m) % 3 else b"b")) for m in range(1 + n // 20)])
        most = max(most, rows(ground, "arrivals"))
    assert KEPT_ARRIVALS * 2 < most <= KEPT_ARRIVALS * 4
    kept = [arrival.outcome for arrival in await store.arrivals_of(first.event_id)]
    assert (kept.count(Outcome.duplicate), kept.count(Outcome.conflict)) == (KEPT_ARRIVALS, KEPT_ARRIVALS)


async def test_of_many_copies_in_one_group_only_those_are_written_that_stay(ground: SqliteGround, store: Store) -> None:
    [first] = await keep(store, item("k"))
    copies = [item("k") for _ in range(KEPT_ARRIVALS + 30)]
    await record(store, *map(intake, copies))
    assert (await event_of(store, first)).copies == len(copies) + 1
    kept = [arrival.id for arrival in await store.arrivals_of(first.event_id)]
    assert kept == [copy.event_id for copy in copies[-KEPT_ARRIVALS:]]
    assert rows(ground, "arrivals") == KEPT_ARRIVALS
    assert ground.sql("SELECT value FROM marks WHERE name = 'seq'") == [(KEPT_ARRIVALS,)]  # no other was ever written


async def test_a_copy_does_not_touch_its_key(ground: SqliteGround, store: Store) -> None:
    [first] = await keep(store, item("k"))
    before = ground.sql("SELECT * FROM keys")
    await keep(store, item("k"))
    await keep(store, item("k", body=b"another"))
    assert ground.sql("SELECT * FROM keys") == before
    assert (await event_of(store, first)).copies == 3


async def test_copies_are_counted_beyond_the_key(ground: SqliteGround, store: Store) -> None:
    """The key's window is shorter than the event's life: the event still knows how often it came."""
    [first] = await keep(store, item("k", keep=60, to=[CRM]))
    await keep(store, item("k"))
    ground.forward(120)
    await prune(store)
    assert rows(ground, "keys") == 0
    assert (await event_of(store, first)).copies == 2
    assert len(await store.arrivals_of(first.event_id)) == 1
    await finish(store)
    ground.forward(2 * DAY)
    await prune(store)
    assert (rows(ground, "copies"), rows(ground, "arrivals")) == (0, 0)


async def test_a_key_that_is_taken_over_leaves_each_event_its_own(ground: SqliteGround, store: Store) -> None:
    [first] = await keep(store, item("k", keep=60))
    await keep(store, item("k"))
    ground.forward(120)
    [second, *_] = await keep(store, item("k"), item("k"), item("k"))
    assert second.event_id != first.event_id
    assert ((await event_of(store, first)).copies, (await event_of(store, second)).copies) == (2, 3)
    assert (len(await store.arrivals_of(first.event_id)), len(await store.arrivals_of(second.event_id))) == (1, 2)


@pytest.mark.parametrize("comes_again", [False, True], ids=["forgotten", "taken over"])
async def test_what_outlives_its_event_goes_with_its_key(ground: SqliteGround, store: Store, comes_again: bool) -> None:
    [first] = await keep(store, item("k", keep=10 * DAY))
    ground.forward(2 * DAY)
    await prune(store)
    assert await store.get_event(first.event_id) is None
    await keep(store, item("k"))
    assert (rows(ground, "copies"), rows(ground, "arrivals")) == (1, 1)
    ground.forward(10 * DAY)
    if comes_again:
        [second] = await keep(store, item("k"))
        assert second.outcome is Outcome.accepted
    else:
        await prune(store)
    assert (rows(ground, "copies"), rows(ground, "arrivals")) == (0, 0)
