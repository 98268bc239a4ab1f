"""Cuts the power of a taped disk at many moments, and opens what is left with our own store.

`python -m tests.torture.power_images TAPE IMAGES SEED PART PARTS` judges every PARTS-th image and prints one JSON
object: images, by manner, and what was wrong with them. Image N of a tape and a seed is always the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oncehook.errors import OncehookError
from oncehook.store.sqlite import SqliteStore
from tests.torture.power_disk import MANNERS, Ack, Disk, Image, Op

MEMORY: Final = Path("/dev/shm")
"""Images are opened and thrown away: a real disk adds nothing but time."""


@dataclass
class Score:
    """What became of the images."""

    images: int = 0
    manners: Counter[str] = field(default_factory=Counter)
    unsynced: int = 0
    """Images at whose cut something was written and not synced: the others are easy."""
    checkpoints: int = 0
    """Images at whose cut part of the log was being copied into the database."""
    acked: int = 0
    """Acknowledged events that were looked for, over all images."""
    lost: int = 0
    control: int = 0
    """Images of the manner "everything" that are wrong: then it is the tape that is, for there was no power cut."""
    wrong: list[str] = field(default_factory=list)

    def told(self) -> str:
        return json.dumps(vars(self) | {"wrong": self.wrong[:20], "failed": len(self.wrong)})


@dataclass(slots=True, frozen=True)
class Cut:
    """The power goes after so many operations of the tape."""

    number: int
    at: int
    manner: str
    seed: int


def cuts(tape: Sequence[Op], images: int, seed: str) -> list[Cut]:
    """Where and how, in the order of the tape: half of them anywhere, half soon after a promise was made."""
    chance = random.Random(seed)
    promises = [n + 1 for n, op in enumerate(tape) if isinstance(op, Ack)]
    last = len(tape)
    made = []
    for number in range(images):
        at = min(chance.choice(promises) + chance.randrange(12), last) if number % 2 else chance.randrange(last + 1)
        made.append(Cut(number, at, MANNERS[number // 2 % len(MANNERS)], chance.getrandbits(64)))
    return sorted(made, key=lambda cut: cut.at)


def images(tape: Sequence[Op], planned: Sequence[Cut]) -> Iterator[tuple[Cut, Disk, Image]]:
    """Each image, with the disk as it stood when the power went."""
    disk, position = Disk(), 0
    for cut in planned:
        while position < cut.at:
            disk.feed(tape[position])
            position += 1
        yield cut, disk, disk.cut(cut.manner, random.Random(cut.seed))


async def judge(folder: Path, disk: Disk, image: Image) -> tuple[int, list[str]]:
    """How many acknowledged events and completions are not there, and what else is wrong."""
    for name, data in image.items():
        (folder / name).write_bytes(data)
    (folder / "oncehook.db-reserve").touch()  # made once and for all: 4 MB per image would be most of the time
    store = SqliteStore(folder / "oncehook.db")
    try:
        await store.open()
        integrity, events, finished = await store.read(_look)
        wrong = [check.name for check in await store.check() if not check.ok]
    except (OncehookError, sqlite3.Error) as error:
        return len(disk.events) + len(disk.done), [f"cannot be opened: {error}"]
    finally:
        await store.close()
    wrong += [] if integrity == "ok" else [f"integrity_check: {integrity}"]
    lost = len(disk.events - events) + len(disk.done - finished)
    return lost, wrong + ([f"{lost} acknowledged are lost"] if lost else [])


def _look(connection: sqlite3.Connection) -> tuple[str, set[bytes], set[bytes]]:
    (integrity,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    events = {row[0] for row in connection.execute("SELECT id FROM events")}
    return integrity, events, {row[0] for row in connection.execute("SELECT id FROM deliveries WHERE status = 'done'")}


async def judge_all(tape: Sequence[Op], planned: Sequence[Cut]) -> Score:
    score = Score()
    with tempfile.TemporaryDirectory(prefix="oncehook-power-", dir=MEMORY if MEMORY.is_dir() else None) as place:
        for cut, disk, image in images(tape, planned):
            folder = Path(place) / str(cut.number)
            folder.mkdir()
            lost, wrong = await judge(folder, disk, image)
            shutil.rmtree(folder)
            score.images += 1
            score.manners[cut.manner] += 1
            score.unsynced += bool(disk.pending)
            score.checkpoints += any(change.file == "oncehook.db" for change in disk.pending)
            score.acked += len(disk.events)
            score.lost += lost
            score.control += cut.manner == "everything" and bool(wrong)
            score.wrong += [f"image {cut.number} ({cut.manner} at {cut.at}): {what}" for what in wrong]
    return score


def main(tape_file: Path, count: int, seed: str, part: int, parts: int) -> None:
    logging.disable()  # what is wrong with an image is told here
    tape: list[Op] = pickle.loads(tape_file.read_bytes())
    planned = cuts(tape, count, seed)
    score = asyncio.run(judge_all(tape, planned[part::parts]))
    sys.stdout.write(score.told() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
