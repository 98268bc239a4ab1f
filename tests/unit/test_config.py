"""The configuration as a person meets it: what is accepted, what is refused and how it is told, and what is hidden."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from oncehook.cli.config import command
from oncehook.config import Config, Loaded, RetryConfig, Secret, check_bind, load, schema
from oncehook.config.origin import scan_lines
from oncehook.errors import ConfigError

CANARY = "canary-9f1b2c"

Write = Callable[..., Path]
Loads = Callable[..., Loaded]
Refused = Callable[..., list[str]]
Run = Callable[..., Result]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "oncehook.toml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), "utf-8")
        return path

    return write


@pytest.fixture
def loads(tmp_path: Path, write: Write) -> Loads:
    """Load a text; the environment is only what the test gives."""

    def loads(text: str, env: Mapping[str, str] | None = None, **options: object) -> Loaded:
        write(text)
        return load(None, env or {}, tmp_path, **options)  # type: ignore[arg-type]

    return loads


@pytest.fixture
def refused(loads: Loads) -> Refused:
    """The lines with which a text is refused."""

    def refused(text: str, env: Mapping[str, str] | None = None, **options: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            loads(text, env, **options)
        return str(caught.value).splitlines()

    return refused


def source(settings: str = "", verify: str = 'verify = "none"') -> str:
    return f"[source.orders]\n{verify}\n{settings}\n"


def destination(settings: str) -> str:
    return f'[destination.n8n]\nurl = "https://n8n.example/x"\n{settings}\n'


EXAMPLE = """\
store = "sqlite:./oncehook.db"

[server]
host = "127.0.0.1"
port = 4020
admin_token = { env = "ONCEHOOK_TOKEN" }

[source.orders]
verify = "none"
key = ["header:X-Request-Id", "$.idempotency_key", "$.data.idempotency_key", "$.messageId"]
on_missing_key = "body_hash"
subject = "$.order.id"
keep_keys = "30d"
keep_events = "30d"

[source.partner]
verify = { scheme = "hmac", header = "X-Signature", prefix = "sha256=", algorithm = "sha256", encoding = "hex" }
secret = [{ env = "PARTNER_SECRET" }, { env = "PARTNER_SECRET_OLD" }]
key = ["$.id"]
tolerance = "off"
max_body = "4MiB"
ip_allow = ["192.0.2.0/24"]

[destination.n8n]
url = "https://n8n.example/webhook/abc"
sign = { env = "N8N_SECRET" }
timeout = "15s"
retry = { attempts = 8, base = "10s", factor = 2, cap = "6h", jitter = "full" }
rate = "50/s"
concurrency = 16
breaker = { failures = 5, open = "30s" }
lease = "10s"
allow_private = false

[[route]]
from = "orders"
to = "n8n"
when = { type = "message.*" }
coalesce = false
on_dead = "continue"

[watermark]
dead = 100
oldest_due = "5m"
daily_volume = { orders = 50 }
disk = "10%"
"""
EXAMPLE_ENV = dict.fromkeys(("ONCEHOOK_TOKEN", "PARTNER_SECRET", "PARTNER_SECRET_OLD", "N8N_SECRET"), CANARY)


# -- what is accepted --------------------------------------------------------------------------


def test_the_example_of_the_design(loads: Loads) -> None:
    config: Config = loads(EXAMPLE, EXAMPLE_ENV).config
    orders, partner, n8n = config.source["orders"], config.source["partner"], config.destination["n8n"]
    assert (orders.keep_keys, orders.on_missing_key, orders.subject) == (2_592_000, "body_hash", "$.order.id")
    assert [secret.reveal() for secret in partner.secret] == [CANARY.encode()] * 2
    assert (partner.tolerance, partner.max_body) == (math.inf, 4 << 20)
    assert partner.ip_allow == (ip_network("192.0.2.0/24"),)
    assert n8n.retry == RetryConfig(attempts=8, base=10, factor=2, cap=21_600, jitter="full")
    assert (n8n.rate, n8n.timeout, n8n.breaker.failures, n8n.breaker.open) == (50, 15, 5, 30)
    assert (config.route[0].from_, config.route[0].to) == ("orders", "n8n")
    assert config.watermark.daily_volume == {"orders": 50}
    assert config.watermark.disk == 0.1
    assert config.server.admin_token is not None
    assert config.server.admin_token.name == "env:ONCEHOOK_TOKEN"


def test_nothing_at_all_is_the_defaults(tmp_path: Path) -> None:
    loaded = load(None, {}, tmp_path)
    assert loaded.config == Config()
    assert loaded.origin is None
    assert (loaded.config.server.host, loaded.config.server.port) == ("127.0.0.1", 4020)
    assert loaded.config.store == "sqlite:./oncehook.db"
    assert loaded.where("server.port") == "default"


def test_there_are_exactly_the_settings_of_the_design() -> None:
    tables = schema()["$defs"]
    said = {
        "SourceConfig": "preset verify secret verify_token public_url tolerance path key on_missing_key on_conflict "
        "subject type event_time ignore rank rank_scope split redact volatile max_body budget keep_keys keep_events "
        "revive_dead ip_allow",
        "DestinationConfig": "url sign headers forward_headers timeout retry rate concurrency breaker lease "
        "allow_private",
        "RouteConfig": "from to when coalesce latest_wins on_dead",
        "ServerConfig": "host port admin_token tokens trusted_proxies admin_bind public_without_tls log_level",
    }
    assert {name: set(tables[name]["properties"]) for name in said} == {k: set(v.split()) for k, v in said.items()}
    top = {"store", "migrate", "retention", "watermark", "server", "source", "destination", "route"}
    assert set(schema()["properties"]) == top


@pytest.mark.parametrize(
    "text",
    [
        source('on_missing_key = "body_hash:10s"'),
        source('rank = { of = "$.status", order = ["sent", "delivered", "read"] }'),
        source('key = "none"'),
        source('key = [["$.id", "?$.action"], "header:X-Id"]'),
        source('split = "$.items"\nredact = []\nvolatile = ["$.attempt"]\nignore = ["ping", "status.*"]'),
        source('path = "Zk3v9xQ2Lm8sT4wYb6NcRd"\nbudget = "800ms"\nrevive_dead = true\non_conflict = "reject"'),
        source("", 'verify = { scheme = "none", confirm = "anyone may send" }'),
        destination('retry = ["10s", "1m", 300]'),
        destination("retry = []"),
        destination('retry = "quick"'),
        destination('retry = { jitter = "0.5s" }'),
        destination('allow_private = ["10.0.0.0/8", "fd00::/8"]'),
        destination('headers = { X-Team = "billing", Authorization = { env = "KEY" } }\nforward_headers = ["X-Trace"]'),
        'retention = "90d"',
        '[retention]\nkeep_keys = "30d"\nkeep_events = "7d"',
        '[server]\nhost = "::1"\nadmin_bind = "[::1]:4021"\ntrusted_proxies = ["10.0.0.7"]',
        '[server]\nhost = "localhost"\nlog_level = "debug"\n'
        '[[server.tokens]]\nname = "ci"\nrole = "viewer"\ntoken = { env = "KEY" }',
        'store = "postgresql://db.example/oncehook"\nmigrate = false',
    ],
)
def test_other_forms(loads: Loads, text: str) -> None:
    assert loads(text, {"KEY": "k"}).config


# -- what is refused, and how it is told -------------------------------------------------------


def test_an_unknown_key_names_file_line_and_the_nearest(refused: Refused) -> None:
    text = '\n# orders\n[source.orders]\nverify = "none"\n\nsubjct = "$.order.id"\n'
    assert refused(text) == ['oncehook.toml:6: unknown key "subjct" in [source.orders]; did you mean "subject"?']


def test_an_unknown_key_that_resembles_nothing_lists_what_there_is(refused: Refused) -> None:
    (line,) = refused("[watermark]\nzzz = 1")
    assert line == 'oncehook.toml:2: unknown key "zzz" in [watermark]; allowed: dead, oldest_due, daily_volume, disk'


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file(refused: Refused) -> None:
    lines = refused("""\
        stor = "sqlite:./x.db"
        [server]
        port = 70000
        [source.orders]
        keep_keys = "30x"
        key = ["foo:bar"]
        [destination.n8n]
        breaker = { failurs = 3 }
        [[route]]
        from = "order"
        to = "n8n"
        [[route]]
        from = "orders"
        """)
    starts = [
        'oncehook.toml:1: unknown key "stor"; did you mean "store"?',
        "oncehook.toml:3: port in [server]: must be a whole number from 0 to 65535",
        "oncehook.toml:4: [source.orders] does not say how its arrivals are verified",
        "oncehook.toml:5: keep_keys in [source.orders]: '30x' is not a duration",
        'oncehook.toml:6: key in [source.orders]: The place "foo:bar"',
        "oncehook.toml:7: [destination.n8n] needs a url",
        'oncehook.toml:8: unknown key "failurs" in [destination.n8n.breaker]; did you mean "failures"?',
        'oncehook.toml:10: there is no source "order"; did you mean "orders"?',
        'oncehook.toml:12: [[route]] needs "to"',
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_a_misspelt_setting_is_not_also_missing(refused: Refused) -> None:
    assert len(refused('[source.orders]\nverfy = "none"')) == 1
    assert len(refused('[destination.n8n]\nulr = "https://x.example"')) == 1
    assert len(refused('[source.orders]\nverify = "bearer"\nsecrt = { env = "X" }')) == 1


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (source('on_missing_key = "hash"'), 'must be "accept", "reject", "body_hash" or "body_hash:10s"'),
        (source('on_missing_key = "body_hash:"'), "is not a duration"),
        (source('on_missing_key = "accept:10s"'), "must be"),
        (source('on_conflict = "ignore"'), 'must be "accept" or "reject"'),
        (source('tolerance = "never"'), "is not a duration"),
        (source("keep_keys = true"), "is not a duration"),
        (source('max_body = "0B"'), "must be a size"),
        (source('split = "items"'), "split takes the path of an array"),
        (source('path = "a/b"'), "must be one part of an address"),
        (source('public_url = "ftp://x"'), "must be a web address"),
        (source('ip_allow = ["10.0.0.1/8"]'), 'write "10.0.0.0/8"'),
        (source('ip_allow = ["everywhere"]'), "is not a network"),
        (source('rank = { order = ["a"] }'), "must be a rule, or { of"),
        (source('subject = ""'), "subject in [source.orders]"),
        (source("redact = [3]"), "must be text"),
        (source("", ""), 'verify = "none" must be said by name'),
        (source("", 'verify = "bearer"'), "needs a secret to verify with"),
        (source("", 'verify = { scheme = "hmac", header = "X" }'), "needs a secret to verify with"),
        (source("", 'verify = "nonne"'), 'Did you mean "none"?'),
        (source("", "verify = false"), "must be a scheme"),
        (source("", 'verify = { scheme = "none", confirm = "yes" }'), "anyone may send"),
        (source("", 'preset = "no-such-provider"'), 'no preset "no-such-provider"'),
        ('[source.Orders]\nverify = "none"', '"Orders" is not a name for a source'),
        (f'[source.{"a" * 64}]\nverify = "none"', "is not a name for a source"),
        ("[source]\norders = 3", "[source.orders] must be a table"),
        ("source = 3", "must be tables with a name each; write [source.NAME]"),
        ("server = 3", "server: must be a table"),
        ("[route]\nfrom = 'a'", "must be a list of tables; write [[route]]"),
        ('[destination.n8n]\nurl = "n8n.example"', "must be a web address"),
        ('[destination.n8n]\nurl = "https://"', "must be a web address"),
        ('[destination.n8n]\nurl = "https://x:99999/"', "must be a web address"),
        ('[destination.n8n]\nurl = "https://x/\\u0007"', "must be a web address"),
        ('[destination.n8n]\nurl = "https://x/#part"', "fragment"),
        ('[destination.n8n]\nurl = "https://bob@x/"', "must not hold a user name or password"),
        (destination('retry = "often"'), 'must be "quick", "durable", a list of waits'),
        (destination('retry = ["soon"]'), "is not a duration"),
        (destination("retry = { attempts = 0 }"), "attempts in [destination.n8n.retry]: must be a whole number"),
        (destination("retry = { factor = 0.5 }"), "must be a number from 1 to 100"),
        (destination('retry = { base = "1h", cap = "1m" }'), "cap must not be shorter than base"),
        (destination('retry = { jitter = "some" }'), "is not a duration"),
        (destination("breaker = { failures = 0 }"), "must be a whole number"),
        (destination("breaker = 3"), "must be a table"),
        (destination('rate = "50"'), "is not a rate"),
        (destination("rate = 50"), "is not a rate"),
        (destination("concurrency = 0"), "must be a whole number"),
        (destination("concurrency = true"), "must be a whole number"),
        (destination('timeout = "0s"'), "longer than nothing"),
        (destination('allow_private = "yes"'), "is not a network"),
        (destination('headers = { "X Y" = "z" }'), "is not the name of a header"),
        (destination('headers = { Host = "z" }'), "set by oncehook itself"),
        (destination('headers = { webhook-id = "z" }'), "set by oncehook itself"),
        (destination('headers = { X-A = "a\\r\\nX-B: b" }'), "must be plain printable ASCII"),
        (destination('forward_headers = ["Content-Length"]'), "set by oncehook itself"),
        ('[server]\nhost = "[::1]"', "without brackets or port"),
        ('[server]\nhost = "127.0.0.1:80"', "without brackets or port"),
        ('[server]\nhost = ""', "must be text"),
        ("[server]\nport = -1", "must be a whole number from 0 to 65535"),
        ('[server]\nport = "4020"', "must be a whole number"),
        ('[server]\nadmin_bind = "127.0.0.1"', "must be an address and a port"),
        ('[server]\ntrusted_proxies = ["0.0.0.0/0"]', "would believe everybody"),
        ('[server]\ntrusted_proxies = ["::/0"]', "would believe everybody"),
        ('[server]\nlog_level = "loud"', 'must be "debug" or'),
        ('[server]\ntokens = [{ name = "a", role = "god", token = { env = "K" } }]', "role in [[server.tokens]]"),
        ('[server]\ntokens = [{ name = "a", role = "admin" }]', '[[server.tokens]] needs "token"'),
        ('store = "mysql://x"', 'must be "sqlite:./file.db" or "postgresql://'),
        ("migrate = 1", "must be true or false"),
        ("[watermark]\ndead = 0", "must be a whole number"),
        ('[watermark]\ndisk = "full"', 'write for example "10%"'),
        ("[watermark]\ndaily_volume = 50", "must be a table of sources and numbers"),
        ("[watermark]\ndaily_volume = { nobody = 5 }", 'there is no source "nobody"; there is none'),
        (source() + "[watermark]\ndaily_volume = { oders = 5 }", 'did you mean "orders"?'),
        ('[retention]\nkeep_events = "long"', "keep_events in [retention]: 'long' is not a duration"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(refused: Refused, text: str, fragment: str) -> None:
    (line,) = refused(text, {"K": "k"})
    assert fragment in line
    assert line.startswith("oncehook.toml:")


@pytest.mark.parametrize(
    ("route", "fragment"),
    [
        ('from = "order"\nto = "n8n"', 'there is no source "order"; did you mean "orders"?'),
        ('from = "orders"\nto = "n8m"', 'there is no destination "n8m"; did you mean "n8n"?'),
        ('from = "orders"\nto = "n8n"\nwhen = { "foo:bar" = "x" }', "when in [[route]]"),
        ('from = "orders"\nto = "n8n"\nwhen = { "$.n" = ">many" }', "needs a number"),
        ('from = "orders"\nto = "n8n"\ncoalesce = "some"', 'must be true, false or "any"'),
        ('from = "orders"\nto = "n8n"\ncoalesce = true', "has no subject to gather by"),
        ('from = "orders"\nto = "n8n"\nlatest_wins = true', "has no rank to compare"),
        ('from = "orders"\nto = "n8n"\non_dead = "stop"', 'must be "continue" or "hold"'),
    ],
)
def test_routes(refused: Refused, route: str, fragment: str) -> None:
    (line,) = refused(source() + destination("") + f"[[route]]\n{route}")
    assert fragment in line


def test_two_sources_cannot_share_an_address(refused: Refused) -> None:
    (line,) = refused(source('path = "partner"') + '[source.partner]\nverify = "none"')
    assert "[source.partner] has the same address as [source.orders]" in line


def test_two_tokens_cannot_share_a_name(refused: Refused) -> None:
    token = '[[server.tokens]]\nname = "ci"\nrole = "viewer"\ntoken = { env = "K" }\n'
    assert '"ci" is the name of 2 tokens' in refused(token * 2, {"K": "k"})[0]


def test_a_problem_stays_on_one_line(refused: Refused) -> None:
    assert len(refused('"a\\nb\\u001b[31m" = 1')) == 1


def test_a_preset_says_what_it_needs(refused: Refused, loads: Loads) -> None:
    text = '[source.hub]\npreset = "whatsapp-cloud"\n'
    lines = refused(text)
    assert lines == [
        'oncehook.toml:1: [source.hub] needs secret: the preset "whatsapp-cloud" asks for it',
        'oncehook.toml:1: [source.hub] needs verify_token: the preset "whatsapp-cloud" asks for it',
    ]
    assert loads(text + 'secret = { env = "A" }\nverify_token = { env = "A" }', {"A": "a"}).config


# -- secrets (S4, S25, S26) --------------------------------------------------------------------


def secret_of(loaded: Loaded) -> Secret:
    return loaded.config.source["orders"].secret[0]


BEARER = 'verify = "bearer"'


def test_a_secret_in_the_environment(loads: Loads) -> None:
    loaded = loads(source('secret = { env = "ORDERS" }', BEARER), {"ORDERS": CANARY})
    assert secret_of(loaded).reveal() == CANARY.encode()


def test_the_bytes_of_the_environment_are_kept(loads: Loads) -> None:
    odd = b"\xff\xfe-\xc3\xa4"
    loaded = loads(source('secret = { env = "ORDERS" }', BEARER), {"ORDERS": odd.decode("utf-8", "surrogateescape")})
    assert secret_of(loaded).reveal() == odd


def test_a_secret_in_a_file_beside_the_configuration(tmp_path: Path, write: Write) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "orders.secret").write_bytes(CANARY.encode() + b"\n")
    path = write(source('secret = { file = "orders.secret" }', BEARER), "etc/oncehook.toml")
    loaded = load(path.relative_to(tmp_path), {}, tmp_path)
    assert secret_of(loaded).reveal() == CANARY.encode()
    assert secret_of(loaded).name == "file:orders.secret"


def test_a_secret_from_systemd(loads: Loads, tmp_path: Path) -> None:
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
def test_a_missing_or_empty_secret_is_refused(
    refused: Refused,
    reference: str,
    env: dict[str, str],
    fragments: list[str],
) -> None:
    (line,) = refused(source(f"secret = {reference}", BEARER), env)
    assert line.startswith("oncehook.toml:3: ")
    assert all(fragment in line for fragment in fragments)


def test_an_empty_file_is_no_secret(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    assert "file:empty is empty" in refused(source('secret = { file = "empty" }', BEARER))[0]


def test_a_secret_that_goes_missing_later_is_refused_too(loads: Loads) -> None:
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
def test_a_secret_is_a_reference_and_never_repeated(refused: Refused, key: str, value: str) -> None:
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
def test_secrets_in_the_wrong_place_are_refused_without_repeating_them(refused: Refused, text: str) -> None:
    assert CANARY not in "\n".join(refused(text))


def test_a_plain_secret_is_told_how_to_be_written(refused: Refused) -> None:
    (line,) = refused(source('secret = "x"', BEARER))
    assert 'write { env = "NAME" }, { file = "path" } or { credential = "name" }' in line


def test_nothing_that_prints_copies_or_encodes_a_secret_shows_it(loads: Loads) -> None:
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


def test_a_traceback_with_locals_shows_no_secret(tmp_path: Path, write: Write) -> None:
    write(source('secret = [{ env = "A" }, { env = "B" }]', BEARER))
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
def test_a_public_host_needs_a_credential_and_tls(
    loads: Loads,
    refused: Refused,
    host: str,
    settings: str,
    expected: list[str],
) -> None:
    text = f'[server]\nhost = "{host}"\n{settings}'
    if not expected:
        assert loads(text, {"T": "t"}).config.server.host == host
        return
    lines = refused(text, {"T": "t"})
    assert len(lines) == len(expected)
    for line, fragment in zip(lines, expected, strict=True):
        assert line.startswith("oncehook.toml:2: ")
        assert fragment in line


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing(loads: Loads, host: str) -> None:
    assert loads(f'[server]\nhost = "{host}"').config


def test_a_public_admin_bind_is_a_public_host(refused: Refused) -> None:
    assert len(refused('[server]\nadmin_bind = "0.0.0.0:4021"')) == 2


def test_a_public_host_by_environment_or_flag_is_checked_too(refused: Refused, tmp_path: Path) -> None:
    lines = refused("", {"ONCEHOOK_SERVER__HOST": "0.0.0.0"})
    assert [line.partition(": ")[0] for line in lines] == ["environment ONCEHOOK_SERVER__HOST"] * 2
    lines = refused("", {}, flags={"server.host": "0.0.0.0"})
    assert [line.partition(": ")[0] for line in lines] == ["flag --host"] * 2


def test_unverified_on_a_public_host_needs_consent(loads: Loads, refused: Refused) -> None:
    server = f'[server]\nhost = "0.0.0.0"\n{SAFE}'
    for verify in ('verify = "none"', 'verify = { scheme = "none" }'):
        (line,) = refused(server + source("", verify), {"T": "t"})
        assert 'verify = { scheme = "none", confirm = "anyone may send" }' in line
        assert loads(source("", verify)).config.source["orders"].is_loopback_only
    consent = 'verify = { scheme = "none", confirm = "anyone may send" }'
    orders = loads(server + source("", consent), {"T": "t"}).config.source["orders"]
    assert orders.is_unverified
    assert not orders.is_loopback_only


def test_another_host_than_the_configured_one(loads: Loads) -> None:
    config = loads(source()).config
    check_bind(config, "127.0.0.1")
    with pytest.raises(ConfigError) as caught:
        check_bind(config, "0.0.0.0")
    assert len(str(caught.value).splitlines()) == 3
    safe = loads(f"[server]\n{SAFE}", {"T": "t"}).config
    check_bind(safe, "0.0.0.0")


# -- where settings come from ------------------------------------------------------------------


def test_flag_environment_file_default_in_that_order(loads: Loads) -> None:
    text = "[server]\nport = 1001\nlog_level = 'debug'\n"
    env = {"ONCEHOOK_SERVER__PORT": "1002", "ONCEHOOK_STORE": "sqlite:./env.db"}
    loaded = loads(text, env, flags={"server.port": 1003, "server.host": None})
    config = loaded.config
    assert (config.server.port, config.store, config.server.log_level) == (1003, "sqlite:./env.db", "debug")
    assert loaded.where("server.port") == "flag --port"
    assert loaded.where("store") == "environment ONCEHOOK_STORE"
    assert loaded.where("server.log_level") == "oncehook.toml:3"
    assert loaded.where("server.host") == "default"
    assert loads(text, env).config.server.port == 1002
    assert loads(text).config.server.port == 1001


def test_the_environment_reaches_every_setting_of_what_exists(loads: Loads) -> None:
    text = '[source.my-orders]\nverify = "bearer"\n' + destination("")
    env = {
        "ONCEHOOK_MIGRATE": "false",
        "ONCEHOOK_SOURCE__MY_ORDERS__SECRET": CANARY,
        "ONCEHOOK_SOURCE__MY_ORDERS__KEEP_KEYS": "1w",
        "ONCEHOOK_SOURCE__MY_ORDERS__KEY": '["$.id", "header:X-Id"]',
        "ONCEHOOK_DESTINATION__N8N__BREAKER__FAILURES": "3",
        "ONCEHOOK_DESTINATION__N8N__RETRY": '["1s", "2s"]',
        "ONCEHOOK_SERVER__TRUSTED_PROXIES": '["10.0.0.0/8"]',
        "ONCEHOOK_WATERMARK__DEAD": "7",
        "ONCEHOOK_RETENTION": "7d",
    }
    loaded = loads(text, env)
    config = loaded.config
    orders = config.source["my-orders"]
    assert not config.migrate
    assert orders.secret[0].name == "env:ONCEHOOK_SOURCE__MY_ORDERS__SECRET"
    assert orders.secret[0].reveal() == CANARY.encode()
    assert (orders.keep_keys, orders.key) == (604_800, ["$.id", "header:X-Id"])
    assert (config.destination["n8n"].breaker.failures, config.destination["n8n"].retry) == (3, (1, 2))
    assert (config.watermark.dead, config.retention.keep_events) == (7, 604_800)
    assert loaded.where("source.my-orders.secret") == "environment ONCEHOOK_SOURCE__MY_ORDERS__SECRET"
    assert loaded.warnings == ()


def test_a_wrong_variable_is_told_by_its_name(refused: Refused) -> None:
    (line,) = refused("", {"ONCEHOOK_SERVER__PORT": "many"})
    assert line == "environment ONCEHOOK_SERVER__PORT: port in [server]: must be a whole number from 0 to 65535"


def test_a_variable_that_could_mean_two_sources_is_refused(refused: Refused) -> None:
    text = '[source.a-b]\nverify = "none"\n[source.a_b]\nverify = "none"\n'
    assert (
        "means both source.a-b.keep_keys and source.a_b.keep_keys"
        in refused(text, {"ONCEHOOK_SOURCE__A_B__KEEP_KEYS": "1d"})[0]
    )


def test_an_unknown_variable_is_a_warning_unless_it_is_somebody_elses(loads: Loads) -> None:
    env = {
        "ONCEHOOK_SERVER_PORT": CANARY,
        "ONCEHOOK_SOURCE__NOBODY__KEY": CANARY,
        "ONCEHOOK_TOKEN": CANARY,
        "ONCEHOOK_SERVE_PORT": CANARY,
        "ONCEHOOK_CONFIG": CANARY,
        "ONCEHOOK_MINE": CANARY,
        "OTHER": CANARY,
    }
    warnings = loads(source('secret = { env = "ONCEHOOK_MINE" }', BEARER), env).warnings
    assert warnings == (
        "environment ONCEHOOK_SERVER_PORT: not a setting, so it changes nothing; did you mean ONCEHOOK_SERVER__PORT?",
        warnings[1],
    )
    assert warnings[1].startswith("environment ONCEHOOK_SOURCE__NOBODY__KEY: not a setting")


def test_the_token_variable_is_not_a_setting(loads: Loads) -> None:
    assert loads("", {"ONCEHOOK_TOKEN": CANARY}).config == Config()


def test_pyproject_counts_when_there_is_no_file_of_our_own(tmp_path: Path, write: Write) -> None:
    write(
        "[project]\nname = 'x'\n\n[tool.oncehook]\nmigrate = false\n[tool.oncehook.server]\nport = 1\n",
        "pyproject.toml",
    )
    loaded = load(None, {}, tmp_path)
    assert loaded.origin == tmp_path / "pyproject.toml"
    assert (loaded.where("migrate"), loaded.where("server.port")) == ("pyproject.toml:5", "pyproject.toml:7")
    assert not loaded.config.migrate
    write("store = 'sqlite:./own.db'")
    loaded = load(None, {}, tmp_path)
    assert loaded.origin == tmp_path / "oncehook.toml"
    assert loaded.config.migrate, "the two are never merged"
    write("migrate = false", "given.toml")
    assert load(Path("given.toml"), {}, tmp_path).where("migrate") == "given.toml:1"


def test_a_pyproject_without_us_is_not_ours(tmp_path: Path, write: Write) -> None:
    write("[project]\nname = 'x'\n[tool.ruff]\n", "pyproject.toml")
    assert load(None, {}, tmp_path).origin is None
    with pytest.raises(ConfigError, match="no table"):
        load(Path("pyproject.toml"), {}, tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(Path("nowhere.toml"), {}, tmp_path)
    (tmp_path / "oncehook.toml").write_bytes(b"store = '\xff'")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(None, {}, tmp_path)
    write("\n\nstore = \n")
    with pytest.raises(ConfigError, match=r"^oncehook\.toml:3: not valid TOML: invalid value$"):
        load(None, {}, tmp_path)
    write("x = " + "[" * 5000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(None, {}, tmp_path)


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_bytes(b"\xef\xbb\xbf# hi\r\n[server]\r\nport = 1\r\n")
    loaded = load(None, {}, tmp_path)
    assert loaded.where("server.port") == "oncehook.toml:3"


def test_sources_may_have_numbers_for_names(loads: Loads) -> None:
    loaded = loads('[source.42]\nverify = "none"')
    assert loaded.where("source.42.verify") == "oncehook.toml:2"


def test_lines_are_found_through_everything_toml_allows() -> None:
    text = '''\
# [not.a.table]
top = """
[fake]
key = 1 \\""" still
""""
lit = \'\'\'
[fake2]
\'\'\'
list = [ # [comment]
  "a = 1", [
    "]",
  ],
]
"quoted \\u0041" = 'x # not a comment'
a.b.c = { inline = 1, deep = { x = [1] } } # c
[ source . "my-orders" ]   # header
key = "="
[[route]]
from = "x"
[route.when]
type = 1
[[route]]
from = "y"
[[server.tokens]]
name = 1.5
'''
    assert scan_lines(text) == {
        ("top",): 2,
        ("lit",): 6,
        ("list",): 9,
        ("quoted A",): 14,
        ("a",): 15,
        ("a", "b"): 15,
        ("a", "b", "c"): 15,
        ("source",): 16,
        ("source", "my-orders"): 16,
        ("source", "my-orders", "key"): 17,
        ("route",): 18,
        ("route", 0): 18,
        ("route", 0, "from"): 19,
        ("route", 0, "when"): 20,
        ("route", 0, "when", "type"): 21,
        ("route", 1): 22,
        ("route", 1, "from"): 23,
        ("server",): 24,
        ("server", "tokens"): 24,
        ("server", "tokens", 0): 24,
        ("server", "tokens", 0, "name"): 25,
    }


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('store = "postgresql://bob:pw@db/x"', "oncehook.toml:1: store holds a password"),
        (source('path = "short"'), "can be guessed"),
        (source('secret = { env = "K" }'), "is not used"),
    ],
)
def test_what_is_allowed_and_yet_worth_a_word(loads: Loads, text: str, fragment: str) -> None:
    (warning,) = loads(text, {"K": "k"}).warnings
    assert fragment in warning


# -- schema ------------------------------------------------------------------------------------


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    document = schema()
    text = json.dumps(document)
    named = {part.partition('"')[0] for part in text.split("#/$defs/")[1:]}
    assert named == set(document["$defs"])
    assert all(table["additionalProperties"] is False for table in document["$defs"].values())


# -- the command line --------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `oncehook config …` in a folder of its own, with an environment that knows nothing of us."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONCEHOOK_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(command, arguments, standalone_mode=False)

    return run


def test_check_says_ok(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(EXAMPLE)
    for name in EXAMPLE_ENV:
        monkeypatch.setenv(name, CANARY)
    result = run("check")
    assert result.return_value == 0
    assert result.stdout.startswith("OK ")
    assert "2 sources, 1 destination, 1 route" in result.stdout
    assert json.loads(run("check", "--json").stdout)["ok"] is True


def test_check_prints_a_line_per_problem_on_stderr(run: Run, write: Write) -> None:
    write("[server]\nport = -1\nhots = 1\n")
    result = run("check")
    assert result.return_value == 1
    assert result.stdout == ""
    assert [line.partition(": ")[0] for line in result.stderr.splitlines()] == ["oncehook.toml:2", "oncehook.toml:3"]
    document = json.loads(run("check", "--json").stdout)
    assert not document["ok"]
    assert len(document["problems"]) == 2


def test_check_asks_for_secrets_unless_told_not_to(run: Run, write: Write) -> None:
    write(source('secret = { env = "ORDERS" }', BEARER))
    assert run("check").return_value == 1
    assert run("check", "--without-secrets").return_value == 0


def test_show_tells_what_holds_and_why(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(EXAMPLE)
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


def test_show_of_a_wrong_file_shows_nothing(run: Run, write: Write) -> None:
    write("[server]\nport = -1")
    result = run("show", "--json")
    assert (result.return_value, result.stdout) == (1, "")
    assert "oncehook.toml:2" in result.stderr


def test_an_empty_list_that_was_said_is_shown(run: Run, write: Write) -> None:
    write(source("redact = []"))
    assert json.loads(run("show", "--json").stdout)["settings"]["source.orders.redact"]["value"] == []


def test_no_output_shows_a_secret(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*EXAMPLE_ENV, "ONCEHOOK_TYPO", "ONCEHOOK_SERVER__ADMIN_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("ONCEHOOK_STORE", f"postgresql://bob:{CANARY}@db.example/x?password={CANARY}")
    hidden = source(f'path = "{CANARY * 2}"').replace("orders", "hidden")
    header = destination("").replace("n8n", "crm") + 'headers = { Authorization = { env = "N8N_SECRET" } }\n'
    said = []
    for text in (EXAMPLE + hidden + header, EXAMPLE + f'[source.x]\nverify = "bearer"\nsecret = "{CANARY}"'):
        write(text)
        for arguments in (("check",), ("check", "--json"), ("show",), ("show", "--json"), ("schema",)):
            result = run(*arguments)
            assert result.exception is None
            said.append(result.stdout + result.stderr)
    assert "postgresql://bob:***@db.example/x?password=***" in "".join(said)
    assert "env:ONCEHOOK_SERVER__ADMIN_TOKEN (set)" in "".join(said)
    assert CANARY not in "".join(said)


def test_wrong_use_exits_with_2(write: Write, tmp_path: Path) -> None:
    for arguments in (("check", "--config", "nowhere.toml"), ("chek",), ("show", "--yaml")):
        assert CliRunner().invoke(command, arguments).exit_code == 2
    path = write("migrate = false")
    for action in ("check", "show", "schema"):
        assert CliRunner().invoke(command, [action, "--config", str(path)]).exit_code == 0


def test_importing_the_configuration_stays_light() -> None:
    heavy = "pydantic", "starlette", "cryptography", "jsonpath_rfc9535", "oncehook.verify", "oncehook.inbox", "asyncio"
    code = f"import sys, oncehook.config; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
