"""The pictures of docs/explanation are those that scripts/diagrams.py draws, and name what there is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from oncehook.model import DeliveryStatus

ROOT = Path(__file__).parent.parent.parent
DRAWN = runpy.run_path(str(ROOT / "scripts/diagrams.py"))


@pytest.mark.parametrize("name", sorted(DRAWN["DIAGRAMS"]))
def test_the_picture_is_the_one_that_is_drawn(name: str) -> None:
    assert (ROOT / "docs/explanation" / name).read_text() == DRAWN["DIAGRAMS"][name], "run scripts/diagrams.py"


def test_every_state_of_a_delivery_is_drawn() -> None:
    drawn = {part.title for part in DRAWN["STATES"] if hasattr(part, "title")}
    assert drawn == {"accepted", *(status.name for status in DeliveryStatus)}


def test_every_module_of_the_way_is_there() -> None:
    named = [word for part in DRAWN["DATA_WAY"] if hasattr(part, "title") for word in part.title.split(", ")]
    modules = [word for word in named if re.search(r"\.py$|/$", word)]
    assert len(modules) > 8
    for module in modules:
        engines = ("sqlite", "postgres") if "…" in module else ("",)
        for engine in engines:
            assert (ROOT / "src/oncehook" / module.replace("…", engine)).exists(), module
