"""`oncehook demo`: the main job at work, in one command: a real server, a real store, a sender that repeats and lies.

Everything lives in a temporary folder that is removed at the end. Hooks go over HTTP on loopback, some of them twice,
some with another body under a known key, some badly signed; each arrival is a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from oncehook import clock, sending
from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.observe import set_up_logging
from oncehook.sources import Source
from oncehook.verify.schemes import Hmac

KINDS = {"shop": ("order.paid", "order.shipped", "refund.made"), "bookings": ("booking.made", "booking.moved")}
CUSTOMERS = ("ana", "bruno", "chidi", "dara", "emre", "fatou")


@click.command("demo")
@click.option("--seconds", type=float, help="Stop by itself after this long.")
@click.option("--rate", type=float, default=3.0, show_default=True, help="Hooks a second.")
@click.option("--port", type=click.IntRange(0, 65535), default=4020, show_default=True, help="Port to listen on.")
def command(seconds: float | None, rate: float, port: int) -> None:
    """Run a living inbox until Ctrl-C."""
    import uvloop

    folder = Path(tempfile.mkdtemp(prefix="oncehook-demo-"))
    set_up_logging(for_people=True)
    try:
        uvloop.run(_run(folder, seconds, rate, port))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(folder: Path, seconds: float | None, rate: float, port: int) -> None:
    from oncehook.web import health, server
    from oncehook.web.ingest import Ingest
    from oncehook.web.peers import direct_peer

    inbox = Inbox(f"sqlite:{folder / 'demo.db'}")
    inbox.observer.verbose = True
    for name in KINDS:
        scheme = Hmac(header="X-Signature", prefix="sha256=")
        inbox.source(name, verify=scheme, secret=clock.random_bytes(16).hex(), key="$.id", subject="$.customer")
    async with inbox.running():
        traffic: list[asyncio.Task[None]] = []
        sent: Counter[str] = Counter()

        def ready(address: str) -> None:
            _say(f"  inbox      {folder}, removed at the end")
            _say(f"  receive    {address}/in/{{{'|'.join(KINDS)}}}")
            _say(f"  sending    {rate:g} hooks a second: some twice, some changed, some badly signed")
            _say("  stop       " + (f"in {seconds:g} seconds" if seconds else "Ctrl-C") + "\n")
            traffic.append(asyncio.create_task(_send_until_stopped(inbox, address, rate, seconds, sent)))

        def stopping() -> None:
            inbox.draining = True

        face = server.Face(Ingest(inbox.receiver, "/in/", direct_peer), health.routes(inbox.troubles, inbox.metrics))
        try:
            await server.serve(face, host="127.0.0.1", port=port, on_ready=ready, on_stop=stopping)
        finally:
            for task in traffic:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        figures = (await inbox.store.figures()).by_source
        _sum_up(sent, Counter({what: sum(f.get(what, 0) for f in figures.values()) for what in _OUTCOMES}))


_OUTCOMES = ("accepted", "duplicate", "conflict")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _sum_up(sent: Counter[str], kept: Counter[str]) -> None:
    _say(
        f"\n  {sent['sent']} hooks sent: {kept['accepted']} events kept, {kept['duplicate']} duplicates folded into"
        f" them, {kept['conflict']} conflicts shown, {sent['refused']} forgeries refused."
    )


async def _send_until_stopped(
    inbox: Inbox, address: str, rate: float, seconds: float | None, sent: Counter[str]
) -> None:
    """A sender as senders are: it repeats itself, now and then it lies."""
    loop = asyncio.get_running_loop()
    ends_at = None if seconds is None else loop.time() + seconds
    chance = clock.chance
    while ends_at is None or loop.time() < ends_at:
        source = inbox.sources[chance.choice(list(KINDS))]
        hook = _hook(source)
        whim = chance.random()
        await _post(address, source, hook, sent, forge=whim < 0.12)
        if whim > 0.65:
            await _post(address, source, hook, sent)
        if whim > 0.94:
            await _post(address, source, replace(hook, body=hook.body.replace(b'"amount":', b'"amount":1')), sent)
        await asyncio.sleep(chance.uniform(0.5, 1.5) / rate)
    import os
    import signal

    os.kill(os.getpid(), signal.SIGTERM)


def _hook(source: Source) -> Arrival:
    chance = clock.chance
    fields = {
        "id": f"{source.name}-{clock.random_bytes(4).hex()}",
        "type": chance.choice(KINDS[source.name]),
        "customer": chance.choice(CUSTOMERS),
        "amount": chance.randrange(5, 500),
    }
    return Arrival(source.name, [(b"content-type", b"application/json")], msgspec.json.encode(fields))


async def _post(address: str, source: Source, hook: Arrival, sent: Counter[str], *, forge: bool = False) -> None:
    signed = sending.sign(source, hook, forge=forge)
    answer = await asyncio.to_thread(sending.post, f"{address}/in/{source.path}", signed)
    sent["sent"] += 1
    if answer.status == 401:
        sent["refused"] += 1
