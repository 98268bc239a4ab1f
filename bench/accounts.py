"""Does the number of accounts matter? Intake for one account, and spread over all of 100,000, on the same store.

Signed bodies of 2 KB go to `oncehook serve` over 64 connections. By a rule, the account is an alias in the body; by the
address, each has a secret of its own. Loads for one and for all accounts take turns, so that a noisy machine touches
both alike; the CPU per event of server and database is compared. Run by `python -m bench.accounts [--engine postgres]
[--accounts N]`; exit 1 when all of them are slower than 0.9 of one.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import random
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench import traffic
from bench.engines import BenchError, Postgres, Server, cpu_seconds, free_port
from bench.load import Connection
from oncehook import Inbox

FLOOR = 0.9
CONNECTIONS = 64
SHARED = "a secret that all of them share"
CONFIG = """
store = "{store}"

[source.rule]
verify = {{ scheme = "hmac", header = "{header}", prefix = "{prefix}" }}
secret = {{ env = "BENCH_SHARED" }}
account = "$.number"
key = "$.id"
budget = "60s"

[source.address]
verify = {{ scheme = "hmac", header = "{header}", prefix = "{prefix}" }}
account = "address"
key = "$.id"
budget = "60s"
"""


@dataclass
class Load:
    """What one load took, per event."""

    cpu_us: float
    per_second: float


def secret_of(account: int) -> str:
    return hashlib.sha256(b"secret %d" % account).hexdigest()


class Mode:
    """A way in which an arrival names its account."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._number = 0

    def requests(self, port: int, accounts: Sequence[int]) -> Iterator[bytes]:
        for account in accounts:
            self._number += 1
            start = json.dumps({"id": f"{self.name}-{self._number}", "number": f"alias-{account}"})[:-1].encode()
            body = start + b', "text": "' + b"x" * (traffic.BODY_SIZE - len(start) - 13) + b'"}'
            path, secret = (
                ("/in/rule", SHARED) if self.name == "rule" else (f"/in/address/{account}", secret_of(account))
            )
            head = traffic.head_for(port, path, len(body))
            yield b"".join((head, hmac.digest(secret.encode(), body, "sha256").hex().encode(), b"\r\n\r\n", body))


async def make_accounts(inbox: Inbox, count: int) -> None:
    """Make the accounts, each with an alias and a secret; some at once, because each is a commit of its own."""
    numbers = iter(range(count))

    async def make() -> None:
        for account in numbers:
            aliases, secrets = [f"alias-{account}"], {"address": secret_of(account)}
            await inbox.define.account(account, aliases=aliases, secrets=secrets)
            if account % 10_000 == 0:
                print(f"  {account:,} accounts", file=sys.stderr)

    await asyncio.gather(*(make() for _ in range(20)))


def take(server: Server, pids: Sequence[int], requests: Sequence[bytes]) -> Load:
    """Send these, one on each connection at a time."""
    waiting = iter(requests)
    accepted = 0
    with selectors.DefaultSelector() as selector:
        connections = [Connection(server.port) for _ in range(CONNECTIONS)]
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        cpu, began = cpu_seconds(pids), time.perf_counter()
        for connection in connections:
            connection.socket.sendall(next(waiting))
        while accepted < len(requests):
            for key, _ in selector.select():
                answer = key.data.read()
                if answer is None:
                    continue
                if answer != (200, True):
                    raise BenchError(f"answered {answer}\n{server.log_tail()}")
                accepted += 1
                if (request := next(waiting, None)) is not None:
                    key.data.socket.sendall(request)
        took, cpu = time.perf_counter() - began, cpu_seconds(pids) - cpu
        for connection in connections:
            connection.socket.close()
    return Load(cpu / len(requests) * 1e6, len(requests) / took)


def compare(server: Server, pids: Sequence[int], mode: Mode, count: int, events: int, rounds: int) -> bool:
    chance = random.Random(27)
    spread: dict[str, Callable[[], list[int]]] = {
        "one account": lambda: [0] * events,
        "all, evenly": lambda: [chance.randrange(count) for _ in range(events)],
        "all, most from few": lambda: [min(int(chance.paretovariate(0.7)) - 1, count - 1) for _ in range(events)],
    }

    def load(accounts: Sequence[int]) -> Load:
        return take(server, pids, list(mode.requests(server.port, accounts)))

    cold = load(range(min(count, events)))
    load(range(count))  # every account has been needed once
    loads: dict[str, list[Load]] = {name: [] for name in spread}
    for _ in range(rounds):
        for name, choose in spread.items():
            loads[name].append(load(choose()))
    one = statistics.median(load.cpu_us for load in loads["one account"])
    print(f"\n{mode.name}: CPU per event, events a second, beside one account")
    is_well = True
    for name, found in loads.items():
        cpu = statistics.median(load.cpu_us for load in found)
        speed = statistics.median(load.per_second for load in found)
        print(f"  {name:24} {cpu:6.1f} µs {speed:9,.0f}/s {one / cpu:6.2f}")
        is_well = is_well and one / cpu >= FLOOR
    print(f"  {'each for the first time':24} {cold.cpu_us:6.1f} µs {cold.per_second:9,.0f}/s {one / cold.cpu_us:6.2f}")
    return is_well


async def fill(store: str, count: int) -> None:
    """Make the accounts, before anything is measured."""
    inbox = Inbox(store)
    inbox.source("address", verify="none", account="address")
    async with inbox.running(work=False):
        await make_accounts(inbox, count)


def run(arguments: argparse.Namespace, folder: Path, store: str, database: Sequence[int]) -> bool:
    uvloop.run(fill(store, arguments.accounts))
    config, port = folder / "oncehook.toml", free_port()
    config.write_text(CONFIG.format(store=store, header=traffic.SIGNATURE_HEADER, prefix=traffic.SIGNATURE_PREFIX))
    command = [sys.executable, "-m", "oncehook", "serve", "--config", str(config), "--port", str(port)]
    server = Server(command, {"BENCH_SHARED": SHARED}, folder / "log", port)
    try:
        server.wait_until_ready()
        sizes = (arguments.accounts, arguments.events, arguments.rounds)
        pids = [server.pid, *database]
        verdicts = [compare(server, pids, Mode(name), *sizes) for name in ("rule", "address")]
        return all(verdicts)
    finally:
        server.stop()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accounts", description=str(__doc__).split("\n")[0])
    parser.add_argument("--engine", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--accounts", type=int, default=100_000)
    parser.add_argument("--events", type=int, default=20_000, help="in one load")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(words)
    logging.disable(logging.WARNING)
    os.environ["ONCEHOOK_SECRET_KEY"] = base64.b64encode(os.urandom(32)).decode()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store, database = f"sqlite:{folder}/inbox.db", list[int]()
        if arguments.engine == "postgres":
            postgres = Postgres(folder)
            store, database = postgres.uri("postgres"), [postgres.pid]
        print(f"{arguments.accounts:,} accounts on {arguments.engine}", file=sys.stderr)
        return 0 if run(arguments, folder, store, database) else 1


if __name__ == "__main__":
    sys.exit(main())
