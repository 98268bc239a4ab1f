"""Limits that count over all workers, seen by the destination: real processes, one of which is killed (decision 24)."""

from __future__ import annotations

import bisect
import http.server
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.acceptance.conftest import Engine
from tests.acceptance.test_admin_cli import SETTINGS, Admin, Done, make_desk, run  # noqa: F401
from tests.wire import SECRET


class Clocked(http.server.ThreadingHTTPServer):
    """A destination that notes when each attempt begins, and how many are under way at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        self.takes = 0.0
        self.times: list[float] = []
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Hook)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def count(self, since: float, until: float) -> int:
        return sum(since <= at < until for at in self.times)

    def wait_for(self, count: int) -> None:
        while len(self.times) < count:
            time.sleep(0.02)


class _Hook(http.server.BaseHTTPRequestHandler):
    server: Clocked
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        server = self.server
        with server.lock:
            server.times.append(time.monotonic())
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(server.takes)
        with server.lock:
            server.under_way -= 1
        try:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked()
    yield made
    made.shutdown()
    made.server_close()


Start = Callable[[str], tuple[Admin, subprocess.Popen[bytes]]]


@pytest.fixture
def start(
    engine: Engine,
    clocked: Clocked,
    run: Callable[..., Done],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Start]:
    """A server and a worker beside it, under this limit, with the destination paused."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(limit: str) -> tuple[Admin, subprocess.Popen[bytes]]:
        settings = SETTINGS.replace('lease = "60s"', f'lease = "2s"\n{limit}')
        monkeypatch.setattr("tests.acceptance.test_admin_cli.SETTINGS", settings)
        admin = make_desk(engine, clocked, run, monkeypatch)  # type: ignore[arg-type]
        admin.good("pause", "crm")
        command = [sys.executable, "-m", "oncehook", "worker", "--config", "oncehook.toml"]
        with Path("worker.log").open("wb") as log:
            workers.append(subprocess.Popen(command, env={**os.environ, "ORDERS_SECRET": SECRET}, stderr=log))
        while "worker ready" not in Path("worker.log").read_text():
            time.sleep(0.05)
        return admin, workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()


def test_two_workers_make_the_rate_together_and_one_alone_makes_all_of_it(start: Start, clocked: Clocked) -> None:
    admin, worker = start('rate = "50/s"')
    admin.send(*[f"k{n}" for n in range(450)], customer=None)
    admin.good("resume", "crm")
    clocked.wait_for(20 + 200)
    worker.kill()
    clocked.wait_for(240)  # what it had reserved is over
    clocked.wait_for(240 + 150)
    both, alone = clocked.times[19:220], clocked.times[239:390]
    assert typical_rate(both) <= 50 * 1.05
    assert typical_rate(alone) <= 50 * 1.05
    # A machine that stands still makes fewer, so the best second counts: a share that nobody uses would show in each.
    assert best_second(both) >= 40
    assert best_second(alone) >= 40


def typical_rate(times: Sequence[float], width: int = 100) -> float:
    """The median over all runs of so many attempts: one whose first attempts came late looks faster than it was."""
    return statistics.median(width / (times[n + width] - times[n]) for n in range(len(times) - width))


def best_second(times: Sequence[float]) -> int:
    """The most attempts that began within one second."""
    return max(bisect.bisect(times, began + 1) - n for n, began in enumerate(times))


def test_there_are_never_more_under_way_than_allowed(start: Start, clocked: Clocked) -> None:
    clocked.takes = 0.05
    admin, worker = start("concurrency = 4")
    admin.send(*[f"k{n}" for n in range(300)], customer=None)
    admin.good("resume", "crm")
    clocked.wait_for(60)
    worker.kill()
    admin.wait_for("done", *[f"k{n}" for n in range(300)])
    assert clocked.most == 4
