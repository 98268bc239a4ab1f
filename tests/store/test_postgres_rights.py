"""A role with the rights that the page on PostgreSQL names can do everything; one right less is told at the start."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from oncehook import Event, GiveUp, Inbox
from oncehook.errors import StoreError
from oncehook.model import Engine, EraseOrder, Filter, StoredSession
from oncehook.store.migrate import migrations
from oncehook.store.postgres import PostgresStore, connection
from tests.servers import fresh_schema, shared_postgres
from tests.store.making import replay_all

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run" / "postgresql.md"


@dataclass
class Granted:
    """A schema that its owner has made, and a role that may do what it was granted."""

    schema: str
    role: str
    admin: psycopg.Connection[tuple[object, ...]]

    def grant(self) -> None:
        """Run the statements of the page, with other names."""
        statements = re.findall(r"^GRANT [^;]+;", PAGE.read_text(), re.MULTILINE)
        assert len(statements) == 4
        for statement in statements:
            self.run(
                statement.replace("SCHEMA oncehook", f"SCHEMA {self.schema}").replace("TO worker", f"TO {self.role}")
            )

    def run(self, statement: str) -> None:
        self.admin.execute(statement.encode())

    @property
    def url(self) -> str:
        return shared_postgres().url.replace("oncehook@", f"{self.role}@") + f"?schema={self.schema}"


@pytest.fixture
async def granted() -> AsyncIterator[Granted]:
    server, schema = shared_postgres(), fresh_schema()
    owner = PostgresStore(server.url, schema=schema)
    await owner.open()
    await owner.close()
    with psycopg.connect(server.url, autocommit=True) as admin:
        made = Granted(schema, f"{schema}_worker", admin)
        made.run(f"CREATE ROLE {made.role} LOGIN")
        made.run(f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC")
        made.grant()
        yield made
        made.run(f"DROP SCHEMA {schema} CASCADE")
        made.run(f"DROP ROLE {made.role}")


async def test_the_documented_rights_suffice(granted: Granted) -> None:
    inbox = Inbox(granted.url, migrate=False)
    inbox.source("orders", verify="bearer", secret="a secret for tests", key="$.id", subject="$.customer", budget="60s")

    @inbox.on("orders", retry=[])
    async def work(event: Event, tx: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        if b"dead" in event.body:
            raise GiveUp("no such order")
        event.emit("onward", "t", {})

    async with inbox.running():
        store = inbox.store
        headers = {"Authorization": "Bearer a secret for tests"}
        for body in (b'{"id": 1, "customer": "7"}', b'{"id": 1}', b'{"id": 2, "customer": "8", "dead": 1}'):
            assert (await inbox.receive("orders", headers, body)).reply.status == 200
        assert (await inbox.receive("orders", {}, b"{}")).reply.status == 401
        await inbox.drain()
        await replay_all(store, Filter(subject="8"))
        await inbox.drain()
        await store.discard(Filter(subject="8"), "ann", "no use")
        await store.pause(1, "ann", "why")
        await store.resume(1, "ann")
        assert (await store.erase(EraseOrder("7", actor="ann", reason="why", spelled="7"))).events == 1
        await store.prune({}, 0.0)
        await store.roll_up()
        await store.mark_watermark("dead", True)
        await store.import_keys(1, [b"k" * 16], 60.0, "ann")
        await store.begin_session(StoredSession(b"h" * 32, "ann", "viewer", b""), 60.0)
        await store.end_session(b"h" * 32)
        await store.audit("ann", "act", "target", {})
        await store.ping()
        assert [check.name for check in await store.check() if not check.ok] == []
        await inbox.emit("plain", "t", {})
    other = PostgresStore(granted.url)
    await other.open(migrate=False)
    await other.invalidate_leases()  # `oncehook db restored`
    await other.close()


@pytest.mark.parametrize(
    ("taken", "lacks"),
    [
        ("USAGE ON SCHEMA {schema}", "USAGE on schema {schema}"),
        ("DELETE ON {schema}.heads", "DELETE on table heads"),
        ("SELECT, INSERT ON {schema}.events", "SELECT, INSERT on table events"),
        ("SELECT ON {schema}.migrations", "SELECT on table migrations"),
        ("USAGE ON SEQUENCE {schema}.counter_slot", "USAGE on sequence counter_slot"),
        ("UPDATE ON SEQUENCE {schema}.fences", "UPDATE on sequence fences"),
        ("EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema}", "EXECUTE on function advance"),
    ],
)
async def test_a_missing_right_is_told_at_the_start(granted: Granted, taken: str, lacks: str) -> None:
    granted.run(f"REVOKE {taken.format(schema=granted.schema)} FROM {granted.role}")
    store = PostgresStore(granted.url)
    with pytest.raises(StoreError, match=re.escape(lacks.format(schema=granted.schema))) as raised:
        await store.open(migrate=False)
    await store.close()
    assert granted.role in str(raised.value)
    for statement in re.findall(r"GRANT [^;]+;", raised.value.hint):
        granted.run(statement)
    await store.open(migrate=False)
    await store.close()


async def test_tables_of_others_in_the_same_schema_are_none_of_our_business(granted: Granted) -> None:
    granted.run(f"CREATE TABLE {granted.schema}.theirs (id integer)")
    store = PostgresStore(granted.url)
    await store.open(migrate=False)
    await store.close()


async def test_every_table_sequence_and_function_of_ours_is_looked_at(granted: Granted) -> None:
    made = {name for step in migrations(Engine.postgres) for name in connection._MADE.findall(step.sql)}
    found = granted.admin.execute(
        """
        SELECT relname FROM pg_class WHERE relnamespace = %s::text::regnamespace AND relkind IN ('r', 'p')
        UNION SELECT proname FROM pg_proc WHERE pronamespace = %s::text::regnamespace
        """,
        [granted.schema, granted.schema],
    ).fetchall()
    assert {str(name) for (name,) in found} <= made | {"migrations"}
