"""The inbox in one SQLite file, in modules of the same names as PostgreSQL's."""

from oncehook.store.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
