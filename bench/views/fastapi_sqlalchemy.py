"""The usual asynchronous view: FastAPI and SQLAlchemy on PostgreSQL, look first, then insert; served by uvicorn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from sqlalchemy import DateTime, LargeBinary, String, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bench.views import STORE, genuine

engine = create_async_engine(STORE.replace("postgresql://", "postgresql+asyncpg://", 1))
sessions = async_sessionmaker(engine, expire_on_commit=False)
app = FastAPI()


class Base(DeclarativeBase):
    """Root of the models."""


class Event(Base):
    """One row per key."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(200), unique=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    received_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=lambda: datetime.now(UTC))


async def open_session() -> AsyncIterator[AsyncSession]:
    """Open a session for one request."""
    async with sessions() as session:
        yield session


@app.post("/hook")
async def hook(request: Request, session: Annotated[AsyncSession, Depends(open_session)]) -> dict[str, str]:
    """Take a webhook."""
    body = await request.body()
    if not genuine(body, request.headers.get("X-Signature", "")):
        raise HTTPException(401, "bad signature")
    key = json.loads(body)["id"]
    if await session.scalar(select(Event).where(Event.key == key)) is not None:
        return {"status": "duplicate"}
    session.add(Event(key=key, body=body))
    try:
        await session.commit()
    except IntegrityError:
        return {"status": "duplicate"}
    return {"status": "accepted"}


async def make_table() -> None:
    """Make the table."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(make_table())
