"""What a handler may do besides returning and raising an Exception: the worker outlives all of it, on both engines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import pytest

from oncehook import Category, Event, GiveUp, Inbox
from oncehook.errors import ConfigError
from oncehook.model import RESULT_KEPT, DeliveryStatus, EventId, Filter, StoredDelivery
from oncehook.web.api.schemas import encode
from tests.acceptance.conftest import Engine

TWICE = ["0.02s"]


class Odd(BaseException):
    """No Exception: some libraries raise such things to get past `except Exception`."""


@pytest.fixture
async def inbox(engine: Engine) -> AsyncIterator[Inbox]:
    made = Inbox(engine.url)
    yield made
    if not made.draining:
        await made.store.close()


async def work_off(inbox: Inbox) -> StoredDelivery:
    """The one delivery of one event, when nothing is left to do."""
    async with inbox.running():
        event_id = await inbox.emit("app", "order.paid", {"id": 1}, key="1", subject="o1")
        await inbox.drain()
        page = await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))
    (delivery,) = page.items
    return delivery


def raise_odd() -> None:
    raise Odd("odd")


def raise_stop_iteration() -> None:
    next(iter(()))


def raise_cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raise_odd, "Odd: odd   test_handlers.py:"),
        (lambda: sys.exit(3), "SystemExit: 3   test_handlers.py:"),
        (raise_stop_iteration, "RuntimeError: "),
        (raise_cancelled, "CancelledError   test_handlers.py:"),
    ],
    ids=["base", "exit", "stop-iteration", "cancelled"],
)
@pytest.mark.parametrize("blocking", [True, False], ids=["def", "async"])
async def test_whatever_is_raised_ends_the_attempt_and_nothing_else(
    inbox: Inbox, act: Any, said: str, blocking: bool
) -> None:
    tries: list[int] = []

    def ship(event: Event) -> None:
        tries.append(event.attempt)
        act()

    async def ship_on_the_loop(event: Event) -> None:
        ship(event)

    inbox.on("app", retry=TWICE)(ship if blocking else ship_on_the_loop)
    delivery = await work_off(inbox)
    assert tries == [1, 2]
    assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.unknown)
    assert (delivery.last_error or "").startswith(said)


async def test_something_cancelled_that_a_handler_awaits_is_a_failure_of_its_own(inbox: Inbox) -> None:
    tries: list[int] = []

    @inbox.on("app", retry=TWICE)
    async def ship(event: Event) -> None:
        tries.append(event.attempt)
        nap = asyncio.create_task(asyncio.sleep(5))
        nap.cancel()
        await nap

    delivery = await work_off(inbox)
    assert (tries, delivery.status) == ([1, 2], DeliveryStatus.dead)


async def test_where_a_stop_iteration_came_from_is_told(inbox: Inbox) -> None:
    @inbox.on("app", retry=TWICE)
    def ship(event: Event) -> None:
        next(iter(()))

    assert "test_handlers.py:" in ((await work_off(inbox)).last_error or "")


# -- what it returns ---------------------------------------------------------------------------


@dataclass
class Summary:
    sent: int
    at: datetime


class Unwilling:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


MOST = "x" * (RESULT_KEPT - 2)
RETURNED: list[tuple[Any, Any]] = [
    (None, None),
    ({"success": True, "stdout": "3 files\n"}, {"success": True, "stdout": "3 files\n"}),
    (0, 0),
    ("", ""),
    (False, False),
    ([1, "two", None], [1, "two", None]),
    (Summary(2, datetime(2026, 11, 17, tzinfo=UTC)), {"sent": 2, "at": "2026-11-17T00:00:00Z"}),
    (MOST, MOST),
    (MOST + "x", "<str>"),
    (["y" * 20_000], "<list>"),
    ("\ud800", "<str>"),
    (object(), "<object>"),
    (Unwilling(), "<tests.acceptance.test_handlers.Unwilling>"),
]


@pytest.mark.parametrize(("returned", "kept"), RETURNED, ids=range(len(RETURNED)))
@pytest.mark.parametrize("blocking", [True, False], ids=["def", "async"])
async def test_what_a_handler_returns_is_kept_with_its_attempt(
    inbox: Inbox, returned: Any, kept: Any, blocking: bool
) -> None:
    def ship(event: Event) -> Any:
        return returned

    async def ship_on_the_loop(event: Event) -> Any:
        return returned

    inbox.on("app")(ship if blocking else ship_on_the_loop)
    assert await result_of_one(inbox) == kept


@pytest.mark.parametrize("blocking", [True, False], ids=["def", "async"])
async def test_what_a_handler_with_a_transaction_returns_is_kept(inbox: Inbox, engine: Engine, blocking: bool) -> None:
    if engine.url.startswith("sqlite"):

        def commit(event: Event) -> Any:
            event.commit(lambda connection: None)
            return {"id": 1}

        inbox.on("app")(commit)
    else:

        def ship(event: Event, tx: Any) -> Any:
            return {"id": 1}

        async def ship_on_the_loop(event: Event, tx: Any) -> Any:
            return {"id": 1}

        inbox.on("app")(ship if blocking else ship_on_the_loop)
    assert await result_of_one(inbox) == {"id": 1}


async def result_of_one(inbox: Inbox) -> Any:
    """What is kept of the one attempt of one event, as the API tells it."""
    async with inbox.running():
        event_id = await inbox.emit("app", "order.paid", {"id": 1}, key="1", subject="o1")
        await inbox.drain()
        page = await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))
        [made] = await inbox.store.attempts_of(page.items[0].id)
    assert page.items[0].status is DeliveryStatus.done
    told = encode(made)
    assert told.answer is None
    return told.result


async def test_a_function_that_yields_is_no_handler(inbox: Inbox) -> None:
    def ship(event: Event) -> Iterator[None]:
        yield

    async def ship_on_the_loop(event: Event) -> AsyncIterator[None]:
        yield

    for handler in (ship, ship_on_the_loop):
        with pytest.raises(ConfigError, match="yield"):
            inbox.on("app")(handler)


# -- categories --------------------------------------------------------------------------------


class Locked(Exception):
    """Of the program's own: the table cannot know it."""


class Answered(Exception):
    """An error of some client."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status_code = status


async def outcome(inbox: Inbox, error: Exception, **settings: Any) -> tuple[str, str | None, int]:
    """Status, category and attempts of a delivery whose handler raises this."""

    @inbox.on("app", retry=TWICE, **settings)
    async def ship(event: Event) -> None:
        raise error

    delivery = await work_off(inbox)
    return delivery.status, delivery.category, delivery.attempts


@pytest.mark.parametrize(
    ("error", "settings", "found"),
    [
        (Answered(400), {}, ("dead", "permanent", 1)),
        (Answered(503), {}, ("dead", "transient", 2)),
        (Answered(404), {"transient": [404, 423]}, ("dead", "transient", 2)),
        (Answered(503), {"permanent": [503]}, ("dead", "permanent", 1)),
        (KeyError("id"), {}, ("dead", "permanent", 1)),
        (Locked(), {}, ("dead", "unknown", 2)),
    ],
    ids=str,
)
async def test_what_a_handler_raises_is_judged_like_an_answer(
    inbox: Inbox, error: Exception, settings: dict[str, Any], found: tuple[str, str, int]
) -> None:
    assert await outcome(inbox, error, **settings) == found


def own(error: Exception) -> Category | None:
    return Category.transient if isinstance(error, KeyError) else None


def of_all(error: Exception) -> Literal["permanent"] | None:
    return "permanent" if isinstance(error, Locked | KeyError) else None


@pytest.mark.parametrize(
    ("error", "category"),
    [(KeyError("id"), "transient"), (Locked(), "permanent"), (ValueError(), "permanent"), (RuntimeError(), "unknown")],
    ids=repr,
)
async def test_functions_of_ones_own_are_asked_before_the_table(inbox: Inbox, error: Exception, category: str) -> None:
    """The handler's, then the inbox's; also one that is added after the handler."""

    @inbox.on("app", retry=TWICE, classify=own)
    def ship(event: Event) -> None:
        raise error

    assert inbox.classify(of_all) is of_all
    assert (await work_off(inbox)).category == category


async def test_what_a_handler_says_itself_is_not_asked_about(inbox: Inbox) -> None:
    assert await outcome(inbox, GiveUp("no"), classify=lambda error: "transient") == ("dead", "permanent", 1)


@pytest.mark.parametrize("says", ["rarely", 7, ZeroDivisionError], ids=str)
async def test_a_function_that_fails_is_told_of_and_the_table_decides(
    inbox: Inbox, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(error: Exception) -> Any:
        if isinstance(says, type):
            raise says
        return says

    assert await outcome(inbox, KeyError("id"), classify=broken) == ("dead", "permanent", 1)
    assert "classify.failed" in [record.getMessage().split()[0] for record in caplog.records]


async def test_a_function_that_could_never_answer_is_refused(inbox: Inbox) -> None:
    async def later(error: Exception) -> None: ...

    with pytest.raises(ConfigError, match="awaited"):
        inbox.on("app", classify=later)(lambda event: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="awaited"):
        inbox.classify(later)  # type: ignore[type-var]
    for wrong in ({"transient": [404], "permanent": [404]}, {"transient": [200]}, {"permanent": ["404"]}):
        with pytest.raises(ConfigError):
            inbox.on("app", **wrong)(lambda event: None)  # type: ignore[arg-type]
    inbox.on("app")(lambda event: None)
    async with inbox.running():
        with pytest.raises(ConfigError, match="too late"):
            inbox.classify(own)


async def test_an_effect_that_cannot_be_written_is_judged_by_the_same_rules(inbox: Inbox, engine: Engine) -> None:
    def write(event: Event) -> None:
        def effect(db: Any) -> None:
            raise Locked

        event.commit(effect)

    def write_with_tx(event: Event, tx: Any) -> None:
        raise Locked

    inbox.classify(of_all)
    inbox.on("app", retry=TWICE)(write if engine.name == "sqlite" else write_with_tx)
    delivery = await work_off(inbox)
    assert (delivery.category, delivery.attempts) == (Category.permanent, 1)
