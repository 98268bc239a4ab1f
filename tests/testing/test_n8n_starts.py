"""n8n while it starts and while a workflow is off, as its own server answers: nothing is lost, nobody has to replay."""

from __future__ import annotations

import pytest

from oncehook.errors import ConfigError
from oncehook.http_client import HttpAnswer
from oncehook.model import Category
from oncehook.testing import TestInbox
from oncehook.testing.standins import N8nStandIn

WRONG_METHOD = (
    b'{"code":404,"message":"This webhook is not registered for POST requests. Did you mean to make a GET request?"}'
)
STATES = [
    (404, "HTTP 404: n8n is starting, or the workflow is off"),
    (503, "HTTP 503"),
    (200, "HTTP 200: n8n is starting and did not take it"),
    (404, "HTTP 404: n8n is starting, or the workflow is off"),
    (404, "HTTP 404: n8n is starting, or the workflow is off"),
    (200, None),
]


@pytest.mark.parametrize("retry", ["durable", "quick", []], ids=str)
async def test_an_event_waits_until_n8n_is_ready(inbox: TestInbox, retry: str | list[str]) -> None:
    async with N8nStandIn() as n8n:
        inbox.destination("n8n", url=n8n.webhook(), preset="n8n", retry=retry, allow_private=True)
        inbox.route("app", "n8n")
        n8n.restart()
        await inbox.emit("app", "order.paid", {"id": 1}, key="1")
        for _ in STATES:
            await inbox.drain()
            inbox.clock.forward("70s")  # five states, none of which was waited for longer
        [delivery] = await inbox.deliveries("n8n")
        assert (delivery.status, delivery.attempts, len(n8n.executions)) == ("done", len(STATES), 1)
        attempts = await inbox.store.attempts_of(delivery.id)
        assert [(one.evidence.status, one.evidence.error) for one in attempts] == STATES
        assert {one.category for one in attempts[:-1]} == {Category.transient}


async def test_a_workflow_that_is_off_over_a_weekend(inbox: TestInbox) -> None:
    async with N8nStandIn() as n8n:
        inbox.destination("n8n", url=n8n.webhook(), preset="n8n", retry="quick", allow_private=True)
        inbox.route("app", "n8n")
        n8n.deactivate()
        await inbox.emit("app", "order.paid", {"id": 1}, key="1")
        for _ in range(60):
            await inbox.drain()
            inbox.clock.forward("1h")
        [waiting] = await inbox.deliveries("n8n")
        assert (waiting.status, waiting.category) == ("pending", "transient")
        n8n.activate("orders")
        inbox.clock.forward("27h")
        await inbox.drain()
        [delivery] = await inbox.deliveries("n8n")
        assert (delivery.status, len(n8n.executions)) == ("done", 1)


async def test_nobody_listens_while_it_is_started_anew(inbox: TestInbox) -> None:
    async with N8nStandIn() as n8n:
        address = n8n.webhook()
    inbox.destination("n8n", url=address, preset="n8n", retry=[], allow_private=True)
    inbox.route("app", "n8n")
    await inbox.emit("app", "order.paid", {"id": 1}, key="1")
    await inbox.drain()
    [waiting] = await inbox.deliveries("n8n")
    assert (waiting.status, waiting.category) == ("pending", "transient")


@pytest.mark.parametrize(
    ("status", "settings", "ends"),
    [
        (404, {"permanent": [404]}, "dead"),  # what a person says comes first
        (403, {}, "dead"),
        (500, {}, "dead"),  # the workflow failed: that is for `retry`
        (404, {"retry": ["1m"]}, "pending"),
    ],
)
async def test_only_not_being_ready_is_waited_out(
    inbox: TestInbox, status: int, settings: dict[str, object], ends: str
) -> None:
    async with N8nStandIn() as n8n:
        inbox.destination("n8n", url=n8n.webhook(), preset="n8n", allow_private=True, **{"retry": [], **settings})  # type: ignore[arg-type]
        inbox.route("app", "n8n")
        n8n.fail(status)
        await inbox.emit("app", "order.paid", {"id": 1}, key="1")
        await inbox.drain()
        [delivery] = await inbox.deliveries("n8n")
        assert delivery.status == ends


async def test_another_method_than_the_workflows_is_no_matter_of_time() -> None:
    from oncehook.destinations.receivers import receiver_of

    n8n = receiver_of("n8n")
    assert n8n.why_unready(HttpAnswer(404, WRONG_METHOD)) is None
    assert n8n.why_unready(HttpAnswer(200, b'{"message":"Workflow was started"}')) is None
    with pytest.raises(ConfigError, match="n8n") as refused:
        receiver_of("stripe")
    assert "sources" in refused.value.hint


async def test_for_everybody_else_there_are_settings(inbox: TestInbox) -> None:
    async with N8nStandIn() as other:
        inbox.destination("hook", url=other.webhook(), transient=[404, 423], retry=["1m"], allow_private=True)
        inbox.route("app", "hook")
        other.deactivate()
        await inbox.emit("app", "order.paid", {"id": 1}, key="1")
        await inbox.drain()
        [waiting] = await inbox.deliveries("hook")
        assert (waiting.status, waiting.category, waiting.last_error) == ("pending", "transient", "HTTP 404")
        other.activate("orders")
        inbox.clock.forward("2m")
        await inbox.drain()
        assert [one.status for one in await inbox.deliveries("hook")] == ["done"]
