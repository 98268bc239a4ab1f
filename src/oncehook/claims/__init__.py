"""The small primitive: being first with a key, without an inbox.

`Claims` and `AsyncClaims` give three answers to `claim(key)` (`new`, `in_progress`, `done`) on Redis or Valkey,
PostgreSQL or SQLite; `DedupLock` is a plain lock; `oncehook.once` is the decorator. `client` defines the verbs,
`redis`, `postgres` and `sqlite` build their requests, `connection` sends them.
"""

from oncehook.claims.client import AsyncClaims, Claim, Claims, Held
from oncehook.claims.lock import AsyncDedupLock, DedupLock

__all__ = ["AsyncClaims", "AsyncDedupLock", "Claim", "Claims", "DedupLock", "Held"]
