"""SIGHUP: `serve` and `worker` begin anew with settings that have changed, if those are good.

They are read by a process of their own first, as the next start would read them. What is wrong with them is told there,
and this process goes on as it was; otherwise it stops as for SIGTERM, and becomes the next one under the same number.
On a terminal the signal says that the terminal is gone: then it stops, and that is all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

log = logging.getLogger("oncehook.settings")

_PROGRAM: Final = "import json, sys; from oncehook.cli.hangup import prove; prove(*json.loads(sys.argv[1]))"
_ONCE_ONLY: Final = "--open"


class Hangup:
    """What to do on SIGHUP, for one process that runs on these settings."""

    def __init__(self, app: str | None, config_file: Path | None, flags: Mapping[str, object]) -> None:
        self.is_again = False
        """Begin anew when everything has stopped."""
        self._is_ready = self._is_stopping = self._is_early = False
        self._question = json.dumps([app, config_file and str(config_file), dict(flags)])
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """While the block runs, the signal is heard."""
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_signal)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def ready(self) -> None:
        """From now on everything stops in order at SIGTERM; a signal that came earlier counts now."""
        self._is_ready = True
        if self._is_early:
            self._on_signal()

    def stopping(self) -> None:
        """Everything is being stopped. Told a second time, somebody wants an end, whatever came before."""
        self.is_again = self.is_again and not self._is_stopping
        self._is_stopping = True

    def run(self, main: Coroutine[None, None, None], inbox: Inbox) -> None:
        """Run the process's whole life; then become the next one, if that was asked for."""
        import uvloop

        async def whole() -> None:
            await main
            if inbox.left_behind:  # a coroutine that does not let itself be cancelled would hold up the loop's end
                self._end(inbox)

        uvloop.run(whole())
        self._end(inbox)

    def _end(self, inbox: Inbox) -> None:
        from oncehook.cli.setup import leave

        self._begin_anew()
        leave(inbox)

    def _begin_anew(self) -> None:
        if not self.is_again:
            return
        logging.shutdown()
        os.environ.pop("ONCEHOOK_SERVE_OPEN", None)
        said = [word for word in sys.orig_argv[1:] if word != _ONCE_ONLY]
        os.execv(sys.executable, [sys.executable, *said])  # noqa: S606 - ourselves

    def _on_signal(self) -> None:
        if not self._is_ready:
            self._is_early = True
        elif self._is_stopping or (self._asking is not None and not self._asking.done()):
            return
        elif sys.stderr.isatty():
            _stop()
        else:
            self._asking = asyncio.create_task(self._ask(), name="oncehook-hangup")

    async def _ask(self) -> None:
        program = [sys.executable, "-c", _PROGRAM, self._question]
        reader = await asyncio.create_subprocess_exec(*program, stdin=asyncio.subprocess.DEVNULL)
        if await reader.wait():
            log.error("settings.refused")
        elif not self._is_stopping:
            log.info("settings.taken")
            self.is_again = True
            _stop()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def prove(app: str | None, config_file: str | None, flags: Mapping[str, object]) -> NoReturn:
    """End with 0 if a process could begin with these settings, and say why not otherwise."""
    from oncehook.cli.setup import from_app, from_settings
    from oncehook.errors import OncehookError

    file = Path(config_file) if config_file else None
    try:
        from_app(app, file, flags) if app else from_settings(file, flags)
    except OncehookError as error:
        sys.exit(f"oncehook: {error}")
    sys.exit(0)
