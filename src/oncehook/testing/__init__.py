"""For the tests of programs that receive hooks.

`send` and `signed` make arrivals as a provider would; `TestInbox` is an inbox under test, which the pytest plugin
hands out as the fixture `inbox`; `oncehook.testing.standins` has servers that behave like the providers' own. The
plugin is loaded by every pytest on the machine, so nothing is imported here before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncehook.testing.inbox import Answer, BlockingTestInbox, TestInbox, send, signed
    from oncehook.testing.recorded import Recorded, RecordedAttempt

_HOMES = {
    "Answer": "inbox",
    "BlockingTestInbox": "inbox",
    "Recorded": "recorded",
    "RecordedAttempt": "recorded",
    "TestInbox": "inbox",
    "send": "inbox",
    "signed": "inbox",
}

__all__ = ["Answer", "BlockingTestInbox", "Recorded", "RecordedAttempt", "TestInbox", "send", "signed"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oncehook.testing' has no attribute {name!r}")
    return getattr(import_module(f"oncehook.testing.{_HOMES[name]}"), name)
