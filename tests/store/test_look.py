"""Look: what is kept can be found again, newest first, and nothing else is found."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from oncehook.model import Filter, Outcome, Page, Rejection, new_id
from oncehook.store.base import KEPT_REJECTIONS, Store
from tests.store.conftest import Ground
from tests.store.making import DAY, event_of, intake, item, keep, record

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


async def test_nothing_is_found_where_nothing_is(store: Store) -> None:
    unknown = new_id()
    assert await store.get_event(unknown) is None
    for question in (Filter(), Filter(source="orders"), Filter(source="nobody")):
        assert await store.find_events(question) == Page([], None)
    assert await store.arrivals_of(unknown) == []
    assert await store.batch_body(unknown) is None
    assert await store.recent_rejections() == []
    figures = await store.figures()
    assert (figures.by_source, figures.by_destination) == ({}, {})


async def test_events_come_newest_first_in_pages(store: Store) -> None:
    verdicts = await record(store, *[intake(item(f"k{n}")) for n in range(25)])
    ids = [verdict.event_id for verdict in reversed(verdicts)]
    assert [event.id for event in (await store.find_events(Filter())).items] == ids
    seen: list[bytes] = []
    page = await store.find_events(Filter(), limit=10)
    while page.next is not None:
        seen += [event.id for event in page.items]
        page = await store.find_events(Filter(), before=page.next, limit=10)
    seen += [event.id for event in page.items]
    assert seen == ids


async def test_events_by_source_and_subject(store: Store) -> None:
    for number in range(6):
        source, source_id = ("orders", 1) if number % 2 else ("payments", 2)
        await keep(store, item(f"k{number}", source=source, subject=f"s{number % 3}"), source_id=source_id)
    await keep(store, item("none"))

    async def found(before: bytes | None = None, **question: str) -> list[str | None]:
        page = await store.find_events(Filter(**question), before=before)  # type: ignore[arg-type]
        return [event.key for event in page.items]

    assert await found(source="orders") == ["none", "k5", "k3", "k1"]
    assert await found(source="payments") == ["k4", "k2", "k0"]
    assert await found(subject="s1") == ["k4", "k1"]
    assert await found(source="orders", subject="s1") == ["k1"]
    assert await found(source="orders", subject="nothing") == []
    newest = (await store.find_events(Filter(source="orders"), limit=2)).items[-1]
    assert newest.key == "k5"
    assert await found(source="orders", before=newest.id) == ["k3", "k1"]
    assert await found(subject="s1", before=newest.id) == ["k4", "k1"]


async def test_a_listed_event_says_the_same_as_a_single_one(store: Store) -> None:
    await record(store, intake(item("a", subject="s"), raw=b"raw", head=b"POST /split"))
    await keep(store, item("a", subject="s"))
    [listed] = (await store.find_events(Filter())).items
    event = await store.get_event(listed.id)
    assert event is not None
    assert (event.key, event.subject, event.request_head, event.copies) == ("a", "s", b"POST /split", 2)
    assert (listed.key, listed.subject, listed.size, listed.copies) == ("a", "s", len(event.body), 2)


async def test_later_arrivals_come_oldest_first(ground: Ground, store: Store) -> None:
    [first] = await keep(store, item("k", body=b"a"))
    later = [intake(item("k", body=body), head=body) for body in (b"a", b"b", b"a", b"c")]
    for one in later:
        ground.forward(1)
        await record(store, one)
    arrivals = await store.arrivals_of(first.event_id)
    assert [arrival.id for arrival in arrivals] == [one.arrival_id for one in later]
    assert [arrival.at for arrival in arrivals] == sorted(arrival.at for arrival in arrivals)
    assert [arrival.request_head for arrival in arrivals] == [b"a", b"b", b"a", b"c"]
    assert {arrival.event_id for arrival in arrivals} == {first.event_id}
    assert [arrival.outcome for arrival in arrivals] == [
        Outcome.duplicate,
        Outcome.conflict,
        Outcome.duplicate,
        Outcome.conflict,
    ]


def rejection(number: int, source: str = "orders") -> Rejection:
    return Rejection(
        source, LONG_AGO + timedelta(seconds=number), "signature_invalid", f"reason {number}", "10.0.0.1", 9
    )


async def test_rejections_come_newest_first(store: Store) -> None:
    sent = [rejection(number) for number in range(10)]
    await store.record_rejections(sent[:4], {})
    await store.record_rejections(sent[4:], {})
    found = await store.recent_rejections()
    assert [replace(one, n=0) for one in found] == sent[::-1]
    assert [one.id for one in await store.recent_rejections(3)] == [one.id for one in sent[:-4:-1]]
    older = await store.recent_rejections(4, before=found[2].n)
    assert [one.id for one in older] == [one.id for one in found[3:7]]
    assert await store.recent_rejections(before=found[-1].n) == []


async def test_the_ring_of_rejections_is_bounded(ground: Ground, store: Store) -> None:
    sent = [rejection(number) for number in range(KEPT_REJECTIONS + 5)]
    await store.record_rejections(sent[:700], {})
    await store.record_rejections(sent[700:], {})
    assert ground.sql("SELECT count(*) FROM rejections") == [(KEPT_REJECTIONS,)]
    kept = await store.recent_rejections(KEPT_REJECTIONS)
    assert [one.id for one in kept] == [one.id for one in sent[: -KEPT_REJECTIONS - 1 : -1]]
    more = [rejection(number) for number in range(KEPT_REJECTIONS * 2 + 7)]
    await store.record_rejections(more, {})
    assert [one.id for one in await store.recent_rejections(5)] == [one.id for one in more[:-6:-1]]


async def test_the_bytes_of_a_rejection_are_kept_for_a_week(ground: Ground, store: Store) -> None:
    event = await event_of(store, *await keep(store, item("now")))
    kept, bare = rejection(1), rejection(2)
    kept.head, kept.body, kept.at = b"POST /in/orders", b"\x00{", event.received_at
    await store.record_rejections([kept, bare], {})
    shown = await store.recent_rejections()
    assert [(one.head, one.body) for one in shown] == [(None, None), (b"POST /in/orders", b"\x00{")]
    assert not (await store.prune({}, otherwise=30 * DAY)).others
    assert (await store.recent_rejections())[1].head == b"POST /in/orders"
    ground.forward(8 * DAY)
    assert (await store.prune({}, otherwise=30 * DAY)).others == 1
    assert [(one.head, one.body) for one in await store.recent_rejections()] == [(None, None)] * 2
    assert not (await store.prune({}, otherwise=30 * DAY)).others


async def test_what_a_stranger_wrote_does_not_spoil_the_ring(store: Store) -> None:
    await store.record_rejections([rejection(1), rejection(2, source="a\x00b"), rejection(3)], {})
    assert [one.reason for one in await store.recent_rejections()] == ["reason 3", "reason 2", "reason 1"]


async def test_rejections_are_counted(store: Store) -> None:
    await store.record_rejections([], {(1, 0, "rejected"): 5, (2, 0, "rejected"): 1})
    await store.record_rejections([rejection(1)], {(1, 0, "rejected"): 2})
    figures = await store.figures()
    assert figures.by_source == {"orders": {"rejected": 7}, "payments": {"rejected": 1}}


async def test_figures_since_a_moment(ground: Ground, store: Store) -> None:
    await keep(store, item("a"), item("a"))
    ground.forward(3600)
    [verdict] = await keep(store, item("b"))
    event = await store.get_event(verdict.event_id)
    assert event is not None
    recent = await store.figures(event.received_at - timedelta(minutes=30))
    assert recent.by_source == {"orders": {"received": 1, "accepted": 1}}
    everything = await store.figures(LONG_AGO)
    assert everything.by_source == {"orders": {"received": 3, "accepted": 2, "duplicate": 1}}
    assert (await store.figures(event.received_at + timedelta(minutes=30))).by_source == {}
