"""Sweep: what has outlived its time goes, in short batches, and nothing else; sums stay; each alarm is told once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from oncehook.model import (
    AttemptOutcome,
    DeliveryStatus,
    Filter,
    Options,
    Outcome,
    Priority,
    Pruned,
    ReplayState,
    StoredWorker,
)
from oncehook.store.base import Store
from oncehook.store.sqlite import upkeep as sqlite_upkeep
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    DAY,
    MAIL,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    done,
    finish,
    ids,
    intake,
    is_lost,
    item,
    keep,
    look,
    opened,
    outcomes,
    record,
    replay,
    replay_all,
    retry,
    settle,
    take,
    take_one,
)


async def prune(store: Store, keep_for: float = DAY, limit: int = 500, **sources: float) -> Pruned:
    """Prune until nothing more is found; the sum of the batches."""
    by_source = {{"orders": 1, "payments": 2}[name]: seconds for name, seconds in sources.items()}
    total = Pruned()
    for _ in range(200):
        batch = await store.prune(by_source, keep_for, limit)
        if not batch:
            return total
        total = Pruned(
            total.events + batch.events,
            total.keys + batch.keys,
            total.batches + batch.batches,
            total.others + batch.others,
        )
    raise AssertionError("pruning never ends")


def count(ground: Ground, table: str) -> int:
    return int(ground.sql(f"SELECT count(*) FROM {table}")[0][0])


# -- prune -------------------------------------------------------------------------------------


async def test_what_is_young_stays(ground: Ground, store: Store) -> None:
    await deliver(store, None, "s")
    await finish(store)
    ground.forward(DAY - 60)
    assert not await prune(store)
    assert count(ground, "events") == 2


async def test_what_is_done_and_old_goes_with_everything_about_it(ground: Ground, store: Store) -> None:
    """R67: event, deliveries, attempts and later arrivals."""
    await keep(store, item("k", subject="s", to=[CRM, MAIL]))
    await keep(store, item("k", subject="s", body=b"another"))
    await finish(store)
    await finish(store, to=2)
    ground.forward(DAY + 60)
    assert (await prune(store)).events == 1
    for table in ("events", "deliveries", "attempts", "arrivals", "heads"):
        assert count(ground, table) == 0, table
    counted = await store.figures()
    assert counted.by_source["orders"]["purged"] == 1
    assert (counted.by_destination["crm"]["purged"], counted.by_destination["mail"]["purged"]) == (1, 1)


async def test_keys_stay_for_their_window(ground: Ground, store: Store) -> None:
    """R20: the event is gone, and its copy is still a duplicate; after the window it is new."""
    [first] = await keep(store, item("k", to=[CRM], keep=30 * DAY))
    await finish(store)
    ground.forward(10 * DAY)
    pruned = await prune(store)
    assert (pruned.events, pruned.keys) == (1, 0)
    [again] = await keep(store, item("k", to=[CRM]))
    assert (again.outcome, again.event_id) == (Outcome.duplicate, first.event_id)
    assert await take(store) == []
    [other] = await keep(store, item("k", to=[CRM], body=b"another"))
    assert other.outcome is Outcome.conflict
    ground.forward(21 * DAY)
    assert (await prune(store)).keys == 1
    assert (count(ground, "keys"), count(ground, "arrivals")) == (0, 0)
    assert outcomes(await keep(store, item("k", to=[CRM]))) == [Outcome.accepted]


async def test_what_is_not_finished_stays(ground: Ground, store: Store) -> None:
    """R67: pending, waiting for a retry, behind another, leased, dead, held; however old."""
    stay = await dead_letters(store, None)
    stay += await deliver(store, None, "s", "s")
    leases = await take(store)
    await settle(store, retry(leases[0], 1e9))
    stay += await deliver(store, None, to=MAIL)
    ground.forward(1000 * DAY)
    assert (await prune(store)).events == 0
    for one in stay:
        assert (await look(store, one)).status in ("pending", "leased", "dead")
        assert await store.get_event((await look(store, one)).event_id) is not None
    assert len(await store.attempts_of(stay[0])) == 1


async def test_an_event_stays_while_one_of_its_deliveries_does(ground: Ground, store: Store) -> None:
    await keep(store, item(to=[CRM, MAIL]))
    await finish(store)
    [lease] = await take(store, to=2)
    await settle(store, dead(lease))
    ground.forward(10 * DAY)
    assert not await prune(store)
    assert count(ground, "deliveries") == 2
    assert await store.discard(Filter(ids=[lease.delivery.id]), "ann", "") == 1
    assert (await prune(store)).events == 1
    assert count(ground, "deliveries") == 0


async def test_a_dead_letter_that_was_replayed_to_done_goes(ground: Ground, store: Store) -> None:
    """R40, R67: acknowledged means discarded, or replayed to done."""
    [made] = await dead_letters(store, None)
    ground.forward(10 * DAY)
    assert not await prune(store)
    await replay(store, made)
    assert (await prune(store)).events == 0
    await finish(store)
    assert (await prune(store)).events == 1
    assert await store.get_delivery(made) is None


async def test_an_event_for_nobody_goes_too(ground: Ground, store: Store) -> None:
    await keep(store, item("k"), item())
    ground.forward(10 * DAY)
    assert (await prune(store)).events == 2


async def test_each_source_has_its_own_time(ground: Ground, store: Store) -> None:
    await deliver(store, None)
    await deliver(store, None, source="payments")
    await finish(store)
    ground.forward(10 * DAY)
    assert (await prune(store, 20 * DAY, orders=5 * DAY)).events == 1
    assert [event.source for event in (await store.find_events(Filter())).items] == ["payments"]
    assert (await prune(store, 5 * DAY, payments=20 * DAY)).events == 0
    assert (await prune(store, 5 * DAY)).events == 1


async def test_batches_are_short(ground: Ground, store: Store) -> None:
    await deliver(store, *[None] * 25)
    await finish(store)
    stays = await deliver_one(store)
    ground.forward(10 * DAY)
    sizes = []
    while (batch := await store.prune({}, DAY, 10)).events:
        sizes.append(batch.events)
        assert [check.name for check in await store.check() if not check.ok] == []
    assert sum(sizes) == 25
    assert max(sizes) <= 10
    assert (await look(store, stays)).status is DeliveryStatus.pending


async def test_what_stays_does_not_stand_in_the_way(ground: Ground, store: Store) -> None:
    """Old dead letters in front, more of them than a batch holds: those behind them are reached all the same."""
    await dead_letters(store, *[None] * 30)
    await deliver(store, *[None] * 5)
    await finish(store)
    ground.forward(10 * DAY)
    assert (await prune(store, limit=10)).events == 5
    assert count(ground, "events") == 30


async def test_the_raw_request_goes_with_its_last_event(ground: Ground, store: Store) -> None:
    split = [item(f"k{n}", to=[CRM]) for n in range(2)]
    await record(store, intake(*split, raw=b"raw"))
    leases = await take(store)
    await settle(store, done(leases[0]), dead(leases[1]))
    ground.forward(10 * DAY)
    assert (await prune(store)).events == 1
    assert count(ground, "batches") == 1
    await store.discard(Filter(), "ann", "")
    pruned = await prune(store)
    assert (pruned.events, pruned.batches) == (1, 1)
    assert count(ground, "batches") == 0


async def test_a_raw_request_of_a_later_arrival_stays_while_its_event_does(ground: Ground, store: Store) -> None:
    await keep(store, item("k", to=[CRM]))
    await record(store, intake(item("k", body=b"another"), raw=b"raw"))
    ground.forward(10 * DAY)
    await prune(store)
    assert count(ground, "batches") == 1
    await finish(store)
    await prune(store)
    assert count(ground, "batches") == 0


async def test_many_sources_have_their_turn_until_nothing_is_left(
    ground: Ground, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy one among very many is not left behind after each batch."""
    monkeypatch.setattr(sqlite_upkeep, "_SOURCES", 1)
    await keep(store, *[item() for _ in range(5)])
    await keep(store, *[item(source="payments") for _ in range(5)], source_id=2)
    ground.forward(2 * DAY)
    assert (await prune(store, limit=2)).events == 10


async def test_a_replay_of_what_was_pruned_meanwhile(ground: Ground, store: Store) -> None:
    made = await deliver(store, None, None)
    await finish(store)
    ground.forward(10 * DAY)
    ordered = await replay_all(store, force=True, expected=2)
    await prune(store)
    await store.feed_replays()
    await finish(store, priority=Priority.replay)
    await store.feed_replays()
    shown = await store.get_replay(ordered.id)
    assert shown is not None
    assert (shown.state, shown.done + shown.skipped) == (ReplayState.done, 2)
    assert len(made) == 2


async def test_pruning_beside_a_replay(ground: Ground, store: Store) -> None:
    """STORAGE.md 9.12: whichever comes first, no delivery is left without its event."""
    made = await deliver(store, *[None] * 20)
    await finish(store)
    ground.forward(10 * DAY)
    replays = [replay(store, one, force=True) for one in made]
    prunes = [store.prune({}, DAY, 3) for _ in range(8)]
    await asyncio.gather(*replays, *prunes, return_exceptions=True)
    await prune(store)
    left = [one for one in made if await store.get_delivery(one) is not None]
    assert sorted(ids(await take(store))) == left
    assert count(ground, "events") == len(left)


async def test_ranks_replays_and_audit_lines_do_not_stay_for_ever(ground: Ground, store: Store) -> None:
    await deliver_one(store, "s", rank=3, options=Options.latest_wins)
    await settle(store, done(await take_one(store)))
    [made] = await dead_letters(store, None)
    ordered = await replay(store, made)
    await finish(store)
    await store.feed_replays()
    assert count(ground, "ranks") == 1
    ground.forward(3 * 365 * DAY)
    pruned = await prune(store)
    assert pruned.others > 0
    assert count(ground, "ranks") == 0
    assert await store.get_replay(ordered.id) is None
    assert count(ground, "replay_items") == 0


# -- roll up -----------------------------------------------------------------------------------


async def test_rolling_up_keeps_the_sums(ground: Ground, store: Store) -> None:
    for number in range(4):
        await deliver(store, None, None)
        if number % 2:
            await keep(store, item("k"))
        await finish(store, limit=1)
        ground.forward(61)
    before = await store.figures()
    rows = count(ground, "counters")
    assert await store.roll_up() == 0
    ground.forward(4 * DAY)
    await deliver_one(store)
    assert await store.roll_up() > 0
    assert count(ground, "counters") < rows
    assert await store.roll_up() == 0
    assert [check.name for check in await store.check() if not check.ok] == []
    after = await store.figures()
    assert after.by_source["orders"] == {
        **before.by_source["orders"],
        "received": before.by_source["orders"]["received"] + 1,
        "accepted": before.by_source["orders"]["accepted"] + 1,
    }
    assert after.by_destination["crm"]["done"] == before.by_destination["crm"]["done"] == 8


async def test_a_chart(ground: Ground, store: Store) -> None:
    began = datetime.now(UTC)
    await deliver(store, None, None)
    await finish(store)
    ground.forward(600)
    await deliver_one(store, source="payments")
    flows = await store.series(began - timedelta(minutes=5), 60.0)
    assert sum(n for _, n in flows["accepted"]) == 3
    assert sum(n for _, n in flows["succeeded"]) == 2
    assert len({at for at, n in flows["accepted"] if n}) == 2
    assert all(points == sorted(points) for points in flows.values())
    only = await store.series(began - timedelta(minutes=5), 60.0, source="payments")
    assert sum(n for _, n in only["accepted"]) == 1
    assert "succeeded" not in only or sum(n for _, n in only["succeeded"]) == 0
    of_crm = await store.series(began - timedelta(minutes=5), 60.0, destination="crm")
    assert sum(n for _, n in of_crm["succeeded"]) == 2
    assert not any(n for _, n in of_crm.get("accepted", []))
    late = await store.series(began + timedelta(minutes=5), 60.0)
    assert sum(n for _, n in late["accepted"]) == 1


# -- watermarks --------------------------------------------------------------------------------


async def test_a_watermark_is_told_once(ground: Ground, store: Store) -> None:
    assert await store.crossings() == {}
    assert not await store.mark_watermark("dead", False)
    assert await store.mark_watermark("dead", True)
    assert not await store.mark_watermark("dead", True)
    assert await store.mark_watermark("oldest_due", True)
    since = (await store.crossings())["dead"]
    ground.forward(100)
    assert not await store.mark_watermark("dead", True)
    assert await store.crossings() == {"dead": since, "oldest_due": (await store.crossings())["oldest_due"]}
    assert await store.mark_watermark("dead", False)
    assert not await store.mark_watermark("dead", False)
    assert list(await store.crossings()) == ["oldest_due"]
    assert await store.mark_watermark("dead", True)


@pytest.mark.parametrize("crossed", [True, False])
async def test_a_watermark_is_told_to_exactly_one(store: Store, crossed: bool) -> None:
    await store.mark_watermark("dead", not crossed)
    news = await asyncio.gather(*[store.mark_watermark("dead", crossed) for _ in range(6)])
    assert sorted(news) == [False] * 5 + [True]


# -- a restored backup -------------------------------------------------------------------------


async def test_leases_of_a_restored_backup_are_void(store: Store) -> None:
    """R69: whoever worked on the original holds fences that the backup has not seen; all of them are refused."""
    made = await deliver(store, None, "s", "s")
    waits = await deliver_one(store, "t")
    leases = await take(store, lease=3600.0)
    [later] = [lease for lease in leases if lease.delivery.id == waits]
    await settle(store, retry(later, 3600.0))
    held = [lease for lease in leases if lease is not later]
    assert await store.invalidate_leases() == 2
    assert await asyncio.to_thread(store.renew, held) == set()
    for lease in held:
        assert await is_lost(store, done(lease))
    again = await take(store)
    assert sorted(ids(again)) == sorted(made[:2])
    assert [lease.delivery.attempt for lease in again] == [1, 1]
    assert min(lease.fence for lease in again) > max(lease.fence for lease in leases) + 100_000
    for lease in again:
        assert [attempt.outcome for attempt in await store.attempts_of(lease.delivery.id)] != [AttemptOutcome.crashed]
    assert await store.invalidate_leases() == 2


async def test_nothing_is_void_where_nothing_is_leased(store: Store) -> None:
    await deliver_one(store)
    assert await store.invalidate_leases() == 0
    assert len(await take(store)) == 1


async def test_void_leases_hold_over_a_restart(ground: Ground) -> None:
    async with opened(ground) as store:
        await deliver_one(store)
        lost = await take_one(store, lease=3600.0)
        assert await store.invalidate_leases() == 1
    async with opened(ground) as store:
        assert (await take_one(store)).fence > lost.fence + 100_000


# -- workers -----------------------------------------------------------------------------------


def worker(name: str, leases: int = 0) -> StoredWorker:
    never = datetime(2000, 1, 1, tzinfo=UTC)
    return StoredWorker(name, "here", 7, never, never, leases, ["crm", "mail"])


async def test_workers_are_known_while_they_greet(ground: Ground, store: Store) -> None:
    assert await store.workers() == []
    await store.register_worker(worker("a"))
    [shown] = await store.workers()
    assert (shown.id, shown.host, shown.pid, shown.leases) == ("a", "here", 7, 0)
    assert list(shown.destinations) == ["crm", "mail"]
    assert shown.started_at == shown.seen_at
    ground.forward(40)
    await store.register_worker(worker("a", 3))
    await store.register_worker(worker("b"))
    [first, second] = sorted(await store.workers(), key=lambda one: one.id)
    assert (first.leases, first.started_at, second.id) == (3, shown.started_at, "b")
    assert (first.seen_at - shown.seen_at).total_seconds() >= 40
    ground.forward(40)
    await store.register_worker(worker("b"))
    ground.forward(40)
    assert [one.id for one in await store.workers()] == ["b"]
    await store.dismiss_worker("b")
    await store.dismiss_worker("nobody")
    assert await store.workers() == []


async def test_workers_not_heard_of_for_a_day_are_forgotten(ground: Ground, store: Store) -> None:
    await store.register_worker(worker("a"))
    ground.forward(DAY + 60)
    await store.register_worker(worker("b"))
    assert count(ground, "workers") == 1
