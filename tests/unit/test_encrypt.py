"""The key of encryption at rest, as settings and programs name it: read, refused, and never shown (S4, S25, S37)."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import pytest
from config_cases import loads, refused, write

from oncehook import Inbox
from oncehook.errors import ConfigError, Undecryptable
from oncehook.settings import load
from oncehook.store.cipher import ENCRYPTED, OVERHEAD, Cipher, read_key

KEY, OTHER = bytes(range(32)), bytes(range(50, 82))
TEXT, OTHER_TEXT = base64.b64encode(KEY).decode(), OTHER.hex()
ROW = bytes(range(16))


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [TEXT, TEXT.rstrip("="), TEXT + "\n", base64.urlsafe_b64encode(KEY).decode(), KEY.hex(), KEY.hex().upper()],
)
def test_a_key_is_32_bytes_in_base64_or_hex(text: str) -> None:
    assert read_key(text.encode()) == KEY


@pytest.mark.parametrize(
    "text",
    ["canary", "canary " * 20, TEXT[:-4], TEXT + "AAAA", KEY.hex()[:-1] + "g", "0" * 64, "A" * 43, "ab" * 32, "é" * 32],
)
def test_anything_else_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="32 random bytes") as caught:
        read_key(text.encode())
    assert "openssl rand -base64 32" in caught.value.hint
    assert text not in str(caught.value)


# -- values --------------------------------------------------------------------------------------


def test_an_encrypted_value_tells_its_key_and_is_longer_by_so_much() -> None:
    cipher = Cipher([KEY, OTHER])
    kept = cipher.encrypt(b"x" * 1000, "body", ROW)
    assert kept.startswith(ENCRYPTED + bytes.fromhex(cipher.key_ids[0]))
    assert len(kept) == 1000 + OVERHEAD
    assert Cipher([OTHER, KEY]).decrypt(kept, "body", ROW) == b"x" * 1000


def test_nothing_stays_nothing() -> None:
    for nothing in (b"", None):
        assert Cipher([KEY]).encrypt(nothing, "body", ROW) == nothing
        assert Cipher([KEY]).decrypt(nothing, "body", ROW) == nothing


def test_a_value_belongs_to_its_column_and_row() -> None:
    cipher = Cipher([KEY])
    kept = cipher.encrypt(b"x", "body", ROW)
    for column, row in (("head", ROW), ("answer", ROW), ("batch body", ROW), ("body", ROW[::-1])):
        with pytest.raises(Undecryptable, match="moved"):
            cipher.decrypt(kept, column, row)


def test_neither_key_nor_cipher_shows_a_key() -> None:
    cipher = Cipher([KEY])
    for shown in (repr(cipher), str(cipher.__dict__), repr(cipher.key_ids)):
        assert repr(KEY)[2:20] not in shown
        assert KEY.hex() not in shown


def test_a_key_that_is_given_twice_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="twice"):
        Cipher([KEY, OTHER, KEY])


def test_a_missing_library_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match="cryptography") as caught:
        Inbox(f"sqlite:{tmp_path / 'inbox.db'}", encrypt=TEXT)
    assert "pip install cryptography" in caught.value.hint
    Inbox(f"sqlite:{tmp_path / 'inbox.db'}")


# -- settings ------------------------------------------------------------------------------------


def test_one_key_or_several() -> None:
    env = {"NEW": TEXT, "OLD": OTHER_TEXT}
    for text, keys, encrypts in (
        ('encrypt = { key = { env = "NEW" } }', [KEY], True),
        ('[encrypt]\nkey = [{ env = "NEW" }, { env = "OLD" }]', [KEY, OTHER], True),
        ('encrypt = { key = { env = "OLD" }, decrypt_only = true }', [OTHER], False),
    ):
        cipher = Inbox.from_loaded(loads(text, env)).store.cipher
        assert (cipher.key_ids, cipher.encrypts) == (Cipher(keys).key_ids, encrypts)
    assert not Inbox.from_loaded(loads("")).store.cipher.has_keys


def test_the_environment_alone_may_hold_the_key() -> None:
    loaded = loads("", {"ONCEHOOK_ENCRYPT__KEY": TEXT})
    assert Inbox.from_loaded(loaded).store.cipher == Cipher([KEY])


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("encrypt = {}", '[encrypt] needs "key"'),
        ("encrypt = true", "must be a table"),
        (f'encrypt = {{ key = "{TEXT}" }}', "never the secret itself"),
        ("encrypt = { key = [] }", "at least one secret"),
        ('encrypt = { key = { env = "NONE" } }', "NONE is not set"),
        ('encrypt = { key = { env = "WORD" } }', "32 random bytes"),
        ('encrypt = { key = [{ env = "NEW" }, { env = "WORD" }] }', "32 random bytes"),
        ('encrypt = { keys = { env = "NEW" } }', 'did you mean "key"?'),
    ],
)
def test_settings_that_would_encrypt_nothing_are_refused(text: str, fragment: str) -> None:
    said = "\n".join(refused(text, {"NEW": TEXT, "WORD": "canary-word"}))
    assert fragment in said
    assert TEXT not in said
    assert "canary" not in said


# -- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encrypt",
    [
        TEXT,
        TEXT.encode(),
        [TEXT],
        {"key": {"env": "INBOX_KEY"}},
        {"key": [{"env": "INBOX_KEY"}], "decrypt_only": False},
    ],
)
def test_a_program_names_it_as_text_or_as_settings_do(encrypt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INBOX_KEY", TEXT)
    assert Inbox(encrypt=encrypt).store.cipher == Cipher([KEY])


def test_a_program_may_only_decrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INBOX_KEY", TEXT)
    assert not Inbox(encrypt={"key": {"env": "INBOX_KEY"}, "decrypt_only": True}).store.cipher.encrypts


@pytest.mark.parametrize("encrypt", ["", "canary", [], {}, {"key": TEXT}, {"keys": {"env": "HOME"}}, [TEXT, "canary"]])
def test_what_a_program_says_wrongly_is_refused(encrypt: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Inbox(encrypt=encrypt)
    assert TEXT not in str(caught.value)


def test_the_file_beside_an_app_brings_the_key(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, 'encrypt = { key = { env = "NEW" } }'), {"NEW": TEXT}, whole=False)
    inbox = Inbox()
    inbox.add_settings(loaded)
    assert inbox.store.cipher == Cipher([KEY])
    Inbox(encrypt=TEXT).add_settings(loaded)
    with pytest.raises(ConfigError, match="encrypt is set by the program too"):
        Inbox(encrypt=OTHER_TEXT).add_settings(loaded)
