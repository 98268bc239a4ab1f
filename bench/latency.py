"""How long does an event take at a fixed rate, from the moment its sender wanted to send it until its delivery is done?

Starts `oncehook serve` with a handler inside, offers events at fixed moments, and reads from the store when each
delivery was settled. A request that had to wait counts from the moment it was due, so a server that stumbles cannot
hide it. Run by `scripts/bench latency`; talk on stderr, report on stdout.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import disk, drive, machine, traffic
from bench.drive import Order
from bench.engines import BenchError, Postgres, Server, free_port
from bench.part import run_part
from bench.progress import Progress
from bench.report import table
from bench.traffic import Traffic
from bench.work_contestants import Place, fresh_store
from bench.work_idle import settled
from bench.work_noise import Neighbours

ENGINES = ("sqlite", "postgres")
RATES = (100, 500, 1000, 2000)
WARM_RATE, WARM_SECONDS = 200, 1.0
PATIENCE_SECONDS = 30.0
"""How long the last deliveries may take after the last request."""
LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Pace:
    """One rate: milliseconds until the answer and until the delivery is done, both from the moment it was due."""

    rate: int
    events: int
    answer_p50_ms: float
    answer_p99_ms: float
    done_p50_ms: float
    done_p99_ms: float
    done_max_ms: float
    others_cores: float
    """Cores that somebody else used meanwhile."""


class Offered:
    """A running server and the records that are still to be offered to it."""

    def __init__(self, engine: str, store: str, port: int, prepared: Traffic) -> None:
        self._engine, self._store, self._port, self._traffic = engine, store, port, prepared
        self._next = 0

    def offer(self, rate: int, seconds: float, tick: Callable[[float], None]) -> tuple[drive.Figures, list[float]]:
        """Offer events at a rate; what the sender saw, and the milliseconds until each was done."""
        first, count = self._next, math.ceil(rate * seconds) + 1
        order = Order(self._traffic, [self._port], "/in/bench", first, first + count)
        figures = drive.load_own(order, seconds=seconds, rate=rate, tick=tick)
        if figures.refused or figures.broken:
            raise BenchError(f"{figures.refused} requests refused and {figures.broken} broken")
        self._next = figures.next
        ends = self._all_settled(self._next)
        keys = self._traffic.keys(first, self._next)
        return figures, sorted((ends[key] - figures.began - n / rate) * 1000 for n, key in enumerate(keys))

    def _all_settled(self, events: int) -> dict[str, float]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := settled(self._engine, self._store)) < events:
            if time.monotonic() > deadline:
                raise BenchError(f"{events} events were sent, but {len(found)} were done")
            time.sleep(LOOK_SECONDS)
        return found


def run_engine(engine: str, place: Place, prepared: Traffic, seconds: float, progress: Progress) -> list[Pace]:
    """Every rate on one engine, in one process, on a store that grows meanwhile."""
    folder = place.folder / "store"
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
        offered = Offered(engine, store, port, prepared)
        try:
            offered.offer(WARM_RATE, WARM_SECONDS, progress.step(f"{engine}  warm up"))
            return [_one_rate(offered, engine, place, rate, seconds, progress) for rate in RATES]
        except BenchError as error:
            raise BenchError(f"{error}\n{server.log_tail()}") from error


def _one_rate(offered: Offered, engine: str, place: Place, rate: int, seconds: float, progress: Progress) -> Pace:
    tick = progress.step(f"{engine}  {rate:,} events/s offered, {seconds:g} s")
    neighbours = Neighbours(place.store_pids(engine))
    figures, whole = offered.offer(rate, seconds, tick)
    pace = Pace(
        rate,
        len(whole),
        figures.p50_ms,
        figures.p99_ms,
        done_p50_ms=whole[len(whole) // 2],
        done_p99_ms=whole[int(len(whole) * 0.99)],
        done_max_ms=whole[-1],
        others_cores=neighbours.cores(),
    )
    progress.result(f"done after p50 {pace.done_p50_ms:.2f} ms, p99 {pace.done_p99_ms:.2f} ms")
    return pace


def run(seconds: float, folder: Path | None) -> dict[str, Any]:
    """The whole of it, as plain values."""
    progress = Progress(1 + len(ENGINES) * (1 + len(RATES)))
    home = Path(tempfile.mkdtemp(prefix="oncehook-latency-", dir=folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        postgres = Postgres(home)
        stack.callback(postgres.stop)
        records = math.ceil(sum(RATES) * seconds + WARM_RATE * WARM_SECONDS) + len(RATES) + 2
        prepared = traffic.prepare(home, records=records, duplicates=0, tick=progress.step("sign the requests"))
        times = disk.measure(home, seconds=1.0)
        place = Place(home, postgres, "", traffic.BODY_SIZE)
        paces = {engine: run_engine(engine, place, prepared, seconds, progress) for engine in ENGINES}
        found = disk.summarize(times + disk.measure(home, seconds=1.0))
    return {
        "machine": machine.describe(),
        "disk": asdict(found),
        "seconds": seconds,
        "engines": {engine: [asdict(pace) for pace in ones] for engine, ones in paces.items()},
    }


def render(found: dict[str, Any]) -> str:
    """The report as text."""
    rows = [["engine", "offered", "answered p50 ms", "p99", "done p50 ms", "p99", "max"]]
    for engine, paces in found["engines"].items():
        for pace in paces:
            names = ("answer_p50_ms", "answer_p99_ms", "done_p50_ms", "done_p99_ms", "done_max_ms")
            rows.append([engine, f"{pace['rate']:,}/s", *[f"{pace[name]:.2f}" for name in names]])
    fsync = found["disk"]
    heading = (
        f"from the moment an event was due, {traffic.BODY_SIZE} bytes, one process receives and works\n"
        f"disk: fsync p50 {fsync['p50_ms']:.3f} ms, p99 {fsync['p99_ms']:.3f} ms"
    )
    return f"{heading}\n\n{table(rows)}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    return run_part(
        words, name="latency", about=str(__doc__), seconds=5.0, length="length of each rate", run=run, render=render
    )


if __name__ == "__main__":
    sys.exit(main())
