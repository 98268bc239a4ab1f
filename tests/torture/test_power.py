"""T5: the power goes, and what was acknowledged is still there (R2).

The store works on a disk whose every write and sync is on tape; the disk is then rebuilt as it may be found after a
power cut at thousands of moments, and each image is opened by the store itself. `TORTURE_IMAGES` makes it
more, `TORTURE_SEED` repeats its dice. With weaker settings the same run must lose, or it
would prove nothing.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.effort import effort, first_seed
from tests.torture.power_disk import MANNERS, Ack, Delete, Disk, Image, Sync, Truncate, Write

IMAGES = effort("IMAGES", 1000)
SEED = first_seed()
ROOT = Path(__file__).parents[2]
PARTS = 2


def run(folder: Path, synchronous: str, images: int) -> dict[str, Any]:
    """Load, cut, open, look: the score of all images."""
    _end(_start("power_load", folder, synchronous, SEED))
    judges = [_start("power_images", folder / "tape", images, SEED, part, PARTS) for part in range(PARTS)]
    score: Counter[str] = Counter()
    wrong: list[str] = []
    manners: Counter[str] = Counter()
    for judge in judges:
        told = json.loads(_end(judge))
        manners.update(told.pop("manners"))
        wrong += told.pop("wrong")
        score.update(told)
    line = " ".join(f"{name}={n}" for name, n in {**score, **manners}.items())
    sys.stdout.write(f"power synchronous={synchronous} {line} seed={SEED}\n")
    return {**score, "manners": manners, "wrong": wrong, "line": f"{line} TORTURE_SEED={SEED}"}


def _start(module: str, *arguments: object) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)]))
    command = [sys.executable, "-m", f"tests.torture.{module}", *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


@pytest.mark.timeout(120 + IMAGES // 10)
def test_what_was_acknowledged_outlives_a_power_cut(tmp_path: Path) -> None:
    score = run(tmp_path, "FULL", IMAGES)
    assert score["wrong"] == [], score["line"]
    assert score["lost"] == 0
    assert score["images"] == IMAGES
    # A run that met none of the hard moments proves nothing.
    assert set(score["manners"]) == set(MANNERS)
    assert score["acked"] > IMAGES
    assert score["unsynced"] > IMAGES // 3, score["line"]
    assert score["checkpoints"] > IMAGES // 100, score["line"]


@pytest.mark.parametrize("synchronous", ["NORMAL", "OFF"])
def test_a_weaker_setting_is_seen_to_lose(tmp_path: Path, synchronous: str) -> None:
    score = run(tmp_path, synchronous, 240)
    assert score["lost"] > 0, f"the power cut found nothing: {score['line']}"
    # When everything came through there was no power cut: so the tape is right, and it is the setting that loses.
    assert score["control"] == 0, score["line"]


# -- the disk itself ---------------------------------------------------------------------------


def cut(manner: str, *ops: Write | Truncate | Sync | Delete | Ack, seed: int = 0) -> Image:
    disk = Disk()
    for op in ops:
        disk.feed(op)
    return disk.cut(manner, random.Random(seed))


WRITTEN = (Write("a", 0, b"x" * 1024), Sync("a", False), Write("a", 0, b"y" * 1024), Write("a", 1024, b"z" * 512))


@pytest.mark.parametrize("manner", MANNERS)
def test_what_was_synced_stays_and_what_was_not_may(manner: str) -> None:
    found = {cut(manner, *WRITTEN, seed=seed)["a"] for seed in range(200)}
    whole = {b"x" * 1024, b"y" * 1024, b"x" * 1024 + b"z" * 512, b"y" * 1024 + b"z" * 512}
    written = b"x" * 1024
    match manner:
        case "nothing":
            assert found == {written}
        case "everything":
            assert found == {b"y" * 1024 + b"z" * 512}
        case "prefix":
            assert found == {written, b"y" * 1024, b"y" * 1024 + b"z" * 512}
        case "subset":
            # A later write without an earlier one: disks keep no order of their own.
            assert found == whole | {b"x" * 1024 + b"z" * 512}
        case "shuffled":
            assert found == whole
        case "torn":
            assert b"y" * 512 + b"x" * 512 in found
            assert found > whole


def test_a_deleted_file_may_come_back_until_its_folder_is_synced() -> None:
    old = (Write("log", 0, b"old"), Sync("log", True), Delete("log", False))
    new = (*old, Write("log", 0, b"n"))
    assert {cut("subset", *old, seed=seed).get("log") for seed in range(50)} == {None, b"old"}
    assert {cut("subset", *new, seed=seed).get("log") for seed in range(50)} == {None, b"old", b"n"}
    assert cut("nothing", *new, Sync("log", True)) == {"log": b"n"}
    assert cut("nothing", *old, Write("a", 0, b"a"), Sync("a", True)) == {"a": b"a"}
    assert cut("nothing", *old[:2], Delete("log", True)) == {}


def test_a_file_may_be_cut_short() -> None:
    cuts = {cut("subset", *WRITTEN[:2], Truncate("a", 100), seed=seed)["a"] for seed in range(50)}
    assert cuts == {b"x" * 1024, b"x" * 100}
