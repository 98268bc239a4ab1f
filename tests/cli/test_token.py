"""`oncehook token`: what it prints lets its holder in, with that role and no other (S27)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncehook.cli.token import command
from oncehook.config import load
from oncehook.web.access import Access, Role


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


def test_each_is_another_one() -> None:
    first, second = (json.loads(CliRunner().invoke(command, ["ci", "--json"]).stdout) for _ in range(2))
    assert first["token"] != second["token"]
    assert (first["role"], first["variable"]) == ("viewer", "ONCEHOOK_TOKEN_CI")
