"""Reports in words: schedules, spans, and what of a request is masked."""

from __future__ import annotations

import pytest

from oncehook import reports, retry
from oncehook.human import show_span as span
from oncehook.inbox import Inbox
from oncehook.reports import MASK, request_of, schedule
from oncehook.web.dashboard.render import handler_name

# -- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (retry.DURABLE, "10 s, 1 min, 5 min … 24 h: 10 attempts over 3 days"),
        (retry.QUICK, "2.5 s, 4.5 s: 3 attempts over 7 s"),
        (retry.Policy(attempts=1), "1 attempt"),
        (retry.Policy(attempts=3, base=60.0, cap=3600.0), "up to 1 min, 2 min: 3 attempts over 3 min"),
        (retry.policy(["90s"]), "1.5 min: 2 attempts over 1.5 min"),
    ],
)
def test_a_schedule_is_told_in_words(policy: retry.Policy, said: str) -> None:
    assert schedule(policy) == said


def test_spans_are_told_in_their_unit() -> None:
    assert [span(s) for s in (0.2, 59, 60, 3600, 86_400, 172_800, 600_000)] == [
        "0.2 s", "59 s", "1 min", "1 h", "24 h", "2 days", "7 days",
    ]  # fmt: skip


# -- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["authorization", "cookie", "x-api-key", "apikey", "x-gitlab-token", "x-secret", "x-auth-token", "client_secret"],
)
def test_what_opens_a_door_is_masked(name: str) -> None:
    shown = request_of(f"POST /in/x?{name}=v&a=b\r\n{name}: v".encode())
    assert shown.target == f"/in/x?{name}={MASK}&a=b"
    assert list(shown.headers) == [(name, MASK)]


@pytest.mark.parametrize("name", ["x-hub-signature-256", "webhook-signature", "content-type", "idempotency-key", "key"])
def test_what_only_proves_is_shown(name: str) -> None:
    assert list(request_of(f"POST /in/x\r\n{name}: v".encode()).headers) == [(name, "v")]


def test_a_head_of_any_shape_can_be_shown() -> None:
    for head in (b"", b"POST", b"POST /x?\r\n: v\r\nname", b"EMIT app\r\na" * 3):
        request_of(head)


def test_places_of_a_rule_are_listed_once_with_composites_as_such() -> None:
    rule = [["$.account", "$.id"], "$.id", ["$.account", "$.id"], ["$.only"]]
    assert reports.list_places(rule) == ["$.account + $.id", "$.id", "$.only"]
    assert reports.list_places("$.id") == ["$.id"]
    assert reports.list_places(handler_name) == ["handler_name()"]
    assert reports.list_places(None) == []


def test_a_source_names_where_its_secret_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_SECRET", "whsec_" + "a" * 32)
    inbox = Inbox("sqlite:unused.db")
    source = inbox.source("stripe", preset="stripe", secret_env="STRIPE_SECRET")
    shown = reports.show_source(source, [], None, {})
    assert shown.secret_names == ["env:STRIPE_SECRET"]
    assert inbox.places["source", "stripe"].partition(":")[0].endswith("test_reports.py")


def test_a_function_inside_another_has_a_short_name() -> None:
    assert handler_name("shop.app._add.<locals>.reply") == "shop.app:reply"
    assert handler_name("shop.app._add.<locals>.inner.<locals>.reply") == "shop.app:reply"
    assert handler_name("shop.app.reply") == "shop.app.reply"
