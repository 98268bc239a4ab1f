"""`oncehook send` against a server without settings: every sample of every preset, over real HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oncehook import presets
from oncehook.cli import cli
from oncehook.errors import ConfigError

SAMPLES = [(name, kind) for name in presets.names() for kind in presets.load(name).samples]
SETTINGS = """
[source.orders]
verify = { scheme = "hmac", header = "X-Signature", prefix = "sha256=" }
secret = { env = "ORDERS_SECRET" }
"""


@dataclass
class Development:
    """A server of its own, with the keys that `send` knows."""

    folder: Path
    address: str

    def send(self, *arguments: str) -> Result:
        """As senders do: again, and a fresh one, when the machine stood still for longer than the source's budget."""
        runner = CliRunner(env={"XDG_STATE_HOME": str(self.folder / "state")})
        for _ in range(10):
            result = runner.invoke(cli, ["send", *arguments], standalone_mode=False)
            if not re.search(r'^→ 5|"http_status": 5', result.stdout, re.MULTILINE):
                break
        return result

    def answers(self, name: str, *arguments: str) -> list[dict[str, object]]:
        result = self.send(name, *arguments, "--to", f"{self.address}/in/{name}", "--json")
        assert result.exception is None, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def development(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Development]:
    folder = tmp_path_factory.mktemp("development")
    log = folder / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "oncehook", "serve", "--port", "0"],
            cwd=folder,
            env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
            stderr=stderr,
        )
    try:
        while not (found := re.search(r"ready on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        yield Development(folder, found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
def test_every_sample_is_accepted(development: Development, name: str, kind: str) -> None:
    result = development.send(name, kind, "--to", f"{development.address}/in/{name}")
    assert (result.exception, result.return_value) == (None, 0), result.output
    assert result.stdout.startswith("→ 20")


@pytest.mark.parametrize("name", presets.names())
def test_every_forgery_is_refused(development: Development, name: str) -> None:
    [answer] = development.answers(name, "--bad-signature")
    assert (answer["http_status"], answer["code"]) == (401, "signature_invalid")


def test_repeat(development: Development) -> None:
    answers = development.answers("github", "push", "--repeat", "3")
    assert [answer["status"] for answer in answers] == ["accepted", "duplicate", "duplicate"]
    assert len({answer["event_id"] for answer in answers}) == 1


def test_batch(development: Development) -> None:
    [answer] = development.answers("sendgrid", "--batch")
    assert answer["accepted"] == 3
    with pytest.raises(ConfigError, match='no sample "batch"'):
        raise development.send("stripe", "--batch", "--to", development.address).exception  # type: ignore[misc]
    assert "leave TYPE out" in str(development.send("sendgrid", "open", "--batch").exception)


def test_file_goes_with_the_headers_of_its_type(development: Development, elsewhere: Path) -> None:
    body = b'{"action": "completed",  "check_run": {"id": 7}, "repository": {"id": 1}}\n'
    (elsewhere / "body.json").write_bytes(body)
    [answer] = development.answers("github", "check_run", "--file", "body.json")
    assert answer["status"] == "accepted"
    with closing(sqlite3.connect(development.folder / "oncehook.db")) as connection:
        found = connection.execute("SELECT type, subject FROM events WHERE body = ?", (body,)).fetchall()
    assert found == [("check_run.completed", "1:7")]


def test_list(development: Development) -> None:
    result = development.send("--list")
    listed = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert set(listed) == {"dev", *presets.names()}
    assert "invoice.paid" in listed["stripe"]
    assert development.send("stripe", "--list").stdout.splitlines() == [listed["stripe"]]
    assert isinstance(development.send("strype", "--list").exception, ConfigError)


def test_a_preset_that_is_not_configured(
    development: Development, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With settings of one's own, --to says where; it is signed with the development key."""
    monkeypatch.setenv("ORDERS_SECRET", "s")
    (elsewhere / "oncehook.toml").write_text(SETTINGS)
    [answer] = development.answers("stripe", "invoice.paid")
    assert answer["status"] == "accepted"
    refused = development.send("stripe", "invoice.paid").exception
    assert isinstance(refused, ConfigError)
    assert "--to" in refused.hint
    unknown = development.send("strype", "--to", development.address).exception
    assert isinstance(unknown, ConfigError)
    listed = development.send("--list")
    assert listed.stdout.splitlines()[0].split()[0] == "orders"
    assert "github" in listed.stdout
