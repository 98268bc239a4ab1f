"""Words that come from outside as they are kept, and the line that every act leaves behind.

Called by whatever acts, in the act's own transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Final

from oncehook.store.sqlite.intake import Micros

LONGEST: Final = 4096
"""Characters of an error or a reason that are kept."""


def kept(text: str) -> str:
    """Text that the store can hold and show: no NUL, no half surrogates, not without end."""
    return text[:LONGEST].replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def write_audit(
    connection: sqlite3.Connection, now: Micros, actor: str, act: str, target: str, detail: Mapping[str, object]
) -> None:
    """Who did what, to what, and what there is to say about it."""
    connection.execute(
        "INSERT INTO audit (at, actor, act, target, detail) VALUES (?,?,?,?,?)",
        (now, kept(actor), act, kept(target), json.dumps(detail, default=str)),
    )
