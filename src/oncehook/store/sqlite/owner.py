"""The owner's end of the socket: clients are greeted, their calls run, their arrivals join the owner's groups.

A client is a process of the same user; it is believed what it says about events, and nothing about frames: one that
sends nonsense, or does not read its answers, is cut off, and finds back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

import msgspec

from oncehook import __version__
from oncehook.errors import OncehookError, StoreError, StoreHeld, StoreUnavailable
from oncehook.logs import ration
from oncehook.model import DefinitionChanges, Intake, Verdict
from oncehook.store.base import Pending
from oncehook.store.sqlite import wire
from oncehook.store.sqlite.connection import Micros, close_in_child
from oncehook.store.sqlite.wire import AnswerFrame, CallFailure, Greeting, Verb, Welcome
from oncehook.store.sqlite.writer import Loan

log = logging.getLogger("oncehook.store")

MOST_CLIENTS: Final = 1000
MOST_CALLS: Final = 5000
"""Calls of one client under way; a client of ours waits for answers long before."""
UNREAD_BYTES: Final = 64 << 20
"""Answers that may wait for a client to read them."""
GREETING_SECONDS: Final = 5.0

NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))


class OwnedStore(Protocol):
    """The store of the owner, as its clients use it."""

    definitions: DefinitionChanges
    """The version that clients are told when they join."""

    @property
    def clock(self) -> tuple[Micros, float]: ...

    def record(self, intake: Intake) -> Pending: ...

    async def find_kept(self, intakes: Sequence[Intake]) -> list[list[Verdict] | None]: ...

    async def lend(self) -> Loan: ...

    def renew_fences(self, seconds: Mapping[int, float]) -> set[int]: ...

    async def resume_leases(self, worker: str, held: Mapping[int, float]) -> None: ...

    async def expire_leases(self, worker: str) -> None: ...


class OwnerServer:
    """The socket beside the file, and whoever has connected to it. Lives on the owner's loop."""

    def __init__(self, store: OwnedStore, listening: socket.socket, *, schema: int, key: str) -> None:
        self.store = store
        self.key = key
        self._schema = schema
        self._listening = listening
        close_in_child(listening)
        self._clients: set[ServedClient] = set()
        self._greeted: set[asyncio.Task[None]] = set()
        self._heartbeats: set[socket.socket] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="oncehook-owner")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                ration.log(log, logging.ERROR, "store.accept_failed", {"error": str(error)}, kind="accept")
                await asyncio.sleep(0.1)
                continue
            close_in_child(connected)
            task = loop.create_task(self._greet(connected))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    async def _greet(self, connected: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                wire.check_peer(connected)
                greeting = await self._read_greeting(connected)
                await self._welcome(connected, greeting)
        except (OSError, ValueError, TimeoutError, msgspec.MsgspecError, OncehookError) as error:
            drop(error)
            connected.close()
        except BaseException:
            connected.close()
            raise

    async def _read_greeting(self, connected: socket.socket) -> Greeting:
        loop, frames = asyncio.get_running_loop(), wire.FrameReader(wire.GREETING_BYTES)
        while data := await loop.sock_recv(connected, 65536):
            if found := frames.feed(data):
                return wire.GREETINGS.decode(found[0])
        raise ConnectionResetError("gone before its greeting")

    async def _welcome(self, connected: socket.socket, greeting: Greeting) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._check(greeting)
        except StoreHeld as refusal:
            with contextlib.suppress(OSError):
                await loop.sock_sendall(connected, wire.encode(AnswerFrame(0, NOTHING, CallFailure.of(refusal))))
            connected.close()
            return
        if greeting.worker is not None and greeting.role != "heartbeat":
            await self.store.resume_leases(greeting.worker, greeting.held)
        welcome = msgspec.msgpack.encode(Welcome(os.getpid(), *self.store.clock))
        await loop.sock_sendall(connected, wire.encode(AnswerFrame(0, msgspec.Raw(welcome))))
        if greeting.role == "heartbeat":
            self._heartbeats.add(connected)
            connected.setblocking(True)
            threading.Thread(target=self._renew, args=(connected,), name="oncehook-renewals", daemon=True).start()
        else:
            await loop.connect_accepted_socket(lambda: ServedClient(self, greeting), connected)

    def _check(self, greeting: Greeting) -> None:
        """Refuse a client that this process could not serve. Raises StoreHeld."""
        me = f"Process {os.getpid()} (oncehook {__version__}) owns this file"
        if (greeting.protocol, greeting.schema) != (wire.PROTOCOL, self._schema):
            raise StoreHeld(
                f"{me}, and is of another version than this process ({greeting.version}): its schema is"
                f" {self._schema}, not {greeting.schema}, and its protocol {wire.PROTOCOL}, not {greeting.protocol}.",
                hint="Stop it first, or install the same version for both.",
            )
        if greeting.role == "client" and greeting.key != self.key:
            mine, theirs = (key or "no key" for key in (self.key, greeting.key))
            raise StoreHeld(
                f"{me}, and encrypts with another key than this process: {mine} there, {theirs} here.",
                hint="Give all processes of a store the same `encrypt.key`.",
            )
        if len(self._clients) >= MOST_CLIENTS:
            raise StoreHeld(f"{me}, and has {MOST_CLIENTS} clients already.", hint="Stop some of them.")

    def _renew(self, connected: socket.socket) -> None:
        """Answer the heartbeats of one client, on a thread: nothing on the loop may hold them up (R32)."""
        renewals = wire.decoder(dict[int, float])
        try:
            while True:
                seconds = renewals.decode(wire.read_frame(connected))
                connected.sendall(wire.encode(self.store.renew_fences(seconds)))
        except (OSError, ValueError, msgspec.MsgspecError, StoreUnavailable):
            connected.close()
            self._heartbeats.discard(connected)

    # -- while it runs -------------------------------------------------------------------------

    def join(self, client: ServedClient) -> None:
        self._clients.add(client)
        client.send(encode_changes(self.store.definitions))

    def note_definitions(self, changes: DefinitionChanges) -> None:
        """Tell all clients of changed definitions, before the answer to whoever changed them."""
        frame = encode_changes(changes)
        for client in list(self._clients):
            client.send(frame)

    def leave(self, client: ServedClient) -> None:
        self._clients.discard(client)

    @property
    def clients(self) -> int:
        return len(self._clients)

    def wake(self, destination_ids: Collection[int] | None) -> None:
        """Wake the workers of all clients."""
        if any(client.greeting.works for client in self._clients):
            woken = msgspec.msgpack.encode(None if destination_ids is None else list(destination_ids))
            frame = wire.encode(AnswerFrame(0, msgspec.Raw(woken)))
            for client in list(self._clients):
                if client.greeting.works:
                    client.send(frame)

    async def stop_taking(self, seconds: float) -> None:
        """Greet nobody any more, take no more calls, and wait until those under way are answered."""
        self._accepting.cancel()
        self._listening.close()
        for client in self._clients:
            client.stop_taking()
        running = [*self._greeted, *(task for client in self._clients for task in client.tasks)]
        if running:
            await asyncio.wait(running, timeout=seconds)

    async def close(self) -> None:
        """Let everybody go; they look for the next owner."""
        closed = [client.close() for client in list(self._clients)]
        for connected in list(self._heartbeats):
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        if closed:
            await asyncio.wait(closed, timeout=1.0)


class ServedClient(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: OwnerServer, greeting: Greeting) -> None:
        self.greeting = greeting
        self.worker = greeting.worker
        self.tasks: set[asyncio.Task[None]] = set()
        self._server = server
        self._store = server.store
        self._loop = asyncio.get_running_loop()
        self._frames = wire.FrameReader()
        self._pending: set[Pending] = set()
        self._loans: dict[int, Loan] = {}
        self._transport: asyncio.Transport | None = None
        self._is_taking = True
        self._gone = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own
        self._server.join(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.leave(self)
        for pending in self._pending:  # it sends them again: what is not written yet must not be written twice
            pending.abandoned = True
        for loan in self._loans.values():
            loan.over.set()
        if self.worker is not None and self._is_taking:
            self._begin(self._expire(self.worker))
        if not self._gone.done():
            self._gone.set_result(None)

    async def _expire(self, worker: str) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self._store.expire_leases(worker)

    def stop_taking(self) -> None:
        self._is_taking = False
        if self._transport is not None:
            self._transport.pause_reading()

    def close(self) -> asyncio.Future[None]:
        """Close when everything is sent."""
        if self._transport is not None:
            self._transport.close()
        return self._gone

    def send(self, frame: bytearray) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > UNREAD_BYTES:
            self._cut_off(ValueError("it does not read its answers"))
        else:
            self._transport.write(frame)

    def _cut_off(self, error: Exception) -> None:
        drop(error, self.greeting.pid)
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take(wire.CALLS.decode(frame))
        except (ValueError, msgspec.MsgspecError) as error:
            self._cut_off(error)

    def _take(self, call: wire.CallFrame) -> None:
        if len(self.tasks) >= MOST_CALLS:
            raise ValueError("too many calls at once")
        if call.verb == "record":
            was_sent, intakes = wire.RECORDS.decode(call.arguments)
            if was_sent:
                self._begin(self._record_again(call.number, intakes))
            else:
                self._record(call.number, intakes, [None] * len(intakes))
        elif call.verb == "borrow":
            self._begin(self._lend(call.number))
        elif call.verb == "give_back":
            if (loan := self._loans.pop(msgspec.msgpack.decode(call.arguments, type=int), None)) is not None:
                loan.over.set()
            self._answer(call.number, None)
        else:
            verb = wire.VERBS.get(call.verb)
            if verb is None:
                raise ValueError(f"no such verb: {call.verb[:40]!r}")
            try:
                arguments = verb.arguments.decode(call.arguments)
            except (ValueError, msgspec.MsgspecError) as error:
                self._fail(call.number, StoreError(f"This cannot be read: {error}"))
            else:
                self._begin(self._run(call.number, verb, arguments))

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _answer(self, number: int, result: object) -> None:
        self.send(wire.encode_cleaned((number, result)))

    def _fail(self, number: int, error: BaseException) -> None:
        self.send(wire.encode_cleaned((number, None, CallFailure.of(error))))

    async def _run(self, number: int, verb: Verb[Any], arguments: Sequence[Any]) -> None:
        if verb.name == "lease_due":
            self.worker = arguments[1] or self.worker
        try:
            self._answer(number, await verb.run(self._store, *arguments))
        except OncehookError as error:
            self._fail(number, error)
        except Exception as error:
            log.exception("store.call_failed", extra={"fields": {"verb": verb.name}})
            self._fail(number, error)
        if self._transport is None and self.worker is not None:  # it may have been leased something in vain
            await self._expire(self.worker)

    # -- arrivals ------------------------------------------------------------------------------

    def _record(self, number: int, intakes: Sequence[Intake], decided: list[wire.Decided | None]) -> None:
        """Have these join the next group, and answer when the last of them is decided."""
        left = 0

        def note(place: int, pending: Pending) -> None:
            nonlocal left
            left -= 1
            self._pending.discard(pending)
            try:
                decided[place] = pending.result()
            except Exception as error:
                decided[place] = CallFailure.of(error)
            if not left:
                self._answer_record(number, intakes, decided)

        joined: list[tuple[int, Pending]] = []
        for place, intake in enumerate(intakes):
            if decided[place] is None:
                try:
                    joined.append((place, self._store.record(intake)))
                except StoreUnavailable as error:
                    decided[place] = CallFailure.of(error)
        left = len(joined)
        if not left:
            self._answer_record(number, intakes, decided)
        for place, pending in joined:
            self._pending.add(pending)
            pending.call_back(partial(note, place, pending))

    def _answer_record(self, number: int, intakes: Sequence[Intake], decided: Sequence[wire.Decided | None]) -> None:
        same = [
            (place, n, item.same_as)
            for place, intake in enumerate(intakes)
            for n, item in enumerate(intake.items)
            if item.same_as is not None
        ]
        self._answer(number, (decided, same))

    async def _record_again(self, number: int, intakes: Sequence[Intake]) -> None:
        """Record what an owner before may have kept already, without having told the client."""
        try:
            kept = await self._store.find_kept(intakes)
        except StoreUnavailable as error:
            self._answer_record(number, intakes, [CallFailure.of(error)] * len(intakes))
        else:
            self._record(number, intakes, list(kept))

    # -- the write lock ------------------------------------------------------------------------

    async def _lend(self, number: int) -> None:
        try:
            loan = await self._store.lend()
        except OncehookError as error:
            self._fail(number, error)
            return
        if self._transport is None:
            loan.over.set()
            return
        self._loans[number] = loan
        self._answer(number, (loan.mark, loan.now))


def encode_changes(changes: DefinitionChanges) -> bytearray:
    return wire.encode(AnswerFrame(wire.DEFINITIONS, msgspec.Raw(msgspec.msgpack.encode(changes))))


def drop(error: BaseException, pid: int = 0) -> None:
    fields = {"pid": pid, "error": str(error) or type(error).__name__}
    ration.log(log, logging.WARNING, "store.client_dropped", fields, kind="client")
