"""What was accepted is done: handlers and HTTP destinations, on both engines, in one process."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from oncehook import Event, GiveUp, Inbox, RetryLater, clock
from oncehook.errors import ConfigError
from oncehook.model import Category, DeliveryStatus, EventId, Filter, StoredAttempt, StoredDelivery
from tests.acceptance.conftest import Engine
from tests.acceptance.sink import Request, Sink
from tests.torture.fleet import until as block_until
from tests.waiting import until

FAST = ["0.02s", "0.02s", "0.02s"]


@pytest.fixture
async def inbox(engine: Engine) -> AsyncIterator[Inbox]:
    made = Inbox(engine.url)
    yield made
    if made.store is not None and not made.draining:
        await made.store.close()


async def look(inbox: Inbox, event_id: str) -> tuple[StoredDelivery, list[StoredAttempt]]:
    """The one delivery of an event, and its attempts."""
    page = await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))
    (delivery,) = page.items
    return delivery, await inbox.store.attempts_of(delivery.id)


async def is_sound(inbox: Inbox) -> None:
    wrong = [check for check in await inbox.store.check() if not check.ok]
    assert not wrong, wrong


async def test_502_502_200_are_three_attempts_and_done(inbox: Inbox) -> None:
    async with Sink((502, 502, 200)).open() as sink:
        inbox.destination("n8n", url=sink.url, retry=FAST, allow_private=True)
        inbox.route("app", "n8n")
        async with inbox.running():
            event_id = await inbox.emit("app", "order.paid", {"id": 1}, key="1")
            await inbox.drain()
            delivery, attempts = await look(inbox, event_id)
            await is_sound(inbox)
    assert delivery.status is DeliveryStatus.done
    assert [(a.n, str(a.outcome), a.evidence.status) for a in attempts] == [
        (1, "retry", 502), (2, "retry", 502), (3, "done", 200),
    ]  # fmt: skip
    assert [r.headers["oncehook-attempt"] for r in sink.requests] == ["1", "2", "3"]
    assert {r.headers["webhook-id"] for r in sink.requests} == {event_id}
    assert [r.headers["oncehook-trigger"] for r in sink.requests] == ["initial", "retry", "retry"]


async def test_400_is_one_attempt_dead_and_permanent(inbox: Inbox) -> None:
    async with Sink(((400, {}, b"no such order"),)).open() as sink:
        inbox.destination("n8n", url=sink.url, retry=FAST, allow_private=True)
        inbox.route("app", "n8n")
        async with inbox.running():
            delivery, attempts = await look(inbox, await _one(inbox))
            await is_sound(inbox)
    assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.permanent)
    (attempt,) = attempts
    assert (attempt.evidence.status, attempt.evidence.answer) == (400, b"no such order")


async def _one(inbox: Inbox) -> str:
    event_id = await inbox.emit("app", "order.paid", {"id": 1}, key="1", subject="o1")
    await inbox.drain()
    return event_id


async def test_a_handler_is_told_everything_and_the_same_key_each_time(inbox: Inbox) -> None:
    seen: list[Event] = []

    @inbox.on("app", "order.*", retry=FAST, timeout=5)
    async def ship(event: Event) -> None:
        seen.append(event)
        if len(seen) < 3:
            raise RetryLater

    async with inbox.running():
        event_id = await _one(inbox)
        await is_sound(inbox)
    assert [e.attempt for e in seen] == [1, 2, 3]
    assert {e.idempotency_key for e in seen} == {event_id}
    assert len({e.fence for e in seen}) == 3
    event = seen[0]
    assert (event.source, event.type, event.key, event.subject, event.json()) == (
        "app", "order.paid", "1", "o1", {"id": 1},
    )  # fmt: skip
    assert (event.run, event.replay, event.trigger, event.destination) == (1, False, "initial", "ship")
    assert event.header("Content-Type") == "application/json"


@pytest.mark.parametrize(
    ("error", "outcomes", "category"),
    [
        (GiveUp("not ours"), ["dead"], Category.permanent),
        (RetryLater("busy"), ["retry", "retry", "retry", "dead"], Category.transient),
        (ConnectionError("gone"), ["retry", "retry", "retry", "dead"], Category.transient),
        (RuntimeError("odd"), ["retry", "retry", "retry", "dead"], Category.unknown),
        (ValueError("odd"), ["dead"], Category.permanent),
    ],
)
async def test_what_a_handler_raises_decides(
    inbox: Inbox, error: Exception, outcomes: list[str], category: Category
) -> None:
    @inbox.on("app", retry=FAST)
    def ship(event: Event) -> None:
        raise error

    async with inbox.running():
        delivery, attempts = await look(inbox, await _one(inbox))
        await is_sound(inbox)
    assert [str(a.outcome) for a in attempts] == outcomes
    assert (delivery.status, delivery.category) == (DeliveryStatus.dead, category)
    assert delivery.last_error is not None
    assert delivery.last_error.startswith(f"{type(error).__name__}: {error}   test_work.py:")
    assert b"raise error" in (attempts[0].evidence.answer or b"")


async def test_a_handler_says_when_it_is_called_again(inbox: Inbox) -> None:
    """Sooner than the policy would, and later, but never beyond its cap."""
    tries: list[int] = []

    @inbox.on("app", retry={"attempts": 4, "base": "1h", "cap": "2h", "jitter": 0})
    def ship(event: Event) -> None:
        tries.append(event.attempt)
        raise RetryLater(after=0.01 if len(tries) < 3 else "9h")

    async with inbox.running():
        await inbox.emit("app", "order.paid", {}, key="1")
        attempts: list[StoredAttempt] = []
        while len(attempts) < 3:
            await asyncio.sleep(0.01)
            (delivery,) = (await inbox.store.find_deliveries(Filter())).items
            attempts = await inbox.store.attempts_of(delivery.id)
        (delivery,) = (await inbox.store.find_deliveries(Filter())).items
    assert [str(a.outcome) for a in attempts] == ["retry"] * 3
    assert delivery.due_at is not None
    assert 7100 < (delivery.due_at - attempts[-1].ended_at).total_seconds() < 7300


async def test_subjects_go_one_at_a_time_in_order_and_beside_each_other(inbox: Inbox) -> None:
    order: defaultdict[str, list[int]] = defaultdict(list)
    running: defaultdict[str, int] = defaultdict(int)
    together = 0

    @inbox.on("app", concurrency=20, retry=FAST)
    async def ship(event: Event) -> None:
        nonlocal together
        subject = event.subject or ""
        running[subject] += 1
        assert running[subject] == 1, "two of one subject at once"
        together = max(together, sum(running.values()))
        await asyncio.sleep(random.random() * 0.004)
        running[subject] -= 1
        if random.random() < 0.1:
            raise RetryLater
        order[subject].append(event.json()["n"])

    async with inbox.running():
        await asyncio.gather(*(_emit_in_order(inbox, subject, range(15)) for subject in ("a", "b", "c", "d")))
        await inbox.drain()
        await is_sound(inbox)
    done = {subject: sorted(set(numbers)) for subject, numbers in order.items()}
    dead = sum(15 - len(numbers) for numbers in order.values())
    assert {subject: numbers == sorted(numbers) for subject, numbers in order.items()} == dict.fromkeys("abcd", True)
    assert len(done) == 4
    assert dead <= 2, "one in ten fails, four times in a row hardly ever"
    assert together > 1, "different subjects do not wait for each other"


async def _emit_in_order(inbox: Inbox, subject: str, numbers: range) -> None:
    for n in numbers:
        await inbox.emit("app", "step", {"n": n}, key=f"{subject}{n}", subject=subject)


async def test_a_coroutine_ends_at_its_time_limit(inbox: Inbox) -> None:
    @inbox.on("app", timeout=0.05, retry=[])
    async def ship(event: Event) -> None:
        await asyncio.sleep(30)

    async with inbox.running():
        delivery, (attempt,) = await look(inbox, await _one(inbox))
    assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.transient)
    assert "longer than 0.05 s" in (attempt.evidence.error or "")


@pytest.fixture
def later() -> Iterator[Callable[[float], None]]:
    """Lets time pass, for leases on SQLite and for heartbeats, and takes it back in the end."""
    passed: list[float] = []

    def forward(seconds: float) -> None:
        clock.forward(seconds)
        passed.append(seconds)

    yield forward
    clock.forward(-sum(passed))


def outlive_lease(inbox: Inbox, later: Callable[[float], None]) -> None:
    """Do nothing else while more time passes than the one lease there is has: a minute, of which heartbeats see all."""
    # They come often because of somebody else's lease, which is short.
    assert inbox.worker is not None
    (held,) = inbox.worker.heartbeat._held.values()
    for _ in range(4):
        later(20.0)
        block_until(lambda: clock.steady() - held.renewed_at < 10.0, "a heartbeat")


async def test_a_thread_that_takes_long_keeps_its_lease(
    inbox: Inbox, engine: Engine, later: Callable[[float], None]
) -> None:
    calls, loop = 0, asyncio.get_running_loop()

    @inbox.on("app", lease=60, timeout=0.1, retry=[])
    def ship(event: Event) -> None:
        nonlocal calls
        calls += 1
        end = engine.rows("SELECT due_at FROM heads WHERE leased")
        outlive_lease(inbox, later)
        loop.call_soon_threadsafe(inbox.worker.wake)  # somebody looks for work, and for leases that have run out
        block_until(lambda: engine.rows("SELECT due_at FROM heads WHERE leased") != end, "the lease prolonged")

    inbox.on("elsewhere", name="idle", lease=0.1)(print)
    async with inbox.running():
        delivery, attempts = await look(inbox, await _one(inbox))
    assert (calls, len(attempts), delivery.status) == (1, 1, DeliveryStatus.done)


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(inbox: Inbox, later: Callable[[float], None]) -> None:
    calls = 0

    @inbox.on("app", lease=60, timeout=600, retry=[])
    async def ship(event: Event) -> None:
        nonlocal calls
        calls += 1
        outlive_lease(inbox, later)

    inbox.on("elsewhere", name="idle", lease=0.1)(print)
    async with inbox.running():
        delivery, attempts = await look(inbox, await _one(inbox))
    assert (calls, len(attempts), delivery.status) == (1, 1, DeliveryStatus.done)


async def test_stopping_gives_back_what_is_under_way_uncounted(inbox: Inbox, engine: Engine) -> None:
    began = asyncio.Event()

    @inbox.on("app")
    async def ship(event: Event) -> None:
        began.set()
        await asyncio.sleep(30)

    await inbox.start()
    event_id = await inbox.emit("app", "order.paid", {}, key="1")
    await began.wait()
    await inbox.stop(patience=0.05)

    seen: list[int] = []
    again = Inbox(engine.url)

    @again.on("app", name="ship")
    async def ship_now(event: Event) -> None:
        seen.append(event.attempt)

    async with again.running():
        await again.drain()
        delivery, attempts = await look(again, event_id)
        await is_sound(again)
    assert seen == [1], "a stop burns no attempt (R37)"
    assert (delivery.status, [str(a.outcome) for a in attempts]) == (DeliveryStatus.done, ["done"])


async def test_concurrency_and_rate_are_kept(inbox: Inbox) -> None:
    async with Sink(delay=0.02).open() as sink:
        inbox.destination("slow", url=sink.url, allow_private=True, concurrency=3, rate="40/s")
        inbox.route("app", "slow")
        async with inbox.running():
            started = clock.steady()  # the store counts from the first request of a worker, which comes with work
            for n in range(20):
                await inbox.emit("app", "x", {}, key=str(n))
            await inbox.drain()
            took = clock.steady() - started
            await is_sound(inbox)
    assert len(sink.requests) == 20
    assert sink.most_at_once <= 3
    assert took >= 19 / 40, "the last of twenty at forty a second begins about half a second after the first"


async def test_a_workers_own_limit_holds_over_all_destinations(inbox: Inbox) -> None:
    running = most = 0

    async def work(event: Event) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    for name in ("first", "second", "third"):
        inbox.on("app", name=name)(work)
    async with inbox.running(concurrency=2):
        for n in range(8):
            await inbox.emit("app", "x", {}, key=str(n))
        await inbox.drain()
        done = {name: level.done for name, level in (await inbox.store.levels()).items()}
    assert most == 2
    assert done == {"first": 8, "second": 8, "third": 8}, "and none of them starves"


async def test_a_breaker_holds_work_back_without_burning_attempts(inbox: Inbox) -> None:
    came: list[float] = []

    def answer(request: Request) -> int:
        came.append(asyncio.get_running_loop().time())
        return 404 if len(came) <= 3 else 200

    async with Sink(answer).open() as sink:
        inbox.destination("n8n", url=sink.url, allow_private=True, concurrency=1, breaker={"failures": 3, "open": "1s"})
        inbox.route("app", "n8n")
        async with inbox.running():
            for n in range(20):
                await inbox.emit("app", "x", {}, key=str(n))
            await inbox.drain()
            levels = (await inbox.store.levels())["n8n"]
            await is_sound(inbox)
    assert came[3] - came[2] > 0.95, "after the third it is open, and nothing is sent for a second"
    assert (levels.dead, levels.done, levels.failures) == (3, 17, 0)


async def test_410_pauses_the_destination(inbox: Inbox) -> None:
    async with Sink((410,)).open() as sink:
        inbox.destination("gone", url=sink.url, allow_private=True, concurrency=1)
        inbox.route("app", "gone")
        async with inbox.running():
            await inbox.emit("app", "x", {}, key="1")
            await inbox.drain()
            await inbox.emit("app", "x", {}, key="2")
            await inbox.drain()
            level = (await inbox.store.levels())["gone"]
    assert (len(sink.requests), level.dead, level.pending) == (1, 1, 1)
    assert level.paused_at is not None
    assert "410" in (level.paused_why or "")


async def test_an_effect_commits_with_its_completion_on_sqlite(sqlite: Engine) -> None:
    inbox = Inbox(sqlite.url)

    @inbox.on("app", retry=FAST)
    def ship(event: Event) -> None:
        def write(db: Any) -> None:
            db.execute("CREATE TABLE IF NOT EXISTS parcels (id TEXT, attempt INTEGER)")
            db.execute("INSERT INTO parcels VALUES (?, ?)", (event.id, event.attempt))
            if event.attempt == 1:
                raise ConnectionError("on second thoughts")

        event.commit(write)

    async with inbox.running():
        event_id = await _one(inbox)
        delivery, attempts = await look(inbox, event_id)
        await is_sound(inbox)
    assert [str(a.outcome) for a in attempts] == ["retry", "done"]
    assert delivery.status is DeliveryStatus.done
    assert sqlite.rows("SELECT id, attempt FROM parcels") == [(event_id, 2)], "the first one was undone"


@pytest.mark.parametrize("blocking", [True, False])
async def test_an_effect_commits_with_its_completion_on_postgres(postgres: Engine, blocking: bool) -> None:
    inbox = Inbox(postgres.url)
    schema = postgres.url.partition("?schema=")[2]
    table = f"{schema}_parcels"

    if blocking:

        @inbox.on("app", name="ship", retry=FAST)
        def ship(event: Event, tx: Any) -> None:
            tx.execute(f"INSERT INTO public.{table} VALUES (%s, %s)", [event.id, event.attempt])
            if event.attempt == 1:
                raise ConnectionError("on second thoughts")

    else:

        @inbox.on("app", name="ship", retry=FAST)
        async def ship_async(event: Event, tx: Any) -> None:
            await tx.execute(f"INSERT INTO public.{table} VALUES (%s, %s)", [event.id, event.attempt])
            if event.attempt == 1:
                raise ConnectionError("on second thoughts")

    import psycopg

    with psycopg.connect(postgres.url.partition("?")[0], autocommit=True) as outside:
        outside.execute(f"CREATE TABLE public.{table} (id text, attempt integer)")
        async with inbox.running():
            event_id = await _one(inbox)
            delivery, attempts = await look(inbox, event_id)
            await is_sound(inbox)
        written = outside.execute(f"SELECT id, attempt FROM public.{table}").fetchall()
        outside.execute(f"DROP TABLE public.{table}")
    assert [str(a.outcome) for a in attempts] == ["retry", "done"]
    assert delivery.status is DeliveryStatus.done
    assert written == [(event_id, 2)], "the first one was undone"


async def test_a_transaction_is_not_to_be_had_on_sqlite(sqlite: Engine) -> None:
    inbox = Inbox(sqlite.url)
    with pytest.raises(ConfigError, match=r"lends its one writer to nobody"):

        @inbox.on("app")
        def ship(event: Event, tx: Any) -> None: ...


async def test_a_keyed_dead_letter_is_replayed_and_the_senders_copy_is_still_a_duplicate(inbox: Inbox) -> None:
    mended = False

    @inbox.on("orders", retry=[])
    def ship(event: Event) -> None:
        seen.append((event.run, event.attempt, event.replay, event.idempotency_key))
        if not mended:
            raise ValueError("broken")

    seen: list[tuple[int, int, bool, str]] = []
    inbox.source("orders", verify="none", key="$.id", loopback_only=False)
    async with inbox.running():
        first = await inbox.receive("orders", {}, b'{"id": "o-1"}')
        await inbox.drain()
        delivery, _ = await look(inbox, first.event_ids[0])
        assert delivery.status is DeliveryStatus.dead
        mended = True
        await inbox.admin.replay_one(delivery.id, actor="test", reason="mended")
        await inbox.drain()
        again = await inbox.receive("orders", {}, b'{"id": "o-1"}')
        delivery, attempts = await look(inbox, first.event_ids[0])
        await is_sound(inbox)
    assert (again.outcome, again.event_ids) == ("duplicate", first.event_ids)
    assert delivery.status is DeliveryStatus.done
    assert [(a.run, a.n, str(a.outcome)) for a in attempts] == [(1, 1, "dead"), (2, 1, "done")]
    assert seen == [(1, 1, False, first.event_ids[0]), (2, 1, True, first.event_ids[0])]


async def test_a_copy_revives_a_dead_letter_where_its_source_says_so(inbox: Inbox) -> None:
    calls = 0

    @inbox.on("orders", retry=[])
    def ship(event: Event) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("broken")

    inbox.source("orders", verify="none", key="$.id", loopback_only=False, revive_dead=True)
    async with inbox.running():
        first = await inbox.receive("orders", {}, b'{"id": "o-1"}')
        await inbox.drain()
        again = await inbox.receive("orders", {}, b'{"id": "o-1"}')
        await inbox.drain()
        delivery, _ = await look(inbox, first.event_ids[0])
    assert (again.outcome, calls, delivery.status, delivery.run) == ("duplicate", 2, DeliveryStatus.done, 2)


async def test_one_delivery_is_replayed_without_a_plan(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom it goes to stands in its id; a sender may be waiting for it (`revive_dead`)."""

    @inbox.on("orders", retry=[])
    def ship(event: Event) -> None:
        raise ValueError("broken")

    inbox.source("orders", verify="none", key="$.id", loopback_only=False)
    async with inbox.running():
        first = await inbox.receive("orders", {}, b'{"id": "o-1"}')
        await inbox.drain()
        delivery, _ = await look(inbox, first.event_ids[0])
        monkeypatch.setattr(inbox.store, "plan_replay", None)
        made = await inbox.admin.replay_one(delivery.id, actor="ana")
        assert made.about["to"] == ["ship"]


async def test_heartbeats_come_from_a_thread_of_their_own(inbox: Inbox) -> None:
    threads: set[str] = set()
    renew = inbox.store.renew
    inbox.store.renew = lambda *about: threads.add(threading.current_thread().name) or renew(*about)  # type: ignore[method-assign,func-returns-value]

    @inbox.on("app", lease=3)
    async def ship(event: Event) -> None:
        await until(lambda: threads)

    async with inbox.running():
        await _one(inbox)
    assert threads == {"oncehook-heartbeat"}
