"""How far it goes: 1, 2 and 4 receivers, then 1, 2 and 4 workers, on one PostgreSQL, and what follows from their cost.

On a small machine more processes cannot be faster than its cores. What can be measured there is what an event *costs*:
CPU on our side and on the database's, bytes of write-ahead log, and whether that grows when processes share it.
From the cost follows how much of each a rate needs (`project`). Run by `python -m bench.scale`; talk on
stderr, report on stdout. `docs/explanation/scale.md` explains the figures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import contestants, drive, traffic, work, work_contestants
from bench.drive import Order
from bench.engines import Postgres, cpu_seconds, machine_seconds
from bench.progress import Progress
from bench.work_report import Settings

PROCESSES = (1, 2, 4)
WARM_SECONDS = 1.0
MAX_RATE = 30_000
"""Prepared requests per second of load: more than this machine will take."""
NOOP = work_contestants.Contestant(
    "noop",
    "noop",
    "oncehook on PostgreSQL",
    "no-op handler, 500 subjects",
    "postgres",
    "oncehook_inbox",
    pace=6_000,
    ledger=work_contestants.ONCEHOOK_POSTGRES,
    subjects=500,
)
NODES = 100
CORES_PER_NODE = 2
STORE_CORES = (8, 32, 64)
BUSY = 0.6
"""Share of its cores that a database should be asked for in the long run."""


@dataclass(frozen=True)
class Cost:
    """What one event takes with so many processes."""

    processes: int
    per_second: float
    ours_us: float
    """CPU of our processes per event."""
    store_us: float
    """CPU of PostgreSQL per event."""
    wal: float
    """Bytes of PostgreSQL's write-ahead log per event."""
    others: float
    """Cores that somebody else used meanwhile: how much to believe the throughput."""


def receive(processes: int, place: contestants.Place, seconds: float, progress: Progress) -> Cost:
    """Load so many receivers, each event stored with one delivery; nobody works."""
    one = contestants.Contestant(f"receivers_{processes}", "", "postgres", "oncehook", processes=processes)
    tick = progress.step(f"{processes} receiving, {seconds:g} s")
    with contestants.run_contestant(one, place) as running:
        warm = round(WARM_SECONDS * MAX_RATE)
        drive.load_own(Order(place.traffic, running.ports, one.path, 0, warm), seconds=WARM_SECONDS, tick=tick)
        assert place.postgres is not None
        written = wal(place.postgres)
        before = _clocks(running.server_pids, running.store_pids)
        order = Order(place.traffic, running.ports, one.path, warm, place.traffic.records)
        figures = drive.load_own(order, seconds=seconds, tick=tick)
        after = _clocks(running.server_pids, running.store_pids)
        written = wal(place.postgres) - written
    ours, store, machine = (b - a for a, b in zip(before, after, strict=True))
    events = figures.acknowledged
    cost = Cost(
        processes,
        figures.per_second,
        ours * 1e6 / events,
        store * 1e6 / events,
        written / events,
        max(0.0, machine - ours - store) / seconds,
    )
    progress.result(f"{cost.per_second:,.0f} events/s")
    return cost


def _clocks(ours: Sequence[int], store: Sequence[int]) -> tuple[float, float, float]:
    return cpu_seconds(ours), cpu_seconds(store), machine_seconds()


def wal(postgres: Postgres) -> int:
    """Bytes of write-ahead log that this server has written so far."""
    return int(str(postgres.ask("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")))


def work_off(processes: int, place: work_contestants.Place, seconds: float, progress: Progress) -> Cost:
    """Let so many workers work off a full store with a handler that does nothing, one at a time per subject."""
    assert place.postgres is not None
    postgres = place.postgres
    one = replace(NOOP, name=f"workers_{processes}", processes=processes)
    move = progress.step(f"{processes} working, {seconds:g} s")
    since: list[int] = []

    def tick(share: float) -> None:
        if not since:  # filled, and the workers have just been started
            since.append(wal(postgres))
        move(share)

    measured = work.run_turn(one, place, Settings(seconds, 1, place.body, 0, None), tick)
    written = (wal(postgres) - since[0]) / measured.done
    cost = Cost(
        processes,
        measured.per_second,
        measured.worker_cpu_us,
        measured.store_cpu_us,
        written,
        measured.others_cores,
    )
    progress.result(f"{cost.per_second:,.0f} deliveries/s")
    return cost


@dataclass(frozen=True)
class Projection:
    """What a database of a size can carry, and what that needs on our side."""

    store_cores: int
    per_second: float
    """Events received and worked off."""
    our_cores: float
    wal_per_second: float
    """Bytes of write-ahead log."""


def project(received: Cost, worked: Cost, store_cores: int) -> Projection:
    """From the cost of an event: PostgreSQL does both halves of the work, and so do our processes."""
    per_second = BUSY * store_cores * 1e6 / (received.store_us + worked.store_us)
    our_cores = per_second * (received.ours_us + worked.ours_us) / 1e6 / BUSY
    return Projection(store_cores, per_second, our_cores, per_second * (received.wal + worked.wal))


def ours_alone(received: Cost, worked: Cost, cores: int) -> float:
    """Events per second that our processes could receive and work off on so many cores, had the database no end."""
    return BUSY * cores * 1e6 / (received.ours_us + worked.ours_us)


def render(received: Sequence[Cost], worked: Sequence[Cost]) -> str:
    """Render the report in Markdown."""
    lines = _table("processes | per second | our CPU µs | PostgreSQL CPU µs | WAL bytes | others' cores")
    both = (("receiving", received), ("working", worked))
    for what, costs in both:
        for one in costs:
            figures = f"{one.ours_us:.0f} | {one.store_us:.0f} | {one.wal:,.0f} | {one.others:.1f}"
            lines.append(f"| {one.processes} {what} | {one.per_second:,.0f} | {figures} |")
    lines += ["", f"Slope of the cost, {PROCESSES[0]} to {PROCESSES[-1]} processes:", ""]
    for what, (first, *_, last) in both:
        ours, store, wal = last.ours_us / first.ours_us, last.store_us / first.store_us, last.wal / first.wal
        lines.append(f"- {what}: ours × {ours:.2f}, PostgreSQL × {store:.2f}, WAL × {wal:.2f}")
    dear = received[-1], worked[-1]
    lines += ["", *_table("PostgreSQL cores | events/s received and worked | cores of ours | WAL MB/s")]
    for cores in STORE_CORES:
        needs = project(*dear, cores)
        log = needs.wal_per_second / 1e6
        lines.append(f"| {cores} | {needs.per_second:,.0f} | {needs.our_cores:.0f} | {log:.0f} |")
    alone = ours_alone(*dear, NODES * CORES_PER_NODE)
    needed = alone * sum(cost.store_us for cost in dear) / 1e6 / BUSY
    log = alone * sum(cost.wal for cost in dear) / 1e6
    lines += [
        "",
        f"{NODES} nodes of {CORES_PER_NODE} cores could receive and work off {alone:,.0f} events/s; that would take"
        f" PostgreSQL {needed:,.0f} cores and {log:,.0f} MB/s of write-ahead log.",
    ]
    return "\n".join(lines)


def _table(head: str) -> list[str]:
    return [f"| {head} |", "|" + " --- |" * (head.count("|") + 1)]


def run(seconds: float, folder: Path | None) -> str:
    """Measure everything."""
    progress = Progress(1 + 2 * len(PROCESSES))
    home = Path(tempfile.mkdtemp(prefix="oncehook-scale-", dir=folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        postgres = Postgres(home)
        stack.callback(postgres.stop)
        records = round((WARM_SECONDS + seconds) * MAX_RATE)
        prepared = traffic.prepare(home, records=records, duplicates=0, tick=progress.step("prepare requests"))
        intake = contestants.Place(home, prepared, postgres, None, with_route=True, serve_options=["--no-worker"])
        received = [receive(n, intake, seconds, progress) for n in PROCESSES]
        shop = work_contestants.Place(home, postgres, "", traffic.BODY_SIZE)
        worked = [work_off(n, shop, seconds, progress) for n in PROCESSES]
    return render(received, worked)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=str(__doc__).split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each turn, roughly (default: 5)")
    parser.add_argument("--folder", type=Path, help="where the store is put (default: the system's temporary folder)")
    arguments = parser.parse_args(words)
    print(run(arguments.seconds, arguments.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
