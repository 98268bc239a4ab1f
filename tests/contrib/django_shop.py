"""The Django example as a newcomer runs it: its own settings, its own database, real server and worker processes.

`Shop` starts those; `set_up` makes the same project the Django of the test process, on a database of its own. Only the
senders have more patience: on a busy machine 800 ms are soon over, and a 503 is not what is looked for here.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psycopg

from tests.servers import free_port, fresh_schema, shared_postgres

FOLDER = Path(__file__).parents[2] / "examples" / "django_orders"
SECRET = "a secret for tests"
PATIENT = """
from shop.settings import *

ONCEHOOK["SOURCES"]["shop"]["budget"] = "60s"
"""


def fresh_database(template: str = "template1") -> str:
    """A database of one's own on the session's server."""
    name = fresh_schema()
    with psycopg.connect(shared_postgres().url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return name


@functools.cache
def migrated_database() -> str:
    """A database in which Django and we have made our tables; nobody works in it, others are made of it."""
    name = fresh_database()
    command = [sys.executable, "-W", "error", "manage.py", "migrate", "--verbosity", "0"]
    env = {**os.environ, **environment(name), "DJANGO_SETTINGS_MODULE": "shop.settings"}
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return name


def environment(database: str) -> dict[str, str]:
    return {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(shared_postgres().port),
        "PGUSER": "oncehook",
        "PGDATABASE": database,
        "SHOP_SECRET": SECRET,
    }


def order(id: str, number: str, status: str = "paid") -> bytes:
    return json.dumps({"id": id, "type": f"order.{status}", "order": {"number": number, "status": status}}).encode()


def signed(body: bytes) -> dict[str, str]:
    signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    return {"X-Signature": f"sha256={signature}", "Content-Type": "application/json"}


class Shop:
    """The project in processes of its own."""

    def __init__(self, folder: Path, server: str = "gunicorn", **env: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.database = fresh_database(migrated_database())
        (folder / "patient.py").write_text(PATIENT)
        paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        settings = {"DJANGO_SETTINGS_MODULE": "patient", "PYTHONPATH": paths}
        self._env = {**os.environ, **environment(self.database), **settings, **env}
        self._server = server
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            self.stop(process)

    # -- processes -----------------------------------------------------------------------------

    def manage(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Django's to its end."""
        command = [sys.executable, "-W", "error", "manage.py", *arguments]
        return subprocess.run(command, cwd=FOLDER, env=self._env | env, capture_output=True, text=True, timeout=150)

    def serve(self) -> None:
        """Start the web server, and wait until it answers."""
        address = f"127.0.0.1:{self.port}"
        command = {
            "gunicorn": ["gunicorn", "shop.wsgi", "--workers", "2", "--threads", "8", "--bind", address],
            "runserver": ["manage.py", "runserver", address, "--noreload"],
            "uvicorn": ["uvicorn", "shop.asgi:application", "--port", str(self.port)],
            "asgi": ["uvicorn", "--factory", "django.core.asgi:get_asgi_application", "--port", str(self.port)],
        }[self._server]
        self._start([] if command[0] == "manage.py" else ["-m"], *command)
        self.wait_for(self._answers)

    def work(self, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a worker, and wait until it is ready: before that a signal would find nobody to take it."""
        log = self.folder / f"{self._server}-{len(self._processes)}.log"
        process = self._start([], "manage.py", "oncehook", "worker", *arguments, **env)
        while process.poll() is None and "worker ready" not in log.read_text():
            threading.Event().wait(0.05)
        return process

    def _start(self, options: Sequence[str], *command: str, **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{self._server}-{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *options, *command], cwd=FOLDER, env=self._env | env, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return process.wait(60)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def wait_for(self, happened: Any) -> None:
        """Until it is so; the test's own time limit is the only one."""
        while not happened():
            assert all(process.poll() in (None, 0) for process in self._processes), self.log()
            threading.Event().wait(0.05)

    def _answers(self) -> bool:
        try:
            self.request("GET", "/admin/login/")
        except OSError:
            return False
        return True

    # -- asking --------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, **options: Any
    ) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {}, **options)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        status, answer = self.request("POST", "/hooks/shop", body, signed(body))
        return status, json.loads(answer)

    def post_at_once(self, bodies: Sequence[bytes]) -> list[tuple[int, dict[str, Any]]]:
        """All at the same moment, each from a thread of its own."""
        ready = threading.Barrier(len(bodies))

        def send(body: bytes) -> tuple[int, dict[str, Any]]:
            ready.wait()
            return self.post(body)

        with ThreadPoolExecutor(len(bodies)) as senders:
            return list(senders.map(send, bodies))

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(shared_postgres().url.replace("/postgres", f"/{self.database}")) as connection:
            return connection.execute(statement).fetchall()

    def let_leases_lapse(self) -> None:
        """Of a worker that was killed, as when its ten seconds are over."""
        self.rows("UPDATE oncehook.heads SET due_at = now() WHERE leased RETURNING true")

    def orders(self) -> list[tuple[str, str, int]]:
        return self.rows("SELECT number, status, changes FROM orders_order ORDER BY number")  # type: ignore[return-value]

    def states(self) -> dict[str, int]:
        """Deliveries by how they stand, as the command line tells it."""
        listed = self.manage("oncehook", "events", "--all", "--json")
        assert listed.returncode == 0, listed.stderr
        found: dict[str, int] = {}
        for line in listed.stdout.splitlines():
            for delivery in json.loads(line)["deliveries"]:
                found[delivery["status"]] = found.get(delivery["status"], 0) + 1
        return found


@functools.cache
def set_up() -> None:
    """Make the example the Django of this process. Connects to nothing."""
    import django

    sys.path.insert(0, str(FOLDER))
    os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    os.environ["SHOP_SECRET"] = SECRET
    django.setup()
    from django.conf import settings

    settings.ONCEHOOK["SOURCES"]["shop"]["budget"] = "60s"


@functools.cache
def set_up_database() -> str:
    """And give it a database, as Django's test runner would; returns its name."""
    set_up()
    from django.core.management import call_command
    from django.db import connections

    name = fresh_database()
    port = shared_postgres().port
    connections["default"].settings_dict.update(NAME=name, USER="oncehook", HOST="127.0.0.1", PORT=str(port))
    call_command("migrate", verbosity=0)
    return name
