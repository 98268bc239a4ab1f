"""An account on events: no customer's event suppresses, delays or shows another's, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from oncehook import clock
from oncehook.model import (
    DeliveryStatus,
    EraseOrder,
    Filter,
    Mark,
    Options,
    Outcome,
    StoredDelivery,
    StoredEvent,
    account_digest,
    digest,
    key_hash,
    subject_key,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import CRM, dead, deliver, done, event_of, intake, item, keep, record, settle, take

ANNA, BEN = "42", "43"


def test_without_an_account_hashes_are_as_before() -> None:
    """Keys and queues of a store that was filled before there were accounts."""
    assert key_hash("orders", ["a"]) == digest(b"orders", b"a") == key_hash("orders", ["a"], None)
    assert key_hash("orders", ["a", "b"]) == digest(b"orders", b"a", b"b")
    assert subject_key("crm", "orders", "s") == digest(b"crm", b"orders", b"s")
    assert key_hash("orders", ["a"]).hex() == "a751ff1f007517ae4527abf852b9742b"
    assert subject_key("crm", "orders", "s").hex() == "02b43ec9c69f4d971c4a75c7a47dd576"


def test_no_parts_make_up_for_an_account() -> None:
    """An account is no further part: nobody can choose a key that is another account's, or nobody's."""
    hashes = {
        key_hash("orders", ["42", "a"]),
        key_hash("42", ["orders", "a"]),
        key_hash("orders", ["a"], "42"),
        key_hash("orders", ["a"], "43"),
        key_hash("orders", ["a"]),
        account_digest("", b"42", b"orders", b"a"),
        subject_key("orders", "a", "b", "42"),
        subject_key("orders", "a", "b"),
    }
    assert len(hashes) == 8


async def test_the_same_key_in_two_accounts_is_two_events(store: Store) -> None:
    copies = [item("k", account=whose) for whose in (ANNA, BEN, None, ANNA, BEN, None)]
    verdicts = await keep(store, *copies)
    assert [one.outcome for one in verdicts] == [Outcome.accepted] * 3 + [Outcome.duplicate] * 3
    assert [one.event_id for one in verdicts[3:]] == [one.event_id for one in verdicts[:3]]
    assert [(await event_of(store, one)).account for one in verdicts[:3]] == [ANNA, BEN, None]


async def test_the_same_key_in_two_accounts_in_one_group(store: Store) -> None:
    group = [intake(item("k", account=whose)) for whose in (ANNA, BEN, None, ANNA, BEN, None)]
    verdicts = await record(store, *group)
    assert [one.outcome for one in verdicts] == [Outcome.accepted] * 3 + [Outcome.duplicate] * 3


async def test_one_accounts_subject_does_not_hold_up_the_others(store: Store) -> None:
    for whose in (ANNA, BEN, None, ANNA):
        await keep(store, item(subject="s", to=[CRM], account=whose))
    leases = await take(store, 10)
    assert [one.event.account for one in leases] == [ANNA, BEN, None]
    await settle(store, *map(done, leases))
    assert [one.event.account for one in await take(store, 10)] == [ANNA]


async def test_the_next_of_a_subject_keeps_its_account(store: Store) -> None:
    """Promoted with the settlement, or coalesced: whose it is comes with it."""
    for _ in range(3):
        await keep(store, item(subject="s", to=[CRM], account=ANNA, options=Options.coalesce_any))
    [lease] = await take(store)
    assert lease.event.account == ANNA
    await settle(store, done(lease))
    assert [one.account for one in (await store.find_deliveries(Filter())).items] == [ANNA] * 3


async def test_queries_by_account(store: Store) -> None:
    for whose in (ANNA, BEN, None, ANNA):
        await keep(store, item(subject="s", to=[CRM], account=whose, marks=Mark.unmapped))

    async def accounts(filter: Filter) -> list[str | None]:
        events: Sequence[StoredEvent] = (await store.find_events(filter)).items  # type: ignore[assignment]
        deliveries: Sequence[StoredDelivery] = (await store.find_deliveries(filter)).items
        assert [one.account for one in events] == [one.account for one in deliveries]
        return [one.account for one in events]

    assert await accounts(Filter(account=ANNA)) == [ANNA, ANNA]
    assert await accounts(Filter(account="4")) == []
    assert await accounts(Filter(accounts=[ANNA, BEN])) == [ANNA, BEN, ANNA]
    assert await accounts(Filter(accounts=[])) == []
    assert await accounts(Filter(account=BEN, subject="s", source="orders")) == [BEN]
    assert await accounts(Filter(account=BEN, status=DeliveryStatus.pending)) == [BEN]
    assert await accounts(Filter(account=BEN, status=DeliveryStatus.dead)) == []
    assert await accounts(Filter(account="4%")) == [] == await accounts(Filter(account="4\n43"))
    (event,) = (await store.find_events(Filter(account=BEN))).items
    assert event.marks == Mark.unmapped


async def test_pages_of_an_account(store: Store) -> None:
    for number in range(10):
        await keep(store, item(to=[CRM], account=(ANNA, BEN)[number % 2]))
    for find in (store.find_events, store.find_deliveries):
        found, before = 0, None
        while True:
            page = await find(Filter(account=ANNA), before=before, limit=2)
            found += len(page.items)
            if (before := page.next) is None:
                break
        assert found == 5


async def test_neighbours_are_of_the_same_account(store: Store) -> None:
    for whose in (ANNA, BEN, None, ANNA, BEN):
        await keep(store, item(subject="s", to=[CRM], account=whose))
    for whose, count in ((ANNA, 2), (BEN, 2), (None, 1)):
        mine = [one for one in (await store.find_deliveries(Filter())).items if one.account == whose]
        assert [one.account for one in await store.subject_of(mine[0].id)] == [whose] * count


async def test_counts_of_accounts(store: Store) -> None:
    since = clock.now_utc() - timedelta(minutes=1)
    await keep(store, item("a", to=[CRM], account=ANNA), item("a", account=ANNA), item("a", account=ANNA, body=b"x"))
    await keep(store, item("a", source="payments", to=[CRM], account=ANNA), source_id=2)
    await keep(store, item("a", to=[CRM], account=BEN), item("a"))
    leases = await take(store, 10)
    await settle(store, *[dead(one) if one.event.account == BEN else done(one) for one in leases])
    figures = await store.figures_of([ANNA], since)
    counted = {"received": 3, "accepted": 1, "duplicate": 1, "conflict": 1}
    once = {"received": 1, "accepted": 1, "duplicate": 0, "conflict": 0}
    assert figures.by_source == {"orders": counted, "payments": once}
    assert (await store.figures_of([ANNA], since, ["payments"])).by_source == {"payments": once}
    assert (await store.figures_of([], since)).by_source == {}
    assert (await store.figures_of([ANNA], clock.now_utc() + timedelta(hours=2))).by_source == {}
    assert await store.count_of(None, accounts=[ANNA]) == {"crm": {DeliveryStatus.done: 2}}
    assert await store.count_of(["payments"], accounts=[ANNA, BEN]) == {"crm": {DeliveryStatus.done: 1}}
    assert await store.count_of(None, since, [BEN]) == {"crm": {DeliveryStatus.dead: 1}}
    assert await store.count_of(["orders"]) == {"crm": {DeliveryStatus.done: 1, DeliveryStatus.dead: 1}}
    assert [one.count for one in await store.causes(None, None, [BEN])] == [1]
    assert await store.causes(None, None, [ANNA]) == []
    assert await store.causes(None, ["payments"], [BEN]) == []


async def test_erasing_an_account_leaves_the_others(store: Store) -> None:
    """Everything of an account, or a subject within it; a second run finds nothing left."""
    for whose in (ANNA, BEN, None):
        await keep(store, item("k", subject="s", to=[CRM], account=whose), item("t", subject="t", account=whose))
    whole = EraseOrder(None, account=ANNA, actor="ann", reason="left us")
    part = EraseOrder("s", account=BEN, actor="ann", reason="letter 7", spelled="s")
    assert (await store.erasable(whole)).events == 2
    assert (await store.erasable(part)).events == 1
    assert (await store.erase(part)).events == 1
    assert (await store.erase(whole)).events == 2
    assert (await store.erase(whole)).events == 0 == (await store.erasable(whole)).events
    kept = {(one.account, one.key) for one in (await store.find_events(Filter())).items if one.key}
    assert kept == {(BEN, "t"), (None, "k"), (None, "t")}
    assert len((await store.find_events(Filter(account=ANNA))).items) == 2
    acts = [(one.act, one.target) for one in await store.audit_log()]
    assert ("erase", f"account {ANNA}") in acts
    verdicts = await keep(store, item("k", account=ANNA), item("k", account=BEN))
    assert [one.outcome for one in verdicts] == [Outcome.duplicate] * 2


async def test_a_batch_of_two_accounts_is_emptied_with_one_of_them(store: Store) -> None:
    one, other = item("a", subject="s", account=ANNA), item("b", subject="s", account=BEN)
    await record(store, intake(one, other, raw=b"both"))
    erased = await store.erase(EraseOrder(None, account=ANNA, actor="ann", reason="left us"))
    assert (erased.batches, erased.shared_batches) == (1, 1)


async def test_deliveries_of_an_account_are_found_by_its_index(store: Store, ground: Ground) -> None:
    await deliver(store, "s")
    if ground.engine == "sqlite":
        plan = ground.sql(
            "EXPLAIN QUERY PLAN SELECT id FROM events WHERE account = '1' AND id < x'ff' ORDER BY id DESC"
        )
        assert "events_account" in str(plan)
    else:
        [(made,)] = ground.sql(
            "SELECT indexdef FROM pg_indexes WHERE indexname = 'events_account' AND schemaname = current_schema"
        )
        assert "(account, id)" in made
