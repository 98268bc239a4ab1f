"""What people do: replay one and many, retry, discard, pause; each with its plan, and none by a bare click."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from msgspec.structs import replace
from playwright.sync_api import Locator, Page, expect

from oncehook import clock
from oncehook.inbox import Inbox
from oncehook.model import DeliveryStatus, EventId, Filter, ReplayState, StoredDelivery
from oncehook.replay import encode_token
from tests.ui.conftest import Enter
from tests.ui.house import House

OURS = {"sec-fetch-site": "same-origin"}


def delivery(house: House, event_id: str) -> StoredDelivery:
    """The one delivery of an order."""
    (found,) = house.do(house.inbox.admin.deliveries(Filter(event_id=EventId.parse(event_id)))).items
    return found


class CommandHouse(House):
    """A house whose orders say where a person's words stand."""

    def _furnish(self) -> Inbox:
        inbox = super()._furnish()
        del inbox.sources["orders"]
        inbox.source("orders", verify="none", key="$.id", subject="$.order", type="$.type", preview="$.note")
        return inbox


def dead_orders(house: House, count: int) -> list[str]:
    house.mood.ship = "broken"
    orders = [house.order(f"dead_{n}", digital=True) for n in range(count)]
    house.settle()
    return orders


def test_a_dead_letter_is_found_understood_replayed_and_done(own_house: House, enter: Enter) -> None:
    """From the first page on, without reading anything: the story a newcomer must manage in a minute."""
    (order,) = dead_orders(own_house, 1)
    page = enter(own_house)
    page.goto(own_house.url)
    page.locator("#rail").get_by_role("link", name="Dead letters").click()
    expect(page.locator(".group")).to_contain_text("no 'shipping_address'")
    expect(page.locator(".evidence")).to_contain_text('File "app/hooks.py"')
    page.locator(".group tbody").get_by_role("link", name="order.paid").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("dead for ship")
    page.wait_for_load_state()
    own_house.mood.ship = "mended"
    page.keyboard.press("r")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Nothing is sent before you confirm")
    expect(dialog).to_contain_text("app.hooks.ship")
    expect(dialog).to_contain_text("oncehook replay dlv_")
    assert delivery(own_house, order).status is DeliveryStatus.dead
    dialog.get_by_label("Reason").fill("the address is optional now")
    dialog.get_by_role("button", name="Replay 1 delivery to ship").click()
    expect(page.locator(".toast")).to_contain_text("Replay started")
    expect(page.locator("#head .state.done")).to_be_visible()
    expect(page.locator(".moments")).to_contain_text("Replay by admin")
    expect(page.locator(".moments")).to_contain_text("the address is optional now")
    found = delivery(own_house, order)
    assert (found.status, found.run) == (DeliveryStatus.done, 2)


def test_a_replayed_delivery_says_so_and_leads_to_the_run_that_followed(own_house: House, enter: Enter) -> None:
    """In the list, on its page, and by a query."""
    order, other = dead_orders(own_house, 2)
    own_house.mood.ship = "mended"
    replay = own_house.do(own_house.inbox.admin.replay_one(delivery(own_house, order).id, actor="ann"))
    own_house.settle()
    page = enter(own_house)
    page.goto(own_house.url + "/events")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="is:replayed").click()
    row = page.locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator(".dlv.done")).to_have_text("ship done")
    row.get_by_role("link", name=re.compile("replayed ?: run 2")).click()
    expect(page).to_have_url(re.compile(rf"/events/{order}\?tab=deliveries#run-2-dlv_[0-9a-f]+$"))
    run = page.locator(page.url.partition("/events/")[2].partition("tab=deliveries")[2])
    expect(run).to_be_in_viewport()
    expect(run).to_contain_text("done")
    expect(page.locator("#head").get_by_role("link", name="replayed")).to_have_attribute(
        "href", re.compile(rf"/events/{order}\?tab=deliveries#run-2-dlv_")
    )
    page.locator("#detail").get_by_role("link", name="replayed").click()
    expect(page).to_have_url(re.compile(rf"/replays#{replay.id}$"))
    page.goto(f"{own_house.url}/events/{other}")
    expect(page.locator("#head")).not_to_contain_text("replayed")


def test_a_replay_is_offered_only_where_it_can_work(own_house: House, enter: Enter) -> None:
    (dead,) = dead_orders(own_house, 1)
    own_house.mood.ship = "later"
    waiting = own_house.order("waits")
    own_house.settle()
    page = enter(own_house)
    offers = page.get_by_role("link", name=re.compile("^Replay…"))
    for tab in ("body", "deliveries"):
        page.goto(f"{own_house.url}/events/{waiting}?tab={tab}")
        expect(page.get_by_role("link", name="Retry now…")).to_be_visible()
        expect(offers).to_have_count(0)
    page.keyboard.press("r")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.goto(f"{own_house.url}/events/{dead}?tab=deliveries")
    expect(offers).to_have_count(2)
    own_house.mood.ship = "mended"
    own_house.do(own_house.inbox.admin.replay_one(delivery(own_house, dead).id, actor="ann"))
    own_house.settle()
    page.reload()
    expect(page.locator("#head .state.done")).to_be_visible()
    expect(offers).to_have_count(0)  # a second one within a minute is refused
    clock.forward(61.0)
    page.reload()
    expect(offers).to_have_count(2)


def test_a_command_that_came_in_is_previewed(tmp_path: Path, enter: Enter) -> None:
    """What a person wrote, who gets it and when it came: on its page, among the dead, in the dialog and the plan."""
    house = CommandHouse(tmp_path)
    try:
        for n in range(2):
            house.order(f"dead_{n}", digital=True, note=f"Ring <b>twice</b> at {n}")
        house.settle()
        page = enter(house)
        page.goto(house.url + "/dead")
        expect(page.locator(".group .message").first).to_contain_text("Ring <b>twice</b> at 1")
        page.locator(".group tbody").get_by_role("link", name="order.paid").first.click()
        expect(page.locator("#head #message-text")).to_have_text("Ring <b>twice</b> at 1")
        page.wait_for_load_state()
        page.keyboard.press("r")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("app.hooks.ship")
        expect(dialog.locator("#message-text")).to_have_text("Ring <b>twice</b> at 1")
        expect(dialog).to_contain_text("First received")
        page.goto(house.url + "/replays/plan?query=status:dead")
        page.get_by_text("The first 2 of 2").click()
        for n in range(2):
            expect(page.locator("details tbody tr").nth(n)).to_contain_text(f"Ring <b>twice</b> at {n}")
    finally:
        house.close()


def test_many_are_replayed_with_progress(own_house: House, enter: Enter) -> None:
    dead_orders(own_house, 45)
    own_house.mood.ship = "mended"
    page = enter(own_house)
    page.goto(own_house.url + "/dead")
    page.get_by_role("link", name="Replay all 45").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("link", name="1 a second").click()  # it must last until somebody aborts it
    expect(dialog).to_contain_text("About 45 s")
    expect(dialog).to_contain_text("--rate 1/s")
    dialog.get_by_role("button", name="Replay 45 deliveries to ship").click()
    card = page.locator(".run-card")
    expect(card).to_contain_text("running")
    expect(card).to_contain_text("45 deliveries to ship")
    expect(page.locator("#rail .badge.busy")).to_have_text("1")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(card).to_contain_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(card).to_contain_text("running")
    page.wait_for_load_state()  # before its scripts run, a link to a dialog is a link to a page
    expect(card.locator(".key.done")).to_have_text(re.compile("[1-9][0-9]* done"))
    page.get_by_role("link", name="Abort…").click()
    expect(page.get_by_role("dialog")).to_contain_text("What is done stays done")
    page.get_by_role("button", name=re.compile("Abort")).click()
    expect(page.locator("table")).to_contain_text("aborted")
    expect(page.locator("table")).to_contain_text("to ship")
    (replay,) = own_house.do(own_house.inbox.admin.replays()).items
    assert replay.state is ReplayState.aborted
    assert 0 < replay.done < 45
    own_house.settle()


def test_a_large_or_repeated_replay_wants_its_number_typed(own_house: House, enter: Enter) -> None:
    own_house.mood.ship = "mended"
    for n in range(3):
        own_house.order(f"done_{n}")
    own_house.settle()
    page = enter(own_house)
    page.goto(own_house.url + "/replays/plan?query=source:orders")
    expect(page.locator(".sheet.page")).to_contain_text("3 are already done and stay out")
    expect(page.locator("[data-confirm]")).to_have_count(0)
    page.get_by_role("link", name="Send the done ones again").click()
    dialog = page.get_by_role("dialog")
    button = dialog.get_by_role("button", name="Replay 3 deliveries to ship")
    expect(button).to_be_disabled()
    dialog.get_by_label("Type 3 to confirm").fill("4")
    expect(button).to_be_disabled()
    dialog.get_by_label("Type 3 to confirm").fill("3")
    button.click()
    expect(page.locator("table")).to_contain_text("done")
    assert own_house.do(own_house.inbox.admin.replays()).items[0].planned == 3


def test_the_server_wants_the_number_too(own_house: House) -> None:
    own_house.mood.ship = "mended"
    own_house.order("once")
    own_house.settle()
    headers = {"cookie": own_house.login("operator"), **OURS}
    admin = own_house.inbox.admin
    plan = own_house.do(admin.plan(admin.build_request("source:orders", force=True)))
    answer = own_house.ask("POST", "/replays", form={"plan": plan.token, "typed": "2"}, headers=headers)
    assert (answer.status, "Type 1 to confirm" in answer.text) == (400, True)
    assert not own_house.do(admin.replays()).items


def test_a_plan_for_a_handler_says_what_it_gets_and_offers_a_new_id(own_house: House) -> None:
    dead_orders(own_house, 2)
    cookie = {"cookie": own_house.login("operator")}
    plan = "/replays/plan?query=status:dead"
    same, new = (own_house.ask("GET", plan + more, headers=cookie).text for more in ("", "&fresh_id=1"))
    for page in (same, new):
        assert "A handler that deduplicates by <code>idempotency_key</code> will ignore these." in page
        assert "webhook-id" not in page
    checked = 'name="fresh_id" value="1" checked'
    assert (checked in same, checked in new) == (False, True)
    admin = own_house.inbox.admin
    own_house.do(admin.pause("ship", actor="ana"))
    said = own_house.do(admin.plan(admin.build_request("status:dead"))).notes
    page = unescape(own_house.ask("GET", plan, headers=cookie).text)
    assert any("is paused" in note for note in said)
    about_ids = ("gets the same event", "--fresh-id")  # the page has a box to tick instead
    assert [note for note in said if note not in page and not any(one in note for one in about_ids)] == []


def test_a_double_click_is_one_replay(own_house: House) -> None:
    dead_orders(own_house, 2)
    own_house.mood.ship = "mended"
    headers = {"cookie": own_house.login("operator"), **OURS}
    admin = own_house.inbox.admin
    plan = own_house.do(admin.plan(admin.build_request("status:dead")))
    form = {"plan": plan.token, "request_key": "one-click"}
    first, second = (own_house.ask("POST", "/replays", form=form, headers=headers) for _ in range(2))
    assert first.status == second.status == 303
    assert first.headers["location"] == second.headers["location"]
    assert len(own_house.do(admin.replays()).items) == 1
    own_house.settle()


def test_a_set_that_has_changed_is_planned_anew(own_house: House) -> None:
    dead_orders(own_house, 2)
    headers = {"cookie": own_house.login("operator"), **OURS}
    admin = own_house.inbox.admin
    plan = own_house.do(admin.plan(admin.build_request("status:dead")))
    own_house.do(admin.discard(plan.sample[0].id, actor="somebody else"))
    answer = own_house.ask("POST", "/replays", form={"plan": plan.token}, headers=headers)
    assert answer.status == 409
    assert "The plan said 2, now it would be 1." in answer.text
    assert "Replay 1 delivery" in answer.text
    assert not own_house.do(admin.replays()).items


def test_retry_discard_pause_and_resume(own_house: House, enter: Enter) -> None:
    own_house.mood.ship = "later"
    order = own_house.order("late")
    own_house.settle()
    page = enter(own_house)
    page.goto(f"{own_house.url}/events/{order}")
    own_house.mood.ship = "mended"
    page.get_by_role("link", name="Retry now…").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry 1 delivery now").click()
    expect(page.locator("#head .state.done")).to_be_visible()

    (dead,) = dead_orders(own_house, 1)
    page.goto(f"{own_house.url}/events/{dead}")
    page.keyboard.press("d")
    page.get_by_role("dialog").get_by_label("Reason").fill("a test order")
    page.get_by_role("button", name="Discard 1 delivery").click()
    expect(page.locator(".moments")).to_contain_text("a test order")
    assert delivery(own_house, dead).status is DeliveryStatus.discarded

    page.goto(own_house.url + "/destinations")
    page.locator("#ship").get_by_role("link", name="Pause…").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("stocktaking")
    page.get_by_role("button", name="Pause ship").click()
    expect(page.locator("#ship")).to_contain_text("stocktaking")
    page.locator("#ship").get_by_role("button", name="Resume").click()
    expect(page.locator("#ship .state.box")).to_have_text("ready")

    page.goto(own_house.url + "/system")
    for act in ("login", "retry", "discard", "pause", "resume"):
        expect(page.locator("#audit tbody")).to_contain_text(act)


def asked_to_discard(house: House, enter: Enter, count: int) -> tuple[Page, Locator]:
    """The page of dead letters with so many of them, and the dialog that closes all."""
    dead_orders(house, count)
    page = enter(house)
    page.goto(house.url + "/dead")
    page.get_by_role("link", name=f"Discard {count}").click()
    return page, page.get_by_role("dialog")


def test_what_dies_while_the_dialog_is_open_is_not_discarded(own_house: House, enter: Enter) -> None:
    page, dialog = asked_to_discard(own_house, enter, 2)
    dialog.get_by_label("Reason").fill("digital goods need no address")
    own_house.order("dead_late", digital=True)
    own_house.settle()
    dialog.get_by_role("button", name="Discard 2 deliveries").click()
    expect(page.locator("#main")).to_contain_text("1 delivery failed for good")
    assert (own_house.levels()["ship"].discarded, own_house.levels()["ship"].dead) == (2, 1)


def test_more_than_were_shown_are_shown_before_they_are_discarded(own_house: House) -> None:
    dead_orders(own_house, 2)
    headers = {"cookie": own_house.login("operator"), **OURS}
    admin = own_house.inbox.admin
    wish, seen = admin.read_plan(own_house.do(admin.plan(admin.build_request("status:dead"))).token)
    form = {"plan": encode_token(wish, replace(seen, count=1)), "reason": "no <address>"}
    answer = own_house.ask("POST", "/dead/discard", form=form, headers=headers)
    assert answer.status == 409
    assert "The plan said 1, now it would be 2." in answer.text
    assert "Discard 2 deliveries" in answer.text
    assert 'value="no &lt;address&gt;"' in answer.text
    assert own_house.levels()["ship"].discarded == 0


def test_a_group_is_discarded_with_a_reason(own_house: House, enter: Enter) -> None:
    page, dialog = asked_to_discard(own_house, enter, 3)
    dialog.get_by_role("button", name="Discard 3 deliveries").click()
    expect(dialog).to_be_visible()  # a reason is required
    dialog.get_by_label("Reason").fill("digital goods need no address")
    dialog.get_by_role("button", name="Discard 3 deliveries").click()
    expect(page.locator("#main")).to_contain_text("No dead letters")
    assert own_house.levels()["ship"].discarded == 3


def test_selected_rows_are_replayed(own_house: House, enter: Enter) -> None:
    dead_orders(own_house, 3)
    own_house.mood.ship = "mended"
    page = enter(own_house)
    page.goto(own_house.url + "/events")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.locator("#selbar")).to_contain_text("2 selected")
    page.keyboard.press("r")
    page.get_by_role("dialog").get_by_role("button", name="Replay 2 deliveries to ship").click()
    expect(page.locator("table")).to_contain_text("done")
    own_house.settle()
    assert own_house.levels()["ship"].dead == 1


def test_dead_letters_are_narrowed_counted_over_runs_and_chosen_one_by_one(own_house: House, enter: Enter) -> None:
    for name in ("one", "two"):
        own_house.order(name, digital=True)
    own_house.moods["/billing"] = (422, b"no")
    own_house.receive("stripe", None)
    own_house.settle()
    cookie = {"cookie": own_house.login()}

    def groups(path: str) -> int:
        return own_house.ask("GET", path, headers=cookie).text.count('<div class="group"')

    assert [groups(path) for path in ("/dead", "/dead?destination=ship", "/dead?source=stripe")] == [2, 1, 1]
    assert groups("/dead?destination=ship&source=stripe") == 0
    page = enter(own_house)
    page.goto(own_house.url + "/dead?destination=ship")
    page.get_by_role("checkbox", name="Select order.paid").first.check()
    expect(page.locator("#selbar")).to_contain_text("1 selected")
    page.locator("#selbar").get_by_role("link", name="Replay…").click()
    page.get_by_role("dialog").get_by_role("button", name="Replay").click()
    expect(page.locator(".toast")).to_contain_text("Replay started")
    own_house.settle()
    page.goto(own_house.url + "/dead?destination=ship")
    expect(page.locator("#groups tbody tr").filter(has_text="2 in 2 runs")).to_have_count(1)


def test_a_replay_that_cannot_be_made_now_says_why(own_house: House) -> None:
    event = own_house.order("one", digital=True)
    own_house.settle()
    cookie = {"cookie": own_house.login()}
    plan = own_house.ask("GET", "/replays/plan?query=status:dead", headers=cookie).text
    assert "Plan of" not in plan
    (until,) = re.findall(r"What was received before (\d\d:\d\d:\d\d) UTC", plan)
    assert f"{until}Z" in plan
    cards = own_house.ask("GET", "/destinations", headers=cookie).text
    assert "/replays/plan?query=destination%3Aship+status%3Adead" in cards
    since = "query=destination%3Aship+status%3Adead+since%3A1h"
    plan = own_house.ask("GET", "/replays/plan?query=destination%3Aship+status%3Adead", headers=cookie).text
    assert since in plan
    plan = own_house.ask("GET", f"/replays/plan?{since}", headers=cookie).text
    assert re.search(r'aria-current="true">last hour<', plan)
    assert "no-replay" not in own_house.ask("GET", f"/events/{event}", headers=cookie).text
    (dead,) = own_house.do(own_house.inbox.admin.deliveries(own_house.inbox.admin.read("status:dead"))).items
    own_house.do(own_house.inbox.admin.replay_one(dead.id, actor="ana"))
    own_house.settle()
    page = own_house.ask("GET", f"/events/{event}", headers=cookie).text
    assert re.search(r'id="no-replay">just replayed, possible again at \d\d:\d\d:\d\d<', page)
    assert '<button class="btn" type="button" disabled aria-describedby="no-replay">' in page
