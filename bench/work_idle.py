"""How long does one event take when nothing else is going on? From its request to the end of its delivery.

Starts `oncehook serve` with a handler inside, sends one event after the other with a pause in between, and reads from
the store when each was settled: the moment at which the commit that settles it began. Called by `bench.work`.
"""

from __future__ import annotations

import shutil
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import psycopg

from bench.engines import BenchError, Server, free_port
from bench.work_contestants import Place, fresh_store
from bench.work_noise import Neighbours
from bench.work_report import Idle

PAUSE_SECONDS = 0.02
BODY = "x" * 1900
WARM = 20
"""Events sent before those that count."""

SETTLED_POSTGRES = """
SELECT key, extract(epoch FROM settled_at)::float8 FROM oncehook.events JOIN oncehook.model ON event_id = events.id
WHERE status = 'done'
"""
SETTLED_SQLITE = """
SELECT key, settled_at / 1e6 FROM events JOIN deliveries ON event_id = events.id WHERE status = 'done'
"""


def run_idle(engine: str, place: Place, *, events: int, tick: Callable[[float], None]) -> Idle:
    """Send events one at a time."""
    folder = place.folder / "idle"
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = fresh_store(engine, place, folder, stack)
        environment = {"BENCH_STORE": store, "BENCH_ENGINE": engine, "BENCH_SCENARIO": "idle"}
        port = free_port()
        command = ["serve", "bench.work_peers.oncehook_inbox:inbox", "--port", str(port)]
        server = Server([sys.executable, "-m", "oncehook", *command], environment, folder / "log", port)
        stack.callback(server.stop)
        server.wait_until_ready()
        try:
            neighbours = Neighbours(place.store_pids(engine))
            sent, answered = _send(port, events + WARM, tick)
            others = neighbours.cores()
            time.sleep(10 * PAUSE_SECONDS)  # the last one may be on its way
            ends = settled(engine, store)
        except (OSError, BenchError) as error:
            raise BenchError(f"{error}\n{server.log_tail()}") from error
    if len(ends) != events + WARM:
        raise BenchError(f"{events + WARM} events were sent, but {len(ends)} were done")
    whole = sorted((ends[key] - sent[key]) * 1000 for key in list(sent)[WARM:])
    answers = [(answered[key] - sent[key]) * 1000 for key in list(sent)[WARM:]]
    return Idle(
        events,
        p50_ms=statistics.median(whole),
        p99_ms=whole[int(len(whole) * 0.99)],
        answer_p50_ms=statistics.median(answers),
        others_cores=others,
    )


def _send(port: int, events: int, tick: Callable[[float], None]) -> tuple[dict[str, float], dict[str, float]]:
    sent, answered = {}, {}
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for n in range(events):
            key = f"event-{n}"
            sent[key] = time.time()
            connection.request("POST", "/in/bench", f'{{"id": "{key}", "text": "{BODY}"}}')
            answer = connection.getresponse()
            if answer.status != 200:
                raise BenchError(f"answered {answer.status}: {answer.read()[:200]!r}")
            answer.read()
            answered[key] = time.time()
            tick(n / events)
            time.sleep(PAUSE_SECONDS)
    return sent, answered


def settled(engine: str, store: str) -> dict[str, float]:
    """When each delivery that is done was settled, in seconds since 1970, by the key of its event."""
    if engine == "postgres":
        with psycopg.connect(store) as connection:
            return dict(connection.execute(SETTLED_POSTGRES).fetchall())
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)) as connection:
        return dict(connection.execute(SETTLED_SQLITE).fetchall())
