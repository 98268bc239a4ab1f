"""Ten thousand hostile connections against `oncehook serve`: memory stays bounded, genuine senders get their answers,
and every open file comes back (S14, R62).

TORTURE_FLOOD says how many connections, TORTURE_FLOOD_SECONDS for how long they are held once they are open.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from oncehook.web.connection import ConnectionLimits
from tests.acceptance.processes import Receiver
from tests.effort import effort
from tests.wire import Client, hook, signed

CONNECTIONS = effort("FLOOD", 10_000)
SECONDS = effort("FLOOD_SECONDS", 4)
CLIENTS = 2
LIMITS = ConnectionLimits()
PER_CONNECTION = LIMITS.head_bytes + (48 << 10)
"""Bytes that a connection may cost: a head as long as it may be, or an unfinished body, and what keeps count of it."""
SPARE = 64 << 20
"""Bytes for everything else that moves meanwhile: the store's caches, the interpreter's arenas."""


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Genuine:
    """A sender that keeps its connection, and sends one hook after the other."""

    def __init__(self, port: int, name: str) -> None:
        self._client = Client("127.0.0.1", port)
        self._name = name
        self.statuses: Counter[int] = Counter()

    async def send(self) -> None:
        body = hook(f"{self._name}-{self.statuses.total()}")
        self.statuses[(await self._client.post("/in/orders", body, signed(body))).status] += 1

    async def keep_sending(self) -> None:
        while True:
            await self.send()
            await asyncio.sleep(0.05)

    def close(self) -> None:
        self._client.close()


def start_flood(port: int, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.torture.fuzz_flood", str(port), str(CONNECTIONS // CLIENTS), str(number)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(flood: subprocess.Popen[str]) -> None:
    assert flood.stdin is not None
    flood.stdin.close()
    flood.wait()
    assert flood.stdout is not None
    flood.stdout.close()


class Gauge:
    """The most that a process has had of memory and open files."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.memory = self.most_memory = resident(pid)
        self.files = self.most_files = open_files(pid)

    async def watch(self) -> None:
        while True:
            self.most_memory = max(self.most_memory, resident(self._pid))
            self.most_files = max(self.most_files, open_files(self._pid))
            await asyncio.sleep(0.1)

    @property
    def grown(self) -> int:
        return self.most_memory - self.memory


async def test_ten_thousand_hostile_connections(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "receiver", f"sqlite:{tmp_path / 'inbox.db'}").start()
    try:
        await withstand(receiver)
        assert receiver.stop() == 0
    finally:
        receiver.kill()
    assert "Traceback" not in receiver.log.read_text()


async def withstand(receiver: Receiver) -> None:
    genuine = [Genuine(receiver.port, f"genuine{n}") for n in range(4)]
    for one in genuine:
        await one.send()
    gauge, stranger = Gauge(receiver.pid), Genuine(receiver.port, "stranger")
    tasks = [asyncio.create_task(work) for work in (gauge.watch(), *(one.keep_sending() for one in genuine))]
    floods = [start_flood(receiver.port, number) for number in range(CLIENTS)]
    try:
        opened = sum(await asyncio.gather(*(asyncio.to_thread(said, flood) for flood in floods)))
        before = sum(one.statuses.total() for one in genuine)
        await asyncio.sleep(SECONDS)
        answered = sum(one.statuses.total() for one in genuine) - before
        await stranger.send()
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(lambda: [end(flood) for flood in floods])
        for one in (*genuine, stranger):
            one.close()
    told = {"opened": opened, "files": gauge.most_files, "grown_mb": gauge.grown >> 20, "answered": answered}
    sys.stdout.write("flood " + " ".join(f"{name}={value}" for name, value in told.items()) + "\n")
    assert {type(result) for result in ends} == {asyncio.CancelledError}, ends
    assert opened > CONNECTIONS * 0.8, "there was no flood: are there too few open files for it?"
    assert gauge.most_files > min(opened, LIMITS.connections) * 0.3, f"it was never really held: {told}"
    assert answered > 0
    assert {status for one in genuine for status in one.statuses} == {200}
    assert set(stranger.statuses) <= {200, 503}, "even one too many is told so"
    assert gauge.grown < (gauge.most_files - gauge.files) * PER_CONNECTION + SPARE, told
    while open_files(receiver.pid) > gauge.files:  # the test's own time limit is the only one
        await asyncio.sleep(0.1)


def said(flood: subprocess.Popen[str]) -> int:
    assert flood.stdout is not None
    return int(flood.stdout.readline().split()[1])
