"""The inbox in PostgreSQL: `engine` is the whole, `commit` writes, `intake` says what, `look` reads, `opening` opens."""

from oncehook.store.postgres.engine import PostgresStore

__all__ = ["PostgresStore"]
