"""Accounts made in the browser: a secret shown once, names that are taken, the way to the portal, and who may not."""

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
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from oncehook import Person
from oncehook.inbox import Inbox
from oncehook.web.dashboard.setup import LISTED
from tests.ui.conftest import Enter
from tests.ui.house import House
from tests.ui.test_acts import OURS
from tests.ui.test_define import OpenHouse
from tests.ui.test_pages import PHONE, axed
from tests.ui.test_portal import PortalHouse


class ShopHouse(OpenHouse, PortalHouse):
    """A house with a portal, and a source that has an address for each account."""

    def _furnish(self) -> Inbox:
        inbox = super()._furnish()
        inbox.source("shopify", preset="shopify", account="address", budget="90s")
        return inbox


@pytest.fixture
def shops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShopHouse]:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())
    house = ShopHouse(tmp_path)
    try:
        yield house
    finally:
        house.close()


def post_order(address: str, secret: str, key: str) -> int:
    """Post an order as Shopify would, signed with what the page has shown; return the status."""
    body = json.dumps({"id": key}).encode()
    signature = base64.b64encode(hmac.digest(secret.encode(), body, hashlib.sha256)).decode()
    headers = {
        "content-type": "application/json",
        "x-shopify-webhook-id": key,
        "x-shopify-topic": "orders/paid",
        "x-shopify-hmac-sha256": signature,
    }
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.netloc, timeout=90)
    connection.request("POST", place.path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def shown(page: Page) -> tuple[str, str]:
    """The address and the secret that a page shows."""
    address, secret = page.locator(".sheet.page .cmd code").all_inner_texts()
    return address, secret


@pytest.mark.parametrize("scripted", [True, False])
def test_an_account_is_made_and_its_secret_is_shown_once(shops: ShopHouse, enter: Enter, scripted: bool) -> None:
    page = enter(shops, java_script_enabled=scripted)
    page.goto(shops.url)
    page.locator("#rail").get_by_role("link", name="Accounts").click()
    expect(page.get_by_role("heading", name="No accounts")).to_be_visible()
    page.get_by_role("link", name="New account…").click()
    page.get_by_label("ID", exact=True).fill("42")
    page.get_by_label("Name", exact=True).fill("Ana's shop")
    page.get_by_label("Aliases").fill("1065403\n ana.example \n")
    page.get_by_label("Secret for shopify").fill("generate")
    page.get_by_role("button", name="Create account").click()
    expect(page.get_by_role("heading", name="42 is ready")).to_be_visible()
    address, secret = shown(page)
    assert address == f"{shops.url}/in/shopify/42"
    assert secret not in page.url
    assert (post_order(address, secret, "o1"), post_order(address, "x" * 64, "o2")) == (200, 401)
    page.get_by_role("link", name="Back to accounts").click()
    row = page.locator("[id='42']")
    for text in ("Ana's shop", "1065403", "ana.example", "shopify"):
        expect(row).to_contain_text(text)
    row.get_by_role("link", name="Events").click()
    expect(page).to_have_url(re.compile(r"/events\?query=account"))
    expect(page.locator("#list tbody tr")).to_have_count(1)
    cookie = {"cookie": shops.login()}
    for path in ("/accounts", "/accounts/42/define", "/system"):
        assert secret not in shops.ask("GET", path, headers=cookie).text
    made = shops.do(shops.inbox.define.accounts.get("42"))
    assert (made.name, list(made.aliases)) == ("Ana's shop", ["1065403", "ana.example"])


def test_a_name_that_is_taken_is_said_beside_its_field_and_may_be_moved(shops: ShopHouse, enter: Enter) -> None:
    shops.do(shops.inbox.define.account("42", aliases=["1065403"]))
    page = enter(shops)
    page.goto(shops.url + "/accounts/new")
    page.get_by_label("ID", exact=True).fill("42")
    page.get_by_role("button", name="Create account").click()
    expect(page.locator("#wrong-id")).to_have_text('There is an account "42" already.')
    expect(page.get_by_label("Move aliases")).to_have_count(0)
    page.get_by_label("ID", exact=True).fill("no spaces")
    page.get_by_role("button", name="Create account").click()
    expect(page.locator("#wrong-id")).to_contain_text("cannot be the id of an account. An id has up to 100 letters")
    page.get_by_label("ID", exact=True).fill("43")
    page.get_by_label("Aliases").fill("1065403")
    page.get_by_label("Secret for shopify").fill("short")
    page.get_by_role("button", name="Create account").click()
    expect(page.locator("[id='wrong-secrets.shopify']")).to_contain_text("must be a secret itself")
    expect(page.get_by_label("Secret for shopify")).to_have_value("")  # not sent back
    page.get_by_role("button", name="Create account").click()
    expect(page.locator("#wrong-aliases")).to_contain_text('"1065403" is another account\'s.')
    expect(page.get_by_label("Aliases", exact=True)).to_have_attribute("aria-invalid", "true")
    assert axed(page) == []
    page.get_by_label("Move aliases that are another account's").check()
    page.get_by_role("button", name="Create account").click()
    expect(page.get_by_role("heading", name="43 is ready")).to_be_visible()
    accounts = shops.do(shops.inbox.define.accounts.all())
    assert {one.id: list(one.aliases) for one in accounts} == {"42": [], "43": ["1065403"]}


def test_an_account_is_changed_its_secret_rotated_and_it_is_deleted(shops: ShopHouse, enter: Enter) -> None:
    define = shops.inbox.define
    shops.do(define.account("42", name="Ana", aliases=["a", "b"]))
    page = enter(shops)
    page.goto(shops.url + "/accounts/42/define")
    expect(page.get_by_label("Aliases")).to_have_value("a\nb")
    page.get_by_label("Name", exact=True).fill("Ana & Co")
    page.get_by_label("Aliases").fill("b")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".toast")).to_contain_text("Changed")
    changed = shops.do(define.accounts.get("42"))
    assert (changed.name, list(changed.aliases), list(changed.secret_sources)) == ("Ana & Co", ["b"], [])

    page.get_by_label("Secret for shopify").fill("generate")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="42 has a secret")).to_be_visible()
    address, old = shown(page)
    page.goto(shops.url + "/accounts/42/define")
    expect(page.get_by_label("Secret for shopify")).to_have_count(0)  # it has one, which is rotated
    page.get_by_role("button", name="Rotate").click()
    expect(page.get_by_role("heading", name="42 has a new secret")).to_be_visible()
    expect(page.locator(".sheet.page")).to_contain_text("nobody is refused")
    _, new = shown(page)
    assert [post_order(address, one, f"r{n}") for n, one in enumerate((old, new))] == [200, 200]
    page.goto(shops.url + "/accounts/42/define")
    page.get_by_role("button", name="Remove secret").click()
    expect(page.locator(".toast")).to_contain_text("Changed")
    assert list(shops.do(define.accounts.get("42")).secret_sources) == []

    page.get_by_role("button", name="Disable").click()
    expect(page.locator(".toast")).to_contain_text("Disabled")
    expect(page.get_by_role("button", name="Make a link")).to_have_count(0)
    page.goto(shops.url + "/accounts")
    expect(page.locator("[id='42']")).to_contain_text("disabled")
    page.locator("[id='42']").get_by_role("link", name="Change…").click()
    page.get_by_role("button", name="Enable").click()
    expect(page.locator(".toast")).to_contain_text("Enabled")

    shops.do(define.destination("hers", url="https://ana.example/", account="42"))
    page.get_by_role("link", name="Delete…").click()
    page.get_by_role("button", name="Delete 42").click()
    expect(page.get_by_role("alert")).to_contain_text(
        'Account 42 still has destination "hers". Delete what is defined for it first.'
    )
    shops.do(define.delete("destination", "hers"))
    page.get_by_role("button", name="Delete 42").click()
    expect(page.locator(".toast")).to_contain_text("Deleted")
    assert shops.do(define.accounts.all()) == []


def test_a_link_leads_a_customer_into_the_portal_which_has_no_accounts(shops: ShopHouse, enter: Enter) -> None:
    shops.inbox.address = shops.url
    shops.do(shops.inbox.define.account("42"))
    page = enter(shops)
    page.goto(shops.url + "/accounts/42/define")
    page.get_by_label("Person").fill("ana")
    page.get_by_role("button", name="Make a link").click()
    expect(page.get_by_role("heading", name="42 has a link to its portal")).to_be_visible()
    expect(page.locator(".note")).to_contain_text("works once")
    link = page.locator("#secret code").inner_text()
    customer = enter(shops, None)
    customer.goto(link)
    expect(customer.get_by_role("heading", name="Destinations", exact=True)).to_be_visible()
    expect(customer.locator("#rail").get_by_role("link", name="Accounts")).to_have_count(0)
    for path in ("/accounts", "/accounts/new", "/accounts/42/define", "/routes", "/routes/new"):
        answer = customer.goto(shops.url + "/portal" + path)
        assert answer is not None
        assert answer.status == 404, path
    audit = shops.do(shops.inbox.admin.audit(limit=20))
    assert ("admin", "portal", "42") in [(one.actor, one.act, one.target) for one in audit]


def test_accounts_are_for_admins_who_see_all_of_them(
    shops: ShopHouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = ("/accounts", "/accounts/new", "/accounts/42/define", "/accounts/42/delete")
    acts = ("define", "rotate", "remove-secret", "enable", "disable", "portal", "delete")
    shops.do(shops.inbox.define.account("42"))
    for role in ("viewer", "operator"):
        cookie = {"cookie": shops.login(role), **OURS}
        assert "/accounts" not in shops.ask("GET", "/events", headers=cookie).text
        assert {shops.ask("GET", path, headers=cookie).status for path in pages} == {403}
    (tmp_path / "scoped").mkdir()
    people = [
        Person("ana", "admin", accounts=["42"]),
        Person("bob", "admin", sources=["stripe"]),
    ]
    for person in people:
        house = House(tmp_path / "scoped", prefix="/inbox", authorize=lambda request, who=person: who)  # type: ignore[misc]
        try:
            if not house.do(house.inbox.define.accounts.all()):
                house.do(house.inbox.define.account("42"))
            assert "/accounts" not in house.ask("GET", "/events").text
            assert {house.ask("GET", path).status for path in pages} == {403}
            assert house.ask("POST", "/accounts", form={"id": "43"}, headers=OURS).status == 403
            for act in acts:
                assert house.ask("POST", f"/accounts/42/{act}", form={}, headers=OURS).status == 403, act
            assert [one.id for one in house.do(house.inbox.define.accounts.all())] == ["42"]
        finally:
            house.close()


def test_one_of_many_accounts_is_found_by_its_id_or_alias(shops: ShopHouse, enter: Enter) -> None:
    async def make() -> None:
        for number in range(LISTED + 5):
            await shops.inbox.define.account(f"c{number:04}", aliases=[f"shop-{number}.example"])

    shops.do(make())
    page = enter(shops, viewport=PHONE)
    page.goto(shops.url + "/accounts")
    rows = page.locator("#list tbody tr")
    expect(rows).to_have_count(LISTED)
    page.get_by_role("link", name="Next").click()
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text(f"c{LISTED:04}")
    for name in ("c0007", "shop-7.example"):
        page.get_by_label("ID or alias").fill(name)
        page.get_by_role("button", name="Find").click()
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("c0007")
    page.get_by_label("ID or alias").fill("<b>nobody")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("heading", name="No such account")).to_be_visible()
    page.get_by_role("link", name="All accounts").click()
    expect(rows).to_have_count(LISTED)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_of_accounts_can_be_read_by_everybody_on_every_screen(shops: ShopHouse, enter: Enter, theme: str) -> None:
    long = "x" * 100
    shops.do(shops.inbox.define.account("42", name="Ana's shop", aliases=["1", "2", "3", "4"]))
    shops.do(shops.inbox.define.account(long, name=long, aliases=[long + "1"], secrets={"shopify": "generate"}))
    page = enter(shops, color_scheme=theme, viewport=PHONE)
    wrong: dict[str, list[str]] = {}
    for path in (
        "/accounts",
        "/accounts?name=nobody",
        "/accounts/new",
        "/accounts/42/define",
        f"/accounts/{long}/define",
        f"/accounts/{long}/delete",
    ):
        page.goto(shops.url + path)
        if found := axed(page):
            wrong[path] = found
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.setdefault(path, []).append(f"wider than {width}")
    assert not wrong
