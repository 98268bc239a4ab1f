"""An event of the application's own, fanned out to subscribers from the configuration, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from oncehook import Event
from oncehook.inbox import Inbox
from oncehook.settings import load
from tests.acceptance.sink import Sink
from tests.waiting import until

SECRETS = {
    "NEW": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "OLD": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
    "OTHER": "whsec_AAECAwQFBgcICQoLDA0ODxAREhM=",
}
SUBSCRIBERS = """
store = "sqlite:{folder}/inbox.db"

[source.orders]
verify = "none"
key = "$.id"
budget = "60s"

[destination.crm]
url = "{crm}"
sign = [{{ env = "NEW" }}, {{ env = "OLD" }}]
retry = ["0.05s", "0.05s"]
allow_private = ["127.0.0.0/8"]

[destination.archive]
url = "{archive}"
sign = {{ env = "OTHER" }}
allow_private = ["127.0.0.0/8"]

[[route]]
from = "app"
to = "crm"

[[route]]
from = "app"
to = "archive"
when = {{ type = "message_*" }}
"""


@asynccontextmanager
async def subscribed(folder: Path, crm: Sink, archive: Sink) -> AsyncIterator[Inbox]:
    async with AsyncExitStack() as stack:
        for sink in (crm, archive):
            await stack.enter_async_context(sink.open())
        settings = folder / "oncehook.toml"
        settings.write_text(SUBSCRIBERS.format(folder=folder, crm=crm.url, archive=archive.url))
        inbox = Inbox.from_config(load(settings, SECRETS).config)

        @inbox.on("orders")
        async def announce(event: Event) -> None:
            await inbox.emit("app", "message_created", event.json(), key=event.idempotency_key, subject="42")

        yield await stack.enter_async_context(inbox.running())


def seen(sink: Sink) -> list[int]:
    return [json.loads(request.body)["n"] for request in sink.requests]


async def test_each_subscriber_has_its_own_deliveries_signed_with_its_own_secrets(tmp_path: Path) -> None:
    crm, archive = Sink([503, 200]), Sink()
    async with subscribed(tmp_path, crm, archive) as inbox:
        await inbox.emit("app", "message_created", {"n": 1}, key="m1")
        await inbox.emit("app", "contact_changed", {"n": 2}, key="c1")
        await inbox.drain()
    assert (sorted(seen(crm)), seen(archive)) == ([1, 1, 2], [1]), "one is tried again, the other is not disturbed"
    for request in crm.requests:
        for secret in ("NEW", "OLD"):  # while rotating, whoever knows either can check
            Webhook(SECRETS[secret]).verify(request.body, request.headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRETS["OTHER"]).verify(request.body, request.headers)
    Webhook(SECRETS["OTHER"]).verify(archive.requests[0].body, archive.requests[0].headers)


async def test_a_subject_keeps_its_order_at_every_subscriber(tmp_path: Path) -> None:
    crm, archive = Sink([200, 503, 200]), Sink()
    async with subscribed(tmp_path, crm, archive) as inbox:
        for n in range(6):
            await inbox.emit("app", "message_created", {"n": n}, key=f"m{n}", subject="conversation/7")
        await inbox.drain()
    assert seen(archive) == [0, 1, 2, 3, 4, 5]
    assert seen(crm) == [0, 1, 1, 2, 3, 4, 5]


async def test_one_subscriber_is_paused_while_the_others_go_on(tmp_path: Path) -> None:
    crm, archive = Sink(), Sink()
    async with subscribed(tmp_path, crm, archive) as inbox:
        await inbox.admin.pause("crm", actor="ana", reason="maintenance")
        await inbox.emit("app", "message_created", {"n": 1}, key="m1")
        await until(lambda: len(archive.requests) == 1)
        await inbox.drain()
        assert crm.requests == []
        await inbox.admin.resume("crm", actor="ana")
        await inbox.drain()
    assert seen(crm) == [1]


async def test_one_duplicate_arrival_never_becomes_two_emissions(tmp_path: Path) -> None:
    crm, archive = Sink(), Sink()
    async with subscribed(tmp_path, crm, archive) as inbox:
        body = b'{"id": "order-1", "n": 1}'
        await asyncio.gather(*[inbox.receive("orders", {}, body, peer="127.0.0.1") for _ in range(10)])
        await inbox.drain()
        (done,) = (await inbox.admin.deliveries(inbox.admin.read("destination:announce"))).items
        await inbox.admin.replay_one(done.id, actor="ana", force=True)
        await inbox.drain()
    assert (seen(crm), seen(archive)) == ([1], [1]), "nor does a handler that is run again"
