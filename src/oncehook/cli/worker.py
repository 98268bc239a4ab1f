"""`oncehook worker`: work only, for an inbox whose arrivals are received elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from oncehook.cli.hangup import Hangup
from oncehook.cli.manners import voice
from oncehook.cli.setup import Setup, config_option, from_app, from_settings, settle_in
from oncehook.cli.showing import say
from oncehook.errors import ConfigError
from oncehook.logs import set_up_logging
from oncehook.notify import supervised


@click.command("worker")
@click.argument("app", required=False)
@config_option
@click.option("--concurrency", type=click.IntRange(1), default=1000, help="Attempts at once, over all destinations.")
@click.option("--destination", "only", multiple=True, help="Work for this destination only; may be repeated.")
@click.option("--drain", is_flag=True, help="Stop when nothing is left to do, retries included.")
@click.option("--listen", metavar="HOST:PORT", help="Answer /livez, /readyz and /metrics here.", show_envvar=True)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.")
def command(
    app: str | None,
    config_file: Path | None,
    concurrency: int,
    only: Sequence[str],
    drain: bool,
    listen: str | None,
    log_level: str | None,
) -> None:
    """Work off what waits, for the destinations of oncehook.toml and of APP (module:inbox)."""
    flags = {"server.log_level": log_level or voice.log_level}
    setup = from_app(app, config_file, flags) if app else from_settings(config_file, flags)
    _check(setup, only)
    setup.inbox.observer.verbose = set_up_logging(setup.config.server.log_level)
    from oncehook.traces import wanted

    setup.inbox.traces = setup.inbox.traces or wanted()
    hangup = Hangup(app, config_file, flags)
    hangup.run(_work(setup, hangup, concurrency, only, drain, listen), setup.inbox)


def _check(setup: Setup, only: Sequence[str]) -> None:
    known = setup.inbox.destinations
    if not known:
        raise ConfigError("There is nothing to work for.", hint="Add a [destination.NAME] and a [[route]] to it.")
    for name in only:
        if name not in known:
            raise ConfigError(f'There is no destination "{name}".', hint=f"There are: {', '.join(known)}.")


async def _work(
    setup: Setup, hangup: Hangup, concurrency: int, only: Sequence[str], drain: bool, listen: str | None
) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The second one finds the ordinary handler again and leaves at once: that is safe too, only less polite.
        loop.add_signal_handler(number, _on_signal, loop, told)
    running = setup.inbox.running(work=True, only=only, concurrency=concurrency)
    with hangup.heard():
        async with supervised() as supervisor, running, _probed(setup, listen):
            settle_in()
            whom = ", ".join(only or setup.inbox.destinations)
            say([f"oncehook worker ready for {whom}"], err=True)
            supervisor.ready(f"working for {whom}")
            hangup.ready()
            if drain:
                await _first(setup.inbox.drain(), told.wait())
            else:
                await told.wait()
            hangup.stopping()
            supervisor.reloading() if hangup.is_again else supervisor.stopping()
            setup.inbox.wind_down()


def _probed(setup: Setup, listen: str | None) -> contextlib.AbstractAsyncContextManager[None]:
    if listen is None:
        return contextlib.nullcontext()
    from oncehook.web.server import answering_probes

    return answering_probes(setup.inbox, listen)


def _on_signal(loop: asyncio.AbstractEventLoop, told: asyncio.Event) -> None:
    told.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


async def _first(*coroutines: object) -> None:
    """Until one of them is over; the others are not waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()
