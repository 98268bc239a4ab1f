"""The sweep on virtual time, with a store that only notes what it is asked: each duty at its pace, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.torture.virtual import VirtualLoop, on_virtual_time

from oncehook import clock
from oncehook.errors import StoreUnavailable
from oncehook.model import Level, Pruned, StoredWorker
from oncehook.store.base import Store
from oncehook.store.checks import Tally, conservation
from oncehook.upkeep import LARGEST_BATCH, SMALLEST_BATCH, Limits, Sweep, Watermark, measure, strays

NOW = datetime(2026, 11, 17, tzinfo=UTC)


class Asked:
    """A store that notes when it was asked for what."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.calls: list[tuple[float, str]] = []
        self.known: dict[str, datetime] = {}
        self.to_prune: list[Pruned] = []
        self.to_feed = 0
        self.is_away = False
        self.waiting: Mapping[str, Level] = {}
        self.present: Sequence[Any] = ()
        self.flows: dict[str, Mapping[str, Any]] = {}
        self.paused: list[tuple[int, str, str]] = []

    def _note(self, name: str) -> None:
        self.calls.append((self.loop.moment, name))
        if self.is_away:
            raise StoreUnavailable("away")

    def times(self, name: str) -> list[float]:
        return [at for at, called in self.calls if called == name]

    async def feed_replays(self) -> int:
        self._note("feed")
        fed, self.to_feed = self.to_feed, 0
        return fed

    async def prune(
        self, keep_events: Mapping[int, float], otherwise: float, limit: int, only: object = None
    ) -> Pruned | None:
        assert SMALLEST_BATCH <= limit <= LARGEST_BATCH
        self._note("prune")
        return self.to_prune.pop(0) if self.to_prune else None

    async def roll_up(self) -> None:
        self._note("roll_up")

    async def register_worker(self, worker: StoredWorker) -> None:
        self._note("register_worker")

    async def crossings(self) -> dict[str, datetime]:
        return dict(self.known)

    async def mark_watermark(self, name: str, crossed: bool) -> bool:
        if crossed == (name in self.known):
            return False
        self.known[name] = NOW
        if not crossed:
            del self.known[name]
        return True

    async def levels(self) -> Mapping[str, Level]:
        return self.waiting

    async def workers(self) -> Sequence[Any]:
        return self.present

    async def series(self, since: datetime, step: float, *, destination: str) -> Mapping[str, Any]:
        return self.flows[destination]

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        self.paused.append((destination_id, actor, why))

    async def find_definitions(self, noun: object, names: object) -> Sequence[Any]:
        return ()


class Heard:
    """An observer that notes which watermarks were crossed and which are back."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, bool]] = []
        self.out: list[tuple[str, str]] = []
        self.levels: list[Sequence[Watermark]] = []
        self.summed = 0

    def watermark(self, mark: Watermark) -> None:
        self.marks.append((mark.name, mark.crossed))

    def watermarks(self, marks: Sequence[Watermark]) -> None:
        self.levels.append(marks)

    def disabled(self, destination: str, reason: str) -> None:
        self.out.append((destination, reason))

    def sum_up(self) -> None:
        self.summed += 1


def swept(seconds: float, prepare: Callable[[Asked, dict[str, Any]], None] = lambda store, parts: None) -> Any:
    """Run a sweep for so long; returns its store and its observer."""
    heard = Heard()

    async def nothing() -> None: ...

    async def no_marks() -> Sequence[Watermark]:
        return ()

    async def kept() -> Mapping[int, float]:
        return {}

    async def no_patience(names: Collection[str]) -> Mapping[str, tuple[int, float]]:
        return {}

    async def live(loop: VirtualLoop) -> Asked:
        store = Asked(loop)
        parts: dict[str, Any] = {
            "keep_events": kept, "otherwise": 60.0, "measure": no_marks, "works_for": None, "worker": lambda: None,
            "write_counts": nothing, "find_patience": no_patience, "sweep_objects": nothing,
        }  # fmt: skip
        prepare(store, parts)
        during = parts.pop("during", None)
        sweep = Sweep(cast("Store", store), heard, **parts)
        sweep.start()
        if during is not None:
            await during(sweep, store)
        await asyncio.sleep(seconds)
        await sweep.stop()
        return store

    return on_virtual_time("sweep", live), heard


# -- duties ------------------------------------------------------------------------------------


def test_each_duty_has_its_own_pace() -> None:
    store, heard = swept(3600.0, lambda store, parts: parts.update(worker=lambda: SimpleNamespace()))
    assert 3000 < heard.summed < 4100
    assert 300 < len(store.times("register_worker")) < 410
    assert 50 < len(store.times("prune")) < 70
    assert 1 <= len(store.times("roll_up")) <= 2


def test_a_store_that_is_away_stops_no_duty() -> None:
    def prepare(store: Asked, parts: dict[str, Any]) -> None:
        async def come_back(sweep: Sweep, store: Asked) -> None:
            await asyncio.sleep(300)
            store.is_away = False

        store.is_away, parts["during"] = True, come_back

    store, heard = swept(200.0, prepare)
    assert store.times("prune")[-1] > 400
    assert heard.summed > 400


def test_pruning_goes_on_until_nothing_is_left() -> None:
    def prepare(store: Asked, parts: dict[str, Any]) -> None:
        store.to_prune = [Pruned(1), Pruned(1), Pruned(1)]

    store, _ = swept(1.0, prepare)
    assert len(store.times("prune")) == 4


def test_a_replay_is_fed_at_once_when_the_sweep_is_nudged() -> None:
    async def nudge(sweep: Sweep, store: Asked) -> None:
        await asyncio.sleep(2.5)
        store.calls.clear()
        sweep.nudge()
        await asyncio.sleep(0.01)
        assert len(store.times("feed")) == 1

    swept(0.1, lambda store, parts: parts.update(during=nudge))


def test_a_replay_that_has_more_is_fed_again_soon() -> None:
    async def feed(sweep: Sweep, store: Asked) -> None:
        await asyncio.sleep(2.5)
        store.calls.clear()
        store.to_feed = 5
        sweep.nudge()
        await asyncio.sleep(0.2)
        assert len(store.times("feed")) == 2

    swept(0.1, lambda store, parts: parts.update(during=feed))


# -- watermarks --------------------------------------------------------------------------------


def test_a_watermark_is_told_once_when_it_is_crossed_and_once_when_it_is_back() -> None:
    levels = iter([1.0, 9.0, 9.0, 9.0, 2.0, 2.0])

    async def measured() -> Sequence[Watermark]:
        level = next(levels, 2.0)
        return [Watermark("dead", level, 5.0, level > 5.0)]

    _, heard = swept(100.0, lambda store, parts: parts.update(measure=measured))
    assert heard.marks == [("dead", True), ("dead", False)]


def test_of_two_processes_one_tells() -> None:
    async def measured() -> Sequence[Watermark]:
        return [Watermark("dead", 9.0, 5.0, True)]

    def prepare(store: Asked, parts: dict[str, Any]) -> None:
        store.known["dead"] = NOW  # another one was first
        parts["measure"] = measured

    _, heard = swept(60.0, prepare)
    assert heard.marks == []
    assert heard.levels


def test_what_is_measured_is_what_has_a_limit() -> None:
    levels = {"crm": Level(dead=3, oldest_due=7.0), "mail": Level(dead=4)}
    assert measure(Limits(), levels, {"shop": 9}, 0.1) == []
    limits = Limits(dead=6, oldest_due=7.0, daily_volume={"shop": 9, "calls": 1}, disk=0.2)
    found = {mark.name: (mark.level, mark.crossed) for mark in measure(limits, levels, {"shop": 9}, 0.1)}
    assert found == {
        "dead": (7, True),
        "oldest_due": (7.0, False),
        "daily_volume.shop": (9, False),
        "daily_volume.calls": (0, False),
        "disk": (0.1, True),
    }
    (unknown,) = measure(Limits(disk=0.2), {}, {}, None)
    assert (unknown.level, unknown.crossed) == (None, False)


def test_a_presets_usual_volume_counts_where_nobody_says_otherwise() -> None:
    limits = Limits(daily_volume={"calls": 0, "shop": 5}).with_usual({"calls": 900, "shop": 900, "whatsapp": 1000})
    assert limits.daily_volume == {"shop": 5, "whatsapp": 1000}


@pytest.mark.parametrize(("name", "source"), [("daily_volume.shop", "shop"), ("dead", None), ("disk", None)])
def test_only_a_volume_belongs_to_a_source(name: str, source: str | None) -> None:
    assert Watermark(name, 1.0, 2.0, False).source == source


# -- deliveries for nobody ---------------------------------------------------------------------


def test_deliveries_for_a_destination_that_nobody_knows() -> None:
    async def look(loop: VirtualLoop) -> dict[str, int]:
        store = Asked(loop)
        waiting = {"crm": 1, "gone": 2, "elsewhere": 3, "idle": 0}
        store.waiting = {name: Level(pending=count) for name, count in waiting.items()}
        store.present = [SimpleNamespace(destinations=["elsewhere"])]
        return await strays(cast("Store", store), ["crm"])

    assert on_virtual_time(1, look) == {"gone": 2}


# -- destinations that fail for days -----------------------------------------------------------


def test_what_has_failed_for_too_long_is_paused() -> None:
    """Only without a success since its first failure, only where it asks for that, and not once more."""

    def prepare(store: Asked, parts: dict[str, Any]) -> None:
        def ago(days: float) -> datetime:
            return clock.now_utc() - timedelta(days=days)

        names = ("gone", "back", "new", "patient", "held", "fine")
        store.waiting = {name: Level(failures=3) for name in names}
        store.waiting = {**store.waiting, "held": Level(failures=3, paused_at=NOW), "fine": Level()}
        store.flows = {name: {"retry": [(ago(4), 1), (ago(1), 2)], "died": [(ago(3.5), 1)]} for name in names}
        store.flows["back"] = {**store.flows["back"], "succeeded": [(ago(2), 1), (ago(0.5), 0)]}
        store.flows["new"] = {"retry": [(ago(1), 5)], "succeeded": []}

        async def find_patience(asked: Collection[str]) -> Mapping[str, tuple[int, float]]:
            return {name: (n, 3 * 86_400.0) for n, name in enumerate(names) if name in asked and name != "patient"}

        parts["find_patience"] = find_patience

    store, heard = swept(30, prepare)
    assert store.paused == [(0, "oncehook", "failed for 3 days without a success")]
    assert heard.out == [("gone", "failed for 3 days without a success")]


def test_large_numbers_of_a_check_are_grouped() -> None:
    counted = [(1, 0, "received", 6079), (1, 0, "accepted", 6079)]
    arrivals, events, *_ = conservation(Tally(counted, {1: 6079}, {}, bad_keys=0, lone_pending=0, misplaced_heads=0))
    assert arrivals.detail.startswith("6,079 received = ")
    assert events.detail.startswith("6,079 events kept = ")
