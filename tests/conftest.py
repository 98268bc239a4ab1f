"""What holds for all tests: no network, signals are heard, ids follow the clock, slow is not wrong, longest first."""

from __future__ import annotations

import errno
import signal
import socket
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from oncehook import model
from oncehook.logs import ration
from oncehook.sources import PLAIN

# A shell may have us ignore them (nohup, a job in the background), and processes that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_HERE = (None, "", b"", "localhost", b"localhost", socket.gethostname())
_NO_NETWORK = "no test reaches the network"


def _address(host: object) -> IPv4Address | IPv6Address | None:
    """Return the address that a host is written as, without its IPv6 coat; None for names."""
    try:
        address = ip_address((host.decode() if isinstance(host, bytes) else str(host)).partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _stay_here(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse connections to other machines, and questions about their names, as a machine without a network does.

    A test that means the outside goes through a proxy of its own on the loopback.
    """
    if event == "socket.getaddrinfo":
        if arguments[0] not in _HERE and _address(arguments[0]) is None:
            raise socket.gaierror(socket.EAI_NONAME, _NO_NETWORK)
    elif event == "socket.connect" and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
        address = _address(arguments[1][0])
        if address is not None and not (address.is_loopback or address.is_unspecified):
            raise OSError(errno.ENETUNREACH, _NO_NETWORK)


sys.addaudithook(_stay_here)

# How long an example takes says how busy the machine is, and nothing about the program.
settings.register_profile("oncehook", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oncehook")

# Nor does an answer that is late because four lanes share two cores. What an answer may take has tests with a budget of
# their own.
BUDGET = PLAIN.settings.budget
PLAIN.settings.budget = 90.0

_LONG = (
    "torture/test_torture_postgres",
    "torture/test_torture",
    "docs/test_commands",
    "torture/test_seeded",
    "torture/test_two_ways",
    "acceptance/test_crashes",
    "acceptance/test_sign_in",
    "acceptance/test_sessions",
    "acceptance/test_kill",
    "acceptance/test_admin_cli",
    "torture/test_shortcut",
    "contrib/test_django_orders",
    "unit/test_cli",
    "docs/test_site",
    "torture/test_power",
    "torture/test_virtual",
    "acceptance/test_tutorial",
    "whatsapp/test_bot",
)
"""Files that take longest, the longest first. Begun last they would run alone, with every other lane at rest."""

_APART = ("torture/test_torture", "docs/test_commands", "torture/test_seeded")
"""Of those, the ones whose tests share nothing: each goes to whichever lane is free."""


@pytest.fixture(autouse=True)
def _ids_of_the_present() -> Iterator[None]:
    """A test that moved the clock and took it back leaves no ids of that future to the next one."""
    yield
    model.start_ids_anew()


@pytest.fixture(autouse=True)
def _own_ration() -> None:
    """A test that logged a flood leaves no sum of it to the next one."""
    ration.sum_up()


def _turn(path: Path) -> int:
    place = path.relative_to(Path(__file__).parent).as_posix()
    if place.startswith("ui/"):
        return len(_LONG) + 1  # the browser keeps its event loop to itself
    return next((turn for turn, name in enumerate(_LONG) if place.startswith(name)), len(_LONG))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests into the order in which they are handed to the lanes."""
    items.sort(key=lambda item: _turn(item.path))


class _Lanes(LoadFileScheduling):  # type: ignore[misc]
    """A file at a time, or a test at a time where a file is long and its tests share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return nodeid if file.removeprefix("tests/").startswith(_APART) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return _Lanes(config, log)
