"""The inbox in PostgreSQL: `engine` is the whole, `commit` writes, `intake` says what, `look` reads."""

from oncehook.store.postgres.engine import PostgresStore

__all__ = ["PostgresStore"]
