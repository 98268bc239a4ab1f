"""`oncehook demo`: the main job at work, in one command: a real server, a real store, senders that repeat and lie.

Everything lives in a temporary folder that is removed at the end. What is set up, what goes wrong there and what is
worth seeing is said in `oncehook.demo`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

import click

from oncehook.cli.manners import voice


@click.command("demo")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop by itself after this long.")
@click.option("--rate", type=click.FloatRange(0.1, 100), default=3.0, show_default=True, help="Hooks a second.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on (default: 4020, or any when that is taken)."
)
@click.option("--no-open", is_flag=True, help="Do not open the dashboard in your browser.")
def command(seconds: float | None, rate: float, port: int | None, no_open: bool) -> None:
    """Run a living inbox until Ctrl-C. With -v, a line for every arrival and every attempt."""
    import uvloop

    from oncehook.demo.running import free_port, run

    free = free_port(port)
    folder = Path(tempfile.mkdtemp(prefix="oncehook-demo-"))
    try:
        uvloop.run(run(folder, seconds, rate, free, browse=not no_open and _has_browser(), verbose=voice.verbose))
    except (KeyboardInterrupt, asyncio.CancelledError):  # before there was anything to stop
        click.echo(err=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_browser() -> bool:
    """Whether a person sits here, with a screen: a browser in the terminal would take the terminal away."""
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return sys.stderr.isatty() and has_screen
