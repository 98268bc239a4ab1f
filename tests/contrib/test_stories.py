"""The stories that oncehook began with (DESIGN.md 1), as examples that run as their README says."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.contrib.running import ROOT, Database, Example, database, post

__all__ = ["database"]


def test_one_whatsapp_message_at_two_receivers_and_two_workers_is_one_row(tmp_path: Path, database: Database) -> None:
    """R11, R51: nobody looks first and inserts then; the unique index and the transaction decide."""
    env = {"STORE": database.url, "META_APP_SECRET": "secret", "META_VERIFY_TOKEN": "token"}
    with Example("whatsapp_two_workers", tmp_path, env) as example:
        example.run("python app.py")
        for port in (4021, 4022):
            example.start(f"oncehook serve app:inbox --no-worker --port {port}")
        for _ in range(2):
            example.start("oncehook worker app:inbox")
        for program in example.programs[1:]:
            program.wait_for("ready")
        for sent in range(1, 6):
            said = example.run("python send.py http://127.0.0.1:4021 http://127.0.0.1:4022").splitlines()
            assert Counter(said) == {"200 accepted": 1, "200 duplicate": 15}
            database.wait_for("SELECT count(*) FROM oncehook.heads", [(0,)])
            assert database.rows("SELECT count(*), count(DISTINCT wamid) FROM messages") == [(sent, sent)]
        for program in example.programs:
            assert "Traceback" not in program.stop()


def test_a_message_whose_worker_was_killed_is_one_row_too(tmp_path: Path, database: Database) -> None:
    """R12, R51: there is no lock that outlives its owner, so the next worker takes it in seconds."""
    env = {"STORE": database.url, "META_APP_SECRET": "secret", "META_VERIFY_TOKEN": "token"}
    with Example("whatsapp_two_workers", tmp_path, env) as example:
        example.run("python app.py")
        for port in (4021, 4022):
            example.start(f"oncehook serve app:inbox --no-worker --port {port}").wait_for("ready")
        fault = {"ONCEHOOK_FAULT": "before_transaction_commit:1"}
        killed = example.start("oncehook worker app:inbox", env=fault).wait_for("ready")
        example.run("python send.py http://127.0.0.1:4021 http://127.0.0.1:4022")
        assert killed.wait() == -9
        assert database.rows("SELECT count(*) FROM messages") == [(0,)]
        example.start("oncehook worker app:inbox").wait_for("ready")
        database.wait_for("SELECT count(*) FROM messages", [(1,)])
        database.wait_for("SELECT count(*) FROM oncehook.heads", [(0,)])
        assert database.rows("SELECT count(*) FROM messages") == [(1,)]


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_a_keyed_trigger_that_failed_is_replayed_and_not_skipped_by_its_own_key(
    tmp_path: Path, database: Database, engine: str
) -> None:
    with Example("keyed_trigger", tmp_path, {"STORE": database.url} if engine == "postgres" else {}) as example:
        server = example.start("oncehook serve app:inbox --port 8000").wait_for("ready")
        url = f"{server.url}/in/triggers"
        trigger = {"data": {"idempotency_key": "t-1"}}
        first = post(url, trigger)
        assert first.said == (200, "accepted")
        while "no agent is set up" not in example.run("oncehook dead --app app:inbox"):
            time.sleep(0.02)
        assert example.read("ran.txt") == []
        example.run("touch agent.txt")
        example.run("oncehook replay --app app:inbox --query status:dead --yes --wait")
        assert example.read("ran.txt") == ["t-1 run 2"]
        copy = post(url, trigger)
        assert copy.said == (200, "duplicate")
        assert copy.json["event_id"] == first.json["event_id"]
        assert post(url, {"data": {}}).said == (422, "key_missing")
        assert post(url, {"idempotency_key": "t-2"}).said == (200, "accepted")
        assert example.wait_for_lines("ran.txt", 2) == ["t-1 run 2", "t-2 run 1"]


@pytest.mark.parametrize("page", ["fastapi", "flask", "celery", "sqlalchemy"])
def test_the_snippets_of_these_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a program of its own; nothing is connected to before it is used."""
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/how-to/{page}.md").read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec", dont_inherit=True), {"__name__": "snippet"})
