"""What a handler may do besides returning and raising an Exception: the worker outlives all of it, on both engines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from oncehook import Event, Inbox
from oncehook.deliveries import RESULT_KEPT, Category, DeliveryStatus, Filter, StoredDelivery
from oncehook.errors import ConfigError
from oncehook.model import Kind, read_id
from oncehook.web.answers import attempt
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
        page = await inbox.store.find_deliveries(Filter(event_id=read_id(Kind.event, event_id)))
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
        page = await inbox.store.find_deliveries(Filter(event_id=read_id(Kind.event, event_id)))
        [made] = await inbox.store.attempts_of(page.items[0].id)
    assert page.items[0].status is DeliveryStatus.done
    told = attempt(made)
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
