"""What a settings file's reader is told beside the mistake: the line, the word that was meant, how many there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.config_cases import BEARER, CANARY, destination, loads, refused, source, write

from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.settings import load

ROUTE = '[[route]]\nfrom = "orders"\nto = "n8n"\n'


def hint_of(text: str, folder: Path) -> str:
    write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load(None, {}, folder)
    return caught.value.hint


# -- the offending line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n[server]\nport = 40x20\n", "port = 40x20\n           ^"),
        ('[[route]]\nfrom = "a\nto = "b"\n', 'from = "a\n           ^'),
        ("[source.orders\n", "[source.orders\n                ^"),
        ("[server]\n    port = 40x20\n", "port = 40x20\n           ^"),
        (f"[source.orders]\nsecret = {CANARY}\n", "secret = …\n           ^"),
        (f"[server]\nadmin_token = {CANARY}\n", "admin_token = …\n                ^"),
        (f"[source.orders]\nsecrt = {CANARY}\n", ""),
        (f"[source.orders]\nsecret = [\n{CANARY}\n]\n", ""),
        (f'[source.orders]\nsecret = [\n"{CANARY}\n]\n', ""),
        (f"store = postgresql://me:{CANARY}@db/inbox\n", "store = …\n          ^"),
        (f"[destination.n8n]\nurl = https://n8n.example/{CANARY}\n", "url = …\n        ^"),
        (f"[destination.n8n]\nheaders = {{ Authorization = {CANARY} }}\n", "headers = …\n            ^"),
        (f"[{CANARY}=\n", ""),
    ],
)
def test_a_line_that_is_no_toml_is_shown_without_secrets(tmp_path: Path, text: str, shown: str) -> None:
    assert hint_of(text, tmp_path) == shown


def test_a_mistake_in_a_route_from_several_sources_is_told_once(tmp_path: Path) -> None:
    text = (
        '[source.a]\nverify = "none"\n[source.b]\nverify = "none"\n[[route]]\nfrom = ["a", "b"]\nto = "y"\nwen = {}\n'
    )
    (tmp_path / "oncehook.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(None, {}, tmp_path)
    first, second = str(caught.value).splitlines()
    assert 'there is no destination "y"' in first
    assert 'unknown key "wen"' in second
    assert caught.value.hint.startswith("2 mistakes.")


# -- did you mean ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (source('secret = { envv = "X" }', BEARER), 'did you mean "env"?'),
        (source('secret = { flie = "x" }', BEARER), 'did you mean "file"?'),
        (source('key = "id"'), 'key in [source.orders]: "id" is not a valid path. Did you mean "$.id"?'),
        (source('key = "data.object.id"'), 'Did you mean "$.data.object.id"?'),
        (source('key = "headers:X-Id"'), 'Did you mean "header:X-Id"?'),
        (
            source() + destination("") + ROUTE + 'when = { typ = "a" }',
            'when in [[route]]: has no "typ"; did you mean "type"?',
        ),
    ],
)
def test_the_word_that_was_meant_is_named(text: str, meant: str) -> None:
    [line] = refused(text)
    assert meant in line


def test_a_secret_in_the_place_of_its_kind_is_not_repeated() -> None:
    [line] = refused(source(f'secret = {{ {CANARY} = "x" }}', BEARER))
    assert CANARY not in line


def test_a_program_is_told_the_same(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    with pytest.raises(ConfigError, match='has no "typ"; did you mean "type"'):
        inbox.route("orders", "n8n", when={"typ": "a"})


# -- how many ----------------------------------------------------------------------------------


def test_mistakes_are_counted_at_the_end(tmp_path: Path) -> None:
    assert hint_of("[server]\nport = -1\nhots = 1\nlog_level = 3\n", tmp_path) == "3 mistakes."
    assert hint_of("[server]\nport = -1\n", tmp_path) == ""


# -- several sources ---------------------------------------------------------------------------

TWO = source() + '[source.refunds]\nverify = "none"\n' + destination("")


def test_a_route_may_come_from_several_sources() -> None:
    loaded = loads(TWO + '[[route]]\nfrom = ["orders", "refunds"]\nto = "n8n"\nwhen = { type = "a" }\n' + ROUTE)
    assert [(route.from_, route.to) for route in loaded.config.route] == [
        ("orders", "n8n"),
        ("refunds", "n8n"),
        ("orders", "n8n"),
    ]
    assert [route.when for route in loaded.config.route[:2]] == [{"type": "a"}] * 2
    assert loaded.where("route.0.to") == loaded.where("route.1.to") != loaded.where("route.2.to")
    assert {route.source for route in Inbox.from_loaded(loaded).routes} == {"orders", "refunds"}


def test_each_of_several_sources_is_checked_on_its_line() -> None:
    lines = refused(
        TWO + '[[route]]\nfrom = ["orders", "refund"]\nto = "n8n"\n[[route]]\nfrom = "orders"\nto = "n9n"\n'
    )
    assert lines == [
        'oncehook.toml:10: there is no source "refund"; did you mean "refunds"?',
        'oncehook.toml:14: there is no destination "n9n"; did you mean "n8n"?',
    ]
    for wrong in ("[]", '["orders", 3]', "{}"):
        [line] = refused(TWO + f'[[route]]\nfrom = {wrong}\nto = "n8n"\n')
        assert "from in [[route]]: must be text in quotes" in line
