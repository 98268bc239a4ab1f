"""The CPU of a server is that of everything it has started, forked receivers included."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from bench.engines import Server, cpu_seconds, family_of

from tests.waiting import until

BURN = """
import os, time

def burn(seconds):
    while time.process_time() < seconds:
        pass

"""
FORKED = """
for _ in range(2):
    if os.fork() == 0:
        burn(0.3)
        time.sleep(60)
time.sleep(60)
"""
ORPHANED = """
if os.fork() == 0:
    if os.fork() == 0:
        burn(0.6)
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(60)
"""
ENDED = """
if os.fork() == 0:
    burn(0.6)
    os._exit(0)
os.wait()
time.sleep(60)
"""


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("text", "processes"), [(FORKED, 3), (ORPHANED, 2), (ENDED, 1)], ids=["two", "orphan", "ended"]
)
async def test_the_cpu_of_all_processes_counts_once(text: str, processes: int, tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", BURN + text], {}, tmp_path / "log", 0)
    try:
        # One of two alone comes to 0.3.
        await until(lambda: cpu_seconds([server.pid]) > 0.5)
        await until(lambda: len(family_of([server.pid, server.pid])) == processes)
        assert cpu_seconds([server.pid, server.pid]) < 1.0
        family = family_of([server.pid])
    finally:
        server.stop()
    await until(lambda: not any(map(is_alive, family)))
