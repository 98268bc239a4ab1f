"""Settle: how an attempt went is written once, under its fence, with its evidence, and the breaker learns of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oncehook.errors import ConfigError, LeaseLost
from oncehook.model import (
    NO_EVIDENCE,
    AttemptOutcome,
    Category,
    DeliveryStatus,
    Evidence,
    Lease,
    Options,
    Settle,
    Settlement,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    MAIL,
    dead,
    deliver,
    deliver_one,
    done,
    ids,
    is_lost,
    look,
    opened,
    release,
    retry,
    settle,
    statuses,
    take,
    take_one,
)

# -- done, retry, dead -------------------------------------------------------------------------


async def test_done(store: Store) -> None:
    made = await deliver_one(store)
    lease = await take_one(store)
    await settle(store, done(lease, evidence=Evidence(200, None, b"thanks"), duration=0.25))
    kept = await look(store, made)
    assert (kept.status, kept.attempts, kept.run, kept.note) == (DeliveryStatus.done, 1, 1, None)
    assert (kept.category, kept.last_error, kept.due_at, kept.reason) == (None, None, None, None)
    assert kept.settled_at is not None
    [attempt] = await store.attempts_of(made)
    assert (attempt.delivery_id, attempt.fence, attempt.run, attempt.n) == (made, lease.fence, 1, 1)
    assert (attempt.outcome, attempt.category) == (AttemptOutcome.done, None)
    assert attempt.evidence == Evidence(200, None, b"thanks")
    assert abs((attempt.ended_at - attempt.started_at).total_seconds() - 0.25) < 0.001
    assert attempt.ended_at == kept.settled_at
    assert await take(store) == []


async def test_502_502_200(store: Store) -> None:
    """Three attempts and done; the failures stay as evidence, but no longer as the delivery's own."""
    made = await deliver_one(store)
    for _ in range(2):
        lease = await take_one(store)
        await settle(
            store,
            Settlement(lease, Settle.retry, category=Category.transient, evidence=Evidence(502, "HTTP 502", b"oops")),
        )
        kept = await look(store, made)
        assert (kept.status, kept.category) == (DeliveryStatus.pending, Category.transient)
        assert (kept.last_status, kept.last_error) == (502, "HTTP 502")
    await settle(store, done(await take_one(store), evidence=Evidence(200)))
    kept = await look(store, made)
    assert (kept.status, kept.attempts, kept.category, kept.last_error) == (DeliveryStatus.done, 3, None, None)
    attempts = await store.attempts_of(made)
    assert [(one.n, one.outcome, one.evidence.status) for one in attempts] == [
        (1, AttemptOutcome.retry, 502),
        (2, AttemptOutcome.retry, 502),
        (3, AttemptOutcome.done, 200),
    ]
    assert [one.category for one in attempts] == [Category.transient, Category.transient, None]
    assert [one.evidence.answer for one in attempts] == [b"oops", b"oops", None]


async def test_400(store: Store) -> None:
    """R40: one attempt, dead, permanent; everything about it is kept."""
    made = await deliver_one(store)
    evidence = Evidence(400, "HTTP 400", b"\xff no utf-8")
    await settle(store, Settlement(await take_one(store), Settle.dead, category=Category.permanent, evidence=evidence))
    kept = await look(store, made)
    assert (kept.status, kept.attempts, kept.category) == (DeliveryStatus.dead, 1, Category.permanent)
    assert (kept.last_status, kept.last_error, kept.due_at, kept.reason) == (400, "HTTP 400", None, None)
    [attempt] = await store.attempts_of(made)
    assert (attempt.outcome, attempt.category, attempt.evidence) == (
        AttemptOutcome.dead,
        Category.permanent,
        evidence,
    )
    event = await store.get_event(kept.event_id)
    assert event is not None
    assert event.body == b'{"id": 1}'
    assert await take(store) == []


async def test_nothing_known_is_kept_as_nothing(store: Store) -> None:
    made = await deliver_one(store)
    await settle(store, Settlement(await take_one(store), Settle.retry, category=Category.unknown))
    [attempt] = await store.attempts_of(made)
    assert (attempt.evidence, attempt.category) == (NO_EVIDENCE, Category.unknown)


async def test_odd_words_in_an_error_are_no_reason_to_lose_the_outcome(store: Store) -> None:
    """A destination says what it likes: NUL, half a surrogate, a megabyte."""
    for error in ("a\x00b", "lone \ud800", "é" * 200_000, "first\nsecond"):
        made = await deliver_one(store)
        lease = await take_one(store)
        await settle(store, Settlement(lease, Settle.dead, category=Category.unknown, evidence=Evidence(500, error)))
        assert (await look(store, made)).status is DeliveryStatus.dead


async def test_a_status_code_of_any_size_is_kept_or_left_out(store: Store) -> None:
    made = await deliver_one(store)
    await settle(store, dead(await take_one(store), status=999))
    assert (await look(store, made)).last_status == 999


async def test_a_retry_waits(ground: Ground, store: Store) -> None:
    await deliver_one(store)
    ground.stand_still()
    await settle(store, retry(await take_one(store), 30.0))
    assert await take(store) == []
    ground.forward(29)
    assert await take(store) == []
    ground.forward(2)
    assert (await take_one(store)).delivery.attempt == 2


async def test_a_retry_survives_a_restart_and_its_time_does_not_move(ground: Ground) -> None:
    """R41"""
    async with opened(ground) as store:
        made = await deliver_one(store)
        await settle(store, retry(await take_one(store), 30.0))
        before = await look(store, made)
    ground.forward(10)
    async with opened(ground) as store:
        assert await look(store, made) == before
        assert await take(store) == []
        ground.forward(21)
        lease = await take_one(store)
        assert (lease.delivery.id, lease.delivery.attempt) == (made, 2)


async def test_many_at_once(store: Store) -> None:
    """One commit for a whole batch, each with its own end."""
    made = await deliver(store, *[None] * 40, *[f"s{n % 10}" for n in range(40)])
    leases = await take(store)
    assert len(leases) == 50
    makers: list[Any] = [done, retry, dead, release]
    await settle(store, *[makers[n % 4](lease) for n, lease in enumerate(leases)])
    expected = {lease.delivery.id: ["done", "pending", "dead", "pending"][n % 4] for n, lease in enumerate(leases)}
    assert await statuses(store, list(expected)) == list(expected.values())
    assert len({*await statuses(store, made)}) == 3


async def test_in_one_batch_the_lost_ones_do_not_harm_the_others(ground: Ground, store: Store) -> None:
    await deliver(store, None, None)
    [lost, other] = await take(store, lease=10.0)
    await settle(store, release(lost))
    assert (await store.settle([done(lost), done(other)])).ours == {other.fence}
    assert (await take_one(store)).delivery.id == lost.delivery.id


async def test_nothing_to_settle(store: Store) -> None:
    assert (await store.settle([])).ours == set()


async def test_two_settle_the_same_lease(store: Store) -> None:
    """R25: whoever comes second is told so, and only one attempt is written."""
    made = await deliver_one(store)
    lease = await take_one(store)
    kept = await asyncio.gather(*[store.settle([done(lease)]) for _ in range(4)])
    assert sorted(len(one.ours) for one in kept) == [0, 0, 0, 1]
    assert len(await store.attempts_of(made)) == 1


async def test_what_is_counted(store: Store) -> None:
    """R68: levels and flows, per destination."""
    await deliver(store, *[None] * 6)
    leases = await take(store)
    await settle(store, done(leases[0]), done(leases[1]), dead(leases[2]), retry(leases[3]), release(leases[4]))
    counted = (await store.figures()).by_destination["crm"]
    expected = {"pending": 3, "done": 2, "dead": 1, "succeeded": 2, "died": 1, "retry": 1}
    assert {what: counted.get(what, 0) for what in expected} == expected
    level = (await store.levels())["crm"]
    assert (level.pending, level.leased, level.done, level.dead, level.discarded) == (3, 1, 2, 1, 0)


# -- stale: latest wins ------------------------------------------------------------------------

LATEST = Options.latest_wins


async def test_the_latest_wins(store: Store) -> None:
    """A rank that was delivered overtakes the lower ones of its scope, and nothing else."""
    await deliver_one(store, "w1", rank=3, options=LATEST)
    lease = await take_one(store)
    assert (lease.highest_rank, lease.is_stale) == (None, False)
    await settle(store, done(lease))
    late = await deliver_one(store, "w1", rank=2, options=LATEST)
    lease = await take_one(store)
    assert (lease.highest_rank, lease.is_stale) == (3, True)
    await settle(store, done(lease, note="stale"))
    kept = await look(store, late)
    assert (kept.status, kept.note, kept.attempts) == (DeliveryStatus.done, "stale", 0)
    assert await store.attempts_of(late) == []
    for rank, stale in ((3, False), (4, False), (1, True)):
        await deliver_one(store, "w1", rank=rank, options=LATEST)
        lease = await take_one(store)
        assert lease.is_stale is stale
        await settle(store, done(lease, note="stale" if stale else None))
    await deliver_one(store, "w2", rank=1, options=LATEST)
    assert not (await take_one(store)).is_stale


async def test_a_scope_of_its_own(store: Store) -> None:
    """Two subjects may share a scope, and one subject may hold several."""
    await deliver_one(store, "a", rank=3, rank_scope="m1", options=LATEST)
    await settle(store, done(await take_one(store)))
    await deliver_one(store, "a", rank=1, rank_scope="m2", options=LATEST)
    lease = await take_one(store)
    assert not lease.is_stale
    await settle(store, done(lease))
    await deliver_one(store, "b", rank=1, rank_scope="m1", options=LATEST)
    assert (await take_one(store)).is_stale


async def test_ranks_are_of_one_destination_and_one_source(store: Store) -> None:
    await deliver_one(store, "a", rank=3, options=LATEST)
    await settle(store, done(await take_one(store)))
    await deliver_one(store, "a", rank=1, options=LATEST, source="payments")
    assert not (await take_one(store)).is_stale
    await deliver_one(store, "a", rank=1, options=LATEST, to=MAIL)
    assert not (await take_one(store, to=2)).is_stale


async def test_only_what_was_delivered_raises_the_rank(store: Store) -> None:
    await deliver_one(store, "a", rank=9, options=LATEST)
    await settle(store, retry(await take_one(store)))
    await settle(store, dead(await take_one(store)))
    await deliver_one(store, "a", rank=1, options=LATEST)
    lease = await take_one(store)
    assert (lease.highest_rank, lease.is_stale) == (None, False)


async def test_without_the_option_ranks_decide_nothing(store: Store) -> None:
    await deliver_one(store, "a", rank=9, options=LATEST)
    await settle(store, done(await take_one(store)))
    await deliver_one(store, "a", rank=1)
    lease = await take_one(store)
    assert (lease.highest_rank, lease.is_stale) == (None, False)


# -- effects that commit with us ---------------------------------------------------------------


async def commit_effect(ground: Ground, store: Store, lease: Lease, *, fails: bool = False) -> None:
    """Write the effect and settle, in one transaction of the store."""
    statement = f"INSERT INTO {table(ground)} VALUES (1)"
    if ground.engine == "postgres":
        async with store.transaction() as transaction:
            await transaction.connection.execute(statement)
            if fails:
                raise ValueError("the handler's own")
            await transaction.settle(done(lease))
        return

    def commit(connection: Any) -> None:
        connection.execute(statement)
        if fails:
            raise ValueError("the handler's own")

    if not (await store.settle([done(lease, commit=commit)])).ours:
        raise LeaseLost


def table(ground: Ground) -> str:
    return f"{getattr(ground, 'schema', 'main')}.effects"


def effects(ground: Ground) -> int:
    return int(ground.sql(f"SELECT count(*) FROM {table(ground)}")[0][0])


async def test_effect_and_completion_commit_together(ground: Ground, store: Store) -> None:
    """R51"""
    ground.sql(f"CREATE TABLE {table(ground)} (n integer)")
    made = await deliver_one(store, "s")
    behind = await deliver_one(store, "s")
    await commit_effect(ground, store, await take_one(store))
    assert effects(ground) == 1
    assert await statuses(store, [made, behind]) == ["done", "pending"]
    assert (await take_one(store)).delivery.id == behind


async def test_without_the_fence_there_is_no_effect(ground: Ground, store: Store) -> None:
    """R52"""
    ground.sql(f"CREATE TABLE {table(ground)} (n integer)")
    made = await deliver_one(store)
    lost = await take_one(store, lease=10.0, crash_tolerance=9)
    ground.forward(11)
    holder = await take_one(store, crash_tolerance=9)
    with pytest.raises(LeaseLost):
        await commit_effect(ground, store, lost)
    assert effects(ground) == 0
    assert (await look(store, made)).status is DeliveryStatus.leased
    await commit_effect(ground, store, holder)
    assert effects(ground) == 1


async def test_an_effect_that_fails_leaves_the_lease_as_it_was(ground: Ground, store: Store) -> None:
    """R51: nothing is written, the error is the handler's own, and the attempt can be settled as failed."""
    ground.sql(f"CREATE TABLE {table(ground)} (n integer)")
    made = await deliver_one(store)
    lease = await take_one(store)
    with pytest.raises(ValueError, match="the handler's own"):
        await commit_effect(ground, store, lease, fails=True)
    assert effects(ground) == 0
    assert (await look(store, made)).status is DeliveryStatus.leased
    await settle(store, retry(lease))
    assert not await is_lost(store, done(await take_one(store)))


async def test_an_effect_that_fails_harms_nobody_else(ground: Ground, store: Store) -> None:
    ground.sql(f"CREATE TABLE {table(ground)} (n integer)")
    await deliver(store, None, None)
    [bad, good] = await take(store)

    async def fails() -> None:
        with pytest.raises(ValueError, match="the handler's own"):
            await commit_effect(ground, store, bad, fails=True)

    await asyncio.gather(fails(), settle(store, done(good)), deliver_one(store))
    assert await statuses(store, ids([bad, good])) == ["leased", "done"]


async def test_a_writer_that_is_alone_is_lent_to_nobody(ground: Ground, store: Store) -> None:
    """DESIGN.md 8.8: on PostgreSQL a transaction that is left without settling changes nothing."""
    made = await deliver_one(store)
    lease = await take_one(store)
    if ground.engine == "sqlite":
        with pytest.raises(ConfigError) as refused:
            async with store.transaction():
                pass
        assert "event.commit" in refused.value.hint
        with pytest.raises(ConfigError), store.blocking_transaction():
            pass
        return

    def blocking() -> None:
        with store.blocking_transaction() as transaction:
            transaction.connection.execute("SELECT 1")
            transaction.settle(done(lease))

    async with store.transaction() as transaction:
        await transaction.connection.execute("SELECT 1")
    assert (await look(store, made)).status is DeliveryStatus.leased
    await asyncio.to_thread(blocking)
    assert (await look(store, made)).status is DeliveryStatus.done
