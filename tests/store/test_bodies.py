"""What bodies say: `body.amount:>1000` finds the same on every engine, whatever strangers have sent (S12, S36)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from oncehook.model import SIGNS, Clause, Engine, Filter, read_number
from oncehook.query import parse
from oncehook.store.base import Store
from oncehook.store.cipher import Cipher
from oncehook.store.filters import encode_clauses
from oncehook.store.migrate import migrations
from oncehook.store.postgres import read as postgres_read
from oncehook.store.sqlite import connection as sqlite_connection
from oncehook.store.sqlite import read
from tests.servers import fresh_schema, shared_postgres
from tests.store.conftest import Ground
from tests.store.making import CRM, MAIL, dead_letters, deliver_one, finish, item, keep, replay_all, statuses

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)

BODIES: dict[str, bytes] = {
    "order": b'{"amount": 1000, "paid": true, "note": null, "to": {"name": "Ann B", "zip": "007"}}',
    "large": b'{"amount": 1000.5, "paid": false, "id": 12345678901234567, "items": [{"sku": "a"}, {"sku": "b"}]}',
    "text": b'{"amount": "1000", "paid": "true", "note": "null", "items": {"0": {"sku": "a"}}}',
    "odd": rb'{"a.b": 1, "two words": 2, "q\"x": 3,"caf\u00e9": "\u00e9t\u00e9", "": {"": 4},"\\": 5, "$": 6,"[0]": 7}',
    "twice": b'{"amount": 1, "amount": 2000}',
    "zero": b'{"nul": "a\\u0000b", "back": "\\\\u0000", "amount": 3}',
    "array": b'[10, [20, 30], {"amount": 40}]',
    "scalar": b"1000",
    "spaced": b' \r\n\t{"amount" : 1e3 } ',
    "deep": b'{"amount": 1000, "deep": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "latin": b'{"amount": 1000, "name": "caf\xe9"}',
    "stray": b'{"amount": 1000, "name": "\xa0"}',
    "half": b'{"amount": 1000, "name": "\\ud800"}',
    "NUL": b'{"amount": 1000}\x00',
    "NUL inside": b'{"amount": 1000, "name": "a\x00b"}',
    "json5": b"{amount: 1000, 'paid': true,}",
    "comment": b'{"amount": 1000} // paid',
    "open": b'{"amount": 1000',
    "two": b'{"amount": 1000} {"amount": 1000}',
    "form": b"amount=1000&paid=true",
    "binary": b"\x7b\xff\x00\x17\x0c\x80",
    "jsonb": b"\x8c\x67amount\x431000",
    "BOM": b'\xef\xbb\xbf{"amount": 1000}',
    "empty": b"",
}
QUESTIONS: list[tuple[str, list[str]]] = [
    ("body.amount:1000", ["order", "spaced", "text"]),
    ("body.amount:1000.0", ["order", "spaced"]),
    ("body.amount:1e3", ["order", "spaced"]),
    ("body.amount:>1000", ["large", "twice"]),
    ("body.amount:>=1000", ["large", "order", "spaced", "twice"]),
    ("body.amount:<1000", ["zero"]),
    ("body.amount:<=1000", ["order", "spaced", "zero"]),
    ("body.amount:>=1000 body.amount:<1000.6", ["large", "order", "spaced"]),
    ("body.amount:>-1e300", ["large", "order", "spaced", "twice", "zero"]),
    ("body.amount:1", []),
    ("body.amount:1000x", []),
    ("body.Amount:1000", []),
    ("body.paid:true", ["order", "text"]),
    ("body.paid:false", ["large"]),
    ("body.paid:1", []),
    ("body.note:null", ["order", "text"]),
    ("body.none:null", []),
    ('body.to.name:"Ann B"', ["order"]),
    ('body.to.name:"ann b"', []),
    ('body.to.name:"Ann%"', []),
    ("body.to.zip:007", ["order"]),
    ("body.to.zip:7", []),
    ("body.to.zip:>6", []),
    ("body.to:Ann", []),
    ("body.to.name.x:Ann", []),
    ("body.id:12345678901234567", ["large"]),
    ("body.id:12345678901234568", []),
    ("body.id:>12345678901234566", ["large"]),
    ("body.items.0.sku:a", ["large", "text"]),
    ("body.items.1.sku:b", ["large"]),
    ("body.items.2.sku:b", []),
    ("body.items.-1.sku:b", []),
    ("body.items.00.sku:a", []),
    ("body.items.99999999999999999999.sku:a", []),
    ("body.items.0.sku:a body.items.1.sku:b", ["large"]),
    ('body."a.b":1', ["odd"]),
    ('body."two words":2', ["odd"]),
    (r'body."q\"x":3', ["odd"]),
    ("body.café:été", ["odd"]),
    ('body."".""' + ":4", ["odd"]),
    (r'body."\\":5', ["odd"]),
    ("body.$:6", ["odd"]),
    ("body.[0]:7", ["odd"]),
    (r'body.back:"\\u0000"', ["zero"]),
    ("body.0:10", ["array"]),
    ("body.1.1:>=30", ["array"]),
    ("body.2.amount:40", ["array"]),
    ("body.amount:' body.amount:\"'; DROP TABLE events; --\"", []),
]


def clauses(text: str) -> Filter:
    return parse(text, NOW)


async def test_every_engine_reads_bodies_alike(store: Store) -> None:
    """Of events and of deliveries, and what is no JSON is simply not found."""
    verdicts = await keep(store, *[item(type_=name, to=[CRM], body=body) for name, body in BODIES.items()])
    assert len(verdicts) == len(BODIES)
    wrong = []
    for text, answer in QUESTIONS:
        events = await store.find_events(clauses(text), limit=100)
        deliveries = await store.find_deliveries(clauses(text), limit=100)
        found = sorted(one.type for one in events.items), sorted(one.type for one in deliveries.items)
        if found != (answer, answer) or events.next or deliveries.next:
            wrong.append((text, answer, found))
    assert wrong == [], wrong


async def test_with_every_other_word(store: Store) -> None:
    """Whichever index the other words choose."""
    await finish_all(store)
    wanted = b'{"n": 7}'
    [dead] = await dead_letters(store, "s1", body=wanted)
    await dead_letters(store, "s1", body=b'{"n": 8}')
    paid = await deliver_one(store, "s2", body=wanted, source="payments")
    await finish(store)
    for text, answer in {
        "body.n:7": [paid, dead],
        "body.n:7 status:dead": [dead],
        "body.n:7 status:done": [paid],
        "body.n:7 status:leased": [],
        "body.n:7 subject:s1": [dead],
        "body.n:7 source:payments": [paid],
        "body.n:7 source:payments subject:s1": [],
        "body.n:7 order.created": [paid, dead],
        "body.n:7 destination:mail": [],
        "body.n:7 since:1h": [paid, dead],
    }.items():
        meant = parse(text, datetime.now(UTC))
        assert [one.id for one in (await store.find_deliveries(meant)).items] == answer, text
        events = [one.id[:14] for one in (await store.find_events(meant)).items]
        assert events == [one[:14] for one in answer], text
    by_id = Filter(ids=(dead, paid), body=clauses("body.n:7").body)
    assert {one.id for one in (await store.find_deliveries(by_id)).items} == {dead, paid}
    assert len((await store.find_events(by_id)).items) == 2
    by_id = Filter(ids=(dead, paid), body=clauses("body.n:8").body)
    assert not (await store.find_deliveries(by_id)).items
    assert not (await store.find_events(by_id)).items


async def finish_all(store: Store) -> None:
    await keep(store, *[item(to=[CRM, MAIL], body=b'{"n": 1}') for _ in range(3)])
    await finish(store)
    await finish(store, to=2)


async def test_a_replay_and_a_discard_mean_what_the_body_says(store: Store) -> None:
    [one] = await dead_letters(store, None, body=b'{"n": 1}')
    [two] = await dead_letters(store, None, body=b'{"n": 2}')
    [three] = await dead_letters(store, None, body=b'{"n": 3}')
    assert (await store.plan_replay(clauses("body.n:9"), force=False)).total == 0
    assert await store.discard(clauses("body.n:9"), "ann", "none at all") == 0
    planned = await store.plan_replay(clauses("body.n:2"), force=False)
    assert (planned.total, [sample.id for sample in planned.sample]) == (1, [two])
    assert await store.discard(clauses("body.n:>2"), "ann", "too much") == 1
    assert (await replay_all(store, clauses("body.n:<2"), expected=1)).planned == 1
    await store.feed_replays()
    assert await statuses(store, [one, two, three]) == ["pending", "dead", "discarded"]


async def test_large_bodies_are_looked_into_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that has looked into enough bytes says how far it came."""
    for module in (read, postgres_read):
        monkeypatch.setattr(module, "LOOKED_INTO", 2500)
    body = json.dumps({"n": 0, "fill": "x" * 980}).encode()
    small = await deliver_one(store, "s", body=b'{"n": 1}')
    for _ in range(7):
        await deliver_one(store, "s", body=body)
    for text in ("body.n:1", "body.n:1 subject:s", "body.n:1 status:pending", "body.n:1 source:orders"):
        for look in (store.find_events, store.find_deliveries):
            assert await pages(look, clauses(text)) == [[], [], [], [small[:14]]], (look.__name__, text)
    monkeypatch.setattr(read, "LOOKED_INTO", 10)
    monkeypatch.setattr(postgres_read, "LOOKED_INTO", 10)
    assert len(await pages(store.find_events, clauses("body.n:0"))) >= 7  # one by one, and it ends


async def pages(look: Callable[..., Any], filter: Filter) -> list[list[bytes]]:
    seen: list[list[bytes]] = []
    before = None
    while True:
        page = await look(filter, before=before)
        seen.append([one.id[:14] for one in page.items])
        before = page.next
        if before is None:
            return seen


async def test_what_was_taken_out_is_not_found(ground: Ground, store: Store) -> None:
    await keep(store, item(body=b'{"card": "4111"}'), item(body=b'{"card": "[redacted]"}'))
    assert len((await store.find_events(clauses("body.card:4111"))).items) == 1
    ground.sql("UPDATE events SET body = ''")
    assert not (await store.find_events(clauses("body.card:4111"))).items


# -- against a model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sqlite_says() -> Iterator[Callable[[bytes, Clause], bool]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        sqlite_connection.teach(connection, Cipher())

        def says(body: bytes, *asked: Clause) -> bool:
            text = "SELECT count(*) FROM (SELECT :body AS body, NULL AS id) e WHERE true " + read.SAYS
            required = [clause for clause in asked if not clause.negated]
            values = {"clauses": encode_clauses(asked, str), "required": encode_clauses(required, str)}
            [(n,)] = connection.execute(text, {"body": body, **values} | ({} if required else {"required": None}))
            return bool(n)

        yield says


def test_python_is_asked_about_few() -> None:
    """Each call would wait for the other threads of a busy server: SQLite looks alone, and asks about what it found."""
    told: list[bytes] = []

    def says(body: bytes, asked: str) -> bool:
        told.append(body)
        return sqlite_connection.says(body, asked)

    with closing(sqlite3.connect(":memory:")) as connection:
        sqlite_connection.teach(connection, Cipher())
        connection.create_function("body_says", 2, says, deterministic=True)
        connection.execute("CREATE TABLE events (body BLOB, id BLOB)")
        sent = [b'{"n": %d, "t": "%d"}' % (n, n) for n in range(100)] + [b"no JSON", b'{"n": "97"}']
        connection.executemany("INSERT INTO events (body) VALUES (?)", [(one,) for one in sent])
        for clause, few in {
            Clause(("n",), ">", "97"): 3,  # one at the edge
            Clause(("n",), "<", "1"): 2,
            Clause(("n",), "=", "97"): 2,
            Clause(("t",), "=", "97"): 1,
            Clause(("t",), ">", "97"): 0,
            Clause(("n", "t"), "=", "97"): 0,
        }.items():
            told.clear()
            found = connection.execute(
                "SELECT 1 FROM events e WHERE true " + read.SAYS,
                dict.fromkeys(("clauses", "required"), encode_clauses([clause], str)),
            )
            assert len(found.fetchall()) <= len(told) == few, clause


@pytest.fixture(scope="module")
def postgres_says() -> Iterator[Callable[[bytes, Clause], bool]]:
    schema = fresh_schema()
    with psycopg.connect(shared_postgres().url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}; SET search_path = {schema}")
        for step in migrations(Engine.postgres):
            connection.execute(step.sql.encode())

        def says(body: bytes, *asked: Clause) -> bool:
            row = connection.execute("SELECT body_says(%s, %s::jsonb)", [body, encode_clauses(asked, str)]).fetchone()
            assert row is not None
            return bool(row[0])

        yield says
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


def at(value: Any, path: tuple[str, ...]) -> list[Any]:
    """What stands there, or nothing."""
    if not path:
        return [value]
    members = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [found for name, inner in members if str(name) == path[0] for found in at(inner, path[1:])]


def holds(clause: Clause, value: Any) -> bool:
    for found in at(value, clause.path):
        if isinstance(found, bool) or found is None or isinstance(found, str):
            text = found if isinstance(found, str) else {True: "true", False: "false", None: "null"}[found]
            return clause.sign == "=" and text == clause.value
        number = read_number(clause.value)
        if isinstance(found, dict | list) or number is None:
            return False
        wanted = {"=": [0], ">": [1], ">=": [0, 1], "<": [-1], "<=": [-1, 0]}[clause.sign]
        return (found > number) - (found < number) in wanted
    return False


names = st.sampled_from(["a", "b", "0", "1", "a.b", "", 'q"', "\\", "é", "\U0001f600", "\ud7ff"])
whole = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)
real = st.sampled_from([0.0, -0.0, 0.1, 1.0, 1.5, -2.0, 1e3, 1e-7, 1e300, 5e-324]) | st.floats(-1e9, 1e9, width=32)
letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(["1", "1.0", "true", "null"])
scalars = st.none() | st.booleans() | whole | real | letters
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4))
some = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=3)


def scalar_texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every place of a value, and something that may stand there."""
    if isinstance(value, dict | list):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in members:
            yield from scalar_texts(inner, (*path, str(name)))
    yield path, value if isinstance(value, str) else json.dumps(value)


@st.composite
def bodies_and_clauses(draw: st.DrawFn) -> tuple[Any, Clause]:
    value = draw(st.dictionaries(names, values, max_size=3) | st.lists(values, max_size=3))
    places = [(path, text) for path, text in scalar_texts(value) if path]
    aimed = st.sampled_from(places) if places else st.nothing()
    path, text = draw(aimed | st.tuples(st.lists(names, min_size=1, max_size=3).map(tuple), some))
    text = draw(st.just(text) | whole.map(str) | real.map(repr) | some)
    sign = draw(st.sampled_from(SIGNS)) if read_number(text) is not None else "="
    return value, Clause(path, sign, text.replace("\0", "") or "x")


def is_close(clause: Clause, value: Any) -> bool:
    """A whole number beside a fraction, both beyond what a float can tell apart: said to be compared as floats."""
    number, found = read_number(clause.value), at(value, clause.path)
    return any(
        isinstance(one, int | float) and isinstance(one, int) != isinstance(number, int) and abs(one) > 2**53
        for one in found
    )


Says = Callable[..., bool]
# How long anything takes says nothing about it.
MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@given(asked=bodies_and_clauses(), ascii_only=st.booleans())
@MANY
@example(asked=({"a": 10}, Clause(("a",), "=", "10.0")), ascii_only=True)
@example(asked=({"a": 2**63 - 1}, Clause(("a",), ">", str(2**63 - 2))), ascii_only=True)
def test_engines_agree_with_a_model(
    sqlite_says: Says, postgres_says: Says, asked: tuple[Any, Clause], ascii_only: bool
) -> None:
    value, clause = asked
    if is_close(clause, value):
        return
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    expected = holds(clause, value)
    assert (sqlite_says(body, clause), postgres_says(body, clause)) == (expected, expected)
    both = (clause, Clause(("a",), "=", "1"))
    expected = expected and holds(both[1], value)
    assert (sqlite_says(body, *both), postgres_says(body, *both)) == (expected, expected)
    opposite = replace(clause, negated=True)
    assert sqlite_says(body, opposite) == postgres_says(body, opposite) == (not holds(clause, value))
    mixed = (opposite, both[1])
    expected = not holds(clause, value) and holds(both[1], value)
    assert (sqlite_says(body, *mixed), postgres_says(body, *mixed)) == (expected, expected)


@given(body=st.binary(max_size=60) | st.text('{}[]":,\\u0d8a 1e-.tfn\0\x80', max_size=40).map(str.encode))
@MANY
def test_nothing_is_raised(sqlite_says: Says, postgres_says: Says, body: bytes) -> None:
    try:
        value = json.loads(body.decode())
    except ValueError:
        value = None
    for clause in (Clause(("a",), "=", "1"), Clause(("0",), ">", "0")):
        said = sqlite_says(body, clause), postgres_says(body, clause)
        if not isinstance(value, dict | list):
            assert said == (False, False)
        opposite = replace(clause, negated=True)
        assert (sqlite_says(body, opposite), postgres_says(body, opposite)) == tuple(not one for one in said)
