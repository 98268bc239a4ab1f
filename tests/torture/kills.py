"""T4: every process is killed, frozen and stopped, at random and at named points, while orders come in."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

from tests.torture.fleet import until
from tests.torture.world import Component, World

COMMON = ("reclaimed", "in_a_row", "crash_between_commit_and_ack", "duplicate_in_flight", "conflict", "poison_dead")


class Kills(Component):
    """Kill, freeze, stop."""

    id = "T4"
    what = "processes killed, frozen and stopped, at random and at named points"
    needs: ClassVar = {
        # On SQLite nobody can take over from a process that sleeps: its leases are its own when it wakes.
        "sqlite": (*COMMON, "drain_with_work_left"),
        "postgres": (*COMMON, "drain_with_work_left", "stale_refused"),
    }
    share = 4.0

    async def rage(self, world: World) -> None:
        nemesis, senders = world.nemesis, world.senders
        await nemesis.strike_surely(senders)
        for receiver in world.receivers:
            await nemesis.strike_between_commit_and_answer(receiver)
            await asyncio.to_thread(until, lambda process=receiver: not process.is_running, "its end after a commit")
            await nemesis.revive(receiver)
        async with nemesis.watching():
            # Before the storm: in it there are always others that must run alone first.
            await nemesis.poison(senders)
            await nemesis.rage(max(world.ends_at - time.monotonic(), 2.0))
        await nemesis.revive_all()
