"""Acts of people beside replay: discard, retry now, and the line that each of them leaves in the audit log."""

from __future__ import annotations

import pytest

from oncehook.errors import NotFound, NotReplayable, NotWaiting, PlanChanged
from oncehook.model import (
    Category,
    DeliveryStatus,
    Filter,
    Options,
    PlanSnapshot,
    ReplayState,
    Settle,
    Settlement,
    new_id,
)
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
    dead,
    dead_letters,
    deliver_one,
    done,
    look,
    mixture,
    replay,
    replay_all,
    retry,
    settle,
    statuses,
    take,
    take_one,
)

# -- other acts ----------------------------------------------------------------------------------


async def test_discard_closes_dead_letters_and_nothing_else(store: Store) -> None:
    found = await mixture(store)
    before = {name: await statuses(store, many) for name, many in found.items()}
    assert await store.discard(Filter(destination="crm"), "ann", "test orders") == 6
    for name, many in found.items():
        assert await statuses(store, many) == (["discarded"] * 6 if name == "dead" else before[name])
    kept = await look(store, found["dead"][0])
    assert (kept.reason, kept.status) == ("test orders", DeliveryStatus.discarded)
    assert len(await store.attempts_of(found["dead"][0])) == 1
    assert await store.discard(Filter(destination="crm"), "ann", "test orders") == 0
    level = (await store.levels())["crm"]
    assert (level.dead, level.discarded) == (0, 7)


async def test_only_what_was_seen_is_discarded(ground: Ground, store: Store) -> None:
    """What dies after the plan, or dies anew, stays; what has been replayed meanwhile is simply no longer there."""
    stays, revived, again = await dead_letters(store, None, None, None)
    late = await deliver_one(store)
    plan = await store.plan_replay(Filter(status=DeliveryStatus.dead), force=False)
    ground.forward(90)
    for one in (revived, again):
        await replay(store, one)
    leases = {lease.delivery.id: lease for lease in await take(store)}
    await settle(store, dead(leases[late]), dead(leases[again]), done(leases[revived]))
    seen = PlanSnapshot(plan.total, plan.at)
    assert seen.count == 3
    assert await store.discard(Filter(status=DeliveryStatus.dead), "ann", "old", seen) == 1
    assert await statuses(store, [stays, revived, again, late]) == ["discarded", "done", "dead", "dead"]
    [line] = await store.audit_log(limit=1)
    assert (line.target, line.detail) == (str(stays), {"count": 1, "reason": "old"})


async def test_nothing_is_discarded_when_more_were_dead_by_then_than_were_seen(store: Store) -> None:
    """One that was about to be written down when the plan looked."""
    made = await dead_letters(store, None, None)
    plan = await store.plan_replay(Filter(), force=False)
    with pytest.raises(PlanChanged, match="said 1, now it would be 2"):
        await store.discard(Filter(), "ann", "old", PlanSnapshot(1, plan.at))
    assert await statuses(store, made) == ["dead", "dead"]
    assert [line.act for line in await store.audit_log()] == []
    assert await store.discard(Filter(), "ann", "old", PlanSnapshot(2, plan.at)) == 2
    [line] = await store.audit_log(limit=1)
    assert (line.target, line.detail) == ("2 deliveries", {"count": 2, "reason": "old"})


async def test_retry_now(ground: Ground, store: Store) -> None:
    made = await deliver_one(store, "s")
    behind = await deliver_one(store, "s")
    await settle(store, retry(await take_one(store), 500.0))
    assert await take(store) == []
    await store.retry_now(made, "ann")
    lease = await take_one(store)
    assert (lease.delivery.id, lease.delivery.attempt, lease.delivery.run) == (made, 2, 1)
    with pytest.raises(NotWaiting):
        await store.retry_now(made, "ann")
    with pytest.raises(NotWaiting):
        await store.retry_now(behind, "ann")
    await settle(store, done(lease))
    with pytest.raises(NotWaiting):
        await store.retry_now(made, "ann")
    with pytest.raises(NotFound):
        await store.retry_now(new_id(), "ann")


async def test_retry_now_is_nothing_for_the_dead(store: Store) -> None:
    [made] = await dead_letters(store, "s", options=Options.hold)
    with pytest.raises(NotWaiting):
        await store.retry_now(made, "ann")
    assert await take(store) == []


async def test_every_act_leaves_its_line(store: Store) -> None:
    """R49, S34: who, what, about what."""
    [one, two, three] = await dead_letters(store, None, None, None)
    ordered = await replay(store, one, reason="fixed", noted={"query": "id:one", "rate": None})
    bulk = await replay_all(store, Filter(ids=[two]), reason="fixed too", force=True)
    await store.set_replay_state(bulk.id, ReplayState.paused, "bob")
    await store.set_replay_state(bulk.id, ReplayState.running, "bob")
    await store.set_replay_state(bulk.id, ReplayState.aborted, "bob")
    await store.discard(Filter(ids=[three]), "cid", "test")
    await settle(store, Settlement(await take_one(store), Settle.retry, 99, category=Category.transient))
    await store.retry_now(one, "dan")
    await store.pause(2, "eve", "why")
    await store.resume(2, "eve")
    await store.audit("fay", "login", "dashboard", {"from": "10.0.0.1"})
    lines = (await store.audit_log())[::-1]
    assert [line.actor for line in lines] == ["ann", "ann", "bob", "bob", "bob", "cid", "dan", "eve", "eve", "fay"]
    acts = ["replay", "replay", "pause", "resume", "abort", "discard", "retry", "pause", "resume", "login"]
    assert [line.act for line in lines] == acts
    assert all(line.target for line in lines)
    replays = [str(ordered.id), *[str(bulk.id)] * 4]
    deliveries = [str(three), str(one)]
    assert [line.target for line in lines] == [*replays, *deliveries, "mail", "mail", "dashboard"]
    assert [line.detail for line in lines] == [
        {"count": 1, "reason": "fixed", "bulk": False, "query": "id:one", "rate": None},
        {"count": 1, "reason": "fixed too", "bulk": True},
        {}, {}, {},
        {"count": 1, "reason": "test"},
        {},
        {"reason": "why"}, {},
        {"from": "10.0.0.1"},
    ]  # fmt: skip
    assert [line.n for line in lines] == sorted({line.n for line in lines})
    newest = await store.audit_log(limit=3)
    assert [line.actor for line in newest] == ["fay", "eve", "eve"]
    older = await store.audit_log(before=newest[-1].n, limit=2)
    assert [line.actor for line in older] == ["dan", "cid"]


async def test_a_refused_act_leaves_no_line(store: Store) -> None:
    made = await deliver_one(store)
    with pytest.raises(NotReplayable):
        await replay(store, made)
    with pytest.raises(NotFound):
        await store.retry_now(new_id(), "ann")
    with pytest.raises(NotFound):
        await store.set_replay_state(new_id(), ReplayState.aborted, "ann")
    assert await store.audit_log() == []
