"""Acts of people beside replay: discard, retry now, and the line that each of them leaves in the audit log."""

from __future__ import annotations

import pytest

from oncehook.deliveries import Category, DeliveryStatus, Filter, Options, Settle, Settlement
from oncehook.errors import NotFound, NotReplayable, NotWaiting
from oncehook.model import new_id
from oncehook.replays import ReplayState
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import (
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


async def test_retry_now(ground: Ground, store: Store) -> None:
    made = await deliver_one(store, "s")
    behind = await deliver_one(store, "s")
    await settle(store, retry(await take_one(store), 500.0))
    assert await take(store) == []
    await store.retry_now(made, "ann")
    lease = await take_one(store)
    assert (lease.delivery_id, lease.attempt, lease.run) == (made, 2, 1)
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
    ordered = await replay(store, one, reason="fixed")
    bulk = await replay_all(store, Filter(ids=[two]), reason="fixed too")
    await store.steer_replay(bulk.id, ReplayState.paused, "bob")
    await store.steer_replay(bulk.id, ReplayState.running, "bob")
    await store.steer_replay(bulk.id, ReplayState.aborted, "bob")
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
    assert ordered.id.hex() in lines[0].target + str(lines[0].detail)
    assert "fixed" in str(lines[0].detail)
    assert "test" in str(lines[5].detail)
    assert one.hex() in lines[6].target
    assert "mail" in lines[7].target
    assert (lines[9].act, lines[9].target, lines[9].detail) == ("login", "dashboard", {"from": "10.0.0.1"})
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
        await store.steer_replay(new_id(), ReplayState.aborted, "ann")
    assert await store.audit_log() == []
