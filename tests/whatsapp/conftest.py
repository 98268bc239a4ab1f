"""The S3 server of the session, behind a relay that counts, and a storage in a part of its bucket that is new."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from oncehook.whatsapp.storage import S3Files
from tests.whatsapp.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Relay, S3Server, fresh_prefix, shared_s3


@pytest.fixture
def s3() -> S3Server:
    return shared_s3()


@pytest.fixture
async def relay(s3: S3Server) -> AsyncIterator[Relay]:
    async with Relay(s3) as relay:
        yield relay


@pytest.fixture
async def storage(relay: Relay) -> AsyncIterator[S3Files]:
    prefix = fresh_prefix()
    async with S3Files(
        BUCKET, endpoint=relay.endpoint, access_key=ACCESS_KEY, secret_key=SECRET_KEY, prefix=prefix
    ) as storage:
        yield storage
