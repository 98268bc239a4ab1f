"""Does it stay fast? Intake on a store that fills up, and leases beside a subject that has more and more waiting.

Intake: the same load on an empty store and after each size, the product in one process on each engine; PostgreSQL has
room for its log (`Postgres.give_room`) and has written out the fill before each load. Leases: the same
leases beside one subject with 1 to 100,000 deliveries waiting, in turn, so that a noisy machine touches all alike. Run
by `scripts/bench growth`; talk on stderr, report on stdout, exit 1 when a check failed.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import machine, part, work_backlog
from bench.contestants import CONTESTANTS, Contestant, Place, run_contestant
from bench.drive import find_wrk
from bench.engines import Postgres
from bench.ingest import Trial, has_mixes, open_place
from bench.progress import Progress
from bench.report import Measured, Settings, Target, table
from bench.work_contestants import Place as Shop
from bench.work_contestants import fresh_store

ENGINES = ("sqlite", "postgres")
DEPTHS = (1, 100, 10_000, 100_000)
TURNS = 8
FLOOR, FLAT = 0.9, 0.95
"""Of an empty store's events per second; two loads of the same thing differ by as much as the second."""
DEEP_LIMIT, DEEP_FLAT = 1.1, 1.05
PIECES = 10
"""Loads in which a store is filled from one size to the next."""


@dataclass(frozen=True)
class Size:
    """A load on a store that holds so many events."""

    events: int
    cpu_us: float
    """CPU per event of all processes."""
    per_second: float

    @classmethod
    def of(cls, events: int, measured: Measured) -> Size:
        """Keep what is compared."""
        return cls(events, measured.server_cpu_us + measured.store_cpu_us, measured.figures.per_second)


def run_intake(one: Contestant, place: Place, settings: Settings, sizes: Sequence[int], bar: Progress) -> list[Size]:
    """Load an empty store, fill it, load it again."""
    with run_contestant(one, place) as running:
        trial = Trial(running, place, settings, bar, "growth")
        trial.warm_up()
        found = [Size.of(0, trial.measure("load on an empty store"))]
        held = 0
        for size in sizes:
            trial.fill(size - held)
            held = size
            if place.postgres is not None:
                place.postgres.rest()
            found.append(Size.of(size, trial.measure(f"load on {size:,} events")))
        return found


def run_leases(engine: str, shop: Shop, turns: int, progress: Progress) -> dict[int, float]:
    """Microseconds per leased delivery, by how many wait on one other subject."""
    with ExitStack() as stack:
        stores = {}
        for depth in DEPTHS:
            folder = shop.folder / f"growth-{engine}-{depth}"
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            store = fresh_store(engine, shop, folder, stack)
            stores[str(depth)] = f"sqlite:{store}" if engine == "sqlite" else store
            tick = progress.step(f"{engine}  {depth:,} waiting on one subject")
            subjects = work_backlog.one_deep_subject(depth)
            uvloop.run(work_backlog.fill(stores[str(depth)], depth + work_backlog.FEW, subjects, tick))
            if engine == "postgres":
                work_backlog.tidy(store)
        tick = progress.step(f"{engine}  lease")
        figures = uvloop.run(work_backlog.measure(stores, turns, tick))
    found = {int(depth): statistics.median(times) for depth, times in figures.items()}
    progress.result(", ".join(f"{depth:,}: {value:.1f} µs" for depth, value in found.items()))
    return found


def run_all_intake(engines: Sequence[str], settings: Settings, sizes: Sequence[int]) -> dict[str, list[Size]]:
    """Measure intake on every engine."""
    chosen = [one for one in CONTESTANTS if has_mixes(one) and one.engine in engines]
    loads = len(sizes) + 1
    steps = 1 + len(chosen) * (1 + loads + PIECES * len(sizes))
    progress = Progress(steps)
    more = len(sizes) * math.ceil(settings.seconds) * settings.max_rate + (sizes[-1] if sizes else 0)
    with open_place(chosen, settings, progress, more=more) as place:
        if place.postgres is not None:
            place.postgres.give_room()
        return {one.engine: run_intake(one, place, settings, sizes, progress) for one in chosen}


def run_all_leases(engines: Sequence[str], folder: Path | None, turns: int) -> dict[str, dict[int, float]]:
    """Measure leases on every engine."""
    # Stderr shows our own progress only.
    logging.getLogger("oncehook").addHandler(logging.NullHandler())
    progress = Progress(len(engines) * (len(DEPTHS) + 1))
    home = Path(tempfile.mkdtemp(prefix="oncehook-growth-", dir=folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        postgres = Postgres(home)
        stack.callback(postgres.stop)
        shop = Shop(home, postgres, "", 0)
        return {engine: run_leases(engine, shop, turns, progress) for engine in engines}


def targets(found: dict[str, Any]) -> list[Target]:
    """Compare what was found with what it should be."""
    judged = []
    for engine, sizes in found["intake"].items():
        for size in sizes[1:]:
            ratio = size["per_second"] / sizes[0]["per_second"]
            judged.append(Target(f"intake on {engine}, {size['events']:,} events / empty", ratio, "x", FLOOR, FLAT))
    for engine, costs in found["leases"].items():
        ratio = costs[str(DEPTHS[-1])] / costs[str(DEPTHS[0])]
        what = f"lease on {engine}, {DEPTHS[-1]:,} waiting on one subject / {DEPTHS[0]}"
        judged.append(Target(what, ratio, "x", DEEP_LIMIT, DEEP_FLAT, lower_is_better=True))
    return judged


def render(found: dict[str, Any]) -> str:
    """Render the report as text."""
    parts = []
    if found["intake"]:
        rows = [["intake", "events in the store", "CPU µs/event", "events/s"]]
        for engine, sizes in found["intake"].items():
            rows += [
                [engine, f"{size['events']:,}", f"{size['cpu_us']:,.0f}", f"{size['per_second']:,.0f}"]
                for size in sizes
            ]
        parts.append(table(rows))
    if found["leases"]:
        rows = [["lease, µs per delivery", *[f"{depth:,} on one subject" for depth in DEPTHS]]]
        rows += [
            [engine, *[f"{costs[str(depth)]:.1f}" for depth in DEPTHS]] for engine, costs in found["leases"].items()
        ]
        parts.append(table(rows))
    parts += ["targets", "\n".join(f"  {target.line()}" for target in targets(found))]
    return "\n\n".join(parts)


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench growth", description=str(__doc__).split("\n")[0])
    parser.add_argument(
        "--events", type=int, action="append", metavar="N", help="a size of the store (repeat; default: 1000000)"
    )
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this (repeat)")
    parser.add_argument("--no-intake", action="store_true", help="leases only")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load (default: 5)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"turns of the leases (default: {TURNS})")
    parser.add_argument("--max-rate", type=int, default=60_000, help="events/s to prepare for (default: 60000)")
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser.parse_args(words)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; return plain values."""
    settings = Settings(
        seconds=arguments.seconds,
        rounds=1,
        wrk=find_wrk(),
        offered=0.0,
        large=False,
        with_route=True,
        serve_options=["--no-worker"],
        folder=arguments.folder,
        max_rate=arguments.max_rate,
    )
    sizes = [] if arguments.no_intake else sorted(arguments.events or [1_000_000])
    engines = arguments.engine or ENGINES
    leases = run_all_leases(engines, arguments.folder, arguments.turns)
    intake = run_all_intake(engines, settings, sizes) if sizes else {}
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "intake": {engine: [asdict(size) for size in ones] for engine, ones in intake.items()},
        "leases": {engine: {str(depth): cost for depth, cost in costs.items()} for engine, costs in leases.items()},
    }
    found["targets"] = [{**asdict(one), "reached": one.reached} for one in targets(found)]
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    arguments = read_arguments(words)
    return part.print_report("growth", lambda: run(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
