"""The server under attack: sources of every kind, one process per engine, and what its store holds.

`house` is a fixture for the modules in which a hostile sender is at work; tests keep apart by their keys.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oncehook.store.cipher import REFERENCE, Reference
from tests.acceptance.conftest import Engine, make_engine
from tests.acceptance.processes import Receiver
from tests.wire import Answer, signed

PATH = "k7_Qm2ZxN4vT9sLdR1wYhE"
API_KEY, BEARER, QUERY_TOKEN, BODY_TOKEN = (f"canary-{name}-5d1c0e" for name in ("api", "bearer", "query", "body"))

SETTINGS = f"""
store = "STORE"

[server]
trusted_proxies = ["127.0.0.2"]

[source.open]
verify = "none"
key = "$.id"

[source.hidden]
verify = {{ scheme = "none", confirm = "anyone may send" }}
path = "{PATH}"
key = "$.id"

[source.meta]
preset = "whatsapp-cloud"
secret = {{ env = "ORDERS_SECRET" }}
verify_token = {{ env = "API_KEY" }}
max_body = "1MiB"

[source.bearer]
verify = "bearer"
secret = {{ env = "BEARER" }}
key = "$.id"

[source.api]
verify = {{ scheme = "token", header = "X-Api-Key" }}
secret = {{ env = "API_KEY" }}
key = "$.id"

[source.query]
verify = {{ scheme = "token", query = "token" }}
secret = {{ env = "QUERY_TOKEN" }}
key = "$.id"

[source.inbody]
verify = {{ scheme = "token", body = "auth.token" }}
secret = {{ env = "BODY_TOKEN" }}
key = "$.id"
"""

SIGNED = {
    "orders": 'key = "$.id"\nsubject = "$.customer"',
    "others": 'key = "$.id"',
    "small": 'key = "$.id"\nmax_body = 2000',
    "large": 'key = "$.id"\nmax_body = "2MiB"',
    "fenced": 'key = "$.id"\nip_allow = ["203.0.113.0/24"]',
    "plain": "",
    "listed": 'key = ["header:Idempotency-Key"]',
    "strict": 'key = "$.id"\non_missing_key = "reject"',
    "hashed": 'key = "$.id"\non_missing_key = "body_hash"',
    "bucket": 'key = "$.id"\non_missing_key = "body_hash:2s"',
    "choosy": 'key = "$.id"\non_conflict = "reject"',
    "quiet": 'key = "$.id"\nignore = ["ping.*"]',
    "batch": 'split = "$.events"\nkey = "$.events[0].id"\ntype = "$.events[0].type"\nignore = ["ping"]',
}
"""Sources with the generic HMAC verifier, and what is special about each."""

for name, special in SIGNED.items():
    SETTINGS += f"""
[source.{name}]
verify = {{ scheme = "hmac", header = "X-Signature", prefix = "sha256=" }}
secret = {{ env = "ORDERS_SECRET" }}
budget = "20s"
{special}
"""
CONFIG = SETTINGS.replace("{", "{{").replace("}", "}}").replace("STORE", "{store}")


@dataclass
class House:
    """The server under attack, and what its store holds."""

    engine: Engine
    receiver: Receiver

    def events(self, source: str) -> list[dict[str, Any]]:
        """All events of a source, oldest first."""
        names = ("source", "id", "key", "subject", "type", "marks", "head", "body", "batch_id")
        rows = self.engine.rows(
            "SELECT s.name, e.id, e.key, e.subject, e.type, e.marks, e.head, e.body, e.batch_id"
            " FROM events e JOIN sources s ON s.id = e.source_id ORDER BY e.id"
        )
        found = [dict(zip(names, row, strict=True)) for row in rows if row[0] == source]
        for event in found:
            if event["body"] is not None and bytes(event["body"]).startswith(REFERENCE):
                event["body"] = self._read_apart(event["id"], Reference(event["body"]))
        return found

    def _read_apart(self, row: bytes, reference: Reference) -> bytes:
        """The large body that a row refers to, from the folder beside the store."""
        (file,) = self.large_bodies(f"{row.hex()}-{reference.digest.hex()}")
        body = file.read_bytes()
        assert (hashlib.sha256(body).digest(), len(body)) == (reference.digest, reference.size)
        return body

    def large_bodies(self, name: str = "*") -> list[Path]:
        """Files of large bodies beside the store, also unfinished ones."""
        folder = self.engine.folder / "inbox.db-bodies"
        return [path for path in folder.rglob(name) if path.is_file()]

    def event(self, source: str, key: str | None) -> dict[str, Any]:
        (found,) = [event for event in self.events(source) if event["key"] == key]
        return found

    def extent(self) -> tuple[int, ...]:
        """How much is stored: events, copies of keys, arrivals, batches, large bodies."""
        ((events, *others),) = self.engine.rows(
            "SELECT (SELECT count(*) FROM events), (SELECT count(*) FROM arrivals), (SELECT count(*) FROM batches)"
        )
        return (events, sum(self.engine.copies()), *others, len(self.large_bodies()))

    async def post(self, source: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        client = self.receiver.client()
        answer = await client.post(f"/in/{source}", body, signed(body) if headers is None else headers)
        client.close()
        return answer

    async def send(self, data: bytes, *, from_: str = "127.0.0.1") -> Answer:
        """One request as raw bytes, and its answer."""
        client = self.receiver.client()
        client._streams = await asyncio.open_connection(client.host, client.port, local_addr=(from_, 0))
        answer = await client.send_raw(data)
        client.close()
        return answer

    async def break_off(self, data: bytes) -> None:
        """Say this and hang up."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.receiver.port)
        writer.write(data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    engine = make_engine(request.param, tmp_path_factory.mktemp(request.param))
    receiver = Receiver(engine.folder / "receiver", engine.url, CONFIG).start(
        env={"API_KEY": API_KEY, "BEARER": BEARER, "QUERY_TOKEN": QUERY_TOKEN, "BODY_TOKEN": BODY_TOKEN}
    )
    yield House(engine, receiver)
    assert receiver.stop() == 0
    log = receiver.log.read_text()
    assert "Traceback" not in log, log
