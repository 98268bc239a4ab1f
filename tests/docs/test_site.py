"""The documents as a site: Sphinx builds them without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-E", "-b", "dirhtml", "-W", "--keep-going", "-q", "docs", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()
