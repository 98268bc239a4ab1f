"""S27, S32 to S34: what a token may see and do, by source, payload and time; and what the audit log says of it.

Each test asks through the API with real tokens, on both engines: whatever is not the token's looks as if it were not
there, in lists, counts, single things, replays, the stream and every act.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.applications import Starlette

from oncehook import admin, clock
from oncehook.errors import StoreUnavailable
from oncehook.model import ArrivalId, DeliveryId, Evidence, Filter, Rejection, ReplayId, Settle, Settlement
from oncehook.secret import Secret
from oncehook.settings.tables import TokenConfig
from oncehook.web import api
from oncehook.web.api.endpoints import ENDPOINTS
from oncehook.web.auth import Access, Person, prove
from tests.acceptance.admin_house import House, admin_house, call, scope_of
from tests.store.making import MAIL, dead_letters, deliver, finish, item, keep, settle, take, take_one
from tests.wire import Answer

ADMIN = {"name": "ana", "role": "admin"}
MINE = {"name": "lena", "role": "admin", "sources": ("payments",)}
BOTH = {"name": "otto", "role": "admin", "sources": ("payments", "orders")}
BLIND = {"name": "hugo", "role": "admin", "payloads": False}


@dataclass
class Rights:
    """The house, asked by one token or another."""

    house: House
    used: list[str]

    def app(self, holder: Mapping[str, Any]) -> Starlette:
        async def note_use(name: str) -> None:
            self.used.append(name)
            await self.house.store.note_token_use(name)

        token = TokenConfig(token=Secret.from_env("T", env={"T": "secret-token"}), **holder)
        made = Access(None, [token], note_use=note_use)
        return Starlette(routes=api.routes(self.house.admin, made, self.house.stream))

    async def ask(self, holder: Mapping[str, Any], method: str, path: str, body: Any = None) -> Answer:
        raw = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": "inbox.example", "Authorization": "Bearer secret-token"}
        return await call(self.app(holder), method, f"/api/v1{path}", raw, headers, "203.0.113.7")

    async def get(self, holder: Mapping[str, Any], path: str) -> dict[str, Any]:
        answer = await self.ask(holder, "GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    async def ids(self, holder: Mapping[str, Any], path: str) -> set[str]:
        return {one["id"] for one in (await self.get(holder, path))["items"]}


@pytest.fixture(params=["sqlite", "postgres"])
async def rights(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rights]:
    async with admin_house(tmp_path, engine=request.param) as house:
        for number, source in enumerate(house.admin._sources.values(), 1):
            source.id = number  # as `enrolled` gave them
        yield Rights(house, [])


def dlv(delivery: bytes) -> str:
    return str(DeliveryId(delivery))


def evt(delivery: bytes) -> str:
    return str(DeliveryId(delivery).event_id)


async def dead_pair(rights: Rights) -> tuple[bytes, bytes]:
    """A dead letter of `payments` and one of `orders`, both for crm."""
    [mine] = await dead_letters(rights.house.store, "s", source="payments")
    [other] = await dead_letters(rights.house.store, "s", source="orders")
    return mine, other


# -- sources -----------------------------------------------------------------------------------


async def test_a_limited_token_sees_only_its_sources(rights: Rights) -> None:
    mine, other = await dead_pair(rights)
    store = rights.house.store
    now = clock.now_utc()
    await store.record_rejections([Rejection(name, now, "c", "r", "p", 1) for name in ("payments", "orders", "x")], {})
    assert await rights.ids(MINE, "/events") == {evt(mine)}
    assert await rights.ids(MINE, "/events?query=source:orders") == set()
    assert await rights.ids(MINE, "/events?source=payments") == {evt(mine)}
    assert await rights.ids(MINE, "/deliveries") == {dlv(mine)}
    assert await rights.ids(MINE, f"/deliveries?query=id:{dlv(other)}") == set()
    assert await rights.ids(MINE, f"/deliveries?event={evt(other)}") == set()
    assert await rights.ids(BOTH, "/events") == {evt(mine), evt(other)} == await rights.ids(ADMIN, "/events")
    assert await rights.ids(BOTH, "/deliveries?status=dead") == {dlv(mine), dlv(other)}
    assert [(one["name"], one["destinations"]) for one in (await rights.get(MINE, "/sources"))["items"]] == [
        ("payments", ["crm"])
    ]
    [crm] = (await rights.get(MINE, "/destinations"))["items"]
    assert (crm["name"], crm["sources"], crm["dead"], crm["figures"]) == ("crm", ["payments"], 1, {})
    assert [one["count"] for one in (await rights.get(MINE, "/dead"))["items"]] == [1]
    assert [one["count"] for one in (await rights.get(BOTH, "/dead"))["items"]] == [2]
    assert [one["source"] for one in (await rights.get(MINE, "/rejections"))["items"]] == ["payments"]


async def test_no_alternative_leads_out_of_its_sources(rights: Rights) -> None:
    """Neither OR nor a negated word finds what is another's: in lists, plans and acts."""
    mine, other = await dead_pair(rights)
    for holder in (MINE, BOTH):
        wanted = {dlv(mine)} if holder is MINE else {dlv(mine), dlv(other)}
        for text in ("source:orders OR source:payments", "-source:nobody", "status:dead OR -status:dead"):
            assert await rights.ids(holder, f"/deliveries?query={quote(text)}") == wanted
    plan = (await rights.ask(MINE, "POST", "/replays/plan", {"query": "source:orders OR status:dead"})).json
    assert plan["total"] == 1
    wide = {"name": "pia", "role": "admin", "sources": ("payments", "others")}
    assert await rights.ids(wide, f"/deliveries?query={quote('source:orders OR subject:s')}") == {dlv(mine)}


async def test_rejected_payloads_are_for_who_may_see_them(rights: Rights) -> None:
    one = Rejection("orders", clock.now_utc(), "signature_invalid", "malformed", "p", 1)
    one.head, one.body = b"POST /in/orders\r\nx-signature: canary", b"canary"
    await rights.house.store.record_rejections([one], {})
    [seen] = (await rights.get(ADMIN, "/rejections"))["items"]
    assert (seen["body"], seen["headers"]) == ("canary", [["x-signature", "canary"]])
    assert seen["diagnosis"]
    [hidden] = (await rights.get(BLIND, "/rejections"))["items"]
    assert {hidden[name] for name in ("body", "headers", "target", "method", "diagnosis")} == {None}
    log = await rights.house.store.audit_log()
    assert [(entry.actor, entry.target) for entry in log if entry.act == "view"] == [("ana", "rejections")]


async def test_what_it_may_not_see_is_not_there(rights: Rights) -> None:
    """404 and not 403, alike in every word with what never was."""
    _, other = await dead_pair(rights)
    made = (await rights.ask(ADMIN, "POST", "/replays", {"query": "source:orders status:dead"})).json["replay_id"]
    there = {"{id}": evt(other), "{arrival}": str(ArrivalId(other.event_id)), "{name}": "orders"}
    gone = {"{id}": evt(bytes(16)), "{arrival}": str(ArrivalId(bytes(16))), "{name}": "nobody"}
    asked = 0
    for endpoint in ENDPOINTS:
        if "{" not in endpoint.path:
            continue
        body = {"keys": [["k"]]} if endpoint.path.endswith("/keys") else {} if endpoint.method == "POST" else None
        answers = []
        for names in (there, gone):
            path = endpoint.path
            if path.startswith("/deliveries"):
                names = names | {"{id}": dlv(other) if names is there else dlv(bytes(16))}
            elif path.startswith("/replays"):
                names = names | {"{id}": made if names is there else str(ReplayId(bytes(16)))}
            elif path.startswith("/destinations"):
                names = names | {"{name}": "mail" if names is there else "nobody"}
            for place, value in names.items():
                path = path.replace(place, value)
            answer = await rights.ask(MINE, endpoint.method, path, body)
            said = answer.body.decode()
            for value in names.values():
                said = said.replace(value, "·")
            answers.append((answer.status, said))
        assert answers[0] == answers[1], endpoint
        assert answers[0][0] in (403, 404), endpoint  # definitions are for who sees all sources
        asked += 1
    assert asked >= 18
    assert (await rights.house.store.get_delivery(other)).status == "dead"  # type: ignore[union-attr]


async def test_its_acts_reach_only_its_sources(rights: Rights) -> None:
    mine, other = await dead_pair(rights)
    asked = {"query": "status:dead", "reason": "mine"}
    plan = (await rights.ask(MINE, "POST", "/replays/plan", {"query": "status:dead"})).json
    assert (plan["total"], [one["id"] for one in plan["sample"]]) == (1, [dlv(mine)])
    foreign = (await rights.ask(ADMIN, "POST", "/replays/plan", {"query": "status:dead"})).json["plan"]
    # Somebody else's plan is worth no more in these hands than a plan of one's own.
    assert (await rights.ask(MINE, "POST", "/replays", {"plan": foreign})).json["code"] == "plan_changed"
    by_id = await rights.ask(MINE, "POST", "/replays", {"ids": [dlv(other)]})
    assert (by_id.status, by_id.json["code"]) == (409, "not_replayable")
    assert (await rights.ask(MINE, "POST", "/dead/discard", asked)).json == {"discarded": 1}
    assert (await rights.ask(MINE, "POST", "/dead/discard", {"plan": foreign, "reason": "x"})).json["discarded"] == 0
    assert await rights.ids(ADMIN, "/deliveries?status=dead") == {dlv(other)}
    forgets = {"subject": "s", "reason": "letter 7"}
    assert (await rights.ask(MINE, "POST", "/erase", forgets)).status == 400
    assert (await rights.ask(MINE, "POST", "/erase", forgets | {"source": "orders"})).status == 404
    assert (await rights.ask(MINE, "POST", "/erase", forgets | {"source": "payments"})).json["events"] == 1
    assert (await rights.house.store.get_event(other.event_id)).subject == "s"  # type: ignore[union-attr]


async def test_what_others_use_too_it_may_not_hold_back(rights: Rights) -> None:
    for act in ("pause", "resume", "test"):
        answer = await rights.ask(MINE, "POST", f"/destinations/crm/{act}", {} if act == "pause" else None)
        assert (answer.status, answer.json["code"]) == (403, "forbidden"), act
    assert (await rights.ask(BOTH, "POST", "/destinations/crm/pause", {})).status == 200
    assert (await rights.ask(BOTH, "POST", "/destinations/crm/resume")).status == 200


async def test_replays_are_seen_by_whose_sources_they_stay_within(rights: Rights) -> None:
    await dead_pair(rights)
    store = rights.house.store
    mine = (await rights.ask(MINE, "POST", "/replays", {"query": "status:dead"})).json["replay_id"]
    [more] = await dead_letters(store, None, source="payments")
    said = (await rights.ask(ADMIN, "POST", "/replays", {"query": "source:payments status:dead"})).json["replay_id"]
    [_] = await dead_letters(store, None, source="orders")
    wide = (await rights.ask(ADMIN, "POST", "/replays", {"query": "status:dead", "force": True})).json["replay_id"]
    assert await rights.ids(MINE, "/replays") == {mine, said}
    assert await rights.ids(ADMIN, "/replays") == {mine, said, wide}
    assert (await rights.ask(MINE, "POST", f"/replays/{said}/abort")).status == 200
    assert (await rights.ask(MINE, "POST", f"/replays/{wide}/abort")).status == 404
    assert (await rights.get(MINE, f"/deliveries/{dlv(more)}"))["id"] == dlv(more)


async def test_it_counts_only_its_sources(rights: Rights) -> None:
    store = rights.house.store
    await dead_pair(rights)
    await deliver(store, None, None, source="payments")
    await deliver(store, None, None, None, source="orders", to=MAIL)
    await finish(store, to=2)
    await take(store, limit=1)
    seen = await rights.get(MINE, "/stats?by=source")
    assert (seen["total"], seen["dead"], set(seen["by"]), seen["per_day"]) == (3, 1, {"payments"}, {})
    assert seen["by_status"] == {"pending": 1, "leased": 1, "done": 0, "dead": 1, "discarded": 0}
    by_destination = (await rights.get(MINE, "/stats?by=destination"))["by"]
    assert {name: counts["dead"] for name, counts in by_destination.items()} == {"crm": 1}
    whole, all_ = await rights.get(BOTH, "/stats"), await rights.get(ADMIN, "/stats")
    for name in ("total", "dead", "by_status", "duplicates", "volume_today"):
        assert whole[name] == all_[name], name
    flows = (await rights.get(MINE, "/series?since=1h"))["series"]
    assert sum(point["count"] for point in flows["accepted"]) == 3
    assert (await rights.get(MINE, "/series?since=1h&source=orders"))["series"] == {}
    assert (await rights.get(MINE, "/series?since=1h&destination=crm"))["series"] == {}
    both = (await rights.get(BOTH, "/series?since=1h"))["series"]
    assert sum(point["count"] for point in both["accepted"]) == 7


async def test_the_stream_tells_it_only_of_its_sources(rights: Rights) -> None:
    stream, heard = rights.house.stream, []
    app = rights.app(MINE)
    headers = {"Host": "inbox.example", "Authorization": "Bearer secret-token"}
    begun = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        heard.append(message.get("body", b""))
        begun.set()

    watching = asyncio.create_task(app(scope_of("GET", "/api/v1/stream", headers, "203.0.113.7"), receive, send))
    while not stream.is_there:
        await asyncio.sleep(0.01)
    for source in ("orders", "payments"):
        stream.publish("arrival", {"source": source, "event_id": f"evt_{source}"})
    stream.publish("watermark", {"watermark": "dead"})
    while b"evt_payments" not in b"".join(heard):
        await asyncio.wait_for(begun.wait(), 10)
        await asyncio.sleep(0.01)
    stream.close()
    await watching
    told = b"".join(heard)
    assert b"orders" not in told
    assert b"watermark" not in told


async def test_of_the_audit_log_it_sees_its_own_acts(rights: Rights) -> None:
    await dead_pair(rights)
    await rights.ask(ADMIN, "POST", "/dead/discard", {"query": "source:orders", "reason": "hers"})
    await rights.ask(MINE, "POST", "/dead/discard", {"query": "status:dead", "reason": "mine"})
    assert {line["actor"] for line in (await rights.get(MINE, "/audit"))["items"]} == {"lena"}
    assert {line["actor"] for line in (await rights.get(ADMIN, "/audit"))["items"]} == {"lena", "ana"}


# -- payloads ----------------------------------------------------------------------------------

SECRET = "canary-in-the-payload"


async def payload(rights: Rights) -> bytes:
    """A done delivery whose body, head, copy and answer all say the canary."""
    store = rights.house.store
    body = json.dumps({"id": 1, "text": SECRET}).encode()
    head = f"POST /in/orders?note={SECRET}\r\nx-note: {SECRET}".encode()
    made = item("k", subject="s", body=body, to=[("crm", 1)])
    await keep(store, made, item("k", subject="s", body=body + b" "), head=head)
    lease = await take_one(store)
    await settle(store, Settlement(lease, Settle.done, evidence=Evidence(200, answer=SECRET.encode())))
    return made.deliveries[0].id


async def test_without_the_right_nothing_of_a_payload_is_shown(rights: Rights) -> None:
    delivery = await payload(rights)
    event = evt(delivery)
    [_, copy] = (await rights.get(ADMIN, f"/events/{event}/arrivals"))["items"]
    assert copy["body_differs"]
    plan = {"ids": [dlv(delivery)], "force": True}
    for holder, sees in ((ADMIN, True), (BLIND, False)):
        told = [
            await rights.ask(holder, "GET", path)
            for path in (
                f"/events/{event}",
                f"/events/{event}/arrivals",
                f"/deliveries/{dlv(delivery)}/attempts",
            )
        ]
        told.append(await rights.ask(holder, "POST", "/replays/plan", plan))
        assert [answer.status for answer in told] == [200] * 4
        assert [SECRET.encode() in answer.body for answer in told] == [sees] * 4
        listed = [await rights.ask(holder, "GET", path) for path in ("/events", "/deliveries", "/stats", "/sources")]
        assert not any(SECRET.encode() in answer.body for answer in listed)
    hidden = await rights.get(BLIND, f"/events/{event}")
    assert (hidden["size"], hidden["headers"], hidden["target"]) == (
        len(json.dumps({"id": 1, "text": SECRET})),
        [["x-note", "[hidden]"]],
        "/in/orders?[hidden]",
    )
    for path in (f"/events/{event}/body", f"/events/{event}/arrivals/{copy['id']}/body"):
        assert (await rights.ask(ADMIN, "GET", path)).status == 200
        refused = await rights.ask(BLIND, "GET", path)
        assert (refused.status, refused.json["code"]) == (403, "payloads_hidden")
        assert SECRET.encode() not in refused.body


async def test_nor_can_it_be_guessed_by_searching(rights: Rights) -> None:
    await payload(rights)
    for path in ("/events", "/deliveries"):
        assert len((await rights.get(ADMIN, f"{path}?query=body.text:{SECRET}"))["items"]) == 1
        refused = await rights.ask(BLIND, "GET", f"{path}?query=body.text:{SECRET}")
        assert (refused.status, refused.json["code"]) == (403, "payloads_hidden")
    for path in ("/replays/plan", "/replays", "/dead/discard"):
        refused = await rights.ask(
            BLIND, "POST", path, {"query": "body.id:1", "reason": "x"} if "dead" in path else {"query": "body.id:1"}
        )
        assert (refused.status, refused.json["code"]) == (403, "payloads_hidden"), path


# -- time and use ------------------------------------------------------------------------------


async def test_a_token_ends_when_it_says(rights: Rights, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = datetime.fromisoformat("2031-02-03T04:05:00Z")
    holder = ADMIN | {"expires": ends}
    now = ends - timedelta(seconds=1)
    monkeypatch.setattr(clock, "now_utc", lambda: now)
    assert (await rights.ask(holder, "GET", "/events")).status == 200
    now = ends
    for path in ("/events", "/nothing"):
        refused = await rights.ask(holder, "GET", path)
        assert (refused.status, refused.json["code"]) == (401, "token_expired")
        assert "2031-02-03 04:05" in refused.json["error"]


def test_a_session_ends_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = datetime.fromisoformat("2031-02-03T04:05:00Z")
    holder = MINE | {"expires": ends, "payloads": False}
    access = Access(None, [TokenConfig(token=Secret.from_env("T", env={"T": "secret-token"}), **holder)])
    proof = prove("session", sha256(b"secret-token").digest())
    now = ends - timedelta(seconds=1)
    monkeypatch.setattr(clock, "now_utc", lambda: now)
    found = access.find_session_holder("session", proof)
    assert found is not None
    assert (found.sources, found.payloads) == ({"payments"}, False)
    now = ends
    assert access.find_session_holder("session", proof) is None


async def test_its_last_use_is_written_once_a_minute(rights: Rights, monkeypatch: pytest.MonkeyPatch) -> None:
    app, steady = rights.app(ADMIN), 1000.0
    monkeypatch.setattr(clock, "steady", lambda: steady)
    headers = {"Host": "inbox.example", "Authorization": "Bearer secret-token"}

    async def ask(path: str = "/api/v1/tokens", **more: str) -> Answer:
        return await call(app, "GET", path, b"", headers | more, "203.0.113.7")

    [token] = (await ask()).json["items"]
    assert token["last_used"] is not None
    for _ in range(20):
        await ask("/api/v1/events")
    assert (await ask(Authorization="Bearer wrong")).status == 401
    assert rights.used == ["ana"]
    steady += 60
    await ask()
    assert rights.used == ["ana", "ana"]


async def test_a_store_that_is_away_keeps_no_token_out(rights: Rights) -> None:
    async def away(name: str) -> None:
        raise StoreUnavailable

    token = TokenConfig(token=Secret.from_env("T", env={"T": "secret-token"}), **ADMIN)
    access = Access(None, [token], note_use=away)
    app = Starlette(routes=api.routes(rights.house.admin, access, rights.house.stream))
    headers = {"Host": "inbox.example", "Authorization": "Bearer secret-token"}
    assert (await call(app, "GET", "/api/v1/events", b"", headers, "203.0.113.7")).status == 200


async def test_tokens_are_listed_with_what_they_may_do(rights: Rights) -> None:
    holder = BLIND | {"expires": datetime.fromisoformat("2099-01-01T00:00:00Z")}
    [token] = (await rights.get(holder, "/tokens"))["items"]
    assert token.pop("last_used")
    assert token == {
        "name": "hugo", "role": "admin", "sources": None, "accounts": None, "payloads": False,
        "expires": "2099-01-01T00:00:00Z", "expired": False,
    }  # fmt: skip
    assert (await rights.ask(MINE, "GET", "/tokens")).status == 403
    assert (await rights.ask(ADMIN | {"role": "operator"}, "GET", "/tokens")).status == 403


# -- a host application's word -----------------------------------------------------------------


async def test_a_host_application_can_say_the_same_of_a_person(tmp_path: Path) -> None:
    person = Person("nina", "viewer", sources=["payments"], payloads=False)
    async with admin_house(tmp_path, authorize=lambda request: person) as house:
        [mine] = await deliver(house.store, None, source="payments")
        [other] = await deliver(house.store, None, source="orders")
        listed = await house.get("/events", role=None)
        assert [one["id"] for one in listed["items"]] == [evt(mine)]
        assert await house.refused("GET", f"/events/{evt(other)}", role=None) == (404, "not_found")
        assert await house.refused("GET", f"/events/{evt(mine)}/body", role=None) == (403, "payloads_hidden")


# -- what the audit log says of it -------------------------------------------------------------


async def acts(rights: Rights) -> list[tuple[str, str, str, dict[str, object]]]:
    found = await rights.house.store.audit_log(limit=1000)
    return [(line.actor, line.act, line.target, dict(line.detail)) for line in reversed(found)]


async def test_who_opened_an_event_is_written_down_once(rights: Rights) -> None:
    delivery = await payload(rights)
    for path in ("", "/body", "/arrivals", "/body"):
        await rights.get(ADMIN, f"/events/{evt(delivery)}") if not path else await rights.ask(
            ADMIN, "GET", f"/events/{evt(delivery)}{path}"
        )
    await rights.ask(BLIND, "GET", f"/events/{evt(delivery)}")
    await rights.ask(ADMIN, "GET", "/events")
    assert await acts(rights) == [("ana", "view", evt(delivery), {})]
    await rights.ask(BOTH, "GET", f"/events/{evt(delivery)}/body")
    assert [line[:2] for line in await acts(rights)] == [("ana", "view"), ("otto", "view")]


async def test_refused_acts_are_written_down(rights: Rights) -> None:
    mine, other = await dead_pair(rights)
    viewer = ADMIN | {"role": "viewer"}
    await rights.ask(viewer, "POST", f"/deliveries/{dlv(mine)}/replay", {})
    await rights.ask(MINE, "POST", f"/deliveries/{dlv(other)}/discard", {"reason": "x"})
    await rights.ask(BLIND, "GET", f"/events/{evt(mine)}/body")
    await rights.ask(ADMIN, "POST", f"/deliveries/{dlv(mine)}/retry")
    # Neither a typing error nor a look at what is not there is an act.
    await rights.ask(ADMIN, "POST", "/replays/plan", {"qurey": "x"})
    await rights.ask(ADMIN, "GET", f"/events/{evt(bytes(16))}")
    assert await acts(rights) == [
        ("ana", "refused", f"POST /api/v1/deliveries/{dlv(mine)}/replay", {"code": "forbidden"}),
        ("lena", "refused", f"POST /api/v1/deliveries/{dlv(other)}/discard", {"code": "not_found"}),
        ("hugo", "refused", f"GET /api/v1/events/{evt(mine)}/body", {"code": "payloads_hidden"}),
        ("ana", "refused", f"POST /api/v1/deliveries/{dlv(mine)}/retry", {"code": "not_waiting"}),
    ]


async def test_a_flood_of_refusals_leaves_few_lines(rights: Rights, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = 6000.0
    monkeypatch.setattr(clock, "steady", lambda: steady)
    viewer = ADMIN | {"role": "viewer"}
    for n in range(20 * 9):
        await rights.ask(viewer, "POST", f"/destinations/{n}/resume")
    told = [detail.get("so_far_this_minute") for _, _, _, detail in await acts(rights)]
    assert told == [None] * admin.NOTED_EACH + [40, 80, 160]
    steady += 60
    await rights.ask(viewer, "POST", "/destinations/crm/resume")
    assert len(await acts(rights)) == len(told) + 1


async def test_looking_again_is_a_new_line_after_an_hour(rights: Rights, monkeypatch: pytest.MonkeyPatch) -> None:
    delivery, steady = await payload(rights), 6000.0
    monkeypatch.setattr(clock, "steady", lambda: steady)
    for _ in range(3):
        await rights.ask(ADMIN, "GET", f"/events/{evt(delivery)}/body")
        steady += 1801
    assert [line[1] for line in await acts(rights)] == ["view", "view"]


async def test_a_filter_of_sources_is_no_word_of_a_query(rights: Rights) -> None:
    """What is asked for and what may be seen are kept apart: a plan or a command never shows the limit."""
    await dead_pair(rights)
    made = (await rights.ask(BOTH, "POST", "/replays", {"query": "status:dead"})).json["replay_id"]
    shown = await rights.get(BOTH, f"/replays/{made}")
    assert shown["query"].startswith("status:dead")
    assert "sources" not in shown["query"] + shown["command"]
    page = await rights.house.store.find_events(Filter(sources=["payments", "nobody"]))
    assert [event.source for event in page.items] == ["payments"]
    assert (await rights.house.store.find_events(Filter(sources=["nobody"]))).items == []
