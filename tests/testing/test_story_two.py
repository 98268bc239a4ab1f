"""The second story: a tunnel that re-delivers everything twice and flaps. One execution, delivered on attempt 2."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from oncehook.inbox import Inbox
from oncehook.testing import TestInbox
from oncehook.testing.standins import EvolutionApiStandIn, MetaStandIn, N8nStandIn, Tunnel
from tests.acceptance.processes import Receiver

ANA = "5511988880142"


@pytest.mark.parametrize("cut", [False, True], ids=["answers 502", "cuts the line"])
async def test_one_execution_on_attempt_two(inbox: TestInbox, cut: bool) -> None:
    """What comes in twice runs once; what goes out into a bad moment goes out again."""
    async with (
        EvolutionApiStandIn() as evolution,
        N8nStandIn("whatsapp") as n8n,
        Tunnel(n8n.url, copies=1, flap_every=2, flap_first=True, cut=cut) as way_out,
    ):
        inbox.source("whatsapp", preset="evolution-api", secret=evolution.secret)
        inbox.destination("n8n", url=f"{way_out.url}/webhook/whatsapp", retry=["1m"], allow_private=True)
        inbox.route("whatsapp", "n8n")
        async with (
            inbox.served() as url,
            Tunnel(url, copies=2, flap_every=2, flap_first=True, cut=cut) as way_in,
        ):
            hook = evolution.message(from_=ANA, text="Hi")
            answers = await evolution.deliver(f"{way_in.url}/whatsapp", hook, retries=3)
            assert len(answers) == 2  # the first met a bad moment
            assert answers[-1].json()["status"] == "duplicate"  # the tunnel says what the second copy was told
            assert (way_in.flapped, way_in.handed_on) == (1, 2)

            await inbox.drain()
            assert n8n.executions == []
            [waiting] = await inbox.deliveries("n8n")
            assert (waiting.status, waiting.attempts) == ("pending", 1)

            inbox.clock.forward("2m")
            await inbox.drain()

        [execution] = n8n.executions
        [delivery] = await inbox.deliveries("n8n")
        assert (delivery.status, delivery.attempts) == ("done", 2)
        assert execution.headers["oncehook-attempt"] == "2"
        assert execution.headers["idempotency-key"] == str(delivery.event_id)
        assert execution.body["data"]["message"] == {"conversation": "Hi"}


async def test_the_same_in_real_time_through_a_server_of_its_own(tmp_path: Path) -> None:
    """`oncehook serve` as a process, real retries, nothing moved in time."""
    async with (
        MetaStandIn() as meta,
        N8nStandIn("whatsapp") as n8n,
        Tunnel(n8n.url, copies=1, flap_every=2, flap_first=True) as way_out,
    ):
        settings = f"""
store = "{{store}}"

[source.whatsapp]
preset = "whatsapp-cloud"
secret = {{{{ env = "META_APP_SECRET" }}}}
verify_token = {{{{ env = "META_VERIFY_TOKEN" }}}}
budget = "60s"

[destination.n8n]
url = "{way_out.url}/webhook/whatsapp"
retry = ["0.1s", "0.1s"]
timeout = "60s"
allow_private = true

[[route]]
from = "whatsapp"
to = "n8n"
"""
        receiver = Receiver(tmp_path, f"sqlite:{tmp_path / 'inbox.db'}", settings)
        receiver.start(env={"META_APP_SECRET": meta.secret, "META_VERIFY_TOKEN": "t"})
        try:
            with Tunnel(f"http://127.0.0.1:{receiver.port}", copies=2, flap_every=2, flap_first=True) as way_in:
                hooks = [meta.message(from_=ANA, text="one"), meta.message(from_=ANA, text="two")]
                await meta.deliver(f"{way_in.url}/in/whatsapp", *hooks, retries=3)
                while len(n8n.executions) < 2:  # the test's own time limit ends this
                    await asyncio.sleep(0.02)
        finally:
            assert receiver.stop() == 0
        texts = [run.body["entry"][0]["changes"][0]["value"]["messages"][0]["text"]["body"] for run in n8n.executions]
        assert texts == ["one", "two"]  # each once, in order
        assert [run.headers["oncehook-attempt"] for run in n8n.executions] == ["2", "2"]
    check = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    async with check.running(work=False):
        assert {one.name: (one.ok, one.detail) for one in await check.check() if not one.ok} == {}
