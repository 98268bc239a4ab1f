"""The layers of one arrival: the benchmark takes the receiver's own steps apart, and must keep up with them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bench import stack, traffic
from oncehook import Inbox
from oncehook.sources import Source


class Unhurried(Inbox):
    """A group that is held up on its way is measured all the same."""

    def add(self, source: Source) -> Source:
        source.settings.budget = 90.0
        return super().add(source)


async def test_every_layer_of_a_group_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "ROUNDS", 2)
    monkeypatch.setattr(stack, "WARM", 1)
    monkeypatch.setattr(stack, "Inbox", Unhurried)
    made = traffic.prepare(tmp_path, records=3 * stack.GROUP, duplicates=0, tick=lambda share: None)
    requests = stack.Requests(made)
    try:
        layers = asdict(await stack.receive_groups(f"sqlite:{tmp_path / 'inbox.db'}", requests, []))
    finally:
        requests.close()
    measured = {name: layers[name] for name in ("verify", "read", "plan", "hand_over", "answer")}
    assert all(0 < time < 100_000 for time in measured.values()), measured
