"""The inbox in one SQLite file: `engine` is the whole, `writer` writes, `intake` says what, `look` reads."""

from oncehook.store.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
