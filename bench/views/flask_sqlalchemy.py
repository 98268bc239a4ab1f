"""The usual view: Flask and SQLAlchemy on SQLite, look first, then insert; served by gunicorn with 4 workers."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from flask import Flask, Response, jsonify, request
from sqlalchemy import LargeBinary, String, create_engine, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from bench.views import STORE, genuine

engine = create_engine(f"sqlite:///{STORE}")
app = Flask(__name__)


class Base(DeclarativeBase):
    """Root of the models."""


class Event(Base):
    """One row per key."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(200), unique=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    received_at: Mapped[datetime] = mapped_column(default=lambda: datetime.now(UTC))


@app.post("/hook")
def hook() -> tuple[Response, int]:
    """Take a webhook."""
    body = request.get_data()
    if not genuine(body, request.headers.get("X-Signature", "")):
        return jsonify(error="bad signature"), 401
    key = json.loads(body)["id"]
    with Session(engine) as session:
        if session.scalar(select(Event).where(Event.key == key)) is not None:
            return jsonify(status="duplicate"), 200
        session.add(Event(key=key, body=body))
        try:
            session.commit()
        except IntegrityError:
            return jsonify(status="duplicate"), 200
    return jsonify(status="accepted"), 200


if __name__ == "__main__":
    Base.metadata.create_all(engine)
