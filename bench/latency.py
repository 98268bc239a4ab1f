"""How long does an event take at a fixed rate, from the moment its sender wanted to send it until its delivery is done?

Starts `oncehook serve` with a handler inside, offers events at fixed moments, and asks when each delivery was
settled. A request that had to wait counts from the moment it was due, so a server that stumbles cannot
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
from bench.engines import BenchError, Postgres, cpu_seconds
from bench.part import run_part
from bench.product import Product, serving
from bench.progress import Progress
from bench.report import name_cpu, table
from bench.traffic import Traffic
from bench.work_contestants import Place
from bench.work_noise import Neighbours

ENGINES = ("sqlite", "postgres")
RATES = (100, 500, 1000, 2000)
WARM_RATE, WARM_SECONDS = 200, 1.0
PATIENCE_SECONDS = 30.0
"""How long the last deliveries may take after the last request."""
SETTLE_SECONDS = 0.3
"""How long the last deliveries take on a machine that is not behind."""


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
    our_cpu_us: float
    """CPU per event of our process."""
    store_cpu_us: float
    """CPU per event of the database's processes, where it has its own."""
    others_cores: float
    """Cores that somebody else used meanwhile."""

    def brief(self) -> str:
        """Tell somebody who watches."""
        cpu = f"CPU {self.our_cpu_us:.0f} + {self.store_cpu_us:.0f} µs"
        return f"done after p50 {self.done_p50_ms:.2f} ms, p99 {self.done_p99_ms:.2f} ms, {cpu}"


class Offered:
    """A running server and the records that are still to be offered to it."""

    def __init__(self, product: Product, prepared: Traffic, store_pids: Sequence[int]) -> None:
        self._product, self._traffic, self._store_pids = product, prepared, store_pids
        self._next = 0

    def warm_up(self, tick: Callable[[float], None]) -> None:
        """Offer what does not count."""
        self.offer(WARM_RATE, WARM_SECONDS, tick)

    def offer(self, rate: int, seconds: float, tick: Callable[[float], None]) -> Pace:
        """Offer events at a rate; return what their sender saw, and how long it took until they were done."""
        first, last = self._next, self._next + math.ceil(rate * seconds) + 1
        neighbours, before = Neighbours(self._store_pids), self._cpu()
        order = Order(self._traffic, [self._product.port], "/in/bench", first, last)
        figures = drive.load_own(order, seconds=seconds, rate=rate, tick=tick)
        if figures.refused or figures.broken:
            raise BenchError(f"{figures.refused} requests refused and {figures.broken} broken")
        self._next = figures.next
        time.sleep(SETTLE_SECONDS)
        ours, store = (after - start for after, start in zip(self._cpu(), before, strict=True))
        others = neighbours.cores()
        keys = self._traffic.keys(first, self._next)
        ends = self._read_settled(len(keys))
        whole = sorted((ends[key] - figures.began - n / rate) * 1000 for n, key in enumerate(keys))
        return Pace(
            rate,
            len(whole),
            figures.p50_ms,
            figures.p99_ms,
            done_p50_ms=whole[len(whole) // 2],
            done_p99_ms=whole[int(len(whole) * 0.99)],
            done_max_ms=whole[-1],
            our_cpu_us=ours * 1e6 / len(whole),
            store_cpu_us=store * 1e6 / len(whole),
            others_cores=others,
        )

    def _cpu(self) -> tuple[float, float]:
        return cpu_seconds([self._product.pid]), cpu_seconds(self._store_pids)

    def _read_settled(self, events: int) -> dict[str, float]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := self._product.read_settled(events)) < events:
            if time.monotonic() > deadline:
                raise BenchError(f"{events} events were sent, but {len(found)} were done")
            time.sleep(SETTLE_SECONDS)
        return found


def run_engine(engine: str, place: Place, prepared: Traffic, seconds: float, progress: Progress) -> list[Pace]:
    """Offer every rate on one engine, in one process, on a store that grows meanwhile."""
    paces = []
    with serving(place, engine) as product:
        offered = Offered(product, prepared, place.store_pids(engine))
        offered.warm_up(progress.step(f"{engine}  warm up"))
        for rate in RATES:
            pace = offered.offer(rate, seconds, progress.step(f"{engine}  {rate:,} events/s offered, {seconds:g} s"))
            progress.result(pace.brief())
            paces.append(pace)
    return paces


def run(seconds: float, folder: Path | None) -> dict[str, Any]:
    """Measure everything; return plain values."""
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
    """Render the report as text."""
    rows = [["engine", "offered", "CPU µs/event", "answered p50 ms", "p99", "done p50 ms", "p99", "max"]]
    for engine, paces in found["engines"].items():
        for pace in paces:
            names = ("answer_p50_ms", "answer_p99_ms", "done_p50_ms", "done_p99_ms", "done_max_ms")
            cpu = name_cpu(pace["our_cpu_us"], pace["store_cpu_us"])
            rows.append([engine, f"{pace['rate']:,}/s", cpu, *[f"{pace[name]:.2f}" for name in names]])
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
