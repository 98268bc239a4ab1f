"""Flask and Django under gunicorn, four processes on one SQLite file: each receives and works."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oncehook.store.sqlite.connection import holder
from tests.contrib.running import ask, post
from tests.servers import free_port

COPIES, KEYS = 16, 150

INBOX = """
import os
from oncehook import Event

def handle(event: Event) -> None:
    with open("handled.txt", "a") as notes:
        notes.write(f"{event.key}\\n")
"""

FLASK = (
    INBOX
    + """
from flask import Flask
from oncehook import Inbox
from oncehook.contrib.flask import init_app

inbox = Inbox("sqlite:./oncehook.db")
inbox.source("orders", verify="none", key="$.id", subject="$.customer", budget="60s")
inbox.on("orders", name="handle")(handle)
app = Flask(__name__)
init_app(inbox, app)

@app.get("/pid")
def pid() -> str:
    return str(os.getpid())
"""
)

DJANGO = (
    INBOX
    + """
import sys
import django
from django.conf import settings

settings.configure(
    SECRET_KEY="x",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.db"}},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "oncehook.contrib.django"],
    ONCEHOOK={
        "STORE": "sqlite:./oncehook.db",
        "SOURCES": {
            "orders": {"verify": "none", "key": "$.id", "subject": "$.customer", "type": "$.type", "budget": "60s"}
        },
    },
)
django.setup()

from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import include, path
from oncehook.contrib.django import inbox

inbox.on("orders", name="handle")(handle)
urlpatterns = [
    path("hooks/", include("oncehook.contrib.django.urls")),
    path("pid", lambda request: HttpResponse(str(os.getpid()))),
]
app = get_wsgi_application()
"""
)


@dataclass
class Site:
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, key: str, customer: str = "c1") -> Any:
        return post(f"{self.url}/hooks/orders", {"id": key, "customer": customer, "type": "order.paid"})

    def pids(self) -> set[int]:
        return {int(ask("GET", f"{self.url}/pid").body) for _ in range(40)}

    def handled(self) -> list[str]:
        path = self.folder / "handled.txt"
        return path.read_text().split() if path.exists() else []

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        database = f"file:{self.folder / 'oncehook.db'}?mode=ro"
        with closing(sqlite3.connect(database, uri=True, timeout=30)) as connection:
            return connection.execute(statement).fetchall()

    def until(self, statement: str, expected: list[tuple[Any, ...]]) -> None:
        ends_at = time.monotonic() + 60
        while (found := self.rows(statement)) != expected:
            assert time.monotonic() < ends_at, (statement, found)
            time.sleep(0.05)

    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def serving(folder: Path, program: str, *options: str) -> Iterator[Site]:
    (folder / "site_app.py").write_text(program)
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--workers", "4", "--threads", "4", "--timeout", "120", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
    env.pop("DJANGO_SETTINGS_MODULE", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--bind", f"127.0.0.1:{port}", "site_app:app"], cwd=folder, env=env, stdout=log, stderr=log
        )
    site = Site(folder, port, process)
    try:
        wait_until_it_answers(site)
        yield site
    finally:
        process.terminate()
        process.wait(60)
        print(site.log()[-8000:])  # noqa: T201 - shown with a failure


def wait_until_it_answers(site: Site) -> None:
    ends_at = time.monotonic() + 60
    while True:
        with suppress(OSError):
            ask("GET", f"{site.url}/pid")
            return
        assert site.process.poll() is None, site.log()
        assert time.monotonic() < ends_at
        time.sleep(0.1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [(), ("--preload",)], ids=["", "preload"])
@pytest.mark.parametrize("program", [FLASK, DJANGO], ids=["flask", "django"])
def test_sixteen_copies_of_each_key_have_one_winner(tmp_path: Path, program: str, options: tuple[str, ...]) -> None:
    with serving(tmp_path, program, *options) as site:
        keys = [f"k{n}" for n in range(KEYS) for _ in range(COPIES)]
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda key: (key, site.send(key)), keys))
        assert Counter(answer.said for _, answer in answers) == {
            (200, "accepted"): KEYS,
            (200, "duplicate"): KEYS * (COPIES - 1),
        }
        ids = {key: {answer.json["event_id"] for other, answer in answers if other == key} for key in set(keys)}
        assert all(len(found) == 1 for found in ids.values())
        site.until("SELECT count(*) FROM deliveries WHERE status = 'done'", [(KEYS,)])
        assert Counter(site.handled()) == dict.fromkeys(set(keys), 1)
        assert len(site.pids()) > 1
    assert "Traceback" not in site.log()
    assert holder(tmp_path / "oncehook.db") is None


@pytest.mark.timeout(300)
def test_the_death_of_any_worker_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, FLASK) as site:
        kept: list[str] = []
        for n in range(120):
            if n % 20 == 10:
                owner = holder(tmp_path / "oncehook.db")
                assert owner is not None
                victim = owner.pid if n % 40 == 10 else max(site.pids())
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            with suppress(OSError):  # a connection to whoever was killed
                answer = site.send(f"k{n}", f"c{n % 7}")
                if answer.status == 200:
                    kept.append(answer.json["event_id"])
                else:
                    assert answer.status == 503
        assert len(kept) >= 100
        stored = {f"evt_{id_.hex()}" for (id_,) in site.rows("SELECT id FROM events")}
        assert set(kept) <= stored
        site.until("SELECT count(*) FROM deliveries WHERE status <> 'done'", [(0,)])
        assert site.rows("PRAGMA integrity_check") == [("ok",)]
