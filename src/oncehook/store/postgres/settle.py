"""SettlementBatcher on PostgreSQL: the end of leases, in one call, and what it says about their destinations.

Settlements go in as columns; the fences that were still ours come out, and leases on what comes next where that was
asked for (`Answer`). The engine calls it in autocommit, `transactions` as the last statement of a handler's own
transaction (R51), hence `statement_timestamp()` in the function. What a handler emitted is kept by the statement before
it, in the same transaction (R54).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from oncehook.model import Intake, Lease, Options, Settle, Settlement, Streak, is_crash, is_over, streaks, was_tried
from oncehook.store.cipher import Cipher
from oncehook.store.postgres import intake
from oncehook.store.postgres.intake import Rows, verdicts
from oncehook.store.postgres.wire import Bigs, Blobs, Bools, Column, Floats, Ids, Integers, Smalls, Texts, storable

SETTLE: Final = f"SELECT * FROM settle({', '.join(f'${n}' for n in range(1, 32))})"
JUDGE: Final = "SELECT judge($1, $2, $3, $4, $5, $6)"

PAUSE: Final = """
WITH s AS (
  INSERT INTO destination_state AS s (destination_id, paused_at, paused_by, paused_why) VALUES ($1, now(), $2, $3)
  ON CONFLICT (destination_id) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by,
    paused_why = excluded.paused_why WHERE s.paused_at IS NULL
  RETURNING destination_id
)
INSERT INTO audit (at, actor, act, target, detail)
SELECT now(), $2, 'pause', coalesce((SELECT d.name FROM destinations d WHERE d.id = s.destination_id), $1::text), $4
FROM s
"""


@dataclass(slots=True)
class Answer:
    """Result of SETTLE."""

    fences: set[int] = field(default_factory=set)
    """The leases that were still ours."""
    made_due: Collection[int] = ()
    """Destinations for which something has become due."""
    next: Sequence[tuple[Any, ...]] = ()
    """Leases on what comes next, as rows."""

    def is_whole(self, settlements: Sequence[Settlement]) -> bool:
        """Tell whether all of these were ours; else nothing was changed."""
        return self.fences.issuperset(one.lease.fence for one in settlements)


@dataclass(slots=True)
class _Ending:
    """A settlement as SETTLE takes it."""

    settlement: Settlement
    lease: Lease
    is_over: bool
    attempted_id: bytes
    """The delivery that the attempt is recorded for: the head, if that is held, whatever it carried."""
    run: int | None
    """None: the head's, where that is not the lease's."""
    attempt: int
    duration: float | None
    """None: no attempt is written down."""

    @classmethod
    def of(cls, settlement: Settlement) -> _Ending:
        lease, over, tried = settlement.lease, is_over(settlement), was_tried(settlement)
        is_held = settlement.what is Settle.dead and not over
        return cls(
            settlement,
            lease,
            over,
            attempted_id=lease.front_id if is_held else lease.delivery.id,
            run=None if is_held and lease.front_id != lease.delivery.id else lease.delivery.run,
            attempt=lease.delivery.attempt if tried else lease.delivery.attempt - 1,
            duration=settlement.duration if tried else None,
        )


def settle_parameters(
    settlements: Sequence[Settlement], cipher: Cipher, slot: int, worker: str | None = None
) -> list[Column | int | str | bool | None]:
    """Return what SETTLE takes, `$1` to `$31`. A lease that is named twice ends once."""
    rows = sorted({one.lease.fence: one for one in reversed(settlements)}.values(), key=lambda one: one.lease.queue_key)
    ends = [_Ending.of(one) for one in rows]
    leases = [one.lease for one in rows]
    evidence = [one.evidence for one in rows]
    over = [one.lease for one in ends if one.is_over]
    followed = [one.settlement for one in ends if one.is_over and one.lease.more]
    ranked = [one.lease for one in rows if _raises_rank(one)]
    counts = _counts(rows)
    return [
        Ids([lease.queue_key for lease in leases]),
        Ids([lease.front_id for lease in leases]),
        Bigs([lease.fence for lease in leases]),
        Texts([one.what for one in rows]),
        Texts([one.note for one in rows]),
        Floats([one.wait for one in rows]),
        Ids([one.attempted_id for one in ends]),
        Smalls([one.run for one in ends]),
        Smalls([one.attempt for one in ends]),
        Floats([one.duration for one in ends]),
        Texts([one.category for one in rows]),
        Smalls([_small(one.status) for one in evidence]),
        Texts([None if one.error is None else storable(one.error) for one in evidence]),
        Blobs(
            [
                cipher.kept_answer(one.evidence.answer, end.attempted_id, one.lease.fence)
                for one, end in zip(rows, ends, strict=True)
            ]
        ),
        Texts(["crash" if is_crash(one) else None for one in rows]),
        Ids([lease.queue_key for lease in over if lease.queue_key == lease.front_id]),
        Ids([lease.queue_key for lease in over if lease.queue_key != lease.front_id and not lease.more]),
        Ids([one.lease.queue_key for one in followed]),
        Floats([one.take_next for one in followed]),
        Integers([destination_id for destination_id, _ in counts]),
        Texts([what for _, what in counts]),
        Bigs(list(counts.values())),
        slot,
        worker,
        Integers([lease.delivery.destination_id for lease in ranked]),
        Integers([lease.event.source_id for lease in ranked]),
        Texts([_rank_scope(lease) for lease in ranked]),
        Integers([lease.event.rank for lease in ranked]),
        None if len(over) == len(ends) else Bools([not one.is_over for one in ends]),
        any(lease.delivery.id != lease.front_id for lease in leases),
        any(lease.delivery.replay_id is not None for lease in leases),
    ]


def _counts(settlements: Sequence[Settlement]) -> Counter[tuple[int, str]]:
    """Return what this changes about each destination; what a lease covered besides is counted by SETTLE itself."""
    counts: Counter[tuple[int, str]] = Counter()
    for one in settlements:
        if one.what is Settle.release:
            continue
        counts[one.lease.delivery.destination_id, one.what.value] += 1
        if one.what is not Settle.retry:
            counts[one.lease.delivery.destination_id, "succeeded" if one.what is Settle.done else "died"] += 1
            counts[one.lease.delivery.destination_id, "pending"] -= 1
    return counts


def emit_parameters(settlements: Sequence[Settlement], cipher: Cipher, slot: int) -> list[Column | int | str | None]:
    """Return what INTAKE takes for what these settlements emit."""
    return Rows(_intakes(settlements), cipher).parameters(slot)


def read_emitted(settlements: Sequence[Settlement], rows: Sequence[tuple[Any, ...]]) -> None:
    """Read what INTAKE said of it; it holds once it is committed."""
    emissions = [emission for one in settlements for emission in one.emits]
    for emission, (verdict,) in zip(emissions, verdicts(_intakes(settlements), intake.read_answer(rows)), strict=True):
        emission.verdict = verdict


def _intakes(settlements: Sequence[Settlement]) -> list[Intake]:
    return [emission.intake for one in settlements for emission in one.emits]


def _small(status: int | None) -> int | None:
    """A status code, unless it is none."""
    return status if status is None or 0 <= status < 1 << 15 else None


def _raises_rank(settlement: Settlement) -> bool:
    lease = settlement.lease
    if lease.event.rank is None or settlement.what is not Settle.done or settlement.note == "stale":
        return False
    return bool(lease.delivery.options & Options.latest_wins) and _rank_scope(lease) is not None


def _rank_scope(lease: Lease) -> str | None:
    return lease.event.subject if lease.event.rank_scope is None else lease.event.rank_scope


Ask = Callable[[str, Callable[[int], Sequence[object]]], Awaitable[list[Any]]]
"""Runs a statement with what makes its parameters for a slot of the counters, and gives its rows."""


async def settle_ours(settlements: Sequence[Settlement], worker: str | None, cipher: Cipher, ask: Ask) -> Answer:
    """Settle those that are ours. SETTLE changes nothing while one of them is not: then it is called without that."""
    while settlements:
        rows = await ask(SETTLE, partial(settle_parameters, settlements, cipher, worker=worker))
        answer = read_answer(settlements, rows)
        if answer.is_whole(settlements):
            return answer
        settlements = [one for one in settlements if one.lease.fence in answer.fences]
    return Answer()


def read_answer(settlements: Sequence[Settlement], rows: Sequence[tuple[Any, ...]]) -> Answer:
    """Read what SETTLE said of these."""
    (ours, made_due, *_), *taken = rows
    by_line = {one.lease.queue_key: one for one in settlements}
    due = {by_line[line].lease.delivery.destination_id for line in made_due or ()}
    put_back = [one for one in settlements if one.what in (Settle.retry, Settle.release)]
    due |= {one.lease.delivery.destination_id for one in put_back if not one.wait}
    leased = [(*row[2:13], by_line[row[2]].take_next, *row[14:]) for row in taken]
    return Answer(set(ours), due, leased)


def streaks_to_tell(settlements: Sequence[Settlement], answer: Answer, failing: Collection[int]) -> dict[int, Streak]:
    """Return what those that were ours say about their destinations, where that would change anything.

    `failing`: destinations with failures on their account, as far as this process knows.
    """
    ours = [one for one in settlements if one.lease.fence in answer.fences and one.breaker is not None]
    known = {*failing, *(one.lease.delivery.destination_id for one in ours if one.lease.failing)}
    return {
        destination_id: streak
        for destination_id, streak in sorted(streaks(ours).items())
        if streak.failures or destination_id in known
    }


def judge_parameters(found: Mapping[int, Streak]) -> list[Column]:
    """Return what JUDGE takes, `$1` to `$6`."""
    streaks = list(found.values())
    return [
        Integers(list(found)),
        Bools([one.reset for one in streaks]),
        Integers([one.failures for one in streaks]),
        Ids([one.last_failed for one in streaks]),
        Integers([one.breaker.failures for one in streaks]),
        Floats([one.breaker.open for one in streaks]),
    ]
