"""An inbox under test for plain functions: the same words as `TestInbox`, without `await`.

The pytest plugin hands it to tests that are no coroutines. Its loop runs only while one of its methods does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from oncehook.model import StoredDelivery
from oncehook.testing.arrivals import Answer
from oncehook.testing.trial import TestInbox

T = TypeVar("T")


class BlockingTrial:
    """See above.

    >>> def test_paid(inbox: BlockingTrial) -> None:
    ...     inbox.use(shop.inbox)
    ...     inbox.send("stripe", "invoice.paid")
    ...     inbox.drain()
    ...     assert shop.paid
    """

    def __init__(self, store: str) -> None:
        self.trial = TestInbox(store)
        """The inbox itself, for what has no word here; see `call`."""
        self.clock = self.trial.clock
        self.use = self.trial.use
        self.source = self.trial.source
        self.add = self.trial.add
        self.on = self.trial.on
        self.destination = self.trial.destination
        self.route = self.trial.route
        self.recorded = self.trial.recorded
        self._runner = asyncio.Runner()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for anything else: `inbox.call(inbox.trial.desk.stats(…))`."""
        return self._runner.run(coroutine)

    def start(self) -> None:
        """Begin to receive; the first use does so, too."""
        self.call(self.trial.start())

    def stop(self) -> None:
        """End."""
        with self._runner:
            self._runner.run(self.trial.stop())

    def send(self, source: str, type: str | None = None, *, body: object = None, forge: bool = False) -> Answer:
        """Send a signed sample, as the provider of that source would."""
        return self.call(self.trial.send(source, type, body=body, forge=forge))

    def send_again(self) -> Answer:
        """Send once more what was sent last, byte for byte: a duplicate."""
        return self.call(self.trial.send_again())

    def emit(
        self, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        """See Inbox."""
        return self.call(self.trial.emit(source, type, payload, key=key, subject=subject))

    def drain(self, *, retries: bool = False) -> None:
        """Do everything that is due now; with `retries`, also what is due later."""
        self.call(self.trial.drain(retries=retries))

    def deliveries(self, destination: str | None = None, *, status: str | None = None) -> list[StoredDelivery]:
        """How deliveries stand, oldest first."""
        return self.call(self.trial.deliveries(destination, status=status))
