"""What the desk says in words: plans and their tokens, commands, schedules, and what it masks."""

from __future__ import annotations

import base64
import shlex
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook import human, query, retry
from oncehook.destinations.base import Terms
from oncehook.destinations.http import HttpDestination
from oncehook.errors import BadRequest
from oncehook.model import DeliveryStatus, Filter, Level, ReplayPlan, Seen
from oncehook.replay import ReplayRequest, build_plan, command, decode_token, encode_token, ended
from oncehook.reports import MASK, request_of, schedule
from oncehook.upkeep import Limits, measure

NOW = datetime(2026, 11, 16, 12, 0, 0, 250_000, tzinfo=UTC)
EVENT, DELIVERY = b"\1" * 16, b"\2" * 16


# -- plans -------------------------------------------------------------------------------------


@given(
    st.builds(
        ReplayRequest,
        st.builds(Filter, subject=st.text("ab \"\\:'", min_size=1), status=st.none() | st.sampled_from(DeliveryStatus)),
        st.booleans(),
        st.booleans(),
        st.none() | st.floats(0.001, 1000),
    ),
    st.builds(Seen, st.integers(0, 10**9), st.datetimes(timezones=st.just(UTC))),
)
def test_a_token_holds_the_whole_plan(wish: ReplayRequest, seen: Seen) -> None:
    assert decode_token(encode_token(wish, seen), NOW) == (wish, seen)


@given(st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_what_is_no_token_is_refused_and_nothing_else(text: str) -> None:
    with pytest.raises(BadRequest):
        decode_token(text, NOW)


def test_a_plan_has_an_end_unless_it_names_its_deliveries() -> None:
    meant = ended(Filter(status=DeliveryStatus.dead), NOW)
    assert meant.until == NOW.replace(microsecond=0) + timedelta(seconds=2)
    for given_ in (Filter(ids=(DELIVERY,)), Filter(event_id=EVENT), Filter(until=NOW)):
        assert ended(given_, NOW) == given_


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (ReplayRequest(Filter(ids=(DELIVERY,))), f"oncehook replay dlv_{DELIVERY.hex()}"),
        (ReplayRequest(Filter(event_id=EVENT, destination="crm")), f"oncehook replay evt_{EVENT.hex()} --to crm"),
        (
            ReplayRequest(Filter(status=DeliveryStatus.dead, destination="crm"), True, True, 0.5),
            "oncehook replay --query 'destination:crm status:dead' --force --fresh-id --rate 30/m",
        ),
    ],
)
def test_a_plan_is_a_command_too(wish: ReplayRequest, said: str) -> None:
    assert command(wish) == said


@pytest.mark.parametrize(
    ("asked", "allowed", "seconds"),
    [(None, None, None), (2.0, None, 5.0), (None, 4.0, 2.0), (2.0, 4.0, 5.0), (10.0, 4.0, 2.0)],
)
def test_a_plan_takes_as_long_as_the_slower_rate_wants(
    asked: float | None, allowed: float | None, seconds: float | None
) -> None:
    """Eight for a destination that may have a rate of its own, two for others that are not configured here."""
    crm = HttpDestination("crm", "https://crm.example/", terms=Terms(rate=allowed))
    counted = ReplayPlan(10, NOW, {"crm": 8, "old": 1, "far": 1})
    plan = build_plan(
        ReplayRequest(Filter(), rate=asked), counted, {"crm": crm}, {"crm": Level(failures=1)}, {}, ["far"]
    )
    assert plan.expected_seconds == seconds
    assert [(one.destination, one.kind, one.failing) for one in plan.recipients] == [
        ("crm", "http", True),
        ("old", "gone", False),
        ("far", "elsewhere", False),
    ]
    assert plan.can_work


def test_a_plan_for_nobody_cannot_work() -> None:
    for counts, can_work in (({"old": 2}, False), ({}, False), ({"old": 1, "far": 1}, True)):
        counted = ReplayPlan(sum(counts.values()), NOW, counts)
        assert build_plan(ReplayRequest(Filter()), counted, {}, {}, {}, ["far"]).can_work is can_work


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_strangers_text_stays_one_word_of_the_command(subject: str) -> None:
    words = shlex.split(command(ReplayRequest(Filter(subject=subject))))
    assert words[:3] == ["oncehook", "replay", "--query"]
    assert query.parse(words[3], NOW) == Filter(subject=subject)
    assert len(words) == 4


@given(st.floats(0.0001, 10_000))
def test_a_rate_is_shown_as_it_can_be_written(rate: float) -> None:
    assert human.rate(human.show_rate(rate)) == pytest.approx(rate, rel=0.01)


# -- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (retry.DURABLE, "10 s, 1 min, 5 min … 24 h: 10 attempts over 3 days"),
        (retry.QUICK, "2.5 s, 4.5 s: 3 attempts over 7 s"),
        (retry.Policy(attempts=1), "1 attempt"),
        (retry.Policy(attempts=3, base=60.0, cap=3600.0), "up to 1 min, 2 min: 3 attempts over 3 min"),
        (retry.policy(["90s"]), "1.5 min: 2 attempts over 1.5 min"),
    ],
)
def test_a_schedule_is_told_in_words(policy: retry.Policy, said: str) -> None:
    assert schedule(policy) == said


def test_spans_are_told_in_their_unit() -> None:
    assert [human.show_span(s) for s in (0.2, 59, 60, 3600, 86_400, 172_800, 600_000)] == [
        "0.2 s", "59 s", "1 min", "1 h", "24 h", "2 days", "7 days",
    ]  # fmt: skip


# -- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["authorization", "cookie", "x-api-key", "apikey", "x-gitlab-token", "x-secret", "x-auth-token", "client_secret"],
)
def test_what_opens_a_door_is_masked(name: str) -> None:
    shown = request_of(f"POST /in/x?{name}=v&a=b\r\n{name}: v".encode())
    assert shown.target == f"/in/x?{name}={MASK}&a=b"
    assert list(shown.headers) == [(name, MASK)]


@pytest.mark.parametrize("name", ["x-hub-signature-256", "webhook-signature", "content-type", "idempotency-key", "key"])
def test_what_only_proves_is_shown(name: str) -> None:
    assert list(request_of(f"POST /in/x\r\n{name}: v".encode()).headers) == [(name, "v")]


def test_a_head_of_any_shape_can_be_shown() -> None:
    for head in (b"", b"POST", b"POST /x?\r\n: v\r\nname", b"EMIT app\r\na" * 3):
        request_of(head)


# -- watermarks --------------------------------------------------------------------------------


def test_a_watermark_is_crossed_above_its_limit_and_a_disk_below() -> None:
    levels = {"a": Level(dead=3, oldest_due=10.0), "b": Level(dead=2, oldest_due=None)}

    def crossed(limits: Limits, free: float | None = None) -> dict[str, tuple[float | None, bool]]:
        return {mark.name: (mark.level, mark.crossed) for mark in measure(limits, levels, {"s": 7}, free)}

    assert crossed(Limits()) == {}
    assert crossed(Limits(5, 10.0, {"s": 7, "t": 1})) == {
        "dead": (5, False), "oldest_due": (10.0, False), "daily_volume.s": (7, False), "daily_volume.t": (0, False),
    }  # fmt: skip
    assert crossed(Limits(4, 9.0, {"s": 6})) == {
        "dead": (5, True), "oldest_due": (10.0, True), "daily_volume.s": (7, True),
    }  # fmt: skip
    assert crossed(Limits(disk=0.1), 0.1) == {"disk": (0.1, False)}
    assert crossed(Limits(disk=0.1), 0.09) == {"disk": (0.09, True)}
    assert crossed(Limits(disk=0.1)) == {"disk": (None, False)}
