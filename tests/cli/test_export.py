"""Events as JSON lines, and a copy of the store that can be taken up again."""

from __future__ import annotations

import base64
import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncehook.store.sqlite import connection
from tests.acceptance.test_admin_cli import Admin


def test_events_with_their_bodies(admin: Admin, tmp_path: Path) -> None:
    admin.good("pause", "crm")
    admin.send(*(f"o{n}" for n in range(205)))
    odd = b'{"id":  "odd", "n": 1e2}'
    admin.send_raw(odd)
    done = admin.good("export")
    found = [json.loads(one) for one in done.out.splitlines()]
    assert [one["key"] for one in found] == ["odd", *(f"o{n}" for n in reversed(range(205)))]
    assert (found[1]["body"]["id"], found[1]["body_encoding"]) == ("o204", "json")
    assert found[1]["deliveries"][0]["status"] == "pending"
    assert done.err == "exported 206 events\n"
    admin.good("export", "key:odd", "--body", "base64", "-o", str(tmp_path / "odd.jsonl"))
    assert (tmp_path / "odd.jsonl").stat().st_mode & 0o777 == 0o600, "bodies are in it"
    [exact] = map(json.loads, (tmp_path / "odd.jsonl").read_text().splitlines())
    assert base64.b64decode(exact["body"]) == odd, "byte for byte"
    assert "body" not in json.loads(admin.good("export", "key:odd", "--body", "none").out)
    assert admin.good("export", "key:nobody").out == ""


def test_an_export_goes_into_no_file_that_others_can_read(here: Admin, tmp_path: Path) -> None:
    here.good("pause", "crm")
    here.send("o1")
    old = tmp_path / "old.jsonl"
    old.write_text("longer than what comes " * 900)
    old.chmod(0o644)
    here.good("export", "-o", str(old))
    assert (len(old.read_text().splitlines()), old.stat().st_mode & 0o777) == (1, 0o600)
    (tmp_path / "link").symlink_to(old)
    refused = here.run("export", "key:nobody", "-o", str(tmp_path / "link"))
    assert (refused.code, refused.out) == (1, "")
    assert "symbolic link" in refused.err
    assert json.loads(old.read_text())["key"] == "o1", "what is refused keeps its content"
    assert here.good("export", "-o", "/dev/null").err.endswith("exported 1 event\n"), (
        "what keeps nothing may be a device"
    )
    assert json.loads(here.good("export", "-o", "-").out)["key"] == "o1"


def test_a_body_that_is_no_json(here: Admin) -> None:
    here.good("pause", "crm")
    here.send_raw(b"\xff\x00 not json")
    here.send_raw(b'{"id": NaN}')
    here.send_raw(b'{"half a character": "\\ud83d"}')
    found = [json.loads(line) for line in here.good("export").out.splitlines()]
    assert [one["body_encoding"] for one in found] == ["json", "base64", "base64"]


# -- backups -----------------------------------------------------------------------------------


def test_a_backup_of_a_running_store_is_taken_up_with_raised_fences(here: Admin, tmp_path: Path) -> None:
    """R69, and the two commands of the docs: copy while everything runs, put it in place, `db restored`."""
    here.sink.hold.clear()
    here.send("leased")
    while not here.sink.bodies:
        threading.Event().wait(0.02)
    copy = tmp_path / "copy.db"
    assert here.good("db", "backup", str(copy)).out == f"{copy}\n"
    assert copy.stat().st_mode & 0o777 == 0o600, "bodies are in it"
    refused = here.run("db", "backup", str(copy))
    assert (refused.code, refused.out) == (1, "")
    [(fence,)] = rows(copy, "SELECT max(fence) FROM heads")
    here.send("later")
    here.sink.hold.set()
    here.receiver.kill()
    for file in tmp_path.glob("inbox.db*"):
        file.unlink()
    copy.rename(tmp_path / "inbox.db")
    assert here.good("db", "restored").out == "1 lease ended, all fences raised\n"
    [(raised,)] = rows(tmp_path / "inbox.db", "SELECT value FROM marks WHERE name = 'fence'")
    assert raised > fence + 1000, "what the original gave out since is lower"
    assert here.stand() == {"leased": "pending"}
    here.receiver.start()
    here.wait_for("done", "leased")


def rows(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def test_a_backup_is_of_one_moment(tmp_path: Path) -> None:
    """A writer goes on between the pages: none of what it writes is in the copy, and the copy does not begin again."""
    store, copy = tmp_path / "store.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE t (a INTEGER, b BLOB)")
        writer.executemany("INSERT INTO t VALUES (1, ?)", [(bytes(4000),)] * 2000)
        told: list[int] = []

        def report(done: int, total: int) -> None:
            told.append(done)
            writer.execute("UPDATE t SET a = a + 1")

        connection.copy(store, copy, report)
        assert len(told) > 3
        assert told == sorted(told), "it never began again"
        assert rows(copy, "SELECT DISTINCT a FROM t") == [(1,)]
        assert not (tmp_path / "copy.db.partial").exists()


def test_half_a_backup_does_not_bear_its_name(tmp_path: Path) -> None:
    store, copy = tmp_path / "store.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(store)) as writer:
        writer.execute("CREATE TABLE t (a)")

    def report(done: int, total: int) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        connection.copy(store, copy, report)
    assert [one.name for one in tmp_path.iterdir()] == ["store.db"]


def test_of_postgres_the_command_is_said(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONCEHOOK_STORE", "postgresql://ann:canary@db.example/inbox")
    done = run("db", "backup", "in box.dump")
    assert (done.code, done.out) == (2, ""), "a script must not take this for a backup"
    assert "pg_dump --format=custom --file='in box.dump' postgresql://ann@db.example/inbox" in done.err
    assert "canary" not in done.err
    assert not list(tmp_path.iterdir())
