"""Promises that break only at one moment, and are therefore tested at that moment: not by chance, but by a gate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from oncehook import clock, faults
from oncehook.errors import StoreUnavailable
from oncehook.model import Lease, Outcome
from oncehook.store.base import Store
from oncehook.store.sqlite import SqliteStore
from oncehook.worker import TIMEOUTS, Heartbeat
from tests.store.making import deliver_one, done, enrolled, intake, item, settle, take, take_one
from tests.store.place import Place

HOUR = 3600.0


class Silent:
    """A store that gives a heartbeat no answer before it is let."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def renew(self, leases: Sequence[Lease], worker: str | None = None) -> set[int]:
        self.asked.set()
        assert self.may_answer.wait(60)
        raise StoreUnavailable("no answer")


async def test_a_worker_is_told_in_time_though_its_heartbeat_waits_for_an_answer(place: Place) -> None:
    """R33: a try that hangs must not outlast the lease, or its holder goes on beside a successor."""
    store, silent, told = await place.open(), Silent(), threading.Event()
    await deliver_one(store, "a")
    lease = await take_one(store, lease=1.2)
    heartbeat = Heartbeat(cast("Store", silent), lambda lost: told.set(), lease.seconds)
    asked_at = clock.steady()
    heartbeat.hold(lease, asked_at, asked_at + HOUR)
    heartbeat.start()
    try:
        await asyncio.to_thread(silent.asked.wait)
        assert await asyncio.to_thread(told.wait, 20), "nobody was told as long as the store did not answer"
        assert clock.steady() >= asked_at + lease.seconds * TIMEOUTS.safe_part
        assert len(heartbeat) == 0
    finally:
        silent.may_answer.set()
        await asyncio.to_thread(heartbeat.stop)


class Gate:
    """A named point at which whoever passes has to wait until the gate is opened."""

    pause = 0.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = threading.Event()
        self.opened = threading.Event()

    def strike(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


async def test_during_the_commit_nobody_is_answered_and_a_copy_is_no_second_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1, R13: the rows are written, the commit is not made; the key is neither free nor promised to anybody."""
    store = SqliteStore(tmp_path / "oncehook.db")
    await store.open()
    gate = Gate("before_intake")
    try:
        await enrolled(store)
        monkeypatch.setattr(faults, "_armed", [gate])
        first = store.record(intake(item("k")))
        await asyncio.to_thread(gate.reached.wait)
        copy = store.record(intake(item("k")))
        await asyncio.sleep(0.05)
        assert not first.future.done()
        assert not copy.future.done()
        gate.opened.set()
        [accepted], [again] = await first.future, await copy.future
        assert (accepted.outcome, again.outcome) == (Outcome.accepted, Outcome.duplicate)
        assert accepted.event_id == again.event_id
        assert await store.read(lambda c: c.execute("SELECT count(*) FROM events").fetchone()) == (1,)
    finally:
        gate.opened.set()
        await store.close()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    await made.remove()


async def test_a_workers_clock_neither_ends_a_lease_nor_holds_work_back(place: Place) -> None:
    """R31, R63: an hour ahead it takes nothing from anybody, an hour behind it takes what is due."""
    store, skewed = await place.open(), await place.open()
    await deliver_one(store, "a")
    lease = await take_one(store, lease=30.0)
    clock.forward(HOUR)
    try:
        assert await take(skewed) == []
        assert skewed.renew([lease]) == {lease.fence}
    finally:
        clock.forward(-HOUR)
    assert await take(store) == []
    await deliver_one(store, "b")
    clock.forward(-HOUR)
    try:
        late = await take_one(skewed, lease=30.0)
    finally:
        clock.forward(HOUR)
    assert await take(store) == []
    await settle(store, done(lease), done(late))
