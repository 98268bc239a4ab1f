"""Is this tree slower than another revision? Ingest, work and latency of both, in one run and in turns.

The other revision is checked out beside this one. Its product runs in processes of its own, under the same load and the
same inbox, and is asked only what is public. CPU per event is shown beside rates and delays, because it scatters
less on a shared machine; a run against `HEAD` tells how much everything scatters. Run by `scripts/bench --against
REVISION` (`scripts/bench ingest --against REVISION`: one part); talk on stderr, report on stdout, exit 1 when a load
failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import contestants, disk, drive, ingest, machine, traffic, work_contestants
from bench.engines import BenchError, Postgres, cpu_seconds
from bench.latency import WARM_RATE, WARM_SECONDS, Offered
from bench.product import FRESH_SECONDS, read_counter, serving
from bench.progress import Progress
from bench.report import NOISY_CORES, Settings, short, table
from bench.trees import SHOWN, check_out_both, take_turns
from bench.work_contestants import Working, run_sink
from bench.work_noise import Neighbours

PARTS = ("ingest", "work", "latency")
ENGINES = ("sqlite", "postgres")
RATES = (100, 1000)
"""Events per second at which latency is measured."""
MAX_RATE = 30_000
"""Prepared requests per second of load."""
START_SECONDS, PATIENCE = 30.0, 6.0
"""Time for workers to start, and how many times as long as asked for they may then take."""

AGREEING = 3
"""Rounds that must agree before they are believed."""

Figures = dict[str, float]
"""By what they are called; `…/s` is better when it is more, everything else when it is less."""


@dataclass(frozen=True)
class Turn:
    """One tree's turn at one load."""

    path: Path
    progress: Progress
    label: str


@dataclass(frozen=True)
class Load:
    """Something that every tree does in every round."""

    title: str
    run: Callable[[Turn], Figures]
    steps: int = 1


@dataclass(frozen=True)
class Measured:
    """What one load came to in one round."""

    load: str
    tree: str
    round: int
    figures: Figures
    others_cores: float
    """Cores that somebody else used meanwhile."""


@dataclass(frozen=True)
class Look:
    """How far the workers were at one moment."""

    at: float
    done: int
    workers: float
    store: float


# -- loads -------------------------------------------------------------------------------------


def run_ingest(turn: Turn, *, one: contestants.Contestant, place: contestants.Place, settings: Settings) -> Figures:
    """Send signed requests with new keys as fast as they are answered."""
    with contestants.run_contestant(one, place, turn.path) as running:
        trial = ingest.Trial(running, place, settings, turn.progress, f"{turn.label}  ingest")
        trial.warm_up()
        measured = trial.measure()
    figures = measured.figures
    return {
        "events/s": figures.per_second,
        "p50 ms": figures.p50_ms,
        "p99 ms": figures.p99_ms,
        **name_cpu(one.engine, measured.server_cpu_us, measured.store_cpu_us),
    }


def run_work(turn: Turn, *, one: work_contestants.Contestant, place: work_contestants.Place, seconds: float) -> Figures:
    """Work a full store off."""
    # Some more, because neither the start nor the end of the workers counts.
    jobs = round(one.pace * (seconds + 2 * FRESH_SECONDS))
    tick = turn.progress.step(f"{turn.label}  work  {one.name}")
    with work_contestants.run_contestant(one, place, jobs, turn.path) as working:
        try:
            looks = watch(working, jobs, seconds, tick)
        except BenchError as error:
            raise BenchError(f"{error}\n{working.logs()}".rstrip()) from error
    first, last = choose_window(looks, jobs)
    done = last.done - first.done
    figures = {
        "deliveries/s": done / (last.at - first.at),
        **name_cpu(one.engine, (last.workers - first.workers) * 1e6 / done, (last.store - first.store) * 1e6 / done),
    }
    turn.progress.result(brief(figures))
    return figures


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
        looks.append(Look(time.monotonic(), done, cpu_seconds(working.pids), cpu_seconds(working.store_pids)))
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
    turn: Turn, *, engine: str, place: work_contestants.Place, prepared: traffic.Traffic, seconds: float
) -> Figures:
    """Offer events at fixed moments to one process that receives and works."""
    tick = turn.progress.step(f"{turn.label}  latency  {engine}")
    found: Figures = {}
    with serving(place, engine, tree=turn.path) as product:
        offered = Offered(product, prepared, place.store_pids(engine))
        offered.warm_up(tick)
        for rate in RATES:
            pace = offered.offer(rate, seconds, tick)
            figures = {
                "answered p50 ms": pace.answer_p50_ms,
                "answered p99 ms": pace.answer_p99_ms,
                "done p50 ms": pace.done_p50_ms,
                "done p99 ms": pace.done_p99_ms,
                **name_cpu(engine, pace.our_cpu_us, pace.store_cpu_us),
            }
            turn.progress.result(f"{rate:,}/s: {brief(figures)}")
            found |= {f"at {rate:,}/s: {name}": value for name, value in figures.items()}
    return found


def name_cpu(engine: str, ours: float, store: float) -> Figures:
    """Name the CPU per event of our processes, and that of the database where it has its own."""
    return {"our CPU µs": ours} if engine == "sqlite" else {"our CPU µs": ours, "database CPU µs": store}


def brief(figures: Figures) -> str:
    """Put figures into one sentence for somebody who watches."""
    return ", ".join(f"{name} {short(value)}" for name, value in figures.items())


# -- the run -----------------------------------------------------------------------------------


def list_loads(
    arguments: argparse.Namespace, intake: contestants.Place, queue: work_contestants.Place, settings: Settings
) -> list[Load]:
    """Return the loads that were asked for: every contestant of `bench.ingest` and `bench.work` that is the product."""
    loads = []
    if "ingest" in arguments.parts:
        for one in contestants.CONTESTANTS:
            if one.is_ours and one.processes == 1 and one.engine in arguments.engine:
                run = partial(run_ingest, one=one, place=intake, settings=settings)
                loads.append(Load(f"ingest  {one.name}", run, steps=2))
    if "work" in arguments.parts:
        for job in work_contestants.CONTESTANTS:
            if job.is_ours and job.engine in arguments.engine:
                work = partial(run_work, one=job, place=queue, seconds=arguments.seconds)
                loads.append(Load(f"work  {job.name}", work))
    for engine in arguments.engine if "latency" in arguments.parts else ():
        latency = partial(run_latency, engine=engine, place=queue, prepared=intake.traffic, seconds=arguments.seconds)
        loads.append(Load(f"latency  {engine}", latency))
    return loads


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every load on both trees, round after round; return plain values."""
    measured: list[Measured] = []
    failures: dict[str, str] = {}
    seconds = arguments.seconds
    settings = Settings(
        seconds=seconds,
        rounds=arguments.rounds,
        wrk=drive.find_wrk(),
        offered=0.0,
        large=False,
        with_route=True,
        serve_options=["--no-worker"],
        folder=arguments.folder,
        max_rate=MAX_RATE,
    )
    with ExitStack() as stack:
        trees = stack.enter_context(check_out_both(arguments.against))
        home = Path(tempfile.mkdtemp(prefix="oncehook-against-", dir=arguments.folder))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        fsync = disk.summarize(disk.measure(home, seconds=1.0))
        postgres = Postgres(home) if "postgres" in arguments.engine else None
        if postgres is not None:
            stack.callback(postgres.stop)
        records = max((seconds + 2) * MAX_RATE, sum(RATES) * seconds + WARM_RATE * WARM_SECONDS + 10)
        prepared = traffic.prepare(home, records=int(records), duplicates=0, tick=lambda share: None)
        intake = contestants.Place(home, prepared, postgres, None, settings.with_route, settings.serve_options)
        queue = work_contestants.Place(home, postgres, stack.enter_context(run_sink(home)), traffic.BODY_SIZE)
        loads = list_loads(arguments, intake, queue, settings)
        progress = Progress(arguments.rounds * len(trees) * sum(load.steps for load in loads))
        for number, load, tree, path in take_turns(arguments.rounds, loads, trees):
            label = f"round {number + 1} of {arguments.rounds}  {tree[:SHOWN]}"
            neighbours = Neighbours(queue.store_pids("postgres"))
            try:
                figures = load.run(Turn(path, progress, label))
            except BenchError as error:
                failures[f"{load.title}  {tree}"] = str(error)
                progress.result(f"FAILED: {error}")
                continue
            measured.append(Measured(load.title, tree, number, figures, neighbours.cores()))
    return {
        "machine": machine.describe(),
        "disk": asdict(fsync),
        "trees": list(trees),
        "seconds": seconds,
        "rounds": arguments.rounds,
        "measured": [asdict(one) for one in measured],
        "failures": failures,
    }


# -- the report --------------------------------------------------------------------------------


def render(found: dict[str, Any]) -> str:
    """Print every figure of both trees with its median, its spread and the ratio between them."""
    other, here = found["trees"]
    fsync = found["disk"]
    heading = [
        f"{found['rounds']} rounds in turns, loads of {found['seconds']:g} s; disk: fsync p50 {fsync['p50_ms']:.3f} ms",
        f"ratio: {here} / {other[:SHOWN]}, of the medians, and the least and the most of one round. …/s is better when",
        "it is more, everything else when it is less. The last column judges where all rounds (at least three) agree.",
    ]
    if (busy := max((one["others_cores"] for one in found["measured"]), default=0.0)) > NOISY_CORES:
        heading.append(f"warning: others kept up to {busy:.1f} cores busy; do not quote these figures")
    rows = [["", other[:SHOWN], "spread", here, "spread", "ratio", "of one round", ""]]
    for load in dict.fromkeys(one["load"] for one in found["measured"]):
        by_tree = {
            tree: {
                one["round"]: one["figures"] for one in found["measured"] if (one["load"], one["tree"]) == (load, tree)
            }
            for tree in (other, here)
        }
        both = sorted(by_tree[other].keys() & by_tree[here].keys())
        if not both:
            continue
        rows.append([load, *[""] * 7])
        for name in by_tree[here][both[0]]:
            theirs, ours = ([by_tree[tree][number][name] for number in both] for tree in (other, here))
            rows.append([f"  {name}", *compare(name, theirs, ours)])
    return "\n".join(heading) + "\n\n" + table(rows)


def compare(name: str, theirs: Sequence[float], ours: Sequence[float]) -> list[str]:
    """Return the cells of one figure, of the same rounds of both trees."""
    cells = []
    for values in (theirs, ours):
        cells += [short(statistics.median(values)), f"{short(min(values))}–{short(max(values))}"]
    rounds = [our / their for their, our in zip(theirs, ours, strict=True) if their]
    if not rounds:
        return [*cells, "–", "–", ""]
    verdict = ""
    if len(rounds) >= AGREEING and (min(rounds) > 1 or max(rounds) < 1):
        verdict = "better" if (min(rounds) > 1) == name.endswith("/s") else "worse"
    ratio = statistics.median(ours) / statistics.median(theirs)
    return [*cells, f"{ratio:.3f}", f"{min(rounds):.2f}–{max(rounds):.2f}", verdict]


# -- the command line --------------------------------------------------------------------------


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", usage="%(prog)s [PART ...] --against REVISION [options]",
        description=str(__doc__).split("\n")[0],
    )  # fmt: skip
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--against", metavar="REVISION", required=True, help="a commit; HEAD shows the noise")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both trees at everything (default: 5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load, roughly (default: 5)")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this (repeat)")
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    arguments = parser.parse_args(words)
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"{part}: only {', '.join(PARTS)} can be run like this")
    arguments.parts = arguments.parts or PARTS
    arguments.engine = arguments.engine or ENGINES
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report; return the exit status."""
    arguments = read_arguments(words)
    # So that a stop from outside also removes what was checked out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        found = run(arguments)
    except BenchError as error:
        print(f"against failed: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(render(found))
    for name, reason in found["failures"].items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
