"""The configuration as a person meets it: what is accepted, what is refused, and how that is told."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from ipaddress import ip_network
from pathlib import Path

import pytest
from config_cases import CANARY, EXAMPLE, EXAMPLE_ENV, destination, loads, refused, source

from oncehook.retry import Policy
from oncehook.settings import Config, load
from oncehook.settings.describe import schema

# -- what is accepted --------------------------------------------------------------------------


def test_the_example_of_the_design() -> None:
    config: Config = loads(EXAMPLE, EXAMPLE_ENV).config
    orders, partner, n8n = config.source["orders"], config.source["partner"], config.destination["n8n"]
    assert (orders.keep_keys, orders.on_missing_key, orders.subject) == (2_592_000, "body_hash", "$.order.id")
    assert [secret.reveal() for secret in partner.secret] == [CANARY.encode()] * 2
    assert (partner.tolerance, partner.max_body) == (math.inf, 4 << 20)
    assert partner.ip_allow == (ip_network("192.0.2.0/24"),)
    assert n8n.retry == Policy(attempts=8, base=10, factor=2, cap=21_600, jitter="full")
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
        "SourceSettings": "preset verify secret verify_token public_url tolerance path key on_missing_key on_conflict "
        "subject type event_time ignore preview rank rank_scope split redact volatile max_body budget keep_keys "
        "keep_events revive_dead ip_allow media account",
        "MediaSettings": "token url max_size types allow_private",
        "BodiesConfig": "url endpoint region access_key secret_key allow_private above",
        "ObjectsConfig": "url endpoint region access_key secret_key allow_private",
        "DestinationSettings": "url path preset whatsapp unsure sign headers forward_headers timeout retry transient "
        "permanent rate concurrency fair breaker lease allow_private allow_hosts ca kind celery subscribe account "
        "disable_after",
        "RouteTable": "from to when coalesce latest_wins on_dead priority",
        "EncryptConfig": "key decrypt_only",
        "ServerConfig": "host port admin_token tokens oidc trusted_proxies admin_bind public_without_tls log_level "
        "receivers portal",
    }
    assert {name: set(tables[name]["properties"]) for name in said} == {k: set(v.split()) for k, v in said.items()}
    top = "store migrate encrypt bodies archive retention watermark server source destination route"
    assert set(schema()["properties"]) == set(top.split())


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
        source('secret = { env = "KEY" }', 'verify = [{ scheme = "hmac", header = "X-Signature" }, "bearer"]'),
        destination('retry = ["10s", "1m", 300]'),
        destination("retry = []"),
        destination('retry = "quick"'),
        destination("transient = [404, 423]\npermanent = [409]"),
        destination('preset = "n8n"'),
        destination('retry = { jitter = "0.5s" }'),
        destination('allow_private = ["10.0.0.0/8", "fd00::/8"]'),
        destination('headers = { X-Team = "billing", Authorization = { env = "KEY" } }\nforward_headers = ["X-Trace"]'),
        'retention = "90d"',
        'bodies = "s3://bucket/prefix"\narchive = "./archive"',
        'bodies = { url = "gs://bucket/x", above = "1MiB" }\narchive = { url = "s3://b/x", region = "auto" }',
        '[retention]\nkeep_keys = "30d"\nkeep_events = "7d"',
        '[server]\nhost = "::1"\nadmin_bind = "[::1]:4021"\ntrusted_proxies = ["10.0.0.7"]',
        '[server]\nhost = "localhost"\nlog_level = "debug"\n'
        '[[server.tokens]]\nname = "ci"\nrole = "viewer"\ntoken = { env = "KEY" }',
        'store = "postgresql://db.example/oncehook"\nmigrate = false',
    ],
)
def test_other_forms(text: str) -> None:
    assert loads(text, {"KEY": "k"}).config


# -- what is refused, and how it is told -------------------------------------------------------


def test_an_unknown_key_names_file_line_and_the_nearest() -> None:
    text = '\n# orders\n[source.orders]\nverify = "none"\n\nsubjct = "$.order.id"\n'
    assert refused(text) == ['oncehook.toml:6: unknown key "subjct" in [source.orders]; did you mean "subject"?']


def test_an_unknown_key_that_resembles_nothing_lists_what_there_is() -> None:
    (line,) = refused("[watermark]\nzzz = 1")
    assert line == 'oncehook.toml:2: unknown key "zzz" in [watermark]; allowed: dead, oldest_due, daily_volume, disk'


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file() -> None:
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


def test_a_misspelt_setting_is_not_also_missing() -> None:
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
        (source("", "verify = []"), "verify does not say which schemes"),
        (source("", 'verify = ["bearer", "none"]'), '"none" cannot be one of several schemes'),
        (source("", 'verify = ["bearer", "basik"]'), 'Did you mean "basic"?'),
        (source("", 'verify = ["bearer", { scheme = "hmac", header = "X" }]'), "needs a secret to verify with"),
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
        (destination("transient = 404"), "write for example [404, 423]"),
        (destination("transient = [204]"), "transient in [destination.n8n]: must be a whole number from 300 to 599"),
        (destination('permanent = ["409"]'), "must be a whole number from 300 to 599"),
        (destination("transient = [404]\npermanent = [403, 404]"), "404 is listed in transient, too"),
        (destination('preset = "stripe"'), 'preset in [destination.n8n]: must be "n8n"'),
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
        ("[watermark]\ndaily_volume = { nobody = 5 }", 'there is no source "nobody"; none is defined yet'),
        (source() + "[watermark]\ndaily_volume = { oders = 5 }", 'did you mean "orders"?'),
        ('[retention]\nkeep_events = "long"', "keep_events in [retention]: 'long' is not a duration"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(text: str, fragment: str) -> None:
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
def test_routes(route: str, fragment: str) -> None:
    (line,) = refused(source() + destination("") + f"[[route]]\n{route}")
    assert fragment in line


def test_two_sources_cannot_share_an_address() -> None:
    (line,) = refused(source('path = "partner"') + '[source.partner]\nverify = "none"')
    assert "[source.partner] has the same address as [source.orders]" in line


def test_two_tokens_cannot_share_a_name() -> None:
    token = '[[server.tokens]]\nname = "ci"\nrole = "viewer"\ntoken = { env = "K" }\n'
    assert '"ci" is the name of 2 tokens' in refused(token * 2, {"K": "k"})[0]


def test_a_problem_stays_on_one_line() -> None:
    assert len(refused('"a\\nb\\u001b[31m" = 1')) == 1


def test_a_preset_says_what_it_needs() -> None:
    text = '[source.hub]\npreset = "whatsapp-cloud"\n'
    lines = refused(text)
    assert lines == [
        'oncehook.toml:1: [source.hub] needs secret: the preset "whatsapp-cloud" asks for it',
        'oncehook.toml:1: [source.hub] needs verify_token: the preset "whatsapp-cloud" asks for it',
    ]
    assert loads(text + 'secret = { env = "A" }\nverify_token = { env = "A" }', {"A": "a"}).config


# -- schema ------------------------------------------------------------------------------------


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    document = schema()
    text = json.dumps(document)
    named = {part.partition('"')[0] for part in text.split("#/$defs/")[1:]}
    assert named == set(document["$defs"])
    assert all(table["additionalProperties"] is False for table in document["$defs"].values())


def test_importing_the_configuration_stays_light() -> None:
    heavy = "pydantic", "starlette", "cryptography", "jsonpath_rfc9535", "oncehook.verify", "oncehook.inbox", "asyncio"
    code = f"import sys, oncehook.settings; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
