"""The worker's scheduler on virtual time, over many seeds (T3): order, due times, rates, breakers, drains, wake-ups.

TORTURE_SEEDS says how many worlds are lived through, TORTURE_SEED where they begin: a world is its seed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import effort, first_seed
from tests.torture.virtual import VirtualLoop, on_virtual_time
from tests.torture.virtual_world import World

FIRST = first_seed(1)
SEEDS = effort("SEEDS", 120)
PARTS = 4
MEMORY = Path("/dev/shm")
"""Where there is one: these worlds never lose power, and a real disk adds nothing but time."""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    yield made
    shutil.rmtree(made)


def lived(seed: int, folder: Path) -> World:
    """The world of this seed, after its end."""

    async def main(loop: VirtualLoop) -> World:
        place = folder / str(seed)
        place.mkdir(parents=True)
        try:
            return await World(loop, place).live()
        finally:
            shutil.rmtree(place)

    return on_virtual_time(seed, main)


@pytest.mark.parametrize("part", range(PARTS))
def test_worlds(folder: Path, part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST + part, FIRST + SEEDS, PARTS):
        world = lived(seed, folder)
        assert not world.complaints, f"seed {seed}: " + "\n".join(world.complaints[:10])
        seen += world.seen
    sys.stdout.write(
        f"virtual part={part} " + " ".join(f"{name}={count}" for name, count in sorted(seen.items())) + "\n"
    )
    assert all(seen[name] for name in ("begin", "retry", "dead", "open", "probe", "stop", "cancelled", "pause"))


@pytest.mark.parametrize("seed", [3, 14, 159])
def test_a_world_is_its_seed(folder: Path, seed: int) -> None:
    one, other = lived(seed, folder / "one"), lived(seed, folder / "other")
    assert one.history == other.history
    assert len(one.history) > 20
