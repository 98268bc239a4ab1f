"""Pages that move by themselves: rows as they come, counts that follow, and nothing that moves under a reader."""

from __future__ import annotations

import http.client
import re

from playwright.sync_api import Page, expect

from oncehook.model import Filter
from tests.ui.conftest import Enter
from tests.ui.house import House

ROWS = "[data-feed] tbody tr"


def watching(page: Page, house: House, path: str) -> None:
    """Go to a page and wait until it listens."""
    page.goto(house.url + path)
    while not house.stream.is_there:
        page.wait_for_timeout(10)


def test_rows_come_by_themselves_and_wait_for_a_reader(own_house: House, enter: Enter) -> None:
    page = enter(own_house)
    watching(page, own_house, "/live")
    own_house.order("one")
    expect(page.locator(ROWS).filter(has_text="order/one")).to_have_count(2)  # accepted, and done
    expect(page.locator(ROWS).first).to_contain_text("done")

    page.locator(ROWS).first.hover()
    own_house.order("two")
    expect(page.locator("[data-wait] b")).to_have_text("2")
    expect(page.locator(ROWS)).to_have_count(2)
    page.get_by_role("heading", name="Live").hover()
    expect(page.locator(ROWS)).to_have_count(4)

    page.keyboard.press("l")
    own_house.order("three")
    expect(page.locator("[data-wait] b")).to_have_text("2")
    expect(page.locator(ROWS)).to_have_count(4)
    page.get_by_role("button", name="Live").click()
    expect(page.locator(ROWS)).to_have_count(6)


def test_attempts_of_the_past_are_there_when_the_page_comes(own_house: House) -> None:
    own_house.order("well")
    own_house.mood.ship = "later"
    own_house.order("late")
    own_house.settle()
    cookie = {"cookie": own_house.login("viewer")}

    def rows(kind: str) -> list[str]:
        page = own_house.ask("GET", f"/live?kind={kind}", headers=cookie).text
        return page[page.index("<tbody>") : page.index("</tbody>")].split("<tr>")[1:]

    retry, accepted, done, first = rows("all")
    assert "the warehouse is closed" in retry
    assert re.search(r"retry 1<.*, after \d+ ms", retry, re.DOTALL)
    assert re.search(r'c-out">\d+ ms<', done)
    assert "accepted" in accepted
    assert "accepted" in first
    assert [len(rows(kind)) for kind in ("arrivals", "attempts", "dead")] == [2, 2, 0]


def test_text_that_is_being_selected_does_not_move(own_house: House, enter: Enter) -> None:
    own_house.order("zero")
    own_house.settle()
    page = enter(own_house)
    watching(page, own_house, "/live")
    expect(page.locator(ROWS)).to_have_count(2)  # accepted, and done
    page.evaluate("getSelection().selectAllChildren(document.querySelector('[data-feed] tbody td'))")
    own_house.order("one")
    expect(page.locator("[data-wait]")).to_contain_text(re.compile("[12] waiting"))
    expect(page.locator(ROWS)).to_have_count(2)
    page.evaluate("getSelection().removeAllRanges()")
    expect(page.locator(ROWS)).to_have_count(4)


def test_no_more_than_five_hundred_rows(own_house: House, enter: Enter) -> None:
    page = enter(own_house)
    watching(page, own_house, "/live")
    for count in (200, 400, 500):
        for n in range(200):
            fields = {
                "source": "orders",
                "outcome": "accepted",
                "type": "flood",
                "subject": str(n),
                "duration_s": 0.001,
            }
            own_house.loop.call_soon_threadsafe(own_house.stream.publish, "arrival", fields)
        expect(page.locator(ROWS)).to_have_count(count)


def test_rejected_and_failing_ones_say_why(own_house: House, enter: Enter) -> None:
    page = enter(own_house)
    watching(page, own_house, "/live")
    own_house.receive("stripe", forge=True)
    expect(page.locator(ROWS).first).to_contain_text("signature_invalid")
    own_house.order("bad", digital=True)
    expect(page.locator(ROWS).first).to_contain_text("no 'shipping_address'")
    expect(page.locator(ROWS).first.locator(".state.dead")).to_be_visible()


def test_new_events_are_announced_and_come_when_asked_for(own_house: House, enter: Enter) -> None:
    own_house.order("one")
    page = enter(own_house)
    watching(page, own_house, "/events?query=source:orders")
    own_house.order("two")
    own_house.receive("stripe")
    # A page asks at every tick, and every 20 s in case one was lost.
    expect(page.locator("#fresh")).to_contain_text("1 new event matches", timeout=15_000)
    expect(page.locator("#list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="1 new event").click()
    expect(page.locator("#list tbody tr")).to_have_count(2)


def test_rows_in_view_follow_their_deliveries(own_house: House, enter: Enter) -> None:
    own_house.mood.ship = "later"
    own_house.order("one")
    own_house.settle()
    page = enter(own_house)
    watching(page, own_house, "/events?query=status:pending")
    row = page.locator("#list tbody tr")
    expect(row).to_contain_text("retry at")
    page.get_by_role("checkbox", name="Select order.paid").check()
    own_house.mood.ship = "well"
    (waiting,) = own_house.do(own_house.inbox.admin.deliveries(Filter())).items
    own_house.do(own_house.inbox.admin.retry(waiting.id, actor="ana"))
    expect(row).not_to_contain_text("retry at")
    expect(row.locator(".dlv.done")).to_have_text("ship done")
    expect(page.get_by_role("checkbox", name="Select order.paid")).to_be_checked()


def test_an_open_event_follows_its_deliveries(own_house: House, enter: Enter) -> None:
    own_house.mood.ship = "later"
    order = own_house.order("one")
    own_house.settle()
    page = enter(own_house)
    watching(page, own_house, f"/events/{order}")
    page.locator(".tree summary").first.click()  # closed by the reader, and must stay so
    own_house.order("one", changed=True)
    expect(page.locator(".moments")).to_contain_text("Arrival 2, conflict")
    assert page.locator(".tree > details").get_attribute("open") is None


def test_paused_pages_stand_still(own_house: House, enter: Enter) -> None:
    own_house.order("one")
    own_house.settle()
    page = enter(own_house)
    # It looks once when it begins to listen. An answer that is under way is shown, although somebody pauses then.
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
        watching(page, own_house, "/")
    page.get_by_role("button", name="Paused").click()
    own_house.order("bad", digital=True)
    own_house.settle()
    page.wait_for_timeout(1500)
    expect(page.locator("#rail .badge.dead")).to_have_count(0)
    page.get_by_role("button", name="Live", exact=True).click()
    expect(page.locator("#rail .badge.dead")).to_have_text("1")
    expect(page.locator("#arrivals canvas")).to_have_count(1)  # drawn anew, and not lost


def test_a_watch_ends_with_its_session(own_house: House) -> None:
    cookie = {"cookie": own_house.login()}
    watch = http.client.HTTPConnection("127.0.0.1", own_house.port, timeout=90)
    watch.request("GET", "/ui/stream?page=live", headers=cookie)
    answer = watch.getresponse()
    assert answer.readline().startswith(b"retry")
    own_house.ask("POST", "/logout", form={}, headers={**cookie, "sec-fetch-site": "same-origin"})
    own_house.order("after")
    rest = answer.read()  # to its end, which must come
    watch.close()
    assert b"order/after" not in rest
