"""What a difficult sender leaves behind: kept as it came, under the right key, and seen (R6, R10, R16-R21, S11-S13).

Over real HTTP, on the server of `house`.
"""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from oncehook.model import Arrival, Mark, unpack_head
from oncehook.verify import Hmac
from tests.acceptance.conftest import Engine
from tests.acceptance.house import API_KEY, BEARER, BODY_TOKEN, PATH, QUERY_TOKEN, House, house
from tests.wire import SECRET, hook, signed

__all__ = ["house"]


# -- what is kept (R6, S25, S26) ---------------------------------------------------------------


async def test_the_row_is_what_came_and_its_signature_can_be_checked_again(house: House) -> None:
    body = b'{ "id" :"as-it-came",  "n": 1.10, "n": 2, "\\u0041": "\xc3\xa4" }\r\n'
    headers = signed(body)
    names = ["X-One: 1", "x-two: a", f"X-Signature: {headers['X-Signature']}", "X-Two: b", "X-One: 1", "X-Empty:"]
    lines = ["POST /in/orders?a=%20b&a=c HTTP/1.1", "Host: test", *names, f"Content-Length: {len(body)}"]
    answer = await house.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    assert answer.json["status"] == "accepted"
    stored = house.event("orders", "as-it-came")
    assert bytes(stored["body"]) == body
    method, target, kept = unpack_head(bytes(stored["head"]))
    assert (method, target) == ("POST", "/in/orders?a=%20b&a=c")
    wanted = [line.partition(":") for line in lines[1:]]
    assert kept == [(name.lower(), value.strip()) for name, _, value in wanted]
    again = Arrival("orders", [(name.encode(), value.encode()) for name, value in kept], bytes(stored["body"]))
    verify = Hmac(header="X-Signature", prefix="sha256=").verifier([SECRET.encode()])
    verify(again)


async def test_no_secret_reaches_store_or_log(house: House) -> None:
    body = hook("canary")
    withtoken = json.dumps({"id": "canary", "auth": {"token": BODY_TOKEN}}).encode()
    sent = [
        await house.post("bearer", body, {"Authorization": f"Bearer {BEARER}", "Cookie": "a=canary-cookie-5d1c0e"}),
        await house.post("api", body, {"X-Api-Key": API_KEY, "Proxy-Authorization": "Basic canary-proxy-5d1c0e"}),
        await house.post(f"query?a=b&token={QUERY_TOKEN}&c=d", body, {}),
        await house.post("inbody", withtoken, {"Content-Type": "application/json"}),
        # The same as conflicts, whose heads and bodies are kept as well.
        await house.post("api", hook("canary", other=1), {"X-Api-Key": API_KEY}),
        await house.post("inbody", withtoken.replace(b'"id"', b'"x":1,"id"'), {"Content-Type": "application/json"}),
        # Refused ones, which are logged.
        await house.post("bearer", body, {"Authorization": f"Bearer {BEARER}x"}),
        await house.post("api", body, {"X-Api-Key": f"{API_KEY}x"}),
    ]  # fmt: skip
    assert [answer.status for answer in sent] == [200, 200, 200, 200, 200, 200, 401, 401]
    everything = house.receiver.log.read_bytes() + dump(house.engine)
    assert b"canary" in everything
    for secret in (API_KEY, BEARER, QUERY_TOKEN, BODY_TOKEN, SECRET, PATH, "canary-cookie", "canary-proxy"):
        assert secret.encode() not in everything


def dump(engine: Engine) -> bytes:
    """All bytes of the store: its files, or what its tables show."""
    if engine.name == "sqlite":
        return b"".join(
            file.read_bytes()
            for file in sorted(engine.folder.glob("inbox.db*"))
            if "lock" not in file.name and file.is_file()
        )
    tables = ("events", "arrivals", "batches", "rejections", "keys")
    rows = [value for table in tables for row in engine.rows(f"SELECT * FROM {table}") for value in row]
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for value in rows)


# -- bodies (S11, S12, S13) --------------------------------------------------------------------


async def test_a_verified_body_that_is_not_json_is_kept_raw(house: House) -> None:
    for body in (b"", b"not json", b"\xff\xfe\x00", b'{"id": "half'):
        answer = await house.post("orders", body)
        assert (answer.status, answer.json["status"]) == (200, "accepted")
        stored = house.events("orders")[-1]
        assert bytes(stored["body"]) == body
        assert Mark(stored["marks"]) == Mark.unparsed | Mark.unkeyed


async def test_an_unreadable_body_is_keyed_by_the_policy(house: House) -> None:
    body = b"{not json"
    assert [(await house.post("hashed", body)).json["status"] for _ in range(2)] == ["accepted", "duplicate"]
    assert Mark(house.events("hashed")[-1]["marks"]) == Mark.unparsed
    before = house.extent()
    answer = await house.post("strict", body)
    assert (answer.status, answer.json["code"]) == (422, "key_missing")
    assert house.extent() == before


ODD_JSON = {
    "deep": b"[" * 10_000 + b"]" * 10_000,
    "deep object": b'{"id":"deep","a":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "NaN": b'{"id":"nan","a":NaN}',
    "Infinity": b'{"id":"inf","a":-Infinity}',
    "huge integer": b'{"id":"int","a":' + b"9" * 5000 + b"}",
    "huge key": b'{"id":' + b"9" * 5000 + b"}",
    "huge exponent": b'{"id":1e999999}',
    "lone surrogate": b'{"id":"lone \\ud800","customer":"\\udfff"}',
    "surrogate in UTF-8": b'{"id":"lone \xed\xa0\x80"}',
    "many values": b'{"id":"many","a":[' + b"1," * 300_000 + b"1]}",
}


@pytest.mark.parametrize("name", ODD_JSON)
async def test_odd_json_is_never_lost(house: House, name: str) -> None:
    body = ODD_JSON[name]
    answer = await house.post("orders", body)
    assert (answer.status, answer.json["status"]) == (200, "accepted")
    stored = house.events("orders")[-1]
    assert bytes(stored["body"]) == body
    assert Mark.unparsed in Mark(stored["marks"])


async def test_a_number_too_large_to_hold_costs_no_key_where_nobody_looks_at_it(house: House) -> None:
    body = b'{"id":"exp","a":1e999999}'
    assert [(await house.post("orders", body)).json["status"] for _ in range(2)] == ["accepted", "duplicate"]
    assert bytes(house.event("orders", "exp")["body"]) == body


async def test_of_a_name_that_occurs_twice_one_value_counts_everywhere(house: House) -> None:
    body = b'{"id":"twice-1","customer":"a","id":"twice-2","customer":"b"}'
    assert (await house.post("orders", body)).json["status"] == "accepted"
    stored = house.event("orders", "twice-2")
    assert stored["subject"] == "b" == json.loads(body)["customer"]


@pytest.mark.parametrize(
    "text",
    [
        *("nul \\u0000 inside", "\\u0000", "x" * 100_000, "ä" * 60_000, "\\ud83d\\ude00"),
        *("\\u202e right to left", "line\\r\\nend \\u001b[31m", "'; DROP TABLE events; --"),
    ],
)
async def test_odd_keys_and_subjects_stay_what_they_are(house: House, text: str) -> None:
    body, other = (f'{{"id":"{text}{end}","customer":"{text}{end}"}}'.encode() for end in ("", "!"))
    first = await house.post("orders", body)
    again = await house.post("orders", body)
    different = await house.post("orders", other)
    assert [a.json["status"] for a in (first, again, different)] == ["accepted", "duplicate", "accepted"]
    assert first.json["event_id"] == again.json["event_id"] != different.json["event_id"]
    assert bytes(house.events("orders")[-2]["body"]) == body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"id=1&payload=%7B%22id%22%3A%22in+a+form%22%7D"),
        ("multipart/form-data; boundary=b", b'--b\r\n\r\n{"id":"in an upload","type":"x"}\r\n--b--'),
        ("Multipart/Mixed", b'--b\r\nContent-Type: application/json\r\n\r\n{"id":"x"}\r\n--b--'),
    ],
)
async def test_forms_and_uploads_are_opaque(house: House, kind: str, body: bytes) -> None:
    answer = await house.post("orders", body, {**signed(body), "Content-Type": kind})
    assert answer.json["status"] == "accepted"
    stored = house.events("orders")[-1]
    assert (stored["key"], stored["subject"], bytes(stored["body"])) == (None, None, body)
    assert Mark(stored["marks"]) == Mark.unkeyed


# -- keys (R10, R17, R18, R21) -----------------------------------------------------------------


async def test_retry_headers_decide_nothing(house: House) -> None:
    body = hook("retried")
    retry = {"X-Slack-Retry-Num": "3", "X-Slack-Retry-Reason": "http_timeout", "X-Retry-Count": "1"}
    assert (await house.post("orders", body, {**signed(body), **retry})).json["status"] == "accepted"
    assert (await house.post("orders", body)).json["status"] == "duplicate"


async def test_a_missing_key_follows_the_policy(house: House) -> None:
    body = b'{"no":"key"}'
    twice = [(await house.post("orders", body)).json for _ in range(2)]
    assert [answer["status"] for answer in twice] == ["accepted", "accepted"]
    assert Mark(house.events("orders")[-1]["marks"]) == Mark.unkeyed
    assert (await house.post("strict", body)).status == 422
    twice = [(await house.post("hashed", body)).json for _ in range(2)]
    assert [answer["status"] for answer in twice] == ["accepted", "duplicate"]
    for n in range(10):  # on a busy machine two of them may be more than its two seconds apart
        body = b'{"no":"key","n":%d}' % n
        twice = [(await house.post("bucket", body)).json for _ in range(2)]
        if [answer["status"] for answer in twice] == ["accepted", "duplicate"]:
            break
    assert [answer["status"] for answer in twice] == ["accepted", "duplicate"]
    await asyncio.sleep(2.1)
    later = (await house.post("bucket", body)).json
    assert later["status"] == "accepted"
    assert later["event_id"] != twice[0]["event_id"]


@pytest.mark.parametrize("source", ["orders", "choosy"])
async def test_same_key_other_body_is_a_conflict(house: House, source: str) -> None:
    body, other = hook("contested", amount=1), hook("contested", amount=2)
    first = await house.post(source, body)
    answer = await house.post(source, other)
    if source == "choosy":
        assert (answer.status, answer.json["code"]) == (422, "key_conflict")
    else:
        assert answer.status == 200
        assert answer.json == {"status": "conflict", "skipped": True, "event_id": first.json["event_id"]}
    assert bytes(house.event(source, "contested")["body"]) == body
    kept = house.engine.rows("SELECT event_id, outcome, body FROM arrivals WHERE outcome = 'conflict'")
    ids = {(f"evt_{bytes(id_).hex() if isinstance(id_, bytes) else id_.hex}", bytes(kept_)) for id_, _, kept_ in kept}
    assert (first.json["event_id"], other) in ids


async def test_ignored_types_are_acknowledged_and_not_kept(house: House) -> None:
    before = house.extent()
    answer = await house.post("quiet", json.dumps({"id": "p", "type": "ping.hello"}).encode())
    assert (answer.status, answer.json) == (200, {"status": "ignored"})
    assert house.extent() == before
    assert (await house.post("quiet", hook("kept"))).json["status"] == "accepted"


async def test_a_header_is_a_key_only_where_it_is_listed(house: House) -> None:
    body = json.dumps({"hello": "world"}).encode()
    key = {"Idempotency-Key": '"from the header"'}
    answers = [(await house.post("plain", body, {**signed(body), **key})).json["status"] for _ in range(2)]
    assert answers == ["accepted", "accepted"], "a relay could burn the key of a real event"
    assert house.events("plain")[-1]["key"] is None
    answers = [(await house.post("listed", body, {**signed(body), **key})).json["status"] for _ in range(2)]
    assert answers == ["accepted", "duplicate"]
    assert house.events("listed")[-1]["key"] == "from the header"


async def test_keys_belong_to_their_source(house: House) -> None:
    body = hook("shared")
    first, second = await house.post("orders", body), await house.post("others", body)
    assert first.json["status"] == second.json["status"] == "accepted"
    assert first.json["event_id"] != second.json["event_id"]


# -- batches -----------------------------------------------------------------------------------


def batch(*items: tuple[str, int], kind: str = "t") -> bytes:
    return json.dumps({"from": "us", "events": [{"id": id_, "n": n, "type": kind} for id_, n in items]}).encode()


async def test_each_item_of_a_batch_is_an_event_in_its_envelope(house: House) -> None:
    body = batch(("b1", 1), ("b2", 2))
    answer = (await house.post("batch", body)).json
    assert {**answer, "event_ids": len(answer["event_ids"])} == {
        "status": "accepted", "accepted": 2, "duplicates": 0, "conflicts": 0, "event_ids": 2,
    }  # fmt: skip
    assert json.loads(bytes(house.event("batch", "b1")["body"])) == json.loads(batch(("b1", 1)))
    batch_id = house.event("batch", "b1")["batch_id"]
    raw = {str(id_): bytes(kept) for id_, kept in house.engine.rows("SELECT id, body FROM batches")}
    assert raw[str(batch_id)] == body
    # Half of it again, then all of it; then one item with another body; then alone.
    answer = (await house.post("batch", batch(("b2", 2), ("b3", 3)))).json
    assert (answer["status"], answer["accepted"], answer["duplicates"]) == ("accepted", 1, 1)
    answer = (await house.post("batch", body)).json
    assert (answer["status"], answer["accepted"], answer["duplicates"], answer["conflicts"]) == ("duplicate", 0, 2, 0)
    answer = (await house.post("batch", batch(("b1", 1), ("b2", 99)))).json
    assert (answer["status"], answer["duplicates"], answer["conflicts"]) == ("duplicate", 1, 1)
    alone = (await house.post("batch", batch(("b1", 1)))).json
    assert alone["status"] == "duplicate"
    assert alone["skipped"] is True


async def test_the_same_key_twice_in_one_batch(house: House) -> None:
    answer = (await house.post("batch", batch(("c1", 1), ("c1", 1), ("c1", 2)))).json
    assert (answer["accepted"], answer["duplicates"], answer["conflicts"]) == (1, 1, 1)
    assert len(set(answer["event_ids"])) == 1


async def test_a_batch_of_which_one_item_counts_keeps_its_raw_bytes(house: House) -> None:
    body = json.dumps({"events": [{"id": "d1", "type": "t"}, {"id": "d2", "type": "ping"}]}).encode()
    answer = (await house.post("batch", body)).json
    assert (answer["accepted"], len(answer["event_ids"])) == (1, 1)
    batch_id = house.event("batch", "d1")["batch_id"]
    raw = {str(id_): bytes(kept) for id_, kept in house.engine.rows("SELECT id, body FROM batches")}
    assert raw[str(batch_id)] == body, "the signature could not be checked again"


# -- being seen (UX.md 9) ----------------------------------------------------------------------


async def test_every_outcome_is_counted_under_the_name_of_its_source(house: House) -> None:
    async def metrics() -> str:
        await asyncio.sleep(1.1)  # the text is kept for a second
        client = house.receiver.client()
        text = (await client.get("/metrics", {"Host": "localhost"})).body.decode()
        client.close()
        return text

    async def counted() -> dict[str, float]:
        text = await metrics()
        lines = [line for line in text.splitlines() if line.startswith("oncehook_arrivals_total{")]
        return {line.partition("{")[2].rpartition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}

    text = await metrics()
    assert float(re.findall(r'store_operation_duration_seconds_count{operation="commit"} (\S+)', text)[0]) > 0
    assert re.search(r"^oncehook_store_size_bytes \d", text, re.MULTILINE)
    before = await counted()
    body, large = hook("counted"), b"x" * 3000
    await house.post("small", body)
    await house.post("small", body)
    await house.post("small", hook("counted", other=1))
    await house.post("small", body, {})
    await house.post("small", large)
    await house.post("never-heard-of", body)
    after = await counted()
    moved = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert moved == {
        'outcome="accepted",source="small"': 1,
        'outcome="duplicate",source="small"': 1,
        'outcome="conflict",source="small"': 1,
        'outcome="rejected",source="small"': 2,
        'outcome="rejected",source="unknown"': 1,
    }


async def test_the_log_has_one_line_for_what_somebody_may_have_to_act_on(house: House) -> None:
    await asyncio.sleep(2.5)  # of what came before, a sum may have to be told
    start = house.receiver.log.stat().st_size
    evil = "%0d%0a%7B%22event%22:%22forged%22%7D%1b%5b31m"
    body = hook("logged \r\n\x1b[31m forged")
    await house.post(evil, body)
    await house.post("orders", body)
    await house.post("orders", hook("logged \r\n\x1b[31m forged", other=1))
    lines = house.receiver.log.read_bytes()[start:].split(b"\n")
    told = [json.loads(line) for line in lines if line]
    assert [line["event"] for line in told] == ["arrival.rejected", "arrival.conflict"]
    assert told[0]["reason"] == "unknown source"
    assert told[0]["peer"] == "127.0.0.1"
    assert told[1]["source"] == "orders"
    assert not any(b"\x1b" in line or b"\r" in line for line in lines)


# -- the end: all adds up ----------------------------------------------------------------------


async def test_rejections_are_written_down_without_bodies(house: House) -> None:
    body = hook("rejected-and-noted")
    await house.post("orders", body, {})
    await house.post("nobody%00here", body, {})
    wanted = [
        ("nobody\\x00here", "signature_invalid", "unknown source", "127.0.0.1", len(body)),
        ("orders", "signature_invalid", "missing", "127.0.0.1", len(body)),
    ]
    for _ in range(300):  # they are written once a second, outside every commit
        await asyncio.sleep(0.2)
        rows = house.engine.rows("SELECT source, code, reason, peer, size FROM rejections ORDER BY n DESC LIMIT 2")
        if [tuple(row) for row in rows] == wanted:
            return
    raise AssertionError(f"these were written instead: {rows}")
