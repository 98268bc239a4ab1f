"""Heartbeats: a thread that prolongs a worker's leases while it works on them.

A thread, because neither a blocked handler nor a blocked event loop may delay it (R32). When a lease is lost, or the
store has not answered for so long that it may be, the worker is told in time to stop (R33); a second thread minds that,
because the first may be waiting for the answer. A lease with an end is not prolonged beyond it, so that a handler that
hangs is taken over by somebody else (R34). One without an end belongs to a thread, which cannot be stopped: it is asked
for until the store says that it is somebody else's (DESIGN.md 8.16).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from oncehook import clock
from oncehook.deliveries import Lease
from oncehook.errors import StoreError
from oncehook.store.base import Store

log = logging.getLogger("oncehook.worker")

BEATS: Final = 6
"""Heartbeats in one lease."""


class _Held:
    __slots__ = ("ends_at", "lease", "renewed_at")

    def __init__(self, lease: Lease, now: float, ends_at: float | None) -> None:
        self.lease = lease
        self.renewed_at = now
        """When its last renewal was asked for: from then on it is surely ours for `lease.seconds`."""
        self.ends_at = ends_at


class Heartbeat:
    """Keeps leases alive until they are let go. `lost` is called on threads of the heartbeat's own."""

    def __init__(self, store: Store, lost: Callable[[Lease], None], shortest: float) -> None:
        self._store = store
        self._lost = lost
        self._interval = shortest / BEATS
        self._held: dict[int, _Held] = {}
        self._unanswered: list[_Held] = []
        """What the last try asked for, until it is answered."""
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat_until_stopped, name="oncehook-heartbeat", daemon=True),
            threading.Thread(target=self._mind_until_stopped, name="oncehook-heartbeat-mind", daemon=True),
        ]

    def start(self) -> None:
        """Begin to beat."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop; leases that are still held run out by themselves."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def hold(self, lease: Lease, asked_at: float, ends_at: float | None) -> None:
        """Keep this lease from now on. `asked_at`: when it was asked for, by the steady clock.

        `ends_at`: not longer than this; None: until it is let go, because whoever works on it cannot be stopped.
        """
        self._held[lease.fence] = _Held(lease, asked_at, ends_at)

    def let_go(self, lease: Lease) -> bool:
        """It is settled, or no longer wanted. Says whether it was held until now."""
        return self._held.pop(lease.fence, None) is not None

    def __len__(self) -> int:
        return len(self._held)

    def _beat_until_stopped(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.beat()
            except Exception:  # whatever it is, the next beat must come
                log.exception("heartbeat.failed")

    def _mind_until_stopped(self) -> None:
        """A try may hang for longer than its leases last: their holder must not wait for it (R33)."""
        while not self._stop.wait(self._interval / 2):
            try:
                self._give_up(self._unanswered)
            except Exception:  # whatever it is, the next look must come
                log.exception("heartbeat.failed")

    def beat(self) -> bool:
        """Prolong what is due to be prolonged; also out of turn, and always on a thread. Tells whether it is known now
        which leases are ours."""
        now = clock.steady()
        # A copy: the loop adds and removes meanwhile.
        held = [h for h in list(self._held.values()) if now - h.renewed_at >= h.lease.seconds / BEATS]
        held = [h for h in held if not h.lease.is_settling]
        wanted = [h for h in held if h.ends_at is None or now < h.ends_at]
        is_known = not wanted or self._renew(wanted, now)
        self._give_up(held)
        return is_known

    def _give_up(self, held: list[_Held]) -> None:
        for h in held:
            # A thread that has no lease goes on all the same, and somebody would begin beside it: when the store is
            # back before anybody has looked, its lease is still there to be had.
            if h.ends_at is not None and self._is_over(h):
                self._lose(h.lease)

    def _renew(self, wanted: list[_Held], now: float) -> bool:
        self._unanswered = wanted
        try:
            ours = self._store.renew([h.lease for h in wanted])
        except StoreError as error:
            log.warning("heartbeat.unanswered", extra={"fields": {"leases": len(wanted), "error": str(error)}})
            return False
        for h in wanted:
            if h.lease.fence in ours:
                h.renewed_at = now
            else:
                self._lose(h.lease)
        self._unanswered = []
        return True

    def _lose(self, lease: Lease) -> None:
        if not lease.is_settling and self.let_go(lease):  # whoever settles it learns of it there
            self._lost(lease)

    def _is_over(self, h: _Held) -> bool:
        """One beat before it may belong to somebody else."""
        return clock.steady() >= h.renewed_at + h.lease.seconds * (1 - 1 / BEATS)
