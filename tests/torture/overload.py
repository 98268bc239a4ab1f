"""T11: more comes in than can be taken, on a hot subject, for a slow sink; memory and log stay bounded (R9, R57).

First it measures what the receivers take, then it offers twice as much, in an open loop, and holds the receivers still
now and then so that what was offered meanwhile comes down on them at once. What is refused is refused by 503.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import ClassVar

from tests.torture.fleet import Order, Process
from tests.torture.senders import PATIENCE, Senders
from tests.torture.world import Component, World
from tests.wire import Client, signed

AT_ONCE = 400
"""Requests under way at most: what is more than the other side takes piles up here and there, not in this process."""

MOST = 2500
"""Orders of one run, so that they can be worked off."""

GROWTH = 160 << 20
LOG = 160 << 20
"""Bytes that a process may grow by under overload, and that SQLite's log may reach. Bounds, not aims."""


class Overload(Component):
    """Twice the capacity, a hot subject, a slow sink."""

    id = "T11"
    what = "twice the capacity on a hot subject for a slow destination"
    needs: ClassVar = {"sqlite": ("overloaded",), "postgres": ("overloaded",)}
    may_fail = ("hook",)

    async def prepare(self, world: World) -> None:
        sink = await world.open_sink(delay=0.01)
        world.set(handlers="note", budget="0.05s", sink=sink.url, retry=",".join(["0.2s"] * 20))

    async def rage(self, world: World) -> None:
        flood = Flood(world)
        capacity = await flood.measure()
        before = {process.name: _memory(process) for process in world.fleet.processes}
        watch = asyncio.create_task(self._watch(world, before))
        await flood.offer(2 * capacity)
        watch.cancel()
        if flood.is_too_much():
            world.seen.add("overloaded")
        grown = {process.name: _memory(process) - before[process.name] for process in world.fleet.processes}
        world.extra["overload"] = {
            "capacity_per_s": round(capacity),
            "offered_per_s": round(flood.offered),
            "memory_growth_mb": round(max(grown.values()) / (1 << 20), 1),
            "log_mb": round(_log(world) / (1 << 20), 1),
        }
        wrong = [f"{name} grew by {n >> 20} MB" for name, n in grown.items() if n > GROWTH]
        world.wrong += wrong + ([f"the log has {_log(world) >> 20} MB"] if _log(world) > LOG else [])
        world.senders.resting.set()  # or there would always be something left
        await asyncio.to_thread(world.fleet.finish)

    async def _watch(self, world: World, before: dict[str, int]) -> None:
        """Hold receivers still, so that arrivals pile up."""
        while True:
            await asyncio.sleep(world.chance.uniform(0.1, 0.4))
            await world.nemesis.nap(world.chance.choice(world.receivers))


class Flood:
    """Many connections that are kept, and orders by the hundred."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free: list[Client] = []
        self._n = 0
        self.offered = 0.0

    async def measure(self) -> float:
        """Orders a second that are answered when nobody asks for more than that."""
        started, ends_at = time.monotonic(), time.monotonic() + 0.5

        async def ask() -> None:
            while time.monotonic() < ends_at and self._n < MOST // 3:
                await self._send()

        await asyncio.gather(*(ask() for _ in range(16)))
        return self._n / (time.monotonic() - started)

    async def offer(self, rate: float) -> None:
        """So many a second, whether they are answered or not."""
        under_way: set[asyncio.Task[None]] = set()
        started, first = time.monotonic(), self._n
        while self._world.has_time(reached=self.is_too_much()) and self._n < MOST:
            due = first + (time.monotonic() - started) * rate
            while self._n < min(due, MOST) and len(under_way) < AT_ONCE:
                under_way.add(task := asyncio.create_task(self._send()))
                task.add_done_callback(under_way.discard)
            await asyncio.sleep(0.005)
        self.offered = (self._n - first) / max(time.monotonic() - started, 0.001)
        if under_way:
            await asyncio.wait(under_way)
        for client in self._free:
            client.close()

    def is_too_much(self) -> bool:
        """Somebody was refused, or got no answer."""
        return bool(self._world.senders.answers["503"] + self._world.senders.answers["nothing"])

    async def _send(self) -> None:
        world, senders = self._world, self._world.senders
        subject = "hot" if world.chance.random() < 0.2 else f"f{self._n % 200}"
        order: Order = {"id": f"flood-{self._n}", "subject": subject}
        self._n += 1
        senders.sent[order["id"]] = order
        senders.tries += 1
        client = self._free.pop() if self._free else world.chance.choice(world.receivers).client()
        said = await self._exchange(client, order, senders)
        senders.answers[said] += 1
        world.history.add("sender", said, order["id"])
        if said != "nothing":
            self._free.append(client)
        else:
            client.close()

    async def _exchange(self, client: Client, order: Order, senders: Senders) -> str:
        body = json.dumps(order).encode()
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await client.post("/in/orders", body, signed(body))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return "nothing"
        said = senders.read(order, answer)
        if said == "accepted":
            senders.acknowledged[order["id"]] = answer.json["event_id"]
        return said


def _memory(process: Process) -> int:
    """Resident bytes."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * 4096


def _log(world: World) -> int:
    log = world.engine.folder / "inbox.db-wal"
    return log.stat().st_size if log.exists() else 0
