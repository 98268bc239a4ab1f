"""The API of a real server process, over a socket, on both engines: a worker at work, a stream that is watched."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.wire import Answer, Client, hook, request, signed

TOKEN = "canary-admin-token-93ab"
SETTINGS = """
[server]
admin_token = {{ env = "ADMIN" }}

[[server.tokens]]
name = "vera"
role = "viewer"
token = {{ env = "VIEWER" }}

[destination.crm]
url = "http://127.0.0.1:{{port}}/hooks"
allow_private = true
retry = ["1h"]

[[route]]
from = "orders"
to = "crm"
"""


@contextmanager
def closed_port() -> Iterator[int]:
    """Nobody listens there, and nobody else gets it meanwhile."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@pytest.fixture
def receiver(engine: Engine) -> Iterator[Receiver]:
    made = engine.receiver()
    with closed_port() as port:
        made.config = CONFIG + SETTINGS.replace("{{port}}", str(port))
        yield made.start(env={"ADMIN": TOKEN, "VIEWER": "token-of-vera-4471"})
        assert made.stop() == 0
    log = made.log.read_text()
    assert "Traceback" not in log, log
    assert TOKEN not in log


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def send(receiver: Receiver, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """One request on a connection of its own."""
    client = Client("127.0.0.1", receiver.port)
    try:
        return await client.send_raw(request(method, path, body, headers))
    finally:
        client.close()


async def ask(receiver: Receiver, path: str, token: str = TOKEN) -> Answer:
    return await send(receiver, "GET", f"/api/v1/{path}", b"", bearer(token))


async def act(receiver: Receiver, path: str, body: Any = None, token: str = TOKEN, **headers: str) -> Answer:
    raw = b"" if body is None else json.dumps(body).encode()
    return await send(receiver, "POST", f"/api/v1/{path}", raw, {**bearer(token), **headers})


async def arrived(receiver: Receiver, key: str, **about: str) -> str:
    body = hook(key, **about)
    answer = await send(receiver, "POST", "/in/orders", body, signed(body))
    event_id: str = answer.json["event_id"]
    return event_id


async def until(receiver: Receiver, path: str, name: str, value: object) -> dict[str, Any]:
    while (found := (await ask(receiver, path)).json).get(name) != value:
        await asyncio.sleep(0.02)
    return found


async def test_from_the_hook_to_the_discarded_dead_letter(receiver: Receiver) -> None:
    event_id = await arrived(receiver, "k1", customer="c")
    assert (await send(receiver, "GET", "/api/v1/events", b"", {})).status == 401
    assert (await ask(receiver, "events", "wrong")).status == 401
    [listed] = (await ask(receiver, "events", "token-of-vera-4471")).json["items"]
    assert (listed["id"], listed["key"], listed["subject"]) == (event_id, "k1", "c")
    [found] = (await ask(receiver, f"deliveries?query=event:{event_id}")).json["items"]
    path = f"deliveries/{found['id']}"
    # nobody listens there: one attempt now, the next in an hour, unless somebody asks for it
    waiting = await until(receiver, path, "category", "transient")
    assert (waiting["status"], waiting["attempts"]) == ("pending", 1)
    assert (await act(receiver, f"{path}/retry", token="token-of-vera-4471")).status == 403
    assert (await act(receiver, f"{path}/retry")).status == 200
    dead = await until(receiver, path, "status", "dead")
    assert (dead["attempts"], dead["run"]) == (2, 1)
    first = await act(receiver, f"{path}/replay", {"reason": "again"}, **{"Idempotency-Key": "a"})
    again = await act(receiver, f"{path}/replay", {"reason": "again"}, **{"Idempotency-Key": "a"})
    assert (first.status, again.body) == (202, first.body)
    await until(receiver, path, "run", 2)
    assert await arrived(receiver, "k1", customer="c") == event_id
    stats = (await ask(receiver, "stats?since=24h&by=destination")).json
    assert (stats["total"], stats["duplicates"], stats["replays"]) == (1, 1, 1)
    assert stats["retries"] >= 1
    [destination] = (await ask(receiver, "destinations")).json["items"]
    assert destination["retry"] == "1 h: 2 attempts over 1 h"
    audit = (await ask(receiver, "audit")).json["items"]
    assert [line["act"] for line in audit if line["actor"] == "vera"] == ["refused"]
    # The wrong tokens are written in sum, by and by.
    assert {line["act"] for line in audit if line["actor"] == "unknown"} <= {"refused"}
    assert {line["actor"] for line in audit} - {"unknown"} == {"admin", "vera"}


async def test_dead_letters_are_planned_and_replayed_together(receiver: Receiver) -> None:
    for n in range(3):
        await arrived(receiver, f"k{n}")
    for found in (await ask(receiver, "deliveries")).json["items"]:
        await until(receiver, f"deliveries/{found['id']}", "attempts", 1)
        await until(receiver, f"deliveries/{found['id']}", "category", "transient")
        await act(receiver, f"deliveries/{found['id']}/retry")
        await until(receiver, f"deliveries/{found['id']}", "status", "dead")
    plan = (await act(receiver, "replays/plan", {"query": "status:dead since:1h"})).json
    assert (plan["total"], plan["by_destination"]) == (3, {"crm": 3})
    made = (await act(receiver, "replays", {"plan": plan["plan"], "reason": "back"})).json["replay_id"]
    replay = await until(receiver, f"replays/{made}", "fed", 3)
    assert (replay["planned"], replay["query"]) == (3, plan["query"])
    assert (await act(receiver, f"replays/{made}/abort")).json["state"] == "aborted"
    paused = (await act(receiver, "destinations/crm/pause", {"reason": "deploy"})).json
    assert (paused["paused"], paused["paused_by"]) == (True, "admin")


async def test_the_stream_is_live_and_ends_with_the_server(receiver: Receiver) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
    writer.write(request("GET", "/api/v1/stream", b"", bearer()))
    head = await reader.readuntil(b"watching")
    assert b"text/event-stream" in head
    event_id = await arrived(receiver, "k1")
    told = await reader.readuntil(event_id.encode())
    assert b"event: arrival" in told
    # a server that stops does not wait for who watches
    stopping = asyncio.get_running_loop().run_in_executor(None, receiver.stop)
    assert await reader.read() is not None
    assert await stopping == 0
    writer.close()
