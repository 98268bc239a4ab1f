"""The dashboard inside another application: what it knows of that one, and what it offers whom (UX.md 4)."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from oncehook import Inbox
from tests.acceptance.admin_house import call
from tests.wire import Answer

NAMES = [f"handler-{n}" for n in range(9)]


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    made.source("orders", verify="none", key="$.id")
    made.source("hidden", verify="none", key="$.id", path="k7_Qm2ZxN4vT9sLdR1wYhE")
    made.source("square", preset="square", secret="s", public_url="https://shop.example/hooks/square")
    made.source("twilio", preset="twilio", secret="s", public_url="https://shop.example/hooks/twilio?token=t")
    for name in NAMES:
        made.on("orders", name=name)(print)
    async with made.running():
        yield made


def around(inbox: Inbox, role: str | None = "viewer", *, with_hooks: bool = True) -> Starlette:
    """An application that has mounted the dashboard, and the way in, too."""
    admin = Mount("/staff/inbox", inbox.dashboard(authorize=cast("Any", lambda request: role)))
    return Starlette(routes=[admin, Mount("/hooks", inbox.asgi())] if with_hooks else [admin])


async def ask(app: Starlette, path: str, **headers: str) -> Answer:
    named = {"host": "shop.example", **headers}
    return await call(app, "GET", "/staff/inbox" + path, b"", named, "203.0.113.7")


async def addresses(app: Starlette, **headers: str) -> list[str]:
    """What is given to providers."""
    page = (await ask(app, "/sources", **headers)).body.decode()
    return [html.unescape(one) for one in re.findall(r'this address</span><div class="cmd"><code[^>]*>([^<]*)<', page)]


SECRET = "a secret address, for operators"


async def test_sources_show_their_whole_address(inbox: Inbox) -> None:
    registered = "https://shop.example/hooks/square"
    assert await addresses(around(inbox)) == ["http://shop.example/hooks/orders", SECRET, registered, SECRET]
    assert await addresses(around(inbox, "operator")) == [
        "http://shop.example/hooks/orders",
        "http://shop.example/hooks/k7_Qm2ZxN4vT9sLdR1wYhE",
        registered,
        "https://shop.example/hooks/twilio?token=t",
    ]


async def test_where_the_way_in_is_not_told_that_is_left_open(inbox: Inbox, tmp_path: Path) -> None:
    assert (await addresses(around(inbox, with_hooks=False)))[0] == "http://shop.example/…/orders"
    other = Inbox(f"sqlite:{tmp_path / 'other.db'}")
    beside = around(inbox, with_hooks=False)
    beside.routes.append(Mount("/theirs", other.asgi()))
    assert (await addresses(beside))[0] == "http://shop.example/…/orders"


async def audit(inbox: Inbox) -> list[tuple[str, str]]:
    return [(line.actor, line.act) for line in await inbox.admin.audit(limit=5)]


def in_the_name_of(inbox: Inbox, decision: Any) -> Starlette:
    async def authorize(request: Any) -> Any:
        return decision

    return Starlette(routes=[Mount("/staff/inbox", inbox.dashboard(authorize=authorize))])


OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("decision", "name"),
    [(("anna@shop.example", "operator"), "anna@shop.example"), ("operator", "host"), ((" Anna ", "admin"), "Anna")],
)
async def test_the_audit_names_the_person_whom_the_application_names(inbox: Inbox, decision: Any, name: str) -> None:
    app = in_the_name_of(inbox, decision)
    paused = await call(app, "POST", "/staff/inbox/destinations/handler-1/pause", b"reason=x", OURS, "203.0.113.7")
    assert paused.status == 303
    assert await audit(inbox) == [(name, "pause")]
    assert f"{name} · ".encode() in (await ask(app, "/system")).body
    named = {**OURS, "content-type": "application/json"}
    told = await call(app, "POST", "/staff/inbox/api/v1/destinations/handler-2/pause", b"{}", named, "203.0.113.7")
    assert told.status == 200, told.body
    assert await audit(inbox) == [(name, "pause"), (name, "pause")]


@pytest.mark.parametrize(
    "decision", ["Admin", "", True, ("anna", "owner"), ("", "admin"), (1, "admin"), ("anna",), ("anna", None), {}]
)
async def test_a_decision_that_cannot_be_read_lets_nobody_in_and_is_told(
    inbox: Inbox, decision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = in_the_name_of(inbox, decision)
    assert (await ask(app, "/events")).status == 403
    assert (await ask(app, "/api/v1/events")).status == 401
    assert caplog.text.count("Return (name, role)") == 2


async def test_the_api_is_mounted_with_the_dashboard_and_refuses_another_sites_changes(inbox: Inbox) -> None:
    app = in_the_name_of(inbox, ("vera", "viewer"))
    listed = await ask(app, "/api/v1/destinations")
    assert [one["name"] for one in listed.json["items"]] == NAMES
    assert (await ask(app, "/openapi.json")).json["openapi"]
    path = "/staff/inbox/api/v1/destinations/handler-1/pause"
    for site, status in (("cross-site", 403), ("same-origin", 403)):  # a stranger's page; a viewer
        headers = {"sec-fetch-site": site}
        assert (await call(app, "POST", path, b"{}", headers, "203.0.113.7")).status == status
    nobody = in_the_name_of(inbox, None)
    for path in ("/api/v1/destinations", "/api/v1/nothing"):
        refused = await ask(nobody, path)
        assert refused.status == 401
        assert "own login decides" in refused.json["hint"]
        assert "Authorization" not in refused.body.decode()
    assert await audit(inbox) == [("vera", "refused")]  # as a viewer; of another site's page it is not known who asks


async def test_a_host_is_a_strangers_text(inbox: Inbox) -> None:
    page = await ask(around(inbox), "/sources", host='x"><script>alert(1)</script>')
    assert page.status == 200
    assert b"<script>alert" not in page.body


async def test_whoever_may_see_nothing_is_offered_nothing_that_is_forbidden(inbox: Inbox) -> None:
    for came, back in {
        "": None,
        "http://shop.example/account": "http://shop.example/account",
        "http://evil.example/": None,
        "http://shop.example.evil.example/": None,
        "javascript://shop.example/%0aalert(1)": None,
    }.items():
        page = await ask(around(inbox, None), "/events", **({"referer": came} if came else {}))
        links = re.findall(r'<a [^>]*href="([^"]*)"', page.body.decode())
        assert (page.status, links) == (403, [back] if back else [])


async def test_whoever_may_not_do_that_is_offered_what_they_may_see(inbox: Inbox) -> None:
    page = (await ask(around(inbox), "/destinations/handler-1/pause")).body.decode()
    assert "That needs the role operator; yours is viewer." in page
    assert re.search(r'<a class="btn primary" href="/staff/inbox/">Overview</a>', page)
    assert "/logout" not in page  # there is nothing to log out of


async def test_a_worker_is_shown_with_all_that_it_works_for(inbox: Inbox) -> None:
    shown: list[str] = []
    while not shown:  # it enlists by itself, a moment after it has begun
        page = (await ask(around(inbox), "/system")).body.decode()
        shown = re.findall(r'<span class="dlv">([^<]*)</span>', page)
    assert shown == NAMES


@pytest.mark.parametrize("role", ["viewer", None])
@pytest.mark.parametrize("path", ["//evil.example/x", "///evil.example/x", "/\\evil.example/x", "/\t/evil.example/x"])
async def test_another_sites_address_in_the_path_is_not_handed_back(inbox: Inbox, path: str, role: str | None) -> None:
    """A page asks for itself again: at `//evil.example/x` that must not be another site."""
    app = inbox.dashboard(authorize=cast("Any", lambda request: role))
    answer = await call(app, "GET", path, b"", {"host": "shop.example"}, "203.0.113.7")
    assert answer.status == (404 if role else 403)
    assert "location" not in answer.headers
    named = [html.unescape(one) for one in re.findall(r'="([^"]*evil[^"]*)"', answer.body.decode())]
    as_browsers_read = [re.sub(r"[\t\r\n]", "", one).replace("\\", "/") for one in named]
    assert [one for one in as_browsers_read if not re.match(r"/[^/]", one)] == []
    assert bool(named) is (role is not None), "else this proves nothing"
