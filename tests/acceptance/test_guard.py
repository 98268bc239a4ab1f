"""Senders that are slow, many, endless or gone: they cost themselves time, and nobody else (S14, R9, R57, R62).

The servers here run in this process. Their deadlines are long until a test makes them short, so that nobody honest is
late on a busy machine; and the commits of their store can be held up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from oncehook import faults
from oncehook.inbox import Inbox
from oncehook.store.sqlite import SqliteStore
from oncehook.verify import Hmac
from oncehook.web import server
from oncehook.web.connection import ConnectionLimits, Connections
from oncehook.web.hooks import BodyBudget, Hooks
from oncehook.web.peers import network_of, peer_finder
from tests.kept import kept_events
from tests.waiting import until
from tests.wire import SECRET, Answer, Client, hook, request, signed

A_LOOK = 1.1
"""Seconds in which the guard surely looks at all connections."""
PATIENCE = 60.0
"""Longer than any deadline here takes; who is still waiting then is held for ever."""
PATIENT = ConnectionLimits(head_seconds=PATIENCE, body_seconds=PATIENCE)


@dataclass
class Served:
    port: int
    path: Path
    inbox: Inbox
    guard: Connections
    hooks: Hooks

    @property
    def open(self) -> int:
        """How many connections it has."""
        return len(self.guard.open)

    @property
    def waiting(self) -> int:
        """How many arrivals wait for the writer."""
        assert isinstance(self.inbox.store, SqliteStore)
        return len(self.inbox.store._writer._waiting)

    @contextlib.contextmanager
    def hurrying(self, seconds: float = 0.5) -> Iterator[None]:
        """While inside, whoever takes longer than this is too slow."""
        before = self.guard.limits
        self.guard.limits = replace(before, head_seconds=seconds, body_seconds=seconds)
        yield
        self.guard.limits = before

    def client(self) -> Client:
        return Client("127.0.0.1", self.port)

    async def post(self, key: str | None, source: str = "orders") -> Answer:
        client, body = self.client(), hook(key) if key else b'{"no": "key"}'
        try:
            return await client.post(f"/in/{source}", body, signed(body))
        finally:
            client.close()

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def keys(self) -> list[str | None]:
        with closing(sqlite3.connect(self.path)) as connection:
            return [key for (key,) in connection.execute("SELECT key FROM events ORDER BY id")]


@contextlib.asynccontextmanager
async def serving(
    folder: Path, limits: ConnectionLimits = PATIENT, *, most_held: int = 256 << 20, **store: Any
) -> AsyncIterator[Served]:
    """A server with a few sources, stopped as an operator would. What comes from this machine is a proxy's word."""
    path = folder / "inbox.db"
    inbox = Inbox(f"sqlite:{path}")
    inbox._parts.store = SqliteStore(path, **store)
    scheme = Hmac(header="X-Signature", prefix="sha256=")
    inbox.source("orders", verify=scheme, secret=SECRET, key="$.id", budget="20s")
    inbox.source("hasty", verify=scheme, secret=SECRET, key="$.id", budget="0.4s")
    inbox.source("fenced", verify="none", key="$.id", ip_allow=["203.0.113.0/24"])
    inbox.source("local", verify="none", key="$.id", loopback_only=True)
    async with inbox.running():
        trusted = [ip_network("127.0.0.1/32")]
        hooks = Hooks(inbox.receiver, "/in/", peer_finder(trusted), BodyBudget(most_held, trusted))
        probes = Starlette(routes=[*server.probe_routes(inbox.troubles), server.metrics_route(inbox.metrics, None)])
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        made: list[Connections] = []

        def making(*given: Any) -> Connections:
            made.append(Connections(*given))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "Connections", making)
            task = asyncio.create_task(
                server.serve(
                    probes,
                    hooks=hooks,
                    host="127.0.0.1",
                    port=0,
                    limits=limits,
                    on_ready=address.set_result,
                    on_stop=lambda: None,
                )
            )
            port = int((await address).rpartition(":")[2])
        served = Served(port, path, inbox, made[0], hooks)
        client = served.client()
        assert (await client.get("/livez")).status == 200
        client.close()
        await until(lambda: not served.open)
        try:
            yield served
        finally:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else nobody hears it, and all tests would end
                signal.raise_signal(signal.SIGTERM)
            await task


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Everything until the other end hangs up; fails when it never does."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            while piece := await reader.read(1 << 16):
                heard += piece
    return heard


async def drip(data: bytes, writer: asyncio.StreamWriter) -> None:
    """One byte at a time, for as long as somebody listens."""
    with contextlib.suppress(OSError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.1)


HEAD = b"POST /in/orders HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n"


# -- slow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_once", "slowly"), [(b"", HEAD), (HEAD + b"\r\n", b"x" * 99), (b"", b"")], ids=["head", "body", "nothing"]
)
async def test_a_slow_request_ends_with_408(tmp_path: Path, at_once: bytes, slowly: bytes) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.dial()
        writer.write(at_once)
        dripping = asyncio.create_task(drip(slowly, writer))
        with served.hurrying():
            assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await dripping
        assert served.keys() == []


@pytest.mark.parametrize("tail", [HEAD[:20], HEAD + b"\r\n"], ids=["head", "body"])
async def test_deadlines_hold_for_the_second_request_of_a_connection(tmp_path: Path, tail: bytes) -> None:
    async with serving(tmp_path) as served:
        client, body = served.client(), hook("first")
        first = request("POST", "/in/orders", body, signed(body))
        assert (await client.send_raw(first)).status == 200
        assert client._streams is not None
        reader, writer = client._streams
        writer.write(tail)
        with served.hurrying():
            assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
        client.close()


async def test_a_second_request_in_the_same_piece_does_not_escape_the_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.dial()
        body = hook("first")
        writer.write(request("POST", "/in/orders", body, signed(body)) + HEAD + b"\r\n")
        assert b'"accepted"' in await reader.readuntil(b"}")
        with served.hurrying():
            assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_an_honest_connection_may_rest_between_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = served.client()
        for n in range(2):
            body = hook(f"rested-{n}")
            assert (await client.post("/in/orders", body, signed(body))).status == 200
            with served.hurrying(0.001):
                await asyncio.sleep(A_LOOK)
        assert (await client.get("/livez")).status == 200
        assert client._streams is not None
        client.close()


async def test_a_sender_that_takes_no_answers_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path, replace(PATIENT, pipelined=4000)) as served:
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", served.port))
            line.sendall(request("GET", "/metrics", b"") * 4000)
            ended = select.poll()
            ended.register(line, 0)  # errors are told without being asked for
            await until(lambda: any(one._stuck_since for one in served.guard.open))
            with served.hurrying():
                await until(lambda: ended.poll(0))


async def test_three_hundred_slow_senders_do_not_stop_honest_ones(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        slow = [await served.dial() for _ in range(300)]
        ends = [asyncio.create_task(rest(reader)) for reader, _ in slow]
        dripping = [
            asyncio.create_task(drip(HEAD if n % 2 else HEAD + b"\r\n" + b"x" * 99, writer))
            for n, (_, writer) in enumerate(slow)
        ]
        for n in range(50):
            assert (await served.post(f"honest-{n}")).json["status"] == "accepted"
        assert served.open >= 300
        with served.hurrying():
            assert all(end.startswith(b"HTTP/1.1 408 ") for end in await asyncio.gather(*ends))
        for _, writer in slow:
            writer.close()
        await asyncio.gather(*dripping)
        assert len(served.keys()) == 50


# -- many --------------------------------------------------------------------------------------


async def test_one_address_holds_a_bounded_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connections, "may_hold_many", lambda guard, address: False)
    async with serving(tmp_path, replace(PATIENT, per_address=3)) as served:
        held = [await served.dial() for _ in range(3)]
        await check_full(served, held)


async def test_all_together_hold_a_bounded_number(tmp_path: Path) -> None:
    async with serving(tmp_path, replace(PATIENT, connections=3)) as served:
        held = [await served.dial() for _ in range(3)]
        for _, writer in held:
            writer.write(HEAD + b"\r\n")  # a body is being read: none of them is idle
        await until(lambda: served.open == 3 and not served.guard.resting)
        await check_full(served, held)


async def check_full(served: Served, held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """There is no place for one more until one of these goes."""
    reader, writer = await served.dial()
    refusal = await rest(reader)
    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: " in refusal
    writer.close()
    held[0][1].close()
    await until(lambda: served.open == 2)
    assert (await served.post("admitted")).status == 200
    for _, other in held:
        other.close()


async def keep(served: Served, key: str) -> Client:
    """A client whose connection is kept after one hook."""
    client, body = served.client(), hook(key)
    assert (await client.post("/in/orders", body, signed(body))).status == 200
    return client


async def test_when_all_places_are_taken_the_longest_idle_one_goes(tmp_path: Path) -> None:
    async with serving(tmp_path, replace(PATIENT, connections=3)) as served:
        first, second, third = [await keep(served, f"kept-{n}") for n in range(3)]
        assert (await first.post("/in/orders", body := hook("again"), signed(body))).status == 200
        assert second._streams is not None
        assert (await served.post("newcomer")).status == 200
        assert await rest(second._streams[0]) == b"", "no answer to a request that was never made"
        for client in (first, third):
            assert (await client.get("/livez")).status == 200
            client.close()
        second.close()


@pytest.mark.parametrize("said", [b"", HEAD[:30]], ids=["nothing", "half a head"])
async def test_who_never_says_a_whole_head_makes_way_for_who_does(tmp_path: Path, said: bytes) -> None:
    async with serving(tmp_path, replace(PATIENT, connections=3)) as served:
        held = [await served.dial() for _ in range(2)]
        for _, writer in held:
            writer.write(said)
        await until(lambda: sum(one._overhead for one in served.guard.open) == 2 * len(said))
        kept = await keep(served, "kept")
        held[1][1].write(b"P")  # bytes now and then do not save a place
        for n in range(5):
            assert (await served.post(f"newcomer-{n}")).status == 200
        assert (await rest(held[0][0])).startswith(b"HTTP/1.1 503 ")
        assert (await kept.get("/livez")).status == 200, "who sends keeps its place"
        kept.close()
        for _, writer in held:
            writer.close()


async def test_a_place_is_had_again_at_once_from_who_takes_no_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, replace(PATIENT, connections=1)) as served:
        _, writer = await served.dial()
        await until(lambda: served.open)
        (stuck,) = served.guard.open
        while not stuck.transport.get_write_buffer_size():  # more than the system takes for somebody who does not read
            stuck.transport.write(b"x" * (1 << 20))
        assert (await served.post("newcomer")).status == 200
        await until(lambda: stuck.transport.get_extra_info("socket").fileno() < 0)
        writer.close()


async def test_who_comes_while_the_server_stops_is_let_go(tmp_path: Path) -> None:
    """It may be accepted in the moment in which all others are shut down; kept, it would hold up the end."""
    async with serving(tmp_path) as served:
        served.guard.shut_down()
        reader, writer = await served.dial()
        assert await rest(reader) == b""
        writer.close()


def test_an_address_is_counted_with_its_network() -> None:
    assert network_of("203.0.113.9") == "203.0.113.9"
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::1") != network_of("2001:db8:1:2::1")
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("unknown") == "unknown"


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    pass


def test_this_machine_and_proxies_may_hold_many() -> None:
    guard = Connections(_nothing, trusted=[ip_network("198.51.100.7")])
    assert [guard.may_hold_many(a) for a in ("127.0.0.1", "::1", "198.51.100.7", "203.0.113.1", "unknown")] == [
        *(True, True, True, False, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("soft", "hard", "asked", "expected"), [(300, 600, 1000, 344), (300, 2000, 1000, 1000)])
def test_open_files_bound_the_connections(soft: int, hard: int, asked: int, expected: int) -> None:
    # In a process of its own: a limit once lowered cannot be raised again.
    program = (
        "import resource; from oncehook.web.connection import limit_connections;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        f"print(limit_connections({asked}), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(expected), str(min(asked + 256, hard)), str(hard)]


# -- gone --------------------------------------------------------------------------------------


async def test_a_sender_that_is_gone_before_we_look_is_not_taken_for_our_own(tmp_path: Path) -> None:
    """Its address can no longer be asked for; that must not open what is closed to strangers."""
    async with serving(tmp_path) as served:
        for source in ("fenced", "local"):  # nothing here lets the loop go on: they are accepted after their end
            line = socket.create_connection(("127.0.0.1", served.port))
            line.sendall(request("POST", f"/in/{source}", hook(f"ghost-{source}")))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.close()  # a reset, not a farewell
        assert (await served.post("ordinary")).status == 200
        assert served.keys() == ["ordinary"]


# -- a store that is held up -------------------------------------------------------------------


@dataclass
class Gate:
    """Holds up the writer before its commit while it is closed."""

    open: threading.Event
    reached: threading.Event

    def close(self) -> None:
        self.open.clear()
        self.reached.clear()

    async def wait_until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(threading.Event(), threading.Event())
    made.open.set()

    def point(name: str) -> None:
        if name == "before_intake":  # the sweep commits too, whenever it likes
            made.reached.set()
            made.open.wait(PATIENCE)  # not for ever: a test that fails must end

    monkeypatch.setattr(faults, "point", point)
    yield made
    made.open.set()


async def test_more_than_can_wait_is_told_to_try_again(tmp_path: Path, gate: Gate) -> None:
    async with serving(tmp_path, max_waiting=5) as served:
        gate.close()
        taken = asyncio.create_task(served.post("taken"))
        await gate.wait_until_reached()
        waiting = [asyncio.create_task(served.post(f"waiting-{n}")) for n in range(5)]
        await until(lambda: served.waiting == 5)
        refused = await served.post("refused")
        assert (refused.status, refused.json["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        client = served.client()
        assert (await client.get("/livez")).status == 200
        client.close()
        gate.open.set()
        assert [answer.json["status"] for answer in await asyncio.gather(taken, *waiting)] == ["accepted"] * 6
        assert (await served.post("refused")).json["status"] == "accepted"


async def test_unfinished_bodies_are_bounded_together(tmp_path: Path) -> None:
    """Nobody has proved anything yet: many large bodies that never end must not fill the memory."""
    async with serving(tmp_path, most_held=300_000) as served:
        head = b"POST /in/orders HTTP/1.1\r\nHost: test\r\nContent-Length: 200000\r\n\r\n"
        lines = [await served.dial() for _ in range(3)]
        for _, writer in lines:
            writer.write(head + b"x" * 150_000)
        answers = [asyncio.create_task(reader.readuntil(b"}")) for reader, _ in lines]
        ended, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert all(b"503 " in task.result() and b'"overloaded"' in task.result() for task in ended)
        assert len(ended) < 3
        assert (await served.post("small ones pass")).status == 200
        for _, writer in lines:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)
        await until(lambda: not served.open)
        client, body = served.client(), hook("large", padding="x" * 290_000)
        assert (await client.post("/in/orders", body, signed(body))).status == 200, "nothing is held any more"
        client.close()


def large(size: int, peer: str, source: str = "orders") -> bytes:
    """The head of a body of this size that a proxy of ours hands on."""
    return (
        f"POST /in/{source} HTTP/1.1\r\nHost: test\r\nX-Forwarded-For: {peer}\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


def in_pieces(peer: str, key: str, size: int) -> list[bytes]:
    """A genuine body of about this size, in chunks."""
    body = hook(key, padding="x" * size)
    lines = ["POST /in/orders HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", f"X-Forwarded-For: {peer}"]
    lines += [f"{name}: {value}" for name, value in signed(body).items()]
    parts = [body[at : at + 4000] for at in range(0, len(body), 4000)]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", *chunks, b"0\r\n\r\n"]


async def send_slowly(served: Served, pieces: list[bytes]) -> Answer:
    reader, writer = await served.dial()
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.001)  # so that they are read apart
    answer = await served.client()._read(reader)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "peers",
    [["203.0.113.9"], ["2001:db8::1", "2001:db8::2:1"], [f"198.51.100.{n}" for n in range(10)], ["127.0.0.1"]],
    ids=["one address", "one network", "many addresses", "one proxy"],
)
async def test_unfinished_bodies_of_some_do_not_keep_out_others(tmp_path: Path, peers: list[str]) -> None:
    """Ten connections that fill what may be held, each within its own cap, and then say nothing more."""
    many = len(peers) > 2 or peers == ["127.0.0.1"]  # not bound to a share
    async with serving(tmp_path, most_held=1_000_000) as served:
        lines = [await served.dial() for _ in range(10)]
        for n, (_, writer) in enumerate(lines):
            writer.write(large(100_000, peers[n % len(peers)]) + b"x" * 99_990)
        full, resting = (999_900, 0) if many else (199_980, 8)  # those that were refused rest
        await until(lambda: served.hooks.budget.held == full and len(served.guard.resting) == resting)
        for n in range(3):
            answer = await send_slowly(served, in_pieces("192.0.2.1", f"genuine-{n}", 50_000))
            assert (answer.status, answer.json.get("status")) == (200, "accepted")
        for _, writer in lines:
            writer.close()
        await until(lambda: not served.hooks.budget.held)


async def test_the_largest_body_is_refused_while_it_waits(tmp_path: Path) -> None:
    async with serving(tmp_path, most_held=400_000) as served:
        lines = [await served.dial() for _ in range(3)]
        for size, (_, writer) in zip((30_000, 90_000, 50_000), lines, strict=True):
            writer.write(large(100_000, "203.0.113.9") + b"x" * size)
        refused = await lines[1][0].readuntil(b"}")
        assert b"HTTP/1.1 503 " in refused
        assert b"retry-after: " in refused
        await until(lambda: served.hooks.budget.held == 80_000)
        for _, writer in lines:
            writer.close()


async def test_nothing_is_held_for_a_source_that_does_not_exist(tmp_path: Path) -> None:
    async with serving(tmp_path, most_held=4_000_000) as served:
        lines = [await served.dial() for _ in range(10)]
        for _, writer in lines:
            writer.write(large(200_000, "203.0.113.9", "nobody") + b"x" * 20_000)
        await until(lambda: served.open == 10 and not served.guard.resting)
        assert served.hooks.budget.held == 0
        for reader, writer in lines:
            writer.write(b"x" * 180_000)
            assert b"HTTP/1.1 401 " in await reader.readuntil(b"}")
            writer.close()


async def test_refusals_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[int]:
        """How many refusals each line tells of."""
        lines = [vars(record) for record in caplog.records]
        return [line["fields"]["statuses"][400] for line in lines if line.get("moment") == "connections.refused"]

    loop = asyncio.get_running_loop()
    async with serving(tmp_path) as served:
        began = loop.time()
        for _ in range(20):
            reader, writer = await served.dial()
            writer.write(b"nonsense\r\n\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")
            writer.close()
        took = loop.time() - began
        await until(lambda: sum(told()) == 20)
    assert len(told()) <= 2 + took, "one a second"


async def test_too_many_bytes_that_wait_are_too_many(tmp_path: Path, gate: Gate) -> None:
    async with serving(tmp_path, max_waiting_bytes=1000) as served:
        gate.close()
        taken = asyncio.create_task(served.post("taken"))
        await gate.wait_until_reached()
        client, body = served.client(), hook("large", padding="x" * 2000)
        large = asyncio.create_task(client.post("/in/orders", body, signed(body)))
        await until(lambda: served.waiting == 1)
        assert (await served.post("refused")).json["code"] == "overloaded"
        gate.open.set()
        assert [answer.status for answer in (await taken, await large)] == [200, 200]
        client.close()


async def test_a_held_up_store_answers_503_within_the_budget(tmp_path: Path, gate: Gate) -> None:
    async with serving(tmp_path) as served:
        gate.close()
        taken = asyncio.create_task(served.post("taken", "hasty"))
        while not gate.reached.is_set():
            if taken.done():  # on a busy machine its time may be over before the writer takes it: then it was nothing
                taken = asyncio.create_task(served.post("taken", "hasty"))
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(served.post(key, "hasty")) for key in ("waiting", None, None)]
        # The gate is still closed: only the budget can have answered these.
        answers = await asyncio.gather(taken, *waiting)
        assert {(answer.status, answer.json["code"]) for answer in answers} == {(503, "store_unavailable")}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
        served.inbox.sources["hasty"].settings.budget = PATIENCE  # from here on it is in no haste
        gate.open.set()
        # What the writer had taken is committed all the same, and its key tells; what it had not is withdrawn, so
        # that the retry of one without a key is not a second event.
        assert (await served.post("taken", "hasty")).json["status"] == "duplicate"
        assert (await served.post("waiting", "hasty")).json["status"] == "accepted"
        assert (await served.post(None, "hasty")).json["status"] == "accepted"
        assert served.keys() == ["taken", "waiting", None]


async def test_a_sender_that_leaves_during_its_commit_disturbs_nobody(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as served:
        gate.close()
        taken = asyncio.create_task(served.post("taken"))
        await gate.wait_until_reached()
        staying = [asyncio.create_task(served.post(f"staying-{n}")) for n in range(3)]
        _, writer = await served.dial()
        body = hook("leaving")
        writer.write(request("POST", "/in/orders", body, signed(body)))
        await until(lambda: served.waiting == 4)
        writer.transport.abort()
        await until(lambda: served.open == 4)
        gate.open.set()
        assert [answer.json["status"] for answer in await asyncio.gather(taken, *staying)] == ["accepted"] * 4
        # Its retry gets the event that was kept meanwhile.
        assert (await served.post("leaving")).json["status"] == "duplicate"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_application_that_cancels_the_request_withdraws_it(tmp_path: Path, gate: Gate) -> None:
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("open", verify="none", budget="20s")
    async with inbox.running():
        gate.close()
        first = asyncio.create_task(inbox.receive("open", {}, b"taken"))
        await gate.wait_until_reached()
        second = asyncio.create_task(inbox.receive("open", {}, b"cancelled"))
        assert isinstance(inbox.store, SqliteStore)
        writer = inbox.store._writer
        await until(lambda: writer._waiting)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.open.set()
        assert (await first).outcome == "accepted"
        assert (await inbox.receive("open", {}, b"later")).outcome == "accepted"
        assert sorted(event.body for event in await kept_events(inbox.store)) == [b"later", b"taken"]
