"""Moving in: ids that were processed elsewhere are duplicates from the first day on."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.acceptance.test_admin_cli import TOKEN, Admin


def test_what_was_processed_elsewhere_is_not_worked_again(admin: Admin, tmp_path: Path) -> None:
    table = tmp_path / "processed.csv"
    table.write_text("id,when\n" + "".join(f"o{n},2026-01-01\n" for n in range(2500)) + ",\n")
    first = admin.good("import", "keys", str(table), "--source", "orders", "--column", "id", "--json").json
    assert first == {"source": "orders", "read": 2500, "new": 2500, "known": 0, "skipped": 1}
    again = admin.good("import", "keys", str(table), "--source", "orders", "--column", "id")
    assert again.out == "2,500 keys read, 2,500 known, 1 skipped\n"
    assert admin.send("o0", "o2499")[1]["status"] == "duplicate"
    assert admin.send("o0", amount=5)[0]["status"] == "duplicate", "nobody knows the body that it came with"
    assert admin.send("o2500")[0]["status"] == "accepted"
    admin.wait_for("done", "o2500")
    assert len(admin.sink.bodies) == 1
    assert all(check["ok"] for check in admin.good("doctor", "--json").json), "the books still balance"
    assert admin.good("stats", "--json").json["total"] == 1, "an import is no arrival"
    assert any(act == "import" for _, act in admin.audit())


def test_an_event_that_was_seen_before_oncehook_is_explained(here: Admin, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    here.good("import", "keys", str(tmp_path / "a.txt"), "--source", "orders")
    event_id = here.send("a")[0]["event_id"]
    shown = here.run("show", event_id)
    assert (shown.code, "There is no such event" in shown.err, "it was imported" in shown.err) == (1, True, True)
    stranger = here.run("show", event_id[:-6] + "ab0000")
    assert (stranger.code, "There is no such event" in stranger.err, "imported" in stranger.err) == (1, True, False)


TABLES = [
    ("a.csv", 'event;x,"the ""id"""\n1,a0\n2,"b\n0"\n', ("--column", 'the "id"')),
    ("a.jsonl", '{"data": {"id": "a1"}}\n\n{"data": {"id": "b\\n1"}}\n', ("--column", "data.id")),
    ("a", '\ufeff{"id": "a2"}\n{"id": "b\\n2", "x": 1}\n', ("--column", "id")),
    ("a.bak", '\ufeffid\na3\n"b\n3"\n', ("--column", "id", "--format", "csv")),
]


def test_tables_of_many_kinds(here: Admin, tmp_path: Path) -> None:
    for number, (name, content, options) in enumerate(TABLES):
        (tmp_path / name).write_text(content)
        done = here.good("import", "keys", str(tmp_path / name), "--source", "orders", *options, "--json").json
        assert (done["new"], done["skipped"]) == (2, 0), name
        sent = here.send(f"a{number}", f"b\n{number}")
        assert [one["status"] for one in sent] == ["duplicate", "duplicate"], name


def test_ids_from_a_pipe(here: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a\n\n  ö \n".encode())))
    assert here.good("import", "keys", "-", "--source", "orders").out == "2 keys read, 2 new, 1 skipped\n"
    assert [one["status"] for one in here.send("a", "ö", "b")] == ["duplicate", "duplicate", "accepted"]


def test_numbers_are_written_as_keys_are(here: Admin, tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"id": 42}\n{"id": null}\n{"id": 1.50}\n')
    done = here.good("import", "keys", str(tmp_path / "n.jsonl"), "--source", "orders", "--column", "id", "--json").json
    assert (done["new"], done["skipped"]) == (2, 1)
    assert [here.send_raw(json.dumps({"id": n}).encode())["status"] for n in (42, 1.5)] == ["duplicate"] * 2


WRONG = [
    ("a.csv", b"id\na\n", (), "Which column"),
    ("a.csv", b"id,b\na\n", ("--column", "key"), "There are: id, b."),
    ("a.txt", b"a\n", ("--column", "id"), "no columns"),
    ("a.jsonl", b'{"id": 1}\n{"id"\n', ("--column", "id"), "Line 2 is no JSON"),
    ("a.txt", b"a\n\xff\xfe\n", (), "Line 2 is not UTF-8"),
    ("a.txt", b"a\n" + b"x" * 5000, (), "Line 2 holds a key of more than"),
    ("a.txt", b"a\n", ("--source", "ordres"), 'There is no source "ordres"'),
]


def test_what_cannot_be_read_is_told(here: Admin, tmp_path: Path) -> None:
    for name, content, options, says in WRONG:
        (tmp_path / name).write_bytes(content)
        done = here.run("import", "keys", str(tmp_path / name), "--source", "orders", *options)
        assert (done.code in (1, 2), done.out) == (True, ""), says
        assert says in done.err


def test_a_dry_run_changes_nothing(here: Admin, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    done = here.good("import", "keys", str(tmp_path / "a.txt"), "--source", "orders", "--dry-run")
    assert (done.out, "  a\n" in done.err) == ("2 keys read\n", True)
    assert here.send("a")[0]["status"] == "accepted"


def test_only_an_admin_may(here: Admin, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    server = f"http://127.0.0.1:{here.receiver.port}"
    asked = ("import", "keys", str(tmp_path / "a.txt"), "--source", "orders", "--server", server, "--token-env")
    refused = here.run(*asked, "VERA")
    assert (refused.code, "admin" in refused.err) == (2, True)
    assert here.good(*asked, "ADMIN").out == "1 key read, 1 new\n"
    assert TOKEN not in here.receiver.log.read_text()
