"""T4 to T11 on PostgreSQL: see test_torture.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import driver
from tests.torture.test_torture import SECONDS, hold


@pytest.mark.timeout(SECONDS * 4 + 400)
@pytest.mark.parametrize("component", driver.COMPONENTS)
async def test_every_promise_holds_on_postgres(component: str, tmp_path: Path) -> None:
    await hold(component, "postgres", tmp_path)
