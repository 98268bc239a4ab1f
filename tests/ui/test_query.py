"""Finding things: one field, chips, completion, pages by cursor; and the address holds it all."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import expect

from oncehook import clock
from tests.ui.conftest import Enter
from tests.ui.house import House

ROWS = "#list tbody tr"


def query_of(url: str) -> str:
    return parse_qs(urlsplit(url).query).get("query", [""])[0]


def test_a_view_is_shared_by_its_address(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events")
    page.keyboard.press("/")
    page.keyboard.type("source:orders status:dead")
    page.keyboard.press("Enter")
    page.wait_for_url("**/events?query=*")
    expect(page.locator(ROWS)).to_have_count(7)
    assert query_of(page.url) == "source:orders status:dead"
    other = enter(house, "viewer")
    other.goto(page.url)
    expect(other.locator(ROWS)).to_have_count(7)
    other.get_by_role("link", name="Drop status: dead").click()
    expect(other.locator(ROWS)).to_have_count(50)
    assert query_of(other.url) == "source:orders"
    page.go_back()
    expect(page.locator(ROWS)).to_have_count(50)


def test_a_query_is_completed(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events")
    page.keyboard.press("/")
    page.keyboard.insert_text("sou")  # in one go: what is completed is never half of it
    expect(page.locator("#complete [role=option]")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    expect(page.locator("#q")).to_have_value("source:")
    expect(page.locator("#complete")).to_contain_text("source:whatsapp")
    page.locator("#complete").get_by_text("source:stripe").click()
    expect(page.locator("#q")).to_have_value("source:stripe ")
    page.keyboard.insert_text("bod")
    expect(page.locator("#complete [role=option]")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    expect(page.locator("#q")).to_have_value("source:stripe body.")


def test_what_bodies_say_is_searched_and_dropped(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events")
    page.keyboard.press("/")
    page.keyboard.type('source:orders body."no such name":>5')
    page.keyboard.press("Enter")
    page.wait_for_url("**/events?query=*")
    expect(page.locator(ROWS)).to_have_count(0)
    page.get_by_role("link", name='Drop body."no such name": >5').click()
    expect(page.locator(ROWS)).to_have_count(50)
    assert query_of(page.url) == "source:orders"


def test_a_wrong_query_says_what_was_meant(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events?query=statsu:dead")
    expect(page.get_by_role("alert")).to_contain_text('Did you mean "status:"?')


def test_pages_by_cursor_do_not_shift(own_house: House, enter: Enter) -> None:
    for n in range(60):
        own_house.order(f"o{n:02}")
    page = enter(own_house)
    page.goto(own_house.url + "/events?query=source:orders")
    expect(page.locator(ROWS)).to_have_count(50)
    own_house.order("later")
    page.get_by_role("link", name="Older").click()
    expect(page.locator(ROWS)).to_have_count(10)
    expect(page.locator(ROWS).last).to_contain_text("o00")
    page.get_by_role("link", name="Newest").click()
    expect(page.locator(ROWS).first).to_contain_text("later")


def test_keys_lead_everywhere(house: House, enter: Enter) -> None:
    page = enter(house)
    page.clock.install()
    page.goto(house.url + "/")
    page.clock.pause_at(clock.now_utc() + timedelta(hours=1))  # the second key has to follow soon, and does
    for key, place in {"e": "/events", "d": "/dead", "r": "/replays", "s": "/sources", "o": "/"}.items():
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(house.url + place)
    page.clock.resume()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.goto(house.url + "/events")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/events/evt_*")


def test_keys_are_off_in_fields_and_by_a_switch(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/system")
    page.locator(".find input").fill("")
    page.locator(".find input").press("g")
    page.locator(".find input").press("e")
    assert page.url.endswith("/system")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.get_by_label("Single keys act").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("e")
    page.wait_for_timeout(200)
    assert page.url.endswith("/system")
