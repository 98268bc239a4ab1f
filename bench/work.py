"""The work benchmark: how many jobs per second are durably worked off, by oncehook and by other Python queues.

Gives every contestant a store full of jobs and starts its workers, one contestant after the other and in another order
each round; then measures what a lease costs as the backlog grows, and how long one event takes when nothing else is
going on. Only ratios inside one run are compared with the targets: machines differ and are shared. Run by
`scripts/bench work`; talk on stderr, report on stdout, exit 1 when a check failed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import disk, work_report
from bench.engines import ROOT, BenchError, Postgres, cpu_seconds, machine_seconds
from bench.progress import Progress
from bench.work_backlog import run_backlog
from bench.work_contestants import CONTESTANTS, SCENARIOS, Contestant, Place, Working, run_contestant, run_sink
from bench.work_idle import run_idle
from bench.work_report import Measured, Results, Settings

LOOK_SECONDS = 0.25
PATIENCE = 6.0
"""A turn that takes this many times as long as it was asked to is cut off; what was done until then counts."""
START_SECONDS = 30.0
FIRST, LAST = 0.05, 0.95
ENGINES = ("sqlite", "postgres")
EVENTS_ALONE = 200
BACKLOG_STEPS = 4
"""Three stores to fill, and the leases."""
MEASURES = [*SCENARIOS, "backlog", "idle"]


@dataclass(frozen=True)
class Look:
    """The CPU clocks at one moment."""

    at: float
    machine: float
    workers: float
    store: float


def run_turn(
    contestant: Contestant, place: Place, settings: Settings, tick: Callable[[float], None], tree: Path = ROOT
) -> Measured:
    """Let a contestant work off a full store; the product is taken from `tree`."""
    jobs = round(contestant.pace * settings.seconds)
    with run_contestant(contestant, place, jobs, tree) as working:
        try:
            looks = watch(working, settings.seconds, tick)
            done = working.books.read_done()
            if wrong := working.books.wrong():
                raise BenchError(f"{wrong} of {jobs} jobs were not done as promised")
            if len(done) > jobs:
                raise BenchError(f"{len(done)} jobs were done, but only {jobs} were given")
            return measure(jobs, done, looks)
        except BenchError as error:
            raise BenchError(f"{error}\n{working.logs()}".rstrip()) from error


def watch(working: Working, seconds: float, tick: Callable[[float], None]) -> list[Look]:
    """Look at the clocks until everything is done, or it has taken too long."""
    began = time.monotonic()
    looks = []
    while True:
        looks.append(Look(time.time(), machine_seconds(), cpu_seconds(working.pids), cpu_seconds(working.store_pids)))
        working.check()
        elapsed = time.monotonic() - began
        if working.books.is_over() or elapsed > START_SECONDS + PATIENCE * seconds:
            return looks
        tick(min(1.0, elapsed / seconds))
        time.sleep(LOOK_SECONDS)


def measure(jobs: int, done: Sequence[float], looks: Sequence[Look]) -> Measured:
    """Measure while most jobs were done: neither the start of the workers nor their tail counts."""
    first, last = int(len(done) * FIRST), int(len(done) * LAST)
    if last <= first or done[last] <= done[first]:
        raise BenchError(f"only {len(done)} of {jobs} jobs were done, too few to measure")
    # The clocks were read at moments of our own: take those inside the time that counts, and the jobs between them.
    inside = [look for look in looks if done[first] <= look.at <= done[last]]
    if len(inside) < 2:
        raise BenchError("it was over too soon to be measured: use more --seconds")
    start, end = inside[0], inside[-1]
    between = max(1, bisect_left(done, end.at) - bisect_left(done, start.at))
    workers, store = end.workers - start.workers, end.store - start.store
    return Measured(
        jobs,
        len(done),
        (last - first) / (done[last] - done[first]),
        worker_cpu_us=workers * 1e6 / between,
        store_cpu_us=store * 1e6 / between,
        others_cores=max(0.0, end.machine - start.machine - workers - store) / (end.at - start.at),
    )


def run_round(number: int, chosen: Sequence[Contestant], place: Place, results: Results, progress: Progress) -> None:
    """Give every contestant its turn once."""
    settings = results.settings
    shift = number * len(chosen) // settings.rounds
    for contestant in [*chosen[shift:], *chosen[:shift]]:
        if contestant.name in results.failures:
            continue
        tick = progress.step(f"round {number + 1} of {settings.rounds}  {contestant.name}")
        try:
            measured = run_turn(contestant, place, settings, tick)
        except BenchError as error:
            results.fail(contestant.name, str(error))
            progress.result(f"{contestant.name} FAILED: {error}")
            continue
        results.rounds.setdefault(contestant.name, []).append(measured)
        cut = "" if measured.done == measured.jobs else f", cut off after {measured.done:,} of {measured.jobs:,}"
        progress.result(f"{measured.per_second:,.0f} jobs/s{cut}")


@contextmanager
def open_place(settings: Settings, *, with_postgres: bool) -> Iterator[Place]:
    """Prepare a folder with running engines and a sink; remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="oncehook-bench-", dir=settings.folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        postgres = Postgres(folder) if with_postgres else None
        if postgres is not None:
            stack.callback(postgres.stop)
        yield Place(folder, postgres, stack.enter_context(run_sink(folder)), settings.body)


def run_lone(place: Place, results: Results, progress: Progress) -> None:
    """Send one event at a time, as often as there are rounds."""
    for number in range(results.settings.rounds):
        for engine in ENGINES:
            tick = progress.step(f"round {number + 1} of {results.settings.rounds}  idle  {engine}")
            try:
                idle = run_idle(engine, place, events=EVENTS_ALONE, tick=tick)
            except BenchError as error:
                results.failures[f"idle {engine}"] = str(error)
                progress.result(f"idle {engine} FAILED: {error}")
                continue
            results.idle.setdefault(engine, []).append(idle)
            progress.result(f"p50 {idle.p50_ms:.2f} ms, p99 {idle.p99_ms:.2f} ms")


def run_backlogs(place: Place, results: Results, progress: Progress) -> None:
    """Measure what a lease costs, on each engine."""
    settings = results.settings
    for engine in ENGINES:
        try:
            results.backlog[engine] = run_backlog(
                engine, place, waiting=settings.waiting, rounds=settings.rounds, progress=progress
            )
        except BenchError as error:
            results.failures[f"backlog {engine}"] = str(error)
            progress.result(f"backlog {engine} FAILED: {error}")


def count_steps(wanted: Sequence[str], chosen: Sequence[Contestant], settings: Settings) -> int:
    """Count the steps that the progress will show."""
    steps = settings.rounds * len(chosen)
    if "idle" in wanted:
        steps += settings.rounds * len(ENGINES)
    return steps + (len(ENGINES) * BACKLOG_STEPS if "backlog" in wanted else 0)


def run(wanted: Sequence[str], chosen: Sequence[Contestant], settings: Settings) -> Results:
    """Run the whole benchmark."""
    results = Results(settings)
    progress = Progress(count_steps(wanted, chosen, settings))
    with_postgres = "idle" in wanted or "backlog" in wanted or any(one.engine == "postgres" for one in chosen)
    with open_place(settings, with_postgres=with_postgres) as place:
        times = disk.measure(place.folder, seconds=1.0)
        for number in range(settings.rounds):
            run_round(number, chosen, place, results, progress)
        if "idle" in wanted:
            run_lone(place, results, progress)
        if "backlog" in wanted:
            run_backlogs(place, results, progress)
        # The disk may be slower after some minutes of load than it was before.
        results.disk = disk.summarize(times + disk.measure(place.folder, seconds=1.0))
    return results


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [*MEASURES, *[contestant.name for contestant in CONTESTANTS]]
    parser = argparse.ArgumentParser(
        prog="scripts/bench work",
        description="Compare how many jobs per second oncehook and other Python queues durably work off.",
        epilog=f"What can be measured: {', '.join(MEASURES)}. Contestants: {', '.join(names[len(MEASURES) :])}.",
    )
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="only this (repeat)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each turn, roughly (default: 6)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every contestant (default: 3)")
    parser.add_argument("--body", type=int, default=2048, metavar="BYTES", help="size of each job (default: 2048)")
    parser.add_argument(
        "--waiting", type=int, default=1_000_000, help="deliveries in the largest backlog (default: 1000000)"
    )
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a floor is not reached")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its report; returns the exit status."""
    arguments = read_arguments(words)
    settings = Settings(
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        body=arguments.body,
        waiting=arguments.waiting,
        folder=arguments.folder,
    )
    wanted = arguments.only or MEASURES
    chosen = [one for one in CONTESTANTS if one.name in wanted or one.scenario in wanted]
    # So that a stop from outside also runs every `finally` above.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = run(wanted, chosen, settings)
    if arguments.json:
        work_report.write_json(results, arguments.json)
    print(work_report.render(results))
    for name, reason in results.failures.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    missed = arguments.strict and any(target.reached is None for target in work_report.targets(results))
    return 1 if results.failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
