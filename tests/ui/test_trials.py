"""Send a test, send a sample: from their pages, with script and without, for those who may."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from oncehook.errors import Forbidden
from oncehook.model import digest
from tests.ui.conftest import Enter
from tests.ui.house import House
from tests.ui.test_acts import OURS
from tests.ui.test_pages import axed

KIND = "invoice.payment_failed"


@pytest.mark.parametrize("scripted", [True, False])
def test_a_destination_is_tested_from_its_page(own_house: House, enter: Enter, scripted: bool) -> None:
    own_house.inbox.admin.test_pause = 3600.0  # however long we look at the answer
    page = enter(own_house, java_script_enabled=scripted, viewport={"width": 1280, "height": 900})
    own_house.moods["/webhook/abc"] = (503, b"busy")
    page.goto(own_house.url + "/destinations")
    card = page.locator("#n8n")
    card.get_by_role("link", name="Send test…").click()
    expect(page.get_by_role("heading", name="Send a test to n8n")).to_be_visible()
    page.get_by_role("button", name="Send 1 test to n8n").click()
    expect(page.get_by_role("heading", name="n8n answered 503")).to_be_visible()
    expect(page.locator(".sheet:not(#keys)")).to_contain_text("failed")
    if scripted:
        assert axed(page) == []
    page.get_by_role("link", name="Back to destinations").click()
    expect(page.get_by_role("heading", level=1, name="Destinations")).to_be_visible()
    answer = own_house.ask("POST", "/destinations/n8n/test", headers={"cookie": own_house.login("admin"), **OURS})
    assert answer.status == 429
    assert "tested a moment ago" in answer.text


def test_an_operator_is_shown_the_class_and_a_viewer_no_button(own_house: House, enter: Enter) -> None:
    own_house.moods["/webhook/abc"] = (404, b"canary-body")
    cookie = {"cookie": own_house.login("operator"), **OURS}
    answer = own_house.ask("POST", "/destinations/n8n/test", headers=cookie)
    assert answer.status == 200
    assert "n8n answered 4xx" in answer.text
    assert not re.search(r"\b404\b", answer.text)
    assert "canary-body" not in answer.text
    page = enter(own_house, "viewer")
    for path in ("/destinations", "/sources"):
        page.goto(own_house.url + path)
        expect(page.get_by_role("link", name="Send", exact=False)).to_have_count(0)
    seen = own_house.ask("GET", "/destinations/n8n/test", headers={"cookie": own_house.login("viewer")})
    assert seen.status == 403
    strange = own_house.ask("POST", "/destinations/billing/test", headers={**cookie, "sec-fetch-site": "cross-site"})
    assert strange.status == 403


@pytest.mark.parametrize("scripted", [True, False])
def test_a_sample_is_sent_from_the_page_of_sources(own_house: House, enter: Enter, scripted: bool) -> None:
    page = enter(own_house, "operator", java_script_enabled=scripted)
    page.goto(own_house.url + "/sources")
    expect(page.locator("#orders").get_by_role("link", name="Send a sample…")).to_have_count(0)
    page.locator("#stripe").get_by_role("link", name="Send a sample…").click()
    expect(page.locator(".sheet:not(#keys)")).to_contain_text("goes to billing")
    page.get_by_label("Sample", exact=True).select_option(index=1)
    kind = page.get_by_label("Sample", exact=True).input_value()
    page.get_by_role("button", name="Send 1 sample to stripe").click()
    expect(page.get_by_role("heading", name="stripe answered 200")).to_be_visible()
    expect(page.locator(".sheet:not(#keys)")).to_contain_text("accepted")
    if scripted:
        assert axed(page) == []
    page.get_by_role("link", name="See the event").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(kind)


def test_a_sample_is_edited_before_it_is_signed_and_sent(own_house: House, enter: Enter) -> None:
    page = enter(own_house, "admin")
    page.goto(own_house.url + "/sources")
    page.locator("#stripe").get_by_role("link", name="Send a sample…").click()
    body = page.get_by_label("Body", exact=True)
    page.get_by_label("Sample", exact=True).select_option(KIND)
    expect(body).to_have_value(re.compile(KIND))
    assert axed(page) == []
    body.fill(re.sub(r'"customer": "[^"]*"', '"customer": "cus_edited"', body.input_value()))
    page.get_by_role("button", name="Send 1 sample to stripe").click()
    expect(page.get_by_role("heading", name="stripe answered 200")).to_be_visible()
    page.get_by_role("link", name="See the event").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(KIND)
    expect(page.locator(".facts")).to_contain_text("cus_edited")


def test_an_operator_sends_samples_as_they_are(own_house: House) -> None:
    """Whoever writes a body that is signed as the sender's could say that an invoice was paid."""
    cookie = {"cookie": own_house.login("operator"), **OURS}
    assert "sample-body" not in own_house.ask("GET", "/sources/stripe/sample", headers=cookie).text
    form = {"type": KIND, "shown": KIND, "body": '{"id": "evt_1"}'}
    assert own_house.ask("POST", "/sources/stripe/sample", form=form, headers=cookie).status == 403
    del form["body"]
    assert own_house.ask("POST", "/sources/stripe/sample", form=form, headers=cookie).status == 200


def test_who_sees_one_account_cannot_write_a_sample(own_house: House) -> None:
    """Its body could name another account."""
    limited = own_house.inbox.admin.within_account("42")
    with pytest.raises(Forbidden):
        own_house.do(limited.send_sample("stripe", actor="ana", body=b"{}"))


def test_what_was_erased_says_so(own_house: House, enter: Enter) -> None:
    order = own_house.order("gone", order="order/canary")
    own_house.settle()
    own_house.do(own_house.inbox.admin.erase("order/canary", actor="ana", reason="request 9"))
    page = enter(own_house)
    page.goto(f"{own_house.url}/events/{order}")
    expect(page.get_by_role("heading", level=1)).to_contain_text("erased")
    expect(page.get_by_role("link", name="Replay…")).to_have_count(0)
    expect(page.locator("main")).not_to_contain_text("canary")
    page.goto(own_house.url + "/events")
    expect(page.locator("tbody")).to_contain_text("erased")


def test_a_plan_marks_a_recipient_that_has_moved(own_house: House, enter: Enter) -> None:
    own_house.mood.ship = "broken"
    own_house.order("moved", digital=True)
    own_house.settle()
    ship = own_house.inbox.destinations["ship"]
    own_house.do(own_house.inbox.store.note_recipients({ship.id: digest(b"another address")}))
    page = enter(own_house)
    page.goto(own_house.url + "/dead")
    page.get_by_role("link", name="Replay all").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".state.conflict")).to_have_text("changed")
    expect(dialog).to_contain_text("first delivered to another address than ship has now")
    assert axed(page) == []
