"""Our own load generator, for where wrk is missing and for what wrk cannot do.

A process of its own, started by `bench.drive`: it sends prepared records (`bench.traffic`) over keep-alive
connections and prints one JSON object. Closed loop: every connection sends its next request when it has its
answer. Open loop (`--rate`): requests are due at fixed moments, and latency counts from the moment a request
was *due*, so a server that stalls cannot hide the requests that had to wait (coordinated omission).
Unlike wrk it waits for every answer before it ends, so what was acknowledged is known exactly.
"""

from __future__ import annotations

import argparse
import hmac
import itertools
import json
import re
import selectors
import socket
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from bench import traffic

DRAIN_SECONDS = 30.0
"""How long a server may take for its last answers."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"


class Connection:
    """One keep-alive connection and the request that is on it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.begun = 0.0
        self._received = b""
        self.connect()

    def connect(self) -> None:
        """Open the connection anew."""
        self.socket = socket.create_connection(("127.0.0.1", self._port), timeout=DRAIN_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def read(self) -> tuple[int, bool] | None:
        """Return the status and whether the connection stays open; None while the answer is not whole."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError("closed before the answer")
        if self._received:
            data = self._received + data
        end = data.find(_HEAD_END)
        if end < 0:
            self._received = data
            return None
        head = data[: end + 2]
        length = _LENGTH.search(head)
        if length is None:
            raise SystemExit(f"an answer without Content-Length is not understood: {head!r}")
        if len(data) < end + 4 + int(length[1]):
            self._received = data
            return None
        self._received = b""
        return int(data[9:12]), _CLOSE.search(head) is None


def read_requests(arguments: argparse.Namespace) -> Iterator[bytes]:
    """Yield a request for each record that `bench.traffic` wrote, from the first on."""
    folder = Path(arguments.traffic)
    tails = traffic.read_tails(folder)
    head = traffic.request_head(arguments.port, arguments.path, tails)
    with (folder / arguments.records).open("rb") as records:
        records.seek(arguments.first * traffic.RECORD_SIZE)
        while record := records.read(traffic.RECORD_SIZE):
            yield traffic.compose(head, tails, record)


def make_requests(arguments: argparse.Namespace) -> Iterator[bytes]:
    """Yield a signed request for `event-N` on one subject after the other; each on its own where there are none."""
    for n in itertools.count(arguments.first):
        subject = n % arguments.subjects if arguments.subjects else n
        start = f'{{"id":"event-{n}","subject":"subject-{subject}","text":"'.encode()
        body = start + b"x" * (traffic.BODY_SIZE - len(start) - 2) + b'"}'
        head = traffic.head_for(arguments.port, arguments.path, len(body))
        signature = hmac.digest(traffic.SECRET.encode(), body, "sha256").hex().encode()
        yield b"".join((head, signature, b"\r\n\r\n", body))


class Load:
    """Sends requests from `first` up to `last` and keeps the figures."""

    def __init__(self, arguments: argparse.Namespace, selector: selectors.BaseSelector) -> None:
        self._requests = read_requests(arguments) if arguments.subjects is None else make_requests(arguments)
        self.next = arguments.first
        self.last = arguments.last
        self.selector = selector
        self.answered = 0
        self.refused = 0
        self.broken = 0
        self.in_window = 0
        self.in_flight = 0
        self.exhausted = False
        self.began = 0.0
        """When the first request of an open loop was due, in seconds since 1970."""
        self.latencies = array("d")
        self.delays = array("d")
        self.connections = [self._connect(arguments.port) for _ in range(arguments.connections)]

    def _connect(self, port: int) -> Connection:
        connection = Connection(port)
        self.selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def send(self, connection: Connection, begun: float) -> bool:
        """Put the next request on a connection; False when there is none left."""
        if self.next >= self.last:
            return False
        self.next += 1
        connection.begun = begun
        request = next(self._requests)
        try:
            connection.socket.sendall(request)
        except OSError:
            self._reconnect(connection)
            connection.socket.sendall(request)
        self.in_flight += 1
        return True

    def take(self, connection: Connection, deadline: float) -> bool:
        """Read what has come; True when the connection is free again."""
        try:
            answer = connection.read()
        except OSError:
            self.in_flight -= 1
            self.broken += 1
            self._reconnect(connection)
            return True
        if answer is None:
            return False
        now = time.perf_counter()
        status, stays = answer
        self.in_flight -= 1
        if status == 200:
            self.answered += 1
            if now <= deadline:
                self.in_window += 1
            self.latencies.append(now - connection.begun)
        else:
            self.refused += 1
        if not stays:
            self._reconnect(connection)
        return True

    def _reconnect(self, connection: Connection) -> None:
        self.selector.unregister(connection.socket)
        connection.socket.close()
        connection.connect()
        self.selector.register(connection.socket, selectors.EVENT_READ, connection)


def closed_loop(load: Load, *, seconds: float, count: int | None) -> float:
    """Keep every connection busy for some seconds, or until `count` requests are sent; returns the elapsed time."""
    started = time.perf_counter()
    deadline = started + seconds
    stop_at = load.next + count if count is not None else None

    def feed(connection: Connection) -> None:
        now = time.perf_counter()
        if now >= deadline or (stop_at is not None and load.next >= stop_at):
            return
        if not load.send(connection, now):
            load.exhausted = True

    for connection in load.connections:
        feed(connection)
    while load.in_flight and time.perf_counter() < deadline + DRAIN_SECONDS:
        for ready, _ in load.selector.select(1.0):
            if load.take(ready.data, deadline):
                feed(ready.data)
    return min(time.perf_counter(), deadline) - started


def open_loop(load: Load, *, seconds: float, rate: float) -> float:
    """Send at fixed moments whatever the server does; returns the elapsed time."""
    load.began = time.time()
    started = time.perf_counter()
    deadline = started + seconds
    idle = deque(load.connections)  # in turn, so that none is idle for so long that the server closes it
    waiting: deque[float] = deque()
    due = started
    step = 1.0 / rate
    while (due < deadline or waiting or load.in_flight) and time.perf_counter() < deadline + DRAIN_SECONDS:
        now = time.perf_counter()
        while due <= now and due < deadline:
            waiting.append(due)
            due += step
        while waiting and idle:
            moment = waiting.popleft()
            # How late the generator itself was: that share of a latency is not the server's.
            load.delays.append(time.perf_counter() - moment)
            if not load.send(idle.popleft(), moment):
                load.exhausted = True
        wait = max(0.0, due - time.perf_counter()) if due < deadline else 1.0
        for ready, _ in load.selector.select(wait):
            if load.take(ready.data, deadline):
                idle.append(ready.data)
    return min(time.perf_counter(), deadline) - started


def percentile(values: array[float], share: float) -> float:
    """Return the value below which this share of the values lies, in milliseconds; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 if ordered else 0.0


def main() -> None:
    """Read the orders, send, print the figures as one JSON object."""
    parser = argparse.ArgumentParser(prog="bench.load", description="Load generator of the benchmark.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--traffic", help="folder that bench.traffic wrote")
    parser.add_argument("--subjects", type=int, help="send numbered events on so many subjects instead; 0: one each")
    parser.add_argument("--records", default="records", help="file of that folder")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--count", type=int, help="stop after this many requests")
    parser.add_argument("--rate", type=float, help="requests per second, at fixed moments")
    arguments = parser.parse_args()
    # select() waits with microseconds; epoll and poll round up to whole milliseconds, half of the gap at 500/s.
    selector: selectors.BaseSelector = selectors.SelectSelector() if arguments.rate else selectors.DefaultSelector()
    load = Load(arguments, selector)
    if arguments.rate:
        elapsed = open_loop(load, seconds=arguments.seconds, rate=arguments.rate)
    else:
        elapsed = closed_loop(load, seconds=arguments.seconds, count=arguments.count)
    print(
        json.dumps(
            {
                "next": load.next,
                "sent": load.next - arguments.first,
                "answered": load.answered,
                "refused": load.refused,
                "broken": load.broken + load.in_flight,
                "in_window": load.in_window,
                "began": load.began,
                "elapsed": elapsed,
                "exhausted": load.exhausted,
                "p50_ms": percentile(load.latencies, 0.50),
                "p99_ms": percentile(load.latencies, 0.99),
                "max_ms": percentile(load.latencies, 1.0),
                "delay_p50_ms": percentile(load.delays, 0.50),
                "delay_p99_ms": percentile(load.delays, 0.99),
            }
        )
    )


if __name__ == "__main__":
    main()
