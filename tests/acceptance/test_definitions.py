"""Definitions made, changed and deleted while everything runs: in one process and in two, on both engines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oncehook import definitions
from oncehook.errors import (
    DefinedElsewhere,
    Exists,
    Forbidden,
    InUse,
    InvalidSettings,
    NotFound,
    SecretKeyMissing,
)
from oncehook.event import Event
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt
from oncehook.model import Arrival, Filter, RouteId, new_id
from tests.acceptance.admin_house import call
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.acceptance.sink import Sink
from tests.effort import effort
from tests.wire import Answer, hook, request, signed

TOKEN = "canary-admin-token-93ab"
KEY = base64.b64encode(bytes(range(32))).decode()
HMAC = {"scheme": "hmac", "header": "X-Signature", "prefix": "sha256="}
OPEN = {"scheme": "none", "confirm": "anyone may send"}


@pytest.fixture(autouse=True)
def secret_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", KEY)


@contextlib.asynccontextmanager
async def running(engine: Engine, inbox: Inbox | None = None, **options: Any) -> AsyncIterator[Inbox]:
    made = inbox or Inbox(engine.url)
    async with made.running(**options):
        yield made


async def send(inbox: Inbox, name: str, key: str, secret: str | None = None) -> Receipt:
    body = hook(key)
    return await inbox.receive(name, {} if secret is None else signed(body, secret), body)


# -- one process ---------------------------------------------------------------------------------


async def test_a_stored_source_receives_and_its_events_are_handled(engine: Engine) -> None:
    inbox, got = Inbox(engine.url), []

    @inbox.on("app")
    async def handle(event: Event) -> None:
        got.append((event.source, event.key))

    async with running(engine, inbox):
        made = await inbox.define.source("trigger-4", verify=HMAC, secret="generate", key="$.id")
        assert made.address == "/in/trigger-4"
        assert made.secret is not None
        await inbox.define.route("trigger-4", "handle")
        assert (await send(inbox, "trigger-4", "1", made.secret)).outcome == "accepted"
        assert (await send(inbox, "trigger-4", "1", made.secret)).outcome == "duplicate"
        assert (await send(inbox, "trigger-4", "2", "a wrong one")).reply.status == 401
        await inbox.drain()
        assert got == [("trigger-4", "1")]


async def test_a_stored_destination_is_worked_for_changed_and_paused(engine: Engine) -> None:
    """By a worker that had no destination at its start."""
    async with Sink().open() as first, Sink().open() as second, running(engine) as inbox:
        await inbox.define.source("orders", verify=OPEN, key="$.id")
        made = await inbox.define.destination("crm", url=first.url, allow_private=True, sign="generate")
        assert made.secret is not None
        assert made.secret.startswith("whsec_")
        await inbox.define.route("orders", "crm")
        await send(inbox, "orders", "1")
        await _delivered(inbox, 1)
        assert first.requests[0].headers["webhook-signature"]
        await inbox.define.change("destination", "crm", url=second.url)
        await send(inbox, "orders", "2")
        await _delivered(inbox, 2)
        assert (len(first.requests), len(second.requests)) == (1, 1)
        await inbox.define.disable("destination", "crm")
        await send(inbox, "orders", "3")
        await inbox.define.enable("destination", "crm")
        await send(inbox, "orders", "4")
        await _delivered(inbox, 3)
        assert [json.loads(one.body)["id"] for one in second.requests] == ["2", "4"], "disabled: nothing new"


async def test_a_route_counts_for_whoever_made_it_as_soon_as_it_is_made(engine: Engine) -> None:
    """Also where its source is the program's, whose arrivals wait for no look-up."""
    inbox = Inbox(engine.url)
    inbox.source("orders", verify=OPEN, key="$.id")
    async with Sink().open() as sink, running(engine, inbox):
        for n in range(10):
            await inbox.define.destination(f"crm-{n}", url=sink.url, allow_private=True)
            made = await inbox.define.route("orders", f"crm-{n}")
            await send(inbox, "orders", f"{n}")
            await inbox.define.disable("route", made.name)
            await send(inbox, "orders", f"{n} without")
        await _delivered(inbox, 10)
        assert sorted(json.loads(one.body)["id"] for one in sink.requests) == [str(n) for n in range(10)]


async def test_a_stored_destination_is_worked_for_in_rounds(engine: Engine) -> None:
    """By a stored route, and by a subscription."""
    async with Sink().open() as sink, running(engine) as inbox:
        terms: dict[str, Any] = {"url": sink.url, "allow_private": True, "concurrency": 1, "fair": "$.who"}
        await inbox.define.destination("routed", **terms)
        await inbox.define.route("app", "routed")
        await inbox.define.destination("subscribed", **terms, subscribe=["*"])
        for name in ("routed", "subscribed"):
            await inbox.admin.pause(name, actor="ann")
        for n in range(19):
            await inbox.emit("app", "x", {"n": n, "who": "big"})
        await inbox.emit("app", "x", {"n": 19, "who": "small"})
        for name in ("routed", "subscribed"):
            await inbox.admin.resume(name, actor="ann")
        await _delivered(inbox, 40)
    order = [json.loads(one.body)["n"] for one in sink.requests]
    assert max(at for at, n in enumerate(order) if n == 19) < 15, order


async def _delivered(inbox: Inbox, count: int) -> None:
    while True:
        found = (await inbox.admin.deliveries(Filter())).items
        if [one.status for one in found] == ["done"] * count:
            return
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
async def test_lists_obey_their_limit_and_show_everything_once(engine: Engine, limit: int) -> None:
    inbox = Inbox(engine.url)
    for name in ("own-c", "own-a", "own-b"):
        inbox.source(name, verify=OPEN)
        inbox.destination(name, url="https://own.example/")
        inbox.route(name, name)
    app: Any = inbox.dashboard(authorize=lambda request: ("ann", "admin"))
    async with running(engine, inbox):
        routes = []
        for name in ("stored-b", "stored-a"):
            await inbox.define.source(name, verify=OPEN)
            await inbox.define.destination(name, url="https://stored.example/")
            routes.append((await inbox.define.route(name, name)).name)
        names = ["own-c", "own-a", "own-b", "stored-a", "stored-b"]
        for noun, field, whole in (
            ("sources", "name", names),
            ("destinations", "name", names),
            ("routes", "id", [None, None, None, *sorted(routes)]),
        ):
            found: list[Any] = []
            cursor = ""
            while cursor is not None:
                target = f"/api/v1/{noun}?limit={limit}&cursor={cursor}"
                page = (await call(app, "GET", target, b"", {"host": "x"}, "127.0.0.1")).json
                assert 0 < len(page["items"]) <= limit
                found += page["items"]
                cursor = page["next"]
            assert [one[field] for one in found] == whole
        assert [one["from"] for one in found[:3]] == names[:3]
        wrong = base64.urlsafe_b64encode(b"source:@x").decode()
        assert (await call(app, "GET", f"/api/v1/sources?cursor={wrong}", b"", {"host": "x"}, "::1")).status == 400


async def test_emitted_events_follow_stored_routes(engine: Engine) -> None:
    inbox, got = Inbox(engine.url), []

    @inbox.on("other")
    async def handle(event: Event) -> None:
        got.append(event.type)

    async with running(engine, inbox):
        await inbox.emit("app", "before", {}, key="1")
        route = await inbox.define.route("app", "handle", when={"type": "message_*"})
        assert route.name.startswith("rte_")
        await inbox.emit("app", "message_created", {}, key="2")
        await inbox.emit("app", "else", {}, key="3")
        await inbox.define.delete("route", route.name)
        await inbox.emit("app", "message_deleted", {}, key="4")
        await inbox.drain()
        assert got == ["message_created"]


async def test_a_rotated_secret_refuses_nobody_until_its_end(engine: Engine) -> None:
    async with running(engine) as inbox:
        old = (await inbox.define.source("s", verify=HMAC, secret="generate", key="$.id")).secret
        assert (await send(inbox, "s", "1", old)).outcome == "accepted"
        new = (await inbox.define.rotate("source", "s", overlap="1h")).secret
        assert new != old
        for number, secret in enumerate((old, new)):
            assert (await send(inbox, "s", f"during-{number}", secret)).outcome == "accepted"
        newest = (await inbox.define.rotate("source", "s", overlap="0s")).secret
        assert [(await send(inbox, "s", "after", one)).reply.status for one in (old, new, newest)] == [401, 401, 200]


async def test_names_belong_to_one_side(engine: Engine) -> None:
    inbox = Inbox(engine.url)
    inbox.source("mine", verify=OPEN)
    inbox.source("hidden", verify=OPEN, path="unguessable-path-of-mine")
    inbox.destination("crm", url="https://crm.example/")
    async with running(engine, inbox, work=False):
        for name in ("mine", "hidden", "unguessable-path-of-mine"):
            with pytest.raises(DefinedElsewhere):
                await inbox.define.source(name, verify=OPEN)
        with pytest.raises(DefinedElsewhere):
            await inbox.define.change("destination", "crm", url="https://elsewhere.example/")
        with pytest.raises(DefinedElsewhere):
            await inbox.define.delete("source", "mine")
        await inbox.define.source("theirs", verify=OPEN)
        with pytest.raises(Exists):
            await inbox.define.source("theirs", verify=OPEN)
        with pytest.raises(NotFound):
            await inbox.define.delete("source", "nobody")


async def test_settings_are_checked_as_in_the_file(engine: Engine) -> None:
    async with running(engine) as inbox:
        with pytest.raises(InvalidSettings) as refused:
            await inbox.define.create("source", "s", {"prest": "n8n", "tolerance": "soon"})
        assert [(one["setting"], one["hint"][:12]) for one in refused.value.errors] == [
            ("prest", "did you mean"),
            ("tolerance", "write for ex"),
        ]
        for settings, setting in (
            ({"preset": "n8n"}, "secret"),
            ({"preset": "discord", "secret": "generate"}, "secret"),
            ({"verify": lambda arrival, secret: True}, "verify"),
        ):
            with pytest.raises(InvalidSettings) as refused:
                await inbox.define.create("source", "s", settings)
            assert refused.value.errors[0]["setting"] == setting
        with pytest.raises(InvalidSettings, match="not a name"):
            await inbox.define.source("Not A Name", verify=OPEN)
        with pytest.raises(InvalidSettings, match="no destination"):
            await inbox.define.route("s", "nowhere")


async def test_no_secret_is_kept_in_clear(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-secret-of-a-source-77"
    async with running(engine) as inbox:
        await inbox.define.source("s", verify=HMAC, secret=canary, path="canary-path-9d2f1c")
        await inbox.define.destination("d", url="https://crm.example/", headers={"Authorization": canary})
        await inbox.define.change("source", "s", key="$.id")
        lines = await inbox.admin.audit()
        assert [line.act for line in lines] == ["change", "create", "create"]
        assert lines[0].detail["before"]["secret"] == "(set)"
        assert lines[0].detail["after"]["key"] == "$.id"
    kept = repr(engine.rows("SELECT * FROM definitions")) + repr(engine.rows("SELECT * FROM audit"))
    assert "canary" not in kept
    monkeypatch.delenv("ONCEHOOK_SECRET_KEY")
    async with running(engine) as inbox:
        with pytest.raises(SecretKeyMissing) as missing:
            await inbox.define.source("t", verify=HMAC, secret="generate")
        assert "openssl rand" in missing.value.hint
        await inbox.define.source("open", verify=OPEN)
        assert (await send(inbox, "s", "1", canary)).reply.status == 503, "it exists, and its key is not here"
        shown = {one.name: one.trouble for one in await inbox.admin.sources()}
        assert shown["open"] is None
        assert "ONCEHOOK_SECRET_KEY" not in (shown["s"] or "ONCEHOOK_SECRET_KEY")


async def test_a_new_key_encrypts_and_the_old_one_still_decrypts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine) as inbox:
        secret = (await inbox.define.source("s", verify=HMAC, secret="generate", key="$.id")).secret
    newer = base64.b64encode(os.urandom(32)).decode()
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", f"{newer},{KEY}")
    async with running(engine) as inbox:
        assert (await send(inbox, "s", "1", secret)).outcome == "accepted"
        await inbox.define.change("source", "s", subject="$.customer")
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", newer)
    async with running(engine) as inbox:
        assert (await send(inbox, "s", "2", secret)).outcome == "accepted"


async def test_an_account_reaches_nothing_of_the_server_and_of_others(engine: Engine) -> None:
    async with running(engine) as inbox:
        theirs = inbox.define.by("token of 42", "42")
        for settings in (
            {"verify": HMAC, "secret": {"env": "HOME"}},
            {"verify": HMAC, "secret": {"env": "NO_SUCH_VARIABLE"}},
            {"verify": HMAC, "secret": {"file": "/etc/hostname"}},
            {"verify": OPEN},
            {"verify": HMAC, "secret": "generate", "path": "some-path-of-their-own"},
        ):
            with pytest.raises(Forbidden):
                await theirs.create("source", "s", settings)
        for more in (
            {"allow_private": True},
            {"ca": "/etc/ssl/cert.pem"},
            {"sign": {"env": "HOME"}},
            {"url": "{$.callback_url}"},
            {"url": "{$.callback_url}", "allow_hosts": ["crm.example"]},
        ):
            with pytest.raises(Forbidden):
                await theirs.create("destination", "d", {"url": "https://crm.example/", **more})
        await theirs.destination("d", url="https://crm.example/")
        with pytest.raises(Forbidden, match="allow_hosts, url: only an admin of the whole inbox"):
            await theirs.change("destination", "d", url="{$.callback_url}", allow_hosts=["crm.example"])
        made = await theirs.source("s", verify=HMAC, secret="generate")
        assert made.definition.account == "42"
        await inbox.define.source("other", verify=OPEN, account="43")
        for act in (theirs.delete, theirs.disable, theirs.get, theirs.rotate):
            with pytest.raises(NotFound):
                await act("source", "other")
        assert [one.name for one in await theirs.all("source")] == ["s"]


async def test_what_deliveries_wait_for_stays_until_they_are_discarded_with_it(engine: Engine) -> None:
    async with running(engine, work=False) as inbox:
        await inbox.define.source("orders", verify=OPEN, key="$.id")
        await inbox.define.destination("crm", url="https://crm.example/")
        await inbox.define.route("orders", "crm")
        await send(inbox, "orders", "1")
        with pytest.raises(InUse):
            await inbox.define.delete("destination", "crm")
        await inbox.define.delete("destination", "crm", discard=True)
        [delivery] = (await inbox.admin.deliveries(Filter())).items
        assert (delivery.status, delivery.reason) == ("discarded", "its destination was deleted")
        assert (await send(inbox, "orders", "2")).outcome == "accepted"
        assert len((await inbox.admin.deliveries(Filter())).items) == 1
        assert all(check.ok for check in await inbox.check())


async def test_a_flood_of_random_names_costs_few_reads_and_no_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "MOST_UNKNOWN", 100)
    async with running(engine) as inbox:
        await inbox.define.source("orders", verify=OPEN, key="$.id")
        reads, find = [], inbox.store.find_sources

        async def counted(addresses: Any) -> Any:
            reads.append(len(addresses))
            return await find(addresses)

        monkeypatch.setattr(inbox.store, "find_sources", counted)
        names = [f"random-{n}" for n in range(1500)]
        answers = await asyncio.gather(*(_at(inbox, name) for name in names), _at(inbox, "orders"))
        assert answers[:-1] == [None] * 1500
        assert answers[-1] is inbox.definitions.at("orders"), "found among them, and kept"
        assert len(reads) <= 1 + 1500 // definitions.BATCH + 1
        assert len(inbox.definitions._unknown) == 100
        before = len(reads)
        assert await _at(inbox, names[-1]) is None
        assert len(reads) == before, "it is known to lead nowhere"
        await inbox.define.source(names[-1], verify=OPEN)
        assert await _at(inbox, names[-1]) is not None


async def _at(inbox: Inbox, path: str) -> Any:
    return await inbox.definitions.find_source_at(path)


async def test_only_so_many_sources_are_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "MOST_SOURCES", 3)
    inbox = Inbox(engine.url)

    @inbox.on("other")
    async def handle(event: Event) -> None: ...

    async with running(engine, inbox):
        for n in range(6):
            await inbox.define.source(f"s{n}", verify=OPEN, key="$.id")
            await inbox.define.route(f"s{n}", "handle")
        for _ in range(2):
            for n in range(6):
                assert (await send(inbox, f"s{n}", "1")).reply.status == 200
        assert len(inbox.definitions._sources) == len(inbox.definitions.routes) - 1 == 3
        await inbox.drain()
        assert len((await inbox.admin.deliveries(Filter())).items) == 6


async def test_nothing_is_taken_while_changes_cannot_be_learnt_of(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(engine.url)
    inbox.source("own", verify=OPEN, key="$.id")
    async with running(engine, inbox):
        await inbox.define.source("s", verify=OPEN, key="$.id")
        assert (await send(inbox, "s", "1")).reply.status == 200
        monkeypatch.setattr(type(inbox.store), "learns_changes", False)
        assert [(await send(inbox, name, "2")).reply.status for name in ("s", "own")] == [503, 200]
        monkeypatch.undo()


async def test_a_source_deleted_while_its_event_is_stored_acknowledges_nothing(engine: Engine) -> None:
    async with running(engine) as inbox:
        await inbox.define.source("s", verify=OPEN, key="$.id")
        await send(inbox, "s", "1")
        begun = inbox.receiver.begin(inbox.definitions.at("s"), Arrival("s", (), hook("2")))  # type: ignore[arg-type]
        assert not isinstance(begun, Receipt)
        await inbox.define.delete("source", "s")
        assert (await inbox.receiver.complete(begun)).reply.status == 401


# -- two processes ---------------------------------------------------------------------------------


class Server(Receiver):
    def begin(self, *, fault: str = "", key: str = KEY) -> Server:
        self.config = CONFIG + '[server]\nadmin_token = {{ env = "ADMIN" }}\n'
        self.start(env={"ADMIN": TOKEN, "ONCEHOOK_SECRET_KEY": key}, fault=fault)
        return self

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        client = self.client()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        content = b"" if body is None else json.dumps(body).encode()
        answer = await client.send_raw(request(method, f"/api/v1/{path}", content, headers))
        client.close()
        return answer

    async def post_hook(self, name: str, key: str, secret: str) -> Answer:
        client = self.client()
        answer = await client.post(f"/in/{name}", hook(key), signed(hook(key), secret))
        client.close()
        return answer


@pytest.fixture
def pair(engine: Engine) -> tuple[Server, Server]:
    made = [Server(engine.folder / name, engine.url) for name in ("a", "b")]
    engine.receivers += made
    return made[0].begin(), made[1].begin()


SOURCE = {"name": "trigger-4", "verify": HMAC, "secret": "generate", "key": "$.id", "account": None}


async def test_two_processes_act_alike_within_a_second(pair: tuple[Server, Server]) -> None:
    one, other = pair
    made = await one.ask("POST", "sources", SOURCE)
    assert made.status == 201
    assert (made.json["name"], made.json["address"]) == ("trigger-4", "/in/trigger-4")
    secret = made.json["secret"]
    await _within_a_second(lambda: other.post_hook("trigger-4", "1", secret), 200)
    assert (await one.post_hook("trigger-4", "1", secret)).json["status"] == "duplicate"
    rotated = (await other.ask("POST", "sources/trigger-4/rotate", {"overlap": "1h"})).json["secret"]
    assert (await one.post_hook("trigger-4", "2", secret)).status == 200
    await _within_a_second(lambda: one.post_hook("trigger-4", "3", rotated), 200)
    await other.ask("POST", "sources/trigger-4/disable")
    await _within_a_second(lambda: one.post_hook("trigger-4", "4", rotated), 401)
    await other.ask("POST", "sources/trigger-4/enable")
    await _within_a_second(lambda: one.post_hook("trigger-4", "4", rotated), 200)
    assert (await one.ask("DELETE", "sources/trigger-4")).status == 200
    await _within_a_second(lambda: other.post_hook("trigger-4", "5", rotated), 401)


async def _within_a_second(ask: Any, status: int) -> None:
    """Wait for a status. A refusal that is due must not be an acknowledgement any more after a second."""
    began = time.monotonic()
    while True:
        asked_at = time.monotonic()
        answer = await ask()
        if answer.status == status:
            return
        assert answer.status != 200 or asked_at - began < 1.0, "still acknowledged"
        await asyncio.sleep(0.02)


async def test_a_change_whose_author_dies_before_the_notice_counts(pair: tuple[Server, Server]) -> None:
    one, other = pair
    made = (await one.ask("POST", "sources", SOURCE)).json
    await _within_a_second(lambda: other.post_hook("trigger-4", "1", made["secret"]), 200)
    one.stop()
    one.begin(fault="before_definition_notice:1")
    other.stop()  # on SQLite the first one must own the file
    other.begin()
    await _within_a_second(lambda: other.post_hook("trigger-4", "2", made["secret"]), 200)
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await one.ask("DELETE", "sources/trigger-4")
    one.wait()
    began = asked_at = time.monotonic()
    while (answer := await other.post_hook("trigger-4", "3", made["secret"])).status != 401:
        assert answer.status == 503 or asked_at - began < 1.0
        await asyncio.sleep(0.02)
        asked_at = time.monotonic()


async def test_a_source_keeps_media_only_where_there_is_a_place_for_them(engine: Engine) -> None:
    """On SQLite there is one beside the file. Otherwise every file would become a dead letter."""
    given = {"preset": "whatsapp-cloud", "verify_token": "a-token-of-mine", "secret": "my-secret-123"}
    async with running(engine) as inbox:
        made = inbox.define.source("chat", media={"token": "a-token-1"}, **given)
        if engine.name == "sqlite":
            assert (await made).name == "chat"
            return
        with pytest.raises(InvalidSettings, match="there is no place to keep files at"):
            await made
        await inbox.define.source("chat", **given)
        with pytest.raises(InvalidSettings, match="there is no place to keep files at"):
            await inbox.define.change("source", "chat", media={"token": "a-token-1"})


async def test_the_api_says_what_is_wrong(pair: tuple[Server, Server]) -> None:
    one, _ = pair
    assert (await one.ask("POST", "sources", SOURCE)).status == 201
    refused = await one.ask("POST", "sources", SOURCE)
    assert (refused.status, refused.json["code"]) == (409, "exists")
    for method, path, body in (
        ("POST", "sources", {**SOURCE, "name": "orders"}),
        ("PATCH", "sources/orders", {"key": "$.id"}),
        ("DELETE", "sources/orders", None),
    ):
        refused = await one.ask(method, path, body)
        assert (refused.status, refused.json["code"]) == (409, "defined_elsewhere")
    refused = await one.ask("POST", "sources", {"name": "t", "prest": "n8n"})
    assert (refused.status, refused.json["code"]) == (422, "invalid_settings")
    assert refused.json["errors"][0] == {
        "setting": "prest",
        "error": 'unknown key "prest" in [source.t]',
        "hint": 'did you mean "preset"?',
    }
    assert (await one.ask("GET", "sources/nobody")).status == 404
    assert (await one.ask("POST", "sources", {"preset": "n8n"})).json["errors"][0]["setting"] == "name"
    shown = {found["name"]: found for found in (await one.ask("GET", "sources")).json["items"]}
    assert (shown["orders"]["origin"], shown["trigger-4"]["origin"]) == ("file", "store")
    assert "oncehook.toml:" in shown["orders"]["place"]
    assert shown["trigger-4"]["settings"]["secret"] == "(set)"
    url = {"name": "crm", "url": "https://crm.example/hooks"}
    assert (await one.ask("POST", "destinations", url)).status == 201
    route = await one.ask("POST", "routes", {"from": "trigger-4", "to": "crm", "when": {"type": "message.*"}})
    assert route.status == 201
    assert route.json["id"].startswith("rte_")
    got = await one.ask("GET", f"routes/{route.json['id']}")
    assert (got.json["from"], got.json["to"], got.json["origin"]) == ("trigger-4", "crm", "store")
    changed = await one.ask("PATCH", f"routes/{route.json['id']}", {"when": None})
    assert changed.status == 200
    assert "when" not in changed.json["settings"]
    put = await one.ask("PUT", "destinations/crm", {"url": "https://other.example/"})
    assert (put.status, put.json["settings"]) == (200, {"url": "https://other.example/"})
    put = await one.ask("PUT", "destinations/crm-2", {"url": "https://other.example/"})
    assert put.status == 201
    unknown = await one.ask("PUT", f"routes/{RouteId(new_id())}", {"from": "trigger-4", "to": "crm"})
    assert (unknown.status, unknown.json["code"]) == (404, "not_found")


async def test_words_that_stand_for_a_secret_never_become_one(pair: tuple[Server, Server]) -> None:
    one, _ = pair
    made = (await one.ask("POST", "sources", {"name": "s", "verify": HMAC, "secret": "generate", "key": "$.id"})).json
    rotated = (await one.ask("POST", "sources/s/rotate", {"secret": "generate", "overlap": "1h"})).json
    assert rotated["secret"] not in ("generate", made["secret"])
    shown = (await one.ask("GET", "sources/s")).json["settings"]
    for method in ("PUT", "PATCH"):
        assert (await one.ask(method, "sources/s", {**shown, "subject": "$.customer"})).status == 200
    for key, secret in (("1", made["secret"]), ("2", rotated["secret"])):
        assert (await one.post_hook("s", key, secret)).status == 200, "given back as it was shown, it is kept"
    refused = await one.ask("PATCH", "sources/s", {"secret": "(set)"})
    assert (refused.status, refused.json["errors"][0]["setting"]) == (422, "secret")
    for word in ("generate", "(set)"):
        assert (await one.post_hook("s", "3", word)).status == 401
    disabled = (await one.ask("POST", "sources/s/disable", {})).json
    enabled = (await one.ask("POST", "sources/s/enable", {})).json
    assert (disabled["address"], enabled["address"]) == ("/in/s", "/in/s")


async def test_an_unknown_parameter_is_refused_everywhere(pair: tuple[Server, Server]) -> None:
    one, _ = pair
    client = one.client()
    document = (await client.get("/openapi.json")).json
    client.close()
    asked = 0
    for path, methods in document["paths"].items():
        for method in methods:
            if path.startswith("/api/v1/") and method in ("get", "post", "put", "patch", "delete"):
                answer = await one.ask(method.upper(), re.sub(r"{[^}]*}", "x", path[8:]) + "?nonsense=1", {})
                assert 400 <= answer.status < 500, (method, path, answer)
                asked += 1
    assert asked > 60


async def test_without_a_key_secrets_are_refused(engine: Engine) -> None:
    server = Server(engine.folder / "a", engine.url)
    engine.receivers.append(server)
    server.begin(key="")
    refused = await server.ask("POST", "sources", SOURCE)
    assert (refused.status, refused.json["code"]) == (422, "secret_key_missing")
    assert "ONCEHOOK_SECRET_KEY" in refused.json["hint"]


async def test_changes_under_traffic_lose_and_leak_nothing(pair: tuple[Server, Server]) -> None:
    """No arrival is acknowledged a second after its source's DELETE was answered; none is refused while it lives."""
    deleted_at: dict[str, float] = {}
    living: dict[str, str] = {}
    wrong: list[str] = []
    accepted = 0
    is_over = False

    async def change(server: Server, part: int) -> None:
        for n in range(25):
            name = f"s-{part}-{n}"
            made = await server.ask("POST", "sources", {**SOURCE, "name": name})
            assert made.status == 201
            living[name] = made.json["secret"]
            await server.ask("PATCH", f"sources/{name}", {"subject": "$.customer"})
            if n % 2:
                secret = living.pop(name)
                assert (await server.ask("DELETE", f"sources/{name}")).status == 200
                deleted_at[name] = time.monotonic()
                gone[name] = secret

    gone: dict[str, str] = {}

    async def send_all(server: Server) -> None:
        nonlocal accepted
        count = 0
        while not is_over:
            for name, secret in [*living.items()][-4:]:
                count += 1
                answer = await server.post_hook(name, f"{server.port}-{count}", secret)
                accepted += answer.status == 200
                if answer.status != 200 and name in living and name not in deleted_at:
                    wrong.append(f"{name} lives, and {answer.status}")
            for name, secret in [*gone.items()][-4:]:
                asked_at = time.monotonic()
                answer = await server.post_hook(name, "late", secret)
                if answer.status == 200 and asked_at - deleted_at[name] > 1.0:
                    wrong.append(f"{name} was deleted {asked_at - deleted_at[name]:.2f} s before")
            await asyncio.sleep(0.005)

    first = (await pair[0].ask("POST", "sources", {**SOURCE, "name": "first"})).json["secret"]
    await _within_a_second(lambda: pair[1].post_hook("first", "1", first), 200)
    senders = [asyncio.create_task(send_all(server)) for server in pair]
    await asyncio.gather(*(change(server, part) for part, server in enumerate(pair)))
    await asyncio.sleep(1.1)
    for name, secret in gone.items():
        for server in pair:
            assert (await server.post_hook(name, "over", secret)).status == 401
    is_over = True
    await asyncio.gather(*senders)
    assert wrong == []
    assert accepted > 50


async def test_changes_under_traffic_and_kills_lose_and_leak_nothing(pair: tuple[Server, Server]) -> None:
    """By the history of answers: what was acknowledged is stored, a living source refuses nobody, and none is
    acknowledged a second after the answer to its DELETE, whichever process was killed meanwhile."""
    history = History(pair)
    changing = [history.change(server, part) for part, server in enumerate(pair)]
    beside = [asyncio.create_task(act) for act in (*map(history.send, pair), history.kill())]
    await asyncio.gather(*changing)
    while history.kills < 4 or len(history.acknowledged) < 20:
        await asyncio.sleep(0.05)
    history.is_over = True
    await asyncio.gather(*beside)
    assert history.wrong == []
    assert await history.find_lost() == []
    for name, secret in [*history.gone.items()][-50:]:
        await _within_a_second(lambda name=name, secret=secret: pair[0].post_hook(name, "over", secret), 401)


class History:
    """Sources that are made, changed and deleted at two servers, what is sent to them, and what was answered."""

    def __init__(self, pair: tuple[Server, Server]) -> None:
        self.pair = pair
        self.is_over = False
        self.kills = 0
        self.names = 0
        self.living: dict[str, tuple[str, float]] = {}
        """Secrets, and when their making was answered."""
        self.gone: dict[str, str] = {}
        self.deleted_at: dict[str, float] = {}
        self.acknowledged: list[str] = []
        self.wrong: list[str] = []

    async def change(self, server: Server, part: int) -> None:
        for n in range(effort("DEFINITIONS", 24) // 2):
            made = None
            while made is None:  # of one that was killed meanwhile nobody knows whether it was made, nor its secret
                self.names += 1
                name = f"s-{part}-{self.names}"
                made = await self._ask(server, "POST", "sources", {**SOURCE, "name": name})
            assert made.status == 201
            self.living[name] = made.json["secret"], time.monotonic()
            await self._ask(server, "PATCH", f"sources/{name}", {"subject": "$.customer"})
            if n % 4:
                secret, _ = self.living.pop(name)
                answer = await self._ask(server, "DELETE", f"sources/{name}")
                if answer is not None and answer.status in (200, 404):  # 404: that of a killed one was done
                    self.deleted_at[name] = time.monotonic()
                    self.gone[name] = secret

    async def _ask(self, server: Server, method: str, path: str, body: Any = None) -> Answer | None:
        """Ask until there is an answer; None where the making of something may have been done before it was killed."""
        while True:
            is_known = False
            try:
                answer = await server.ask(method, path, body)
            except ConnectionRefusedError:
                is_known = True
            except (OSError, asyncio.IncompleteReadError):
                pass
            else:
                if answer.status < 500:
                    return answer
            await asyncio.sleep(0.05)
            if method == "POST" and not is_known:
                return None

    async def send(self, server: Server) -> None:
        count = 0
        while not self.is_over:
            for name, (secret, made_at) in [*self.living.items()][-3:]:
                count += 1
                asked_at = time.monotonic()
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    answer = await server.post_hook(name, f"{server.port}-{count}", secret)
                    if answer.status == 200:
                        self.acknowledged.append(answer.json["event_id"])
                    elif answer.status != 503 and name in self.living and asked_at - made_at > 1.0:
                        self.wrong.append(f"{name} lives, and {answer.status}")
            for name, secret in [*self.gone.items()][-3:]:
                asked_at = time.monotonic()
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    answer = await server.post_hook(name, "late", secret)
                    if answer.status == 200 and asked_at - self.deleted_at[name] > 1.0:
                        self.wrong.append(f"{name} was deleted {asked_at - self.deleted_at[name]:.2f} s before")
            await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """Kill one of them and start it again, in turns."""
        while not self.is_over:
            victim = self.pair[self.kills % 2]
            await asyncio.sleep(0.5)
            victim.kill()
            await asyncio.to_thread(victim.begin)
            self.kills += 1

    async def find_lost(self) -> list[str]:
        """Return the acknowledged events that are not stored."""
        found = [await self._ask(self.pair[0], "GET", f"events/{one}") for one in self.acknowledged]
        return [one for one, answer in zip(self.acknowledged, found, strict=True) if not answer or answer.status != 200]
