"""`oncehook demo`: the main job at work, in one command: a real server, a real store, a sender that repeats and lies.

Everything lives in a temporary folder that is removed at the end. Hooks go over HTTP on loopback, some of them twice,
some with another body under a known key, some badly signed. Four handlers do the work: two are well, one has a bad
connection, and one meets orders it cannot ship, which become dead letters until somebody replays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from oncehook import clock, presets, sending
from oncehook.config import ServerConfig
from oncehook.event import Event
from oncehook.inbox import Inbox
from oncehook.logs import set_up_logging
from oncehook.model import Arrival
from oncehook.sources import Source
from oncehook.watermarks import Limits

SENDERS = {"whatsapp": "whatsapp-cloud", "stripe": "stripe", "github": "github", "orders": "shopify"}
OUTCOMES = ("accepted", "duplicate", "conflict")
WORK = ("done", "pending", "dead")


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
    from oncehook.web.server import serve_inbox

    inbox = Inbox(f"sqlite:{folder / 'demo.db'}")
    inbox.observer.verbose = True
    for name, preset in SENDERS.items():
        inbox.source(name, preset=preset, secret=clock.random_bytes(16).hex(), verify_token="demo")  # noqa: S106
    inbox.limits = Limits(daily_volume={"whatsapp": 0})  # a day's worth comes in a minute here
    _add_handlers(inbox)
    traffic: list[asyncio.Task[None]] = []
    sent: Counter[str] = Counter()

    def ready(address: str, link: str | None) -> None:
        _say(f"  inbox      {folder}, removed at the end")
        _say(f"  dashboard  {link}")
        _say(f"  receive    {address}/in/{{{'|'.join(SENDERS)}}}")
        _say(f"  sending    {rate:g} hooks a second: some twice, some changed, some badly signed")
        _say(f"  stop       {f'in {seconds:g} seconds' if seconds else 'Ctrl-C'}\n")
        traffic.append(asyncio.create_task(_send_until_stopped(inbox, address, rate, seconds, sent)))

    async with inbox.running():
        try:
            await serve_inbox(inbox, ServerConfig(port=port), on_ready=ready)
        finally:
            for task in traffic:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        figures = (await inbox.store.figures()).by_source.values()
        levels = (await inbox.store.levels()).values()
        _sum_up(
            sent,
            {what: sum(source.get(what, 0) for source in figures) for what in OUTCOMES},
            {what: sum(getattr(level, what) for level in levels) for what in WORK},
        )


def _add_handlers(inbox: Inbox) -> None:
    chance = clock.chance

    @inbox.on("whatsapp")
    async def reply(event: Event) -> None:
        await asyncio.sleep(chance.uniform(0.02, 0.15))

    @inbox.on("github")
    async def build(event: Event) -> None:
        await asyncio.sleep(chance.uniform(0.1, 0.4))

    @inbox.on("stripe", retry=["2s", "4s", "8s"])
    async def ledger(event: Event) -> None:
        await asyncio.sleep(chance.uniform(0.02, 0.1))
        if chance.random() < 0.35:
            raise ConnectionError("the ledger hung up")

    @inbox.on("orders", retry=["1s"], breaker={"failures": 1000})
    async def warehouse(event: Event) -> None:
        await asyncio.sleep(chance.uniform(0.02, 0.1))
        # A replay finds the shelf filled up: press "replay" and see it done.
        if int(event.id[-8:-4], 16) % 4 == 0 and not event.replay:
            raise ValueError("no such article in stock")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _sum_up(sent: Counter[str], kept: dict[str, int], work: dict[str, int]) -> None:
    _say(
        f"\n  {sent['sent']} hooks sent: {kept['accepted']} events kept, {kept['duplicate']} duplicates folded into"
        f" them, {kept['conflict']} conflicts shown, {sent['refused']} forgeries refused."
    )
    _say(f"  {work['done']} deliveries done, {work['pending']} still due, {work['dead']} dead letters.")


async def _send_until_stopped(
    inbox: Inbox, address: str, rate: float, seconds: float | None, sent: Counter[str]
) -> None:
    """A sender as senders are: it repeats itself, now and then it lies."""
    loop = asyncio.get_running_loop()
    ends_at = None if seconds is None else loop.time() + seconds
    chance = clock.chance
    while ends_at is None or loop.time() < ends_at:
        source = inbox.sources[chance.choice(list(SENDERS))]
        hook = sending.draft(source, chance.choice(list(presets.load(SENDERS[source.name]).samples)))
        whim = chance.random()
        await _post(address, source, hook, sent, forge=whim < 0.12)
        if whim > 0.65:
            await _post(address, source, hook, sent)
        if whim > 0.9:
            await _post(address, source, replace(hook, body=hook.body.rstrip()[:-1] + b',"changed":true}'), sent)
        await asyncio.sleep(chance.uniform(0.5, 1.5) / rate)
    os.kill(os.getpid(), signal.SIGTERM)


async def _post(address: str, source: Source, hook: Arrival, sent: Counter[str], *, forge: bool = False) -> None:
    signed = sending.sign(source, hook, forge=forge)
    answer = await asyncio.to_thread(sending.post, f"{address}/in/{source.path}", signed)
    sent["sent"] += 1
    if answer.status == 401:
        sent["refused"] += 1
