"""The inbox under test: signed samples in, work when it is asked for, time that moves when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest

from oncehook import Event, GiveUp, Inbox, RetryLater, clock, presets
from oncehook.errors import ConfigError
from oncehook.model import new_id
from oncehook.sources import build
from oncehook.testing import BlockingTestInbox, TestInbox
from oncehook.verify.schemes import Nothing

# -- sending -----------------------------------------------------------------------------------


async def test_the_common_case(inbox: TestInbox) -> None:
    seen: list[str] = []

    @inbox.on("stripe", "invoice.*")
    async def book(event: Event) -> None:
        seen.append(event.type)

    answer = await inbox.send("stripe", "invoice.paid")
    assert (answer.status, answer.json()["status"]) == (200, "accepted")
    assert (await inbox.send_again()).json()["status"] == "duplicate"
    await inbox.drain()
    assert seen == ["invoice.paid"]


async def test_nothing_is_worked_on_before_it_is_asked_for(inbox: TestInbox) -> None:
    n8n = inbox.recorded("n8n")
    inbox.route("stripe", "n8n")
    await inbox.send("stripe", "invoice.paid")
    await asyncio.sleep(0.2)  # far more than a worker would need
    [waiting] = await inbox.deliveries("n8n")
    assert (waiting.status, waiting.attempts, n8n.attempts) == ("pending", 0, [])
    await inbox.drain()
    assert len(n8n.deliveries) == 1


@pytest.mark.parametrize("preset", presets.names())
async def test_every_preset_is_there_by_its_name(inbox: TestInbox, preset: str) -> None:
    assert 200 <= (await inbox.send(preset)).status < 300
    assert 200 <= (await inbox.send_again()).status < 300
    assert (await inbox.send(preset, forge=True)).status == 401


async def test_a_body_of_ones_own(inbox: TestInbox) -> None:
    inbox.source("orders", verify={"scheme": "hmac", "header": "X-Sign"}, secret="s", key="$.id")
    assert (await inbox.send("orders", body={"id": 7})).json()["status"] == "accepted"
    assert (await inbox.send("orders", body={"id": 7})).json()["status"] == "duplicate"
    assert (await inbox.send("orders", body={"id": 7, "x": 1})).json()["status"] == "conflict"


async def test_a_sender_waits_however_long_it_takes(inbox: TestInbox, oncehook_store: str) -> None:
    """A test that somebody else's machine holds up for a moment must not fail by a 503."""
    source = build("orders", verify=Nothing(), key="$.id", budget=0.05)
    inbox.add(source)
    await inbox.start()
    with contextlib.closing(sqlite3.connect(oncehook_store.removeprefix("sqlite:"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        sending = asyncio.create_task(inbox.send("orders", body={"id": 7}))
        await asyncio.wait([sending], timeout=0.5)
        assert not sending.done()
    assert (await sending).json()["status"] == "accepted"
    inbox.take_back()
    assert source.settings.budget == 0.05


async def test_what_is_not_there_is_told(inbox: TestInbox) -> None:
    with pytest.raises(ConfigError, match="no source"):
        await inbox.send("strype")
    with pytest.raises(ConfigError, match="Nothing was sent"):
        await inbox.send_again()
    await inbox.drain()  # without any destination there is nothing to do


# -- working and time --------------------------------------------------------------------------


async def test_a_retry_waits_for_the_clock(inbox: TestInbox) -> None:
    attempts: list[int] = []

    @inbox.on("stripe", retry=["1h", "24h"])
    async def flaky(event: Event) -> None:
        attempts.append(event.attempt)
        if event.attempt < 3:
            raise RetryLater("not yet")

    await inbox.send("stripe", "invoice.paid")
    await inbox.drain()
    inbox.clock.forward("59m")
    await inbox.drain()
    assert attempts == [1]
    inbox.clock.forward("8m")  # a tenth may be added to each wait
    await inbox.drain()
    assert attempts == [1, 2]
    [waiting] = await inbox.deliveries("flaky")
    assert (waiting.status, waiting.attempts, waiting.category) == ("pending", 2, "transient")
    inbox.clock.forward("27h")
    await inbox.drain()
    assert attempts == [1, 2, 3]
    [done] = await inbox.deliveries(status="done")
    assert done.id == waiting.id


async def test_draining_retries_too_goes_through_days_at_once(inbox: TestInbox) -> None:
    attempts: list[int] = []

    @inbox.on("stripe", retry="durable")
    def broken(event: Event) -> None:
        attempts.append(event.attempt)
        raise RuntimeError("always")

    before = inbox.clock.now()
    await inbox.send("stripe", "invoice.paid")
    await inbox.drain(retries=True)
    assert attempts == list(range(1, 11))
    [dead] = await inbox.deliveries("broken", status="dead")
    assert dead.attempts == 10
    assert inbox.clock.now() - before > timedelta(hours=69)


async def test_a_key_is_forgotten_after_its_window(inbox: TestInbox) -> None:
    inbox.source("orders", verify="none", key="$.id", keep_keys="7d")
    assert (await inbox.send("orders", body={"id": 1})).json()["status"] == "accepted"
    inbox.clock.forward("6d")
    assert (await inbox.send_again()).json()["status"] == "duplicate"
    inbox.clock.forward("2d")
    assert (await inbox.send_again()).json()["status"] == "accepted"


async def test_a_signature_grows_stale(inbox: TestInbox) -> None:
    await inbox.send("stripe", "invoice.paid")
    inbox.clock.forward("10m")
    assert (await inbox.send_again()).status == 401


async def test_what_a_handler_makes_due_is_drained_as_well(inbox: TestInbox) -> None:
    seen: list[str] = []

    @inbox.on("stripe")
    async def first(event: Event) -> None:
        await inbox.emit("app", "booked", {"n": 1})

    @inbox.on("app")
    async def second(event: Event) -> None:
        seen.append(event.type)

    await inbox.send("stripe", "invoice.paid")
    await inbox.drain()
    assert seen == ["booked"]


async def test_a_dead_letter_is_replayed(inbox: TestInbox) -> None:
    answers = [GiveUp("no"), None]

    @inbox.on("stripe")
    async def once_bad(event: Event) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    await inbox.send("stripe", "invoice.paid")
    await inbox.drain()
    [dead] = await inbox.deliveries(status="dead")
    await inbox.admin.replay_one(dead.id, actor="test")
    await inbox.drain()
    [done] = await inbox.deliveries()
    assert (done.id, done.status, done.run) == (dead.id, "done", 2)


async def test_a_long_attempt_is_waited_for_and_time_stands_still_meanwhile(inbox: TestInbox) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    @inbox.on("stripe")
    async def slow(event: Event) -> None:
        begun.set()
        await go_on.wait()

    await inbox.send("stripe", "invoice.paid")
    draining = asyncio.create_task(inbox.drain())
    await begun.wait()
    with pytest.raises(ConfigError, match="under way"):
        inbox.clock.forward("1h")
    assert not draining.done()
    go_on.set()
    await draining
    [done] = await inbox.deliveries()
    assert (done.status, done.attempts) == ("done", 1)


async def test_time_is_taken_back(tmp_path: Path) -> None:
    trial = TestInbox(f"sqlite:{tmp_path}/x.db")
    present = clock.now()
    trial.clock.forward("400d")
    later = new_id()
    assert clock.now() > present + 399 * 86400
    trial.take_back()
    assert clock.now() < present + 86400
    assert new_id() < later  # ids belong to the present again
    trial.take_back()  # twice is once
    assert clock.now() < present + 86400


# -- recorded destinations ---------------------------------------------------------------------


async def test_a_recorded_destination_gets_what_the_real_one_would(inbox: TestInbox) -> None:
    inbox.destination("n8n", url="https://n8n.example/webhook/abc", sign="whsec_c2VjcmV0", headers={"X-Team": "a"})
    inbox.route("stripe", "n8n")
    n8n = inbox.recorded("n8n")
    await inbox.send("stripe", "invoice.paid")
    await inbox.drain()
    [delivery] = n8n.deliveries
    assert (delivery.url, delivery.attempt) == ("https://n8n.example/webhook/abc", 1)
    assert delivery.event_id.startswith("evt_")
    assert delivery.json()["type"] == "invoice.paid"
    assert {"webhook-signature", "x-team", "idempotency-key"} <= set(delivery.headers)


async def test_its_answers_are_scripted(inbox: TestInbox) -> None:
    n8n = inbox.recorded("n8n")  # made up: nothing of that name was there
    inbox.route("stripe", "n8n")
    n8n.fail(502)
    n8n.drop_connection()
    await inbox.send("stripe", "invoice.paid")
    await inbox.drain(retries=True)
    assert [attempt.status for attempt in n8n.attempts] == [502, None, 200]
    assert [attempt.attempt for attempt in n8n.deliveries] == [3]
    n8n.fail(404)
    await inbox.send("stripe", "invoice.paid")
    await inbox.drain(retries=True)
    [dead] = await inbox.deliveries("n8n", status="dead")
    assert dead.last_error == "HTTP 404"


async def test_only_requests_are_recorded(inbox: TestInbox) -> None:
    @inbox.on("stripe")
    async def book(event: Event) -> None: ...

    with pytest.raises(ConfigError, match="is a handler"):
        inbox.recorded("book")


# -- a program's own inbox ---------------------------------------------------------------------


def program(folder: Path) -> tuple[Inbox, list[str]]:
    """An application with an inbox of its own, as it would be imported."""
    inbox = Inbox(f"sqlite:{folder}/production.db")
    inbox.source("payments", preset="stripe", secret="whsec_program")
    inbox.destination("crm", url="https://crm.example/")
    seen: list[str] = []

    @inbox.on("payments", "invoice.*", retry="quick")
    async def book(event: Event) -> None:
        await asyncio.sleep(0.1)
        seen.append(event.type)
        await inbox.emit("app", "booked", {})

    inbox.route("app", "crm")
    return inbox, seen


async def test_a_programs_inbox_runs_on_the_tests_store(inbox: TestInbox, tmp_path: Path) -> None:
    own, seen = program(tmp_path)
    state = dict(own.__dict__)
    inbox.use(own)
    crm = inbox.recorded("crm")
    await inbox.send("payments", "invoice.paid")
    await inbox.drain()
    assert seen == ["invoice.paid"]
    assert [one.headers["oncehook-source"] for one in crm.deliveries] == ["app"]
    assert not (tmp_path / "production.db").exists()
    await inbox.stop()
    inbox.take_back()
    assert own.__dict__ == state
    assert own.destinations["crm"] is state["destinations"]["crm"]


async def test_a_programs_functions_for_categories_count_whenever_they_were_added(
    inbox: TestInbox, tmp_path: Path
) -> None:
    own = Inbox(f"sqlite:{tmp_path / 'production.db'}")

    @own.on("app", retry=["1m"])
    def ship(event: Event) -> None:
        raise KeyError("id")

    inbox.use(own)
    own.classify(lambda error: "transient")
    await inbox.emit("app", "order.paid", {})
    await inbox.drain()
    assert [one.category for one in await inbox.deliveries("ship")] == ["transient"]


async def test_a_host_application_starts_it_by_itself(inbox: TestInbox, tmp_path: Path) -> None:
    own, seen = program(tmp_path)
    inbox.use(own)
    crm = inbox.recorded("crm")
    crm.fail(503)
    async with own.lifespan(None):  # as FastAPI does, with a worker in the background
        await inbox.send("payments", "invoice.paid")
        await inbox.drain()
        assert (seen, [one.status for one in crm.attempts]) == (["invoice.paid"], [503])
        inbox.clock.forward("1m")
        await inbox.drain()
        assert [one.status for one in crm.attempts] == [503, 200]
    assert not (tmp_path / "production.db").exists()


async def test_an_inbox_that_runs_cannot_be_used(inbox: TestInbox, tmp_path: Path) -> None:
    own, _ = program(tmp_path)
    async with own.running():
        with pytest.raises(ConfigError, match="before it is started"):
            inbox.use(own)


# -- without await -----------------------------------------------------------------------------


def test_a_plain_function_needs_no_await(inbox: BlockingTestInbox) -> None:
    seen: list[int] = []

    @inbox.on("stripe", retry=["5m"])
    def book(event: Event) -> None:
        seen.append(event.attempt)
        if event.attempt == 1:
            raise RetryLater

    n8n = inbox.recorded("n8n")
    inbox.route("app", "n8n")
    assert inbox.send("stripe", "invoice.paid").json()["status"] == "accepted"
    assert inbox.send_again().json()["status"] == "duplicate"
    inbox.drain()
    inbox.clock.forward("6m")
    inbox.emit("app", "booked", {"n": 1})
    inbox.drain()
    assert seen == [1, 2]
    assert [one.json() for one in n8n.deliveries] == [{"n": 1}]
    assert [one.status for one in inbox.deliveries()] == ["done", "done"]
    assert inbox.call(inbox.trial.troubles()) == {}
