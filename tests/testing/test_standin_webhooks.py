"""Webhooks as the stand-ins send them: an inbox with the provider's own preset takes them, over real HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from oncehook.testing import TestInbox
from oncehook.testing.standins import (
    UNANSWERED,
    EvolutionApiStandIn,
    EvolutionGoStandIn,
    MetaStandIn,
    N8nStandIn,
    StandIn,
    Tunnel,
)
from tests.kept import kept_events

ANA = "5511988880142"


def listen_to(inbox: TestInbox, standin: StandIn) -> None:
    token = {"verify_token": "t"} if isinstance(standin, MetaStandIn) else {}
    inbox.source("hooks", preset=standin.preset, secret=standin.secret, **token)


@pytest.mark.parametrize("kind", [MetaStandIn, EvolutionApiStandIn, EvolutionGoStandIn])
async def test_a_message_sent_twice_is_one_event(inbox: TestInbox, kind: type[Any]) -> None:
    async with kind() as standin:
        listen_to(inbox, standin)
        async with inbox.served() as url:
            hook = standin.message(from_=ANA, text="Olá, ação! 👍")
            first, second = await standin.deliver(f"{url}/hooks", hook, copies=2)
            assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")
            [other] = await standin.deliver(f"{url}/hooks", standin.message(from_=ANA, text="Olá, ação! 👍"))
            assert other.json()["status"] == "accepted"
        assert len(await kept_events(inbox.store)) == 2


@pytest.mark.parametrize("kind", [MetaStandIn, EvolutionApiStandIn, EvolutionGoStandIn])
async def test_somebody_with_another_secret_is_refused(inbox: TestInbox, kind: type[Any]) -> None:
    async with kind() as standin:
        listen_to(inbox, standin)
        standin.secret = "another"
        async with inbox.served() as url:
            [answer] = await standin.deliver(f"{url}/hooks", standin.message(from_=ANA, text="Hi"))
        assert answer.status == 401


async def test_meta_batches_messages_and_statuses(inbox: TestInbox) -> None:
    meta = MetaStandIn()
    listen_to(inbox, meta)
    hooks = [meta.message(from_=ANA, text="one"), meta.message(from_="4915100000000", text="two", name="Bo")]
    hooks += [meta.status("wamid.out", word, to=ANA) for word in ("sent", "delivered")]
    async with inbox.served() as url:
        [answer] = await meta.deliver(f"{url}/hooks", *hooks)
        assert answer.json()["accepted"] == 4
    types = sorted(event.type for event in await kept_events(inbox.store))
    assert types == ["message.text", "message.text", "status.delivered", "status.sent"]


async def test_a_status_that_was_overtaken_is_not_delivered(inbox: TestInbox) -> None:
    """`read` before `delivered`, and the rank of the preset sees to it."""
    meta = MetaStandIn()
    listen_to(inbox, meta)
    crm = inbox.recorded("crm")
    inbox.route("hooks", "crm", latest_wins=True)
    async with inbox.served() as url:
        for word in ("sent", "read", "delivered"):
            await meta.deliver(f"{url}/hooks", meta.status("wamid.out", word, to=ANA))
            await inbox.drain()
    said = [one.json()["entry"][0]["changes"][0]["value"]["statuses"][0]["status"] for one in crm.deliveries]
    assert said == ["sent", "read"]
    assert [one.note for one in await inbox.deliveries("crm")] == [None, None, "stale"]


async def test_a_failed_status_tells_why() -> None:
    meta = MetaStandIn()
    item = meta.status("wamid.out", "failed", to=ANA, code=131047).item
    assert (item["status"], item["errors"][0]["code"]) == ("failed", 131047)


async def test_meta_signs_what_is_escaped_as_meta_escapes() -> None:
    [request] = MetaStandIn().signed(MetaStandIn().message(from_=ANA, text="é/"))
    assert b"\\u00e9\\/" in request.body


async def test_one_receipt_of_evolution_go_is_an_event_per_message(inbox: TestInbox) -> None:
    go = EvolutionGoStandIn()
    listen_to(inbox, go)
    async with inbox.served() as url:
        [answer] = await go.deliver(f"{url}/hooks", go.receipt("A", "B", from_=ANA))
    assert answer.json()["accepted"] == 2
    assert all(go.token.encode() not in event.body for event in await kept_events(inbox.store))


async def test_evolution_api_statuses(inbox: TestInbox) -> None:
    evolution = EvolutionApiStandIn()
    listen_to(inbox, evolution)
    async with inbox.served() as url:
        hooks = [evolution.status("3EB0", word, to=ANA) for word in ("READ", "DELIVERY_ACK")]
        hooks.append(evolution.event("connection.update", {"instance": "sales", "state": "close"}))
        answers = await evolution.deliver(f"{url}/hooks", *hooks)
    assert [answer.json()["status"] for answer in answers] == ["accepted"] * 3
    assert {event.type for event in await kept_events(inbox.store)} == {"messages.update", "connection.update"}


async def test_n8n_sends_what_a_flow_would(inbox: TestInbox) -> None:
    n8n = N8nStandIn()
    listen_to(inbox, n8n)
    async with inbox.served() as url:
        first, second = await n8n.deliver(f"{url}/hooks", {"type": "lead", "messageId": "m1"}, copies=2)
    assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")


async def test_what_is_not_answered_2xx_is_sent_again_byte_for_byte() -> None:
    meta = MetaStandIn()
    with N8nStandIn() as receiver:
        receiver.fail(503, times=2)
        answers = await meta.deliver(receiver.webhook(), meta.message(from_=ANA, text="Hi"), retries=5)
        assert [answer.status for answer in answers] == [503, 503, 200]
        assert len({(r.body, r.headers["x-hub-signature-256"]) for r in receiver.requests}) == 1
        receiver.fail(500, times=None)
        answers = await meta.deliver(receiver.webhook(), meta.message(from_=ANA, text="Hi"), retries=1)
        assert [answer.status for answer in answers] == [500, 500]


def test_nobody_there_is_an_answer_too() -> None:
    meta = MetaStandIn()
    answers = meta.deliver_blocking(
        "http://127.0.0.1:1/in/x", meta.message(from_=ANA, text="Hi"), retries=1, after=0.01
    )
    assert [answer.status for answer in answers] == [UNANSWERED, UNANSWERED]


# -- the tunnel --------------------------------------------------------------------------------


async def test_a_tunnel_hands_everything_on_twice() -> None:
    meta = MetaStandIn()
    with N8nStandIn() as receiver, Tunnel(receiver.url) as tunnel:
        [answer] = await meta.deliver(f"{tunnel.url}/webhook/orders", meta.message(from_=ANA, text="Hi"))
        assert (answer.status, answer.json()) == (200, {"message": "Workflow was started"})
        assert (len(receiver.executions), tunnel.handed_on, len(tunnel.requests)) == (2, 2, 1)
        assert len({(r.body, r.headers["x-hub-signature-256"]) for r in receiver.requests}) == 1


@pytest.mark.parametrize(("cut", "status"), [(False, 502), (True, UNANSWERED)])
async def test_a_tunnel_flaps(cut: bool, status: int) -> None:
    meta = MetaStandIn()
    with N8nStandIn() as receiver, Tunnel(receiver.url, copies=1, flap_every=2, cut=cut) as tunnel:
        hooks = [meta.message(from_=ANA, text="Hi") for _ in range(4)]
        answers = [(await meta.deliver(f"{tunnel.url}/webhook/orders", hook))[0] for hook in hooks]
        assert [answer.status for answer in answers] == [200, status, 200, status]
        assert (len(receiver.requests), tunnel.flapped) == (2, 2)


async def test_a_tunnel_without_anybody_behind_it() -> None:
    with Tunnel("http://127.0.0.1:1") as tunnel:
        meta = MetaStandIn()
        [answer] = await meta.deliver(f"{tunnel.url}/x", meta.message(from_=ANA, text="Hi"))
        assert (answer.status, tunnel.handed_on) == (502, 0)
