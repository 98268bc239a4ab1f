"""The demo from its first line to its last: history, server, traffic, a sum at the end. Called by `oncehook demo`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click

from oncehook import samples
from oncehook.demo.past import live_through
from oncehook.demo.shop import MINUTES, Shop
from oncehook.demo.tour import Tour
from oncehook.demo.traffic import Traffic, Way
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.logs import set_up_logging
from oncehook.model import Arrival, Level
from oncehook.settings import ServerConfig
from oncehook.sources import Source
from oncehook.web.server import listen, serve_inbox

PORT: Final = 4020
PATIENCE: Final = 0.5
"""Seconds for which attempts may go on when the demo is stopped: nothing of it is kept anyway."""


def free_port(asked: int | None) -> int:
    """Where to listen. Looked for first: nobody wants to hear of a taken port after the history is made."""
    try:
        listen("127.0.0.1", PORT if asked is None else asked).close()
    except OSError as error:
        if asked is not None:
            raise ConfigError(f"Cannot listen on port {asked}: {error.strerror or error}") from error
        return 0
    return PORT if asked is None else asked


async def run(folder: Path, seconds: float | None, rate: float, port: int, *, browse: bool, verbose: bool) -> None:
    """Give the shop a history, then serve it until a signal comes. `browse` opens the dashboard."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # until the server listens to it
    set_up_logging("critical")  # the history is told by the dashboard, not line by line
    with Shop(folder) as shop:
        await live_through(shop, _tell_of_history)
        await _live(shop, seconds, rate, port, browse=browse, verbose=verbose)


async def _live(shop: Shop, seconds: float | None, rate: float, port: int, *, browse: bool, verbose: bool) -> None:
    inbox = shop.inbox()
    sent: Counter[str] = Counter()
    beside: list[asyncio.Task[None]] = []

    def ready(address: str, link: str | None) -> None:
        _say(f"  inbox      {shop.folder}, removed at the end")
        _say(f"  dashboard  {link}{'   (opened in your browser)' if browse else ''}")
        _say(f"  receive    {address}/in/{{{'|'.join(inbox.sources)}}}")
        _say(f"  sending    {rate:g} hooks a second: some twice, some changed, some badly signed")
        _say("  trouble    the ledger hangs up now and then, the CRM refuses everything")
        _say(f"  stop       {f'in {seconds:g} seconds' if seconds is not None else 'Ctrl-C'}\n")
        beside.append(asyncio.create_task(Traffic(shop, inbox.sources, _over_http(address), sent).run(rate)))
        if seconds is not None:
            beside.append(asyncio.create_task(_stop_after(seconds)))
        if browse and link:
            webbrowser.open(link)

    await inbox.start()
    before = await _counted(inbox)
    inbox.observer.verbose = verbose
    set_up_logging("info" if verbose else "warning", for_people=True)
    try:
        await serve_inbox(inbox, ServerConfig(port=port), on_ready=ready, guide=Tour(inbox.admin, shop.crm))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        _sum_up(sent, await _counted(inbox) - before, (await inbox.store.levels()).values())
    finally:
        await inbox.stop(PATIENCE)


def _tell_of_history(minute: int) -> None:
    """One line, which grows on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r  history    {minute} minutes of it", nl=minute == MINUTES, err=True)
    elif minute == MINUTES:
        _say(f"  history    {minute} minutes of it")


def _over_http(address: str) -> Way:
    async def bring(source: Source, arrival: Arrival) -> int:
        try:
            return (await asyncio.to_thread(samples.post, f"{address}/in/{source.path}", arrival)).status
        except OSError:
            return 0

    return bring


async def _stop_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    click.echo(text, err=True)


async def _counted(inbox: Inbox) -> Counter[str]:
    """What has come in and what was done, ever."""
    figures = await inbox.store.figures()
    counted: Counter[str] = Counter()
    for flows in (*figures.by_source.values(), *figures.by_destination.values()):
        counted.update({name: flows.get(name, 0) for name in ("accepted", "duplicate", "conflict", "succeeded")})
    return counted


def _sum_up(sent: Counter[str], counted: Counter[str], levels: Iterable[Level]) -> None:
    """What came of what was sent; what waits and what is dead may be of the history, too."""
    levels = list(levels)
    _say(
        f"\n  {sent['sent']} hooks sent, some with many messages: {counted['accepted']} events kept, our own answers"
        f" included, {counted['duplicate']} duplicates folded into them, {counted['conflict']} conflicts shown,"
        f" {sent['refused']} forgeries refused."
    )
    _say(
        f"  {counted['succeeded']} deliveries done, {sum(level.pending for level in levels)} still due,"
        f" {sum(level.dead for level in levels)} dead letters."
    )
