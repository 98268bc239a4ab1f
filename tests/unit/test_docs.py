"""What the documents say is what the program does: compared, not remembered."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from tests.conftest import BUDGET

from oncehook import presets
from oncehook.cli import COMMANDS
from oncehook.settings import load
from oncehook.settings.describe import reference
from oncehook.settings.stored import MOST_OF_ACCOUNTS
from oncehook.sources import PLAIN

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_page_of_settings_is_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLAIN.settings, "budget", BUDGET)
    assert (ROOT / "docs/reference/settings.md").read_text() == reference(), "run: oncehook config reference"


def test_the_page_of_settings_has_the_defaults_that_sources_share() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text().partition("## `[source.NAME]`")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE))
    assert all(rows[name] for name in vars(PLAIN.settings))


def test_the_page_of_accounts_has_the_most_that_customers_may_ask_for() -> None:
    page = (ROOT / "docs/how-to/accounts.md").read_text()
    limits = {key: show(most) for table in MOST_OF_ACCOUNTS.values() for key, (most, show) in table.items()}
    assert (
        dict(re.findall(r'`(\w+) = "?(\w+)"?`', page.partition("Customers may ask for")[2].partition("\n\n")[0]))
        == limits
    )


def test_every_preset_has_a_page_and_every_page_a_preset() -> None:
    pages = {page.stem for page in (ROOT / "docs/providers").glob("*.md")} - {"index"}
    assert pages == set(presets.names())


def test_the_readmes_settings_are_good(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    tomllib.loads(block)
    (tmp_path / "oncehook.toml").write_text(block)
    env = dict.fromkeys(["META_APP_SECRET", "META_VERIFY_TOKEN", "ORDERS_SECRET", "N8N_SECRET"], "set")
    assert set(load(tmp_path / "oncehook.toml", env).config.source) == {"whatsapp", "orders"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_commands_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?:`|\$ )oncehook ([a-z]+)", text))
    assert named <= set(COMMANDS), f"{page} names commands that are not there"
    scripts = set(re.findall(r"scripts/([a-z]+(?:\.py)?)", text))
    assert scripts <= {script.name for script in (ROOT / "scripts").iterdir()}


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("page", ["docs/how-to/handlers.md", "docs/how-to/emit.md"])
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a program of its own; nothing is connected to before an inbox is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRIPE_SECRET", "whsec_test")
    (tmp_path / "oncehook.toml").write_text("")
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        program = compile(snippet, page, "exec")
        if "fastapi" not in snippet:  # no dependency of ours, nor of these tests
            exec(program, {"__name__": "snippet"})


def test_every_extra_is_on_the_page_about_installing() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    page = (ROOT / "docs/how-to/install.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == extras
