"""The plans of SQLite's statements (R44): by an index, whatever waits; a lease sorts nothing."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import SqliteStore, admin, queue, read, upkeep


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    yield store
    await store.close()


LEASING = {
    "due": queue.DUE,
    "next value": queue.NEXT_FAIR,
    "due of a value": queue.DUE_FAIR,
    "leased": queue.LEASED,
    "places": queue.PLACES,
    "carried": queue.CARRIED,
    "head": queue.HEAD,
    "newest of any": queue.NEWEST_OF_ANY,
    "last covered": queue.LAST_COVERED,
    "take": queue.TAKE.text,
    "set aside": queue.SET_ASIDE.text,
    "prolong": queue.PROLONG.text,
}
SETTLING = {
    "held": queue.HELD.text,
    "gone": queue.GONE.text,
    "finished": queue.FINISHED.text,
    "failed": queue.FAILED.text,
    "later": queue.LATER.text,
    "next": queue.NEXT,
    "promoted": queue.PROMOTED.text,
    "covered of any": queue.COVERED_OF_ANY,
    "covered of type": queue.COVERED_OF_TYPE,
    "coalesced": queue.COALESCED.text,
    "replayed": queue.REPLAYED.text,
    "finish replay": queue.FINISH_REPLAY,
    "newest of type": queue.NEWEST_OF_TYPE,
    "open items": admin.OPEN,
    "replayed delivery": admin.DELIVERY,
}
LOOKING = {
    **{f"number of events by {way}": one.SELECT for way, one in read.EVENTS.items()},
    **{f"number of events by {way}, closely": one.SELECT for way, one in read.EVENTS_CLOSELY.items()},
    **{f"deliveries by {way}": one.LIST for way, one in read.DELIVERIES.items()},
    **{f"deliveries by {way}, body": one.LIST for way, one in read.DELIVERIES_CLOSELY.items()},
    **{f"all deliveries by {way}": one.SELECT for way, one in read.DELIVERIES.items()},
    **{f"all deliveries by {way}, body": one.SELECT for way, one in read.DELIVERIES_CLOSELY.items()},
    **{f"events by {way}": one.LIST for way, one in read.EVENTS.items()},
    **{f"events by {way}, body": one.LIST for way, one in read.EVENTS_CLOSELY.items()},
    **{f"far by {way}": one.FAR for way, one in read.DELIVERIES.items()},
    **{f"far events by {way}": one.FAR for way, one in read.EVENTS.items()},
    **{f"weight by {way}": one.WEIGH for way, one in read.DELIVERIES.items()},
    **{f"weight of events by {way}": one.WEIGH for way, one in read.EVENTS.items()},
    "attempts": read.ATTEMPTS,
    "deliveries of an event": read.DELIVERIES_OF_EVENT,
    "earlier": read.EARLIER,
    "later": read.LATER,
    "replay": read.REPLAY + "WHERE r.id = ?",
    "old events": upkeep.OLD_EVENTS,
}
# What may be walked from end to end: our own constants, what another step has bounded, and the few rows under way.
WALKED = {"clause", "member", "walk", "n", "v", "f", "w", "CONSTANT", "(subquery-", "1", "2", "3"}

_NUMBERS = re.compile(r"\d+")


class Anything(dict[str, Any]):
    def __missing__(self, key: str) -> None:
        return None


def plan(store: SqliteStore, statement: str) -> list[str]:
    parameters: Any = Anything() if ":" in statement else [None] * (statement.count("?") + 12)
    with closing(sqlite3.connect(store.path)) as connection:
        read.teach(connection, Cipher())
        for count in range(len(parameters) + 1) if isinstance(parameters, list) else [0]:
            try:
                given = parameters[:count] if isinstance(parameters, list) else parameters
                return [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement, given)]
            except sqlite3.ProgrammingError:
                continue
    raise AssertionError("cannot be explained")


def scanned(steps: list[str]) -> list[str]:
    """Tables that are walked from end to end."""
    return [
        step
        for step in steps
        if step.startswith("SCAN") and "heads_leased" not in step and step.split()[1] not in WALKED
        if "CONSTANT ROW" not in step and "(subquery" not in step
    ]


@pytest.mark.parametrize("name", [*LEASING, *SETTLING, *LOOKING])
async def test_every_access_is_by_an_index(inbox: SqliteStore, name: str) -> None:
    steps = plan(inbox, {**LEASING, **SETTLING, **LOOKING}[name])
    assert any("SEARCH" in step or "heads_leased" in step for step in steps)
    assert scanned(steps) == []


@pytest.mark.parametrize("name", LEASING)
async def test_a_lease_sorts_nothing(inbox: SqliteStore, name: str) -> None:
    assert not [step for step in plan(inbox, LEASING[name]) if "TEMP B-TREE" in step]


@pytest.mark.parametrize("way", ["all", "unfinished", "replay"])
async def test_a_list_sorts_nothing(inbox: SqliteStore, way: str) -> None:
    for text in (read.DELIVERIES[way].LIST, read.EVENTS[way].LIST):
        assert not [step for step in plan(inbox, text) if "TEMP B-TREE" in step]


async def test_who_asks_for_no_body_and_excludes_nothing_does_not_pay_for_it(inbox: SqliteStore) -> None:
    """Looking into bodies and leaving out comes behind a plan that stays as it is, and is in no other."""
    deliveries, by_body = read.DELIVERIES.values(), read.DELIVERIES_CLOSELY.values()
    for texts, saying_texts in (
        ([one.LIST for one in deliveries], [one.LIST for one in by_body]),
        ([one.SELECT for one in deliveries], [one.SELECT for one in by_body]),
        ([one.LIST for one in read.EVENTS.values()], [one.LIST for one in read.EVENTS_CLOSELY.values()]),
    ):
        for text, saying_text in zip(texts, saying_texts, strict=True):
            plain, saying = plan(inbox, text), plan(inbox, saying_text)
            rest = iter(_NUMBERS.sub("", step) for step in saying)
            assert all(_NUMBERS.sub("", step) in rest for step in plain)  # in this order
            assert not [step for step in plain if "VIRTUAL TABLE" in step]


async def test_what_is_not_finished_has_an_index_of_its_own(inbox: SqliteStore) -> None:
    """A dead letter among a million done ones is found without walking past them."""
    way = read.DELIVERIES["unfinished"]
    for text in (way.LIST, way.SELECT, way.FAR, read.EVENTS["unfinished"].LIST):
        assert any("deliveries_unfinished (status=?" in step for step in plan(inbox, text))
    assert any("deliveries_unfinished (status=?" in step for step in plan(inbox, read.DEAD))


async def test_what_came_again_is_found_without_walking_past_what_did_not(inbox: SqliteStore) -> None:
    for text in (read.EVENTS["copies"].LIST, read.EVENTS["copies"].SELECT, read.EVENTS["copies"].FAR):
        steps = plan(inbox, text)
        assert any("copies USING PRIMARY KEY (event_id>? AND event_id<?)" in step for step in steps)
        assert not [step for step in steps if "TEMP B-TREE" in step]


async def test_the_plan_test_sees_a_scan(inbox: SqliteStore) -> None:
    assert scanned(plan(inbox, "SELECT 1 FROM heads WHERE fence = ?"))
    assert scanned(plan(inbox, "SELECT 1 FROM deliveries WHERE status = 'dead'"))
    assert "USE TEMP B-TREE FOR ORDER BY" in plan(inbox, "SELECT 1 FROM heads ORDER BY fence")


async def test_the_outlook_looks_at_the_front_of_each_queue(inbox: SqliteStore) -> None:
    steps = plan(inbox, queue.OUTLOOK)
    assert len([step for step in steps if "heads USING COVERING INDEX heads_due" in step]) == 5
    assert scanned(steps) == ["SCAN d"]  # the one that is asked about


async def test_what_has_become_due_is_found_by_its_time(inbox: SqliteStore) -> None:
    assert any("heads_next (due_at>?" in step for step in plan(inbox, queue.BECAME_DUE))
    assert any("destination_state_open (open_until>?" in step for step in plan(inbox, queue.BECAME_OPEN))
