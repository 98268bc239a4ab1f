"""The stories that oncehook began with, as examples that run as their README says."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.contrib.running import ROOT, Database, Example, database, post
from tests.servers import free_port

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


TOLD = {
    "two_copies.py": """
One WhatsApp message, delivered twice at the same moment
  original, GET and SETEX   2 rows. Both workers looked before either had written.
  oncehook, 16 copies       1 row. 1 accepted, 15 duplicate. Key, event and work are one commit.
A worker dies in the middle, and Meta delivers again
  original, SET NX EX       0 rows. The lock of the dead refuses every retry for 24 hours.
  oncehook, killed          0 rows. 1 accepted, then the process is gone.
  oncehook, next start      1 row. 1 duplicate. The event was due, and no lock was in its way.
""",
    "replayed_trigger.py": """
A trigger from n8n comes twice; its destination answers 502 once; a person replays what failed
  original, two copies      it ran 2 times. The key is one level deeper than it looks.
  original, 502 once        failed, and never tried again.
  original, replayed        skipped. The replay meets its own unique key.
  oncehook, two copies      accepted, duplicate; n8n ran 1 time.
  oncehook, 502 once        done on attempt 2.
  oncehook, no agent        dead, and kept until a person replays or discards it.
  oncehook, replayed        done in run 2, under the same key.
  oncehook, a late copy     duplicate. Keys count for hooks that come in, not for replays.
""",
    "rivals.py": """
Two hooks for one object, a microsecond apart
  original, side by side    2 rows. Each looked before the other had written.
  original, with a check    0 rows. Each found the other, and quit.
  oncehook, in order        1 row, paid. 1 hook of the object at a time.
Version 4 of the object comes before version 3
  oncehook, latest wins     the row says shipped. Version 4 handled, version 3 stale.
""",
}


@pytest.mark.parametrize("script", TOLD)
def test_a_script_tells_each_story_beside_its_original(script: str, tmp_path: Path) -> None:
    with Example("stories", tmp_path) as example:
        assert example.run(f"python {script}") == TOLD[script].lstrip()


def test_there_is_a_script_for_each_story() -> None:
    assert {path.name for path in (ROOT / "examples/stories").glob("*.py")} == set(TOLD)


CHAT_PRODUCT = """
20 customers with a WhatsApp number and a webhook each
  messages come in          1000 accepted, 2000 duplicates.
  one webhook is slow       0 answered there; the other 19 have all of theirs.
  webhooks go out           1000; 20 customers: each once.
  wrong signatures          0.
  a number of nobody        kept, account null, told to nobody.
  a customer's token        sees 50 of 1000 events, all of account 7.
"""


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_a_chat_product_tells_each_customer_of_its_own_messages_once(
    tmp_path: Path, database: Database, engine: str
) -> None:
    env = {"PORT": str(free_port())} | ({"STORE": database.url} if engine == "postgres" else {})
    with Example("stories/chat_product", tmp_path, env) as example:
        assert example.run("python tell.py") == CHAT_PRODUCT.lstrip()


@pytest.mark.parametrize("page", ["fastapi", "flask", "celery", "sqlalchemy"])
def test_the_snippets_of_these_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a program of its own; nothing is connected to before it is used."""
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/how-to/{page}.md").read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec", dont_inherit=True), {"__name__": "snippet"})
