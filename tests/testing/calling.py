"""A plain HTTP client, as somebody else's program would have one: to see what a stand-in really says."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Said:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def call(
    url: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
    timeout: float = 60.0,
) -> Said:
    """One request on a connection of its own; a body that is not bytes goes as JSON."""
    parts = urlsplit(url)
    assert parts.hostname
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    try:
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, content, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return Said(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def multipart(fields: Mapping[str, str], file: tuple[str, str, bytes]) -> tuple[bytes, dict[str, str]]:
    """A form with one file (name, type, content): its body, and its header."""
    edge = "edge-5f1c"
    disposition = f"--{edge}\r\ncontent-disposition: form-data; name="
    parts = [f'{disposition}"{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    name, kind, content = file
    head = f'{disposition}"file"; filename="{name}"\r\ncontent-type: {kind}\r\n\r\n'
    body = b"".join([*parts, head.encode(), content, f"\r\n--{edge}--\r\n".encode()])
    return body, {"content-type": f"multipart/form-data; boundary={edge}"}
