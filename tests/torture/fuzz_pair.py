"""Servers that differ in one thing: one answers arrivals itself, one through the ASGI adapter, one hands connections
over between what answers arrivals and what answers the rest, as receivers and their main process do.

`both_ways` starts them in this process, each with a store of its own; `talk` says the same bytes to both and returns
what each answered; `kept` tells what a store holds. Called by `test_two_ways`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.sources import Reply, Source
from oncehook.verify import Hmac
from oncehook.web import connection, server
from oncehook.web.asgi import HookApp
from oncehook.web.connection import ConnectionLimits, Connections, HookExchange, InboundConnection
from oncehook.web.hooks import BodyBudget, Hooks
from oncehook.web.peers import peer_finder
from oncehook.web.receivers import Channel, Handed, Message, hand_over
from tests.waiting import until
from tests.wire import SECRET, request

WAYS = ("direct", "asgi")
HANDED = "handed"
LIMITS = ConnectionLimits(head_seconds=60, body_seconds=60)
"""Nobody is too slow by chance, on a machine that is. Whose time is to be up is told so: `Served.impatient`."""
LAST = request("GET", "/livez", b"", {"Connection": "close"})
"""Said after everything else: it is answered if, and only if, the connection was kept and is in step."""


class Tapped:
    """A transport that remembers what was written to it.

    Whoever hangs up with bytes unread sends a reset, which may take back what the other end has not read yet. What was
    said must not depend on that.
    """

    def __init__(self, transport: asyncio.Transport, said: list[bytes]) -> None:
        self._transport = transport
        self._said = said

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._said.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Heard(InboundConnection):
    """A connection whose answers are noted by the port at its other end. Counts the arrivals it answers itself."""

    taken = 0

    def __init__(self, said: dict[int, list[bytes]], server: Connections, first: bytes = b"") -> None:
        super().__init__(server, first)
        self.said = said

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        port = transport.get_extra_info("peername")[1]
        super().connection_made(Tapped(transport, self.said.setdefault(port, [])))  # type: ignore[arg-type]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        Heard.taken += isinstance(self._reading, HookExchange)


@dataclass
class Served:
    """One of the two."""

    port: int
    path: Path
    inbox: Inbox
    guard: Connections
    hooks: Hooks
    stop: asyncio.Event
    said: dict[int, list[bytes]]
    others: list[Connections] = field(default_factory=list)
    """Connections that were handed over."""
    saying: int = 0
    """Talks that have not said everything yet."""

    @property
    def connections(self) -> list[InboundConnection]:
        """Those that are open, as the server sees them."""
        return [connection for guard in (self.guard, *self.others) for connection in guard.open]

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """Whoever has a request or an answer unfinished now has had time enough."""
        limits = self.guard.limits
        for guard in (self.guard, *self.others):
            guard.limits = replace(limits, head_seconds=0, body_seconds=0)
        try:
            yield
        finally:
            for guard in (self.guard, *self.others):
                guard.limits = limits

    def kept(self) -> list[tuple[Any, ...]]:
        """Everything that arrivals have left, but for ids and times."""
        with closing(sqlite3.connect(self.path)) as connection:
            events = connection.execute(
                "SELECT s.name, e.key, e.subject, e.type, e.marks, e.head, e.body, coalesce(c.n, 1)"
                " FROM events e JOIN sources s ON s.id = e.source_id LEFT JOIN copies c ON c.event_id = e.id"
            ).fetchall()
            copies = connection.execute("SELECT outcome, head, body FROM arrivals").fetchall()
        return sorted(events, key=repr) + sorted(copies, key=repr)


class Joined:
    """Two who answer, in one process: each hands over what is for the other."""

    def __init__(self, app: Any, hooks: Hooks, limits: ConnectionLimits) -> None:
        self.receiver = Connections(_nobody, hooks, limits, others=_Other(self, hooks=False))
        self.main = Connections(app, hooks, limits, others=_Other(self, hooks=True))
        ends = socket.socketpair()
        self.channels = [
            Channel(ends[0], partial(self._take, self.receiver), lambda: None),
            Channel(ends[1], partial(self._take, self.main), lambda: None),
        ]

    def _take(self, into: Connections, message: Message, descriptor: int | None) -> None:
        assert isinstance(message, Handed)
        assert descriptor is not None
        into.run(into.adopt(descriptor, message.data))

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        async with self.main.serving(is_urgent=lambda: False):
            async with self.receiver.serving(listener, is_urgent=lambda: False):
                yield
            await until(lambda: not self.receiver.open)
        for channel in self.channels:
            channel.close()


class _Other:
    def __init__(self, joined: Joined, *, hooks: bool) -> None:
        self._joined, self._hooks = joined, hooks

    def answers(self, *, is_hook: bool) -> bool:
        return is_hook is self._hooks

    def take(self, descriptor: int, data: bytes) -> bool:
        return hand_over(self._joined.channels[self._hooks], descriptor, data)


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a receiver has no application")


def greet(arrival: Arrival, source: Source) -> Reply | None:
    """A handshake by POST, as Slack and Zoom have it."""
    return Reply(200, b"hello", ((b"Content-Type", b"text/plain"),)) if b"challenge" in arrival.body else None


def furnish(inbox: Inbox) -> None:
    """Sources of every kind that an answer depends on."""
    scheme = Hmac(header="X-Signature", prefix="sha256=")
    common: dict[str, Any] = {"verify": scheme, "secret": SECRET, "key": "$.id", "budget": "20s"}
    inbox.source("orders", subject="$.customer", **common)
    inbox.source("small", max_body=2000, **common)
    inbox.source("strict", on_missing_key="reject", **common)
    inbox.source("choosy", on_conflict="reject", **common)
    inbox.source("quiet", ignore=["order.*"], **common)
    inbox.source("fenced", ip_allow=["203.0.113.0/24"], **common)
    inbox.source("hidden", path="k7_Qm2ZxN4vT9sLdR1wYhE", **common)
    inbox.source("revived", revive_dead=True, **common)
    inbox.source("open", verify={"scheme": "none", "confirm": "anyone may send"}, key="$.id", budget="20s")
    inbox.source("local", verify="none", key="$.id", loopback_only=True, budget="20s")
    batch = replace_common(common, split="$.events", key="$.events[0].id", type="$.events[0].type")
    inbox.source("batch", **batch)
    odd = inbox.source("odd", **common)
    odd.base = odd.base.replace(accepted=299, handshake=greet)
    told = inbox.source("told", **common)
    reply = Reply(202, b"<Response/>", ((b"Content-Type", b"text/xml"), (b"X-Said", b"yes")))
    told.base = told.base.replace(answer=reply)


def replace_common(common: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**common, **changed}


@contextlib.asynccontextmanager
async def served(
    folder: Path, way: str, limits: ConnectionLimits = LIMITS, *, most_held: int = 256 << 20
) -> AsyncIterator[Served]:
    """One server, on the running loop."""
    path = folder / f"{way}.db"
    inbox = Inbox(f"sqlite:{path}")
    furnish(inbox)
    async with inbox.running():
        hooks = Hooks(inbox.receiver, "/in/", peer_finder(()), BodyBudget(most_held))
        probes = Starlette(routes=[*server.probe_routes(inbox.troubles), server.metrics_route(inbox.metrics, None)])
        adapter = HookApp(hooks)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (adapter if scope["path"].startswith("/in/") else probes)(scope, receive, send)

        said: dict[int, list[bytes]] = {}
        listener, ready, stop = (
            server.listen("127.0.0.1", 0),
            asyncio.get_running_loop().create_future(),
            asyncio.Event(),
        )

        others: list[Connections] = []

        async def serve() -> None:
            made = hooks if way == "direct" else None
            if way == HANDED:
                joined = Joined(app, hooks, limits)
                async with joined.serving(listener):
                    others.append(joined.main)
                    ready.set_result(joined.receiver)
                    await stop.wait()
                return
            async with server.serve_on(listener, app, hooks=made, limits=limits) as connections:
                ready.set_result(connections)
                await stop.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "InboundConnection", partial(Heard, said))
            serving = asyncio.create_task(serve())
            guard = await ready
        try:
            yield Served(listener.getsockname()[1], path, inbox, guard, hooks, stop, said, others)
        finally:
            stop.set()
            await serving


@contextlib.asynccontextmanager
async def both_ways(folder: Path, way: str = "asgi") -> AsyncIterator[tuple[Served, Served]]:
    Heard.taken = 0
    async with served(folder, "direct") as direct, served(folder, way) as other:
        yield direct, other


async def dial(port: int, receive_buffer: int | None = None) -> socket.socket:
    """A bare line: what was answered can be read even after the other end has slammed the door."""
    line = socket.socket()
    if receive_buffer is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", port))
    return line


async def say(line: socket.socket, pieces: Sequence[bytes]) -> None:
    """Piece by piece, so that the other end reads them apart; for as long as anybody listens."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        for piece in pieces:
            await loop.sock_sendall(line, piece)
            for _ in range(3):
                await asyncio.sleep(0)


async def hear(line: socket.socket) -> bytes:
    """Everything until the other end hangs up."""
    loop, heard = asyncio.get_running_loop(), b""
    with contextlib.suppress(OSError):
        while piece := await loop.sock_recv(line, 1 << 16):
            heard += piece
    return heard


async def ask(one: Served, pieces: Sequence[bytes], *, last: bytes = LAST) -> bytes:
    """Say this, and then the last word; everything that is answered before the other end hangs up."""
    one.saying += 1
    line = await dial(one.port)
    with closing(line):
        port = line.getsockname()[1]
        await say(line, [*pieces, last] if last else pieces)
        one.saying -= 1
        await hear(line)
    return without_ids(b"".join(one.said.pop(port, [])))


async def break_off(one: Served, pieces: Sequence[bytes]) -> None:
    """Say this and be gone."""
    line = await dial(one.port)
    with closing(line):
        await say(line, pieces)


_ID = re.compile(rb"evt_[0-9a-f-]{32,36}")


def without_ids(answers: bytes) -> bytes:
    """The answers with the first event called 1, the second 2: ids are drawn, which of them are the same is not."""
    names: dict[bytes, bytes] = {}
    return _ID.sub(lambda found: names.setdefault(found[0], b"evt_%d" % (len(names) + 1)), answers)


async def talk(pair: tuple[Served, Served], pieces: Sequence[bytes], *, last: bytes = LAST) -> list[bytes]:
    """What each of the two answers to the same bytes."""
    return list(await asyncio.gather(*(ask(one, pieces, last=last) for one in pair)))


async def talks_at_once(pair: tuple[Served, Served], many: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """Many at once. Who has said everything and hears nothing has left a request unfinished: we do not wait for the
    patience with that to run out by itself."""
    answers = asyncio.gather(*(talk(pair, pieces) for pieces in many))
    while not all(one.saying for one in pair):  # they begin in the same turn
        await asyncio.sleep(0)
    await until(lambda: not any(one.saying for one in pair))
    for pause in (0.0,) * 20 + (0.05,) + (0.0,) * 20:  # until all of it is read, too
        await asyncio.sleep(pause)
    with pair[0].impatient(), pair[1].impatient():
        return await answers


def quick(**changed: Any) -> ConnectionLimits:
    """Limits for tests that wait for their end."""
    return replace(LIMITS, **changed)
