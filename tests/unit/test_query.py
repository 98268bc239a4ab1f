"""The query language: what each word means, what is said about a wrong one, and that text and filter are one thing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook.deliveries import Category, DeliveryStatus, Filter
from oncehook.errors import BadRequest, QueryInvalid
from oncehook.query import WORDS, fixed, moment, parse, quoted

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
EVENT, DELIVERY, OTHER, REPLAY = (bytes([n]) * 16 for n in (1, 2, 3, 4))

MEANINGS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("   ", {}),
    ("source:stripe", {"source": "stripe"}),
    ("type:invoice.*", {"type": "invoice.*"}),
    ("status:dead", {"status": DeliveryStatus.dead}),
    ("subject:cus_42", {"subject": "cus_42"}),
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
    ("refund", {"text": "refund"}),
    ('source:stripe "no such: customer" again', {"source": "stripe", "text": "no such: customer again"}),
    ("12:30", {"text": "12:30"}),
    ("50%_'; DROP TABLE events; --", {"text": "50%_'; DROP TABLE events; --"}),
]


@pytest.mark.parametrize(("text", "meaning"), MEANINGS)
def test_words_have_their_meaning(text: str, meaning: dict[str, Any]) -> None:
    assert parse(text, NOW) == Filter(**meaning)


@pytest.mark.parametrize(("text", "meaning"), MEANINGS)
def test_fixed_says_the_same_an_hour_later(text: str, meaning: dict[str, Any]) -> None:
    written = fixed(parse(text, NOW))
    assert parse(written, NOW + timedelta(hours=1)) == Filter(**meaning)
    assert fixed(parse(written, NOW)) == written


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("satus:dead", "status:"),
        ("sorce:x", "source:"),
        ("destinaton:x", "destination:"),
        ("http://example.org", "in quotes"),
        ("body.amount:>1000", "no word of a query"),
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
        try:
            parse(text, NOW)
        except QueryInvalid:
            continue


def test_every_word_has_a_meaning_here() -> None:
    assert {word for word in WORDS if any(f"{word}:" in text for text, _ in MEANINGS)} == set(WORDS)


def test_a_moment_ago_is_counted_from_now() -> None:
    assert moment("24h", NOW) == NOW - timedelta(days=1)
    assert moment("2026-11-16T10:00:00.5", NOW).microsecond == 500_000


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
ids = st.binary(min_size=16, max_size=16)
times = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
filters = st.builds(
    Filter,
    ids=st.none() | st.lists(ids, min_size=1, max_size=3, unique=True).map(tuple),
    event_id=st.none() | ids,
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
    replay_id=st.none() | ids,
    since=st.none() | times,
    until=st.none() | times,
    text=st.none() | texts,
)


@given(filters)
def test_text_and_filter_are_one_thing(filter: Filter) -> None:
    assert parse(fixed(filter), NOW) == filter


@given(texts)
def test_whatever_is_quoted_is_one_value(text: str) -> None:
    assert parse(f"subject:{quoted(text)}", NOW) == Filter(subject=text)


@given(st.text())
def test_nothing_but_a_refusal_is_raised(text: str) -> None:
    try:
        assert parse(fixed(parse(text, NOW)), NOW) == parse(text, NOW)
    except QueryInvalid:
        return


def test_no_ids_is_no_way_of_saying_all() -> None:
    with pytest.raises(ValueError, match="everything"):
        fixed(Filter(ids=()))
