"""Does oncehook keep up? One `serve` receives and delivers at a steady rate, on many subjects and on few.

Draining a full store (`scripts/bench work`) hides what steady traffic shows: small groups, hot subjects, statistics of
a young store. Three parts. `steady` offers events at fixed moments, delivers them to an HTTP sink that answers at once,
and asks when each delivery was settled. `alone` drains one subject with a handler that does nothing.
`hot` sends many events to one subject while nobody vacuums, and compares what the first and the last of them cost. Run
by `scripts/bench steady`; talk on stderr, report on stdout, exit 1 when a check failed.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from bench import disk, drive, machine, part, traffic, work
from bench.engines import ROOT, BenchError, Postgres, cpu_seconds
from bench.pairs import read_count
from bench.product import Product, serving
from bench.progress import Progress
from bench.steady_report import ALONE_RATE, ENGINES, PIECE, SUBJECTS, Alone, Hot, Scene, Steady, render, targets
from bench.work_contestants import CONTESTANTS, Books, Contestant, Place, run_sink
from bench.work_noise import Neighbours
from bench.work_report import Settings

PARTS = ("steady", "alone", "hot")
RATES = (200, 1000, 2000)
STATISTICS = ("fresh", "analysed")
WARM_RATE, WARM_SECONDS = 200, 1.5
"""Before what counts. Where the store is to be analysed, that is done right after it."""
LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 20.0
"""How long after the last event deliveries may still come."""
BACKLOG_SECONDS, BACKLOG_LOOKS = 0.5, 25
"""The backlog is looked up so many times in each step, and the most counts."""
ALONE_SECONDS, ALONE_PACE = 10.0, 1_500
"""The longest time for which one subject is drained, and deliveries per second to expect."""
HOT_EVENTS = 100_000
CONTESTANT = {"sqlite": "oncehook_sqlite", "postgres": "oncehook_subject"}


def contestant_of(engine: str) -> Contestant:
    """Return the product on one engine, in one process, with one subject."""
    [one] = [one for one in CONTESTANTS if one.name == CONTESTANT[engine]]
    return replace(one, processes=1, subjects=1, pace=ALONE_PACE)


@dataclass(frozen=True)
class Turn:
    """One tree's chance to show what it can."""

    tree: Path
    place: Place
    tick: drive.Tick


class Running:
    """A `serve` on a fresh store, that receives and delivers."""

    def __init__(self, product: Product, books: Books, place: Place, engine: str) -> None:
        self._product, self._books, self._engine = product, books, engine
        self._store_pids = place.store_pids(engine)
        self.sent = 0

    def send(
        self, subjects: int, tick: drive.Tick, *, seconds: float, rate: int | None = None, count: int | None = None
    ) -> float:
        """Send numbered events, at a rate or as fast as they are answered; returns when the first was due."""
        last = self.sent + (count or math.ceil((rate or 0) * seconds)) + drive.CONNECTIONS
        order = drive.Order(None, [self._product.port], "/in/bench", self.sent, last)
        figures = drive.load_own(order, seconds=seconds, rate=rate, count=count, subjects=subjects, tick=tick)
        if figures.refused or figures.broken:
            raise BenchError(f"{figures.refused} requests refused and {figures.broken} broken")
        self.sent = figures.next
        return figures.began

    def wait(self) -> bool:
        """Wait until everything is delivered, or for as long as is bearable; returns whether it was."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._books.is_over():
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def warm_up(self, subjects: int) -> None:
        """Send what does not count."""
        self.send(subjects, lambda share: None, seconds=WARM_SECONDS, rate=WARM_RATE)
        if not self.wait():
            raise BenchError(f"{self.sent} events were not delivered within {PATIENCE_SECONDS:g} s")

    def analyse(self) -> None:
        """Make statistics of what is there now."""
        if self._engine == "postgres":
            with psycopg.connect(self._product.store, autocommit=True) as connection:
                connection.execute("ANALYZE")

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the database, without the session that looks whether all is over, and of our process."""
        return cpu_seconds(self._store_pids) - cpu_seconds(self._books.pids), cpu_seconds([self._product.pid])

    def neighbours(self) -> Neighbours:
        """Watch the rest of the machine from now on."""
        return Neighbours(self._store_pids)

    def read_delivered(self) -> dict[str, float]:
        """Return when each event was delivered, by its key; raise BenchError when that was not in order."""
        if wrong := self._books.wrong():
            raise BenchError(f"{wrong} of {self.sent} events were not delivered as promised")
        return self._product.read_settled(self.sent)


@contextmanager
def run_server(turn: Turn, engine: str, scenario: str = "steady") -> Iterator[Running]:
    """Start `serve` on a fresh store; both are gone afterwards. `noop`: for a handler that does nothing."""
    with serving(turn.place, engine, scenario, turn.tree) as product, ExitStack() as stack:
        books = Books(contestant_of(engine), product.store)
        stack.callback(books.close)
        yield Running(product, books, turn.place, engine)


def run_scene(turn: Turn, *, scene: Scene, seconds: float) -> Steady:
    """Offer events at a steady rate to a fresh server."""
    with run_server(turn, scene.engine) as running:
        running.warm_up(scene.subjects)
        if scene.statistics == "analysed":
            running.analyse()
        first = running.sent
        neighbours, before = running.neighbours(), running.cpu()
        began = running.send(scene.subjects, turn.tick, seconds=seconds, rate=scene.rate)
        running.wait()
        until, after, others = time.time(), running.cpu(), neighbours.cores()
        ends = running.read_delivered()
    return measure(
        scene,
        due=[began + n / scene.rate for n in range(running.sent - first)],
        ends=[ends.get(f"event-{n}") for n in range(first, running.sent)],
        until=until,
        cpu=(after[0] - before[0], after[1] - before[1]),
        others=others,
    )


def measure(
    scene: Scene,
    *,
    due: Sequence[float],
    ends: Sequence[float | None],
    until: float,
    cpu: tuple[float, float],
    others: float,
) -> Steady:
    """Turn moments into figures; what was not delivered counts as delivered when the waiting ended."""
    delays = sorted(((end or until) - moment) * 1000 for moment, end in zip(due, ends, strict=True))
    return Steady(
        scene=scene,
        events=len(due),
        undelivered=ends.count(None),
        mean_ms=statistics.fmean(delays),
        p50_ms=delays[len(delays) // 2],
        p99_ms=delays[int(len(delays) * 0.99)],
        behind_s=delays[-1] / 1000,
        store_cpu_us=cpu[0] * 1e6 / len(due),
        our_cpu_us=cpu[1] * 1e6 / len(due),
        backlog=count_backlog(due, [end for end in ends if end is not None], until),
        others_cores=others,
    )


def count_backlog(due: Sequence[float], ends: Sequence[float], until: float) -> list[int]:
    """Return the most that waited in each step, from the first event to a step in which nothing does, or `until`."""
    ends = sorted(ends)
    over = ends[-1] + BACKLOG_SECONDS if len(ends) == len(due) else until
    steps = math.ceil((over - due[0]) / BACKLOG_SECONDS)
    fine = BACKLOG_SECONDS / BACKLOG_LOOKS

    def waiting(moment: float) -> int:
        return bisect_right(due, moment) - bisect_right(ends, moment)

    return [
        max(waiting(due[0] + step * BACKLOG_SECONDS + look * fine) for look in range(BACKLOG_LOOKS))
        for step in range(steps)
    ]


def run_alone(turn: Turn, *, engine: str, seconds: float) -> Alone:
    """Drain one subject; then offer it events at a steady rate. The handler does nothing."""
    seconds = min(seconds, ALONE_SECONDS)
    settings = Settings(seconds, 1, turn.place.body, 0, None)
    drained = work.run_turn(contestant_of(engine), turn.place, settings, turn.tick, turn.tree)
    with run_server(turn, engine, "noop") as running:
        running.warm_up(1)
        neighbours, first = running.neighbours(), running.sent
        began = running.send(1, turn.tick, seconds=seconds, rate=ALONE_RATE)
        running.wait()
        others, ends = neighbours.cores(), running.read_delivered()
    in_time = sum(ends.get(f"event-{n}", math.inf) <= began + seconds for n in range(first, running.sent))
    return Alone(
        engine,
        drained.per_second,
        in_time / seconds,
        drained.store_cpu_us,
        drained.worker_cpu_us,
        max(others, drained.others_cores),
    )


def run_hot(turn: Turn, *, engine: str, events: int) -> Hot:
    """Send piece after piece to one subject, each when the last is delivered."""
    pieces = events // PIECE
    costs: list[tuple[float, float]] = []
    with stop_vacuum(turn.place), run_server(turn, engine) as running:
        running.warm_up(1)
        neighbours, before = running.neighbours(), running.cpu()
        for number in range(pieces):
            running.send(1, lambda share: None, seconds=PATIENCE_SECONDS, count=PIECE)
            if not running.wait():
                raise BenchError(f"{PIECE} events after {number * PIECE:,} took more than {PATIENCE_SECONDS:g} s")
            after = running.cpu()
            costs.append((after[0] - before[0], after[1] - before[1]))
            before = after
            turn.tick((number + 1) / pieces)
        others = neighbours.cores()
        running.read_delivered()
    store, ours = ([cost * 1e6 / PIECE for cost in column] for column in zip(*costs, strict=True))
    return Hot(engine, store, ours, others)


@contextmanager
def stop_vacuum(place: Place) -> Iterator[None]:
    """Have PostgreSQL leave old versions of rows where they are."""
    if place.postgres is None:
        yield
        return
    try:
        place.postgres.ask("ALTER SYSTEM SET autovacuum = off")
        place.postgres.ask("SELECT pg_reload_conf()")
        yield
    finally:
        place.postgres.ask("ALTER SYSTEM RESET autovacuum")
        place.postgres.ask("SELECT pg_reload_conf()")


# -- the run -----------------------------------------------------------------------------------

Result = Steady | Alone | Hot


def scenes(arguments: argparse.Namespace) -> list[Scene]:
    """List the loads that were asked for; only PostgreSQL has statistics that somebody could make."""
    return [
        Scene(engine, rate, subjects, known)
        for engine in arguments.engine
        for rate in arguments.rate
        for subjects in arguments.subjects
        for known in arguments.statistics
        if engine == "postgres" or known == "fresh"
    ]


def list_jobs(arguments: argparse.Namespace) -> list[tuple[str, Callable[[Turn], Result]]]:
    """List what is to be measured, each with its title."""
    jobs: list[tuple[str, Callable[[Turn], Result]]] = []
    if "steady" in arguments.only:
        jobs += [
            (str(scene), partial(run_scene, scene=scene, seconds=arguments.seconds)) for scene in scenes(arguments)
        ]
    for engine in arguments.engine if "alone" in arguments.only else ():
        jobs.append((f"{engine}  one subject alone", partial(run_alone, engine=engine, seconds=arguments.seconds)))
    for engine in arguments.engine if "hot" in arguments.only else ():
        title = f"{engine}  {arguments.events:,} events on one subject"
        jobs.append((title, partial(run_hot, engine=engine, events=arguments.events)))
    return jobs


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; return plain values."""
    jobs = list_jobs(arguments)
    results: list[Result] = []
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="oncehook-steady-", dir=arguments.folder))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        postgres = Postgres(home) if "postgres" in arguments.engine else None
        if postgres is not None:
            stack.callback(postgres.stop)
        place = Place(home, postgres, stack.enter_context(run_sink(home)), traffic.BODY_SIZE)
        fsync = disk.summarize(disk.measure(home, seconds=1.0))
        progress = Progress(arguments.rounds * len(jobs))
        for title, job in jobs * arguments.rounds:
            tick = progress.step(title)
            try:
                results.append(job(Turn(ROOT, place, tick)))
            except BenchError as error:
                failures[title] = str(error)
                progress.result(f"FAILED: {error}")
            else:
                progress.result(brief(results[-1]))
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "disk": asdict(fsync),
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "backlog_seconds": BACKLOG_SECONDS,
        "steady": [asdict(one) for one in results if isinstance(one, Steady)],
        "alone": [asdict(one) for one in results if isinstance(one, Alone)],
        "hot": [asdict(one) for one in results if isinstance(one, Hot)],
        "failures": failures,
    }
    found["targets"] = [{**asdict(one), "reached": one.reached} for one in targets(found)]
    return found


def brief(one: Result) -> str:
    """Put a result into one sentence for somebody who watches."""
    if isinstance(one, Alone):
        return f"{one.drained:,.0f}/s drained, {one.under_load:,.0f}/s of {ALONE_RATE:,} offered"
    if isinstance(one, Hot):
        costs = {"database": one.store_cpu_us, "ours": one.our_cpu_us}
        ends = [f"{name} {costs[0]:,.0f} to {costs[-1]:,.0f} µs" for name, costs in costs.items()]
        return f"CPU per event, first to last {PIECE:,}: {', '.join(ends)}"
    lost = f", {one.undelivered:,} not delivered" if one.undelivered else ""
    return (
        f"mean {one.mean_ms:,.1f} ms, p50 {one.p50_ms:,.1f}, p99 {one.p99_ms:,.1f}, behind {one.behind_s:.2f} s{lost};"
        f" CPU per event: database {one.store_cpu_us:,.0f} µs, ours {one.our_cpu_us:,.0f} µs"
    )


# -- the command line --------------------------------------------------------------------------


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def read_subjects(text: str) -> int:
    """Read a number of subjects, 0 where every event has its own."""
    if text in ("unique", "0"):
        return 0
    try:
        return read_count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of subjects nor `unique`") from None


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench steady",
        description=str(__doc__).split("\n")[0],
        epilog="Options that take several values may also be repeated.",
    )
    parser.add_argument("--seconds", type=_positive, default=60.0, help="length of each load (default: 60)")
    parser.add_argument("--rounds", type=read_count, default=1, help="turns of everything (default: 1)")
    several: list[tuple[str, Sequence[Any], Any, str]] = [
        ("only", PARTS, str, "parts"),
        ("engine", tuple(ENGINES), str, "engines"),
        ("rate", RATES, read_count, "events per second"),
        ("subjects", SUBJECTS, read_subjects, "how many, or `unique`: one for each event"),
        ("statistics", STATISTICS, str, "whether PostgreSQL has none at first, or those of a nearly empty store"),
    ]
    for name, values, kind, about in several:
        parser.add_argument(
            f"--{name}",
            action="extend",
            nargs="+",
            type=kind,
            choices=values if kind is str else None,
            metavar=None if kind is str else "N",
            help=f"{about} (default: {' '.join(str(value or 'unique') for value in values)})",
        )
    parser.add_argument(
        "--events", type=read_count, default=HOT_EVENTS, help=f"events on the hot subject (default: {HOT_EVENTS})"
    )
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    arguments = parser.parse_args(words)
    for name, values, _, _ in several:
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name) or values)))
    if arguments.events < 2 * PIECE:
        parser.error(f"--events: {arguments.events} are too few to compare the first {PIECE:,} with the last")
    for name in ("folder", "json"):
        path = getattr(arguments, name)
        folder = path.parent if path and name == "json" else path
        if folder and not folder.is_dir():
            # Said now, and not after an hour of measuring.
            parser.error(f"--{name}: there is no folder {folder}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    arguments = read_arguments(words)
    return part.print_report("steady", lambda: run(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
