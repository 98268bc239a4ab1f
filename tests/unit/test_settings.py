"""One table per noun: Python is told the same as the file, with the same sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import destination, refused, source

from oncehook import Event, Inbox
from oncehook.errors import ConfigError
from oncehook.retry import Policy
from oncehook.settings.read import fields_of
from oncehook.settings.tables import DestinationSettings, RetrySettings, RouteSettings, SourceSettings
from oncehook.sources import Preset
from oncehook.verify import Nothing


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(f"sqlite:{tmp_path}/x.db")


@pytest.mark.parametrize(
    ("settings", "text", "sentence"),
    [
        (
            {"on_missing_key": "acept"},
            'on_missing_key = "acept"',
            'on_missing_key in [source.orders]: must be "accept", "reject", "body_hash" or "body_hash:10s"; '
            'did you mean "accept"?',
        ),
        (
            {"on_conflict": "rejct"},
            'on_conflict = "rejct"',
            'on_conflict in [source.orders]: must be "accept" or "reject"; did you mean "reject"?',
        ),
        (
            {"subjct": "$.id"},
            'subjct = "$.id"',
            'unknown key "subjct" in [source.orders]; did you mean "subject"?',
        ),
        (
            {"key": "literal:x"},
            'key = "literal:x"',
            "key in [source.orders]: A `key` made of literals alone would make every arrival a duplicate of the first.",
        ),
        (
            {"ip_allow": ["10.0.0.1/8"]},
            'ip_allow = ["10.0.0.1/8"]',
            "ip_allow in [source.orders]: '10.0.0.1/8' is an address inside a network; write \"10.0.0.0/8\"",
        ),
        (
            {"budget": "800"},
            'budget = "800"',
            "budget in [source.orders]: '800' is not a duration; write for example",
        ),
    ],
)
def test_a_source_is_refused_alike(inbox: Inbox, settings: Any, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inbox.source("orders", verify="none", **settings)
    assert str(caught.value).startswith(sentence)
    (line,) = refused(source(text))
    assert line == f"oncehook.toml:3: {caught.value}"


@pytest.mark.parametrize(
    ("settings", "text", "sentence"),
    [
        (
            {"retry": {"factor": 0.5}},
            "retry = { factor = 0.5 }",
            "factor in [destination.n8n.retry]: must be a number from 1 to 100",
        ),
        (
            {"retry": "quik"},
            'retry = "quik"',
            'retry in [destination.n8n]: must be "quick", "durable", a list of waits, or '
            '{ attempts = 8, base = "10s", cap = "6h" }; did you mean "quick"?',
        ),
        (
            {"breaker": {"failurs": 3}},
            "breaker = { failurs = 3 }",
            'unknown key "failurs" in [destination.n8n.breaker]; did you mean "failures"?',
        ),
        (
            {"headers": {"Content-Encoding": "gzip"}},
            'headers = { Content-Encoding = "gzip" }',
            'headers in [destination.n8n]: The header "Content-Encoding" is set by oncehook itself',
        ),
        (
            {"concurrency": 0},
            "concurrency = 0",
            "concurrency in [destination.n8n]: must be a whole number from 1 to 10000",
        ),
        (
            {"transient": [409], "permanent": [409]},
            "transient = [409]\npermanent = [409]",
            "permanent in [destination.n8n]: 409 is listed in transient, too",
        ),
    ],
)
def test_a_destination_is_refused_alike(inbox: Inbox, settings: Any, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inbox.destination("n8n", url="https://n8n.example/x", **settings)
    assert str(caught.value).startswith(sentence)
    (line,) = refused(destination(text))
    assert line.partition(": ")[2] == str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"coalesce": "anny"}, 'coalesce in [[route]]: must be true, false or "any"; did you mean "any"?'),
        ({"on_dead": "holt"}, 'on_dead in [[route]]: must be "continue" or "hold"; did you mean "hold"?'),
        ({"latest": True}, 'unknown key "latest" in [[route]]; did you mean "latest_wins"?'),
        ({"when": {"$.n": ">many"}}, "when in [[route]]: A comparison needs a number"),
    ],
)
def test_a_route_is_refused_alike(inbox: Inbox, settings: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inbox.route("orders", "n8n", **settings)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"retyr": "quick"}, 'unknown key "retyr" in [destination.book]; did you mean "retry"?'),
        ({"coalesce": "anny"}, 'coalesce in [destination.book]: must be true, false or "any"; did you mean "any"?'),
    ],
)
def test_a_handler_is_refused_alike(inbox: Inbox, settings: Any, sentence: str) -> None:
    def book(event: Event) -> None: ...

    with pytest.raises(ConfigError) as caught:
        inbox.on("orders", **settings)(book)
    assert str(caught.value) == sentence
    assert not inbox.destinations
    assert not inbox.routes


def test_everything_that_is_wrong_is_told_at_once(inbox: Inbox) -> None:
    with pytest.raises(ConfigError) as caught:
        inbox.source("orders", preset="stripe", on_conflict="no", budget=-1)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 2


def test_a_preset_is_a_part_of_the_table() -> None:
    with pytest.raises(ConfigError, match='unknown key "subjct" in'):
        Preset(name="acme", title="Acme", scheme=Nothing(), subjct="$.id")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="is not a duration"):
        Preset(name="acme", title="Acme", scheme=Nothing(), keep_keys="30 days")
    preset = Preset(name="acme", title="Acme", scheme=Nothing(), keep_keys="30d", on_conflict="reject")
    changed = preset.replace(keep_keys="1d", title="Other")
    assert (changed.title, vars(changed.settings)) == ("Other", {"keep_keys": 86_400, "on_conflict": "reject"})


def test_what_python_leaves_open_may_be_none(inbox: Inbox) -> None:
    assert inbox.source("orders", verify="none", key=None, secret=None).places["key"]  # type: ignore[arg-type]


def test_a_program_may_write_objects_where_a_file_writes_tables(inbox: Inbox) -> None:
    policy = Policy(attempts=2, waits=(0.0,))
    made = inbox.destination("crm", url="https://crm.example/", retry=policy, permanent={409}, rate=None)  # type: ignore[typeddict-item]
    assert made.terms.retry is policy
    assert (made.terms.rate, made.terms.rules.permanent) == (None, {409})


@pytest.mark.parametrize("table", [SourceSettings, DestinationSettings, RouteSettings, RetrySettings])
def test_every_setting_says_how_it_is_written_and_what_it_means(table: type) -> None:
    for name, field in fields_of(table).items():
        assert field.table or (field.form and field.about), name


@pytest.mark.parametrize("write", [lambda inbox: inbox.destination("crm"), lambda inbox: inbox.source("orders")])
def test_what_cannot_be_left_out_is_asked_for(inbox: Inbox, write: Callable[[Inbox], object]) -> None:
    with pytest.raises(ConfigError, match=r"needs a url|does not say how its arrivals are verified"):
        write(inbox)
