"""Every page, with data and without: it comes, nothing goes wrong in it, everybody can read it, it fits a phone."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.sync_api import Page, expect

from oncehook import clock
from oncehook.model import DeliveryStatus, Filter
from oncehook.web.dashboard.events import ListedRow, ListedState
from oncehook.web.dashboard.render import render
from tests.npm import package
from tests.servers import fresh_schema, shared_postgres
from tests.ui.conftest import Enter, opened
from tests.ui.house import House

PAGES = {
    "overview": ("/", "Overview"),
    "events": ("/events", "Events"),
    "dead": ("/dead", "Dead letters"),
    "rejected": ("/rejected", "Rejected"),
    "replays": ("/replays", "Replays"),
    "sources": ("/sources", "Sources"),
    "destinations": ("/destinations", "Destinations"),
    "accounts": ("/accounts", "Accounts"),
    "charts": ("/charts", "Charts"),
    "live": ("/live", "Live"),
    "system": ("/system", "System"),
}
PICTURED = ("overview", "events", "event", "dead")
PICTURES = Path(__file__).parents[2] / "docs/screenshots"
WIDE = {"width": 1440, "height": 900}
STANDING = re.compile(r'<span class="state [^"]*"(?: title="([^"]*)")?>.*?</svg>(.*?)<')
PHONE = {"width": 390, "height": 844}


def found(house: House, query: str) -> str:
    """The newest event that matches."""
    (event,) = house.do(house.inbox.admin.events(house.inbox.admin.read(query), limit=1)).items
    return str(event.id)


def views(house: House) -> dict[str, str]:
    """Everything there is to see, by name."""
    waiting, twice = found(house, "destination:n8n status:pending attempts:>1"), found(house, "key:req_twice")
    dead = found(house, "destination:ship status:dead")
    tabs = {f"event-{tab}": f"/events/{dead}?tab={tab}" for tab in ("headers", "deliveries", "subject")}
    delivered = found(house, "destination:n8n status:done")
    return {
        **{name: path for name, (path, _) in PAGES.items()},
        "exchange": f"/events/{delivered}?tab=deliveries",
        "alternatives": "/events?query=status:dead+OR+outcome:conflict",
        "event": f"/events/{waiting}",
        "event-arrivals": f"/events/{twice}?tab=arrivals",
        **tabs,
        "event-raw": f"/events/{dead}?view=raw",
        "event-hex": f"/events/{dead}?view=hex",
        "plan": "/replays/plan?query=status:dead",
        "discard": "/dead/discard?query=status:dead",
        "bad-query": "/events?query=statsu:dead",
        "routes": "/routes",
        "none-match": "/events?query=key:nothing",
        "nowhere": "/nowhere",
    }


def picture(page: Page, name: str, folder: Path) -> None:
    """Pictures for the documents; they are only replaced when somebody asks for that."""
    wanted = PICTURES / f"{name}.png"
    if os.environ.get("ONCEHOOK_PICTURES") or not wanted.exists():
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=wanted)
    else:
        page.screenshot(path=folder / f"{name}.png")


def axe() -> Path:
    return package("axe-core") / "axe.min.js"


def axed(page: Page, **options: Any) -> list[str]:
    """What axe finds wrong with the page in view."""
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(axe().read_text())
    result = page.evaluate("(options) => axe.run(document, options)", {"resultTypes": ["violations"], **options})
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in result["violations"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_come_and_can_be_read_by_everybody(house: House, enter: Enter, tmp_path: Path, theme: Any) -> None:
    page = enter(house, color_scheme=theme, viewport=WIDE)
    page.add_init_script(path=axe())
    wrong: dict[str, list[str]] = {}
    for name, path in views(house).items():
        is_main = name in PAGES or name in ("event", "event-arrivals")
        if theme == "dark" and not is_main:
            continue  # another theme is other colours, and nothing else
        page.goto(house.url + path)
        if found := axed(page, **({"runOnly": ["color-contrast"]} if theme == "dark" else {})):
            wrong[name] = found
        if name in PICTURED:
            if name == "overview":
                page.wait_for_selector("oh-chart canvas")
            picture(page, f"{name}-{theme}", tmp_path)
    page.goto(house.url + "/dead")
    page.get_by_role("link", name="Replay all").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    wrong |= {"dialog": found} if (found := axed(page, runOnly=["wcag2a", "wcag2aa"])) else {}
    picture(page, f"replay-{theme}", tmp_path)
    assert not wrong


def test_the_door_can_be_used_by_everybody(house: House, enter: Enter) -> None:
    page = enter(house, None)
    page.goto(house.url + "/login")
    assert axed(page) == []
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("not the password")
    assert axed(page) == []


def test_axe_sees_what_is_wrong(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/system")
    page.evaluate("document.querySelector('.top').insertAdjacentHTML('beforeend', '<input><img>')")
    assert {line.partition(":")[0] for line in axed(page)} >= {"label", "image-alt"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_itself_and_its_place(house: House, enter: Enter, name: str) -> None:
    path, title = PAGES[name]
    page = enter(house)
    page.goto(house.url + path)
    expect(page).to_have_title(f"{title} · oncehook")
    expect(page.get_by_role("heading", level=1, name=title, exact=True)).to_be_visible()
    expect(page.locator("#rail [aria-current=page] > span").first).to_have_text(title)


def test_every_page_teaches_when_it_is_empty(own_house: House, enter: Enter) -> None:
    page = enter(own_house, viewport=WIDE)
    for path, words in {
        "/": "Waiting for the first webhook",
        "/events": "No events yet",
        "/dead": "No dead letters",
        "/replays": "No replays yet",
        "/live": "newest on top",
        "/system": "Workers",
        "/sources": "Give the provider this address",
        "/destinations": "closed",
        "/accounts": "No accounts",
    }.items():
        page.goto(own_house.url + path)
        expect(page.locator("#main")).to_contain_text(words)


def test_the_first_hook_brings_the_charts(own_house: House, enter: Enter) -> None:
    """The page that waits for it becomes the overview by itself, and must be able to draw."""
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url)
    expect(page.locator("#main")).to_contain_text("oncehook send whatsapp message.text")
    own_house.receive("stripe", "invoice.paid")
    expect(page.locator("oh-chart canvas")).to_have_count(3)


def test_an_address_that_is_no_page_is_not_called_pruned(house: House) -> None:
    cookie = {"cookie": house.login()}
    unknown = house.ask("GET", "/nonsense", headers=cookie)
    assert (unknown.status, "pruned" in unknown.text, "no page at this address" in unknown.text) == (404, False, True)
    gone = house.ask("GET", f"/events/evt_{'0' * 32}", headers=cookie)
    assert (gone.status, "pruned" in gone.text) == (404, True)


def test_what_needs_script_or_keys_is_hidden_where_there_is_none(own_house: House, enter: Enter) -> None:
    own_house.order("one")
    own_house.settle()
    bare = enter(own_house, viewport=WIDE, java_script_enabled=False)
    bare.goto(own_house.url)
    expect(bare.locator("#arrivals summary")).to_be_visible()
    for drawn in ("oh-chart .plot", "kbd", "#arrivals .key"):
        expect(bare.locator(drawn).first).to_be_hidden()
    phone = enter(own_house, viewport=PHONE)
    phone.goto(own_house.url + "/events")
    phone.locator("#q").focus()
    expect(phone.locator("#complete")).to_be_visible()
    expect(phone.locator(".complete > p")).to_be_hidden()


def test_a_phone_can_log_out_and_choose_the_clock(own_house: House, enter: Enter) -> None:
    page = enter(own_house, viewport=PHONE)
    page.goto(own_house.url + "/system")
    page.get_by_role("button", name="More").click()
    rail = page.locator("#rail")
    rail.get_by_role("button", name="Local").click()
    expect(rail.get_by_role("button", name="Local")).to_have_attribute("aria-pressed", "true")
    rail.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("status")).to_contain_text("Logged out")


def test_nothing_is_wider_than_a_small_screen(house: House, enter: Enter, tmp_path: Path) -> None:
    page = enter(house)
    wide = {}
    for name, path in views(house).items():
        page.set_viewport_size(PHONE)
        page.goto(house.url + path)
        if name in ("overview", "events", "event"):
            picture(page, f"{name}-phone", tmp_path)
        for width in (390, 820):
            page.set_viewport_size({"width": width, "height": 844})
            over = page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
            if over > 0:
                wide[name, width] = over
    assert not wide


def test_a_small_laptop_shows_things_in_one_line(house: House, enter: Enter) -> None:
    page = enter(house, viewport={"width": 1280, "height": 900})
    waiting = found(house, "destination:n8n status:pending attempts:>1")
    page.goto(f"{house.url}/events/{waiting}")
    bar = page.locator("#detail .row.wrap").first
    assert bar.bounding_box()["height"] < 40  # type: ignore[index]
    assert not page.locator("#lanes").evaluate("(one) => one.scrollWidth - one.clientWidth")
    page.goto(f"{house.url}/events/{waiting}?tab=deliveries")
    page.locator("td.result .state").first.evaluate("(one) => one.append(' the ledger of the warehouse hung up again')")
    assert not page.locator("#detail .tbl-wrap").first.evaluate("(one) => one.scrollWidth - one.clientWidth")
    page.goto(f"{house.url}/destinations")
    assert page.locator("#billing .steps li").count() == 9
    assert page.locator("#billing .steps").bounding_box()["height"] < 30  # type: ignore[index]


def test_a_destination_says_how_it_stands_and_what_comes_next(own_house: House) -> None:
    cookie = {"cookie": own_house.login("viewer")}

    def standing(name: str) -> set[tuple[str, str]]:
        """The words of both pages, and what they explain."""
        told = set()
        for path, place in (("/", f'destinations#{name}"'), ("/destinations", f'id="{name}"')):
            page = own_house.ask("GET", path, headers=cookie).text
            found = STANDING.search(page, page.index(place))
            assert found
            told.add((found[2], found[1] or ""))
        return told

    own_house.order("well")
    own_house.settle()
    assert standing("ship") == {("ready", "")}
    own_house.order("bad", digital=True)
    own_house.settle()
    next_ = "1 delivery has failed since the last success. At 1,000 nothing is sent for 30 s, then one trial decides."
    assert standing("ship") == {("failing", next_)}
    own_house.moods["/billing"] = (422, b"no")
    for _ in range(10):
        own_house.receive("stripe", None)
    own_house.settle()
    [(word, why)] = standing("billing")
    assert (word, "One trial decides" in why) == ("held back", True)
    assert own_house.do(own_house.inbox.admin.destination("billing")).state == "held_back"
    banner = own_house.ask("GET", "/destinations", headers=cookie).text.partition("billing is held back until")[2]
    assert "runbooks/destination-down.md" in banner[: banner.index("</div>")]


def test_numbers_of_the_overview_lead_to_what_they_count(own_house: House) -> None:
    cookie = {"cookie": own_house.login("viewer")}
    own_house.order("one")
    own_house.settle()
    page = own_house.ask("GET", "/?since=24h", headers=cookie).text
    links = {unescape(link) for link in re.findall(r'<a class="stat[^"]*" href="([^"]*)"', page)}
    assert {"/rejected?since=24h", "/events?query=status%3Adone+since%3A24h"} <= links
    assert "/events?query=%28outcome%3Aduplicate+OR+outcome%3Aconflict%29+since%3A24h" in links
    for link in links:
        assert own_house.ask("GET", link, headers=cookie).status == 200, link
    assert re.search(
        r'Received</span><span class="value">1 <small>/day</small></span><span class="sub">1 accepted<', page
    )
    assert "1 arrival: 1 accepted, 0 duplicate" in page


def test_rejected_arrivals_are_found_by_cause_and_time(own_house: House) -> None:
    cookie = {"cookie": own_house.login("operator")}
    own_house.receive("stripe", forge=True)
    own_house.do(own_house.inbox.receive("nowhere", {}, b"{}"))
    own_house.do(own_house.inbox.write_counts())

    def listed(path: str) -> int:
        return own_house.ask("GET", path, headers=cookie).text.count('<article class="rejection"')

    assert listed("/rejected") == 2
    assert listed("/rejected?reason=unknown+source") == 1
    assert listed("/rejected?since=1h") == 2
    assert listed("/rejected?from=2020-01-01T00:00Z&to=2020-01-01T01:00Z") == 0
    assert "None of those that are kept match" in own_house.ask("GET", "/rejected?reason=x", headers=cookie).text


def test_labels_of_a_chart_do_not_touch(own_house: House, enter: Enter) -> None:
    own_house.order("one")
    own_house.settle()
    for viewport in (WIDE, PHONE):
        page = enter(own_house, viewport=viewport)
        for span in ("1h", "24h", "7d"):
            page.goto(f"{own_house.url}/?since={span}")
            page.wait_for_selector("#latency canvas")
            widths = page.locator("oh-chart").evaluate_all(
                """(charts) => charts.map((chart) => {
                    const room = chart.plot.clientWidth - 76, labels = chart.short(chart.ticks(room));
                    return [labels.length, labels.join("").length * 6.5, room];
                })"""
            )
            for count, taken, room in widths:
                assert count >= 1
                assert taken < room, (viewport, span)


def test_the_list_counts_the_deliveries_of_an_event_that_has_many(own_house: House) -> None:
    cookie = {"cookie": own_house.login("viewer")}
    own_house.order("few")
    own_house.settle()
    few = own_house.ask("GET", "/events", headers=cookie).text
    assert 'ship<span class="vh"> done' in few
    assert '<span class="quiet-mark" title="done">✓' in few
    event = own_house.do(own_house.inbox.admin.events(Filter())).items[0]
    (ship,) = event.deliveries
    statuses = [DeliveryStatus.done] * 2 + [DeliveryStatus.pending] * 5 + [DeliveryStatus.dead]
    many = [ship._replace(destination=f"shop-{n}", status=status) for n, status in enumerate(statuses)]
    row = ListedRow(replace(event, deliveries=many), ListedState())
    assert (row.done, row.has_progress, row.unnamed) == (2, True, 3)
    assert [one.destination for one in row.chips] == ["shop-7", "shop-2", "shop-3"]
    html = render("_event_rows.html", rows=[row], root="", may_act=False, now=clock.now_utc())
    assert "<b>2/8</b>" in html
    assert "shop-0" not in html.partition("</b>")[2]


def test_an_event_of_the_application_s_own_has_a_sign(own_house: House) -> None:
    own_house.do(own_house.inbox.emit("orders", "order.sent", {"id": "out"}, key="out"))
    own_house.order("in")
    page = own_house.ask("GET", "/events", headers={"cookie": own_house.login("viewer")}).text
    assert page.count('class="sent-mark" title="sent by this application, not received"') == 1


def test_a_delivery_to_a_destination_held_back_is_not_called_due(own_house: House) -> None:
    own_house.moods["/billing"] = (422, b"no")
    for _ in range(10):
        own_house.receive("stripe", None)
    own_house.settle()
    event = own_house.receive("stripe", None)[0]
    cookie = {"cookie": own_house.login("viewer")}
    for path in ("/events?query=status:pending", f"/events/{event}?tab=deliveries"):
        page = own_house.ask("GET", path, headers=cookie).text
        assert re.search(r"held back until \d\d:\d\d:\d\d", page.partition('id="detail"')[2] or page), path
        assert "due now" not in page


def test_setup_pages_say_where_things_are_defined_and_secrets_kept(own_house: House) -> None:
    cookie = {"cookie": own_house.login("viewer")}
    page = own_house.ask("GET", "/sources", headers=cookie).text
    stripe = page[page.index('id="stripe"') :]
    assert re.search(r"Defined in</dt><dd><code>\S*house.py:\d+</code>", stripe)
    assert "in the program</span>" in stripe
    assert "whsec_house" not in page
    assert "<code>$.data.object.customer</code>" in stripe
    page = own_house.ask("GET", "/destinations", headers=cookie).text
    for name, signs in (("n8n", "<code>standard-webhooks</code>"), ("billing", "requests are unsigned")):
        card = page[page.index(f'id="{name}"') :].partition("</section>")[0]
        assert re.search(r"Defined in</dt><dd><code>\S*house.py:\d+</code>", card)
        assert signs in card


def test_the_theme_is_chosen_and_kept(house: House, enter: Enter) -> None:
    page = enter(house, color_scheme="light")
    page.goto(house.url + "/system")
    switch = page.locator("[data-theme-switch]")
    switch.click()
    switch.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.goto(house.url + "/sources")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(12, 15, 16)"


def test_a_body_is_shown_three_ways_and_saved_as_it_is(house: House, enter: Enter) -> None:
    event_id = found(house, "key:req_twice")
    page = enter(house)
    page.goto(f"{house.url}/events/{event_id}")
    expect(page.locator(".tree")).to_contain_text('"order/req_twice"')
    page.get_by_role("link", name="Raw").click()
    expect(page.locator("pre.code")).to_contain_text('"id":"req_twice"')
    page.get_by_role("link", name="Hex").click()
    expect(page.locator("pre.code")).to_contain_text("00000000")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.path().read_bytes().startswith(b'{"id":"req_twice"')


def test_an_arrival_says_exactly_when_and_by_whom(own_house: House) -> None:
    body = b'{"id": "one", "type": "order.paid", "order": "order/one"}'
    headers = {"User-Agent": "Shop/2.1", "X-Forwarded-For": "203.0.113.9, 10.0.0.1"}
    for _ in range(2):
        own_house.do(own_house.inbox.receive("orders", headers, body))
    event = found(own_house, "key:one")
    cookie = {"cookie": own_house.login("viewer")}
    page = own_house.ask("GET", f"/events/{event}?tab=arrivals", headers=cookie).text
    table = page[page.index("<th>Sent by</th>") :]
    assert re.search(r'data-form="full"[^>]*>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}<', table)
    assert "203.0.113.9</code>" in table
    assert ">Shop/2.1<" in table
    assert re.search(r'<span class="dimmer">\+\d+ ms</span>', table)


def test_a_conflict_shows_what_differs(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(f"{house.url}/events/{found(house, 'key:req_twice')}")
    page.get_by_role("link", name="See diff").click()
    expect(page.locator(".diff .del")).to_contain_text('"note": "first"')
    expect(page.locator(".diff .add").last).to_contain_text('"note": "changed"')


def test_the_next_attempt_is_a_time_and_a_countdown(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(f"{house.url}/events/{found(house, 'destination:n8n status:pending attempts:>1')}")
    ahead = page.locator(".moments .future")
    expect(ahead).to_contain_text("due in")
    before = ahead.locator("[data-until]").text_content()
    expect(ahead.locator("[data-until]")).not_to_have_text(before or "")
    expect(page.locator("#lanes .future")).to_have_count(1)


def test_charts_have_their_numbers_in_a_table(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/")
    page.wait_for_selector("#arrivals canvas")
    page.locator("#arrivals summary").click()
    expect(page.locator("#arrivals tbody tr")).to_have_count(60)


def test_every_page_comes_from_postgres_too(tmp_path: Path) -> None:
    with opened(tmp_path, store=f"{shared_postgres().url}?schema={fresh_schema()}") as house:
        house.order("req_twice", note="first")
        house.order("req_twice", note="changed")
        house.order("dead", digital=True)
        house.moods["/webhook/abc"] = (503, b"busy")
        house.message("5511988880142")
        house.settle()
        cookie = {"cookie": house.login()}
        dead, waiting = found(house, "status:dead"), found(house, "status:pending")
        paths = [path for path, _ in PAGES.values()]
        paths += [f"/events/{dead}?tab={tab}" for tab in ("body", "headers", "deliveries", "subject")]
        paths += [
            f"/events/{found(house, 'key:req_twice')}?tab=arrivals",
            f"/events/{waiting}",
            "/?since=24h",
            "/?since=7d",
        ]
        paths += ["/events?query=status:dead", "/replays/plan?query=status:dead", "/dead/discard?query=status:dead"]
        for path in paths:
            assert house.ask("GET", path, headers=cookie).status == 200, path
