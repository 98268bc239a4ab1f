"""The inbox in PostgreSQL: `PostgresStore` in `engine` is made of one part per noun.

`connection` opens and lends connections; `writer` commits groups of arrivals by the statement of `intake`; `queue`
leases and settles, `transactions` does so inside transactions of others; `admin`, `read` and `upkeep` do the rest.
"""

from oncehook.store.postgres.engine import PostgresStore

__all__ = ["PostgresStore"]
