"""Definitions from staging to production: exported as TOML, imported once or again, without a secret."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from oncehook import clock
from tests.acceptance.test_admin_cli import Done

Run = Callable[..., Done]
Place = Callable[[str], None]


@pytest.fixture
def go_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Go to the folder of another inbox, which has a key of its own."""

    def go_to(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        Path("oncehook.toml").write_text('store = "sqlite:./inbox.db"\n')
        monkeypatch.setenv("ONCEHOOK_SECRET_KEY", clock.random_bytes(32).hex())
        good(run, "db", "migrate")

    return go_to


def good(run: Run, *arguments: str) -> Done:
    done = run(*arguments)
    assert done.code == 0, done
    return done


def test_definitions_and_accounts_are_carried_without_secrets(run: Run, go_to: Place, tmp_path: Path) -> None:
    go_to("staging")
    secrets = [
        good(run, "sources", "create", "shop", "preset=shopify", "secret=generate", "account=address", "--json").json,
        good(run, "destinations", "create", "crm", "url=https://crm.example/in", "sign=generate", "--json").json,
    ]
    good(run, "sources", "create", "quiet", "preset=n8n", "secret=generate")
    good(run, "sources", "disable", "quiet")
    good(run, "routes", "create", "from=shop", "to=crm", 'when={type="orders/*"}')
    made = good(run, "accounts", "create", "a@b.example", "--name", 'Ana "A"', "--alias", "n2", "--alias", "n1",
                "--secret", "shop=generate", "--json").json  # fmt: skip
    good(run, "accounts", "create", "43")
    good(run, "accounts", "change", "43", "--disable")
    file = tmp_path / "definitions.toml"
    good(run, "export", "--definitions", "--output", str(file))
    told = [*(one["secret"] for one in secrets), made["secrets"]["shop"]]
    assert all(told)
    assert not [secret for secret in told if secret in file.read_text()]
    tree = tomllib.loads(file.read_text())
    assert tree["account"] == {
        "a@b.example": {"name": 'Ana "A"', "aliases": ["n1", "n2"], "secrets": {"shop": "generate"}},
        "43": {"enabled": False},
    }

    go_to("production")
    would = good(run, "import", "definitions", str(file), "--dry-run").out
    assert would.endswith("6 definitions read, 6 would be made, 0 would be changed\n")
    assert good(run, "accounts", "--json").json["items"] == []
    imported = good(run, "import", "definitions", str(file), "--json").json["items"]
    assert [(one["noun"], one["new"]) for one in imported] == [
        ("source", True), ("source", True), ("account", True), ("account", True), ("destination", True), ("route", True)
    ]  # fmt: skip
    new = [one["secret"] for one in imported if one.get("secret")] + [
        secret for one in imported for secret in one.get("secrets", {}).values()
    ]
    assert len(new) == 4
    assert not set(new) & set(told), "each inbox has its own"
    again = tmp_path / "again.toml"
    good(run, "export", "--definitions", "--output", str(again))
    assert again.read_text() == file.read_text()

    unchanged = good(run, "import", "definitions", str(file)).out
    assert unchanged == "6 definitions read, 0 made, 0 changed\n"
    file.write_text(file.read_text().replace('["n1", "n2"]', '["n3"]').replace("enabled = false", ""))
    changed = good(run, "import", "definitions", str(file)).out.splitlines()
    assert changed == [
        "changed source quiet",
        "changed account 43",
        "changed account a@b.example",
        "6 definitions read, 0 made, 3 changed",
    ]
    kept = good(run, "accounts", "show", "a@b.example", "--json").json
    assert (kept["aliases"], kept["secret_sources"]) == (["n3"], ["shop"])


def test_what_cannot_be_imported_says_so(run: Run, go_to: Place, tmp_path: Path) -> None:
    go_to("production")
    file = tmp_path / "definitions.toml"
    file.write_text("[acount.42]\n")
    refused = run("import", "definitions", str(file))
    assert (refused.code, "[account.ID]" in refused.err) == (2, True)
    file.write_text('[account.42]\nsecrets = { shop = "generate" }\n')
    refused = run("import", "definitions", str(file))
    assert (refused.code, 'there is no source "shop"' in refused.err) == (1, True), refused
    file.write_text('[account.42]\nalias = ["n1"]\n')
    refused = run("import", "definitions", str(file))
    assert refused.code != 0, "a word that is none is not passed over"
    assert good(run, "accounts", "--json").json["items"] == []
