"""The webhook inbox for Python: every event accepted once, worked in order, never lost, always replayable."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oncehook import logs

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oncehook.categories import Classify
    from oncehook.claims.once import once
    from oncehook.errors import ClaimLost, GiveUp, InProgress, OncehookError, RetryLater
    from oncehook.event import Event
    from oncehook.inbox import Inbox
    from oncehook.ingest import Receipt
    from oncehook.model import Category, Person
    from oncehook.secret import OldSecret
    from oncehook.sources import Preset, Sample

_HOMES = {
    "Category": "model",
    "ClaimLost": "errors",
    "Classify": "categories",
    "Event": "event",
    "GiveUp": "errors",
    "InProgress": "errors",
    "Inbox": "inbox",
    "OldSecret": "secret",
    "OncehookError": "errors",
    "Person": "model",
    "Preset": "sources",
    "Receipt": "ingest",
    "RetryLater": "errors",
    "Sample": "sources",
    "once": "claims.once",
}

__all__ = [
    "Category",
    "ClaimLost",
    "Classify",
    "Event",
    "GiveUp",
    "InProgress",
    "Inbox",
    "OldSecret",
    "OncehookError",
    "Person",
    "Preset",
    "Receipt",
    "RetryLater",
    "Sample",
    "once",
]

logs.show_details()  # set here, because every module may log, and some are imported without the rest


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import oncehook` itself costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'oncehook' has no attribute {name!r}")
    return getattr(import_module(f"oncehook.{_HOMES[name]}"), name)
