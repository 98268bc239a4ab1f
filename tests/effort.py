"""How long tests that roll dice go on: a little in `scripts/test`, much longer in `scripts/torture tests`.

Each has a name, under which the environment may say another number: `TORTURE_KILLS=500 scripts/test …`.
"""

from __future__ import annotations

import os
import secrets


def effort(name: str, short: float) -> int:
    """How many rounds, examples or seconds; `short` unless the environment says otherwise."""
    return int(float(os.environ.get(f"TORTURE_{name}", short)))


def first_seed(fixed: int | None = None) -> int:
    """What the dice begin with: `TORTURE_SEED`, a fixed number, or another one each time."""
    return int(os.environ.get("TORTURE_SEED") or (secrets.randbelow(10**9) if fixed is None else fixed))
