"""`oncehook keys`: JSON, exit codes, and nothing that is released by accident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oncehook.cli import cli, main


def run(*arguments: str) -> tuple[int, Any]:
    """The exit code, and what JSON came."""
    result = CliRunner(catch_exceptions=False).invoke(cli, ["keys", *arguments, "--json"], standalone_mode=False)
    assert isinstance(result.return_value, int)
    return result.return_value, json.loads(result.stdout)


@pytest.fixture(autouse=True)
def environment(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_CLAIMS", store)


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the whole program."""
    monkeypatch.setattr("sys.argv", ["oncehook", "keys", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    code = left.value.code
    assert isinstance(code, int)
    return code


def test_a_life_by_hand(key: str) -> None:
    assert run("show", key) == (1, {"key": key, "status": "free", "token": None, "result": None, "retry_after": None})
    code, claim = run("claim", key, "--ttl", "60s", "--payload", "p")
    assert (code, claim["status"], len(claim["token"])) == (0, "new", 32)
    code, busy = run("claim", key)
    assert (code, busy["status"], busy["token"]) == (1, "in_progress", None)
    assert 0 < busy["retry_after"] <= 60
    assert run("commit", key, "--token", claim["token"], "--result", "refunded")[0] == 0
    code, done = run("show", key)
    assert (code, done["status"], done["result"]) == (0, "done", "refunded")
    assert run("release", key, "--force")[0] == 0
    assert run("release", key, "--force")[0] == 1
    code, again = run("claim", key)
    assert (code, run("release", key, "--token", again["token"])[0]) == (0, 0)
    assert run("show", key, "--namespace", "other")[0] == 1


def test_what_ends_how(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert ended(monkeypatch, "claim", key) == 0
    assert "new" in capsys.readouterr().out
    assert ended(monkeypatch, "release", key) == 2, "neither --token nor --force"
    assert ended(monkeypatch, "release", key, "--token", "x", "--force") == 2
    assert ended(monkeypatch, "release", key, "--token", "x") == 1
    assert ended(monkeypatch, "commit", key, "--token", "x") == 1
    assert ended(monkeypatch, "claim", key, "--ttl", "soon") == 2
    assert ended(monkeypatch, "claim", key, "--store", "mongodb://x") == 2
    (tmp_path / "file").write_text("")
    assert ended(monkeypatch, "claim", key, "--store", f"sqlite:{tmp_path}/file/c.db") == 3
    assert not capsys.readouterr().out, "on failure stdout is empty"


def test_without_a_store_it_is_the_one_of_once(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCEHOOK_CLAIMS")
    monkeypatch.chdir(tmp_path)
    assert run("claim", key)[0] == 0
    assert run("claim", key)[0] == 1
    assert (tmp_path / "oncehook-claims.db").exists()
