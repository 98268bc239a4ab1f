"""The parts of the Django app, in this process, on real PostgreSQL: settings, view, atomic handlers, admin."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from oncehook import Event
from oncehook.cli.options import build_setup
from oncehook.contrib.bridge import Bridge
from oncehook.errors import ConfigError
from oncehook.model import DeliveryStatus, Filter, StoredDelivery
from tests.contrib.django_shop import order, set_up, set_up_database, signed
from tests.servers import shared_postgres

set_up()

from asgiref.sync import async_to_sync, sync_to_async  # noqa: E402
from django.contrib.auth.models import Permission, User  # noqa: E402
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.core.handlers.wsgi import WSGIRequest  # noqa: E402
from django.db import connection, connections, transaction  # noqa: E402
from django.db.utils import ConnectionHandler  # noqa: E402
from django.test import Client, RequestFactory, override_settings  # noqa: E402
from orders.models import Order  # type: ignore[import-not-found]  # noqa: E402

from oncehook.contrib.django import assembly, views  # noqa: E402
from oncehook.contrib.django.assembly import DjangoInbox  # noqa: E402
from oncehook.contrib.django.urls import dashboard  # noqa: E402

numbers = itertools.count()


@pytest.fixture
def number() -> str:
    return f"N{next(numbers)}"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    yield set_up_database()
    assembly.get_bridge().stop()
    connections.close_all()
    async_to_sync(sync_to_async(connections.close_all))()


class House:
    """An inbox of its own in Django's database, with a worker."""

    def __init__(self) -> None:
        self.inbox = DjangoInbox(str(assembly.store_url()))
        self.inbox.alias, self.inbox.url = assembly.alias(), assembly.store_url()
        self.bridge = Bridge(self.inbox, work=True)
        self.name = f"h{next(numbers)}"

    def on(self, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return self.inbox.on(self.name, name=self.name, **{"atomic": True, "retry": ["0.05s"] * 5, **options})

    def run(self, *subjects: str) -> list[StoredDelivery]:
        """Emit one event for each, work them off, and say how they stand."""
        for subject in subjects:
            self.bridge.call(self.inbox.emit(self.name, "order.paid", {"number": subject}, subject=subject))
        self.bridge.call(self.inbox.drain())
        page = self.bridge.call(self.inbox.admin.deliveries(Filter(destination=self.name)))
        return list(reversed(page.items))


@pytest.fixture
def house(database: str) -> Iterator[House]:
    house = House()
    yield house
    house.bridge.stop()


def keep(event: Event) -> None:
    Order.objects.create(number=event.subject, status="paid")


def kept(number: str) -> int:
    return Order.objects.filter(number=number).count()


# -- settings ----------------------------------------------------------------------------------


def address(monkeypatch: pytest.MonkeyPatch, **database: Any) -> dict[str, Any]:
    """What the driver would read from the address of such a database."""
    known = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}
    monkeypatch.setattr(assembly, "connections", ConnectionHandler({"default": {**known, **database}}))
    url = assembly.database_url("default", "oncehook")
    assert "schema=oncehook" in url
    return conninfo_to_dict(url.replace("&schema=oncehook", "").replace("?schema=oncehook", ""))


def test_the_address_of_djangos_database(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"USER": "ad:min", "PASSWORD": "p@ss/w?rd&%", "HOST": "db.example", "PORT": "6432"}
    found = address(monkeypatch, **full, OPTIONS={"sslmode": "require", "isolation_level": 3})
    assert [found.pop(name) for name in ("user", "password", "host", "port")] == list(full.values())
    assert found == {"dbname": "shop", "sslmode": "require"}
    assert address(monkeypatch, HOST="/var/run/pg sql")["host"] == "/var/run/pg sql"


def test_the_projects_search_path_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"options": "-c search_path=app,public -c statement_timeout=3000"}
    assert address(monkeypatch, OPTIONS=options)["options"] == "-c statement_timeout=3000"
    assert address(monkeypatch, OPTIONS={"assume_role": "owner"})["options"] == "-c role=owner"


def test_a_store_in_a_file_database_of_djangos_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="SQLite") as refused:
        address(monkeypatch, ENGINE="django.db.backends.sqlite3")
    assert "sqlite:./oncehook.db" in refused.value.hint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"SORCES": {}}, 'unknown key "SORCES"'),
        ({"STORE": "other"}, "DATABASES has none"),
        ({"SOURCES": {"shop": {"verify": "none", "kee": "$.id"}}}, "kee"),
        ({"SOURCES": {"shop": {}}}, "verified"),
        ({"ENCRYPT": {"keys": {"env": "INBOX_KEY"}}}, 'did you mean "key"'),
        ({"ROUTES": [{"from": "shop", "to": "n8n", "wen": {}}]}, "wen"),
    ],
)
def test_a_wrong_setting_is_told(settings: dict[str, Any], words: str) -> None:
    with override_settings(ONCEHOOK=settings), pytest.raises(ConfigError, match=words):
        assembly.get_inbox.__wrapped__()


def test_settings_may_be_a_file(tmp_path: Any) -> None:
    (tmp_path / "oncehook.toml").write_text('[source.orders]\nverify = "none"\nkey = "$.id"\n')
    said = {"CONFIG": "oncehook.toml", "STORE": "default", "SOURCES": {"others": {"verify": "none"}}}
    with override_settings(ONCEHOOK=said, BASE_DIR=tmp_path):
        inbox = assembly.get_inbox.__wrapped__()
    assert (list(inbox.sources), inbox.alias) == (["orders", "others"], "default")


@pytest.mark.parametrize("more", [{}, {"CONFIG": "oncehook.toml"}])
def test_payloads_are_encrypted_under_the_key_of_the_settings(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    """Also where a file has the rest, and when the inbox moves to Django's test database."""
    monkeypatch.setenv("INBOX_KEY", bytes(range(32)).hex())
    (tmp_path / "oncehook.toml").write_text("")
    said = {"STORE": "default", "ENCRYPT": {"key": {"env": "INBOX_KEY"}}, **more}
    with override_settings(ONCEHOOK=said, BASE_DIR=tmp_path):
        inbox = assembly.get_inbox.__wrapped__()
        assert inbox.store.cipher.encrypts
        inbox.store_url = "postgresql:///elsewhere"
        inbox._follow_database()
        assert inbox.store_url != "postgresql:///elsewhere"
    assert inbox.store.cipher.encrypts


def test_a_file_counts_for_commands_where_config_names_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then once: views, which look for none by themselves, and workers must have the same inbox."""
    route = '[[route]]\nfrom = "orders"\nto = "keep"\n'
    (tmp_path / "oncehook.toml").write_text(f'[source.orders]\nverify = "none"\n{route}')
    with override_settings(ONCEHOOK={"CONFIG": "oncehook.toml", "STORE": "default"}, BASE_DIR=tmp_path):
        named = assembly.get_inbox.__wrapped__()
    named.on("orders", name="keep")(keep)
    unnamed = DjangoInbox("sqlite:./never.db")
    monkeypatch.setitem(sys.modules, "projects", SimpleNamespace(named=named, unnamed=unnamed))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert list(build_setup("projects:named", tmp_path / "oncehook.toml").inbox.sources) == ["orders"]
    assert not build_setup("projects:unnamed", None).inbox.sources


def test_atomic_needs_djangos_own_database() -> None:
    inbox = DjangoInbox("sqlite:./never.db")
    with pytest.raises(ConfigError, match="not in a database of Django"):
        inbox.on("shop", atomic=True)(keep)


def test_atomic_needs_a_plain_function(house: House) -> None:
    async def handler(event: Event) -> None: ...

    with pytest.raises(ConfigError, match="plain functions"):
        house.on()(handler)


# -- atomic handlers ---------------------------------------------------------------------------


def test_effect_and_completion_commit_together(house: House, number: str) -> None:
    """R51"""
    seen: list[bool] = []

    @house.on()
    def handler(event: Event) -> dict[str, int]:
        keep(event)
        seen.append(connection.in_atomic_block)
        return {"orders": kept(number)}

    (delivery,) = house.run(number)
    assert (delivery.status, delivery.attempts, kept(number), seen) == (DeliveryStatus.done, 1, 1, [True])
    [attempt] = house.bridge.call(house.inbox.admin.attempts(delivery.id))
    assert attempt.result == b'{"orders":1}'


def test_what_a_handler_raises_takes_its_writes_back(house: House, number: str) -> None:
    """R51: only what the last attempt wrote stays."""
    attempts: list[int] = []

    @house.on()
    def handler(event: Event) -> None:
        keep(event)
        attempts.append(kept(number))
        if event.attempt < 3:
            raise RuntimeError("not yet")

    (delivery,) = house.run(number)
    assert (delivery.status, attempts, kept(number)) == (DeliveryStatus.done, [1, 1, 1], 1)


def test_a_lost_lease_takes_everything_back(house: House, number: str) -> None:
    """R52: whoever was overtaken in the middle commits nothing, whatever the handler believes."""
    attempts: list[int] = []

    @house.on()
    def handler(event: Event) -> None:
        keep(event)
        attempts.append(kept(number))
        if len(attempts) == 1:
            overtake()

    def overtake() -> None:
        """Somebody else has it, and dies at once."""
        taken = "fence = nextval('oncehook.fences'), due_at = now()"
        with psycopg.connect(shared_postgres().url.replace("/postgres", f"/{database_name()}")) as other:
            other.execute(f"UPDATE oncehook.heads SET {taken} WHERE leased")

    (delivery,) = house.run(number)
    assert (delivery.status, attempts, kept(number)) == (DeliveryStatus.done, [1, 1], 1)


def database_name() -> str:
    return str(connections["default"].settings_dict["NAME"])


def test_a_transaction_marked_to_roll_back_is_no_success(house: House, number: str) -> None:
    """Django rolls it back without a word; the delivery must not count as done."""

    @house.on()
    def handler(event: Event) -> None:
        keep(event)
        if event.attempt == 1:
            transaction.set_rollback(True)

    (delivery,) = house.run(number)
    assert (delivery.status, delivery.attempts, kept(number)) == (DeliveryStatus.done, 2, 1)


def test_a_callback_that_fails_after_the_commit_changes_nothing(
    house: House, number: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in the log, and the attempt is not taken for a failure."""

    @house.on()
    def handler(event: Event) -> None:
        keep(event)
        transaction.on_commit(lambda: 1 // 0)

    (delivery,) = house.run(number)
    assert (delivery.status, delivery.attempts, kept(number)) == (DeliveryStatus.done, 1, 1)
    moments = [vars(record).get("moment") for record in caplog.records]
    assert [moment for moment in moments if str(moment).startswith("handler.")] == ["handler.on_commit_failed"]


def test_a_handler_that_writes_nothing_is_done(house: House, number: str) -> None:
    @house.on()
    def handler(event: Event) -> None: ...

    (delivery,) = house.run(number)
    assert (delivery.status, delivery.attempts) == (DeliveryStatus.done, 1)


def test_what_is_emitted_in_a_handler_commits_with_it(house: House, number: str) -> None:
    """R54"""

    @house.on()
    def handler(event: Event) -> None:
        event.emit("app", "order.kept", {"attempt": event.attempt}, subject=number)
        if event.attempt == 1:
            raise RuntimeError("not yet")

    house.run(number)
    page = house.bridge.call(house.inbox.admin.events(Filter(source="app", subject=number)))
    assert len(page.items) == 1
    assert json.loads(house.bridge.call(house.inbox.admin.body(page.items[0].id))) == {"attempt": 2}


def test_what_is_emitted_in_a_transaction_commits_with_it(house: House, number: str) -> None:
    """R54: also in a view, beside an inbox that nobody has started there."""
    elsewhere = DjangoInbox(str(assembly.store_url()))
    elsewhere.alias, elsewhere.url = assembly.alias(), assembly.store_url()
    with transaction.atomic():
        elsewhere.emit_in_blocking(connection, "app", "paid", {"n": 1}, key=number, subject=number)
    with transaction.atomic():
        elsewhere.emit_in_blocking(connection, "app", "paid", {"n": 2}, key=f"{number}-2", subject=number)
        transaction.set_rollback(True)
    page = house.bridge.call(house.inbox.admin.events(Filter(source="app", subject=number)))
    assert [event.key for event in page.items] == [number]


@pytest.mark.parametrize("kind", ["atomic", "plain", "async"])
def test_a_broken_connection_is_not_met_twice(house: House, number: str, kind: str) -> None:
    """Django mends connections around requests; here it is done around handlers."""
    backends: list[int] = []

    def look(event: Event) -> None:
        if event.subject != "break":
            keep(event)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backends.append(cursor.fetchone()[0])
        if event.subject == "break" and event.attempt == 1:
            with psycopg.connect(shared_postgres().url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 60000)", [backends[-1]])  # and wait until it is gone

    async def look_on_the_loop(event: Event) -> None:
        await sync_to_async(look)(event)

    house.on(atomic=kind == "atomic", concurrency=1)(look_on_the_loop if kind == "async" else look)
    house.run("break")
    (_, delivery) = house.run(number)
    assert (delivery.status, delivery.attempts, kept(number)) == (DeliveryStatus.done, 1, 1)


# -- the view ----------------------------------------------------------------------------------


def post(body: bytes, path: str = "/hooks/shop", **options: Any) -> Any:
    client = Client(enforce_csrf_checks=True)
    options = {"HTTP_X_SIGNATURE": signed(body)["X-Signature"], **options}
    return client.generic("POST", path, body, "application/json", **options)


def test_the_inbox_follows_djangos_test_database(database: str) -> None:
    """Else the tests of a project would write into the database it works with."""
    assembly.get_bridge().start()
    inbox = assembly.get_inbox()
    assert database in str(inbox.store_url)
    assert inbox.store.database.conninfo.count(f"dbname={database}") == 1  # type: ignore[attr-defined]


def test_a_hook_is_taken_in_once(database: str, number: str) -> None:
    """Without a CSRF token, and without a transaction around it."""
    with_atomic = connections["default"].settings_dict | {"ATOMIC_REQUESTS": True}
    connections.settings["default"].update(with_atomic)
    try:
        first, second = post(order(number, number)), post(order(number, number))
    finally:
        connections.settings["default"]["ATOMIC_REQUESTS"] = False
    assert (first.status_code, first.json()["status"]) == (200, "accepted")
    assert (second.status_code, second.json()["status"]) == (200, "duplicate")
    assert first.json()["event_id"] == second.json()["event_id"]
    assert first["content-type"] == "application/json"


def test_a_stranger_learns_nothing(database: str) -> None:
    answers = [post(b"{}", "/hooks/nobody"), post(b"{}", HTTP_X_SIGNATURE="sha256=00"), Client().get("/hooks/shop")]
    assert {(answer.status_code, answer.content) for answer in answers} == {(401, answers[0].content)}


def test_a_body_that_ends_early_is_not_taken(database: str, number: str) -> None:
    """R7: Django would hand it on as if it were whole."""
    body = order(number, number)
    environ = RequestFactory().post("/hooks/shop", HTTP_X_SIGNATURE=signed(body)["X-Signature"]).environ
    environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body) + 10)}
    answer = views.hook(WSGIRequest(environ), "shop")
    assert (answer.status_code, json.loads(answer.content)["code"]) == (400, "malformed")
    assert post(body).json()["status"] == "accepted"


def test_a_body_that_somebody_else_has_read_is_our_own_fault(database: str) -> None:
    request = RequestFactory().post("/hooks/shop", {"a": "b"})
    assert request.POST["a"] == "b"
    with pytest.raises(ImproperlyConfigured, match="middleware"):
        views.hook(request, "shop")


def test_a_store_that_is_away_is_503(database: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R3"""
    away = DjangoInbox("postgresql://127.0.0.1:1/nowhere")
    away.source("shop", verify="none", key="$.id")
    bridge = Bridge(away)
    monkeypatch.setattr(assembly, "get_bridge", lambda: bridge)
    answer = post(order(number, number))
    assert (answer.status_code, answer["retry-after"]) == (503, "5")


def test_a_second_process_on_sqlite_takes_arrivals_in_too(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R61"""
    answers = []
    bridges = [Bridge(DjangoInbox(f"sqlite:{tmp_path}/inbox.db")) for _ in range(2)]
    for bridge in bridges:
        bridge.inbox.source("shop", verify="none", key="$.id")
        bridge.start()
    for bridge in reversed(bridges):
        monkeypatch.setattr(assembly, "get_bridge", lambda bridge=bridge: bridge)
        answers.append(post(order(number, number)).json())
    for bridge in bridges:
        bridge.stop()
    assert [answer["status"] for answer in answers] == ["accepted", "duplicate"]
    assert answers[0]["event_id"] == answers[1]["event_id"]


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "expected"),
    [
        ((), "10.0.0.1", "203.0.113.9", "10.0.0.1"),
        (("10.0.0.0/8",), "10.0.0.1", "203.0.113.9", "203.0.113.9"),
        (("10.0.0.0/8",), "192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ((), "", "203.0.113.9", "unknown"),
    ],
)
def test_a_proxy_is_believed_only_if_it_is_ours(trusted: Any, peer: str, forwarded: str, expected: str) -> None:
    request = RequestFactory().post("/hooks/shop", REMOTE_ADDR=peer, HTTP_X_FORWARDED_FOR=forwarded)
    views._peer_of.cache_clear()
    with override_settings(ONCEHOOK={"TRUSTED_PROXIES": trusted}):
        assert views._peer(request, views._headers(request)) == expected
    views._peer_of.cache_clear()


# -- the admin ---------------------------------------------------------------------------------


@pytest.fixture
def dead(house: House) -> StoredDelivery:
    """A dead letter whose sender is up to no good."""

    @house.on(atomic=False, retry=[])
    def handler(event: Event) -> None:
        raise RuntimeError("<script>alert(1)</script>")

    (delivery,) = house.run("<b>bold</b>")
    assert delivery.status is DeliveryStatus.dead
    return delivery


def browser(*permissions: str) -> tuple[Client, str]:
    user = User.objects.create_user(f"user{next(numbers)}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client, user.username


def shown(delivery: StoredDelivery) -> str:
    return f"dlv_{delivery.id.hex()}"


def messages(page: Any) -> list[str]:
    return re.findall(r'<li class="(?:info|warning|error)">(.*?)</li>', page.content.decode())


def audited(house: House) -> list[tuple[str, str]]:
    return [(line.actor, line.act) for line in house.bridge.call(house.inbox.admin.audit(limit=5))]


def test_permissions_decide_what_is_seen(house: House, dead: StoredDelivery) -> None:
    nobody, _ = browser()
    assert nobody.get("/admin/oncehook/deadletter/").status_code == 403
    assert nobody.get("/admin/oncehook/event/").status_code == 403
    assert Client().get("/admin/oncehook/event/").status_code == 302
    viewer, _ = browser("view_delivery", "view_event")
    page = viewer.get("/admin/oncehook/deadletter/").content.decode()
    assert shown(dead) in page
    assert f'href="/inbox/events/{dead.event_id}"' in page, "the project's URLs say where the dashboard is"
    assert "<select" not in page
    assert "<b>bold" not in page
    assert "<script>alert" not in page
    assert "&lt;b&gt;bold" in page
    assert viewer.get("/admin/oncehook/event/", {"q": f"source:{house.name}"}).content.count(b'title="evt_') == 1
    assert "Dead letters" in viewer.get("/admin/").content.decode()


def test_permissions_decide_what_is_done(house: House, dead: StoredDelivery) -> None:
    chosen = {"action": "replay", "chosen": [shown(dead)]}
    viewer, _ = browser("view_delivery", "discard_delivery")
    assert viewer.post("/admin/oncehook/delivery/", chosen).status_code == 403
    assert viewer.post("/admin/oncehook/delivery/", {"action": "delete", "chosen": [shown(dead)]}).status_code == 403
    assert house.bridge.call(house.inbox.admin.delivery(dead.id)).status is DeliveryStatus.dead


def test_a_replay_carries_the_users_name(house: House, dead: StoredDelivery) -> None:
    operator, name = browser("view_delivery", "replay_delivery")
    done = operator.post(
        "/admin/oncehook/deadletter/", {"action": "replay", "chosen": [shown(dead)], "reason": "mended"}, follow=True
    )
    assert "Replay: 1 of 1" in messages(done)
    assert (name, "replay") in audited(house)
    house.bridge.call(house.inbox.drain())
    assert house.bridge.call(house.inbox.admin.delivery(dead.id)).run == 2
    again = operator.post("/admin/oncehook/deadletter/", {"action": "replay", "chosen": [shown(dead)]}, follow=True)
    assert "Replay: 0 of 1" in messages(again)


def test_a_discard_carries_the_users_name(house: House, dead: StoredDelivery) -> None:
    operator, name = browser("view_delivery", "discard_delivery")
    operator.post("/admin/oncehook/deadletter/", {"action": "discard", "chosen": [shown(dead)]})
    assert (name, "discard") in audited(house)
    assert house.bridge.call(house.inbox.admin.delivery(dead.id)).status is DeliveryStatus.discarded


# -- the dashboard -----------------------------------------------------------------------------

OURS = {"HTTP_SEC_FETCH_SITE": "same-origin"}


def test_the_dashboard_is_for_the_projects_staff_under_wsgi(database: str, number: str) -> None:
    body = order(f"event-{number}", number)
    assert Client().post("/hooks/shop", body, "application/json", headers=signed(body)).status_code == 200
    nobody, _ = browser()
    for client in (Client(), nobody):
        assert client.get("/inbox/events").status_code == 403
        assert client.get("/inbox/api/v1/events").status_code == 401
    viewer, _ = browser("view_delivery", "view_event")
    page = viewer.get("/inbox/events", {"query": f"subject:{number}"})
    assert (page.status_code, "order.paid" in page.text) == (200, True)
    assert 'href="/inbox/dead"' in page.text
    assert "http://testserver/hooks/shop" in viewer.get("/inbox/sources").text
    assert viewer.get("/inbox/api/v1/events", {"query": f"subject:{number}"}).json()["items"]
    assert viewer.get("/inbox/static/oncehook.css")["Content-Type"].startswith("text/css")
    assert viewer.get("/inbox/ui/stream").status_code == 501
    refused = viewer.post("/inbox/destinations/keep/pause", {"reason": "x"}, **OURS)
    assert refused.status_code == 403


def test_what_is_done_at_the_dashboard_carries_the_users_name(database: str) -> None:
    client = Client(enforce_csrf_checks=True)
    user = User.objects.create_user(f"user{next(numbers)}", is_staff=True, is_superuser=True)
    client.force_login(user)
    pause = "/inbox/destinations/keep/pause"
    assert client.post(pause, {"reason": "x"}, HTTP_SEC_FETCH_SITE="cross-site").status_code == 403
    assert client.post(pause, {"reason": "no paper"}, **OURS).status_code == 303
    resume = "/inbox/api/v1/destinations/keep/resume"
    assert client.post(resume, "{}", "application/json", **OURS).status_code == 200
    audit = assembly.get_bridge().call(assembly.get_inbox().admin.audit(limit=2))
    assert [(line.actor, line.act) for line in audit] == [(user.username, "resume"), (user.username, "pause")]


def test_another_rule_may_decide_at_the_dashboard(database: str) -> None:
    (pattern,), *_ = dashboard(authorize=lambda request: ("anna", "viewer") if "anna" in request.GET else None)
    for query, status in (("", 403), ("anna", 200)):
        asked = RequestFactory().get(f"/inbox/events?{query}")
        assert pattern.callback(asked, rest="events").status_code == status


def test_a_query_that_cannot_be_read_is_told(database: str) -> None:
    viewer, _ = browser("view_event")
    page = viewer.get("/admin/oncehook/event/", {"q": "colour:red", "before": ""})
    assert page.status_code == 200
    assert "colour" in messages(page)[0]
    assert "no place" in messages(viewer.get("/admin/oncehook/event/", {"before": "zz"}))[0]


def test_older_rows_follow(house: House) -> None:
    @house.on(atomic=False)
    def handler(event: Event) -> None: ...

    house.run(*[f"s{n}" for n in range(53)])
    viewer, _ = browser("view_delivery")
    found: set[str] = set()
    address = f"?q=destination:{house.name}"
    while address:
        page = viewer.get(f"/admin/oncehook/delivery/{address}").content.decode()
        rows = set(re.findall(r'<th scope="row" title="(dlv_\w+)"', page))
        assert not rows & found
        found |= rows
        address = page.partition('class="paginator"><a href="')[2].partition('"')[0].replace("&amp;", "&")
    assert len(found) == 53


def test_threads_may_ask_at_once(house: House, number: str) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(post(order(number, number)).status_code)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 16


PAGE = Path(__file__).parents[2] / "docs/how-to/django.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_blocks_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = DjangoInbox(str(assembly.store_url()))
    inbox.alias = assembly.alias()
    made = assembly.get_inbox.__wrapped__
    monkeypatch.setattr(assembly, "get_inbox", lambda: inbox)
    monkeypatch.setattr(assembly, "get_bridge", lambda: Bridge(inbox))
    monkeypatch.setenv("STRIPE_SECRET", "whsec_test")
    sources = []
    assert len(blocks()) == 7
    for block in blocks():
        said: dict[str, Any] = {"__name__": "block"}
        exec(compile(block, "django.md", "exec"), said)
        if "ONCEHOOK" in said:
            with override_settings(ONCEHOOK=said["ONCEHOOK"]):
                sources += made().sources
    assert sources == ["stripe", "shop"]
    assert list(inbox.destinations) == ["keep", "keep_latest"]


def test_versions_that_come_out_of_order_end_as_the_page_says(
    database: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, handler = (block for block in blocks() if '"rank"' in block or "latest_wins" in block)
    said: dict[str, Any] = {}
    exec(settings, said)
    with override_settings(ONCEHOOK=said["ONCEHOOK"]):
        inbox = assembly.get_inbox.__wrapped__()
    monkeypatch.setattr(assembly, "get_inbox", lambda: inbox)
    exec(handler, {"__name__": "block"})
    inbox.sources["shop"].settings.budget = 60.0
    bridge = Bridge(inbox, work=True)
    rows = re.findall(
        r"^\| version (\d)(?:, `(\w+)`| once more) \| (.*?) \| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE
    )
    told: list[str] = []
    bodies: dict[str, bytes] = {}
    for version, status, _, state in rows:
        body = {"number": number, "version": int(version), "status": status}
        receipt = bridge.receive("shop", {}, bodies.setdefault(version, json.dumps(body).encode()))
        bridge.call(inbox.drain())
        assert Order.objects.get(number=number).status == state
        told.append(receipt.outcome)
    assert told == ["accepted", "accepted", "accepted", "duplicate"]
    page = bridge.call(inbox.admin.deliveries(inbox.admin.read(f"subject:{number}")))
    assert [(one.status, one.note) for one in reversed(page.items)] == [
        (DeliveryStatus.done, None),
        (DeliveryStatus.done, None),
        (DeliveryStatus.done, "stale"),
    ]
    assert Order.objects.get(number=number).changes == 2
    bridge.stop()


def test_the_page_names_every_setting() -> None:
    page = PAGE.read_text()
    assert not [key for key in assembly.KEYS if f"`{key}`" not in page]
