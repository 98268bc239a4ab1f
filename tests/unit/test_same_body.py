"""What a check covers, and what came before under another key, as every face shows it."""

from __future__ import annotations

from pathlib import Path

import httpx

from oncehook import Inbox, samples
from oncehook.model import Arrival


def renamed(arrival: Arrival) -> list[tuple[bytes, bytes]]:
    return [(name, b"another" if name == b"x-github-delivery" else value) for name, value in arrival.headers]


async def test_every_face_shows_it(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    source = inbox.source("git", preset="github", secret="long enough")
    inbox.source("chat", preset="telegram", secret="long enough")
    app = inbox.dashboard(authorize=lambda request: ("ann", "admin"))
    async with inbox.running(), httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://a") as http:
        captured = samples.sign(source, samples.draft(source, "push"))
        [first] = (await inbox.receive("git", captured.headers, captured.body)).event_ids
        [again] = (await inbox.receive("git", renamed(captured), captured.body)).event_ids

        event = (await http.get(f"/api/v1/events/{again}")).json()
        assert (event["same_body_as"], event["marks"]) == (first, ["same_body"])
        assert (event["body_authenticated"], event["key_authenticated"]) == (True, False)
        assert (await http.get(f"/api/v1/events/{first}")).json()["same_body_as"] is None
        listed = (await http.get("/api/v1/events")).json()["items"]
        assert {one["id"]: one["marks"] for one in listed} == {again: ["same_body"], first: []}
        sources = {one["name"]: one for one in (await http.get("/api/v1/sources")).json()["items"]}
        assert [sources[name]["body_authenticated"] for name in ("git", "chat")] == [True, False]
        assert [sources[name]["key_authenticated"] for name in ("git", "chat")] == [False, False]

        page = (await http.get(f"/events/{again}")).text
        assert "Same body as" in page
        assert f"/events/{first}" in page
        assert "body, not the key" in page
        assert "Same body as" not in (await http.get(f"/events/{first}")).text
        assert (await http.get("/events")).text.count(">same body<") == 1
        page = (await http.get("/sources")).text
        assert "body, not the key" in page
        assert "who sends, not the body" in page
