"""Kinds of destinations that settings can name, besides a web address: ours, and those that other packages bring.

A kind of one's own is an entry point in the group `oncehook.destinations` whose value is a `DestinationKind`. It is
used by a table of its name, `[destination.NAME.sqs]`, or by `kind = "sqs"` where it needs no settings. Only the kinds
that are named are imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oncehook.destinations.base import Destination, Terms
from oncehook.plugins import find_entry_points, load_entry_point

if TYPE_CHECKING:
    from oncehook.settings.read import SettingsReader

GROUP: Final = "oncehook.destinations"
OURS: Final = {"whatsapp": "oncehook.whatsapp.settings", "celery": "oncehook.contrib.celery"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationKind:
    """A kind of destination: its settings, and how one is built from them.

    A destination of any kind has `kind` and `address`. It may have `preview(body)`, shown before a replay, `apart()`, a
    copy with connections of its own that a test is sent over, and `payload(lease)`, the bytes that it sends, which a
    `TestInbox` records instead of the event's body.
    """

    settings: type
    """The table of its own settings: a TypedDict or a msgspec Struct, annotated as in `oncehook.settings.tables`."""
    build: Callable[[str, Any, Any, Terms], Destination]
    """Called with the destination's name, its own settings, all settings of `[destination.NAME]`, and its terms."""
    check: Callable[[str, Any, SettingsReader], None] | None = None
    """Called with the destination's name and its own settings; notes in the reader what is wrong across them."""


def names() -> list[str]:
    return sorted({*OURS, *(point.name for point in find_entry_points(GROUP))})


def find(name: str) -> DestinationKind | None:
    """Return the kind of this name, or None. Another package cannot replace one of ours. Raises ConfigError."""
    if name in OURS:
        kind: DestinationKind = importlib.import_module(OURS[name]).KIND
        return kind
    points = find_entry_points(GROUP, name)
    return next((load_entry_point(point, DestinationKind, "kind") for point in points), None)


def find_table(name: str) -> type | None:
    """Return the table of the settings of a kind, or None where there is no such kind. Raises ConfigError."""
    kind = find(name)
    return None if kind is None else kind.settings
