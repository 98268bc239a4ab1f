"""Plans of replays: their tokens, their commands, whom they reach, and what is said before anybody says yes."""

from __future__ import annotations

import asyncio
import base64
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook import Event, GiveUp, Inbox, human, query
from oncehook.destinations.base import Terms
from oncehook.destinations.http import HttpDestination
from oncehook.errors import BadRequest
from oncehook.model import DeliveryId, DeliveryStatus, EventId, Filter, Level, PlannedFor, PlanSnapshot, ReplayPlan
from oncehook.replay import Plan, ReplayRequest, build_plan, command, decode_token, encode_token, some_ids, with_end

NOW = datetime(2026, 11, 16, 12, 0, 0, 250_000, tzinfo=UTC)
EVENT, DELIVERY = EventId(b"\1" * 16), DeliveryId(b"\2" * 16)


# -- plans -------------------------------------------------------------------------------------


@given(
    st.builds(
        ReplayRequest,
        st.builds(Filter, subject=st.text("ab \"\\:'", min_size=1), status=st.none() | st.sampled_from(DeliveryStatus)),
        st.booleans(),
        st.booleans(),
        st.none() | st.floats(0.001, 1000),
    ),
    st.builds(PlanSnapshot, st.integers(0, 10**9), st.datetimes(timezones=st.just(UTC))),
)
def test_a_token_holds_the_whole_plan(wish: ReplayRequest, seen: PlanSnapshot) -> None:
    assert decode_token(encode_token(wish, seen), NOW) == (wish, seen)


@given(st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_what_is_no_token_is_refused_and_nothing_else(text: str) -> None:
    with pytest.raises(BadRequest):
        decode_token(text, NOW)


def test_a_plan_has_an_end_unless_it_names_its_deliveries() -> None:
    meant = with_end(Filter(status=DeliveryStatus.dead), NOW)
    assert meant.until == NOW.replace(microsecond=0) + timedelta(seconds=2)
    for given_ in (Filter(ids=(DELIVERY,)), Filter(event_id=EVENT), Filter(until=NOW)):
        assert with_end(given_, NOW) == given_


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


# -- what is said before -----------------------------------------------------------------------


def plan_of(level: Level, *, changed: int = 0, fresh_id: bool = False, to: str = "crm") -> Plan:
    crm = HttpDestination("crm", "https://crm.example/")
    counted = ReplayPlan(2, NOW, {to: 2}, changed={to: changed})
    return build_plan(ReplayRequest(Filter(), fresh_id=fresh_id), counted, {"crm": crm}, {to: level}, {})


@pytest.mark.parametrize(
    ("level", "warning"),
    [
        (Level(), None),
        (Level(paused_at=NOW, failures=3), "crm is paused: nothing is sent before it is resumed."),
        (
            Level(failures=1),
            "crm failed its last attempts: unless that is mended, these may become dead letters again.",
        ),
        (
            Level(open_until=NOW),
            "crm failed its last attempts: unless that is mended, these may become dead letters again.",
        ),
    ],
)
def test_a_plan_warns_of_a_destination_that_cannot_take_it(level: Level, warning: str | None) -> None:
    assert plan_of(level).warnings == ([] if warning is None else [warning])


def test_a_plan_names_who_refused() -> None:
    counted = ReplayPlan(
        5, NOW, {"crm": 3, "far": 2}, parts={"crm": PlannedFor(refused=2), "far": PlannedFor(refused=2)}
    )
    plan = build_plan(ReplayRequest(Filter()), counted, {}, {}, {}, ["crm", "far"])
    refused = [
        "crm refused 2 of 3 for good: they fail again unless the cause is mended.",
        "far refused these for good: they fail again unless the cause is mended.",
    ]
    assert plan.warnings == refused
    levels = {"crm": Level(failures=2), "far": Level(failures=2)}
    plan = build_plan(ReplayRequest(Filter()), counted, {}, levels, {}, ["crm", "far"])
    assert plan.warnings[1:] == refused, "of far, whose deliveries were all refused, it is said once"
    assert plan.warnings[0].startswith("crm failed its last attempts")


async def test_a_plan_does_not_warn_of_a_handler_that_was_started_again(tmp_path: Path) -> None:
    """A mended program is not called failing for what its former code did."""

    def make() -> Inbox:
        inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
        inbox.on("app", name="ship")(fail)
        return inbox

    def fail(event: Event) -> None:
        raise GiveUp("no address")

    inbox = make()
    async with inbox.running():
        await inbox.emit("app", "t", {}, key="1")
        await inbox.drain()
        request = inbox.admin.build_request("status:dead")
        assert (await inbox.admin.plan(request)).warnings[-1] == (
            "ship refused this for good: it fails again unless the cause is mended."
        )
    again = make()
    async with again.running():
        async with asyncio.timeout(30):
            while not (plan := await again.admin.plan(request)).recipients[0].failed_before:
                await asyncio.sleep(0.05)
        [warning] = plan.warnings
        assert re.fullmatch(r"ship failed last at \S+Z; its program was started since, and may be mended\.", warning)
        assert not plan.recipients[0].failing


def test_a_plan_warns_of_another_address_and_of_nobody() -> None:
    assert plan_of(Level(), changed=1).warnings == ["1 of 2 were first delivered to another address than crm has now."]
    assert plan_of(Level(), changed=1, to="old").warnings == ["old is no longer configured: nobody would work these."]


def test_spans_are_told_in_their_unit() -> None:
    assert [human.show_span(s) for s in (0.2, 59, 60, 3600, 86_400, 172_800, 600_000)] == [
        "0.2 s", "59 s", "1 min", "1 h", "24 h", "2 days", "7 days",
    ]  # fmt: skip


def test_a_plan_says_what_the_receiver_sees() -> None:
    kept, fresh = plan_of(Level()).visible, plan_of(Level(), fresh_id=True).visible
    assert "the same webhook-id and Idempotency-Key as before" in kept[0]
    assert "--fresh-id" in kept[1]
    assert len(fresh) == 1
    assert "a new webhook-id" in fresh[0]


@pytest.mark.parametrize(
    ("ids", "filter"), [([], Filter()), ([DELIVERY] * 501, Filter()), ([DELIVERY], Filter(ids=()))]
)
def test_deliveries_are_named_one_by_one_within_bounds(ids: list[DeliveryId], filter: Filter) -> None:
    with pytest.raises(BadRequest):
        some_ids(ids, filter)


def test_a_delivery_that_is_named_twice_counts_once() -> None:
    assert some_ids([DELIVERY, DELIVERY], Filter()) == (DELIVERY,)
