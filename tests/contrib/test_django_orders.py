"""The third story in Django and PostgreSQL: two hooks of one object a microsecond apart, in several processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncehook import __version__
from tests.contrib.django_shop import Shop, order, signed

SERVERS = ["gunicorn", "runserver", "uvicorn", "asgi"]
"""The last two: hooks in front of Django, and Django's own view."""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Shop(tmp_path) as shop:
        yield shop


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with Shop(tmp_path_factory.mktemp(request.param), request.param) as shop:
        shop.serve()
        yield shop
    assert "Traceback" not in shop.log(), shop.log()


def test_sixteen_hooks_of_one_order_make_one_row_and_nobody_quits(served: Shop) -> None:
    """R24, R42, R51: sixteen changes of one order at once, and one hook sixteen times at once."""
    shop = served
    workers = [shop.work(), shop.work()]
    changes = shop.post_at_once([order(f"evt-{n}", "A1") for n in range(16)])
    assert [status for status, _ in changes] == [200] * 16
    assert {answer["status"] for _, answer in changes} == {"accepted"}
    copies = shop.post_at_once([order("same", "B2")] * 16)
    assert [status for status, _ in copies] == [200] * 16
    assert sorted(answer["status"] for _, answer in copies) == ["accepted"] + ["duplicate"] * 15
    assert len({answer["event_id"] for _, answer in copies}) == 1

    shop.wait_for(lambda: sum(changes for _, _, changes in shop.orders()) >= 17)
    for worker in workers:
        assert shop.stop(worker) == 0
    assert shop.orders() == [("A1", "paid", 16), ("B2", "paid", 1)]
    outcomes = shop.rows("SELECT count(*), max(n) FROM oncehook.attempts")
    assert outcomes == [(17, 1)], "nobody failed, and nobody tried twice"
    assert shop.states() == {"done": 17}


def test_the_contract_holds_behind_every_server(served: Shop) -> None:
    """R6, R7, R8: the same answers as anywhere, bodies whole or not at all."""
    shop = served
    assert shop.request("POST", "/hooks/shop", b"{}", {"X-Signature": "sha256=00"})[0] == 401
    assert shop.request("POST", "/hooks/nobody", b"{}")[0] == 401
    assert shop.request("GET", "/hooks/shop")[0] == 401
    assert shop.request("POST", "/hooks/shop/", order("a", "C3"), signed(order("a", "C3")))[0] == 200
    large = b" " * (1 << 20) + b"{}"
    assert shop.request("POST", "/hooks/shop", large, signed(large))[0] == 413

    body = order("chunked", "C3")
    status, answer = shop.request("POST", "/hooks/shop", iter([body]), signed(body), encode_chunked=True)  # type: ignore[arg-type]
    if shop._server == "runserver":  # it cannot read such a body, and an empty one must not be taken for it
        assert (status, json.loads(answer)["code"]) == (400, "malformed")
    else:
        assert (status, json.loads(answer)["status"]) == (200, "accepted")
        many = iter([b" " * 65_536] * 20)
        assert shop.request("POST", "/hooks/shop", many, signed(b""), encode_chunked=True)[0] == 413  # type: ignore[arg-type]
    bodies = [bytes(body) for (body,) in shop.rows("SELECT body FROM oncehook.events WHERE subject = 'C3'")]
    assert bodies == [order("a", "C3"), order("chunked", "C3")][: 1 if shop._server == "runserver" else 2]
    strangers = shop.rows("SELECT count(*) FROM oncehook.events WHERE subject IS NULL")
    assert strangers == [(0,)]


@pytest.mark.parametrize("fault", ["before_tx_settle", "before_transaction_commit", "after_effect"])
def test_effects_are_one_wherever_the_worker_is_killed(shop: Shop, fault: str) -> None:
    """R51"""
    shop.serve()
    assert shop.post(order("once", "A1"))[1]["status"] == "accepted"
    killed = shop.work(ONCEHOOK_FAULT=fault)
    assert killed.wait() == -9
    shop._processes.remove(killed)
    committed = fault == "after_effect"
    assert shop.orders() == ([("A1", "paid", 1)] if committed else [])
    shop.let_leases_lapse()
    shop.work()
    shop.wait_for(shop.orders)
    assert shop.orders() == [("A1", "paid", 1)]
    assert shop.states() == {"done": 1}


def test_the_command_line_knows_the_inbox(shop: Shop) -> None:
    shop.serve()
    shop.post(order("one", "A1"))
    worked = shop.manage("oncehook", "worker", "--drain", "--settings", "shop.settings")
    assert worked.returncode == 0, worked.stderr
    assert shop.states() == {"done": 1}
    assert re.search(r"version (\d+) of \1", shop.manage("oncehook", "db", "status").stdout)
    destinations = json.loads(shop.manage("oncehook", "destinations", "--json").stdout)
    assert "orders.hooks.keep" in json.dumps(destinations)
    shown = shop.manage("oncehook", "--help")
    assert (shown.returncode, "manage.py oncehook" in shown.stdout) == (0, True)
    assert shop.manage("oncehook", "show", "nonsense").returncode == 2
    assert shop.manage("oncehook", "version").stdout.strip() == __version__


def test_migrate_may_be_run_at_any_time(shop: Shop) -> None:
    """R65: one history, whoever runs it."""
    versions = shop.rows("SELECT version FROM oncehook.migrations ORDER BY 1")
    assert versions
    for command in (("migrate", "--verbosity", "2"), ("oncehook", "db", "migrate")):
        done = shop.manage(*command)
        assert done.returncode == 0, done.stderr
    assert shop.rows("SELECT version FROM oncehook.migrations ORDER BY 1") == versions
    assert shop.manage("makemigrations", "--check", "--dry-run").returncode == 0


def test_the_dashboard_is_for_the_projects_staff(tmp_path: Path) -> None:
    """Mounted in front of Django, on the session that Django gave out."""
    with Shop(tmp_path, "uvicorn") as shop:
        shop.serve()
        shop.post(order("one", "A1"))
        sessions = shop.manage("shell", "-c", LOG_IN)
        assert sessions.returncode == 0, sessions.stderr
        admin, viewer, stranger = sessions.stdout.split()[-3:]
        status, page = shop.request("GET", "/inbox/events", headers={"Cookie": f"sessionid={viewer}"})
        assert (status, b"order.paid" in page) == (200, True)
        assert "viewer · viewer" in page.decode()  # the user's name, which the audit log has, and the role
        assert shop.request("GET", "/inbox/events", headers={"Cookie": f"sessionid={admin}"})[0] == 200
        for cookie in ({"Cookie": f"sessionid={stranger}"}, {"Cookie": "sessionid=guessed"}, {}):
            status, page = shop.request("GET", "/inbox/events", headers=cookie)
            assert b"order.paid" not in page
            assert status != 200


LOG_IN = """
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.backends.db import SessionStore

for name in ("admin", "viewer", "guest"):
    user = User.objects.create_user(name, is_staff=name != "guest", is_superuser=name == "admin")
    if name == "viewer":
        user.user_permissions.set(Permission.objects.filter(codename__in=["view_event", "view_delivery"]))
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    print(session.session_key)
"""
