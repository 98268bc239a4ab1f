"""`[server.oidc]`: what is missing or unsafe is found before anybody signs in."""

from __future__ import annotations

import sys

import pytest
from tests.unit.config_cases import CANARY, loads, refused

from oncehook.errors import ConfigError
from oncehook.settings.describe import reference, schema
from oncehook.web.oidc import check_installed

ENV = {"OIDC_SECRET": CANARY}
WHOLE = """
issuer = "https://id.example"
client_id = "inbox"
client_secret = { env = "OIDC_SECRET" }
public_url = "https://hooks.example"
roles = { admin = ["ops"], viewer = "staff" }
"""


def oidc(text: str) -> str:
    return f"[server.oidc]\n{text}\n"


def without(name: str) -> str:
    return oidc("\n".join(line for line in WHOLE.splitlines() if not line.startswith(name)))


def test_the_whole_of_it() -> None:
    loaded = loads(oidc(WHOLE + 'email_domains = ["Example.org"]\nallow_private = ["10.0.0.0/8"]'), ENV)
    found = loaded.config.server.oidc
    assert found is not None
    assert found.roles == {"admin": ("ops",), "viewer": ("staff",)}
    assert (found.roles_claim, found.scopes) == ("groups", ("openid", "email", "profile"))
    assert found.email_domains == ("example.org",)
    shown = {one.name: one.value for one in loaded.settings()}
    assert shown["server.oidc.client_secret"] == "env:OIDC_SECRET (set)"
    assert CANARY not in str(shown)


@pytest.mark.parametrize("name", ["issuer", "client_id", "client_secret", "public_url", "roles"])
def test_what_is_missing_is_named(name: str) -> None:
    assert refused(without(name), ENV) == [f'oncehook.toml:1: [server.oidc] needs "{name}"']


def test_a_secret_that_is_not_set_is_named() -> None:
    (line,) = refused(oidc(WHOLE))
    assert "OIDC_SECRET is not set" in line


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("issuer", '"http://id.example"', "must begin with https://"),
        ("issuer", '"https://id.example/?tenant=1"', "must not hold a query"),
        ("issuer", '"id.example"', "must be a web address"),
        ("public_url", '"http://hooks.example"', "must begin with https://"),
        ("public_url", '"https://hooks.example/#x"', "fragment"),
        ("client_secret", f'"{CANARY}"', "must be a reference"),
        ("roles", "{}", "must say who gets which role"),
        ("roles", '["ops"]', "must say who gets which role"),
        ("roles", '{ amdin = ["ops"] }', 'did you mean "admin"?'),
        ("roles", "{ admin = [7] }", "must be text in quotes"),
        ("scopes", '["email"]', 'must hold "openid"'),
        ("scopes", '["openid", "a b"]', "must be a list of words"),
        ("email_domains", '["@example.org"]', "is not a domain"),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(setting: str, value: str, said: str) -> None:
    lines = refused(f"{without(setting)}{setting} = {value}\n", ENV)
    assert len(lines) == 1
    assert said in lines[0]
    assert CANARY not in lines[0]


def test_this_machine_needs_no_tls() -> None:
    text = without("issuer").replace("https://hooks.example", "http://127.0.0.1:4020")
    assert loads(f'{text}issuer = "http://localhost:9400"\n', ENV).config.server.oidc


def test_a_public_address_may_have_people_instead_of_a_token() -> None:
    public = '[server]\nhost = "0.0.0.0"\npublic_without_tls = true\n'
    assert "admin_token" in refused(public)[0]
    assert loads(public + oidc(WHOLE), ENV)
    broken = refused(public + without("issuer"), ENV)
    assert broken == ['oncehook.toml:4: [server.oidc] needs "issuer"'], "one thing is wrong, not two"


def test_a_missing_package_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joserfc", None)
    assert refused(oidc(WHOLE), ENV) == [
        "oncehook.toml:1: [server.oidc] needs a package that is not installed; run pip install 'oncehook[oidc]'"
    ]
    with pytest.raises(ConfigError) as caught:
        check_installed()
    assert caught.value.hint == "Run: pip install 'oncehook[oidc]'"


def test_the_environment_may_say_it() -> None:
    env = ENV | {"ONCEHOOK_SERVER__OIDC__CLIENT_ID": "other"}
    found = loads(oidc(WHOLE), env).config.server.oidc
    assert found is not None
    assert found.client_id == "other"


def test_editors_and_people_are_told() -> None:
    assert schema()["$defs"]["OidcConfig"]["required"] == [
        "issuer",
        "client_id",
        "client_secret",
        "public_url",
        "roles",
    ]
    assert "## `[server.oidc]`" in reference()
