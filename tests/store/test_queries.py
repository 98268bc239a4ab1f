"""The query language on both engines: every word and its opposite, alternatives, counts, and acts by query."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from oncehook import query
from oncehook.model import DeliveryId, DeliveryStatus, EventId, Filter, ReplayId, Total
from oncehook.store import filters
from oncehook.store.base import Store
from tests.store.making import CRM, MAIL, deliver_one, item, keep, replay_all
from tests.store.test_lists import Zoo, found, found_events, zoo

__all__ = ["zoo"]

NOW = datetime.now(UTC)
WORDS = (
    *("source:payments", "type:order.*", "status:dead", "status:pending", "status:leased", "subject:s1", "key:the-key"),
    *("destination:crm", "to:mail", "attempts:3", "attempts:>0", "attempts:<=1", "code:404", "code:5xx"),
    *("category:unknown", "note:stale", "arrivals:1", "arrivals:>1", "outcome:duplicate", "outcome:conflict"),
    *("is:replayed", "since:1h", "until:1h", "Boom", "body.id:1", "body.id:>1", "body.name:x"),
)


def meant(text: str) -> Filter:
    return query.parse(text, NOW)


async def named(zoo: Zoo, store: Store, text: str) -> list[str]:
    return zoo.names([one for f in meant(text).alternatives() for one in await found(store, **fields(f))])


def fields(filter: Filter) -> dict[str, object]:
    return {name: getattr(filter, name) for name in filter.__struct_fields__}


async def all_of(store: Store, text: str) -> list[bytes]:
    """Every matching delivery, over all pages."""
    return await found(store, **fields(meant(text)))


async def events_of(store: Store, text: str) -> list[bytes]:
    return await found_events(store, **fields(meant(text)))


async def come_again(store: Store) -> None:
    """Two events that came again: once the same, once with another body."""
    await keep(store, item("twice", to=[CRM]))
    await keep(store, item("twice", to=[CRM]))
    await keep(store, item("odd", to=[CRM]))
    await keep(store, item("odd", body=b'{"id": 2, "name": "x"}', to=[CRM]))


@pytest.mark.parametrize("word", WORDS)
async def test_a_word_and_its_opposite_part_everything(zoo: Zoo, store: Store, word: str) -> None:
    await come_again(store)
    every = set(await all_of(store, ""))
    those, others = await all_of(store, word), await all_of(store, f"-{word}")
    assert set(those) | set(others) == every
    assert not set(those) & set(others)
    assert len(those) + len(others) == len(every)  # each once, over all pages


async def test_ids_can_be_left_out(zoo: Zoo, store: Store) -> None:
    one, every = zoo.ids["404"], await all_of(store, "")
    event = EventId(one[:13] + bytes(3))
    for text in (f"-id:{DeliveryId(one)}", f"-{DeliveryId(one)}", f"-event:{event}", f"-{event}"):
        assert await all_of(store, text) == [each for each in every if each != one]
    replayed = await all_of(store, f"-replay:{ReplayId(zoo.replay_id)}")
    assert replayed == [each for each in every if each != zoo.ids["replayed"]]
    two = f"-id:{DeliveryId(one)} -id:{DeliveryId(zoo.ids['done'])}"
    assert len(await all_of(store, two)) == len(every) - 2


async def test_several_values_can_be_left_out(zoo: Zoo, store: Store) -> None:
    left = await named(zoo, store, "-status:done -status:dead -code:4xx -code:503")
    assert left == ["leased", "pending"]


async def test_either_is_the_union(zoo: Zoo, store: Store) -> None:
    dead, stale = await all_of(store, "status:dead"), await all_of(store, "note:stale")
    both = await all_of(store, "status:dead OR note:stale OR status:dead source:payments")
    assert both == sorted({*dead, *stale}, reverse=True)
    within = await all_of(store, "(status:dead OR note:stale) source:payments")
    assert zoo.names(within) == ["404"]


async def test_pages_of_alternatives_miss_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each search stops early: a merged page ends where the first of them stopped."""
    made = [await deliver_one(store, f"s{n % 3}", type_=f"t{n % 4}") for n in range(40)]
    text = "type:t0 OR subject:s1 OR type:t3 subject:s2"
    wanted = [one for n, one in enumerate(made) if n % 4 == 0 or n % 3 == 1 or (n % 4 == 3 and n % 3 == 2)]
    for looked_at in (3, 8, 20_000):
        for module in ("sqlite", "postgres"):
            monkeypatch.setattr(f"oncehook.store.{module}.read.LOOKED_AT", looked_at)
        assert await all_of(store, text) == sorted(wanted, reverse=True)
        events = await events_of(store, text)
        assert events == sorted({EventId(one[:13] + bytes(3)) for one in wanted}, reverse=True)


async def test_events_that_came_again_are_found(store: Store) -> None:
    await keep(store, item("once", to=[CRM]))
    await come_again(store)
    twice, odd = [
        (await keep(store, item(key, to=[CRM], body=body)))[0].event_id
        for key, body in (("twice", b'{"id": 1}'), ("odd", b'{"id": 1}'))
    ]
    assert await events_of(store, "arrivals:>1") == [odd, twice]
    assert await events_of(store, "arrivals:>=3 outcome:conflict") == [odd]
    assert await events_of(store, "outcome:duplicate -outcome:conflict") == [twice]
    assert len(await events_of(store, "arrivals:1")) == len(await events_of(store, "-arrivals:>1")) == 1
    page = await store.find_events(meant("arrivals:>1"))
    assert [(one.copies, one.has_conflict) for one in page.items] == [(3, True), (3, False)]


async def test_an_event_without_deliveries_meets_only_what_is_negated(store: Store) -> None:
    await keep(store, item("alone"))
    await deliver_one(store)
    assert len(await events_of(store, "-status:done")) == 2
    assert len(await events_of(store, "-status:pending")) == 1
    assert len(await events_of(store, "-status:done status:pending")) == 1
    assert await events_of(store, "status:pending -status:pending") == []


async def test_one_delivery_must_meet_all_conditions(store: Store) -> None:
    """An event for two destinations: a negated word is about the same delivery as the others."""
    await keep(store, item("two", to=[CRM, MAIL]))
    assert len(await events_of(store, "status:pending -to:crm")) == 1
    assert await events_of(store, "to:crm -to:crm") == []


async def test_unreadable_bodies_meet_what_is_negated(store: Store) -> None:
    await keep(store, item("text", body=b"no JSON", to=[CRM]))
    await keep(store, item("json", body=b'{"a": 1}', to=[CRM]))
    assert len(await events_of(store, "-body.a:1")) == 1
    assert len(await events_of(store, "-body.a:2")) == 2
    assert len(await events_of(store, "-body.a:2 body.a:>0")) == 1


# -- numbers -----------------------------------------------------------------------------------


async def test_matches_are_counted(zoo: Zoo, store: Store) -> None:
    await come_again(store)
    for text in (
        "",
        "status:dead",
        "-status:done",
        "arrivals:>1",
        "status:dead OR note:stale",
        "body.id:1",
        "-body.id:1",
    ):
        assert await store.count_events(meant(text)) == Total(len(await events_of(store, text)))
    assert await store.count_events(Filter(ids=(DeliveryId(zoo.ids["404"]),))) == Total(1)
    assert await store.count_events(Filter(ids=())) == Total(0)


async def test_a_count_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(12):
        await deliver_one(store)
    for module in ("sqlite", "postgres"):
        monkeypatch.setattr(f"oncehook.store.{module}.read.MOST_COUNTED", 10)
    assert await store.count_events(Filter()) == Total(10, is_exact=False)
    for module in ("sqlite", "postgres"):
        monkeypatch.setattr(f"oncehook.store.{module}.read.MOST_COUNTED", filters.MOST_COUNTED)
        monkeypatch.setattr(f"oncehook.store.{module}.read.LOOKED_AT", 5)
    assert await store.count_events(meant("-status:done")) == Total(5, is_exact=False)


# -- acts --------------------------------------------------------------------------------------


async def test_replays_and_discards_understand_the_same_words(zoo: Zoo, store: Store) -> None:
    text = "status:dead -code:404 OR status:discarded OR status:dead body.id:7"
    plan = await store.plan_replay(meant(text), force=False)
    assert (plan.total, dict(plan.by_status)) == (2, {DeliveryStatus.dead: 1, DeliveryStatus.discarded: 1})
    made = await replay_all(store, meant(text))
    assert made.planned == 2
    assert await store.discard(meant("status:dead -code:5xx (code:404 OR note:stale)"), "ann", "why") == 1
    assert zoo.names(await all_of(store, "status:discarded")) == ["404", "discarded"]
