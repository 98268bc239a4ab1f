"""What can be added to an inbox, by whom, and until when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncehook import Event, Inbox
from oncehook.destinations.base import WELL, Result, Terms
from oncehook.errors import ConfigError
from oncehook.model import Lease
from oncehook.settings import load


class Shelf:
    """A destination of somebody's own: it keeps what it is given."""

    kind = "shelf"
    crash_tolerance = 0
    address = "the shelf"

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = 0
        self.terms = Terms()
        self.kept: list[bytes] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def attempt(self, lease: Lease) -> Result:
        self.kept.append(lease.event.body)
        return WELL


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(f"sqlite:{tmp_path}/x.db")


async def test_a_destination_of_ones_own_is_given_its_deliveries(inbox: Inbox) -> None:
    shelf = inbox.add_destination(Shelf("shelf"))
    inbox.route("app", "shelf")
    async with inbox.running():
        await inbox.emit("app", "kept", b"{}")
        await inbox.drain()
    assert shelf.kept == [b"{}"]


def test_names_and_paths_are_given_once(inbox: Inbox) -> None:
    inbox.source("orders", verify="none")
    inbox.destination("crm", url="https://crm.example/")
    with pytest.raises(ConfigError, match="Two sources"):
        inbox.source("orders", verify="none")
    with pytest.raises(ConfigError, match="Two sources"):
        inbox.source("others", verify="none", path="orders")
    with pytest.raises(ConfigError, match="Two destinations"):
        inbox.add_destination(Shelf("crm"))


def test_a_function_that_handles_two_sources_is_one_destination(inbox: Inbox) -> None:
    @inbox.on("orders")
    @inbox.on("invoices")
    def book(event: Event) -> None: ...

    assert list(inbox.destinations) == ["book"]
    assert [(route.source, route.destination) for route in inbox.routes] == [("invoices", "book"), ("orders", "book")]
    with pytest.raises(ConfigError, match="Two destinations"):
        inbox.on("orders", name="book")(lambda event: None)


async def test_nothing_is_added_while_it_runs(inbox: Inbox) -> None:
    assert not inbox.is_started
    async with inbox.running():
        assert inbox.is_started
        with pytest.raises(ConfigError, match="too late"):
            inbox.source("orders", verify="none")
        with pytest.raises(ConfigError, match="too late"):
            inbox.add_destination(Shelf("shelf"))
    assert not inbox.is_started


async def test_a_route_may_come_from_several_sources(inbox: Inbox) -> None:
    shelf = inbox.add_destination(Shelf("shelf"))
    inbox.route(["app", "shop"], "shelf", when={"type": "kept"})
    assert [(route.source, route.destination) for route in inbox.routes] == [("app", "shelf"), ("shop", "shelf")]
    async with inbox.running():
        await inbox.emit("app", "kept", b"1")
        await inbox.emit("shop", "kept", b"2")
        await inbox.emit("shop", "other", b"3")
        await inbox.drain()
    assert sorted(shelf.kept) == [b"1", b"2"]


@pytest.mark.parametrize("source", [[], [1], [["app"]]])
def test_a_route_from_no_name_is_refused_at_once(inbox: Inbox, source: Any) -> None:
    with pytest.raises(ConfigError, match="needs the name of a source, or a list of names"):
        inbox.route(source, "shelf")
    assert not inbox.routes


async def test_a_route_that_leads_nowhere_is_found_at_the_start(inbox: Inbox) -> None:
    inbox.route("app", "nobody")
    with pytest.raises(ConfigError, match='"nobody", which is nowhere'):
        await inbox.start()


def test_a_file_makes_an_inbox_of_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    class Special(Inbox): ...

    (tmp_path / "oncehook.toml").write_text(
        f'store = "sqlite:{tmp_path}/x.db"\n[destination.crm]\nurl = "https://c.example/"\n'
    )
    made = Special.from_toml(tmp_path / "oncehook.toml")
    assert isinstance(made, Special)
    assert list(made.destinations) == ["crm"]


def test_a_file_counts_for_a_dashboard_that_was_mounted_before(inbox: Inbox, tmp_path: Path) -> None:
    inbox.dashboard(authorize=lambda request: "admin")
    (tmp_path / "oncehook.toml").write_text('[watermark]\ndead = 3\n[destination.crm]\nurl = "https://c.example/"\n')
    inbox.add_settings(load(tmp_path / "oncehook.toml"))
    marks = {mark.name: mark.limit for mark in inbox.admin._measure({}, {})}
    assert (marks, "crm" in inbox.destinations) == ({"dead": 3}, True)


def test_settings_forbid_a_migration_whoever_says_so(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text("migrate = false")
    for said in (True, False):
        inbox = Inbox(f"sqlite:{tmp_path}/x.db", migrate=said)
        inbox.add_settings(load(tmp_path / "oncehook.toml"))
        assert not inbox.migrates
    inbox = Inbox(f"sqlite:{tmp_path}/x.db", migrate=False)
    inbox.add_settings(load(cwd=tmp_path, env={"ONCEHOOK_MIGRATE": "true"}))
    assert not inbox.migrates


async def test_settings_come_too_late_for_an_inbox_that_runs(inbox: Inbox, tmp_path: Path) -> None:
    async with inbox.running(work=False):
        with pytest.raises(ConfigError, match="too late"):
            inbox.add_settings(load(cwd=tmp_path, env={}))
