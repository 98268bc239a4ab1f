"""Metrics and logs: one log record and a few numbers per arrival and per attempt.

`Observer` counts for Prometheus, logs moments, publishes them to followers, and collects rejections and volume until
the inbox writes them to the store. Bodies and secrets never appear.
"""

from __future__ import annotations

import collections
import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec

from oncehook import __version__, clock, model
from oncehook.destinations.base import Destination
from oncehook.errors import Rejected, SignatureInvalid, StoreUnavailable
from oncehook.human import replay_state
from oncehook.logs import plain, ration
from oncehook.model import (
    Arrival,
    BreakerChange,
    Expired,
    Item,
    Lease,
    Mark,
    Outcome,
    Rejection,
    Settle,
    Settlement,
    StoredReplay,
)
from oncehook.rejections import Samples
from oncehook.reports import RunningReceiver
from oncehook.sources import Source
from oncehook.store.base import KEPT_REJECTIONS
from oncehook.upkeep import Watermark

if TYPE_CHECKING:  # the client library is imported when somebody asks for the metrics
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Row: TypeAlias = tuple[tuple[str, ...], list[int | float]]
"""Labels of an instrument, and what was counted under them."""


class Registry:
    """The instruments of one inbox, in a form that the Prometheus client can export."""

    def __init__(self) -> None:
        self.instruments: list[Instrument] = []

    def collect(self) -> Iterable[Metric]:
        return [instrument.family() for instrument in self.instruments]

    def take(self) -> list[list[Row]]:
        """Return what was counted, and begin anew: for a process whose counts another one shows."""
        return [instrument.take() for instrument in self.instruments]

    def merge(self, taken: Sequence[Sequence[Row]]) -> None:
        """Add what another process has counted with the same instruments."""
        for instrument, rows in zip(self.instruments, taken, strict=True):
            instrument.merge(rows)


class Instrument(ABC):
    """A named measure, by labels."""

    def __init__(self, registry: Registry, name: str, about: str, *labels: str) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._values: dict[tuple[str, ...], Any] = {}
        registry.instruments.append(self)

    @abstractmethod
    def family(self) -> Metric:
        """Return its values as the client library writes them out."""

    def _fill(self, family: CounterMetricFamily | GaugeMetricFamily) -> Metric:
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family

    def take(self) -> list[Row]:
        """Return what was counted, and begin anew; nothing, where numbers of several processes have no sum."""
        return []

    def merge(self, rows: Sequence[Row]) -> None:
        """Add what another process counted."""
        assert not rows, self._name


class Counter(Instrument):
    """A number that only grows."""

    def family(self) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._fill(CounterMetricFamily(self._name, self._about, labels=self._labels))

    def add(self, *labels: str, by: int = 1) -> None:
        """Count more. With 0, the counter is exported from the start, so that its first increase is seen."""
        self._values[labels] = self._values.get(labels, 0) + by

    def values(self) -> collections.Counter[tuple[str, ...]]:
        """Return a copy of the counts so far, by labels."""
        return collections.Counter(self._values)

    def take(self) -> list[Row]:
        values, self._values = self._values, {}
        return [(labels, [value]) for labels, value in values.items() if value]

    def merge(self, rows: Sequence[Row]) -> None:
        for labels, (value,) in rows:
            self._values[labels] = self._values.get(labels, 0) + value


class Gauge(Instrument):
    """A number that goes up and down."""

    def family(self) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._fill(GaugeMetricFamily(self._name, self._about, labels=self._labels))

    def set(self, value: float, *labels: str) -> None:
        self._values[labels] = value

    def clear(self) -> None:
        self._values.clear()


class Histogram(Instrument):
    """A distribution over buckets."""

    def __init__(self, registry: Registry, name: str, about: str, *labels: str, buckets: Sequence[float]) -> None:
        super().__init__(registry, name, about, *labels)
        self._buckets = buckets
        self._rows: dict[str | tuple[str, ...], list[float]] = {}
        """By labels: the count of each bucket, the count beyond all of them, and the sum."""

    def add(self, label: str | tuple[str, ...], value: float) -> None:
        row = self._rows.get(label)
        if row is None:
            row = self._rows[label] = [0] * (len(self._buckets) + 2)
        row[bisect_left(self._buckets, value)] += 1
        row[-1] += value

    def row(self, label: str) -> Sequence[float]:
        """Return the count of each bucket so far, and the count beyond all of them."""
        return self._rows.get(label, [0] * (len(self._buckets) + 2))[:-1]

    def take(self) -> list[Row]:
        rows, self._rows = self._rows, {}
        return [((label,) if isinstance(label, str) else label, row) for label, row in rows.items()]

    def merge(self, rows: Sequence[Row]) -> None:
        for labels, row in rows:
            label = labels if len(labels) > 1 else labels[0]
            known = self._rows.get(label)
            self._rows[label] = list(row) if known is None else list(map(add, known, row))

    def family(self) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        names = [*(f"{float(limit)}" for limit in self._buckets), "+Inf"]
        for label, row in self._rows.items():
            upto = list(accumulate(row[:-1]))
            buckets = list(zip(names, upto, strict=True))
            family.add_metric((label,) if isinstance(label, str) else label, buckets, row[-1])
        return family


log = logging.getLogger("oncehook.arrival")
attempt_log = logging.getLogger("oncehook.attempt")
access_log = logging.getLogger("oncehook.web")
replay_log = logging.getLogger("oncehook.replay")


class LiveStream(Protocol):
    """Stream of what happens, for open pages and `oncehook tail`."""

    @property
    def is_there(self) -> bool:
        """Tell whether anybody follows now; if nobody does, moments are not formatted."""

    def publish(self, kind: str, fields: Mapping[str, object]) -> None:
        """Publish one moment. Called on the loop; must be quick and must not raise."""


class _NoFollowers:
    is_there = False

    def publish(self, kind: str, fields: Mapping[str, object]) -> None: ...


_FAST: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ATTEMPTS: Final = (*_FAST, 10.0, 30.0, 60.0)
TOOK: Final = tuple(f"took:{limit:g}" for limit in (*_ATTEMPTS, float("inf")))
"""Counters of attempts by how long they took, at most so many seconds each and more than the one before."""
ACKED: Final = tuple(f"ack:{limit:g}" for limit in (*_FAST, float("inf")))
"""Counters of arrivals by how long their answer took."""
MOST_ATTEMPTS: Final = 10
"""Attempts of one run that are counted by number; later ones count as the last of these."""
SPREAD_PACE: Final = 5.0
"""Seconds between two writes of how attempts went."""
_SLOW: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0, 21600.0, 86400.0)
_SIZES: Final = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)


class Observed(msgspec.Struct):
    """Counts of one process since it last reported them."""

    instruments: list[list[Row]]
    rejections: list[Rejection]
    counts: list[tuple[int, str, int]]
    """Counts of `rejected` and `volume`, by source id."""


class Observer:
    """Observer of one inbox: counts and logs what its receiver, worker, sweep and store report."""

    def __init__(self, engine: str) -> None:
        self.verbose = False
        """Log every arrival at info, for a terminal; otherwise only what somebody may have to act on."""
        self.worker: str | None = None
        self.registry = all_ = Registry()
        self._arrivals = Counter(all_, "oncehook_arrivals", "Arrivals by outcome", "source", "outcome")
        self._acks = Histogram(
            all_, "oncehook_ack_duration_seconds", "From the whole request to its answer", "source", buckets=_FAST
        )
        self._sizes = Histogram(all_, "oncehook_arrival_size_bytes", "Size of bodies", "source", buckets=_SIZES)
        self._unkeyed = Counter(all_, "oncehook_unkeyed", "Events accepted although no key was found", "source")
        self._unparsed = Counter(all_, "oncehook_unparsed", "Verified events whose body could not be read", "source")
        self._unmapped = Counter(all_, "oncehook_unmapped", "Events whose account nobody has defined", "source")
        self._same_bodies = Counter(
            all_, "oncehook_same_bodies", "Events whose signed body had come before under another key", "source"
        )
        self._attempts = Counter(all_, "oncehook_attempts", "Attempts by outcome", "destination", "outcome")
        self._durations = Histogram(
            all_, "oncehook_attempt_duration_seconds", "Time of an attempt", "destination", buckets=_ATTEMPTS
        )
        self._latencies = Histogram(
            all_, "oncehook_delivery_latency_seconds", "From received to done", "source", "destination", buckets=_SLOW
        )
        self._deaths = Counter(all_, "oncehook_dead_letters", "Deliveries that were given up", "destination")
        self._lost = Counter(all_, "oncehook_leases_lost", "Leases that ended before their attempt did", "destination")
        self._expired = Counter(all_, "oncehook_leases_expired", "Leases that ran out and were taken over here")
        self._expired.add(by=0)
        self._breaker_opened = Counter(
            all_, "oncehook_breaker_opened", "Times that a breaker has opened here", "destination"
        )
        self._breaker_open = Gauge(all_, "oncehook_breaker_open", "1 while nothing is sent to it", "destination")
        self._replayed = Counter(all_, "oncehook_replayed", "Replayed deliveries by outcome", "destination", "outcome")
        self._deliveries = Gauge(all_, "oncehook_deliveries", "Deliveries by status", "destination", "status")
        self._dead = Gauge(all_, "oncehook_dead_letters", "Dead letters", "destination")
        self._oldest = Gauge(all_, "oncehook_oldest_due_seconds", "For how long the oldest has been due", "destination")
        self._workers = Gauge(all_, "oncehook_workers", "Workers that are there")
        self._crossed = Gauge(all_, "oncehook_watermark_crossed", "1 while a watermark is crossed", "watermark")
        self._store_errors = Counter(all_, "oncehook_store_errors", "Operations the store could not do", "operation")
        self._store_errors.add("record", by=0)
        self._operations = Histogram(
            all_, "oncehook_store_operation_duration_seconds", "Time of a store operation", "operation", buckets=_FAST
        )
        self._receivers_ended = Counter(all_, "oncehook_receivers_ended", "Receivers that ended and were started again")
        self._receivers_ended.add(by=0)
        self._store_size = Gauge(all_, "oncehook_store_size_bytes", "Bytes the store takes on disk")
        Gauge(all_, "oncehook_build_info", "Version and store", "version", "store").set(1, __version__, engine)
        self._rejections: deque[Rejection] = deque(maxlen=KEPT_REJECTIONS)
        self._samples = Samples()
        self._counts: collections.Counter[tuple[int, int, str]] = collections.Counter()
        """By source id, destination id (0: none) and name."""
        self.destination_ids: dict[str, int] = {}
        """Ids in the store of the destinations whose attempts are counted for charts."""
        self.source_ids: dict[str, int] = {}
        """Ids of the sources whose answers are."""
        self._tried: collections.Counter[tuple[int, str]] = collections.Counter()
        """Attempts by number and outcome, except first ones that succeeded."""
        self._spread: dict[tuple[str, str], Sequence[float]] = {}
        """Histograms of attempts and of acks as they were last handed to the store, by kind and name."""
        self._spread_due = 0.0
        self._summed = (self._arrivals.values(), self._attempts.values())
        """Counts that `sum_up` has logged already."""
        self.volumes: dict[str, tuple[int, re.Pattern[str]]] = {}
        """Sources with volume types: their id in the store, and a pattern of these types."""
        self.audience: LiveStream = _NoFollowers()
        self.refusals = Refusals()
        self.receivers: dict[int, RunningReceiver] = {}
        """Processes that receive for this one, by number."""

    def sum_up(self) -> None:
        """Log one record for each sum since the last call: what outsiders caused, and what succeeded.

        With `verbose`, successes were logged one by one already.
        """
        ration.sum_up()
        arrivals, attempts = self._arrivals.values(), self._attempts.values()
        came, made = arrivals - self._summed[0], attempts - self._summed[1]
        self._summed = arrivals, attempts
        if self.verbose:
            return
        accepted, duplicates = _of(came, "accepted"), _of(came, "duplicate")
        if accepted or duplicates:
            fields = {
                "accepted": accepted.total(), "duplicates": duplicates.total(), "sources": dict(accepted + duplicates),
            }  # fmt: skip
            log.info("arrival.summary", extra={"fields": fields})
        if done := _of(made, "done"):
            attempt_log.info("attempt.summary", extra={"fields": {"done": done.total(), "destinations": dict(done)}})

    # -- the way in ----------------------------------------------------------------------------

    def arrival(
        self, source: str, outcomes: Sequence[str], seconds: float, size: int, items: Sequence[Item], ids: list[str]
    ) -> None:
        for outcome in outcomes:
            self._arrivals.add(source, outcome)
        self._acks.add(source, seconds)
        self._sizes.add(source, size)
        for item in items:
            if item.marks:
                self._count_marks(source, item.marks)
        if source in self.volumes:
            self._count_volume(source, outcomes, items)
        level = logging.WARNING if "conflict" in outcomes else logging.INFO if self.verbose else logging.DEBUG
        if self.audience.is_there or log.isEnabledFor(level):
            self._log_arrival(level, source, outcomes, seconds, items, ids)

    def operation(self, name: str, seconds: float) -> None:
        self._operations.add(name, seconds)

    def _log_arrival(
        self, level: int, source: str, outcomes: Sequence[str], seconds: float, items: Sequence[Item], ids: list[str]
    ) -> None:
        # A batch is logged under its most notable outcome: a conflict first, then new events.
        outcome = next((word for word in ("conflict", "accepted") if word in outcomes), outcomes[0])
        fields: dict[str, object] = {"source": source, "outcome": outcome, "duration_s": round(seconds, 6)}
        if len(outcomes) == 1 and items:
            item = items[0]
            fields |= {"type": item.type, "event_id": ids[0], "key": item.key, "subject": item.subject}
            if item.account is not None:
                fields["account"] = item.account
            if item.marks:
                fields["marks"] = [mark.name for mark in item.marks]
            if item.same_as is not None:
                fields["same_body_as"] = str(item.same_as)
        elif items:
            fields |= {"outcomes": dict(collections.Counter(map(str, outcomes))), "event_ids": ids}
        self.audience.publish("arrival", fields)
        if level == logging.WARNING:
            ration.log(log, level, f"arrival.{outcome}", fields, kind=source)
        else:
            log.log(level, f"arrival.{outcome}", extra={"fields": fields})

    def note_rejection(self, arrival: Arrival, source: Source | None, error: Rejected) -> None:
        # An unknown source's name is untrusted: never used as a label, and never logged unescaped.
        name = "unknown" if source is None else source.name
        self._arrivals.add(name, "rejected")
        self._counts[0 if source is None else source.id, 0, "rejected"] += 1
        reason = error.reason if isinstance(error, SignatureInvalid) else error.code
        named, size = plain(arrival.source[:63]) if source is None else name, len(arrival.body)
        rejection = Rejection(named, clock.now_utc(), error.code, reason, arrival.peer, size)
        self._rejections.append(rejection)
        self._samples.add(rejection, source, arrival)
        fields: dict[str, object] = {
            "source": named, "reason": reason, "peer": arrival.peer, "code": error.code, "size": size,
        }  # fmt: skip
        if self.audience.is_there:
            self.audience.publish("arrival", {"outcome": "rejected", **fields})
        ration.log(log, logging.INFO, "arrival.rejected", fields, kind=f"{name}: {reason}")

    def unavailable(self, source: str, error: StoreUnavailable) -> None:
        self._arrivals.add(source, "error")
        self._store_errors.add("record")
        fields = {"source": source, "code": error.code, "error": str(error), "hint": error.hint}
        ration.log(log, logging.WARNING, "arrival.error", fields, kind=f"{source}: {error.code}")

    def access_refused(self, way: str, network: str, reason: str) -> None:
        """Log and count a wrong token, password or sign-in, or any attempt from a network that must wait."""
        self.refusals.add(way, network)
        fields = {"by": way, "reason": reason, "peer": network}
        ration.log(access_log, logging.WARNING, "access.refused", fields, kind=f"{way}: {reason}")

    def _count_marks(self, source: str, marks: Mark) -> None:
        if Mark.unkeyed in marks:
            self._unkeyed.add(source)
        if Mark.unparsed in marks:
            self._unparsed.add(source)
        if Mark.unmapped in marks:
            self._unmapped.add(source)
        if Mark.same_body in marks:
            self._same_bodies.add(source)

    def _count_volume(self, source: str, outcomes: Sequence[str], items: Sequence[Item]) -> None:
        number, types = self.volumes[source]
        # Outcomes of ignored parts of a batch follow those of its items.
        for item, outcome in zip(items, outcomes, strict=False):
            if outcome == Outcome.accepted and types.match(item.type):
                self._counts[number, 0, "volume"] += 1

    def take_counts(
        self, *, everything: bool = False
    ) -> tuple[list[Rejection], collections.Counter[tuple[int, int, str]]]:
        """Return the rejections (a bounded number) and the counts since the last call, for the store: `rejected` and
        `volume` of sources, and every few seconds, or with `everything`, how attempts of destinations went."""
        self._samples.take()
        gathered, self._rejections = list(self._rejections), deque(maxlen=KEPT_REJECTIONS)
        counts, self._counts = self._counts, collections.Counter()
        if everything or clock.steady() >= self._spread_due:
            self._spread_due = clock.steady() + SPREAD_PACE
            self._count_spread(counts)
        return gathered, counts

    def _count_spread(self, counts: collections.Counter[tuple[int, int, str]]) -> None:
        """Count how long attempts and answers took, from what the histograms of the metrics have gained: neither pays
        for it."""
        for (number, what), n in self._tried.items():
            counts[0, number, what] += n
        self._tried.clear()
        for name, number in self.destination_ids.items():
            for bucket, n in self._gain("took", name, self._durations.row(name), TOOK):
                counts[0, number, bucket] += n
        for name, number in self.source_ids.items():
            for bucket, n in self._gain("ack", name, self._acks.row(name), ACKED):
                counts[number, 0, bucket] += n

    def _gain(self, kind: str, name: str, row: Sequence[float], buckets: Sequence[str]) -> Iterable[tuple[str, int]]:
        """Return what a histogram has gained since it was last handed to the store."""
        before = self._spread.get((kind, name)) or [0] * len(row)
        self._spread[kind, name] = row
        return [(bucket, int(n - known)) for bucket, n, known in zip(buckets, row, before, strict=True) if n > known]

    def take_observed(self) -> Observed:
        """Return what was counted since the last call, for the process that shows and writes it."""
        self._spread_due = float("inf")  # the histograms travel as they are, and are counted where they are shown
        rejections, counts = self.take_counts()
        return Observed(
            self.registry.take(), rejections, [(source, what, n) for (source, _, what), n in counts.items()]
        )

    def add_observed(self, observed: Observed) -> int:
        """Count what a receiver has counted; returns how many arrivals it has answered."""
        self.registry.merge(observed.instruments)
        answered = observed.instruments[self.registry.instruments.index(self._acks)]
        self._rejections.extend(observed.rejections)
        for source, what, n in observed.counts:
            self._counts[source, 0, what] += n
        return sum(int(sum(row[:-1])) for _, row in answered)

    def receiver_ended(self, number: int) -> None:
        """Count a receiver that ended although nobody stopped it."""
        self.receivers.pop(number, None)
        self._receivers_ended.add()

    # -- the way out ---------------------------------------------------------------------------

    def note_attempt(self, destination: Destination, settled: Settlement) -> None:
        name, outcome = destination.name, str(settled.what)
        lease = settled.lease
        self._attempts.add(name, outcome)
        self._durations.add(name, settled.duration)
        if settled.what is Settle.done:
            self._latencies.add((lease.event.source, name), max(clock.now() - lease.event.received_at.timestamp(), 0.0))
        elif settled.what is Settle.dead:
            self._deaths.add(name)
        if lease.delivery.replay_id is not None and settled.what is not Settle.retry:
            self._replayed.add(name, outcome)
        if lease.delivery.attempt > 1 or settled.what is not Settle.done:
            # The first attempt that succeeds is the rest of all attempts: the usual case counts nothing here.
            word = "done" if settled.what is Settle.done else "failed"
            self._tried[destination.id, f"{word}:{min(lease.delivery.attempt, MOST_ATTEMPTS)}"] += 1
        level = _LEVELS[settled.what]
        if level == logging.DEBUG and self.verbose:
            level = logging.INFO
        if self.audience.is_there or attempt_log.isEnabledFor(level):
            fields = _attempt_fields(name, settled, self.worker)
            self.audience.publish("attempt", fields)
            attempt_log.log(level, _MOMENTS[settled.what], extra={"fields": fields})

    def lease_lost(self, destination: Destination, lease: Lease) -> None:
        """Note that a settlement was refused, because another worker has leased the delivery by now."""
        self._lost.add(destination.name)
        fields: dict[str, object] = {
            "source": lease.event.source,
            "destination": destination.name,
            "event_id": str(lease.event.id),
            "delivery_id": str(lease.delivery.id),
            "fence": lease.fence,
            "worker": self.worker,
        }
        attempt_log.warning("lease.lost", extra={"fields": fields})

    def lease_expired(self, destination: Destination, expired: Expired) -> None:
        """Note an expired lease that was taken over here: its worker died, hung, or is cut off."""
        self._expired.add()
        fields: dict[str, object] = {
            "destination": destination.name,
            "attempt": expired.attempt,
            "run": expired.run,
            "event_id": str(expired.event_id),
            "delivery_id": str(expired.delivery_id),
            "fence": expired.fence,
            "former_worker": expired.worker,
            "worker": self.worker,
        }
        attempt_log.warning("lease.expired", extra={"fields": fields})

    def breaker(self, destination: Destination, change: BreakerChange) -> None:
        """Log, count and publish a breaker that has opened or closed: from then on nothing, or all, is sent."""
        fields: dict[str, object] = {"destination": destination.name, "failures": change.failures}
        if change.open_until is None:
            attempt_log.info("breaker.closed", extra={"fields": fields | {"worker": self.worker}})
        else:
            self._breaker_opened.add(destination.name)
            fields["until"] = change.open_until.isoformat(timespec="milliseconds")
            attempt_log.warning("breaker.opened", extra={"fields": fields | {"worker": self.worker}})
        self.audience.publish("breaker", {"state": "closed" if change.open_until is None else "open", **fields})

    def replay_over(self, replay: StoredReplay) -> None:
        """Log a replay that is done, or was aborted."""
        fields: dict[str, object] = {
            "replay_id": str(replay.id),
            "state": replay_state(replay.state, replay.planned, replay.dead, replay.skipped),
            "planned": replay.planned,
            "done": replay.done,
            "dead": replay.dead,
            "skipped": replay.skipped,
            "actor": replay.actor,
        }
        replay_log.info("replay.done", extra={"fields": fields})

    def disabled(self, destination: str, reason: str) -> None:
        """Log a destination that was paused because it has failed for too long."""
        fields = {"destination": destination, "reason": reason, "hint": f"oncehook resume {destination}"}
        self.audience.publish("disabled", fields)
        log.warning("destination.disabled", extra={"fields": fields})

    def watermark(self, mark: Watermark) -> None:
        """Log a watermark that was just crossed, or is back below its limit."""
        seen = {"watermark": mark.name, "level": mark.level, "limit": mark.limit, "crossed": mark.crossed}
        self.audience.publish("watermark", seen)
        moment = "watermark.crossed" if mark.crossed else "watermark.back"
        # Not `level`: that is the log record's own.
        fields = {"watermark": mark.name, "measured": mark.level, "limit": mark.limit}
        log.log(logging.WARNING if mark.crossed else logging.INFO, moment, extra={"fields": fields})

    def watermarks(self, marks: Sequence[Watermark]) -> None:
        for mark in marks:
            self._crossed.set(int(mark.crossed), mark.name)

    def levels(self, levels: Mapping[str, model.Level], workers: int) -> None:
        """Export the levels of all destinations, and the number of workers."""
        self._workers.set(workers)
        self._oldest.clear()
        for name, level in levels.items():
            for status in ("pending", "leased", "done", "dead", "discarded"):
                self._deliveries.set(getattr(level, status), name, status)
            self._dead.set(level.dead, name)
            self._oldest.set(level.oldest_due or 0.0, name)
            self._breaker_open.set(int(level.open_until is not None), name)

    def exposition(self, store_size: int | None) -> bytes:
        """Return the metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        if store_size is not None:
            self._store_size.set(store_size)
        return generate_latest(self.registry)


class Refusals:
    """Wrong tokens and passwords, collected for the audit log: the first is written within a second, the others as sums
    every ten minutes, so that guessing cannot fill the table."""

    PACE: Final = 600.0
    MOST: Final = 20
    """Networks that one entry names."""

    def __init__(self) -> None:
        self._ways: collections.Counter[str] = collections.Counter()
        self._networks: collections.Counter[str] = collections.Counter()
        self._due_at = 0.0

    def add(self, way: str, network: str) -> None:
        self._ways[way] += 1
        self._networks[network if network in self._networks or len(self._networks) < self.MOST else "others"] += 1

    def take(self, *, is_last: bool = False) -> dict[str, dict[str, int]]:
        """Return the content of the next audit entry; empty while none is due."""
        now = clock.steady()
        if not self._ways or (now < self._due_at and not is_last):
            return {}
        detail = {"by": dict(self._ways), "from": dict(self._networks.most_common())}
        self._ways.clear()
        self._networks.clear()
        self._due_at = now + self.PACE
        return detail

    def put_back(self, detail: Mapping[str, Mapping[str, int]]) -> None:
        """Keep what could not be written, for the next entry."""
        self._ways.update(detail["by"])
        self._networks.update(detail["from"])
        self._due_at = 0.0


_LEVELS: Final = {Settle.done: logging.DEBUG, Settle.retry: logging.INFO, Settle.dead: logging.ERROR}
_MOMENTS: Final = {Settle.done: "attempt.done", Settle.retry: "attempt.retry", Settle.dead: "delivery.dead"}


def _of(counted: Mapping[tuple[str, ...], int], outcome: str) -> collections.Counter[str]:
    """Return the counts of this outcome, by source or destination."""
    return collections.Counter({name: n for (name, what), n in counted.items() if what == outcome})


def _attempt_fields(destination: str, settled: Settlement, worker: str | None) -> dict[str, object]:
    lease = settled.lease
    fields: dict[str, object] = {
        "source": lease.event.source,
        "type": lease.event.type,
        "destination": destination,
        "outcome": str(settled.what),
        "attempt": lease.delivery.attempt,
        "run": lease.delivery.run,
        "duration_s": round(settled.duration, 6),
        "category": settled.category and str(settled.category),
        "status": settled.evidence.status,
        "error": settled.evidence.error,
        "note": settled.note,
        "key": lease.event.key,
        "subject": lease.event.subject,
        "account": lease.event.account,
        "worker": worker,
        "event_id": str(lease.event.id),
        "delivery_id": str(lease.delivery.id),
        "replay_id": lease.delivery.replay_id and str(lease.delivery.replay_id),
    }
    if settled.what is Settle.retry:
        fields["again_in_s"] = round(settled.wait, 3)
    else:
        fields |= {"attempts": lease.delivery.attempt, "final_status": str(settled.what)}
    return {name: value for name, value in fields.items() if value is not None}
