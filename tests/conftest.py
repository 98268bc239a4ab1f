"""What holds for all tests: signals are heard, ids follow the clock, slow is not wrong, the longest begin first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from oncehook import model

# A shell may have us ignore them (nohup, a job in the background), and processes that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing about the program.
settings.register_profile("oncehook", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oncehook")

_LONG = (
    "torture/test_torture",
    "torture/test_seeded",
    "torture/test_shortcut",
    "acceptance/test_kill",
    "docs/test_commands",
)
"""Files that take minutes. Begun last they would run alone, with every other lane at rest."""


@pytest.fixture(autouse=True)
def _ids_of_the_present() -> Iterator[None]:
    """A test that moved the clock and took it back leaves no ids of that future to the next one."""
    yield
    model.start_ids_anew()


def _turn(path: Path) -> int:
    place = path.relative_to(Path(__file__).parent).as_posix()
    if place.startswith("ui/"):
        return 2  # the browser keeps its event loop to itself
    return 0 if place.startswith(_LONG) else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which files are handed to the lanes."""
    items.sort(key=lambda item: _turn(item.path))
