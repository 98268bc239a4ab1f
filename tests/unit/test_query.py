"""The query language: what each word means, what is said about a wrong one, and that text and filter are one thing."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook.errors import BadRequest, QueryInvalid
from oncehook.human import moment
from oncehook.model import (
    SIGNS,
    Category,
    Clause,
    DeliveryId,
    DeliveryStatus,
    EventId,
    Filter,
    Outcome,
    ReplayId,
    read_number,
)
from oncehook.query import WORDS, narrow, parse, quote_value, with_words, write_query

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
EVENT, DELIVERY, OTHER, REPLAY = (bytes([n]) * 16 for n in (1, 2, 3, 4))

MEANINGS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("   ", {}),
    ("source:stripe", {"source": "stripe"}),
    ("type:invoice.*", {"type": "invoice.*"}),
    ("status:dead", {"status": DeliveryStatus.dead}),
    ("subject:cus_42", {"subject": "cus_42"}),
    ("account:42", {"account": "42"}),
    ('subject:"two words"', {"subject": "two words"}),
    (r'subject:"a \"b\" \\ c"', {"subject": r'a "b" \ c'}),
    ("key:wamid.HB:1", {"key": "wamid.HB:1"}),
    ("destination:crm", {"destination": "crm"}),
    ("to:crm", {"destination": "crm"}),
    ("to:crm destination:crm", {"destination": "crm"}),
    ("attempts:>3", {"attempts_above": 3}),
    ("attempts:>=3", {"attempts_above": 2}),
    ("attempts:<3", {"attempts_below": 3}),
    ("attempts:<=3", {"attempts_below": 4}),
    ("attempts:3", {"attempts_above": 2, "attempts_below": 4}),
    ("attempts:>3 attempts:<9", {"attempts_above": 3, "attempts_below": 9}),
    ("code:503", {"code": "503"}),
    ("code:5XX", {"code": "5xx"}),
    ("category:transient", {"category": Category.transient}),
    ("note:stale", {"note": "stale"}),
    (f"replay:rpl_{REPLAY.hex()}", {"replay_id": REPLAY}),
    (f"left:rpl_{REPLAY.hex()}", {"left_of": REPLAY}),
    ("is:replayed", {"is_replayed": True}),
    ("is:replayed status:done", {"is_replayed": True, "status": DeliveryStatus.done}),
    (f"event:evt_{EVENT.hex()}", {"event_id": EVENT}),
    (f"id:evt_{EVENT.hex()}", {"event_id": EVENT}),
    (f"id:dlv_{DELIVERY.hex()}", {"ids": (DELIVERY,)}),
    (f"id:dlv_{DELIVERY.hex()} id:dlv_{OTHER.hex()} id:dlv_{OTHER.hex()}", {"ids": (DELIVERY, OTHER)}),
    (f"evt_{EVENT.hex()}", {"event_id": EVENT}),
    (f"dlv_{DELIVERY.hex()}", {"ids": (DELIVERY,)}),
    (f"rpl_{REPLAY.hex()}", {"replay_id": REPLAY}),
    (f'"evt_{EVENT.hex()}"', {"text": f"evt_{EVENT.hex()}"}),
    ("since:2h", {"since": NOW - timedelta(hours=2)}),
    ("since:1h30m", {"since": NOW - timedelta(minutes=90)}),
    ("until:2026-11-16T10:00Z", {"until": datetime(2026, 11, 16, 10, tzinfo=UTC)}),
    ("until:2026-11-16", {"until": datetime(2026, 11, 16, tzinfo=UTC)}),
    ('until:"2026-11-16 10:00"', {"until": datetime(2026, 11, 16, 10, tzinfo=UTC)}),
    ("since:2026-11-16T10:00+02:00", {"since": datetime(2026, 11, 16, 8, tzinfo=UTC)}),
    ("body.amount:>1000", {"body": (Clause(("amount",), ">", "1000"),)}),
    ("body.data.items.0.price:>=-1.5e3", {"body": (Clause(("data", "items", "0", "price"), ">=", "-1.5e3"),)}),
    ("body.n:<5 body.n:<=6", {"body": (Clause(("n",), "<", "5"), Clause(("n",), "<=", "6"))}),
    ("body.paid:true body.paid:true", {"body": (Clause(("paid",), "=", "true"),)}),
    ("body.at:12:30", {"body": (Clause(("at",), "=", "12:30"),)}),
    ("body.n:=5", {"body": (Clause(("n",), "=", "5"),)}),
    ('body.op:">5"', {"body": (Clause(("op",), "=", ">5"),)}),
    ("body.op:=>5", {"body": (Clause(("op",), "=", ">5"),)}),
    (r'body."first name"."a.b:\"c\"".x-y:"Ann B"', {"body": (Clause(("first name", 'a.b:"c"', "x-y"), "=", "Ann B"),)}),
    ('body."":x', {"body": (Clause(("",), "=", "x"),)}),
    ("body.größe:2 body.$id:7", {"body": (Clause(("größe",), "=", "2"), Clause(("$id",), "=", "7"))}),
    ("source:shop body.a:1 word", {"source": "shop", "body": (Clause(("a",), "=", "1"),), "text": "word"}),
    ("body.amount", {"text": "body.amount"}),
    ("refund", {"text": "refund"}),
    ('source:stripe "no such: customer" again', {"source": "stripe", "text": "no such: customer again"}),
    ("12:30", {"text": "12:30"}),
    ("50%_'; DROP TABLE events; --", {"text": "50%_'; DROP TABLE events; --"}),
    ("arrivals:>1", {"arrivals_above": 1}),
    ("arrivals:2", {"arrivals_above": 1, "arrivals_below": 3}),
    ("outcome:duplicate", {"outcome": Outcome.duplicate}),
    ("outcome:conflict", {"outcome": Outcome.conflict}),
    ("-status:done", {"without": (Filter(status=DeliveryStatus.done),)}),
    ("-source:a -source:b -source:a", {"without": (Filter(source="a"), Filter(source="b"))}),
    ("-to:crm status:dead", {"status": DeliveryStatus.dead, "without": (Filter(destination="crm"),)}),
    ("-is:replayed", {"without": (Filter(is_replayed=True),)}),
    ("-outcome:conflict", {"without": (Filter(outcome=Outcome.conflict),)}),
    (f"-dlv_{DELIVERY.hex()}", {"without": (Filter(ids=(DeliveryId(DELIVERY),)),)}),
    ("-attempts:>3", {"attempts_below": 4}),
    ("-arrivals:<=1", {"arrivals_above": 1}),
    ("-since:2h", {"until": NOW - timedelta(hours=2)}),
    ("-until:2h", {"since": NOW - timedelta(hours=2)}),
    ("-body.a:1", {"body": (Clause(("a",), "=", "1", negated=True),)}),
    ("-refund paid", {"text": "paid", "without": (Filter(text="refund"),)}),
    ('-"no way" "-x"', {"text": "-x", "without": (Filter(text="no way"),)}),
    ("- a", {"text": "- a"}),
    ("-attempts:3", {"either": (Filter(attempts_below=3), Filter(attempts_above=3))}),
    ("source:a OR source:b", {"either": (Filter(source="a"), Filter(source="b"))}),
    (
        "source:a text OR -to:b",
        {"either": (Filter(source="a", text="text"), Filter(without=(Filter(destination="b"),)))},
    ),
    ("(source:a OR source:b) key:k", {"either": (Filter(source="a", key="k"), Filter(source="b", key="k"))}),
    ("key:k AND ((source:a))", {"source": "a", "key": "k"}),
    ("status:dead (status:done OR source:x)", {"status": DeliveryStatus.dead, "source": "x"}),
    ("since:2h (since:1h OR since:3h)", {"either": tuple(Filter(since=NOW - timedelta(hours=n)) for n in (1, 2))}),
    ("source:a OR source:a", {"source": "a"}),
    ("call(1)", {"text": "call(1)"}),
    ("(call(1))", {"text": "call(1)"}),
    ('("a)" OR b)', {"either": (Filter(text="a)"), Filter(text="b"))}),
    ('"OR" "AND"', {"text": "OR AND"}),
    ("ORDER or android", {"text": "ORDER or android"}),
]


@pytest.mark.parametrize(("text", "meaning"), MEANINGS)
def test_words_have_their_meaning(text: str, meaning: dict[str, Any]) -> None:
    assert parse(text, NOW) == Filter(**meaning)


@pytest.mark.parametrize(("text", "meaning"), MEANINGS)
def test_fixed_says_the_same_an_hour_later(text: str, meaning: dict[str, Any]) -> None:
    written = write_query(parse(text, NOW))
    assert parse(written, NOW + timedelta(hours=1)) == Filter(**meaning)
    assert write_query(parse(written, NOW)) == written


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("satus:dead", "status:"),
        ("sorce:x", "source:"),
        ("destinaton:x", "destination:"),
        ("http://example.org", "in quotes"),
        ("body:x", "no word of a query"),
        ("bodies.a:x", "and body.…"),
        ("body.:x", "leads nowhere"),
        ("body..a:x", "leads nowhere"),
        ("body.a.:x", "leads nowhere"),
        ("body" + ".a" * 65 + ":x", "leads nowhere"),
        ("body.a:", "has no value"),
        ("body.items.0:", "has no value"),
        ("body.a:>=", "has no value"),
        ('body.a:""', "has no value"),
        ('body."a":', "has no value"),
        ('body."a:x', "quote"),
        ("body.a:>many", "no number"),
        ("body.a:<1e999", "no number"),
        ("body.a:>0x10", "no number"),
        ("body.a:>007", "no number"),
        ("body.a:<>5", "no number"),
        (" ".join(f"body.a:{n}" for n in range(11)), "10 places"),
        ("status:ded", "status:dead"),
        ("status:DEAD", "pending"),
        ("category:transitory", "transient"),
        ("note:old", "coalesced"),
        ("attempts:many", "attempts:>3"),
        ("attempts:>-1", "attempts:>3"),
        ("attempts:>9999999999", "attempts:>3"),
        ("code:50", "5xx"),
        ("code:5x", "5xx"),
        ("since:soon", "2h"),
        ("since:2x", "2h"),
        ("since:2026-13-01", "2h"),
        ("until:0001-01-01T00:00+14:00", "2h"),
        ("since:200000000000000000w", "2h"),
        ("event:evt_12", "evt_"),
        (f"event:dlv_{DELIVERY.hex()}", "evt_"),
        (f"id:rpl_{REPLAY.hex()}", "dlv_"),
        ("source:", "source:"),
        ('source:""', "source:"),
        ("status:dead source:", "source:"),
        ('"open', "quote"),
        ('subject:"open', "quote"),
        ('subject:"a"b', "quote"),
        ("source:a source:b", "twice"),
        ("attempts:3 attempts:4", "twice"),
        ("outcome:rejected", "oncehook rejected"),
        ("outcome:accepted", "arrivals:1"),
        ("outcome:duplicates", "outcome:duplicate"),
        ("arrivals:lots", "arrivals:>3"),
        ("-satus:done", "status:"),
        ("-status:ded", "status:dead"),
        ("-source:", "has no value"),
        ("a OR", "each side"),
        ("OR a", "each side"),
        ("a OR OR b", "each side"),
        ("()", "each side"),
        ("(a OR )", "each side"),
        ("(a", "does not close"),
        ("-(a OR b)", "Negate each"),
        ("a NOT b", "minus"),
        ("(source:a) (source:b OR source:c)", "contradict"),
        ("(a OR b) (c OR d) (e OR f) (g OR h)", "8 alternatives"),
        (" OR ".join("abcdefghi"), "8 alternatives"),
        (" ".join(f"-source:s{n}" for n in range(21)), "20 words"),
        ("(" * 20 + "a" + ")" * 20, "inside each other"),
        ("a\0b", "character"),
        ("a\ud800b", "character"),
        ("x" * 40_000, "longer"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(text, NOW)
    assert caught.value.code == "query_invalid"
    assert said in f"{caught.value} {caught.value.hint}"


def test_a_long_query_is_read_in_no_time() -> None:
    # every pattern runs over each character a bounded number of times (S36)
    for text in ('"' + "\\" * 30_000, "a:" * 15_000, "a." * 15_000, '"a" ' * 8_000, "\\" * 30_000, "1.h" * 10_000):
        parse_or_refuse(text)
    for text in (
        "(" * 30_000,
        "(" + ")" * 30_000,
        "(a " + "x)" * 15_000,
        "-" * 30_000,
        "a OR " * 6_000,
        "-a " * 10_000,
    ):
        parse_or_refuse(text)
    for text in ("body" + ".a" * 16_000, "body." + "a" * 30_000, 'body."' + "\\" * 30_000, 'body."a".' * 3_000):
        parse_or_refuse(text)


def parse_or_refuse(text: str) -> None:
    with suppress(QueryInvalid):
        parse(text, NOW)


def test_every_word_has_a_meaning_here() -> None:
    assert {word for word in WORDS if any(f"{word}:" in text for text, _ in MEANINGS)} == set(WORDS)


def test_a_moment_ago_is_counted_from_now() -> None:
    assert moment("24h", NOW) == NOW - timedelta(days=1)
    assert moment("2026-11-16T10:00:00.5", NOW).microsecond == 500_000


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
ids = st.binary(min_size=16, max_size=16)
delivery_ids, event_ids, replay_ids = ids.map(DeliveryId), ids.map(EventId), ids.map(ReplayId)
times = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
numbers = st.integers(-(10**20), 10**20).map(str) | st.floats(allow_nan=False, allow_infinity=False).map(repr)
clauses = st.builds(
    Clause,
    path=st.lists(texts, min_size=1, max_size=4).map(tuple),
    sign=st.just("="),
    value=texts,
    negated=st.booleans(),
)
clauses |= st.builds(Clause, path=st.tuples(texts), sign=st.sampled_from(SIGNS), value=numbers, negated=st.booleans())
excluded = st.one_of(
    st.builds(Filter, source=texts),
    st.builds(Filter, text=texts),
    st.builds(Filter, status=st.sampled_from(DeliveryStatus)),
    st.builds(Filter, ids=st.tuples(delivery_ids)),
    st.builds(Filter, code=st.sampled_from(["503", "5xx"])),
    st.builds(Filter, outcome=st.sampled_from([Outcome.duplicate, Outcome.conflict])),
)
filters = st.builds(
    Filter,
    arrivals_above=st.none() | st.integers(0, 50),
    arrivals_below=st.none() | st.integers(0, 50),
    outcome=st.none() | st.sampled_from([Outcome.duplicate, Outcome.conflict]),
    without=st.none() | st.lists(excluded, min_size=1, max_size=3, unique=True).map(tuple),
    ids=st.none() | st.lists(delivery_ids, min_size=1, max_size=3, unique=True).map(tuple),
    event_id=st.none() | event_ids,
    source=st.none() | texts,
    destination=st.none() | texts,
    status=st.none() | st.sampled_from(DeliveryStatus),
    type=st.none() | texts,
    subject=st.none() | texts,
    key=st.none() | texts,
    category=st.none() | st.sampled_from(Category),
    note=st.none() | st.sampled_from(["stale", "coalesced"]),
    code=st.none() | st.sampled_from(["503", "5xx"]),
    attempts_above=st.none() | st.integers(0, 50),
    attempts_below=st.none() | st.integers(0, 50),
    replay_id=st.none() | replay_ids,
    since=st.none() | times,
    until=st.none() | times,
    text=st.none() | texts,
    body=st.none() | st.lists(clauses, min_size=1, max_size=5, unique=True).map(tuple),
)


@given(filters)
def test_text_and_filter_are_one_thing(filter: Filter) -> None:
    assert parse(write_query(filter), NOW) == filter


@given(st.lists(filters, min_size=2, max_size=4, unique=True))
def test_alternatives_are_written_and_read(some: list[Filter]) -> None:
    assert parse(write_query(Filter(either=tuple(some))), NOW) == Filter(either=tuple(some))


@given(filters, filters)
def test_a_filter_is_narrowed_by_another(one: Filter, other: Filter) -> None:
    try:
        both = narrow(one, other)
    except QueryInvalid:
        return
    assert both == narrow(one, narrow(other, Filter()))
    assert narrow(one, Filter()) == one


def test_words_narrow_a_whole_query() -> None:
    assert with_words("", "status:dead") == "status:dead"
    assert with_words("source:a", "status:dead") == "source:a status:dead"
    meant = parse(with_words("source:a OR source:b", "status:dead"), NOW)
    assert meant.alternatives() == [Filter(source=name, status=DeliveryStatus.dead) for name in "ab"]


@given(texts)
def test_whatever_is_quoted_is_one_value(text: str) -> None:
    assert parse(f"subject:{quote_value(text)}", NOW) == Filter(subject=text)


@given(st.text())
def test_nothing_but_a_refusal_is_raised(text: str) -> None:
    try:
        assert parse(write_query(parse(text, NOW)), NOW) == parse(text, NOW)
    except QueryInvalid:
        return


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("10", 10), ("10.0", 10.0), ("-0", 0), ("1e3", 1000.0), ("9223372036854775807", 2**63 - 1)),
        *(("9223372036854775808", float(2**63)), ("1e-999", 0.0), ("1e999", None), ("1" * 200, None)),
        *(
            ("", None),
            ("+1", None),
            ("01", None),
            ("1.", None),
            (".5", None),
            ("NaN", None),
            ("1_0", None),
            ("١", None),
        ),
    ],
)
def test_a_number_is_what_json_calls_one(text: str, number: float | None) -> None:
    assert read_number(text) == number
    assert type(read_number(text)) is type(number)


def test_no_ids_is_no_way_of_saying_all() -> None:
    with pytest.raises(ValueError, match="everything"):
        write_query(Filter(ids=()))


def test_what_a_replay_has_left_is_not_negated() -> None:
    with pytest.raises(QueryInvalid, match="cannot be negated"):
        parse(f"-left:rpl_{REPLAY.hex()}", NOW)
