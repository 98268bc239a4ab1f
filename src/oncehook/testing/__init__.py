"""Helpers for tests of programs that receive hooks.

`send` and `signed` make arrivals like a provider's; `TestInbox` is an inbox under test, which the pytest plugin
provides as the fixture `inbox`; `oncehook.testing.standins` has servers that behave like the providers'. Every pytest
on the machine loads the plugin, so imports here are lazy.
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
