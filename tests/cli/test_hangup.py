"""SIGHUP: settings that are good take effect, settings that are not change nothing, and no arrival is lost between."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Process

ORDERS = 'store = "sqlite:./inbox.db"\n[server]\nport = {port}\n[source.orders]\nverify = "none"\nbudget = "90s"\n'
MORE = ORDERS + '[source.more]\nverify = "none"\nbudget = "90s"\n'
WORK = """
[destination.first]
url = "http://127.0.0.1:9/"
[[route]]
from = "orders"
to = "first"
"""


def post(address: str, source: str, key: str) -> str:
    body = json.dumps({"idempotency_key": key}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/in/{source}", body)) as answer:
            return str(json.loads(answer.read())["status"])
    except urllib.error.HTTPError as error:
        error.close()
        return str(error.code)


def settings(folder: Path, text: str, port: int = 0) -> None:
    (folder / "oncehook.toml").write_text(text.replace("{port}", str(port)))


def test_good_settings_are_taken(tmp_path: Path, begin: Callable[..., Process]) -> None:
    settings(tmp_path, ORDERS)
    served = begin(tmp_path, "serve")
    served.wait_for("ready on", "err")
    address = served.err.split("ready on ")[1].split()[0]
    assert (post(address, "orders", "a"), post(address, "more", "a")) == ("accepted", "401")
    settings(tmp_path, MORE, int(address.rpartition(":")[2]))  # and it is found where it was
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("ready on", "err", times=2)
    assert (post(address, "orders", "a"), post(address, "more", "a")) == ("duplicate", "accepted")
    assert served.end(signal.SIGTERM) == 0


def test_bad_settings_change_nothing(tmp_path: Path, begin: Callable[..., Process]) -> None:
    settings(tmp_path, ORDERS)
    served = begin(tmp_path, "serve")
    served.wait_for("ready on", "err")
    address = served.err.split("ready on ")[1].split()[0]
    settings(tmp_path, MORE.replace("verify", "verfy"))
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("settings.refused", "err")
    assert 'did you mean "verify"?' in served.err
    assert post(address, "orders", "a") == "accepted"
    assert served.err.count("ready on") == 1
    assert served.end(signal.SIGTERM) == 0


def test_a_flag_still_counts(tmp_path: Path, begin: Callable[..., Process]) -> None:
    """What the file says is read as the next start would read it: here it would listen publicly, without a token."""
    settings(tmp_path, ORDERS)
    served = begin(tmp_path, "serve", "--host", "127.0.0.2")
    served.wait_for("ready on http://127.0.0.2:", "err")
    settings(tmp_path, MORE.replace("[server]", '[server]\nhost = "0.0.0.0"'))
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("ready on http://127.0.0.2:", "err", times=2)
    assert served.end(signal.SIGTERM) == 0


def test_a_worker_begins_anew(tmp_path: Path, begin: Callable[..., Process]) -> None:
    settings(tmp_path, ORDERS + WORK)
    works = begin(tmp_path, "worker")
    works.wait_for("worker ready for first", "err")
    settings(tmp_path, ORDERS + WORK.replace("first", "second"))
    works.process.send_signal(signal.SIGHUP)
    works.wait_for("worker ready for second", "err")
    assert works.end(signal.SIGTERM) == 0


def test_a_closed_terminal_ends_it_in_order(tmp_path: Path, begin: Callable[..., Process]) -> None:
    settings(tmp_path, ORDERS)
    served = begin(tmp_path, "serve", terminal=True)
    served.wait_for("dashboard")
    assert served.end(signal.SIGHUP) == 0
