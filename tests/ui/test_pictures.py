"""Charts, the page of a replay, the breaker on pages, and the dashboard in other languages."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import expect

from oncehook.model import Filter, ReplayState
from tests.ui.conftest import Enter
from tests.ui.house import TOKENS, House
from tests.ui.test_pages import PHONE, WIDE, axed

DEAD = "status:dead destination:ship"


def eventually(house: House, is_so: Callable[[], object]) -> None:
    """Wait until something is so."""
    while not is_so():
        house.do(asyncio.sleep(0.02))


def die(house: House, count: int, prefix: str = "bad") -> list[str]:
    """Orders that ship cannot deliver."""
    made = [house.order(f"{prefix}_{n}", digital=True) for n in range(count)]
    house.settle()
    return made


def replayed(house: House, query: str = DEAD) -> Any:
    admin = house.inbox.admin
    made = house.do(admin.start_replay(admin.build_request(query), actor="ana", reason="again"))

    def is_over() -> bool:
        return house.do(admin.replay(made.id)).state is ReplayState.done

    eventually(house, is_over)
    return made


# -- charts ------------------------------------------------------------------------------------


def test_charts_can_be_read_by_everybody(house: House, enter: Enter) -> None:
    house.do(house.inbox.write_counts(is_last=True))
    house.do(house.inbox.admin.mark("v1.2", actor="ana"))
    for theme in ("light", "dark"):
        page = enter(house, color_scheme=theme, viewport=WIDE)
        page.goto(house.url + "/charts")
        page.wait_for_selector("oh-chart canvas")
        assert axed(page) == []
        for name in ("n8n", "ship", "reply"):
            expect(page.locator("#failures figure", has_text=name)).to_be_visible()
        expect(page.locator("#heat td[class^=heat-]").first).to_be_visible()
        expect(page.locator("#latencies figure").first).to_contain_text(re.compile("p50 .*, p95 "))
        expect(page.locator(".mark-line").first).to_be_attached()


def test_charts_fit_a_phone(house: House, enter: Enter) -> None:
    page = enter(house, viewport=PHONE)
    for path in ("/charts", "/sources", "/system", "/replays"):
        page.goto(house.url + path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_a_range_is_chosen_by_dragging(house: House, enter: Enter) -> None:
    page = enter(house, viewport=WIDE)
    for path, plot in (("/", "#arrivals .u-over"), ("/charts", "#failures svg[data-drag] >> nth=0")):
        page.goto(house.url + path)
        page.wait_for_selector("oh-chart canvas")
        target = page.locator(plot)
        target.scroll_into_view_if_needed()
        box = target.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2, steps=4)
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2, steps=4)
        page.mouse.up()
        expect(page).to_have_url(re.compile(r"from=.*&to="))
        expect(page.get_by_role("group", name="Time range").get_by_text(re.compile(r"..:.. to ..:.."))).to_be_visible()


def test_charts_without_script_are_tables(house: House) -> None:
    answer = house.ask("GET", "/charts?since=1h", headers={"cookie": house.login("viewer")})
    assert answer.status == 200
    for words in ("Share of attempts that failed, by destination", "Which attempt fails", "<caption"):
        assert words in answer.text
    assert "style=" not in answer.text


@pytest.mark.parametrize("range_", ["from=x&to=y", "from=2h", "from=%00&to=1h"])
def test_a_bad_range_is_no_failure_of_ours(house: House, range_: str) -> None:
    assert house.ask("GET", f"/charts?{range_}", headers={"cookie": house.login()}).status in (200, 400)


def test_the_latency_of_answers_can_be_chosen(house: House, enter: Enter) -> None:
    page = enter(house, viewport=WIDE)
    page.goto(house.url + "/")
    page.get_by_role("group", name="Which latency").get_by_role("link", name="Ack").click()
    expect(page.locator("#latency h2")).to_have_text("Ack")


def test_routes_are_a_picture(own_house: House, enter: Enter) -> None:
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/sources")
    expect(page.locator("#map .route")).to_have_count(len(own_house.inbox.routes))
    expect(page.locator("#map svg")).to_have_attribute("aria-label", re.compile("whatsapp to n8n"))
    assert axed(page) == []


# -- marks -------------------------------------------------------------------------------------


def test_a_mark_over_the_api(own_house: House) -> None:
    def post(role: str, body: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", own_house.port, timeout=90)
        headers = {"authorization": f"Bearer {TOKENS[role]}", "content-type": "application/json"}
        with closing(connection):
            connection.request("POST", "/api/v1/marks", body, headers)
            return connection.getresponse().status

    assert post("operator", '{"text": "v1.2"}') == 201
    assert post("viewer", '{"text": "v1.2"}') == 403
    assert post("operator", '{"text": " "}') == 400
    assert post("operator", '{"text": "%s"}' % ("x" * 61)) == 400
    answer = own_house.ask("GET", "/api/v1/marks", headers={"authorization": f"Bearer {TOKENS['viewer']}"})
    assert [one["text"] for one in json.loads(answer.body)["items"]] == ["v1.2"]


# -- replays -----------------------------------------------------------------------------------


def test_a_replay_that_failed_says_so_and_can_be_opened(own_house: House, enter: Enter) -> None:
    die(own_house, 3)
    made = replayed(own_house)
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/replays")
    row = page.locator(f"[id={made.id}]")
    expect(row.locator(".state").first).to_have_text("all failed")
    expect(row.locator(".state.done")).to_have_count(0)
    expect(page.locator("#rail .badge.busy")).to_have_count(0)
    expect(row.locator("code.whole")).to_contain_text("destination:ship status:dead until:")
    row.get_by_role("link").first.click()
    expect(page.locator("#items tbody tr")).to_have_count(3)
    expect(page.locator("#items .state.dead")).to_have_count(3)
    expect(page.locator("#outcomes tbody tr")).to_have_count(1)
    assert axed(page) == []


def test_what_an_abort_has_left_can_be_run(own_house: House, enter: Enter) -> None:
    die(own_house, 4)
    admin = own_house.inbox.admin
    own_house.do(admin.pause("ship", actor="ana"))
    made = own_house.do(admin.start_replay(admin.build_request(DEAD, rate=0.001), actor="ana"))
    own_house.do(admin.set_replay_state(made.id, ReplayState.aborted, actor="ana"))
    own_house.do(admin.resume("ship", actor="ana"))
    left = 4 - own_house.do(admin.replay(made.id)).fed
    page = enter(own_house, viewport=WIDE)
    page.goto(f"{own_house.url}/replays/{made.id}")
    page.get_by_role("link", name=f"Run the {left} left").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"left:{made.id}")
    page.get_by_role("button", name=re.compile("Replay")).click()
    eventually(own_house, lambda: len(own_house.do(admin.replays()).items) == 2)
    assert own_house.do(admin.replays()).items[0].planned == left


def test_a_plan_has_a_row_for_each_destination_and_says_what_is_hopeless(own_house: House, enter: Enter) -> None:
    die(own_house, 2)
    own_house.moods["/billing"] = (422, b"no")
    own_house.receive("stripe", None)
    own_house.settle()
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/replays/plan?query=status:dead")
    rows = page.locator(".sheet .inset tbody tr")
    expect(rows.filter(has_text="to ship")).to_have_count(1)
    expect(rows.filter(has_text="to billing")).to_have_count(1)
    expect(rows.filter(has_text="in all")).to_have_count(1)
    expect(page.locator("main")).to_contain_text(
        "ship refused these for good: they fail again unless the cause is mended."
    )
    page.get_by_label("Send as new").check()
    page.get_by_role("button", name=re.compile("Replay 3")).click()
    eventually(own_house, lambda: bool(own_house.do(own_house.inbox.admin.replays()).items))
    [made] = own_house.do(own_house.inbox.admin.replays()).items
    assert made.about["fresh_id"] is True


def test_a_discard_looks_dangerous(own_house: House, enter: Enter) -> None:
    die(own_house, 1)
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/dead/discard?query=status:dead")
    expect(page.locator(".btn.fatal")).to_contain_text("Discard 1 delivery")
    assert axed(page) == []


# -- the breaker -------------------------------------------------------------------------------


def invoice(house: House, n: int) -> str:
    body = {"id": f"evt_{n}", "type": "invoice.paid", "data": {"object": {"id": f"in_{n}", "customer": f"cus_{n}"}}}
    return house.receive("stripe", "invoice.paid", body=body)[0]


def test_a_destination_that_is_held_back_says_until_when_and_can_be_tried(own_house: House, enter: Enter) -> None:
    own_house.moods["/billing"] = (503, b"busy")
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/live")
    expect(page.locator("[data-live-word]")).to_have_text("connected")
    for n in range(10):  # of different customers: those of one wait for each other
        invoice(own_house, n)
    expect(page.locator("[data-feed]")).to_contain_text("10 deliveries failed in a row: nothing is sent until")
    last = invoice(own_house, 10)
    page.goto(f"{own_house.url}/events/{last}")
    held = re.compile(r"held back until ..:..:..: 10 deliveries failed in a row")
    expect(page.locator("#moments")).to_contain_text(held)
    expect(page.locator("#head h1")).to_contain_text("held back for billing")
    own_house.moods["/billing"] = (200, b"ok")
    page.goto(own_house.url + "/destinations")
    page.get_by_role("button", name="Try one now").click()
    eventually(own_house, lambda: own_house.levels()["billing"].open_until is None)


def test_the_live_page_says_when_things_happened(own_house: House, enter: Enter) -> None:
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/live")
    expect(page.locator("[data-live-word]")).to_have_text("connected")
    own_house.order("ok_1")
    own_house.settle()
    rows = page.locator("[data-feed] tbody tr")
    expect(rows).to_have_count(2)
    times = [rows.nth(n).locator("time").get_attribute("datetime") or "" for n in range(2)]
    assert times[0] >= times[1]
    assert times[0] != times[1]
    page.reload()
    expect(rows).to_have_count(2)  # also how it ended, not only that it came
    expect(page.locator("main [data-live-pause]")).to_have_count(0)


# -- the event ---------------------------------------------------------------------------------


def test_the_event_page_goes_to_its_neighbours(own_house: House, enter: Enter) -> None:
    made = [own_house.order(f"n_{n}") for n in range(3)]
    own_house.settle()
    page = enter(own_house, viewport=WIDE)
    page.goto(f"{own_house.url}/events/{made[1]}")
    page.get_by_role("link", name="Previous").click()
    expect(page).to_have_url(re.compile(made[0]))
    expect(page.get_by_role("link", name="Previous")).to_have_count(0)
    page.get_by_role("link", name="Next").click()
    expect(page).to_have_url(re.compile(made[1]))
    replay = page.locator("#head").get_by_role("link", name=re.compile("^Replay"))
    expect(replay).not_to_have_class(re.compile("primary"))


# -- the system --------------------------------------------------------------------------------


def test_the_system_page_shows_upkeep_and_findings(own_house: House, enter: Enter) -> None:
    page = enter(own_house, viewport=WIDE)
    page.goto(own_house.url + "/system")
    for words in ("growth a day", "disk free", "Events kept", "Leases expired"):
        expect(page.locator("#store")).to_contain_text(words)
    page.get_by_role("link", name="Check everything that must add up").click()
    expect(page.locator("#checks tbody tr .state.crossed")).to_have_count(0)
    assert page.locator("#checks tbody tr").count() > 3
    assert axed(page) == []


# -- languages ---------------------------------------------------------------------------------


def test_the_browser_s_language_and_a_switch(house: House, enter: Enter) -> None:
    page = enter(house, locale="pt-BR", viewport=WIDE)
    page.goto(house.url + "/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Visão geral")
    expect(page.locator("html")).to_have_attribute("lang", "pt-BR")
    page.goto(house.url + "/dead")
    expect(page.get_by_role("heading", level=1)).to_have_text("Entregas mortas")
    page.locator("#rail").get_by_role("link", name="Español").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Entregas muertas")
    assert axed(page) == []
    page.locator("#rail").get_by_role("link", name="English").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Dead letters")


def test_the_switch_leads_nowhere_else(house: House) -> None:
    elsewhere = {"referer": "https://evil.example/x", "host": f"127.0.0.1:{house.port}"}
    answer = house.ask("GET", "/language?to=es", headers=elsewhere)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert "set-cookie" not in house.ask("GET", "/language?to=xx").headers


def test_every_page_speaks_every_language(house: House) -> None:
    cookie = house.login()
    event = house.do(house.inbox.admin.events(Filter(), limit=1)).items[0].id
    for tag, words in (("pt-BR", "Eventos"), ("es", "Eventos")):
        for path in ("/", "/events", f"/events/{event}", "/dead", "/replays", "/sources", "/destinations", "/live"):
            answer = house.ask("GET", path, headers={"cookie": cookie, "accept-language": tag})
            assert (answer.status, answer.headers["content-language"]) == (200, tag), path
            assert words in answer.text
