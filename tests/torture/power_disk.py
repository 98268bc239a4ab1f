"""What a disk may hold after the power went: a tape of what SQLite asked of it in, possible images out.

What was synced is there. Of what was written since, everything may have come through, nothing, the beginning, any
writes in any order, or any 512-byte parts of them. Nothing else changes: bytes that nobody wrote stay as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

SECTOR: Final = 512


@dataclass(slots=True, frozen=True)
class Write:
    file: str
    offset: int
    data: bytes


@dataclass(slots=True, frozen=True)
class Truncate:
    file: str
    size: int


@dataclass(slots=True, frozen=True)
class Sync:
    """All that was written to a file is on the disk."""

    file: str
    folder: bool
    """So is every name in its folder: files that were deleted are gone for good."""


@dataclass(slots=True, frozen=True)
class Delete:
    file: str
    synced: bool
    """The folder was synced after it."""


@dataclass(slots=True, frozen=True)
class Ack:
    """From here on, these must be there whatever happens: events, and deliveries as done."""

    events: list[bytes]
    done: list[bytes]


Op = Write | Truncate | Sync | Delete | Ack
Change = Write | Truncate | Delete
Image = dict[str, bytes]

MANNERS: Final = ("nothing", "everything", "prefix", "subset", "shuffled", "torn")


class Disk:
    """The disk at one moment of the tape."""

    def __init__(self) -> None:
        self._durable: dict[str, bytearray] = {}
        self.pending: list[Change] = []
        """Asked for, and not known to be on the disk."""
        self.events: set[bytes] = set()
        self.done: set[bytes] = set()

    def feed(self, op: Op) -> None:
        """Let one more thing happen."""
        match op:
            case Ack(events, done):
                self.events.update(events)
                self.done.update(done)
            case Sync(file, folder):
                self._settle(lambda change: change.file == file)
                if folder:
                    self._settle_names()
            case Delete(file, True):
                self.pending.append(op)
                self._settle_names()
            case _:
                self.pending.append(op)

    def _settle(self, is_sure: Callable[[Change], bool]) -> None:
        apply(self._durable, filter(is_sure, self.pending))
        self.pending = [change for change in self.pending if not is_sure(change)]

    def _settle_names(self) -> None:
        """Who was deleted stays so, whatever had been written to it before."""
        while deleted := [n for n, change in enumerate(self.pending) if isinstance(change, Delete)]:
            file = self.pending[deleted[-1]].file
            self._durable.pop(file, None)
            before = [change for change in self.pending[: deleted[-1]] if change.file != file]
            self.pending = before + self.pending[deleted[-1] + 1 :]

    def cut(self, manner: str, chance: random.Random) -> Image:
        """The power goes now."""
        image = {name: bytearray(data) for name, data in self._durable.items()}
        apply(image, _survivors(_one_life_each(self.pending, manner, chance), manner, chance))
        return {name: bytes(data) for name, data in image.items()}


def apply(files: dict[str, bytearray], changes: Iterable[Change]) -> None:
    """Do these things to these files."""
    for change in changes:
        if isinstance(change, Delete):
            files.pop(change.file, None)
            continue
        data = files.setdefault(change.file, bytearray())
        end = change.size if isinstance(change, Truncate) else change.offset + len(change.data)
        if end > len(data):
            data.extend(bytes(end - len(data)))
        if isinstance(change, Truncate):
            del data[end:]
        else:
            data[change.offset : end] = change.data


def _one_life_each(changes: Sequence[Change], manner: str, chance: random.Random) -> list[Change]:
    """A name leads to the file before it was deleted, or to the one after: never to a mixture of both."""
    likely = {"nothing": 0.0, "everything": 1.0}.get(manner, 0.5)
    kept: list[Change] = []
    stuck: set[str] = set()
    for change in changes:
        if change.file in stuck:
            continue
        if isinstance(change, Delete):
            if chance.random() >= likely:
                stuck.add(change.file)
                continue
            kept = [one for one in kept if one.file != change.file]
        kept.append(change)
    return kept


def _survivors(changes: list[Change], manner: str, chance: random.Random) -> list[Change]:
    """What of these came through. That a file was deleted is settled by now."""
    gone: list[Change] = [change for change in changes if isinstance(change, Delete)]
    rest = [change for change in changes if not isinstance(change, Delete)]
    share = chance.random()
    match manner:
        case "nothing":
            rest = []
        case "prefix":
            rest = rest[: chance.randrange(len(rest) + 1)]
        case "subset" | "shuffled":
            rest = [change for change in rest if chance.random() < share]
        case "torn":
            rest = [part for change in rest for part in _sectors(change) if chance.random() < share]
    if manner == "shuffled":
        chance.shuffle(rest)
    return gone + list(rest)


def _sectors(change: Write | Truncate) -> list[Write | Truncate]:
    """A write as the disk takes it: sector by sector."""
    if isinstance(change, Truncate):
        return [change]
    begin, end = change.offset, change.offset + len(change.data)
    marks = [begin, *range(begin - begin % SECTOR + SECTOR, end, SECTOR), end]
    return [Write(change.file, at, change.data[at - begin : to - begin]) for at, to in pairwise(marks)]
