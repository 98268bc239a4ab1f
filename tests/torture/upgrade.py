"""T10: a store with orders in it is brought to the next version under load, by migrations that are interrupted.

The next version is this program with one migration more: on PostgreSQL it migrates and works beside the present one; on
SQLite, where one process writes, after it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import psycopg

import oncehook
from oncehook.model import Engine as EngineName
from oncehook.store.migrate import migrations
from tests.torture.app import make
from tests.torture.fleet import Order, Process
from tests.torture.world import Component, World
from tests.wire import signed

INHERITED = 60

NEXT = {
    "sqlite": "CREATE TABLE IF NOT EXISTS novelties (id INTEGER PRIMARY KEY);\n",
    "postgres": "ALTER TABLE events ADD COLUMN IF NOT EXISTS novelty text;\n"
    "ALTER TABLE deliveries ADD COLUMN IF NOT EXISTS novelty text;\n",
}


class Upgrade(Component):
    """Interrupted migrations, two versions at once."""

    id = "T10"
    what = "a store migrated under load, migrations interrupted, two versions on one store"
    needs: ClassVar = {
        "sqlite": ("migration_interrupted", "newer_schema_refused"),
        "postgres": ("migration_interrupted", "newer_schema_refused", "two_versions_at_work"),
    }

    async def prepare(self, world: World) -> None:
        for _ in range(2):
            await asyncio.to_thread(self._interrupt, world, world.fleet.server("migrator"), 0)
        world.fleet.processes.clear()
        self.inherited = await _old_orders(world)

    def _interrupt(self, world: World, process: Process, stays: int) -> None:
        """A migration that dies just before its commit leaves nothing behind."""
        world.history.fault("migration_killed")
        assert process.launch(fault="before_migration_commit:1").wait() == -9, process.text()
        if (found := _version(world)) != stays:
            world.wrong.append(f"a migration that died left the schema at version {found}, not {stays}")
        world.seen.add("migration_interrupted")

    async def rage(self, world: World) -> None:
        world.senders.sent |= self.inherited
        kept = world.engine.events()
        world.senders.acknowledged |= {key: f"evt_{kept[key].hex()}" for key in self.inherited}
        present = _version(world)
        newer = await asyncio.to_thread(_next_version, world)
        more = True
        while more:
            await asyncio.sleep(world.chance.uniform(0.3, 0.8))
            await self._move_on(world, newer, present)
            await asyncio.to_thread(self._refused, world)
            await asyncio.sleep(world.chance.uniform(0.2, 0.5))
            await self._move_back(world, present)
            more = await world.passing(0.1, 0.3)

    async def _move_on(self, world: World, newer: str, present: int) -> None:
        """One process after the other becomes the next version; the first of them migrates, at the second try."""
        processes = world.fleet.processes
        world.chance.shuffle(processes)
        for n, process in enumerate(list(processes)):
            await asyncio.to_thread(process.stop)
            process.program = [newer]
            if n == 0:
                await asyncio.to_thread(self._interrupt, world, process, present)
            world.history.fault("upgraded", process.name)
            await asyncio.to_thread(process.start)
            if n == 0 and len(processes) > 1:
                world.seen.add("two_versions_at_work")
                await asyncio.sleep(0.5)

    def _refused(self, world: World) -> None:
        """This version does not touch a store that a newer one has changed (R65)."""
        version = _version(world)
        process = Process("older", world.engine.folder / "older", ("worker",), dict(world.fleet.settings))
        code = process.launch().wait()
        if code == 0 or str(version) not in process.text():
            world.wrong.append(f"a newer schema was not refused: {code} {process.text()[-500:]}")
        world.seen.add("newer_schema_refused")

    async def _move_back(self, world: World, present: int) -> None:
        """What the next version added is forgotten, and everybody is this version again."""
        for process in world.fleet.processes:
            await asyncio.to_thread(process.stop)
        _execute(world, f"DELETE FROM migrations WHERE version > {present}")
        for process in world.fleet.processes:
            process.program = []
            process.launch()
        for process in world.fleet.processes:
            await asyncio.to_thread(process.ready)


# -- stores of another age ---------------------------------------------------------------------


async def _old_orders(world: World) -> dict[str, Order]:
    """Take in orders that nobody works on before the fleet starts."""
    orders: dict[str, Order] = {}
    shop = make(world.fleet.settings)
    async with shop.running(work=False):
        for n in range(INHERITED):
            order = {"id": f"old-{n}", "subject": f"s{n % 4}", "sleep": 0.01}
            body = json.dumps(order).encode()
            receipt = await shop.receive("orders", signed(body), body)
            assert receipt.outcome == "accepted"
            orders[order["id"]] = order
    return orders


def _next_version(world: World) -> str:
    """A copy of this program with one migration more; returns where it is."""
    folder = world.engine.folder / "next"
    package = folder / "oncehook"
    shutil.copytree(Path(oncehook.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, sql in NEXT.items():
        known = migrations(EngineName[name])[-1].version
        (package / "store" / "migrations" / name / f"{known + 1:04d}_next.sql").write_text(sql)
    return str(folder)


def _version(world: World) -> int:
    try:
        ((version,),) = world.engine.rows("SELECT coalesce(max(version), 0) FROM migrations")
    except (psycopg.errors.UndefinedTable, sqlite3.OperationalError):
        return 0
    return int(version)


def _execute(world: World, statement: str) -> None:
    if world.is_sqlite:
        with closing(sqlite3.connect(world.engine.folder / "inbox.db", isolation_level=None)) as connection:
            connection.execute(statement)
        return
    url, _, schema = world.engine.url.partition("?schema=")
    with psycopg.connect(url, options=f"-csearch_path={schema}", autocommit=True) as connection:
        connection.execute(statement)
