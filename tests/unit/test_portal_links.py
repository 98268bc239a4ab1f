"""Links to the portal: signed for one account and a time, and of no use once a character of them is changed."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from oncehook import Inbox, clock
from oncehook.errors import BadRequest, ConfigError, SecretKeyMissing
from oncehook.portal import LinkRefused, make_link, read_link
from oncehook.settings.stored import Vault
from oncehook.settings.values import check_origins
from oncehook.store.cipher import Cipher

OLD, NEW = os.urandom(32), os.urandom(32)


def vault(*keys: bytes) -> Vault:
    return Vault(Cipher(keys))


def token(link: str) -> str:
    (found,) = parse_qs(urlsplit(link).query)["link"]
    return found


def test_a_link_says_whose_it_is_and_until_when() -> None:
    made = make_link(vault(NEW), 42, "ana@shop.example", "5m")
    link, _ = read_link(vault(NEW), token(made))
    assert urlsplit(made).path == "/portal/enter"
    assert (link.account, link.actor) == ("42", "portal 42 (ana@shop.example)")
    assert 290 < link.until - clock.now() <= 300
    assert token(make_link(vault(NEW), 42)) != token(make_link(vault(NEW), 42))


def test_every_key_reads_and_the_first_one_signs() -> None:
    old = token(make_link(vault(OLD), 42))
    assert read_link(vault(NEW, OLD), old)[0].account == "42"
    with pytest.raises(LinkRefused):
        read_link(vault(OLD), token(make_link(vault(NEW, OLD), 42)))


def test_no_character_of_a_link_can_be_changed() -> None:
    made = token(make_link(vault(NEW), 42))
    said, _, signed = made.partition(".")
    other = json.loads(base64.urlsafe_b64decode(said + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**other, "account": "43"}).encode()).decode().rstrip("=")
    later = base64.urlsafe_b64encode(json.dumps({**other, "until": 1e12}).encode()).decode().rstrip("=")
    for text in (
        *(f"{forged}.{signed}", f"{later}.{signed}", said, f"{said}.", f".{signed}", "", ".", "..", f"{made}.{signed}"),
        *(made[:at] + ("A" if made[at] != "A" else "B") + made[at + 1 :] for at in range(len(made) - 1)),
        *("ü.é", "%00.%00", "a" * 5000, made + "\n", f" {made}"),
    ):
        with pytest.raises(LinkRefused) as refused:
            read_link(vault(NEW), text)
        assert str(refused.value) == str(LinkRefused())


def test_a_link_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = token(make_link(vault(NEW), 42, expires=60))
    at = clock.now()
    monkeypatch.setattr(clock, "now", lambda: at + 59)
    assert read_link(vault(NEW), made)
    monkeypatch.setattr(clock, "now", lambda: at + 61)
    with pytest.raises(LinkRefused):
        read_link(vault(NEW), made)


def test_what_cannot_be_a_link_is_refused() -> None:
    for account in ("", "a b", "../43", "x" * 101):
        with pytest.raises(BadRequest):
            make_link(vault(NEW), account)
    for expires in ("0s", "-1s", "2d", "soon", float("nan")):
        with pytest.raises(BadRequest):
            make_link(vault(NEW), 42, expires=expires)
    with pytest.raises(SecretKeyMissing, match="no key to sign"):
        make_link(vault(), 42)
    with pytest.raises(LinkRefused):
        read_link(vault(), token(make_link(vault(NEW), 42)))


def test_the_name_of_a_person_is_one_line_and_never_anothers() -> None:
    link, _ = read_link(vault(NEW), token(make_link(vault(NEW), 42, "admin\n\u202eevil" + "x" * 500)))
    assert link.actor.startswith("portal 42 (admin evil")
    assert len(link.actor) < 130


def test_a_program_makes_links_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(NEW).decode())
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    assert inbox.portal_link(42).startswith("http://127.0.0.1:4020/portal/enter?link=")
    made = inbox.portal_link(42, url="https://app.example/inbox/")
    assert made.startswith("https://app.example/inbox/portal/enter?link=")
    assert read_link(vault(NEW), token(made))[0].account == "42"


def test_links_begin_with_the_address_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(NEW).decode())
    file = tmp_path / "oncehook.toml"
    file.write_text(
        'store = "sqlite:./x.db"\n[server.portal]\nurl = "https://hooks.example"\n'
        'frame_ancestors = ["https://app.example", "https://*.shop.example:8443"]\n'
    )
    inbox = Inbox.from_toml(file)
    assert inbox.portal_link("ana").startswith("https://hooks.example/portal/enter?")
    assert inbox.settings is not None
    assert inbox.settings.config.server.portal is not None
    assert inbox.settings.config.server.portal.frame_ancestors == ("https://app.example", "https://*.shop.example:8443")


@pytest.mark.parametrize(
    "site",
    ["*", "https://*", "app.example", "https://app.example/path", "https://a.example; script-src *", "'self'", ""],
)
def test_only_sites_are_named_in_the_header(site: str) -> None:
    with pytest.raises(ConfigError):
        check_origins([site])
