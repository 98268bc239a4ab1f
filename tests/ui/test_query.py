"""Finding things: one field, chips, completion, pages by cursor; and the address holds it all."""

from __future__ import annotations

import re
from datetime import timedelta
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

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


def test_what_came_again_is_marked_and_found(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events?query=outcome:conflict")
    expect(page.locator(ROWS)).to_have_count(1)
    expect(page.locator("#total")).to_have_text("1")
    expect(page.locator(ROWS).locator(".c-arr")).to_contain_text("×2")
    expect(page.locator(ROWS).locator(".c-arr")).to_contain_text("≠")
    page.locator(ROWS).locator(".c-arr a").first.click()
    page.wait_for_url("**?tab=arrivals")
    expect(page.locator("#head h1")).to_contain_text("×2")
    expect(page.locator("#head h1")).to_contain_text("conflict")


def test_lists_to_choose_from_write_the_query(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events?query=digital")
    page.goto(house.url + "/events")
    page.locator("select[name=choose-source]").select_option("orders")
    page.wait_for_url("**/events?query=source*")
    page.locator("select[name=choose-status]").select_option("dead")
    page.wait_for_url("**status*")  # whole, with the script that hears of the next choice
    expect(page.locator(ROWS)).to_have_count(7)
    assert query_of(page.url) == "source:orders status:dead"
    expect(page.locator("#total")).to_have_text("7")
    page.locator("select[name=choose-since]").select_option("24h")
    page.wait_for_url("**since*")
    assert query_of(page.url) == "source:orders status:dead since:24h"
    page.locator("select[name=choose-status]").select_option("")
    page.wait_for_url(lambda url: "status" not in url)
    assert query_of(page.url) == "source:orders since:24h"


def test_lists_to_choose_from_work_without_script(house: House, enter: Enter) -> None:
    page = enter(house, java_script_enabled=False)
    page.goto(house.url + "/events?query=status:dead+OR+status:pending")
    page.locator("select[name=choose-source]").select_option("orders")
    page.get_by_role("button", name="Narrow").click()
    assert query_of(page.url) == "(status:dead OR status:pending) source:orders"
    expect(page.get_by_label("Query", exact=True)).to_have_value("(status:dead OR status:pending) source:orders")


def test_a_wrong_query_is_not_said_to_find_nothing(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events?query=-statsu:done")
    expect(page.get_by_role("alert")).to_contain_text('Did you mean "status:"?')
    expect(page.get_by_text("finds nothing")).to_have_count(0)


def test_tab_takes_what_was_begun(house: House, enter: Enter) -> None:
    page = enter(house)
    page.goto(house.url + "/events")
    page.keyboard.press("/")
    page.keyboard.insert_text("-outc")
    expect(page.locator("#complete [role=option]")).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.locator("#q")).to_have_value("-outcome:")
    expect(page.locator("#complete")).to_contain_text("-outcome:conflict")


def test_numbers_lead_to_their_lists(house: House, enter: Enter) -> None:
    page = enter(house)
    places = {"Received": "since:24h", "Duplicates": "(outcome:duplicate OR outcome:conflict) since:24h"}
    for label, query in places.items():
        page.goto(house.url + "/?since=24h")
        page.locator("#stats a", has_text=label).click()
        page.wait_for_url("**/events?*")
        assert query_of(page.url) == query
        expect(page.locator(ROWS).first).to_be_visible()
    page.goto(house.url + "/")
    page.locator("#stats a", has_text="Rejected").click()
    page.wait_for_url("**/rejected?since=1h")
    expect(page.locator("article.rejection").first).to_contain_text("stripe")


def test_a_rejected_arrival_says_why(own_house: House, enter: Enter) -> None:
    own_house.receive("stripe", None, forge=True)
    own_house.do(own_house.inbox.write_counts())
    page = enter(own_house)
    page.goto(own_house.url + "/rejected")
    one = page.locator("article.rejection")
    expect(one).to_have_count(1)
    expect(one.locator(".diagnosis")).not_to_be_empty()
    one.get_by_text("Headers and body").click()
    expect(one).to_contain_text("stripe-signature")
    viewer = enter(own_house, "viewer")
    viewer.goto(own_house.url + "/rejected?source=orders")
    expect(viewer.get_by_text("None rejected of orders")).to_be_visible()


def test_request_and_answer_stand_side_by_side(own_house: House, enter: Enter) -> None:
    event = own_house.message("5511988880142")
    own_house.settle()
    page = enter(own_house, viewport={"width": 1440, "height": 900})
    page.goto(own_house.url + f"/events/{event}?tab=deliveries")
    request, answer = page.get_by_label("Request of attempt 1"), page.get_by_label("Answer to attempt 1")
    expect(request).to_contain_text("POST http://127.0.0.1")
    expect(request).to_contain_text("webhook-signature: v1,")
    expect(request).to_contain_text("Signed: evt_")
    expect(answer).to_contain_text("200")
    expect(answer).to_contain_text("thank you")
    expect(answer).to_contain_text("first byte")
    left, right = request.bounding_box(), answer.bounding_box()
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]
    curl = request.get_by_role("button", name="Copy as curl").get_attribute("data-copy") or ""
    assert curl.startswith("curl -X POST -H ")
    page.set_viewport_size({"width": 390, "height": 844})
    left, right = request.bounding_box(), answer.bounding_box()
    assert left is not None
    assert right is not None
    assert left["y"] < right["y"]


def test_a_refused_query_offers_the_one_that_was_meant(own_house: House) -> None:
    cookie = {"cookie": own_house.login("viewer")}
    for wrong, meant in {"statsu:dead": "status:dead", "-status:daed x": "-status:dead x", "status:zz": None}.items():
        page = own_house.ask("GET", "/events?" + urlencode({"query": wrong}), headers=cookie)
        assert page.status == 400
        link = re.search(r'id="suggested" href="/events\?query=([^"]*)"', page.text)
        assert (unquote(link[1]) if link else None) == meant


def test_the_field_of_every_page_completes(own_house: House, enter: Enter) -> None:
    page = enter(own_house)
    page.goto(own_house.url + "/dead")
    field = page.get_by_role("combobox", name="Search events")
    field.fill("status:d")
    expect(page.get_by_role("group", name="status:")).to_be_visible()
    page.keyboard.press("Tab")
    expect(field).to_have_value(re.compile("status:d[a-z]+ "))
    page.keyboard.press("Enter")
    page.wait_for_url("**/events?query=status*")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(own_house.url + "/dead")
    page.get_by_role("combobox", name="Search events").focus()
    expect(page.get_by_role("group", name="Narrow by")).to_be_visible()
    assert page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
    box = page.locator(".complete").bounding_box()
    assert box
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
