"""A Chromium for the tests: what is on the machine, else what its package manager or Playwright brings."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def find_browser() -> str:
    """The path of a Chromium; fails with one sentence when there is none and none can be had."""
    found = _on_this_machine()
    if found is None:
        # Because every lane of the tests asks, and the package manager refuses all but one at a time.
        with Path(tempfile.gettempdir(), "chromium.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _on_this_machine() or _from_packages() or _from_playwright()
    assert found, "there is no Chromium: install the package chromium, or run `playwright install chromium`"
    return found


def _on_this_machine() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def _from_packages() -> str | None:
    apt = shutil.which("apt-get")
    patient = "DPkg::Lock::Timeout=300"
    if apt is None or os.geteuid() != 0:
        return None
    for arguments in (["update", "-q"], ["install", "-qy", "--no-install-recommends", "chromium"]):
        if subprocess.run([apt, "-o", patient, *arguments], capture_output=True, check=False).returncode:
            return None
    return _on_this_machine()


def _from_playwright() -> str | None:
    from playwright.sync_api import sync_playwright

    done = subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], capture_output=True, check=False)
    if done.returncode:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None
