"""Where settings come from: which file counts, what lies over it, and on which line each stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import BEARER, CANARY, destination, loads, refused, source, write

from oncehook.cli import COMMANDS
from oncehook.errors import ConfigError
from oncehook.settings import Config, load
from oncehook.settings.origin import scan_lines


def test_flag_environment_file_default_in_that_order() -> None:
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


def test_the_environment_reaches_every_setting_of_what_exists() -> None:
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
    assert (config.destination["n8n"].breaker.failures, config.destination["n8n"].retry.waits) == (3, (1, 2))
    assert (config.watermark.dead, config.retention.keep_events) == (7, 604_800)
    assert loaded.where("source.my-orders.secret") == "environment ONCEHOOK_SOURCE__MY_ORDERS__SECRET"
    assert loaded.warnings == ()


def test_a_wrong_variable_is_told_by_its_name() -> None:
    (line,) = refused("", {"ONCEHOOK_SERVER__PORT": "many"})
    assert line == "environment ONCEHOOK_SERVER__PORT: port in [server]: must be a whole number from 0 to 65535"


def test_a_variable_that_could_mean_two_sources_is_refused() -> None:
    text = '[source.a-b]\nverify = "none"\n[source.a_b]\nverify = "none"\n'
    assert (
        "means both source.a-b.keep_keys and source.a_b.keep_keys"
        in refused(text, {"ONCEHOOK_SOURCE__A_B__KEEP_KEYS": "1d"})[0]
    )


def test_an_unknown_variable_is_a_warning_unless_it_is_somebody_elses() -> None:
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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_variables_of_every_command_are_known(command: str) -> None:
    variable = f"ONCEHOOK_{command.upper().replace('-', '_')}_LIMIT"
    assert loads("", {variable: "1"}).warnings == ()


def test_the_token_variable_is_not_a_setting() -> None:
    assert loads("", {"ONCEHOOK_TOKEN": CANARY}).config == Config()


def test_pyproject_counts_when_there_is_no_file_of_our_own(tmp_path: Path) -> None:
    write(
        tmp_path,
        "[project]\nname = 'x'\n\n[tool.oncehook]\nmigrate = false\n[tool.oncehook.server]\nport = 1\n",
        "pyproject.toml",
    )
    loaded = load(None, {}, tmp_path)
    assert loaded.origin == tmp_path / "pyproject.toml"
    assert (loaded.where("migrate"), loaded.where("server.port")) == ("pyproject.toml:5", "pyproject.toml:7")
    assert not loaded.config.migrate
    write(tmp_path, "store = 'sqlite:./own.db'")
    loaded = load(None, {}, tmp_path)
    assert loaded.origin == tmp_path / "oncehook.toml"
    assert loaded.config.migrate, "the two are never merged"
    write(tmp_path, "migrate = false", "given.toml")
    assert load(Path("given.toml"), {}, tmp_path).where("migrate") == "given.toml:1"


def test_a_pyproject_without_us_is_not_ours(tmp_path: Path) -> None:
    write(tmp_path, "[project]\nname = 'x'\n[tool.ruff]\n", "pyproject.toml")
    assert load(None, {}, tmp_path).origin is None
    with pytest.raises(ConfigError, match="no table"):
        load(Path("pyproject.toml"), {}, tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(Path("nowhere.toml"), {}, tmp_path)
    (tmp_path / "oncehook.toml").write_bytes(b"store = '\xff'")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(None, {}, tmp_path)
    write(tmp_path, "\n\nstore = \n")
    with pytest.raises(ConfigError, match=r"^oncehook\.toml:3: not valid TOML: invalid value\n"):
        load(None, {}, tmp_path)
    write(tmp_path, "x = " + "[" * 5000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(None, {}, tmp_path)


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_bytes(b"\xef\xbb\xbf# hi\r\n[server]\r\nport = 1\r\n")
    loaded = load(None, {}, tmp_path)
    assert loaded.where("server.port") == "oncehook.toml:3"


def test_sources_may_have_numbers_for_names() -> None:
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
        (source('key = ["$.id", ["$.a", "?$..*..id"]]'), '"?$..*..id" descends twice'),
        (source('redact = ["$..a..token"]'), "redact in [source.orders]"),
        (source('rank = { of = "$..a..b", order = ["x"] }'), "rank in [source.orders]"),
    ],
)
def test_what_is_allowed_and_yet_worth_a_word(text: str, fragment: str) -> None:
    (warning,) = loads(text, {"K": "k"}).warnings
    assert fragment in warning
