"""A flood: one process that opens thousands of hostile connections and holds them for as long as it is let.

    python -m tests.torture.fuzz_flood PORT CONNECTIONS SEED

Says `flooding N` when all are open, and ends when its standard input does. Started by `test_flood.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
import sys
from collections.abc import AsyncIterator

from tests.torture.fuzz_wire import post

AT_ONCE = 200
"""Connections that are being opened at the same time: the system's own queue is not what is tried here."""


def affordable(wanted: int) -> int:
    """As many open files as there may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted + 100 if hard == resource.RLIM_INFINITY else min(wanted + 100, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed - 100


async def slow_head(chance: random.Random) -> AsyncIterator[bytes]:
    yield b"POST /in/orders HTTP/1.1\r\n"
    while True:
        await asyncio.sleep(chance.uniform(1, 4))
        yield b"X: y\r\n"


async def half_open(chance: random.Random) -> AsyncIterator[bytes]:
    yield b""


async def endless_head(chance: random.Random) -> AsyncIterator[bytes]:
    yield b"POST /in/orders HTTP/1.1\r\n"
    while True:
        await asyncio.sleep(chance.uniform(0.5, 2))
        yield b"X-Long: " + b"x" * 8000 + b"\r\n"


async def slow_body(chance: random.Random) -> AsyncIterator[bytes]:
    data = post(f"flood-{chance.random()}", body=b"x" * 40_000)
    yield data[: chance.randrange(200, 30_000)]
    while True:
        await asyncio.sleep(chance.uniform(1, 4))
        yield b"x"


async def never_reading(chance: random.Random) -> AsyncIterator[bytes]:
    yield post("forged", secret="another") * 8  # not more: this is about room, and forgeries cost time
    while True:
        await asyncio.sleep(chance.uniform(2, 4))
        yield b"\r\n"


async def garbage(chance: random.Random) -> AsyncIterator[bytes]:
    await asyncio.sleep(chance.uniform(0.5, 3))
    yield chance.randbytes(200)


KINDS = (slow_head, half_open, endless_head, slow_body, never_reading, garbage)


class Flood:
    """The connections of this process."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._seed = seed
        self._opening = asyncio.Semaphore(AT_ONCE)
        self.opened = 0

    async def hold(self, number: int) -> None:
        """Open one, and say what its kind says; nothing is ever read. What is cut off is not opened again."""
        chance = random.Random(f"{self._seed}-{number}")
        loop, line = asyncio.get_running_loop(), socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.setblocking(False)
        with contextlib.closing(line), contextlib.suppress(OSError):
            async with self._opening:
                await loop.sock_connect(line, ("127.0.0.1", self._port))
            self.opened += 1
            async for piece in KINDS[number % len(KINDS)](chance):
                await loop.sock_sendall(line, piece)
            await asyncio.Event().wait()


async def main(port: int, count: int, seed: int) -> None:
    flood = Flood(port, seed)
    count = affordable(count)
    tasks = [asyncio.create_task(flood.hold(number)) for number in range(count)]
    while flood.opened < count and not all(task.done() for task in tasks):
        await asyncio.sleep(0.05)
    sys.stdout.write(f"flooding {flood.opened}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4])))
