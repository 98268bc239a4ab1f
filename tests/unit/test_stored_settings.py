"""Definitions as data: what is stored of settings, how secrets are kept, made and rotated, and who may give what."""

from __future__ import annotations

import base64
import json
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from oncehook.errors import ConfigError, Forbidden, InvalidSettings, SecretKeyMissing, Undecryptable
from oncehook.model import Noun, StoredDefinition
from oncehook.settings import stored
from oncehook.settings.stored import Vault, make_key_file, open_vault, read_draft
from oncehook.store.cipher import Cipher

KEYS = [bytes(range(n, n + 32)) for n in (0, 100)]
NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
HMAC = {"scheme": "hmac", "header": "X-Signature"}


def row(vault: Vault, noun: Noun, name: str, given: dict[str, Any]) -> StoredDefinition:
    draft = read_draft(noun, name, given)
    secrets = vault.encrypt(noun, name, draft.secret)
    return StoredDefinition(noun, name, 1, None, None, *draft.ends, stored.encode(draft), secrets, True, 1, NOW, NOW)


def test_secrets_are_kept_apart_and_shown_as_set() -> None:
    vault = Vault(Cipher(KEYS[:1]))
    kept = row(
        vault, Noun.source, "s", {"verify": HMAC, "secret": "canary-secret-1", "path": "canary-path", "key": "$.id"}
    )
    assert "canary" not in kept.settings
    assert b"canary" not in (kept.secrets or b"")
    assert stored.show(kept) == {"verify": HMAC, "key": "$.id", "secret": "(set)", "path": "(set)"}
    built = stored.source_from(vault, kept)
    assert (built.secrets, built.path) == ((b"canary-secret-1",), "canary-path")


def test_a_secret_is_bound_to_its_definition_and_its_key() -> None:
    vault = Vault(Cipher(KEYS[:1]))
    kept = row(vault, Noun.source, "s", {"verify": HMAC, "secret": "canary-secret-1"})
    import msgspec

    for other in (
        lambda: vault.decrypt(msgspec.structs.replace(kept, name="t")),
        lambda: Vault(Cipher(KEYS[1:])).decrypt(kept),
        lambda: Vault(Cipher()).decrypt(kept),
    ):
        with pytest.raises(Undecryptable, match="cannot be read here"):
            other()
    assert Vault(Cipher(KEYS[::-1])).decrypt(kept) == {"secret": "canary-secret-1"}


def test_without_a_key_nothing_secret_is_stored() -> None:
    with pytest.raises(SecretKeyMissing):
        Vault(Cipher()).encrypt(Noun.source, "s", {"secret": "x"})
    assert Vault(Cipher()).encrypt(Noun.route, "rte_1", {}) is None


def test_keys_come_from_the_environment_then_from_a_file(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'inbox.db'}"
    assert not open_vault(url, {}).has_key
    made = make_key_file(url, {})
    assert made is not None
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert make_key_file(url, {}) is None, "it is made once"
    assert open_vault(url, {}).has_key
    texts = [base64.b64encode(key).decode() for key in KEYS]
    both = open_vault(url, {"ONCEHOOK_SECRET_KEY": ", ".join(texts)})
    old = Vault(Cipher(KEYS[1:])).encrypt(Noun.source, "s", {"secret": "x"})
    kept = StoredDefinition(Noun.source, "s", 1, None, None, None, None, "{}", old, True, 1, NOW, NOW)
    assert both.decrypt(kept) == {"secret": "x"}
    with pytest.raises(ConfigError, match="ONCEHOOK_SECRET_KEY: An encryption key"):
        open_vault(url, {"ONCEHOOK_SECRET_KEY": "too short"})
    assert make_key_file("postgresql://db/inbox", {}) is None


def test_a_rotated_secret_ends_when_it_was_to_end_at_the_latest() -> None:
    once = stored.rotate("old", "new", 3600, NOW)
    end = (NOW + timedelta(hours=1)).isoformat()
    assert once == ["new", {"value": "old", "until": end}]
    later = NOW + timedelta(minutes=30)
    twice = stored.rotate(once, "newer", 7200, later)
    assert twice == [
        "newer",
        {"value": "new", "until": (later + timedelta(hours=2)).isoformat()},
        {"value": "old", "until": end},
    ]
    assert stored.rotate(twice, "newest", 0, later) == ["newest"]
    assert "old" not in json.dumps(stored.hide(once))


def test_generated_secrets_fit_their_scheme() -> None:
    assert str(
        read_draft(Noun.source, "s", {"verify": "standard-webhooks", "secret": "generate"}).generated
    ).startswith("whsec_")
    assert read_draft(Noun.source, "s", {"preset": "n8n", "secret": "generate"}).generated
    with pytest.raises(InvalidSettings, match="cannot be generated"):
        read_draft(Noun.source, "s", {"preset": "discord", "secret": "generate"})


@pytest.mark.parametrize(
    ("noun", "given", "privileged"),
    [
        (Noun.source, {"verify": HMAC, "secret": "generate"}, []),
        (Noun.source, {"verify": HMAC, "secret": {"env": "HOME"}}, ["secret"]),
        (Noun.source, {"verify": "none"}, ["verify"]),
        (Noun.source, {"verify": HMAC, "secret": "generate", "path": "a-path"}, ["path"]),
        (Noun.destination, {"url": "https://crm.example/"}, []),
        (Noun.destination, {"url": {"env": "HOME"}}, ["url"]),
        (Noun.destination, {"url": "https://crm.example/", "headers": {"X-A": {"file": "/etc/hostname"}}}, ["headers"]),
        (Noun.destination, {"url": "https://crm.example/", "allow_private": ["10.0.0.0/8"]}, ["allow_private"]),
        (Noun.destination, {"url": "{$.back}", "allow_hosts": ["crm.example"]}, ["allow_hosts", "url"]),
    ],
)
def test_what_reaches_into_the_server_is_found(
    noun: Noun, given: dict[str, Any], privileged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HOME", "https://home.example/")
    assert read_draft(noun, "one", given).privileged == privileged


WHATSAPP = {"preset": "whatsapp-cloud", "verify_token": "a-token-of-mine"}


@pytest.mark.parametrize(
    ("noun", "given", "setting", "said"),
    [
        (Noun.source, {"verify": "bearer", "secret": ["generate"]}, "secret", 'write secret = "generate" alone'),
        (Noun.source, {"verify": "bearer", "secret": ["my-secret-123", "generate"]}, "secret", "or rotate it"),
        (Noun.source, {"preset": "whatsapp-cloud", "secret": "my-secret-123", "verify_token": "generate"},
         "verify_token", "choose one"),
        (Noun.source, {"verify": "bearer", "secret": "(set)"}, "secret", "leave it out to keep it"),
        (Noun.source, {"verify": "bearer", "secret": ["(set, until 2026-11-18T12:00:00+00:00)"]}, "secret", "leave it"),
        (Noun.destination, {"url": "https://a.example", "headers": {"Authorization": "(set)"}}, "headers", "leave it"),
        (Noun.source, {"verify": "bearer", "secret": "short"}, "secret", "8 characters or more"),
        (Noun.source, {"verify": "bearer", "secret": "my-secret-123", "max_body": 1 << 70}, "max_body", "1 TiB"),
        (Noun.destination, {"url": "https://a.example", "ca": "/no/such/file.pem"}, "ca", "/no/such/file.pem"),
    ],
)  # fmt: skip
def test_words_that_stand_for_a_secret_are_none(noun: Noun, given: dict[str, Any], setting: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        read_draft(noun, "it", given)
    [error] = refused.value.errors
    assert error["setting"] == setting
    assert said in f"{error['error']}; {error['hint']}"


def test_media_of_private_addresses_are_not_for_an_account() -> None:
    given = {**WHATSAPP, "secret": "my-secret-123", "media": {"token": "a-token-1", "allow_private": True}}
    assert read_draft(Noun.source, "it", given).privileged == ["media"]
    with pytest.raises(Forbidden, match="media"):
        read_draft(Noun.source, "it", given, is_scoped=True)
    for media in ("keep", {"token": "a-token-of-ours"}):
        own = {**WHATSAPP, "secret": "my-secret-123", "media": media}
        assert read_draft(Noun.source, "it", own, is_scoped=True).privileged == []


def test_what_was_shown_and_is_given_back_keeps_its_secrets() -> None:
    kept = {
        "secret": ["new-secret-1", {"value": "old-secret-1", "until": "2026-11-18T12:00:00+00:00"}],
        "headers": {"Authorization": "Bearer x", "X-Team": "a"},
    }
    shown = stored.hide_all(kept)
    assert stored.restore(shown, kept) == kept
    changed = stored.restore({"headers": {"Authorization": "(set)", "X-Team": "b"}, "key": "$.id"}, kept)
    assert changed == {"headers": {"Authorization": "Bearer x", "X-Team": "b"}, "key": "$.id"}
    assert stored.restore({"secret": "(set)"}, kept) == {"secret": "(set)"}, "which is then refused"
