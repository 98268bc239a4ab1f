"""An inbox that sends to itself: each event goes round a few times, and is then refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oncehook import Event, Inbox
from oncehook.model import HOPS, MOST_HOPS, Filter, hops_of, split_answer
from tests.acceptance.conftest import Engine, engine
from tests.waiting import until

__all__ = ["engine"]

SETTINGS = """
store = "{store}"

[source.loop]
verify = "none"
key = "header:webhook-id"
budget = "20s"

[destination.self]
url = "http://127.0.0.1:PORT/in/loop"
allow_private = true

[[route]]
from = "loop"
to = "self"
when = {{ type = "*" }}
"""


async def test_an_event_does_not_go_round_for_ever(engine: Engine) -> None:
    receiver = engine.receiver()
    receiver.port = receiver._port_of_its_own()
    receiver.config = SETTINGS.replace("PORT", str(receiver.port))
    receiver.start()
    answer = await receiver.client().post("/in/loop", b"{}", {"webhook-id": "first"})
    assert answer.status == 200
    await until(lambda: ("dead",) in engine.rows("SELECT status FROM deliveries"))
    # the last refusal may be settled before the hop that led to it
    await until(lambda: ("pending",) not in engine.rows("SELECT status FROM deliveries"))
    assert sorted(engine.rows("SELECT status FROM deliveries")) == [("dead",), *[("done",)] * MOST_HOPS]
    assert len(engine.rows("SELECT id FROM events")) == MOST_HOPS + 1
    [(status, kept)] = engine.rows("SELECT status, answer FROM attempts WHERE outcome = 'dead'")
    said, _ = split_answer(kept)
    assert said is not None
    assert (status, json.loads(said)["code"]) == (400, "too_many_hops")
    receiver.stop()
    log = receiver.log.read_text()
    assert "too_many_hops" in log
    assert "leads back to [source.loop] of this inbox" in log, "the start has said so"


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    made = Inbox(f"sqlite:{tmp_path}/oncehook.db")
    made.source("orders", verify="bearer", secret="a secret for tests", key="none", budget="60s")
    return made


def header(hops: str, secret: str = "a secret for tests") -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}", "Oncehook-Hops": hops}


async def test_who_cannot_prove_anything_learns_nothing_of_hops(inbox: Inbox) -> None:
    async with inbox.running(work=False):
        forged = await inbox.receive("orders", header("9", "wrong"), b"{}")
        unknown = await inbox.receive("nobody", header("9"), b"{}")
        far = await inbox.receive("orders", header(str(MOST_HOPS + 1)), b"{}")
        near = await inbox.receive("orders", header(str(MOST_HOPS)), b"{}")
    assert forged.reply == unknown.reply
    assert forged.reply.status == 401
    assert (far.reply.status, json.loads(far.reply.body)["code"]) == (400, "too_many_hops")
    assert (near.reply.status, near.outcome) == (200, "accepted")


@pytest.mark.parametrize("value", ["", "-1", "six", "1e9", "9" * 10, "٩", "6, 7"])
async def test_what_no_inbox_has_written_counts_as_nothing(inbox: Inbox, value: str) -> None:
    async with inbox.running(work=False):
        headers = [(b"authorization", b"Bearer a secret for tests"), (HOPS, value.encode())]
        assert (await inbox.receive("orders", headers, b"{}")).outcome == "accepted"


async def test_a_handler_that_emits_does_not_begin_to_count_anew(inbox: Inbox) -> None:
    @inbox.on("orders")
    async def pass_on(event: Event) -> None:
        event.emit("onward", "t", {})

    async with inbox.running():
        await inbox.receive("orders", header("3"), b"{}")
        await inbox.drain()
        await inbox.emit("plain", "t", {})
        events = [await inbox.store.get_event(one.id) for one in (await inbox.store.find_events(Filter())).items]
    assert {one.source: hops_of(one.request_head) for one in events if one} == {"orders": 3, "onward": 3, "plain": 0}
