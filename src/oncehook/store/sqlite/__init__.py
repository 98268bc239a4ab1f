"""The inbox in one SQLite file: `engine` writes, `intake` says what, `look` reads, `opening` and `hold` guard it."""

from oncehook.store.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
