"""The small primitive: being first with a key, without an inbox.

`Claims` and `AsyncClaims` give three answers to `claim(key)` (`new`, `in_progress`, `done`) on Redis or Valkey,
PostgreSQL or SQLite; `DedupLock` is the plain lock for those who want just that; `oncehook.once` is the decorator.
`base` says what each verb means, `redis`, `postgres` and `sqlite` how it is asked, `faces` who asks.
"""

from oncehook.claims.client import AsyncClaims, Claim, Claims, Held
from oncehook.claims.lock import AsyncDedupLock, DedupLock

__all__ = ["AsyncClaims", "AsyncDedupLock", "Claim", "Claims", "DedupLock", "Held"]
