"""The nemesis: does to processes what the world does, from a seed; beside chance, blows that always strike.

Chance alone hits the narrow moments too seldom (PROMISES.md part 3), so it also has processes die at named points, and
each run has one worker killed, one frozen past its lease and one stopped in the middle of an attempt that it has surely
begun, one receiver killed between commit and answer, and one order that kills whoever works on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from tests.torture.fleet import Fleet, Process, until
from tests.torture.history import History
from tests.torture.ledger import Entry
from tests.torture.senders import Senders

LEASE = 1.0

Blow = Callable[[Process], Awaitable[None]]

RECEIVING = ("before_intake", "after_intake")
WORKING = {
    "sqlite": ("after_lease", "after_effect", "before_commit", "after_commit"),
    "postgres": (
        *("after_lease", "before_settle", "after_settle"),
        *("after_effect", "before_tx_settle", "before_transaction_commit"),
    ),
}
"""Named points of `oncehook.faults` that a process of each kind passes."""


class Nemesis:
    """Strikes one process after the other. What it has struck, it starts again."""

    def __init__(self, fleet: Fleet, workers: Sequence[Process], chance: random.Random, history: History) -> None:
        self._fleet = fleet
        self._workers = workers
        self._chance = chance
        self._history = history
        self._free = {process.name: asyncio.Lock() for process in fleet.processes}
        self.bad_exits: list[str] = []

    # -- by chance -----------------------------------------------------------------------------

    async def rage(self, seconds: float, blows: Sequence[Blow] = (), pause: tuple[float, float] = (0.05, 0.5)) -> None:
        """Strike at random for so long, and have everybody on their feet in the end."""
        choice = blows or (self.kill, self.kill, self.arm, self.freeze, self.nap, self.nap, self.stop)
        ends_at = asyncio.get_running_loop().time() + seconds
        under_way: set[asyncio.Task[None]] = set()
        while asyncio.get_running_loop().time() < ends_at:
            process = self._chance.choice(self._fleet.processes)
            if not self._free[process.name].locked():
                under_way.add(asyncio.ensure_future(self._chance.choice(choice)(process)))
            await asyncio.sleep(self._chance.uniform(*pause))
            under_way |= {asyncio.ensure_future(self.revive(process)) for process in self._fallen()}
        await asyncio.gather(*under_way)
        await self.revive_all()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """A supervisor: whoever falls is started again. What it has begun it ends, or two would be started."""
        over = asyncio.Event()

        async def watch() -> None:
            while not over.is_set():
                await asyncio.sleep(0.1)
                await self.revive_all()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            over.set()
            await task

    async def revive_all(self) -> None:
        while fallen := self._fallen():
            await asyncio.gather(*map(self.revive, fallen))

    def _fallen(self) -> list[Process]:
        return [p for p in self._fleet.processes if not p.is_running and not self._free[p.name].locked()]

    async def revive(self, process: Process) -> None:
        """Start what has killed itself: by a named point, or over a poisonous order."""
        async with self._free[process.name]:
            if not process.is_running:
                self._note_end(process)
                await self._start(process)

    async def kill(self, process: Process) -> None:
        async with self._free[process.name]:
            self._record("kill", process)
            await asyncio.to_thread(process.kill)
            await self._start(process)

    async def arm(self, process: Process) -> None:
        """Kill it, and have its successor die at a named point; or sleep there past its lease."""
        async with self._free[process.name]:
            self._record("kill", process)
            await asyncio.to_thread(process.kill)
            name = self._chance.choice(self._points(process))
            pause = ":pause=1.5" if self._chance.random() < 0.2 else ""
            await self._start(process, fault=f"{name}:{self._chance.randint(1, 12)}{pause}")

    def _points(self, process: Process) -> Sequence[str]:
        if self._fleet.ledger.is_sqlite:
            return RECEIVING + WORKING["sqlite"]
        return RECEIVING if process not in self._workers else WORKING["postgres"]

    async def freeze(self, process: Process) -> None:
        await self._sleep("freeze", process, self._chance.uniform(0.5, 2.0) * LEASE)

    async def nap(self, process: Process) -> None:
        """Frozen, for less than its lease."""
        await self._sleep("nap", process, self._chance.uniform(0.01, 0.3) * LEASE)

    async def _sleep(self, op: str, process: Process, seconds: float) -> None:
        async with self._free[process.name]:
            self._record(op, process)
            process.freeze()
            try:
                await asyncio.sleep(seconds)
            finally:  # whoever is called off must not leave it frozen: it could not even be told to stop
                process.thaw()

    async def stop(self, process: Process) -> None:
        async with self._free[process.name]:
            self._record("stop", process)
            code = await asyncio.to_thread(process.stop)
            if code not in (0, -9):  # -9: its own end, by a named point or a poisonous order
                self.bad_exits.append(f"{process.name} ended with {code} when it was told to stop")
            await self._start(process)

    async def _start(self, process: Process, fault: str = "") -> None:
        await asyncio.sleep(self._chance.uniform(0.0, 0.2))
        await asyncio.to_thread(process.launch, fault=fault)
        while True:
            try:
                await asyncio.to_thread(process.ready)
            except AssertionError:
                if process.process.poll() != -9:
                    raise
                self._note_end(process)
                await asyncio.to_thread(process.launch)
            else:
                return

    def _note_end(self, process: Process) -> None:
        code = process.process.poll()
        if code != -9:
            self.bad_exits.append(f"{process.name} ended by itself with {code}: {process.text()[-2000:]}")
        self._record("kill_at_point" if process.fault else "kill_by_poison", process)

    def _record(self, op: str, process: Process) -> None:
        self._history.fault(op, process.name, process.pid)

    # -- for certain ---------------------------------------------------------------------------

    async def strike_surely(self, senders: Senders) -> None:
        """Each blow once, in the middle of an attempt; and one order that nobody survives."""
        killed, stopped, frozen = (self._fleet.gate(name) for name in ("killed", "stopped", "frozen"))
        await senders.send("killed", "killed", gate=str(killed))
        await self.kill(await self._at_work_on("killed"))
        killed.touch()

        await senders.send("stopped", "stopped", gate=str(stopped))
        await self.stop(await self._at_work_on("stopped"))
        stopped.touch()

        # It blocks its loop, so that the first thing it does when it wakes is to say that it is done.
        await senders.send("frozen", "frozen", blocking_gate=str(frozen))
        process = await self._at_work_on("frozen")
        async with self._free[process.name]:
            self._record("freeze", process)
            process.freeze()
            frozen.touch()
            if len(self._workers) > 1:
                await asyncio.to_thread(until, lambda: self._ended("frozen"), "somebody else done with it")
            else:
                await asyncio.sleep(2 * LEASE)
            process.thaw()

    async def strike_between_commit_and_answer(self, receiver: Process) -> None:
        """A receiver dies when it has committed and not yet answered."""
        async with self._free[receiver.name]:
            self._record("kill", receiver)
            await asyncio.to_thread(receiver.kill)
            await self._start(receiver, fault="after_intake:1")

    async def poison(self, senders: Senders) -> None:
        """An order that kills whoever works on it, until it is condemned."""
        await senders.send("poison", None, kill="note")
        await asyncio.to_thread(until, lambda: self._condemned("poison"), "the poisonous order dead")

    def _condemned(self, key: str) -> bool:
        found = self._fleet.deliveries().get(("note", key))
        return found is not None and found[0] == "dead"

    async def _at_work_on(self, key: str) -> Process:
        entry = await asyncio.to_thread(until, lambda: self._begun(key), f"somebody at work on {key}")
        return next(process for process in self._workers if process.pid == entry.pid)

    def _begun(self, key: str) -> Entry | None:
        return next(iter(self._entries(key, "begin")), None)

    def _ended(self, key: str) -> int:
        return len(self._entries(key, "end"))

    def _entries(self, key: str, moment: str) -> list[Entry]:
        entries = self._fleet.ledger.entries()
        return [e for e in entries if (e.key, e.destination, e.moment) == (key, "note", moment)]
