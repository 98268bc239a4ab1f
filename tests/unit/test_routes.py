"""Routes: which destinations an event goes to."""

from __future__ import annotations

import pytest

from oncehook.errors import ConfigError
from oncehook.model import Arrival, DeliveryId, Item, new_id, subject_key
from oncehook.routes import Route, plan


def item(kind: str = "message.new", body: bytes = b"{}", subject: str | None = None) -> Item:
    return Item(new_id(), kind, None, None, 1.0, subject, body, b"hash")


def matches(when: dict[str, str | list[str]], it: Item, **headers: str) -> bool:
    pairs = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    return Route("orders", "sink", when=when).matches(Arrival("orders", pairs, b"{}", b"env=test"), it)


@pytest.mark.parametrize(
    ("pattern", "kind", "expected"),
    [
        *(("message.*", "message.new", True), ("message.*", "messages.new", False), ("message.*", "message.", True)),
        *(("*", "", True), ("message.new", "message.new", True), ("message.new", "message.newer", False)),
        *(("Message.*", "message.new", False), ("!=message.*", "message.new", False), ("!=message.*", "order", True)),
        *(("message.?ew", "message.new", True), ("*", "with\nline", True)),
    ],
)
def test_types(pattern: str, kind: str, expected: bool) -> None:
    assert matches({"type": pattern}, item(kind)) is expected


@pytest.mark.parametrize(
    ("wanted", "value", "expected"),
    [
        *((">1000", b"1001", True), (">1000", b"1000", False), (">= 1000", b"1000", True), ("<0.5", b"0.25", True)),
        *(("<=0.5", b"0.50", True), (">1000", b'"2000"', True), (">1000", b'"many"', False), (">1000", b"null", False)),
        *((">-5", b"-4.9", True), (">1000", b'"NaN"', False), (">1000", b'"Infinity"', False), ("<1e3", b"999", True)),
        *(("open", b'"open"', True), ("true", b"true", True), ("1", b"1.0", True), ("!=open", b"null", True)),
        *((">1000", b"9" * 300, True), ("o*", b'"open"', True)),
    ],
)
def test_values_in_the_body(wanted: str, value: bytes, expected: bool) -> None:
    assert matches({"$.order.amount": wanted}, item(body=b'{"order": {"amount": %s}}' % value)) is expected


def test_any_of_a_list_and_all_of_a_table() -> None:
    when: dict[str, str | list[str]] = {"type": ["message.*", "status.*"], "$.n": ">1", "header:X-Env": "prod"}
    assert matches(when, item("status.read", b'{"n": 2}'), X_Env="prod")
    assert not matches(when, item("order.new", b'{"n": 2}'), X_Env="prod")
    assert not matches(when, item("status.read", b'{"n": 1}'), X_Env="prod")
    assert not matches(when, item("status.read", b'{"n": 2}'), X_Env="test")
    assert not matches(when, item("status.read", b'{"n": 2}'))
    assert matches({"query:env": "test"}, item())
    assert matches({}, item())


@pytest.mark.parametrize("body", [b"", b"not json", b"[" * 10_000, b"[1]", b"null"])
def test_a_body_that_cannot_be_read_matches_no_value(body: bytes) -> None:
    assert not matches({"$.n": ">0"}, item(body=body))
    assert matches({"type": "message.*"}, item(body=body))


@pytest.mark.parametrize("wanted", [">", ">many", "<= ", ">NaN", "<Infinity"])
def test_a_comparison_needs_a_number(wanted: str) -> None:
    with pytest.raises(ConfigError, match="needs a number"):
        Route("orders", "sink", when={"$.n": wanted})


def test_a_place_must_be_one() -> None:
    with pytest.raises(ConfigError):
        Route("orders", "sink", when={"nowhere": "x"})


def test_one_delivery_per_destination_and_the_first_route_counts() -> None:
    routes = [
        Route("orders", "a", when={"type": "other"}, destination_id=1),
        Route("orders", "b", destination_id=2),
        Route("orders", "a", destination_id=1),
        Route("orders", "b", when={"type": "message.*"}, destination_id=2),
    ]
    event = item(subject="42")
    planned = plan(routes, Arrival("orders", [], b"{}"), event)
    assert [(p.id, p.destination_id, p.subject_key) for p in planned] == [
        (DeliveryId.of(event.event_id, 2), 2, subject_key("b", "orders", "42")),
        (DeliveryId.of(event.event_id, 1), 1, subject_key("a", "orders", "42")),
    ]


def test_without_a_subject_nobody_waits() -> None:
    (planned,) = plan([Route("orders", "a", destination_id=1)], Arrival("orders", [], b""), item())
    assert planned.subject_key is None


def test_the_same_subject_of_two_sources_is_two() -> None:
    assert subject_key("a", "orders", "42") != subject_key("a", "others", "42") != subject_key("b", "others", "42")
    assert subject_key("a", "bc", "d") != subject_key("ab", "c", "d")
