"""What does a lease cost as the backlog grows? The same leases, on stores with few, one deep and many waiting.

Three stores of one engine are filled and then measured in turn, so that whatever else this machine does touches all of
them alike. What was leased is given back untried, so that as many wait afterwards as before. Called by `bench.work`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import psycopg
import uvloop

from bench.engines import BenchError
from bench.progress import Progress
from bench.work_contestants import Place, fresh_store
from bench.work_noise import Neighbours
from bench.work_report import Backlog
from oncehook import Event, Inbox
from oncehook.model import LeaseRequest, Settle, Settlement
from oncehook.settings.build import open_store
from oncehook.store.base import Store

FEW, DEEP = 1_000, 100_000
LEASED = 50
"""Deliveries per lease: what a worker asks for while it is busy."""
LEASES = FEW // LEASED
"""Leases in a row: each of the few is taken once."""
TURNS = 5
"""Turns of every store, per round."""
AT_ONCE = 500
LEASE_SECONDS = 60.0
BODY = b'{"text": "' + b"x" * 240 + b'"}'

Tick = Callable[[float], None]


def run_backlog(engine: str, place: Place, *, waiting: int, rounds: int, progress: Progress) -> Backlog:
    """Fill three stores of an engine and measure them."""
    # Our own progress is what is told on stderr.
    logging.getLogger("oncehook").addHandler(logging.NullHandler())
    plans = {
        "few": (FEW, own_subjects(FEW)),
        "deep": (FEW + DEEP, one_deep_subject(DEEP)),
        "many": (waiting, own_subjects(waiting)),
    }
    with ExitStack() as stack:
        stores = {}
        for name, (count, subjects) in plans.items():
            folder = place.folder / f"backlog-{engine}-{name}"
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            store = fresh_store(engine, place, folder, stack)
            stores[name] = f"sqlite:{store}" if engine == "sqlite" else store
            tick = progress.step(f"backlog  {engine}  {count:,} waiting")
            uvloop.run(fill(stores[name], count, subjects, tick))
            if engine == "postgres":
                tidy(store)
        tick = progress.step(f"backlog  {engine}  lease")
        neighbours = Neighbours(place.store_pids(engine))
        figures = uvloop.run(measure(stores, TURNS * rounds, tick))
        others = neighbours.cores()
    few, deep, many = (f"{statistics.median(one):.1f}" for one in figures.values())
    progress.result(f"{few} µs per delivery, with a deep subject {deep} µs, with many waiting {many} µs")
    return Backlog(FEW, DEEP, waiting, figures["few"], figures["deep"], figures["many"], others)


def own_subjects(count: int) -> Iterable[str]:
    """A subject for each."""
    return (f"subject-{n}" for n in range(count))


def one_deep_subject(depth: int) -> Iterable[str]:
    """The deep one first: were it last, nobody would have to look past it."""
    yield from ("deep" for _ in range(depth))
    yield from own_subjects(FEW)


async def fill(store: str, count: int, subjects: Iterable[str], tick: Tick) -> None:
    """Put deliveries with these subjects into an empty store."""
    inbox = Inbox(store)

    @inbox.on("bench")
    async def noop(event: Event) -> None:
        pass

    async with inbox.running(work=False):
        batch = []
        for n, subject in enumerate(subjects):
            batch.append(inbox.emit("bench", "job", BODY, subject=subject))
            # The first one alone: it makes the source known to the store.
            if n == 0 or len(batch) == AT_ONCE:
                await asyncio.gather(*batch)
                batch.clear()
                tick(n / count)
        await asyncio.gather(*batch)


def tidy(store: str) -> None:
    """Leave nothing of the filling behind: neither unwritten pages nor missing statistics."""
    with psycopg.connect(store, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


async def measure(urls: dict[str, str], turns: int, tick: Tick) -> dict[str, list[float]]:
    """Microseconds per leased delivery: for each store, one figure per turn."""
    stores = {name: open_store(url) for name, url in urls.items()}
    figures: dict[str, list[float]] = {name: [] for name in stores}
    try:
        for store in stores.values():
            await store.open()
            numbers = await store.register_names(["bench"], ["noop"])
            await _one_turn(store, numbers.destinations["noop"])
        for turn in range(turns):
            for name, store in stores.items():
                figures[name].append(await _one_turn(store, numbers.destinations["noop"]))
            tick((turn + 1) / turns)
    finally:
        for store in stores.values():
            await store.close()
    return figures


async def _one_turn(store: Store, destination: int) -> float:
    want = LeaseRequest(destination, LEASED, LEASE_SECONDS)
    times = []
    for _ in range(LEASES):
        began = time.perf_counter()
        leases = await store.lease([want])
        times.append(time.perf_counter() - began)
        if len(leases) != LEASED:
            raise BenchError(f"asked for {LEASED} deliveries and was given {len(leases)}")
        ours = (await store.settle([Settlement(lease, Settle.release) for lease in leases])).ours
        if len(ours) != LEASED:
            raise BenchError(f"leased {LEASED} deliveries, but only {len(ours)} could be given back")
    # The lower quartile: what a lease costs when nobody else wants the processor just then.
    return statistics.quantiles(times, n=4)[0] * 1e6 / LEASED
