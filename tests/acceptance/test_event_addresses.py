"""Events that name the address they are sent to: delivered, refused, replayed, and nobody else harmed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from oncehook import Inbox
from oncehook.destinations.http import HttpDestination
from oncehook.errors import BadRequest
from oncehook.http_client.client import HttpClient
from oncehook.model import Category, DeliveryStatus, EventId, Filter, StoredAttempt, StoredDelivery
from tests.acceptance.conftest import Engine
from tests.acceptance.sink import Sink

FAST = ["0.02s", "0.02s"]


@asynccontextmanager
async def sending_back(engine: Engine, *sinks: Sink, **settings: Any) -> AsyncIterator[Inbox]:
    """An inbox whose events are sent to these servers, as each event says."""
    settings.setdefault("allow_hosts", [f"http://127.0.0.1:{sink.port}" for sink in sinks])
    settings.setdefault("allow_private", True)
    inbox = Inbox(engine.url)
    inbox.destination("back", url="{$.callback_url}", retry=FAST, **settings)
    inbox.route("app", "back")
    async with inbox.running():
        yield inbox


async def emit(inbox: Inbox, key: str, url: object, subject: str | None = None) -> str:
    return await inbox.emit("app", "job.done", {"callback_url": url}, key=key, subject=subject)


async def look(inbox: Inbox, event_id: str) -> tuple[StoredDelivery, list[StoredAttempt]]:
    (delivery,) = (await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))).items
    return delivery, await inbox.store.attempts_of(delivery.id)


async def test_each_event_goes_to_the_address_it_names_and_only_the_host_is_kept(engine: Engine) -> None:
    echo = (200, {"x-echo": "canary-path"}, b"you came to canary-path?token=canary-token")
    async with Sink((echo,)).open() as one, Sink((200,)).open() as two, sending_back(engine, one, two) as inbox:
        first = await emit(inbox, "1", f"{one.url}/canary-path?token=canary-token")
        await emit(inbox, "2", two.url.upper().replace("HTTP:", "Http:").replace("/HOOK", "/b"))
        await inbox.drain()
        delivery, (attempt,) = await look(inbox, first)
    assert [request.path for request in one.requests] == ["/hook/canary-path?token=canary-token"]
    assert [request.path for request in two.requests] == ["/b"]
    assert delivery.status is DeliveryStatus.done
    assert attempt.exchange is not None
    assert attempt.exchange.address == f"http://127.0.0.1:{one.port}/…"
    assert b"canary" not in attempt.exchange.received + (attempt.evidence.answer or b"")


async def test_a_refused_address_is_a_dead_letter_that_a_longer_list_and_a_replay_deliver(engine: Engine) -> None:
    async with Sink((200,)).open() as sink, Sink((200,)).open() as other:
        async with sending_back(engine, other) as inbox:
            refused = await emit(inbox, "1", sink.url)
            missing = await emit(inbox, "2", None)
            await inbox.drain()
            delivery, (attempt,) = await look(inbox, refused)
            assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.permanent)
            said = "the address at $.callback_url is not allowed by allow_hosts"
            assert delivery.last_error == f"{said}\nhttp://127.0.0.1:{sink.port}"
            assert attempt.exchange is None, "nothing was sent"
            assert (await look(inbox, missing))[0].last_error == "the event has no address at $.callback_url"
            assert {cause.cause for cause in await inbox.admin.causes()} == {
                said,
                "the event has no address at $.callback_url",
            }
        assert not sink.requests
        async with sending_back(engine, other, sink) as inbox:
            await inbox.admin.replay_one(delivery.id, actor="anna", reason="allowed now")
            await inbox.drain()
            assert (await look(inbox, refused))[0].status is DeliveryStatus.done
        assert len(sink.requests) == 1
        assert not other.requests


async def test_refused_addresses_open_no_breaker_and_one_that_is_gone_pauses_nobody(engine: Engine) -> None:
    breaker = {"failures": 2, "open": "1h"}
    async with (
        Sink((410,)).open() as gone,
        Sink((200,)).open() as sink,
        sending_back(engine, gone, sink, breaker=breaker) as inbox,
    ):
        for number in range(5):
            await emit(inbox, f"evil-{number}", f"https://evil-{number}.example/")
        await emit(inbox, "gone", gone.url)
        await inbox.drain()
        await emit(inbox, "good", sink.url)
        await inbox.drain()
        level = await inbox.admin.destination("back")
    assert (len(gone.requests), len(sink.requests)) == (1, 1)
    assert level.level.paused_at is None


async def test_a_redirect_out_of_the_list_is_not_followed(engine: Engine) -> None:
    async with Sink((200,)).open() as other:
        away = (307, {"location": other.url}, b"")
        async with Sink((away,)).open() as sink, sending_back(engine, sink) as inbox:
            event_id = await emit(inbox, "1", sink.url)
            await inbox.drain()
            delivery, _ = await look(inbox, event_id)
    assert (delivery.status, delivery.last_error) == (DeliveryStatus.dead, "HTTP 307; redirects are not followed")
    assert not other.requests


async def test_the_list_does_not_open_private_networks(engine: Engine) -> None:
    async with Sink((200,)).open() as sink, sending_back(engine, sink, allow_private=False) as inbox:
        event_id = await emit(inbox, "1", sink.url)
        await inbox.drain()
        delivery, _ = await look(inbox, event_id)
    assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.permanent)
    assert "not a public address (loopback)" in (delivery.last_error or "")
    assert not sink.requests


async def test_a_subject_stays_in_order_whatever_addresses_its_events_name(engine: Engine) -> None:
    served: list[str] = []
    answers = iter([503, 200])

    def stumble(request: object) -> int:
        served.append("one")
        return next(answers)

    def serve(request: object) -> int:
        served.append("two")
        return 200

    async with Sink(stumble).open() as one, Sink(serve).open() as two, sending_back(engine, one, two) as inbox:
        await emit(inbox, "1", one.url, subject="job-1")
        await emit(inbox, "2", two.url, subject="job-1")
        await inbox.drain()
    assert served == ["one", "one", "two"]


async def test_it_can_be_defined_while_everything_runs_and_not_be_tested(engine: Engine) -> None:
    inbox = Inbox(engine.url)
    async with Sink((200,)).open() as sink, inbox.running():
        hosts = [f"http://127.0.0.1:{sink.port}"]
        await inbox.define.destination("back", url="{$.callback_url}", allow_hosts=hosts, allow_private=True)
        await inbox.define.route("app", "back")
        await emit(inbox, "1", sink.url)
        await inbox.drain()
        assert len(sink.requests) == 1
        assert not await inbox.admin.can_test("back")
        with pytest.raises(BadRequest, match="no web address of its own"):
            await inbox.admin.test_destination("back", actor="anna")


async def test_many_hosts_leave_few_idle_connections() -> None:
    async def look_up(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with Sink((200,)).open() as sink:
        client = HttpClient(allow_private=True, look_up=look_up)
        await client.open()
        for number in range(100):
            await client.post(f"http://h{number}.example.net:{sink.port}/", {}, b"", within=30)
        assert len(client._kept) <= 64
        await client.close()
    assert len(sink.requests) == 100


def test_it_is_shown_as_the_place() -> None:
    made = HttpDestination("back", "{$.callback_url}", allow_hosts=["hooks.example.org"])
    assert made.address == "POST {$.callback_url}"
