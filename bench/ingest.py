"""The ingest benchmark: how many webhooks per second are durably taken, by oncehook and by what people write instead.

Starts every contestant on loopback, one after the other and in another order each round, loads it, and checks that
its store holds exactly what it acknowledged. Only ratios inside one run are compared with the targets: machines
differ and are shared. Run by `scripts/bench`; talk on stderr, report on stdout, exit 1 when a check failed.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import disk, drive, report, traffic
from bench.contestants import CONTESTANTS, Contestant, Place, Running, run_contestant
from bench.drive import Figures, Order
from bench.engines import BenchError, Postgres, Redis, cpu_seconds, generator_seconds, machine_seconds
from bench.progress import Progress
from bench.report import Measured, Mixed, Results, Settings

WARM_SECONDS = 1.0
SETTLE_SECONDS = 0.3
LARGE_RATE = 12_000
"""Requests per second to prepare with large bodies: signing one takes as long as storing it."""
TOLERATED = 0.01
"""Share of failed requests that a reference may have; oncehook may have none."""


class Account:
    """What a contestant's store must hold, by what it acknowledged."""

    def __init__(self, running: Running, *, with_route: bool) -> None:
        self._running = running
        self._with_deliveries = running.contestant.is_ours and with_route
        self._rows = running.count("events")

    def check(self, figures: Figures, *, distinct: int | None = None, tolerated: float = 0.0) -> None:
        """Compare the rows that were added with the acknowledged events; raises BenchError unless they agree.

        `distinct` is how many different keys were sent, where keys were repeated. A request that was under way when
        wrk stopped, or that failed, may or may not have been stored; of ours the share `tolerated` may have failed.
        """
        failed = figures.refused + figures.broken
        total = figures.acknowledged + failed
        if not figures.acknowledged or failed > total * (tolerated if self._running.contestant.is_ours else TOLERATED):
            raise BenchError(f"{figures.refused} requests refused and {figures.broken} broken, of {total}")
        unsure = figures.in_flight + failed
        least = figures.acknowledged if distinct is None else distinct - unsure
        most = figures.acknowledged + unsure if distinct is None else distinct
        rows = self._settled_rows()
        if not least <= rows - self._rows <= most:
            promised = str(least) if least == most else f"{least} to {most}"
            raise BenchError(f"acknowledged {promised} events, but {rows - self._rows} were stored")
        self._rows = rows
        if self._with_deliveries and (made := self._running.count("deliveries")) != rows:
            raise BenchError(f"{rows} events have {made} deliveries, expected one each")

    def _settled_rows(self) -> int:
        """Count the rows, once the requests that wrk left behind are written or gone."""
        rows = self._running.count("events")
        while True:
            time.sleep(SETTLE_SECONDS)
            if (again := self._running.count("events")) == rows:
                return rows
            rows = again


class Trial:
    """One contestant, running, under the loads of one round."""

    def __init__(self, running: Running, place: Place, settings: Settings, progress: Progress, label: str) -> None:
        self._running = running
        self._traffic = place.traffic
        self._large = place.large
        self._settings = settings
        self._progress = progress
        self._label = label
        self._account = Account(running, with_route=place.with_route)
        self._next = 0

    def warm_up(self) -> None:
        """Send a first load and await every answer: here stored and acknowledged must be equal to the row."""
        figures = drive.load_own(
            self._order(self._allot(WARM_SECONDS)), seconds=WARM_SECONDS, tick=self._step("warm up")
        )
        self._account.check(figures)
        self._next = figures.next

    def measure(self, what: str = "load") -> Measured:
        """Send a full load with keys that never came before."""
        measured = self._full_load(self._order(self._allot(self._settings.seconds)), what)
        self._account.check(measured.figures)
        self._next = measured.figures.next
        self._tell(measured)
        return measured

    def measure_mix(self, repeated: float) -> Measured:
        """Send a full load with a share of the keys repeated."""
        prepared, ports, path = self._traffic, self._running.ports, self._running.contestant.path
        measured = self._full_load(
            Order(prepared, ports, path, 0, prepared.duplicates, repeated), f"{repeated:.0%} duplicates"
        )
        self._account.check(measured.figures, distinct=prepared.distinct(measured.figures.next, repeated))
        self._tell(measured)
        return measured

    def measure_large(self) -> Measured:
        """Send a full load with large bodies, all keys new."""
        assert self._large is not None
        order = Order(self._large, self._running.ports, self._running.contestant.path, 0, self._large.records)
        measured = self._full_load(order, f"{self._large.body_size >> 10} KB bodies")
        self._account.check(measured.figures)
        self._tell(measured)
        return measured

    def measure_latency(self) -> Measured:
        """Send a modest load at fixed moments; time each answer from the moment its request was due."""
        settings = self._settings
        tick = self._step(f"{settings.offered:.0f} events/s offered")
        order = self._order(math.ceil(settings.offered * settings.seconds) + len(self._running.ports))
        before = _clocks(self._running)
        figures = drive.load_own(order, seconds=settings.seconds, rate=settings.offered, tick=tick)
        measured = _count_cpu(figures, before, _clocks(self._running))
        self._account.check(figures)
        self._next = figures.next
        self._progress.result(f"p50 {figures.p50_ms:.2f} ms, p99 {figures.p99_ms:.2f} ms")
        return measured

    def fill(self, events: int) -> None:
        """Take about this many events in, over HTTP like all others.

        Because a disk that has to write out gigabytes may hold up a commit for longer than a sender waits, some are
        answered 503; they are not sent again.
        """
        step = max(1, events // 10)
        for done in range(0, events, step):
            tick = self._step(f"fill to {min(events, done + step):,} events")
            count = min(step, events - done)
            figures = drive.load_own(self._order(count), seconds=24 * 3600.0, count=count, tick=tick)
            self._account.check(figures, tolerated=TOLERATED)
            self._next = figures.next

    def _full_load(self, order: Order, what: str) -> Measured:
        tick = self._step(f"{what}, {self._settings.seconds:g} s")
        running, seconds = self._running, self._settings.seconds
        before = _clocks(running)
        if self._settings.wrk:
            figures = drive.load_wrk(self._settings.wrk, order, seconds=seconds, tick=tick)
        else:
            figures = drive.load_own(order, seconds=seconds, tick=tick)
        return _count_cpu(figures, before, _clocks(running))

    def _order(self, records: int) -> Order:
        return Order(
            self._traffic, self._running.ports, self._running.contestant.path, self._next, self._next + records
        )

    def _allot(self, seconds: float) -> int:
        return math.ceil(seconds) * self._settings.max_rate

    def _step(self, what: str) -> Callable[[float], None]:
        return self._progress.step(f"{self._label}  {self._running.contestant.name}  {what}")

    def _tell(self, measured: Measured) -> None:
        figures = measured.figures
        self._progress.result(
            f"{figures.per_second:,.0f} events/s, p50 {figures.p50_ms:.1f} ms, p99 {figures.p99_ms:.1f} ms, "
            f"CPU {measured.server_cpu_us:.0f} + {measured.store_cpu_us:.0f} µs"
        )


def _count_cpu(figures: Figures, before: Sequence[float], after: Sequence[float]) -> Measured:
    """Add what a load cost, by the clocks before and after it."""
    elapsed, machine, server, store, generator = (end - start for end, start in zip(after, before, strict=True))
    events = max(1, figures.acknowledged)
    return Measured(
        figures,
        server_cpu_us=server * 1e6 / events,
        store_cpu_us=store * 1e6 / events,
        others_cores=max(0.0, machine - server - store - generator) / elapsed,
    )


def _clocks(running: Running) -> tuple[float, float, float, float, float]:
    return (
        time.monotonic(),
        machine_seconds(),
        cpu_seconds(running.server_pids),
        cpu_seconds(running.store_pids),
        generator_seconds(),
    )


def run_round(number: int, chosen: Sequence[Contestant], place: Place, results: Results, progress: Progress) -> None:
    """Give every contestant its turn once."""
    settings = results.settings
    shift = number * len(chosen) // settings.rounds
    for contestant in [*chosen[shift:], *chosen[:shift]]:
        if contestant.name in results.failures:
            continue
        try:
            with run_contestant(contestant, place) as running:
                trial = Trial(running, place, settings, progress, f"round {number + 1} of {settings.rounds}")
                trial.warm_up()
                run_loads(contestant, trial, results)
        except BenchError as error:
            results.fail(contestant.name, str(error))
            progress.result(f"{contestant.name} FAILED: {error}")


def run_loads(contestant: Contestant, trial: Trial, results: Results) -> None:
    """Run all loads of one turn."""
    name = contestant.name
    measured = trial.measure()
    results.rounds.setdefault(name, []).append(measured)
    if has_latency(contestant):
        results.latency.setdefault(name, []).append(trial.measure_latency().figures)
    if has_mixes(contestant):
        for repeated in traffic.MIXES:
            mixed = Mixed(repeated, measured.figures.per_second, trial.measure_mix(repeated).figures.per_second)
            results.duplicates.setdefault(name, []).append(mixed)
    if results.settings.large:
        results.large.setdefault(name, []).append(trial.measure_large())


def has_mixes(contestant: Contestant) -> bool:
    """Tell whether it is also measured with repeated keys: the product in one process."""
    return contestant.is_ours and contestant.processes == 1


def has_latency(contestant: Contestant) -> bool:
    """Tell whether it is also measured at a modest rate: the product, and the thin references."""
    return has_mixes(contestant) or contestant.name.startswith("thin_")


def count_steps(chosen: Sequence[Contestant], settings: Settings) -> int:
    """Count the steps that the progress will show."""
    steps = 1 + settings.large
    for contestant in chosen:
        loads = 2 + len(traffic.MIXES) * has_mixes(contestant) + has_latency(contestant) + settings.large
        steps += settings.rounds * loads
    return steps


@contextmanager
def open_place(
    chosen: Sequence[Contestant], settings: Settings, progress: Progress, *, more: int = 0
) -> Iterator[Place]:
    """Prepare a folder with requests (for one turn, and some more) and running engines; remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="oncehook-bench-", dir=settings.folder))
    postgres: Postgres | None = None
    redis: Redis | None = None
    try:
        per_load = settings.max_rate * math.ceil(settings.seconds)
        offered = math.ceil(settings.offered * settings.seconds)
        prepared = traffic.prepare(
            folder,
            records=per_load + settings.max_rate + offered + more + 10,
            duplicates=per_load if any(map(has_mixes, chosen)) else 0,
            tick=progress.step("sign the requests"),
        )
        large = _prepare_large(folder, settings, progress) if settings.large else None
        if any(contestant.engine == "postgres" for contestant in chosen):
            postgres = Postgres(folder)
        if any(contestant.redis for contestant in chosen):
            redis = Redis(folder)
        yield Place(folder, prepared, postgres, redis, settings.with_route, settings.serve_options, large)
    finally:
        if redis is not None:
            redis.stop()
        if postgres is not None:
            postgres.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _prepare_large(folder: Path, settings: Settings, progress: Progress) -> traffic.Traffic:
    return traffic.prepare(
        folder / "large",
        records=min(LARGE_RATE, settings.max_rate) * math.ceil(settings.seconds),
        duplicates=0,
        tick=progress.step("sign the large requests"),
        body_size=traffic.LARGE_SIZE,
    )


def run(chosen: Sequence[Contestant], settings: Settings) -> Results:
    """Run the whole benchmark."""
    results = Results(settings)
    progress = Progress(count_steps(chosen, settings))
    with open_place(chosen, settings, progress) as place:
        times = disk.measure(place.folder, seconds=1.0)
        for number in range(settings.rounds):
            run_round(number, chosen, place, results, progress)
        # The disk may be slower after some minutes of load than it was before.
        results.disk = disk.summarize(times + disk.measure(place.folder, seconds=1.0))
    return results


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [contestant.name for contestant in CONTESTANTS]
    parser = argparse.ArgumentParser(
        prog="scripts/bench ingest",
        description="Compare how many signed webhooks per second oncehook and other programs durably take.",
        epilog=f"Contestants: {', '.join(names)}.",
    )
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="only this contestant (repeat)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load (default: 5)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every contestant (default: 2)")
    parser.add_argument(
        "--load", choices=("auto", "wrk", "own"), default="auto", help="load generator (default: wrk if found)"
    )
    parser.add_argument("--offered", type=float, default=500.0, help="events/s for the latency load (default: 500)")
    parser.add_argument("--no-large", action="store_true", help="leave the 64 KB bodies out")
    parser.add_argument("--with-worker", action="store_true", help="let oncehook work meanwhile; the references do not")
    parser.add_argument("--no-route", action="store_true", help="oncehook without route: no deliveries are written")
    parser.add_argument("--receivers", type=int, metavar="N", help="pass on to oncehook serve")
    parser.add_argument(
        "--serve-option", action="append", default=[], metavar="OPTION", help="pass on to oncehook serve"
    )
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument(
        "--max-rate", type=int, default=60_000, help="events/s to prepare requests for (default: 60000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a floor is not reached")
    return parser.parse_args(words)


def settings_from(arguments: argparse.Namespace, wrk: str | None) -> Settings:
    """Return what the command line asks for. The references do not work, so the product does not either."""
    return Settings(
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        wrk=wrk,
        offered=arguments.offered,
        large=not arguments.no_large,
        with_route=not arguments.no_route,
        serve_options=[
            *([] if arguments.with_worker else ["--no-worker"]),
            *(["--receivers", str(arguments.receivers)] if arguments.receivers else []),
            *arguments.serve_option,
        ],
        folder=arguments.folder,
        max_rate=arguments.max_rate,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its report; returns the exit status."""
    arguments = read_arguments(words)
    wrk = None if arguments.load == "own" else drive.find_wrk()
    if arguments.load == "wrk" and wrk is None:
        print("wrk is not on the path; install it, or use --load own", file=sys.stderr)
        return 2
    settings = settings_from(arguments, wrk)
    chosen = [one for one in CONTESTANTS if not arguments.only or one.name in arguments.only]
    # So that a stop from outside also runs every `finally` above.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = run(chosen, settings)
    if arguments.json:
        report.write_json(results, arguments.json)
    print(report.render(results))
    for name, reason in results.failures.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    missed = arguments.strict and any(target.reached is None for target in report.targets(results))
    return 1 if results.failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
