"""Accounts, from a signed request at an address to the webhooks of a customer: over real HTTP, on both engines.

Two inboxes share one store, as two processes would: what one of them changes, the other has learnt within a second.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from oncehook import Event, Inbox
from oncehook.account_definitions import DefinedAccount
from oncehook.errors import ConfigError, Exists, Forbidden, InUse, InvalidSettings, NotFound, SecretKeyMissing
from oncehook.model import EventId, Filter, Mark
from oncehook.web.hooks import Hooks
from oncehook.web.peers import direct_peer
from oncehook.web.server import listen, serve_on
from tests.acceptance.conftest import Engine
from tests.wire import Answer, Client, signed

SIGNED = {"scheme": "hmac", "header": "X-Signature", "prefix": "sha256="}
OWN = "the source's own secret"
RULE = "$.entry[*].changes[*].value.metadata.phone_number_id"


@dataclass
class Served:
    """An inbox behind its own server."""

    inbox: Inbox
    client: Client

    async def post(self, path: str, body: Any, secret: str, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, raw, {**signed(raw, secret), **headers})

    async def accounts(self, query: str = "") -> list[str | None]:
        page = await self.inbox.admin.events(self.inbox.admin.read(query), limit=500)
        return [one.account for one in reversed(page.items)]


def make_inbox(url: str) -> Inbox:
    inbox = Inbox(url)
    inbox.source("shop", verify=SIGNED, account="address", key="$.id", subject="$.who")
    inbox.source("open", verify=SIGNED, secret=OWN, account="address", key="$.id")
    inbox.source("meta", verify=SIGNED, secret=OWN, account="$.number", key="$.id", subject="$.who")
    inbox.source("batch", verify=SIGNED, secret=OWN, account="$.items[0].number", key="$.items[0].id", split="$.items")
    inbox.source("fixed", verify=SIGNED, secret=OWN, account="42", key="$.id")
    inbox.source("plain", verify=SIGNED, secret=OWN, key="$.id")
    return inbox


@asynccontextmanager
async def serving(inbox: Inbox, **options: Any) -> AsyncIterator[Served]:
    async with inbox.running(**options):
        listener = listen("127.0.0.1", 0)
        hooks = Hooks(inbox.receiver, "/in/", direct_peer)
        client = Client("127.0.0.1", listener.getsockname()[1])
        async with serve_on(listener, nothing, hooks=hooks):
            yield Served(inbox, client)
            client.close()


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("only hooks are served here")


@pytest.fixture(autouse=True)
def secret_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())


@pytest.fixture
async def served(engine: Engine) -> AsyncIterator[Served]:
    async with serving(make_inbox(engine.url)) as made:
        yield made


@pytest.fixture
async def pair(engine: Engine) -> AsyncIterator[tuple[Served, Served]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(make_inbox(engine.url)))
        second = await stack.enter_async_context(serving(make_inbox(engine.url), work=False))
        yield first, second


async def until(is_so: Callable[[], Any]) -> None:
    while not await is_so():
        await asyncio.sleep(0.01)


# -- by the address ----------------------------------------------------------------------------


async def test_an_account_is_verified_with_its_own_secret(served: Served) -> None:
    made = await served.inbox.define.account(42, name="Ana", aliases=["1065403"], secrets={"shop": "generate"})
    await served.inbox.define.account("43", secrets={"shop": "the secret of 43"})
    mine = made.secrets["shop"]
    body = {"id": "1", "who": "s"}
    assert (await served.post("/in/shop/42", body, mine)).json["status"] == "accepted"
    assert (await served.post("/in/shop/43", body, "the secret of 43")).json["status"] == "accepted"
    assert (await served.post("/in/shop/42", body, mine)).json["status"] == "duplicate"
    assert (await served.post("/in/shop/43", body, mine)).status == 401
    assert (await served.post("/in/shop/42", body, "the secret of 43")).status == 401
    assert (await served.post("/in/shop/42/more", body, mine)).json["status"] == "duplicate"
    assert await served.accounts() == ["42", "43"]
    assert await served.accounts("account:42") == ["42"]


async def test_an_account_without_a_secret_has_the_sources(served: Served) -> None:
    await served.inbox.define.account("42")
    assert (await served.post("/in/open/42", {"id": "1"}, OWN)).status == 200
    assert (await served.post("/in/shop/42", {"id": "1"}, OWN)).status == 401


async def test_the_sources_own_secret_is_not_an_accounts(served: Served) -> None:
    await served.inbox.define.account("42", secrets={"open": "the secret of 42"})
    assert (await served.post("/in/open/42", {"id": "1"}, OWN)).status == 401
    assert (await served.post("/in/open/42", {"id": "1"}, "the secret of 42")).status == 200


async def diagnosis_of(served: Served, path: str, secret: str) -> str:
    """Why a request was rejected, as somebody with the right reads it."""
    assert (await served.post(path, {"id": "1"}, secret)).status == 401
    [found] = await served.inbox.admin.rejections(1)
    assert secret not in (found.diagnosis or "")
    return found.diagnosis or ""


async def test_a_source_that_is_made_again_does_not_revive_secrets(pair: tuple[Served, Served]) -> None:
    served, other = pair
    define = served.inbox.define
    settings: dict[str, Any] = {"verify": SIGNED, "secret": OWN, "account": "address", "key": "$.id"}
    await define.source("late", **settings)
    await define.account("42", secrets={"late": "the secret of 42", "open": "another of 42"})
    assert (await served.post("/in/late/42", {"id": "1"}, "the secret of 42")).status == 200
    await define.change("source", "late", subject="$.who")
    await define.disable("source", "late")
    await define.enable("source", "late")
    assert (await served.post("/in/late/42", {"id": "2"}, "the secret of 42")).status == 200, "it is the same source"
    assert (await define.accounts.get("42")).secret_sources == ["late", "open"]
    await define.delete("source", "late")
    assert (await define.accounts.get("42")).secret_sources == ["open"]
    assert [one.secret_sources for one in await define.accounts.all()] == [["open"]]
    await define.source("late", **settings)
    assert (await served.post("/in/late/42", {"id": "3"}, "the secret of 42")).status == 401
    assert (await served.post("/in/late/42", {"id": "3"}, OWN)).status == 200
    await until(lambda: _is(other.post("/in/late/42", {"id": "4"}, OWN), 200))
    assert (await other.post("/in/late/42", {"id": "5"}, "the secret of 42")).status == 401
    assert (await define.accounts.get("42")).secret_sources == ["open"]
    with pytest.raises(NotFound):
        await define.accounts.rotate("42", "late")
    assert (await define.accounts.change("42", name="Ana")).secret_sources == ["open"]
    made = await define.accounts.change("42", secrets={"late": "a new one of 42"})
    assert made.secret_sources == ["late", "open"]
    assert (await served.post("/in/late/42", {"id": "6"}, "a new one of 42")).status == 200
    assert (await served.post("/in/open/42", {"id": "1"}, "another of 42")).status == 200


async def _is(answer: Any, status: int) -> bool:
    return bool((await answer).status == status)


@pytest.mark.parametrize("kind", ["own", "stored"])
async def test_the_diagnosis_knows_the_secret_of_the_account(served: Served, kind: str) -> None:
    define = served.inbox.define
    if kind == "stored":
        await define.source("late", verify=SIGNED, secret=OWN, account="address", key="$.id")
    name = {"own": "open", "stored": "late"}[kind]
    await define.account("42", secrets={name: "the secret of 42"})
    said = await diagnosis_of(served, f"/in/{name}/42", OWN)
    assert "Signed with the secret of the source, and account 42 has one of its own" in said
    assert "no secret known here" in await diagnosis_of(served, f"/in/{name}/42", "of nobody at all")
    await define.accounts.rotate("42", name, overlap=0.2, secret="the next secret of 42")
    await asyncio.sleep(0.3)
    said = await diagnosis_of(served, f"/in/{name}/42", "the secret of 42")
    assert "Signed with an old secret of account 42, which ended on" in said
    assert "The header X-Signature is missing" in await diagnosis_of_unsigned(served, f"/in/{name}/42")
    assert "names no account" in await diagnosis_of(served, f"/in/{name}/43", OWN)
    await define.account("44")
    assert "no secret known here" in await diagnosis_of(served, f"/in/{name}/44", "the secret of 42")


async def diagnosis_of_unsigned(served: Served, path: str) -> str:
    await served.client.post(path, b"{}", {})
    [found] = await served.inbox.admin.rejections(1)
    return found.diagnosis or ""


@pytest.mark.parametrize(
    "path",
    [
        *("/in/shop/44", "/in/shop", "/in/shop/", "/in/shop/1065403", "/in/shop/address", "/in/shop//42", "/in/open"),
        *("/in/shop/..", "/in/shop/%2e%2e", "/in/shop/42%00", "/in/shop/42%0a", "/in/shop/4%2f2", "/in/shop/%ff"),
        *("/in/shop/%EF%BC%94%EF%BC%92", "/in/shop/42'--", "/in/shop/" + "9" * 3000),
    ],
)
async def test_an_unknown_account_looks_like_an_unknown_source(served: Served, path: str) -> None:
    """Word for word, and with nothing stored, however the address is written."""
    await served.inbox.define.account("42", aliases=["1065403"], secrets={"shop": "the secret of 42"})
    unknown = await served.post("/in/nobody", {"id": "1"}, OWN)
    for secret in ("the secret of 42", OWN):
        answer = await served.post(path, {"id": "1"}, secret)
        assert (answer.status, answer.body, answer.headers) == (unknown.status, unknown.body, unknown.headers)
    assert await served.accounts() == []


async def test_only_a_source_for_accounts_takes_them_from_the_address(served: Served) -> None:
    """A forged account in the address of any other source is a sub-path, and no account."""
    await served.inbox.define.account("43")
    assert (await served.post("/in/plain/43", {"id": "1"}, OWN)).status == 200
    assert (await served.post("/in/fixed/43", {"id": "2"}, OWN)).status == 200
    assert (await served.post("/in/meta/43", {"id": "3"}, OWN)).status == 200
    assert await served.accounts() == [None, "42", None]


async def test_a_rotated_secret_overlaps(served: Served) -> None:
    await served.inbox.define.account("42", secrets={"shop": "the old secret"})
    made = await served.inbox.define.accounts.rotate("42", "shop", overlap="1h")
    new = made.secrets["shop"]
    for number, secret in enumerate(("the old secret", new, "the old secret")):
        assert (await served.post("/in/shop/42", {"id": str(number)}, secret)).status == 200
    await served.inbox.define.accounts.rotate("42", "shop", overlap=0)
    for secret in ("the old secret", new):
        assert (await served.post("/in/shop/42", {"id": "9"}, secret)).status == 401


async def test_secrets_are_stored_encrypted_and_told_once(served: Served, engine: Engine) -> None:
    made = await served.inbox.define.account("42", secrets={"shop": "generate", "open": "a secret of my own"})
    assert list(made.secrets) == ["shop"]
    for again in (await served.inbox.define.accounts.get("42"), (await served.inbox.define.accounts.all())[0]):
        assert (again.secrets, again.secret_sources) == ({}, ["open", "shop"])
    kept = str(engine.rows("SELECT settings, secrets FROM definitions")) + str(engine.rows("SELECT detail FROM audit"))
    for secret in (made.secrets["shop"], "a secret of my own"):
        assert secret not in kept
        assert secret.encode().hex() not in kept
    assert made.secrets["shop"] not in repr(made)


async def test_without_a_key_no_secret_is_stored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCEHOOK_SECRET_KEY")
    async with serving(make_inbox(engine.url)) as served:
        with pytest.raises(SecretKeyMissing):
            await served.inbox.define.account("42", secrets={"shop": "generate"})
        await served.inbox.define.account("43", aliases=["x"])
        assert [one.id for one in await served.inbox.define.accounts.all()] == ["43"]


async def test_a_secret_that_cannot_be_read_lets_nobody_in(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even whoever has the source's own: 503, so that the sender comes again when the key is back."""
    async with serving(make_inbox(engine.url)) as served:
        await served.inbox.define.account("42", secrets={"open": "the secret of 42"})
        await served.inbox.define.account("43")
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())
    async with serving(make_inbox(engine.url)) as served:
        for secret in (OWN, "the secret of 42"):
            assert (await served.post("/in/open/42", {"id": "1"}, secret)).status == 503
        assert (await served.post("/in/open/43", {"id": "1"}, OWN)).status == 200


# -- by a rule ---------------------------------------------------------------------------------


async def test_a_rule_finds_an_id_or_an_alias(served: Served) -> None:
    await served.inbox.define.account("42", aliases=["1065403", "a shop, with spaces"])
    for number, value in enumerate(
        ("42", "1065403", 1065403, "a shop, with spaces", "nobody's", None, "", ["x"], True)
    ):
        body = {"id": str(number), "number": value}
        assert (await served.post("/in/meta", body, OWN)).json["status"] == "accepted"
    assert await served.accounts() == ["42"] * 4 + [None] * 5
    page = await served.inbox.admin.events(Filter())
    marks = [one.marks for one in reversed(page.items)]
    assert marks[4] == Mark.unmapped
    assert Mark.unmapped not in marks[5]
    assert b'oncehook_unmapped_total{source="meta"}' in await served.inbox.metrics()


async def test_two_customers_whom_nobody_has_mapped_do_not_suppress_each_other(served: Served) -> None:
    expected = {"111": "accepted", "222": "accepted"}
    for number in ("111", "222", "111", "222"):
        answer = await served.post("/in/meta", {"id": "1", "number": number}, OWN)
        assert answer.json["status"] == expected[number]
        expected[number] = "duplicate"
    assert await served.accounts() == [None, None]


async def test_the_same_key_and_subject_in_two_accounts(served: Served) -> None:
    for account in ("42", "43"):
        await served.inbox.define.account(account)
    for number in ("42", "43", "42", "43"):
        await served.post("/in/meta", {"id": "same", "number": number, "who": "same"}, OWN)
    assert await served.accounts() == ["42", "43"]


async def test_a_batch_of_several_accounts(served: Served) -> None:
    await served.inbox.define.account("42", aliases=["n1"])
    await served.inbox.define.account("43", aliases=["n2"])
    items = [{"id": str(n), "number": f"n{n % 4}"} for n in range(12)]
    answer = await served.post("/in/batch", {"items": items}, OWN)
    assert (answer.status, answer.json["accepted"]) == (200, 12)
    found = await served.accounts()
    assert sorted(map(str, found)) == ["42"] * 3 + ["43"] * 3 + ["None"] * 6


async def test_a_batch_of_more_names_than_may_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncehook.accounts.MOST_WAITING", 3)
    items = [{"id": str(n), "number": f"n{n}"} for n in range(50)]
    assert (await served.post("/in/batch", {"items": items}, OWN)).json["accepted"] == 50


async def test_nothing_is_looked_up_for_who_cannot_sign(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rule, the store is asked for names of verified arrivals only."""
    asked: list[Any] = []
    monkeypatch.setattr(served.inbox.store, "find_accounts", lambda names: asked.append(names))
    await served.inbox.define.account("42")
    assert (await served.post("/in/meta", {"id": "1", "number": "1065403"}, "a wrong secret")).status == 401
    assert asked == []


# -- changes under traffic ---------------------------------------------------------------------


async def test_another_process_knows_an_account_at_once(pair: tuple[Served, Served]) -> None:
    first, second = pair
    assert (await second.post("/in/shop/42", {"id": "0"}, "the secret of 42")).status == 401
    await first.inbox.define.account("42", aliases=["n1"], secrets={"shop": "the secret of 42"})
    began = time.monotonic()

    async def is_known() -> bool:
        return (await second.post("/in/shop/42", {"id": "1"}, "the secret of 42")).status == 200

    await until(is_known)
    assert time.monotonic() - began < 5  # a second, and time for a machine that stands still
    assert (await second.post("/in/meta", {"id": "2", "number": "n1"}, OWN)).status == 200
    assert await first.accounts("account:42") == ["42", "42"]


async def test_a_deleted_account_acknowledges_nothing_any_more(pair: tuple[Served, Served]) -> None:
    """Under traffic in both processes: nothing is acknowledged later than a second after the answer to its delete."""
    first, second = pair
    await first.inbox.define.account("42", secrets={"shop": "the secret of 42"})
    acknowledged: list[float] = []
    is_over = asyncio.Event()

    async def send(served: Served, name: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            answer = await served.post("/in/shop/42", {"id": f"{name}-{number}"}, "the secret of 42")
            assert answer.status in (200, 401, 503)
            if answer.status == 200:
                acknowledged.append(time.monotonic())

    senders = [asyncio.create_task(send(served, name)) for served, name in ((first, "a"), (second, "b"))]
    await until(lambda: asyncio.sleep(0, len(acknowledged) > 50))
    await first.inbox.define.accounts.delete("42")
    deleted = time.monotonic()
    await asyncio.sleep(1.5)
    is_over.set()
    await asyncio.gather(*senders)
    assert max(acknowledged) - deleted < 1.0
    kept = await first.accounts("account:42")
    assert len(acknowledged) <= len(kept)


async def test_an_alias_that_moves_under_traffic(pair: tuple[Served, Served]) -> None:
    """Every event is of one of the two accounts, at no moment of none; after a second, all are of the new one."""
    first, second = pair
    await first.inbox.define.account("42", aliases=["n1"])
    await first.inbox.define.account("43")
    with pytest.raises(Exists):
        await first.inbox.define.accounts.change("43", aliases=["n1"])
    await until(lambda: asyncio.sleep(0, second.inbox.definitions.version == first.inbox.definitions.version))
    is_over = asyncio.Event()
    sent: list[str] = []

    async def send(served: Served, name: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            assert (await served.post("/in/meta", {"id": f"{name}-{number}", "number": "n1"}, OWN)).status == 200
            sent.append(name)

    senders = [asyncio.create_task(send(served, name)) for served, name in ((first, "a"), (second, "b"))]
    await until(lambda: asyncio.sleep(0, len(sent) > 50))
    await first.inbox.define.accounts.change("43", aliases=["n1"], move=True)
    await asyncio.sleep(1.2)
    settled = len(sent)
    await until(lambda: asyncio.sleep(0, len(sent) > settled + 50))
    is_over.set()
    await asyncio.gather(*senders)
    found = await first.accounts()
    assert set(found) <= {"42", "43"}
    assert set(found[-50:]) == {"43"}
    assert (await first.inbox.define.accounts.get("42")).aliases == []


async def test_a_secret_that_was_read_before_its_rotation_is_not_kept(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arrival waits for its account while the secret is rotated: from then on the old one opens nothing."""
    served, _ = pair
    made = await served.inbox.define.account("42", secrets={"shop": "generate"})
    old = made.secrets["shop"]
    find, began, goes_on = served.inbox.store.find_accounts, asyncio.Event(), asyncio.Event()

    async def find_slowly(names: Any) -> Any:
        found = await find(names)
        began.set()
        await goes_on.wait()
        return found

    monkeypatch.setattr(served.inbox.store, "find_accounts", find_slowly)
    waiting = asyncio.create_task(served.post("/in/shop/42", {"id": "1"}, old))
    await began.wait()
    monkeypatch.undo()
    new = (await served.inbox.define.accounts.rotate("42", "shop", overlap=0)).secrets["shop"]
    goes_on.set()
    assert (await waiting).status == 401
    assert [(await served.post("/in/shop/42", {"id": "2"}, secret)).status for secret in (old, new)] == [401, 200]


async def test_two_who_claim_a_name_at_once_have_one_winner(pair: tuple[Served, Served]) -> None:
    async def claim(served: Served, account: str) -> bool:
        try:
            await served.inbox.define.account(account, aliases=["n1"])
        except Exists:
            return False
        return True

    made = await asyncio.gather(*(claim(pair[n % 2], f"a{n}") for n in range(10)))
    assert made.count(True) == 1
    found = [one for one in await pair[0].inbox.define.accounts.all() if one.aliases]
    assert [one.aliases for one in found] == [["n1"]]


# -- what is defined ---------------------------------------------------------------------------


async def test_accounts_are_checked(served: Served) -> None:
    define = served.inbox.define
    await define.account("42", aliases=["n1"])
    for refused in (
        {"id": "a b"},
        {"id": "44", "aliases": ["x\n"]},
        {"id": "44", "aliases": ["\udc00"]},
        {"id": "44", "aliases": ["y" * 201]},
        {"id": "44", "name": "x" * 201},
        {"id": "44", "secrets": {"nobody": "generate"}},
        {"id": "44", "secrets": {"plain": "generate"}},
        {"id": "44", "secrets": {"shop": "short"}},
    ):
        with pytest.raises(InvalidSettings):
            await define.account(**refused)  # type: ignore[arg-type]
    for taken in ({"id": "42"}, {"id": "n1"}, {"id": "44", "aliases": ["n1"]}, {"id": "44", "aliases": ["42"]}):
        with pytest.raises(Exists):
            await define.account(**taken)  # type: ignore[arg-type]
    for moved in ({"id": "n1", "move": True}, {"id": "44", "aliases": ["42"], "move": True}):
        with pytest.raises(Exists):
            await define.account(**moved)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await define.accounts.get("n1")
    with pytest.raises(ConfigError):
        await served.inbox.emit("app", "x", {}, account="a b")
    assert [one.id for one in await define.accounts.all()] == ["42"]


async def test_what_an_account_has_keeps_it(served: Served) -> None:
    define = served.inbox.define
    await define.account("42", aliases=["n1"])
    await define.destination("to42", url="https://example.com/x", account="42", subscribe=["*"])
    with pytest.raises(InUse):
        await define.accounts.delete("42")
    await define.delete("destination", "to42")
    await define.accounts.delete("42")
    with pytest.raises(NotFound):
        await define.accounts.delete("42")
    again: DefinedAccount = await define.account("43", aliases=["42", "n1"])
    assert again.aliases == ["42", "n1"]


async def test_changes_of_an_account(served: Served) -> None:
    define = served.inbox.define.accounts
    await served.inbox.define.account("42", name="Ana", aliases=["n1", "n2"], secrets={"shop": "the secret of 42"})
    changed = await define.change("42", aliases=["n2", "n3"])
    assert (changed.name, changed.aliases, changed.secret_sources) == ("Ana", ["n2", "n3"], ["shop"])
    changed = await define.change("42", name="Bea", secrets={"shop": None})
    assert (changed.name, changed.aliases, changed.secret_sources) == ("Bea", ["n2", "n3"], [])
    await define.change("42", enabled=False)
    await served.post("/in/meta", {"id": "1", "number": "n2"}, OWN)
    await define.change("42", enabled=True)
    await served.post("/in/meta", {"id": "2", "number": "n2"}, OWN)
    assert await served.accounts() == [None, "42"]
    acts = [(one.act, one.target) for one in await served.inbox.admin.audit()]
    assert acts.count(("change", "account 42")) == 4
    limited = served.inbox.define.by("anna", "42")
    with pytest.raises(Forbidden):
        await limited.account("44")
    with pytest.raises(NotFound):
        await limited.accounts.get("43")


# -- subscriptions -----------------------------------------------------------------------------


async def destinations_of(served: Served, event_id: str) -> list[str]:
    page = await served.inbox.admin.deliveries(Filter(event_id=EventId.parse(event_id)))
    return sorted(one.destination for one in page.items)


async def test_an_accounts_destinations_get_exactly_its_emitted_events(pair: tuple[Served, Served]) -> None:
    first, second = pair
    url = "https://example.com/x"
    for account in ("42", "43"):
        await first.inbox.define.account(account)
        types = ["message_created", "conversation.*"]
        await first.inbox.define.destination(f"to{account}", url=url, account=account, subscribe=types, sign="generate")
    filtered = [{"type": "*", "when": {"$.amount": ">100"}}, {"type": "paid", "from": "meta"}]
    await first.inbox.define.destination("rich", url=url, account="42", subscribe=filtered)
    await first.inbox.define.destination("all", url=url, subscribe=["*"])
    for served in (first, second):
        emit = served.inbox.emit

        async def is_known(emit: Any = emit, served: Served = served) -> bool:
            return "rich" in await destinations_of(served, await emit("app", "x", {"amount": 500}, account=42))

        await until(is_known)
        expected = {
            ("message_created", "42"): ["all", "to42"],
            ("message_created", "43"): ["all", "to43"],
            ("message_created", None): ["all"],
            ("conversation.opened", "42"): ["all", "to42"],
            ("conversation", "42"): ["all"],
            ("other", "44"): ["all"],
        }
        for (kind, account), to in expected.items():
            event_id = await emit("app", kind, {"amount": 1}, account=account)
            assert await destinations_of(served, event_id) == to, (kind, account)
    # what arrives is nobody's to subscribe to, unless the subscription says where from
    for kind, to in (("message_created", []), ("paid", ["rich"])):
        body = {"id": kind, "number": "42", "type": kind}
        answer = await first.post("/in/meta", body, OWN)
        assert await destinations_of(first, answer.json["event_id"]) == to


async def test_a_subscription_that_ends_gets_nothing_more(served: Served) -> None:
    define, emit = served.inbox.define, served.inbox.emit
    await define.destination("to42", url="https://example.com/x", account="42", subscribe=["a.*"])
    assert await destinations_of(served, await emit("app", "a.b", {}, account=42)) == ["to42"]
    await define.change("destination", "to42", subscribe=["c.*"])
    assert await destinations_of(served, await emit("app", "a.b", {}, account=42)) == []
    assert await destinations_of(served, await emit("app", "c.d", {}, account=42)) == ["to42"]
    await define.change("destination", "to42", subscribe=None)
    assert await destinations_of(served, await emit("app", "c.d", {}, account=42)) == []


async def test_a_destination_of_an_account_gets_no_other_ones_events(engine: Engine) -> None:
    """Whatever route leads to it."""
    inbox = make_inbox(engine.url)
    seen: list[str | None] = []

    @inbox.on("app", account="42")
    async def only(event: Event) -> None:
        seen.append(event.account)

    async with inbox.running():
        for account in (42, 43, None):
            await inbox.emit("app", "x", {}, account=account)
        await inbox.drain()
    assert seen == ["42"]


async def test_a_stored_route_leads_to_an_account_only_its_own_events(served: Served) -> None:
    define, emit = served.inbox.define, served.inbox.emit
    await define.destination("theirs", url="https://example.com/x", account="42")
    await define.route("app", "theirs")

    async def reached() -> list[str | int | None]:
        events = {account: await emit("app", "x", {}, account=account) for account in (42, 43, None)}
        return [account for account, event_id in events.items() if await destinations_of(served, event_id)]

    assert await reached() == [42]
    await define.change("destination", "theirs", account="43")
    assert await reached() == [43]
    await define.change("destination", "theirs", account=None)
    assert await reached() == [42, 43, None]
