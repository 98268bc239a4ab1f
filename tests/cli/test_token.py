"""`oncehook token`: what it prints lets its holder in, with that role and no other (S27)."""

from __future__ import annotations

import json
import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncehook import clock
from oncehook.cli import main
from oncehook.cli.settings import token as command
from oncehook.errors import ConfigError
from oncehook.model import ROLES
from oncehook.settings import load
from oncehook.web.auth import Access, Role


def test_the_lines_let_the_token_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CliRunner().invoke(command, ["night shift", "--role", "operator"])
    token = made.stdout.strip()
    lines = made.stderr[made.stderr.index("[[server.tokens]]") :]
    variable = tomllib.loads(lines)["server"]["tokens"][0]["token"]["env"]
    monkeypatch.setenv(variable, token)
    (tmp_path / "oncehook.toml").write_text(lines)
    server = load(tmp_path / "oncehook.toml").config.server
    access = Access(server.admin_token, server.tokens, "")
    found = access.identify([(b"authorization", f"Bearer {token}".encode())], "203.0.113.1")
    assert found is not None
    assert (found.name, found.role) == ("night shift", Role.operator)
    assert access.identify([(b"authorization", b"Bearer oht_0")], "203.0.113.1") is None


def test_a_token_in_the_environment_is_no_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oncehook token accounts` says to keep it in ONCEHOOK_TOKEN_ACCOUNTS."""
    for name in ("ROLE", "EXPIRES", "SOURCES", "ACCOUNTS", "NO_PAYLOADS"):
        monkeypatch.setenv(f"ONCEHOOK_TOKEN_{name}", "oht_x")
    with pytest.raises(SystemExit) as end:
        main(["token", "accounts", "--json"])
    assert end.value.code == 0
    made = json.loads(capsys.readouterr().out)
    assert made.keys() == {"name", "role", "token", "variable"}
    assert made["role"] == "viewer"


def test_every_role_has_its_rank() -> None:
    assert tuple(role.name for role in sorted(Role)) == ROLES


def test_the_lines_hold_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.now_utc()
    made = CliRunner().invoke(command, ["ci", "--expires", "90d", "--sources", "shop, orders", "--no-payloads"])
    lines = made.stderr[made.stderr.index("[[server.tokens]]") :]
    sources = "".join(f'[source.{name}]\nverify = "none"\n' for name in ("shop", "orders"))
    monkeypatch.setenv("ONCEHOOK_TOKEN_CI", made.stdout.strip())
    (tmp_path / "oncehook.toml").write_text(lines + sources)
    [token] = load(tmp_path / "oncehook.toml").config.server.tokens
    assert (token.sources, token.payloads) == (("shop", "orders"), False)
    assert token.expires is not None
    assert timedelta(days=90) >= token.expires - before >= timedelta(days=90) - timedelta(seconds=2)
    [found] = Access(None, [token]).holders
    assert (found.sources, found.payloads, found.expires) == ({"shop", "orders"}, False, token.expires)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sources = []", "must name at least one"),
        ('sources = ["shpo"]', 'there is no source "shpo"; did you mean "shop"?'),
        ('expires = "tomorrow"', "must be a day or a moment in UTC"),
        ("expires = 2027-02-15T12:00:00", "must be a day or a moment in UTC"),
        ('expires = "2027-02-15T12:00:00"', "must be a day or a moment in UTC"),
        ('payloads = "no"', "must be true or false"),
    ],
)
def test_a_limit_that_cannot_be_read_is_an_error_and_never_none(
    setting: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("T", "x" * 40)
    lines = f'[[server.tokens]]\nname = "ci"\nrole = "viewer"\ntoken = {{ env = "T" }}\n{setting}\n'
    (tmp_path / "oncehook.toml").write_text(f'{lines}[source.shop]\nverify = "none"\n')
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(tmp_path / "oncehook.toml")


@pytest.mark.parametrize("day", ["2027-02-15", '"2027-02-15"', "2027-02-15T01:00:00+01:00", '"2027-02-15T00:00:00Z"'])
def test_a_day_begins_in_utc(day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T", "x" * 40)
    lines = f'[[server.tokens]]\nname = "ci"\nrole = "viewer"\ntoken = {{ env = "T" }}\nexpires = {day}\n'
    (tmp_path / "oncehook.toml").write_text(lines)
    loaded = load(tmp_path / "oncehook.toml")
    assert loaded.config.server.tokens[0].expires == datetime(2027, 2, 15, tzinfo=UTC)
    [shown] = [setting.value for setting in loaded.settings() if setting.name == "server.tokens.0.expires"]
    assert shown == "2027-02-15T00:00:00Z"


def test_a_limited_token_has_no_name_of_oncehooks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the audit log it sees what was done under its name."""
    monkeypatch.setenv("T", "x" * 40)
    lines = '[[server.tokens]]\nname = "local"\nrole = "viewer"\ntoken = { env = "T" }\nsources = ["shop"]\n'
    (tmp_path / "oncehook.toml").write_text(f'{lines}[source.shop]\nverify = "none"\n')
    with pytest.raises(ConfigError, match="a name of oncehook's own"):
        load(tmp_path / "oncehook.toml")


def test_digests_tell_what_was_changed_and_nothing_of_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "oncehook.toml"

    def digests(secret: str, port: int, variable: str = "S") -> dict[str, str]:
        monkeypatch.setenv(variable, secret)
        file.write_text(
            f'[server]\nport = {port}\n[source.shop]\npreset = "stripe"\nsecret = {{ env = "{variable}" }}\n'
        )
        return load(file).digests()

    first = digests("whsec_one", 4020)
    assert digests("whsec_two", 4020) == first
    changed = digests("whsec_two", 4021, "OTHER")
    assert {name for name in first if first[name] != changed[name]} == {"server.port", "source.shop.secret"}


def test_each_is_another_one() -> None:
    first, second = (json.loads(CliRunner().invoke(command, ["ci", "--json"]).stdout) for _ in range(2))
    assert first["token"] != second["token"]
    assert (first["role"], first["variable"]) == ("viewer", "ONCEHOOK_TOKEN_CI")


def test_no_token_takes_the_variable_of_an_option() -> None:
    refused = CliRunner().invoke(command, ["env"])
    assert (refused.exit_code, "another name" in refused.output) == (2, True)
