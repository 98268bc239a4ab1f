"""`oncehook serve --reload`: the server in a process of its own, started anew when a file of the program changes.

Watched are the Python files below this folder and the settings. The old process is asked to stop as a signal would ask
it, and is waited for: what it took in is committed, and a SQLite store is free again. One that ends by itself, over a
typing error say, is started again with the next change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

LOOK_EVERY: Final = 0.3
PATIENCE: Final = 40.0
"""Seconds the old process has to end: more than it gives its attempts."""

_PASSED_OVER: Final = frozenset({"node_modules", "__pycache__", "site-packages"})

Stamps = Mapping[Path, int]


def run(arguments: Sequence[str], settings: Sequence[Path], *, at_first: Sequence[str] = ()) -> int:
    """Serve with these arguments until a signal comes; returns how the last process ended."""
    stop = _Stop()
    seen = stamps(Path.cwd(), settings)
    process = _serve([*arguments, *at_first])
    while not stop.asked:
        stop.wait(process, LOOK_EVERY)
        now = stamps(Path.cwd(), settings)
        if now == seen or stop.asked:
            continue
        changed = sorted({str(path) for path in {*now, *seen} if now.get(path) != seen.get(path)})
        click.echo(f"{os.path.relpath(changed[0])} changed; starting again", err=True)
        seen = now
        end(process)
        process = _serve(arguments)
    return end(process)


def _serve(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != "ONCEHOOK_SERVE_RELOAD"}
    return subprocess.Popen([sys.executable, "-m", "oncehook", "serve", *arguments], env=env)  # noqa: S603 - ourselves


class _Stop:
    """Remembers that somebody wants to stop; a second signal goes straight through to the server."""

    def __init__(self) -> None:
        self.asked = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.asked and self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self.asked = True

    def wait(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Let some time pass."""
        self._process = process
        threading.Event().wait(seconds)


def end(process: subprocess.Popen[bytes]) -> int:
    """Ask it to stop, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def stamps(folder: Path, settings: Sequence[Path]) -> Stamps:
    """When each watched file was last written."""
    found = {}
    for path in [*_python_files(folder), *settings]:
        try:
            found[path] = path.stat().st_mtime_ns
        except OSError:
            continue  # gone again, or not there yet
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
        yield from (Path(here) / name for name in files if name.endswith(".py"))
