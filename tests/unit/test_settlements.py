"""Settlements in groups: when the next one is begun, and who shares it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oncehook.model import Lease, Settle, Settled, Settlement
from oncehook.store.base import Store
from oncehook.worker import TURNS, SettlementBatcher


class Slow:
    """A store that settles a group when it is told to."""

    def __init__(self) -> None:
        self.groups: list[tuple[list[int], asyncio.Future[None]]] = []

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        fences = [one.lease.fence for one in settlements]
        self.groups.append((fences, asyncio.get_running_loop().create_future()))
        await self.groups[-1][1]
        return Settled(set(fences))

    @property
    def fences(self) -> list[list[int]]:
        return [fences for fences, _ in self.groups]


class Holder:
    """A worker with so many attempts under way or not settled."""

    id = "worker"

    def __init__(self) -> None:
        self.busy = 0
        self.done: list[int] = []

    def note_settled(self, done: Settlement, following: Lease | None = None, asked_at: float = 0.0) -> None:
        self.done.append(done.lease.fence)

    def note_lost(self, lease: Lease) -> None:
        raise AssertionError(lease)

    def count_unsettled(self) -> int:
        return self.busy

    def destination_of(self, lease: Lease) -> Any:
        raise AssertionError(lease)


def ended(fence: int, take_next: float | None = None) -> Settlement:
    lease = SimpleNamespace(fence=fence, queue_key=bytes([fence]), seconds=10.0)
    return Settlement(cast("Lease", lease), Settle.done, take_next=take_next)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def store() -> Slow:
    return Slow()


@pytest.fixture
def holder() -> Holder:
    return Holder()


@pytest.fixture
async def settling(store: Slow, holder: Holder) -> SettlementBatcher:
    made = SettlementBatcher(cast("Store", store), holder)
    made.start()
    return made


async def test_the_end_of_a_group_lets_the_next_begin(settling: SettlementBatcher, store: Slow, holder: Holder) -> None:
    for fence in (1, 2, 3):
        settling.add(ended(fence))
        await turns()
    assert store.fences == [[1], [2]], "two at once, and the third waits"
    store.groups[0][1].set_result(None)
    await turns()
    assert store.fences == [[1], [2], [3]]
    for _, over in store.groups[1:]:
        over.set_result(None)
    await settling.stop()
    assert sorted(holder.done) == [1, 2, 3]


async def test_subjects_that_go_on_share_a_commit(settling: SettlementBatcher, store: Slow, holder: Holder) -> None:
    holder.busy = 2
    settling.add(ended(1, take_next=10.0))
    await turns(TURNS // 2)
    settling.add(ended(2, take_next=10.0))
    await turns(TURNS)
    assert store.fences == [[1, 2]]


async def test_nobody_waits_long_for_others(settling: SettlementBatcher, store: Slow, holder: Holder) -> None:
    holder.busy = 2
    settling.add(ended(1, take_next=10.0))
    await turns(TURNS + 5)
    assert store.fences == [[1]]


@pytest.mark.parametrize(("busy", "take_next"), [(1, 10.0), (2, None)], ids=["alone", "does not go on"])
async def test_who_cannot_share_does_not_wait(
    settling: SettlementBatcher, store: Slow, holder: Holder, busy: int, take_next: float | None
) -> None:
    holder.busy = busy
    settling.add(ended(1, take_next))
    await turns(4)
    assert store.fences == [[1]]
