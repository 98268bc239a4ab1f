"""systemd is told the truth: ready when it is ready, stopping when it stops, and beats only while the loop turns."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncehook.notify import Supervisor, supervise
from tests.acceptance.sink import Sink
from tests.waiting import until

CONFIG = """
store = "sqlite:{folder}/inbox.db"

[source.orders]
verify = "none"
key = ["$.id"]

[destination.shop]
url = "{url}"
allow_private = true

[[route]]
from = "orders"
to = "shop"
"""


class Manager:
    """The other end: what systemd would hear."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(150)

    def hear(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")

    def hear_until(self, word: str) -> list[str]:
        """All messages up to the one that says it; the last line of the list is that one's first."""
        heard = []
        while not heard or heard[-1] != word:
            heard.append(self.hear()[0])
        return heard

    def pending(self) -> list[str]:
        heard = []
        self.socket.setblocking(False)
        try:
            while True:
                heard.append(self.hear()[0])
        except BlockingIOError:
            return heard


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = str(tmp_path / "notify")
    made = Manager(path if request.param == "path" else f"@oncehook-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.socket.close()


@pytest.mark.parametrize("arguments", [("serve", "--port", "0"), ("worker",)], ids=["serve", "worker"])
async def test_a_process_tells_how_it_is(manager: Manager, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    async with Sink().open() as sink:
        (tmp_path / "oncehook.toml").write_text(CONFIG.format(folder=tmp_path, url=sink.url))
        env = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "300000"}
        process = subprocess.Popen([sys.executable, "-m", "oncehook", *arguments], cwd=tmp_path, env=env)
        try:
            before = await asyncio.to_thread(manager.hear_until, "READY=1")
            assert set(before[:-1]) <= {"WATCHDOG=1"}
            beats = [await asyncio.to_thread(manager.hear) for _ in range(4)]
            assert beats == [["WATCHDOG=1"]] * 4
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(manager.hear_until, "STOPPING=1")
        finally:
            code = await asyncio.to_thread(process.wait)
    assert code == 0


async def test_ready_says_what_it_does(manager: Manager) -> None:
    Supervisor({"NOTIFY_SOCKET": manager.address}).ready("receiving on http://127.0.0.1:4020")
    assert manager.hear() == ["READY=1", "STATUS=receiving on http://127.0.0.1:4020"]


async def test_a_loop_that_hangs_is_silent(manager: Manager) -> None:
    async with supervise({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "30000"}):
        await until(lambda: "WATCHDOG=1" in manager.pending())
        time.sleep(0.2)  # the loop does not turn
        assert manager.pending() == []
        await until(lambda: "WATCHDOG=1" in manager.pending())
    await asyncio.sleep(0.05)
    manager.pending()
    await asyncio.sleep(0.05)
    assert manager.pending() == [], "nothing beats after the block"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WATCHDOG_USEC": "300000"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "nonsense"},
        {"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "300000"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "300000", "WATCHDOG_PID": "1"},
    ],
)
async def test_where_nobody_listens_nothing_happens(env: dict[str, str]) -> None:
    async with supervise(env) as supervisor:
        supervisor.ready("x")
        supervisor.stopping()
        assert supervisor.interval is None
