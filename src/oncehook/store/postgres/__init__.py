"""The inbox in PostgreSQL: `engine` is the whole; `commit` writes what `intake` says, `look` reads.

Work: `lease` and `settle` are statements, run on connections of `hot`, `heartbeat` and `transactions`; `notify` wakes.
People: `acts` and `replay` do what they ask, `show` and `gauges` tell what there is. `sweep` looks after the house.
"""

from oncehook.store.postgres.engine import PostgresStore

__all__ = ["PostgresStore"]
