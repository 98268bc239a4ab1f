"""The client against raw servers on loopback: what counts as an answer, which connection is used again, what is sent.

Every test runs on asyncio's own loop and on uvloop.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any

import pytest
import uvloop

from oncehook.http_client import AddressForbidden, HttpAnswer, Unanswered, Untrusted, addresses
from oncehook.http_client.client import HttpClient
from oncehook.http_client.connection import _PIECE, LARGE
from oncehook.model import Category
from tests import certificates
from tests.waiting import until
from tests.whatsapp.scripted import Api, Asked, answer, cut

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test once on each loop."""

    def run(loop: str, **given: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(asyncio.wait_for(test(**given), 120))

    given = inspect.signature(test)
    first = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = given.replace(parameters=[first, *given.parameters.values()])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.pytestmark = [*getattr(test, "pytestmark", ()), pytest.mark.parametrize("loop", LOOPS).mark]  # type: ignore[attr-defined]
    return run


@asynccontextmanager
async def opened(**rules: Any) -> AsyncIterator[HttpClient]:
    rules.setdefault("allow_private", True)
    made = HttpClient(**rules)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def facing(*says: Any, **rules: Any) -> AsyncIterator[tuple[HttpClient, Api]]:
    async with Api(list(says)).open() as api, opened(**rules) as client:
        yield client, api


async def call(
    client: HttpClient,
    api: Api,
    method: str = "POST",
    *,
    headers: Mapping[str, str] = {},
    within: float = 60,
    **how: Any,
) -> HttpAnswer:
    body = how.pop("body", None if method in ("GET", "HEAD") else b"{}")
    return await client.request(method, f"{api.url}/", headers, body, within=within, **how)


def and_close(said: bytes) -> Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]:
    async def say(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    return say


@asynccontextmanager
async def listening(serve: Any, **options: Any) -> AsyncIterator[asyncio.Server]:
    """A server that does with each connection what it is told, and leaves none behind."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(begin, "127.0.0.1", 0, **options)
    try:
        yield server
    finally:
        server.close()
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks))
        await settled()


def url_of(server: asyncio.Server, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def settled() -> None:
    """Let both ends see what the other one has done."""
    for _ in range(5):
        await asyncio.sleep(0.005)


# -- what is an answer -------------------------------------------------------------------------

WHOLE = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
    "nothing": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n", 200, b"ok"),
    "trailer": (
        b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nRetry-After: 9\r\n\r\n",
        503,
        b"ok",
    ),
    "204": (b"HTTP/1.1 204 X\r\n\r\n", 204, b""),
    "204 with a length": (b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\n", 204, b""),
    "304": (b"HTTP/1.1 304 X\r\nContent-Length: 5\r\n\r\n", 304, b""),
    "100 before": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok"),
    "103 before": (b"HTTP/1.1 103 Early Hints\r\nRetry-After: 9\r\nLink: </a>\r\n\r\n" * 3 + OK, 200, b"ok"),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
}


@on_both_loops
@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("by", [1, 7, 1 << 20], ids=["byte by byte", "in pieces", "at once"])
async def test_an_answer_that_says_where_it_ends_leaves_the_connection_for_the_next_call(case: str, by: int) -> None:
    said, status, body = WHOLE[case]

    async def in_pieces(asked: Asked, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(said), by):
            writer.write(said[start : start + by])
            await asyncio.sleep(0)

    async with facing(in_pieces) as (client, api):
        for _ in range(3):
            assert await call(client, api) == HttpAnswer(status, body)
        assert api.connections == 1


ONCE = {
    "until it closes": (and_close(b"HTTP/1.1 200 OK\r\n\r\nok"), b"ok"),
    "close": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "close, among others": (b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "1.0 that would stay": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "an unknown coding": (and_close(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok"), b"ok"),
    "cut off": (and_close(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"), b"ok"),
    "a wrong chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n", b"ok"),
    "more than is kept": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + b"x" * 5000, b"x" * 4096),
    "a second answer behind it": (OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"ok"),
    "a byte behind it": (OK + b"x", b"ok"),
    "a body where none can be": (b"HTTP/1.1 204 X\r\nContent-Length: 4\r\n\r\nevil", b""),
    "data behind the last one": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nokHTTP/1.1", b"ok"),
    "endless trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: " + b"x" * 200_000,
        b"ok",
    ),
}


@on_both_loops
@pytest.mark.parametrize("case", ONCE)
async def test_after_any_other_answer_the_next_call_has_a_connection_of_its_own(case: str) -> None:
    said, body = ONCE[case]
    async with facing(said, OK) as (client, api):
        first = await call(client, api)
        assert (first.status // 100, first.body) == (2, body)
        assert await call(client, api) == HttpAnswer(200, b"ok")
        assert api.connections == 2


NONSENSE = {
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
    "switching, without a word": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + OK,
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "a length in words": b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
    "a huge length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nok",
    "another version": b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "status 99": b"HTTP/1.1 099 X\r\nContent-Length: 2\r\n\r\nok",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9\r\n",
    "a request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a line without a name": b"HTTP/1.1 200 OK\r\n: x\r\nContent-Length: 2\r\n\r\nok",
    "a NUL": b"HTTP/1.1 200 OK\r\nX: \0\r\nContent-Length: 2\r\n\r\nok",
    "101 headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100 + b"Content-Length: 2\r\n\r\nok",
    "a large header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 33_000 + b"\r\nContent-Length: 2\r\n\r\nok",
    "an endless header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
    "an endless reason": b"HTTP/1.1 200 " + b"x" * 200_000,
    "endless announcements": b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
    "endless announced headers": b"HTTP/1.1 103 X\r\nA: b\r\n\r\n" * 101 + OK,
}


@on_both_loops
@pytest.mark.parametrize("case", NONSENSE)
async def test_what_is_not_http_is_no_answer(case: str) -> None:
    async with facing(NONSENSE[case], OK) as (client, api):
        with pytest.raises(Unanswered, match="did not answer in HTTP") as raised:
            await call(client, api, again=True)
        assert raised.value.reached
        assert (len(api.asked), api.connections) == (1, 1)
        assert (await call(client, api)).body == b"ok"
        assert api.connections == 2


@on_both_loops
async def test_a_server_that_speaks_first_is_not_listened_to() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await reader.read()

    async with listening(greet) as server, opened() as client:
        for _ in range(3):
            with suppress(Unanswered):  # it may also come after the request, and then it is as good as an answer
                assert await client.request("POST", url_of(server), {}, b"{}", within=0.3) == HttpAnswer(200, b"ok")


@on_both_loops
async def test_nobody_waits_for_what_is_not_kept() -> None:
    async with facing(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n0123456789") as (client, api):
        got = await asyncio.wait_for(call(client, api, within=600, most=10), 60)
        assert got == HttpAnswer(200, b"0123456789", is_complete=False)


@on_both_loops
async def test_the_first_retry_after_of_the_answer_itself_is_kept() -> None:
    said = b"HTTP/1.1 503 X\r\nretry-after:  7 \r\nRetry-After: 8\r\nContent-Length: 0\r\n\r\n"
    early = b"HTTP/1.1 103 X\r\nRetry-After: 1\r\n\r\n"
    async with facing(said, early + said, early + OK) as (client, api):
        assert [(await call(client, api)).retry_after for _ in range(3)] == ["7", "7", None]


@on_both_loops
async def test_the_head_of_an_answer_is_enough_for_head() -> None:
    async with facing(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", OK) as (client, api):
        assert await call(client, api, "HEAD") == HttpAnswer(200, b"")
        assert (await call(client, api)).body == b"ok"
        assert api.connections == 2


# -- which connection is used ------------------------------------------------------------------


@on_both_loops
async def test_the_newest_idle_connection_is_used_first_and_old_ones_are_closed() -> None:
    ports: dict[str, int] = {}
    go_on = asyncio.Event()

    async def note(asked: Asked, writer: asyncio.StreamWriter) -> None:
        ports[asked.headers["name"]] = writer.get_extra_info("peername")[1]
        if asked.headers["name"] == "slow":
            await go_on.wait()
        writer.write(OK)

    async with facing(note, idle=600) as (client, api):
        way = client
        slow = asyncio.create_task(call(client, api, headers={"name": "slow"}))
        await until(lambda: "slow" in ports)
        await call(client, api, headers={"name": "quick"})
        go_on.set()
        await slow
        assert api.connections == 2
        for n in range(4):
            await call(client, api, headers={"name": str(n)})
            assert ports[str(n)] == ports["slow"], "the one that was used last"
        min(way._open, key=lambda one: one.idle_since).idle_since -= 600
        way._close_idle()
        await until(lambda: any(task.done() for task in api.tasks))
        await settled()
        assert sorted(task.done() for task in api.tasks) == [False, True], "the other one was idle for too long"
        way._idle = 0.1
        way._close_idle()  # either closes the last one now, or looks again when it is due
        await until(lambda: all(task.done() for task in api.tasks))
        assert (await call(client, api, headers={"name": "last"})).status == 200
        assert api.connections == 3
        await until(lambda: all(task.done() for task in api.tasks))


@on_both_loops
async def test_each_place_has_connections_of_its_own() -> None:
    async with facing(OK) as (client, api), Api([OK]).open() as other:
        for where in (api, other, api, other):
            await call(client, where)
        await client.request("POST", f"http://localhost:{api.port}/", {}, b"", within=60)
        assert (api.connections, other.connections) == (2, 1)


@on_both_loops
async def test_a_connection_that_was_closed_while_idle_is_not_used() -> None:
    """Also by a call that cannot be sent again."""

    async def and_leave(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        asyncio.get_running_loop().call_later(0.01, writer.close)

    async with facing(and_leave) as (client, api):
        for n in range(1, 4):
            assert (await call(client, api)).status == 200
            await until(lambda: not client._open)
            assert (api.connections, len(api.asked)) == (n, n)


@on_both_loops
async def test_a_connection_that_is_about_to_end_is_not_used() -> None:
    async with facing(OK) as (client, api):
        await call(client, api)
        (connection,) = client._open
        connection.abort()
        assert (await call(client, api)).status == 200
        assert (api.connections, len(api.asked)) == (2, 2)


@on_both_loops
async def test_what_is_said_unasked_is_not_the_answer_to_the_next_call() -> None:
    async def and_more(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    async with facing(and_more) as (client, api):
        for n in range(1, 4):
            assert (await call(client, api)).body == b"ok"
            await until(lambda: not client._open)
            assert api.connections == n


@on_both_loops
@pytest.mark.parametrize(
    ("method", "again", "times"),
    [("POST", True, 2), ("POST", False, 1), ("GET", False, 2), ("PUT", False, 2), ("DELETE", False, 2)],
)
async def test_what_met_a_closing_connection_is_sent_again_where_that_does_no_harm(
    method: str, again: bool, times: int
) -> None:
    async with facing(OK, cut, OK) as (client, api):
        await call(client, api)
        if times == 2:
            assert (await call(client, api, method, again=again)).status == 200
        else:
            with pytest.raises(Unanswered, match="closed the connection before it answered") as raised:
                await call(client, api, method, again=again)
            assert raised.value.reached
        assert (len(api.asked), api.connections) == (1 + times, times)


@on_both_loops
async def test_it_is_sent_twice_at_most_and_once_over_a_fresh_connection() -> None:
    async with facing(OK, cut) as (client, api):
        await call(client, api)
        with pytest.raises(Unanswered):
            await call(client, api, again=True)
        assert len(api.asked) == 3
        with pytest.raises(Unanswered):
            await call(client, api, again=True)
        assert len(api.asked) == 4


@on_both_loops
async def test_two_idle_connections_that_are_closing_cost_one_more_call_and_not_two() -> None:
    async def slow(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(OK)

    async with facing(slow, slow, cut, OK) as (client, api):
        await asyncio.gather(call(client, api), call(client, api))
        assert (await call(client, api, again=True)).status == 200
        assert (len(api.asked), api.connections) == (4, 3), "the second time over a fresh one"


@on_both_loops
async def test_half_an_answer_is_no_reason_to_send_it_again() -> None:
    async with facing(OK, and_close(b"HTTP/1.1 200 OK\r\nX"), OK) as (client, api):
        await call(client, api)
        with pytest.raises(Unanswered, match="closed the connection"):
            await call(client, api, again=True)
        assert len(api.asked) == 2


@on_both_loops
async def test_a_call_that_may_have_been_received_stays_so_when_the_second_connection_fails() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(OK)
        await reader.readuntil(b"{}")
        server.close()

    async with listening(serve) as server, opened() as client:
        url = url_of(server)
        await client.request("POST", url, {}, b"{}", within=60)
        with pytest.raises(Unanswered, match="cannot connect") as raised:
            await client.request("POST", url, {}, b"{}", within=60, again=True)
        assert raised.value.reached


# -- deadlines, and who stops waiting ----------------------------------------------------------


@on_both_loops
@pytest.mark.parametrize("stops", ["cancelled", "late", "closed"])
async def test_whoever_stops_waiting_ends_the_connection(stops: str) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        with suppress(ConnectionError):
            while await reader.read(1000):
                pass
        gone.set()
        writer.close()

    async with listening(watch) as server, opened() as client:
        url = url_of(server)
        within = 0.3 if stops == "late" else 60
        task = asyncio.create_task(client.request("POST", url, {}, b"{}", within=within))
        while not asked.is_set():
            if task.done():  # on a busy machine its time may be over before it was sent
                assert isinstance(task.exception(), Unanswered)
                within *= 10
                task = asyncio.create_task(client.request("POST", url, {}, b"{}", within=within))
            await asyncio.sleep(0.01)
        if stops == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            if stops == "closed":
                await client.close()
            with pytest.raises(Unanswered) as raised:
                await task
            assert raised.value.reached
        await gone.wait()


@on_both_loops
async def test_a_call_that_is_cancelled_while_its_answer_arrives_leaves_the_next_one_alone() -> None:
    """The connection may be another call's by the time the cancelled one notices."""
    async with facing(OK) as (client, api):
        await call(client, api)
        for turns in range(40):
            task = asyncio.create_task(call(client, api))
            for _ in range(turns % 8):
                await asyncio.sleep(0)
            other = asyncio.create_task(call(client, api))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert await other == HttpAnswer(200, b"ok")


@on_both_loops
async def test_a_deadline_before_there_is_a_connection_leaves_nothing_sent() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(mute) as server, opened() as client:
        with pytest.raises(Unanswered, match=r"no answer within 0\.2 s") as raised:
            await client.request("POST", url_of(server, "https"), {}, b"{}", within=0.2)
        assert not raised.value.reached


@on_both_loops
@pytest.mark.parametrize("is_found", [False, True])
async def test_a_client_that_is_closed_while_it_connects_sends_nothing(is_found: bool) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(host: str, port: int) -> Sequence[str]:
        asked.set()
        await go_on.wait()
        return ["127.0.0.1"]

    async with facing(OK, look_up=slowly) as (client, api):
        task = asyncio.create_task(client.request("POST", f"http://a.example:{api.port}/", {}, b"", within=60))
        await asked.wait()
        if is_found:
            go_on.set()
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Unanswered, match="this client was closed") as raised:
            await task
        assert not raised.value.reached
        assert not api.asked


# -- what is sent ------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nEvil: 1"},
        {"X": "a\nEvil: 1"},
        {"X": "a\rEvil: 1"},
        {"X": "a\0"},
        {"X": "a\r\n"},
        {"X\r\nEvil": "1"},
        {"X\n": "1"},
        {"X\0": "1"},
        {"X Y": "1"},
        {"X:": "1"},
        {"": "1"},
        {"é": "1"},
        {"X": "\ud800"},
        {"Content-Length": "0"},
        {"transfer-encoding": "chunked"},
        {"HOST": "evil.example"},
        {"Connection": "upgrade"},
    ],
)
async def test_a_header_that_would_break_the_request_is_an_error_and_nothing_is_sent(headers: dict[str, str]) -> None:
    async with facing(OK) as (client, api):
        await call(client, api)
        for _ in range(2):
            with pytest.raises(ValueError) as raised:  # noqa: PT011 - its words are checked below
                await call(client, api, headers={"A": "b", **headers})
            assert "evil" not in str(raised.value).lower()
        for method, url in (("PO ST", api.url + "/"), ("POST", api.url + "/a b"), ("POST", api.url + "/a\r\nb")):
            with pytest.raises(ValueError):  # noqa: PT011
                await client.request(method, url, {}, b"", within=60)
        assert len(api.asked) == 1


async def wire(
    client: HttpClient, url: str, method: str = "POST", headers: Mapping[str, str] = {}, **how: Any
) -> bytes:
    """The bytes of a request, whoever it is for: every name leads to a server here."""
    seen = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 X\r\nConnection: close\r\n\r\n")
        writer.close()

    async with listening(serve) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aiohappyeyeballs.impl._connect_sock", _leading_to(server))
            await client.request(method, url, headers, how.get("body", b"x"), within=60)
    return bytes(seen)


def _leading_to(server: asyncio.Server) -> Any:
    async def connect(loop: asyncio.AbstractEventLoop, *rest: Any) -> socket.socket:
        line = socket.socket()
        line.setblocking(False)
        await loop.sock_connect(line, server.sockets[0].getsockname())
        return line

    return connect


@on_both_loops
@pytest.mark.parametrize(
    ("url", "host", "path"),
    [
        ("http://a.example/", "a.example", "/"),
        ("http://a.example:80/", "a.example", "/"),
        ("http://a.example:8080/x", "a.example:8080", "/x"),
        ("http://a.example:443/", "a.example:443", "/"),
        ("http://a.example./", "a.example", "/"),
        ("http://[2606:4700::1]/", "[2606:4700::1]", "/"),
        ("http://[2606:4700::1]:81/", "[2606:4700::1]:81", "/"),
        ("http://a.example/a%2Fb//c/../d;e?f=%20g&f=h?i|j", "a.example", "/a%2Fb//c/../d;e?f=%20g&f=h?i|j"),
        ("http://a.example/?", "a.example", "/?"),
    ],
)
async def test_host_and_path_are_sent_as_they_were_read(url: str, host: str, path: str) -> None:
    async def anywhere(host: str, port: int) -> Sequence[str]:
        return ["93.184.216.34"]

    async with opened(look_up=anywhere, allow_private=False) as client:
        sent = await wire(client, url)
    assert sent.startswith(f"POST {path} HTTP/1.1\r\nHost: {host}\r\n".encode())


@on_both_loops
async def test_the_request_brings_what_it_needs_and_nothing_twice() -> None:
    async with facing(OK) as (client, api):
        await call(client, api)
        await call(
            client, api, headers={"accept": "text/plain", "CONTENT-TYPE": "a/b", "x-ü".replace("ü", "u"): "wörld"}
        )
        await call(client, api, "GET")
        await call(client, api, "DELETE", body=None)
        host = f"127.0.0.1:{api.port}"
        usual = {"host": host, "accept": "*/*", "accept-encoding": "identity"}
        assert [asked.headers for asked in api.asked] == [
            {**usual, "content-type": "application/octet-stream", "content-length": "2"},
            {
                **usual,
                "accept": "text/plain",
                "content-type": "a/b",
                "content-length": "2",
                "x-u": "wörld".encode().decode("latin-1"),
            },
            usual,
            {**usual, "content-length": "0"},
        ]


@on_both_loops
@pytest.mark.parametrize("size", [LARGE - 1, LARGE, 32 * LARGE + 1])
async def test_a_large_body_goes_out_as_the_other_end_takes_it(size: int) -> None:
    body = random.Random(size).randbytes(size)
    got = bytearray()
    held: list[int] = []
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await go_on.wait()
        while len(got) < size:
            got.extend(await reader.read(1 << 16))
        writer.write(OK)
        writer.close()

    async with listening(serve, limit=1 << 12) as server, opened() as client:
        task = asyncio.create_task(client.request("POST", url_of(server), {}, body, within=60))
        await asked.wait()
        for _ in range(2 * size // _PIECE + 20):  # turns of the loop: more than it would take to send it all
            held += [one._transport.get_write_buffer_size() for one in client._open]
            await asyncio.sleep(0)
        go_on.set()
        assert (await task).status == 200
    assert got == body
    if size >= LARGE:
        assert max(held) <= LARGE // 2, "the rest waits in the body itself"


@on_both_loops
async def test_an_answer_before_all_was_sent_counts_and_ends_the_connection() -> None:
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 X\r\nContent-Length: 3\r\n\r\nbig")
        await asyncio.sleep(0.05)
        while await reader.read(1 << 16):
            pass

    async with listening(refuse, limit=1 << 12) as server, opened() as client:
        for n in (1, 2):
            assert await client.request("POST", url_of(server), {}, b"x" * (32 << 20), within=60) == HttpAnswer(
                413, b"big"
            )
            assert connections == n


# -- names and addresses -----------------------------------------------------------------------


@on_both_loops
async def test_a_name_is_looked_up_once_for_all_who_wait_and_kept_for_a_while() -> None:
    asked: list[str] = []
    go_on = asyncio.Event()

    async def look_up(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        await go_on.wait()
        return ["127.0.0.1"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "KEPT", 600)
        async with facing(answer(200, connection="close"), look_up=look_up) as (client, api):
            url = f"http://a.example:{api.port}/"

            async def one() -> int:
                return (await client.request("POST", url, {}, b"", within=60)).status

            impatient = asyncio.create_task(client.request("POST", url, {}, b"", within=0.01))
            patient = [asyncio.create_task(one()) for _ in range(20)]
            with pytest.raises(Unanswered):
                await impatient
            go_on.set()
            assert await asyncio.gather(*patient) == [200] * 20
            assert (await one(), len(asked), api.connections) == (200, 1, 21)
            patch.setattr(addresses, "KEPT", 0)
            assert (await one(), len(asked)) == (200, 2)


@on_both_loops
async def test_a_name_that_was_not_found_is_looked_up_again() -> None:
    asked: list[str] = []

    async def look_up(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) > 1 else []

    async with facing(OK, look_up=look_up) as (client, api):
        url = f"http://a.example:{api.port}/"
        with pytest.raises(Unanswered, match="cannot be found"):
            await client.request("POST", url, {}, b"", within=60)
        assert (await client.request("POST", url, {}, b"", within=60)).status == 200


@on_both_loops
async def test_the_next_address_is_tried_when_one_refuses_or_is_silent() -> None:
    addresses = ["127.0.0.2", "127.0.0.1"]

    async def look_up(host: str, port: int) -> Sequence[str]:
        return addresses

    async with facing(answer(200, connection="close"), look_up=look_up) as (client, api):
        url = f"http://a.example:{api.port}/"
        assert (await client.request("POST", url, {}, b"", within=60)).status == 200
        with socket.socket() as full:
            full.bind(("127.0.0.3", api.port))
            full.listen(0)
            waiting = [await _pushing(("127.0.0.3", api.port)) for _ in range(4)]
            addresses[0] = "127.0.0.3"
            async with opened(look_up=look_up) as another:
                assert (await another.request("POST", url, {}, b"", within=60)).status == 200
            for line in waiting:
                line.close()


async def _pushing(address: tuple[str, int]) -> socket.socket:
    """Takes a place in a queue that nobody serves, so that whoever comes later hears nothing."""
    line = socket.socket()
    line.setblocking(False)
    with suppress(BlockingIOError):
        line.connect(address)
    await asyncio.sleep(0.01)
    return line


@on_both_loops
async def test_every_socket_is_judged_also_the_second_one() -> None:
    """S17: whatever the names said."""
    tried: list[str] = []

    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async def unguarded(self: addresses.Names, host: str, port: int) -> Sequence[str]:
        return await look_up(host, port)

    async with Api([OK]).open() as api:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(addresses.Names, "resolve", unguarded)
            async with opened(allow_private=False) as client:
                check = client._dialled.check
                patch.setattr(client._dialled, "check", lambda text: (tried.append(text), check(text)))
                with pytest.raises(Unanswered) as raised:
                    await client.request("POST", f"http://a.example:{api.port}/", {}, b"", within=60)
                assert not raised.value.reached
        assert set(map(ip_address, tried)) == {ip_address("127.0.0.1"), ip_address("127.0.0.2")}
        assert api.connections == 0


@on_both_loops
async def test_every_address_of_a_name_is_judged_before_there_is_a_socket() -> None:
    """S17: whatever the sockets would say."""

    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    async with facing(OK, allow_private=False, look_up=look_up) as (client, api):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HttpClient, "_socket", lambda self, info: socket.socket(*info[:3]))
            with pytest.raises(AddressForbidden):
                await client.request("POST", f"http://a.example:{api.port}/", {}, b"", within=60)
        assert api.connections == 0


@on_both_loops
async def test_an_address_in_the_url_is_judged_too() -> None:
    async with facing(OK, allow_private=False) as (client, api):
        with pytest.raises(AddressForbidden) as raised:
            await call(client, api)
        assert not raised.value.reached
        assert api.connections == 0


# -- TLS ---------------------------------------------------------------------------------------


certificate = certificates.fixture("hooks.example")


@on_both_loops
async def test_over_tls_connections_are_checked_kept_and_large_bodies_pass(
    certificate: certificates.Certificate,
) -> None:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    context = certificates.served(certificate)
    body = random.Random(1).randbytes(3 * LARGE)
    until_close = and_close(b"HTTP/1.1 200 OK\r\n\r\nto the end")
    async with Api([OK, OK, OK, until_close, OK]).open(ssl=context, limit=1 << 23) as api:
        async with opened(ca=certificate[0], look_up=look_up) as client:
            url = f"https://hooks.example:{api.port}/"
            for sent in (b"a", body, b"b"):
                assert await client.request("POST", url, {}, sent, within=60) == HttpAnswer(200, b"ok")
            assert api.connections == 1
            assert [asked.body for asked in api.asked] == [b"a", body, b"b"]
            assert api.asked[0].headers["host"] == f"hooks.example:{api.port}"
            assert (await client.request("POST", url, {}, b"c", within=60)).body == b"to the end"
            assert (await client.request("POST", url, {}, b"d", within=60)).body == b"ok"
            assert api.connections == 2
            with pytest.raises(Untrusted) as raised:
                await client.request("POST", f"https://other.example:{api.port}/", {}, b"", within=60)
            assert (raised.value.reached, raised.value.category) == (False, Category.permanent)
        async with opened(look_up=look_up) as trusting_the_system:
            with pytest.raises(Untrusted):
                await trusting_the_system.request("POST", url, {}, b"", within=60)
        assert len(api.asked) == 5


# -- a server that lies ------------------------------------------------------------------------

HONEST = [said for said, _, _ in WHOLE.values()]
PIECES = [b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"HTTP/1.1 200 OK\r\n", b"Content-Length: 3\r\n", b"0\r\n\r\n", OK,
          b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"HTTP/1.1 100 X\r\n\r\n", b"fffffff\r\n",
          b"X" * 40_000, b"Content-Length: 0\r\n\r\n", b"\xff", b"HTTP/1.1 101 X\r\n\r\n"]  # fmt: skip


def lie(dice: random.Random) -> bytes:
    """An answer, changed in a few places."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(200))
    said = bytearray(dice.choice(HONEST))
    for _ in range(dice.randrange(4)):
        at = dice.randrange(len(said) + 1)
        match dice.randrange(5):
            case 0:
                said[at:at] = dice.choice(PIECES)
            case 1:
                del said[at : at + dice.randrange(1, 6)]
            case 2:
                said[at : at + 1] = dice.randbytes(1)
            case 3:
                said += dice.choice(HONEST)
            case _:
                del said[at:]
    return bytes(said)


@on_both_loops
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_a_server_says_a_call_ends_and_the_next_one_gets_its_own_answer(seed: int) -> None:
    dice = random.Random(seed)
    said: dict[str, asyncio.Event] = {}

    async def mislead(asked: Asked, writer: asyncio.StreamWriter) -> None:
        number = asked.headers["number"]
        if "honest" in asked.headers:
            writer.write(answer(200, number.encode()))
            return
        told = said[number] = asyncio.Event()
        lying, ends = lie(dice), dice.random()
        cuts = sorted(dice.randrange(len(lying) + 1) for _ in range(dice.randrange(4)))
        for start, end in zip([0, *cuts], [*cuts, len(lying)], strict=True):
            if not writer.is_closing():
                writer.write(lying[start:end])
            await asyncio.sleep(0)
        if ends < 0.5:
            writer.close()
        told.set()

    async with facing(mislead) as (client, api):

        async def be_lied_to(number: str) -> None:
            try:
                got = await call(client, api, headers={"number": number}, within=0.2, again=dice.random() < 0.5)
                assert 200 <= got.status <= 999
            except Unanswered:
                pass
            if number in said:  # on a busy machine its time may be over before it was asked
                await said[number].wait()

        async def be_told(number: str) -> None:
            got = await call(client, api, headers={"number": number, "honest": "1"}, again=True)
            assert got == HttpAnswer(200, number.encode())

        for start in range(0, 200, 50):
            numbers = [str(number) for number in range(start, start + 50)]
            await asyncio.gather(*map(be_lied_to, numbers))
            await settled()  # what is said behind an answer is there, before anybody asks again over that connection
            await asyncio.gather(*map(be_told, numbers))
