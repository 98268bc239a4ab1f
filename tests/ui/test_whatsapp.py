"""A message that was not sent, from its dead letter to the recipient's phone: previewed, replayed, arrived once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from oncehook.inbox import Inbox
from oncehook.model import DeliveryStatus, EventId, Filter
from oncehook.testing.standins import MetaStandIn
from oncehook.upkeep import Limits
from oncehook.whatsapp import MetaCloud, Text
from tests.ui.conftest import Enter
from tests.ui.house import House

NUMBER = "+55 11 99999-0001"
WORDS = "Your order <b>42</b> is ready"


class SendingHouse(House):
    """A house that also answers over WhatsApp."""

    def _furnish(self) -> Inbox:
        self.meta = MetaStandIn().start()
        inbox = super()._furnish()
        sender = MetaCloud(self.meta.token, self.meta.phone_number_id, base_url=self.meta.url, allow_private=True)
        inbox.sender("answers", sender)
        inbox.limits = Limits()
        return inbox

    def close(self) -> None:
        super().close()
        self.meta.stop()

    def send(self, key: str, text: str = WORDS) -> str:
        event_id = self.do(self.inbox.send_message("answers", Text(to=NUMBER, text=text), key=key))
        self.settle()
        return event_id

    def status(self, event_id: str) -> DeliveryStatus:
        (found,) = self.do(self.inbox.admin.deliveries(Filter(event_id=EventId.parse(event_id)))).items
        return found.status


@pytest.fixture
def sending_house(tmp_path: Path) -> Iterator[SendingHouse]:
    house = SendingHouse(tmp_path)
    yield house
    house.close()


def test_the_dead_letter_of_a_failed_send_is_previewed_replayed_and_arrives_once(
    sending_house: SendingHouse, enter: Enter
) -> None:
    house = sending_house
    house.meta.close_window(NUMBER)
    event_id = house.send("order-42")
    assert (house.status(event_id), house.meta.sent) == (DeliveryStatus.dead, [])
    page = enter(house)
    page.goto(house.url + "/dead")
    expect(page.locator(".group")).to_contain_text("window_closed 131047")
    expect(page.locator(".group .message")).to_contain_text(f"{NUMBER} {WORDS}")
    page.locator(".group tbody").get_by_role("link", name="message.text").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("dead for answers")
    expect(page.locator("#head #message-text")).to_have_text(WORDS)
    page.wait_for_load_state()
    page.keyboard.press("r")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"meta {house.meta.url}")
    expect(dialog.locator("#message-to")).to_have_text(NUMBER)
    expect(dialog.locator("#message-text")).to_have_text(WORDS)
    expect(dialog).to_contain_text("will get it again")
    expect(dialog).not_to_contain_text("webhook-id")
    assert house.meta.sent == [], "nothing is sent by a bare look"
    house.meta.message(from_="5511999990001", text="Is it ready?")  # opens the window
    dialog.get_by_role("button", name="Replay 1 delivery to answers").click()
    expect(page.locator(".toast")).to_contain_text("Replay started")
    expect(page.locator("#head .state.done")).to_be_visible()
    assert [(sent.to, sent.text) for sent in house.meta.sent] == [("5511999990001", WORDS)]
    assert house.status(event_id) is DeliveryStatus.done


def test_many_are_previewed_before_they_are_replayed(sending_house: SendingHouse, enter: Enter) -> None:
    house = sending_house
    house.meta.expire_token()
    for n in range(3):
        house.send(f"k{n}", f"Message {n}")
    page = enter(house)
    page.goto(house.url + "/replays/plan?query=status:dead")
    page.get_by_text("The first 3 of 3").click()
    for n in range(3):
        expect(page.locator("details tbody")).to_contain_text(f"Message {n}")
    expect(page.locator("details tbody tr").first).to_contain_text(NUMBER)


def test_a_busy_day_is_seen_on_every_page(sending_house: SendingHouse, enter: Enter) -> None:
    for n in range(51):
        sending_house.do(sending_house.inbox.emit("whatsapp", "message.text", {"n": n}, key=str(n)))
    sending_house.settle()
    for n in range(60):  # receipts are no messages
        sending_house.do(sending_house.inbox.emit("whatsapp", "status.read", {"n": n}, key=f"read {n}"))
    sending_house.settle()
    page = enter(sending_house)
    page.goto(sending_house.url)
    banner = page.locator(".banner")
    expect(banner).to_contain_text("51 messages from whatsapp today, over the watermark of 50")
    expect(banner).to_have_class("banner wait")
    badge = page.locator("#rail").get_by_label("1 watermark crossed")
    expect(badge).to_have_text("1")
    expect(badge).to_have_class("badge wait")
    banner.get_by_role("link", name="See today's events").click()
    expect(page).to_have_url(re.compile(r"/events\?query=source%3Awhatsapp%20since%3A\d{4}-\d\d-\d\d"))
    page.goto(sending_house.url + "/system")
    expect(page.locator("#watermarks .state.over")).to_have_count(2)
    expect(page.locator("#watermarks .state.crossed")).to_have_count(0)
