"""What a run was made on: written beside its figures, so that nobody has to guess."""

from __future__ import annotations

import os
import platform
import sqlite3
from importlib import metadata
from pathlib import Path

import psutil


def version_of(package: str) -> str:
    """Return the version of a contestant's package; a contestant may be drawn where it cannot run."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe() -> dict[str, str | int | float | None]:
    """Describe this machine and what runs on it."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()
