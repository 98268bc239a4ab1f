"""One side's turn at a load, and the figures that it gives: the CPU of all processes first, then the rate.

Another commit's product runs in processes of its own, under the same load and the same inbox. Used by `bench.against`
and `bench.ratios`; `bench.pairs` says who has which turn.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import contestants, disk, drive, ingest, machine, pairs, report, steady, traffic, work, work_contestants
from bench.engines import ROOT, BenchError, Postgres, cpu_seconds
from bench.latency import WARM_RATE, WARM_SECONDS, Offered
from bench.pairs import Figures
from bench.product import FRESH_SECONDS, read_counter, serving
from bench.progress import Progress
from bench.steady_report import Scene
from bench.trees import name_tree
from bench.verdicts import CPU
from bench.work_contestants import Working, run_sink
from bench.work_report import Settings as WorkSettings

RATES = (100, 1000)
"""Events per second at which latency is measured."""
OFFERED = 500
"""Events per second at which answers are timed."""
START_SECONDS, PATIENCE = 30.0, 6.0
"""Time for workers to start, and how many times as long as asked for they may then take."""


@dataclass(frozen=True)
class Places:
    """What a run offers to those who receive, and to those who work."""

    intake: contestants.Place
    queue: work_contestants.Place
    settings: report.Settings
    fsync: disk.Disk


@dataclass(frozen=True)
class Look:
    """How far the workers were at one moment."""

    at: float
    done: int
    cpu: tuple[float, float]
    """Seconds of the workers, and of the database."""


@contextmanager
def open_places(
    engines: Collection[str],
    *,
    seconds: float,
    max_rate: int,
    folder: Path | None,
    receivers: int | None = None,
    duplicates: bool = False,
) -> Iterator[Places]:
    """Prepare requests, engines and a sink in a folder; all of it is gone afterwards.

    `receivers`: of every `oncehook serve` that only receives. `duplicates`: also prepare repeated keys.
    """
    settings = report.Settings(
        seconds=seconds,
        rounds=1,
        wrk=drive.find_wrk(),
        offered=OFFERED,
        large=False,
        with_route=True,
        serve_options=["--no-worker"],
        folder=folder,
        max_rate=max_rate,
    )
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="oncehook-bench-", dir=folder))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        fsync = disk.summarize(disk.measure(home, seconds=1.0))
        postgres = Postgres(home) if "postgres" in engines else None
        if postgres is not None:
            stack.callback(postgres.stop)
        load = math.ceil(seconds) * max_rate
        records = max(load + max_rate, math.ceil(sum(RATES) * seconds + WARM_RATE * WARM_SECONDS))
        prepared = traffic.prepare(
            home, records=records + 10, duplicates=load if duplicates else 0, tick=lambda share: None
        )
        intake = contestants.Place(home, prepared, postgres, None, settings.with_route, settings.serve_options)
        yield Places(
            contestants.with_receivers(intake, receivers),
            work_contestants.Place(home, postgres, stack.enter_context(run_sink(home)), traffic.BODY_SIZE),
            settings,
            fsync,
        )


def run_pairs(wanted: Sequence[pairs.Pair], rounds: int, places: Places) -> pairs.Found:
    """Run all turns, and describe the machine beside what they came to."""
    return {
        "machine": machine.describe(),
        "tree": name_tree(),
        "disk": asdict(places.fsync),
        "seconds": places.settings.seconds,
        **pairs.run_pairs(wanted, rounds, places.queue.store_pids("postgres")),
    }


def run_ingest(
    progress: Progress,
    label: str,
    *,
    one: contestants.Contestant,
    place: contestants.Place,
    settings: report.Settings,
    tree: Path = ROOT,
    repeated: float = 0.0,
) -> Figures:
    """Send signed requests as fast as they are answered, with a share of the keys repeated."""
    with contestants.run_contestant(one, place, tree) as running:
        trial = ingest.Trial(running, place, settings, progress, label)
        trial.warm_up()
        measured = trial.measure_mix(repeated) if repeated else trial.measure()
    return name_ingest(one.engine, measured, "events/s")


def run_answers(
    progress: Progress,
    label: str,
    *,
    one: contestants.Contestant,
    place: contestants.Place,
    settings: report.Settings,
) -> Figures:
    """Offer requests at fixed moments, and time each answer from the moment its request was due."""
    with contestants.run_contestant(one, place) as running:
        trial = ingest.Trial(running, place, settings, progress, label)
        trial.warm_up()
        measured = trial.measure_latency()
    return name_ingest(one.engine, measured)


def name_ingest(engine: str, measured: report.Measured, rate: str | None = None) -> Figures:
    """Name the figures of one load of requests."""
    figures = measured.figures
    rates = {rate: figures.per_second} if rate else {}
    rest = {**rates, "p50 ms": figures.p50_ms, "p99 ms": figures.p99_ms}
    return name_figures(engine, measured.server_cpu_us, measured.store_cpu_us, rest)


def run_http(
    progress: Progress, label: str, *, one: work_contestants.Contestant, place: work_contestants.Place, seconds: float
) -> Figures:
    """Work a full store off by HTTP, or send the same requests without any store; each keeps its own record."""
    settings = WorkSettings(seconds, 1, place.body, 0, None)
    measured = work.run_turn(one, place, settings, progress.step(label))
    if measured.done < measured.jobs:
        raise BenchError(f"only {measured.done:,} of {measured.jobs:,} jobs were done in time")
    rest = {"deliveries/s": measured.per_second}
    return name_figures(one.engine, measured.worker_cpu_us, measured.store_cpu_us, rest)


def run_work(
    progress: Progress,
    label: str,
    *,
    one: work_contestants.Contestant,
    place: work_contestants.Place,
    seconds: float,
    tree: Path = ROOT,
) -> Figures:
    """Work a full store off. Asks only what is public, because another commit may have other tables."""
    # Some more, because neither the start nor the end of the workers counts.
    jobs = round(one.pace * (seconds + 2 * FRESH_SECONDS))
    tick = progress.step(label)
    with work_contestants.run_contestant(one, place, jobs, tree) as working:
        try:
            looks = watch(working, jobs, seconds, tick)
        except BenchError as error:
            raise BenchError(f"{error}\n{working.logs()}".rstrip()) from error
    first, last = choose_window(looks, jobs)
    done = last.done - first.done
    ours, store = ((end - start) * 1e6 / done for start, end in zip(first.cpu, last.cpu, strict=True))
    return name_figures(one.engine, ours, store, {"deliveries/s": done / (last.at - first.at)})


def watch(working: Working, jobs: int, seconds: float, tick: drive.Tick) -> list[Look]:
    """Look at the workers until everything is done."""
    for worker in working.workers:
        worker.wait_until_ready()
    deadline = time.monotonic() + START_SECONDS + PATIENCE * seconds
    looks: list[Look] = []
    while not looks or looks[-1].done < jobs:
        if time.monotonic() > deadline:
            raise BenchError(f"only {looks[-1].done:,} of {jobs:,} jobs were done in time")
        working.check()
        done = sum(read_counter(worker.port, "oncehook_attempts_total", "done") for worker in working.workers)
        looks.append(Look(time.monotonic(), done, (cpu_seconds(working.pids), cpu_seconds(working.store_pids))))
        tick(min(1.0, done / jobs))
        time.sleep(FRESH_SECONDS)
    if looks[-1].done > jobs:
        raise BenchError(f"{looks[-1].done:,} jobs were done, but only {jobs:,} were given")
    return looks


def choose_window(looks: Sequence[Look], jobs: int) -> tuple[Look, Look]:
    """Return the first and the last look at workers that were busy: neither their start nor their end counts."""
    busy = [look for look in looks if 0 < look.done < jobs]
    if len(busy) < 2:
        raise BenchError("it was over too soon to be measured: use more --seconds")
    return busy[0], busy[-1]


def run_latency(
    progress: Progress,
    label: str,
    *,
    engine: str,
    place: work_contestants.Place,
    prepared: traffic.Traffic,
    seconds: float,
    tree: Path = ROOT,
) -> Figures:
    """Offer events at fixed moments to one process that receives and works."""
    tick = progress.step(label)
    found: Figures = {}
    with serving(place, engine, tree=tree) as product:
        offered = Offered(product, prepared, place.store_pids(engine))
        offered.warm_up(tick)
        for rate in RATES:
            pace = offered.offer(rate, seconds, tick)
            rest = {
                "answered p50 ms": pace.answer_p50_ms,
                "answered p99 ms": pace.answer_p99_ms,
                "done p50 ms": pace.done_p50_ms,
                "done p99 ms": pace.done_p99_ms,
            }
            figures = name_figures(engine, pace.our_cpu_us, pace.store_cpu_us, rest)
            found |= {f"{name} at {rate:,} a second": value for name, value in figures.items()}
    return found


def run_steady(
    progress: Progress, label: str, *, scene: Scene, place: work_contestants.Place, seconds: float, tree: Path = ROOT
) -> Figures:
    """Receive and deliver by HTTP at a steady rate."""
    measured = steady.run_scene(steady.Turn(tree, place, progress.step(label)), scene=scene, seconds=seconds)
    rest = {
        "mean ms": measured.mean_ms,
        "p50 ms": measured.p50_ms,
        "p99 ms": measured.p99_ms,
        "furthest behind s": measured.behind_s,
    }
    return name_figures(scene.engine, measured.our_cpu_us, measured.store_cpu_us, rest)


def name_figures(engine: str, ours: float, store: float, rest: Figures) -> Figures:
    """Put the CPU per event of all processes first, and last of what it consists where the database has its own."""
    parts = {"CPU of ours": ours, "CPU of the database": store} if engine == "postgres" else {}
    return {CPU: ours + store, **rest, **parts}
