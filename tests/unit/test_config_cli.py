"""`oncehook config` from outside: streams, exit codes, and that nothing it prints is a secret (S26)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from config_cases import BEARER, CANARY, EXAMPLE, EXAMPLE_ENV, destination, source, write

from oncehook.cli.settings import config

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `oncehook config …` in a folder of its own, with an environment that knows nothing of us."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONCEHOOK_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(config, arguments, standalone_mode=False)

    return run


def test_check_says_ok(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, EXAMPLE)
    for name in EXAMPLE_ENV:
        monkeypatch.setenv(name, CANARY)
    result = run("check")
    assert result.return_value == 0
    assert result.stdout.startswith("OK ")
    assert "2 sources, 1 destination, 1 route" in result.stdout
    assert json.loads(run("check", "--json").stdout)["ok"] is True


def test_check_prints_a_line_per_problem_on_stderr(run: Run, tmp_path: Path) -> None:
    write(tmp_path, "[server]\nport = -1\nhots = 1\n")
    result = run("check")
    assert result.return_value == 2, "as `serve` ends"
    assert result.stdout == ""
    *lines, sum_ = result.stderr.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["oncehook.toml:2", "oncehook.toml:3"]
    assert sum_ == "  2 mistakes."
    document = json.loads(run("check", "--json").stdout)
    assert not document["ok"]
    assert len(document["problems"]) == 2


def test_check_asks_for_secrets_unless_told_not_to(run: Run, tmp_path: Path) -> None:
    write(tmp_path, source('secret = { env = "ORDERS" }', BEARER))
    assert run("check").return_value == 2
    assert run("check", "--without-secrets").return_value == 0


def test_show_tells_what_holds_and_why(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, EXAMPLE)
    monkeypatch.setenv("PARTNER_SECRET", CANARY)
    monkeypatch.setenv("ONCEHOOK_SERVER__PORT", "5000")
    settings = json.loads(run("show", "--json").stdout)["settings"]
    assert settings["server.port"] == {"value": 5000, "from": "environment ONCEHOOK_SERVER__PORT"}
    assert settings["source.partner.secret"] == {
        "value": ["env:PARTNER_SECRET (set)", "env:PARTNER_SECRET_OLD (not set)"],
        "from": "oncehook.toml:18",
    }
    assert settings["migrate"] == {"value": True, "from": "default"}
    assert settings["destination.n8n.retry"]["value"]["cap"] == "6h"
    assert settings["source.partner.tolerance"]["value"] == "off"
    lines = run("show").stdout.splitlines()
    assert lines[0].endswith("oncehook.toml")
    (port,) = [line.split() for line in lines if line.startswith("server.port")]
    assert port == ["server.port", "5000", "environment", "ONCEHOOK_SERVER__PORT"]


def test_show_of_a_wrong_file_shows_nothing(run: Run, tmp_path: Path) -> None:
    write(tmp_path, "[server]\nport = -1")
    result = run("show", "--json")
    assert (result.return_value, result.stdout) == (2, "")
    assert "oncehook.toml:2" in result.stderr


def test_an_empty_list_that_was_said_is_shown(run: Run, tmp_path: Path) -> None:
    write(tmp_path, source("redact = []"))
    assert json.loads(run("show", "--json").stdout)["settings"]["source.orders.redact"]["value"] == []


def test_no_output_shows_a_secret(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*EXAMPLE_ENV, "ONCEHOOK_TYPO", "ONCEHOOK_SERVER__ADMIN_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("ONCEHOOK_STORE", f"postgresql://bob:{CANARY}@db.example/x?password={CANARY}")
    hidden = source(f'path = "{CANARY * 2}"').replace("orders", "hidden")
    header = destination("").replace("n8n", "crm") + 'headers = { Authorization = { env = "N8N_SECRET" } }\n'
    said = []
    for text in (EXAMPLE + hidden + header, EXAMPLE + f'[source.x]\nverify = "bearer"\nsecret = "{CANARY}"'):
        write(tmp_path, text)
        for arguments in (("check",), ("check", "--json"), ("show",), ("show", "--json"), ("schema",)):
            result = run(*arguments)
            assert result.exception is None
            said.append(result.stdout + result.stderr)
    assert "postgresql://bob:***@db.example/x?password=***" in "".join(said)
    assert "env:ONCEHOOK_SERVER__ADMIN_TOKEN (set)" in "".join(said)
    assert CANARY not in "".join(said)


def test_wrong_use_exits_with_2(tmp_path: Path) -> None:
    for arguments in (("check", "--config", "nowhere.toml"), ("chek",), ("show", "--yaml")):
        assert CliRunner().invoke(config, arguments).exit_code == 2
    path = write(tmp_path, "migrate = false")
    for action in ("check", "show", "schema"):
        assert CliRunner().invoke(config, [action, "--config", str(path)]).exit_code == 0
