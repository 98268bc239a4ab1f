"""Examples as a reader of their README would run them: its own commands, in a copy of the folder, on free ports.

Only their senders have more patience: on a busy machine 800 ms are soon over, and a 503 is not what is looked for here.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.servers import free_port, fresh_schema, shared_postgres

ROOT = Path(__file__).parents[2]


PATIENT = (
    ("app.py", r"(?m)^(inbox\.source\(.*)\)$", r'\1, budget="60s")'),
    ("oncehook.toml", r"(?m)^(\[source\..*)$", r'\1\nbudget = "60s"'),
)
"""Where sources are written, how, and how with a sender that waits."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def said(self) -> tuple[int, str]:
        """Status, and the word of the contract."""
        return self.status, self.json.get("status") or self.json["code"]


def ask(method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {n.lower(): v for n, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def post(url: str, data: object, headers: Mapping[str, str] | None = None) -> Answer:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return ask("POST", url, body, {"content-type": "application/json", **(headers or {})})


@dataclass
class Program:
    """One command of a README, at work."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for_port(self) -> Program:
        return self._wait(self._listens)

    def wait_for(self, text: str) -> Program:
        return self._wait(lambda: text in self.log.read_text())

    def _wait(self, is_ready: Any) -> Program:
        while not is_ready():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return self

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def wait(self) -> int:
        return self.process.wait()

    def stop(self) -> str:
        """Politely; what it logged."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.log.read_text()


@dataclass
class Example:
    """A copy of one example, and what runs in it."""

    name: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    """Ours, for each that the README names."""

    def __post_init__(self) -> None:
        shutil.copytree(ROOT / "examples" / self.name, self.folder, dirs_exist_ok=True)
        for name, hasty, patient in PATIENT:
            if (path := self.folder / name).exists():
                path.write_text(re.sub(hasty, patient, path.read_text()))
        readme = (self.folder / "README.md").read_text()
        self.lines = [line for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) for line in block.split("\n")]

    def __enter__(self) -> Example:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self.programs:
            program.stop()
        if error is not None:  # shown by pytest with the failure
            for program in self.programs:
                print(f"--- {program.log.name}\n{program.log.read_text()}")  # noqa: T201

    def start(self, line: str, *, env: Mapping[str, str] | None = None) -> Program:
        """Start the command that a line of the README is, on ports of our own."""
        assert line in self.lines, f"{line!r} is not in the README of {self.name}"
        named = re.findall(r"\b(?:8000|402\d)\b", line)
        for port in named:
            line = line.replace(port, str(self.ports.setdefault(port, free_port())))
        words = shlex.split(line)
        said = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        log = self.folder / f"log-{len(self.programs)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words[len(said) :],
                cwd=self.folder,
                env=self._environment(said | dict(env or {})),
                stdout=output,
                stderr=output,
            )
        self.programs.append(Program(process, log, self.ports[named[0]] if named else 0))
        return self.programs[-1]

    def run(self, line: str, **options: Any) -> str:
        """Run one to its end; what it said."""
        program = self.start(line, **options)
        assert program.wait() == 0, program.log.read_text()
        return program.log.read_text()

    def _environment(self, said: Mapping[str, str]) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # Where Django's own tests have run before in this process, they have named their settings to everybody.
        inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        paths = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        return {**inherited, "PATH": programs, "PYTHONPATH": paths, **self.env, **said}

    def read(self, name: str) -> list[str]:
        """The lines of a file that the example writes."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_lines(self, name: str, count: int) -> list[str]:
        while len(self.read(name)) < count:
            time.sleep(0.02)
        return self.read(name)


@dataclass
class Database:
    """A database of one's own on the session's PostgreSQL: examples make tables, and processes share them."""

    url: str

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(statement).fetchall()

    def do(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)

    def let_leases_lapse(self) -> None:
        """Of a worker that was killed, as when its ten seconds are over."""
        self.do("UPDATE oncehook.heads SET due_at = now() WHERE leased")

    def wait_for(self, statement: str, wanted: list[tuple[Any, ...]]) -> None:
        """Until a question has this answer; the test's own time limit is the only one."""
        while self.rows(statement) != wanted:
            time.sleep(0.02)


@contextmanager
def fresh_database() -> Iterator[Database]:
    server, name = shared_postgres(), fresh_schema()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    try:
        yield Database(server.url.replace("/postgres", f"/{name}"))
    finally:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database() -> Iterator[Database]:
    with fresh_database() as made:
        yield made
