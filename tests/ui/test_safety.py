"""Who comes in and what they may do (S29, S31, S32); and that a stranger's text is never anything but text (S30)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from oncehook import clock
from oncehook.web import auth
from oncehook.web.auth import SESSION_SECONDS, Role
from oncehook.web.dashboard import PAGES
from tests.ui.conftest import Enter, opened
from tests.ui.house import HIDDEN, TOKENS, House
from tests.ui.test_live import watching

OURS = {"sec-fetch-site": "same-origin"}
BEARER = {"authorization": f"Bearer {TOKENS['admin']}"}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house with one dead letter and one replay in it."""
    with opened(tmp_path_factory.mktemp("shop")) as made:
        made.order("dead", digital=True)
        made.settle()
        yield made


# -- coming in ---------------------------------------------------------------------------------


def test_a_session_is_begun_rotated_and_ended(shop: House) -> None:
    first = shop.ask("POST", "/login", form={"password": TOKENS["admin"]}, headers=OURS)
    cookie = first.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert len(cookie.partition(";")[0].partition("=")[2]) == 64
    old = cookie.partition(";")[0]
    assert shop.ask("GET", "/", headers={"cookie": old}).status == 200
    again = shop.ask("POST", "/login", form={"password": TOKENS["admin"]}, headers={**OURS, "cookie": old})
    new = again.headers["set-cookie"].partition(";")[0]
    assert "Log in" in shop.ask("GET", "/", headers={"cookie": old}).text
    assert shop.ask("POST", "/logout", headers={**OURS, "cookie": new}, form={}).status == 303
    assert "Log in" in shop.ask("GET", "/", headers={"cookie": new}).text


def test_a_session_ends_by_itself(shop: House) -> None:
    cookie = {"cookie": shop.login()}
    clock.forward(SESSION_SECONDS + 1)
    try:
        assert shop.ask("GET", "/events", headers=cookie).status == 303
    finally:
        clock.forward(-SESSION_SECONDS - 1)


def test_a_cookie_is_secure_behind_a_proxy_that_ends_tls(tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        plain = house.ask("POST", "/login", form={"password": TOKENS["admin"]}, headers=OURS)
        assert "Secure" not in plain.headers["set-cookie"]
        house.door._trusted = [ip_network("127.0.0.0/8")]
        headers = {**OURS, "x-forwarded-proto": "https"}
        proxied = house.ask("POST", "/login", form={"password": TOKENS["admin"]}, headers=headers)
        assert "Secure" in proxied.headers["set-cookie"]


def test_the_link_works_once_and_only_from_here(own_house: House, enter: Enter) -> None:
    link = own_house.door.link()
    for stranger in ({"x-forwarded-for": "203.0.113.9"}, {"host": "evil.example"}, {"via": "1.1 tunnel"}):
        assert own_house.ask("GET", link, headers=stranger).status == 401
    page = enter(own_house, None)
    page.goto(own_house.url + link)
    expect(page).to_have_title("Overview · oncehook")
    assert "token" not in page.url
    assert own_house.ask("GET", link).status == 401


def test_the_link_ends_after_ten_minutes(own_house: House) -> None:
    for seconds, status in ((599, 303), (601, 401)):
        link = own_house.door.link()
        clock.forward(seconds)
        try:
            assert own_house.ask("GET", link).status == status
        finally:
            clock.forward(-seconds)


def test_a_new_link_is_printed_not_shown(own_house: House, enter: Enter) -> None:
    page = enter(own_house, None)
    page.goto(own_house.url)
    page.get_by_role("button", name="Print a login link").click()
    expect(page.get_by_role("status")).to_contain_text("in the terminal")
    (link,) = own_house.links
    assert link.partition("=")[2] not in page.content()
    page.goto(own_house.url + link)
    expect(page).to_have_title("Overview · oncehook")
    asked = own_house.ask("POST", "/login/link", form={}, headers={**OURS, "x-forwarded-for": "203.0.113.9"})
    assert (asked.status, len(own_house.links)) == (403, 1)


def test_the_page_that_was_wanted_is_there_after_the_login(own_house: House, enter: Enter) -> None:
    wanted = "/events?query=status%3Adead"
    page = enter(own_house, None)
    page.goto(own_house.url + wanted)
    page.get_by_label("Password").fill(TOKENS["admin"])
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(own_house.url + wanted)
    page = enter(own_house, None)
    page.goto(own_house.url + wanted)
    page.get_by_role("button", name="Print a login link").click()
    expect(page.get_by_role("status")).to_contain_text("in the terminal")
    page.goto(own_house.url + own_house.links[-1])
    expect(page).to_have_url(own_house.url + wanted)
    for elsewhere in ("//evil.example/x", "https://evil.example", "/login", "/\\evil.example"):
        form = {"password": TOKENS["admin"]}
        answer = own_house.ask("POST", f"/login?{urlencode({'to': elsewhere})}", form=form, headers=OURS)
        assert answer.headers["location"] == "/"


def test_guessing_is_slow(own_house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [clock.steady()]  # the door's own clock: it stands still while it is tried
    monkeypatch.setattr(auth, "clock", SimpleNamespace(**{**vars(clock), "steady": lambda: times[-1]}))
    for _ in range(5):
        assert own_house.ask("POST", "/login", form={"password": "guess"}, headers=OURS).status == 401
    refused = own_house.ask("POST", "/login", form={"password": TOKENS["admin"]}, headers=OURS)
    assert (refused.status, int(refused.headers["retry-after"]) > 0) == (429, True)
    times.append(times[-1] + 3)
    assert own_house.ask("POST", "/login", form={"password": TOKENS["admin"]}, headers=OURS).status == 303


def test_the_local_token_is_no_password(shop: House) -> None:
    answer = shop.ask("POST", "/login", form={"password": shop.inbox.local_token}, headers=OURS)
    assert answer.status == 401


def test_pages_want_a_session_and_the_api_a_token(shop: House) -> None:
    assert shop.ask("GET", "/events", headers=BEARER).headers["location"] == "/login?to=%2Fevents"
    assert shop.ask("GET", "/api/v1/events", headers={"cookie": shop.login()}).status == 401
    assert shop.ask("GET", "/api/v1/events", headers=BEARER).status == 200


# -- what they may do --------------------------------------------------------------------------


def places(house: House) -> Iterator[tuple[str, str, Role]]:
    """Every route there is, with ids that exist, and the role it needs."""
    dead, *_ = house.do(house.inbox.admin.deliveries(house.inbox.admin.read("status:dead"))).items
    ids = {"events": str(dead.event_id), "deliveries": str(dead.id)}
    for page in PAGES:
        kind = page.path.split("/")[1]
        path = page.path.replace("{id}", ids.get(kind, f"rpl_{'0' * 32}")).replace("{name}", "ship")
        yield page.method, path, page.role


@pytest.mark.parametrize("role", [None, "viewer", "operator", "admin"])
def test_every_route_for_every_role(shop: House, role: str | None) -> None:
    cookie = {} if role is None else {"cookie": shop.login(role)}
    for method, path, needed in places(shop):
        if path == "/ui/stream" or (method == "POST" and role in ("operator", "admin")):
            continue  # what they do is tested with the acts
        answer = shop.ask(method, path, form={} if method == "POST" else None, headers={**OURS, **cookie})
        where = f"{role} {method} {path}"
        if role is None:
            assert answer.status in (200, 303), where
            assert "Log in" in answer.text or answer.headers["location"].partition("?")[0] == "/login", where
        elif Role[role] < needed:
            assert answer.status == 403, where
        else:
            assert answer.status in (200, 400, 404), where  # 400 and 404: without the parameters of a real visit
    assert shop.levels()["ship"].dead == 1


def test_a_stream_is_not_for_everybody(shop: House) -> None:
    assert shop.ask("GET", "/ui/stream").status == 303


def test_a_viewer_sees_no_acts(shop: House, enter: Enter) -> None:
    (dead,) = shop.do(shop.inbox.admin.deliveries(shop.inbox.admin.read("status:dead"))).items
    page = enter(shop, "viewer")
    for path in ("/dead", f"/events/{dead.event_id}?tab=deliveries", "/events", "/destinations"):
        page.goto(shop.url + path)
        expect(page.locator("main").get_by_text(re.compile("Replay|Discard…|Pause…"))).to_have_count(0)


def test_whoever_may_not_do_that_can_come_as_somebody_else(shop: House, enter: Enter) -> None:
    page = enter(shop, "viewer")
    page.goto(shop.url + "/destinations/ship/pause")
    expect(page.locator("main")).to_contain_text("That needs the role operator; yours is viewer.")
    page.get_by_role("button", name="Log in as somebody else").click()
    expect(page.get_by_label("Password")).to_be_visible()
    stranger = shop.ask("POST", "/login/link", headers={**OURS, "x-forwarded-for": "192.0.2.1"})
    assert (stranger.status, re.findall(r'<a [^>]*href="([^"]*)"', stranger.text)) == (403, ["/login"])


def test_an_unguessable_address_is_not_for_viewers(shop: House) -> None:
    for role, is_shown in (("viewer", False), ("operator", True)):
        assert (HIDDEN in shop.ask("GET", "/sources", headers={"cookie": shop.login(role)}).text) == is_shown


def test_a_change_from_another_site_is_refused(shop: House, enter: Enter) -> None:
    cookie = {"cookie": shop.login("operator")}
    (dead,) = shop.do(shop.inbox.admin.deliveries(shop.inbox.admin.read("status:dead"))).items
    path = f"/deliveries/{dead.id}/discard"
    for strange in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {},
    ):
        answer = shop.ask("POST", path, form={"reason": "mischief"}, headers={**cookie, **strange})
        assert answer.status == 403, strange
    for place in ("/login", "/logout", "/login/link"):
        assert shop.ask("POST", place, form={}, headers={**cookie, "origin": "https://evil.example"}).status == 403
    assert shop.levels()["ship"].dead == 1


def test_a_form_on_another_page_does_nothing(shop: House, enter: Enter) -> None:
    """In a real browser: another origin's page sends a form to us, with the visitor's session at hand."""
    (dead,) = shop.do(shop.inbox.admin.deliveries(shop.inbox.admin.read("status:dead"))).items
    page = enter(shop, "operator")
    target = f"{shop.url}/deliveries/{dead.id}/discard"
    form = f"<form id=f method=post action='{target}'><input name=reason value=x></form>"
    page.route("http://evil.example/", lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto("http://evil.example/")
    with page.expect_navigation():
        page.evaluate("document.getElementById('f').submit()")
    assert shop.levels()["ship"].dead == 1


def test_every_answer_forbids_what_it_does_not_need(shop: House) -> None:
    cookie = {"cookie": shop.login()}
    for method, path, _ in places(shop):
        if method == "GET" and path != "/ui/stream":
            headers = shop.ask("GET", path, headers=cookie).headers
            policy = headers["content-security-policy"]
            # Bytes and JSON are data, and get the stricter policy; every page has the other one.
            is_data = path.endswith(("/body", "/json"))
            assert policy == "default-src 'none'; sandbox" if is_data else "default-src 'self'" in policy, path
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
    body = next(path for _, path, _ in places(shop) if path.endswith("/body"))
    saved = shop.ask("GET", body, headers=cookie).headers
    assert saved["content-disposition"].startswith("attachment")
    assert saved["content-type"] == "application/octet-stream"


# -- a stranger's text -------------------------------------------------------------------------

CORPUS = (
    "<script>window.xss=1</script>",
    '"><img src=x onerror="window.xss=1">',
    "'><svg/onload=window.xss=1>",
    "</code></pre></textarea></title><script>window.xss=1</script>",
    "javascript:window.xss=1",
    "{{ 7*7 }}{% raise %}",
    "<a href='javascript:window.xss=1' hx-get='/logout' hx-trigger=load>x</a>",
    "\u2028\r\nevent: tick\r\ndata: <script>window.xss=1</script>\r\n\r\n",
)


def clean(page: Page, where: str) -> None:
    """Nothing of the corpus has become an element, an attribute or a script."""
    found = page.evaluate(
        """() => [window.xss, ...document.querySelectorAll(
          'script:not([src]), img, svg[onload], [onerror], [onload], a[href^="javascript:"], [hx-trigger=load]'
        )].filter(Boolean).map((one) => one.outerHTML || String(one))"""
    )
    assert not found, f"{where}: {found}"


def test_a_strangers_text_is_text_everywhere(own_house: House, enter: Enter) -> None:
    house = own_house
    admin = house.inbox.admin
    page = enter(house)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    watching(page, house, "/live")
    events = []
    for n, text in enumerate(CORPUS):
        fields = {"type": text, "order": text, text: [text, {text: text}], "digital": n % 2 == 0, "note": text}
        events.append(house.receive("orders", body={"id": f"{n}{text}", **fields})[0])
        house.receive("orders", body={"id": f"{n}{text}", **fields, "extra": text})
        head = {"content-type": "text/html", "x-evil": text.encode("unicode_escape").decode("latin-1")}
        house.do(house.inbox.receive("orders", head, json.dumps({"id": f"h{n}", "type": "t"}).encode()))
        house.do(house.inbox.receive(text, {}, b"{}"))
    house.settle()
    for one in house.do(admin.deliveries(admin.read("status:dead"))).items[:2]:
        house.do(admin.discard(one.id, actor=CORPUS[1], reason=CORPUS[0]))
    for one in house.do(admin.deliveries(admin.read("status:dead"))).items:
        house.do(admin.replay_one(one.id, actor=CORPUS[2], reason=CORPUS[1]))
    house.do(admin.pause("ship", actor=CORPUS[1], reason=CORPUS[0]))
    house.do(admin.resume("ship", actor=CORPUS[1]))
    house.do(admin.pause("n8n", actor=CORPUS[1], reason=CORPUS[3]))
    expect(page.locator("[data-feed] tbody tr").nth(10)).to_be_attached()
    clean(page, "live")
    paths = ["/", "/events", "/dead", "/replays", "/sources", "/destinations", "/live", "/system"]
    paths += ["/replays/plan?query=source:orders&force=1", "/dead/discard?query=status:dead"]
    for event_id in (events[0], events[-1]):
        paths += [f"/events/{event_id}?tab={tab}" for tab in ("body", "headers", "arrivals", "deliveries", "subject")]
        paths += [f"/events/{event_id}?view=raw", f"/events/{event_id}?view=hex"]
    for path in paths:
        page.goto(house.url + path)
        clean(page, path)
    for text in CORPUS:
        page.goto(house.url + "/events")
        page.locator("#q").fill(text.splitlines()[0])
        page.locator("#q").press("Enter")
        page.wait_for_url("**/events?query=*")
        clean(page, text)
    for place in ("/events/<script>", "/destinations/<img src=x>/pause", "/live?kind=<script>", "/?said=<script>"):
        page.goto(house.url + place)
        clean(page, place)


# -- under a prefix, and without script --------------------------------------------------------


def test_it_lives_under_a_prefix_inside_another_application(tmp_path: Path, enter: Enter) -> None:
    with opened(tmp_path, prefix="/staff/inbox", authorize=lambda request: "operator") as house:
        house.order("one", digital=True)
        house.settle()
        page = enter(house, None)
        strays: list[str] = []
        page.on("request", lambda request: strays.append(request.url) if house.prefix not in request.url else None)
        page.goto(house.url + "/")
        page.wait_for_selector("oh-chart canvas")
        for name in ("Events", "Dead letters", "Replays", "Sources", "Destinations", "Live", "System"):
            page.locator("#rail").get_by_role("link", name=name).click()
            expect(page.get_by_role("heading", level=1, name=name, exact=True)).to_be_visible()
        page.goto(house.url + "/dead")
        house.mood.ship = "mended"
        page.locator(".group tbody").get_by_role("link", name="Replay…").click()
        page.get_by_role("button", name="Replay 1 delivery to ship").click()
        expect(page.locator("#head .state.done")).to_be_visible()
        assert house.ask("GET", "/login").status == 404
        assert not strays
        page.close()  # before its server: a page that loses its live events says so in its console


def test_the_host_application_decides(tmp_path: Path) -> None:
    roles: list[str | None] = [None]
    with opened(tmp_path, prefix="/inbox", authorize=lambda request: roles[0]) as house:
        for role, status in ((None, 403), ("owner", 403), ("viewer", 200)):
            roles[0] = role
            assert house.ask("GET", "/events").status == status
        assert house.ask("POST", "/destinations/ship/pause", form={}, headers=OURS).status == 403
        roles[0] = "operator"
        assert house.ask("POST", "/destinations/ship/pause", form={}).status == 403
        assert house.ask("POST", "/destinations/ship/pause", form={}, headers=OURS).status == 303
        assert house.levels()["ship"].paused_at is not None


def test_everything_works_without_script(own_house: House, enter: Enter) -> None:
    own_house.order("one", digital=True)
    own_house.settle()
    page = enter(own_house, None, java_script_enabled=False)
    page.goto(own_house.url)
    page.get_by_label("Password").fill(TOKENS["operator"])
    page.get_by_role("button", name="Log in").click()
    page.locator("#rail").get_by_role("link", name="Events").click()
    page.locator("#q").fill("status:dead")
    page.locator("#q").press("Enter")
    expect(page.locator("#list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="order.paid").click()
    page.get_by_role("link", name="Deliveries").click()
    expect(page.locator("#detail")).to_contain_text("no 'shipping_address'")
    own_house.mood.ship = "mended"
    page.locator("#head").get_by_role("link", name="Replay…").click()
    page.get_by_label("Reason").fill("mended")
    page.get_by_role("button", name="Replay 1 delivery to ship").click()
    expect(page.locator(".toast")).to_contain_text("Replay started")
    own_house.settle()
    page.reload()
    expect(page.locator("#head .state.done")).to_be_visible()
    for path in ("/", "/dead", "/replays", "/sources", "/destinations", "/live", "/system"):
        page.goto(own_house.url + path)
        expect(page.locator("h1").first).to_be_visible()
    page.goto(own_house.url + "/destinations/ship/pause")
    page.get_by_role("button", name="Pause ship").click()
    page.locator("#ship").get_by_role("button", name="Resume").click()
    page.wait_for_load_state()  # because without its style sheet the page shows the phone's button, too
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Password")).to_be_visible()
