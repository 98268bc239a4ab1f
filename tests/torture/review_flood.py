"""Genuine arrivals with and without a flood of forged requests: `scripts/fuzz --only flood`.

One process sends forged requests at a fixed rate, prepared beforehand so that it costs the machine little; genuine ones
come at a fixed rate of their own, each timed from the moment at which it was due. At most 15 % fewer may be answered,
and their p99 may be three times what it was. This is a measurement: the suite does not run it.

    python -m tests.torture.review_flood PORT RATE
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.processes import Receiver
from tests.torture.fuzz_wire import post
from tests.wire import Client, hook, signed

GENUINE = 200
FORGED = 3000
"""Requests a second; more forged ones than a server could refuse while it wrote a line for each."""
SENDERS = 16
FORGERS = 4
TOGETHER = 10
"""Forged requests in one piece."""
FEWER, SLOWER = 0.15, 3.0


@dataclass(frozen=True)
class Figures:
    """Genuine arrivals in one stretch of time."""

    sent: int
    answered: int
    p50: float
    p99: float
    forged: int = 0

    def row(self, name: str) -> str:
        return (
            f"{name:<14}{self.sent:>9,}{self.answered:>10,}{self.p50 * 1000:>10,.1f} ms{self.p99 * 1000:>10,.1f} ms"
            f"{self.forged:>11,}"
        )


@dataclass(frozen=True)
class Outcome:
    """The figures alone and beside a flood, and whether they hold."""

    alone: Figures
    flooded: Figures

    @property
    def holds(self) -> bool:
        enough = self.flooded.answered >= (1 - FEWER) * self.alone.answered
        return enough and self.flooded.p99 <= SLOWER * self.alone.p99

    def table(self) -> str:
        head = f"{'flood':<14}{'genuine':>9}{'answered':>10}{'p50':>13}{'p99':>13}{'forged':>11}"
        fewer = 1 - self.flooded.answered / max(self.alone.answered, 1)
        slower = self.flooded.p99 / max(self.alone.p99, 1e-9)
        end = f"{fewer:.0%} fewer (at most {FEWER:.0%}), p99 {slower:.1f}× (at most {SLOWER:.0f}×): "
        rows = [head, self.alone.row("alone"), self.flooded.row("with forgeries")]
        return "\n".join([*rows, end + ("holds" if self.holds else "DOES NOT HOLD")])


def measure(seconds: float) -> Outcome:
    """Measure both, each for so many seconds, against `oncehook serve` as it is started by anybody."""
    with tempfile.TemporaryDirectory(prefix="oncehook-flood-") as folder:
        receiver = Receiver(Path(folder), f"sqlite:{folder}/inbox.db").start()
        try:
            outcome = asyncio.run(_measure(receiver.port, seconds))
            assert receiver.stop() == 0
            return outcome
        finally:
            receiver.kill()


async def _measure(port: int, seconds: float) -> Outcome:
    await genuine(port, 1.0, "warm")
    alone = await genuine(port, seconds, "alone")
    async with flood(port) as answered:
        await asyncio.sleep(1.0)
        flooded = await genuine(port, seconds, "flooded")
    return Outcome(alone, Figures(flooded.sent, flooded.answered, flooded.p50, flooded.p99, answered[0]))


@contextlib.asynccontextmanager
async def flood(port: int) -> AsyncIterator[list[int]]:
    """Forge from another process; the list has the number of answers when it has ended."""
    command = [sys.executable, "-m", "tests.torture.review_flood", str(port), str(FORGED)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    answered: list[int] = []
    try:
        yield answered
    finally:
        printed, _ = await asyncio.to_thread(process.communicate, "")
        answered.append(int(printed or 0))


async def genuine(port: int, seconds: float, name: str) -> Figures:
    """Send at a fixed rate, whatever becomes of those before."""
    clients = [Client("127.0.0.1", port) for _ in range(SENDERS)]
    free: asyncio.Queue[Client] = asyncio.Queue()
    for client in clients:
        free.put_nowait(client)
    taken: list[float] = []
    began = time.perf_counter()

    async def send(number: int, due: float) -> None:
        client = await free.get()
        body = hook(f"{name}-{number}")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await client.post("/in/orders", body, signed(body))).status == 200:
                taken.append(time.perf_counter() - due)
        free.put_nowait(client)

    tasks = []
    for number in range(int(seconds * GENUINE)):
        due = began + number / GENUINE
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(number, due)))
    await asyncio.wait(tasks, timeout=10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        client.close()
    answered = sorted(taken) or [float("inf")]
    return Figures(len(tasks), len(taken), answered[len(answered) // 2], answered[int(len(answered) * 0.99)])


def forge(port: int, rate: float, answered: list[int]) -> None:
    """Send forged requests at this rate over a connection, some at a time, and open the next when it is closed."""
    batch = b"".join(post(f"forged-{n}", secret="another") for n in range(TOGETHER))
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
            due = time.perf_counter()
            while True:
                line.sendall(batch)
                heard = b""
                while heard.count(b"HTTP/1.1 4") < TOGETHER:
                    heard += line.recv(1 << 16) or _closed()
                answered.append(TOGETHER)
                due = max(due + TOGETHER / rate, time.perf_counter() - 1)
                time.sleep(max(0.0, due - time.perf_counter()))
        time.sleep(0.05)


def _closed() -> bytes:
    raise ConnectionError("the server has closed the connection")


def main(port: int, rate: float) -> None:
    """Forge until standard input ends; print how many were answered."""
    answered: list[int] = []
    for _ in range(FORGERS):
        threading.Thread(target=forge, args=(port, rate / FORGERS, answered), daemon=True).start()
    sys.stdin.read()
    sys.stdout.write(f"{sum(answered)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
