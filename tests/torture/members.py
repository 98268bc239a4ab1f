"""Processes that share one SQLite file, killed at random: `python -m tests.torture.members --minutes 30 --seed 7`.

Each process emits and works: events with keys that others use too, events without a key, all on a few subjects, whose
handler commits an effect of its own now and then. A process that is killed is started again. In the end everything that
was acknowledged must be there once, nothing twice, in order, and done; and the file may never have been without an
owner for long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncehook.errors import StoreUnavailable
from oncehook.inbox import Inbox
from oncehook.store.sqlite.connection import holder

ROOT = Path(__file__).parents[2]
SUBJECTS = 5
OWNED_WITHIN = 2.0
"""Seconds after the death of an owner within which there is another."""


# -- one process -------------------------------------------------------------------------------


class Member:
    """An inbox that emits and works until it is killed, and notes what it was told."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.number = number
        self.name = f"{os.getpid()}.{time.time_ns()}"
        """Unlike the process's id no other one's in a long run."""
        self.inbox = Inbox(f"sqlite:{folder / 'inbox.db'}")
        self.inbox.on("app", name="handle", retry="quick", lease="5s", timeout="4s")(self.handle)

    def note(self, **fields: Any) -> None:
        os.write(self.notes, json.dumps({"at": time.time(), "pid": os.getpid(), **fields}).encode() + b"\n")

    async def handle(self, event: Any) -> None:
        said = event.json()
        self.note(begun=said["name"], subject=event.subject)
        if said["n"] % 7 == 0:
            event.commit(lambda c: c.execute("INSERT INTO effects (name) VALUES (?)", (said["name"],)))
        if said["n"] % 11 == 0 and not said.get("child"):
            child = {"n": 1, "name": f"child of {said['name']}", "child": True}
            event.emit("app", "child", child, key=child["name"], subject=event.subject)

    async def emit(self, n: int) -> None:
        name = f"{self.name}-{n}"
        key = None if n % 3 == 0 else f"key-{n % 500 if n % 2 else name}"
        self.note(asked=name, key=key)
        with suppress(StoreUnavailable):  # a sender with a key would try again; one without may or may not
            said = {"n": n, "name": name}
            event_id = await self.inbox.emit("app", "ping", said, key=key, subject=f"s{n % SUBJECTS}")
            self.note(acknowledged=name, key=key, event_id=event_id)

    async def run(self) -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await self.inbox.start()
        self.note(started=self.number)
        n = random.Random().randrange(1000)
        emits: set[asyncio.Task[None]] = set()
        while not ended.is_set():
            n += 1
            task = asyncio.create_task(self.emit(n))
            emits.add(task)
            task.add_done_callback(emits.discard)
            if len(emits) > 20:
                await asyncio.wait(emits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(random.Random().uniform(0.0, 0.02))
        if emits:
            await asyncio.wait(emits)
        await self.inbox.stop()


# -- all of them -------------------------------------------------------------------------------


@dataclass
class Run:
    """Some processes on one file, and what strikes them."""

    folder: Path
    seed: int
    size: int = 4
    deaths: int = 0
    owners_killed: int = 0
    longest_without: float = 0.0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.database = self.folder / "inbox.db"

    def start(self, number: int) -> subprocess.Popen[bytes]:
        with (self.folder / f"log-{number}").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.torture.members", "--member", str(number), str(self.folder)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
                stdout=log,
                stderr=log,
            )

    def strike(self, *, seconds: float, kills: int = 1_000_000) -> None:
        """Kill one after the other, the owner more often than the others, and start it again."""
        prepare(self.database)
        (self.folder / "notes").touch()
        self.processes = [self.start(number) for number in range(self.size)]
        ends_at = time.monotonic() + seconds
        self._wait_for_members()
        while time.monotonic() < ends_at and self.deaths < kills:
            time.sleep(self.dice.uniform(0.0, 0.4))
            held = holder(self.database)
            pids = {process.pid: place for place, process in enumerate(self.processes)}
            is_owner = held is not None and held.pid in pids and self.dice.random() < 0.6
            place = pids[held.pid] if is_owner and held is not None else self.dice.randrange(self.size)
            victim = self.processes[place]
            victim.send_signal(signal.SIGKILL if self.dice.random() < 0.9 else signal.SIGTERM)
            victim.wait(30)
            self.deaths += 1
            if held is not None and held.pid == victim.pid:
                self.owners_killed += 1
                self.longest_without = max(self.longest_without, self._wait_for_owner(victim.pid))
            self.processes[place] = self.start(place)
            self._wait_for_members()

    def _wait_for_members(self) -> None:
        """Wait until all are there: those that are still being loaded can take nobody's place."""
        began = time.monotonic()
        while (self.folder / "notes").read_bytes().count(b'"started"') < self.size + self.deaths:
            time.sleep(0.02)
            assert time.monotonic() - began < 60, "a process did not start"

    def _wait_for_owner(self, before: int = 0) -> float:
        began = time.monotonic()
        while (held := holder(self.database)) is None or held.pid in (0, before):
            time.sleep(0.005)
            assert time.monotonic() - began < 60, "nobody owns the file"
        return time.monotonic() - began

    def end(self) -> None:
        """Stop all of them, and finish what there is to do."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)
        asyncio.run(finish(self.folder))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(30)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(statement).fetchall()

    def check(self) -> dict[str, int]:
        """Raise AssertionError for anything that is lost, twice, out of order or undone; returns what there was."""
        notes = [json.loads(line) for line in (self.folder / "notes").read_bytes().splitlines()]
        rows = self.ask("SELECT e.id, e.key, e.body, e.subject FROM events e ORDER BY e.id")
        events = {f"evt_{id_.hex()}": (key, json.loads(body)["name"], subject) for id_, key, body, subject in rows}
        names = Counter(name for _, name, _ in events.values())
        acknowledged = [note for note in notes if "acknowledged" in note]
        lost = [note for note in acknowledged if note["event_id"] not in events]
        assert not lost, f"acknowledged and lost: {lost[:3]}"
        twice = [name for name, n in names.items() if n > 1]
        assert not twice, f"kept twice: {twice[:3]}"
        keys = Counter(key for key, _, _ in events.values() if key is not None)
        assert max(keys.values(), default=1) == 1, keys.most_common(3)
        by_key: dict[str, set[str]] = defaultdict(set)
        for note in acknowledged:
            if note["key"] is not None:
                by_key[note["key"]].add(note["event_id"])
        assert all(len(ids) == 1 for ids in by_key.values()), "one key, two ids"
        unkeyed = {note["acknowledged"] for note in acknowledged if note["key"] is None}
        assert unkeyed <= names.keys(), "an unkeyed event is another's"
        self._check_order(notes)
        assert self.ask("SELECT count(*) FROM deliveries WHERE status <> 'done'") == [(0,)]
        effects = Counter(name for (name,) in self.ask("SELECT name FROM effects"))
        assert max(effects.values(), default=1) == 1, "an effect was committed twice"
        done = {
            name for _, name, _ in events.values() if not name.startswith("child") and int(name.split("-")[1]) % 7 == 0
        }
        assert effects.keys() >= done, "an effect is missing"
        return {
            "events": len(events),
            "acknowledged": len(acknowledged),
            "deaths": self.deaths,
            "owners": self.owners_killed,
            "crashed": self.ask("SELECT count(*) FROM attempts WHERE outcome = 'crashed'")[0][0],
        }

    def _check_order(self, notes: list[dict[str, Any]]) -> None:
        """Of each subject, deliveries begin for the first time in order of commit."""
        order = {
            json.loads(body)["name"]: seq
            for body, seq in self.ask("SELECT e.body, d.seq FROM deliveries d JOIN events e ON e.id = d.event_id")
        }
        begun: dict[str, list[int]] = defaultdict(list)
        known: set[str] = set()
        for note in notes:
            if "begun" in note and note["begun"] not in known:
                known.add(note["begun"])
                begun[note["subject"]].append(order[note["begun"]])
        for subject, numbers in begun.items():
            assert numbers == sorted(numbers), f"out of order: {subject}"


def prepare(database: Path) -> None:
    """Make the store, and the table of the handlers' effects."""

    async def make() -> None:
        inbox = Inbox(f"sqlite:{database}")
        async with inbox.running(work=False):
            pass

    asyncio.run(make())
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS effects (name TEXT NOT NULL)")
        connection.commit()


async def finish(folder: Path) -> None:
    member = Member(folder, 99)
    async with member.inbox.running():
        await asyncio.wait_for(member.inbox.drain(), 900)  # half an hour of kills leaves much to do


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--member", type=int)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--kills", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.Random().randrange(1 << 30))
    asked = parser.parse_args()
    if asked.member is not None:
        asyncio.run(Member(asked.folder, asked.member).run())
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    run = Run(asked.folder, asked.seed)
    try:
        run.strike(seconds=asked.minutes * 60, kills=asked.kills)
        run.end()
        print(f"seed {run.seed}: {run.check()}, an owner after {run.longest_without:.2f} s at most")  # noqa: T201
    finally:
        run.stop()


if __name__ == "__main__":
    main()
