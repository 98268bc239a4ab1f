"""An app and a settings file that count together: `serve app:inbox` beside an oncehook.toml."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.test_admin_cli import Sink
from tests.cli.conftest import Process
from tests.cli.test_hangup import post

APP = """
from pathlib import Path
from oncehook import Event, Inbox

inbox = Inbox("sqlite:./app.db")
inbox.source("shop", verify="none", key="$.idempotency_key", budget="90s")
inbox.route("shop", "crm")

@inbox.on("shop", name="ship")
async def ship(event: Event) -> None:
    with Path("shipped").open("a") as file:
        file.write(f"{event.source} {event.key}\\n")
"""
FILE = """
retention = "7d"
[server]
port = 0
[source.partner]
verify = "none"
key = "$.idempotency_key"
budget = "90s"
[destination.crm]
url = "http://127.0.0.1:PORT/hooks"
allow_private = true
[[route]]
from = "partner"
to = "ship"
[watermark]
dead = 3
daily_volume = { shop = 10, partner = 20 }
"""


def write(folder: Path, app: str = APP, file: str = FILE, port: int = 9) -> None:
    (folder / "app.py").write_text(app)
    (folder / "oncehook.toml").write_text(file.replace("PORT", str(port)))


def command(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
    told = [sys.executable, "-m", "oncehook", *arguments]
    return subprocess.run(told, capture_output=True, text=True, cwd=folder, env={**ours, **env}, timeout=60)


def address_of(served: Process) -> str:
    served.wait_for("ready on", "err")
    return served.err.split("ready on ")[1].split()[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.02)


def shipped(folder: Path) -> set[str]:
    file = folder / "shipped"
    return set(file.read_text().splitlines()) if file.exists() else set()


def test_file_and_app_are_one_inbox(tmp_path: Path, begin: Callable[..., Process], sink: Sink) -> None:
    write(tmp_path, port=sink.port)
    served = begin(tmp_path, "serve", "app:inbox")
    address = address_of(served)
    assert post(address, "shop", "a") == "accepted"
    assert post(address, "partner", "b") == "accepted", "a source of the file"
    wait_until(lambda: shipped(tmp_path) == {"shop a", "partner b"})  # the file's route leads to the app's handler
    wait_until(lambda: len(sink.bodies) == 1)  # the app's route leads to the file's destination
    stats = json.loads(command(tmp_path, "stats", "--app", "app:inbox", "--json").stdout)
    limits = {mark["name"]: mark["limit"] for mark in stats["watermarks"]}
    assert limits == {"dead": 3, "daily_volume.shop": 10, "daily_volume.partner": 20}
    assert served.end(signal.SIGTERM) == 0
    assert (tmp_path / "app.db").exists()
    assert not (tmp_path / "oncehook.db").exists()


def test_a_worker_works_for_both(tmp_path: Path, begin: Callable[..., Process]) -> None:
    write(tmp_path)
    works = begin(tmp_path, "worker", "app:inbox")
    works.wait_for("worker ready for ship, crm", "err")
    assert works.end(signal.SIGTERM) == 0


def test_another_file_is_named(tmp_path: Path, begin: Callable[..., Process]) -> None:
    write(tmp_path)
    (tmp_path / "oncehook.toml").rename(tmp_path / "other.toml")
    served = begin(tmp_path, "serve", "app:inbox", "--config", "other.toml")
    assert post(address_of(served), "partner", "b") == "accepted"
    assert served.end(signal.SIGTERM) == 0


def test_an_app_without_a_file(tmp_path: Path, begin: Callable[..., Process]) -> None:
    (tmp_path / "app.py").write_text(APP.replace('inbox.route("shop", "crm")\n', ""))
    served = begin(tmp_path, "serve", "app:inbox", "--port", "0", ONCEHOOK_STORE="sqlite:./elsewhere.db")
    address = address_of(served)
    assert (post(address, "shop", "a"), post(address, "partner", "b")) == ("accepted", "401")
    wait_until(lambda: shipped(tmp_path) == {"shop a"})
    told = "warning: environment ONCEHOOK_STORE: not used, since app:inbox keeps its events in sqlite:./app.db"
    assert told in served.err
    assert served.end(signal.SIGTERM) == 0


def test_an_inbox_made_from_the_file_has_had_it(tmp_path: Path, begin: Callable[..., Process]) -> None:
    """UX.md 8: `Inbox.from_toml()` and handlers; a route of the file leads to one that is defined later."""
    app = APP.replace('Inbox("sqlite:./app.db")', "Inbox.from_toml()")
    write(tmp_path, app, 'store = "sqlite:./inbox.db"\n' + FILE)
    served = begin(tmp_path, "serve", "app:inbox")
    address = address_of(served)
    assert (post(address, "shop", "a"), post(address, "partner", "b")) == ("accepted", "accepted")
    wait_until(lambda: shipped(tmp_path) == {"shop a", "partner b"})
    assert served.end(signal.SIGTERM) == 0
    assert (tmp_path / "inbox.db").exists()
    (tmp_path / "other.toml").write_text(FILE)
    refused = command(tmp_path, "serve", "app:inbox", "--config", "other.toml")
    assert (refused.returncode, "--config names other.toml" in refused.stderr) == (2, True), refused.stderr


def test_a_route_of_the_file_that_leads_nowhere_is_told_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, APP.replace('Inbox("sqlite:./app.db")', "Inbox.from_toml()"), FILE.replace('"ship"', '"shop_"'))
    program = "import asyncio, app; asyncio.run(app.inbox.start())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert 'oncehook.toml:14: there is no destination "shop_"; did you mean "ship"?' in done.stderr


TWICE = {
    "source": (
        "[source.shop]\nverify = 'none'",
        "oncehook.toml:1: [source.shop] is defined by app:inbox too; give one another name",
    ),
    "destination": (
        "[destination.ship]\nurl = 'https://c.example/'\n[destination.crm]\nurl = 'https://c.example/'",
        "oncehook.toml:1: [destination.ship] is defined by app:inbox too; give one another name",
    ),
    "store": (
        "store = 'sqlite:./other.db'\n[destination.crm]\nurl = 'https://c.example/'",
        "oncehook.toml:1: store is sqlite:./other.db, and app:inbox keeps its events in sqlite:./app.db",
    ),
    "limit": (
        "[watermark]\ndead = 4",
        "oncehook.toml:2: watermark.dead is set by app:inbox too, to something else; say it once",
    ),
    "volume": (
        "[watermark]\ndaily_volume = { shop = 4 }",
        "oncehook.toml:2: watermark.daily_volume.shop is set by app:inbox too, to something else; say it once",
    ),
    "retention": (
        "retention = '2d'",
        "oncehook.toml:1: retention.keep_events is set by app:inbox too, to something else; say it once",
    ),
}
LEVELS = """
from oncehook.settings import RetentionConfig
from oncehook.upkeep import Limits
inbox.limits = Limits(dead=5, daily_volume={"shop": 5})
inbox.retention = RetentionConfig(keep_events=86400.0)
"""


@pytest.mark.parametrize("what", TWICE)
def test_what_both_say_names_both_places(tmp_path: Path, what: str) -> None:
    settings, told = TWICE[what]
    write(tmp_path, APP + LEVELS, settings)
    for words in (("serve", "app:inbox"), ("worker", "app:inbox"), ("config", "check", "app:inbox")):
        refused = command(tmp_path, *words)
        assert refused.returncode == 2, refused
        assert told in refused.stderr
        assert refused.stdout == ""
    doctor = command(tmp_path, "doctor", "app:inbox")
    assert (doctor.returncode, told in doctor.stdout) == (1, True), doctor
    assert not list(tmp_path.glob("*.db*")), "nothing was begun"


def test_what_both_say_alike_is_no_conflict(tmp_path: Path) -> None:
    alike = "store = 'sqlite:app.db'\nretention = '1d'\n" + FILE.replace('retention = "7d"', "")
    write(tmp_path, APP + LEVELS, alike.replace("dead = 3", "dead = 5").replace("shop = 10", "shop = 5"))
    checked = command(tmp_path, "config", "check", "app:inbox")
    assert checked.returncode == 0, checked
    assert checked.stdout.startswith("OK  app:inbox and ")
    assert checked.stdout.endswith("oncehook.toml  2 sources, 2 destinations, 3 routes\n")


def test_the_file_alone_is_not_the_whole(tmp_path: Path) -> None:
    """Its route leads to a handler: who only looks for the store need not know, and who checks is told of the app."""
    write(tmp_path)
    alone = command(tmp_path, "config", "check")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert 'oncehook.toml:14: there is no destination "ship"' in alone.stderr
    assert "oncehook serve app:inbox" in alone.stderr
    for words in (("config", "show"), ("db", "status")):
        assert "there is no destination" not in command(tmp_path, *words).stderr
    assert command(tmp_path, "config", "check", "app:inbox", "--without-secrets").returncode == 2


def test_the_apps_store_is_the_one_that_is_shown(tmp_path: Path, begin: Callable[..., Process]) -> None:
    write(tmp_path)
    served = begin(tmp_path, "serve", "app:inbox", terminal=True)
    served.wait_for("sqlite:./app.db")
    served.wait_for("app:inbox and ")
    assert served.end(signal.SIGTERM) == 0
