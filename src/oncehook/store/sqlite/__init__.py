"""The inbox in one SQLite file: `engine` is the whole, `writer` writes, `look`, `find` and `show` read.

What is written: `intake` (arrivals), `work` (leases), `settle` (their ends), `replay` (what people do), `sweep`.
"""

from oncehook.store.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
