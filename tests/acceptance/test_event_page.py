"""What is taken away from an event's page: the command, the test and the JSON (UX.md 4)."""

from __future__ import annotations

import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.applications import Starlette

from oncehook import Event, Inbox
from oncehook.testing import send
from tests.acceptance.admin_house import Answer, call
from tests.testing.test_plugin import good, run

APP = """
import json
from pathlib import Path

from oncehook import Inbox
from oncehook.whatsapp import MetaCloud

inbox = Inbox("sqlite:./shop.db")
inbox.source("orders", verify="none", key="$.id", type="$.type")
inbox.source("github", preset="github", secret="of-github")
inbox.destination("crm", url="https://crm.example/hooks")
inbox.route("orders", "crm")
inbox.sender("answers", MetaCloud("106540352242922", "a-token"))
inbox.route("answers", "answers")


def note(event):
    told = {"type": event.type, "body": event.body.decode(), "key": event.key, "subject": event.subject}
    with Path("seen").open("a") as seen:
        seen.write(json.dumps(told) + "\\n")


for source in ("orders", "github", "app"):
    inbox.on(source, name=f"note-{source}")(note)
"""
BODY = b'{"id": 1, "type": "paid", "note": "\\"\'</button><script>alert(1)</script>"}'


@pytest.fixture
async def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Inbox]:
    """That of the program `app.py`, which tests that are copied import."""
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {}
    exec(APP, program)
    async with program["inbox"].running(work=False):
        yield program["inbox"]


async def look(inbox: Inbox, path: str, role: str | None = "viewer") -> Answer:
    admin = inbox.dashboard(authorize=cast("Any", lambda request: role))
    return await call(cast("Starlette", admin), "GET", path, b"", {"host": "127.0.0.1:4020"}, "127.0.0.1")


def copied(page: Answer) -> list[str]:
    """What the buttons beside the body copy."""
    found = re.findall(r'data-copy="([^"]*)"[^>]*>.{0,400}?Copy as', page.body.decode(), re.DOTALL)
    return [html.unescape(one) for one in found]


async def sent(inbox: Inbox) -> str:
    receipt = await inbox.receive("orders", {"content-type": "application/json"}, BODY)
    return receipt.event_ids[0]


def run_copied(folder: Path, text: str) -> list[dict[str, Any]]:
    """Run a test as it was copied, beside the program it imports; what the program's handler was given by it."""
    seen = folder / "seen"
    seen.unlink(missing_ok=True)
    assert good(run(folder, text), 1)
    return [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []


async def test_an_event_is_copied_as_a_test_that_runs(inbox: Inbox, tmp_path: Path) -> None:
    page = await look(inbox, f"/events/{await sent(inbox)}")
    assert b"<script>alert" not in page.body
    text = copied(page)[-1]
    assert run_copied(tmp_path, text) == [{"type": "paid", "body": BODY.decode(), "key": "1", "subject": None}]
    assert "assert len(inbox.sent('crm')) == 1" in text


async def test_a_type_that_is_in_a_header_is_kept_by_the_test(inbox: Inbox, tmp_path: Path) -> None:
    [answer] = await send(inbox, "github", "pull_request.opened")
    [seen] = run_copied(tmp_path, copied(await look(inbox, f"/events/{answer.json()['event_id']}"))[-1])
    assert seen["type"] == "pull_request.opened"


async def test_a_large_body_is_read_from_where_it_was_downloaded_to(inbox: Inbox, tmp_path: Path) -> None:
    body = b'{"id": 2, "type": "paid", "note": "%s"}' % (b"x" * 5000)
    event_id = (await inbox.receive("orders", {}, body)).event_ids[0]
    saved = await look(inbox, f"/events/{event_id}/body")
    name = saved.headers["content-disposition"].partition('filename="')[2].rstrip('"')
    (tmp_path / name).write_bytes(saved.body)
    [seen] = run_copied(tmp_path, copied(await look(inbox, f"/events/{event_id}"))[-1])
    assert seen["body"].encode() == body


async def test_an_event_of_ones_own_is_emitted_by_its_test_and_has_no_command(inbox: Inbox, tmp_path: Path) -> None:
    event_id = await inbox.emit("app", "order.paid", {"id": 1}, key="k'1", subject="o1")
    (text,) = copied(await look(inbox, f"/events/{event_id}"))
    assert run_copied(tmp_path, text) == [{"type": "order.paid", "body": '{"id":1}', "key": "k'1", "subject": "o1"}]


async def test_a_test_sends_no_message(inbox: Inbox, tmp_path: Path) -> None:
    event_id = await inbox.emit("answers", "message.text", {"to": "5511988880142", "text": "Hi"}, key="1")
    (text,) = copied(await look(inbox, f"/events/{event_id}"))
    assert run_copied(tmp_path, text) == []
    assert "\n    inbox.drain()\n    assert len(inbox.sent('answers')) == 1" in text


async def test_an_event_is_opened_as_json_that_no_browser_takes_for_a_page(inbox: Inbox) -> None:
    event_id = await sent(inbox)
    answer = await look(inbox, f"/events/{event_id}/json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    told = json.loads(answer.body)
    assert (told["id"], told["source"], told["key"], len(told["deliveries"])) == (event_id, "orders", "1", 2)
    assert f'/events/{event_id}/json"' in (await look(inbox, f"/events/{event_id}")).body.decode()
    assert (await look(inbox, f"/events/{event_id}/json", None)).status != 200


async def test_what_a_handler_returned_is_shown_and_cannot_break_the_page(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/shop.db")
    inbox.source("orders", verify="none", key="$.id")

    @inbox.on("orders")
    def ship(event: Event) -> dict[str, object]:
        return {"rows": 3, "note": "</pre><script>alert(1)</script>"}

    async with inbox.running():
        event_id = await sent(inbox)
        await inbox.drain()
        timeline = await look(inbox, f"/events/{event_id}")
        deliveries = await look(inbox, f"/events/{event_id}?tab=deliveries")
    assert "returned {&#34;rows&#34;:3" in timeline.body.decode()
    told = deliveries.body.decode()
    assert "<h3>Result, attempt 1, after" in told
    assert "&#34;rows&#34;: 3,\n" in told
    assert "<script>alert" not in timeline.body.decode() + told
