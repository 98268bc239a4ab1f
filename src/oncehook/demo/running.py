"""The run of the demo: history, server, traffic, and a summary at the end. Called by `oncehook demo`."""

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
from oncehook.demo.history import make_history
from oncehook.demo.shop import MINUTES, Shop
from oncehook.demo.tour import Tour
from oncehook.demo.traffic import Post, Traffic
from oncehook.errors import ConfigError
from oncehook.human import count
from oncehook.inbox import Inbox
from oncehook.logs import set_up_logging
from oncehook.model import Arrival, Level
from oncehook.settings import ServerConfig
from oncehook.sources import Source
from oncehook.web.server import listen, serve_inbox

PORT: Final = 4020
STOP_SECONDS: Final = 0.5
"""Seconds for which attempts may go on when the demo is stopped: nothing is kept anyway."""


def free_port(asked: int | None) -> int:
    """Return the port to listen on; refuse a taken one before the history is made."""
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
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # until the server handles it
    set_up_logging("critical")  # the dashboard shows the history, not the log
    with Shop(folder) as shop:
        await make_history(shop, _print_history)
        await _serve(shop, seconds, rate, port, browse=browse, verbose=verbose)


async def _serve(shop: Shop, seconds: float | None, rate: float, port: int, *, browse: bool, verbose: bool) -> None:
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
        beside.append(asyncio.create_task(Traffic(shop, inbox.sources, _post_to(address), sent).run(rate)))
        if seconds is not None:
            beside.append(asyncio.create_task(_stop_after(seconds)))
        if browse and link:
            webbrowser.open(link)

    await inbox.start()
    before = await _figures(inbox)
    inbox.observer.verbose = verbose
    set_up_logging("info" if verbose else "warning", for_people=True)
    try:
        await serve_inbox(inbox, ServerConfig(port=port), on_ready=ready, guide=Tour(inbox.admin, shop.crm))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        _print_summary(sent, await _figures(inbox) - before, (await inbox.store.levels()).values())
    finally:
        await inbox.stop(STOP_SECONDS)


def _print_history(minute: int) -> None:
    """Print one line, which a terminal shows growing."""
    if sys.stderr.isatty() or minute == MINUTES:
        start = "\r" if sys.stderr.isatty() else ""
        click.echo(f"{start}  history    {count(minute, 'minute')} of it", nl=minute == MINUTES, err=True)


def _post_to(address: str) -> Post:
    async def post(source: Source, arrival: Arrival) -> int:
        try:
            return (await asyncio.to_thread(samples.post, f"{address}/in/{source.path}", arrival)).status
        except OSError:
            return 0

    return post


async def _stop_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    click.echo(text, err=True)


async def _figures(inbox: Inbox) -> Counter[str]:
    figures = await inbox.store.figures()
    sums: Counter[str] = Counter()
    for flows in (*figures.by_source.values(), *figures.by_destination.values()):
        sums.update({name: flows.get(name, 0) for name in ("accepted", "duplicate", "conflict", "succeeded")})
    return sums


def _print_summary(sent: Counter[str], done: Counter[str], levels: Iterable[Level]) -> None:
    """Print what came of what was sent; pending and dead deliveries may be of the history, too."""
    levels = list(levels)
    _say(
        f"\n  {count(sent['sent'], 'hook')} sent, some with many messages: {count(done['accepted'], 'event')} kept,"
        f" our own answers included, {count(done['duplicate'], 'duplicate')} folded into them,"
        f" {count(done['conflict'], 'conflict')} shown, {count(sent['refused'], 'forgery')} refused."
    )
    _say(
        f"  {count(done['succeeded'], 'delivery')} done, {sum(level.pending for level in levels)} still due,"
        f" {count(sum(level.dead for level in levels), 'dead letter')}."
    )
