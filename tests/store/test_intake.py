"""Intake: an arrival is kept once, whole, in one commit, and every copy of it gets the same answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oncehook.errors import Overloaded, StoreUnavailable
from oncehook.model import Filter, Mark, Outcome, new_id, subject_key
from oncehook.store.base import KEPT_ARRIVALS, Store, StoreObserver
from tests.store.conftest import Ground
from tests.store.making import DAY, enrolled, event_of, intake, item, keep, outcomes, record, record_all

ACCEPTED, DUPLICATE, CONFLICT = Outcome.accepted, Outcome.duplicate, Outcome.conflict
CRM, MAIL = ("crm", 1), ("mail", 2)


# -- accepted, duplicate, conflict -------------------------------------------------------------


async def test_an_arrival_is_kept_as_it_came(store: Store) -> None:
    body, head = bytes(range(256)), b"POST /in/orders?a=1\r\nx-a: 1\r\nx-a: \xff\x002"
    happened = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    one = item(
        "k1",
        body=body,
        subject="42",
        type_="order.paid",
        event_at=happened,
        rank=3,
        rank_scope="m1",
        marks=Mark.unparsed | Mark.emitted,
    )
    [verdict] = await keep(store, one, head=head)
    assert (verdict.outcome, verdict.event_id) == (ACCEPTED, one.event_id)
    event = await event_of(store, verdict)
    assert (event.id, event.source, event.type, event.key, event.subject) == (
        one.event_id,
        "orders",
        "order.paid",
        "k1",
        "42",
    )
    assert (event.request_head, event.body, event.batch_id, event.copies) == (head, body, None, 1)
    assert (event.event_at, event.rank, event.rank_scope) == (happened, 3, "m1")
    assert event.marks == Mark.unparsed | Mark.emitted
    assert event.received_at.tzinfo is not None


async def test_a_large_body_is_kept_whole(store: Store) -> None:
    body = os.urandom(3 << 20)
    [verdict] = await keep(store, item("big", body=body))
    assert (await event_of(store, verdict)).body == body


async def test_the_same_key_and_body_is_a_duplicate_of_the_first(store: Store) -> None:
    first, second, third = await keep(store, item("k"), item("k"), item("k"))
    assert outcomes([first, second, third]) == [ACCEPTED, DUPLICATE, DUPLICATE]
    assert first.event_id == second.event_id == third.event_id
    assert (await event_of(store, first)).copies == 3


async def test_another_body_is_a_conflict_and_leaves_the_first_alone(store: Store) -> None:
    """R18"""
    first, second = await keep(store, item("k", body=b"one"), item("k", body=b"two", type_="other", subject="s"))
    assert (second.outcome, second.event_id) == (CONFLICT, first.event_id)
    event = await event_of(store, first)
    assert (event.body, event.type, event.subject, event.copies) == (b"one", "order.created", None, 2)
    [arrival] = await store.arrivals_of(first.event_id)
    assert (arrival.outcome, arrival.body) == (CONFLICT, b"two")


async def test_two_sources_may_use_the_same_key(store: Store) -> None:
    """R21"""
    [first] = await keep(store, item("k", source="orders"), source_id=1)
    [second] = await keep(store, item("k", source="payments"), source_id=2)
    assert outcomes([first, second]) == [ACCEPTED, ACCEPTED]


async def test_parts_of_a_key_do_not_run_together(store: Store) -> None:
    """R16"""
    assert outcomes(await keep(store, item(["a", "bc"]), item(["ab", "c"]), item(["abc"]))) == [ACCEPTED] * 3


async def test_without_key_nothing_is_a_duplicate(store: Store) -> None:
    verdicts = await keep(store, item(marks=Mark.unkeyed), item(marks=Mark.unkeyed))
    assert outcomes(verdicts) == [ACCEPTED, ACCEPTED]
    event = await event_of(store, verdicts[1])
    assert (event.key, event.marks, event.copies) == (None, Mark.unkeyed, 1)


@pytest.mark.parametrize("text", ["", "ключ-鍵-🔑", "x" * 500, "a'b\"c\\d%s$1{}"])
async def test_any_text_is_a_key(store: Store, text: str) -> None:
    first, second = await keep(store, item(text, subject=text, type_=text or "t"), item(text, subject=text))
    assert outcomes([first, second]) == [ACCEPTED, DUPLICATE]
    event = await event_of(store, first)
    assert (event.key, event.subject) == (text, text)


# -- races -------------------------------------------------------------------------------------


async def test_of_many_at_once_exactly_one_is_accepted(store: Store) -> None:
    """R11"""
    verdicts = await record(store, *[intake(item("k", to=[CRM])) for _ in range(300)])
    assert outcomes(verdicts).count(ACCEPTED) == 1
    assert outcomes(verdicts).count(DUPLICATE) == 299
    assert len({verdict.event_id for verdict in verdicts}) == 1
    assert (await event_of(store, verdicts[0])).copies == 300
    assert len((await store.find_events(Filter())).items) == 1


async def test_copies_inside_one_group_are_judged_like_any_other(store: Store) -> None:
    verdicts = await record(store, *[intake(item("k", body=body)) for body in (b"a", b"a", b"b", b"a", b"b")])
    assert outcomes(verdicts) == [ACCEPTED, DUPLICATE, CONFLICT, DUPLICATE, CONFLICT]
    kept = [(arrival.outcome, arrival.body) for arrival in await store.arrivals_of(verdicts[0].event_id)]
    assert kept == [(DUPLICATE, None), (CONFLICT, b"b"), (DUPLICATE, None), (CONFLICT, b"b")]


async def test_copies_inside_one_group_of_a_key_that_stood_before(store: Store) -> None:
    """The group's candidate is itself a conflict; its copies are compared with the first event, not with it."""
    [first] = await keep(store, item("k", body=b"a"))
    verdicts = await record(store, *[intake(item("k", body=body)) for body in (b"b", b"b", b"a", b"c")])
    assert outcomes(verdicts) == [CONFLICT, CONFLICT, DUPLICATE, CONFLICT]
    kept = [(arrival.outcome, arrival.body) for arrival in await store.arrivals_of(first.event_id)]
    assert kept == [(CONFLICT, b"b"), (CONFLICT, b"b"), (DUPLICATE, None), (CONFLICT, b"c")]
    assert (await event_of(store, first)).copies == 5


async def test_a_sender_that_has_gone_does_not_harm_the_others(store: Store) -> None:
    pending = [store.record(intake(item(f"k{n}"))) for n in range(20)]
    for gone in pending[::2]:
        gone.future.cancel()
    verdicts = await asyncio.gather(*[one.future for one in pending[1::2]])
    assert {verdict.outcome for [verdict] in verdicts} == {ACCEPTED}


async def test_an_answer_that_fails_leaves_the_others_of_its_group_theirs(store: Store) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    pending = [store.record(intake(item(f"k{n}"))) for n in range(3)]
    answered: list[Outcome] = []
    for one in pending:
        one.call_back(lambda one=one: answered.append(one.result()[0].outcome))
    broken = ValueError("the connection is gone")

    def fail() -> None:
        raise broken

    pending[1].call_back(fail)
    await asyncio.gather(*[one.future for one in pending])
    assert (answered, failures) == ([ACCEPTED, ACCEPTED], [broken])
    late = asyncio.Event()
    pending[0].call_back(late.set)
    await late.wait()


async def test_an_abandoned_intake_is_not_written(ground: Ground) -> None:
    store = ground.make()
    await store.open()
    await enrolled(store)
    # many before it, so that it is still in the line when its sender is told 503
    others = [store.record(intake(item(f"k{n}", body=b"x" * 10_000))) for n in range(600)]
    late = store.record(intake(item("late")))
    late.abandoned = True
    await asyncio.gather(*[one.future for one in others])
    await store.close()
    assert not late.future.done() or late.future.exception()
    again = ground.make()
    await again.open()
    assert outcomes(await keep(again, item("late"))) == [ACCEPTED]
    await again.close()


# -- later arrivals ----------------------------------------------------------------------------


async def test_the_latest_copies_are_kept_and_all_are_counted(store: Store) -> None:
    [first] = await keep(store, item("k", body=b"a"))
    later = [intake(item("k", body=b"a"), head=b"POST /%d" % n) for n in range(45)]
    for one in later:
        await record(store, one)
    kept = await store.arrivals_of(first.event_id)
    assert [arrival.id for arrival in kept] == [one.arrival_id for one in later[-KEPT_ARRIVALS:]]
    assert [arrival.request_head for arrival in kept] == [one.headers for one in later[-KEPT_ARRIVALS:]]
    assert {arrival.outcome for arrival in kept} == {DUPLICATE}
    assert {arrival.body for arrival in kept} == {None}
    assert (await event_of(store, first)).copies == 46


async def test_more_copies_in_one_group_than_are_kept(store: Store) -> None:
    """Two of them share a place in the ring, and one statement may touch a row only once: the later one stays."""
    [first] = await keep(store, item("k"))
    later = [intake(item("k")) for _ in range(KEPT_ARRIVALS + 8)]
    assert set(outcomes(await record(store, *later))) == {DUPLICATE}
    kept = await store.arrivals_of(first.event_id)
    assert [arrival.id for arrival in kept] == [one.arrival_id for one in later[-KEPT_ARRIVALS:]]


async def test_a_flood_of_copies_and_conflicts(store: Store) -> None:
    [first] = await keep(store, item("k", body=b"a"))
    flood = [intake(item("k", body=b"a" if n % 3 else b"b%d" % n)) for n in range(300)]
    assert outcomes(await record(store, *flood)).count(CONFLICT) == 100
    kept = [arrival.outcome for arrival in await store.arrivals_of(first.event_id)]
    assert 0 < kept.count(DUPLICATE) <= KEPT_ARRIVALS
    assert 0 < kept.count(CONFLICT) <= KEPT_ARRIVALS
    assert (await event_of(store, first)).copies == 301


async def test_a_storm_of_duplicates_does_not_push_conflicts_out(store: Store) -> None:
    [first, _] = await keep(store, item("k", body=b"a"), item("k", body=b"b"))
    await record(store, *[intake(item("k", body=b"a")) for _ in range(100)])
    kept = await store.arrivals_of(first.event_id)
    assert [arrival.body for arrival in kept if arrival.outcome is CONFLICT] == [b"b"]
    assert len(kept) == KEPT_ARRIVALS + 1


# -- split requests ----------------------------------------------------------------------------


async def test_the_events_of_a_split_request_share_its_head_and_raw_body(store: Store) -> None:
    whole = intake(item("a", body=b"1"), item("b", body=b"2"), head=b"POST /whole", raw=b"[1, 2]")
    first, second = await record(store, whole)
    for verdict, body in ((first, b"1"), (second, b"2")):
        event = await event_of(store, verdict)
        assert (event.body, event.request_head, event.batch_id) == (body, b"POST /whole", whole.arrival_id)
    assert await store.batch_body(whole.arrival_id) == (b"POST /whole", b"[1, 2]")


async def test_a_key_twice_in_one_request_is_a_duplicate_of_itself(store: Store) -> None:
    whole = intake(item("a", body=b"1"), item("b", body=b"2"), item("a", body=b"1"), item("b", body=b"3"), raw=b"[]")
    verdicts = await record(store, whole)
    assert outcomes(verdicts) == [ACCEPTED, ACCEPTED, DUPLICATE, CONFLICT]
    assert verdicts[2].event_id == verdicts[0].event_id
    assert [a.body for a in await store.arrivals_of(verdicts[3].event_id)] == [b"3"]


async def test_a_split_request_that_comes_again(store: Store) -> None:
    await record(store, intake(item("a", body=b"1"), item("b", body=b"2"), raw=b"[1, 2]"))
    again = intake(item("a", body=b"1"), item("b", body=b"x"), item("c", body=b"3"), head=b"POST /again", raw=b"again")
    verdicts = await record(store, again)
    assert outcomes(verdicts) == [DUPLICATE, CONFLICT, ACCEPTED]
    [copy] = await store.arrivals_of(verdicts[0].event_id)
    assert copy.id == again.items[0].event_id  # one of its own: two parts of a request may be copies of one event
    assert (copy.batch_id, copy.request_head, copy.body) == (again.arrival_id, b"POST /again", None)
    [conflict] = await store.arrivals_of(verdicts[1].event_id)
    assert conflict.body == b"x"
    assert await store.batch_body(again.arrival_id) == (b"POST /again", b"again")


async def test_a_split_request_is_kept_whole_or_not_at_all(ground: Ground, store: Store) -> None:
    [taken] = await keep(store, item("taken"))
    bad = intake(item("a", to=[CRM]), item(event_id=taken.event_id), item("b", to=[CRM]), raw=b"raw")
    others = [intake(item(f"k{n}")) for n in range(10)]
    results = await record_all(store, [*others[:5], bad, *others[5:]])
    assert isinstance(results[5], StoreUnavailable)
    assert await store.batch_body(bad.arrival_id) is None
    assert ground.sql("SELECT count(*) FROM deliveries") == [(0,)]
    assert outcomes(await keep(store, item("a"), item("b"))) == [ACCEPTED, ACCEPTED]


async def test_an_empty_split_request_is_kept(store: Store) -> None:
    empty = intake(raw=b"[]")
    assert await record(store, empty) == []
    assert await store.batch_body(empty.arrival_id) is not None


# -- failing rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 7, 19])
async def test_a_row_that_the_database_refuses_fails_alone(store: Store, position: int) -> None:
    [taken] = await keep(store, item("taken"))
    intakes = [intake(item(f"k{n}", to=[CRM])) for n in range(20)]
    intakes[position] = intake(item(event_id=taken.event_id))
    results = await record_all(store, intakes)
    assert isinstance(results.pop(position), StoreUnavailable)
    assert [outcomes(verdicts) for verdicts in results if isinstance(verdicts, list)] == [[ACCEPTED]] * 19


async def test_text_that_is_no_text_fails_alone(store: Store) -> None:
    """Half a surrogate pair is legal in JSON escapes and cannot be stored by any database."""
    intakes = [intake(item(f"k{n}")) for n in range(10)]
    bad = item("fine")
    bad.subject = "\ud800"
    results = await record_all(store, [*intakes, intake(bad)])
    assert isinstance(results.pop(), StoreUnavailable)
    assert [outcomes(verdicts) for verdicts in results if isinstance(verdicts, list)] == [[ACCEPTED]] * 10
    assert outcomes(await keep(store, item("fine"))) == [ACCEPTED]


async def test_too_much_waits(ground: Ground) -> None:
    """R57"""
    store = ground.make(max_waiting=0)
    await store.open()
    with pytest.raises(Overloaded):
        store.record(intake(item("k")))
    await store.close()


async def test_receivers_divide_what_may_wait(ground: Ground, owner: Store | None) -> None:
    """R57: over all of them as much may wait as in one process. The owner of a file writes for all."""
    observer = StoreObserver()
    observer.receiver_count = 2
    store = ground.make(max_waiting=10)
    await store.open(observer)
    await enrolled(store)
    most = 10 if getattr(store, "owns", False) else 5
    taken = [store.record(intake(item(f"k{n}"))) for n in range(most)]
    with pytest.raises(Overloaded):
        store.record(intake(item("k")))
    await asyncio.gather(*(pending.future for pending in taken))
    await store.close()


# -- the window of a key -----------------------------------------------------------------------


async def test_a_key_is_remembered_to_the_end_of_its_window(ground: Ground, store: Store) -> None:
    """R19"""
    [first] = await keep(store, item("k", keep=30 * DAY))
    ground.forward(30 * DAY - 60)
    [second] = await keep(store, item("k", keep=30 * DAY))
    assert (second.outcome, second.event_id) == (DUPLICATE, first.event_id)


async def test_a_key_past_its_window_is_taken_over(ground: Ground, store: Store) -> None:
    old = item("k", body=b"old", keep=60)
    [first, _] = await keep(store, old, item("k", body=b"old"))
    ground.forward(61)
    second, third, fourth = await record(store, *[intake(item("k", body=body)) for body in (b"new", b"new", b"old")])
    assert outcomes([second, third, fourth]) == [ACCEPTED, DUPLICATE, CONFLICT]
    assert second.event_id not in (first.event_id, None)
    assert third.event_id == fourth.event_id == second.event_id
    assert (await event_of(store, second)).copies == 3
    assert (await event_of(store, first)).body == b"old"
    assert [a.outcome for a in await store.arrivals_of(first.event_id)] == [DUPLICATE]


async def test_a_duplicate_does_not_prolong_the_window(ground: Ground, store: Store) -> None:
    await keep(store, item("k", keep=600))
    ground.forward(500)
    assert outcomes(await keep(store, item("k", keep=600))) == [DUPLICATE]
    ground.forward(200)
    assert outcomes(await keep(store, item("k", keep=600))) == [ACCEPTED]


async def test_keys_outlive_their_events(ground: Ground, store: Store) -> None:
    """R20"""
    [first] = await keep(store, item("k"))
    ground.damage("DELETE FROM events")
    assert await store.get_event(first.event_id) is None
    [second] = await keep(store, item("k"))
    assert (second.outcome, second.event_id) == (DUPLICATE, first.event_id)


# -- the work ----------------------------------------------------------------------------------


async def test_an_event_makes_its_deliveries_and_heads(ground: Ground, store: Store) -> None:
    [verdict] = await keep(store, item("k", subject="42", to=[CRM, MAIL]))
    deliveries = ground.sql("SELECT destination_id, subject_key, status, run, attempts FROM deliveries ORDER BY 1")
    assert [(row[0], as_bytes(row[1]), *row[2:]) for row in deliveries] == [
        (1, subject_key("crm", "orders", "42"), "pending", 1, 0),
        (2, subject_key("mail", "orders", "42"), "pending", 1, 0),
    ]
    heads = ground.sql("SELECT destination_id, event_id FROM heads ORDER BY 1")
    assert [(row[0], as_bytes(row[1])) for row in heads] == [(1, verdict.event_id), (2, verdict.event_id)]
    assert (await store.figures()).by_destination == {"crm": {"pending": 1}, "mail": {"pending": 1}}


async def test_a_copy_makes_no_deliveries(ground: Ground, store: Store) -> None:
    await keep(store, item("k", body=b"a", to=[CRM]), item("k", body=b"a", to=[CRM]), item("k", body=b"b", to=[CRM]))
    await record(store, *[intake(item("k2", to=[CRM])) for _ in range(5)])
    assert ground.sql("SELECT count(*) FROM deliveries") == [(2,)]
    assert ground.sql("SELECT count(*) FROM heads") == [(2,)]


async def test_deliveries_of_a_subject_line_up_in_order_of_arrival(ground: Ground, store: Store) -> None:
    """R42: in one group and over several; keyed and unkeyed alike."""
    verdicts = []
    for group in range(4):
        # keys count down, so that their order is not the order of arrival
        items = [item(f"k{99 - group * 20 - n}" if n % 3 else None, subject="s", to=[CRM]) for n in range(20)]
        verdicts += await record(store, *[intake(one) for one in items])
    rows = ground.sql("SELECT event_id, behind FROM deliveries ORDER BY seq")
    assert [as_bytes(row[0]) for row in rows] == [verdict.event_id for verdict in verdicts]
    assert [bool(row[1]) for row in rows] == [False] + [True] * 79
    [(head, seq)] = ground.sql("SELECT event_id, seq FROM heads")
    assert as_bytes(head) == verdicts[0].event_id
    assert ground.sql("SELECT min(seq) FROM deliveries") == [(seq,)]


async def test_deliveries_without_subject_wait_for_nobody(ground: Ground, store: Store) -> None:
    await record(store, *[intake(item(f"k{n}", to=[CRM])) for n in range(10)])
    assert ground.sql("SELECT count(*) FROM heads WHERE subject_key = delivery_id") == [(10,)]


# -- counters ----------------------------------------------------------------------------------


async def test_every_item_is_counted_once(store: Store) -> None:
    await record(store, intake(item("a"), item("b"), item("a"), raw=b"raw"), intake(item()))
    await keep(store, item("a"), item("b", body=b"other"))
    [_] = await keep(store, item("a", source="payments"), source_id=2)
    assert (await store.figures()).by_source == {
        "orders": {"received": 6, "accepted": 3, "duplicate": 2, "conflict": 1},
        "payments": {"received": 1, "accepted": 1},
    }


async def test_whoever_watches_is_told_of_every_commit(ground: Ground) -> None:
    told: list[tuple[str, float]] = []
    store = ground.make()
    store.observer.note_commit = lambda operation, seconds: told.append((operation, seconds))
    await store.open()
    await enrolled(store)
    await keep(store, item("a"), item("b"))
    await store.close()
    commits = [seconds for operation, seconds in told if operation == "commit"]
    assert len(commits) >= 2
    assert min(commits) > 0


# -- ends --------------------------------------------------------------------------------------


async def test_close_finishes_what_was_taken_in(ground: Ground) -> None:
    """R56"""
    store = ground.make()
    await store.open()
    await enrolled(store)
    pending = [store.record(intake(item(f"k{n}"))) for n in range(300)]
    await store.close()
    await asyncio.sleep(0)
    assert {verdict.outcome for one in pending for verdict in one.future.result()} == {ACCEPTED}
    with pytest.raises(StoreUnavailable):
        store.record(intake(item("late")))
    assert ground.sql("SELECT count(*) FROM events") == [(300,)]


async def test_what_is_kept_is_still_there_after_reopening(ground: Ground) -> None:
    first = ground.make()
    await first.open()
    await enrolled(first)
    [verdict] = await keep(first, item("k"))
    await first.close()
    second = ground.make()
    await second.open()
    await enrolled(second)
    [again] = await keep(second, item("k"))
    assert (again.outcome, again.event_id) == (DUPLICATE, verdict.event_id)
    await second.close()


DYING = """
import asyncio, sys
from oncehook.store.{engine} import {store}
from tests.store.making import enrolled, intake, item

async def main():
    store = {store}(sys.argv[1])
    await store.open()
    await enrolled(store)
    await store.record(intake(item("k", event_id=bytes.fromhex(sys.argv[2])))).future
    print("answered")

asyncio.run(main())
"""


def die(ground: Ground, fault: str, event_id: bytes) -> None:
    """Record the key `k` in a process of its own that is killed at a named point."""
    names = {"sqlite": "SqliteStore", "postgres": "PostgresStore"}
    code = DYING.format(engine=ground.engine, store=names[ground.engine])
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, ground.address, event_id.hex()],
        env={**os.environ, "ONCEHOOK_FAULT": fault, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "answered" not in done.stdout


async def test_killed_before_commit_the_next_arrival_is_new_at_once(ground: Ground) -> None:
    """R12: no lock, no window to wait for."""
    die(ground, "before_intake:1", new_id())
    store = ground.make()
    await store.open()
    assert outcomes(await keep(store, item("k"))) == [ACCEPTED]
    await store.close()


async def test_killed_after_commit_the_retry_gets_the_same_event(ground: Ground) -> None:
    """R1, R5"""
    event_id = new_id()
    die(ground, "after_intake:1", event_id)
    store = ground.make()
    await store.open()
    [verdict] = await keep(store, item("k"))
    assert (verdict.outcome, verdict.event_id) == (DUPLICATE, event_id)
    assert len((await store.find_events(Filter())).items) == 1
    await store.close()


def as_bytes(value: object) -> bytes:
    """An id as either driver gives it."""
    return value if isinstance(value, bytes) else bytes.fromhex(str(value).replace("-", ""))
