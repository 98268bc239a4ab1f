"""Keys that were seen to stand a moment ago: a copy of one of them travels to PostgreSQL without its body.

Nothing is decided here. When such a key does not stand any more, or stands for another body, the statement is refused
by a constraint (an event has a body, and so has a conflict), nothing is written, and `commit` sends it all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from oncehook.model import Intake, Item, Outcome, Verdict

MOST: Final = 30_000
"""Keys remembered: about 6 MB. Retries come within minutes; who comes later brings its body along, that is all."""


class Familiar:
    """What one process has seen, latest last."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()

    def among(self, intakes: Sequence[Intake]) -> frozenset[bytes]:
        """The items that are most likely copies, by the event id they offer."""
        if not self._bodies:
            return frozenset()
        return frozenset(item.event_id for intake in intakes for item in intake.items if self._knows(item))

    def _knows(self, item: Item) -> bool:
        return item.key_hash is not None and self._bodies.get(item.key_hash) == item.body_hash

    def note(self, intakes: Sequence[Intake], verdicts: Sequence[Sequence[Verdict]]) -> None:
        """These stand now."""
        bodies = self._bodies
        for intake, decided in zip(intakes, verdicts, strict=True):
            for item, verdict in zip(intake.items, decided, strict=True):
                if item.key_hash is not None and verdict.outcome is not Outcome.conflict:
                    bodies[item.key_hash] = item.body_hash
        while len(bodies) > self._most:
            bodies.popitem(last=False)

    def forget(self) -> None:
        """Something was not as it seemed."""
        self._bodies.clear()
