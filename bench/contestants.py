"""Who takes part in the ingest benchmark, and how each is started, probed and counted.

A contestant is a server program with a store of its own, fresh for every round. Called by `bench.ingest`, which
loads it through `bench.drive` while it runs.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import drive, traffic
from bench.engines import (
    ROOT,
    BenchError,
    Postgres,
    Redis,
    Server,
    count_sqlite,
    free_port,
    run_once,
)
from bench.machine import version_of
from bench.traffic import Traffic

FORGED = b"0" * traffic.RECORD_SIZE


@dataclass(frozen=True)
class Contestant:
    """A program that takes webhooks."""

    name: str
    title: str
    engine: str
    """Where it keeps its rows: `sqlite` or `postgres`."""
    front: str
    """What serves it: `uvicorn`, `gunicorn`, or `oncehook` itself."""
    setup: str = ""
    """How it is set up, to be shown beside its figures."""
    packages: tuple[str, ...] = ()
    """What it is made of, to be shown with their versions."""
    options: tuple[str, ...] = ()
    redis: bool = False
    processes: int = 1

    @property
    def is_ours(self) -> bool:
        """Tell the product from a reference."""
        return self.front == "oncehook"

    @property
    def path(self) -> str:
        """Return the path that takes webhooks."""
        return "/in/bench" if self.is_ours else "/hook"

    @property
    def versions(self) -> dict[str, str]:
        """Return the installed versions of the packages it is made of."""
        return {package: version_of(package) for package in self.packages}


_PRODUCT = "oncehook serve --no-worker: events, keys and one delivery each; durable settings as they come"
_UVICORN = "uvicorn 1 process, uvloop, httptools"

CONTESTANTS = [
    Contestant(
        "flask_sqlalchemy",
        "Flask + SQLAlchemy + SQLite, gunicorn 4",
        "sqlite",
        "gunicorn",
        "gunicorn 4 workers; SELECT, then INSERT, one transaction each; SQLite as it comes",
        ("flask", "sqlalchemy", "gunicorn"),
    ),
    Contestant(
        "fastapi_sqlalchemy",
        "FastAPI + SQLAlchemy async",
        "postgres",
        "uvicorn",
        f"{_UVICORN}; asyncpg, ORM session, SELECT, then INSERT, one transaction each",
        ("fastapi", "sqlalchemy", "asyncpg", "uvicorn"),
    ),
    Contestant(
        "django_redis",
        "Django + psycopg + Redis SET NX, gunicorn 4",
        "postgres",
        "gunicorn",
        "gunicorn 4 workers of 2 threads; SET NX EX 86400 first, then one INSERT; CONN_MAX_AGE kept open",
        ("django", "psycopg", "redis", "gunicorn"),
        # With threads gunicorn keeps connections alive, and this view is then faster than with plain workers.
        options=("--threads", "2"),
        redis=True,
    ),
    Contestant(
        "fastapi_asyncpg",
        "FastAPI + raw asyncpg upsert, pool 20",
        "postgres",
        "uvicorn",
        f"{_UVICORN}; pool of 20; INSERT ... ON CONFLICT DO NOTHING, one transaction each",
        ("fastapi", "asyncpg", "uvicorn"),
    ),
    Contestant(
        "thin_sqlite",
        "bare ASGI, one row, SQLite",
        "sqlite",
        "uvicorn",
        f"{_UVICORN}; no framework, one table, group commit, WAL, synchronous=FULL",
        ("uvicorn", "msgspec"),
    ),
    Contestant(
        "thin_postgres",
        "bare ASGI, one row, PostgreSQL",
        "postgres",
        "uvicorn",
        f"{_UVICORN}; no framework, one table, group commit by unnest",
        ("uvicorn", "msgspec", "asyncpg"),
    ),
    Contestant("oncehook_sqlite", "oncehook on SQLite", "sqlite", "oncehook", _PRODUCT),
    Contestant("oncehook_postgres", "oncehook on PostgreSQL", "postgres", "oncehook", _PRODUCT),
    Contestant(
        "oncehook_postgres_2",
        "oncehook on PostgreSQL, 2 processes",
        "postgres",
        "oncehook",
        f"2 x {_PRODUCT}",
        processes=2,
    ),
]


@dataclass(frozen=True)
class Place:
    """What a run offers its contestants."""

    folder: Path
    traffic: Traffic
    postgres: Postgres | None
    redis: Redis | None
    with_route: bool
    serve_options: list[str]
    """Passed on to `oncehook serve`."""
    large: Traffic | None = None
    """The same with large bodies, where they are measured."""


def with_receivers(place: Place, receivers: int | None) -> Place:
    """Have `oncehook serve` receive in so many processes; None: as it comes."""
    options = [] if receivers is None else ["--receivers", str(receivers)]
    return replace(place, serve_options=[*place.serve_options, *options])


@dataclass(frozen=True)
class Running:
    """A contestant that is up and has answered its probe."""

    contestant: Contestant
    ports: list[int]
    server_pids: list[int]
    store_pids: list[int]
    """The database's processes; none when it lives inside the server's."""
    count: Callable[[str], int]
    """Rows of a table of its store."""


@contextmanager
def run_contestant(contestant: Contestant, place: Place, tree: Path = ROOT) -> Iterator[Running]:
    """Run a contestant on a fresh store; it is stopped and its store removed at the end.

    `tree`: where the product is taken from.
    """
    folder = place.folder / "store"
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store, count = _fresh_store(contestant, place, folder, stack)
        environment = {"BENCH_SECRET": traffic.SECRET, "BENCH_STORE": store, "BENCH_TREE": str(tree)}
        store_pids = [place.postgres.pid] if place.postgres and contestant.engine == "postgres" else []
        if contestant.redis:
            assert place.redis is not None
            place.redis.empty()
            environment["BENCH_REDIS"] = place.redis.url
            store_pids.append(place.redis.pid)
        if not contestant.is_ours:
            run_once([sys.executable, "-m", f"bench.views.{contestant.name}"], environment)
        servers = []
        for number in range(contestant.processes):
            port = free_port()
            command = _command(contestant, place, store, folder, port)
            server = Server(command, environment, folder / f"log-{number}", port)
            stack.callback(server.stop)
            server.wait_until_ready()
            servers.append(server)
        ports = [server.port for server in servers]
        running = Running(contestant, ports, [server.pid for server in servers], store_pids, count)
        try:
            probe(running, place.traffic)
            yield running
        except BenchError as error:
            logs = "\n".join(filter(None, (server.log_tail() for server in servers)))
            raise BenchError(f"{error}\n{logs}".rstrip()) from error


def probe(running: Running, prepared: Traffic) -> None:
    """Make sure that it does the job at all: refuses a forged request, keeps a genuine one, and keeps it once."""
    path = running.contestant.path
    genuine = traffic.one_record(prepared.folder)
    for port in running.ports:
        status = drive.post(port, path, prepared.folder, FORGED)
        if not 400 <= status < 500:
            raise BenchError(f"a forged signature was answered {status}, expected 4xx")
        for _ in range(2):
            status = drive.post(port, path, prepared.folder, genuine)
            if status != 200:
                raise BenchError(f"a genuine request was answered {status}, expected 200")
    if (rows := running.count("events")) != 1:
        raise BenchError(f"one event was sent {2 * len(running.ports)} times and stored {rows} times")


def _fresh_store(
    contestant: Contestant, place: Place, folder: Path, stack: ExitStack
) -> tuple[str, Callable[[str], int]]:
    if contestant.engine == "sqlite":
        path = folder / "store.db"
        return str(path), lambda table: count_sqlite(path, table)
    postgres = place.postgres
    assert postgres is not None
    name = f"bench_{time.monotonic_ns()}"
    uri = stack.enter_context(postgres.database(name))
    return uri, lambda table: postgres.count(table, name)


def _command(contestant: Contestant, place: Place, store: str, folder: Path, port: int) -> list[str]:
    module = f"bench.views.{contestant.name}:app"
    if contestant.front == "gunicorn":
        options = ["-w", "4", "-b", f"127.0.0.1:{port}", "--log-level", "warning", *contestant.options]
        return [sys.executable, "-m", "gunicorn", *options, module]
    if contestant.front == "uvicorn":
        options = ["--port", str(port), "--loop", "uvloop", "--http", "httptools"]
        return [sys.executable, "-m", "uvicorn", *options, "--no-access-log", "--log-level", "warning", module]
    config = folder / "oncehook.toml"
    config.write_text(_oncehook_config(contestant, store, with_route=place.with_route))
    options = ["--config", str(config), "--port", str(port), *place.serve_options]
    return [sys.executable, "-m", "oncehook", "serve", *options]


def _oncehook_config(contestant: Contestant, store: str, *, with_route: bool) -> str:
    where = f"sqlite:{store}" if contestant.engine == "sqlite" else store
    return _CONFIG.format(store=where) + (_ROUTE if with_route else "")


_CONFIG = """
store = "{store}"

[source.bench]
verify = {{ scheme = "hmac", header = "X-Signature", prefix = "sha256=", algorithm = "sha256", encoding = "hex" }}
secret = {{ env = "BENCH_SECRET" }}
key = ["$.id"]
"""

# Nobody listens there: what is measured is that deliveries are written, not that they are made.
_ROUTE = """
[destination.sink]
url = "http://127.0.0.1:9/"
allow_private = true

[[route]]
from = "bench"
to = "sink"
"""
