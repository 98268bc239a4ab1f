"""A client's end of the socket: arrivals go to the owner in groups, other writes as calls, heartbeats on their own.

What was sent and not answered when the owner went is kept here until there is another one, which may be this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from oncehook import clock
from oncehook.errors import NotStarted, OncehookError, Overloaded, StoreUnavailable
from oncehook.model import DefinitionChanges, EventId, Intake, Mark
from oncehook.store.base import Pending, refuse
from oncehook.store.sqlite import wire
from oncehook.store.sqlite.connection import Micros, StoreClock, close_in_child
from oncehook.store.sqlite.wire import AnswerFrame, CallFailure, Greeting, Moved, Verb

log = logging.getLogger("oncehook.store")

GROUP: Final = 128
GROUP_BYTES: Final = 8 << 20
"""Arrivals, and bytes of them, that one frame holds; a larger arrival is a frame of its own."""
ANSWER_BYTES: Final = (1 << 32) - 1
"""The longest answer: leases come with their bodies, and the owner is believed."""
GROUPS: Final = 2
"""Frames of arrivals under way: one is being committed, the next waits for its turn; what comes meanwhile gathers."""


class _Ask:
    """A call that waits for its answer."""

    __slots__ = ("future", "repeats", "result")

    def __init__(self, future: asyncio.Future[Any], result: Callable[[bytes], Any], repeats: bool) -> None:
        self.future = future
        self.result = result
        self.repeats = repeats


class StoreClient(asyncio.Protocol):
    """A process's requests to the owner. Outlives its connections: `follow` makes the next one."""

    def __init__(
        self,
        wake: Callable[[Collection[int] | None], None],
        note_commit: Callable[[float], None],
        note_definitions: Callable[[DefinitionChanges], None],
        *,
        max_waiting: int,
        max_waiting_bytes: int,
        patience: float,
    ) -> None:
        """`patience`: seconds without an owner after which nobody is kept waiting for one."""
        self._wake = wake
        self._note_commit = note_commit
        self._note_definitions = note_definitions
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._part = self._part_bytes = 0
        """Arrivals, and bytes of them, that may wait in this process."""
        self._patience = patience
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.Transport | None = None
        self._frames = wire.FrameReader(ANSWER_BYTES)
        self._number = 0
        self._waiting: deque[Pending] = deque()
        self._unsure: deque[Pending] = deque()
        """Sent to an owner that has gone, and not answered."""
        self._bytes = 0
        self._sent: dict[int, tuple[list[Pending], float]] = {}
        self._asks: dict[int, _Ask] = {}
        self._is_planned = False
        self._closed: OncehookError | None = NotStarted("The store is not open.")
        """Why nothing can be asked."""
        self._connected = asyncio.Event()
        self.lost = asyncio.Event()
        """There is no connection."""
        self._lost_at = 0.0
        self.pid = 0
        """Of the owner."""
        self.clock: StoreClock | None = None
        """The store's time, once there was an owner."""

    # -- connecting ----------------------------------------------------------------------------

    async def follow(self, connected: socket.socket, welcome: wire.Welcome) -> None:
        """Be the client of an owner that has said welcome."""
        connected.setblocking(False)
        self.pid = welcome.pid
        self.clock = StoreClock(welcome.started_at, welcome.started_steady)
        self._frames = wire.FrameReader(ANSWER_BYTES)
        await self._loop.create_unix_connection(lambda: self, sock=connected)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own
        self.lost.clear()
        self._connected.set()
        self._plan()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost_at = self._loop.time()
        self._connected.clear()
        for group, _ in self._sent.values():
            self._unsure.extend(pending for pending in group if not pending.is_decided)
        self._sent.clear()
        asks, self._asks = self._asks, {}
        for ask in asks.values():
            if not ask.future.done():
                ask.future.set_exception(Moved() if ask.repeats else wire.outcome_unknown())
                ask.future.exception()
        self._count_bytes()
        self.lost.set()

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    async def wait_until_idle(self) -> None:
        """Wait until nothing waits for an answer any more, or this process owns the file."""
        while waiting := [future for future in self._list_futures() if not future.done()]:
            await asyncio.wait(waiting)

    def _list_futures(self) -> list[asyncio.Future[Any]]:
        groups = [self._waiting, self._unsure, *(group for group, _ in self._sent.values())]
        return [
            *(pending.future for group in groups for pending in group),
            *(ask.future for ask in self._asks.values()),
        ]

    def move(self) -> list[Pending]:
        """Give up what waits, because this process owns the file now. Those that may be kept already come first."""
        moved = [pending for pending in (*self._unsure, *self._waiting) if not pending.abandoned]
        self._unsure.clear()
        self._waiting.clear()
        self._bytes = 0
        self._connected.set()  # who waits for a connection looks again
        return moved

    def give_up(self) -> None:
        """Refuse what has waited for an owner, after `patience`."""
        if self._has_given_up():
            waiting = [*self._unsure, *self._waiting]
            self._unsure.clear()
            self._waiting.clear()
            self._bytes = 0
            refuse(waiting, _no_owner())

    def open(self, receiver_count: int = 1) -> None:
        """Begin, as one of so many processes that divide between them what may wait."""
        self._part, self._part_bytes = self._max_waiting // receiver_count, self._max_waiting_bytes // receiver_count
        self._loop = asyncio.get_running_loop()
        self._closed = None
        self.lost.set()
        self._lost_at = self._loop.time()

    def close(self, why: OncehookError | None = None) -> None:
        self._closed = why or StoreUnavailable("The store is closed.")
        self._connected.set()
        if self._transport is not None:
            self._transport.close()

    # -- arrivals ------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        """Join the next frame. Raises at once when too much waits, or there has been no owner for a while."""
        self._check()
        waiting = len(self._waiting) + len(self._unsure) + GROUP * len(self._sent)
        if waiting >= self._part or self._bytes > self._part_bytes:
            raise Overloaded
        pending = Pending(intake, self._loop)
        if pending.size > wire.MOST_BYTES // 2:
            raise StoreUnavailable("This arrival is too large to be handed to the process that owns the file.")
        self._waiting.append(pending)
        self._bytes += pending.size
        self._plan()
        return pending

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if self._has_given_up():
            raise _no_owner()

    def _has_given_up(self) -> bool:
        return self._transport is None and self._loop.time() - self._lost_at > self._patience

    def _plan(self) -> None:
        # Not at once: whatever the loop has ready now belongs to the same frame.
        if not self._is_planned and self._transport is not None and len(self._sent) < GROUPS:
            self._is_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_planned = False
        while self._transport is not None and len(self._sent) < GROUPS:
            was_sent = bool(self._unsure)
            group = self._take(self._unsure if was_sent else self._waiting)
            if not group:
                if was_sent and not self._unsure:
                    continue
                break
            self._send(self._transport, group, was_sent)

    def _send(self, transport: asyncio.Transport, group: list[Pending], was_sent: bool) -> None:
        self._number += 1
        try:
            frame = wire.encode((self._number, "record", (was_sent, [pending.intake for pending in group])))
        except UnicodeEncodeError as error:  # one of them is to blame: the others must not suffer for it
            if len(group) > 1:
                for pending in group:
                    self._send(transport, [pending], was_sent)
            else:
                self._bytes -= group[0].size
                refuse(group, StoreUnavailable(f"The store could not write: {error}"))
        else:
            self._sent[self._number] = (group, clock.perf())
            transport.write(frame)

    def _take(self, queue: deque[Pending]) -> list[Pending]:
        group: list[Pending] = []
        size = 0
        while queue and len(group) < GROUP and size < GROUP_BYTES:
            pending = queue.popleft()
            if pending.abandoned or pending.is_decided:
                self._bytes -= pending.size
                continue
            group.append(pending)
            size += pending.size
        return group

    def _count_bytes(self) -> None:
        self._bytes = sum(pending.size for pending in (*self._waiting, *self._unsure))

    # -- calls ---------------------------------------------------------------------------------

    async def request(self, verb: Verb[Any], arguments: Sequence[Any]) -> Any:
        """Have the owner run a verb."""
        return await self._ask(verb.name, tuple(arguments), verb.result.decode, repeats=verb.repeats)

    async def borrow(self) -> tuple[int, int, Micros]:
        """Borrow the write lock; returns the number of the loan, the mark that must still be there, and the time."""
        return await self._ask("borrow", None, _decode_loan, repeats=True, has_number=True)  # type: ignore[no-any-return]

    async def give_back(self, loan: int) -> None:
        """Give the write lock back. Where the owner has gone, it is back already."""
        with contextlib.suppress(Moved, StoreUnavailable):
            await self._ask("give_back", loan, msgspec.msgpack.decode, repeats=True)

    async def _ask(
        self, name: str, arguments: object, result: Callable[[bytes], Any], *, repeats: bool, has_number: bool = False
    ) -> Any:
        await self._wait_for_owner()
        if self._transport is None:
            raise Moved
        self._number += 1
        number = self._number
        ask = self._asks[number] = _Ask(self._loop.create_future(), result, repeats)
        try:
            self._transport.write(wire.encode_cleaned((number, name, arguments)))
            value = await ask.future
        finally:
            self._asks.pop(number, None)
        return (number, *value) if has_number else value

    async def _wait_for_owner(self) -> None:
        self._check()
        if not self._connected.is_set():
            try:
                async with asyncio.timeout(self._patience):
                    await self._connected.wait()
            except TimeoutError:
                raise _no_owner() from None
            if self._closed is not None:
                raise self._closed.with_traceback(None)

    # -- answers -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take_answer(wire.ANSWERS.decode(frame))
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("store.owner_unreadable", extra={"fields": {"pid": self.pid, "error": str(error)}})
            if self._transport is not None:
                self._transport.abort()

    def _take_answer(self, answer: AnswerFrame) -> None:
        if not answer.number:
            self._wake(wire.WOKEN.decode(answer.result))
        elif answer.number == wire.DEFINITIONS:
            self._note_definitions(wire.CHANGED.decode(answer.result))
        elif (sent := self._sent.pop(answer.number, None)) is not None:
            self._plan()
            self._resolve(*sent, *wire.DECIDED.decode(answer.result))
        elif (ask := self._asks.get(answer.number)) is not None and not ask.future.done():
            if answer.failure is not None:
                ask.future.set_exception(answer.failure.build())
            else:
                ask.future.set_result(ask.result(bytes(answer.result)))

    def _resolve(
        self,
        group: list[Pending],
        began: float,
        decided: Sequence[wire.Decided],
        same: Sequence[tuple[int, int, EventId]],
    ) -> None:
        self._note_commit(clock.perf() - began)
        for place, n, event_id in same:
            item = group[place].intake.items[n]
            item.same_as = event_id
            item.marks |= Mark.same_body
        for pending, one in zip(group, decided, strict=True):
            self._bytes -= pending.size
            if isinstance(one, CallFailure):
                pending.refuse(one.build())
            else:
                pending.answer(one)


def _decode_loan(result: bytes) -> tuple[int, Micros]:
    return msgspec.msgpack.decode(result, type=tuple[int, int])


def _no_owner() -> StoreUnavailable:
    return StoreUnavailable("No process owns the file just now; try again.")


def connect_to_owner(database: Path, greeting: Greeting, timeout: float) -> tuple[socket.socket, wire.Welcome]:
    """Connect to the owner, on a thread. Raises OSError where nobody answers, StoreHeld where it refuses."""
    connected = wire.connect(database, timeout)
    close_in_child(connected)
    try:
        return connected, wire.greet(connected, greeting)
    except BaseException as error:
        connected.close()
        if isinstance(error, msgspec.MsgspecError):
            raise OSError(f"the owner answers with nonsense: {error}") from error
        raise


class HeartbeatClient:
    """Renewals of leases with the owner, from threads: a blocking connection of their own (R32)."""

    def __init__(self, database: Path, greeting: Callable[[], Greeting]) -> None:
        self._database = database
        self._greeting = greeting
        self._lock = threading.Lock()
        self._connected: socket.socket | None = None

    def renew(self, seconds: Mapping[int, float], timeout: float) -> set[int]:
        """Prolong the leases with these fences; returns those that are still held. Raises StoreUnavailable."""
        with self._lock:
            for is_last in (False, True):
                try:
                    return self._renew(seconds, timeout)
                except (OSError, msgspec.MsgspecError) as error:
                    self.close()  # the owner may have gone since the last beat: look for the next one
                    if is_last:
                        raise StoreUnavailable(f"The owner of the file does not answer heartbeats: {error}") from error
        raise AssertionError("unreachable")

    def _renew(self, seconds: Mapping[int, float], timeout: float) -> set[int]:
        if self._connected is None:
            self._connected, _ = connect_to_owner(self._database, self._greeting(), timeout)
        self._connected.settimeout(timeout)
        self._connected.sendall(wire.encode(seconds))
        return msgspec.msgpack.decode(wire.read_frame(self._connected), type=set[int])

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()
            self._connected = None
