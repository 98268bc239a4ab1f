"""The rule language: where a key, a subject, a type, a time and a rank are found, and when they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncehook import rules
from oncehook.errors import ConfigError
from oncehook.model import Arrival, key_hash
from oncehook.payload import parse
from oncehook.rules import (
    DEFAULT_KEY,
    DEFAULT_TYPE,
    Reading,
    Rule,
    RuleContext,
    Rules,
    Spec,
    bound_text,
    compile_rule,
    header,
    key_text,
)

FORM = ("content-type", "application/x-www-form-urlencoded")


def arrive(body: object = b"", *headers: tuple[str, str], query: bytes = b"") -> Arrival:
    """An arrival with this body (JSON unless it is bytes already) and these headers."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Arrival("orders", [(name.lower().encode(), value.encode("latin-1")) for name, value in headers], raw, query)


def key_of(spec: Spec, arrival: Arrival) -> tuple[str, ...] | None:
    return Rules(key=spec).read(arrival).key


# -- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("header:X-Request-Id", "r-1"),
        ("header:x-request-id", "r-1"),
        ("header:X-Other", None),
        ("header:X-Blank", None),
        ("query:id", "q 1"),
        ("query:blank", None),
        ("query:twice", None),
        ("query:same", "s"),
        ("query:other", None),
        ("$.id", "j-1"),
        ("$.number", "42"),
        ("$.big", "12345678901234567890123"),
        ("$.amount", "1.1"),
        ("$.flag", "false"),
        ("$.nothing", None),
        ("$.empty", None),
        ("$.object", None),
        ("$.list", None),
        ("$.list[0]", "first"),
        ("$.list[-1]", "last"),
        ("$.list[2]", None),
        ("$.list[*]", "first"),
        ("$.object.id", "o-1"),
        ("$['object']['id']", "o-1"),
        ("$.id.id", None),
        ("$.nothing.id", None),
        ("$..key", "deep"),
        ("$.hits[?@.ok == true].id", "2"),
        ("$", None),
    ],
)
def test_a_place_is_there_or_missing(place: str, found: str | None) -> None:
    body = {
        "id": "j-1",
        "number": 42,
        "big": 12345678901234567890123,
        "amount": 1.10,
        "flag": False,
        "nothing": None,
        "empty": "",
        "object": {"id": "o-1", "a": {"key": "deep"}},
        "list": ["first", "last"],
        "hits": [{"id": 1, "ok": False}, {"id": 2, "ok": True}],
    }
    query = b"id=q+1&blank=&twice=1&twice=2&same=s&same=s"
    arrival = arrive(body, ("X-Request-Id", "  r-1 "), ("X-Blank", " "), query=query)
    assert key_of(place, arrival) == (None if found is None else (found,))
    assert Rules(key=place).read_data(arrival, body, arrival.body).key == (None if found is None else (found,))


def test_the_first_node_decides_even_when_it_is_of_no_use() -> None:
    assert key_of("$.list[*]", arrive({"list": [None, "second"]})) is None
    assert key_of("$..id", arrive({"id": {}, "a": {"id": "x"}})) is None


def test_a_header_that_says_two_things_says_nothing() -> None:
    assert key_of("header:X-Id", arrive(b"", ("X-Id", "a"), ("X-Id", "b"))) is None
    assert key_of("header:X-Id", arrive(b"", ("X-Id", "a"), ("X-Id", " a"))) == ("a",)
    assert key_of("header:X-Id", arrive(b"", ("X-Other", "a"), ("X-Other", "b"), ("X-Id", "c"))) == ("c",)
    assert header([(b"x-id", b"a"), (b"x-id", b"b")], b"x-id") is None
    assert header([(b"x-id", b"\xe9 ")], b"x-id") == "é"
    assert header([], b"x-id") is None


@pytest.mark.parametrize(
    ("value", "found"),
    [('"abc"', "abc"), ("abc", "abc"), ('"a\\"b\\\\c"', 'a"b\\c'), ('""', None), ('"', '"'), ('"abc', '"abc')],
)
def test_only_the_idempotency_key_loses_its_quotes(value: str, found: str | None) -> None:
    assert header([(b"idempotency-key", value.encode())], b"idempotency-key") == found
    assert header([(b"x-id", value.encode())], b"x-id") == value


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([FORM], "SM1"),
        ([("content-type", "Application/X-WWW-Form-Urlencoded; charset=UTF-8")], "SM1"),
        ([], "SM1"),
        ([("content-type", "application/json")], None),
        ([("content-type", "text/plain")], None),
    ],
)
def test_form_fields_are_read_from_forms(headers: Sequence[tuple[str, str]], found: str | None) -> None:
    arrival = arrive(b"MessageSid=SM1&Body=a+b&To=1&To=2", *headers)
    assert key_of("form:MessageSid", arrival) == (None if found is None else (found,))
    assert key_of("form:To", arrival) is None
    assert key_of("form:Nothing", arrival) is None


def test_a_form_with_too_many_fields_has_none() -> None:
    assert key_of("form:a", arrive(b"&".join([b"a=1"] * 1001), FORM)) is None


def test_places_are_tried_in_order() -> None:
    spec = ["header:X-Request-Id", "$.idempotency_key", "$.data.idempotency_key", "$.messageId"]
    nested = {"data": {"idempotency_key": "nested"}, "messageId": "m"}
    assert key_of(spec, arrive(nested, ("X-Request-Id", "h"))) == ("h",)
    assert key_of(spec, arrive(nested)) == ("nested",)
    assert key_of(spec, arrive({"idempotency_key": "", "messageId": "m"})) == ("m",)
    assert key_of(tuple(spec), arrive({"other": 1})) is None


# -- composites ----------------------------------------------------------------------------------


def test_a_composite_needs_all_its_parts() -> None:
    spec = [["$.event", "$.payload.uri"], "$.id"]
    assert key_of(spec, arrive({"event": "created", "payload": {"uri": "u"}, "id": 7})) == ("created", "u")
    assert key_of(spec, arrive({"event": "created", "payload": {}, "id": 7})) == ("7",)
    assert key_of(spec, arrive({"event": "created"})) is None


def test_an_optional_part_leaves_a_gap() -> None:
    spec = [["literal:sms", "form:MessageSid", "?form:MessageStatus"]]
    assert key_of(spec, arrive(b"MessageSid=S&MessageStatus=sent", FORM)) == ("sms", "S", "sent")
    assert key_of(spec, arrive(b"MessageSid=S", FORM)) == ("sms", "S", "")
    assert key_of(spec, arrive(b"MessageStatus=sent", FORM)) is None


def test_parts_that_say_nothing_are_no_key() -> None:
    """Otherwise all arrivals without an id would be one event, and all but the first would be lost."""
    assert key_of([["?$.a", "?$.b"]], arrive({})) is None
    assert key_of([["literal:x", "?$.a"]], arrive({})) is None
    assert key_of([["literal:x", "?$.a"]], arrive({"a": 1})) == ("x", "1")


def test_parts_never_run_together() -> None:
    """R16."""
    rules = Rules(key=[["$.a", "$.b"]], subject=[["$.a", "$.b"]])
    one, other = rules.read(arrive({"a": "a", "b": "bc"})), rules.read(arrive({"a": "ab", "b": "c"}))
    assert one.key is not None
    assert other.key is not None
    assert key_hash("orders", one.key) != key_hash("orders", other.key)
    assert rules.read(arrive({"a": "x:", "b": "y"})).subject != rules.read(arrive({"a": "x", "b": ":y"})).subject


def test_keys_belong_to_their_source() -> None:
    """R21."""
    found = key_of("$.id", arrive({"id": 1}))
    assert found is not None
    assert key_hash("orders", found) != key_hash("payments", found)


def test_composites_are_joined_for_people() -> None:
    arrival = arrive({"a": "x:y", "b": "p\\q", "c": "z"})
    reading = Rules(subject=[["$.a", "$.b"]], rank_scope=[["$.c", "$.a"]], type=[["$.c", "$.a"]]).read(arrival)
    assert reading.subject == "x\\:y:p\\\\q"
    assert reading.rank_scope == "z:x\\:y"
    assert reading.type == "z.x:y"
    assert Rules(subject="$.a").read(arrival).subject == "x:y"
    assert key_text(("x:y",)) == "x:y"
    assert key_text(("x:y", "z")) == "x\\:y:z"


def test_a_type_without_its_optional_part_has_no_dot_at_the_end() -> None:
    rules = Rules(type=[["header:X-GitHub-Event", "?$.action"]])
    assert rules.read(arrive({"action": "opened"}, ("X-GitHub-Event", "issues"))).type == "issues.opened"
    assert rules.read(arrive({}, ("X-GitHub-Event", "push"))).type == "push"


@given(
    st.lists(st.text(":\\ab", max_size=4), min_size=2, max_size=3),
    st.lists(st.text(":\\ab", max_size=4), min_size=2, max_size=3),
)
def test_joined_texts_differ_when_their_parts_do(one: list[str], other: list[str]) -> None:
    assert (key_text(one) == key_text(other)) == (one == other)


# -- a rule set ----------------------------------------------------------------------------------


def test_a_source_without_rules_reads_nothing() -> None:
    assert Rules().read(arrive({"id": 1})) == Reading(None, None, None, None, None, None, False)


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        ({"messageId": "m"}, [("Idempotency-Key", '"h"')], ("h",)),
        ({"idempotency_key": "i", "messageId": "m"}, [], ("i",)),
        ({"messageId": "m", "data": {"messageId": "d"}}, [], ("m",)),
        ({"data": {"messageId": "d", "idempotency_key": "e"}}, [], ("e",)),
        ({"messageId": "m", "data": {"idempotency_key": "e"}}, [], ("m",)),
        ({"data": {"idempotency_key": "e"}}, [], ("e",)),
        ({"data": None}, [], None),
        ({"data": ["messageId"]}, [], None),
        ({"data": {"data": {"messageId": "too deep"}}}, [], None),
        ([{"messageId": "m"}], [], None),
    ],
)
def test_the_default_places(body: Any, headers: list[tuple[str, str]], found: tuple[str, ...] | None) -> None:
    assert key_of(DEFAULT_KEY, arrive(body, *headers)) == found


def test_the_default_type() -> None:
    assert Rules(type=DEFAULT_TYPE).read(arrive({"event": "b"})).type == "b"
    assert Rules(type=DEFAULT_TYPE).read(arrive({"type": "a", "event": "b"})).type == "a"


def test_a_retry_counter_decides_nothing() -> None:
    """R10."""
    rules = Rules(key=DEFAULT_KEY, type=DEFAULT_TYPE, subject="$.team")
    body = {"idempotency_key": "e1", "team": "t", "type": "x"}
    first = rules.read(arrive(body))
    again = rules.read(arrive(body, ("X-Slack-Retry-Num", "1"), ("X-Slack-Retry-Reason", "http_timeout")))
    assert first == again


def test_a_missing_key_is_none_and_never_a_guess() -> None:
    """R17: what then happens is the source's policy."""
    reading = Rules(key="$.id", subject="$.order").read(arrive({"data": {"id": 1}, "order": None}))
    assert reading == Reading(None, None, None, None, None, None, False)


@pytest.mark.parametrize("body", [b"not json", b"", b'{"id": 1, "x": "\xff"}', b"[" * 100_000, b'{"id": 1e999}'])
def test_a_body_that_cannot_be_read_is_marked(body: bytes) -> None:
    for subject in ("$.id", "$..id", lambda context: context.data and context.data["id"]):
        reading = Rules(key="header:X-Id", subject=subject).read(arrive(body, ("X-Id", "a")))
        assert reading == Reading(("a",), None, None, None, None, None, True)


def test_a_number_too_large_to_hold_is_no_matter_where_no_rule_looks() -> None:
    body = b'{"id": 1, "x": 1e999}'
    assert key_of("$.id", arrive(body)) == ("1",)
    assert Rules(key="$.id", subject="$..id").read(arrive(body)).unparsed


def test_a_body_nobody_asked_for_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: bytes) -> Any:
        raise AssertionError("the body was parsed")

    monkeypatch.setattr(rules, "parser_of", lambda names: refuse)
    read = Rules(key=["header:X-Id", "query:id"], type="literal:x", subject="form:s").read
    assert read(arrive(b"not json", ("X-Id", "a"))) == Reading(("a",), None, "x", None, None, None, False)
    assert not Rules(key=["header:X-Id", "$.id"]).read(arrive(b"not json", ("X-Id", "a"))).unparsed


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "Multipart/mixed"]
)
@pytest.mark.parametrize("path", ["$.id", "$..id"])
def test_forms_and_uploads_are_opaque(kind: str, path: str) -> None:
    """S13: they are not read as JSON, and that is nothing to be marked."""
    for body in (b"id=1", b"--x\r\n", b""):
        reading = Rules(key=path).read(arrive(body, ("content-type", kind)))
        assert (reading.key, reading.unparsed) == (None, False)


def test_json_that_curl_calls_a_form_is_read() -> None:
    """`curl -d '{…}'` says urlencoded; neither a form nor an upload ever begins with a bracket that is not escaped.

    Content types are signed by nobody: called an upload, a captured request would be another event without a key.
    """
    form = ("content-type", "application/x-www-form-urlencoded")
    assert Rules(key="$.id").read(arrive(b' {"id": 1}', form)).key == ("1",)
    upload = ("content-type", "multipart/form-data; boundary=x")
    assert Rules(key="$.id").read(arrive(b'{"id": 1}', upload)).key == ("1",)
    assert Rules(key="$.id").read(arrive(b'--x\r\n\r\n{"id": 1}\r\n--x--', upload)).key is None


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "text/plain", "application/cloudevents+json"])
def test_every_other_content_type_may_hold_json(kind: str) -> None:
    assert key_of("$.id", arrive({"id": 1}, ("content-type", kind))) == ("1",)


def test_simple_paths_do_not_load_the_library() -> None:
    code = (
        "import sys; from oncehook.payload import BodyHash, Redaction; from oncehook.rules import *; "
        "Rules(key=DEFAULT_KEY, subject='$.a[0].b', type=\"$['x-y']\"); BodyHash(['$[*].n']); Redaction(['$.t']); "
        "assert 'jsonpath_rfc9535' not in sys.modules; Rules(key='$..id'); assert 'jsonpath_rfc9535' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- rules in Python -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("a", ("a",)),
        (("a", "", "b"), ("a", "", "b")),
        (("a", 7), ("a", "7")),
        (7, ("7",)),
        (None, None),
        ("", None),
        (("", ""), None),
        ("x\ud800", ("x\\ud800",)),
    ],
)
def test_a_rule_may_be_a_function(answer: Any, found: tuple[str, ...] | None) -> None:
    reading = Rules(key=lambda context: answer, subject="$.s").read(arrive({"s": 1}))
    assert (reading.key, reading.subject) == (found, "1")
    if found is not None:
        key_hash("orders", found)


def test_a_function_sees_the_whole_arrival() -> None:
    def look(context: RuleContext) -> tuple[str, ...]:
        return (context.header("X-Id") or "", context.query("q") or "", context.data["a"]["b"], context.body.decode())

    arrival = arrive({"a": {"b": "c"}}, ("X-Id", "h"), query=b"q=1")
    assert key_of(look, arrival) == ("h", "1", "c", arrival.body.decode())
    assert key_of(lambda context: context.form("f"), arrive(b"f=1", FORM)) == ("1",)
    assert key_of(lambda context: context.media_type, arrive(b"f=1", FORM)) == (FORM[1],)


def test_a_function_that_stumbles_finds_nothing() -> None:
    for body in (b"[]", b"{}", b"null", b"not json", b'{"a": 1}'):
        assert key_of(lambda context: context.data["a"]["b"], arrive(body)) is None
    with pytest.raises(ZeroDivisionError):
        key_of(lambda context: str(1 // 0), arrive({}))


# -- parts of a batch ----------------------------------------------------------------------------


def test_a_part_is_read_with_the_headers_of_its_arrival() -> None:
    rules = Rules(key=[["header:X-Shop", "$.id"]], subject="$.id", type=lambda context: context.body.decode())
    arrival = arrive([{"id": 1}, {"id": 2}], ("X-Shop", "s"))
    reading = rules.read_data(arrival, {"id": 2}, b'{"id":2}')
    assert reading == Reading(("s", "2"), "2", '{"id":2}', None, None, None, False)
    assert Rules(key="$.id").read_data(arrive(b"broken"), None, b"null") == Reading(
        None, None, None, None, None, None, False
    )


# -- time and rank -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1719848392, "2024-07-01T15:39:52+00:00"),
        ("1719848392", "2024-07-01T15:39:52+00:00"),
        (1719848392123, "2024-07-01T15:39:52.123000+00:00"),
        ("1719848392123", "2024-07-01T15:39:52.123000+00:00"),
        ("1355517523.000005", "2012-12-14T20:38:43.000005+00:00"),
        (1355517523.5, "2012-12-14T20:38:43.500000+00:00"),
        (0, "1970-01-01T00:00:00+00:00"),
        ("2024-07-01T15:39:52Z", "2024-07-01T15:39:52+00:00"),
        ("2024-07-01t15:39:52.123456789z", "2024-07-01T15:39:52.123456+00:00"),
        ("2024-07-01 17:39:52+02:00", "2024-07-01T15:39:52+00:00"),
        ("2024-07-01T15:39:52.000+0000", "2024-07-01T15:39:52+00:00"),
        ("2024-07-01T15:39:52", None),
        ("2024-07-01", None),
        ("20240701T153952Z", None),
        ("2024-13-01T00:00:00Z", None),
        ("2024-07-01T15:39:52+99:99", None),
        ("0001-01-01T00:00:00+23:59", None),
        ("9999-12-31T23:59:59-23:59", None),
        ("0000-01-01T00:00:00Z", None),
        (10**17, None),
        ("9" * 400, None),
        (1e300, None),
        ("yesterday", None),
        ("1_000", None),
        ("١٧١٩٨٤٨٣٩٢", None),
        (True, None),
        (None, None),
    ],
)
def test_times(value: object, expected: str | None) -> None:
    found = Rules(event_time="$.t").read(arrive({"t": value})).event_at
    assert found == (None if expected is None else datetime.fromisoformat(expected))
    assert found is None or found.tzinfo is UTC


@pytest.mark.parametrize(
    ("value", "rank"),
    [
        (7, 7),
        ("7", 7),
        ("-3", -3),
        (100000.0, 100000),
        (2**63 - 1, 2**63 - 1),
        (2**63, None),
        (-(2**63), -(2**63)),
        ("9" * 30, None),
        ("1.5", None),
        ("new", None),
        ("٣", None),
        ("", None),
    ],
)
def test_ranks(value: object, rank: int | None) -> None:
    assert Rules(rank="$.v").read(arrive({"v": value})).rank == rank


def test_a_rank_may_be_a_place_in_an_order() -> None:
    rules = Rules(rank={"of": "$.status", "order": ["sent", "delivered", "read"]}, rank_scope="$.id")
    ranks = [
        rules.read(arrive({"status": status, "id": "wamid"})).rank for status in ("sent", "delivered", "read", "failed")
    ]
    assert ranks == [0, 1, 2, None]
    assert rules.read(arrive({"id": "wamid"})) == Reading(None, None, None, None, None, "wamid", False)


# -- texts that every store can hold -------------------------------------------------------------


def test_short_texts_stay_as_they_are() -> None:
    assert bound_text("é" * 256) == "é" * 256
    assert bound_text("x" * 512) == "x" * 512


def test_long_texts_are_cut_and_stay_different() -> None:
    one, other = bound_text("x" * 513), bound_text("x" * 512 + "y")
    assert one != other
    assert one.startswith("xxx")
    assert len(one.encode()) == 512
    assert len(one.rpartition("…")[2]) == 32
    assert len(bound_text("é" * 1000, 200).encode()) <= 200


def test_what_no_store_can_hold_is_spelled_out() -> None:
    assert bound_text("a\0b") == "a\\u0000b"
    assert bound_text("a\ud800b").encode()
    assert len(bound_text("\0" * 512).encode()) <= 512


@given(st.text(st.characters(codec=None), max_size=300), st.integers(60, 600))
def test_bounded_texts_fit_and_are_final(text: str, limit: int) -> None:
    once = bound_text(text, limit)
    assert len(once.encode()) <= limit
    assert "\0" not in once
    assert bound_text(once, limit) == once


def test_what_is_shown_is_bounded_and_what_is_hashed_is_not() -> None:
    long = "k" * 2000
    reading = Rules(key="$.k", subject="$.k", type="$.k", rank_scope="$.k").read(arrive({"k": long}))
    assert reading.key == (long,)
    assert key_text(reading.key) == reading.subject == reading.rank_scope == bound_text(long)
    assert reading.type == bound_text(long, 200)
    assert Rules(subject="$.k").read(arrive({"k": "a\0b"})).subject == "a\\u0000b"
    assert Rules(key="$.k").read(arrive({"k": "a\0b"})).key == ("a\0b",)


# -- what is wrong with a rule -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("id", '"id" is not a valid path'),
        ("headers:X-Id", 'The place "headers:X-Id" is of no known kind'),
        ("body:id", 'The place "body:id" is of no known kind'),
        ("", '"" is not a valid path'),
        ("header:", 'The place "header:" does not name what to look for'),
        ("header:X Id", 'The place "header:X Id" does not name what to look for'),
        ("query:", 'The place "query:" does not name'),
        ("literal:", 'The place "literal:" does not name'),
        ("?$.id", 'The place "?$.id" cannot be optional'),
        ("$.event-data.id", 'The place "$.event-data.id" is not a JSONPath'),
        (["$.id", "$.["], 'The place "$.[" is not a JSONPath'),
        ("$[?1e999@.a==1]", 'The place "$[?1e999@.a==1]" is not a JSONPath'),
        ([], "at least one place"),
        ([[]], "A composite of no parts"),
        ([["$.a", ["$.b", "$.c"]]], "stands inside another one"),
        ([["$.a", "b"]], '"b" is not a valid path'),
        ([["$.a", "??$.b"]], r'The place "\?\$.b" cannot be optional'),
        (7, "7 is not a place"),
        (["$.id", None], "None is not a place"),
        ([["$.id", 7]], "7 is not a place"),
        ({"of": "$.s"}, "is not a rank"),
        ({"of": "$.s", "order": []}, "is not a rank"),
        ({"of": "$.s", "order": ["a"], "by": 1}, "is not a rank"),
        ({"of": "s", "order": ["a"]}, '"s" is not a valid path'),
    ],
)
def test_a_wrong_rule_is_named(spec: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rule.parse(spec)
    assert message.replace("\\", "") in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("spec", ["literal:x", ["$.id", "literal:x"], [["literal:x", "literal:y"]]])
def test_a_key_that_is_always_the_same_is_refused(spec: Spec) -> None:
    with pytest.raises(ConfigError, match="every arrival a duplicate"):
        Rules(key=spec)
    assert Rules(subject=spec).read(arrive({})).subject in ("x", "x:y")


def test_only_a_rank_has_an_order() -> None:
    with pytest.raises(ConfigError, match="`key` takes places"):
        Rules(key={"of": "$.s", "order": ["a"]})


@pytest.mark.parametrize("name", ["key", "subject", "type", "account"])
def test_a_table_is_refused_in_the_name_of_its_setting(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_rule(name, {"a": 1})
    assert f"`{name}` takes places, not a table" in str(caught.value)
    assert "rank =" not in caught.value.hint


# -- whatever comes ------------------------------------------------------------------------------

PATHS = ["$.id", "$.data.id", "$.list[0].id", "$['x-y']", "$..id", "$.list[*].id", "$"]
PLACES = [*PATHS, "header:X-Id", "header:Idempotency-Key", "query:id", "form:id", "literal:x"]
specs = st.one_of(
    st.sampled_from(PLACES),
    st.lists(st.one_of(st.sampled_from(PLACES), st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)), min_size=1),
)
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["id", "data", "list", "x-y"]), inner, max_size=4)
    ),
    max_leaves=10,
)
some_headers = st.lists(
    st.tuples(
        st.sampled_from([b"x-id", b"idempotency-key", b"content-type"]),
        st.one_of(st.binary(max_size=6), st.sampled_from([b"application/json", FORM[1].encode(), b"multipart/x"])),
    ),
    max_size=4,
)


def rules_of(specs: Sequence[Spec]) -> Rules:
    subject, kind, event_time, rank, scope = specs
    return Rules(subject=subject, type=kind, event_time=event_time, rank=rank, rank_scope=scope)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(specs, min_size=5, max_size=5),
    some_headers,
    st.one_of(st.binary(max_size=60), values.map(lambda value: json.dumps(value).encode())),
    st.binary(max_size=20),
)
def test_nothing_that_arrives_raises(
    specs: list[Spec], headers: list[tuple[bytes, bytes]], body: bytes, query: bytes
) -> None:
    reading = rules_of(specs).read(Arrival("s", headers, body, query))
    for text in (reading.subject, reading.type, reading.rank_scope):
        assert text is None or (text.encode() and "\0" not in text)


@settings(deadline=None, max_examples=150)
@given(st.lists(specs, min_size=5, max_size=5), values)
def test_a_whole_arrival_and_a_parsed_one_read_alike(specs: list[Spec], value: Any) -> None:
    arrival = arrive(value, ("content-type", "application/json"), ("X-Id", "h"), query=b"id=1")
    rules = rules_of(specs)
    assert rules.read(arrival) == rules.read_data(arrival, parse(arrival.body), arrival.body)
