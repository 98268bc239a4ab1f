"""Does the number of accounts matter? Intake for one account, and spread over all of 100,000, on the same store.

One process, no sockets: signed arrivals go through the receiver into a store on disk, a hundred at a time. By a rule,
the account is an alias in the body; by the address, each has a secret of its own. Loads for one and for all accounts
take turns, so that a noisy machine touches both alike; CPU per event is compared. Run by
`python -m bench.accounts [--engine postgres] [--accounts N]`; exit 1 when all of them are slower than 0.9 of one.
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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.engines import Postgres
from oncehook import Inbox
from oncehook.model import Arrival

FLOOR = 0.9
AT_ONCE = 100
SIGNED = {"scheme": "hmac", "header": "X-Signature"}
SHARED = "a secret that all of them share"
FILLER = "x" * 300


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

    def arrivals(self, accounts: Sequence[int]) -> Iterator[Arrival]:
        for account in accounts:
            self._number += 1
            body = {"id": f"{self.name}-{self._number}", "number": f"alias-{account}", "text": FILLER}
            raw = json.dumps(body).encode()
            secret = SHARED if self.name == "rule" else secret_of(account)
            signature = hmac.new(secret.encode(), raw, "sha256").hexdigest().encode()
            headers = [(b"content-type", b"application/json"), (b"x-signature", signature)]
            yield Arrival(self.name, headers, raw, path=f"/in/{self.name}", account=str(account))


def make_inbox(url: str) -> Inbox:
    inbox = Inbox(url)
    inbox.source("rule", verify=SIGNED, secret=SHARED, account="$.number", key="$.id", budget="60s")
    inbox.source("address", verify=SIGNED, account="address", key="$.id", budget="60s")
    return inbox


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


async def take(inbox: Inbox, arrivals: Sequence[Arrival]) -> Load:
    """Receive these, a hundred at a time."""
    waiting = iter(arrivals)
    receiver = inbox.receiver

    async def send() -> None:
        for arrival in waiting:
            receipt = await receiver.receive(arrival)
            assert receipt.outcome == "accepted", receipt

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    cpu, took = time.process_time() - cpu, time.perf_counter() - began
    return Load(cpu / len(arrivals) * 1e6, len(arrivals) / took)


async def compare(inbox: Inbox, mode: Mode, count: int, events: int, rounds: int) -> bool:
    chance = random.Random(27)
    spread: dict[str, Callable[[], list[int]]] = {
        "one account": lambda: [0] * events,
        "all, evenly": lambda: [chance.randrange(count) for _ in range(events)],
        "all, most from few": lambda: [min(int(chance.paretovariate(0.7)) - 1, count - 1) for _ in range(events)],
    }
    cold = await take(inbox, list(mode.arrivals(range(min(count, events)))))
    await take(inbox, list(mode.arrivals(range(count))))  # every account has been needed once
    loads: dict[str, list[Load]] = {name: [] for name in spread}
    for _ in range(rounds):
        for name, choose in spread.items():
            loads[name].append(await take(inbox, list(mode.arrivals(choose()))))
    one = statistics.median(load.cpu_us for load in loads["one account"])
    print(f"\n{mode.name}: CPU per event, events a second, beside one account")
    is_well = True
    for name, found in loads.items():
        cpu = statistics.median(load.cpu_us for load in found)
        speed = statistics.median(load.per_second for load in found)
        print(f"  {name:20} {cpu:7.1f} µs {speed:9,.0f}/s {one / cpu:6.2f}")
        is_well = is_well and one / cpu >= FLOOR
    print(f"  {'each for the first time':20} {cold.cpu_us:4.1f} µs {cold.per_second:9,.0f}/s {one / cold.cpu_us:6.2f}")
    return is_well


async def run(arguments: argparse.Namespace, url: str) -> bool:
    inbox = make_inbox(url)
    async with inbox.running(work=False):
        await make_accounts(inbox, arguments.accounts)
        sizes = (arguments.accounts, arguments.events, arguments.rounds)
        return all([await compare(inbox, Mode(name), *sizes) for name in ("rule", "address")])


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
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = f"sqlite:{folder}/inbox.db"
        if arguments.engine == "postgres":
            url = Postgres(Path(folder)).uri("postgres")
        print(f"{arguments.accounts:,} accounts on {arguments.engine}", file=sys.stderr)
        return 0 if uvloop.run(run(arguments, url)) else 1


if __name__ == "__main__":
    sys.exit(main())
