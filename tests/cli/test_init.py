"""Three questions, and settings that are good."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncehook import presets
from oncehook.cli.settings import page
from oncehook.settings import load
from tests.cli.conftest import Process

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def secrets_of(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r'env = "(\w+)"', text):
        monkeypatch.setenv(name, "a value that is set")


@pytest.mark.parametrize("goal", ["python", "https://n8n.example/webhook/abc", "http://localhost:5678/x"])
def test_what_is_written_passes_config_check(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, goal: str
) -> None:
    done = run("init", "--from", "stripe", "--from", "whatsapp-cloud", "--to", goal, "--store", "sqlite:./x.db")
    assert (done.code, done.out) == (0, "oncehook.toml\n")
    assert "export STRIPE_SECRET=…" in done.err
    secrets_of((folder / "oncehook.toml").read_text(), monkeypatch)
    checked = run("config", "check")
    assert checked.code == 0, checked.err
    assert "2 sources" in checked.out
    assert not checked.err


@pytest.mark.parametrize("preset", presets.names())
def test_every_preset(folder: Path, preset: str) -> None:
    text = page([preset], "https://a.example/x", "postgresql://db.example/inbox")
    (folder / "oncehook.toml").write_text(text)
    loaded = load(folder / "oncehook.toml", dict.fromkeys(re.findall(r'env = "(\w+)"', text), "a value that is set"))
    assert list(loaded.config.source) == [preset]
    assert len(loaded.config.route) == 1
    assert not loaded.warnings


def test_a_file_that_is_there_is_never_touched(run: Run, folder: Path) -> None:
    (folder / "oncehook.toml").write_text("# mine")
    asked = ("init", "--from", "stripe", "--to", "python", "--store", "sqlite:./x.db")
    done = run(*asked)
    assert (done.code, done.out) == (1, "")
    assert (folder / "oncehook.toml").read_text() == "# mine"
    assert run(*asked, "--file", "other.toml").out == "other.toml\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--from", "strip", "--to", "python", "--store", "sqlite:./x.db"), 'Did you mean "stripe"?'),
        (("--from", "stripe", "--to", "nowhere", "--store", "sqlite:./x.db"), "url"),
        (("--from", "stripe", "--to", "python", "--store", "mysql://x"), "postgresql://"),
        (("--from", "stripe", "--to", "python", "--store", "postgresql://a:canary@b/c"), "password"),
        (("--from", "stripe"), "--to"),
    ],
)
def test_what_cannot_be_is_not_written(run: Run, folder: Path, options: tuple[str, ...], says: str) -> None:
    done = run("init", *options)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "canary" not in done.err
    assert not list(folder.iterdir())


def test_on_a_terminal_it_asks_three_questions(folder: Path, begin: Callable[..., Process]) -> None:
    asking = begin(folder, "init", terminal=True)
    asking.wait_for("Where do hooks come from?")
    asking.type("stripe, github\n")
    asking.wait_for("Where do they go?")
    asking.type("\n")
    asking.wait_for("Which store?")
    asking.type("\n")
    asking.process.wait()
    assert asking.end() == 0
    settings = load(folder / "oncehook.toml", secrets=False).config
    assert (list(settings.source), settings.store) == (["stripe", "github"], "sqlite:./oncehook.db")
    assert "oncehook serve app:inbox" in asking.out
