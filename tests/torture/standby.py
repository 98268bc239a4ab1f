"""T13: the primary dies under load, its standby is promoted, and a new standby follows that one; again and again.

Commits wait for the standby. Before the primary dies the standby often stops following, so that what was acknowledged
without it would be gone; for as long as that goes on nothing may be acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

from tests.servers import Postgres
from tests.torture.world import PATIENT, Component, World


class Standby(Component):
    """Promoted, and followed again."""

    id = "T13"
    what = "the primary dies, and a standby for which commits wait is promoted"
    engines = ("postgres",)
    needs: ClassVar = {"postgres": ("promoted", "refused_503", "in_a_row")}
    own_server: ClassVar = {}
    may_fail = ("book",)
    share = 3.0

    async def prepare(self, world: World) -> None:
        world.set(handlers="note,book", retry=PATIENT)
        assert world.server is not None
        self.primary, self.schema = world.server, world.engine.url.partition("?")[2]
        self.standby = await self._follow(world)
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in (self.primary, self.standby))
        world.set(store=f"postgresql://oncehook@{hosts}/postgres?{self.schema}")

    async def _follow(self, world: World, port: int | None = None) -> Postgres:
        """A standby of the primary, for which its commits wait from now on."""
        standby = await asyncio.to_thread(lambda: Postgres(self.primary, port=port))
        world.stack.callback(standby.remove)
        while not await asyncio.to_thread(lambda: self.primary.is_followed):
            await asyncio.sleep(0.05)
        return standby

    async def rage(self, world: World) -> None:
        while await world.passing(0.5, 2.0, reached=self._reached(world)):
            await self._fail_over(world)

    @staticmethod
    def _reached(world: World) -> bool:
        return "promoted" in world.seen and bool(world.senders.answers["503"])

    async def _fail_over(self, world: World) -> None:
        dead, self.primary = self.primary, self.standby
        is_blind = world.chance.random() < 0.7
        with self.primary.follower_stopped() if is_blind else contextlib.nullcontext():
            await asyncio.sleep(world.chance.choice([0.0, 0.3, 2.0]) if is_blind else 0.0)
            await asyncio.to_thread(dead.stop, immediate=True)
        world.history.fault("primary_died_unfollowed" if is_blind else "primary_died")
        await asyncio.sleep(world.chance.uniform(0.0, 1.0))
        await asyncio.to_thread(self.primary.promote)
        world.seen.add("promoted")
        world.engine.url = f"{self.primary.url}?{self.schema}"
        world.fleet.ledger.move(world.engine.url)
        await asyncio.to_thread(dead.remove)
        self.standby = await self._follow(world, dead.port)
