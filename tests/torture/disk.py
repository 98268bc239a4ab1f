"""T6: the disk fills up and is freed again, over and over, while orders come in (R3, R58, R59).

Where this process may mount one, the store lies on a small file system of its own, which is filled to the brim. A limit
on the size of files, set and lifted from outside, makes every write to SQLite's files fail; PostgreSQL's backends get
one that lets no table grow, where there is no small file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import resource
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import psycopg

from tests.torture.world import PATIENT, Component, World

SMALL = 48 << 20
"""Bytes of the small file system."""

WAL_SEGMENT = 16 << 20
"""A limit below this would stop PostgreSQL itself, not a table."""


class Disk(Component):
    """Full, and free again."""

    id = "T6"
    what = "disk full and free again"
    needs: ClassVar = {"sqlite": ("disk_full", "refused_503"), "postgres": ("disk_full", "refused_503")}
    own_server: ClassVar = {"max_wal_size": "2GB", "wal_recycle": "off"}
    may_fail = ("note", "book")

    def __init__(self) -> None:
        self.filler: Path | None = None

    async def prepare(self, world: World) -> None:
        world.set(handlers="note,book", retry=PATIENT)
        small = _mounted(world)
        if small is None:
            return
        self.filler = small / "filler"
        if world.is_sqlite:
            world.engine.url = f"sqlite:{small / 'inbox.db'}"
            world.fleet.settings["SHOP_STORE"] = world.engine.url
            world.fleet.ledger.move(world.engine.url)
            (world.engine.folder / "inbox.db").symlink_to(small / "inbox.db")
        else:
            await asyncio.to_thread(_settle_there, world, small)

    async def rage(self, world: World) -> None:
        if world.server is not None:
            world.senders.padding = 20_000  # so that tables grow
            if self.filler is None:
                await self._grow(world)
        more = True
        while more:
            before = world.senders.answers["503"]
            if self.filler is not None and (world.server or world.chance.random() < 0.5):
                await self._fill(world, self.filler)
            else:
                await self._limit(world)
            if world.senders.answers["503"] > before:
                world.seen.add("disk_full")
            more = await world.passing(0.1, 0.6, reached="disk_full" in world.seen)

    async def _grow(self, world: World) -> None:
        """Let a table outgrow a segment of the log; from then on every order is large."""
        large = [world.senders.send(f"large-{n}", None, padding="x" * 900_000) for n in range(22)]
        await asyncio.gather(*large)

    async def _limit(self, world: World) -> None:
        pids = _backends(world) if world.server else [process.pid for process in world.fleet.processes]
        size = max(_largest(world), WAL_SEGMENT) if world.server else 4 << 10
        world.history.fault("file_limit")
        with _limited(pids, size):
            await asyncio.sleep(world.chance.uniform(0.2, 1.0))

    async def _fill(self, world: World, filler: Path) -> None:
        world.history.fault("disk_filled")
        with filler.open("wb") as file:
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), b"\0" * 4096)
            await asyncio.sleep(world.chance.uniform(0.3, 1.0))
        filler.unlink()

    async def judge(self, world: World) -> list[str]:
        if not world.is_sqlite:
            return []
        with contextlib.closing(sqlite3.connect(world.engine.folder / "inbox.db")) as connection:
            ((verdict,),) = connection.execute("PRAGMA integrity_check(1)").fetchall()
        return [] if verdict == "ok" else [f"the file is damaged: {verdict}"]


@contextlib.contextmanager
def _limited(pids: Iterable[int], size: int) -> Iterator[None]:
    limited = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            limited[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, limited[pid][1]))
    try:
        yield
    finally:
        for pid, limit in limited.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def _backends(world: World) -> list[int]:
    """Those that serve our processes now. New ones are not limited: a connection that is made again can write."""
    assert world.server is not None
    with psycopg.connect(world.server.url) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return [pid for (pid,) in found.fetchall()]


def _largest(world: World) -> int:
    assert world.server is not None
    with psycopg.connect(world.server.url) as connection:
        ((size,),) = connection.execute(
            "SELECT max(pg_relation_size(oid)) FROM pg_class WHERE relkind IN ('r', 't', 'i')"
        ).fetchall()
        return int(size)


def _mounted(world: World) -> Path | None:
    """A small file system of one's own, where this process may make one."""
    if os.geteuid() != 0:
        return None
    small = Path(tempfile.mkdtemp(prefix="oncehook-small-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL},mode=755", "tmpfs", str(small)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        small.rmdir()
        return None
    world.stack.callback(small.rmdir)
    world.stack.callback(subprocess.run, ["umount", "-l", str(small)], check=True)
    return small


def _settle_there(world: World, small: Path) -> None:
    """Have PostgreSQL make its tables on the small file system; its log stays where it is."""
    assert world.server is not None
    space = small / "space"
    space.mkdir()
    nobody = pwd.getpwnam("nobody")
    os.chown(space, nobody.pw_uid, nobody.pw_gid)
    with psycopg.connect(world.server.url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        connection.execute("ALTER ROLE oncehook SET default_tablespace = small")
