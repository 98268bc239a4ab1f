"""What does the end of a day cost? Intake at a fixed rate while nothing is pruned, and while everything old is.

A store is filled with events whose deliveries are done. Then `serve` is started on it in turns: once it keeps them,
once they have outlived their time and pruning begins at the start. Run by `scripts/bench prune`; talk on stderr, report
on stdout.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench import drive, machine, part, traffic
from bench.drive import Order
from bench.engines import BenchError, Postgres, free_port
from bench.pairs import read_count
from bench.product import CONFIG, FRESH_SECONDS, TOKEN, Product, read_counter
from bench.progress import Progress
from bench.report import Target, table
from bench.steady import CONTESTANT, contestant_of
from bench.traffic import Traffic
from bench.work_contestants import Place, fill, fresh_store, settings

ENGINES = tuple(CONTESTANT)
KEPT, ENDED = "30d", "1s"
"""How long events are kept: longer than the benchmark, and shorter than the start of a process."""
WARM_RATE, WARM_SECONDS = 200, 1.0
LIMIT, FLAT = 1.5, 1.1
"""Times the p99 of a store that prunes nothing."""


@dataclass(frozen=True)
class Load:
    """A load at a fixed rate."""

    keep: str
    held: int
    """Events in the store before it."""
    pruned: int
    seconds: float
    """Time from the start of the process until the load was over."""
    p50_ms: float
    p99_ms: float


def count_events(engine: str, store: str) -> int:
    """Return how many events the store holds."""
    if engine == "sqlite":
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as file:
            return int(file.execute("SELECT count(*) FROM events").fetchone()[0])
    with psycopg.connect(store) as connection:
        row = connection.execute("SELECT count(*) FROM oncehook.events").fetchone()
        assert row is not None
        return int(row[0])


class Filled:
    """A store full of finished events, and the records that are still to be offered to it."""

    def __init__(self, engine: str, place: Place, store: str, prepared: Traffic, progress: Progress) -> None:
        self._engine, self._place, self._store = engine, place, store
        self._traffic, self._next, self._progress = prepared, 0, progress

    @contextmanager
    def serving(self, keep: str) -> Iterator[Product]:
        """Start `serve` on the store."""
        contestant = contestant_of(self._engine)
        environment = settings(contestant, self._place, self._store, 0) | {"BENCH_KEEP": keep, "BENCH_TOKEN": TOKEN}
        config, port = self._place.folder / "oncehook.toml", free_port()
        config.write_text(CONFIG)
        options = ["--config", str(config), "--port", str(port)]
        command = [sys.executable, "-m", "oncehook", "serve", "bench.work_peers.oncehook_inbox:inbox", *options]
        product = Product(command, environment, self._place.folder / "log", port)
        try:
            product.wait_until_ready()
            yield product
        except (BenchError, OSError) as error:
            raise BenchError(f"{error}\n{product.log_tail()}".rstrip()) from error
        finally:
            product.stop()

    def fill(self, events: int) -> None:
        """Keep so many events, and work them off."""
        tick = self._progress.step(f"{self._engine}  keep {events:,} events")
        contestant = contestant_of(self._engine)
        fill(contestant, settings(contestant, self._place, self._store, events))
        tick = self._progress.step(f"{self._engine}  work them off")
        with self.serving(KEPT) as product:
            while (done := read_counter(product.port, "oncehook_attempts_total", "done")) < events:
                tick(done / events)
                time.sleep(FRESH_SECONDS)
        if self._engine == "postgres":
            assert self._place.postgres is not None
            self._place.postgres.rest()

    def load(self, keep: str, rate: int, seconds: float) -> Load:
        """Offer events at a rate, from a second after the start on."""
        tick = self._progress.step(f"{self._engine}  {'prune' if keep == ENDED else 'keep all'}, {rate:,} events/s")
        held, began = count_events(self._engine, self._store), time.monotonic()
        with self.serving(keep) as product:
            stored = self._offer(product, WARM_RATE, WARM_SECONDS, lambda done: None).acknowledged
            figures = self._offer(product, rate, seconds, tick)
            took, now = time.monotonic() - began, count_events(self._engine, self._store)
        load = Load(keep, held, held + stored + figures.acknowledged - now, took, figures.p50_ms, figures.p99_ms)
        self._progress.result(f"p50 {load.p50_ms:.2f} ms, p99 {load.p99_ms:.2f} ms, {load.pruned:,} pruned")
        return load

    def _offer(self, product: Product, rate: int, seconds: float, tick: drive.Tick) -> drive.Figures:
        first, last = self._next, self._next + math.ceil(rate * seconds) + 1
        order = Order(self._traffic, [product.port], "/in/bench", first, last)
        figures = drive.load_own(order, seconds=seconds, rate=rate, tick=tick)
        if figures.refused or figures.broken:
            raise BenchError(f"{figures.refused} requests refused and {figures.broken} broken")
        self._next = figures.next
        return figures


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; return plain values."""
    engines = arguments.engine or ENGINES
    progress = Progress(1 + len(engines) * (2 + 2 * arguments.rounds))
    home = Path(tempfile.mkdtemp(prefix="oncehook-prune-", dir=arguments.folder))
    loads: dict[str, list[Load]] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        postgres = Postgres(home)
        stack.callback(postgres.stop)
        each = arguments.rate * arguments.seconds + WARM_RATE * WARM_SECONDS + 2
        records = math.ceil(each * 2 * arguments.rounds * len(engines))
        prepared = traffic.prepare(home, records=records, duplicates=0, tick=progress.step("sign the requests"))
        place = Place(home, postgres, "", traffic.BODY_SIZE)
        for engine in engines:
            store = fresh_store(engine, place, home, stack)
            filled = Filled(engine, place, store, prepared, progress)
            filled.fill(arguments.events)
            loads[engine] = [
                filled.load(keep, arguments.rate, arguments.seconds)
                for n in range(arguments.rounds)
                for keep in ((KEPT, ENDED) if n % 2 == 0 else (ENDED, KEPT))
            ]
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "events": arguments.events,
        "rate": arguments.rate,
        "engines": {engine: [asdict(load) for load in ones] for engine, ones in loads.items()},
    }
    found["targets"] = [{**asdict(one), "reached": one.reached} for one in targets(found)]
    return found


def targets(found: dict[str, Any]) -> list[Target]:
    """Compare the p99 beside pruning with the p99 without."""
    judged = []
    for engine, loads in found["engines"].items():
        p99 = {keep: statistics.median(one["p99_ms"] for one in loads if one["keep"] == keep) for keep in (KEPT, ENDED)}
        what = f"p99 of intake on {engine}, beside pruning / without"
        judged.append(Target(what, p99[ENDED] / p99[KEPT], "x", LIMIT, FLAT, lower_is_better=True))
    return judged


def render(found: dict[str, Any]) -> str:
    """Render the report as text."""
    rows = [["engine", "events held", "pruned", "pruned/s", "answered p50 ms", "p99"]]
    for engine, loads in found["engines"].items():
        for one in loads:
            pace = f"{one['pruned'] / one['seconds']:,.0f}" if one["keep"] == ENDED else ""
            times = (f"{one['p50_ms']:.2f}", f"{one['p99_ms']:.2f}")
            rows.append([engine, f"{one['held']:,}", f"{one['pruned']:,}", pace, *times])
    judged = "\n".join(f"  {target.line()}" for target in targets(found))
    return f"{found['rate']:,} events/s offered, {traffic.BODY_SIZE} bytes\n\n{table(rows)}\n\ntargets\n{judged}"


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench prune", description=str(__doc__).split("\n")[0])
    parser.add_argument("--events", type=read_count, default=300_000, help="in the store (default: 300000)")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this (repeat)")
    parser.add_argument("--rate", type=read_count, default=500, help="events/s to offer (default: 500)")
    parser.add_argument("--rounds", type=read_count, default=5, help="of both loads (default: 5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each load (default: 8)")
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    arguments = read_arguments(words)
    return part.print_report("prune", lambda: run(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
