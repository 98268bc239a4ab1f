"""T1: any order of arrivals, leases, settlements, crashes, replays and prunings, held against a model in plain Python.

The model says what each verb must answer and how every delivery must stand; Hypothesis looks for a way to prove one of
the two wrong. The same rules run on both engines. Time stands still but for steps that never fall on the end of a lease
or a wait, so what really passes meanwhile decides nothing.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from oncehook.errors import NotReplayable, NotWaiting, ReplayTooSoon
from oncehook.model import (
    DEATHS,
    DeliveryStatus,
    Evidence,
    Filter,
    Lease,
    LeaseRequest,
    Outcome,
    Priority,
    Settle,
    Settlement,
    StoredDelivery,
    new_id,
)
from oncehook.store.base import Store
from tests.effort import effort
from tests.store.conftest import Ground, PostgresGround, SqliteGround, failed_checks
from tests.store.making import enrolled, intake, item, record, replay
from tests.store.model import KEEP, LEASE, OPTIONS, PAUSE, WAIT, Line, Model, Work

T = TypeVar("T")
STEP = 35.0
NAMES = {1: "crm", 2: "mail"}
SEEDS = range(effort("RULE_SEEDS", 4))
BOUNDS = settings(
    max_examples=effort("RULE_EXAMPLES", 8),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- the rules ---------------------------------------------------------------------------------

SUBJECTS = st.sampled_from(["a", "b", None])
DESTINATIONS = st.sampled_from([1, 2])
FREQUENT_ENDS = [Settle.done, Settle.done, Settle.retry, Settle.dead, Settle.dead, Settle.release]
ENDS = st.sampled_from(FREQUENT_ENDS)
ANY = st.integers(0, 1_000_000)


class Rules(RuleBasedStateMachine):
    """Each rule asks the store and the model, and compares."""

    house: House

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.leases: list[Lease] = []
        self.firsts: dict[Line, list[int]] = {}
        self.highest_fence = 0
        self.keys = 0
        self.first_events: dict[int, bytes] = {}

    @property
    def store(self) -> Store:
        return self.house.store

    def run(self, verb: Coroutine[Any, Any, T]) -> T:
        return self.house.runner.run(verb)

    @initialize(subjects=st.lists(SUBJECTS, min_size=2, max_size=5))
    def begin(self, subjects: list[str | None]) -> None:
        self.house.begin()
        for subject in subjects:
            self.keep(subject, (1, 2))

    def teardown(self) -> None:
        self.house.end()

    # arrivals

    @rule(subject=SUBJECTS, to=st.sampled_from([(1,), (2,), (1, 2)]))
    def receive(self, subject: str | None, to: tuple[int, ...]) -> None:
        self.keep(subject, to)

    def keep(self, subject: str | None, to: tuple[int, ...]) -> None:
        number = self.keys
        self.keys += 1
        to_all = [(NAMES[one], one) for one in to]
        sent = item(f"k{number}", subject=subject, to=to_all, event_id=self.house.event_id())
        for planned in sent.deliveries:
            planned.options = int(OPTIONS[planned.destination_id])
        [verdict] = self.run(record(self.store, intake(sent)))
        assert (verdict.outcome, verdict.event_id) == (Outcome.accepted, sent.event_id)
        self.model.events[sent.event_id] = (self.model.now, number)
        self.first_events[number] = sent.event_id
        for planned in sent.deliveries:
            line = (planned.destination_id, planned.id if subject is None else subject)
            self.model.arrive(Work(planned.id, sent.event_id, line, planned.destination_id, number))

    @precondition(lambda self: self.keys)
    @rule(pick=ANY, other=st.booleans())
    def receive_again(self, pick: int, other: bool) -> None:
        number = pick % self.keys
        sent = item(f"k{number}", body=b"other" if other else b'{"id": 1}', to=[("crm", 1)])
        [verdict] = self.run(record(self.store, intake(sent)))
        assert verdict.outcome is (Outcome.conflict if other else Outcome.duplicate)
        assert verdict.event_id == self.first_events[number]
        self.house.seen[verdict.outcome.value] += 1

    # work

    @rule(destination=DESTINATIONS, priority=st.sampled_from([Priority.live, Priority.live, Priority.quarantined]))
    def lease(self, destination: int, priority: Priority) -> None:
        self.take_all(destination, priority)

    def take_all(self, destination: int, priority: Priority) -> None:
        lost = self.model.lost_leases()
        expected = self.model.lease(destination, priority)
        self.house.seen["taken over"] += lost - self.model.lost_leases()
        given = self.run(self.store.lease([LeaseRequest(destination, 50, LEASE, priority)]))
        assert {lease.delivery.id for lease in given} == expected
        assert len({lease.queue_key for lease in given}) == len({lease.fence for lease in given}) == len(given)
        fences = [lease.fence for lease in given]
        assert all(fence > self.highest_fence for fence in fences)
        self.highest_fence = max([self.highest_fence, *fences])
        for lease in given:
            self.take(lease)

    def take(self, lease: Lease) -> None:
        work = self.model.works[lease.delivery.id]
        if lease.delivery.run == 1 and work.number not in self.firsts.setdefault(work.line, []):
            self.firsts[work.line].append(work.number)
        self.model.take(lease)
        head = self.model.heads[work.line]
        assert (lease.delivery.run, lease.delivery.attempt, lease.deaths) == (work.run, work.attempts, head.deaths)
        assert lease.event.id == work.event
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=ANY)
    def renew(self, pick: int) -> None:
        lease = self.leases[-1 - pick % min(len(self.leases), 8)]
        kept = self.run(asyncio.to_thread(self.store.renew, [lease]))
        assert kept == ({lease.fence} if self.model.holds(lease) else set())
        if kept:
            self.model.heads[self.model.works[lease.delivery.id].line].due_at = self.model.now + LEASE

    @rule(destination=DESTINATIONS)
    def work_off(self, destination: int) -> None:
        self.take_all(destination, Priority.live)
        self.settle([lease for lease in self.leases if self.model.holds(lease)], Settle.done)

    @precondition(lambda self: self.leases)
    @rule(what=ENDS)
    def settle_all(self, what: Settle) -> None:
        self.settle([lease for lease in self.leases if self.model.holds(lease)], what)

    @precondition(lambda self: self.leases)
    @rule(picks=st.lists(ANY, min_size=1, max_size=4), what=ENDS)
    def settle_some(self, picks: list[int], what: Settle) -> None:
        """Late ones too: whatever was leased once may be settled at any time, and twice."""
        chosen = {pick % min(len(self.leases), 8) for pick in picks}
        self.settle([self.leases[-1 - one] for one in chosen], what)

    @precondition(lambda self: self.zombies())
    @rule(pick=ANY, what=ENDS)
    def settle_late(self, pick: int, what: Settle) -> None:
        """Of a delivery that somebody else works on by now."""
        zombies = self.zombies()
        self.settle([zombies[pick % len(zombies)]], what)

    def zombies(self) -> list[Lease]:
        return [lease for lease in self.leases if self.model.is_overtaken(lease)]

    def settle(self, leases: list[Lease], what: Settle) -> None:
        settlements = [self.end(lease, what) for lease in leases]
        held = [one for one in settlements if self.model.holds(one.lease)]
        assert self.run(self.store.settle(settlements)).ours == {one.lease.fence for one in held}
        for one in held:
            self.model.settle(one.lease, one.what)
            self.house.seen["poisoned"] += one.lease.deaths >= DEATHS
        self.house.seen["refused"] += len(settlements) - len(held)

    def end(self, lease: Lease, what: Settle) -> Settlement:
        if lease.deaths >= DEATHS:
            return Settlement(lease, Settle.dead, evidence=Evidence(error="crash"))
        return Settlement(lease, what, WAIT)

    @rule()
    def crash(self) -> None:
        """The process goes and comes back. On SQLite nobody else can hold a lease, so all of them end with it."""
        self.house.reopen()
        if self.house.engine == "sqlite":
            self.model.crash_all()

    @rule(destination=DESTINATIONS, alone=st.booleans())
    def lapse(self, destination: int, alone: bool) -> None:
        """What is leased runs out, is found out, and is perhaps run alone."""
        self.take_all(destination, Priority.live)
        self.forward(3)
        self.take_all(destination, Priority.live)
        if alone:
            self.take_all(destination, Priority.quarantined)

    @rule(steps=st.sampled_from([1, 3, 3, 10]))
    def let_time_pass(self, steps: int) -> None:
        self.forward(steps)

    def forward(self, steps: int) -> None:
        self.house.forward(STEP * steps)
        self.model.now += STEP * steps

    # acts

    @precondition(lambda self: self.model.works)
    @rule(pick=ANY, force=st.booleans())
    def replay(self, pick: int, force: bool) -> None:
        work = self.pick(pick, "dead", "discarded", "done")
        allowed = work.status in ("dead", "discarded") or (force and work.status == "done")
        soon = work.replayed_at is not None and self.model.now < work.replayed_at + PAUSE
        try:
            self.run(replay(self.store, work.id, force=force))
        except NotReplayable:
            assert not allowed
        except ReplayTooSoon:
            assert soon
        else:
            assert allowed
            assert not soon
            self.model.replay(work)
            self.house.seen["replayed"] += 1

    @precondition(lambda self: self.model.works)
    @rule(pick=ANY)
    def discard(self, pick: int) -> None:
        work = self.pick(pick, "dead")
        count = self.run(self.store.discard(Filter(ids=[work.id]), "ann", "no use"))
        assert count == (work.status == "dead")
        if count:
            self.model.discard(work)

    @precondition(lambda self: self.model.works)
    @rule(pick=ANY)
    def retry_now(self, pick: int) -> None:
        work = self.pick(pick)
        head = self.model.heads.get(work.line)
        waits = head is not None and head.queue[0] == work.id and not head.leased and not head.held
        try:
            self.run(self.store.retry_now(work.id, "ann"))
        except NotWaiting:
            assert not waits or (head is not None and head.due_at <= self.model.now)
        else:
            assert waits
            assert head is not None
            head.due_at = min(head.due_at, self.model.now)

    @rule(destination=DESTINATIONS)
    def pause_and_resume(self, destination: int) -> None:
        self.run(self.store.pause(destination, "ann", "why"))
        assert (
            self.run(self.store.lease([LeaseRequest(destination, 50, LEASE, priority) for priority in Priority])) == []
        )
        self.run(self.store.resume(destination, "ann"))

    @rule(later=st.booleans())
    def prune(self, later: bool) -> None:
        self.forward(10 * later)
        expected, gone = self.model.prune(), 0
        while pruned := self.run(self.store.prune({}, KEEP, 3)):
            gone += pruned.events
        assert gone == expected
        self.house.seen["pruned"] += gone

    def pick(self, number: int, *statuses: str) -> Work:
        """Any delivery; most often one of these statuses."""
        works = list(self.model.works.values())
        fitting = [work for work in works if work.status in statuses]
        chosen = fitting if fitting and number % 4 else works
        return chosen[number % len(chosen)]

    # what must hold after each

    @invariant()
    def every_delivery_stands_as_it_should(self) -> None:
        """So every accepted event has its deliveries, none has too many attempts, and one per subject is leased."""
        page = self.run(self.store.find_deliveries(Filter(), limit=500))
        assert {one.id: _shown(one) for one in page.items} == {
            work.id: self.model.shown(work) for work in self.model.works.values()
        }

    @invariant()
    def first_attempts_are_in_order_of_commit(self) -> None:
        for numbers in self.firsts.values():
            assert numbers == sorted(numbers)

    @invariant()
    def the_books_balance(self) -> None:
        assert failed_checks(self.run(self.store.check())) == []

    @invariant()
    def every_attempt_is_written_down(self) -> None:
        written = dict(
            self.house.ground.sql(
                "SELECT delivery_id, count(*) FROM attempts WHERE delivery_id IN (SELECT id FROM deliveries)"
                " GROUP BY delivery_id"
            )
        )
        rows = {_bytes(one): count for one, count in written.items()}
        assert rows == {work.id: work.rows for work in self.model.works.values() if work.rows}

    def all_holds(self) -> None:
        """The same, for walks that go without Hypothesis."""
        self.every_delivery_stands_as_it_should()
        self.first_attempts_are_in_order_of_commit()
        self.the_books_balance()
        self.every_attempt_is_written_down()


def _shown(one: StoredDelivery) -> tuple[str, int, int, bytes | None]:
    if one.status is DeliveryStatus.leased:
        assert one.due_at is not None
    return one.status.value, one.run, one.attempts, one.blocked_by


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(value.bytes)


# -- where they run ----------------------------------------------------------------------------


class House:
    """A loop, a place and the store on it: a new file for each example, or the same schema emptied."""

    ground: Ground
    store: Store

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.runner = asyncio.Runner()
        self.seen: Counter[str] = Counter()
        """What came to pass: a run that never got there proves nothing about it."""
        self._ahead = 0.0
        if engine == "postgres":
            self.ground = PostgresGround()
            self.ground.stand_still()
            self.runner.run(self._open())

    def begin(self) -> None:
        if self.engine == "sqlite":
            self._folder = tempfile.TemporaryDirectory()
            self.ground = SqliteGround(Path(self._folder.name))
            self.ground.stand_still()
            self.runner.run(self._open())
            return
        for table in (
            *("keys", "events", "batches", "arrivals", "deliveries", "heads", "counters"),
            *("attempts", "replays", "replay_items", "destination_state", "ranks"),
        ):
            self.ground.sql(f"DELETE FROM {table}")

    def forward(self, seconds: float) -> None:
        self.ground.forward(seconds)
        self._ahead += seconds

    def event_id(self) -> bytes:
        """An id of now by the store's clock, which on PostgreSQL is moved alone: ids tell the time too."""
        made = new_id()
        ahead = self._ahead if self.engine == "postgres" else 0.0
        return (int.from_bytes(made[:6]) + int(ahead * 1000)).to_bytes(6) + made[6:]

    def end(self) -> None:
        if self.engine == "sqlite":
            self.runner.run(self.store.close())
            self.ground.remove()
            self._folder.cleanup()

    def reopen(self) -> None:
        self.runner.run(self.store.close())
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.store = self.ground.make()
        await self.store.open()
        await enrolled(self.store)

    def close(self) -> None:
        if self.engine == "postgres":
            self.runner.run(self.store.close())
            self.ground.remove()
        self.runner.close()


@pytest.fixture(params=["sqlite", "postgres"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    Rules.house = made = House(request.param)
    yield made
    made.close()


def test_no_order_of_events_breaks_a_promise(house: House) -> None:
    """T1"""
    run_state_machine_as_test(Rules, settings=BOUNDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_long_walks_by_chance(house: House, seed: int) -> None:
    """T1: Hypothesis repeats itself within a run, so that it can shrink; dice mix all rules evenly, and see more."""
    dice = random.Random(seed)
    rules = Rules()
    rules.begin(["a", "b", None])
    try:
        for _ in range(150 if house.engine == "sqlite" else 100):
            dice.choice(moves(rules, dice))()
            rules.all_holds()
    finally:
        rules.teardown()


def moves(rules: Rules, dice: random.Random) -> list[Callable[[], None]]:
    """What can be done next, each with arguments of its own."""
    pick, what, destination = dice.randrange(1000), dice.choice(FREQUENT_ENDS), dice.choice([1, 2])
    of_works: list[Callable[[], None]] = [
        *[lambda: rules.replay(pick, dice.random() < 0.5)] * 2,
        lambda: rules.discard(pick),
        lambda: rules.retry_now(pick),
    ]
    of_leases: list[Callable[[], None]] = [
        lambda: rules.renew(pick),
        *[lambda: rules.settle_all(what)] * 2,
        lambda: rules.settle_some([pick, pick // 8], what),
    ]
    return [
        *[lambda: rules.receive(dice.choice(["a", "b", None]), dice.choice([(1,), (2,), (1, 2)]))] * 3,
        lambda: rules.receive_again(pick, dice.random() < 0.5),
        *[lambda: rules.lease(destination, dice.choice([Priority.live, Priority.live, Priority.quarantined]))] * 3,
        lambda: rules.work_off(destination),
        lambda: rules.lapse(destination, dice.random() < 0.5),
        lambda: rules.let_time_pass(dice.choice([1, 3, 10])),
        rules.crash,
        lambda: rules.pause_and_resume(destination),
        lambda: rules.prune(dice.random() < 0.5),
        *(of_works if rules.model.works else []),
        *(of_leases if rules.leases else []),
        *([lambda: rules.settle_late(pick, what)] * 3 if rules.zombies() else []),
    ]


def test_the_rules_get_to_the_rare_places(house: House) -> None:
    """A walk of the same rules that is sure to see what chance may miss: else a green run would prove nothing."""
    rules = Rules()
    rules.begin(["a", "a", None])
    walk: list[Callable[[], None]] = [
        lambda: rules.receive_again(0, False),
        lambda: rules.receive_again(0, True),
        lambda: rules.lease(1, Priority.live),
        rules.crash,
        lambda: rules.let_time_pass(3),
        lambda: rules.lease(1, Priority.live),
        *[lambda: rules.lease(1, Priority.quarantined), lambda: rules.let_time_pass(3)] * DEATHS,
        lambda: rules.lease(1, Priority.quarantined),
        lambda: rules.settle_some([4, 5, 6, 7], Settle.done),
        lambda: rules.settle_all(Settle.done),
        lambda: rules.discard(1),
        lambda: rules.replay(2, False),
        lambda: rules.retry_now(2),
        lambda: rules.work_off(1),
        lambda: rules.work_off(1),
        lambda: rules.lease(2, Priority.live),
        lambda: rules.settle_all(Settle.dead),
        *[lambda: rules.discard(1), lambda: rules.work_off(2)] * 3,
        lambda: rules.prune(True),
        lambda: rules.receive_again(0, False),
    ]
    try:
        for step in walk:
            step()
            rules.all_holds()
    finally:
        rules.teardown()
    assert {*house.seen} >= {"duplicate", "conflict", "taken over", "refused", "replayed", "pruned", "poisoned"}
    assert min(house.seen.values()) > 0, house.seen
