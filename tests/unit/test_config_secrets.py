"""What must not leak and what must not stand open: secrets by reference (S4, S25, S26), public addresses (S28)."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import traceback
from pathlib import Path

import msgspec
import pytest
from config_cases import BEARER, CANARY, EXAMPLE, EXAMPLE_ENV, destination, loads, refused, source, write

from oncehook.errors import ConfigError
from oncehook.secret import weakness
from oncehook.settings import Loaded, Secret, check_bind, load
from oncehook.settings.check import is_for_loopback, is_unverified

# -- secrets (S4, S25, S26) --------------------------------------------------------------------


def secret_of(loaded: Loaded) -> Secret:
    return loaded.config.source["orders"].secret[0]


def test_a_secret_in_the_environment() -> None:
    loaded = loads(source('secret = { env = "ORDERS" }', BEARER), {"ORDERS": CANARY})
    assert secret_of(loaded).reveal() == CANARY.encode()


def test_the_bytes_of_the_environment_are_kept() -> None:
    odd = b"\xff\xfe-\xc3\xa4"
    loaded = loads(source('secret = { env = "ORDERS" }', BEARER), {"ORDERS": odd.decode("utf-8", "surrogateescape")})
    assert secret_of(loaded).reveal() == odd


def test_a_secret_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "orders.secret").write_bytes(CANARY.encode() + b"\n")
    path = write(tmp_path, source('secret = { file = "orders.secret" }', BEARER), "etc/oncehook.toml")
    loaded = load(path.relative_to(tmp_path), {}, tmp_path)
    assert secret_of(loaded).reveal() == CANARY.encode()
    assert secret_of(loaded).name == "file:orders.secret"


def test_a_secret_from_systemd(tmp_path: Path) -> None:
    (tmp_path / "orders").write_bytes(CANARY.encode())
    text = source('secret = { credential = "orders" }', BEARER)
    assert secret_of(loads(text, {"CREDENTIALS_DIRECTORY": str(tmp_path)})).reveal() == CANARY.encode()


@pytest.mark.parametrize(
    ("reference", "env", "fragments"),
    [
        ('{ env = "ORDERS" }', {}, ["environment variable ORDERS is not set", "source.orders.secret"]),
        ('{ env = "ORDERS" }', {"ORDERS": ""}, ["env:ORDERS is empty", "source.orders.secret"]),
        ('{ env = "ORDERS" }', {"ORDERS": " \n"}, ["env:ORDERS is empty"]),
        ('[{ env = "NEW" }, { env = "OLD" }]', {"NEW": "x"}, ["environment variable OLD is not set"]),
        ('{ file = "nowhere" }', {}, ['file "nowhere" cannot be read', "source.orders.secret"]),
        ('{ file = "." }', {}, ['file "." cannot be read']),
        ('{ credential = "orders" }', {}, ["CREDENTIALS_DIRECTORY is not set"]),
        ('{ credential = "orders" }', {"CREDENTIALS_DIRECTORY": "."}, ['credential "orders" cannot be read']),
    ],
)
def test_a_missing_or_empty_secret_is_refused(reference: str, env: dict[str, str], fragments: list[str]) -> None:
    (line,) = refused(source(f"secret = {reference}", BEARER), env)
    assert line.startswith("oncehook.toml:3: ")
    assert all(fragment in line for fragment in fragments)


# -- old secrets (S6) --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "ends"),
    [
        ("2026-12-01", "2026-12-02T00:00:00+00:00"),
        ('"2026-12-01"', "2026-12-02T00:00:00+00:00"),
        ("2026-12-01T10:00:00Z", "2026-12-01T10:00:00+00:00"),
        ("2026-12-01T10:00:00+02:00", "2026-12-01T08:00:00+00:00"),
        ('"2026-12-01T10:00:00"', "2026-12-01T10:00:00+00:00"),
        ("2026-12-01 10:00:00", "2026-12-01T10:00:00+00:00"),
    ],
)
def test_an_old_secret_has_an_end(until: str, ends: str) -> None:
    text = source(f'secret = [{{ env = "NEW" }}, {{ env = "OLD", until = {until} }}]', BEARER)
    loaded = loads(text, {"NEW": "new-" + CANARY, "OLD": CANARY})
    new, old = loaded.config.source["orders"].secret
    assert new.until is None
    assert old.until is not None
    assert old.until.isoformat() == ends
    assert old.reveal() == CANARY.encode()
    [shown] = [one.value for one in loaded.settings() if one.name == "source.orders.secret"]
    assert shown == ["env:NEW (set)", f"env:OLD (set, until {old.until:%Y-%m-%d %H:%M} UTC)"]


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ('[{ env = "A", until = 2026-12-01 }]', "a secret without until"),
        ('[{ env = "A", until = 2026-12-01 }, { env = "B", until = 2027-12-01 }]', "a secret without until"),
        ('{ env = "A", until = 2026-12-01 }', "must be one reference"),
        ('[{ env = "A" }, { env = "B", until = "soon" }]', "until must be a date"),
        ('[{ env = "A" }, { env = "B", until = 20261201 }]', "until must be a date"),
        ('[{ env = "A" }, { env = "B", until = true }]', "until must be a date"),
        ('[{ env = "A" }, { env = "B", until = 9999-12-31 }]', "until must be a date"),
        ('[{ env = "A" }, { until = 2026-12-01 }]', "must be one reference"),
    ],
)
def test_an_end_that_cannot_be_meant_is_refused(value: str, fragment: str) -> None:
    (line,) = refused(source(f"secret = {value}", BEARER), {"A": "a", "B": "b"})
    assert fragment in line


def test_what_signs_outgoing_requests_has_no_end() -> None:
    (line,) = refused(destination('sign = [{ env = "A" }, { env = "B", until = 2026-12-01 }]'), {"A": "a", "B": "b"})
    assert "must be one reference" in line


def test_an_empty_file_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    assert "file:empty is empty" in refused(source('secret = { file = "empty" }', BEARER), folder=tmp_path)[0]


def test_a_secret_that_goes_missing_later_is_refused_too() -> None:
    loaded = loads(source('secret = { env = "ORDERS" }', BEARER), {}, secrets=False)
    assert not secret_of(loaded).is_set()
    with pytest.raises(ConfigError, match=r"ORDERS is not set; source\.orders\.secret needs it"):
        secret_of(loaded).reveal()


@pytest.mark.parametrize(
    "value",
    [
        f'"{CANARY}"',
        f'["{CANARY}"]',
        f'{{ value = "{CANARY}" }}',
        f'{{ env = "{CANARY}" }}',
        f'{{ env = "A", file = "{CANARY}" }}',
        f'{{ credential = "../{CANARY}" }}',
        "{ env = 3 }",
        '{ env = "" }',
        "[]",
        "{}",
        "true",
    ],
)
@pytest.mark.parametrize("key", ["secret", "verify_token"])
def test_a_secret_is_a_reference_and_never_repeated(key: str, value: str) -> None:
    lines = refused(source(f"{key} = {value}", BEARER if key == "secret" else 'verify = "none"'), {"A": "a"})
    assert len(lines) == 1
    assert key in lines[0]
    assert CANARY not in lines[0]


@pytest.mark.parametrize(
    "text",
    [
        f'[server]\nadmin_token = "{CANARY}"',
        f'[[server.tokens]]\nname = "a"\nrole = "admin"\ntoken = "{CANARY}"',
        destination(f'sign = "{CANARY}"'),
        destination(f'headers = {{ Authorization = "{CANARY}" }}'),
        destination(f'headers = {{ X-Api-Key = "{CANARY}" }}'),
        f'[destination.n8n]\nurl = "https://bob:{CANARY}@x.example/"',
        f'store = "mysql://bob:{CANARY}@db/x"',
        source(f'path = "{CANARY}/"'),
    ],
)
def test_secrets_in_the_wrong_place_are_refused_without_repeating_them(text: str) -> None:
    assert CANARY not in "\n".join(refused(text))


def test_a_plain_secret_is_told_how_to_be_written() -> None:
    (line,) = refused(source('secret = "x"', BEARER))
    assert 'write { env = "NAME" }, { file = "path" } or { credential = "name" }' in line


def test_nothing_that_prints_copies_or_encodes_a_secret_shows_it() -> None:
    loaded = loads(EXAMPLE, EXAMPLE_ENV | {"ONCEHOOK_STORE": f"postgresql://bob:{CANARY}@db/x?sslpassword={CANARY}"})
    secret = loaded.config.source["partner"].secret[0]
    said = [f"{thing!r} {thing}" for thing in (secret, loaded, loaded.config, loaded.config.source, loaded.warnings)]
    said += [str(dataclasses.asdict(secret)), str(copy.deepcopy(secret)), str(vars_of(secret))]
    said += [json.dumps([dataclasses.asdict(one) for one in loaded.settings()])]
    assert CANARY not in "".join(said)
    for encode in (msgspec.json.encode, msgspec.to_builtins, pickle.dumps):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            encode(secret)
    with pytest.raises(dataclasses.FrozenInstanceError):
        secret.reference = "OTHER"  # type: ignore[misc]


def vars_of(thing: object) -> dict[str, object]:
    return {name: getattr(thing, name) for name in type(thing).__slots__}  # type: ignore[attr-defined]


def test_a_traceback_with_locals_shows_no_secret(tmp_path: Path) -> None:
    write(tmp_path, source('secret = [{ env = "A" }, { env = "B" }]', BEARER))
    for action in (
        lambda: load(None, {"A": CANARY}, tmp_path),
        lambda: load(None, {"A": CANARY}, tmp_path, secrets=False).config.source["orders"].secret[1].reveal(),
    ):
        with pytest.raises(ConfigError) as caught:
            action()
        told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        inside = [line for line in told.format() if "test_config.py" not in line]
        assert CANARY not in "".join(inside)


# -- open doors (S28) --------------------------------------------------------------------------

TOKEN = "oht_" + "0123456789abcdef" * 4
SAFE = 'admin_token = { env = "T" }\ntrusted_proxies = ["10.0.0.0/8"]\n'


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "hooks.example", "127.0.0.1.nip.example", "127.1"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", ["add admin_token", "add to [server] trusted_proxies"]),
        ('admin_token = { env = "T" }', ["add to [server] trusted_proxies"]),
        ("public_without_tls = true", ["add admin_token"]),
        ('trusted_proxies = ["10.0.0.0/8"]', ["add admin_token"]),
        (SAFE, []),
        ('admin_token = { env = "T" }\npublic_without_tls = true', []),
        ('public_without_tls = true\n[[server.tokens]]\nname = "a"\nrole = "admin"\ntoken = { env = "T" }', []),
    ],
)
def test_a_public_host_needs_a_credential_and_tls(host: str, settings: str, expected: list[str]) -> None:
    text = f'[server]\nhost = "{host}"\n{settings}'
    if not expected:
        assert loads(text, {"T": TOKEN}).config.server.host == host
        return
    lines = refused(text, {"T": TOKEN})
    assert len(lines) == len(expected)
    for line, fragment in zip(lines, expected, strict=True):
        assert line.startswith("oncehook.toml:2: ")
        assert fragment in line


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert loads(f'[server]\nhost = "{host}"').config


def test_a_public_admin_bind_is_a_public_host() -> None:
    assert len(refused('[server]\nadmin_bind = "0.0.0.0:4021"')) == 2


def test_a_public_host_by_environment_or_flag_is_checked_too() -> None:
    lines = refused("", {"ONCEHOOK_SERVER__HOST": "0.0.0.0"})
    assert [line.partition(": ")[0] for line in lines] == ["environment ONCEHOOK_SERVER__HOST"] * 2
    lines = refused("", {}, flags={"server.host": "0.0.0.0"})
    assert [line.partition(": ")[0] for line in lines] == ["flag --host"] * 2


def test_unverified_on_a_public_host_needs_consent() -> None:
    server = f'[server]\nhost = "0.0.0.0"\n{SAFE}'
    for verify in ('verify = "none"', 'verify = { scheme = "none" }'):
        (line,) = refused(server + source("", verify), {"T": TOKEN})
        assert 'verify = { scheme = "none", confirm = "anyone may send" }' in line
        assert is_for_loopback(loads(source("", verify)).config.source["orders"])
    consent = 'verify = { scheme = "none", confirm = "anyone may send" }'
    orders = loads(server + source("", consent), {"T": TOKEN}).config.source["orders"]
    assert is_unverified(orders)
    assert not is_for_loopback(orders)


def test_another_host_than_the_configured_one() -> None:
    config = loads(source()).config
    check_bind(config, "127.0.0.1")
    with pytest.raises(ConfigError) as caught:
        check_bind(config, "0.0.0.0")
    assert len(str(caught.value).splitlines()) == 3
    safe = loads(f"[server]\n{SAFE}", {"T": TOKEN}).config
    check_bind(safe, "0.0.0.0")


# -- what could be guessed ---------------------------------------------------------------------

WEAK = ["x", "fifteen-letters", "a" * 40, "12345678" * 3, "changeme" * 4, "ana-" + "a" * 40]
STRONG = [TOKEN, "k3Jw9qXz7LpV2mRt", "0f9a3c71e5d2b846", "correct horse battery staple"]


@pytest.mark.parametrize("token", WEAK)
@pytest.mark.parametrize("at", ['host = "0.0.0.0"', 'admin_bind = "0.0.0.0:4021"'])
def test_a_token_that_can_be_guessed_is_refused_on_a_public_address(token: str, at: str) -> None:
    (line,) = refused(f"[server]\n{at}\n{SAFE}", {"T": token})
    assert "admin_token in [server]" in line
    assert "public address" in line
    assert "oncehook token" in line
    assert token not in line.replace("letters", "")
    named = f'[server]\n{at}\n{SAFE}tokens = [{{ name = "vera", role = "viewer", token = {{ env = "V" }} }}]\n'
    (line,) = refused(named, {"T": TOKEN, "V": token})
    assert 'the token of "vera" in [server]' in line


@pytest.mark.parametrize("token", WEAK)
def test_elsewhere_a_token_that_can_be_guessed_is_warned_of(token: str) -> None:
    (warning,) = loads(f"[server]\n{SAFE}", {"T": token}).warnings
    assert "admin_token in [server]" in warning
    assert "oncehook token" in warning


@pytest.mark.parametrize("token", STRONG)
def test_a_token_that_cannot_be_guessed_passes(token: str) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        assert loads(f'[server]\nhost = "{host}"\n{SAFE}', {"T": token}).warnings == ()


def test_another_host_is_refused_for_a_token_that_can_be_guessed() -> None:
    config = loads(f"[server]\n{SAFE}", {"T": "secret"}).config
    with pytest.raises(ConfigError, match="is shorter than 16 characters"):
        check_bind(config, "0.0.0.0")


def test_a_sources_secret_that_can_be_guessed_is_warned_of() -> None:
    for secret in ("seven77", "aaaaaaaaaaaa"):
        (warning,) = loads(source('secret = { env = "S" }', BEARER), {"S": secret}).warnings
        assert "secret in [source.orders]" in warning
        assert secret not in warning
    assert loads(source('secret = { env = "S" }', BEARER), {"S": "eight-88"}).warnings == ()


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        ("hunter2hunter2", "repeats itself"),
        ("aaaaaaaa", "repeats itself"),
        ("abcdefgh123456", "counts up"),
        ("0123456789abcdef", "counts up"),
        ("87654321", "counts down"),
        ("aabababaab", "has few different characters"),
        ("eight-8e", ""),
    ],
)
def test_it_is_told_why_a_secret_can_be_guessed(secret: str, why: str) -> None:
    assert weakness(secret.encode(), 8) == why
