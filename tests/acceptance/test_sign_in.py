"""People sign in with an OpenID provider: a real one, a real server, and a browser that keeps its cookies (S31)."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.openid import CLIENT, SECRET, Liar, Provider

ANA = {"sub": "u-ana", "email": "ana@example.org", "email_verified": True, "groups": ["ops", "staff"]}
VERA = {"sub": "u-vera", "email": "vera@example.org", "email_verified": True, "groups": ["staff"]}
EVE = {"sub": "u-eve", "email": "eve@example.org", "email_verified": True, "groups": ["sales"]}
UMA = {"sub": "admin", "email": "ana@example.org", "email_verified": False, "groups": ["staff"]}
ADMIN = "ana-" + "a" * 40
SETTINGS = """
[server]
trusted_proxies = ["127.0.0.1"]
{password}

[server.oidc]
name = "Keyring"
issuer = "{issuer}"
client_id = "{client}"
client_secret = {{{{ env = "OIDC_SECRET" }}}}
public_url = "{public}"
roles = {{{{ admin = ["ops"], viewer = ["staff"] }}}}
allow_private = ["127.0.0.0/8"]
"""
PASSWORD = 'admin_token = {{ env = "ADMIN_TOKEN" }}'


class Server(Receiver):
    """A server, which knows its port before it starts."""

    public = ""

    def begin(self, issuer: str, client: str = CLIENT, secret: str = SECRET, password: str = PASSWORD) -> Server:
        public = self.public or self.url
        self.config = CONFIG + SETTINGS.format(password=password, issuer=issuer, client=client, public=public)
        self.start(env={"OIDC_SECRET": secret, "ADMIN_TOKEN": ADMIN})
        return self

    @property
    def url(self) -> str:
        self.port = self.port or self._port_of_its_own()
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Browser:
    """Somebody's browser, at an address of its own."""

    server: Server
    address: str = "192.0.2.1"
    cookies: httpx.Cookies = field(default_factory=httpx.Cookies)

    def ask(self, method: str, url: str, form: dict[str, str] | None = None) -> httpx.Response:
        ours = {"sec-fetch-site": "same-origin", "x-forwarded-for": self.address}
        with httpx.Client(timeout=60, cookies=self.cookies) as client:
            answer = client.request(method, url, data=form, headers=ours)
            self.cookies = client.cookies
        return answer

    def get(self, path: str) -> httpx.Response:
        return self.ask("GET", path if path.startswith("http") else self.server.url + path)

    def post(self, path: str, **form: str) -> httpx.Response:
        return self.ask("POST", self.server.url + path, form)

    def leave(self, to: str = "") -> str:
        """Press *Sign in with …*; where that leads."""
        answer = self.get("/login/oidc" + (f"?to={to}" if to else ""))
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    @property
    def is_in(self) -> bool:
        answer = self.get("/events")
        assert answer.status_code in (200, 303)
        return answer.status_code == 200

    @property
    def may_act(self) -> bool:
        return self.get("/dead/discard?query=status:dead").status_code != 403

    @property
    def session(self) -> list[str]:
        return [name for name in self.cookies if not name.endswith("_sign_in")]


def made(engine: Engine) -> Server:
    """A server that ends with its test, however that ends."""
    server = Server(engine.folder / "a", engine.url)
    engine.receivers.append(server)
    return server


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider(tmp_path_factory.mktemp("provider"), ANA, VERA, EVE, UMA, seconds=1800) as made:
        yield made


@pytest.fixture
def server(engine: Engine, provider: Provider) -> Iterator[Server]:
    """A server on either store that the real provider knows."""
    server = made(engine)
    yield server.begin(provider.issuer, *provider.register(f"{server.url}/login/oidc/callback"))
    assert server.stop() == 0


def audit(engine: Engine) -> list[tuple[str, str, dict[str, Any]]]:
    rows = engine.rows("SELECT actor, act, detail FROM audit ORDER BY 1, 2")
    return [(actor, act, json.loads(text) if isinstance(text, str | bytes) else text) for actor, act, text in rows]


# -- with the real provider --------------------------------------------------------------------


def test_people_come_in_with_their_role_and_go(engine: Engine, server: Server, provider: Provider) -> None:
    ana, vera = Browser(server), Browser(server, "192.0.2.2")
    page = ana.get("/login").text
    assert "Sign in with Keyring" in page
    assert 'name="password"' in page
    back = provider.agree(ana.leave(), "u-ana")
    arrived = ana.get(back)
    assert arrived.status_code == 200
    assert 'content="0; url=/"' in arrived.text
    assert arrived.headers["referrer-policy"] == "no-referrer"
    cookies = arrived.headers.get_list("set-cookie")
    (begun,) = [one for one in cookies if "_sign_in=" not in one]
    assert {"httponly", "samesite=strict", "path=/"} <= set(begun.lower().split("; "))
    lasting = int(re.findall(r"Max-Age=(\d+)", begun)[0])
    assert 1700 < lasting <= 1800, "no longer than the token"
    assert ana.is_in
    assert ana.may_act
    vera.get(provider.agree(vera.leave(), "u-vera"))
    assert vera.is_in
    assert not vera.may_act
    assert engine.rows("SELECT actor, role FROM sessions ORDER BY actor") == [
        ("ana@example.org", "admin"),
        ("vera@example.org", "viewer"),
    ]
    assert audit(engine) == [
        ("ana@example.org", "login", {"by": "oidc", "subject": "u-ana", "role": "admin"}),
        ("vera@example.org", "login", {"by": "oidc", "subject": "u-vera", "role": "viewer"}),
        ("vera@example.org", "refused", {"code": "forbidden"}),
    ]
    assert ana.post("/logout").status_code == 303
    assert not ana.is_in
    assert vera.is_in


def test_who_has_no_role_is_told_so(engine: Engine, server: Server, provider: Provider) -> None:
    eve = Browser(server)
    refused = eve.get(provider.agree(eve.leave(), "u-eve"))
    assert refused.status_code == 403
    assert "You have signed in as eve@example.org, but no role" in refused.text
    assert not eve.session
    assert not eve.is_in
    assert audit(engine) == [
        (
            "eve@example.org",
            "login_refused",
            {"by": "oidc", "subject": "u-eve", "reason": "no role for what groups says"},
        )
    ]


def test_an_unverified_address_is_nobodys_name(engine: Engine, server: Server, provider: Provider) -> None:
    uma = Browser(server)
    uma.get(provider.agree(uma.leave(), "admin"))
    assert uma.is_in
    assert [actor for actor, _, _ in audit(engine)] == ["oidc:admin"]


def test_a_stolen_answer_is_of_no_use(engine: Engine, server: Server, provider: Provider) -> None:
    ana, thief = Browser(server), Browser(server, "192.0.2.2")
    back = provider.agree(ana.leave(), "u-ana")
    held = dict(ana.cookies)
    for visitor in (thief, Browser(server, "192.0.2.3")):
        refused = visitor.get(back)
        assert refused.status_code == 400
        assert "not begun in this browser" in refused.text
        visitor.leave()  # a sign-in of one's own does not help
    assert thief.get(back).status_code == 400
    assert ana.get(back).status_code == 200
    assert ana.get(back).status_code == 400, "the browser has forgotten this sign-in"
    replay = Browser(server, "192.0.2.4")
    replay.cookies.update({name: value for name, value in held.items() if name.endswith("_sign_in")})
    refused = replay.get(back)
    assert refused.status_code == 401, "and the provider this code"
    assert not thief.session
    assert not replay.session
    assert "invalid_grant" in server.log.read_text()


def test_whoever_changes_their_mind_is_back_at_the_login_page(server: Server, provider: Provider) -> None:
    ana = Browser(server)
    address = ana.leave()
    state = parse_qs(urlsplit(address).query)["state"][0]
    denied = provider.deny(address)
    answer = ana.get(denied if "state=" in denied else f"{denied}&state={state}")
    assert answer.status_code == 401
    assert "access_denied" in answer.text
    assert "Sign in with Keyring" in answer.text


def test_people_return_to_the_page_they_wanted_and_to_no_other_site(server: Server, provider: Provider) -> None:
    ana = Browser(server)
    sent = ana.get("/events?query=status:dead")
    assert (sent.status_code, sent.headers["location"]) == (303, "/login?to=%2Fevents%3Fquery%3Dstatus%3Adead")
    link = re.findall(r'href="(/login/oidc[^"]*)"', ana.get(sent.headers["location"]).text)[0]
    address = ana.get(html.unescape(link)).headers["location"]
    arrived = ana.get(provider.agree(address, "u-ana"))
    assert 'content="0; url=/events?query=status:dead"' in html.unescape(arrived.text)
    for evil in (
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "%2F%2Fevil.example",
        "/%09/evil.example",
    ):
        arrived = ana.get(provider.agree(ana.leave(evil), "u-ana"))
        assert 'content="0; url=/"' in arrived.text
        assert "evil" not in arrived.text
        page = Browser(server).get(f"/login?to={evil}")
        assert page.status_code == 200
        assert "evil" not in page.text


def test_without_a_password_nobody_is_asked_for_one(sqlite: Engine, provider: Provider) -> None:
    server = made(sqlite)
    client, secret = provider.register(f"{server.url}/login/oidc/callback")
    server.begin(provider.issuer, client, secret, password="")
    page = Browser(server).get("/login").text
    assert "Sign in with Keyring" in page
    assert 'name="password"' not in page
    assert server.stop() == 0


def test_a_session_ends_with_the_settings_that_let_it_in(sqlite: Engine, tmp_path: Path) -> None:
    with Provider(tmp_path, ANA, VERA, registered=False) as provider:
        server = made(sqlite).begin(provider.issuer)
        ana = Browser(server)
        ana.get(provider.agree(ana.leave(), "u-ana"))
        assert ana.is_in
        assert server.stop() == 0
        server.begin(provider.issuer)
        assert ana.is_in, "over a restart"
        assert server.stop() == 0
        server.config = server.config.replace('admin = ["ops"]', 'admin = ["nobody"]')
        server.start(env={"OIDC_SECRET": SECRET, "ADMIN_TOKEN": ADMIN})
        assert not ana.is_in
        assert server.stop() == 0


def test_a_provider_that_is_down_ends_no_session(sqlite: Engine, tmp_path: Path) -> None:
    with Provider(tmp_path, ANA, VERA, registered=False) as provider:
        server = made(sqlite).begin(provider.issuer)
        ana, vera = Browser(server), Browser(server, "192.0.2.2")
        ana.get(provider.agree(ana.leave(), "u-ana"))
        back = provider.agree(vera.leave(), "u-vera")
        provider.stop()
        answer = vera.get(back)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "provider does not answer" in answer.text
        assert 'name="password"' in answer.text, "there may be another way in"
        assert ana.is_in
        assert server.stop() == 0
        server.begin(provider.issuer)
        answer = vera.get("/login/oidc")
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert vera.get("/login").status_code == 200
        assert vera.post("/login", password=ADMIN).status_code == 303
        assert ana.is_in
        assert server.stop() == 0


def test_over_https_no_other_host_can_plant_a_sign_in(sqlite: Engine) -> None:
    with Liar() as liar:
        server = made(sqlite)
        server.public = "https://hooks.example/inbox"
        answer = Browser(server.begin(liar.issuer)).get("/login/oidc")
        (cookie,) = answer.headers.get_list("set-cookie")
        assert cookie.startswith("__Host-oncehook_")
        assert {"httponly", "secure", "path=/", "samesite=lax", "max-age=600"} <= set(cookie.lower().split("; "))
        asked = parse_qs(urlsplit(answer.headers["location"]).query)
        assert asked["redirect_uri"] == ["https://hooks.example/inbox/login/oidc/callback"]
        assert server.stop() == 0


# -- with one that lies ------------------------------------------------------------------------


def test_a_liar_lets_nobody_in(sqlite: Engine) -> None:
    with Liar() as liar:
        server = made(sqlite).begin(liar.issuer)
        lies: list[dict[str, Any]] = [
            {"iss": "https://evil.example"},
            {"aud": "another"},
            {"nonce": "replayed"},
            {"exp": 1},
            {"sub": None},
        ]
        for number, lie in enumerate(lies):
            visitor = Browser(server, f"198.51.100.{number}")
            liar.claims = lie
            answer = visitor.get(liar.agree(visitor.leave()))
            assert answer.status_code == 401, lie
            assert "does not prove who you are" in answer.text
            assert not visitor.session
        liar.claims = {}
        ana = Browser(server)
        ana.get(liar.agree(ana.leave()))
        assert ana.is_in, "and the truth does"
        guesser = Browser(server, "203.0.113.1")
        seen = []
        for times in (1, 1, 1, 1, 1, 3):  # the last three at once: the wait is two seconds
            back = re.sub(r"code=\w+", "code=guess", liar.agree(guesser.leave()))
            seen += [guesser.get(back).status_code for _ in range(times)]
        assert seen == [401] * 5 + [429] * 3
        assert liar.hits["/token"] == len(lies) + 1 + 5
        assert sqlite.rows("SELECT count(*) FROM sessions") == [(1,)]
        assert server.stop() == 0
