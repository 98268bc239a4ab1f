"""The programs that oncehook is compared with: webhook views as people write them.

Each takes a signed POST at `/hook`, checks the signature, keeps the event once per key in the table `events`, and
answers 200 after the commit. Run as a program (`python -m bench.views.NAME`) a view makes its table in the store
that `BENCH_STORE` names. What all have in common, the check of the signature, is here.
"""

from __future__ import annotations

import hmac
import os

SECRET = os.environ["BENCH_SECRET"].encode()
STORE = os.environ["BENCH_STORE"]
PREFIX = "sha256="


def genuine(body: bytes, signature: str) -> bool:
    """Check the signature header against the body, in the fastest way of the standard library."""
    expected = hmac.digest(SECRET, body, "sha256").hex()
    return signature.startswith(PREFIX) and hmac.compare_digest(signature[len(PREFIX) :], expected)
