"""Named points at which a test may stop this process, and nothing else.

`ONCEHOOK_FAULT=after_intake:3` kills the process (SIGKILL, no clean-up) when it passes that point the third
time; `before_intake:1:pause=2` holds it there for two seconds instead. Unset, a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading


class _Fault:
    def __init__(self, text: str) -> None:
        name, _, rest = text.partition(":")
        count, _, action = rest.partition(":")
        self.name = name
        self.left = int(count or 1)
        self.pause = float(action.removeprefix("pause=") or 0)

    def strike(self) -> None:
        self.left -= 1
        if self.left != 0:
            return
        if self.pause:
            threading.Event().wait(self.pause)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


_armed = [_Fault(text) for text in os.environ.get("ONCEHOOK_FAULT", "").split(",") if text]


def point(name: str) -> None:
    """Stop here if a test asked for it."""
    for fault in _armed:
        if fault.name == name:
            fault.strike()
