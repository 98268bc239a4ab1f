"""The run of the demo: a day of history, then server and traffic, and a summary at the end.

The history consists of real arrivals and attempts, made in a moment: the clock is set back by a day and moved forward
step by step, so that charts, retries and dead letters are there from the start. Then the clock is right again. Its day
has a shape: a quiet night, a rush in the afternoon that leads up to the live rate, and half an hour in which the ledger
was down, after which somebody replayed what had died.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import webbrowser
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click

from oncehook import clock, samples
from oncehook.cli.output import Progress
from oncehook.demo.shop import MENDS_AFTER, Shop
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
"""Seconds for which attempts may go on when the demo stops; nothing is kept anyway."""

DAY: Final = 86_400.0
STEP: Final = 60.0
"""Seconds of history that pass at once in its last hour, as long as a bar of the overview's chart."""
LONG_STEP: Final = 900.0
"""Seconds that pass at once before that."""
PARTS: Final = 3
PAUSE: Final = 20.0
"""Seconds between the parts of a step: about as long as a retry waits."""
RETRIES: Final = 2
"""Retries of the ledger, each within a pause."""
FINE: Final = 4200.0
"""Seconds before now at which the short steps begin: more than the overview's hour."""
EXPIRES: Final = 720.0
"""Seconds before now at which the CRM's key expires."""
OUTAGE: Final = (5.5 * 3600, 5.0 * 3600)
"""Seconds before now between which the ledger was down."""
REPLAYED: Final = 4.75 * 3600
"""Seconds before now at which somebody replayed what died then."""
FASTEST: Final = 0.2
"""Hooks a second above which the history does not follow the live rate: it would take too long to make."""
AFTERNOON: Final = 16.0
"""The hour of the history's day that is now, whatever the clock says."""
MOST_POLLS: Final = 100
"""Polls, a few milliseconds apart, after which a step ends even if work is left."""


def free_port(wanted: int | None) -> int:
    """Return the port to listen on; refuse one that is in use before the history is made."""
    try:
        listen("127.0.0.1", PORT if wanted is None else wanted).close()
    except OSError as error:
        if wanted is not None:
            raise ConfigError(f"Cannot listen on port {wanted}: {error.strerror or error}") from error
        return 0
    return PORT if wanted is None else wanted


async def run(folder: Path, seconds: float | None, rate: float, port: int, *, browse: bool, verbose: bool) -> None:
    """Give the shop a history, then serve it until a signal comes. `browse` opens the dashboard."""
    task = asyncio.current_task()
    assert task is not None
    # until the server installs its own handler
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    set_up_logging("critical")  # people watch the dashboard, not the log
    with Shop(folder) as shop:
        await _make_history(shop, min(rate, FASTEST))
        await _serve(shop, seconds, rate, port, browse=browse, verbose=verbose)


# -- history -----------------------------------------------------------------------------------


class _PastClock:
    """A clock that is behind, and catches up."""

    def __init__(self, seconds: float) -> None:
        self.behind = seconds
        self.at_once = 1
        """About how many handlers run at the same time."""
        clock.forward(-seconds)

    def forward(self, seconds: float) -> None:
        seconds = min(max(seconds, 0.0), self.behind)
        self.behind -= seconds
        clock.forward(seconds)

    async def pace(self, seconds: float) -> None:
        """Let a handler's time pass. Handlers run at once, so the clock moves by a part of it only."""
        await asyncio.sleep(0)
        self.forward(seconds / (2 * self.at_once))


def busyness(behind: float) -> float:
    """Return how busy the shop was so many seconds ago, as a share of now: quiet at night, busiest in the afternoon."""
    return _daylight(AFTERNOON - behind / 3600) / _daylight(AFTERNOON)


def _daylight(hour: float) -> float:
    afternoon, morning = (hour % 24 - 15.5) / 2.2, (hour % 24 - 10) / 1.3
    return 0.05 + math.exp(-(afternoon**2)) + 0.4 * math.exp(-(morning**2))


async def _make_history(shop: Shop, rate: float) -> None:
    past = _PastClock(DAY)
    replayed = False
    try:
        inbox = shop.inbox(past.pace)
        async with inbox.running():
            traffic = Traffic(shop, inbox.sources, _receive_by(inbox))
            steps = list(_steps())
            with Progress("  history  ", sum(_work(rate, *one) for one in steps)) as bar:
                for before, step in steps:
                    shop.crm.is_expired = past.behind <= EXPIRES
                    shop.ledger_is_down = OUTAGE[0] >= past.behind > OUTAGE[1]
                    if not replayed and past.behind <= REPLAYED:
                        replayed = True
                        await _replay_dead(inbox)
                    await _pass_time(inbox, past, traffic, rate, step)
                    bar.add(_work(rate, before, step))
    finally:
        past.forward(past.behind)
    click.echo("  history    one day, with half an hour in which the ledger was down", err=True)
    shop.crm.mends_at = clock.now_utc() + MENDS_AFTER


def _steps() -> Iterator[tuple[float, float]]:
    """Yield the steps of the history: how many seconds before now each begins, and how long it is."""
    behind = DAY
    while behind > 0:
        step = STEP if behind <= FINE else LONG_STEP
        yield behind, step
        behind -= step


def _work(rate: float, behind: float, step: float) -> int:
    """Estimate the work of a step, for the progress bar: its hooks, and as much as five of them for itself."""
    return 5 + round(rate * step * busyness(behind))


async def _pass_time(inbox: Inbox, past: _PastClock, traffic: Traffic, rate: float, step: float) -> None:
    """Let one step of the history happen: what comes in, by and by, so that what failed is tried again meanwhile."""
    before = past.behind
    expected = rate * step * busyness(before) / PARTS
    past.at_once = max(1, round(expected / 2))
    for _ in range(PARTS):
        aim = traffic.sent["sent"] + int(expected + clock.chance.random())
        while traffic.sent["sent"] < aim:
            left = aim - traffic.sent["sent"]
            await asyncio.gather(*[traffic.act() for _ in range(min(past.at_once, left))])
        await _work_off(inbox)
        past.forward(PAUSE)
    if step > PARTS * PAUSE:  # what failed at its end is tried again before the clock jumps over the rest
        for _ in range(RETRIES):
            await _work_off(inbox)
            past.forward(PAUSE)
        await _work_off(inbox)
    await inbox.store.record_rejections(*inbox.observer.take_counts(everything=True))
    past.forward(past.behind - max(before - step, 0.0))


async def _work_off(inbox: Inbox) -> None:
    if inbox.worker is not None:
        inbox.worker.wake()  # it sleeps until a moment that has come by now
    await _wait_until_idle(inbox)


async def _replay_dead(inbox: Inbox) -> None:
    request = inbox.admin.build_request("to:ledger status:dead")
    await inbox.admin.start_replay(request, actor="ana", reason="the ledger is back")
    await _wait_until_idle(inbox)


def _receive_by(inbox: Inbox) -> Post:
    async def post(source: Source, arrival: Arrival) -> int:
        receipt = await inbox.receive(source.name, arrival.headers, arrival.body, query=arrival.query)
        return receipt.reply.status

    return post


async def _wait_until_idle(inbox: Inbox) -> None:
    for _ in range(MOST_POLLS):
        levels = (await inbox.admin.levels()).values()
        if not any(level.leased or level.oldest_due is not None for level in levels):
            return
        await asyncio.sleep(0.004)


# -- live --------------------------------------------------------------------------------------


async def _serve(shop: Shop, seconds: float | None, rate: float, port: int, *, browse: bool, verbose: bool) -> None:
    inbox = shop.inbox()
    sent: Counter[str] = Counter()
    beside: list[asyncio.Task[None]] = []

    def ready(address: str, link: str | None) -> None:
        _say(f"  inbox      {shop.folder}, removed at the end")
        _say(f"  dashboard  {link}{'   (opened in your browser)' if browse else ''}")
        _say(f"  commands   export ONCEHOOK_STORE={inbox.store_url}")
        _say(f"  receive    {address}/in/{{{'|'.join(inbox.sources)}}}")
        _say(f"  sending    {_show_pace(rate)}: some twice, some changed, some badly signed")
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


def _show_pace(rate: float) -> str:
    return f"{rate:g} hooks a second" if rate >= 1 else f"{rate * 60:g} hooks a minute"


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
    """Print what became of the hooks; pending and dead deliveries of the history are included."""
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
