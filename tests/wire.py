"""A small HTTP client for tests: keep-alive, raw bytes in, status and body out; nothing hidden."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from typing import Any

SECRET = "a secret for tests"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Client:
    """One connection to one server, opened again when it was lost."""

    host: str
    port: int
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None, repr=False)

    async def send_raw(self, data: bytes) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self._streams
        try:
            writer.write(data)
            await writer.drain()
            return await self._read(reader)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Answer(int(first.split(" ")[1]), headers, body)

    async def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        return await self.send_raw(request("POST", path, body, headers))

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await self.send_raw(request("GET", path, b"", headers))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request(method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in {"Host": "test", **(headers or {})}.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def signed(body: bytes, secret: str = SECRET) -> dict[str, str]:
    """Headers of a genuine arrival for a source with the generic HMAC verifier."""
    digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    return {"X-Signature": f"sha256={digest}", "Content-Type": "application/json"}


def hook(key: str, **fields: object) -> bytes:
    """A JSON body with a key at `$.id`."""
    return json.dumps({"id": key, "type": "order.paid", **fields}).encode()
