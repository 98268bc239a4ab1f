"""How long does one event take when nothing else is going on? From its request to the end of its delivery.

Starts `oncehook serve` with a handler inside, sends one event after the other with a pause in between, and asks when
each was settled: the moment at which the commit that settles it began. Called by `bench.work`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection

from bench.engines import BenchError
from bench.product import serving
from bench.work_contestants import Place
from bench.work_noise import Neighbours
from bench.work_report import Idle

PAUSE_SECONDS = 0.02
BODY = "x" * 1900
WARM = 20
"""Events sent before those that count."""


def run_idle(engine: str, place: Place, *, events: int, tick: Callable[[float], None]) -> Idle:
    """Send events one at a time."""
    with serving(place, engine) as product:
        neighbours = Neighbours(place.store_pids(engine))
        sent, answered = _send(product.port, events + WARM, tick)
        others = neighbours.cores()
        time.sleep(10 * PAUSE_SECONDS)  # the last one may be on its way
        ends = product.read_settled(events + WARM)
    if len(ends) != events + WARM:
        raise BenchError(f"{events + WARM} events were sent, but {len(ends)} were done")
    whole = sorted((ends[key] - sent[key]) * 1000 for key in list(sent)[WARM:])
    answers = [(answered[key] - sent[key]) * 1000 for key in list(sent)[WARM:]]
    return Idle(
        events,
        p50_ms=statistics.median(whole),
        p99_ms=whole[int(len(whole) * 0.99)],
        answer_p50_ms=statistics.median(answers),
        others_cores=others,
    )


def _send(port: int, events: int, tick: Callable[[float], None]) -> tuple[dict[str, float], dict[str, float]]:
    sent, answered = {}, {}
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for n in range(events):
            key = f"event-{n}"
            sent[key] = time.time()
            connection.request("POST", "/in/bench", f'{{"id": "{key}", "text": "{BODY}"}}')
            answer = connection.getresponse()
            if answer.status != 200:
                raise BenchError(f"answered {answer.status}: {answer.read()[:200]!r}")
            answer.read()
            answered[key] = time.time()
            tick(n / events)
            time.sleep(PAUSE_SECONDS)
    return sent, answered
