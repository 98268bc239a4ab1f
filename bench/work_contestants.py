"""Who takes part in the work benchmark: how each is filled, started, watched and counted.

A contestant is a program that works jobs off a store of its own, fresh for every turn. All write down, in their
own tables and as part of being done, when each job was done; that is what is read here. Called by `bench.work`.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.engines import ROOT, BenchError, Postgres, Server, child_environment, free_port

SUBJECTS = 500
IN_FLIGHT = 64
FILL_SECONDS = 300.0
LOG_SHOWN = 1000
"""Characters of each worker's log that are shown when it fails."""


@dataclass(frozen=True)
class Ledger:
    """How a program's own tables tell what is done. Constant SQL; a program without store leaves a file instead."""

    left: str
    """Whether anything is left to do."""
    done: str
    """When each job was done, in seconds since 1970."""
    wrong: str | None = None
    """Jobs that were not done as promised: not done at all, or not in the order of their subject."""


@dataclass(frozen=True)
class Contestant:
    """A program that works off jobs."""

    name: str
    scenario: str
    title: str
    setup: str
    """How it is set up, to be shown beside its figures."""
    engine: str
    """Where its jobs are: `sqlite`, `postgres`, or `none`."""
    module: str
    pace: int
    """Jobs per second to expect on a small machine: decides how many it is given, never how it is judged."""
    ledger: Ledger | None = None
    processes: int = 1
    subjects: int = 0
    packages: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Tell the product from a reference."""
        return self.module == "oncehook_inbox"


_ORDER = """
  + (SELECT count(*) FROM (
      SELECT fence < lag(fence) OVER (PARTITION BY subject_key ORDER BY seq) AS early FROM deliveries
      WHERE subject_key IS NOT NULL AND status = 'done'
    ) AS pairs WHERE early)
"""
ONCEHOOK_POSTGRES = Ledger(
    "SELECT EXISTS (SELECT FROM deliveries WHERE status = 'pending')",
    "SELECT extract(epoch FROM settled_at)::float8 FROM deliveries WHERE status = 'done'",
    "SELECT (SELECT count(*) FROM deliveries WHERE status NOT IN ('done', 'pending'))" + _ORDER,
)
ONCEHOOK_SQLITE = Ledger(
    "SELECT EXISTS (SELECT 1 FROM deliveries WHERE status = 'pending')",
    "SELECT settled_at / 1e6 FROM deliveries WHERE status = 'done'",
    "SELECT (SELECT count(*) FROM deliveries WHERE status NOT IN ('done', 'pending'))" + _ORDER,
)
PGQUEUER = Ledger(
    "SELECT EXISTS (SELECT FROM pgqueuer)",
    "SELECT extract(epoch FROM created)::float8 FROM pgqueuer_log WHERE status = 'successful'",
    "SELECT count(*) FROM pgqueuer_log WHERE status IN ('exception', 'canceled', 'failed')",
)
PROCRASTINATE = Ledger(
    "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
    "SELECT extract(epoch FROM at)::float8 FROM procrastinate_events WHERE type = 'succeeded'",
    "SELECT count(*) FROM procrastinate_jobs WHERE status NOT IN ('todo', 'doing', 'succeeded')",
)
DBOS_POSTGRES = Ledger(
    "SELECT EXISTS (SELECT FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING'))",
    "SELECT completed_at / 1000.0::float8 FROM dbos.workflow_status WHERE status = 'SUCCESS'",
    "SELECT count(*) FROM dbos.workflow_status WHERE status NOT IN ('ENQUEUED', 'PENDING', 'SUCCESS')",
)
DBOS_SQLITE = Ledger(
    "SELECT EXISTS (SELECT 1 FROM workflow_status WHERE status IN ('ENQUEUED', 'PENDING'))",
    "SELECT completed_at / 1000.0 FROM workflow_status WHERE status = 'SUCCESS'",
    "SELECT count(*) FROM workflow_status WHERE status NOT IN ('ENQUEUED', 'PENDING', 'SUCCESS')",
)

HANDLER = "async handler, concurrency=200"
DBOS_SETUP = "partition_concurrency=1, polling_interval_sec=0.1 (default 1.0)"

CONTESTANTS = [
    Contestant(
        "pgqueuer",
        "noop",
        "PgQueuer",
        "batch_size=200, asyncpg, uvloop, autovac, durable",
        "postgres",
        "pgqueuer_batch",
        18_000,
        PGQUEUER,
        processes=2,
        packages=("pgqueuer",),
    ),
    Contestant(
        "oncehook_noop",
        "noop",
        "oncehook, no subjects",
        HANDLER,
        "postgres",
        "oncehook_inbox",
        18_000,
        ONCEHOOK_POSTGRES,
        processes=2,
    ),
    Contestant(
        "procrastinate",
        "subject",
        "procrastinate, lock = subject",
        "concurrency=100, pool of 20, fetch_job_polling_interval=0.2 (default 5), uvloop",
        "postgres",
        "procrastinate_lock",
        700,
        PROCRASTINATE,
        processes=2,
        subjects=SUBJECTS,
        packages=("procrastinate",),
    ),
    Contestant(
        "dbos",
        "subject",
        "DBOS, partition = subject",
        DBOS_SETUP,
        "postgres",
        "dbos_partition",
        900,
        DBOS_POSTGRES,
        processes=2,
        subjects=SUBJECTS,
        packages=("dbos",),
    ),
    Contestant(
        "oncehook_subject",
        "subject",
        "oncehook, one at a time per subject",
        HANDLER,
        "postgres",
        "oncehook_inbox",
        12_000,
        ONCEHOOK_POSTGRES,
        processes=2,
        subjects=SUBJECTS,
    ),
    Contestant(
        "dbos_sqlite",
        "sqlite",
        "DBOS on SQLite, partition = subject",
        DBOS_SETUP,
        "sqlite",
        "dbos_partition",
        500,
        DBOS_SQLITE,
        subjects=SUBJECTS,
        packages=("dbos",),
    ),
    Contestant(
        "oncehook_sqlite",
        "sqlite",
        "oncehook on SQLite, one at a time per subject",
        HANDLER,
        "sqlite",
        "oncehook_inbox",
        9_000,
        ONCEHOOK_SQLITE,
        subjects=SUBJECTS,
    ),
    Contestant(
        "aiohttp",
        "http",
        "bare aiohttp client loop, no store",
        f"{IN_FLIGHT} in flight, uvloop",
        "none",
        "aiohttp_loop",
        12_000,
        packages=("aiohttp",),
    ),
    Contestant(
        "oncehook_http_sqlite",
        "http",
        "oncehook on SQLite, HTTP deliveries",
        f"concurrency={IN_FLIGHT}",
        "sqlite",
        "oncehook_inbox",
        4_000,
        ONCEHOOK_SQLITE,
    ),
    Contestant(
        "oncehook_http_postgres",
        "http",
        "oncehook on PostgreSQL, HTTP deliveries",
        f"concurrency={IN_FLIGHT}",
        "postgres",
        "oncehook_inbox",
        4_000,
        ONCEHOOK_POSTGRES,
    ),
]
SCENARIOS = list(dict.fromkeys(contestant.scenario for contestant in CONTESTANTS))


@dataclass(frozen=True)
class Place:
    """What a run offers its contestants."""

    folder: Path
    postgres: Postgres | None
    sink: str
    """Where HTTP deliveries go."""
    body: int
    """Bytes of JSON in each job."""

    def store_pids(self, engine: str) -> list[int]:
        """Return the database's processes; none when it lives inside the worker's."""
        return [self.postgres.pid] if self.postgres is not None and engine == "postgres" else []


class Worker(Server):
    """One of a contestant's processes. It works until it is stopped; the product answers `/metrics` at its port."""

    @property
    def has_failed(self) -> bool:
        """Tell whether it ended on its own with an error."""
        return bool(self._process.poll())


class Books:
    """Reads a contestant's ledger while it works, on a connection of its own."""

    def __init__(self, contestant: Contestant, store: str) -> None:
        self._ledger = contestant.ledger
        self._store = store
        self._postgres = (
            psycopg.connect(store, autocommit=True, options="-c search_path=public,oncehook")
            if contestant.engine == "postgres"
            else None
        )

    @property
    def pids(self) -> list[int]:
        """Return the database's process that answers us; none where there is no database."""
        return [] if self._postgres is None else [self._postgres.info.backend_pid]

    def settle(self) -> None:
        """Leave nothing of the filling behind: neither unwritten pages nor missing statistics."""
        if self._postgres is not None:
            self._postgres.execute("VACUUM ANALYZE")
            self._postgres.execute("CHECKPOINT")

    def is_over(self) -> bool:
        """Tell whether nothing is left to do."""
        if self._ledger is None:
            return Path(self._store).exists()
        return not self._ask(self._ledger.left)[0]

    def read_done(self) -> list[float]:
        """Return when each job was done, in order."""
        if self._ledger is None:
            moments = array("d")
            moments.frombytes(Path(self._store).read_bytes())
            return sorted(moments)
        return sorted(float(str(moment)) for moment in self._ask(self._ledger.done))

    def wrong(self) -> int:
        """Count the jobs that were not done as promised."""
        if self._ledger is None or self._ledger.wrong is None:
            return 0
        return int(str(self._ask(self._ledger.wrong)[0]))

    def close(self) -> None:
        """Let go of the store."""
        if self._postgres is not None:
            self._postgres.close()

    def _ask(self, query: str) -> list[object]:
        try:
            if self._postgres is not None:
                return [row[0] for row in self._postgres.execute(query.encode())]
            uri = f"file:{self._store}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=30)) as connection:
                return [row[0] for row in connection.execute(query)]
        except (psycopg.Error, sqlite3.Error) as error:
            raise BenchError(f"cannot read what was done: {error}") from error


@dataclass(frozen=True)
class Working:
    """A contestant whose processes were just started."""

    books: Books
    workers: list[Worker]
    store_pids: list[int]

    @property
    def pids(self) -> list[int]:
        """Return the ids of its processes."""
        return [worker.pid for worker in self.workers]

    def check(self) -> None:
        """Raises BenchError when one of its processes has failed."""
        if any(worker.has_failed for worker in self.workers):
            raise BenchError("a worker ended before its work was done")

    def logs(self) -> str:
        """Return the last lines that its processes wrote."""
        return "\n".join(filter(None, (worker.log_tail()[-LOG_SHOWN:] for worker in self.workers)))


@contextmanager
def run_contestant(contestant: Contestant, place: Place, jobs: int, tree: Path = ROOT) -> Iterator[Working]:
    """Fill a fresh store and start the workers, all at once; they are stopped and the store is removed at the end.

    `tree`: where the product is taken from.
    """
    folder = place.folder / "store"
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = fresh_store(contestant.engine, place, folder, stack)
        environment = {**settings(contestant, place, store, jobs), "BENCH_TREE": str(tree)}
        fill(contestant, environment)
        books = Books(contestant, store)
        stack.callback(books.close)
        books.settle()
        workers = []
        for number in range(contestant.processes):
            port = free_port()
            worker = Worker(work_command(contestant, port), environment, folder / f"log-{number}", port)
            stack.callback(worker.stop)
            workers.append(worker)
        yield Working(books, workers, place.store_pids(contestant.engine))


def fresh_store(engine: str, place: Place, folder: Path, stack: ExitStack) -> str:
    """Return where an empty store is, or is to be: a database, or the path of a file."""
    if engine != "postgres":
        return str(folder / "store.db")
    assert place.postgres is not None
    return stack.enter_context(place.postgres.database(f"bench_{time.monotonic_ns()}"))


def settings(contestant: Contestant, place: Place, store: str, jobs: int) -> dict[str, str]:
    """Build what the programs of `bench.work_peers` read from their environment."""
    return {
        "BENCH_STORE": store,
        "BENCH_ENGINE": contestant.engine,
        "BENCH_SCENARIO": contestant.scenario,
        "BENCH_JOBS": str(jobs),
        "BENCH_SUBJECTS": str(contestant.subjects),
        "BENCH_BODY": str(place.body),
        "BENCH_SINK": place.sink,
    }


def fill(contestant: Contestant, environment: Mapping[str, str]) -> None:
    """Have a contestant put its jobs into its store; raises BenchError with what it said when that fails."""
    command = [sys.executable, "-m", f"bench.work_peers.{contestant.module}", "fill"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=child_environment(environment),
            capture_output=True,
            text=True,
            timeout=FILL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"it was not filled within {FILL_SECONDS:.0f} s: use fewer --seconds") from error
    if done.returncode:
        raise BenchError(f"it could not be filled:\n{done.stderr[-LOG_SHOWN:]}")


def work_command(contestant: Contestant, port: int) -> list[str]:
    """Return how a worker is started: the product by its own command line, as its users do."""
    if contestant.is_ours:
        options = ["--listen", f"127.0.0.1:{port}"]
        return [sys.executable, "-m", "oncehook", "worker", "bench.work_peers.oncehook_inbox:inbox", *options]
    return [sys.executable, "-m", f"bench.work_peers.{contestant.module}", "work"]


@contextmanager
def run_sink(folder: Path) -> Iterator[str]:
    """Run a sink; give its address."""
    port = free_port()
    sink = Server([sys.executable, "-m", "bench.work_peers.sink", str(port)], {}, folder / "sink-log", port)
    try:
        sink.wait_until_ready()
        yield f"http://127.0.0.1:{port}/"
    finally:
        sink.stop()
