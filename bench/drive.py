"""Loads a running contestant with prepared requests and says what came of it.

Two generators stand behind one face: wrk, when it is there, for the closed loop; our own (`bench.load`) for
everything that must be exact or open-loop. Both run as separate processes. Called by `bench.contestants` and
`bench.ingest`.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import traffic
from bench.engines import ROOT, BenchError, child_environment
from bench.traffic import Traffic

CONNECTIONS = 64
GRACE_SECONDS = 60.0
"""What a generator may take beyond its time, for its start and the last answers."""

RAN_OUT = "the prepared requests ran out: this machine is faster than expected, raise --max-rate"

Tick = Callable[[float], None]


@dataclass(frozen=True)
class Figures:
    """What a generator saw."""

    acknowledged: int
    """Answers 200."""
    in_flight: int
    """Requests that may have been stored though their answer was not awaited; 0 from our own generator."""
    refused: int
    """Answers other than 200."""
    broken: int
    """Requests whose connection failed, or that were never answered."""
    per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    delay_p50_ms: float
    """How late our own generator sent, in the open loop."""
    next: int
    """The first record that was not used."""
    began: float = 0.0
    """When the first request was due, in seconds since 1970; in the open loop of one port only."""


@dataclass(frozen=True)
class Order:
    """What to send: records from `first` up to `last`, to these ports at this path."""

    traffic: Traffic | None
    """None: numbered events, made by our own generator."""
    ports: Sequence[int]
    path: str
    first: int
    last: int
    repeated: float = 0.0

    def shares(self) -> list[Order]:
        """One order per port, each with its own part of the records."""
        size = (self.last - self.first) // len(self.ports)
        return [
            Order(self.traffic, [port], self.path, self.first + i * size, self.first + (i + 1) * size, self.repeated)
            for i, port in enumerate(self.ports)
        ]


def find_wrk() -> str | None:
    """Return the path of wrk, if it is installed."""
    return shutil.which("wrk")


def load_wrk(wrk: str, order: Order, *, seconds: float, tick: Tick) -> Figures:
    """Closed loop by wrk: 64 connections over all ports, for whole seconds."""
    assert order.traffic is not None
    whole = max(1, math.ceil(seconds))
    commands = []
    for share in order.shares():
        (port,) = share.ports
        script = order.traffic.folder / f"wrk-{port}.lua"
        head = traffic.request_head(port, order.path, traffic.read_tails(order.traffic.folder))
        traffic.write_lua(script, order.traffic, head=head, first=share.first, last=share.last, repeated=share.repeated)
        options = ["-t1", f"-c{CONNECTIONS // len(order.ports)}", f"-d{whole}s", "--timeout", "10s", "-s", str(script)]
        commands.append([wrk, *options, f"http://127.0.0.1:{port}{order.path}"])
    answers = zip(_run_all(commands, whole, tick), order.shares(), strict=True)
    return _merge([_from_wrk(answer, share, CONNECTIONS // len(order.ports)) for answer, share in answers], order)


def load_own(
    order: Order,
    *,
    seconds: float,
    tick: Tick,
    rate: float | None = None,
    count: int | None = None,
    subjects: int | None = None,
) -> Figures:
    """Closed loop, or open loop when there is a `rate`, by our own generator; ends after `count` requests if given."""
    commands = []
    for share in order.shares():
        (port,) = share.ports
        options = {
            "port": port,
            "path": order.path,
            "traffic": order.traffic and order.traffic.folder,
            "records": order.traffic and order.traffic.records_file(order.repeated).name,
            "subjects": subjects,
            "first": share.first,
            "last": share.last,
            "connections": CONNECTIONS // len(order.ports),
            "seconds": seconds,
            "rate": rate and rate / len(order.ports),
            "count": count and count // len(order.ports),
        }
        flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
        commands.append([sys.executable, "-m", "bench.load", *flags])
    return _merge([_from_own(answer) for answer in _run_all(commands, seconds, tick)], order)


def post(port: int, path: str, folder: Path, record: bytes) -> int:
    """Send one record on a connection of its own; returns the status."""
    tails = traffic.read_tails(folder)
    request = traffic.compose(traffic.request_head(port, path, tails), tails, record)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(request)
            answer = connection.recv(65536)
    except OSError as error:
        raise BenchError(f"no answer to a single request: {error}") from error
    if not answer.startswith(b"HTTP/1."):
        raise BenchError(f"not an HTTP answer: {answer[:80]!r}")
    return int(answer[9:12])


def _run_all(commands: Sequence[Sequence[str]], seconds: float, tick: Tick) -> list[dict[str, Any]]:
    """Run generators side by side; their last line of output is their answer."""
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=child_environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        _wait(processes, seconds, tick)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    answers = []
    for process in processes:
        output, errors = process.communicate()
        if process.returncode:
            raise BenchError(f"the load generator failed:\n{errors[-2000:]}{output[-500:]}")
        answers.append(json.loads(output.strip().splitlines()[-1]))
    return answers


def _wait(processes: Sequence[subprocess.Popen[str]], seconds: float, tick: Tick) -> None:
    started = time.monotonic()
    while any(process.poll() is None for process in processes):
        elapsed = time.monotonic() - started
        if elapsed > seconds + GRACE_SECONDS:
            raise BenchError(f"the load generator did not end within {seconds + GRACE_SECONDS:.0f} s")
        tick(min(1.0, elapsed / seconds) if seconds else 1.0)
        time.sleep(0.1)


def _from_wrk(answer: dict[str, Any], share: Order, connections: int) -> Figures:
    if answer["next"] >= share.last:
        raise BenchError(RAN_OUT)
    completed = answer["completed"] - answer["refused"]
    return Figures(
        acknowledged=completed,
        in_flight=connections,
        refused=answer["refused"],
        broken=answer["broken"],
        per_second=completed / answer["elapsed"],
        p50_ms=answer["p50_ms"],
        p99_ms=answer["p99_ms"],
        max_ms=answer["max_ms"],
        delay_p50_ms=0.0,
        next=answer["next"],
    )


def _from_own(answer: dict[str, Any]) -> Figures:
    if answer["exhausted"]:
        raise BenchError(RAN_OUT)
    return Figures(
        acknowledged=answer["answered"],
        in_flight=0,
        refused=answer["refused"],
        broken=answer["broken"],
        per_second=answer["in_window"] / answer["elapsed"],
        p50_ms=answer["p50_ms"],
        p99_ms=answer["p99_ms"],
        max_ms=answer["max_ms"],
        delay_p50_ms=answer["delay_p50_ms"],
        next=answer["next"],
        began=answer["began"],
    )


def _merge(parts: list[Figures], order: Order) -> Figures:
    if len(parts) == 1:
        return parts[0]
    return Figures(
        acknowledged=sum(part.acknowledged for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        refused=sum(part.refused for part in parts),
        broken=sum(part.broken for part in parts),
        per_second=sum(part.per_second for part in parts),
        # Percentiles cannot be added up: the mean of the medians, and the worst of the rest.
        p50_ms=statistics.mean(part.p50_ms for part in parts),
        p99_ms=max(part.p99_ms for part in parts),
        max_ms=max(part.max_ms for part in parts),
        delay_p50_ms=statistics.mean(part.delay_p50_ms for part in parts),
        next=order.last,
    )
