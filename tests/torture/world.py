"""One run: a store, the processes around it, senders, a sink, and what is done to them; then the judgement.

A component says what is special about its run (`Component`); `play` is the same for all of them. The driver and pytest
call `play`, and get figures, complaints, and the rare states that were not reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psycopg

from tests.acceptance.conftest import Engine, make_engine
from tests.acceptance.sink import Request, Sink
from tests.servers import Postgres, fresh_schema
from tests.torture import checker
from tests.torture.figures import Figures, count
from tests.torture.fleet import Fleet, Process
from tests.torture.history import History
from tests.torture.nemesis import LEASE, Nemesis
from tests.torture.senders import Senders

ENGINES = ("sqlite", "postgres")

SUBJECTS, HOT = 8, 2
"""Of the first each has one sender that waits for its answers; to the others many send at once."""

RESTS_AFTER = 120.0
"""Seconds in which every sender must have its answer, once the faults are over."""

LONGER = 60.0
"""Seconds that a run goes on at most when its time is over, for a rare state that it has not reached yet."""

BACKLOG = 300
"""Deliveries that may wait before senders hold their breath."""

PATIENT = ",".join(["0.1s"] * 100)
"""A retry policy that outlasts any fault of a run."""


@dataclass
class World:
    """What a component may touch."""

    engine: Engine
    fleet: Fleet
    history: History
    chance: random.Random
    seconds: float
    stack: AsyncExitStack
    server: Postgres | None = None
    sink: Sink | None = None
    receivers: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """Rare states that the component itself has reached."""
    wrong: list[str] = field(default_factory=list)
    extra: dict[str, object] = field(default_factory=dict)
    """Figures that only this component has."""
    senders: Senders = field(init=False)
    nemesis: Nemesis = field(init=False)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.name == "sqlite"

    def set(self, **settings: str) -> None:
        """Settings of processes that are made from now on."""
        self.fleet.settings |= {f"SHOP_{name.upper()}": text for name, text in settings.items()}

    async def open_sink(self, delay: float = 0.0) -> Sink:
        """An HTTP destination, which writes history."""

        def answer(request: Request) -> int:
            self.history.add("sink", "request", json.loads(request.body)["id"])
            return 200

        self.sink = await self.stack.enter_async_context(Sink(answer, delay=delay).open())
        return self.sink

    def muster(self) -> None:
        """Receivers and workers: one process on SQLite; on PostgreSQL two of each, of which one is both."""
        if self.is_sqlite:
            self.receivers = self.workers = [self.fleet.server()]
        else:
            both = self.fleet.server("both")
            self.receivers = [self.fleet.server("receiver", "--no-worker"), both]
            self.workers = [self.fleet.worker("worker"), both]

    def start(self) -> None:
        for process in self.fleet.processes:
            process.launch()
        for process in self.fleet.processes:
            process.ready()

    async def passing(self, low: float, high: float, *, reached: bool = True) -> bool:
        """Wait a while by chance; says whether there is time left after that. Until everything is `reached` there is:
        on a machine that stands still for a second chance is not even asked."""
        await asyncio.sleep(self.chance.uniform(low, high))
        return self.has_time(reached=reached)

    def has_time(self, *, reached: bool = True) -> bool:
        return time.monotonic() < self.ends_at + (0.0 if reached else LONGER)

    def begin(self) -> None:
        self.ends_at = time.monotonic() + self.seconds


class Component:
    """What is special about one kind of run."""

    id: ClassVar[str]
    what: ClassVar[str]
    engines: ClassVar[tuple[str, ...]] = ENGINES
    needs: ClassVar[dict[str, tuple[str, ...]]] = {"sqlite": (), "postgres": ()}
    """Rare states without which a run proves nothing: figures that are not zero, or what the component has seen."""
    own_server: ClassVar[dict[str, str] | None] = None
    """Settings of a PostgreSQL of its own, for a run that would disturb others."""
    share: ClassVar[float] = 1.0
    """Its part of the time there is."""
    pause: ClassVar[float] = 0.15
    """Seconds between two orders of one sender, on average."""
    may_fail: ClassVar[tuple[str, ...]] = ()

    async def prepare(self, world: World) -> None:
        """Before there are any processes."""

    async def arrange(self, world: World) -> None:
        """When there are processes, before they are started."""

    async def rage(self, world: World) -> None:
        """Break things for `world.seconds`, while senders send; mend them in the end."""
        raise NotImplementedError

    async def judge(self, world: World) -> list[str]:
        """What only this component can find wrong."""
        return []


@dataclass
class Outcome:
    """What came of a run."""

    component: str
    engine: str
    figures: Figures
    wrong: Sequence[str]
    unreached: Sequence[str]


async def play(component: Component, engine: str, folder: Path, seconds: float, seed: int) -> Outcome:
    """One run, from an empty store to the judgement."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"{seed}-{engine}-{component.id}")
    async with AsyncExitStack() as stack:
        place, server = await asyncio.to_thread(_place, component, engine, folder, stack)
        fleet = Fleet(place, lease=f"{LEASE}s", patience="0.3")
        stack.callback(fleet.end)
        history = History(folder / "history.jsonl")
        stack.callback(history.close)
        world = World(place, fleet, history, chance, seconds, stack, server)
        await component.prepare(world)
        world.muster()
        await component.arrange(world)
        await asyncio.to_thread(world.start)
        world.senders = Senders(world.receivers, chance, history)
        world.nemesis = Nemesis(fleet, world.workers, chance, history)
        await _under_load(component, world)
        return await _settle(component, world)


def _place(component: Component, engine: str, folder: Path, stack: AsyncExitStack) -> tuple[Engine, Postgres | None]:
    if engine == "sqlite" or component.own_server is None:
        return make_engine(engine, folder, bare=True), None
    server = stack.enter_context(Postgres(**component.own_server))
    return Engine(engine, f"{server.url}?schema={fresh_schema()}", folder), server


async def _under_load(component: Component, world: World) -> None:
    senders = world.senders
    world.begin()
    load = [asyncio.create_task(senders.keep_sending(f"s{n}", f"s{n}", component.pause)) for n in range(SUBJECTS)]
    load += [asyncio.create_task(senders.crowd(f"hot{n}", component.pause)) for n in range(HOT)]
    load.append(asyncio.create_task(senders.keep_sending(None, "loose", component.pause)))
    load.append(asyncio.create_task(senders.send_what_is_rare()))
    brake = asyncio.create_task(_brake(world))
    try:
        await component.rage(world)
        senders.resting.set()
        async with asyncio.timeout(RESTS_AFTER):
            await asyncio.gather(*load)
    finally:
        for task in (*load, brake):
            task.cancel()
        await asyncio.gather(*load, brake, return_exceptions=True)


async def _brake(world: World) -> None:
    """Hold senders up while too much waits."""
    while True:
        with contextlib.suppress(sqlite3.Error, psycopg.Error):
            world.senders.behind = await asyncio.to_thread(world.fleet.left) > BACKLOG
        await asyncio.sleep(0.5)


def _stop(process: Process) -> int:
    """Its exit code when it is asked to stop. One that was revived a moment ago is let come to its feet first: before
    that nothing hears the signal, and it simply ends."""
    with contextlib.suppress(AssertionError):
        process.ready()
    return process.stop()


async def _settle(component: Component, world: World) -> Outcome:
    """Everybody stops, everything is worked off, and everything must add up."""
    fleet, senders = world.fleet, world.senders
    codes = [await asyncio.to_thread(_stop, process) for process in fleet.processes if process.is_running]
    await asyncio.to_thread(fleet.drain)
    sleepers = world.history.pids("freeze") | world.history.pids("nap")
    about = checker.Terms(frozen=sleepers | _paused(fleet), ambiguous=senders.ambiguous, may_fail=component.may_fail)
    wrong = [*world.wrong, *senders.wrong, *world.nemesis.bad_exits]
    wrong += [f"exit code {code} at the end" for code in codes if code not in (0, -9)]
    wrong += await checker.complaints(fleet, senders.sent, about=about)
    wrong += checker.not_as_acknowledged(senders.acknowledged, senders.sent, checker.places(fleet))
    wrong += checker.lost(fleet, senders.acknowledged) + checker.miscounted_conflicts(fleet, senders)
    if world.sink is not None:
        wrong += checker.wrong_at_sink(fleet, world.sink, senders.sent)
    wrong += await component.judge(world)
    figures = count(world, wrong)
    reached = {name for name, value in figures.reach.items() if value} | world.seen
    unreached = [name for name in component.needs[world.engine.name] if name not in reached]
    return Outcome(component.id, world.engine.name, figures, wrong, unreached)


def _paused(fleet: Fleet) -> set[int]:
    """Processes that a named point held up: they slept too."""
    return {pid for process in fleet.processes for pid in process.paused}
