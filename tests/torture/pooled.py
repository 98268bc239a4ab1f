"""T12: a pooler in transaction mode stands before PostgreSQL; it dies, the server behind it crashes, and processes are
killed.

It is a real PgBouncer where that is installed, otherwise the harsher one of `tests.pooler`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol

import psycopg

from tests.pooler import TransactionPooler
from tests.servers import PgBouncer, Postgres, free_port
from tests.torture.world import PATIENT, Component, World

_ANY = """
SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random()
"""


class Front(Protocol):
    """What stands before the server."""

    port: int

    async def start(self) -> None: ...
    async def kill(self) -> None: ...


class Bouncer:
    """A real PgBouncer."""

    def __init__(self, server: Postgres) -> None:
        self._pooler = PgBouncer(server)
        self.port = self._pooler.port

    async def start(self) -> None:
        await asyncio.to_thread(self._pooler.start)

    async def kill(self) -> None:
        await asyncio.to_thread(self._pooler.kill)


class OwnPooler:
    """The one of the tests, on the loop of the torture itself."""

    def __init__(self, server: Postgres) -> None:
        self._pooler = TransactionPooler("127.0.0.1", server.port, sessions=20)
        self.port = free_port()

    async def start(self) -> None:
        await self._pooler.start(self.port)

    async def kill(self) -> None:
        await self._pooler.stop()


class Pooler(Component):
    """Killed, and everything on both sides of it."""

    id = "T12"
    what = "PostgreSQL behind a pooler in transaction mode, which dies like everything around it"
    engines = ("postgres",)
    needs: ClassVar = {"postgres": ("pooler_killed", "refused_503", "reclaimed", "in_a_row")}
    own_server: ClassVar = {}
    may_fail = ("book",)
    share = 3.0

    async def prepare(self, world: World) -> None:
        world.set(handlers="note,book", retry=PATIENT)
        assert world.server is not None
        self.front: Front
        if PgBouncer.program():
            self.front = await asyncio.to_thread(Bouncer, world.server)
        else:
            self.front = OwnPooler(world.server)
            await self.front.start()
        world.stack.push_async_callback(self.front.kill)
        world.extra["pooler"] = type(self.front).__name__
        world.set(store=world.engine.url.replace(f":{world.server.port}/", f":{self.front.port}/"))

    async def rage(self, world: World) -> None:
        await world.nemesis.strike_surely(world.senders)
        blows = (self._kill_pooler, self._kill_pooler, self._crash_server, self._terminate, self._terminate, self._kill)
        while await world.passing(0.05, 0.6, reached=self._reached(world)):
            await world.chance.choice(blows)(world)
        await self._back(world)

    @staticmethod
    def _reached(world: World) -> bool:
        return "pooler_killed" in world.seen and bool(world.senders.answers["503"])

    async def _kill_pooler(self, world: World) -> None:
        await self.front.kill()
        world.history.fault("pooler_killed")
        world.seen.add("pooler_killed")
        await asyncio.sleep(world.chance.uniform(0.0, 0.6))
        await self.front.start()

    async def _crash_server(self, world: World) -> None:
        assert world.server is not None
        crash = world.chance.random() < 0.7
        await asyncio.to_thread(world.server.stop, immediate=crash)
        world.history.fault("database_crash" if crash else "database_stop")
        await asyncio.sleep(world.chance.uniform(0.0, 0.6))
        await asyncio.to_thread(world.server.start)

    async def _terminate(self, world: World) -> None:
        assert world.server is not None
        with psycopg.connect(world.server.url, autocommit=True, application_name="nemesis") as connection:
            if (found := connection.execute(_ANY).fetchone()) is not None:
                connection.execute("SELECT pg_terminate_backend(%s)", found)
                world.history.fault("backend_terminated")

    async def _back(self, world: World) -> None:
        """Wait until the server can be reached again: a process that cannot reach it ends, and is not our concern."""
        url = world.fleet.settings["SHOP_STORE"].partition("?")[0]
        while not await asyncio.to_thread(_answers, url):
            await asyncio.sleep(0.1)

    async def _kill(self, world: World) -> None:
        await self._back(world)
        await world.nemesis.kill(world.chance.choice(world.fleet.processes))


def _answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=5, prepare_threshold=None) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False
