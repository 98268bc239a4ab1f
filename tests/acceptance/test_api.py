"""The JSON API: what it answers, what it refuses and why, and to whom (DESIGN.md 5, S29-S36, R46-R49)."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from oncehook import clock
from oncehook.cli.operate import plan_lines
from oncehook.model import (
    Arrival,
    Category,
    DeliveryId,
    EraseOrder,
    EventId,
    Evidence,
    Exchange,
    Filter,
    Id,
    PlanSnapshot,
    Rejection,
    ReplayId,
    Settle,
    Settlement,
    StoredWorker,
    new_id,
)
from oncehook.rejections import keep_bytes
from oncehook.replay import decode_token, encode_token
from oncehook.upkeep import Limits
from oncehook.web import auth as access_module
from oncehook.web.api.endpoints import ENDPOINTS
from oncehook.web.api.openapi import PREFIX
from tests.acceptance.admin_house import CANARY, LOCAL, PATH, TOKENS, House, admin_house, call, scope_of
from tests.store.making import (
    CRM,
    MAIL,
    dead,
    dead_letters,
    deliver,
    deliver_one,
    finish,
    intake,
    item,
    keep,
    mixture,
    record,
    retry,
    settle,
    statuses,
    take_one,
)

ROOT = Path(__file__).parents[2]
CONTRACT = (
    "id event_id source destination type subject status category note attempts run due_at last_error last_replay_at"
)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with admin_house(tmp_path) as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
async def either(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    """The same with each engine, for what engines could see differently."""
    async with admin_house(tmp_path, engine=request.param) as made:
        yield made


def dlv(value: bytes) -> str:
    return str(DeliveryId(value))


def evt(value: bytes) -> str:
    return str(DeliveryId(value).event_id)


# -- events and deliveries ---------------------------------------------------------------------


async def test_a_delivery_is_shown_flat_with_the_fields_of_the_contract(either: House) -> None:
    made = await deliver_one(either.store, "cus_42", key="k1")
    lease = await take_one(either.store)
    await settle(either.store, retry(lease, 60.0, error="HTTP 502", status=502))
    shown = await either.get(f"/deliveries/{dlv(made)}", role="viewer")
    assert set(CONTRACT.split()) <= set(shown)
    assert {name: shown[name] for name in ("id", "event_id", "source", "destination", "type", "subject")} == {
        "id": dlv(made), "event_id": evt(made), "source": "orders", "destination": "crm", "type": "order.created",
        "subject": "cus_42",
    }  # fmt: skip
    assert (shown["status"], shown["category"], shown["note"]) == ("pending", "transient", None)
    assert (shown["attempts"], shown["run"], shown["last_error"], shown["last_replay_at"]) == (1, 1, "HTTP 502", None)
    due = datetime.fromisoformat(shown["due_at"]) - datetime.now(UTC)
    assert timedelta(seconds=50) < due < timedelta(seconds=61)
    listed = await either.get("/deliveries", role="viewer")
    assert listed["items"] == [shown]
    assert listed["next"] is None


async def test_attempts_keep_their_evidence(either: House) -> None:
    made = await deliver_one(either.store)
    first = await take_one(either.store)
    await settle(either.store, retry(first, error="HTTP 502", status=502))
    second = await take_one(either.store)
    evidence = Evidence(400, "HTTP 400", b"no such order \xff<script>")
    await settle(either.store, Settlement(second, Settle.dead, category=Category.permanent, evidence=evidence))
    items = (await either.get(f"/deliveries/{dlv(made)}/attempts"))["items"]
    assert [(a["run"], a["attempt"], a["outcome"], a["category"], a["status"], a["error"]) for a in items] == [
        (1, 1, "retry", "transient", 502, "HTTP 502"),
        (1, 2, "dead", "permanent", 400, "HTTP 400"),
    ]
    assert all(a["id"].startswith("att_") and a["delivery_id"] == dlv(made) and a["duration"] >= 0 for a in items)
    assert items[1]["answer"] == "no such order \ufffd<script>"
    assert [a["request"] for a in items] == [None, None]
    assert items[1]["response"] == {"status": 400, "headers": [], "body": "no such order \ufffd<script>"}


async def test_attempts_show_request_response_and_times(either: House) -> None:
    made = await deliver_one(either.store)
    sent = {"webhook-id": "evt_1", "webhook-timestamp": "17", "webhook-signature": "v1,abc…", "x-api-key": "canary"}
    times = (0.001, 0.002, None, 0.05, 0.06)
    exchange = Exchange("POST", "https://crm.example/hook", sent, times, b"Server: x\r\nX-Token: canary").encode()
    lease = await take_one(either.store)
    await settle(either.store, Settlement(lease, Settle.done, evidence=Evidence(200, None, b"thanks", exchange)))
    [shown] = (await either.get(f"/deliveries/{dlv(made)}/attempts", role="viewer"))["items"]
    assert shown["request"] == {
        "method": "POST",
        "url": "https://crm.example/hook",
        "headers": [[name, "[masked]" if name == "x-api-key" else value] for name, value in sent.items()],
        "signed": "evt_1.17.{body}",
    }
    headers = [["Server", "x"], ["X-Token", "[masked]"]]
    assert shown["response"] == {"status": 200, "headers": headers, "body": "thanks"}
    assert shown["times"] == dict(zip(("dns", "connect", "tls", "first_byte", "total"), times, strict=True))
    assert shown["result"] is None


async def test_a_handlers_attempt_has_a_result(either: House) -> None:
    made = await deliver_one(either.store)
    lease = await take_one(either.store)
    await settle(either.store, Settlement(lease, Settle.done, evidence=Evidence(answer=b'{"shipped":1}')))
    [shown] = (await either.get(f"/deliveries/{dlv(made)}/attempts"))["items"]
    assert (shown["result"], shown["request"], shown["response"]) == ({"shipped": 1}, None, None)


async def test_queries_negate_and_choose(either: House) -> None:
    first = await deliver_one(either.store, "a", type_="x")
    second = await deliver_one(either.store, "b", type_="y")
    await keep(either.store, item("k"))
    await keep(either.store, item("k", body=b"{}"))

    async def ids(text: str, more: str = "") -> list[str]:
        return [one["id"] for one in (await either.get(f"/deliveries?query={quote(text)}{more}"))["items"]]

    assert await ids("-type:x") == [dlv(second)]
    assert await ids("type:x OR type:y") == [dlv(second), dlv(first)]
    assert await ids("type:x OR type:y", "&subject=a") == [dlv(first)]  # a parameter is about the whole query
    [again] = (await either.get("/events?query=arrivals:%3E1"))["items"]
    assert (again["copies"], again["has_conflict"], again["key"]) == (2, True, "k")
    assert (await either.get("/events?query=outcome:conflict"))["items"] == [again]
    for text in ("a%20OR", "-satus:done", "outcome:rejected", "(a"):
        assert await either.refused("GET", f"/events?query={text}") == (400, "query_invalid")


async def test_a_discard_honours_every_alternative(either: House) -> None:
    one, other = await dead_letters(either.store, "a", "b")
    plan = await either.post("/replays/plan", {"query": "status:dead subject:a OR subject:b"})
    refused = await either.refused("POST", "/dead/discard", {"plan": plan["plan"], "reason": "why"})
    assert refused == (400, "bad_request")
    plan = await either.post("/replays/plan", {"query": "(subject:a OR subject:nobody) status:dead"})
    assert plan["total"] == 1
    assert (await either.post("/dead/discard", {"plan": plan["plan"], "reason": "why"}))["discarded"] == 1
    assert await statuses(either.store, [one, other]) == ["discarded", "dead"]
    made = await either.post("/replays", {"query": "-subject:a status:dead"})
    assert (await either.get(f"/replays/{made['replay_id']}"))["planned"] == 1


async def test_rejections_say_why_and_go_by_cursor(either: House) -> None:
    body = b'{"id": 1}'
    source = either.admin._sources["orders"]
    came = Arrival(
        "orders", [(b"x-signature", b"sha1=00"), (b"authorization", b"Basic canary")], body, path="/in/orders"
    )
    made = [Rejection("orders", clock.now_utc(), "signature_invalid", "malformed", "192.0.2.1", 9) for _ in range(3)]
    made[2].head, made[2].body = keep_bytes(source, came)
    made.append(Rejection("ordres", clock.now_utc(), "signature_invalid", "unknown source", "192.0.2.1", 9))
    await either.store.record_rejections(made, {})
    page = await either.get("/rejections?limit=2", role="viewer")
    unknown, known = page["items"]
    assert "Did you mean …/orders?" in unknown["diagnosis"]
    assert (unknown["headers"], unknown["body"]) == (None, None)
    assert "'sha256=' is expected" in known["diagnosis"]
    assert (known["source"], known["code"], known["reason"], known["peer"], known["size"]) == (
        *("orders", "signature_invalid", "malformed", "192.0.2.1"),
        9,
    )
    assert (known["headers"], known["body"]) == (
        [["x-signature", "sha1=00"], ["authorization", "[masked]"]],
        '{"id": 1}',
    )
    rest = await either.get(f"/rejections?limit=2&cursor={page['next']}")
    assert [one["id"] for one in rest["items"]] == [str(one.id) for one in (made[1], made[0])]
    mine = await either.get("/rejections?source=ordres")
    assert [one["source"] for one in mine["items"]] == ["ordres"]
    assert await either.refused("GET", "/rejections?cursor=x") == (400, "bad_request")


async def test_lists_are_walked_by_cursor_without_gap_or_repeat(either: House) -> None:
    made = await deliver(either.store, *[None] * 7)
    for path, prefix in (("/deliveries", dlv), ("/events", evt)):
        seen, after = [], ""
        while True:
            page = await either.get(f"{path}?limit=3{after}")
            assert len(page["items"]) <= 3
            seen += [one["id"] for one in page["items"]]
            if page["next"] is None:
                break
            after = f"&cursor={page['next']}"
            await deliver_one(either.store)  # what comes meanwhile does not shift the page
        assert seen == [prefix(one) for one in reversed(made)] or seen[-7:] == [prefix(one) for one in reversed(made)]
        assert len(seen) == len(set(seen))
        made += [one for one in await _all(either) if one not in made]


async def _all(house: House) -> list[bytes]:
    page = await house.store.find_deliveries(Filter(), limit=200)
    return [one.id for one in reversed(page.items)]


@pytest.mark.parametrize("cursor", ["x", "%00", "AAAA", "ZGVsaXZlcnk6", "é", "Zm9vOmJhcg"])
async def test_a_wrong_cursor_is_refused(house: House, cursor: str) -> None:
    assert await house.refused("GET", f"/events?cursor={cursor}") == (400, "bad_request")


@pytest.mark.parametrize("path", ["events", "deliveries", "replays", "audit"])
async def test_a_cursor_that_was_cut_or_grew_is_refused_by_either_engine(either: House, path: str) -> None:
    kind = {"events": "event", "deliveries": "delivery", "replays": "replay"}.get(path, path)
    for place in (b"", b"1", b"\xff" * 8, b"1" * 15, b"1" * 17, b"1" * 64):
        text = base64.urlsafe_b64encode(f"{kind}:".encode() + place).decode().rstrip("=")
        assert await either.refused("GET", f"/{path}?cursor={text}") == (400, "bad_request"), place


async def test_a_cursor_of_another_list_is_refused(house: House) -> None:
    await deliver(house.store, None, None)
    cursor = (await house.get("/events?limit=1"))["next"]
    assert await house.refused("GET", f"/deliveries?limit=1&cursor={cursor}") == (400, "bad_request")


@pytest.mark.parametrize("limit", ["0", "201", "-1", "1e2", "٣", "99999999999999999999", "x"])
async def test_a_limit_is_from_1_to_200(house: House, limit: str) -> None:
    assert await house.refused("GET", f"/deliveries?limit={limit}") == (400, "bad_request")


async def test_queries_find_what_they_say(either: House) -> None:
    found = await mixture(either.store)
    expected = {
        "status:dead": found["dead"] + found["dead of mail"],
        "status:dead to:mail": found["dead of mail"],
        "status:discarded": found["discarded"],
        "status:leased": found["leased"],
        "status:pending": found["pending"],
        "status:done": found["done"],
        "status:dead category:permanent subject:a": [found["dead"][4]],
        "status:dead type:order.*": found["dead"] + found["dead of mail"],
        "type:invoice.*": [],
        f"id:{dlv(found['dead'][0])}": [found["dead"][0]],
        f"{evt(found['dead'][0])}": [found["dead"][0]],
        "attempts:>1": [],
        "source:payments": [],
        "source:nobody": [],
    }
    for query, deliveries in expected.items():
        asked = query.replace(" ", "%20").replace(">", "%3E")
        listed = await either.get(f"/deliveries?query={asked}")
        assert {one["id"] for one in listed["items"]} == {dlv(one) for one in deliveries}, query
    by_words = await either.get("/deliveries?status=dead&destination=mail")
    assert {one["id"] for one in by_words["items"]} == {dlv(one) for one in found["dead of mail"]}
    events = await either.get("/events?query=status:dead%20to:mail")
    assert {one["id"] for one in events["items"]} == {evt(one) for one in found["dead of mail"]}
    [chip] = events["items"][0]["deliveries"]
    assert chip == {
        "id": dlv(found["dead of mail"][-1]), "destination": "mail", "status": "dead", "note": None,
        "replayed": False, "run": 1, "replay_id": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("search", "code", "said"),
    [
        ("query=satus:dead", "query_invalid", "status:"),
        ("query=status:ded", "query_invalid", "status:dead"),
        ("query=since:soon", "query_invalid", "2h"),
        ("status=ded", "query_invalid", "status:dead"),
        ("query=status:dead&status=done", "query_invalid", "twice"),
        ("querry=x", "bad_request", "query"),
        ("query=a&query=b", "bad_request", "twice"),
        ("query=%00", "bad_request", "NUL"),
    ],
)
async def test_what_cannot_be_read_is_said(house: House, search: str, code: str, said: str) -> None:
    answer = await house.ask("GET", f"/deliveries?{search}")
    assert (answer.status, answer.json["code"]) == (400, code)
    assert said in answer.json["error"] + answer.json["hint"]


@pytest.mark.parametrize(
    "query",
    [
        "' OR 1=1 --",
        "type:%25",
        "type:*[a-z]*",
        "subject:_",
        "50%25",
        "subject:%22%5C%22%3B--%22",
        "key:a%27b",
        "!_%25",
    ],
)
async def test_a_strangers_text_is_only_compared(either: House, query: str) -> None:
    await deliver_one(either.store, "cus", type_="order.paid", key="kk")
    for path in ("/events", "/deliveries"):
        assert (await either.get(f"{path}?query={query.replace(' ', '%20')}"))["items"] == []


@pytest.mark.parametrize(
    "path",
    [
        *("/events/{dlv}", "/events/evt_12", "/deliveries/{evt}", "/deliveries/x", "/replays/{dlv}", "/events/{evt}"),
        *("/events/{evt}/body", "/events/{evt}/arrivals", "/deliveries/{dlv}", "/deliveries/{dlv}/attempts"),
        *("/replays/{rpl}", "/deliveries/{dlv}/subject", "/nothing"),
    ],
)
async def test_what_is_not_there_is_not_found(house: House, path: str) -> None:
    ids = {kind.prefix[:3]: str(kind(new_id())) for kind in Id.__subclasses__()}
    assert await house.refused("GET", path.format(**ids)) == (404, "not_found")


async def test_the_body_is_the_bytes_and_no_page(house: House) -> None:
    body = b'<script>alert(1)</script>\xff\x00{"id":1}'
    one = item("k", body=body, to=[CRM])
    await record(house.store, intake(one))
    answer = await house.ask("GET", f"/events/{evt(one.event_id)}/body", role="viewer")
    assert answer.body == body
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment;")
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_arrivals_tell_outcome_time_headers_and_whether_the_body_differs(either: House) -> None:
    head = (
        b"POST /in/orders?token=s3cr3t&x=1\r\ncontent-type: application/json\r\nx-signature: sha256=abc\r\n"
        b"authorization: Bearer s3cr3t\r\nx-api-key: s3cr3t\r\nx-dup: 1\r\nx-dup: 2\r\nx-gitlab-token: s3cr3t"
    )
    first, same, other = item("k"), item("k"), item("k", body=b'{"id": 2}')
    for one in (first, same, other):
        await record(either.store, intake(one, head=head))
    answer = await either.ask("GET", f"/events/{evt(first.event_id)}/arrivals")
    items = answer.json["items"]
    assert [(a["outcome"], a["body_differs"]) for a in items] == [
        ("accepted", False), ("duplicate", False), ("conflict", True),
    ]  # fmt: skip
    assert all(a["id"].startswith("arr_") and a["at"].endswith("Z") for a in items)
    headers = items[0]["headers"]
    assert ["x-signature", "sha256=abc"] in headers
    assert headers[-3:-1] == [["x-dup", "1"], ["x-dup", "2"]]
    assert items[0]["target"] == "/in/orders?token=[masked]&x=1"
    assert b"s3cr3t" not in answer.body
    shown = await either.ask("GET", f"/events/{evt(first.event_id)}")
    assert b"s3cr3t" not in shown.body
    assert (shown.json["copies"], shown.json["key"], shown.json["size"]) == (3, "k", len(first.body))


async def test_the_bytes_of_an_arrival(either: House) -> None:
    first, same, other = item("k"), item("k"), item("k", body=b"<b>\xff\x00")
    stranger = item("x")
    for one in (first, same, other, stranger):
        await record(either.store, intake(one))
    event = f"/events/{evt(first.event_id)}"
    came = [one["id"] for one in (await either.get(f"{event}/arrivals"))["items"]]
    told = [await either.ask("GET", f"{event}/arrivals/{one}/body", role="viewer") for one in came]
    assert [answer.body for answer in told] == [first.body, first.body, other.body]
    assert {answer.headers["content-type"] for answer in told} == {"application/octet-stream"}
    assert told[2].headers["content-disposition"] == f'attachment; filename="{came[2]}.bin"'
    [elsewhere] = [one["id"] for one in (await either.get(f"/events/{evt(stranger.event_id)}/arrivals"))["items"]]
    for wrong in (elsewhere, "arr_nonsense", evt(first.event_id)):
        assert await either.refused("GET", f"{event}/arrivals/{wrong}/body") == (404, "not_found")


async def test_parts_of_a_batch_show_the_head_of_their_request(either: House) -> None:
    head = b"POST /in/orders\r\nx-batch: yes"
    one, again = item("a"), item("a")
    await record(either.store, intake(one, head=head, raw=b"[1]"))
    await record(either.store, intake(again, head=head, raw=b"[1]"))
    items = (await either.get(f"/events/{evt(one.event_id)}/arrivals"))["items"]
    assert [a["headers"] for a in items] == [[["x-batch", "yes"]]] * 2


# -- acts on one delivery ----------------------------------------------------------------------


async def test_a_dead_letter_is_replayed_and_its_key_still_knows_it(house: House) -> None:
    one = item("k1", to=[CRM])
    await record(house.store, intake(one))
    made = one.deliveries[0].id
    await settle(house.store, Settlement(await take_one(house.store), Settle.dead, category=Category.permanent))
    answer = await house.ask("POST", f"/deliveries/{dlv(made)}/replay", {"reason": "fixed"})
    assert answer.status == 202
    assert set(answer.json) == {"replay_id"}
    assert answer.json["replay_id"].startswith("rpl_")
    assert await finish(house.store) == [made]
    shown = await house.get(f"/deliveries/{dlv(made)}")
    assert (shown["status"], shown["run"], shown["attempts"]) == ("done", 2, 1)
    assert shown["replay_id"] == answer.json["replay_id"]
    assert shown["last_replay_at"] is not None
    assert shown["replayed"] is True
    for path in ("/events?query=is:replayed", "/events"):
        [[chip]] = [event["deliveries"] for event in (await house.get(path))["items"]]
        assert (chip["id"], chip["status"], chip["replayed"], chip["run"]) == (dlv(made), "done", True, 2)
        assert chip["replay_id"] == shown["replay_id"]
    assert [one["id"] for one in (await house.get("/deliveries?query=is:replayed"))["items"]] == [dlv(made)]
    [verdict] = await record(house.store, intake(item("k1", to=[CRM])))
    assert verdict.outcome == "duplicate"
    assert len((await house.get("/events"))["items"]) == 1  # a run, never a second event (R46)
    replay = await house.get(f"/replays/{answer.json['replay_id']}")
    assert (replay["actor"], replay["reason"], replay["planned"]) == ("olga", "fixed", 1)


async def test_what_is_not_finished_is_never_replayed(either: House) -> None:
    found = await mixture(either.store)
    for status in ("pending", "leased"):
        for body in ({}, {"force": True}):
            path = f"/deliveries/{dlv(found[status][0])}/replay"
            assert await either.refused("POST", path, body) == (409, "not_replayable")
    done = f"/deliveries/{dlv(found['done'][0])}/replay"
    assert await either.refused("POST", done, {}) == (409, "not_replayable")
    await either.post(done, {"force": True})
    await either.post(f"/deliveries/{dlv(found['discarded'][0])}/replay")
    missing = str(DeliveryId(new_id()))
    assert await either.refused("POST", f"/deliveries/{missing}/replay", {}) == (404, "not_found")


async def test_a_replay_is_offered_only_where_it_can_work(either: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended, not erased, not replayed a moment ago, and for a destination that somebody works for."""
    found = await mixture(either.store)
    ended = [one for status in ("dead", "dead of mail", "discarded", "done") for one in found[status]]
    await either.store.register_names([], ["old"])
    [nowhere] = await dead_letters(either.store, None, to=("old", 3))
    [erased] = await dead_letters(either.store, "gone")
    await either.store.erase(EraseOrder("gone", actor="ann"))
    [replayed] = await dead_letters(either.store, None)
    await either.post(f"/deliveries/{dlv(replayed)}/replay")
    await finish(either.store)

    async def offered() -> set[bytes]:
        return await either.admin.replayable((await either.store.find_deliveries(Filter(), limit=100)).items)

    assert await offered() == set(ended)
    assert erased not in await offered()
    worker = StoredWorker("w", "elsewhere", 1, clock.now_utc(), clock.now_utc(), 0, ["old"])
    await either.store.register_worker(worker)
    assert await offered() == {*ended, nowhere}
    later = clock.now_utc() + timedelta(seconds=61)
    monkeypatch.setattr(clock, "now_utc", lambda: later)
    assert await offered() == {*ended, nowhere, replayed}


async def test_a_second_replay_within_a_minute_is_too_soon(house: House) -> None:
    [made] = await dead_letters(house.store, None)
    await house.post(f"/deliveries/{dlv(made)}/replay", {})
    await settle(house.store, Settlement(await take_one(house.store), Settle.dead, category=Category.permanent))
    answer = await house.ask("POST", f"/deliveries/{dlv(made)}/replay", {})
    assert (answer.status, answer.json["code"]) == (429, "replay_too_soon")
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_one_idempotency_key_makes_one_replay(either: House) -> None:
    made, other = await dead_letters(either.store, None, None)
    key = {"Idempotency-Key": "click-1"}
    path = f"/deliveries/{dlv(made)}/replay"
    first = await either.ask("POST", path, {}, headers=key)
    again = await either.ask("POST", path, {}, headers=key)
    assert (again.status, again.body) == (first.status, first.body) == (202, first.body)
    assert await finish(either.store) == [made]
    # when it is done, and however it stands now, the answer is the same
    later = await either.ask("POST", path, {}, headers=key)
    assert (later.status, later.body) == (202, first.body)
    assert (await either.get(f"/deliveries/{dlv(made)}"))["run"] == 2
    # another person, or another delivery, with the same key is another request
    assert await either.refused("POST", path, {}, headers=key, role="oscar") == (409, "not_replayable")
    elsewhere = await either.post(f"/deliveries/{dlv(other)}/replay", {}, headers=key)
    assert elsewhere["replay_id"] != first.json["replay_id"]


async def test_a_key_that_is_none_is_refused(house: House) -> None:
    [made] = await dead_letters(house.store, None)
    for key in ("", "x" * 256):
        refused = await house.refused("POST", f"/deliveries/{dlv(made)}/replay", {}, headers={"Idempotency-Key": key})
        assert refused == (400, "bad_request")


async def test_retry_makes_a_waiting_delivery_due(house: House) -> None:
    made = await deliver_one(house.store)
    await settle(house.store, retry(await take_one(house.store), 3600.0))
    shown = await house.post(f"/deliveries/{dlv(made)}/retry")
    assert datetime.fromisoformat(shown["due_at"]) <= datetime.now(UTC) + timedelta(seconds=1)
    assert await finish(house.store) == [made]
    assert await house.refused("POST", f"/deliveries/{dlv(made)}/retry") == (409, "not_waiting")
    missing = str(DeliveryId(new_id()))
    assert await house.refused("POST", f"/deliveries/{missing}/retry") == (404, "not_found")


async def test_a_dead_letter_is_discarded_with_its_reason(house: House) -> None:
    [made] = await dead_letters(house.store, None)
    pending = await deliver_one(house.store)
    path = f"/deliveries/{dlv(made)}/discard"
    shown = await house.post(path, {"reason": "a test order"})
    assert (shown["status"], shown["reason"]) == ("discarded", "a test order")
    assert (await house.post(path, {}))["status"] == "discarded"  # a double click
    assert await house.refused("POST", f"/deliveries/{dlv(pending)}/discard", {}) == (409, "not_waiting")
    missing = str(DeliveryId(new_id()))
    assert await house.refused("POST", f"/deliveries/{missing}/discard", {}) == (404, "not_found")


async def test_dead_letters_are_gathered_by_cause_and_discarded_together(either: House) -> None:
    found = await mixture(either.store)
    causes = (await either.get("/dead"))["items"]
    assert [(c["destination"], c["cause"], c["count"]) for c in causes] == [
        ("crm", "no such order", 6), ("mail", "no such order", 2),
    ]  # fmt: skip
    assert [c["destination"] for c in (await either.get("/dead?destination=mail"))["items"]] == ["mail"]
    path = "/dead/discard"
    assert await either.refused("POST", path, {"query": "status:dead"}) == (400, "bad_request")
    assert await either.refused("POST", path, {"query": "status:dead", "reason": " "}) == (400, "bad_request")
    assert await either.refused("POST", path, {"query": "", "reason": "all"}) == (400, "bad_request")
    assert await either.post(path, {"query": "to:mail", "reason": "old"}) == {"discarded": 2}
    assert (await either.get(f"/deliveries/{dlv(found['done'][0])}"))["status"] == "done"
    assert len((await either.get("/deliveries?query=status:dead"))["items"]) == 6


async def test_a_discard_by_plan_closes_what_was_shown(either: House) -> None:
    made = await dead_letters(either.store, None, None)
    plan = await either.post("/replays/plan", {"query": "status:dead"})
    later = await dead_letters(either.store, None)
    path, order = "/dead/discard", {"plan": plan["plan"], "reason": "old"}
    assert await either.refused("POST", path, {"plan": plan["plan"]}) == (400, "bad_request")
    assert await either.refused("POST", path, {**order, "query": "status:dead"}) == (400, "bad_request")
    assert await either.refused("POST", path, {**order, "plan": "no plan"}) == (400, "bad_request")
    others = await either.post("/replays/plan", {"query": "to:crm"})
    assert await either.refused("POST", path, {**order, "plan": others["plan"]}) == (400, "bad_request")
    wish, seen = decode_token(plan["plan"], clock.now_utc())
    fewer = encode_token(wish, PlanSnapshot(1, seen.at))  # one was dead by then that was not seen
    assert await either.refused("POST", path, {**order, "plan": fewer}) == (409, "plan_changed")
    assert await statuses(either.store, [*made, *later]) == ["dead"] * 3
    assert await either.post(path, order) == {"discarded": 2}
    assert await statuses(either.store, [*made, *later]) == ["discarded", "discarded", "dead"]
    assert await either.post(path, order) == {"discarded": 0}


async def test_neighbours_of_a_subject_come_in_order(either: House) -> None:
    made = await deliver(either.store, "a", "b", "a", "a")
    items = (await either.get(f"/deliveries/{dlv(made[2])}/subject"))["items"]
    assert [one["id"] for one in items] == [dlv(made[n]) for n in (0, 2, 3)]
    assert [one["blocked_by"] for one in items] == [None, dlv(made[0]), dlv(made[0])]


# -- replays -----------------------------------------------------------------------------------


async def test_a_plan_says_what_would_happen_and_does_nothing(either: House) -> None:
    await mixture(either.store)
    plan = await either.post("/replays/plan", {"query": "since:2h", "rate": "2/s"})
    assert (plan["total"], plan["by_destination"]) == (9, {"crm": 7, "mail": 2})
    assert plan["by_status"] == {"dead": 8, "discarded": 1}
    assert plan["left_out"] == {"done": 3, "leased": 1, "pending": 2}
    assert plan["expected_seconds"] == 4.5
    assert len(plan["sample"]) == 5
    assert {r["destination"]: (r["kind"], r["address"], r["paused"], r["failing"]) for r in plan["recipients"]} == {
        "crm": ("http", "POST https://crm.example/hooks", False, False),
        "mail": ("handler", "app.mail:send", False, False),
    }
    assert plan["oldest"] <= plan["newest"]
    assert re.fullmatch(r"since:\d{4}-\d\d-\d\dT[\d:.]+Z until:\d{4}-\d\d-\d\dT[\d:]+Z", plan["query"])
    assert plan["command"] == f"oncehook replay --query '{plan['query']}' --rate 2/s"
    assert any("same webhook-id" in note for note in plan["notes"])
    assert (await either.get("/replays"))["items"] == []
    forced = await either.post("/replays/plan", {"query": "since:2h", "force": True, "destination": "crm"})
    assert (forced["total"], forced["by_destination"]) == (10, {"crm": 10})
    assert forced["command"].endswith(" --force")
    assert forced["expected_seconds"] is None


async def test_a_plan_previews_what_came_in_and_who_would_get_it(either: House) -> None:
    """`preview` of the source says where a person's text stands; what hides or turns text is left out."""
    said = {"message": {"text": "Ship it\u202e now\n please \U0001f44d\u0007"}}
    await keep(either.store, item("c", to=[CRM], body=json.dumps(said).encode(), subject="ana"))
    await keep(either.store, item("n", to=[MAIL], body=b'{"message": "not there"}'))
    for to in (1, 2):
        await settle(either.store, dead(await take_one(either.store, to=to)))
    plan = await either.post("/replays/plan", {"query": "status:dead"})
    first, _ = plan["sample"]
    assert plan["previews"] == {
        first["id"]: {
            "to": "POST https://crm.example/hooks",
            "text": "Ship it now please \U0001f44d",
            "at": first["received_at"],
        }
    }
    [told] = [line for line in plan_lines(plan) if first["id"] in line]
    assert "ana" in told
    assert "“Ship it now please \U0001f44d”" in told


async def test_a_plan_for_handlers_speaks_of_what_a_handler_sees(either: House) -> None:
    await mixture(either.store)
    for fresh, said in ((False, "the same idempotency_key"), (True, "a new idempotency_key")):
        plan = await either.post("/replays/plan", {"query": "since:2h", "destination": "mail", "fresh_id": fresh})
        assert [r["kind"] for r in plan["recipients"]] == ["handler"]
        assert any(said in note for note in plan["notes"])
        assert not any("webhook-id" in note for note in plan["notes"])
        assert any("--fresh-id" in note for note in plan["notes"]) is not fresh


async def test_a_plan_says_that_a_recipient_is_paused_or_failing(house: House) -> None:
    await dead_letters(house.store, None)
    await house.post("/destinations/crm/pause", {"reason": "deploy"})
    plan = await house.post("/replays/plan", {"query": "status:dead", "fresh_id": True})
    assert plan["recipients"][0]["paused"] is True
    assert any("paused" in note for note in plan["notes"])
    assert any("a new webhook-id" in note for note in plan["notes"])


async def test_what_was_planned_is_what_is_done(either: House) -> None:
    found = await mixture(either.store)
    plan = await either.post("/replays/plan", {"query": "status:dead"})
    answer = await either.ask("POST", "/replays", {"plan": plan["plan"], "reason": "receiver is back"})
    assert answer.status == 202
    assert either.nudges
    replay = await either.get(f"/replays/{answer.json['replay_id']}")
    assert (replay["state"], replay["planned"], replay["bulk"]) == ("running", plan["total"], True)
    assert (replay["actor"], replay["reason"], replay["query"]) == ("olga", "receiver is back", plan["query"])
    assert await either.store.feed_replays() == 8
    fed = (await either.get(f"/deliveries?query=replay:{replay['id']}"))["items"]
    assert {one["id"] for one in fed} == {dlv(one) for one in found["dead"] + found["dead of mail"]}
    assert (await either.get("/replays"))["items"][0]["fed"] == 8


async def test_a_plan_that_no_longer_holds_is_not_carried_out(either: House) -> None:
    found = await mixture(either.store)
    plan = await either.post("/replays/plan", {"query": "status:dead"})
    await either.post(f"/deliveries/{dlv(found['dead'][0])}/discard", {})
    assert await either.refused("POST", "/replays", {"plan": plan["plan"]}) == (409, "plan_changed")
    assert (await either.get("/replays"))["items"] == []


async def test_what_arrives_after_the_plan_is_not_meant_by_it(house: House) -> None:
    await dead_letters(house.store, None)
    plan = await house.post("/replays/plan", {"query": "status:dead"})
    until = datetime.fromisoformat(plan["query"].rpartition("until:")[2])
    assert until < datetime.now(UTC) + timedelta(seconds=3)


async def test_a_bulk_replay_by_one_key_is_made_once(house: House) -> None:
    await mixture(house.store)
    plan = (await house.post("/replays/plan", {"query": "status:dead"}))["plan"]
    key = {"Idempotency-Key": "one"}
    first = await house.post("/replays", {"plan": plan}, headers=key)
    await house.store.feed_replays()
    assert await house.post("/replays", {"plan": plan}, headers=key) == first
    assert len((await house.get("/replays"))["items"]) == 1


async def test_a_replay_may_name_its_deliveries(house: House) -> None:
    made = await dead_letters(house.store, None, None, None)
    body = {"ids": [dlv(made[0]), evt(made[1]), dlv(made[0])]}
    plan = await house.post("/replays/plan", body)
    assert plan["total"] == 2
    assert plan["command"] == f"oncehook replay {dlv(made[0])} {dlv(made[1])}"
    started = await house.post("/replays", body)
    assert (await house.get(f"/replays/{started['replay_id']}"))["planned"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"query": " "},
        {"ids": []},
        {"ids": ["x"]},
        {"ids": ["rpl_" + "0" * 32]},
        {"ids": [f"dlv_{n:032x}" for n in range(501)]},
        {"query": "status:dead", "until": "tomorrow"},
        {"query": "to:crm", "destination": "mail"},
        {"query": "status:dead", "rate": "fast"},
        {"query": "status:dead", "rate": 0},
        {"query": "status:dead", "rate": -1},
        {"query": "status:dead", "force": "yes"},
        {"query": 5},
    ],
)
async def test_a_wish_that_cannot_be_meant_is_refused(house: House, body: dict[str, Any]) -> None:
    for path in ("/replays/plan", "/replays"):
        status, code = await house.refused("POST", path, body)
        assert (status, code in ("bad_request", "query_invalid")) == (400, True)


async def test_a_wish_for_a_destination_that_is_not_there_names_the_nearest(house: House) -> None:
    answer = await house.ask("POST", "/replays/plan", {"query": "status:dead", "destination": "crn"})
    assert (answer.status, answer.json["code"], answer.json["hint"]) == (404, "not_found", 'Did you mean "crm"?')


@pytest.mark.parametrize("plan", ["", "x", "!!!", "e30", "WzEsIiIsZmFsc2UsZmFsc2UsbnVsbCwxXQ==x", "é"])
async def test_a_plan_that_is_none_is_refused(house: House, plan: str) -> None:
    assert await house.refused("POST", "/replays", {"plan": plan}) == (400, "bad_request")


async def test_a_plan_is_not_widened_on_the_way(house: House) -> None:
    await dead_letters(house.store, None)
    plan = (await house.post("/replays/plan", {"query": "status:dead"}))["plan"]
    for more in ({"query": "status:done"}, {"force": True}, {"ids": ["dlv_" + "0" * 32]}, {"destination": "crm"}):
        assert await house.refused("POST", "/replays", {"plan": plan, **more}) == (400, "bad_request")
    started = await house.post("/replays", {"plan": plan, "rate": 5})
    assert (await house.get(f"/replays/{started['replay_id']}"))["rate"] == 5.0


async def test_a_plan_of_nothing_is_not_carried_out(house: House) -> None:
    plan = await house.post("/replays/plan", {"query": "status:dead"})
    assert plan["total"] == 0
    for asked in ({"plan": plan["plan"]}, {"query": "status:dead"}, {"query": "status:dead body.n:1"}):
        assert await house.refused("POST", "/replays", asked) == (409, "not_replayable")
    assert (await house.get("/replays"))["items"] == []


async def test_a_body_is_searched_by_what_it_says(either: House) -> None:
    [small] = await dead_letters(either.store, None, body=b'{"data": {"amount": 900}}')
    [large] = await dead_letters(either.store, None, body=b'{"data": {"amount": 1200.5}}')
    await dead_letters(either.store, None, body=b"no JSON: amount 2000")
    for query, answer in (("body.data.amount:>1000", [large]), ("status:dead body.data.amount:<=900", [small])):
        found = await either.get(f"/deliveries?query={quote(query)}")
        assert [one["id"] for one in found["items"]] == [str(one) for one in answer]
        assert len((await either.get(f"/events?query={quote(query)}"))["items"]) == 1
    plan = await either.post("/replays/plan", {"query": "body.data.amount:>1000"})
    assert (plan["total"], plan["sample"][0]["id"]) == (1, str(large))
    assert "body.data.amount:>1000" in plan["command"]
    started = await either.post("/replays", {"plan": plan["plan"]})
    assert (await either.get(f"/replays/{started['replay_id']}"))["planned"] == 1
    assert await either.refused("GET", "/events?query=body.a:%3Emany") == (400, "query_invalid")


async def test_a_replay_is_paused_resumed_and_aborted(either: House) -> None:
    await mixture(either.store)
    path = "/replays/" + (await either.post("/replays", {"query": "status:dead"}))["replay_id"]
    assert (await either.post(f"{path}/pause"))["state"] == "paused"
    assert await either.store.feed_replays() == 0
    assert (await either.post(f"{path}/resume"))["state"] == "running"
    assert (await either.post(f"{path}/abort"))["state"] == "aborted"
    assert await either.refused("POST", f"{path}/resume") == (409, "not_waiting")
    missing = str(ReplayId(new_id()))
    assert await either.refused("POST", f"/replays/{missing}/abort") == (404, "not_found")


# -- what is set up, and how it goes -----------------------------------------------------------


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_stats_have_the_fields_of_the_contract_at_the_top(tmp_path: Path, engine: str) -> None:
    async with admin_house(tmp_path, engine=engine, limits=Limits(5, 300.0, {"orders": 50}, 0.1), free=0.05) as house:
        if (of_today := 86_400 - clock.now() % 86_400) < 30:
            await asyncio.sleep(of_today)  # what came today must not have come yesterday when it is counted
        await mixture(house.store)
        await record(house.store, intake(item("k", to=[CRM])))
        await record(house.store, intake(item("k")))
        await record(house.store, intake(item("k", body=b'{"id": 9}')))
        await settle(house.store, retry(await take_one(house.store, limit=1)))
        stats = await house.get("/stats?since=24h", role="viewer")
        contract = "total by_status dead duplicates conflicts rejected retries replays volume_today watermarks"
        assert set(contract.split()) <= set(stats)
        assert stats["total"] == stats["volume_today"] == 16
        assert stats["by_status"] == {"pending": 3, "leased": 1, "done": 3, "dead": 8, "discarded": 1}
        assert (stats["dead"], stats["duplicates"], stats["conflicts"], stats["rejected"]) == (8, 1, 1, 0)
        assert (stats["retries"], stats["replays"]) == (1, 0)
        assert stats["watermarks"] == [
            {"name": "dead", "level": 8, "limit": 5, "crossed": True},
            {"name": "oldest_due", "level": stats["watermarks"][1]["level"], "limit": 300.0, "crossed": False},
            {"name": "daily_volume.orders", "level": 16, "limit": 50, "crossed": False},
            {"name": "disk", "level": 0.05, "limit": 0.1, "crossed": True},
        ]
        assert stats["by"] is None
        by_source = (await house.get("/stats?by=source"))["by"]
        assert (by_source["orders"]["total"], by_source["orders"]["duplicates"]) == (16, 1)
        by_destination = (await house.get("/stats?by=destination"))["by"]
        assert by_destination["mail"]["dead"] == 2
        assert (by_destination["crm"]["leased"], by_destination["crm"]["retries"]) == (1, 1)
        await house.post("/replays", {"query": "status:dead to:mail"})
        await house.store.feed_replays()
        assert (await house.get("/stats"))["replays"] == 2


async def test_every_rejection_counts(either: House) -> None:
    """A bad signature, and a source that does not exist, which stands under no name."""
    await either.store.record_rejections([], {(1, 0, "rejected"): 1, (0, 0, "rejected"): 1})
    stats = await either.get("/stats?by=source")
    assert stats["rejected"] == 2
    assert {name: counts["rejected"] for name, counts in stats["by"].items()} == {"orders": 1}


async def test_stats_since_a_moment_count_from_there(house: House) -> None:
    await deliver(house.store, None, None)
    later = (datetime.now(UTC) + timedelta(minutes=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    stats = await house.get(f"/stats?since={later}")
    assert (stats["total"], sum(stats["by_status"].values())) == (0, 0)
    assert await house.refused("GET", "/stats?since=soon") == (400, "query_invalid")
    assert await house.refused("GET", "/stats?by=colour") == (400, "bad_request")


async def test_sources_are_shown_without_their_secrets(house: House) -> None:
    await deliver_one(house.store)
    answer = await house.ask("GET", "/sources", role="admin")
    assert CANARY.encode() not in answer.body
    orders, payments = answer.json["items"]
    assert (orders["name"], orders["address"], orders["verifier"], orders["secrets"]) == (
        "orders",
        "/in/orders",
        "hmac",
        1,
    )
    assert (orders["unverified"], orders["key"], orders["subject"]) == (False, "$.id", "$.customer")
    assert orders["destinations"] == ["crm", "mail"]
    assert orders["last_arrival"] is not None
    assert orders["figures"]["accepted"] == 1
    assert (payments["verifier"], payments["unverified"], payments["last_arrival"]) == ("none", True, None)
    assert payments["address"] == f"/in/{PATH}"
    seen = await house.ask("GET", "/sources", role="viewer")
    assert PATH.encode() not in seen.body  # who may only look is not given the key of a door (S8)
    assert seen.json["items"][1]["address"] is None


async def test_destinations_are_shown_on_their_terms(either: House) -> None:
    await mixture(either.store)
    crm, mail = (await either.get("/destinations"))["items"]
    assert (crm["kind"], crm["address"]) == ("http", "POST https://crm.example/hooks")
    assert crm["retry"] == "10 s, 1 min, 5 min … 24 h: 10 attempts over 3 days"
    assert (crm["pending"], crm["leased"], crm["done"], crm["dead"], crm["discarded"]) == (2, 1, 3, 6, 1)
    assert (crm["paused"], crm["breaker"], crm["sources"]) == (False, "closed", ["orders", "payments"])
    assert (mail["rate"], mail["dead"]) == (2.0, 2)


async def test_a_destination_is_paused_and_resumed_by_name(house: House) -> None:
    made = await deliver_one(house.store)
    shown = await house.post("/destinations/crm/pause", {"reason": "deploy"})
    assert (shown["paused"], shown["paused_by"], shown["paused_why"]) == (True, "olga", "deploy")
    assert await finish(house.store) == []
    assert (await house.post("/destinations/crm/resume"))["paused"] is False
    assert await finish(house.store) == [made]
    assert await house.refused("POST", "/destinations/nobody/pause", {}) == (404, "not_found")


async def test_everything_that_is_done_is_audited(either: House) -> None:
    made, other = await dead_letters(either.store, None, None)
    await either.post("/destinations/crm/pause", {"reason": "deploy"})
    await either.post("/destinations/crm/resume", role="oscar")
    await either.post(f"/deliveries/{dlv(made)}/replay", {"reason": "again"}, role="admin")
    await either.post(f"/deliveries/{dlv(other)}/discard", {"reason": "old"})
    lines = (await either.get("/audit"))["items"]
    assert [line["actor"] for line in lines] == ["olga", "admin", "oscar", "olga"]
    first = await either.get("/audit?limit=3")
    rest = await either.get(f"/audit?limit=3&cursor={first['next']}")
    assert first["items"] + rest["items"] == lines
    assert rest["next"] is None


async def test_the_system_and_its_series_are_told(either: House) -> None:
    await deliver(either.store, None, None)
    system = await either.get("/system")
    assert (system["store"], system["schema"]) == (either.store.engine.value, system["schema_target"])
    assert system["size"] > 0
    series = (await either.get("/series?since=1h&step=1h&source=orders"))["series"]
    assert sum(point["count"] for point in series["accepted"]) == 2
    for search in ("step=1s", "step=x", "since=x"):
        assert (await either.refused("GET", f"/series?{search}"))[0] == 400
    assert (await either.get("/rejections"))["items"] == []


# -- the request itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'"force"', 400, "object"),
        (b"[" * 500, 400, "nested"),
        (b"\xff", 400, "JSON"),
        (b'{"reason": "' + b"x" * 70_000 + b'"}', 413, "64 KB"),
        (b'{"reasn": "x"}', 400, '"reason"'),
        (b'{"force": 1}', 400, "force"),
        (b'{"force": null}', 400, "force"),
        (b'{"reason": "' + b"x" * 1001 + b'"}', 400, "1000"),
        (b'{"reason": "a\\u0000b"}', 400, "character"),
    ],
)
async def test_a_body_is_read_strictly(house: House, body: bytes, status: int, said: str) -> None:
    [made] = await dead_letters(house.store, None)
    answer = await house.ask("POST", f"/deliveries/{dlv(made)}/replay", body)
    assert answer.status == status
    assert said in answer.json["error"] + answer.json["hint"]
    assert (await house.get(f"/deliveries/{dlv(made)}"))["run"] == 1


async def test_a_wrong_method_is_told_the_right_one(house: House) -> None:
    for method, path, hint in (("GET", "/replays/plan", "POST"), ("DELETE", "/events", "GET")):
        answer = await house.ask(method, path)
        if path == "/replays/plan":  # reads as the id of a replay
            assert answer.status == 404
        else:
            assert (answer.status, answer.json["code"]) == (405, "method_not_allowed")
            assert hint in answer.json["hint"]


async def test_a_store_that_cannot_answer_is_503(house: House, tmp_path: Path) -> None:
    [made] = await dead_letters(house.store, None)
    with closing(sqlite3.connect(tmp_path / "inbox.db", isolation_level=None)) as other:
        other.execute("ALTER TABLE deliveries RENAME TO taken_away")
        for method, path in (("GET", "/events"), ("GET", "/stats"), ("POST", f"/deliveries/{dlv(made)}/replay")):
            answer = await house.ask(method, path)
            assert (answer.status, answer.headers.get("retry-after")) == (503, "1")
            assert set(answer.json) == {"error", "code", "hint"}
            assert b"deliveries" not in answer.body  # what the database says is for the log
        other.execute("ALTER TABLE taken_away RENAME TO deliveries")


async def test_it_works_below_any_prefix(house: House) -> None:
    [made] = await dead_letters(house.store, None)
    key = {"Idempotency-Key": "one"}
    path = f"/deliveries/{dlv(made)}/replay"
    below = await house.post(path, {}, headers=key, prefix="/below/this/api/v1")
    assert await house.post(path, {}, headers=key) == below


# -- who may ask -------------------------------------------------------------------------------


def address(path: str) -> str:
    kind = {"events": EventId, "deliveries": DeliveryId, "replays": ReplayId}.get(path.split("/")[1])
    return path.replace("{id}", str(kind(new_id())) if kind else "42").replace("{name}", "crm")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
async def test_every_address_asks_for_its_role(house: House, endpoint: Any) -> None:
    path = address(endpoint.path)
    strangers: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKENS['admin']}"},
        {"Authorization": TOKENS["admin"]},
        {"Cookie": f"token={TOKENS['admin']}; session={TOKENS['admin']}"},
        {"X-Forwarded-User": "admin"},
        {"Authorization": f"Bearer {LOCAL}"},
    ]
    for headers in strangers:
        answer = await house.ask(endpoint.method, path, role=None, headers=headers)
        assert (answer.status, answer.json["code"]) == (401, "unauthorized"), headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert_safe(answer.headers)
    by_query = await house.ask(endpoint.method, f"{path}?token={TOKENS['admin']}", role=None)
    assert by_query.status == 401
    if endpoint.path == "/stream":
        return
    for role, level in (("viewer", 1), ("operator", 2), ("admin", 3)):
        answer = await house.ask(endpoint.method, path, role=role)
        assert (answer.status == 403) == (level < endpoint.role), role
        assert answer.status != 500
        assert_safe(answer.headers)


def assert_safe(headers: dict[str, str]) -> None:
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["cache-control"] == "no-store"


def test_no_change_is_made_by_get_nor_by_a_viewer() -> None:
    assert {endpoint.method for endpoint in ENDPOINTS} == {"GET", "POST", "PATCH", "PUT", "DELETE"}
    for endpoint in ENDPOINTS:
        assert (endpoint.role >= 2) == (endpoint.method != "GET" or endpoint.path in ("/audit", "/tokens"))
        if endpoint.method in ("PATCH", "PUT", "DELETE"):  # of definitions
            assert endpoint.role == 3


async def test_a_stranger_does_not_learn_what_there_is(house: House) -> None:
    assert await house.refused("GET", "/nothing", role=None) == (401, "unauthorized")
    assert await house.refused("PUT", "/events", role=None) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("peer", "headers", "status"),
    [
        ("127.0.0.1", {"Host": "127.0.0.1:4020"}, 200),
        ("127.0.0.1", {"Host": "localhost:4020"}, 200),
        ("::1", {"Host": "[::1]:4020"}, 200),
        ("203.0.113.7", {"Host": "127.0.0.1:4020"}, 401),
        ("127.0.0.1", {"Host": "evil.example"}, 401),
        ("127.0.0.1", {"Host": "127.0.0.1:4020", "X-Forwarded-For": "1.2.3.4"}, 401),
        ("127.0.0.1", {"Host": "127.0.0.1:4020", "Forwarded": "for=1.2.3.4"}, 401),
        ("127.0.0.1", {"Host": "127.0.0.1:4020", "Origin": "http://evil.example"}, 401),
        ("127.0.0.1", {"Host": "127.0.0.1:4020", "Sec-Fetch-Site": "cross-site"}, 401),
        ("127.0.0.1", {"Host": "localhost.evil.example"}, 401),
        ("127.0.0.1", {"Host": ""}, 401),
    ],
)
async def test_the_local_token_opens_for_this_machine_only(
    house: House, peer: str, headers: dict[str, str], status: int
) -> None:
    named = {**headers, "Authorization": f"Bearer {LOCAL}"}
    assert (await house.ask("GET", "/events", role=None, headers=named, peer=peer)).status == status


async def test_two_authorizations_are_none(house: House) -> None:
    scope = scope_of("GET", "/api/v1/events", {"Host": "x"}, "203.0.113.7")
    right, wrong = f"Bearer {TOKENS['admin']}".encode(), b"Bearer wrong"
    for values in ((right, wrong), (wrong, right), (right, right)):
        scope["headers"] = [(b"authorization", value) for value in values]
        sent: list[dict[str, Any]] = []

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        await house.app(dict(scope), _nothing_more, send)
        assert sent[0]["status"] == 401


async def _nothing_more() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def test_every_token_is_compared_in_constant_time(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def same(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(access_module, "same", same)
    for role in ("admin", "viewer"):
        compared.clear()
        await house.get("/events", role=role)
        assert compared == [(32, 32)] * 5  # hashes, and all of them, wherever the match was


async def test_a_host_application_may_decide(tmp_path: Path) -> None:
    async def authorize(request: Any) -> str | None:
        return {"yes": "operator", "look": "viewer", "odd": "king"}.get(request.cookies.get("session", ""))

    async with admin_house(tmp_path, authorize=authorize) as house:
        [made] = await dead_letters(house.store, None)
        path = f"/deliveries/{dlv(made)}/discard"
        yes = {"Cookie": "session=yes"}

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            return (await house.ask(method, path, role=None, headers=headers)).status

        assert await status("GET", "/events", {"Cookie": "session=look"}) == 200
        assert await status("POST", path, {"Cookie": "session=look"}) == 403
        assert await status("GET", "/events", {"Cookie": "session=odd"}) == 401
        assert await status("GET", "/events", {}) == 401
        # a cookie is also sent for a stranger's page (S29)
        assert await status("POST", path, {**yes, "Sec-Fetch-Site": "cross-site"}) == 403
        assert await status("POST", path, {**yes, "Sec-Fetch-Site": "same-site"}) == 403
        assert await status("POST", path, {**yes, "Origin": "https://evil.example"}) == 403
        assert await status("POST", path, {**yes, "Origin": "null"}) == 403
        assert (await house.get(f"/deliveries/{dlv(made)}"))["status"] == "dead"
        assert await status("POST", path, {**yes, "Sec-Fetch-Site": "same-origin"}) == 200
        assert (await house.get("/audit"))["items"][0]["actor"] == "host"


# -- the stream --------------------------------------------------------------------------------


class Listening:
    """A client of the stream that reads as it goes."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.text = ""
        self.headers: dict[str, str] = {}
        self.gone = asyncio.Event()
        self.came = asyncio.Event()

    async def __aenter__(self) -> Listening:
        headers = {"Host": "x", "Authorization": f"Bearer {TOKENS['viewer']}"}
        scope = scope_of("GET", "/api/v1/stream", headers, "203.0.113.7")
        self.task = asyncio.create_task(self.house.app(scope, self.receive, self.send))
        await self.until("watching")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.gone.set()
        await self.task

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        self.text += message.get("body", b"").decode()
        self.came.set()

    async def until(self, text: str) -> None:
        while text not in self.text:
            await self.came.wait()
            self.came.clear()


async def test_the_stream_tells_what_happens(house: House) -> None:
    house.stream.publish("arrival", {"before": "anybody watched"})
    async with Listening(house) as listening:
        assert listening.headers["content-type"].startswith("text/event-stream")
        assert_safe(listening.headers)
        house.stream.publish("arrival", {"source": "orders", "subject": "a\nevent: forged\ndata: x"})
        await listening.until("forged")
        [(at, rest)] = re.findall(r'^event: arrival\ndata: \{"at":"([^"]+)",(.*)\n\n', listening.text, re.MULTILINE)
        assert rest == r'"source":"orders","subject":"a\nevent: forged\ndata: x"}'
        assert abs(datetime.fromisoformat(at) - clock.now_utc()) < timedelta(minutes=1)
        assert "anybody" not in listening.text
    assert not house.stream._watchers


async def test_a_slow_watcher_loses_the_oldest_and_is_told(house: House) -> None:
    watcher = house.stream.join()
    for n in range(1200):
        house.stream.publish("arrival", {"n": n})
    taken = watcher.take().decode()
    house.stream.leave(watcher)
    assert taken.startswith('event: dropped\ndata: {"count":700}\n\n')
    assert [json.loads(line)["n"] for line in re.findall(r"data: (.*n.*)", taken)[1:]] == list(range(700, 1200))


async def test_a_stream_that_closes_lets_everybody_go(house: House) -> None:
    async with Listening(house) as listening:
        house.stream.close()
        await listening.task


async def test_who_asks_only_for_the_head_does_not_watch(house: House) -> None:
    answer = await house.ask("HEAD", "/stream")
    assert (answer.status, answer.body) == (200, b"")


async def test_watchers_are_counted(house: House) -> None:
    watchers = [house.stream.join() for _ in range(100)]
    assert await house.refused("GET", "/stream") == (429, "too_many_watchers")
    house.stream.leave(watchers[0])
    async with Listening(house):
        pass


# -- the description ---------------------------------------------------------------------------


async def test_the_description_and_the_routes_are_one(house: House) -> None:
    answer = await call(house.app, "GET", "/openapi.json", b"", {"Host": "x"}, "203.0.113.7")
    document = answer.json
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    routed = {
        (method, route.path)
        for route in house.app.routes
        for method in getattr(route, "methods", None) or ()
        if route.path.startswith(PREFIX) and "{rest" not in route.path and method != "HEAD"
    }
    assert described == routed == {(e.method, PREFIX + e.path) for e in ENDPOINTS}
    names = [op["operationId"] for ops in document["paths"].values() for op in ops.values()]
    assert len(names) == len(set(names))
    references = set(re.findall(r'"#/components/schemas/(\w+)"', answer.body.decode()))
    assert references <= set(document["components"]["schemas"])


def test_the_page_of_the_api_has_every_endpoint_and_no_other() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    written = set(re.findall(r"^#+ `(GET|POST|PATCH|PUT|DELETE) (/\S+)`", page, re.MULTILINE))
    assert written == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    for endpoint in ENDPOINTS:
        [section] = re.findall(
            rf"^#+ `{endpoint.method} {re.escape(endpoint.path)}`(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL
        )
        assert f"Role: {endpoint.role.name}" in section
        named = [
            name
            for name in (endpoint.body.__struct_encode_fields__ if endpoint.body else ())
            if f"`{name}`" not in section
        ]
        assert not named, f"{endpoint.path}: {named}"
        for status in endpoint.refusals:
            assert str(status) in section, f"{endpoint.path}: {status}"


def test_the_page_of_the_api_has_every_field_of_every_answer() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    for endpoint in ENDPOINTS:
        if endpoint.answer is None or endpoint.answer.__name__ in ("Replayed", "Discarded"):
            continue
        [row] = re.findall(rf"^\| {endpoint.answer.__name__} \| (.*) \|$", page, re.MULTILINE)
        assert row == ", ".join(f"`{name}`" for name in endpoint.answer.__struct_fields__)


def test_only_what_has_a_name_of_its_own_is_said_to_be_made_by_put() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    for endpoint in ENDPOINTS:
        if endpoint.method == "PUT":
            [section] = re.findall(rf"^### `PUT {endpoint.path}`\n\n(.*?)(?=^#)", page, re.MULTILINE | re.DOTALL)
            text = " ".join(section.split())
            assert text.startswith(endpoint.summary)
            makes = endpoint.path != "/routes/{name}"  # an id is given by POST
            assert (endpoint.summary.startswith("Make"), "201 where it is new" in text) == (makes, makes)
