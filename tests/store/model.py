"""What the store ought to hold, in plain Python: `test_rules` asks both after every step, and compares."""

from __future__ import annotations

from dataclasses import dataclass, field

from oncehook.model import DEATHS, Lease, Options, Priority, Settle

Line = tuple[int, str | bytes]
"""A destination, and a subject or a delivery of its own."""

LEASE = 90.0
WAIT = 50.0
KEEP = 300.0
PAUSE = 60.0
OPTIONS = {1: Options.none, 2: Options.hold}


@dataclass
class Work:
    """A delivery as it ought to be."""

    id: bytes
    event: bytes
    line: Line
    destination: int
    number: int
    """Of its event, in order of commit."""
    status: str = "pending"
    run: int = 1
    attempts: int = 0
    replayed_at: float | None = None
    rows: int = 0
    """Attempts that are written down."""


@dataclass
class Head:
    """The work of one line: who is first, who waits, and who holds it."""

    queue: list[bytes]
    due_at: float
    fence: int = 0
    leased: bool = False
    held: bool = False
    priority: Priority = Priority.live
    alone: bool = False
    deaths: int = 0


@dataclass
class Model:
    """What the store ought to hold."""

    now: float = 0.0
    works: dict[bytes, Work] = field(default_factory=dict)
    heads: dict[Line, Head] = field(default_factory=dict)
    events: dict[bytes, tuple[float, int]] = field(default_factory=dict)
    """When each was received, and the number of its key."""

    def arrive(self, work: Work) -> None:
        """Join the line: at its head when nobody is there."""
        self.works[work.id] = work
        self.join(work)

    def join(self, work: Work) -> None:
        head = self.heads.get(work.line)
        if head is None:
            self.heads[work.line] = Head([work.id], self.now)
        else:
            head.queue.append(work.id)

    def lease(self, destination: int, priority: Priority) -> set[bytes]:
        """Who must be given out now. What is found leased has lost its holder: it is set aside, or dies alone."""
        given: set[bytes] = set()
        for line, head in self.heads.items():
            if line[0] != destination or head.priority is not priority or head.held or head.due_at > self.now:
                continue
            work = self.works[head.queue[0]]
            if head.leased:
                work.rows += 1
                work.attempts -= 1
                head.deaths += head.alone
                head.leased = head.alone = False
                if priority is not Priority.quarantined:
                    head.priority, head.due_at = Priority.quarantined, self.now
                    continue
            given.add(work.id)
        return given

    def lost_leases(self) -> int:
        """Those that have run out and that nobody has taken over."""
        return sum(head.leased and head.due_at <= self.now for head in self.heads.values())

    def take(self, lease: Lease) -> None:
        work = self.works[lease.delivery.id]
        head = self.heads[work.line]
        head.leased, head.fence, head.due_at = True, lease.fence, self.now + LEASE
        head.alone = head.priority is Priority.quarantined
        work.attempts += 1

    def holds(self, lease: Lease) -> bool:
        work = self.works.get(lease.delivery.id)
        head = self.heads.get(work.line) if work else None
        return head is not None and head.leased and head.fence == lease.fence

    def is_overtaken(self, lease: Lease) -> bool:
        """Whether its delivery is leased to somebody else."""
        work = self.works.get(lease.delivery.id)
        head = self.heads.get(work.line) if work else None
        return head is not None and head.leased and head.queue[0] == lease.delivery.id and head.fence != lease.fence

    def settle(self, lease: Lease, what: Settle) -> None:
        work = self.works[lease.delivery.id]
        head = self.heads[work.line]
        head.leased = head.alone = False
        if what is Settle.release:
            work.attempts -= 1
            head.due_at = self.now + WAIT
            return
        if lease.deaths < DEATHS:
            work.rows += 1
        else:
            work.attempts -= 1  # it was given out only to be ended
        head.priority = Priority.live
        if what is Settle.retry:
            head.due_at = self.now + WAIT
            return
        work.status = what.value
        head.held = what is Settle.dead and OPTIONS[work.destination] is Options.hold
        if not head.held:
            self.promote(work.line)

    def promote(self, line: Line) -> None:
        head = self.heads.pop(line)
        if head.queue[1:]:
            self.heads[line] = Head(head.queue[1:], self.now)

    def replay(self, work: Work) -> None:
        head = self.heads.get(work.line)
        work.status, work.run, work.attempts, work.replayed_at = "pending", work.run + 1, 0, self.now
        if head is not None and head.held and head.queue[0] == work.id:
            self.heads[work.line] = Head(head.queue, self.now)
        else:
            self.join(work)

    def discard(self, work: Work) -> None:
        work.status = "discarded"
        head = self.heads.get(work.line)
        if head is not None and head.held and head.queue[0] == work.id:
            self.promote(work.line)

    def prune(self) -> int:
        """Forget old events whose work is all finished; how many."""
        gone = 0
        for event, (received, _) in list(self.events.items()):
            works = [work for work in self.works.values() if work.event == event]
            if received + KEEP < self.now and all(work.status in ("done", "discarded") for work in works):
                del self.events[event]
                for work in works:
                    del self.works[work.id]
                gone += 1
        return gone

    def crash_all(self) -> None:
        for head in self.heads.values():
            if head.leased:
                head.due_at = self.now

    def shown(self, work: Work) -> tuple[str, int, int, bytes | None]:
        """How a list must show it."""
        head = self.heads.get(work.line)
        status, ahead = work.status, None
        if status == "pending" and head is not None:
            ahead = None if head.queue[0] == work.id else head.queue[0]
            status = "leased" if head.leased and ahead is None else "pending"
        return status, work.run, work.attempts, ahead
