"""`serve --reload`: the program changes, the server is started anew, and nothing is lost between."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

from oncehook.cli.run import modification_times
from tests.cli.conftest import Process

APP = """
from oncehook import Event, Inbox

inbox = Inbox("sqlite:./app.db")
inbox.source("orders", verify="none", budget="90s")

@inbox.on("orders")
async def handle(event: Event) -> None:
    print("VERSION", event.key, flush=True)
"""


def change(app: Path, text: str) -> None:
    """Write the program in one moment: half of it would be a change of its own."""
    whole = app.with_suffix(".new")
    whole.write_text(text)
    whole.replace(app)


def post(address: str, key: str) -> str:
    body = json.dumps({"idempotency_key": key}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/in/orders", body)) as answer:
        return str(json.loads(answer.read())["status"])


def address_of(process: Process, times: int) -> str:
    process.wait_for("ready on", "err", times=times)
    return process.err.split("ready on ")[-1].split()[0]


def test_a_change_starts_it_anew(tmp_path: Path, begin: Callable[..., Process]) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP.replace("VERSION", "one"))
    served = begin(tmp_path, "serve", "app:inbox", "--reload", "--port", "0")
    assert post(address_of(served, 1), "a") == "accepted"
    served.wait_for("one a")
    change(app, APP.replace("VERSION", "two  "))
    address = address_of(served, 2)
    assert "app.py changed; starting again" in served.err
    assert post(address, "a") == "duplicate", "the same store, taken up by the next process"
    assert post(address, "b") == "accepted"
    served.wait_for("two   b")
    change(app, "this is no Python")
    served.wait_for("SyntaxError", "err")
    change(app, APP.replace("VERSION", "three"))
    assert post(address_of(served, 3), "c") == "accepted"
    served.wait_for("three c")
    assert served.end() == 0


def test_what_is_watched(tmp_path: Path) -> None:
    settings = tmp_path / "oncehook.toml"
    for name in ("app.py", "shop/orders.py", ".hidden/x.py", "venv/lib/x.py", "node_modules/x.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "venv/pyvenv.cfg").touch()
    settings.touch()
    found = modification_times(tmp_path, [settings, tmp_path / "not-there.toml"])
    assert {str(path.relative_to(tmp_path)) for path in found} == {"app.py", "shop/orders.py", "oncehook.toml"}
