"""`scripts/house.py` counts what it says it counts."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from bench.engines import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = load()


@pytest.mark.parametrize(
    ("text", "is_participle"),
    [
        ("def told(): ...", True),
        ("def _said(): ...", True),
        ("async def settled(): ...", True),
        ("def read_told(): ...", False),
        ("def feed(): ...", False),
        ("def read(): ...", False),
        ("@property\ndef closed(self): ...", False),
    ],
)
def test_bare_participles(text: str, is_participle: bool) -> None:
    [function] = ast.parse(text).body
    assert house.is_participle(function) is is_participle


def test_what_is_read_off_the_text(tmp_path: Path) -> None:
    package = tmp_path / "src" / "oncehook"
    (package / "store").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("pass\n")
    (tmp_path / "pyproject.toml").write_text(
        '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["oncehook.web", "oncehook.store"]\n'
    )
    (package / "one.py").write_text(
        'class Line:\n    """See DESIGN.md 8 (R42)."""\n\n\ndef told():\n    """What was told; kept in S3."""\n'
    )
    (package / "store" / "two.py").write_text(
        'class Line: ...\n\n\ndef build():\n    """Build it."""\n    return R42  # S9\n'
    )
    found = house.read_text(tmp_path)
    assert {name: value.total() if hasattr(value, "total") else value for name, value in found.items()} == {
        "modules": 2,
        "modules at the top": 1,
        "lines of src": 12,
        "lines of tests": 1,
        "functions": 2,
        "class names defined more than once": 1,
        "classes with such a name": 2,
        "import contracts": 1,
        "layers in them": 2,
        "functions named by a bare participle": 1,
        "docstrings of functions that begin without a verb": 1,
        "references to promises (R1, S1)": 2,
        "references to DESIGN.md, STORAGE.md": 1,
    }


def test_trees_are_shown_side_by_side() -> None:
    figures = [{"modules": count, "walk": [("a.py", "f"), ("b.py", "g"), ("a.py", "h")]} for count in (320, 80)]
    text = house.render(dict(zip(("before", "after"), figures, strict=True)), details=False)
    assert [line.split() for line in text.splitlines()][2] == ["|", "modules", "|", "320", "|", "80", "|"]
    assert house.count_changes(figures[0]["walk"]) == 2
