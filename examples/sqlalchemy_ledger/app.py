"""A ledger in which every payment stands once: what the session writes commits with the completion, or not at all."""

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from oncehook import Event, Inbox
from oncehook.contrib.sqlalchemy import session_handler

STORE = os.environ.get("STORE", "postgresql://localhost/shop")


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "ledger"
    id: Mapped[int] = mapped_column(primary_key=True)
    payment: Mapped[str]  # not unique: nothing but the transaction keeps it to one
    cents: Mapped[int]


inbox = Inbox(STORE)
inbox.source("payments", verify="none", key="$.id", subject="$.account")


@inbox.on("payments", "payment.received")
@session_handler
def book(event: Event, session: Session) -> None:
    payment = event.json()
    session.add(Entry(payment=payment["id"], cents=payment["cents"]))


if __name__ == "__main__":
    url = STORE.partition("?")[0].replace("postgresql:", "postgresql+psycopg:")
    Base.metadata.create_all(create_engine(url))
