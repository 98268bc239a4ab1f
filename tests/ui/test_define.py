"""Definitions made in the browser: three clicks to an address, a secret shown once, routes, and the way back."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Error, Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from oncehook import Person, clock
from oncehook.model import Filter
from oncehook.web.dashboard.setup import CARDS, LISTED
from tests.ui.conftest import Enter
from tests.ui.house import House
from tests.ui.test_acts import OURS
from tests.ui.test_pages import PHONE, axed

SIGNED = "Standard Webhooks and Svix"


class OpenHouse(House):
    """A house that receives hooks over HTTP, at the address that its dashboard shows."""

    def _app(self) -> Starlette:
        app = super()._app()
        app.routes.insert(0, Mount("/in", self.inbox.asgi()))
        return app


@pytest.fixture
def open_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenHouse]:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())
    house = OpenHouse(tmp_path)
    try:
        yield house
    finally:
        house.close()


def post_signed(house: House, address: str, secret: str, number: int) -> int:
    """Post a hook as its sender would, signed with what the page has shown; return the status."""
    body = json.dumps({"type": "order.paid", "n": number}).encode()
    sent_id, at = f"msg_{number}", str(int(clock.now_utc().timestamp()))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.new(key, f"{sent_id}.{at}.".encode() + body, hashlib.sha256).digest()).decode()
    headers = {"webhook-id": sent_id, "webhook-timestamp": at, "webhook-signature": f"v1,{signature}"}
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=90)
    connection.request("POST", "/" + address.split("/", 3)[3], body, {"content-type": "application/json", **headers})
    status = connection.getresponse().status
    connection.close()
    return status


def shown(page: Page) -> tuple[str, str]:
    """The address and the secret that a page shows."""
    codes = page.locator(".sheet.page .cmd code").all_inner_texts()
    assert len(codes) == 2, codes
    return codes[0], codes[1]


def make_source(page: Page, house: House) -> tuple[str, str]:
    page.goto(house.url + "/sources")
    page.get_by_role("link", name="New source…").click()
    page.get_by_role("link", name=SIGNED).click()
    page.get_by_role("button", name="Create source").click()
    expect(page.get_by_role("heading", name="standard-webhooks is ready")).to_be_visible()
    return shown(page)


@pytest.mark.parametrize("scripted", [True, False])
def test_three_clicks_to_a_source_that_takes_its_first_hook(
    open_house: OpenHouse, enter: Enter, scripted: bool
) -> None:
    page = enter(open_house, java_script_enabled=scripted)
    address, secret = make_source(page, open_house)
    assert address == f"{open_house.url}/in/standard-webhooks"
    assert secret.startswith("whsec_")
    assert secret not in page.url
    assert post_signed(open_house, address, secret, 1) == 200
    assert post_signed(open_house, address, "whsec_" + "A" * 32, 2) == 401
    page.get_by_role("link", name="Send a sample…").click()
    page.get_by_role("button", name="Send 1 sample to standard-webhooks").click()
    expect(page.get_by_role("heading", name="standard-webhooks answered 200")).to_be_visible()
    page.get_by_role("link", name="See the event").click()
    expect(page.locator("#head")).to_be_visible()
    found = open_house.do(open_house.inbox.admin.events(Filter(source="standard-webhooks")))
    assert len(found.items) == 2


def test_a_secret_is_in_one_answer_and_is_not_kept(open_house: OpenHouse) -> None:
    cookie = {"cookie": open_house.login("admin"), **OURS}
    form = {"preset": "standard-webhooks", "name": "trigger-4", "secret": "generate"}
    made = open_house.ask("POST", "/sources", form=form, headers=cookie)
    assert made.status == 201
    assert made.headers["cache-control"] == "no-store"
    (secret,) = set(re.findall(r"whsec_[A-Za-z0-9+/=]{40,}", made.text))
    assert re.search(r'hx-trigger="never"', made.text)  # a refresh would take it away
    for path in ("/sources", "/sources/trigger-4/define", "/system"):
        answer = open_house.ask("GET", path, headers=cookie)
        assert answer.status == 200
        assert secret not in answer.text
        assert "trigger-4" in answer.text
    again = open_house.ask("POST", "/sources", form=form, headers=cookie)
    assert again.status == 409
    assert "whsec_" not in again.text
    assert 'id="wrong-name"' in again.text


def test_rotating_with_an_overlap_refuses_nobody(open_house: OpenHouse, enter: Enter) -> None:
    page = enter(open_house)
    address, old = make_source(page, open_house)
    page.goto(open_house.url + "/sources")
    page.locator("#standard-webhooks").get_by_role("link", name="Change…").click()
    page.get_by_label("The old one stays valid for").select_option("1 hour")
    page.get_by_role("button", name="Rotate").click()
    expect(page.get_by_role("heading", name="standard-webhooks has a new secret")).to_be_visible()
    expect(page.locator(".sheet.page")).to_contain_text("nobody is refused")
    same, new = shown(page)
    assert (same, new != old) == (address, True)
    assert [post_signed(open_house, address, one, n) for n, one in enumerate((old, new, old, new))] == [200] * 4
    page.goto(open_house.url + "/sources/standard-webhooks/define")
    page.get_by_label("The old one stays valid for").select_option("not at all")
    page.get_by_role("button", name="Rotate").click()
    expect(page.get_by_role("heading", name="has a new secret")).to_be_visible()
    _, last = shown(page)
    assert [post_signed(open_house, address, one, 10 + n) for n, one in enumerate((new, last))] == [401, 200]
    page.goto(open_house.url + "/sources")
    with pytest.raises(Error, match="ERR_CACHE_MISS"):  # the browser has not kept the answer with the secret
        page.go_back()


def test_what_is_wrong_is_said_beside_its_field(open_house: OpenHouse, enter: Enter) -> None:
    page = enter(open_house)
    page.goto(open_house.url + "/sources/new?preset=generic")
    page.get_by_label("Name", exact=True).fill("stripe")
    page.get_by_role("button", name="Create source").click()
    expect(page.locator("#wrong-name")).to_contain_text("defined in the file or in the program")
    page.get_by_label("Name", exact=True).fill("mine")
    page.get_by_label("Secret", exact=True).fill("typed-by-hand")
    page.get_by_role("button", name="Create source").click()
    expect(page.locator("#wrong-key")).to_contain_text('the preset "generic" asks for it')
    expect(page.get_by_label("Key", exact=True)).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Secret", exact=True)).to_have_value("")  # not sent back
    page.get_by_label("Key", exact=True).fill("$.id")
    page.get_by_label("Secret", exact=True).fill("typed-by-hand")
    page.get_by_text("More settings").click()
    page.get_by_label("Others, one a line").fill('subjct = "$.a"')
    page.get_by_role("button", name="Create source").click()
    expect(page.locator(".sheet.page")).to_contain_text("subject")  # did you mean
    assert axed(page) == []
    page.get_by_label("Others, one a line").fill("this is no TOML")
    page.get_by_label("Secret", exact=True).fill("typed-by-hand")
    page.get_by_role("button", name="Create source").click()
    expect(page.locator("#wrong-more")).to_contain_text("cannot be read")
    page.get_by_label("Others, one a line").fill('max_body = "1MiB"')
    page.get_by_label("Secret", exact=True).fill("typed-by-hand")
    page.get_by_role("button", name="Create source").click()
    expect(page.get_by_role("heading", name="mine is ready")).to_be_visible()
    expect(page.locator("body")).not_to_contain_text("typed-by-hand")
    page.get_by_role("link", name="Back to sources").click()
    expect(page.locator("#mine")).to_be_visible()
    page.goto(open_house.url + "/sources/mine/define")
    expect(page.get_by_label("Others, one a line")).to_have_value('preset = "generic"\nmax_body = "1MiB"')
    page.get_by_label("Others, one a line").fill('preset = "generic"')
    page.get_by_text("More settings").scroll_into_view_if_needed()
    page.get_by_label("Subject").fill("$.order")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".toast")).to_contain_text("Changed")
    kept = open_house.do(open_house.inbox.admin.source("mine")).settings
    assert kept == {"preset": "generic", "key": "$.id", "subject": "$.order", "secret": "(set)"}


def test_without_a_key_no_secret_is_taken(tmp_path: Path) -> None:
    house = House(tmp_path)
    try:
        cookie = {"cookie": house.login("admin"), **OURS}
        form = {"preset": "stripe", "name": "mine", "secret": "generate"}
        answer = house.ask("POST", "/sources", form=form, headers=cookie)
        assert answer.status == 422
        assert 'id="wrong-secret"' in answer.text
        assert "openssl rand -base64 32" in answer.text
    finally:
        house.close()


def test_a_destination_is_made_changed_disabled_and_deleted_with_what_waits(
    open_house: OpenHouse, enter: Enter
) -> None:
    house, there = open_house, f"http://127.0.0.1:{open_house.theirs.server_port}/crm"
    page = enter(house)
    page.goto(house.url + "/destinations")
    page.get_by_role("link", name="New destination…").click()
    page.get_by_label("Name", exact=True).fill("crm")
    page.get_by_label("URL").fill(there)
    page.get_by_label("Subscribe to").fill("message_created, conversation.*")
    page.get_by_text("More settings").click()
    page.get_by_label("Others, one a line").fill("allow_private = true")
    page.get_by_role("button", name="Create destination").click()
    expect(page.get_by_role("heading", name="crm is ready")).to_be_visible()
    expect(page.locator("#secret")).to_contain_text("whsec_")
    page.get_by_role("link", name="Send test…").click()
    page.get_by_role("button", name="Send 1 test to crm").click()
    expect(page.get_by_role("heading", name="crm answered 200")).to_be_visible()
    kept = house.do(house.inbox.admin.destination("crm")).settings
    assert kept["subscribe"] == ["message_created", "conversation.*"]

    page.goto(house.url + "/destinations/crm/define")
    expect(page.get_by_label("Subscribe to")).to_have_value("message_created, conversation.*")
    page.get_by_label("Subscribe to").fill("message_created")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".toast")).to_contain_text("Changed")
    page.get_by_role("button", name="Disable").click()
    expect(page.locator(".toast")).to_contain_text("Disabled")
    page.goto(house.url + "/destinations")
    expect(page.locator("#crm")).to_contain_text("disabled")
    page.locator("#crm").get_by_role("link", name="Change…").click()
    page.get_by_role("button", name="Enable").click()
    expect(page.locator(".toast")).to_contain_text("Enabled")

    house.do(house.inbox.admin.pause("crm", actor="ana"))
    house.do(house.inbox.emit("app", "message_created", {"n": 1}, key="1"))
    page.get_by_role("link", name="Delete…").click()
    page.get_by_role("button", name="Delete crm").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("Deliveries still wait for crm.")
    assert axed(page) == []
    assert house.do(house.inbox.admin.destination("crm")).level.pending == 1
    page.get_by_label("Discard what waits, and its dead letters").check()
    page.get_by_role("button", name="Delete crm").click()
    expect(page.locator(".toast")).to_contain_text("Deleted")
    expect(page.locator("#crm")).to_have_count(0)


def test_who_is_no_admin_sees_no_button_and_is_refused(open_house: OpenHouse, enter: Enter) -> None:
    admin = {"cookie": open_house.login("admin"), **OURS}
    form = {"preset": "stripe", "name": "mine", "secret": "generate"}
    assert open_house.ask("POST", "/sources", form=form, headers=admin).status == 201
    for role in ("viewer", "operator"):
        page = enter(open_house, role)
        for noun in ("source", "destination"):
            page.goto(f"{open_house.url}/{noun}s")
            expect(page.get_by_role("link", name=re.compile("^(New|Change|Origin)"))).to_have_count(0)
        cookie = {"cookie": open_house.login(role), **OURS}
        for path in (
            "/sources/new",
            "/sources/mine/define",
            "/sources/mine/delete",
            "/destinations/new",
            "/routes/new",
        ):
            assert open_house.ask("GET", path, headers=cookie).status == 403
        for act in ("define", "rotate", "enable", "disable", "delete"):
            assert open_house.ask("POST", f"/sources/mine/{act}", form={}, headers=cookie).status == 403
        assert open_house.ask("POST", "/sources", form={**form, "name": "other"}, headers=cookie).status == 403
    elsewhere = {**admin, "sec-fetch-site": "cross-site"}
    for path in ("/sources", "/sources/mine/rotate", "/sources/mine/delete", "/destinations"):
        assert open_house.ask("POST", path, form=form, headers=elsewhere).status == 403
    assert open_house.do(open_house.inbox.admin.source("mine")).is_enabled


def test_what_a_program_defines_is_shown_and_not_edited(open_house: OpenHouse, enter: Enter) -> None:
    page = enter(open_house)
    for noun, name in (("source", "stripe"), ("destination", "n8n")):
        page.goto(f"{open_house.url}/{noun}s")
        page.locator(f"#{name}").get_by_role("link", name="Origin…").click()
        expect(page.locator(".sheet.page")).to_contain_text("A program defines it.")
        expect(page.locator(".sheet.page input, .sheet.page button")).to_have_count(0)
        cookie = {"cookie": open_house.login("admin"), **OURS}
        for act in ("define", "rotate", "disable", "delete"):
            answer = open_house.ask("POST", f"/{noun}s/{name}/{act}", form={}, headers=cookie)
            assert answer.status == 409, act
            assert "defined in the file or in the program" in answer.text


@pytest.mark.parametrize("scripted", [True, False])
def test_a_route_made_in_the_browser_leads_events_to_its_destination(
    open_house: OpenHouse, enter: Enter, scripted: bool
) -> None:
    house = open_house
    page = enter(house, java_script_enabled=scripted)
    page.goto(house.url + "/sources")
    page.locator("#partner").get_by_role("link", name="New route…").click()
    expect(page.get_by_label("From")).to_have_value("partner")
    offered = page.locator("#choices-to option").evaluate_all("(all) => all.map((one) => one.value)")
    assert set(offered) == {"n8n", "billing", "reply", "ship"}
    page.get_by_label("To", exact=True).fill("billing")
    page.get_by_label("Types").fill("order.paid, order.sent")
    page.get_by_text("More settings").click()
    page.get_by_label("Coalesce").select_option("yes")
    page.get_by_role("button", name="Create route").click()
    expect(page.locator(".toast")).to_contain_text("Created")
    (made,) = house.do(house.inbox.define.all("route"))
    row = page.locator(f"#{made.name}")
    expect(row).to_contain_text("order.paid | order.sent")
    expect(row).to_contain_text("coalesce = true")

    def deliver(key: str, type_: str) -> list[str]:
        (event,) = house.receive("partner", body={"id": key, "type": type_})
        house.settle()
        found = house.do(house.inbox.admin.deliveries(house.inbox.admin.read(f"event:{event}"))).items
        return [f"{one.destination} {one.status}" for one in found]

    assert deliver("p1", "order.paid") == ["billing done"]
    assert deliver("p2", "order.lost") == []
    page.goto(house.url + "/sources")
    expect(page.locator("#partner")).to_contain_text("to billing")

    page.goto(house.url + "/routes")
    row.get_by_role("link", name="Change…").click()
    expect(page.get_by_label("Types")).to_have_value("order.paid, order.sent")
    expect(page.get_by_label("Coalesce")).to_have_value("true")
    page.get_by_label("Types").fill("")
    page.get_by_label("Coalesce").select_option("")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".toast")).to_contain_text("Changed")
    assert house.do(house.inbox.admin.route(made.name)).settings == {"from": "partner", "to": "billing"}
    assert deliver("p3", "order.lost") == ["billing done"]
    page.get_by_role("button", name="Disable").click()
    expect(page.locator(".toast")).to_contain_text("Disabled")
    assert deliver("p4", "order.lost") == []
    page.get_by_role("button", name="Enable").click()
    expect(page.locator(".toast")).to_contain_text("Enabled")
    page.get_by_role("link", name="Delete…").click()
    page.get_by_role("button", name="Delete partner → billing").click()
    expect(page.locator(".toast")).to_contain_text("Deleted")
    expect(row).to_have_count(0)
    assert house.do(house.inbox.define.all("route")) == []
    assert house.ask("GET", f"/routes/{made.name}/define", headers={"cookie": house.login()}).status == 404


def test_what_is_wrong_with_a_route_is_said_beside_its_field(open_house: OpenHouse, enter: Enter) -> None:
    cookie = {"cookie": open_house.login("admin"), **OURS}
    empty = open_house.ask("POST", "/routes", form={}, headers=cookie)
    assert empty.status == 422
    assert re.findall(r'class="wrong" id="([^"]+)"', empty.text) == ["wrong-from", "wrong-to"]
    page = enter(open_house)
    page.goto(open_house.url + "/routes/new?from=stripe&to=shp")
    page.get_by_role("button", name="Create route").click()
    expect(page.locator("#wrong-to")).to_contain_text('there is no destination "shp"; did you mean "ship"?')
    expect(page.get_by_label("To", exact=True)).to_have_attribute("aria-invalid", "true")
    page.get_by_label("To", exact=True).fill("ship")
    page.get_by_label("Types").fill("charge.*")
    page.get_by_text("More settings").click()
    page.get_by_label("Others, one a line").fill('when = { "$.amount" = ">1000" }')
    page.get_by_role("button", name="Create route").click()
    expect(page.locator("#wrong-when")).to_contain_text("when is given twice")
    page.get_by_label("Types").fill("")
    page.get_by_label("Others, one a line").fill('when = { "$.amount[" = ">1000" }')
    page.get_by_role("button", name="Create route").click()
    expect(page.locator("#wrong-when")).to_contain_text("is not a JSONPath")
    assert axed(page) == []
    page.get_by_label("Others, one a line").fill('when = { "$.amount" = ">1000" }')
    page.get_by_role("button", name="Create route").click()
    expect(page.locator("#list")).to_contain_text("$.amount >1000")
    page.get_by_role("link", name="Change…").click()
    expect(page.get_by_label("Others, one a line")).to_have_value('when = { "$.amount" = ">1000" }')
    forged = {"from": "stripe", "to": "ship", "priority": "urgent"}
    refused = open_house.ask("POST", "/routes", form=forged, headers=cookie)
    assert (refused.status, 'id="wrong-priority"' in refused.text) == (422, True)


def test_routes_of_a_program_are_shown_with_their_origin_and_not_edited(open_house: OpenHouse, enter: Enter) -> None:
    made = open_house.do(open_house.inbox.define.route("stripe", "ship"))
    page = enter(open_house)
    page.goto(open_house.url + "/routes")
    rows = page.locator("#list tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.filter(has_text="a program")).to_have_count(4)
    expect(page.get_by_role("link", name="Change…")).to_have_count(1)
    expect(rows.filter(has_text="a program").locator("a.btn, button")).to_have_count(0)
    viewer = enter(open_house, "viewer")
    viewer.goto(open_house.url + "/routes")
    expect(viewer.locator("#list tbody tr")).to_have_count(5)
    expect(viewer.locator("#main").get_by_role("link", name=re.compile("^(New|Change)"))).to_have_count(0)
    cookie = {"cookie": open_house.login("operator"), **OURS}
    for act in ("define", "enable", "disable", "delete"):
        assert open_house.ask("POST", f"/routes/{made.name}/{act}", form={}, headers=cookie).status == 403


def test_many_routes_are_shown_a_page_at_a_time(open_house: OpenHouse) -> None:
    async def make() -> None:
        for number in range(LISTED + 5):
            await open_house.inbox.define.route(f"app-{number}", "ship")

    open_house.do(make())
    cookie = {"cookie": open_house.login()}
    first = open_house.ask("GET", "/routes", headers=cookie).text
    (after,) = re.findall(r'href="(/routes\?cursor=[^"]+)"', first)
    second = open_house.ask("GET", after, headers=cookie).text
    rows = [set(re.findall(r'id="(rte_[0-9a-f]+)"', text)) for text in (first, second)]
    own = len(open_house.inbox.routes)
    assert (len(rows[0]), len(rows[1]), rows[0] & rows[1]) == (LISTED - own, own + 5, set())
    assert "cursor=" not in second


def test_many_sources_and_destinations_are_shown_a_page_at_a_time(open_house: OpenHouse, enter: Enter) -> None:
    define = open_house.inbox.define
    for n in range(CARDS):
        open_house.do(define.source(f"s{n:02}", preset="n8n", secret="generate"))
        open_house.do(define.destination(f"d{n:02}", url="https://example.com/"))
    cookie = {"cookie": open_house.login()}

    def listed(path: str) -> tuple[list[str], str | None]:
        page = open_house.ask("GET", path, headers=cookie).text
        following = re.search(r'href="([^"]*cursor=[^"]*)" rel="next"', page)
        return re.findall(r'<section class="panel thing[^"]*" id="([^"]*)"', page), following and following[1]

    for noun, own in (("sources", open_house.inbox.sources), ("destinations", open_house.inbox.destinations)):
        first, following = listed(f"/{noun}")
        assert following is not None
        rest, end = listed(following)
        assert (len(first), first[: len(own)], end) == (CARDS, list(own), None)
        assert len({*first, *rest}) == CARDS + len(own)
        last = rest[-1]
        assert listed(f"/{noun}?name={last}") == ([last], None)
        assert listed(f"/{noun}?name=nobody") == ([], None)
        page = enter(open_house)
        page.goto(f"{open_house.url}/{noun}#{last}")  # as other pages refer to it
        expect(page.locator(f"#{last}")).to_be_visible()
        page.get_by_role("link", name=f"All {noun}").click()
        expect(page.locator(f"#{first[0]}")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_forms_can_be_read_by_everybody_on_every_screen(
    open_house: OpenHouse, enter: Enter, tmp_path: Path, theme: str
) -> None:
    page = enter(open_house, color_scheme=theme, viewport=PHONE)
    make_source(page, open_house)
    cookie = {"cookie": open_house.login("admin"), **OURS}
    form = {"name": "crm", "url": "https://crm.example/hooks", "sign": "generate"}
    assert open_house.ask("POST", "/destinations", form=form, headers=cookie).status == 201
    route = open_house.do(open_house.inbox.define.route("stripe", "crm", coalesce="any"))
    wrong: dict[str, list[str]] = {}

    def check(name: str) -> None:
        if found := axed(page):
            wrong[name] = found
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.setdefault(name, []).append(f"wider than {width}")
            page.screenshot(path=tmp_path / f"{name}-{theme}-{width}.png", full_page=True)

    check("defined")
    for name, path in {
        "preset": "/sources/new",
        "new-source": "/sources/new?preset=whatsapp-cloud",
        "new-destination": "/destinations/new",
        "source": "/sources/standard-webhooks/define",
        "destination": "/destinations/crm/define",
        "origin": "/sources/stripe/define",
        "delete": "/destinations/crm/delete",
        "routes": "/routes",
        "new-route": "/routes/new",
        "route": f"/routes/{route.name}/define",
        "delete-route": f"/routes/{route.name}/delete",
        "sources": "/sources",
        "destinations": "/destinations",
    }.items():
        page.goto(open_house.url + path)
        check(name)
    assert not wrong


def test_a_customer_sends_a_source_to_destinations_of_its_own_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())
    ana = Person("ana", "admin", accounts=["42"])
    house = House(tmp_path, prefix="/inbox", authorize=lambda request: ana)  # type: ignore[arg-type, return-value]
    try:
        define = house.inbox.define
        house.do(define.destination("hers", url="https://ana.example/", account="42"))
        house.do(define.destination("theirs", url="https://bob.example/", account="43"))
        offered = house.ask("GET", "/sources/new?preset=standard-webhooks")
        assert re.findall(r'<option value="([^"]+)">', offered.text) == ["hers"]
        form = {"preset": "standard-webhooks", "name": "lead", "secret": "generate"}
        for goal in ("theirs", "ship", "nobody"):
            refused = house.ask("POST", "/sources", form={**form, "to": goal}, headers=OURS)
            assert refused.status == 422
            assert f"there is no destination &#34;{goal}&#34;; name one of your own" in refused.text
        assert house.do(define.all("source")) == [], "nothing was made that leads nowhere"
        assert house.ask("POST", "/sources", form={**form, "to": "hers"}, headers=OURS).status == 201
        (route,) = house.do(define.all("route"))
        assert (route.source, route.destination, route.account) == ("lead", "hers", "42")
        offered = house.ask("GET", "/routes/new")
        assert set(re.findall(r'<option value="([a-z]+)"></option>', offered.text)) == {"lead", "hers"}
        assert 'name="account"' not in offered.text
        for ends in ({"from": "lead", "to": "theirs"}, {"from": "stripe", "to": "hers"}):
            assert house.ask("POST", "/routes", form=ends, headers=OURS).status == 422
        ends = {"from": "lead", "to": "hers", "when": "order.paid"}
        assert house.ask("POST", "/routes", form=ends, headers=OURS).status == 303
        assert {one.account for one in house.do(define.all("route"))} == {"42"}
        theirs = house.do(define.route("stripe", "ship"))
        assert house.ask("GET", f"/routes/{theirs.name}/define").status == 404
        assert house.ask("POST", f"/routes/{theirs.name}/delete", form={}, headers=OURS).status == 404
    finally:
        house.close()
