"""What a filter asks of bodies: a condition that SQLite decides while it walks, and Python's word on what it found.

An encrypted body is decrypted on the way, by Python alone.

`find` puts SAYS behind its conditions and hands in `clauses`. SQLite's own JSON functions look at every body without
holding up Python's other threads; the few that seem to match are then read as handlers read them (`says`), because
SQLite takes bytes for text, and the first of two same names, where they do not.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec

from oncehook import model as reading
from oncehook.errors import Undecryptable
from oncehook.model import Asked, Clause
from oncehook.store.cipher import Cipher

# Step by step down the path of each clause; only objects and arrays lead further. CASE, unlike AND, keeps what is no
# JSON away from functions that would raise, and most bodies away from Python. The cast makes text of the bytes: newer
# releases take a blob for their own binary JSON. Numbers are compared roughly, on the side of too many: their digits
# may be read a trifle differently; without the plus, the cast would make text of them. Times 1.0: abs() of the least
# integer is an error.
SAYS: Final = """
AND CASE WHEN substr(e.body, 1, 4) = x'ff4f4845' THEN encrypted_says(e.body, e.id, :clauses)
WHEN NOT json_valid(CAST(e.body AS TEXT)) THEN 0 WHEN (
  WITH RECURSIVE walk (clause, step, kind, value) AS (
    SELECT clause.key, 0, 'object', +CAST(e.body AS TEXT) FROM json_each(:clauses) clause
    UNION ALL
    SELECT walk.clause, walk.step + 1, member.type, member.value FROM walk, json_each(walk.value) member
    WHERE walk.kind IN ('object', 'array')
      AND CAST(member.key AS TEXT) = json_extract(:clauses, '$[' || walk.clause || '].path[' || walk.step || ']')
  ), asked (clause, steps, sign, value, number, near) AS (
    SELECT key, json_array_length(value, '$.path'), json_extract(value, '$.sign'), json_extract(value, '$.value'),
      json_extract(value, '$.number'), abs(1.0 * json_extract(value, '$.number')) * 1e-12
    FROM json_each(:clauses) clause
  )
  SELECT count(DISTINCT asked.clause) FROM asked, walk
  WHERE walk.clause = asked.clause AND walk.step = asked.steps AND CASE
    WHEN walk.kind IN ('object', 'array') THEN 0
    WHEN walk.kind NOT IN ('integer', 'real') THEN
      asked.sign = '=' AND asked.value = CASE walk.kind WHEN 'text' THEN walk.value ELSE walk.kind END
    WHEN asked.sign IN ('>', '>=') THEN walk.value >= asked.number - asked.near
    WHEN asked.sign IN ('<', '<=') THEN walk.value <= asked.number + asked.near
    ELSE abs(1.0 * (walk.value - asked.number)) <= asked.near END
) < json_array_length(:clauses) THEN 0 ELSE body_says(e.body, :clauses) END
"""

_asked: Final = msgspec.json.Decoder(list[Asked]).decode


def asked(clauses: Sequence[Clause] | None) -> str | None:
    """Clauses as the one parameter that SAYS takes."""
    if clauses is None:
        return None
    return json.dumps(
        [
            {"path": clause.path, "sign": clause.sign, "value": clause.value, "number": clause.number}
            for clause in clauses
        ]
    )


def teach(connection: sqlite3.Connection, cipher: Cipher) -> None:
    """Give a connection the functions that SAYS calls."""

    def encrypted_says(body: bytes, event_id: bytes, clauses: str) -> bool:
        try:
            return says(cipher.decrypt(body, "body", event_id), clauses)
        except Undecryptable:
            return False

    connection.create_function("body_says", 2, says, deterministic=True)
    connection.create_function("encrypted_says", 3, encrypted_says, deterministic=True)


def says(body: bytes, clauses: str) -> bool:
    """Tell whether a body, read as handlers read it, says all of this."""
    return reading.says(body, _asked(clauses))
