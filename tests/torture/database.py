"""T8: PostgreSQL stops, crashes and starts again, and its backends are terminated; another program holds SQLite's lock.

For the claims' own Valkey see `tests.torture.claiming`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from typing import ClassVar

import psycopg

from tests.torture.world import PATIENT, Component, World

_AT_WORK = """
SELECT pid, wait_event IN ('CommitDelay', 'WALWrite', 'WALSync', 'WalSync', 'WalWrite') FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND application_name = 'oncehook'
"""


class Database(Component):
    """Stopped, crashed, terminated; locked."""

    id = "T8"
    what = "the store restarts, loses its connections, or is locked by somebody else"
    needs: ClassVar = {
        "sqlite": ("locked", "in_a_row"),
        "postgres": ("store_restart_in_commit", "refused_503", "in_a_row"),
    }
    # Every commit takes a while, so that a crash finds one under way.
    own_server: ClassVar = {"commit_delay": "20000", "commit_siblings": "0"}
    may_fail = ("book",)
    share = 2.0

    async def prepare(self, world: World) -> None:
        world.set(handlers="note,book", retry=PATIENT)

    async def rage(self, world: World) -> None:
        if world.server is None:
            await self._lock(world)
            return
        next_stop = time.monotonic() + 0.5
        while await world.passing(0.05, 0.25, reached=self._reached(world)):
            if time.monotonic() < next_stop:
                await asyncio.to_thread(self._terminate, world)
            else:
                await asyncio.to_thread(self._restart, world)
                next_stop = time.monotonic() + world.chance.uniform(1.0, 4.0)

    @staticmethod
    def _reached(world: World) -> bool:
        return "store_restart_in_commit" in world.seen and bool(world.senders.answers["503"])

    def _terminate(self, world: World) -> None:
        assert world.server is not None
        with psycopg.connect(world.server.url, autocommit=True, application_name="nemesis") as connection:
            pids = [pid for pid, _ in connection.execute(_AT_WORK).fetchall()]
            if pids:
                connection.execute("SELECT pg_terminate_backend(%s)", [world.chance.choice(pids)])
                world.history.fault("backend_terminated")

    def _restart(self, world: World) -> None:
        server, crash = world.server, world.chance.random() < 0.7
        assert server is not None
        with psycopg.connect(server.url, autocommit=True, application_name="nemesis") as connection:
            for _ in range(200):
                if any(committing for _, committing in connection.execute(_AT_WORK).fetchall()):
                    world.seen.add("store_restart_in_commit")
                    break
            server.stop(immediate=crash)
        world.history.fault("database_crash" if crash else "database_stop")
        time.sleep(world.chance.uniform(0.0, 0.6))
        server.start()

    async def _lock(self, world: World) -> None:
        """Another program writes, or reads for long: what arrives waits, or is refused."""
        path = world.engine.folder / "inbox.db"
        while await world.passing(0.02, 0.2, reached="locked" in world.seen):
            with closing(sqlite3.connect(path, timeout=0.05, isolation_level=None)) as rival:
                try:
                    rival.execute("BEGIN IMMEDIATE" if world.chance.random() < 0.7 else "BEGIN")
                    rival.execute("SELECT count(*) FROM events").fetchone()
                except sqlite3.OperationalError:
                    continue
                world.history.fault("locked_by_another")
                world.seen.add("locked")
                await asyncio.sleep(world.chance.choice([0.02, 0.1, 0.3, 1.0]))
                rival.execute("ROLLBACK")
