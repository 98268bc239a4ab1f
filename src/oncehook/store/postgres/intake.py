"""Intake on PostgreSQL: parameters and result of the one call that stores a group of arrivals.

A group comes in (`IntakeRows`), one call stores all of it in one commit (`INTAKE`), and one verdict per item comes out
(`verdicts`). Locks are taken in the order keys, subjects, each sorted, and never held across a round trip, so
concurrent groups wait for each other and cannot deadlock. `writer` calls it; settlements use it for emitted events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from oncehook.model import (
    MARKS,
    ArrivalId,
    EventDetails,
    EventId,
    Intake,
    Item,
    Outcome,
    Planned,
    Rejection,
    Verdict,
    new_id,
)
from oncehook.store.base import KEPT_REJECTIONS, UNSEEN, NameIds, Reserved
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import (
    Bigs,
    Blobs,
    Bools,
    Column,
    Floats,
    Ids,
    Integers,
    Smalls,
    StorePart,
    Texts,
    Times,
    blocking_session,
    clean_text,
    fetch_all,
    fetch_one,
)

DETAIL_COLUMNS: Final = """
  e.id, e.source_id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope,
  coalesce(e.head, b.head, ''), e.body, e.account, e.batch_id, coalesce(k.copies, 1), e.same_as
"""


def read_details(row: Sequence[Any]) -> EventDetails:
    """Build an event from DETAIL_COLUMNS."""
    *columns, batch_id, copies, same_as = row
    columns[0], columns[8] = EventId(columns[0]), MARKS[columns[8]]
    batch_id, same_as = batch_id and ArrivalId(batch_id), same_as and EventId(same_as)
    return EventDetails(*columns, batch_id=batch_id, copies=copies, same_as=same_as)


INTAKE: Final = (
    "SELECT * FROM intake($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,"
    " $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38, $39, $40, $41, $42,"
    " $43, $44)"
)
"""Takes candidates, split requests, copies inside this group, deliveries with their leases, and counters."""

INTAKE_PROVEN: Final = (
    "SELECT * FROM intake_proven($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19,"
    " $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38, $39, $40, $41,"
    " $42, $43, $44, $45, $46, $47, $48)"
)
"""Takes the proofs of the group's items, too."""

PROOFS: Final = """
SELECT p.hash, p.key_hash FROM unnest($1::uuid[]) AS i(hash) CROSS JOIN LATERAL (
  SELECT p.hash, p.key_hash FROM proofs p WHERE p.hash = i.hash AND p.expires_at > now() LIMIT 1
) p
"""
"""Returns the first keys of proofs."""


NO_SPLITS: Final = (Ids([]), Integers([]), Blobs([]), Blobs([]))
NO_COPIES: Final = (Ids([]), Integers([]), Ids([]), Ids([]), Ids([]), Blobs([]), Blobs([]), Integers([]))


class IntakeRows:
    """The columns of one group, in order of arrival. Each key has one candidate; later items with it are its copies."""

    def __init__(
        self, batch: Sequence[Intake], cipher: Cipher, bare: Collection[bytes] = (), reserved: Reserved | None = None
    ) -> None:
        """`bare`: event ids of likely copies, which are sent without body and deliveries."""
        self._cipher = cipher
        self._bare = bare
        self._reserved = reserved
        self.items: list[tuple[Item, Intake]] = []
        self.counts: list[int] = []
        self.copies: list[tuple[int, Item, Intake, int]] = []
        """Position of the candidate, the copy, its intake, and the copy's number."""
        self.splits: list[Intake] = []
        self.proven = [item for intake in batch for item in intake.items if item.proof is not None]
        places: dict[bytes, int] = {}
        for intake in batch:
            if intake.raw is not None:
                self.splits.append(intake)
            for item in intake.items:
                place = len(self.items)
                if item.key_hash is not None and (first := places.setdefault(item.key_hash, place)) != place:
                    self.copies.append((first, item, intake, self.counts[first]))
                    self.counts[first] += 1
                else:
                    self.items.append((item, intake))
                    self.counts.append(1)

    def parameters(self, slot: int) -> list[Column | int | str | None]:
        """Return the parameters of INTAKE, `$1` to `$44`; with proofs those of INTAKE_PROVEN, to `$48`."""
        planned = self._list_planned()
        arrived = [*self._candidates(), *self._splits(), *self._copies()]
        fairs = Bigs([one.fair for _, one in planned])
        accounts = Texts([item.account for item, _ in self.items])
        return [*arrived, *self._deliveries(planned), *self._counts(planned), slot, fairs, accounts, *self._proofs()]

    def _proofs(self) -> list[Column]:
        rows = self.proven
        if not rows:
            return []
        return [
            Ids([item.event_id for item in rows]),
            Ids([item.proof for item in rows]),
            Ids([item.key_hash for item in rows]),
            Floats([item.keep for item in rows]),
        ]

    def _candidates(self) -> list[Column]:
        rows = self.items
        items = [item for item, _ in rows]
        ids = Ids([item.event_id for item in items])
        return [
            ids,
            Integers([intake.source_id for _, intake in rows]),
            Texts([item.type for item in items]),
            Texts([item.key for item in items]),
            Texts([item.subject for item in items]),
            Times([item.event_at for item in items]),
            Smalls([item.marks for item in items]),
            Integers([item.rank for item in items]),
            Texts([item.rank_scope for item in items]),
            Ids([item.body_hash for item in items]),
            Ids([item.key_hash for item in items]),
            ids,
            Ids([intake.arrival_id if intake.raw is not None else None for _, intake in rows]),
            Blobs([self._cipher.encrypt_head(intake, item) for item, intake in rows]),
            Blobs([None if item.event_id in self._bare else self._cipher.encrypt_body(item) for item in items]),
            Integers(self.counts),
            Floats([item.keep for item in items]),
        ]

    def _splits(self) -> Sequence[Column]:
        splits = self.splits
        if not splits:
            return NO_SPLITS
        kept = [self._cipher.encrypt_batch(intake) for intake in splits]
        return [
            Ids([intake.arrival_id for intake in splits]),
            Integers([intake.source_id for intake in splits]),
            Blobs([head for head, _ in kept]),
            Blobs([body for _, body in kept]),
        ]

    def _copies(self) -> Sequence[Column]:
        rows = self.copies
        if not rows:
            return NO_COPIES
        return [
            Ids([item.key_hash for _, item, _, _ in rows]),
            Integers([intake.source_id for _, _, intake, _ in rows]),
            Ids([item.body_hash for _, item, _, _ in rows]),
            Ids([item.event_id for _, item, _, _ in rows]),
            Ids([intake.arrival_id if intake.raw is not None else None for _, _, intake, _ in rows]),
            Blobs([self._cipher.encrypt_head(intake, item) for _, item, intake, _ in rows]),
            Blobs([self._copied_body(item, self.items[place][0]) for place, item, _, _ in rows]),
            Integers([self.counts[place] - 1 - nth for place, _, _, nth in rows]),
        ]

    def _copied_body(self, item: Item, candidate: Item) -> bytes | None:
        """Return the body of a copy; None where the candidate's can be used, which an encrypted or large one cannot."""
        own = self._cipher.encrypts or item.reference is not None
        if item.body_hash == candidate.body_hash and (not own or item.event_id in self._bare):
            return None
        return self._cipher.encrypt_body(item)

    def _list_planned(self) -> list[tuple[bytes, Planned]]:
        items = [item for item, _ in self.items if item.event_id not in self._bare]
        return [(item.event_id, planned) for item in items for planned in item.deliveries]

    def _counts(self, rows: Sequence[tuple[bytes, Planned]]) -> list[Column]:
        """Return the changes of counters, assuming that all candidates are new."""
        counts: Counter[tuple[int, int, str]] = Counter()
        for (_, intake), copies in zip(self.items, self.counts, strict=True):
            counts[intake.source_id, 0, "received"] += copies
            counts[intake.source_id, 0, "accepted"] += 1
        for _, planned in rows:
            counts[0, planned.destination_id, "pending"] += 1
        return [
            Integers([source_id for source_id, _, _ in counts]),
            Integers([destination_id for _, destination_id, _ in counts]),
            Texts([what for _, _, what in counts]),
            Bigs(list(counts.values())),
        ]

    def _deliveries(self, rows: Sequence[tuple[bytes, Planned]]) -> list[Column | str | None]:
        seconds = {} if self._reserved is None else self._reserved.seconds
        subject_keys = [planned.subject_key for _, planned in rows]
        firsts: dict[bytes, int] = {}
        for place, key in enumerate(subject_keys):
            if key is not None:
                firsts.setdefault(key, place)
        return [
            Ids([planned.id for _, planned in rows]),
            Ids([event_id for event_id, _ in rows]),
            Integers([planned.destination_id for _, planned in rows]),
            Ids(subject_keys),
            Smalls([planned.options for _, planned in rows]),
            Bools([key is None or firsts[key] == place for place, key in enumerate(subject_keys)]),
            Floats([seconds.get(planned.id) for _, planned in rows] if seconds else []),
            None if self._reserved is None else self._reserved.who,
        ]


@dataclass(slots=True)
class IntakeResult:
    known: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    """Keys that existed before, with event and body hash."""
    leased: dict[bytes, int] = field(default_factory=dict)
    """Fences of the deliveries that were leased at once."""
    at: datetime | None = None
    same_as: dict[bytes, bytes] = field(default_factory=dict)
    """Events whose proof came before, and the first event with it."""
    made_due: Sequence[int] = ()


def read_intake_result(rows: Sequence[tuple[Any, ...]]) -> IntakeResult:
    answer = IntakeResult()
    for key_hash, id_, body_hash, fence, at, made_due in rows:
        if key_hash is not None:
            answer.known[key_hash] = (id_, body_hash)
        elif fence is not None:
            answer.leased[id_] = fence
            answer.at = at
        elif id_ is not None:
            answer.same_as[id_] = body_hash
        else:
            answer.made_due = made_due
    return answer


def verdicts(batch: Sequence[Intake], answer: IntakeResult) -> list[list[Verdict]]:
    """Return the verdict on every item, given the keys that existed before."""
    first = dict(answer.known)

    def judge(item: Item) -> Verdict:
        if item.key_hash is None:
            return Verdict(Outcome.accepted, item.event_id)
        known = first.get(item.key_hash)
        if known is None:
            first[item.key_hash] = (item.event_id, item.body_hash)
            return Verdict(Outcome.accepted, item.event_id)
        event_id, body_hash = known
        is_copy = body_hash in (item.body_hash, UNSEEN)
        return Verdict(Outcome.duplicate if is_copy else Outcome.conflict, EventId(event_id))

    return [[judge(item) for item in intake.items] for intake in batch]


# -- names and imported keys -------------------------------------------------------------------

# Known names are filtered out first, because each row that conflicts uses up an id. ON CONFLICT is for the race: it
# waits for the rival's commit, which the SELECT then sees.
_REGISTER: Final = """
WITH s AS (
  INSERT INTO sources (name) SELECT DISTINCT name FROM unnest($1::text[]) AS i(name)
  WHERE NOT EXISTS (SELECT FROM sources s WHERE s.name = i.name) ORDER BY name ON CONFLICT DO NOTHING
)
INSERT INTO destinations (name) SELECT DISTINCT name FROM unnest($2::text[]) AS i(name)
WHERE NOT EXISTS (SELECT FROM destinations d WHERE d.name = i.name) ORDER BY name ON CONFLICT DO NOTHING
"""
_SOURCES: Final = "SELECT name, id FROM sources"
_DESTINATIONS: Final = "SELECT name, id FROM destinations"

# Sorted, as intake locks them. A lapsed key is taken over; any other is not changed.
_IMPORT: Final = """
WITH k AS (
  INSERT INTO keys AS k (hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)
  SELECT hash, event_id, '00000000-0000-0000-0000-000000000000', $3, 0, now(), now(), now() + make_interval(secs => $4)
  FROM unnest($1::uuid[], $2::uuid[]) AS i(hash, event_id) ORDER BY hash
  ON CONFLICT (hash) DO UPDATE SET event_id = excluded.event_id, body_hash = excluded.body_hash,
    source_id = excluded.source_id, copies = 0, first_seen = now(), last_seen = now(), expires_at = excluded.expires_at
  WHERE k.expires_at <= now()
  RETURNING 1
), a AS (
  INSERT INTO audit (at, actor, act, target, detail)
  SELECT now(), $5, 'import', (SELECT name FROM sources WHERE id = $3),
    json_build_object('keys', cardinality($1::uuid[]), 'new', (SELECT count(*) FROM k))::text
)
SELECT count(*) FROM k
"""

# Of two processes that write the same slot, the row with the later number stays.
_REJECT: Final = """
WITH c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), 0, source_id, destination_id, what, n
  FROM unnest($1::integer[], $14::integer[], $2::text[], $3::bigint[]) AS c(source_id, destination_id, what, n)
  ORDER BY source_id, destination_id, what
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
INSERT INTO rejections AS r (slot, n, source, at, code, reason, peer, size, id, head, body)
SELECT n % $4, n, source, at, code, reason, peer, size, id, head, body FROM (
  SELECT nextval('rejection_seq') AS n, i.*
  FROM unnest($5::text[], $6::timestamptz[], $7::text[], $8::text[], $9::text[], $10::bigint[], $11::uuid[],
      $12::bytea[], $13::bytea[])
    AS i(source, at, code, reason, peer, size, id, head, body)
) AS i
ON CONFLICT (slot) DO UPDATE SET n = excluded.n, source = excluded.source, at = excluded.at,
  code = excluded.code, reason = excluded.reason, peer = excluded.peer, size = excluded.size,
  id = excluded.id, head = excluded.head, body = excluded.body
WHERE r.n < excluded.n
"""


class PostgresIntake(StorePart):
    """Names, imported keys and rejections; `PostgresStore.record` takes arrivals in."""

    async def register_names(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        async with self.connection() as connection:
            await connection.execute(_REGISTER, [Texts(list(sources)), Texts(list(destinations))])
            ids = NameIds(dict(await fetch_all(connection, _SOURCES)), dict(await fetch_all(connection, _DESTINATIONS)))
        self.source_names.update({source_id: name for name, source_id in ids.sources.items()})
        return ids

    def register_names_blocking(self, sources: Iterable[str], destinations: Iterable[str]) -> NameIds:
        with blocking_session(self.database) as connection:
            connection.execute(_REGISTER, [Texts(list(sources)), Texts(list(destinations))])
            known_sources: Any = connection.execute(_SOURCES).fetchall()
            known_destinations: Any = connection.execute(_DESTINATIONS).fetchall()
        return NameIds(dict(known_sources), dict(known_destinations))

    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        meant = list(dict.fromkeys(hashes))  # a statement may update a row once only
        asked = [Ids(meant), Ids([new_id() for _ in meant]), source_id, keep, clean_text(actor)]
        async with self.connection() as connection:
            (added,) = await fetch_one(connection, _IMPORT, asked)
        return int(added)

    async def record_rejections(
        self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, int, str], int]
    ) -> None:
        latest = rejections[-KEPT_REJECTIONS:]  # a statement may update a slot once only
        kept = [self.cipher.encrypt_rejection(r) for r in latest]
        await self.execute(
            _REJECT,
            [
                Integers([source_id for source_id, _, _ in counts]),
                Texts([what for _, _, what in counts]),
                Bigs(list(counts.values())),
                KEPT_REJECTIONS,
                Texts([clean_text(r.source) for r in latest]),
                Times([r.at for r in latest]),
                Texts([clean_text(r.code) for r in latest]),
                Texts([clean_text(r.reason) for r in latest]),
                Texts([clean_text(r.peer) for r in latest]),
                Bigs([r.size for r in latest]),
                Ids([r.id for r in latest]),
                Blobs([head for head, _ in kept]),
                Blobs([body for _, body in kept]),
                Integers([destination_id for _, destination_id, _ in counts]),
            ],
        )
