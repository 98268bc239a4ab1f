"""What is kept beside the store: references to large bodies, files of events, and events that leave and come back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from oncehook.model import DeliveryId, EraseOrder, EventId, Filter, Outcome, StoredMedia, fair_hash
from oncehook.store.base import Store
from oncehook.store.cipher import PLAIN, Reference
from tests.store.conftest import Ground
from tests.store.making import CRM, DAY, dead, done, finish, intake, item, record, replay, settle, take, take_one

LARGE = b'{"big": true}' * 10
OTHER = b'{"big": false}' * 10


def refer(content: bytes) -> Reference:
    return Reference.to(content, len(content))


async def test_a_reference_takes_the_place_of_a_body_and_tells_its_size(store: Store, ground: Ground) -> None:
    large = item("a", body=LARGE)
    large.reference = refer(LARGE)
    await record(store, intake(large), intake(item("b")))
    kept = await store.get_event(large.event_id)
    assert kept is not None
    assert kept.is_apart
    assert Reference(kept.body).digest == refer(LARGE).digest
    [listed] = (await store.find_events(Filter(ids=None, source="orders", key="a"))).items
    assert listed.size == len(LARGE)
    assert [bytes(body) for (body,) in ground.sql("SELECT body FROM events WHERE key = 'a'")] == [refer(LARGE)]


async def test_nobody_can_send_a_reference(store: Store, ground: Ground) -> None:
    forged = item("a", body=bytes(refer(LARGE)))
    await record(store, intake(forged))
    kept = await store.get_event(forged.event_id)
    assert kept is not None
    assert not kept.is_apart
    assert kept.body == forged.body
    assert bytes(ground.sql("SELECT body FROM events")[0][0]) == PLAIN + forged.body
    assert await store.find_references([forged.event_id]) == {forged.event_id: False}


async def test_rows_that_refer_to_objects_are_found(store: Store) -> None:
    first, other, split = item("a", body=LARGE), item("a", body=OTHER), intake(item("b"), item("c"), raw=LARGE)
    first.reference, other.reference, split.raw_reference = refer(LARGE), refer(OTHER), refer(LARGE)
    await record(store, intake(first))
    verdicts = await record(store, intake(other), split)
    assert verdicts[0].outcome is Outcome.conflict
    nobody = EventId(b"\x01" * 16)
    asked = [first.event_id, other.event_id, split.arrival_id, split.items[0].event_id, nobody]
    assert await store.find_references(asked) == {
        first.event_id: True, other.event_id: True, split.arrival_id: True, split.items[0].event_id: False,
    }  # fmt: skip
    rows = await store.list_references(b"", 10)
    assert dict(rows) == {
        first.event_id: refer(LARGE), other.event_id: refer(OTHER), split.arrival_id: refer(LARGE),
    }  # fmt: skip
    assert await store.list_references(rows[0][0], 10) == rows[1:]


async def test_an_erased_event_refers_to_nothing(store: Store) -> None:
    large = item("a", body=LARGE, subject="anna")
    large.reference = refer(LARGE)
    await record(store, intake(large))
    await store.keep_media(large.event_id, StoredMedia(0, b"d" * 32, 3, "image/png"))
    await store.erase(EraseOrder("anna", actor="me", reason="asked", spelled="anna"), 10)
    assert await store.find_references([large.event_id]) == {large.event_id: False}
    assert await store.media_of(large.event_id) == []
    assert not await store.keep_media(large.event_id, StoredMedia(0, b"d" * 32, 3, "image/png"))


# -- media -------------------------------------------------------------------------------------


async def test_a_file_of_an_event_is_noted_once_per_place(store: Store, ground: Ground) -> None:
    one = item("a")
    await record(store, intake(one))
    image = StoredMedia(0, b"a" * 32, 100, "image/png", "photo.png")
    assert await store.keep_media(one.event_id, StoredMedia(0, b"z" * 32, 1, "text/plain"))
    assert await store.keep_media(one.event_id, image)
    assert await store.keep_media(one.event_id, voice := StoredMedia(1, b"b" * 32, 200, "audio/ogg"))
    assert await store.media_of(one.event_id) == [image, voice]
    assert await store.find_media([b"a" * 32, b"b" * 32, b"z" * 32]) == {b"a" * 32, b"b" * 32}
    assert not await store.keep_media(EventId(b"\x01" * 16), image)
    ground.forward(2 * DAY)
    await store.prune({}, DAY)
    assert ground.sql("SELECT count(*) FROM media")[0][0] == 0


# -- archive -----------------------------------------------------------------------------------


async def test_what_may_be_pruned_is_what_is_pruned(store: Store, ground: Ground) -> None:
    ground.stand_still()
    kept = [item(str(n), subject=str(n), to=[CRM]) for n in range(4)]
    await record(store, *(intake(one) for one in kept))
    leases = await take(store, limit=4)
    by_event = {lease.event.id: lease for lease in leases}
    await settle(store, done(by_event[kept[0].event_id]), done(by_event[kept[1].event_id]))
    await settle(store, dead(by_event[kept[2].event_id]))
    assert await store.find_prunable(1, DAY, b"", 10) == ([], None)
    ground.forward(2 * DAY)
    young = item("young")
    await record(store, intake(young))
    found, after = await store.find_prunable(1, DAY, b"", 10)
    assert (found, after) == ([kept[0].event_id, kept[1].event_id], None)
    assert (await store.find_prunable(1, DAY, b"", 1)) == ([kept[0].event_id], kept[0].event_id)
    everything = [*(one.event_id for one in kept), young.event_id]
    # Whatever is named, only what may go goes.
    assert (await store.prune({}, DAY, only=[kept[1].event_id, kept[2].event_id])).events == 1
    assert (await store.prune({}, DAY, only=())).events == 0
    assert (await store.prune({}, DAY, only=everything)).events == 1
    assert [one.id for one in (await store.find_events(Filter())).items] == [
        young.event_id, kept[3].event_id, kept[2].event_id,
    ]  # fmt: skip


async def test_archived_events_come_back_as_they_were(store: Store, ground: Ground) -> None:
    ground.stand_still()
    happened = datetime(2026, 11, 1, tzinfo=UTC)
    one = item("a", subject="anna", to=[CRM], rank=3, rank_scope="x", event_at=happened, account="42")
    await record(store, intake(one))
    await finish(store)
    before = await store.get_event(one.event_id)
    [delivery] = (await store.find_deliveries(Filter(event_id=one.event_id))).items
    archived = await store.read_archivable([one.event_id, EventId(b"\x01" * 16)])
    assert [event.id for event in archived] == [str(EventId(one.event_id))]
    ground.forward(40 * DAY)
    assert (await store.prune({}, DAY)).events == 1
    assert await store.get_event(one.event_id) is None

    assert await store.restore(archived, 5 * DAY, "me") == 1
    assert await store.restore(archived, 5 * DAY, "me") == 0
    assert [entry.act for entry in await store.audit_log(limit=2)] == ["restore", "restore"]
    assert await store.get_event(one.event_id) == before
    assert [event.id for event in (await store.find_events(Filter(account="42"))).items] == [one.event_id]
    [back] = (await store.find_deliveries(Filter(event_id=one.event_id))).items
    assert (back.id, back.status, back.destination, back.run) == (delivery.id, delivery.status, "crm", 1)
    # Old as it is, it stays for as long as it was asked for.
    assert (await store.prune({}, DAY)).events == 0
    assert await store.find_prunable(1, DAY, b"", 10) == ([], None)
    ground.forward(6 * DAY)
    assert (await store.prune({}, DAY)).events == 1


async def test_what_came_back_can_be_replayed(store: Store, ground: Ground) -> None:
    one = item("a", subject="anna", to=[CRM], fair="shop", account="42")
    await record(store, intake(one))
    await finish(store)
    archived = await store.read_archivable([one.event_id])
    ground.forward(40 * DAY)
    await store.prune({}, DAY)
    await store.restore(archived, 5 * DAY, "me")
    await replay(store, DeliveryId.of(one.event_id, CRM[1]), force=True)
    assert ground.sql("SELECT fair FROM heads") == [(fair_hash("shop"),)]
    lease = await take_one(store, fair=True)
    assert (lease.event.id, lease.event.account) == (one.event_id, "42")
    assert lease.event.body == one.body
    await settle(store, done(lease))


@pytest.mark.parametrize("again", [False, True])
async def test_a_store_that_never_had_it_takes_it_too(store: Store, ground: Ground, again: bool) -> None:
    one = item("a", to=[CRM])
    await record(store, intake(one))
    await finish(store)
    [archived] = await store.read_archivable([one.event_id])
    ground.forward(40 * DAY)
    await store.prune({}, DAY)
    if again:
        await record(store, intake(item("a", to=[CRM])))
        await finish(store)
    assert await store.restore([archived], DAY, "me") == 1
