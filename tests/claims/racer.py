"""A process of a race: `python -m tests.claims.racer STORE KEY ROUNDS` claims KEY-0, KEY-1, … in each of four threads.

It begins when a line comes in on stdin, and prints the number and the answer of every claim. With `--hold STORE KEY
TTL BEATS` it claims KEY instead, renews it so often in each TTL, says so, and waits to be killed.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from oncehook.claims import Claims, client
from oncehook.claims import sqlite as sqlite_claims

THREADS = 4
sqlite_claims.PATIENCE = 60.0  # type: ignore[misc]  # all of them wait for one file, and its disk may be slow


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def race(store: str, key: str, rounds: int) -> None:
    with Claims(store) as claims, ThreadPoolExecutor(THREADS) as pool:

        def run(_: int) -> None:
            for number in range(rounds):
                claim = claims.claim(f"{key}-{number}")
                say(f"{number} {claim.status}")
                if claim.status == "new" and number % 2:
                    claims.commit(f"{key}-{number}", claim.token)

        claims.look(key)
        say("ready")
        sys.stdin.readline()
        list(pool.map(run, range(THREADS)))


def hold(store: str, key: str, ttl: str, beats: str) -> None:
    client.BEATS = int(beats)  # type: ignore[misc]
    claims = Claims(store, ttl=ttl)
    with claims.hold(key):
        say("held")
        time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold(*sys.argv[2:])
    else:
        race(sys.argv[1], sys.argv[2], int(sys.argv[3]))
