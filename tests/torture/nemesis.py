"""The nemesis: does to processes what the world does, from a seed; beside chance, three blows that always strike.

Chance alone hits the narrow moments too seldom (PROMISES.md part 3), so each run also has one worker killed, one frozen
past its lease and one stopped, each in the middle of an attempt that it has surely begun.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tests.torture.fleet import Fleet, Process, until
from tests.torture.history import History
from tests.torture.ledger import Entry
from tests.torture.senders import Senders

LEASE = 1.0


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

    async def rage(self, seconds: float) -> None:
        """Strike at random for so long."""
        ends_at = asyncio.get_running_loop().time() + seconds
        blows: set[asyncio.Task[None]] = set()
        while asyncio.get_running_loop().time() < ends_at:
            process = self._chance.choice(self._fleet.processes)
            blow = self._chance.choice([self.kill, self.kill, self.freeze, self.stop])
            if not self._free[process.name].locked():
                blows.add(asyncio.create_task(blow(process)))
            await asyncio.sleep(self._chance.uniform(0.1, 0.7))
        await asyncio.gather(*blows)

    async def kill(self, process: Process) -> None:
        async with self._free[process.name]:
            self._record("kill", process)
            await asyncio.to_thread(process.kill)
            await self._start(process)

    async def freeze(self, process: Process) -> None:
        async with self._free[process.name]:
            self._record("freeze", process)
            process.freeze()
            await asyncio.sleep(self._chance.uniform(0.1, 2.0) * LEASE)
            process.thaw()

    async def stop(self, process: Process) -> None:
        async with self._free[process.name]:
            self._record("stop", process)
            code = await asyncio.to_thread(process.stop)
            if code:
                self.bad_exits.append(f"{process.name} ended with {code} when it was told to stop")
            await self._start(process)

    async def _start(self, process: Process) -> None:
        await asyncio.sleep(self._chance.uniform(0.0, 0.3))
        await asyncio.to_thread(process.start)

    def _record(self, op: str, process: Process) -> None:
        self._history.add("nemesis", op, process.name, process.pid)

    # -- for certain ---------------------------------------------------------------------------

    async def strike_surely(self, senders: Senders) -> None:
        """Each blow once, in the middle of an attempt."""
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
