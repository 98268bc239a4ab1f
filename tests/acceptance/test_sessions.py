"""Logged in once: at every server of an inbox, over a restart, and nowhere any more after the logout (S31)."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver

ADMIN, VERA = "ana-" + "a" * 40, "vera-" + "v" * 40
TOKENS = {"ADMIN_TOKEN": ADMIN, "VERA_TOKEN": VERA}
OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
SERVER = """
[server]
admin_token = {{ env = "ADMIN_TOKEN" }}
tokens = [{{ name = "vera", role = "ROLE", token = {{ env = "VERA_TOKEN" }} }}]
"""


class Server(Receiver):
    """One server, seen by somebody without script."""

    cookie = ""

    def begin(self, role: str = "viewer", **tokens: str) -> Server:
        self.config = CONFIG + SERVER.replace("ROLE", role)
        self.start(env=TOKENS | tokens)
        return self

    def ask(self, method: str, path: str, cookie: str = "", **form: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, urlencode(form) or None, {**OURS, "cookie": cookie})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer

    def login(self, password: str) -> str:
        answer = self.ask("POST", "/login", password=password)
        assert (answer.status, answer.getheader("location")) == (303, "/")
        return str(answer.getheader("set-cookie")).partition(";")[0]

    def lets_in(self, cookie: str) -> bool:
        answer = self.ask("GET", "/events", cookie)
        assert answer.status in (200, 303)
        return answer.status == 200

    def may_act(self, cookie: str) -> bool:
        """Whether they may do more than look."""
        status = self.ask("GET", "/dead/discard?query=status:dead", cookie).status
        assert status in (200, 400, 403)
        return status != 403

    def link(self) -> str:
        """The path of the one-time link that it printed."""
        found = re.search(r"dashboard +(http\S+token=\w+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        return f"/?{urlsplit(found[1]).query}"


@pytest.fixture
def servers(engine: Engine) -> Iterator[list[Server]]:
    """Two at once on PostgreSQL; on SQLite one, and the other of a test is the same after a restart."""
    made = [Server(engine.folder / name, engine.url) for name in "ab"]
    yield made
    for server in made:
        if server.process is not None and server.process.poll() is None:
            server.stop()


def second(engine: Engine, first: Server, other: Server, role: str = "viewer", **tokens: str) -> Server:
    """Another server of the same inbox."""
    if engine.name == "sqlite":
        assert first.stop() == 0
    return other.begin(role, **tokens)


def test_logged_in_here_is_logged_in_there(engine: Engine, servers: list[Server]) -> None:
    first = servers[0].begin()
    cookie = first.login(VERA)
    assert first.lets_in(cookie)
    other = second(engine, first, servers[1])
    assert other.port != first.port
    assert other.lets_in(cookie)
    assert not other.may_act(cookie), "the role is kept"
    assert other.may_act(other.login(ADMIN))
    assert engine.rows("SELECT actor, role FROM sessions ORDER BY actor") == [("admin", "admin"), ("vera", "viewer")]
    logins = engine.rows("SELECT count(*) FROM audit WHERE act = 'login' AND actor = 'vera'")
    assert logins == [(1,)], "nobody had to log in again"


def test_logged_out_there_is_logged_out_here(postgres: Engine) -> None:
    first, other = (Server(postgres.folder / name, postgres.url).begin() for name in "ab")
    try:
        cookie = first.login(VERA)
        assert other.lets_in(cookie)
        assert other.ask("POST", "/logout", cookie).status == 303
        assert not other.lets_in(cookie)
        assert not first.lets_in(cookie)
        assert postgres.rows("SELECT count(*) FROM sessions") == [(0,)]
    finally:
        assert (first.stop(), other.stop()) == (0, 0)


def test_a_new_login_ends_the_old_session(postgres: Engine) -> None:
    first, other = (Server(postgres.folder / name, postgres.url).begin() for name in "ab")
    try:
        old = first.login(VERA)
        answer = other.ask("POST", "/login", old, password=ADMIN)
        new = str(answer.getheader("set-cookie")).partition(";")[0]
        assert (first.lets_in(old), first.lets_in(new)) == (False, True)
    finally:
        assert (first.stop(), other.stop()) == (0, 0)


def test_a_session_ends_with_its_password(engine: Engine, servers: list[Server]) -> None:
    first = servers[0].begin()
    vera, admin = first.login(VERA), first.login(f" {ADMIN} ")
    assert first.lets_in(admin), "a space around a password is no part of it"
    other = second(engine, first, servers[1], VERA_TOKEN="another-" + "x" * 40)
    assert (other.lets_in(vera), other.lets_in(admin)) == (False, True)


def test_a_role_that_was_taken_back_is_gone(engine: Engine, servers: list[Server]) -> None:
    first = servers[0].begin("operator")
    vera = first.login(VERA)
    assert first.may_act(vera)
    other = second(engine, first, servers[1], "viewer")
    assert other.lets_in(vera)
    assert not other.may_act(vera)


def test_a_link_works_once_and_only_where_it_was_printed(postgres: Engine) -> None:
    first, other = (Server(postgres.folder / name, postgres.url).begin() for name in "ab")
    try:
        link = first.link()
        assert other.ask("GET", link).status == 401
        used = first.ask("GET", link)
        assert used.status == 303
        cookie = str(used.getheader("set-cookie")).partition(";")[0]
        assert [server.ask("GET", link).status for server in (first, other)] == [401, 401]
        assert (first.may_act(cookie), other.may_act(cookie)) == (True, True), "the session is known to both"
    finally:
        assert (first.stop(), other.stop()) == (0, 0)


def test_a_session_begun_by_a_link_ends_with_the_password(engine: Engine, servers: list[Server]) -> None:
    first = servers[0].begin()
    cookie = str(first.ask("GET", first.link()).getheader("set-cookie")).partition(";")[0]
    assert first.may_act(cookie)
    assert first.stop() == 0
    same = servers[1].begin()
    assert same.may_act(cookie), "a restart does not end it"
    assert same.stop() == 0
    changed = servers[0].begin(ADMIN_TOKEN="another-" + "x" * 40)
    assert not changed.lets_in(cookie)


def test_a_page_view_writes_nothing(tmp_path: Path, sqlite: Engine) -> None:
    server = Server(sqlite.folder / "a", sqlite.url).begin()
    try:
        cookie = server.login(VERA)
        before = sqlite.rows("SELECT * FROM sessions")
        for _ in range(5):
            assert server.lets_in(cookie)
        assert sqlite.rows("SELECT * FROM sessions") == before
    finally:
        assert server.stop() == 0
