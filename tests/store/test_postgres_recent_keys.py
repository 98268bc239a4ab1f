"""A copy travels without its body when its key was seen to stand; when that turns out wrong, nothing is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from oncehook.model import Outcome, Verdict
from oncehook.store.cipher import Cipher
from oncehook.store.postgres import PostgresStore
from oncehook.store.postgres.intake import IntakeRows
from oncehook.store.postgres.writer import RecentKeys
from tests.store.making import CRM, MAIL, event_of, intake, item, keep, record
from tests.store.place import Place


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    await made.remove()


@pytest.fixture
async def store(place: Place) -> PostgresStore:
    return await place.open()


async def test_a_copy_is_sent_without_body_and_deliveries() -> None:
    first, copy, other = (intake(item("k", body=body, to=[CRM])) for body in (b"a", b"a", b"b"))
    familiar = RecentKeys()
    assert familiar.among([first]) == frozenset()
    familiar.note([first], [[_accepted(first.items[0].event_id)]])
    assert familiar.among([first, copy, other]) == {first.items[0].event_id, copy.items[0].event_id}
    bare = IntakeRows([copy], Cipher(), familiar.among([copy])).parameters(0)
    whole = IntakeRows([copy], Cipher()).parameters(0)
    assert (bare[14].packed != whole[14].packed, bare[29].packed != whole[29].packed) == (True, True)  # type: ignore[union-attr]
    assert bare[13].packed == whole[13].packed  # type: ignore[union-attr]  # the head is kept


async def test_a_familiar_key_that_is_gone_is_accepted_whole(place: Place, store: PostgresStore) -> None:
    await keep(store, item("k", body=b"a", to=[CRM]))
    place.sql("DELETE FROM keys")
    [again, _] = await keep(store, item("k", body=b"a", to=[CRM, MAIL]), item("new"))
    assert again.outcome is Outcome.accepted
    assert (await event_of(store, again)).body == b"a"
    assert place.sql("SELECT count(*) FROM deliveries") == [(3,)]


async def test_a_familiar_key_that_stands_for_another_body_keeps_the_conflict(
    place: Place, store: PostgresStore
) -> None:
    """It lapsed, and another process took it over for another body."""
    rival = await place.open()
    await keep(store, item("k", body=b"a", keep=60))
    place.sql("UPDATE keys SET expires_at = now() - interval '1 second'")
    [taken] = await keep(rival, item("k", body=b"b"))
    verdicts = await record(store, intake(item("k", body=b"a")), intake(item("k", body=b"a")))
    assert [verdict.outcome for verdict in verdicts] == [Outcome.conflict] * 2
    assert [arrival.body for arrival in await store.arrivals_of(taken.event_id)] == [b"a", b"a"]


async def test_a_lapsed_familiar_key_is_taken_over_whole(place: Place, store: PostgresStore) -> None:
    [first] = await keep(store, item("k", body=b"a", keep=60))
    place.sql("UPDATE keys SET expires_at = now() - interval '1 second'")
    [second] = await keep(store, item("k", body=b"a", to=[CRM]))
    assert (second.outcome, second.event_id != first.event_id) == (Outcome.accepted, True)
    assert (await event_of(store, second)).body == b"a"
    assert place.sql("SELECT count(*) FROM deliveries") == [(1,)]


async def test_only_so_many_are_remembered() -> None:
    familiar = RecentKeys(most=3)
    seen = [intake(item(f"k{n}")) for n in range(5)]
    for one in seen:
        familiar.note([one], [[_accepted(one.items[0].event_id)]])
    assert familiar.among(seen) == {one.items[0].event_id for one in seen[2:]}


def _accepted(event_id: bytes) -> Verdict:
    return Verdict(Outcome.accepted, event_id)
