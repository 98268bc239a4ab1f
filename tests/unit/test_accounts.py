"""The directory of accounts: what it asks the store, what it keeps, and when it looks again."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Mapping, Sequence
from types import FunctionType

import pytest

from oncehook import accounts
from oncehook.account_definitions import read_secrets
from oncehook.accounts import Account, AccountDirectory, load_nobody
from oncehook.errors import ConfigError, Overloaded, StoreUnavailable
from oncehook.model import check_account_id, is_account_id
from oncehook.sources import Source, build
from oncehook.verify import Hmac


class Shelf:
    """The accounts of a store, and what was asked of it."""

    def __init__(self, **names: str) -> None:
        self.names = names
        self.asked: list[list[str]] = []
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    async def load(self, names: Sequence[str]) -> Mapping[str, Account]:
        self.asked.append(list(names))
        found = {name: Account(self.names[name]) for name in names if name in self.names}
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return found


@pytest.mark.parametrize("text", ["42", "a", "acme.myshopify.com", "a@b.c", "_x", "A-b_c.d+e~f", "9" * 100])
def test_ids(text: str) -> None:
    assert is_account_id(text)
    assert check_account_id(text) == text


def test_a_number_is_an_id() -> None:
    assert check_account_id(42) == "42"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a b", "a/b", "..", ".a", "-a", "a\n", "\na", "a\0", "é", "\uff14\uff12", "a:b", "a*", "a%", "?x"),
        *("9" * 101, "address", "a'b", 'a"b', "a,b", "a#b", "a?b", "a\\b", "$.id"),
    ],
)
def test_what_is_no_id(text: str) -> None:
    """Nothing that an address, a query, a log line or a list of ids could take for something else."""
    assert not is_account_id(text)
    with pytest.raises(ConfigError):
        check_account_id(text)


async def test_a_name_is_looked_up_once() -> None:
    shelf = Shelf(a="42")
    directory = AccountDirectory(shelf.load)
    with pytest.raises(KeyError):
        directory.find("a")
    found = await asyncio.gather(*(directory.load(["a", "b"]) for _ in range(50)))
    assert found == [{"a": Account("42"), "b": None}] * 50
    assert shelf.asked == [["a", "b"]]
    assert directory.find("a") == Account("42")
    assert directory.find("b") is None


async def test_names_of_many_arrivals_are_one_query() -> None:
    shelf = Shelf(**{f"n{n}": str(n) for n in range(1200)})
    directory = AccountDirectory(shelf.load)
    await asyncio.gather(*(directory.load([f"n{n}"]) for n in range(1200)))
    assert [len(one) for one in shelf.asked] == [500, 500, 200]


async def test_made_up_names_push_no_real_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MOST_UNKNOWN", 10)
    monkeypatch.setattr(accounts, "MOST_KNOWN", 10)
    shelf = Shelf(**{f"n{n}": str(n) for n in range(10)})
    directory = AccountDirectory(shelf.load)
    await directory.load([f"n{n}" for n in range(10)])
    for n in range(100):
        await directory.load([f"made-up-{n}"])
    assert [directory.find(f"n{n}") for n in range(10)] == [Account(str(n)) for n in range(10)]
    assert len(directory._unknown) == 10


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MOST_KNOWN", 10)
    monkeypatch.setattr(accounts, "MOST_ADDRESSES", 10)
    shelf = Shelf(**{f"n{n}": str(n) for n in range(100)})
    directory = AccountDirectory(shelf.load)
    template = build("shop", verify="none", account="address", key="$.id", path="p" * 24)
    for n in range(100):
        (account,) = (await directory.load([f"n{n}"])).values()
        assert account is not None
        assert directory.at(template, account).account == str(n)
    assert (len(directory._known), len(directory._addresses)) == (10, 10)


def test_the_collector_has_nothing_to_do_with_the_secrets_of_accounts() -> None:
    """Otherwise 100,000 of them would be looked through again and again, and arrivals would wait meanwhile."""
    template = build("shop", verify={"scheme": "hmac", "header": "X-Signature"}, account="address", key="$.id")
    directory = AccountDirectory(load_nobody, read_secrets=read_secrets)
    directory.at(template, Account("42", {"shop": "0123456789abcdef" * 4}))
    gc.collect()
    gc.collect()  # each lets go of tuples that hold nothing to look at, the inner ones first
    (address,) = directory._addresses.values()
    seen, waiting = set[int](), [address, *directory._addresses]
    while waiting:
        one = waiting.pop()
        # What all accounts share may be looked at, and types.
        if id(one) not in seen and not isinstance(one, type | Source | Hmac | FunctionType | re.Pattern):
            seen.add(id(one))
            assert not gc.is_tracked(one), one
            fields = getattr(one, "__struct_fields__", ())
            waiting += [getattr(one, name) for name in fields] or gc.get_referents(one)
    assert len(seen) > 10


async def test_too_many_that_wait_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MOST_WAITING", 3)
    shelf = Shelf()
    shelf.gate = asyncio.Event()
    directory = AccountDirectory(shelf.load)
    waiting = [asyncio.create_task(directory.load([name])) for name in "abc"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await directory.load(["d"])
    shelf.gate.set()
    assert await asyncio.gather(*waiting) == [{"a": None}, {"b": None}, {"c": None}]


async def test_a_store_that_fails_is_asked_again() -> None:
    shelf = Shelf(a="42")
    directory = AccountDirectory(shelf.load)
    shelf.error = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        await directory.load(["a"])
    shelf.error = None
    assert await directory.load(["a"]) == {"a": Account("42")}


async def test_a_notice_makes_it_look_again() -> None:
    """An alias that moved, an account that is gone, a name that has come to be: each by its own notice."""
    shelf = Shelf(a="42", b="43", alias="42")
    directory = AccountDirectory(shelf.load)
    await directory.load(["a", "b", "alias", "new"])
    shelf.names = {"b": "43", "alias": "43", "new": "44"}
    directory.forget(["42"])
    for name in ("a", "alias", "new"):
        with pytest.raises(KeyError):
            directory.find(name)
    assert directory.find("b") == Account("43")
    assert await directory.load(["a", "alias", "new"]) == {"a": None, "alias": Account("43"), "new": Account("44")}
    directory.forget()
    with pytest.raises(KeyError):
        directory.find("b")


async def test_what_was_read_before_a_notice_is_not_kept() -> None:
    """The row was read, then changed, then noticed, and only then the reading came back."""
    shelf = Shelf(alias="42")
    shelf.gate = asyncio.Event()
    directory = AccountDirectory(shelf.load)
    reading = asyncio.create_task(directory.load(["alias"]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    shelf.names = {"alias": "43"}
    directory.forget(["42", "43"])
    shelf.gate.set()
    await reading
    with pytest.raises(KeyError):
        directory.find("alias")
    assert await directory.load(["alias"]) == {"alias": Account("43")}


async def test_a_source_of_an_account_follows_its_template() -> None:
    directory = AccountDirectory(Shelf().load, read_secrets=read_secrets)
    signed = {"scheme": "hmac", "header": "X-Signature"}
    template = build("shop", verify=signed, account="address", key="$.id")
    account = Account("42", {"shop": "0123456789abcdef"})
    mine = directory.at(template, account)
    assert (mine.account, mine.name, mine.has_accounts_by_address) == ("42", "shop", False)
    assert directory.at(template, account).verifier is mine.verifier, "compiled again"
    changed = build("shop", verify=signed, account="address", key="$.other")
    other = directory.at(changed, account)
    assert other.template is changed
    assert other.verifier is not mine.verifier
