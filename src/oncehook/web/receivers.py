"""Receivers: processes that take arrivals in for one server (`serve --receivers N`).

The main process works, and answers API, dashboard, probes and metrics. Each receiver accepts connections on a socket of
its own at the one address and answers requests to `/in/`. A connection whose next request is for another process is
handed over with its socket, so that any connection may ask for anything. What receivers count goes to the main process
once a second, which shows it as its own; limits are counted together in shared memory (`counts`).

A receiver that ends is started again. Until then the main process accepts on its socket and answers itself. Where the
main process is gone, the receivers answer what is under way and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from oncehook import clock, logs
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.model import Id
from oncehook.observe import Observed, Observer
from oncehook.reports import RunningReceiver
from oncehook.sources import Network
from oncehook.web.connection import BACKLOG, DRAIN_SECONDS, ConnectionLimits, Connections
from oncehook.web.counts import BODIES, CONNECTIONS, DROPPED, SharedCounts
from oncehook.web.hooks import BodyBudget, Hooks
from oncehook.web.live import Broadcast
from oncehook.web.peers import peer_finder

log = logging.getLogger("oncehook.web")

REPORT_EVERY: Final = 1.0
MOST_SILENT: Final = 30
"""Reports that may be missing before a receiver counts as hung, and is ended."""
FIRST_WAIT: Final = 0.1
LONGEST_WAIT: Final = 30.0
"""Seconds before a receiver that ended is started again: doubled from the first to the longest."""
STEADY_AFTER: Final = 60.0
"""Seconds after which a receiver has run so long that its end is a first one again."""
MOST_HANDED_OVER: Final = 1024
"""Connections that may be on their way from one process to another."""
MOST_MOMENTS: Final = 1024
"""Messages on their way beyond which moments for watchers are dropped."""
PIECE: Final = 1 << 18


# -- messages ----------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True):
    """The receiver accepts connections."""


class Handed(msgspec.Struct, tag=True):
    """A connection, with the request that was read off it; its socket comes beside the message."""

    inode: int
    """Number of the socket: where the system could not hand one over, the next one must not be taken for it."""
    data: bytes


class Report(msgspec.Struct, tag=True):
    """Work of a receiver since its last report."""

    connections: int
    cpu: float
    memory: int
    observed: Observed


class Happened(msgspec.Struct, tag=True):
    """A moment for those who watch, its fields as JSON."""

    kind: str
    fields: bytes


class Watched(msgspec.Struct, tag=True):
    """Whether anybody watches."""

    is_watched: bool


class Stop(msgspec.Struct, tag=True):
    """Answer what is under way and end; at once, if it is urgent."""

    is_urgent: bool


Message: TypeAlias = Ready | Handed | Report | Happened | Watched | Stop


def _encode_id(value: object) -> bytes:
    if isinstance(value, Id):
        return bytes(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_id(kind: type, value: object) -> object:
    if issubclass(kind, Id) and isinstance(value, bytes):
        return kind(value)
    raise NotImplementedError(f"{kind.__name__} does not travel")


class Channel:
    """Messages between two processes, in order, over one end of a pair of sockets. Lives on one event loop."""

    _LENGTH: Final = struct.Struct("!I")

    def __init__(
        self, end: socket.socket, on_message: Callable[[Message, int | None], None], on_end: Callable[[], None]
    ) -> None:
        """`on_message` gets a message and the open file that came with it, which is then its own; `on_end` is called
        when the other process is gone."""
        end.setblocking(False)
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_id)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=_decode_id)
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._loop.add_reader(end.fileno(), self._read)

    @property
    def waiting(self) -> int:
        """Messages that the other process has not taken yet, without those that the system holds."""
        return len(self._unsent)

    @property
    def is_open(self) -> bool:
        return self._end.fileno() >= 0

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message, with an open file that is closed here then. Nothing is sent once the other end is gone."""
        if not self.is_open:
            _close(descriptor)
            return
        data = self._encoder.encode(message)
        self._unsent.append((memoryview(self._LENGTH.pack(len(data)) + data), descriptor))
        if len(self._unsent) == 1:
            self._write()
            if self._unsent and self.is_open:
                self._loop.add_writer(self._end.fileno(), self._write_more)

    def _write(self) -> None:
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                sent = socket.send_fds(self._end, [data], [] if descriptor is None else [descriptor])
            except BlockingIOError:
                return
            except ConnectionError:
                self._drop_unsent()  # that the other process is gone is seen when reading
                return
            except OSError:
                if descriptor is None:  # half of a message may be sent: what comes behind it could not be read
                    self._fail()
                    return
                sent = len(data)  # too many descriptors are on their way: whose connection this is has to come again
            _close(descriptor)
            if sent < len(data):
                self._unsent[0] = data[sent:], None
            else:
                self._unsent.popleft()

    def _write_more(self) -> None:
        self._write()
        if not self._unsent and self.is_open:
            self._loop.remove_writer(self._end.fileno())

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, PIECE, 16)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._descriptors.append(descriptor)
        if not data:
            self._fail()
            return
        self._received += data
        while len(self._received) >= 4:
            end = 4 + self._LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            message = self._decoder.decode(memoryview(self._received)[4:end])
            del self._received[:end]
            self._on_message(message, self._descriptor_of(message) if isinstance(message, Handed) else None)

    def _descriptor_of(self, handed: Handed) -> int | None:
        """Return the socket of a message; None where the system had no descriptor left for it."""
        for place, descriptor in enumerate(self._descriptors):
            if os.fstat(descriptor).st_ino == handed.inode:
                for _ in range(place):
                    os.close(self._descriptors.popleft())
                return self._descriptors.popleft()
        return None

    def _fail(self) -> None:
        self.close()
        self._on_end()

    async def flush(self, seconds: float) -> None:
        """Wait until the other process has taken everything, or is gone, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._unsent:  # noqa: ASYNC110 - once in a process's life
                    await asyncio.sleep(0.01)

    def close(self) -> None:
        if self.is_open:
            self._loop.remove_reader(self._end.fileno())
            self._loop.remove_writer(self._end.fileno())
            self._end.close()
            self._drop_unsent()
            while self._descriptors:
                os.close(self._descriptors.popleft())

    def _drop_unsent(self) -> None:
        while self._unsent:
            _close(self._unsent.popleft()[1])


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def hand_over(channel: Channel, descriptor: int, data: bytes) -> bool:
    """Send a connection to the other process, with the request that was read off it; False: it cannot be now."""
    if not channel.is_open or channel.waiting >= MOST_HANDED_OVER:
        return False
    channel.send(Handed(os.fstat(descriptor).st_ino, data), descriptor)
    return True


def build_hooks(inbox: Inbox, trusted: Sequence[Network], counts: SharedCounts | None = None) -> Hooks:
    """Build what answers `/in/`, with the limits of one process, or of all whose counts are given."""
    bodies, dropped = (counts.count_of(BODIES), counts.count_of(DROPPED)) if counts is not None else (None, None)
    return Hooks(inbox.receiver, "/in/", peer_finder(trusted), BodyBudget(trusted=trusted, count=bodies), dropped)


# -- the main process --------------------------------------------------------------------------


class Assignment(msgspec.Struct):
    """Arguments of a receiver: descriptors that it inherits, and limits that it shares."""

    number: int
    receiver_count: int
    listener: int
    channel: int
    counts: int
    seed: bytes
    limits: dict[str, Any]


@dataclass(eq=False)
class Place:
    """One receiver's socket, and the process that accepts on it now."""

    number: int
    listener: socket.socket
    process: asyncio.subprocess.Process | None = None
    channel: Channel | None = None
    started_at: datetime | None = None
    is_ready: bool = False
    silent: int = 0
    """Reports that have been due since the last one came."""
    arrivals: int = 0
    connections: int = 0
    stand_in: asyncio.Server | None = None
    """Accepts here while there is no receiver."""

    @property
    def can_take(self) -> bool:
        """Tell whether its receiver can be handed a connection."""
        return self.is_ready and self.channel is not None and self.channel.is_open


class Receivers:
    """The receivers of one server, as its main process sees them. Itself what connections are handed over to."""

    def __init__(self, count: int, command: Sequence[str], observer: Observer) -> None:
        """`command` starts a receiver; its last argument will be the assignment."""
        self.count = count
        self._command = command
        self._observer = observer
        self.counts = SharedCounts.create(count + 1)
        self.stream = Broadcast(self._note_watched)
        """Moments of all processes, for those who watch."""
        self._places: list[Place] = []
        self._stopping = asyncio.Event()

    # -- handing over --------------------------------------------------------------------------

    def answers(self, *, is_hook: bool) -> bool:
        return is_hook and not self._stopping.is_set() and any(place.can_take for place in self._places)

    def take(self, descriptor: int, data: bytes) -> bool:
        ready = [place for place in self._places if place.can_take]
        least = min(ready, key=lambda place: place.connections, default=None)
        if least is None or least.channel is None or not hand_over(least.channel, descriptor, data):
            return False
        least.connections += 1  # until it reports: not all of a burst to the same one
        return True

    def _note_watched(self, is_watched: bool) -> None:
        """Have receivers report every arrival while somebody watches."""
        for place in self._places:
            if place.channel is not None:
                place.channel.send(Watched(is_watched))

    # -- running -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(
        self, listeners: Sequence[socket.socket], connections: Connections, is_urgent: Callable[[], bool]
    ) -> AsyncIterator[None]:
        """Keep a receiver running on each socket inside the block; behind it, have them finish what is under way.

        `connections` are those of the main process. Raises ConfigError where a receiver cannot be started.
        """
        self._places = [Place(number, listener) for number, listener in enumerate(listeners, 1)]
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in self._places]
        keepers = [
            asyncio.create_task(self._keep(place, connections, first), name=f"oncehook-receiver-{place.number}")
            for place, first in zip(self._places, ready, strict=True)
        ]
        watch = asyncio.create_task(self._watch(), name="oncehook-receivers")
        try:
            await asyncio.gather(*ready)
            yield
        finally:
            self._stopping.set()
            watch.cancel()
            for place in self._places:
                place.listener.close()
                if place.stand_in is not None:
                    place.stand_in.close()
            connections.shut_down()
            await self._stop(keepers, is_urgent)
            for first in ready:
                first.cancel()
            os.close(self.counts.descriptor)

    async def _keep(self, place: Place, connections: Connections, first: asyncio.Future[None]) -> None:
        wait = FIRST_WAIT
        while True:
            began = clock.steady()
            try:
                reason = f"exit code {await self._run(place, connections, first)}"
            except OSError as error:
                reason = str(error)
            if self._stopping.is_set():
                return
            self.counts.clear(place.number)
            if not first.done():
                first.set_exception(ConfigError(f"A receiver cannot be started: {reason}.", hint="See what it said."))
                return
            wait = FIRST_WAIT if clock.steady() - began > STEADY_AFTER else wait
            self._observer.receiver_ended(place.number)
            pid = place.process and place.process.pid
            fields = {"receiver": place.number, "pid": pid, "reason": reason, "again_in_s": wait}
            log.error("receiver.ended", extra={"fields": fields})
            await self._stand_in(place, connections)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopping.wait()
                    return
            wait = min(wait * 2, LONGEST_WAIT)

    async def _stand_in(self, place: Place, connections: Connections) -> None:
        """Accept on this socket until its receiver is there again."""
        if place.stand_in is None:
            loop, listener = asyncio.get_running_loop(), place.listener.dup()
            place.stand_in = await loop.create_server(connections.accept, sock=listener, backlog=BACKLOG)

    async def _run(self, place: Place, connections: Connections, first: asyncio.Future[None]) -> int:
        """Start a receiver, and return its exit code when it has ended."""
        ours, theirs = socket.socketpair()
        assignment = Assignment(
            place.number,
            self.count,
            place.listener.fileno(),
            theirs.fileno(),
            self.counts.descriptor,
            self.counts.seed,
            asdict(connections.limits),
        )
        inherited = (assignment.listener, assignment.channel, assignment.counts)
        place.started_at, place.arrivals, place.silent = clock.now_utc(), 0, 0
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            place.process = await asyncio.create_subprocess_exec(
                *self._command,
                msgspec.json.encode(assignment).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C is for the main process, which tells the others
            )
            on_failure.pop_all()
        gone = asyncio.Event()
        place.channel = Channel(ours, partial(self._receive, place, connections, first), gone.set)
        if self._stopping.is_set():
            place.channel.send(Stop(False))
        try:
            code = await place.process.wait()
            async with asyncio.timeout(5):
                await gone.wait()  # its last report is read then
        except TimeoutError:
            pass
        finally:
            place.is_ready = False
            place.channel.close()
        return code

    def _receive(
        self,
        place: Place,
        connections: Connections,
        first: asyncio.Future[None],
        message: Message,
        descriptor: int | None,
    ) -> None:
        match message:
            case Handed(data=data):
                if descriptor is not None:
                    connections.run(connections.adopt(descriptor, data))
            case Report():
                self._note_report(place, message)
            case Happened(kind=kind, fields=fields):
                self.stream.publish(kind, msgspec.json.decode(fields))
            case Ready():
                place.is_ready = True
                if place.stand_in is not None:
                    place.stand_in.close()
                    place.stand_in = None
                if self.stream.is_there and place.channel is not None:
                    place.channel.send(Watched(True))
                if not first.done():
                    first.set_result(None)
            case _:
                pass

    def _note_report(self, place: Place, report: Report) -> None:
        assert place.process is not None
        assert place.started_at is not None
        place.silent = 0
        place.connections = report.connections
        place.arrivals += self._observer.add_observed(report.observed)
        self._observer.receivers[place.number] = RunningReceiver(
            place.number,
            place.process.pid,
            place.started_at,
            report.connections,
            place.arrivals,
            report.cpu,
            report.memory,
        )

    async def _watch(self) -> None:
        """End receivers that have not reported for long: they hang, and others would be sent to them."""
        while True:
            await asyncio.sleep(REPORT_EVERY)
            for place in self._places:
                place.silent += place.is_ready
                if place.silent > MOST_SILENT and place.process is not None and place.process.returncode is None:
                    log.error("receiver.hung", extra={"fields": {"receiver": place.number, "pid": place.process.pid}})
                    place.silent = 0
                    place.process.kill()

    async def _stop(self, keepers: Sequence[asyncio.Task[None]], is_urgent: Callable[[], bool]) -> None:
        for is_over, seconds in ((is_urgent, DRAIN_SECONDS + 5), (lambda: False, 2.0)):
            self._send_stop(is_urgent=seconds < DRAIN_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not all(keeper.done() for keeper in keepers) and not is_over():  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
        for place in self._places:
            if place.process is not None and place.process.returncode is None:
                place.process.kill()
        await asyncio.gather(*keepers, return_exceptions=True)

    def _send_stop(self, *, is_urgent: bool) -> None:
        for place in self._places:
            if place.channel is not None:
                place.channel.send(Stop(is_urgent))


# -- a receiver --------------------------------------------------------------------------------


class ReceiverProcess:
    """One receiver of a server, in a process of its own. To its connections and its observer it is the main process,
    which answers everything but arrivals, and shows what happens."""

    def __init__(self, assignment: Assignment, inbox: Inbox, trusted: Sequence[Network]) -> None:
        self._observer = inbox.observer
        self.is_there = False
        """Whether anybody watches what happens."""
        self._is_urgent = False
        self._stop = asyncio.Event()
        self._listener = _inherit(assignment.listener)
        self._channel = Channel(_inherit(assignment.channel), self._receive, self._stop.set)
        os.set_inheritable(assignment.counts, False)
        counts = SharedCounts(assignment.counts, assignment.receiver_count + 1, assignment.number, assignment.seed)
        hooks = build_hooks(inbox, trusted, counts)
        limits = ConnectionLimits(**assignment.limits)
        self._connections = Connections(_answer_nothing, hooks, limits, trusted, counts.count_of(CONNECTIONS), self)

    async def run(self) -> None:
        """Take arrivals in until the main process says to stop, or is gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        reporting = asyncio.create_task(self._report_until_cancelled(), name="oncehook-report")
        async with self._connections.serving(self._listener, is_urgent=lambda: self._is_urgent):
            self._channel.send(Ready())
            await self._stop.wait()
        reporting.cancel()

    async def end(self) -> None:
        """Report for the last time."""
        self._report()
        await self._channel.flush(2.0)
        self._channel.close()

    def answers(self, *, is_hook: bool) -> bool:
        return not is_hook

    def take(self, descriptor: int, data: bytes) -> bool:
        return hand_over(self._channel, descriptor, data)

    def publish(self, kind: str, fields: Mapping[str, object]) -> None:
        if self.is_there and self._channel.waiting < MOST_MOMENTS:
            self._channel.send(Happened(kind, msgspec.json.encode(fields, enc_hook=str)))

    def _receive(self, message: Message, descriptor: int | None) -> None:
        match message:
            case Handed(data=data):
                if descriptor is not None:
                    self._connections.run(self._connections.adopt(descriptor, data))
            case Watched(is_watched=is_watched):
                self.is_there = is_watched
            case Stop(is_urgent=is_urgent):
                self._is_urgent = is_urgent
                self._stop.set()
            case _:
                pass

    async def _report_until_cancelled(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY)
            logs.ration.sum_up()
            self._report()

    def _report(self) -> None:
        used = os.times()
        observed = self._observer.take_observed()
        cpu = round(used.user + used.system, 2)
        self._channel.send(Report(len(self._connections.open), cpu, _memory(), observed))


async def receive(inbox: Inbox, assignment: Assignment, trusted: Sequence[Network]) -> None:
    """Run as a receiver of a server until its main process says to stop, or is gone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.ration.few = max(logs.FEW // assignment.receiver_count, 1)
    async with inbox.receiving(assignment.receiver_count):
        process = ReceiverProcess(assignment, inbox, trusted)
        inbox.observer.audience = process
        await process.run()
    await process.end()


def _inherit(descriptor: int) -> socket.socket:
    inherited = socket.socket(fileno=descriptor)
    inherited.set_inheritable(False)
    return inherited


async def _answer_nothing(scope: object, receive: object, send: object) -> None:
    """Stand for the application, which is in the main process."""


def _memory() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not on this system: then the most that it ever had
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
