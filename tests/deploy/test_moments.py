"""Lines about arrivals and attempts carry what a search in a log begins with (UX.md 9)."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncehook import Event, GiveUp, Inbox
from oncehook.logs import set_up_logging
from oncehook.model import BreakerChange, DeliveryStatus, Filter, ReplayState
from oncehook.upkeep import strays
from oncehook.worker import Worker
from tests.leases import make_lease

ALWAYS = {"source", "outcome", "duration_s", "event_id", "key", "subject"}
OF_ATTEMPTS = ALWAYS | {"destination", "delivery_id", "attempt", "run", "worker"}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("oncehook")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    stream = io.StringIO()
    set_up_logging("debug", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def moments(lines: io.StringIO, name: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, lines.getvalue().splitlines()) if line["event"] == name]


async def test_every_moment_has_its_fields(tmp_path: Path, lines: io.StringIO) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    inbox.source("orders", verify="none", key=["$.id"], subject="$.customer", budget="90s")

    @inbox.on("orders", retry=["0.01s"])
    async def ship(event: Event) -> None:
        if event.key == "bad":
            raise GiveUp("never") if event.attempt == 2 else RuntimeError("not yet")

    async with inbox.running():
        for key in ("good", "good", "bad"):
            await inbox.receive("orders", {}, json.dumps({"id": key, "customer": "c1"}).encode())
        await inbox.drain()
        (dead,) = (await inbox.admin.deliveries(Filter(status=DeliveryStatus.dead))).items
        replay = await inbox.admin.replay_one(dead.id, actor="somebody")
        await inbox.drain()
    for name, many in (("arrival.accepted", 2), ("arrival.duplicate", 1)):
        found = moments(lines, name)
        assert len(found) == many
        assert all(line.keys() >= ALWAYS for line in found), name
    for name, many in (("attempt.done", 1), ("attempt.retry", 2), ("delivery.dead", 2)):
        found = moments(lines, name)
        assert len(found) == many
        assert all(line.keys() >= OF_ATTEMPTS for line in found), name
    assert [line["run"] for line in moments(lines, "delivery.dead") if "replay_id" in line] == [2]
    (over,) = moments(lines, "replay.done")
    assert (over["level"], over["replay_id"], over["state"]) == ("info", str(replay.id), "failed")
    assert [over[name] for name in ("planned", "done", "dead", "skipped", "actor")] == [1, 0, 1, 0, "somebody"]


async def test_a_breaker_that_stays_open_after_a_trial_says_so(tmp_path: Path, lines: io.StringIO) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    is_mended = False

    @inbox.on("app", retry=["0.05s"] * 50, breaker={"failures": 2, "open": "0.2s"})
    async def ship(event: Event) -> None:
        if not is_mended:
            raise ConnectionError("nobody is there")

    async with inbox.running(), asyncio.timeout(30):
        for key in ("a", "b"):
            await inbox.emit("app", "t", {}, key=key)
        while len(moments(lines, "breaker.opened")) < 3:
            await asyncio.sleep(0.05)
        is_mended = True
        await inbox.drain()
    opened = moments(lines, "breaker.opened")
    assert opened[0]["failures"] == 2
    assert all(one["failures"] in (2, 3, 4) for one in opened[:3]), "one delivery that fails again is one failure"
    assert opened[0]["until"] < opened[1]["until"] < opened[2]["until"]
    assert len(moments(lines, "attempt.retry")) == len(opened) + 1, "once for each trial, and never without one"
    assert len(moments(lines, "breaker.closed")) == 1


async def test_a_trial_is_told_from_what_was_under_way_also_by_a_slow_process(
    tmp_path: Path, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of an opening late, and counts from then: the trial begins too early for it."""
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    hear, late = Worker.note_breaker, timedelta(seconds=0.3)

    def hear_late(worker: Worker, change: BreakerChange) -> None:
        until = None if change.open_until is None else change.open_until + late
        hear(worker, BreakerChange(change.destination_id, until, change.failures))

    monkeypatch.setattr(Worker, "note_breaker", hear_late)

    @inbox.on("app", retry=["0.05s"] * 50, breaker={"failures": 1, "open": "0.5s"})
    async def ship(event: Event) -> None:
        if len(moments(lines, "breaker.opened")) < 2:
            raise ConnectionError("nobody is there")

    async with inbox.running(), asyncio.timeout(30):
        await inbox.emit("app", "t", {}, key="a")
        await inbox.drain()
    assert len(moments(lines, "attempt.retry")) == len(moments(lines, "breaker.opened")) == 2


@pytest.mark.parametrize("bulk", [False, True], ids=["single", "bulk"])
async def test_who_waits_for_nobody_is_told_at_the_start(tmp_path: Path, lines: io.StringIO, bulk: bool) -> None:
    """A replay was asked for while nothing ran, and by the next start its destination has another name."""

    def make(name: str) -> Inbox:
        inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")

        @inbox.on("app", name=name)
        async def handle(event: Event) -> None:
            raise GiveUp("never")

        return inbox

    async with make("ship").running() as inbox:
        for n in range(3):
            await inbox.emit("app", "t", {}, key=str(n))
        await inbox.drain()
        dead = (await inbox.admin.deliveries(Filter(status=DeliveryStatus.dead))).items
    command = make("ship")
    await command.store.open()
    if bulk:
        await command.admin.start_replay(command.admin.build_request("status:dead"), actor="cli")
    else:
        await command.admin.replay_one(dead[0].id, actor="cli")
    await command.store.close()
    if not bulk:
        async with make("send").running(work=False):
            await asyncio.sleep(0.1)
        assert not moments(lines, "destination.unknown"), "who only receives need not know"
    async with make("send").running() as inbox:
        while not (told := moments(lines, "destination.unknown")):
            await asyncio.sleep(0.01)
        assert await strays(inbox.store, inbox.destinations) == {"ship": 3 if bulk else 1}
    (line,) = told
    assert (line["level"], line["destination"], line["waiting"]) == ("warning", "ship", 3 if bulk else 1)
    assert "oncehook serve module:inbox" in line["hint"]


async def test_an_aborted_replay_says_so_once(tmp_path: Path, lines: io.StringIO) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")

    @inbox.on("app", retry=["1h"])
    async def ship(event: Event) -> None:
        raise GiveUp("never") if event.run == 1 else RuntimeError("not yet")

    async with inbox.running():
        for n in range(3):
            await inbox.emit("app", "t", {}, key=str(n))
        await inbox.drain()
        replay = await inbox.admin.start_replay(inbox.admin.build_request("status:dead"), actor="somebody")
        await inbox.admin.set_replay_state(replay.id, ReplayState.aborted, actor="somebody")
    (over,) = moments(lines, "replay.done")
    assert (over["replay_id"], over["state"], over["planned"]) == (str(replay.id), "aborted", 3)


def test_a_lost_lease_says_whose_it_was(lines: io.StringIO, tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    inbox.observer.worker = "host:1:abc"
    destination = inbox.destination("shop", url="http://127.0.0.1:1/", allow_private=True)
    lease = make_lease(fence=7)
    inbox.observer.lease_lost(destination, lease)
    (line,) = moments(lines, "lease.lost")
    assert line.keys() >= {"source", "destination", "event_id", "delivery_id", "fence", "worker"}
