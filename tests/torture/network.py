"""T7: connections are cut, reset, silenced, slowed and robbed of answers, by a proxy in front of PostgreSQL and of the
HTTP destination (R4, R42, R55)."""

from __future__ import annotations

import asyncio
import functools
from typing import ClassVar

from tests.torture.proxy import KINDS, Fault, Link, Proxy
from tests.torture.world import PATIENT, Component, World

FAULTY = 0.5
"""The part of connections to the destination that a fault awaits."""


class Network(Component):
    """Cut at byte n, half open, delay, drip, reset, answer lost."""

    id = "T7"
    what = "connections to PostgreSQL and to the destination broken at any byte"
    needs: ClassVar = {
        "sqlite": ("retried", "in_a_row"),
        "postgres": ("retried", "in_a_row", "refused_503", "crash_between_commit_and_ack"),
    }
    may_fail = ("book", "hook")
    share = 3.0
    store: Proxy | None = None

    async def prepare(self, world: World) -> None:
        # No `stamp`: a thread cannot be ended when its lease is lost (DESIGN.md 8.16).
        world.set(handlers="note,book", retry=PATIENT)
        sink = await world.open_sink()
        told = functools.partial(self._told, world)
        outward = Proxy(sink.port, functools.partial(told, "http"), lambda: self._plan(world))
        self.outward = await world.stack.enter_async_context(outward.open())
        world.set(sink=f"http://127.0.0.1:{outward.port}/hook")
        if not world.is_sqlite:
            url = world.engine.url
            port = int(url.partition("?")[0].rpartition(":")[2].partition("/")[0])
            self.store = Proxy(port, functools.partial(told, "store"), lambda: None)
            await world.stack.enter_async_context(self.store.open())
            world.set(store=url.replace(f":{port}/", f":{self.store.port}/"))

    @staticmethod
    def _told(world: World, where: str, kind: str) -> None:
        world.history.fault(f"{where}_{kind}")

    def _plan(self, world: World) -> Fault | None:
        if world.senders.resting.is_set() or world.chance.random() > FAULTY:
            return None
        return Fault(
            world.chance.choice(KINDS), world.chance.choice(["up", "down"]), int(2 ** world.chance.uniform(0, 12)),
            world.chance.uniform(0.1, 1.5),
        )  # fmt: skip

    async def rage(self, world: World) -> None:
        proxies = [proxy for proxy in (self.outward, self.store) if proxy]
        while await world.passing(0.01, 0.08):
            proxy = world.chance.choice(proxies)
            if links := sorted((link for link in proxy.links if not link.fault), key=lambda link: link.number):
                self._strike(world, proxy, world.chance.choice(links))
        await self._lose_an_answer_surely(world)
        for proxy in proxies:
            for link in proxy.links:
                link.fault = None

    async def _lose_an_answer_surely(self, world: World) -> None:
        """Every connection to the database loses its next answer, until one of them was to a commit of arrivals."""
        for _ in range(60):
            if self.store is None or world.senders.recovered:
                return
            for link in self.store.links:
                self.store.strike(link, "lose_answer", "down", 0, 0.0)
            await asyncio.sleep(0.5)

    def _strike(self, world: World, proxy: Proxy, link: Link) -> None:
        kind = world.chance.choice(KINDS)
        side = "down" if kind == "lose_answer" else world.chance.choice(["up", "down"])
        seconds = world.chance.choice([0.05, 0.2, 0.5, 2.0])
        proxy.strike(link, kind, side, world.chance.choice([0, 7, 100, 500]), seconds)
