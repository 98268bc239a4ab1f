"""Notifications for systemd: READY, STOPPING, and WATCHDOG while the event loop runs.

`serve` and `worker` run inside `supervise()`. Where nobody listens (no NOTIFY_SOCKET) nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Final

BEATS: Final = 3
"""Beats within systemd's watchdog interval: one may be late, and one lost."""


class Supervisor:
    """Service manager that started this process, if one did."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        # @ begins a name in the abstract namespace; anything but that and a path (vsock) is not supported.
        self._address = "\0" + address[1:] if address.startswith("@") else address if address[:1] == "/" else ""
        self.interval = _read_interval(env) if self._address else None
        """Seconds of silence that systemd allows; None: no watchdog is set."""

    def ready(self, status: str) -> None:
        """Report the end of start-up, so that dependent units may start."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Report a restart under the same process id, after SIGHUP."""
        self._send("RELOADING=1\nSTATUS=beginning anew")

    def stopping(self) -> None:
        """Report that running attempts are being ended, after a signal."""
        self._send("STOPPING=1\nSTATUS=stopping")

    async def beat(self) -> None:
        """Report that the event loop runs, until cancelled. One that hangs is silent, so systemd restarts the
        process."""
        while self.interval is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.interval / BEATS)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # Serving goes on, even if the service manager does not listen.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.setblocking(False)
            teller.sendto(message.encode(), self._address)


def _read_interval(env: Mapping[str, str]) -> float | None:
    """Read the watchdog's interval; None where the variables were inherited from a parent process."""
    if env.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = env.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) else None


@contextlib.asynccontextmanager
async def supervise(env: Mapping[str, str] = os.environ) -> AsyncIterator[Supervisor]:
    """Send watchdog beats while the block runs."""
    supervisor = Supervisor(env)
    beating = asyncio.create_task(supervisor.beat(), name="oncehook-watchdog")
    try:
        yield supervisor
    finally:
        beating.cancel()
