"""The reference says what the code says: pages that are written are written anew, and those by hand are complete."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

from oncehook import model
from tests.docs.blocks import ROOT

WRITER: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/reference.py"))
SOURCE = ROOT / "src/oncehook"


def test_a_written_page_is_as_it_would_be_written() -> None:
    for page, text in WRITER["pages"]().items():
        assert page.read_text() == text, f"{page.name}: run scripts/docs --write"


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    for module in WRITER["MODULES"]:
        if module.startswith("oncehook.contrib.django"):
            continue  # Django must be set up first; its names are read off the text
        names = getattr(importlib.import_module(module), "__all__", None) or WRITER["public_names"](module)
        for name in names:
            assert f"### `{module}.{name}`" in page


def test_the_top_of_the_package_promises_what_it_has() -> None:
    import oncehook

    assert set(WRITER["public_names"]("oncehook")) == set(oncehook.__all__)
    assert all(hasattr(oncehook, name) for name in oncehook.__all__)


def test_every_class_of_errors_has_its_row_and_every_code_its_advice() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    codes = {WRITER["code_of"](error) for error in WRITER["error_classes"]()}
    assert codes == {key for key in WRITER["ADVICE"] if key.islower()}
    assert codes == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


def test_every_code_in_the_text_of_the_package_is_known() -> None:
    """Also of classes that a newcomer might put elsewhere."""
    said = {
        code
        for path in SOURCE.rglob("*.py")
        for code in re.findall(r'^    code = "(\w+)"', path.read_text(), re.MULTILINE)
    }
    assert said == {WRITER["code_of"](error) for error in WRITER["error_classes"]()}


def test_every_label_is_explained() -> None:
    labels = {label for family in WRITER["metric_families"]() for label in family._labelnames}
    assert labels == set(WRITER["LABELS"])


# -- moments -----------------------------------------------------------------------------------

_LOGGERS = {"log", "attempt_log", "replay_log", "logger", "ration"}
_MOMENT = re.compile(r"[a-z]+\.[a-z_]+")
_LEVELS = {"exception": "error"}
OUTCOMES = {*map(str, model.Outcome), "ignored", "handshake"}


def logged(path: Path) -> dict[str, str]:
    """The moments that a module logs, and how loudly; those whose level is decided while it runs are left out."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) in _LOGGERS
        ):
            is_rationed = ast.unparse(node.func.value) == "ration"
            said = node.args[2] if is_rationed and len(node.args) > 2 else node.args[0] if node.args else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                moment = said.value
                assert _MOMENT.fullmatch(moment), f"{path}: {moment!r} is not the name of a moment"
                if is_rationed:
                    found[moment] = ast.unparse(node.args[1]).removeprefix("logging.").lower()
                    continue
                assert len(node.args) == 1, f"{path}: what is told of {moment!r} belongs in its fields"
                found[moment] = _LEVELS.get(node.func.attr, node.func.attr)
    return found


def moments_by_outcome() -> set[str]:
    """Those that `observe` puts together while it runs."""
    constants = {
        node.value
        for node in ast.walk(ast.parse((SOURCE / "observe.py").read_text()))
        if isinstance(node, ast.Constant)
    }
    told = {
        word for word in constants if isinstance(word, str) and re.fullmatch(r"(attempt|delivery|watermark)\.\w+", word)
    }
    return told | {f"arrival.{outcome}" for outcome in OUTCOMES}


def test_the_page_of_moments_is_complete_and_right() -> None:
    page = (ROOT / "docs/reference/moments.md").read_text()
    shown = dict(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (\w+) \|", page, re.MULTILINE))
    fixed = {moment: level for path in SOURCE.rglob("*.py") for moment, level in logged(path).items()}
    assert set(shown) == set(fixed) | moments_by_outcome()
    assert {moment: shown[moment] for moment in fixed} == fixed


# -- states ------------------------------------------------------------------------------------


def test_the_page_of_states_names_each_of_them() -> None:
    page = (ROOT / "docs/explanation/states.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == {*map(str, model.Outcome), *map(str, model.DeliveryStatus)}
    for outcome in model.AttemptOutcome:
        assert f"`{outcome}`" in page


def test_the_glossary_has_the_words_of_the_model() -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    words = re.findall(r"^([a-z ]+)\n: ", page, re.MULTILINE)
    assert words == sorted(words)
    needed = {
        "arrival",
        "event",
        "delivery",
        "lease",
        "fence",
        "attempt",
        "replay",
        "run",
        "subject",
        "key",
        "source",
        "route",
    }
    assert needed <= set(words)


def test_the_versions_of_the_builders_are_locked() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    locked = (ROOT / "requirements/docs.txt").read_text()
    for requirement in groups["docs"]:
        assert f"\n{requirement.partition('>=')[0]}==" in f"\n{locked}"
