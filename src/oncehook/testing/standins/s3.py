"""A stand-in for S3-compatible storage: what was put into its bucket can be fetched, and nothing else.

It checks no signatures and its links do not expire; everything that oncehook stores and links to works as with the real
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote

from oncehook.testing.standins.server import LoopbackServer, Reply, Request

_XML: Final = {"content-type": "application/xml"}


@dataclass(slots=True, frozen=True)
class StoredObject:
    content: bytes = field(repr=False)
    content_type: str


class S3StandIn(LoopbackServer):
    """A server with one bucket.

    >>> with S3StandIn() as s3:
    ...     files = S3Files.from_env(s3.environ)
    """

    def __init__(self, bucket: str = "files", *, port: int = 0) -> None:
        super().__init__(port=port)
        self.bucket = bucket
        self.objects: dict[str, StoredObject] = {}
        """Contents of the bucket by key."""

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables with which `S3Files.from_env` finds it."""
        return {
            "ONCEHOOK_S3_BUCKET": self.bucket,
            "ONCEHOOK_S3_ENDPOINT": self.url,
            "ONCEHOOK_S3_ACCESS_KEY": "stand-in",
            "ONCEHOOK_S3_SECRET_KEY": "stand-in-secret",
        }

    def reply(self, request: Request) -> Reply:
        bucket, _, key = unquote(request.path).removeprefix("/").partition("/")
        if bucket != self.bucket:
            return _error(404, "NoSuchBucket")
        if request.method == "PUT":
            return self._put(key, request)
        if request.method in ("GET", "HEAD"):
            return self._get(key, request)
        return _error(405, "MethodNotAllowed")

    def _put(self, key: str, request: Request) -> Reply:
        if request.headers.get("if-none-match") == "*" and key in self.objects:
            return _error(412, "PreconditionFailed")
        self.objects[key] = StoredObject(request.body, request.headers.get("content-type", "binary/octet-stream"))
        return Reply(200, b"", _XML)

    def _get(self, key: str, request: Request) -> Reply:
        found = self.objects.get(key)
        if found is None:
            return _error(404, "NoSuchKey")
        query = parse_qs(request.query)
        return Reply(
            200,
            found.content,
            {
                "content-type": query.get("response-content-type", [found.content_type])[0],
                "content-disposition": query.get("response-content-disposition", ["attachment"])[0],
            },
        )


def _error(status: int, code: str) -> Reply:
    return Reply(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode(), _XML)
