"""The portal: a link that works once, a session of one account, and pages that show that account's own and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import unescape
from ipaddress import ip_network
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from oncehook import admin, clock
from oncehook.model import DeliveryStatus, EventId, Filter, Noun
from oncehook.settings.stored import Vault
from oncehook.store.cipher import Cipher
from oncehook.web import dashboard
from oncehook.web.auth import Access, Identity, Role
from oncehook.web.dashboard import PAGES
from oncehook.web.dashboard.portal import portal_routes
from oncehook.web.session import Auth, DashboardSessions, PortalAuth
from tests.acceptance.admin_house import call
from tests.acceptance.test_account_leaks import (
    CANARY,
    MINE,
    OTHER,
    Tenants,
    candidates,
    clean,
    nobody,
    paths_of,
    seen_by_other,
    tenants,
)
from tests.wire import Answer

assert tenants  # a fixture

OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
SITE = "https://app.example"
SKIPPED = ("/portal/static", "/portal/language")
FILLED = "/portal/replays/plan"
"""Script adds what is selected."""
CUSTOMERS = [page for page in PAGES if page.customers and page.path != "/ui/stream"]


@dataclass
class Visitor:
    """A browser without script."""

    app: Starlette
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    scheme: str = "http"

    async def ask(self, method: str, path: str, form: Mapping[str, str] | None = None) -> Answer:
        sent = {"host": "hooks.example", **self.headers, **({} if form is None else OURS)}
        if self.cookie:
            sent["cookie"] = self.cookie
        return await call(self.app, method, path, urlencode(form or {}).encode(), sent, "203.0.113.7")

    async def get(self, path: str) -> str:
        answer = await self.ask("GET", path)
        assert answer.status == 200, (path, answer.body.decode())
        return answer.body.decode()

    async def enter(self, link: str) -> Answer:
        """Follow a link, and send the form of its page."""
        shown = await self.ask("GET", link)
        if shown.status != 200:
            return shown
        (token,) = re.findall(r'name="link" value="([^"]+)"', shown.body.decode())
        answer = await self.ask("POST", "/portal/enter", {"link": unescape(token)})
        if "set-cookie" in answer.headers:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer


def path_of(link: str) -> str:
    parts = urlsplit(link)
    return f"{parts.path}?{parts.query}"


def app_of(tenants: Tenants, **how: Any) -> Starlette:
    """The portal beside the API and the dashboard, as the server has them."""
    auth = Auth(Access(), DashboardSessions(tenants.inbox.store))
    return Starlette(
        routes=[
            Mount("/portal", routes=portal_routes(tenants.inbox, tenants.stream, **how)),
            *tenants.app.routes,
            *dashboard.routes(tenants.inbox.admin, auth, tenants.stream),
        ]
    )


async def visitor(tenants: Tenants, account: str = MINE, **how: Any) -> Visitor:
    made = Visitor(app_of(tenants, **how))
    answer = await made.enter(path_of(tenants.inbox.portal_link(account)))
    assert (answer.status, answer.headers["location"]) == (303, "/portal/destinations")
    return made


# -- the link ----------------------------------------------------------------------------------


async def test_a_link_works_once(tenants: Tenants) -> None:
    link = path_of(tenants.inbox.portal_link(MINE, name="ana"))
    someone, thief = Visitor(app_of(tenants)), Visitor(app_of(tenants))
    for _ in range(2):  # a program that looks at links in messages does not use it up
        looked_at = await thief.ask("GET", link)
        assert (looked_at.status, "set-cookie" in looked_at.headers) == (200, False)
    answer = await someone.enter(link)
    assert answer.status == 303
    assert "portal 42 (ana)" in await someone.get("/portal/destinations")
    assert (await thief.enter(link)).status == 401
    assert (await thief.ask("GET", "/portal/destinations")).status == 401
    assert (await someone.enter(link)).status == 303  # who is in by it stays so
    assert (await someone.ask("POST", "/portal/logout", {})).status == 200
    assert (await someone.ask("GET", "/portal/destinations")).status == 401
    assert (await someone.enter(link)).status == 401
    logins = [one for one in await tenants.inbox.admin.audit(limit=50) if one.actor == "portal 42 (ana)"]
    assert [(one.act, one.detail["by"]) for one in logins] == [("login", "portal link")]


async def test_an_old_or_changed_link_lets_nobody_in(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now - 3600)
    old = path_of(tenants.inbox.portal_link(MINE, expires="10m"))
    monkeypatch.undo()
    one = Visitor(app_of(tenants))
    good = path_of(tenants.inbox.portal_link(MINE))
    answers = [
        await one.ask("GET", link) for link in (old, good[:-3] + "AAA", "/portal/enter", "/portal/enter?link=x.y")
    ]
    assert {answer.status for answer in answers} == {401}
    assert {clean(answer.body.decode()) for answer in answers} == {clean(answers[0].body.decode())}
    for text in (old.partition("link=")[2], "", "x" * 3000, "\x01"):
        assert (await one.ask("POST", "/portal/enter", {"link": text})).status in (400, 401)
    assert one.cookie == ""


async def test_only_our_own_page_sends_the_link(tenants: Tenants) -> None:
    """Otherwise another site could put somebody into an account of its choosing, unseen."""
    link = tenants.inbox.portal_link(MINE).partition("link=")[2]
    one = Visitor(app_of(tenants))
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}, {}):
        raw = await call(one.app, "POST", "/portal/enter", f"link={link}".encode(), {"host": "h", **headers}, "")
        assert raw.status == 403
    assert (await one.enter(f"/portal/enter?link={link}")).status == 303


async def test_a_session_has_a_name_that_nobody_chose(tenants: Tenants) -> None:
    cookie = await DashboardSessions(tenants.inbox.store, "_portal").cookie()
    one = Visitor(app_of(tenants), cookie=f"{cookie}=chosen")
    await one.enter(path_of(tenants.inbox.portal_link(MINE)))
    assert one.cookie.startswith(f"{cookie}=")
    assert one.cookie != f"{cookie}=chosen"
    before = one.cookie
    await one.enter(path_of(tenants.inbox.portal_link(OTHER)))
    assert CANARY in await one.get("/portal/destinations")
    left = Visitor(one.app, before)
    assert (await left.ask("GET", "/portal/destinations")).status == 401  # the one before has ended


async def test_a_session_ends_with_its_key_and_with_its_account(tenants: Tenants) -> None:
    one = await visitor(tenants)
    other_key = PortalAuth(tenants.inbox)
    other_key._vault = Vault(Cipher([bytes(range(32))]))
    name = one.cookie.partition("=")[2]
    assert other_key._sessions is not None
    session = await other_key._sessions.of(name)
    assert session is not None
    assert other_key._holder(name, session) is None
    assert PortalAuth(tenants.inbox)._holder(name, session) is not None
    assert PortalAuth(tenants.inbox)._holder(name, replace_account(session)) is None
    waiting = path_of(tenants.inbox.portal_link(MINE))
    await tenants.inbox.define.accounts.change(MINE, enabled=False)
    assert (await one.ask("GET", "/portal/destinations")).status == 401
    assert (await Visitor(one.app).enter(waiting)).status == 401
    await tenants.inbox.define.accounts.change(MINE, enabled=True)
    assert (await one.ask("GET", "/portal/destinations")).status == 401
    await tenants.inbox.define.account("99")
    again = await visitor(tenants, "99")
    clock.forward(-120)
    try:
        unused = path_of(tenants.inbox.portal_link("99"))
    finally:
        clock.forward(120)
    await tenants.inbox.define.accounts.delete("99")
    assert (await again.ask("GET", "/portal/destinations")).status == 401
    assert (await Visitor(one.app).enter(unused)).status == 401
    await tenants.inbox.define.account("99")  # somebody else, who has the name now
    assert (await Visitor(one.app).enter(unused)).status == 401


def replace_account(session: Any) -> Any:
    return type(session)(session.hash, session.actor, session.role, session.proof, None)


# -- what is there, and what is not ------------------------------------------------------------


async def test_pages_that_are_not_for_customers_are_absent(tenants: Tenants) -> None:
    one = await visitor(tenants)
    home = await one.get("/portal/destinations")
    menu = re.findall(r'class="nav" href="([^"]+)"', home)
    assert menu == ["/portal/destinations", "/portal/events", "/portal/dead", "/portal/replays"]
    assert (await one.ask("GET", "/portal/")).headers["location"] == "/portal/destinations"
    offered = {(page.method, page.path) for page in PAGES if page.customers}
    absent = [page for page in PAGES if (page.method, page.path) not in offered and page.path != "/"]
    assert len(absent) >= 20
    assert not {"/system", "/sources", "/rejected", "/charts", "/live"} & {path for _, path in offered}
    for page in absent:
        for path in candidates("/portal" + page.path, tenants.ids[MINE])[:3]:
            answer = await one.ask(page.method, path, None if page.method == "GET" else {})
            assert answer.status in (404, 405), (page.method, path, answer.status)
    for path in ("/portal/login", "/portal/api/v1/events", "/portal/metrics", "/portal/?token=x"):
        assert (await one.ask("GET", path)).status in (303, 404), path


async def test_every_link_of_a_page_leads_somewhere(tenants: Tenants) -> None:
    """Also none to what only the inbox's own people have."""
    one = await visitor(tenants)
    seen, waiting = set[str](), ["/portal/destinations"]
    while waiting and len(seen) < 150:
        path = waiting.pop(0)
        seen.add(path)
        text = (await one.ask("GET", path)).body.decode() if path == "/portal/" else await one.get(path)
        for found in re.findall(r'(?:href|hx-get)="(/[^"#]*)', text):
            to = unescape(found)
            assert to.startswith("/portal/"), (path, to)
            if to not in seen and to not in waiting and not to.startswith(SKIPPED) and to != FILLED:
                waiting.append(to)
        assert "oncehook worker" not in text
        assert "Discard" not in re.sub(r"Discarded so far|Discarded", "", text)
    assert {"/portal/dead", "/portal/destinations/new", "/portal/replays"} <= seen
    assert any("/replays/plan" in path for path in seen)


async def test_a_customers_cookie_opens_nothing_else(tenants: Tenants) -> None:
    one = await visitor(tenants)
    document = json.loads((await one.ask("GET", "/openapi.json")).body)
    asked = 0
    for method, path in paths_of(document):
        for whose in (MINE, OTHER):
            for target in candidates(f"/api/v1{path}", tenants.ids[whose])[:4]:
                answer = await one.ask(method, target)
                assert answer.status in (401, 404), (method, target, answer.body)
                assert CANARY not in answer.body.decode().replace(target, "")
                asked += 1
    assert asked > 100
    # its session under the name of the dashboard's cookie, and a session of the dashboard here
    name = one.cookie.partition("=")[2]
    sessions = DashboardSessions(tenants.inbox.store)
    stranger = Visitor(one.app, f"{await sessions.cookie()}={name}")
    assert (await stranger.ask("GET", "/events")).status == 303
    admin = await sessions.begin("admin", "admin", Access().tokens_digest)
    operator = Visitor(one.app, f"{await sessions.cookie()}={admin}")
    assert (await operator.ask("GET", "/events")).status == 200
    operator.cookie = f"{await DashboardSessions(tenants.inbox.store, '_portal').cookie()}={admin}"
    assert (await operator.ask("GET", "/portal/events")).status == 401


# -- leaks -------------------------------------------------------------------------------------


async def test_no_page_shows_a_byte_of_anothers(tenants: Tenants) -> None:
    one, theirs, asked = await visitor(tenants), tenants.ids[OTHER], 0
    before = await seen_by_other(tenants)
    form = {"url": "https://example.com/x", "name": f"to-{CANARY}", "query": f"account:{OTHER}", "plan": "x"}
    for page in CUSTOMERS:
        paths = candidates("/portal" + page.path, theirs)
        queries = ["", f"?query=account:{OTHER}", f"?query=destination:to-{CANARY}", f"?ids={theirs['delivery'][0]}"]
        queries += [f"?destination=to-{CANARY}", "?query=same", f"?cause=x&destination=to-{CANARY}"]
        for path in [path + query for path in paths for query in (queries if "{" not in page.path else [""])]:
            answer = await one.ask(page.method, path, None if page.method == "GET" else form)
            asked += 1
            text = without_said(unquote(unescape(answer.body.decode())), path, form)
            assert answer.status < 500, (page.method, path, text)
            assert CANARY not in text, (page.method, path)
            for id_ in (*theirs["event"], *theirs["delivery"], *theirs["replay"]):
                assert id_ not in text or id_ in path, (page.method, path, id_)
            if "{" in page.path:
                assert answer.status in (400, 404, 409), (page.method, path, answer.status)
    assert asked > 150
    assert await seen_by_other(tenants) == before


def without_said(text: str, path: str, form: Mapping[str, str]) -> str:
    """An answer without the names that the caller itself said; a name that is only part of another stays."""
    for name in set(re.findall(rf"[\w-]*{CANARY}[\w-]*", " ".join([path, *form.values()]))):
        text = re.sub(rf"(?<![\w-]){name}(?![\w-])", "", text)
    return text


async def test_anothers_is_refused_like_what_never_was(tenants: Tenants) -> None:
    one, theirs, none, compared = await visitor(tenants), tenants.ids[OTHER], nobody(), 0
    for page in CUSTOMERS:
        if page.path.count("{") != 1:
            continue
        for kind, ids in none.items():
            for their_id, nobodys_id in zip(theirs[kind], ids, strict=False):
                place = re.findall(r"\{\w+\}", page.path)[0]
                form = None if page.method == "GET" else {"overlap": "1h"}
                real, made_up = [
                    await one.ask(page.method, "/portal" + page.path.replace(place, id_), form)
                    for id_ in (their_id, nobodys_id)
                ]
                assert (real.status, tidy(real)) == (made_up.status, tidy(made_up)), (page.path, their_id)
                compared += 1
    assert compared > 100


def tidy(answer: Answer) -> str:
    return re.sub(r'data-now="[^"]*"', "", clean(answer.body.decode()))


async def test_what_goes_to_the_servers_own_destinations_is_no_customers(tenants: Tenants) -> None:
    """Its errors tell of the server, and a replay would run its handlers again."""
    inbox = tenants.inbox
    event_id = await inbox.emit("shop", "internal.made", {}, key="k-17", account=MINE)
    await inbox.drain()
    (delivery,) = (await inbox.admin.deliveries(Filter(destination="internal", type="internal.made"))).items
    one = await visitor(tenants)
    pages = ("/events", "/dead", "/destinations", "/replays", "/events?query=status:dead", "/events/complete?query=to:")
    for path in (*pages, "/replays/plan?query=status:dead"):
        text = await one.get("/portal" + path)
        assert "server&#39;s own words" not in text
        assert not re.search(r"\binternal\b(?!\.made)", text.replace("destination=internal", "")), path
    for path in (f"/deliveries/{delivery.id}/retry", "/dead/group?destination=internal"):
        assert (await one.ask("GET", "/portal" + path)).status == 404
    both = (await inbox.admin.event(event_id_of(event_id))).deliveries
    assert {each.destination for each in both} == {"internal", "to-mine42"}
    shown = await one.get(f"/portal/events/{event_id}?tab=deliveries")
    assert "to-mine42" in shown
    assert not re.search(r"\binternal\b(?!\.made)", shown)
    plan = await one.ask("GET", f"/portal/replays/plan?ids={delivery.id}")
    assert not re.search(r"\binternal\b(?!\.made)", plan.body.decode())
    assert "Replay 1 delivery" not in plan.body.decode()
    counted = [page for page in (await one.get("/portal/dead")).split("\n") if "failed for good" in page]
    mine = await inbox.admin.deliveries(Filter(account=MINE, destination="to-mine42", status=DeliveryStatus.dead))
    assert f"{len(mine.items)} deliver" in counted[0]


def event_id_of(text: str) -> EventId:
    return EventId(bytes.fromhex(text.removeprefix("evt_")))


# -- what a customer does ----------------------------------------------------------------------


async def test_a_customer_makes_changes_rotates_and_deletes_a_destination(tenants: Tenants) -> None:
    one = await visitor(tenants)
    form = {"name": "hook-9", "url": "https://ana.example/hooks", "sign": "generate", "subscribe": "order.*"}
    made = await one.ask("POST", "/portal/destinations", form)
    assert made.status == 201
    (secret,) = set(re.findall(r"whsec_[A-Za-z0-9+/=]{40,}", unescape(made.body.decode())))
    stored = await tenants.inbox.define.get("destination", "hook-9")
    assert stored.account == MINE
    changed = {"url": "https://ana.example/other", "subscribe": "order.*", "shown": "url,subscribe,account"}
    assert (await one.ask("POST", "/portal/destinations/hook-9/define", changed)).status == 303
    assert (await tenants.inbox.define.get("destination", "hook-9")).account == MINE
    rotated = await one.ask("POST", "/portal/destinations/hook-9/rotate", {"sign": "generate", "overlap": "1h"})
    assert rotated.status == 200
    assert secret not in unescape(rotated.body.decode())
    assert (await one.ask("POST", "/portal/destinations/hook-9/disable", {})).status == 303
    assert (await one.ask("POST", "/portal/destinations/hook-9/delete", {})).status == 303
    acts = [entry.act for entry in await tenants.inbox.admin.audit(limit=50) if entry.actor == f"portal {MINE}"]
    assert acts == ["delete", "disable", "rotate", "change", "create", "login"]


async def test_a_customer_with_many_destinations_sees_the_deliveries_to_all(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MOST_STORED", 3)
    define = tenants.inbox.define.by("ann", MINE)
    for n in range(7):
        await define.destination(f"many-{n}", url="https://example.com/", account=MINE)
    narrowed = await tenants.inbox.admin.within_account(MINE).within_own_destinations()
    assert {f"many-{n}" for n in range(7)} <= (narrowed.scope.destinations or set())


@pytest.mark.parametrize(
    "more",
    [
        "allow_private = true",
        'allow_private = ["10.0.0.0/8"]',
        'headers = { X-Key = { env = "HOME" } }',
        'ca = "/etc/ssl/x.pem"',
        'sign = { env = "HOME" }',
        'sign = { file = "/etc/passwd" }',
        'allow_hosts = ["internal.example"]',
        f'account = "{OTHER}"',
    ],
)
async def test_nothing_that_reaches_into_the_server_can_be_set(tenants: Tenants, more: str) -> None:
    one = await visitor(tenants)
    form = {"name": "hook-9", "url": "https://ana.example/hooks", "more": more}
    answer = await one.ask("POST", "/portal/destinations", form)
    assert answer.status == 403, answer.body.decode()
    form = {"url": "https://ana.example/hooks", "more": more, "shown": "url"}
    assert (await one.ask("POST", "/portal/destinations/stored-mine42/define", form)).status == 403
    assert not await tenants.inbox.store.find_definitions(Noun.destination, ["hook-9"])


async def test_a_customer_replays_a_dead_letter(tenants: Tenants) -> None:
    inbox = tenants.inbox
    event_id = await inbox.emit("app", "fresh.made", {"n": 1}, key="fresh", account=MINE)
    await inbox.drain()
    one = await visitor(tenants)
    (delivery,) = (await inbox.admin.deliveries(Filter(event_id=event_id_of(event_id)))).items
    shown = await one.get(f"/portal/replays/plan?ids={delivery.id}")
    (plan,) = set(re.findall(r'name="plan" value="([^"]+)"', shown))
    answer = await one.ask("POST", "/portal/replays", {"plan": unescape(plan), "reason": "again"})
    assert answer.status == 303, answer.body.decode()
    assert answer.headers["location"].startswith("/portal/")
    await inbox.drain()
    (again,) = (await inbox.admin.deliveries(Filter(event_id=event_id_of(event_id)))).items
    assert again.run == 2


# -- in a frame --------------------------------------------------------------------------------


async def test_no_site_frames_the_portal_unless_it_is_named(tenants: Tenants) -> None:
    for one, policy in (
        (await visitor(tenants), "frame-ancestors 'none'"),
        (
            await visitor(tenants, frame_ancestors=(SITE, "https://b.example")),
            f"frame-ancestors {SITE} https://b.example",
        ),
    ):
        for path in ("/portal/destinations", "/portal/unknown", path_of(tenants.inbox.portal_link(MINE))):
            answer = await one.ask("GET", path)
            assert answer.headers["content-security-policy"].endswith(policy)
            assert answer.headers.get("x-frame-options") == ("DENY" if "none" in policy else None)
        assert "DENY" in (await one.ask("GET", "/login")).headers["x-frame-options"]  # the dashboard beside it


@pytest.mark.parametrize(
    ("sites", "dest", "proto", "kind"),
    [
        ((SITE,), "iframe", "https", "SameSite=None; Partitioned"),
        ((SITE,), "document", "https", "SameSite=strict"),
        ((), "iframe", "https", "SameSite=strict"),
        ((SITE,), "iframe", "http", "SameSite=strict"),
    ],
)
async def test_the_cookie_goes_into_frames_of_named_sites_only(
    tenants: Tenants, sites: tuple[str, ...], dest: str, proto: str, kind: str
) -> None:
    app = app_of(tenants, frame_ancestors=sites, trusted=(ip_network("203.0.113.0/24"),))
    one = Visitor(app, headers={"sec-fetch-dest": dest, "x-forwarded-proto": proto})
    answer = await one.enter(path_of(tenants.inbox.portal_link(MINE)))
    cookie = answer.headers["set-cookie"]
    assert kind in cookie
    assert "HttpOnly" in cookie
    assert "Path=/portal" in cookie
    assert ("Secure" in cookie) == (proto == "https")


# -- who may make links --------------------------------------------------------------------------


async def test_links_are_made_by_who_sees_at_least_as_much(tenants: Tenants) -> None:
    status, text = await tenants.ask("", "POST", f"/accounts/{MINE}/portal", {"name": "ana", "expires": "1h"})
    made = json.loads(text)
    assert (status, made["account"]) == (201, MINE)
    one = Visitor(app_of(tenants))
    assert (await one.enter(path_of(made["url"]))).status == 303
    assert "mine42" in await one.get("/portal/destinations")
    assert (await tenants.ask(MINE, "POST", f"/accounts/{MINE}/portal", {}))[0] == 201
    assert (await tenants.ask(MINE, "POST", f"/accounts/{OTHER}/portal", {}))[0] == 404
    assert (await tenants.ask("", "POST", f"/accounts/{MINE}/portal", {"expires": "2d"}))[0] == 400
    entries = [entry for entry in await tenants.inbox.admin.audit(limit=20) if entry.act == "portal"]
    assert {(entry.actor, entry.target) for entry in entries} == {("admin", MINE), (f"of {MINE}", MINE)}
    for less in (
        Identity("s", Role.admin, sources=frozenset({"app"})),
        Identity("p", Role.admin, payloads=False),
    ):
        with pytest.raises(Exception, match="you see less"):
            await less.admin(tenants.inbox.admin).portal_link(MINE, actor="x")
