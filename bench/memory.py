"""What it takes to be there: memory idle and under load, CPU while nothing happens, and the time to import it.

Starts `oncehook serve` with a handler inside on each engine, leaves it alone, then loads it with as much as it takes.
Memory is what the process holds for itself and shares (RSS), its children included. Run by `scripts/bench memory`;
talk on stderr, report on stdout.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import drive, machine, traffic
from bench.drive import Order
from bench.engines import (
    ROOT,
    BenchError,
    Postgres,
    child_environment,
    cpu_seconds,
    family_of,
    generator_seconds,
)
from bench.part import run_part
from bench.product import serving
from bench.progress import Progress
from bench.report import Target, table
from bench.work_contestants import Place

ENGINES = ("sqlite", "postgres")
REST_SECONDS = 2.0
"""After the start, before anything counts."""
MAX_RATE = 30_000
RUNS = 10
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import oncehook": ["-c", "import oncehook"],
    "oncehook --help": ["-m", "oncehook", "--help"],
}
LIMITS = {
    "idle_mb": (90.0, 60.0),
    "loaded_mb": (200.0, 120.0),
    "import oncehook": (150.0, None),
    "oncehook --help": (250.0, None),
    "idle_cpu": (1.0, None),
}
"""Floor and moonshot."""


@dataclass(frozen=True)
class Footprint:
    """One server: megabytes, and the percentage of a core that it takes while nothing happens."""

    idle_mb: float
    loaded_mb: float
    """The most that was seen under load."""
    after_mb: float
    """When all of it was worked off."""
    idle_cpu: float
    events: int


def rss_mb(pid: int) -> float:
    """Return the megabytes that a process and its children hold."""
    total = 0
    for process in family_of([pid]):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 1e6


def run_engine(engine: str, place: Place, prepared: traffic.Traffic, seconds: float, progress: Progress) -> Footprint:
    """Start, rest, load, rest."""
    with serving(place, engine) as product:
        progress.step(f"{engine}  idle, {seconds:g} s")
        time.sleep(REST_SECONDS)
        before = cpu_seconds([product.pid])
        time.sleep(seconds)
        idle_cpu, idle = (cpu_seconds([product.pid]) - before) * 100 / seconds, rss_mb(product.pid)
        tick = progress.step(f"{engine}  load, {seconds:g} s")
        peak, figures = _measure_load(product.pid, product.port, prepared, seconds, tick)
        time.sleep(REST_SECONDS)
        found = Footprint(idle, peak, rss_mb(product.pid), idle_cpu, figures.acknowledged)
    progress.result(f"{found.idle_mb:.0f} MB idle, {found.loaded_mb:.0f} MB under load, {idle_cpu:.2f} % CPU idle")
    return found


def _measure_load(
    pid: int, port: int, prepared: traffic.Traffic, seconds: float, tick: Callable[[float], None]
) -> tuple[float, drive.Figures]:
    peak = rss_mb(pid)

    def look(share: float) -> None:
        nonlocal peak
        peak = max(peak, rss_mb(pid))
        tick(share)

    order = Order(prepared, [port], "/in/bench", 0, prepared.records)
    figures = drive.load_own(order, seconds=seconds, tick=look)
    if figures.refused or figures.broken:
        raise BenchError(f"{figures.refused} requests refused and {figures.broken} broken")
    return peak, figures


def run_imports(tick: Callable[[float], None]) -> dict[str, float]:
    """Return the CPU milliseconds of each command: the least of several runs, in turn."""
    best = dict.fromkeys(COMMANDS, math.inf)
    for number in range(RUNS):
        for name, words in COMMANDS.items():
            before = generator_seconds()
            subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=child_environment({}), check=True, stdout=subprocess.DEVNULL
            )
            best[name] = min(best[name], (generator_seconds() - before) * 1000)
        tick((number + 1) / RUNS)
    return best


def targets(found: dict[str, Any]) -> list[Target]:
    """Compare what was found with what it should be."""
    judged = []
    for engine, one in found["engines"].items():
        for what, field in (("memory idle", "idle_mb"), ("memory under load", "loaded_mb")):
            judged.append(Target(f"{what}, {engine}", one[field], " MB", *LIMITS[field], lower_is_better=True))
        judged.append(Target(f"CPU idle, {engine}", one["idle_cpu"], " %", *LIMITS["idle_cpu"], lower_is_better=True))
    for name, value in found["imports"].items():
        if name in LIMITS:
            judged.append(Target(name, value, " ms", *LIMITS[name], lower_is_better=True))
    return judged


def run(seconds: float, folder: Path | None) -> dict[str, Any]:
    """Measure everything; return plain values."""
    progress = Progress(2 + 2 * len(ENGINES))
    home = Path(tempfile.mkdtemp(prefix="oncehook-memory-", dir=folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        imports = run_imports(progress.step("import"))
        postgres = Postgres(home)
        stack.callback(postgres.stop)
        records = math.ceil(seconds) * MAX_RATE
        prepared = traffic.prepare(home, records=records, duplicates=0, tick=progress.step("sign the requests"))
        place = Place(home, postgres, "", traffic.BODY_SIZE)
        engines = {engine: asdict(run_engine(engine, place, prepared, seconds, progress)) for engine in ENGINES}
    found = {"machine": machine.describe(), "seconds": seconds, "engines": engines, "imports": imports}
    return {**found, "targets": [{**asdict(one), "reached": one.reached} for one in targets(found)]}


def render(found: dict[str, Any]) -> str:
    """Render the report as text."""
    rows = [["engine", "idle MB", "under load MB", "after it MB", "idle CPU %", "events"]]
    for engine, one in found["engines"].items():
        figures = [f"{one[name]:.1f}" for name in ("idle_mb", "loaded_mb", "after_mb")]
        rows.append([engine, *figures, f"{one['idle_cpu']:.2f}", f"{one['events']:,}"])
    imports = [["command", "CPU ms"], *[[name, f"{value:.0f}"] for name, value in found["imports"].items()]]
    marks = "\n".join(f"  {target.line()}" for target in targets(found))
    return f"{table(rows)}\n\n{table(imports)}\n\ntargets\n\n{marks}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    return run_part(
        words, name="memory", about=str(__doc__), seconds=5.0, length="length of rest and load", run=run, render=render
    )


if __name__ == "__main__":
    sys.exit(main())
