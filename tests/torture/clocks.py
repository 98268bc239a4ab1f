"""T9: workers' clocks are wrong and jump by hours and days; nothing is stolen, nothing is early (R19, R31, R63, R64).

Each process reads how wrong its clock is from a file of its own (`ONCEHOOK_CLOCK`, see `oncehook.clock`). In the end
everything that is kept is made 29 days old, and what was sent first is sent again: it must still be known.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import psycopg

from tests.torture.fleet import Attempt
from tests.torture.ledger import Entry
from tests.torture.nemesis import LEASE
from tests.torture.world import Component, World

HOUR, DAY = 3600.0, 86400.0
WRONG = (0.0, HOUR, -HOUR, DAY, -DAY, 2 * DAY, -2 * DAY, 0.5, -0.5)
"""Not more: from the earliest to the end of the horizon it must be less than what is kept."""
HORIZON = 29 * DAY


class Clocks(Component):
    """Skewed and jumping."""

    id = "T9"
    what = "clocks of processes skewed, and jumping by hours and days"
    needs: ClassVar = dict.fromkeys(("sqlite", "postgres"), ("jumped", "retried", "horizon", "in_a_row"))

    async def prepare(self, world: World) -> None:
        world.set(handlers="note,book")  # a thread that outlasts a stop would leave its lease to run out
        self.files: list[Path] = []

    async def arrange(self, world: World) -> None:
        for process in world.fleet.processes:
            file = world.engine.folder / f"clock-{process.name}"
            file.write_text(str(world.chance.choice(WRONG)))
            self.files.append(file)
            process.settings["ONCEHOOK_CLOCK"] = str(file)

    async def rage(self, world: World) -> None:
        next_stop, more = time.monotonic() + 1.0, True
        while more:
            file = world.chance.choice(self.files)
            _replace(file, str(world.chance.choice(WRONG)))
            world.history.fault("clock_jump", file.name)
            world.seen.add("jumped")
            if time.monotonic() > next_stop:  # on SQLite a store looks at the wall clock when it is opened
                await world.nemesis.stop(world.chance.choice(world.fleet.processes))
                next_stop = time.monotonic() + world.chance.uniform(1.0, 4.0)
            more = await world.passing(0.02, 0.1)
        await self._at_the_end_of_the_horizon(world)

    async def _at_the_end_of_the_horizon(self, world: World) -> None:
        while not world.senders.acknowledged:
            await asyncio.sleep(0.1)
        known = list(world.senders.acknowledged)[:20]
        if world.is_sqlite:
            # Its own time never runs backward: from wherever the jumps have taken it, 26 days on are past them all.
            _replace(self.files[0], str(26 * DAY))
            await world.nemesis.stop(world.receivers[0])
        else:
            await asyncio.to_thread(_age, world, HORIZON)
        for key in known:
            answer = None
            while answer is None:
                answer = await world.senders.attempt(world.senders.sent[key])
                await asyncio.sleep(0 if answer else 0.1)
            if answer.status != "duplicate" or answer.event_id != world.senders.acknowledged[key]:
                world.wrong.append(f"{key}: sent again at the end of the horizon, and {answer}")
        world.seen.add("horizon")

    async def judge(self, world: World) -> list[str]:
        """Nobody died, so nobody's lease may have been taken (R31, R63); on SQLite its own time may jump forward.

        A lease that ran out because the database did not answer its heartbeats or its settlement, or because its holder
        was held up by the machine, was not taken by a clock: it is counted and shown, so that a run on a machine that
        is too busy can be told from a quiet one. So is one that its holder heard of too late to begin.
        """
        if world.is_sqlite:
            return []
        crashed = [attempt for attempt in world.fleet.attempts() if attempt.outcome == "crashed"]
        last = {entry.fence: entry for entry in world.fleet.ledger.entries()}
        stolen = [one for one in crashed if one.fence in last and not _has_lapsed(world, one, last[one.fence])]
        world.extra["lapsed_unanswered"] = len(crashed) - len(stolen)
        return [f"{attempt}: stolen, and nobody had died" for attempt in stolen]


def _has_lapsed(world: World, attempt: Attempt, last: Entry) -> bool:
    """Whether its holder says that its heartbeats got no answer while it had this lease, or that it slept; or had long
    been done. `last`: what it has written last."""
    if last.moment == "end" and attempt.ended_at - last.at > LEASE / 2:
        return True
    held_by = [process for process in world.fleet.processes if last.pid in process.pids]
    times = [line["timestamp"] for process in held_by for line in process.said("heartbeat.unanswered")]
    if any(attempt.started_at <= datetime.fromisoformat(at).timestamp() <= attempt.ended_at for at in times):
        return True
    sleeps = world.fleet.ledger.slept().get(last.pid, ())
    asleep = [min(end, attempt.ended_at) - max(start, attempt.started_at) for start, end in sleeps]
    return sum(seconds for seconds in asleep if seconds > 0) > LEASE / 2


def _replace(file: Path, text: str) -> None:
    """In one step: it is read at any moment."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def _age(world: World, seconds: float) -> None:
    """As if all keys had been seen so long ago. A clock of PostgreSQL's own cannot be set by a test."""
    url, _, schema = world.engine.url.partition("?schema=")
    with psycopg.connect(url, options=f"-csearch_path={schema}") as connection:
        connection.execute("LOCK TABLE keys IN SHARE ROW EXCLUSIVE MODE")  # arrivals take its rows in another order
        connection.execute(
            "UPDATE keys SET first_seen = first_seen - %(age)s, last_seen = last_seen - %(age)s,"
            " expires_at = expires_at - %(age)s",
            {"age": timedelta(seconds=seconds)},
        )
