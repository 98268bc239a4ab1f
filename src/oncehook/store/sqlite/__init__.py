"""The inbox in one SQLite file: `engine` is the whole, `writer` writes, `look`, `find` and `show` read.

What is written: `intake` (arrivals; `copies` are the later ones), `work` (leases), `settle` (their ends), `replay`
(what people do), `sweep`.
"""

from oncehook.store.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
