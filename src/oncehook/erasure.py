"""The words of erasing a subject as values: what is asked for, and how much was erased or would be (S37).

The desk makes an `EraseOrder`, a store carries it out in short batches and answers each with an `Erasure`. An erased
event stays as a row without content: it is still counted, and its key still makes a late copy a duplicate.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass
from typing import Final

ERASED: Final = "erased"
"""The note of deliveries whose event was erased; they can never be replayed."""

_MENTION: Final = "subject:[erased]"


@dataclass(slots=True, frozen=True)
class EraseOrder:
    """Whose events are to be erased, who wants it, and why."""

    subject: str
    source_id: int | None = None
    """Only this source's; two sources may use the same text for different things."""
    actor: str = ""
    reason: str = ""
    spelled: str = ""
    """The subject as queries write it, which replays have kept, and lines of an old audit log."""


@dataclass(slots=True, frozen=True)
class Erasure:
    """How much was erased, or would be."""

    events: int = 0
    deliveries: int = 0
    """Open ones and dead letters, which are discarded first."""
    attempts: int = 0
    """Attempts whose error and answer go."""
    arrivals: int = 0
    """Later arrivals of these events that are still kept."""
    batches: int = 0
    """Split requests whose raw bytes go."""
    shared_batches: int = 0
    """Those of them that also held events of others: the raw bytes go all the same, the others' events stay."""

    def __add__(self, other: Erasure) -> Erasure:
        return Erasure(*[mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)])


def needle(order: EraseOrder) -> str:
    """What a kept line holds when it mentions the subject: lines are JSON."""
    return json.dumps(f"subject:{order.spelled}")[1:-1]


def without_mention(line: str, order: EraseOrder) -> str:
    """A kept line of JSON in which queries no longer name the subject."""
    return re.sub(re.escape(needle(order)) + r"(?=[\s\"'\\]|$)", _MENTION, line)
