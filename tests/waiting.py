"""Waiting for what must come. Nothing here is in a hurry: the test's own time limit is the only one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)
