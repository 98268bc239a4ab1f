"""Lists: deliveries and events found by anything that is known of them, page by page, and the numbers beside them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from oncehook.model import (
    Category,
    DeliveryStatus,
    Evidence,
    Filter,
    Mark,
    Options,
    Outcome,
    Settle,
    Settlement,
    new_id,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    MAIL,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    finish,
    intake,
    item,
    keep,
    look,
    record,
    release,
    replay,
    retry,
    settle,
    take,
    take_one,
)

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


async def found(store: Store, **conditions: Any) -> list[bytes]:
    """All deliveries that match, over all pages."""
    seen: list[bytes] = []
    before = None
    for _ in range(1000):
        page = await store.find_deliveries(Filter(**conditions), before=before, limit=7)
        assert len(page.items) <= 7
        seen += [one.id for one in page.items]
        before = page.next
        if before is None:
            return seen
    raise AssertionError("the list never ends")


async def found_events(store: Store, **conditions: Any) -> list[bytes]:
    seen: list[bytes] = []
    before = None
    for _ in range(1000):
        page = await store.find_events(Filter(**conditions), before=before, limit=7)
        assert len(page.items) <= 7
        seen += [one.id for one in page.items]
        before = page.next
        if before is None:
            return seen
    raise AssertionError("the list never ends")


class Zoo:
    """One delivery for each thing a filter may ask for, by name."""

    def __init__(self) -> None:
        self.ids: dict[str, bytes] = {}

    def names(self, ids: list[bytes]) -> list[str]:
        by_id = {one: name for name, one in self.ids.items()}
        return sorted(by_id[one] for one in ids)

    async def fill(self, store: Store) -> None:
        add = self.ids
        add["done"] = await deliver_one(store, "s1", type_="order.paid")
        await finish(store)
        add["404"] = await deliver_one(store, "s2", type_="order.paid", source="payments")
        await settle(store, dead(await take_one(store), error="HTTP 404", status=404))
        add["unknown"] = await deliver_one(store, "100% s_3", type_="invoice[1]")
        lease = await take_one(store)
        await settle(store, Settlement(lease, Settle.dead, category=Category.unknown, evidence=Evidence(None, "Boom")))
        add["discarded"] = await deliver_one(store, type_="order.x", to=MAIL)
        await settle(store, dead(await take_one(store, to=2), error="HTTP 410", status=410))
        await store.discard(Filter(ids=[add["discarded"]]), "ann", "no use")
        add["stale"] = await deliver_one(store, "s4", rank=1, options=Options.latest_wins)
        await settle(store, done(await take_one(store), note="stale"))
        add["retrying"] = await deliver_one(store, "s5")
        for _ in range(3):
            await settle(store, retry(await take_one(store), error="HTTP 503", status=503))
        await settle(store, release(await take_one(store), 9999.0))
        add["replayed"] = await deliver_one(store, "s6")
        await settle(store, dead(await take_one(store), error="Bang", status=500))
        self.replay_id = (await replay(store, add["replayed"])).id
        await settle(store, done(await take_one(store)))
        [verdict] = await keep(store, item("the-key", to=[CRM], subject="s7"))
        add["leased"] = (await take_one(store)).delivery.id
        assert add["leased"][:14] == verdict.event_id[:14]
        add["pending"] = await deliver_one(store, "s5")


@pytest.fixture
async def zoo(store: Store) -> Zoo:
    made = Zoo()
    await made.fill(store)
    return made


ALL = ["404", "discarded", "done", "leased", "pending", "replayed", "retrying", "stale", "unknown"]

QUESTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ALL),
    ({"source": "payments"}, ["404"]),
    ({"source": "nobody"}, []),
    ({"destination": "mail"}, ["discarded"]),
    ({"destination": "nobody"}, []),
    ({"status": DeliveryStatus.pending}, ["pending", "retrying"]),
    ({"status": DeliveryStatus.leased}, ["leased"]),
    ({"status": DeliveryStatus.done}, ["done", "replayed", "stale"]),
    ({"status": DeliveryStatus.dead}, ["404", "unknown"]),
    ({"status": DeliveryStatus.discarded}, ["discarded"]),
    ({"type": "order.paid"}, ["404", "done"]),
    ({"type": "order.*"}, [one for one in ALL if one != "unknown"]),
    ({"type": "order.?"}, ["discarded"]),
    ({"type": "*[1]"}, ["unknown"]),
    ({"type": "order%"}, []),
    ({"type": "order_paid"}, []),
    ({"type": "*"}, ALL),
    ({"subject": "s5"}, ["pending", "retrying"]),
    ({"subject": "s"}, []),
    ({"key": "the-key"}, ["leased"]),
    ({"key": "the"}, []),
    ({"category": Category.permanent}, ["404", "discarded"]),
    ({"category": Category.unknown}, ["unknown"]),
    ({"category": Category.transient}, ["retrying"]),
    ({"note": "stale"}, ["stale"]),
    ({"note": "coalesced"}, []),
    ({"is_replayed": True}, ["replayed"]),
    ({"is_replayed": True, "status": DeliveryStatus.done}, ["replayed"]),
    ({"is_replayed": True, "status": DeliveryStatus.dead}, []),
    ({"is_replayed": True, "subject": "s6"}, ["replayed"]),
    ({"is_replayed": True, "text": "s_"}, []),
    ({"code": "404"}, ["404"]),
    ({"code": "4xx"}, ["404", "discarded"]),
    ({"code": "503"}, ["retrying"]),
    ({"attempts_above": 2}, ["retrying"]),
    ({"attempts_above": 3}, []),
    ({"attempts_below": 1}, ["pending", "stale"]),
    ({"attempts_above": 0, "attempts_below": 2}, ["404", "discarded", "done", "leased", "replayed", "unknown"]),
    ({"text": "boom"}, ["unknown"]),
    ({"text": "the-k"}, ["leased"]),
    ({"text": "100% s_"}, ["unknown"]),
    ({"text": "%"}, ["unknown"]),
    ({"text": "invoice["}, ["unknown"]),
    ({"text": "nowhere"}, []),
    ({"since": LONG_AGO}, ALL),
    ({"until": LONG_AGO}, []),
    ({"status": DeliveryStatus.dead, "source": "orders"}, ["unknown"]),
    ({"status": DeliveryStatus.dead, "subject": "s2", "code": "4xx", "text": "404"}, ["404"]),
    ({"subject": "s5", "attempts_above": 0}, ["retrying"]),
]


async def test_every_field_of_a_filter(store: Store, zoo: Zoo) -> None:
    """Of deliveries, and of events: each event of the zoo has one delivery, so it matches exactly when that does."""
    events = {(await look(store, one)).event_id: one for one in zoo.ids.values()}
    wrong = []
    for question, answer in QUESTIONS:
        deliveries = zoo.names(await found(store, **question))
        of_events = zoo.names([events[one] for one in await found_events(store, **question)])
        if deliveries != answer or of_events != answer:
            wrong.append((question, answer, deliveries, of_events))
    assert wrong == []


async def test_by_ids_event_and_replay(store: Store, zoo: Zoo) -> None:
    some = [zoo.ids["done"], zoo.ids["leased"], new_id()]
    assert zoo.names(await found(store, ids=some)) == ["done", "leased"]
    assert await found(store, ids=[]) == []
    event_id = (await look(store, zoo.ids["404"])).event_id
    assert zoo.names(await found(store, event_id=event_id)) == ["404"]
    assert await found_events(store, event_id=event_id) == [event_id]
    assert await found(store, event_id=new_id()) == []
    assert zoo.names(await found(store, replay_id=zoo.replay_id)) == ["replayed"]
    assert await found_events(store, replay_id=zoo.replay_id) == [(await look(store, zoo.ids["replayed"])).event_id]
    assert await found(store, replay_id=new_id()) == []
    assert zoo.names(await found(store, replay_id=zoo.replay_id, is_replayed=True)) == ["replayed"]
    assert await found(store, replay_id=new_id(), is_replayed=True) == []
    assert zoo.names(await found(store, ids=some, status=DeliveryStatus.leased)) == ["leased"]


async def test_by_the_time_it_was_received(store: Store) -> None:
    made = []
    for _ in range(5):
        made.append(await deliver_one(store))
        await asyncio.sleep(0.01)
    times = [(await look(store, one)).received_at for one in made]
    assert await found(store, since=times[2]) == made[:1:-1]
    assert await found(store, until=times[2]) == made[1::-1]
    assert await found(store, since=times[1], until=times[3]) == made[2:0:-1]
    assert len(await found_events(store, since=times[1], until=times[3])) == 2
    assert await found(store, since=times[4] + timedelta(seconds=60)) == []


async def test_newest_first_page_by_page_while_more_arrive(store: Store) -> None:
    """Without gaps and without repeats."""
    made = await deliver(store, *[None] * 20)
    await dead_letters_of(store)
    seen: list[bytes] = []
    before = None
    while True:
        page = await store.find_deliveries(Filter(status=DeliveryStatus.dead), before=before, limit=6)
        seen += [one.id for one in page.items]
        await deliver(store, None)
        await dead_letters_of(store)
        if page.next is None:
            break
        before = page.next
    assert seen == made[::-1]
    newest = await store.find_deliveries(Filter(), limit=1)
    assert newest.items[0].id not in made


async def dead_letters_of(store: Store) -> None:
    await settle(store, *[dead(lease) for lease in await take(store)])


async def test_events_page_by_page_while_more_arrive(store: Store) -> None:
    verdicts = await keep(store, *[item(f"k{n}") for n in range(20)])
    seen: list[bytes] = []
    before = None
    while True:
        page = await store.find_events(Filter(), before=before, limit=6)
        seen += [one.id for one in page.items]
        await keep(store, item())
        if page.next is None:
            break
        before = page.next
    assert seen == [verdict.event_id for verdict in reversed(verdicts)]


async def test_an_end_that_falls_on_a_page(store: Store) -> None:
    made = await deliver(store, *[None] * 14)
    assert await found(store) == made[::-1]
    assert len(await found_events(store)) == 14
    page = await store.find_deliveries(Filter(), before=made[0], limit=5)
    assert (list(page.items), page.next) == ([], None)


async def test_a_scarce_match_is_found_behind_many_others(store: Store) -> None:
    scarce = await deliver_one(store, type_="scarce")
    await deliver(store, *[None] * 300)
    assert await found(store, type="scarce") == [scarce]


async def test_a_delivery_in_a_list_is_as_whole_as_a_single_one(store: Store, zoo: Zoo) -> None:
    page = await store.find_deliveries(Filter(), limit=50)
    assert page.next is None
    for one in page.items:
        assert one == await store.get_delivery(one.id)


async def test_a_delivery_says_what_it_is_about(store: Store) -> None:
    await keep(store, item("k1", subject="s", to=[MAIL], type_="a.b"))
    [one] = (await store.find_deliveries(Filter())).items
    assert (one.source, one.destination, one.type, one.key, one.subject) == ("orders", "mail", "a.b", "k1", "s")
    event = await store.get_event(one.event_id)
    assert event is not None
    assert one.received_at == event.received_at
    assert (one.replay_id, one.last_replay_at, one.settled_at, one.reason) == (None, None, None, None)


# -- events ------------------------------------------------------------------------------------


async def test_a_listed_event_says_what_became_of_it(store: Store) -> None:
    [verdict] = await keep(store, item("k", subject="s", to=[CRM, MAIL], body=b"12345", marks=Mark.emitted))
    assert (await keep(store, item("k", subject="s", body=b"12345")))[0].outcome is Outcome.duplicate
    await take_one(store)
    await settle(store, done(await take_one(store, to=2), note="stale"))
    [listed] = (await store.find_events(Filter())).items
    assert (listed.id, listed.source, listed.type) == (verdict.event_id, "orders", "order.created")
    assert (listed.key, listed.subject, listed.size, listed.copies) == ("k", "s", 5, 2)
    assert listed.marks == Mark.emitted
    assert sorted((one.destination, one.status, one.note, one.is_replayed) for one in listed.deliveries) == [
        ("crm", DeliveryStatus.leased, None, False),
        ("mail", DeliveryStatus.done, "stale", False),
    ]
    event = await store.get_event(verdict.event_id)
    assert event is not None
    assert (listed.received_at, listed.event_at) == (event.received_at, event.event_at)


async def test_a_listed_event_says_which_of_its_deliveries_were_replayed(store: Store) -> None:
    made = await deliver_one(store, "s")
    await settle(store, dead(await take_one(store)))
    [[before]] = [event.deliveries for event in (await store.find_events(Filter())).items]
    assert (before.id, before.run, before.replay_id, before.is_replayed) == (made, 1, None, False)
    asked = await replay(store, made)
    [[again]] = [event.deliveries for event in (await store.find_events(Filter())).items]
    assert (again.status, again.run, again.replay_id) == (DeliveryStatus.pending, 2, asked.id)
    assert again.is_replayed


async def test_conditions_on_deliveries_must_be_met_by_one_of_them(store: Store) -> None:
    """Dead at crm and done at mail is not "dead at mail"."""
    [verdict] = await keep(store, item(to=[CRM, MAIL]))
    await settle(store, dead(await take_one(store)))
    await settle(store, done(await take_one(store, to=2)))
    assert await found_events(store, status=DeliveryStatus.dead, destination="mail") == []
    assert await found_events(store, status=DeliveryStatus.dead, destination="crm") == [verdict.event_id]
    assert await found_events(store, status=DeliveryStatus.done, destination="mail") == [verdict.event_id]
    assert len(await found_events(store, source="orders")) == 1


async def test_an_event_for_nobody_is_listed_too(store: Store) -> None:
    [verdict] = await keep(store, item("k"))
    assert await found_events(store) == [verdict.event_id]
    assert await found_events(store, key="k") == [verdict.event_id]
    assert await found_events(store, status=DeliveryStatus.done) == []
    assert await found(store) == []


# -- numbers -----------------------------------------------------------------------------------


async def test_the_levels(ground: Ground, store: Store, zoo: Zoo) -> None:
    levels = await store.levels()
    crm, mail = levels["crm"], levels["mail"]
    assert (crm.pending, crm.leased, crm.done, crm.dead, crm.discarded) == (3, 1, 3, 2, 0)
    assert (mail.pending, mail.leased, mail.done, mail.dead, mail.discarded) == (0, 0, 0, 0, 1)
    assert (crm.paused_at, crm.failures, crm.open_until) == (None, 0, None)
    assert mail.oldest_due is None


async def test_every_destination_has_a_level(store: Store) -> None:
    levels = await store.levels()
    assert {name: (level.pending, level.oldest_due) for name, level in levels.items()} == {
        "crm": (0, None),
        "mail": (0, None),
    }


async def test_the_oldest_due(ground: Ground, store: Store) -> None:
    await deliver_one(store)
    ground.forward(40)
    await deliver_one(store)
    oldest = (await store.levels())["crm"].oldest_due
    assert oldest is not None
    assert 40 <= oldest < 60
    await settle(store, *[retry(lease, 500.0) for lease in await take(store)])
    assert (await store.levels())["crm"].oldest_due is None


async def test_counts_since(store: Store, zoo: Zoo) -> None:
    everything = await store.count_since(LONG_AGO)
    assert {status: n for status, n in everything.items() if n} == {
        DeliveryStatus.pending: 2,
        DeliveryStatus.leased: 1,
        DeliveryStatus.done: 3,
        DeliveryStatus.dead: 2,
        DeliveryStatus.discarded: 1,
    }
    since = (await look(store, zoo.ids["leased"])).received_at
    assert {status: n for status, n in (await store.count_since(since)).items() if n} == {
        DeliveryStatus.pending: 1,
        DeliveryStatus.leased: 1,
    }
    assert not any((await store.count_since(since + timedelta(hours=1))).values())


async def test_the_cause_is_what_was_said_and_not_its_status(store: Store) -> None:
    await deliver_one(store)
    await settle(store, dead(await take_one(store), error="unauthorized 190: The token has expired.", status=401))
    assert [one.cause for one in await store.causes()] == ["unauthorized 190: The token has expired."]


async def test_causes(store: Store) -> None:
    for error, status in (("HTTP 404", 404), ("Boom: at line 7\nmore\nstill more", None), ("HTTP 404", 404)):
        await deliver_one(store)
        await settle(store, dead(await take_one(store), error=error, status=status))
    for error in ("Boom: at line 7\nother lines", "Boom: at line 7"):
        await deliver_one(store)
        await settle(store, dead(await take_one(store), error=error))
    last = await deliver_one(store, to=MAIL)
    await settle(store, dead(await take_one(store, to=2), error=None, status=500))
    causes = await store.causes()
    assert [(one.destination, one.cause, one.count) for one in causes] == [
        ("crm", "Boom: at line 7", 3),
        ("crm", "HTTP 404", 2),
        ("mail", "HTTP 500", 1),
    ]
    assert causes[2].sample == last
    assert all(one.first_at <= one.last_at for one in causes)
    assert causes[0].first_at < causes[0].last_at
    assert [one.destination for one in await store.causes("mail")] == ["mail"]
    assert await store.causes("nobody") == []
    await store.discard(Filter(destination="mail"), "ann", "")
    assert len(await store.causes()) == 2


async def test_replays_newest_first_in_pages(ground: Ground, store: Store) -> None:
    made = await dead_letters(store, *[None] * 5)
    ordered = [(await replay(store, one)).id for one in made]
    page = await store.find_replays(limit=3)
    assert [one.id for one in page.items] == ordered[:1:-1]
    assert page.next is not None
    rest = await store.find_replays(before=page.next, limit=3)
    assert ([one.id for one in rest.items], rest.next) == (ordered[1::-1], None)
    for one in page.items:
        assert one == await store.get_replay(one.id)
    assert await store.get_replay(new_id()) is None


async def test_what_is_there_is_seen_by_one_who_only_reads(ground: Ground, store: Store, zoo: Zoo) -> None:
    """The look verbs work on a store that was opened for reading."""
    reader = ground.make()
    await reader.open(write=False)
    try:
        assert zoo.names(await found(reader)) == ALL
        assert len(await found_events(reader)) == len(ALL)
        assert (await reader.levels())["crm"].dead == 2
        assert len(await reader.causes()) == 2
        assert (await reader.plan_replay(Filter(), force=False)).total == 3
        assert len((await reader.find_replays()).items) == 1
        assert await reader.audit_log() != []
        assert len(await reader.subject_of(zoo.ids["pending"])) == 2
        assert await reader.workers() == []
        assert await reader.crossings() == {}
    finally:
        await reader.close()


async def test_an_event_of_a_split_request_is_listed_like_any_other(store: Store) -> None:
    split = [item(f"k{n}", to=[CRM], body=b"%d" % n) for n in range(3)]
    await record(store, intake(*split, raw=b"raw"))
    assert len(await found_events(store, destination="crm")) == 3
