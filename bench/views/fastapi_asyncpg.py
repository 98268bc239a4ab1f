"""The competent view: FastAPI and a raw asyncpg upsert, one transaction each, a pool of 20; served by uvicorn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from fastapi import FastAPI, HTTPException, Request

from bench.views import STORE, genuine

POOL_SIZE = 20
TABLE = (
    "CREATE TABLE events (key text PRIMARY KEY, body bytea NOT NULL, received_at timestamptz NOT NULL DEFAULT now())"
)
KEEP = "INSERT INTO events (key, body) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING RETURNING key"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold the pool while the server runs."""
    async with asyncpg.create_pool(STORE, min_size=POOL_SIZE, max_size=POOL_SIZE) as pool:
        app.state.pool = pool
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/hook")
async def hook(request: Request) -> dict[str, str]:
    """Take a webhook."""
    body = await request.body()
    if not genuine(body, request.headers.get("X-Signature", "")):
        raise HTTPException(401, "bad signature")
    key = json.loads(body)["id"]
    kept = await request.app.state.pool.fetchval(KEEP, key, body)
    return {"status": "duplicate" if kept is None else "accepted"}


async def make_table() -> None:
    """Make the table."""
    connection = await asyncpg.connect(STORE)
    await connection.execute(TABLE)
    await connection.close()


if __name__ == "__main__":
    asyncio.run(make_table())
