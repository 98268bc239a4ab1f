"""`serve --receivers`: several processes take arrivals in, and it cannot be told from one (R56, R57, S14)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.applications import Starlette

from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.web import server as web
from oncehook.web.connection import ConnectionLimits
from oncehook.web.counts import CONNECTIONS
from oncehook.web.receivers import Receivers, build_hooks
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, PATIENCE, Receiver
from tests.waiting import until
from tests.wire import SECRET, Answer, Client, hook, request, signed

TOKEN = "canary-admin-token-93ab"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS = """
[server]
admin_token = {{ env = "ADMIN" }}
receivers = 2
"""


class Server(Receiver):
    """A server with two receivers."""

    def begin(self, **options: Any) -> Server:
        self.start(env={"ADMIN": TOKEN}, **options)
        return self

    async def ask(self, path: str) -> Any:
        client = self.client()
        answer = await client.get(f"/api/v1/{path}", BEARER)
        client.close()
        return answer.json

    async def receivers(self) -> list[dict[str, Any]]:
        """As they reported: a receiver that has just started is missing."""
        receivers: list[dict[str, Any]] = (await self.ask("system"))["receivers"]
        return receivers

    async def page(self, path: str) -> str:
        """A page of the dashboard, for who sits at this machine."""
        (link,) = re.findall(r"^dashboard  \S+(/\?token=\w+)$", self.log.read_text(), re.MULTILINE)
        client = self.client()
        host = {"Host": f"127.0.0.1:{self.port}"}
        cookie = (await client.get(link, host)).headers["set-cookie"].partition(";")[0]
        return (await client.get(path, {**host, "Cookie": cookie})).body.decode()

    def pids(self) -> list[int]:
        """Processes that the server has started."""
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.pid)], capture_output=True, text=True).stdout
        return [int(pid) for pid in children.split()]

    async def metrics(self) -> Counter[str]:
        client = self.client()
        text = (await client.get("/metrics", BEARER)).body.decode()
        client.close()
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("oncehook_")]
        return Counter({name: float(value) for name, _, value in lines})  # type: ignore[arg-type]

    async def wait_for_metric(self, name: str, value: float) -> None:
        while (await self.metrics())[name] < value:
            await asyncio.sleep(0.1)
        assert (await self.metrics())[name] == value


def make_server(engine: Engine, settings: str = SETTINGS) -> Server:
    made = Server(engine.folder / "server", engine.url, CONFIG + settings)
    engine.receivers.append(made)
    return made


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[Server]:
    made = make_server(engine).begin()
    yield made
    assert await asyncio.to_thread(made.stop) == 0
    log = made.log.read_text()
    assert "Traceback" not in log, log
    assert log.count("ready on http") == 1, "only the main process says so"


def is_running(pid: int) -> bool:
    """Tell whether a process is there, and no zombie."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


async def post(client: Client, key: str) -> Answer:
    body = hook(key)
    return await client.post("/in/orders", body, signed(body))


# -- taking in ---------------------------------------------------------------------------------


async def test_of_many_copies_one_is_accepted_whichever_process_takes_them(engine: Engine, server: Server) -> None:
    clients = [server.client() for _ in range(16)]
    verdicts: dict[str, list[dict[str, Any]]] = {}
    for n in range(60):
        answers = await asyncio.gather(*(post(client, f"order-{n}") for client in clients))
        verdicts[f"order-{n}"] = [answer.json for answer in answers]
    for key, answers in verdicts.items():
        assert sorted(one["status"] for one in answers) == ["accepted", *["duplicate"] * 15], key
        assert len({one["event_id"] for one in answers}) == 1
    assert len(engine.events()) == 60
    assert sorted(engine.copies()) == [16] * 60
    # Every arrival is counted once, and both processes had their part of 16 connections.
    await server.wait_for_metric('oncehook_arrivals_total{outcome="accepted",source="orders"}', 60)
    await server.wait_for_metric('oncehook_arrivals_total{outcome="duplicate",source="orders"}', 900)
    metrics = await server.metrics()
    assert metrics['oncehook_ack_duration_seconds_count{source="orders"}'] == 960
    assert metrics['oncehook_ack_duration_seconds_bucket{le="+Inf",source="orders"}'] == 960
    assert metrics['oncehook_arrival_size_bytes_count{source="orders"}'] == 960
    receivers = await server.receivers()
    assert [one["number"] for one in receivers] == [1, 2]
    assert sorted(one["pid"] for one in receivers) == sorted(server.pids())
    assert sum(one["arrivals"] for one in receivers) == 960
    assert all(os.getsid(one["pid"]) == one["pid"] for one in receivers), "Ctrl-C is for the main process"
    page = await server.page("/system")
    for one in receivers:
        assert f"{one['number']} · {one['pid']}" in page
    assert all(one["arrivals"] and one["memory"] > 1 << 20 and one["cpu"] > 0 for one in receivers), receivers


async def test_any_connection_may_ask_for_anything(server: Server) -> None:
    client = server.client()
    for n in range(5):
        for _ in range(2):
            assert (await client.get("/livez")).body == b"ok\n"
            assert (await client.get("/readyz")).json == {"status": "ready"}
        assert (await post(client, f"mixed-{n}")).json["status"] == "accepted"
        events = (await client.get("/api/v1/events", BEARER)).json["items"]
        assert [one["key"] for one in events] == [f"mixed-{m}" for m in range(n, -1, -1)]
        assert (await post(client, f"mixed-{n}")).json["status"] == "duplicate"
        assert (await client.get("/api/v1/nowhere", BEARER)).status == 404
    assert client._streams is not None
    port = client._streams[1].get_extra_info("sockname")[1]
    # In one piece, too: answers come in the order of their requests.
    body = hook("piece")
    hooks, probe = request("POST", "/in/orders", body, signed(body)), request("GET", "/livez", b"")
    reader, writer = client._streams
    writer.write((hooks * 3 + probe) * 3)
    answers = [await client._read(reader) for _ in range(12)]
    assert [one.body == b"ok\n" for one in answers] == [False, False, False, True] * 3
    assert [one.json["status"] for one in answers if one.body != b"ok\n"] == ["accepted", *["duplicate"] * 8]
    assert client._streams[1].get_extra_info("sockname")[1] == port, "all on one connection"


async def test_a_large_body_is_handed_over_in_the_middle(server: Server) -> None:
    client = server.client()
    body = b'{"query": "' + b"x" * 300_000 + b'"}'
    whole = request("POST", "/api/v1/replays/plan", body, {**BEARER, "Content-Type": "application/json"})
    assert (await post(client, "before")).status == 200
    assert client._streams is not None
    reader, writer = client._streams
    for start in range(0, len(whole), 70_000):
        writer.write(whole[start : start + 70_000])
        await writer.drain()
        await asyncio.sleep(0.05)
    assert (await client._read(reader)).status in (400, 404, 405, 413, 422)
    client.close()


async def test_arrivals_of_receivers_are_seen_live(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("GET", "/api/v1/stream", b"", BEARER))
    await reader.readuntil(b"watching")
    clients = [server.client() for _ in range(12)]
    for n, client in enumerate(clients):
        assert (await post(client, f"live-{n}")).status == 200
    forged = await clients[0].post("/in/orders", hook("forged"), signed(b"another"))
    assert forged.status == 401
    seen = b""
    while b"rejected" not in seen:
        seen += await reader.read(1 << 16)
    assert set(re.findall(rb'"key":"(live-\d+)"', seen)) == {b"live-%d" % n for n in range(12)}
    writer.close()


async def test_rejections_of_receivers_are_kept(engine: Engine, server: Server) -> None:
    for n in range(8):
        client = server.client()
        assert (await client.post("/in/orders", hook(f"forged-{n}"), signed(b"another"))).status == 401
        client.close()
    await server.wait_for_metric('oncehook_arrivals_total{outcome="rejected",source="orders"}', 8)
    while len(kept := (await server.ask("rejections"))["items"]) < 8:
        await asyncio.sleep(0.1)
    assert len({rejection["id"] for rejection in kept}) == 8
    assert engine.rows("SELECT sum(n) FROM counters WHERE what = 'rejected'")[0][0] == 8


# -- ending ------------------------------------------------------------------------------------


async def load(server: Server, acknowledged: set[str], stop: asyncio.Event, name: str) -> Counter[int]:
    """Send until told to stop; returns how often each status came, and under 0 how often a connection was lost."""
    statuses: Counter[int] = Counter()
    client, n = server.client(), 0
    while not stop.is_set():
        n += 1
        try:
            answer = await post(client, f"{name}-{n}")
        except (OSError, asyncio.IncompleteReadError):
            statuses[0] += 1
            await asyncio.sleep(0.01)
            continue
        statuses[answer.status] += 1
        if answer.status == 200:
            acknowledged.add(f"{name}-{n}")
    client.close()
    return statuses


async def test_a_receiver_that_is_killed_loses_nothing_and_comes_back(engine: Engine, server: Server) -> None:
    acknowledged: set[str] = set()
    stop = asyncio.Event()
    senders = [asyncio.create_task(load(server, acknowledged, stop, f"sender{n}")) for n in range(8)]
    await until(lambda: len(acknowledged) > 100)
    before = server.pids()
    for killed in before:
        os.kill(killed, signal.SIGKILL)
        await until(lambda killed=killed: not is_running(killed))  # type: ignore[misc]
        so_far = len(acknowledged)
        await until(lambda so_far=so_far: len(acknowledged) > so_far + 50)  # type: ignore[misc]
        while len(pids := {one["pid"] for one in await server.receivers()}) < 2 or killed in pids:
            await asyncio.sleep(0.05)
    stop.set()
    statuses = sum(await asyncio.gather(*senders), Counter())
    assert statuses[0] <= 2 * len(senders), "a connection is lost at most once for each that is killed"
    assert set(statuses) <= {0, 200}, "meanwhile others answered"
    assert acknowledged <= set(engine.events())
    assert not set(before) & set(server.pids())
    assert (await server.metrics())["oncehook_receivers_ended_total"] == 2
    assert server.log.read_text().count('"receiver.ended"') == 2


async def test_a_receiver_that_ends_in_order_makes_no_count_fall(server: Server) -> None:
    client = server.client()
    for n in range(20):
        assert (await post(client, f"order-{n}")).status == 200
    before = server.pids()
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    await until(lambda: len(set(server.pids()) - set(before)) == 2)
    for n in range(20):
        body = hook(f"order-{n}")
        assert (await server.client().post("/in/orders", body, signed(body))).json["status"] == "duplicate"
    await server.wait_for_metric('oncehook_arrivals_total{outcome="duplicate",source="orders"}', 20)
    assert (await server.metrics())['oncehook_arrivals_total{outcome="accepted",source="orders"}'] == 20


async def test_receivers_end_with_their_main_process(engine: Engine) -> None:
    server = make_server(engine).begin()
    assert (await post(server.client(), "first")).status == 200
    receivers = server.pids()
    assert len(receivers) == 2
    server.kill()
    await until(lambda: not any(map(is_running, receivers)))
    server.begin()  # the address is free
    assert (await post(server.client(), "first")).json["status"] == "duplicate"
    assert server.stop() == 0


async def test_stopping_answers_everything_that_was_taken(engine: Engine) -> None:
    # Each receiver holds its first commit for a second, so the signal comes in the middle of it.
    server = make_server(engine).begin(fault="before_intake:1:pause=1")
    clients = [server.client() for _ in range(16)]
    answers = [asyncio.create_task(post(client, f"order-{n}")) for n, client in enumerate(clients)]
    probe = server.client()
    await until(lambda: all(client._streams for client in clients))
    for _ in range(4):
        assert (await probe.get("/livez")).body == b"ok\n"
    receivers = server.pids()
    assert server.process is not None
    await asyncio.sleep(0.3)  # both have begun to write
    server.process.send_signal(signal.SIGTERM)
    assert {(await answer).json["status"] for answer in answers} == {"accepted"}
    assert server.wait() == 0
    assert not any(map(is_running, receivers))
    assert set(engine.events()) == {f"order-{n}" for n in range(16)}
    assert "Traceback" not in server.log.read_text()


async def test_stopping_under_load_loses_nothing(engine: Engine) -> None:
    server = make_server(engine).begin()
    acknowledged: set[str] = set()
    stop = asyncio.Event()
    senders = [asyncio.create_task(load(server, acknowledged, stop, f"sender{n}")) for n in range(8)]
    await until(lambda: len(acknowledged) > 100)
    assert await asyncio.to_thread(server.stop) == 0
    stop.set()
    statuses = sum(await asyncio.gather(*senders), Counter())
    assert set(statuses) <= {0, 200}
    assert acknowledged <= set(engine.events())
    assert '"receiver.ended"' not in server.log.read_text()


async def test_both_signals_end_it_at_once(postgres: Engine) -> None:
    server = make_server(postgres).begin(fault="before_intake:1:pause=20")
    asked = [asyncio.create_task(post(server.client(), f"order-{n}")) for n in range(4)]
    await asyncio.sleep(0.5)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGINT)
    receivers = server.pids()
    await asyncio.to_thread(server.process.wait, 15)
    await until(lambda: not any(map(is_running, receivers)))
    await asyncio.gather(*asked, return_exceptions=True)


# -- starting ----------------------------------------------------------------------------------


async def test_an_address_is_not_shared_with_another_server(postgres: Engine) -> None:
    server = make_server(postgres).begin()
    command = [sys.executable, "-m", "oncehook", "serve", "--port", str(server.port)]
    again = subprocess.run(
        command, cwd=server.folder, capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "ADMIN": TOKEN, "ORDERS_SECRET": "x" * 20},
    )  # fmt: skip
    assert again.returncode == 2
    assert "Cannot listen on 127.0.0.1" in again.stderr
    assert server.stop() == 0


@contextlib.asynccontextmanager
async def serving(engine: Engine, limits: ConnectionLimits, command: Sequence[str] = ()) -> AsyncIterator[Limited]:
    """A main process inside this one, with real receivers, and limits that a test can reach."""
    file = engine.folder / "oncehook.toml"
    file.write_text(CONFIG.format(store=engine.url))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORDERS_SECRET", SECRET)
        inbox = Inbox.from_toml(file)
        setup = json.dumps([None, str(file), {}])
        async with inbox.running(work=False):
            default = [sys.executable, "-m", "oncehook.cli.receiver", setup]
            receivers = Receivers(2, command or default, inbox.observer)
            address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(
                web.serve(
                    Starlette(routes=web.probe_routes(inbox.troubles)),
                    hooks=build_hooks(inbox, (), receivers.counts),
                    host="127.0.0.1",
                    port=0,
                    limits=limits,
                    on_ready=address.set_result,
                    on_stop=lambda: None,
                    receivers=receivers,
                )
            )
            await asyncio.wait([task, address], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            try:
                yield Limited(int(address.result().rpartition(":")[2]), inbox, receivers)
            finally:
                signal.raise_signal(signal.SIGTERM)
                await task


@dataclass
class Limited:
    port: int
    inbox: Inbox
    main: Receivers

    def client(self) -> Client:
        return Client("127.0.0.1", self.port)

    @property
    def open(self) -> int:
        return self.main.counts.count_of(CONNECTIONS).total


async def test_connections_are_bounded_over_all_receivers(engine: Engine) -> None:
    async with serving(engine, ConnectionLimits(connections=6)) as served:
        streams = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(6)]
        for _, writer in streams:
            writer.write(request("POST", "/in/orders", hook("half"), {})[:-5])  # a body is being read: none is idle
        await until(lambda: served.open == 6)
        await asyncio.sleep(0.2)
        for _ in range(6):  # whichever process they come to
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()
        streams[0][1].close()
        await until(lambda: served.open == 5)
        client = served.client()
        assert (await post(client, "admitted")).status == 200
        assert (await client.get("/livez")).status == 200, "its place goes with it to the main process"
        assert served.open == 6
        client.close()
        for _, writer in streams:
            writer.close()
        await until(lambda: served.open == 0)


async def test_the_main_process_takes_arrivals_in_while_receivers_are_away(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncehook.web.receivers.FIRST_WAIT", 1000.0)
    async with serving(engine, ConnectionLimits()) as served:
        await until(lambda: len(served.inbox.receivers) == 2)
        for one in served.inbox.receivers:
            os.kill(one.pid, signal.SIGKILL)
        await until(lambda: not served.inbox.receivers)
        for n in range(12):
            client = served.client()
            assert (await post(client, f"order-{n}")).json["status"] == "accepted"
            assert (await client.get("/livez")).status == 200
            assert (await post(client, f"order-{n}")).json["status"] == "duplicate"
            client.close()
        await until(lambda: served.open == 0)
    assert len(engine.events()) == 12


async def test_a_receiver_that_hangs_is_ended(postgres: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(postgres, ConnectionLimits()) as served:
        await until(lambda: len(served.inbox.receivers) == 2)
        hung = served.inbox.receivers[0].pid
        monkeypatch.setattr("oncehook.web.receivers.MOST_SILENT", 3)
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: served.inbox.receivers[0].pid != hung and len(served.inbox.receivers) == 2)
        assert not is_running(hung)
        for n in range(8):
            client = served.client()
            assert (await post(client, f"after-{n}")).status == 200
            client.close()


async def test_a_receiver_that_cannot_start_is_a_failure_of_the_whole(postgres: Engine) -> None:
    with pytest.raises(ConfigError, match="A receiver cannot be started: exit code 7"):
        async with serving(postgres, ConnectionLimits(), [sys.executable, "-c", "exit(7)"]):
            pass
