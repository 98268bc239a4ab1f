"""S32 between accounts: every route of the OpenAPI document, with one customer's token and the other's ids.

Whatever is another account's looks as if it never was: not a byte of it is answered, not a name of its definitions, and
a refusal is the same, word for word, as for an id that nobody has.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from starlette.applications import Starlette

from oncehook import Event, GiveUp, Inbox, clock
from oncehook.model import Arrival, DeliveryId, DeliveryStatus, EventId, Filter, ReplayId, Scope, new_id
from oncehook.secret import Secret
from oncehook.settings.tables import TokenConfig
from oncehook.web import api
from oncehook.web.api.endpoints import watch_while_valid
from oncehook.web.auth import Access, Identity, Role
from oncehook.web.live import OF_CUSTOMERS, OF_ONE, Broadcast, TooManyWatchers
from oncehook.web.server import metrics_route
from tests.acceptance.admin_house import call
from tests.acceptance.conftest import Engine

MINE, OTHER = "42", "43"
CANARY = "canary43"
"""In every text of the other's: keys, subjects, bodies, headers, names, errors, reasons."""

NAMED = ("/destinations", "/sources", "/accounts")
TOKENS = {MINE: "token-of-42-kX1vQ9", OTHER: "token-of-43-kX1vQ9", "": "token-of-all-kX1vQ9"}


@dataclass
class Tenants:
    inbox: Inbox
    app: Starlette
    stream: Broadcast
    ids: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By account and kind."""

    async def ask(self, whose: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
        raw = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": "inbox.example", "Authorization": f"Bearer {TOKENS[whose]}"}
        answer = await call(self.app, method, f"/api/v1{path}", raw, headers, "203.0.113.7")
        return answer.status, answer.body.decode("utf-8", "replace")

    async def get(self, whose: str, path: str) -> Any:
        status, body = await self.ask(whose, "GET", path)
        assert status == 200, body
        return json.loads(body)


def words(whose: str) -> str:
    return "mine42" if whose == MINE else CANARY


@pytest.fixture
async def tenants(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tenants]:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())
    inbox = Inbox(engine.url)
    signed = {"scheme": "hmac", "header": "X-Signature"}
    inbox.source("shop", verify=signed, account="address", key="$.id", subject="$.who")
    for whose in (MINE, OTHER):
        make_destination(inbox, whose)
        inbox.source(f"own-{words(whose)}", verify="none", account=whose, key="$.id", path=f"q{whose}" * 12)
    monkeypatch.setenv("KEYED_SECRET", "a secret for tests")
    inbox.source("keyed", verify="bearer", secret=Secret.from_env("KEYED_SECRET"), account=MINE, key="$.id")

    @inbox.on("shop")
    async def internal(event: Event) -> None:
        raise GiveUp("the server's own words")

    stream = inbox.observer.audience = Broadcast()
    holders = [
        TokenConfig(name=f"of {whose}", role="admin", token=token_of(whose), accounts=(whose,))
        for whose in (MINE, OTHER)
    ]
    access = Access(token_of(""), holders)
    async with inbox.running():
        made = Tenants(inbox, Starlette(routes=api.routes(inbox.admin, access, stream)), stream)
        await fill(made)
        yield made


def token_of(whose: str) -> Secret:
    return Secret.from_env("T", env={"T": TOKENS[whose]})


def make_destination(inbox: Inbox, whose: str) -> None:
    @inbox.on("nothing", name=f"to-{words(whose)}", account=whose, subscribe="*", retry=["1h"])
    async def fail(event: Event) -> None:
        raise GiveUp(f"{words(whose)} answered this")


async def define(tenants: Tenants, whose: str) -> list[str]:
    """What a customer defines with its own token; the names of all of it."""
    word = words(whose)
    destination = {"name": f"stored-{word}", "url": f"https://{word}.example/x", "sign": "generate", "subscribe": "x.*"}
    source = {"name": f"in-{word}", "preset": "n8n", "secret": "generate"}
    route = {"from": f"in-{word}", "to": f"stored-{word}"}
    made = [f"stored-{word}", f"in-{word}"]
    for path, body in (("/destinations", destination), ("/sources", source), ("/routes", route)):
        status, text = await tenants.ask(whose, "POST", path, body)
        assert (status, json.loads(text)["account"]) == (201, whose), text
        made += [json.loads(text)["id"]] if path == "/routes" else []
    return made


async def fill(tenants: Tenants) -> None:
    """The same for both: arrivals, a copy, emitted events, dead letters, replays, acts."""
    inbox = tenants.inbox
    defined: dict[str, list[str]] = {}
    for whose in (MINE, OTHER):
        word = words(whose)
        secrets = {"shop": f"secret of {word}, long enough"}
        await inbox.define.account(whose, name=f"called {word}", aliases=[f"alias-{word}"], secrets=secrets)
        defined[whose] = await define(tenants, whose)
        await inbox.emit("app", f"{word}.made", {"text": word}, key=f"{word}-k", subject=f"{word}-s", account=whose)
        await inbox.emit("app", "same.made", {"text": word}, key="same", subject="same", account=whose)
        for _ in range(2):
            head = [(b"x-said", word.encode())]
            body = json.dumps({"id": f"{word}-1", "who": "same", "text": word}).encode()
            arrival = Arrival(f"own-{word}", head, body, path=f"/in/own-{word}")
            assert (await inbox.receiver.receive(arrival)).reply.status == 200
    await inbox.drain()
    for whose in (MINE, OTHER):
        events = (await tenants.get(whose, "/events"))["items"]
        deliveries = (await tenants.get(whose, "/deliveries"))["items"]
        dead = next(one["id"] for one in deliveries if one["status"] == "dead")
        reason = {"reason": words(whose)}
        status, _ = await tenants.ask(whose, "POST", f"/deliveries/{dead}/replay", reason)
        assert status == 202
        status, body = await tenants.ask(whose, "POST", "/replays", {"query": "status:dead", **reason})
        replays = (await tenants.get(whose, "/replays"))["items"]
        arrivals = (await tenants.get(whose, f"/events/{events[0]['id']}/arrivals"))["items"]
        tenants.ids[whose] = {
            "event": [one["id"] for one in events],
            "delivery": [one["id"] for one in deliveries],
            "replay": [one["id"] for one in replays],
            "arrival": [one["id"] for one in arrivals],
            "name": [f"to-{words(whose)}", f"own-{words(whose)}", whose, *defined[whose]],
        }
        assert all(tenants.ids[whose].values())
    while any(one["state"] != "done" for one in (await tenants.get("", "/replays"))["items"]):
        await asyncio.sleep(0.01)
    await inbox.drain()


def paths_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [
        (method.upper(), path.removeprefix("/api/v1"))
        for path, operations in document["paths"].items()
        for method in operations
        if path != "/api/v1/stream"
    ]
    # The audit log first: later it repeats what the caller itself has asked for.
    return sorted(found, key=lambda one: one[1] != "/audit")


def candidates(path: str, ids: Mapping[str, list[str]]) -> list[str]:
    """The path with every one of these ids in every place."""
    places = re.findall(r"\{\w+\}", path)
    every = [one for kind, listed in ids.items() for one in (listed if kind == "name" else listed[:1])]
    filled = []
    pairs = zip(every, reversed(every), strict=True)
    for chosen in itertools.product(every, repeat=len(places)) if len(places) < 2 else pairs:
        one = path
        for place, id_ in zip(places, chosen, strict=True):
            one = one.replace(place, id_, 1)
        filled.append(one)
    return filled


def bodies_of(ids: Mapping[str, list[str]]) -> list[dict[str, Any] | None]:
    """What an act may be told about the other: by id, by query, by name."""
    return [
        None,
        {"reason": "x"},
        {"reason": "x", "query": f"account:{OTHER}"},
        {"reason": "x", "query": f"destination:to-{CANARY}"},
        {"ids": ids["delivery"][:2]},
        {"query": f"account:{OTHER} status:dead"},
        {"query": f"id:{ids['delivery'][0]}"},
        {"destination": f"to-{CANARY}", "query": "status:dead"},
        {"subject": "same", "account": OTHER, "dry_run": True},
        {"account": OTHER, "dry_run": True},
        {"subject": "same", "dry_run": True},
        {"keys": [["a"]], "account": OTHER},
        {"keys": [["a"]]},
        {"name": f"to-{CANARY}", "url": "https://example.com/x"},
        {"name": f"own-{CANARY}", "preset": "n8n", "secret": "generate"},
        {"name": "new", "url": "https://example.com/x", "account": OTHER, "subscribe": ["*"]},
        {"from": f"own-{CANARY}", "to": f"to-{CANARY}"},
        {"id": OTHER, "name": "x"},
        {"aliases": ["x"]},
        {"enabled": False},
        {"overlap": "1h"},
    ]


def nobody() -> dict[str, list[str]]:
    fresh = new_id()
    return {
        "event": [str(EventId(fresh))],
        "delivery": [str(DeliveryId.of(fresh, 1))],
        "replay": [str(ReplayId(fresh))],
        "name": ["to-nobody", "own-nobody", "44", "stored-nobody", "in-nobody", f"rte_{fresh.hex()}"],
    }


def clean(text: str) -> str:
    """An answer without what the caller itself said."""
    return re.sub(rf"{CANARY}|nobody|\b43\b|\b44\b|[a-z]{{3}}_[0-9a-f]{{32}}", "*", text)


async def test_no_route_answers_a_byte_of_the_others(tenants: Tenants) -> None:
    before = await seen_by_other(tenants)
    document = json.loads((await call(tenants.app, "GET", "/openapi.json", b"", {}, "203.0.113.7")).body)
    theirs, asked = tenants.ids[OTHER], 0
    for method, path in paths_of(document):
        for n, target in enumerate(candidates(path, theirs)):
            acts = bodies_of(theirs) if n == 0 else [{}, {"reason": "x", "overlap": "1h"}]
            for body in [None] if method in ("GET", "DELETE") else acts:
                status, text = await tenants.ask(MINE, method, target, body)
                asked += 1
                said = json.dumps(body) + target
                for secret in (CANARY, *theirs["event"], *theirs["delivery"], *theirs["replay"]):
                    assert secret not in text or secret in said, (method, target, body, text)
                assert status < 500, (method, target, body, text)
                if "{" in path and status < 400:  # what it has made itself, a moment ago
                    assert json.loads(text).get("account") == MINE or method == "DELETE", (method, target, body, text)
    assert asked > 200
    assert await seen_by_other(tenants) == before


async def seen_by_other(tenants: Tenants) -> list[Any]:
    """What the other sees, to be the same after whatever was tried."""
    paths = (
        *("/events", "/deliveries", "/replays", "/destinations", "/sources", "/routes", "/accounts", "/audit", "/dead"),
        "/stats?by=source",
    )
    answers = [await tenants.get(OTHER, path) for path in paths]
    answers[-1].pop("since")
    return answers


async def test_another_accounts_thing_is_refused_like_what_never_was(tenants: Tenants) -> None:
    document = json.loads((await call(tenants.app, "GET", "/openapi.json", b"", {}, "203.0.113.7")).body)
    theirs, none = tenants.ids[OTHER], nobody()
    compared = 0
    for method, path in paths_of(document):
        if path.count("{") != 1:
            continue
        for kind, ids in none.items():
            for theirs_id, nobodys_id in zip(theirs[kind], ids, strict=False):
                place = re.findall(r"\{\w+\}", path)[0]
                real = await tenants.ask(MINE, method, path.replace(place, theirs_id), {})
                made_up = await tenants.ask(MINE, method, path.replace(place, nobodys_id), {})
                assert (real[0], clean(real[1])) == (made_up[0], clean(made_up[1])), (method, path, real, made_up)
                compared += 1
    assert compared > 50


async def test_lists_and_searches_hold_only_the_viewers(tenants: Tenants) -> None:
    for path in ("/events", "/deliveries"):
        for query in ("", "?query=same", "?query=source:app", f"?query=account:{MINE}", "?query=status:dead"):
            items = (await tenants.get(MINE, path + query))["items"]
            assert {one["account"] for one in items} <= {MINE}
        assert (await tenants.get(MINE, path))["items"]
        assert (await tenants.get(MINE, f"{path}?account={OTHER}"))["items"] == []
        everybody = {one["account"] for one in (await tenants.get("", path))["items"]}
        assert everybody == {MINE, OTHER}
    assert (await tenants.get(MINE, f"/stats?account={OTHER}"))["total"] == 0
    assert (await tenants.get(MINE, "/stats"))["total"] == 3
    assert (await tenants.get("", f"/stats?account={OTHER}"))["total"] == 3
    assert (await tenants.get(MINE, "/stats"))["dead"] == (await tenants.get("", f"/stats?account={MINE}"))["dead"]
    names = {path: [one["name"] for one in (await tenants.get(MINE, path))["items"]] for path in NAMED}
    assert names == {
        "/destinations": ["to-mine42", "stored-mine42"],
        "/sources": ["shop", "own-mine42", "keyed", "in-mine42"],
        "/accounts": ["called mine42"],
    }
    assert [one["to"] for one in (await tenants.get(MINE, "/routes"))["items"]] == ["stored-mine42"]


async def test_the_stream_holds_only_the_viewers(tenants: Tenants) -> None:
    watchers = {whose: tenants.stream.join(Scope(accounts=frozenset({whose}))) for whose in (MINE, OTHER)}
    for whose in (MINE, OTHER):
        await tenants.inbox.emit("app", f"{words(whose)}.more", {}, account=whose)
    await tenants.inbox.drain()
    await asyncio.sleep(0)
    seen = {whose: watcher.take().decode() for whose, watcher in watchers.items()}
    assert "mine42.more" in seen[MINE]
    assert CANARY not in seen[MINE]
    assert f"{CANARY}.more" in seen[OTHER]
    assert "mine42" not in seen[OTHER]


async def test_the_servers_own_destinations_are_not_a_customers(tenants: Tenants) -> None:
    """Its events may go there; its token neither lists, pauses nor tests them, nor reads what they answered."""
    inbox = tenants.inbox
    await inbox.emit("shop", "x", {}, key="to-internal", account=MINE)
    await inbox.drain()
    page = await inbox.admin.deliveries(Filter(destination="internal"))
    mine = str(page.items[0].id)
    assert (await tenants.get(MINE, f"/deliveries/{mine}"))["destination"] == "internal"
    attempts = (await tenants.get(MINE, f"/deliveries/{mine}/attempts"))["items"]
    assert [one["answer"] for one in attempts] == [None]
    for act in ("pause", "resume", "test"):
        status, _ = await tenants.ask(MINE, "POST", f"/destinations/internal/{act}", {})
        assert status == 404
    status, _ = await tenants.ask(MINE, "POST", "/destinations/to-mine42/pause", {})
    assert status == 200
    system = await tenants.get(MINE, "/system")
    assert system["workers"] == []


async def test_a_customer_learns_nothing_of_the_servers_files_and_variables(tenants: Tenants) -> None:
    """Where a definition stands, and what its secrets are called there, is for those who can look there."""
    for whose, is_told in (("", True), (MINE, False)):
        sources = {one["name"]: one for one in (await tenants.get(whose, "/sources"))["items"]}
        destinations = {one["name"]: one for one in (await tenants.get(whose, "/destinations"))["items"]}
        assert (sources["keyed"]["secret_names"] == ["env:KEYED_SECRET"]) == is_told
        assert [one["place"] is not None for one in (sources["keyed"], destinations["to-mine42"])] == [is_told] * 2
    for path in ("/sources", "/sources/keyed", "/destinations", "/destinations/to-mine42", "/routes", "/accounts"):
        _, text = await tenants.ask(MINE, "GET", path)
        assert "KEYED_SECRET" not in text
        assert ".py" not in text


async def test_only_an_admin_of_the_whole_inbox_defines_addresses_from_events(tenants: Tenants) -> None:
    given = {"name": "back", "url": "{$.callback_url}"}
    status, said = await tenants.ask("", "POST", "/destinations", given)
    refusal = json.loads(said)
    assert (status, refusal["code"]) == (422, "invalid_settings")
    (error,) = refusal["errors"]
    assert error["setting"] == "allow_hosts"
    assert error["hint"] == 'say which hosts it may name: allow_hosts = ["hooks.example.org"]'
    allowed = {**given, "allow_hosts": ["hooks.example.org"]}
    for whose in (MINE, OTHER):
        status, said = await tenants.ask(whose, "POST", "/destinations", allowed)
        assert (status, json.loads(said)["code"]) == (403, "forbidden")
    status, said = await tenants.ask("", "POST", "/destinations", allowed)
    assert status == 201
    shown = await tenants.get("", "/destinations/back")
    assert shown["address"] == "POST {$.callback_url}"
    assert shown["settings"]["allow_hosts"] == ["hooks.example.org"]


@pytest.mark.parametrize("noun", ["sources", "destinations"])
async def test_a_name_stays_with_its_account(tenants: Tenants, noun: str) -> None:
    """What was kept under it would be worked, shown and pruned by whoever has the name."""
    given = {"sources": {"preset": "n8n", "secret": "generate"}, "destinations": {"url": "https://example.com/x"}}[noun]
    theirs = {"sources": f"in-{CANARY}", "destinations": f"stored-{CANARY}"}[noun]
    assert (await tenants.ask(OTHER, "DELETE", f"/{noun}/{theirs}"))[0] == 200
    for whose, account in ((MINE, {}), ("", {}), ("", {"account": MINE})):
        status, text = await tenants.ask(whose, "POST", f"/{noun}", {"name": theirs, **given, **account})
        assert (status, json.loads(text)["code"]) == (409, "exists"), (whose, account)
        status, text = await tenants.ask(whose, "PUT", f"/{noun}/{theirs}", {**given, **account})
        assert (status, json.loads(text)["code"]) == (409, "exists"), "and not `definition_changed`, for ever"
    assert (await tenants.ask(OTHER, "POST", f"/{noun}", {"name": theirs, **given}))[0] == 201
    status, _ = await tenants.ask(
        MINE, "POST", f"/{noun}", {"name": "app" if noun == "sources" else "internal", **given}
    )
    assert status == 409, "nor does a customer get what was the server's own"


async def test_nothing_is_delivered_to_a_destination_that_has_become_anothers(tenants: Tenants) -> None:
    """An admin gives it to another account: what was planned for it before ends."""
    given = {"name": "moved", "url": "https://127.0.0.1:9/x", "subscribe": "*", "retry": ["1h"]}
    assert (await tenants.ask(MINE, "POST", "/destinations", given))[0] == 201
    await tenants.inbox.emit("app", "mine42.moved", {"text": "mine42"}, account=MINE)
    await tenants.inbox.drain()
    (dead,) = (await tenants.inbox.admin.deliveries(Filter(destination="moved"))).items
    assert dead.status is DeliveryStatus.dead, "a private address"
    assert (await tenants.ask("", "PATCH", "/destinations/moved", {"account": OTHER}))[0] == 200
    await tenants.inbox.admin.replay_one(dead.id, actor="ana")
    await tenants.inbox.drain()
    (dead,) = (await tenants.inbox.admin.deliveries(Filter(destination="moved"))).items
    assert (dead.status, dead.last_error) == (DeliveryStatus.dead, "its destination is another account's now")


async def test_a_plan_tells_nothing_of_destinations_that_are_not_the_viewers(tenants: Tenants) -> None:
    secret = "https://127.0.0.1:9/path-of-the-server"
    assert (await tenants.ask("", "POST", "/destinations", {"name": "own", "url": secret}))[0] == 201
    assert (await tenants.ask("", "POST", "/routes", {"from": "app", "to": "own"}))[0] == 201
    await tenants.inbox.emit("app", "mine42.own", {"text": "mine42"}, account=MINE)
    await tenants.inbox.drain()
    for whose, is_told in (("", True), (MINE, False)):
        status, text = await tenants.ask(whose, "POST", "/replays/plan", {"query": "to:own"})
        assert (status, json.loads(text)["total"]) == (200, 1), text
        assert ("path-of-the-server" in text, json.loads(text)["recipients"][0]["failing"]) == (is_told, is_told)


async def test_a_choice_that_contradicts_its_query_is_refused(tenants: Tenants) -> None:
    ids = [str(DeliveryId.of(new_id(), 1)) for _ in range(3)]
    for choice in (
        {"query": "to:a OR to:b", "destination": "internal"},
        {"query": f"id:{ids[0]} OR id:{ids[1]}", "ids": [ids[2]]},
    ):
        for path in ("/replays/plan", "/replays"):
            assert (await tenants.ask("", "POST", path, choice))[0] == 400


@pytest.mark.parametrize(
    ("path", "given", "setting"),
    [
        ("/sources", {"preset": "n8n", "secret": "generate", "max_body": "10GB"}, "max_body"),
        ("/sources", {"preset": "n8n", "secret": "generate", "budget": "10m"}, "budget"),
        ("/destinations", {"url": "https://example.com/x", "concurrency": 10000}, "concurrency"),
        ("/destinations", {"url": "https://example.com/x", "timeout": "30d"}, "timeout"),
    ],
)
async def test_a_customer_takes_no_more_than_its_part_of_what_all_share(
    tenants: Tenants, path: str, given: dict[str, Any], setting: str
) -> None:
    status, text = await tenants.ask(MINE, "POST", path, {"name": "greedy", **given})
    assert (status, [one["setting"] for one in json.loads(text)["errors"]]) == (422, [setting])
    assert (await tenants.ask("", "POST", path, {"name": "greedy", **given, "account": MINE}))[0] == 201


async def test_one_customer_leaves_places_for_others_who_watch(tenants: Tenants) -> None:
    mine = Scope(accounts=frozenset({MINE}))
    for _ in range(OF_ONE):
        tenants.stream.join(mine)
    with pytest.raises(TooManyWatchers):
        tenants.stream.join(mine)
    for n in range(OF_CUSTOMERS - OF_ONE):
        tenants.stream.join(Scope(accounts=frozenset({f"other-{n}"})))
    with pytest.raises(TooManyWatchers):
        tenants.stream.join(Scope(accounts=frozenset({OTHER})))
    tenants.stream.join()


async def test_headers_of_a_destination_are_secrets(tenants: Tenants) -> None:
    given = {"name": "keyed-out", "url": "https://example.com/x", "headers": {"X-Functions-Key": "a-key-of-theirs"}}
    assert (await tenants.ask("", "POST", "/destinations", given))[0] == 201
    for path in ("/destinations", "/destinations/keyed-out", "/audit"):
        status, text = await tenants.ask("", "GET", path)
        assert (status, "a-key-of-theirs" in text) == (200, False)


async def test_metrics_of_the_whole_inbox_are_not_for_customers(tenants: Tenants) -> None:
    holders = [TokenConfig(name="of 42", role="admin", token=token_of(MINE), accounts=(MINE,))]
    app = Starlette(routes=[metrics_route(tenants.inbox.metrics, Access(token_of(""), holders))])
    for whose, status in ((MINE, 403), ("", 200)):
        headers = {"Host": "inbox.example", "Authorization": f"Bearer {TOKENS[whose]}"}
        answer = await call(app, "GET", "/metrics", b"", headers, "203.0.113.7")
        assert (answer.status, b"oncehook_" in answer.body) == (status, status == 200)


async def test_a_stream_ends_with_the_token_that_opened_it(tenants: Tenants) -> None:
    soon = clock.now_utc() + timedelta(hours=1)
    who = Identity("of 42", Role.viewer, accounts=frozenset({MINE}), expires=soon)
    watcher = tenants.stream.join(who.scope)
    seen = watch_while_valid(tenants.stream, watcher, who)
    assert (await anext(seen)).startswith(b"retry")
    clock.forward(3601)
    try:
        await tenants.inbox.emit("app", "mine42.late", {}, account=MINE)
        with pytest.raises(StopAsyncIteration):
            await anext(seen)
    finally:
        clock.forward(-3601)


async def test_looking_at_a_destination_whose_key_is_rotated_leaves_nothing_behind(tenants: Tenants) -> None:
    status, _ = await tenants.ask(MINE, "POST", "/destinations/stored-mine42/rotate", {"overlap": "1h"})
    assert status == 200
    before = len(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
    for _ in range(50):
        await tenants.ask(MINE, "POST", "/replays/plan", {"query": "to:stored-mine42", "force": True})
        await tenants.inbox.definitions.find_destinations(["stored-mine42"])
    assert len(asyncio.get_running_loop()._scheduled) < before + 25  # type: ignore[attr-defined]


@pytest.mark.parametrize("types", [" ", "\n", [""]])
async def test_a_subscription_that_could_never_be_used_is_refused(tenants: Tenants, types: Any) -> None:
    given = {"name": "odd", "url": "https://example.com/x", "subscribe": types}
    status, text = await tenants.ask(MINE, "POST", "/destinations", given)
    assert (status, json.loads(text)["code"]) == (422, "invalid_settings"), text
