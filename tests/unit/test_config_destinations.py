"""Where destinations lead: addresses that are secrets, authorities of one's own, and circles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import CANARY, loads, refused
from tests import certificates

from oncehook import Inbox
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ConfigError
from oncehook.settings import build
from oncehook.settings.check import has_secret_address, read_address
from oncehook.whatsapp.destination import SenderDestination

SLACK = f"https://hooks.slack.example/services/T0/B0/{CANARY}"
BY_REFERENCE = [
    ('url = { env = "SLACK" }', {"SLACK": SLACK}),
    ('url = "https://hooks.slack.example"\npath = { env = "SLACK" }', {"SLACK": f"services/T0/B0/{CANARY}"}),
    ('url = "https://hooks.slack.example/services/"\npath = { env = "SLACK" }', {"SLACK": f"/T0/B0/{CANARY}"}),
]


def slack(settings: str) -> str:
    return f"[destination.slack]\n{settings}\n"


# -- addresses that are secrets ------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "env"), BY_REFERENCE)
def test_an_address_by_reference_is_called_and_not_shown(settings: str, env: dict[str, str]) -> None:
    loaded = loads(slack(settings), env)
    made = build.destination_from("slack", loaded.config.destination["slack"])
    assert isinstance(made, HttpDestination)
    assert made._target is not None
    assert made._target.url == SLACK
    assert made.address == "POST https://hooks.slack.example/…"
    said = json.dumps([(one.name, one.value) for one in loaded.settings()])
    assert "env:SLACK (set)" in said
    assert CANARY not in said + repr(loaded.config) + repr(loaded.config.destination)


def test_an_address_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "address").write_text(f"{SLACK}\n")
    loaded = loads(slack('url = { file = "address" }'), folder=tmp_path)
    assert read_address(loaded.config.destination["slack"]) == SLACK


def test_a_variable_that_is_the_setting_is_a_secret_too() -> None:
    loaded = loads(slack('url = "https://a.example/"'), {"ONCEHOOK_DESTINATION__SLACK__URL": SLACK})
    found = loaded.config.destination["slack"]
    assert (read_address(found), has_secret_address(found)) == (SLACK, True)


def test_the_settings_show_no_value_of_a_plain_query() -> None:
    loaded = loads(slack(f'url = "https://a.example/x?token={CANARY}"'))
    assert "https://a.example/x?token=…" in [one.value for one in loaded.settings()]


@pytest.mark.parametrize(
    ("settings", "value", "sentence"),
    [
        ('url = { env = "SLACK" }', None, "environment variable SLACK is not set"),
        ('url = { env = "SLACK" }', CANARY, "begins with http:// or https://"),
        ('url = { env = "SLACK" }', f"https://bob:{CANARY}@a.example/", "user name or password"),
        ('url = { env = "SLACK" }', f"https://a.example/{CANARY} x", "spaces"),
        ('url = { env = "SLACK" }', f"https://a.example/{CANARY}\udcff", "is not UTF-8 text"),
        ('url = "https://a.example/?b=1"\npath = { env = "SLACK" }', CANARY, "cannot follow"),
        ('url = "https://a.example/"\npath = { env = "SLACK" }', f"{CANARY}#x", "fragment"),
        ('url = "https://a.example/"\npath = { env = "SLACK" }', None, "SLACK is not set"),
        (f'url = "https://a.example/"\npath = "{CANARY}"', None, "must be a reference"),
        ('path = { env = "SLACK" }', CANARY, "needs a url"),
    ],
)
def test_what_cannot_be_called_is_told_without_repeating_it(settings: str, value: str | None, sentence: str) -> None:
    (line,) = refused(slack(settings), {} if value is None else {"SLACK": value})
    assert sentence in line
    assert CANARY not in line
    assert line.startswith("oncehook.toml:")


def test_a_program_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLACK", SLACK)
    monkeypatch.setenv("REST", f"T0/B0/{CANARY}")
    inbox = Inbox(f"sqlite:{tmp_path}/oncehook.db")
    whole = inbox.destination("whole", url_env="SLACK")
    parted = inbox.destination("parted", url="https://hooks.slack.example/services", path_env="REST")
    assert isinstance(whole, HttpDestination)
    assert isinstance(parted, HttpDestination)
    assert whole._target == parted._target
    assert whole._target is not None
    assert whole._target.url == SLACK
    assert whole.address == parted.address == "POST https://hooks.slack.example/…"
    with pytest.raises(ConfigError, match="both url and url_env"):
        inbox.destination("both", url="https://a.example/", url_env="SLACK")
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        inbox.destination("none", url_env="NOWHERE")
    with pytest.raises(ConfigError, match="needs a url"):
        inbox.destination("none")


# -- names of other letters ----------------------------------------------------------------------


def test_a_name_of_other_letters_is_taken_from_the_file() -> None:
    found = loads(slack('url = "https://bücher.example/hook"')).config.destination["slack"]
    assert read_address(found) == "https://xn--bcher-kva.example/hook"
    (line,) = refused(slack('url = "https://a\\u200db.example/hook"'))
    assert "no usable host" in line or "must be a web address" in line


# -- an authority of one's own -------------------------------------------------------------------


def test_ca_is_a_setting_of_web_addresses_and_whatsapp(tmp_path: Path) -> None:
    certificate = certificates.make("a.example", tmp_path)
    (tmp_path / "ca.pem").write_bytes(certificate[0].read_bytes())
    text = slack('url = "https://a.example/"\nca = "ca.pem"') + (
        '[destination.answers]\nca = "ca.pem"\n[destination.answers.whatsapp]\napi = "evolution-go"\n'
        'base_url = "https://evo.example"\ntoken = { env = "EVO" }\n'
    )
    config = loads(text, {"EVO": "a-token"}, folder=tmp_path).config
    http, sender = (build.destination_from(name, one) for name, one in config.destination.items())
    assert isinstance(http, HttpDestination)
    assert isinstance(sender, SenderDestination)
    assert (http._ca, sender.sender._ca) == (tmp_path / "ca.pem", tmp_path / "ca.pem")


@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_a_file_without_certificates_is_told_before_the_start(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    text = slack('url = "https://a.example/"\nca = "ca.pem"')
    (line,) = refused(text, folder=tmp_path)
    assert line.startswith("oncehook.toml:3: ca in [destination.slack]: ")
    assert "cannot be read as a file of certificates" in line
    assert loads(text, folder=tmp_path, secrets=False), "CI has no certificates either"


# -- circles -------------------------------------------------------------------------------------

SOURCE = '[source.orders]\nverify = "none"\n[source.other]\nverify = "none"\npath = "{path}"\n{more}\n'
PATH = "an-unguessable-path-of-its-own"


def circle(url: str, *routes: str, more: str = "", server: str = "") -> str:
    text = f"[server]\n{server}\n" + SOURCE.format(path=PATH, more=more)
    text += f'[destination.self]\nurl = "{url}"\nallow_private = true\n'
    return text + "".join(f"[[route]]\n{route}\n" for route in routes)


BACK = 'from = "orders"\nto = "self"'


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://127.0.0.1:4020/in/orders", {}),
        ("http://localhost:4020/in/orders", {}),
        ("http://[::1]:4020/in/orders/", {}),
        ("http://0x7f.1:4020/in/orders?x=1", {}),
        ("http://127.0.0.1:5000/in/orders", {"server": "port = 5000"}),
        ("https://hooks.example/in/orders", {"more": 'public_url = "https://hooks.example/in/other"'}),
        ("https://hooks.example:443/x/in/orders", {"more": 'public_url = "https://hooks.example/x/in/other"'}),
    ],
)
def test_a_destination_that_is_our_own_source_is_a_circle(url: str, settings: dict[str, str]) -> None:
    (line,) = refused(circle(url, BACK, **settings))
    assert "leads back to [source.orders], whose events are routed to it again" in line


def test_an_address_that_a_proxy_rewrites_is_known_by_its_public_url() -> None:
    public = 'public_url = "https://hooks.example/stripe"'
    (line,) = refused(circle("https://hooks.example/stripe", 'from = "other"\nto = "self"', more=public))
    assert "leads back to [source.other]" in line


def test_a_circle_through_a_secret_address_and_two_sources() -> None:
    text = SOURCE.format(path=PATH, more="")
    text += '[destination.one]\nurl = { env = "ONE" }\n[destination.two]\nurl = "http://127.0.0.1:4020/in/orders"\n'
    text += '[[route]]\nfrom = "orders"\nto = "one"\n[[route]]\nfrom = "other"\nto = "two"\n'
    lines = refused(text, {"ONE": f"http://127.0.0.1:4020/in/{PATH}"})
    assert [line.partition(" leads")[0].rpartition("[")[2] for line in lines] == [
        "destination.one]",
        "destination.two]",
    ]
    assert PATH not in "".join(lines)


@pytest.mark.parametrize(
    "routes",
    [(), ('from = "other"\nto = "self"',), (f'{BACK}\nwhen = {{ type = "a" }}',)],
)
def test_what_only_leads_back_is_a_warning(routes: tuple[str, ...]) -> None:
    loaded = loads(circle("http://127.0.0.1:4020/in/orders", *routes))
    assert any("leads back to [source.orders] of this inbox" in one for one in loaded.warnings)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4021/in/orders",
        "http://127.0.0.1:4020/in/nobody",
        "http://127.0.0.1:4020/in/other",  # its address is its path
        "http://127.0.0.1:4020/hooks/orders",
        "https://hooks.example/in/orders",
    ],
)
def test_what_leads_elsewhere_is_no_circle(url: str) -> None:
    assert not any("leads back" in one for one in loads(circle(url, BACK)).warnings)
