"""Keys that were seen elsewhere: taken over once, without inventing arrivals (R20, R68)."""

from __future__ import annotations

from oncehook.model import Item, Outcome, key_hash
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import DAY, intake, item, outcomes, record


def hashes(*keys: str) -> list[bytes]:
    return [key_hash("orders", (key,)) for key in keys]


async def outcome(store: Store, *items: Item) -> list[Outcome]:
    """All in one group."""
    return outcomes(await record(store, *map(intake, items)))


async def test_what_was_imported_is_a_duplicate_whatever_its_body(store: Store) -> None:
    assert await store.import_keys(1, hashes("a", "b", "b"), 30 * DAY, "olga") == 2
    assert await outcome(store, item("a", body=b"one")) == [Outcome.duplicate]
    assert await outcome(store, item("a", body=b"another")) == [Outcome.duplicate], "nobody knows the first body"
    assert await outcome(store, item("b", body=b"1"), item("b", body=b"2")) == [Outcome.duplicate] * 2
    assert await outcome(store, item("c")) == [Outcome.accepted]
    figures = (await store.figures()).by_source["orders"]
    assert (figures["received"], figures["duplicate"], figures["accepted"]) == (5, 4, 1), "an import is no arrival"


async def test_importing_again_changes_nothing(store: Store) -> None:
    [first] = await record(store, intake(item("known", body=b"x")))
    assert await store.import_keys(1, hashes("known", "new"), DAY, "olga") == 1
    assert await store.import_keys(1, hashes("known", "new"), DAY, "olga") == 0
    [again] = await record(store, intake(item("known", body=b"y")))
    assert (again.outcome, again.event_id) == (Outcome.conflict, first.event_id), "its body is known, and still counts"
    [line, _] = await store.audit_log()
    assert (line.actor, line.act, line.target, line.detail) == ("olga", "import", "orders", {"keys": 2, "new": 0})


async def test_imported_keys_have_a_window_too(store: Store, ground: Ground) -> None:
    assert await store.import_keys(1, hashes("a", "b"), 10.0, "olga") == 2
    ground.forward(11)
    assert await store.import_keys(1, hashes("a"), DAY, "olga") == 1, "what has lapsed is taken over"
    assert await outcome(store, item("a"), item("b")) == [Outcome.duplicate, Outcome.accepted]
